"""decompose: five gaps between retraining without a row and the influence estimate, and which question is answered."""

import datetime
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from downweight.errors import DamagedResult, InvalidInput
from downweight.gradients import check_removals, training
from downweight.influence import Curvature, System, as_groups, self_influence, warn_of_mode
from downweight.losses import IGNORED, CrossEntropy
from downweight.measurements import Measurement, as_measurement, of_measurement
from downweight.memory import Budget
from downweight.objectives import (
    LABELS,
    ColdStart,
    GaussNewton,
    LinearizedProximalBregman,
    Objective,
    Optimizer,
    Proximal,
    ProximalBregman,
    TwoStage,
    WarmStart,
)
from downweight.progress import reporting, track
from downweight.recipe import Recipe
from downweight.respond import BatchOrder, Response, respond, stacked_outputs
from downweight.rows import Inputs, Rows, chunks
from downweight.scores import require_fingerprint, versions
from downweight.settings import rows_in
from downweight.shapes import Float
from downweight.solvers.solver import Indefinite, Solver
from downweight.stack import Stacked
from downweight.store import read_folder, write_folder
from downweight.task import Task
from downweight.version import __version__

if TYPE_CHECKING:
    import pandas

_NAMES = {
    "warm_start": "warm-start",
    "proximity": "proximity",
    "non_convergence": "non-convergence",
    "linearization": "linearisation",
    "solver": "solver",
}
STAGES = ("cold_start", "warm_start", "proximal", "proximal_bregman", "linearized", "influence")
GAPS = {  # name: the two stages between which it lies
    "warm_start": ("cold_start", "warm_start"),
    "proximity": ("warm_start", "proximal"),
    "non_convergence": ("proximal", "proximal_bregman"),
    "linearization": ("proximal_bregman", "linearized"),
    "solver": ("linearized", "influence"),
}
# What `verdict` calls close, and what it calls no more than a tendency. Words for a reader, not tests: guesses.
CLOSE, TENDENCY = 0.9, 0.5


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Stage by stage from retraining without a row to its influence estimate, for R removals.

    gaps: name -> (R,), the mean over training rows (and counted positions) of ‖f(θ_a, x) − f(θ_b, x)‖₂ between two
        neighbouring stages, each by the real network at its parameters. total: the same from the first to the last.
    shifts: stage -> θ − θˢ, (R, d). Their differences from stage to stage add up to the whole; the gaps, which are
        norms, bound it.
    predicted: influence's change of every query's measurement, (Q, R); actual: response -> what really changes, (Q, R).
    """

    gaps: dict[str, Float[Tensor, " R"]]
    total: Float[Tensor, " R"]
    shifts: dict[str, Float[Tensor, "R d"]]
    predicted: Float[Tensor, "Q R"]
    actual: dict[str, Float[Tensor, "Q R"]]
    meta: dict[str, Any]
    responses: dict[str, Response] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"Decomposition({len(self.total)} removals, gaps {', '.join(self.gaps)})"

    def table(self) -> "pandas.DataFrame":
        """One line a gap: mean, standard deviation and maximum over the removals."""
        import pandas

        rows = [
            {"gap": name, "mean": float(gap.mean()), "std": _std(gap), "max": float(gap.max())}
            for name, gap in (*self.gaps.items(), ("total", self.total))
        ]
        return pandas.DataFrame(rows)

    def correlations(self) -> "pandas.DataFrame":
        """How well influence predicts each response over the removals: Pearson and Spearman.

        Per query, averaged with their spread over the queries, and of the mean of the measurement over all queries.
        """
        import pandas

        lines = [{"response": name, **correlate(self.predicted, actual)} for name, actual in self.actual.items()]
        return pandas.DataFrame(lines)

    def verdict(self) -> str:
        """Which question influence answers on this model, and how well, in plain words."""
        return "\n".join(_sentences(self))

    def record(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON can hold it: what the page is made of."""
        correlations = [
            {
                "response": name,
                "label": LABELS[name],
                "queries": len(self.predicted),
                "removals": len(self.total),
                **{key: _number(value) for key, value in correlate(self.predicted, actual).items()},
            }
            for name, actual in self.actual.items()
        ]
        asked = len(self.predicted) > 0
        return {
            "kind": "decomposition",
            **self.meta,
            "gaps": {name: gap.tolist() for name, gap in self.gaps.items()},
            "total": self.total.tolist(),
            "gap_unit": "mean over the training rows of the distance between outputs",
            "queries": len(self.predicted),
            "predicted_mean": self.predicted.mean(0).tolist() if asked else [],
            "actual_mean": {name: actual.mean(0).tolist() for name, actual in self.actual.items()},
            "correlations": correlations,
            "verdict": _sentences(self),
        }

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the page: one file that needs nothing else."""
        from downweight.report import page  # here, because it brings the libraries that draw

        return page.write({"package_version": __version__, **self.record()}, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a folder, whole or not at all."""
        arrays = {f"shift-{name}": shift.cpu() for name, shift in self.shifts.items()}
        arrays |= {f"gap-{name}": gap.cpu() for name, gap in self.gaps.items()}
        arrays |= {"total": self.total.cpu(), "predicted": self.predicted.T.cpu()}
        arrays |= {f"actual-{name}": actual.T.cpu() for name, actual in self.actual.items()}
        write_folder(path, _finite_only(self.record()), arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str], expect: Task | None = None) -> Self:
        """A decomposition that `save` wrote; with `expect`, refused unless it belongs to that task."""
        meta, arrays = read_folder(path, "decomposition")
        if expect is not None:
            require_fingerprint(meta, expect, path)

        def those(kind: str) -> dict[str, Tensor]:
            names = [name for name in arrays if name.startswith(f"{kind}-")]
            return {name.removeprefix(f"{kind}-"): arrays[name].load() for name in names}

        try:
            return cls(
                gaps=those("gap"),
                total=arrays["total"].load(),
                shifts=those("shift"),
                predicted=arrays["predicted"].load().T,
                actual={name: actual.T for name, actual in those("actual").items()},
                meta={name: meta[name] for name in _META},
            )
        except KeyError as missing:
            raise DamagedResult(f"The decomposition at {path} lacks {missing}; compute and save it again.") from missing


