"""Scores: the predicted change of every query for every removal, and how far to believe it."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from downweight.errors import DamagedResult, ForeignResult, InvalidInput, InvalidType
from downweight.settings import whole
from downweight.shapes import Bool, Float
from downweight.store import read_folder, write_folder
from downweight.task import Coverage, Task
from downweight.version import __version__

if TYPE_CHECKING:
    import pandas


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "downweight": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# What a value of a baseline is; the sign is that of influence.
_DEFINITIONS = {
    "grad_dot": "values[q, i] is (1/N) ∇m(q)·∇L(i), influence with A = I.",
    "grad_cos": "values[q, i] is the cosine between ∇m(q) and ∇L(i).",
    "tracin": "values[q, i] is (1/N) Σ η ∇m(q)·∇L(i) over the checkpoints, η the learning rates.",
    "representer_points": "values[q, i] is (1/(l2 N)) ∇m(q)·∇L(i) over the last linear layer: to "
    "first order what the query's measurement loses with row i's part of its outputs.",
}


@dataclass(frozen=True, eq=False)
class Scores:
    """`values[q, i]`: the predicted change of query q's measurement when removal i is made.

    residuals: ‖A x − v‖ / ‖v‖ of every solved system, which were those of the queries or of the
        rows, as `solved` says ("none" for a baseline that solves nothing); results: why each solve
        ended, in words; converged: whether each reached its tolerance.
    removals: what column i removes: a row, a group of rows, or a candidate, by its index or id.
    """

    values: Float[Tensor, "Q n"]
    residuals: Float[Tensor, " K"]
    solved: Literal["queries", "rows", "none"]
    results: tuple[str, ...]
    converged: Bool[Tensor, " K"]
    removals: tuple[Any, ...]
    of: Literal["rows", "groups", "candidates"]
    method: str
    measurement: str
    higher_is_better: bool | None
    unit: str
    damping: float
    l2: float
    curvature: str
    solver: str
    loss: str
    rows: int
    coverage: Coverage
    fingerprint: dict[str, str]
    seed: int | None = None
    notes: tuple[str, ...] = ()
    stats: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)

    def __repr__(self) -> str:
        worst = f", worst residual {self.worst_residual:.1e}" if len(self.residuals) else ""
        return (
            f"Scores({self.values.shape[0]} queries × {self.values.shape[1]} {self.of}, "
            f"{self.method} by {self.solver}{worst})"
        )

    @property
    def worst_residual(self) -> float:
        return float(self.residuals.max()) if len(self.residuals) else 0.0

    def top(
        self, query: int = 0, k: int = 10, sign: Literal["helpful", "harmful"] = "helpful"
    ) -> list[tuple[Any, float]]:
        """(row, score) of the k strongest removals of this sign for a query, strongest first.

        Helpful: the removal makes the query worse. Fewer than k where fewer have that sign; a score that is not a
        finite number has none.
        """
        if sign not in ("helpful", "harmful"):
            raise InvalidInput(f"sign is {sign!r}; expected 'helpful' or 'harmful'.")
        if self.higher_is_better is None:
            raise InvalidInput(
                f"Whether more of {self.measurement} is better was never said, so nothing can be "
                "called helpful. Measure with dw.Measurement(name, function, higher_is_better=…)."
            )
        k = whole(k, "k", 0)
        count = len(self.values)
        if isinstance(query, bool) or not hasattr(query, "__index__") or not -count <= query < count:
            raise InvalidInput(f"query is {query!r}; the queries are 0 to {count - 1}.")
        # Removing a helpful row raises a loss and lowers a margin.
        raises = (sign == "helpful") != self.higher_is_better
        values = self.values[query]
        strength = values if raises else -values
        order = strength.argsort(descending=True, stable=True)
        order = order[(strength[order] > 0) & strength[order].isfinite()][:k]  # NaN where a solver diverged
        return [(self.removals[i], values[i].item()) for i in order.tolist()]

    def meaning(self) -> str:
        """What one number of `values` says, its unit and sign, and what it rests on."""
        what = {
            "rows": "one training row is removed",
            "groups": "a group of training rows is removed (the sum over its rows)",
            "candidates": "a candidate row is removed as if it had been a training row (adding it has "
            "the opposite sign)",
        }[self.of]
        if self.higher_is_better is None:
            direction = f"Whether more of {self.measurement} is better was not declared."
        else:
            change = "lowers" if self.higher_is_better else "raises"
            direction = (
                f"{'Negative' if self.higher_is_better else 'Positive'}: the removal {change} the "
                f"{self.measurement}, so the row helped this query."
            )
        lines = [
            _DEFINITIONS.get(self.method)
            or f"values[q, i] is the predicted change of query q's {self.measurement} in {self.unit} when "
            f"{what}: its loss leaves the cost of {self.rows:,} rows with weight 1/{self.rows}, and the "
            "1/N normaliser stays.",
            direction,
        ]
        if self.method == "influence":
            lines.append(
                f"First order in 1/N, with the {self.curvature} and damping λ = {self.damping:g} "
                f"(absolute; l2 = {self.l2:g} is in the cost), at the given parameters, which need "
                "not be a minimum: it approximates the proximal Bregman response, not retraining."
            )
        else:
            lines.append(f"A baseline, not a predicted change of a removal; {what} in column i.")
        if self.solved != "none":
            done = int(self.converged.sum())
            lines.append(
                f"Solved for the {self.solved} by {self.solver}: {done} of {len(self.residuals)} systems "
                f"reached their tolerance, worst relative residual {self.worst_residual:.1e}."
            )
        lines.append(f"Covers {self.coverage}.")
        lines.extend(note for note in self.notes if not note.startswith("Covers "))
        return "\n".join(lines)

    def to_pandas(self) -> "pandas.DataFrame":
        """One line a (query, removal): columns query, row (or group, candidate) and score."""
        import pandas  # here, because importing the package must not import it

        queries, removals = self.values.shape
        name = {"rows": "row", "groups": "group", "candidates": "candidate"}[self.of]
        labels = pandas.Series(list(self.removals), dtype=None)
        return pandas.DataFrame(
            {
                "query": np.repeat(np.arange(queries), removals),
                name: np.tile(labels.to_numpy(), queries),
                "score": self.values.detach().cpu().numpy().ravel(),
            }
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a folder, whole or not at all; an earlier result of scores there is replaced."""
        meta = {
            "kind": "scores",
            "solved": self.solved,
            "results": list(self.results),
            "removals": list(self.removals),
            "of": self.of,
            "method": self.method,
            "measurement": self.measurement,
            "higher_is_better": self.higher_is_better,
            "unit": self.unit,
            "damping": self.damping,
            "l2": self.l2,
            "curvature": self.curvature,
            "solver": self.solver,
            "loss": self.loss,
            "rows": self.rows,
            "coverage": [self.coverage.covered, self.coverage.total, list(self.coverage.left_out)],
            "fingerprint": self.fingerprint,
            "dtype": str(self.values.dtype).removeprefix("torch."),
            "seed": self.seed,
            "notes": list(self.notes),
            "stats": self.stats,
            "versions": self.versions,
        }
        arrays = {
            "values": self.values.detach().cpu(),
            "residuals": self.residuals.cpu(),
            "converged": self.converged.cpu().to(torch.uint8),
        }
        write_folder(path, meta, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str], expect: Task | None = None) -> Self:
        """Scores that `save` wrote; with `expect`, refused unless they belong to that task."""
        meta, arrays = read_folder(path, "scores")
        if expect is not None:
            require_fingerprint(meta, expect, path)
        try:
            covered, total, left_out = meta["coverage"]
            return cls(
                values=arrays["values"].load(),
                residuals=arrays["residuals"].load(),
                converged=arrays["converged"].load().bool(),
                results=tuple(meta["results"]),
                removals=_tuples(meta["removals"]),
                coverage=Coverage(covered, total, tuple(left_out)),
                notes=tuple(meta["notes"]),
                **{
                    name: meta[name]
                    for name in (
                        *("solved", "of", "method", "measurement", "higher_is_better", "unit"),
                        *("damping", "l2", "curvature", "solver", "loss", "rows", "fingerprint"),
                        *("seed", "stats", "versions"),
                    )
                },
            )
        except KeyError as missing:
            raise DamagedResult(
                f"The scores at {path} lack {missing}; the folder was changed by hand or is damaged. "
                "Compute and save them again."
            ) from missing


def _tuples(value: Any) -> Any:
    """The labels as they were, before JSON made lists of their tuples."""
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def require_fingerprint(meta: dict[str, Any], task: Task, path: str | os.PathLike[str]) -> None:
    """Raise ForeignResult, naming what differs, unless a result belongs to this task."""
    if not isinstance(task, Task):
        raise InvalidType(f"expect is a {type(task).__name__}; expected the dw.Task that the result was made with.")
    if different := differing(meta.get("fingerprint", {}), task.fingerprint()):
        raise ForeignResult(
            f"The result at {path} belongs to another task: its {', '.join(different)} differ from "
            "those of the task given as expect. Load it with the task it was made with, or compute "
            "it again."
        )


def differing(theirs: Mapping[str, str], mine: Mapping[str, str]) -> list[str]:
    """The parts of a fingerprint in which a result is not of this task."""
    return [name for name, value in mine.items() if theirs.get(name) != value]


def jsonable(stats: dict[str, Any]) -> dict[str, Any]:
    """Statistics as JSON can hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {str(name): plain(part) for name, part in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [plain(part) for part in value]
        return value if isinstance(value, str | int | float | bool | None) else str(value)

    return {name: plain(value) for name, value in stats.items()}
