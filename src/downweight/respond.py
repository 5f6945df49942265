"""respond(task, objective, remove): the parameters that a counterfactual training without some rows would reach."""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from downweight.errors import DamagedResult, ForeignResult, InvalidInput, InvalidType, warn
from downweight.features import RowGradients
from downweight.gradients import check_removals, training
from downweight.influence import as_groups, parameter_shift, warn_of_mode
from downweight.linearization import quiet_batching
from downweight.memory import Budget, parse_bytes
from downweight.objectives import GaussNewton, Objective, TwoStage
from downweight.progress import reporting
from downweight.proximal import Ending, proximal_bregman
from downweight.recipe import Recipe
from downweight.rows import TensorRows, tensors_of
from downweight.scores import require_fingerprint, versions
from downweight.settings import number
from downweight.shapes import Bool, Float, Shaped
from downweight.solvers.solver import norms
from downweight.stack import Stack, Stacked, learning_modules, stack, unstack
from downweight.store import read_folder, write_folder
from downweight.task import Task
from downweight.train import Gradient, Keep, Problem, Run, Trained, groups_that_fit, replica_bytes, run_replicas

BatchOrder = Literal["shared", "independent"]
RATE_OF_BREGMAN = 0.1  # of the recipe's, for responses whose fidelity starts at zero: Bae et al. 2022, appendix


