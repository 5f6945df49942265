"""How well does influence predict what leave-one-out retraining of every row does?

    python benchmarks/leave_one_out.py

Logistic regression at its optimum (l2 = 0.01, λ = 0) on two embedded tables, ten random splits of each: the
change of the mean test loss, predicted, predicted over 1 − leverage, and actual. Mean (least to largest).
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from common import report
from downweight.datasets.uci import Table, breast_cancer, pima_diabetes, split
from downweight.influence import influence, self_influence
from downweight.shapes import Float
from downweight.task import Task

L2 = 0.01
SPLITS = 10


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """What influence predicts for every row of a table, and what retraining without it really does.

    All three are changes of the mean test loss, (N,). `corrected` is the prediction over 1 − h, h the
    row's leverage: exact for one Newton step, which sees that the row's own curvature leaves with it.
    """

    predicted: Float[Tensor, " N"]
    corrected: Float[Tensor, " N"]
    actual: Float[Tensor, " N"]
    leverage: Float[Tensor, " N"]
    tiny: float  # Pearson of predicted and actual at ε = 1e-3/N

    @property
    def summary(self) -> dict[str, float]:
        return {
            "Pearson at 1e-3/N": self.tiny,
            "Pearson at 1/N": pearson(self.predicted, self.actual),
            "Spearman at 1/N": pearson(ranks(self.predicted), ranks(self.actual)),
            "Pearson, corrected": pearson(self.corrected, self.actual),
            "error, plain": relative_error(self.predicted, self.actual),
            "error, corrected": relative_error(self.corrected, self.actual),
            "largest leverage": float(self.leverage.max()),
        }


def pearson(a: Tensor, b: Tensor) -> float:
    return float(np.corrcoef(a.numpy(), b.numpy())[0, 1])


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def relative_error(predicted: Tensor, actual: Tensor) -> float:
    return float((predicted - actual).norm() / actual.norm())


def leave_one_out(table: Table, seed: int = 0) -> LeaveOneOut:
    """Logistic regression at its optimum (l2 = 0.01): all rows predicted at once, then all retrained."""
    data = split(table, seed=seed)
    inputs, targets = with_ones(data.train[0]), data.train[1].double()
    asked, answers = with_ones(data.test[0]), data.test[1].double()
    count = len(inputs)
    start = retrained(inputs, targets, torch.zeros(1, inputs.shape[1], dtype=torch.float64), 0.0)
    model = nn.Linear(inputs.shape[1], 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(start)
    task = Task(model.eval(), "binary_cross_entropy", (inputs, targets), l2=L2)
    predicted = influence(task, (asked, answers), damping=0.0, solver="cholesky").values.mean(0)
    probability = (inputs @ start[0]).sigmoid()
    leverage = self_influence(task, damping=0.0, solver="cholesky") * probability * (1 - probability)
    leverage /= (probability - targets).square()

    def change(epsilon: float) -> Tensor:
        weights = retrained(inputs, targets, start.expand(count, -1), epsilon)
        before, after = (mean_loss(asked, answers, at) for at in (start, weights))
        return after - before

    return LeaveOneOut(
        predicted,
        predicted / (1 - leverage),
        change(1 / count),
        leverage,
        pearson(predicted, change(1e-3 / count)),
    )


def with_ones(inputs: Tensor) -> Tensor:
    """A column of ones for the intercept, which the penalty then covers too."""
    return torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], 1)


def mean_loss(inputs: Tensor, targets: Tensor, weights: Float[Tensor, "R p"]) -> Float[Tensor, " R"]:
    logits = weights @ inputs.T
    return nn.functional.binary_cross_entropy_with_logits(logits, targets.expand_as(logits), reduction="none").mean(1)


def retrained(
    inputs: Float[Tensor, "N p"], targets: Float[Tensor, " N"], weights: Float[Tensor, "R p"], epsilon: float
) -> Float[Tensor, "R p"]:
    """Minima of J − ε L(zᵢ), one a row i (or of J alone for ε = 0), all together by Newton's method."""
    count, size = inputs.shape
    share = torch.full((len(weights), count), 1 / count, dtype=torch.float64)
    if epsilon:
        share -= epsilon * torch.eye(count, dtype=torch.float64)
    penalty = L2 * torch.eye(size, dtype=torch.float64)
    outer = (inputs[:, :, None] * inputs[:, None, :]).flatten(1)
    for _ in range(30):
        probability = (weights @ inputs.T).sigmoid()
        gradient = (share * (probability - targets)) @ inputs + L2 * weights
        if gradient.norm(dim=1).max() < 1e-13:
            break
        curved = share * probability * (1 - probability)
        hessian = (curved @ outer).unflatten(1, (size, size)) + penalty
        weights = weights - torch.linalg.solve(hessian, gradient)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    settings = parser.parse_args()
    record: dict[str, object] = {}
    for table in (breast_cancer(), pima_diabetes()):
        results = [leave_one_out(table, seed) for seed in range(SPLITS)]
        record[f"{table.name}: rows"] = len(results[0].predicted)
        for name in results[0].summary:
            values = [result.summary[name] for result in results]
            digits = 7 if "1e-3/N" in name else 3
            low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
            record[f"{table.name}: {name}"] = f"{np.mean(values):.{digits}f} ({low} to {high})"
    report(__doc__.splitlines()[0], record, settings.out)


if __name__ == "__main__":
    main()
