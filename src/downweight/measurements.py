"""What is asked of a query: its loss, its margin, or any function of outputs and target."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from downweight.errors import InvalidInput, InvalidType
from downweight.gradients import Gradients
from downweight.losses import BinaryCrossEntropy, CrossEntropy, check_row_by_row, require_finite
from downweight.rows import Rows
from downweight.task import Task

Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measurement:
    """m(outputs, targets) -> one number a query, shape (B,), in float64 torch code.

    higher_is_better: whether a larger value is a better model (a loss: False, a margin: True). None
    leaves it open; values are then still the predicted change, but nothing can be called helpful.
    """

    name: str
    function: Function
    higher_is_better: bool | None = None
    unit: str = "units of the measurement"


_UNITS = {
    "cross_entropy": "nats",
    "binary_cross_entropy": "nats",
    "squared_error": "half squared errors",
}


def as_measurement(task: Task, measurement: str | Measurement | Function) -> Measurement:
    """The measurement of this name on this task, or the user's own."""
    if isinstance(measurement, Measurement):
        return measurement
    if measurement == "loss":
        return Measurement("loss", task.losses, False, _UNITS.get(task.loss.name, "units of the loss"))
    if measurement == "margin":
        loss = task.loss
        if not isinstance(loss, CrossEntropy | BinaryCrossEntropy):
            raise InvalidInput(
                f"measurement='margin' needs classes, and the task's loss is {loss.name}. Use "
                "measurement='loss' or a function of outputs and targets."
            )
        return Measurement("margin", lambda y, t: loss.margins(y, t).reshape(len(y), -1).sum(1), True, "nats")
    if callable(measurement):
        name = getattr(measurement, "__qualname__", type(measurement).__qualname__)
        return Measurement(name, measurement, getattr(measurement, "higher_is_better", None))
    raise InvalidType(
        f"measurement is {measurement!r}; expected 'loss', 'margin', a function of (outputs, targets) "
        "that returns one number a query, or dw.Measurement(name, function, higher_is_better)."
    )


def of_measurement(task: Task, rows: Rows, measurement: Measurement) -> Gradients:
    """∇m of every query."""

    def cotangent(outputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        if measurement.name == "loss" and measurement.function == task.losses:
            # In closed form: autograd of a confident loss cancels where this does not.
            return task.output_gradient(outputs, targets).unsqueeze(0)
        with torch.enable_grad():
            leaf = outputs.detach().double().requires_grad_()
            check_row_by_row(measurement.function, leaf.detach(), targets, f"The measurement {measurement.name}")
            values = measurement.function(leaf, targets)
            require_finite(values, f"The measurement {measurement.name} for queries", positions)
            if not values.requires_grad:
                raise InvalidInput(
                    f"The measurement {measurement.name} does not depend on the outputs through "
                    "autograd (argmax, a comparison, numpy?); its change cannot be predicted."
                )
            gradient = torch.autograd.grad(values.sum(), leaf)[0]
            require_finite(gradient, f"The derivative of the measurement {measurement.name} for queries", positions)
            return gradient.unsqueeze(0)

    return Gradients(task, rows, torch.arange(len(rows)), cotangent, "queries")