@dataclass(frozen=True, eq=False)
class Response:
    """Where each removal takes the parameters, and how far to believe it.

    parameters: θ of every removal, in the order of `task.names`, (R, d); shift: θ − θˢ, which keeps its digits where θ
        in its dtype does not.
    relative_gradient: ‖∇ objective(θ)‖ / (ε ‖Σ_S ∇L(z, θˢ)‖), 0 for a removal without gradient.
    converged, result: whether a minimum was reached, and why the work stopped, in words. What a recipe reaches in its
        epochs is rarely a minimum, and says so.
    """

    parameters: Float[Tensor, "R d"]
    shift: Float[Tensor, "R d"]
    converged: Bool[Tensor, " R"]
    result: tuple[str, ...]
    relative_gradient: Float[Tensor, " R"]
    removals: tuple[tuple[int, ...], ...]
    objective: str
    settings: str
    epsilon: float
    batch_order: str
    seconds: float
    fingerprint: dict[str, str]
    notes: tuple[str, ...] = ()
    buffers: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    task: Task | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return (
            f"Response({self.objective}, {len(self.removals)} removals, {int(self.converged.sum())} converged, "
            f"{self.seconds:.1f} s)"
        )

    def outputs(self, inputs: Any) -> Shaped[Tensor, "R n *out"]:
        """The network's outputs on these inputs at each of the parameters, in eval mode."""
        if self.task is None:
            raise InvalidInput("This response was loaded without its task: Response.load(path, expect=task).")
        rows = TensorRows(inputs, torch.zeros(len(tensors_of(inputs)[0][1])), self.task.device, self.task.dtype)
        moved, _ = rows.read(torch.arange(len(rows)))
        return stacked_outputs(self.task, self.parameters, self.buffers, moved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a folder, whole or not at all."""
        meta = {
            "kind": "response",
            "result": list(self.result),
            "removals": [list(group) for group in self.removals],
            **{name: getattr(self, name) for name in _PLAIN},
            "notes": list(self.notes),
            "buffers": list(self.buffers),
        }
        arrays = {
            "parameters": self.parameters.cpu(),
            "shift": self.shift.cpu(),
            "converged": self.converged.cpu().to(torch.uint8),
            "relative_gradient": self.relative_gradient.cpu(),
            **{f"buffer-{place}": value.cpu() for place, value in enumerate(self.buffers.values())},
        }
        write_folder(path, meta, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str], expect: Task | None = None) -> Self:
        """A response that `save` wrote; with `expect`, refused unless it belongs to that task."""
        meta, arrays = read_folder(path, "response")
        if expect is not None:
            require_fingerprint(meta, expect, path)
        try:
            return cls(
                parameters=arrays["parameters"].load(),
                shift=arrays["shift"].load(),
                converged=arrays["converged"].load().bool(),
                relative_gradient=arrays["relative_gradient"].load(),
                result=tuple(meta["result"]),
                removals=tuple(tuple(group) for group in meta["removals"]),
                notes=tuple(meta["notes"]),
                buffers={name: arrays[f"buffer-{place}"].load() for place, name in enumerate(meta["buffers"])},
                task=expect,
                **{name: meta[name] for name in _PLAIN},
            )
        except KeyError as missing:
            raise DamagedResult(f"The response at {path} lacks {missing}; compute and save it again.") from missing


_PLAIN = ("objective", "settings", "epsilon", "batch_order", "seconds", "fingerprint", "versions")


def stacked_outputs(task: Task, flat: Float[Tensor, "R d"], buffers: Stacked, inputs: Any) -> Tensor:
    """Outputs (R, n, *out) at every row of `flat`, a few replicas at a time."""
    passes, parts = Stack.of(task), []
    count = len(tensors_of(inputs)[0][1])
    with task.evaluating(), torch.no_grad(), quiet_batching():
        size = max(2, int(0.2 * Budget(task.device).available()) // max(1, task.row_bytes * count))
        for start in range(0, len(flat), size):
            some = slice(start, start + size)
            own = {name: value[some].to(task.device) for name, value in buffers.items()}
            parts.append(passes.outputs(stack(task, len(flat[some]), flat[some]), own, inputs, shared=True))
    return torch.cat(parts)


@torch.inference_mode(False)
def respond(
    task: Task,
    objective: Objective,
    remove: Any,
    *,
    epsilon: float | None = None,
    batch_order: BatchOrder = "shared",
    exact_removal: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Response:
    """Where each removal takes the parameters, all removals trained together.

    remove: groups of training rows such as [[3], [5, 9]].
    epsilon: by how much they are downweighted; None is 1/N, removal.
    batch_order: "shared" by all removals, or "independent", a random one for each removal (from epoch K on: the first K
        epochs of a cold start are always in the base run's order). What two independent orders alone change is then
        part of the response.
    exact_removal: take the removed rows' exact term off at every step, instead of their weight in their batch.
    checkpoint: a folder that a stopped run goes on from, with the same result.
    """
    with reporting(progress):
        warn_of_mode(task)
        _check(objective, batch_order)
        removals = check_removals(as_groups(remove, "remove"), len(task))
        step = 1 / len(task) if epsilon is None else number(epsilon, "epsilon")
        folder = None if checkpoint is None else Path(checkpoint)
        started = time.monotonic()
        if isinstance(objective.optimizer, GaussNewton):
            made = _to_tolerance(task, objective, removals, step, objective.optimizer, memory_limit, folder)
        else:
            made = _by_recipe(task, objective, removals, step, batch_order, exact_removal, memory_limit, folder)
        made = replace(made, seconds=time.monotonic() - started, task=task)
        if isinstance(objective.optimizer, GaussNewton) and not bool(made.converged.all()):
            reasons = sorted({words for words, ok in zip(made.result, made.converged.tolist(), strict=True) if not ok})
            warn(
                f"{int((~made.converged).sum())} of {len(removals)} responses are no minimum and not ground truth "
                f"({'; '.join(reasons[:3])})."
            )
        return made


def _check(objective: Any, batch_order: str) -> None:
    if isinstance(objective, type) or not isinstance(objective, Objective):
        raise InvalidType(
            f"objective is {objective!r}; expected one such as dw.WarmStart() or dw.ProximalBregman(damping=1e-3)."
        )
    if batch_order not in ("shared", "independent"):
        raise InvalidInput(f'batch_order is "shared" or "independent", got {batch_order!r}.')


# -- to a tolerance -------------------------------------------------------------------------------


def _to_tolerance(
    task: Task,
    objective: Objective,
    removals: list[list[int]],
    epsilon: float,
    settings: GaussNewton,
    memory_limit: int | str | None,
    folder: Path | None,
) -> Response:
    if folder is not None and folder.exists():
        held = Response.load(folder, expect=task)
        if (held.settings, held.removals, held.epsilon) != (repr(objective), tuple(map(tuple, removals)), epsilon):
            raise ForeignResult(
                f"The checkpoint at {folder} is of {held.settings} with other removals, epsilon or settings than "
                f"{objective!r} here. Name another folder, or delete this one to start again."
            )
        return held
    if objective.fidelity == "quadratic":
        shift = parameter_shift(task, removals, damping=objective.damping, epsilon=epsilon, memory_limit=memory_limit)
        relative = _relative_gradient(task, objective, removals, epsilon, shift, {})
        still = _without_gradient(task, removals, epsilon)
        words = tuple(Ending.ZERO.value if none else "solved, as an influence system is" for none in still)
        tolerance = settings.rtol or (1e-6 if task.dtype == torch.float64 else 1e-3)
        converged = relative <= tolerance
    else:
        answer = proximal_bregman(task, objective.damping, removals, epsilon, settings, parse_bytes(memory_limit))
        shift, relative, words = answer.shift, answer.relative_gradient, answer.words
        converged = torch.tensor([ending.ok for ending in answer.endings])
    made = _response(task, objective, removals, epsilon, "none", shift, converged, words, relative, {}, ())
    if folder is not None:
        made.save(folder)
    return made


# -- by the recipe --------------------------------------------------------------------------------


def _by_recipe(
    task: Task,
    objective: Objective,
    removals: list[list[int]],
    epsilon: float,
    batch_order: BatchOrder,
    exact: bool,
    memory_limit: int | str | None,
    folder: Path | None,
) -> Response:
    recipe, initial = recipe_of(task, objective)
    cold = objective.start == "initial"
    statistics = cold and bool(learning_modules(task, statistics=True, dropout=False))
    if exact and statistics:
        raise InvalidInput(
            "exact_removal takes a row's own term off, outside its batch; with batch norm in training that term "
            "depends on the batch. Leave exact_removal out: the row then stays in its batch, at no weight."
        )
    epochs = range(0 if cold else recipe.epochs, recipe.epochs + recipe.more_epochs)
    own = recipe.epochs if batch_order == "independent" else None
    scale = 1.0 if objective.fidelity == "cost" else RATE_OF_BREGMAN
    start = initial if cold else task.params | task.buffers
    problem = Problem(task, objective.fidelity, objective.damping, removals, epsilon, exact)
    run = Run(problem, recipe, epochs, own, scale, statistics)
    ended = in_groups(run, start, objective.name, memory_limit, folder)
    flat = unstack(ended.leaves).to(task.device)
    shift = flat if problem.relative else flat - task.flat
    notes = []
    if isinstance(objective, TwoStage):
        # With the rows, in each removal's own order where there is one, else once for all.
        whole = replace(problem, removals=removals if own is not None else removals[:1], epsilon=0.0)
        kept = in_groups(replace(run, problem=whole), start, "two_stage_with", memory_limit, folder)
        shift = shift - (unstack(kept.leaves).to(task.device) - task.flat)
    if cold is False and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in task.model.modules()):
        notes.append(
            "Batch norm keeps the statistics of θˢ here, and learns its own in a cold start: the warm-start gap "
            "includes that change of mode."
        )
    buffers = {name: value.to(task.device) for name, value in ended.buffers.items()}
    relative = _relative_gradient(task, objective, removals, epsilon, shift, buffers)
    tolerance = 1e-6 if task.dtype == torch.float64 else 1e-3
    # Without a gradient of the removal the relative one says nothing of where the recipe ended.
    still = _without_gradient(task, removals, epsilon)
    converged = (relative <= tolerance) & ended.finite & ~torch.tensor(still)
    words = tuple(
        _words(recipe, len(epochs), bool(done), bool(finite)) + ("; the removed rows have no gradient" if none else "")
        for done, finite, none in zip(converged, ended.finite, still, strict=True)
    )
    return _response(task, objective, removals, epsilon, batch_order, shift, converged, words, relative, buffers, notes)


def _words(recipe: Recipe, epochs: int, done: bool, finite: bool) -> str:
    if not finite:
        return "training diverged: parameters are NaN or infinite"
    unit = "iterations" if recipe.optimizer == "lbfgs" else "epochs"
    if done:
        return f"converged: the relative gradient reached the tolerance within its {epochs} {unit}"
    return f"trained for its {epochs} {unit}, as the recipe says, and not to a minimum"


def recipe_of(task: Task, objective: Objective) -> tuple[Recipe, dict[str, Tensor]]:
    origin = task.origin
    if origin is None or not isinstance(origin.recipe, Recipe):
        raise InvalidInput(
            f"{objective.name} trains by the recipe that led to θˢ, and this task has none. Train it with "
            "dw.train(task, dw.Recipe(…)), or name the recipe of a model that you trained: task.with_recipe(recipe). "
            "dw.ProximalBregman and dw.LinearizedProximalBregman need no recipe."
        )
    if objective.start == "initial" and origin.state is None:
        raise InvalidInput(
            "A cold start begins at θ⁰, which this task does not know. Train it with dw.train(task, recipe), or name "
            "θ⁰: task.with_recipe(recipe, initial=state_dict)."
        )
    return origin.recipe, origin.state or {}


def in_groups(run: Run, start: Stacked, what: str, memory_limit: int | str | None, folder: Path | None) -> Trained:
    """The run for all replicas, in groups that fit in memory; each group has a checkpoint of its own."""
    task, recipe = run.problem.task, run.recipe
    passes = Stack.of(task)
    budget = Budget(task.device, parse_bytes(memory_limit))
    count = len(run.problem.removals)
    ended = []
    for group in groups_that_fit(count, replica_bytes(run, task), budget):
        some = run.of(group)
        identity = {
            "what": what,
            "task": task.fingerprint(),
            "recipe": recipe.settings(),
            "removals": [list(entry) for entry in some.problem.removals],
            "epsilon": some.problem.epsilon,
            "damping": some.problem.damping,
            "exact": some.problem.exact,
            "own_order": some.own_order,
            **({} if some.subsets is None else {"subsets": _digest({"": some.subsets})}),
            "start": _digest(start),
        }
        path = None if folder is None else folder / f"{what}-{group.start:05}-{group.stop:05}"
        label = f"Epochs of {what.replace('_', ' ')}"
        ended.append(run_replicas(some, initial=start, passes=passes, what=label, keep=Keep(path, identity)))
    joined = [{name: torch.cat([e[name] for e in each]) for name in each[0]} for each in _columns(ended)]
    return Trained(joined[0], joined[1], torch.cat([each.finite for each in ended]))


def _digest(start: Stacked) -> str:
    """What identifies the parameters and buffers that a run starts at."""
    digest = hashlib.sha256()
    for name, value in start.items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _columns(ended: Sequence[Trained]) -> tuple[list[Stacked], list[Stacked]]:
    return [each.leaves for each in ended], [each.buffers for each in ended]


# -- both -----------------------------------------------------------------------------------------


def _response(
    task: Task,
    objective: Objective,
    removals: list[list[int]],
    epsilon: float,
    batch_order: str,
    shift: Tensor,
    converged: Tensor,
    words: Sequence[str],
    relative: Tensor,
    buffers: Stacked,
    notes: Sequence[str],
) -> Response:
    return Response(
        parameters=task.flat + shift,
        shift=shift,
        converged=converged.cpu(),
        result=tuple(words),
        relative_gradient=relative.cpu(),
        removals=tuple(tuple(group) for group in removals),
        objective=objective.name,
        settings=repr(objective),
        epsilon=epsilon,
        batch_order=batch_order,
        seconds=0.0,
        fingerprint=task.fingerprint(),
        notes=(*task.notes, *notes),
        buffers=buffers,
    )


def _removal_gradients(task: Task, removals: list[list[int]], epsilon: float) -> Float[Tensor, " R"]:
    """ε ‖Σ_S ∇L(z, θˢ)‖."""
    return abs(epsilon) * norms(training(task, removals).vectors(RowGradients(task), 256))


def _without_gradient(task: Task, removals: list[list[int]], epsilon: float) -> list[bool]:
    """Which removals have no gradient, so that they move nothing."""
    return (_removal_gradients(task, removals, epsilon) == 0).tolist()


def _relative_gradient(
    task: Task,
    objective: Objective,
    removals: list[list[int]],
    epsilon: float,
    shift: Float[Tensor, "R d"],
    buffers: Stacked,
) -> Float[Tensor, " R"]:
    """‖∇ objective(θ)‖ over ε ‖Σ_S ∇L(z, θˢ)‖, 0 where the removal has no gradient; in eval mode."""
    size = _removal_gradients(task, removals, epsilon)
    problem = Problem(task, objective.fidelity, objective.damping, removals, epsilon)
    passes = Stack.of(task)
    short = max(0, passes.at_least - len(removals))
    if short:
        problem = replace(problem, removals=[*removals, *[()] * short])
        shift = torch.cat([shift, shift[:1].expand(short, -1)])
        buffers = {name: torch.cat([value, value[:1]]) for name, value in buffers.items()}
    leaves = stack(task, len(shift), shift if problem.relative else task.flat + shift)
    rows = int(0.2 * Budget(task.device).available()) // max(1, task.row_bytes * len(shift))
    with task.evaluating():
        gradient = Gradient(problem, passes).whole(leaves, max(1, min(len(task), rows)), buffers)
    left = norms(unstack(gradient))[: len(size)]
    return torch.where(size > 0, left / torch.where(size > 0, size, 1.0), 0.0).cpu()
