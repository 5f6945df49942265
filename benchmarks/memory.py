"""Does peak memory follow the estimate, and is a memory limit kept?

    python benchmarks/memory.py [--large]

An MLP, a convolutional network and an embedding model, by each solver, without a limit and with one that is a
part of the estimate without one.

On a GPU the peak is the allocator's; on a CPU it is the resident size of a process of its own
for each case (Linux), less that before the call.

glibc keeps freed pieces of up to 32 MiB for itself, and counts them as resident. The peak is measured
with that off, so that it is what was asked for; "resident by default" is the size with it on.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import downweight as dw
from common import mlp, report

SOLVERS = {"dual": dw.Dual(), "cg": dw.CG(max_steps=3), "cholesky": dw.Cholesky()}
# (network, solver) and the part of the estimate that is the limit of the second run; None where there is no other way.
CASES = {
    ("mlp", "dual"): 0.97,
    ("mlp", "cg"): 0.5,
    ("wide mlp", "cg"): 0.1,
    ("small mlp", "cholesky"): None,
    ("conv", "dual"): 0.5,
    ("conv", "cg"): 0.5,
    ("small conv", "cholesky"): None,
    ("embedding", "dual"): 0.25,
    ("embedding", "cg"): 0.5,
    ("small embedding", "cholesky"): None,
}


class MeanOfWords(nn.Module):
    """Classes from the mean of word vectors: most parameters are an embedding, formed explicitly a row."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.last = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.words(x).mean(1)))


def conv(channels: int, side: int) -> nn.Module:
    """Two convolutions and a linear layer on images of 3 x side x side."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (side // 4) ** 2, 10),
    )


def problem(name: str, large: bool) -> tuple[nn.Module, int, int, dict[str, Any]]:
    """A model, its rows and queries, and the shape of an input (or the number of words)."""
    torch.manual_seed(0)
    if name == "mlp":
        widths, rows, asked = ((784, 1024, 1024, 10), 3000, 400) if large else ((784, 512, 512, 10), 500, 50)
        return mlp(*widths), rows, asked, {"shape": (784,)}
    if name == "wide mlp":
        widths, asked = ((784, 4096, 4096, 10), 100) if large else ((200, 1000, 1000, 10), 20)
        return mlp(*widths), 300, asked, {"shape": (widths[0],)}
    if name == "small mlp":
        return mlp(*((40, 150, 10) if large else (40, 30, 10))), 300, 20, {"shape": (40,)}
    if name == "conv":
        return conv(64 if large else 16, 32), 1000 if large else 100, 20, {"shape": (3, 32, 32)}
    if name == "small conv":
        return conv(16 if large else 4, 8), 100, 20, {"shape": (3, 8, 8)}
    if name == "embedding":
        return MeanOfWords(50_000 if large else 5000, 32), 200 if large else 40, 20, {"words": 5000}
    return MeanOfWords(200, 32 if large else 8), 300, 20, {"words": 200}


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


def measure(name: str, solver: str, limit: int | None, large: bool) -> dict[str, object]:
    warnings.simplefilter("ignore", dw.DownweightWarning)  # three steps of CG are not meant to converge
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, rows, asked, inputs = problem(name, large)

    def data(count: int) -> tuple[Tensor, Tensor]:
        if "words" in inputs:
            x = torch.randint(0, inputs["words"], (count, 12))
        else:
            x = torch.randn(count, *inputs["shape"])
        return x.to(device), torch.randint(0, 10, (count,), device=device)

    train, queries = data(rows), data(asked)
    task = dw.Task(model.to(device).eval(), "cross_entropy", train)
    warm_up, few = dw.Task(mlp(4, 5, 3).to(device), "cross_entropy", _few(4, device)), _few(4, device)
    dw.influence(warm_up, few, damping=1.0, solver=solver)
    # The network's own kernels, without a matrix of its size.
    small = dw.Task(task.model, "cross_entropy", (train[0][:8], train[1][:8]))
    dw.influence(small, (queries[0][:2], queries[1][:2]), damping=1.0, solver="cg" if solver == "cg" else "dual")
    gc.collect()
    before = reset_peak(device)
    try:
        scores = dw.influence(task, queries, damping=0.1, solver=SOLVERS[solver], memory_limit=limit, progress=False)
    except dw.MemoryLimit as refused:
        return {"limit": limit, "refused": str(refused)}
    peak = peak_bytes(device)
    answer: dict[str, object] = {"estimate": scores.stats["memory_estimate"], "peak": peak - before}
    return answer | ({"limit": limit} if limit else {})


def _few(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(8, size, device=device), torch.randint(0, 3, (8,), device=device)


def child(command: list[str], **variables: str) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--network")
    parser.add_argument("--solver")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out")
    settings = parser.parse_args()
    if settings.solver:
        print(json.dumps(measure(settings.network, settings.solver, settings.limit, settings.large)))
        return
    record: dict[str, object] = {}
    for (network, solver), part in CASES.items():
        command = [sys.executable, __file__, "--network", network, "--solver", solver]
        command += ["--large"] if settings.large else []
        limit = None
        for case in (f"{network}, {solver}", f"{network}, {solver}, limited")[: 2 if part else 1]:
            asked = [*command, *(["--limit", str(limit)] if limit else [])]
            answer = child(asked, MALLOC_MMAP_THRESHOLD_=str(2**17))
            if "peak" in answer and not torch.cuda.is_available() and network == "mlp":
                answer["resident by default"] = child(asked)["peak"]
            record |= {f"{case}: {name}": value for name, value in answer.items()}
            if "peak" in answer:
                record[f"{case}: peak / estimate"] = answer["peak"] / answer["estimate"]
            if "peak" in answer and limit:
                record[f"{case}: peak / limit"] = answer["peak"] / limit
            limit = int((part or 1) * answer["estimate"]) if "estimate" in answer else None
    report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
