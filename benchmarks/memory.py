"""Does peak memory follow the estimate, and is a memory limit kept?

    python benchmarks/memory.py [--large]

On a GPU the peak is the allocator's; on a CPU it is the resident size of a process of its own
for each case (Linux), less that before the call. Limits are parts of the estimate without one.

glibc keeps freed pieces of up to 32 MiB for itself, and counts them as resident. The peak is measured
with that off, so that it is what was asked for; "resident by default" is the size with it on.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import downweight as dw
from common import mlp, report

CASES = {
    "dual": ("dual", None),
    "cg": ("cg", None),
    "dual, limited": ("dual", 0.75),
    "cg, limited": ("cg", 0.5),
}


def reset_peak(device: torch.device) -> int:
    """Start a new peak; returns what is in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else status("VmHWM")


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"This system does not tell {name}.")


def measure(solver: str, limit: int | None, large: bool) -> dict[str, object]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widths, rows, asked = ((784, 1024, 1024, 10), 3000, 400) if large else ((784, 512, 512, 10), 700, 100)
    torch.manual_seed(0)
    data = torch.randn(rows, 784, device=device), torch.randint(0, 10, (rows,), device=device)
    queries = torch.randn(asked, 784, device=device), torch.randint(0, 10, (asked,), device=device)
    task = dw.Task(mlp(*widths).to(device).eval(), "cross_entropy", data)
    small = dw.Task(task.model, "cross_entropy", (data[0][:20], data[1][:20]))
    dw.influence(small, (queries[0][:2], queries[1][:2]), damping=1.0, solver=solver)
    chosen = dw.CG(rtol=1e-2) if solver == "cg" else dw.Dual()
    gc.collect()
    before = reset_peak(device)
    try:
        scores = dw.influence(task, queries, damping=0.1, solver=chosen, memory_limit=limit, progress=False)
    except dw.MemoryLimit as refused:
        return {"limit": limit, "refused": str(refused)}
    peak = peak_bytes(device)
    answer = {"estimate": scores.stats["memory_estimate"], "peak": peak - before}
    return answer | ({"limit": limit} if limit else {})


def child(command: list[str], **variables: str) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--solver")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out")
    settings = parser.parse_args()
    if settings.solver:
        print(json.dumps(measure(settings.solver, settings.limit, settings.large)))
        return
    record: dict[str, object] = {}
    estimates: dict[str, int] = {}
    for case, (solver, part) in CASES.items():
        command = [sys.executable, __file__, "--solver", solver, *(["--large"] if settings.large else [])]
        command += ["--limit", str(int(part * estimates[solver]))] if part else []
        answer = child(command, MALLOC_MMAP_THRESHOLD_=str(2**17))
        if "peak" in answer and not torch.cuda.is_available():
            answer["resident by default"] = child(command)["peak"]
        record |= {f"{case}: {name}": value for name, value in answer.items()}
        if "estimate" in answer:
            estimates.setdefault(solver, answer["estimate"])
            record[f"{case}: peak / estimate"] = answer["peak"] / answer["estimate"]
    report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
