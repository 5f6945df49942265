"""The memory that a computation takes: what was estimated, and never more than was allowed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "memory.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(
    ("network", "solver", "limit"),
    [
        ("wide mlp", "cg", 60 * 2**20),
        ("conv", "dual", None),
        ("conv", "dual", 60 * 2**20),
        ("embedding", "cg", 40 * 2**20),
        ("small embedding", "cholesky", None),
    ],
)
def test_the_peak_is_the_estimate_and_below_the_limit(network, solver, limit):
    """Per-row gradients, probes and checks that nobody counted took twice the limit outside MLPs."""
    command = [sys.executable, str(BENCHMARK), "--network", network, "--solver", solver]
    if limit is not None:
        command += ["--limit", str(limit)]
    # glibc would keep freed pieces for itself; one thread, so that others' arenas are not counted.
    quiet = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet})
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert 0.8 < answer["peak"] / answer["estimate"] < 1.2
    if limit is not None:
        assert answer["peak"] < 1.02 * limit  # code that is read in on the way is resident too
