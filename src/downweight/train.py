"""The one training loop: many replicas of a task at once, each with a removal of its own; and the base run."""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from downweight.errors import DamagedResult, ForeignResult, InvalidInput, InvalidType, NonFinite, warn
from downweight.linearization import unflatten
from downweight.losses import AutogradLoss
from downweight.memory import Budget
from downweight.objectives import Fidelity
from downweight.progress import reporting, track
from downweight.recipe import Recipe
from downweight.rows import Inputs, TensorRows, chunks, map_tensors, tensors_of
from downweight.scores import versions
from downweight.shapes import Bool, Float, Int
from downweight.stack import Stack, Stacked, learning_modules, part, read, unstack
from downweight.store import read_folder, write_folder
from downweight.task import Origin, Task

_STREAMS = 4  # on a GPU, replicas that pass one by one share it; more gained nothing (measured before starting)
_CHECKPOINT_SECONDS = 30.0


@dataclass(frozen=True, eq=False)
class Problem:
    """fidelity − ε Σ_S removal + (λ/2) ‖θ − θˢ‖² for R replicas: what is optimised, and nothing of how.

    removals: the rows S of each replica, which may be none. exact: the removed rows' term at every step, instead of a
    smaller weight on the row in its batch.
    """

    task: Task  # at θˢ
    fidelity: Fidelity
    damping: float
    removals: Sequence[Sequence[int]]
    epsilon: float
    exact: bool = False

    @property
    def relative(self) -> bool:
        """Whether the replicas hold δ = θ − θˢ: a step far below the spacing of θ is then not lost."""
        return self.fidelity != "cost"


