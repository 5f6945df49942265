"""Do CPU and GPU give the same scores, for every solver, curvature and dtype?

    python benchmarks/devices.py

Needs a GPU; the reference is the float64 answer of the CPU. A check rather than a benchmark: it
exits with an error where a difference is larger than rounding explains.
"""

import argparse
import copy

import torch
from torch import nn

import downweight as dw
from common import report


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Flatten(),
        nn.LayerNorm(64),
        nn.Linear(64, 3),
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    settings = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 2, 8, 8, generator=generator)
    targets = torch.randint(0, 3, (40,), generator=generator)
    reference: dict[str, torch.Tensor] = {}
    record: dict[str, object] = {}
    worst = 0.0
    for device in ("cpu", "cuda"):
        for dtype in (torch.float64, torch.float32):
            model = copy.deepcopy(network()).to(device, dtype)
            data = inputs.to(device, dtype), targets.to(device)
            task = dw.Task(model, "cross_entropy", data, l2=1e-3)
            queries = data[0][:5], data[1][:5]
            for curvature, damping in (("gauss_newton", 0.01), ("hessian", 0.3)):  # the second is indefinite
                names = ["cholesky", "minres"]
                names += ["dual", "cg", "auto"] if curvature == "gauss_newton" else []
                for solver in names:
                    scores = dw.influence(
                        task,
                        queries,
                        damping=damping,
                        curvature=curvature,
                        solver=solver,
                        indefinite="raise" if curvature == "gauss_newton" else "allow",
                    )
                    values = scores.values.double().cpu()
                    expected = reference.setdefault(curvature, values)
                    error = float((values - expected).norm() / expected.norm())
                    kind = str(dtype).removeprefix("torch.")
                    record[f"{device} {kind} {curvature} {solver}"] = error
                    # cond(A) is some 1e3 for both: float32 keeps about 1e-4, float64 far more than 1e-8.
                    worst = max(worst, error / (1e-8 if dtype == torch.float64 else 2e-3))
    report(__doc__.splitlines()[0], record, settings.out)
    if worst > 1:
        raise SystemExit("CPU and GPU differ by more than rounding.")


if __name__ == "__main__":
    main()
