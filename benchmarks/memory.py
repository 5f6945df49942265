"""Does peak memory follow the estimate, and is a memory limit kept?

    python benchmarks/memory.py [--large]

On a GPU the peak is the allocator's; on a CPU it is the resident size of a process of its own
for each case (Linux), less that before the call.
"""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

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


def measure(solver: str, limit: float | None, large: bool) -> dict[str, object]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widths, rows, asked = ((784, 1024, 1024, 10), 3000, 400) if large else ((784, 256, 256, 10), 600, 60)
    torch.manual_seed(0)
    data = torch.randn(rows, 784, device=device), torch.randint(0, 10, (rows,), device=device)
    queries = torch.randn(asked, 784, device=device), torch.randint(0, 10, (asked,), device=device)
    task = dw.Task(mlp(*widths).to(device).eval(), "cross_entropy", data)
    small = dw.Task(task.model, "cross_entropy", (data[0][:20], data[1][:20]))
    dw.influence(small, (queries[0][:2], queries[1][:2]), damping=1.0, solver=solver)
    chosen = dw.CG(rtol=1e-2) if solver == "cg" else dw.Dual()
    bytes_: int | None = None
    if limit is not None:
        whole = dw.influence(task, queries, damping=0.1, solver=chosen, progress=False)
        bytes_ = int(limit * whole.stats["memory_estimate"])
        del whole
    gc.collect()
    before = reset_peak(device)
    try:
        scores = dw.influence(task, queries, damping=0.1, solver=chosen, memory_limit=bytes_, progress=False)
    except dw.MemoryLimit as refused:
        return {"limit": bytes_, "refused": str(refused)}
    peak = peak_bytes(device)
    answer = {"estimate": scores.stats["memory_estimate"], "peak": peak - before}
    return answer | ({"limit": bytes_} if bytes_ else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--out")
    settings = parser.parse_args()
    if settings.case:
        print(json.dumps(measure(*CASES[settings.case], settings.large)))
        return
    record: dict[str, object] = {}
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, *(["--large"] if settings.large else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        record |= {f"{case}: {name}": value for name, value in answer.items()}
        if "estimate" in answer:
            record[f"{case}: peak / estimate"] = answer["peak"] / answer["estimate"]
    report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