class Gradient:
    """The gradient of a problem on any rows, for R replicas at once."""

    def __init__(self, problem: Problem, passes: Stack) -> None:
        task = problem.task
        self.problem, self.task, self.passes = problem, task, passes
        count = len(problem.removals)
        self.reference = task.params
        self.removed: Bool[Tensor, "R N"] = torch.zeros(count, len(task), dtype=torch.bool)
        for place, group in enumerate(problem.removals):
            self.removed[place, list(group)] = True
        self.removed = self.removed.to(task.device)
        self.longest = max((len(group) for group in problem.removals), default=0)
        # For `exact`: the removed rows of each replica, filled up with its first (or row 0) at no weight.
        own = torch.zeros(count, self.longest, dtype=torch.long)
        real = torch.zeros(count, self.longest, dtype=torch.float64)
        for place, group in enumerate(problem.removals):
            own[place, : len(group)] = torch.tensor(list(group), dtype=torch.long)
            real[place, : len(group)] = 1.0
        self.own, self.real = own.to(task.device), real.to(task.device)
        several = task.device.type == "cuda" and len(passes.blocks(count)) > 1
        self.streams = [torch.cuda.Stream(task.device) for _ in range(min(_STREAMS, count))] if several else []

    def positions(self, leaves: Stacked) -> Stacked:
        """θ of every replica."""
        if not self.problem.relative:
            return leaves
        return {name: self.reference[name] + value for name, value in leaves.items()}

    def batch(self, leaves: Stacked, buffers: Stacked, index: Int[Tensor, "*R B"]) -> Stacked:
        """The gradient as one batch estimates it: divided by the batch's own length."""
        count, size = len(self.removed), index.shape[-1]
        if not self.problem.exact:
            fidelity = torch.full((), 1 / size, dtype=torch.float64, device=self.task.device)
            scale = self.problem.epsilon * len(self.task) / size
            hit = self.removed[:, index] if index.dim() == 1 else self.removed.gather(1, index)
            return self._sum(leaves, buffers, index, fidelity.expand(count, size), scale * hit.double())
        if index.dim() == 1:
            index = index.expand(count, size)
        index = torch.cat([index, self.own], 1)
        fidelity = torch.zeros(index.shape, dtype=torch.float64, device=self.task.device)
        fidelity[:, :size] = 1 / size
        removal = torch.zeros_like(fidelity)
        removal[:, size:] = self.problem.epsilon * self.real
        return self._sum(leaves, buffers, index, fidelity, removal)

    def whole(self, leaves: Stacked, size: int, buffers: Stacked | None = None) -> Stacked:
        """The gradient itself, over all rows, `size` of them at a time."""
        count, rows = len(self.removed), len(self.task)
        total: Stacked | None = None
        for index in chunks(torch.arange(rows), size):
            index = index.to(self.task.device)
            fidelity = torch.full((count, len(index)), 1 / rows, dtype=torch.float64, device=self.task.device)
            removal = self.problem.epsilon * self.removed[:, index].double()
            share = len(index) / rows  # of the penalties, which every part brings
            some = self._sum(leaves, buffers or {}, index, fidelity, removal, penalty=share)
            total = some if total is None else {name: total[name] + value for name, value in some.items()}
        assert total is not None
        return total

    def value(self, leaves: Stacked) -> Float[Tensor, ""]:
        """The problem's value for one replica, float64, by the same sums."""
        (removed,), task = self.removed, self.task
        positions, total = self.positions(leaves), torch.zeros((), dtype=torch.float64, device=self.task.device)
        with torch.no_grad():
            for index in chunks(torch.arange(len(task)), 4096):
                inputs, targets = task.rows.read(index)
                weights = task.weights_of(index)
                outputs = self.passes.outputs(positions, {}, inputs, shared=True)[0]
                losses = task.losses(outputs, targets)
                held = losses
                if self.problem.fidelity == "bregman":
                    held = task.divergences(outputs, task.forward(self.reference, inputs), targets)
                terms = held / len(task) - self.problem.epsilon * removed[index.to(removed.device)].double() * losses
                total += (terms if weights is None else weights * terms).sum()
            moved = [positions[name] - value for name, value in self.reference.items()]
            penalised = moved if self.problem.relative else list(positions.values())
            for l2, parts in ((task.l2, penalised), (self.problem.damping, moved)):
                total += 0.5 * l2 * torch.stack([value.double().square().sum() for value in parts]).sum()
        return total

    def _sum(
        self,
        leaves: Stacked,
        buffers: Stacked,
        index: Tensor,
        fidelity: Float[Tensor, "R B"],
        removal: Float[Tensor, "R B"],
        penalty: float = 1.0,
    ) -> Stacked:
        """Σ over rows of fidelity · ∂(fidelity term) − removal · ∂(removal term), and the penalties."""
        inputs, targets = read(self.task.rows, index)
        shared = index.dim() == 1
        weights = self.task.weights_of(index)
        if weights is not None:
            fidelity, removal = fidelity * weights, removal * weights
        positions = {name: value.detach().requires_grad_() for name, value in self.positions(leaves).items()}
        if self.problem.fidelity == "quadratic":
            gradients = self._linear(leaves, inputs, targets, fidelity, removal, shared)
        else:
            parts, drawn = [], torch.random.get_rng_state()
            for block in _on_streams(self.passes.blocks(len(self.removed)), self.streams):
                torch.random.set_rng_state(drawn)  # dropout's masks are those that the replica draws alone
                own = part(positions, block), part(buffers, block)
                parts.append(self._block(*own, inputs, targets, fidelity, removal, block, shared))
            alone = len(parts) == 1
            gradients = parts[0] if alone else {name: torch.cat([some[name] for some in parts]) for name in leaves}
        return self._with_penalties(gradients, leaves, penalty)

    def _block(
        self,
        positions: Stacked,
        buffers: Stacked,
        inputs: Inputs,
        targets: Tensor,
        fidelity: Tensor,
        removal: Tensor,
        block: slice,
        shared: bool,
    ) -> Stacked:
        if not shared:
            inputs, targets = map_tensors(lambda tensor: tensor[block], inputs), targets[block]
        outputs = self.passes.outputs(positions, buffers, inputs, shared=shared)
        reference = None
        if self.problem.fidelity == "bregman":
            # θˢ rides along through the same kernels, so that the difference at θ = θˢ is exactly zero.
            count = len(outputs)
            still = {name: value.expand(count, *value.shape).contiguous() for name, value in self.reference.items()}
            with torch.no_grad():
                reference = self.passes.outputs(still, buffers, inputs, shared=shared)
        seeds = self._cotangent(outputs.detach(), reference, targets, fidelity[block], removal[block], shared)
        grads = torch.autograd.grad(outputs, list(positions.values()), seeds.to(outputs.dtype), allow_unused=True)
        return {
            name: torch.zeros_like(value) if grad is None else grad
            for (name, value), grad in zip(positions.items(), grads, strict=True)
        }

    def _cotangent(
        self,
        outputs: Tensor,
        reference: Tensor | None,
        targets: Tensor,
        fidelity: Tensor,
        removal: Tensor,
        shared: bool,
    ) -> Tensor:
        """∂/∂y of every replica's rows, float64, (R, B, *out)."""
        shape, task = outputs.shape, self.task
        if shared:
            targets = targets.expand(shape[0], *targets.shape)
        y, t = outputs.flatten(0, 1).double(), targets.flatten(0, 1)
        slope = task.output_gradient(y, t)
        held = slope if reference is None else task.output_change(y, reference.flatten(0, 1).double(), t)
        tail = [1] * (y.dim() - 1)
        seeds = fidelity.reshape(-1, *tail) * held - removal.reshape(-1, *tail) * slope
        return seeds.reshape(shape)

    def _linear(
        self, leaves: Stacked, inputs: Inputs, targets: Tensor, fidelity: Tensor, removal: Tensor, shared: bool
    ) -> Stacked:
        """Jᵀ(fidelity · H J δ − removal · ∂L/∂y) at θˢ."""
        task, like = self.task, list(self.reference.values())
        moved = unstack(leaves)
        groups = [slice(0, len(moved))] if shared else [slice(place, place + 1) for place in range(len(moved))]
        pulled = []
        for group in groups:
            own = inputs if shared else map_tensors(lambda tensor, at=group.start: tensor[at], inputs)
            t = targets if shared else targets[group.start]
            at = task.linearize(own)
            curved = task.output_product(at.outputs, t, at.push(moved[group]))
            slope = task.output_gradient(at.outputs, t).unsqueeze(0)
            tail = [1] * (slope.dim() - 2)
            a, m = (each[group].reshape(*each[group].shape, *tail) for each in (fidelity, removal))
            pulled.append(at.pull(a * curved - m * slope))
        return dict(zip(self.reference, unflatten(torch.cat(pulled), like), strict=True))

    def _with_penalties(self, gradients: Stacked, leaves: Stacked, share: float) -> Stacked:
        l2, damping = self.task.l2 * share, self.problem.damping * share
        if self.problem.relative:
            if l2 + damping:
                gradients = {name: value.add(leaves[name], alpha=l2 + damping) for name, value in gradients.items()}
            return gradients
        for name, value in gradients.items():
            if l2:
                value = value.add(leaves[name], alpha=l2)
            if damping:
                value = value.add(leaves[name] - self.reference[name], alpha=damping)
            gradients[name] = value
        return gradients


