"""The demo: influence against actual leave-one-out on two embedded tables, as one page with pictures."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import altair
import numpy as np
import pandas
import torch
import vl_convert
from jinja2 import Environment
from torch import Tensor, nn

from downweight.datasets.uci import Split, Table, breast_cancer, pima_diabetes, split
from downweight.influence import influence, self_influence
from downweight.progress import track
from downweight.scores import Scores
from downweight.shapes import Float
from downweight.task import Task
from downweight.version import __version__

L2 = 0.01
SPLITS = 10


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """What influence predicts for every row of a table, and what retraining without it really does.

    All three are changes of the mean test loss, (N,). `corrected` is the prediction over 1 − h, h the
    row's leverage: exact for one Newton step, which sees that the row's own curvature leaves with it.
    """

    table: Table
    data: Split
    scores: Scores
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
    scores = influence(task, (asked, answers), damping=0.0, solver="cholesky")
    predicted = scores.values.mean(0)
    probability = (inputs @ start[0]).sigmoid()
    leverage = self_influence(task, damping=0.0, solver="cholesky") * probability * (1 - probability)
    leverage /= (probability - targets).square()

    def change(epsilon: float) -> Tensor:
        weights = retrained(inputs, targets, start.expand(count, -1), epsilon)
        before, after = (mean_loss(asked, answers, at) for at in (start, weights))
        return after - before

    return LeaveOneOut(
        table,
        data,
        scores,
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


def run(out: Path) -> Path:
    """Write the demo's page to `out`/page.html and print its table: the mean and range over ten splits."""
    tables = [breast_cancer(), pima_diabetes()]
    splits = [(table, seed) for table in tables for seed in range(SPLITS)]
    results = [leave_one_out(*each) for each in track(splits, "Leave-one-out of every row")]
    groups = [results[start : start + SPLITS] for start in range(0, len(results), SPLITS)]
    print(spread(groups).to_string(index=False))
    out.mkdir(parents=True, exist_ok=True)
    page = out / "page.html"
    page.write_text(render(groups), encoding="utf-8")
    return page


def spread(groups: list[list[LeaveOneOut]]) -> pandas.DataFrame:
    """One line a table: mean (least to largest) over the splits of every number of the summary."""
    lines = []
    for results in groups:
        line: dict[str, object] = {"table": results[0].table.name, "rows": len(results[0].predicted)}
        for name in results[0].summary:
            values = [result.summary[name] for result in results]
            digits = 7 if "1e-3/N" in name else 3
            low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
            line[name] = f"{np.mean(values):.{digits}f} ({low} to {high})"
        lines.append(line)
    return pandas.DataFrame(lines)


def render(groups: list[list[LeaveOneOut]]) -> str:
    """One self-contained page: the answer in words, the pictures, the rows behind one prediction."""
    results = [group[0] for group in groups]
    template = (resources.files("downweight") / "demo.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True).from_string(template)
    return page.render(
        results=[
            {
                "name": result.table.name,
                "citation": result.table.citation,
                "removals": len(result.predicted),
                "summary": result.summary,
                "picture": picture(result),
                "rows": rows_behind(result),
                "meaning": result.scores.meaning(),
            }
            for result in results
        ],
        spread=spread(groups).to_dict("records"),
        splits=SPLITS,
        version=__version__,
        torch=torch.__version__,
        l2=L2,
    )


def picture(result: LeaveOneOut) -> str:
    """Predicted against actual for every row, plain and corrected, as SVG."""
    parts = [("as predicted", result.predicted), ("divided by 1 − leverage", result.corrected)]
    frame = pandas.concat(
        pandas.DataFrame(
            {
                "row": result.data.train_rows.numpy(),
                "predicted": 1e3 * values.numpy(),
                "actual": 1e3 * result.actual.numpy(),
                "leverage": result.leverage.numpy(),
                "kind": kind,
            }
        )
        for kind, values in parts
    )
    ends = [float(frame[["predicted", "actual"]].min().min()), float(frame[["predicted", "actual"]].max().max())]
    line = altair.Chart(pandas.DataFrame({"predicted": ends, "actual": ends}))
    diagonal = line.mark_line(color="#999", strokeDash=[4, 4]).encode(x="predicted", y="actual")
    points = (
        altair.Chart()
        .mark_circle(size=34, opacity=0.75)
        .encode(
            x=altair.X("predicted", title="predicted change of the mean test loss (10⁻³ nats)"),
            y=altair.Y("actual", title="actual change (10⁻³ nats)"),
            color=altair.Color("leverage", title="leverage ", scale=altair.Scale(scheme="viridis", reverse=True)),
        )
    )
    chart = altair.layer(diagonal, points, data=frame).properties(width=320, height=300)
    faceted = chart.facet(column=altair.Column("kind", title=None, sort=[kind for kind, _ in parts]))
    return vl_convert.vegalite_to_svg(faceted.properties(padding={"right": 25}).to_dict())


def rows_behind(result: LeaveOneOut, count: int = 4) -> dict[str, Any]:
    """The test row that depends most on single rows, and the training rows that helped and hurt it most."""
    query = int(result.scores.values.abs().sum(1).argmax())
    spread = result.data.train[0].std(0)

    def described(row: int, score: float) -> dict[str, object]:
        # Features by how far they lie from the mean, in standard deviations.
        values = result.data.train[0][row] / spread
        unusual = values.abs().argsort(descending=True)[:3].tolist()
        return {
            "row": int(result.data.train_rows[row]),
            "label": int(result.data.train[1][row]),
            "score": score,
            "unusual": ", ".join(f"{result.table.feature_names[i]} {float(values[i]):+.1f} sd" for i in unusual),
        }

    return {
        "query": int(result.data.test_rows[query]),
        "label": int(result.data.test[1][query]),
        "target": result.table.target_name,
        "helpful": [described(*entry) for entry in result.scores.top(query, count, "helpful")],
        "harmful": [described(*entry) for entry in result.scores.top(query, count, "harmful")],
    }
