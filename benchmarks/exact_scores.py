"""How long do exact scores take, and how right are the approximations of other libraries?

    python benchmarks/exact_scores.py                the small setting (two CPU threads)
    python benchmarks/exact_scores.py --large        MLP 784-1024-1024-10, 6,000 rows, all 10,000 test rows

Every side scores the same rows of the same network in this process; correlations are over the
rows, averaged over the queries, with the exact float64 scores.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import downweight as dw
from common import correlations, mlp, mnist, report, seconds, trained
from peers import curvlinops_cg, curvlinops_ekfac, kronfluence_ekfac


def exact(model: nn.Module, train: Any, queries: Any, damping: float) -> dict[str, Any]:
    """Factor and all scores in one call, then residuals by products that share no code with it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    task = dw.Task(model, "cross_entropy", train)
    elapsed, scores = seconds(lambda: dw.influence(task, queries, damping=damping, solver="dual", progress=False))
    record: dict[str, Any] = {
        "scores": scores,
        "seconds": elapsed,
        "count": scores.values.numel(),
        "residual (dual formula, worst)": scores.worst_residual,
        "memory estimated": scores.stats["memory_estimate"],
    }
    if torch.cuda.is_available():
        record["memory peak"] = torch.cuda.max_memory_allocated()
    return record


def independent_residual(model: nn.Module, train: Any, damping: float, count: int) -> float:
    """Worst ‖A x − v‖/‖v‖ of parameter shifts, A x by autograd's jvp and vjp row block by row block."""
    task = dw.Task(model, "cross_entropy", train)
    groups = [[row] for row in range(count)]
    shifts = dw.parameter_shift(task, groups, damping=damping, epsilon=1.0, solver="dual", progress=False)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def outputs(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, params, (train[0],))

    worst = 0.0
    for row, shift in enumerate(shifts):
        pieces = shift.split([value.numel() for value in params.values()])
        tangent = {
            name: piece.reshape(value.shape) for (name, value), piece in zip(params.items(), pieces, strict=True)
        }
        logits, pushed = torch.func.jvp(outputs, (params,), (tangent,))
        p = logits.double().softmax(-1)
        curved = p * (pushed - (p * pushed).sum(-1, keepdim=True)) / len(logits)
        _, pull = torch.func.vjp(outputs, params)
        product = torch.cat([part.flatten() for part in pull(curved.to(logits.dtype))[0].values()])
        error = p[row].clone()  # p - 1 of a confident row would be rounding noise
        error[train[1][row]] = 0
        error[train[1][row]] = -error.sum()
        seed = torch.zeros_like(logits)
        seed[row] = error.to(seed.dtype)
        vector = torch.cat([part.flatten() for part in pull(seed)[0].values()])
        missing = product.double() + damping * shift.double() - vector.double()
        worst = max(worst, float(missing.norm() / vector.double().norm()))
    return worst


def compare(name: str, function: Callable[[], Tensor], reference: Tensor) -> dict[str, Any]:
    try:
        elapsed, scores = seconds(function)
    except Exception as error:  # a peer that cannot run is part of the answer
        return {f"{name}: failed": f"{type(error).__name__}: {error}"[:300]}
    return {f"{name}: seconds": elapsed} | {
        f"{name}: {kind}": value for kind, value in correlations(scores, reference).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--damping", type=float)
    settings = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(2)
    rows, asked, few = (6000, 10_000, 200) if settings.large else (1000, 100, 100)
    widths = (784, 1024, 1024, 10) if settings.large else (784, 256, 256, 10)
    damping = settings.damping or (1e-3 if settings.large else 1e-2)
    train, test = (tuple(part.to(device) for part in pair) for pair in mnist(rows, asked))
    single = trained(mlp(*widths).to(device), *train, epochs=20)
    double = copy.deepcopy(single).double()
    train64, test64 = ((pair[0].double(), pair[1]) for pair in (train, test))
    # Warm up the libraries (handles, kernels) on a small copy of the same computation.
    small = dw.Task(single, "cross_entropy", (train[0][:64], train[1][:64]))
    dw.influence(small, (test[0][:8], test[1][:8]), damping=damping, solver="dual")

    record: dict[str, Any] = {"rows": rows, "queries": asked, "damping": damping}
    mine64 = exact(double, train64, test64, damping)
    reference = mine64.pop("scores").values
    mine32 = exact(single, train, test, damping)
    record |= {f"float32 {name}": value for name, value in correlations(mine32.pop("scores").values, reference).items()}
    for kind, mine in (("float64", mine64), ("float32", mine32)):
        record |= {f"{kind} {name}": value for name, value in mine.items()}
    record["float64 residual (independent, worst of 32)"] = independent_residual(double, train64, damping, 32)
    record["float32 residual (independent, worst of 32)"] = independent_residual(single, train, damping, 32)
    fewer = tuple(part[:few] for part in test)
    fewer64 = (fewer[0].double(), fewer[1])
    task = dw.Task(single, "cross_entropy", train)
    elapsed, scores = seconds(lambda: dw.influence(task, fewer, damping=damping, solver="dual", progress=False))
    record[f"ours, {few} queries, float32: seconds"] = elapsed
    record |= {
        f"ours, {few} queries, float32: {name}": value
        for name, value in correlations(scores.values, reference[:few]).items()
    }
    peers: list[tuple[str, Callable[[], Tensor]]] = [
        ("kronfluence EK-FAC", lambda: kronfluence_ekfac(copy.deepcopy(single), train, fewer, damping)),
        ("curvlinops EK-FAC", lambda: curvlinops_ekfac(single, train, fewer, damping)),
        ("curvlinops block CG 1e-6", lambda: curvlinops_cg(single, train, fewer, damping, 1e-6)),
    ]
    if not settings.large:
        peers.append(
            ("curvlinops block CG 1e-6 float64", lambda: curvlinops_cg(double, train64, fewer64, damping, 1e-6))
        )
    for name, function in peers:
        record |= compare(f"{name}, {few} queries", function, reference[:few])
    report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
