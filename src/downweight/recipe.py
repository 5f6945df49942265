"""Recipe: how a network is trained, as a pure function of seed, removal and epoch."""

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from downweight.errors import InvalidInput, InvalidType
from downweight.settings import nonnegative, whole
from downweight.shapes import Int

OPTIMIZERS = ("sgd", "adam", "adamw", "lbfgs")
SCHEDULES = ("constant", "step", "cosine")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is trained: optimiser, rate, batches and epochs. Nothing is drawn but from `seed`.

    optimizer: "sgd", "adam", "adamw" or "lbfgs", each that of `torch.optim`. The penalty of the cost is the task's
        `l2`; `weight_decay` is the decoupled decay of "adamw" only. L-BFGS takes all rows at once, with a strong
        Wolfe line search, and `epochs` is the number of its iterations.
    batch_size: rows a step; None is all of them. The ragged last batch is divided by its own length.
    epochs: K. Responses train on for K/2 (rounded up), from epoch K on.
    schedule: "constant"; "step", which multiplies the rate by `decay` at each of the `milestones` (epochs); or
        "cosine", from `lr` to nearly 0 over the K epochs. Beyond K a cosine repeats its second half.
    dropout: whether dropout layers drop in training. Off unless asked for: with it on, two runs differ by chance.
    """

    lr: float
    epochs: int
    optimizer: Literal["sgd", "adam", "adamw", "lbfgs"] = "sgd"
    batch_size: int | None = None
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    seed: int = 0
    dropout: bool = False

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, SCHEDULES)
        for name in ("lr", "momentum", "weight_decay", "decay", "eps"):
            object.__setattr__(self, name, nonnegative(getattr(self, name), name))
        for name, least in (("epochs", 1), ("seed", 0), ("batch_size", 1)):
            if name != "batch_size" or self.batch_size is not None:
                object.__setattr__(self, name, whole(getattr(self, name), name, least))
        for name in ("betas", "milestones"):
            if not isinstance(getattr(self, name), list | tuple):
                raise InvalidType(f"{name} is {getattr(self, name)!r}; expected a tuple of numbers.")
        object.__setattr__(self, "betas", tuple(nonnegative(beta, "an entry of betas") for beta in self.betas))
        object.__setattr__(self, "milestones", tuple(whole(at, "an entry of milestones", 0) for at in self.milestones))
        if self.lr == 0:
            raise InvalidInput("lr is 0; expected a number above 0.")
        if len(self.betas) != 2 or max(self.betas) >= 1:
            raise InvalidInput(f"betas is {self.betas!r}; expected two numbers, at least 0 and less than 1.")
        if self.momentum >= 1:
            raise InvalidInput(f"momentum is {self.momentum:g}; expected at least 0 and less than 1.")
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise InvalidInput(f"momentum and nesterov are settings of 'sgd'; {self.optimizer!r} has its own.")
        if self.nesterov and not self.momentum:
            raise InvalidInput("nesterov needs a momentum above 0.")
        if self.weight_decay and self.optimizer != "adamw":
            raise InvalidInput(
                f"weight_decay is {self.weight_decay:g} with {self.optimizer!r}. A penalty on the weights belongs to "
                "the cost: give it to the task, dw.Task(…, l2=…). Only 'adamw' has a decay of its own."
            )
        if self.optimizer == "lbfgs" and (self.batch_size is not None or self.schedule != "constant"):
            raise InvalidInput("'lbfgs' takes all rows at once at a constant rate; leave batch_size and schedule out.")
        if (self.schedule == "step") != bool(self.milestones):
            raise InvalidInput("milestones (epochs) go with schedule='step', which needs them.")

    @property
    def more_epochs(self) -> int:
        """K/2, rounded up: how long responses train on."""
        return (self.epochs + 1) // 2

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, which may lie beyond K."""
        if self.schedule == "step":
            return self.lr * self.decay ** sum(epoch >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            place = epoch
            while place >= self.epochs:
                place -= self.more_epochs
            return 0.5 * self.lr * (1 + math.cos(math.pi * place / self.epochs))
        return self.lr

    def order(self, rows: int, epoch: int, removal: tuple[int, ...] | None = None) -> Int[torch.Tensor, " N"]:
        """The order of the rows in an epoch: that of the base run, or of a removal with an order of its own."""
        key = repr((self.seed, epoch, None if removal is None else tuple(sorted(removal))))
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))

    def batch_rows(self, rows: int) -> int:
        """Rows in a full batch."""
        return rows if self.batch_size is None else min(self.batch_size, rows)

    def settings(self) -> dict[str, Any]:
        """The recipe as JSON can hold it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidInput(f"{name} is {value!r}; expected one of {', '.join(map(repr, known))}.")