_META = (
    *("task", "settings", "removals", "chosen", "stages", "left_out", "stage", "measurement", "unit", "notes"),
    *("residual", "versions", "started", "seconds", "fingerprint"),
)


@torch.inference_mode(False)
def decompose(
    task: Task,
    remove: Any = 20,
    *,
    damping: float = 1e-3,
    queries: Any = None,
    measurement: str | Measurement | Any = "loss",
    size: float = 1,
    choose: Literal["random", "stratified"] = "random",
    seed: int = 0,
    epsilon: float | None = None,
    solver: Solver | str = "auto",
    curvature: Curvature = "gauss_newton",
    indefinite: Indefinite = "raise",
    batch_order: BatchOrder = "independent",
    proximal_bregman: Optimizer | None = None,
    linearized: Optimizer | None = None,
    two_stage: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Decomposition:
    """The five gaps between cold retraining and influence, and how well influence predicts each response.

    remove: how many removals to draw, or the removals themselves: rows such as [3, 5] or groups [[3], [5, 9]].
    size: rows in each drawn removal; below 1 a part of the training rows (0.3 removes 30 %).
    choose: "random" draws by `seed`; "stratified" draws one row from each of equally many ranks of self-influence, so
        that not all removals are of rows that hardly matter.
    queries: (inputs, targets) on which predicted and actual changes are compared; without them only the gaps.
    batch_order: "independent", each removal's own as in the paper, or "shared" by all.
    proximal_bregman, linearized: dw.GaussNewton(…), the default, or "recipe" as in the paper.
    checkpoint: a folder that a stopped decomposition goes on from, with the same result.

    Stages that need a recipe are left out where the task has none, and said to be.
    """
    with reporting(progress):
        warn_of_mode(task)
        started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
        asked = None if queries is None else task.query_rows(queries)
        measured = as_measurement(task, measurement)
        groups, chosen = _choose(task, remove, size, choose, seed, damping)
        step = 1 / len(task) if epsilon is None else float(epsilon)
        objectives: list[Objective] = [
            ColdStart(),
            WarmStart(),
            *([TwoStage()] if two_stage and asked is not None else []),
            Proximal(damping),
            ProximalBregman(damping, proximal_bregman or GaussNewton()),
            LinearizedProximalBregman(damping, linearized or GaussNewton()),
        ]
        folder = None if checkpoint is None else Path(checkpoint)
        responses: dict[str, Response] = {}
        left_out: list[str] = []
        for objective in objectives:
            if reason := _impossible(task, objective):
                left_out.append(f"{objective.name} {reason}")
                continue
            responses[objective.name] = respond(
                task,
                objective,
                groups,
                epsilon=step,
                batch_order=batch_order,
                checkpoint=None if folder is None else folder / objective.name,
                memory_limit=memory_limit,
            )
        before = time.monotonic()
        shifts = len(groups) * task.size * task.dtype.itemsize
        system = System.make(task, damping, curvature, solver, indefinite, memory_limit, len(groups), shifts)
        solution = system.solve(training(task, groups))
        system.warn_unless_converged(solution)
        estimate = step * solution.value
        estimated = time.monotonic() - before

        stages = {name: responses[name].shift for name in STAGES if name in responses} | {"influence": estimate}
        gaps, total = _gaps(task, stages, responses)
        predicted, actual = _changes(task, asked, measured, estimate, system, responses)
        info = {name: _stage(response) for name, response in responses.items()}
        info["influence"] = {
            "label": LABELS["influence"],
            "converged": [result.ok for result in solution.result],
            "result": [result.value for result in solution.result],
            "relative_gradient": [None] * len(groups),
            "seconds": estimated,
            "shift_norm": estimate.double().norm(dim=1).tolist(),
        }
        recipe = task.origin.recipe if task.origin is not None else None
        notes = dict.fromkeys(note for response in responses.values() for note in response.notes)
        smallest = solution.stats.get("smallest_eigenvalue")
        if smallest is not None and smallest < 0:
            notes[f"The influence system is indefinite: its smallest eigenvalue is {smallest:.3g}."] = None
        meta = {
            "task": {
                "model": type(task.model).__name__,
                "loss": task.loss.name,
                "rows": len(task),
                "parameters": task.size,
                "l2": task.l2,
                "dtype": str(task.dtype).removeprefix("torch."),
                "device": _device(task.device),
                "coverage": str(task.coverage),
                "outputs": list(task.output_shape),
            },
            "settings": {
                "damping": float(damping),
                "epsilon": step,
                "curvature": system.curvature.describe(),
                "solver": repr(system.solver),
                "batch_order": batch_order,
                "seed": seed,
                "recipe": recipe.settings() if isinstance(recipe, Recipe) else None,
                "proximal_bregman": repr(proximal_bregman or GaussNewton()),
                "linearized": repr(linearized or GaussNewton()),
            },
            "removals": [[row if task.row_ids is None else task.row_ids[row] for row in group] for group in groups],
            "chosen": chosen,
            "stages": list(stages),
            "left_out": left_out,
            "stage": info,
            "measurement": measured.name,
            "unit": measured.unit,
            "notes": [*notes, *system.notes],
            "residual": {"influence": float(solution.residual.max())},
            "versions": versions(),
            "started": started.isoformat(timespec="seconds"),
            "seconds": time.monotonic() - clock,
            "fingerprint": task.fingerprint(),
        }
        return Decomposition(gaps, total, stages, predicted, actual, meta, responses)


# -- which rows -----------------------------------------------------------------------------------


def _choose(
    task: Task, remove: Any, size: float, choose: str, seed: int, damping: float
) -> tuple[list[list[int]], str]:
    if isinstance(remove, bool) or not isinstance(remove, int):
        groups = check_removals(as_groups(remove, "remove"), len(task))
        return groups, f"{len(groups)} given removals"
    if choose not in ("random", "stratified"):
        raise InvalidInput(f'choose is "random" or "stratified", got {choose!r}.')
    rows = len(task)
    each = rows_in(size, rows)
    if remove < 1 or each < 1 or each >= rows or (each == 1 and remove > rows):
        raise InvalidInput(
            f"remove={remove} with size={size} asks for {remove} removals of {each} rows each, of {rows} rows. Name at "
            "least one removal of at least one row and fewer than all."
        )
    generator = torch.Generator().manual_seed(seed)
    if each > 1:
        if choose == "stratified":
            raise InvalidInput("choose='stratified' draws single rows; leave size at 1.")
        drawn = [torch.randperm(rows, generator=generator)[:each].sort().values.tolist() for _ in range(remove)]
        return drawn, f"{remove} random groups of {each} rows, seed {seed}"
    if choose == "random":
        drawn = torch.randperm(rows, generator=generator)[:remove].tolist()
        return [[row] for row in drawn], f"{remove} single rows at random, seed {seed}"
    ranked = self_influence(task, damping=damping).argsort(descending=True).cpu()
    picked = [int(part[torch.randint(len(part), (1,), generator=generator)]) for part in ranked.tensor_split(remove)]
    return [[row] for row in picked], f"{remove} single rows, one from each rank of self-influence, seed {seed}"


def _impossible(task: Task, objective: Objective) -> str | None:
    """Why a stage cannot be run on this task; None where it can."""
    if isinstance(objective.optimizer, GaussNewton):
        return None
    if task.origin is None or not isinstance(task.origin.recipe, Recipe):
        return "needs the recipe that led to θˢ: train with dw.train(task, recipe), or name it with task.with_recipe."
    if objective.start == "initial" and task.origin.state is None:
        return "needs θ⁰: train with dw.train(task, recipe), or name it with task.with_recipe(recipe, initial=…)."
    return None


# -- distances ------------------------------------------------------------------------------------


def _gaps(
    task: Task, stages: Mapping[str, Tensor], responses: Mapping[str, Response]
) -> tuple[dict[str, Tensor], Tensor]:
    """The distance between the outputs of neighbouring stages, and between the first and the last."""
    names = list(stages)
    pairs = {gap: ends for gap, ends in GAPS.items() if all(end in stages for end in ends)}
    ends = {**pairs, "": (names[0], names[-1])}
    sums = {gap: torch.zeros(len(stages["influence"]), dtype=torch.float64, device=task.device) for gap in ends}
    counted = 0
    held = 8 * len(names) * len(stages["influence"]) * math.prod(task.output_shape)
    room = max(1, int(0.2 * Budget(task.device).available()) // held)
    for index in track(list(chunks(torch.arange(len(task)), min(room, 2048))), "Distances between outputs"):
        inputs, targets = task.rows.read(index)
        buffers = {name: responses[name].buffers if name in responses else {} for name in names}
        outputs = {
            name: stacked_outputs(task, task.flat + shift, buffers[name], inputs).double()
            for name, shift in stages.items()
        }
        inside = torch.ones(outputs[names[0]].shape[1:-1], dtype=torch.float64, device=task.device)
        if isinstance(task.loss, CrossEntropy) and targets.dim() > 1:
            inside = (targets != IGNORED).double()  # positions that count
        counted += float(inside.sum())
        for gap, (one, other) in ends.items():
            sums[gap] += ((outputs[one] - outputs[other]).norm(dim=-1) * inside).flatten(1).sum(1)
    means = {gap: (total / counted).cpu() for gap, total in sums.items()}
    return {gap: means[gap] for gap in pairs}, means[""]


def _changes(
    task: Task,
    asked: Rows | None,
    measured: Measurement,
    estimate: Tensor,
    system: System,
    responses: Mapping[str, Response],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Predicted and actual changes of every query's measurement, (Q, R)."""
    if asked is None:
        return torch.zeros(0, len(estimate), dtype=torch.float64), {}
    family = of_measurement(task, asked, measured)
    predicted = family.dot(estimate, system.curvature.chunk_rows, system.curvature.block)
    order = ("cold_start", "warm_start", "two_stage", "proximal", "proximal_bregman", "linearized")
    actual: dict[str, list[Tensor]] = {name: [] for name in order if name in responses}
    for index in chunks(torch.arange(len(asked)), 2048):
        inputs, targets = asked.read(index)
        before = measurements(task, measured, task.flat.expand(2, -1), {}, inputs, targets)[:, :1]
        for name, parts in actual.items():
            response = responses[name]
            flat = response.parameters.to(task.device)
            parts.append(measurements(task, measured, flat, response.buffers, inputs, targets) - before)
    return predicted.double().cpu(), {name: torch.cat(parts).detach().double().cpu() for name, parts in actual.items()}


def measurements(
    task: Task, measured: Measurement, flat: Float[Tensor, "R d"], buffers: Stacked, inputs: Inputs, targets: Tensor
) -> Float[Tensor, "Q R"]:
    """m of these queries for every one of R networks, float64."""
    outputs = stacked_outputs(task, flat, buffers, inputs).double()
    return torch.stack([measured.function(each, targets) for each in outputs], 1)


def _stage(response: Response) -> dict[str, Any]:
    return {
        "label": LABELS[response.objective],
        "converged": response.converged.tolist(),
        "result": list(response.result),
        "relative_gradient": [_number(value) for value in response.relative_gradient.tolist()],
        "seconds": response.seconds,
        "shift_norm": response.shift.double().norm(dim=1).tolist(),
    }


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# -- how well it predicts -------------------------------------------------------------------------


def correlate(predicted: Float[Tensor, "Q R"], actual: Float[Tensor, "Q R"]) -> dict[str, float]:
    """Pearson and Spearman over the removals: the mean over queries, its spread, and of the mean over the queries.

    A query whose changes are all equal has no correlation and is left out; NaN where nothing is left.
    """
    answer = {}
    for name, prepare in (("pearson", lambda x: x), ("spearman", _ranks)):
        each = _pearson(prepare(predicted.numpy()), prepare(actual.numpy()))
        each = each[np.isfinite(each)]
        answer[name] = float(each.mean()) if len(each) else math.nan
        answer[f"{name}_std"] = float(each.std(ddof=1)) if len(each) > 1 else math.nan
        means = (prepare(side.numpy().mean(0, keepdims=True)) for side in (predicted, actual))
        answer[f"{name}_mean_loss"] = float(_pearson(*means)[0])
    return answer


def _pearson(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (side - side.mean(1, keepdims=True) for side in (a, b))
    sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sizes > 0, (a * b).sum(1) / sizes, np.nan)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis; equal values share the mean of theirs."""
    ranks = np.empty(values.shape)
    for row, line in enumerate(values):
        _, inverse, counts = np.unique(line, return_inverse=True, return_counts=True)
        last = counts.cumsum()
        ranks[row] = (last - (counts - 1) / 2)[inverse]
    return ranks


# -- in words -------------------------------------------------------------------------------------


def as_text(result: Decomposition) -> str:
    """Both tables and the verdict, as a terminal shows them."""
    frames = [frame for frame in (result.table(), result.correlations()) if len(frame)]
    tables = [frame.to_string(index=False, float_format="{:.4g}".format) for frame in frames]
    return "\n\n".join([*tables, result.verdict()])


def _sentences(result: Decomposition) -> list[str]:
    removals = len(result.total)
    sentences = []
    table = {name: correlate(result.predicted, actual) for name, actual in result.actual.items()}
    known = {name: values["pearson"] for name, values in table.items() if math.isfinite(values["pearson"])}
    known.pop("linearized", None)  # what influence computes is no question of its own

    def told(name: str) -> str:
        values = table[name]
        spread = f" ± {values['pearson_std']:.2f}" if math.isfinite(values["pearson_std"]) else ""
        return f"{values['pearson']:.2f}{spread} with {_QUESTIONS[name]}"

    if known:
        best = max(known, key=lambda name: known[name])
        how = "closely" if known[best] >= CLOSE else "roughly" if known[best] >= TENDENCY else "badly"
        if how == "badly":
            sentences.append(
                f"On this model influence predicts none of the responses well: the best is {_QUESTIONS[best]}, at a "
                f"correlation of {known[best]:.2f}."
            )
        else:
            sentences.append(f"On this model influence {how} answers: {_ASKS[best]}")
        said = ", ".join(told(name) for name in table if name in known)
        sentences.append(
            f"Over {removals} removals its predictions correlate {said} (Pearson, the mean over "
            f"{len(result.predicted)} queries and its spread)."
        )
    means = {name: float(gap.mean()) for name, gap in result.gaps.items()}
    whole = sum(means.values())
    if len(means) == len(GAPS) and whole > 0:
        questions = sum(means[name] for name in ("warm_start", "proximity", "non_convergence"))
        largest = max(means, key=lambda name: means[name])
        sentences.append(
            f"{100 * questions / whole:.0f} % of the sum of the five gaps is between different questions (warm-start, "
            f"proximity and non-convergence gap) and {100 * (1 - questions / whole):.0f} % is error of the answer "
            f"(linearisation and solver); the largest is the {_NAMES[largest]} gap."
        )
    for name, info in result.meta["stage"].items():
        undone = info["converged"].count(False)
        if name == "proximal_bregman" and undone:
            sentences.append(
                f"{undone} of {removals} PBRFs are no minimum, and what is said about them is no ground truth."
            )
        if name == "influence" and undone:
            sentences.append(f"{undone} of {removals} influence systems are not solved to their tolerance.")
    if len(result.predicted) and removals > 2:
        spread = (result.predicted.mean(0) - result.predicted.mean()).square()
        if float(spread.sum()) > 0 and float(spread.max() / spread.sum()) > 0.5:
            row = result.meta["removals"][int(spread.argmax())]
            spreading = "; choose='stratified' spreads the removals over all sizes of influence"
            sentences.append(
                f"One removal ({row if len(row) < 4 else f'{len(row)} rows'}) carries "
                f"{100 * float(spread.max() / spread.sum()):.0f} % of the spread of the predictions, and with it the "
                f"correlations of the mean loss{'' if 'self-influence' in result.meta['chosen'] else spreading}."
            )
    if result.meta["settings"]["batch_order"] == "independent" and "warm_start" in table:
        sentences.append(
            "Retraining used a batch order of its own for each removal, which moves the network without any removal; "
            "batch_order='shared' takes that out."
        )
    if result.meta["left_out"]:
        sentences.append("Left out: " + " ".join(result.meta["left_out"]))
    return sentences or ["Without queries there is nothing to predict; the gaps are in the table."]


_QUESTIONS = {
    "cold_start": "retraining from scratch",
    "warm_start": "training on without the row",
    "two_stage": "training on without against training on with the row",
    "proximal": "training on without the row, held near θˢ",
    "proximal_bregman": "the PBRF",
}
_ASKS = {
    "cold_start": "what would retraining from scratch without the row change?",
    "warm_start": "what would training on without the row change?",
    "two_stage": "what does the row change in training on?",
    "proximal": "what would training on without the row change, held near the trained parameters?",
    "proximal_bregman": "what does the row itself hold in place, if the network keeps what it says on all others (the "
    "proximal Bregman response, PBRF)? That is not retraining.",
}


def _std(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else math.nan


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite_only(record: Any) -> Any:
    """The record with None for what JSON cannot hold."""
    if isinstance(record, float):
        return _number(record)
    if isinstance(record, Mapping):
        return {name: _finite_only(value) for name, value in record.items()}
    if isinstance(record, Sequence) and not isinstance(record, str):
        return [_finite_only(value) for value in record]
    return record
