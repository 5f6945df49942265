"""How long does `import downweight` take on top of `import torch`?

    python benchmarks/importing.py

Median of several new processes, the same ones for both parts.
"""

import argparse
import statistics
import subprocess
import sys

from common import report

CODE = """
import time
started = time.perf_counter()
import torch, numpy
between = time.perf_counter()
import downweight
print(between - started, time.perf_counter() - between)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    settings = parser.parse_args()
    runs = [subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True) for _ in range(7)]
    parts = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    of_torch, ours = map(statistics.median, parts)
    record: dict[str, object] = {"torch and numpy (s)": of_torch, "downweight on top (s)": ours}
    report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