def _on_streams(blocks: list[slice], streams: list[torch.cuda.Stream]) -> Iterator[slice]:
    """Each block on one of a few CUDA streams in turn, so that small kernels of several replicas run side by side."""
    if not streams:
        yield from blocks
        return
    main = torch.cuda.current_stream(streams[0].device)
    for stream in streams:
        stream.wait_stream(main)
    for place, block in enumerate(blocks):
        with torch.cuda.stream(streams[place % len(streams)]):
            yield block
    for stream in streams:
        main.wait_stream(stream)


# -- the loop -------------------------------------------------------------------------------------


class Steps:
    """Optimiser steps on stacked leaves; on a GPU each kind of batch is captured once and replayed."""

    def __init__(self, gradient: Gradient, recipe: Recipe, leaves: Stacked, buffers: Stacked) -> None:
        self.gradient, self.leaves, self.buffers = gradient, leaves, buffers
        task = gradient.task
        rows = task.rows
        held = isinstance(rows, TensorRows) and all(
            tensor.device.type == "cuda" for _, tensor in [*tensors_of(rows.inputs), ("targets", rows.targets)]
        )
        closed = not isinstance(task.loss, AutogradLoss) and gradient.problem.fidelity != "quadratic"
        self.capturing = held and closed and not recipe.dropout
        # A tensor where a graph reads the rate at every replay.
        self.rate = torch.tensor(recipe.lr, device=task.device) if self.capturing else recipe.lr
        self.optimizer = _optimizer(recipe, list(leaves.values()), self.rate, self.capturing)
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.laid = False  # whether the leaves lie as their gradients come

    def set_rate(self, rate: float) -> None:
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def __call__(self, index: Int[Tensor, "*R B"]) -> None:
        if not self.capturing:
            self._step(index)
            return
        shape = tuple(index.shape)
        if shape in self.graphs:
            graph, place = self.graphs[shape]
            place.copy_(index)
            graph.replay()
        elif shape not in self.seen:  # the first is a step like any other, which warms the libraries up
            self.seen.add(shape)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(index)
            torch.cuda.current_stream().wait_stream(side)
        else:
            place, graph = index.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(place)
            self.graphs[shape] = (graph, place)
            graph.replay()

    def _step(self, index: Tensor) -> None:
        gradients = self.gradient.batch(self.leaves, self.buffers, index)
        for name, leaf in self.leaves.items():
            grad = gradients[name]
            if self.capturing and grad.stride() != leaf.stride():
                if self.laid:  # graphs know where the leaf lies
                    grad = torch.empty_like(leaf).copy_(grad)
                else:
                    self._lay(leaf, like=grad)
            leaf.grad = grad
        self.laid = True
        self.optimizer.step()

    def _lay(self, leaf: Tensor, like: Tensor) -> None:
        """Lay a leaf and its momenta in memory as its gradient comes: transposed for a layer's weight, never copied.

        At the first step, before anything is captured; a matrix product takes either way.
        """
        leaf.data = torch.empty_like(like).copy_(leaf.data)
        held = self.optimizer.state.get(leaf, {})
        for key, value in held.items():
            if isinstance(value, Tensor) and value.shape == leaf.shape:
                held[key] = torch.empty_like(like).copy_(value)


