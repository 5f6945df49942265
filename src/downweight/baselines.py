"""Baselines that users compare with, in the call shape of `influence` and with its sign."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from downweight.errors import InvalidInput, InvalidType
from downweight.features import RowGradients
from downweight.gradients import Gradients
from downweight.influence import choose_removals, warn_of_mode
from downweight.kernel import Kernel
from downweight.measurements import Measurement, as_measurement, of_measurement
from downweight.memory import Budget, parse_bytes
from downweight.progress import reporting
from downweight.scores import Scores
from downweight.settings import number
from downweight.task import Task

Asked = str | Measurement | Callable[[Tensor, Tensor], Tensor]


@torch.inference_mode(False)
def grad_dot(
    task: Task,
    queries: Any,
    *,
    measurement: Asked = "loss",
    rows: Any = None,
    candidates: Any = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Scores:
    """(1/N) ∇m(q)·∇L(zᵢ): influence with A = I, or one gradient step on the removal."""
    with reporting(progress):
        left, right, describe = _families(task, queries, measurement, rows, candidates)
        gram = _gram(_kernel(task, memory_limit), left, right)
        return describe("grad_dot", gram / len(task))


@torch.inference_mode(False)
def grad_cos(
    task: Task,
    queries: Any,
    *,
    measurement: Asked = "loss",
    rows: Any = None,
    candidates: Any = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Scores:
    """cos(∇m(q), ∇L(zᵢ)), 0 where either gradient vanishes: blind to how large a gradient is."""
    with reporting(progress):
        left, right, describe = _families(task, queries, measurement, rows, candidates)
        kernel = _kernel(task, memory_limit)
        gram = _gram(kernel, left, right)
        norms = kernel.squared_norms(left)[:, None] * kernel.squared_norms(right)[None, :]
        cosine = torch.where(norms > 0, gram / norms.clamp_min(1e-300).sqrt(), 0.0)
        return describe("grad_cos", cosine)


@torch.inference_mode(False)
def tracin(
    task: Task,
    queries: Any,
    *,
    checkpoints: Sequence[Tensor | Mapping[str, Tensor]] | Tensor,
    learning_rates: Sequence[float] | Tensor | float,
    measurement: Asked = "loss",
    rows: Any = None,
    candidates: Any = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Scores:
    """(1/N) Σₖ ηₖ ∇mₖ(q)·∇Lₖ(zᵢ) over checkpoints k (Pruthi et al. 2020, TracInCP).

    checkpoints: flat parameters (d,), as a list or as rows of a tensor, or state dicts (with their
    buffers); learning_rates: one for each, or one for all.
    """
    with reporting(progress):
        if isinstance(checkpoints, str | Mapping) or not isinstance(checkpoints, Sequence | Tensor):
            raise InvalidType(f"checkpoints is a {type(checkpoints).__name__}; expected a list of checkpoints.")
        if len(checkpoints) == 0:
            raise InvalidInput("tracin needs at least one checkpoint (a flat tensor or a state dict).")
        several = isinstance(learning_rates, Sequence | Tensor | np.ndarray) and getattr(learning_rates, "ndim", 1)
        given: Any = learning_rates if several else [learning_rates]
        rates = [number(rate, "A learning rate") for rate in given]
        rates = rates * len(checkpoints) if len(rates) == 1 else rates
        if len(rates) != len(checkpoints):
            raise InvalidInput(
                f"tracin got {len(rates)} learning rates for {len(checkpoints)} checkpoints; give one "
                "rate for each, or one for all."
            )
        total: Tensor | None = None
        for checkpoint, rate in zip(checkpoints, rates, strict=True):
            at = task.with_state(checkpoint) if isinstance(checkpoint, Mapping) else task.with_parameters(checkpoint)
            left, right, _ = _families(at, queries, measurement, rows, candidates)
            part = rate * _gram(_kernel(at, memory_limit), left, right)
            total = part if total is None else total.add_(part)
        assert total is not None
        _, _, describe = _families(task, queries, measurement, rows, candidates)
        return describe("tracin", total / len(task))


@torch.inference_mode(False)
def representer_points(
    task: Task,
    queries: Any,
    *,
    measurement: Asked = "loss",
    rows: Any = None,
    candidates: Any = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> Scores:
    r"""(1/(ρN)) ∇m(q)·∇L(zᵢ) over the last linear layer: what row i adds to the outputs (Yeh et al. 2018).

    At a stationary point of a cost with l2 = ρ on that layer its weights are −(1/(ρN)) Σ ∂L/∂y fᵀ,
    so a row's part of an output is −(1/(ρN)) (∂Lᵢ/∂y) (fᵢ·f). How far the layer is from stationary,
    and the decomposition from exact, is said in the notes.
    """
    with reporting(progress):
        if task.l2 <= 0:
            raise InvalidInput(
                "representer_points needs l2 > 0 in the task: the last layer's weights are a sum over "
                "rows only at a minimum with a penalty."
            )
        names = RowGradients(task).last_layer()
        head = task.restricted_to(names)
        left, right, describe = _families(head, queries, measurement, rows, candidates)
        values = _gram(_kernel(head, memory_limit), left, right) / (task.l2 * len(task))
        weights = torch.cat([value.flatten() for value in head.params.values()]).double()
        pulled = training_gradient(head).double()
        away = float((pulled + task.l2 * weights).norm() / (task.l2 * weights).norm().clamp_min(1e-300))
        note = (
            f"The gradient of the cost in the last layer ({', '.join(names)}) is {away:.2g} times its "
            "penalty's; the decomposition is exact at 0."
        )
        return describe("representer_points", values, note, whole=task)


def training_gradient(task: Task) -> Tensor:
    """(1/N) Σ wᵢ ∇L, without the penalty, (d,)."""

    def part(rows: Tensor) -> Tensor:
        inputs, targets = task.rows.read(rows)
        weights = task.weights_of(rows)
        at = task.linearize(inputs)
        return at.pull(task.output_gradient(at.outputs, targets, weights).unsqueeze(0))[0]

    with task.evaluating():
        return task.mean(torch.arange(len(task)), 1024, part)


def _families(
    task: Task, queries: Any, measurement: Asked, rows: Any, candidates: Any
) -> tuple[Gradients, Gradients, Callable[..., Scores]]:
    """The two families and a function that describes values between them as Scores."""
    warn_of_mode(task)
    measured = as_measurement(task, measurement)
    right, removals, of = choose_removals(task, rows, candidates)
    left = of_measurement(task, task.query_rows(queries), measured)

    def describe(method: str, values: Tensor, *notes: str, whole: Task = task) -> Scores:
        return Scores(
            values=values.to(task.dtype),
            residuals=torch.zeros(0, dtype=torch.float64),
            solved="none",
            results=(),
            converged=torch.zeros(0, dtype=torch.bool),
            removals=removals,
            of=of,
            method=method,
            measurement=measured.name,
            higher_is_better=measured.higher_is_better,
            unit="cosine" if method == "grad_cos" else measured.unit,
            damping=0.0,
            l2=task.l2,
            curvature="none",
            solver="none",
            loss=task.loss.name,
            rows=len(task),
            coverage=task.coverage,
            fingerprint=whole.fingerprint(),
            notes=(*task.notes, *notes),
        )

    return left, right, describe


def _kernel(task: Task, memory_limit: int | str | None) -> Kernel:
    budget = Budget(task.device, parse_bytes(memory_limit))
    return Kernel(RowGradients(task, budget), budget.available() // 2, task.row_bytes)


def _gram(kernel: Kernel, left: Gradients, right: Gradients) -> Tensor:
    return right.reduce(left.reduce(kernel.gram(left, right), 0), 1)
