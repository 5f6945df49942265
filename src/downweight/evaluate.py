"""How well scores predict real retrainings: the linear datamodelling score."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from downweight.decompose import measurements
from downweight.errors import ForeignResult, InvalidInput, InvalidType
from downweight.gradients import check_removals
from downweight.influence import as_groups, warn_of_mode
from downweight.measurements import Measurement, as_measurement
from downweight.objectives import ColdStart
from downweight.progress import reporting, track
from downweight.respond import in_groups, recipe_of
from downweight.rows import chunks
from downweight.scores import Scores, differing
from downweight.settings import rows_in, whole
from downweight.shapes import Float, Int
from downweight.stack import unstack
from downweight.task import Task
from downweight.train import Problem, Run


@dataclass(frozen=True, eq=False)
class DatamodellingScore:
    """How well sums of scores rank retrainings on random subsets of the training rows.

    value: Spearman's correlation over the subsets, averaged over the queries that have one; spread: its standard
        deviation over them; interval: 95 % by bootstrap over the subsets, for these queries.
    per_query: (Q,), NaN where all subsets gave a query the same measurement or the same prediction.
    predicted: the sum of the scores of the rows left out, the predicted change of m(q), (Q, M).
    actual: m(q) of the network retrained on the subset alone, (Q, M).
    """

    value: float
    spread: float
    interval: tuple[float, float]
    per_query: Float[Tensor, " Q"]
    predicted: Float[Tensor, "Q M"]
    actual: Float[Tensor, "Q M"]
    subsets: Int[Tensor, "M n"]
    measurement: str

    def __repr__(self) -> str:
        return f"DatamodellingScore({self.value:.3f}, 95 % from {self.interval[0]:.3f} to {self.interval[1]:.3f})"

    def meaning(self) -> str:
        """What the number says, in words."""
        queries, subsets = self.actual.shape
        return (
            f"Over {subsets} networks trained from θ⁰ on {self.subsets.shape[1]} rows each, by the recipe and with the "
            f"cost averaged over those rows, sums of scores rank the {self.measurement} of a query at a Spearman "
            f"correlation of {self.value:.3f}, the mean over {queries} queries (spread {self.spread:.3f}; 95 % from "
            f"{self.interval[0]:.3f} to {self.interval[1]:.3f} by bootstrap over the subsets)."
        )


@torch.inference_mode(False)
def linear_datamodelling_score(
    task: Task,
    scores: Scores | Float[Tensor, "Q N"] | Mapping[str, Any],
    queries: Any,
    *,
    subsets: int | Sequence[Sequence[int]] = 100,
    size: float = 0.5,
    measurement: str | Measurement | Any = None,
    seed: int = 0,
    bootstrap: int = 1000,
    checkpoint: str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Any:
    """Spearman's correlation, over random subsets, of summed scores with what retraining on the subset really gives.

    The networks are trained all together from θ⁰ on the rows of their subset alone, by the task's recipe, each in a
    batch order of its own; their cost is the mean over the subset (not 1/N of the whole). A sum of scores is compared
    by rank, so scores in any unit can be; the sign is that of `influence`: what the removal of a row adds to m.

    scores: those of all rows on these queries, (Q, N), as `influence` or a baseline returns them; or several under
        names, compared on the same networks: the answer is then a dict of the same names.
    subsets: how many to draw, of `size` rows (below 1 a part of the rows), or the subsets themselves, equally long.
    measurement: None takes that of the scores; a function of one's own is named again.
    checkpoint: a folder that a stopped run goes on from, with the same result.
    """
    with reporting(progress):
        warn_of_mode(task)
        asked = task.query_rows(queries)
        named = scores if isinstance(scores, Mapping) else {"": scores}
        measured = _measurement(task, named, measurement)
        mine = task.fingerprint()
        values = {name: _values(task, mine, each, len(asked), name) for name, each in named.items()}
        bootstrap = whole(bootstrap, "bootstrap", 1)
        chosen = _subsets(task, subsets, size, seed)
        recipe, start = recipe_of(task, ColdStart())
        count = len(chosen)
        problem = Problem(task, "cost", 0.0, [()] * count, 0.0)
        run = Run(problem, recipe, range(recipe.epochs), statistics=True, subsets=chosen)
        folder = None if checkpoint is None else Path(checkpoint)
        ended = in_groups(run, start, "subsets", memory_limit, folder)
        if not bool(ended.finite.all()):
            raise InvalidInput(
                f"{int((~ended.finite).sum())} of {count} networks diverged on their subset: their parameters are NaN "
                "or infinite. Lower the recipe's lr."
            )
        flat, parts = unstack(ended.leaves), []
        for index in chunks(torch.arange(len(asked)), 2048):
            inputs, targets = asked.read(index)
            parts.append(measurements(task, measured, flat, ended.buffers, inputs, targets).detach())
        actual = torch.cat(parts).double().cpu()
        left_out = torch.ones(count, len(task), dtype=torch.float64)
        left_out.scatter_(1, chosen, 0.0)
        answers = {}
        for name, each in values.items():
            predicted = each @ left_out.T
            per_query, interval = _spearman(predicted, actual, bootstrap, seed)
            held = per_query[per_query.isfinite()]
            answers[name] = DatamodellingScore(
                value=float(held.mean()),
                spread=float(held.std()) if len(held) > 1 else float("nan"),
                interval=interval,
                per_query=per_query,
                predicted=predicted,
                actual=actual,
                subsets=chosen,
                measurement=measured.name,
            )
        return answers if isinstance(scores, Mapping) else answers[""]


def _measurement(task: Task, named: Mapping[str, Any], measurement: Any) -> Measurement:
    if not named:
        raise InvalidInput("scores is empty; give scores of all training rows, or several under names.")
    theirs = {each.measurement for each in named.values() if isinstance(each, Scores)}
    if measurement is None:
        if theirs - {"loss", "margin"} or len(theirs) > 1:
            raise InvalidInput(
                f"The scores measure {', '.join(sorted(theirs))}. Score one measurement at a time, and name a function "
                "of your own again: measurement=function."
            )
        measurement = next(iter(theirs), "loss")
    measured = as_measurement(task, measurement)
    if theirs - {measured.name}:
        raise InvalidInput(f"The scores predict {', '.join(sorted(theirs))}, and measurement is {measured.name}.")
    return measured


def _values(task: Task, fingerprint: dict[str, str], scores: Any, queries: int, name: str) -> Float[Tensor, "Q N"]:
    """(Q, N) in float64 on the CPU; refused where they are of other rows, queries or parameters."""
    what = f"scores[{name!r}]" if name else "scores"
    if isinstance(scores, Scores):
        if scores.of != "rows" or len(scores.removals) != len(task):
            raise InvalidInput(
                f"{what} are of {len(scores.removals)} {scores.of}; expected those of all {len(task)} training rows."
            )
        if different := differing(scores.fingerprint, fingerprint):
            raise ForeignResult(
                f"{what} belong to another task: {', '.join(different)} differ. Compute them again on this one."
            )
        if tuple(scores.removals) != (tuple(range(len(task))) if task.row_ids is None else tuple(task.row_ids)):
            raise InvalidInput(f"{what} are of all rows in another order; compute them with rows=None.")
        scores = scores.values
    if not isinstance(scores, Tensor):
        raise InvalidType(f"{what} is a {type(scores).__name__}; expected Scores or a tensor (queries, rows).")
    if tuple(scores.shape) != (queries, len(task)):
        raise InvalidInput(
            f"{what} has shape {tuple(scores.shape)}; expected ({queries}, {len(task)}): one value a query and "
            "training row."
        )
    if not bool(scores.isfinite().all()):
        raise InvalidInput(f"{what} has NaN or infinite values, which have no rank.")
    return scores.detach().double().cpu()


def _subsets(task: Task, subsets: Any, size: float, seed: int) -> Int[Tensor, "M n"]:
    rows = len(task)
    if isinstance(subsets, int) and not isinstance(subsets, bool):
        each = rows_in(size, rows)
        if subsets < 3 or not 1 <= each < rows:
            raise InvalidInput(
                f"subsets={subsets} with size={size} asks for {subsets} subsets of {each} of {rows} rows. Name at "
                "least three subsets, of at least one row and fewer than all."
            )
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([torch.randperm(rows, generator=generator)[:each].sort().values for _ in range(subsets)])
    groups = check_removals(as_groups(subsets, "subsets"), rows)
    if len({len(group) for group in groups}) > 1 or len(groups) < 3:
        raise InvalidInput(
            f"subsets are {len(groups)} of {sorted({len(group) for group in groups})} rows; expected at least three, "
            "all of one size: a network learns more from more rows whatever these are."
        )
    return torch.tensor([sorted(group) for group in groups])


# -- ranks ----------------------------------------------------------------------------------------


def _spearman(
    predicted: Float[Tensor, "Q M"], actual: Float[Tensor, "Q M"], resamples: int, seed: int
) -> tuple[Float[Tensor, " Q"], tuple[float, float]]:
    """Spearman's correlation of every query, and the 95 % interval of their mean over resampled subsets."""
    sides = _places(predicted), _places(actual)
    count = predicted.shape[1]
    per_query = _rank_correlation(*sides, torch.ones(count, dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    means = []
    for _ in track(range(resamples), "Bootstrap over the subsets"):
        drawn = torch.randint(count, (count,), generator=generator)
        each = _rank_correlation(*sides, torch.bincount(drawn, minlength=count).double())
        means.append(each.nanmean())
    low, high = torch.stack(means).nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return per_query, (low, high)


def _places(values: Float[Tensor, "Q M"]) -> Int[Tensor, "Q M"]:
    """Each value's place among the different values of its row; equal values share theirs."""
    ordered, order = values.sort(1)
    new = torch.zeros_like(order)
    new[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
    return torch.empty_like(order).scatter_(1, order, new.cumsum(1))


def _rank_correlation(
    one: Int[Tensor, "Q M"], other: Int[Tensor, "Q M"], weights: Float[Tensor, " M"]
) -> Float[Tensor, " Q"]:
    """Spearman's correlation of every row, with entry m there `weights[m]` times."""

    def centred(places: Tensor) -> Tensor:
        w = weights.expand(places.shape)
        held = torch.zeros(places.shape, dtype=torch.float64).scatter_add_(1, places, w)  # entries at each place
        mean_rank = held.cumsum(1) - (held - 1) / 2
        ranks = mean_rank.gather(1, places)
        return ranks - (w * ranks).sum(1, keepdim=True) / w.sum(1, keepdim=True)

    a, b = centred(one), centred(other)
    sizes = ((weights * a * a).sum(1) * (weights * b * b).sum(1)).sqrt()
    return torch.where(sizes > 0, (weights * a * b).sum(1) / sizes, torch.nan)