def _optimizer(recipe: Recipe, leaves: list[Tensor], rate: Any, capturing: bool) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        settings: dict[str, Any] = {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
        return torch.optim.SGD(leaves, lr=rate, fused=capturing or None, **settings)
    settings = {"betas": recipe.betas, "eps": recipe.eps, "capturable": capturing}
    if recipe.optimizer == "adam":
        return torch.optim.Adam(leaves, lr=rate, **settings)
    return torch.optim.AdamW(leaves, lr=rate, weight_decay=recipe.weight_decay, **settings)


@dataclass(frozen=True, eq=False)
class Trained:
    """Where R replicas ended: parameters (or, for a relative problem, δ), the buffers that were learned."""

    leaves: Stacked
    buffers: Stacked
    finite: Bool[Tensor, " R"]


@dataclass(frozen=True, eq=False)
class Run:
    """Which epochs a problem is trained for, in which order, and at which multiple of the recipe's rate.

    own_order: from this epoch on each removal has a batch order of its own; None never.
    statistics: batch norm learns (and uses) the statistics of its batches; else those of the start stay.
    subsets: the rows that each replica is trained on, as if there were no others, in an order of its own.
    """

    problem: Problem
    recipe: Recipe
    epochs: range
    own_order: int | None = None
    rate_scale: float = 1.0
    statistics: bool = False
    subsets: Int[Tensor, "R n"] | None = None

    @property
    def rows(self) -> int:
        """Rows in an epoch."""
        return len(self.problem.task) if self.subsets is None else self.subsets.shape[1]

    def order(self, epoch: int) -> Int[Tensor, "*R N"]:
        if self.subsets is not None:
            orders = [self.recipe.order(self.rows, epoch, tuple(subset)) for subset in self.subsets.tolist()]
            return self.subsets.gather(1, torch.stack(orders))
        if self.own_order is None or epoch < self.own_order:
            return self.recipe.order(self.rows, epoch)
        return torch.stack([self.recipe.order(self.rows, epoch, tuple(group)) for group in self.problem.removals])

    def of(self, replicas: slice) -> "Run":
        subsets = None if self.subsets is None else self.subsets[replicas]
        return replace(self, problem=replace(self.problem, removals=self.problem.removals[replicas]), subsets=subsets)

    def alone(self, place: int) -> Problem:
        """The problem of one replica over all rows; those outside its subset have no weight."""
        problem = self.of(slice(place, place + 1)).problem
        if self.subsets is None:
            return problem
        task = problem.task
        weights = torch.zeros(len(task), dtype=torch.float64, device=task.device)
        weights[self.subsets[place].to(task.device)] = len(task) / self.rows
        return replace(problem, task=task.with_weights(weights if task.weights is None else weights * task.weights))


def optimise(run: Run, start: Stacked, buffers: Stacked, passes: Stack, what: str, keep: "Keep") -> Trained:
    """Train R replicas from `start` (δ = 0 for a relative problem) over the epochs of the run."""
    problem, recipe, task = run.problem, run.recipe, run.problem.task
    leaves = {name: torch.zeros_like(value) if problem.relative else value.clone() for name, value in start.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    buffers = {name: value.clone() for name, value in buffers.items()}
    learning = learning_modules(task, statistics=run.statistics, dropout=recipe.dropout)
    gradient = Gradient(problem, passes)
    with task.evaluating(learning=learning):
        if recipe.optimizer == "lbfgs":
            _lbfgs(run, gradient, leaves, what)
        else:
            _epochs(run, gradient, leaves, buffers, what, keep)
    ended = {name: value.detach() for name, value in leaves.items()}
    finite = torch.stack([value.isfinite().flatten(1).all(1) for value in ended.values()]).all(0)
    return Trained(ended, buffers, finite.cpu())


def _epochs(run: Run, gradient: Gradient, leaves: Stacked, buffers: Stacked, what: str, keep: "Keep") -> None:
    recipe, task = run.recipe, run.problem.task
    steps = Steps(gradient, recipe, leaves, buffers)
    size = recipe.batch_rows(run.rows)
    first = keep.resume(leaves, buffers, steps.optimizer, run.epochs.start)
    for epoch in track(range(first, run.epochs.stop), what):
        steps.set_rate(recipe.rate(epoch) * run.rate_scale)
        order = run.order(epoch).to(task.device)
        with _seeded(recipe, epoch, task.device):
            for index in order.split(size, dim=-1):
                steps(index)
        if epoch == run.epochs.start or (epoch - run.epochs.start) % 50 == 49:
            require_finite(leaves, recipe, epoch)
        keep.epoch(leaves, buffers, steps.optimizer, epoch + 1)


@contextlib.contextmanager
def _seeded(recipe: Recipe, epoch: int, device: torch.device) -> Iterator[None]:
    """Dropout's own random numbers, a function of seed and epoch; the user's generators are left as they were."""
    if not recipe.dropout:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed((recipe.seed << 32) + epoch)
        yield


def require_finite(leaves: Stacked, recipe: Recipe, epoch: int) -> None:
    """Raise when no replica has finite parameters left: hours of NaN help nobody."""
    finite = torch.stack([value.detach().isfinite().flatten(1).all(1) for value in leaves.values()]).all(0)
    if not bool(finite.any()):
        raise NonFinite(
            f"Training diverged: after epoch {epoch} every parameter vector holds NaN or infinity, at lr = "
            f"{recipe.rate(epoch):g}. Lower the recipe's lr, and look for very large values in the data."
        )


def _lbfgs(run: Run, gradient: Gradient, leaves: Stacked, what: str) -> None:
    """L-BFGS for one replica after the other, on all rows, with the value of the problem beside its gradient."""
    task, recipe = gradient.task, run.recipe
    count = len(run.problem.removals)
    if run.problem.fidelity == "quadratic":
        raise InvalidInput("A linearised response is not optimised by L-BFGS: use dw.GaussNewton(), which is exact.")
    for place in track(range(count), what):
        one = Gradient(run.alone(place), Stack(task, False))
        own = part(leaves, slice(place, place + 1))
        variables = [value.detach().clone().requires_grad_() for value in own.values()]
        optimizer = torch.optim.LBFGS(
            variables,
            lr=recipe.lr * run.rate_scale,
            max_iter=len(run.epochs),
            max_eval=25 * len(run.epochs),  # as many as its line search may take
            history_size=20,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure(one: Gradient = one, variables: list[Tensor] = variables) -> Tensor:
            at = dict(zip(leaves, variables, strict=True))
            gradients = one.whole(at, len(task))
            for variable, name in zip(variables, leaves, strict=True):
                variable.grad = gradients[name]
            return one.value(at)

        optimizer.step(closure)
        with torch.no_grad():
            for variable, value in zip(variables, own.values(), strict=True):
                value.copy_(variable)


# -- what is kept of a run that is not over -------------------------------------------------------


class Keep:
    """A run's state on disk, written now and then and at its end; or, without a folder, nothing at all."""

    def __init__(self, path: Path | None, identity: dict[str, Any], every: float = _CHECKPOINT_SECONDS) -> None:
        self.path, self.identity, self.every = path, identity, every
        self.written = time.monotonic()

    def resume(self, leaves: Stacked, buffers: Stacked, optimizer: torch.optim.Optimizer, start: int) -> int:
        """The epoch to go on from; the tensors are filled with what they held then."""
        if self.path is None or not self.path.exists():
            return start
        meta, arrays = self._read()
        held = {name: array.load() for name, array in arrays.items()}
        with torch.no_grad():
            for kind, tensors in (("leaf", leaves), ("buffer", buffers)):
                for place, value in enumerate(tensors.values()):
                    value.copy_(held[f"{kind}-{place}"].to(value.device))
        groups = optimizer.state_dict()["param_groups"]
        state: dict[int, dict[str, Any]] = {}
        for name, value in held.items():
            if name.startswith("state-"):
                _, place, key = name.split("-", 2)
                like = list(leaves.values())[int(place)]
                # A count of steps came as a number of its own; it stays where the optimiser made it.
                scalar = key == "step"
                state.setdefault(int(place), {})[key] = value[0] if scalar else value.to(like.device)
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return int(meta["epoch"])

    def epoch(self, leaves: Stacked, buffers: Stacked, optimizer: torch.optim.Optimizer, following: int) -> None:
        if self.path is not None and time.monotonic() - self.written >= self.every:
            self._write(leaves, buffers, following, optimizer)

    def finished(self) -> Trained | None:
        """The end of this run, if it was reached before."""
        if self.path is None or not self.path.exists():
            return None
        meta, arrays = self._read()
        if not meta["finished"]:
            return None
        parts: dict[str, Stacked] = {"leaf": {}, "buffer": {}}
        for kind, names in (("leaf", meta["leaves"]), ("buffer", meta["buffers"])):
            for place, name in enumerate(names):
                parts[kind][name] = arrays[f"{kind}-{place}"].load()
        return Trained(parts["leaf"], parts["buffer"], arrays["finite"].load().bool())

    def finish(self, ended: Trained) -> None:
        if self.path is not None:
            self._write(ended.leaves, ended.buffers, -1, None, ended.finite)

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self.path is not None
        meta, arrays = read_folder(self.path, "checkpoint")
        try:
            found = meta["identity"]
            different = [name for name, value in self.identity.items() if found.get(name) != value]
        except (KeyError, AttributeError) as error:
            raise DamagedResult(
                f"{self.path / 'meta.json'} does not say which run it is of; it was changed."
            ) from error
        if different:
            raise ForeignResult(
                f"The checkpoint at {self.path} is of another run: its {', '.join(different)} differ from what was "
                "asked for. Name another folder, or delete this one to start again."
            )
        return meta, arrays

    def _write(
        self,
        leaves: Stacked,
        buffers: Stacked,
        epoch: int,
        optimizer: torch.optim.Optimizer | None,
        finite: Tensor | None = None,
    ) -> None:
        assert self.path is not None
        arrays: dict[str, Tensor] = {}
        for kind, tensors in (("leaf", leaves), ("buffer", buffers)):
            arrays |= {f"{kind}-{place}": value.detach() for place, value in enumerate(tensors.values())}
        if optimizer is not None:
            for place, entries in optimizer.state_dict()["state"].items():
                for key, value in entries.items():
                    if isinstance(value, Tensor):
                        arrays[f"state-{place}-{key}"] = value.detach().reshape(1) if value.dim() == 0 else value
        if finite is not None:
            arrays["finite"] = finite.to(torch.uint8)
        meta = {
            "kind": "checkpoint",
            "identity": self.identity,
            "epoch": epoch,
            "finished": finite is not None,
            "leaves": list(leaves),
            "buffers": list(buffers),
            "versions": versions(),
        }
        write_folder(self.path, meta, arrays)
        self.written = time.monotonic()


# -- the base run ---------------------------------------------------------------------------------


@torch.inference_mode(False)
def train(
    task: Task,
    recipe: Recipe,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Task:
    """The task at θˢ, trained by the recipe from the parameters that the task has: a new task, which remembers both.

    The model itself is left as it was; `task.state_dict()` of the answer is what `model.load_state_dict` takes.
    checkpoint: a folder that a stopped run goes on from, with the same result. A finished run is read, not run again.
    """
    if not isinstance(recipe, Recipe):
        raise InvalidType(f"recipe is a {type(recipe).__name__}; expected a dw.Recipe(lr=…, epochs=…).")
    with reporting(progress):
        state = {name: value.clone() for name, value in (task.params | task.buffers).items()}
        start = task.with_values(state)
        identity = {"what": "train", "task": start.fingerprint(), "recipe": recipe.settings()}
        keep = Keep(None if checkpoint is None else Path(checkpoint), identity)
        run = Run(Problem(start, "cost", 0.0, [()], 0.0), recipe, range(recipe.epochs), statistics=True)
        before = _cost(start)
        ended = run_replicas(run, initial=state, passes=Stack.of(start), what="Epochs of training", keep=keep)
        if not bool(ended.finite[0]):
            raise NonFinite(
                f"Training diverged: the parameters hold NaN or infinity after {recipe.epochs} epochs at lr = "
                f"{recipe.lr:g}. Lower it."
            )
        values = {name: value[0] for name, value in (ended.leaves | ended.buffers).items()}
        trained = start.with_values(values)
        after = _cost(trained)
        if not math.isfinite(after):
            raise NonFinite(
                f"Training diverged: the cost is {after} after {recipe.epochs} epochs at lr = {recipe.lr:g}. Lower it."
            )
        if not after <= before:
            warn(
                f"Training raised the cost from {before:.4g} to {after:.4g}: the recipe's lr = {recipe.lr:g} is "
                "probably too large."
            )
        trained.origin = Origin(state, recipe)
        return trained


def run_replicas(run: Run, *, initial: Stacked, passes: Stack, what: str, keep: Keep) -> Trained:
    """`optimise` from one start for all replicas, with a companion where a replica alone would pass another way."""
    if (done := keep.finished()) is not None:
        return done
    count = len(run.problem.removals)
    short = max(0, passes.at_least - count)
    if short:
        more = None if run.subsets is None else torch.cat([run.subsets, run.subsets[:1].expand(short, -1)])
        run = replace(run, problem=replace(run.problem, removals=[*run.problem.removals, *[()] * short]), subsets=more)
    names = run.problem.task.names
    changing = {name for name in run.problem.task.buffers} if run.statistics and _has_statistics(run) else set()
    many = {name: initial[name].expand(count + short, *initial[name].shape) for name in (*names, *sorted(changing))}
    start, buffers = ({name: many[name] for name in chosen} for chosen in (names, sorted(changing)))
    ended = optimise(run, start, buffers, passes, what, keep)
    kept = slice(0, count)
    ended = Trained(part(ended.leaves, kept), part(ended.buffers, kept), ended.finite[:count])
    keep.finish(ended)
    return ended


def _has_statistics(run: Run) -> bool:
    return bool(learning_modules(run.problem.task, statistics=True, dropout=False))


def _cost(task: Task) -> float:
    losses = task.row_losses()
    weighted = losses if task.weights is None else losses * task.weights
    return float(weighted.mean()) + 0.5 * task.l2 * float(task.flat.double().square().sum())


def replica_bytes(run: Run, task: Task) -> int:
    """What one replica holds in training: parameters, gradient, momenta and temporaries, and a batch's activations."""
    copies = 6 + {"sgd": int(run.recipe.momentum > 0), "lbfgs": 44}.get(run.recipe.optimizer, 2)
    return copies * task.size * task.dtype.itemsize + task.row_bytes * run.recipe.batch_rows(len(task))


def groups_that_fit(count: int, one: int, budget: Budget) -> list[slice]:
    """Replicas in groups of nearly equal size, each of which fits in memory."""
    budget.require(one, "One replica in training", "Use a smaller batch_size, or a device with more memory.")
    size = max(1, budget.available() // one)
    return [slice(int(some[0]), int(some[-1]) + 1) for some in chunks(torch.arange(count), size)]
