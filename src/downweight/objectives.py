r"""The responses as compositions: fidelity − ε Σ_S removal + proximity, and a start.

    fidelity     "cost"       J(θ) = (1/N) Σ wᵢ L(f(θ, xᵢ), tᵢ) + (ρ/2) ‖θ‖²
                 "bregman"    (1/N) Σ wᵢ D(f(θ, xᵢ), f(θˢ, xᵢ)) + (ρ/2) ‖θ − θˢ‖²
                 "quadratic"  (1/N) Σ wᵢ ½ ‖Jᵢ (θ − θˢ)‖²_H + (ρ/2) ‖θ − θˢ‖², outputs and loss linearised at θˢ
    removal      wᵢ L(f(θ, xᵢ), tᵢ), or for "quadratic" its linearisation ⟨wᵢ ∇L(zᵢ, θˢ), θ⟩
    proximity    (λ/2) ‖θ − θˢ‖²

Removal is ε = 1/N. The paper (Bae et al. 2022, appendix) drops the square in the proximity term; it is there here.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from downweight.errors import InvalidInput
from downweight.settings import nonnegative, whole

Fidelity = Literal["cost", "bregman", "quadratic"]
Start = Literal["initial", "trained"]


@dataclass(frozen=True)
class GaussNewton:
    """Optimise to a tolerance, by Gauss-Newton steps with the removed rows left out of the matrix.

    rtol: ‖∇ objective‖ / (ε ‖Σ_S ∇L(z, θˢ)‖) to reach; None is 1e-6 in float64 and 1e-3 in float32.
    settle: where no gradient can vanish (a piecewise-linear network's minimiser sits on its kinks), the response has
        settled when the second half of all the work moved the outputs by at most this part of the response.
    max_steps: evaluations of the objective over all rows.
    """

    rtol: float | None = None
    settle: float = 1e-3
    max_steps: int = 256

    def __post_init__(self) -> None:
        if self.rtol is not None and not 0 < self.rtol < 1:
            raise InvalidInput(f"rtol is the relative gradient to reach, between 0 and 1; got {self.rtol!r}.")
        if not 0 < self.settle < 1:
            raise InvalidInput(f"settle is a part of the response, between 0 and 1; got {self.settle!r}.")
        object.__setattr__(self, "max_steps", whole(self.max_steps, "max_steps", 1))


Optimizer = GaussNewton | Literal["recipe"]


@runtime_checkable
class Objective(Protocol):
    """What `respond` asks of an objective."""

    name: ClassVar[str]
    fidelity: ClassVar[Fidelity]
    start: ClassVar[Start]

    @property
    def damping(self) -> float: ...
    @property
    def optimizer(self) -> Optimizer: ...


@dataclass(frozen=True)
class ColdStart:
    """Retraining from θ⁰ without the rows: the recipe's K + K/2 epochs, the first K in the base run's batch order."""

    name: ClassVar[str] = "cold_start"
    fidelity: ClassVar[Fidelity] = "cost"
    start: ClassVar[Start] = "initial"
    damping: float = field(default=0.0, init=False, repr=False)
    optimizer: Optimizer = field(default="recipe", init=False, repr=False)


@dataclass(frozen=True)
class WarmStart:
    """Training on from θˢ without the rows, for the recipe's K/2 epochs."""

    name: ClassVar[str] = "warm_start"
    fidelity: ClassVar[Fidelity] = "cost"
    start: ClassVar[Start] = "trained"
    damping: float = field(default=0.0, init=False, repr=False)
    optimizer: Optimizer = field(default="recipe", init=False, repr=False)


@dataclass(frozen=True)
class TwoStage:
    """θˢ + (warm start without the rows − warm start with them), both in the same batch order.

    The drift of training on, which a warm start books as influence, cancels.
    """

    name: ClassVar[str] = "two_stage"
    fidelity: ClassVar[Fidelity] = "cost"
    start: ClassVar[Start] = "trained"
    damping: float = field(default=0.0, init=False, repr=False)
    optimizer: Optimizer = field(default="recipe", init=False, repr=False)


@dataclass(frozen=True)
class Proximal:
    """A warm start held near θˢ by (λ/2) ‖θ − θˢ‖², for the recipe's K/2 epochs."""

    damping: float
    name: ClassVar[str] = "proximal"
    fidelity: ClassVar[Fidelity] = "cost"
    start: ClassVar[Start] = "trained"
    optimizer: Optimizer = field(default="recipe", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "damping", nonnegative(self.damping, "damping"))


@dataclass(frozen=True)
class ProximalBregman:
    """The question that damped influence answers: lower the rows' weight, keep all outputs, stay near θˢ.

    The local minimiser on the branch that starts at θˢ (ε = 0), by Gauss-Newton to a tolerance; or, with
    optimizer="recipe", what the recipe at a tenth of its rate reaches in K/2 epochs, as in the paper.
    """

    damping: float
    optimizer: Optimizer = field(default_factory=GaussNewton)
    name: ClassVar[str] = "proximal_bregman"
    fidelity: ClassVar[Fidelity] = "bregman"
    start: ClassVar[Start] = "trained"

    def __post_init__(self) -> None:
        object.__setattr__(self, "damping", nonnegative(self.damping, "damping"))
        _check_optimizer(self.optimizer)


@dataclass(frozen=True)
class LinearizedProximalBregman:
    """The same with outputs and losses linearised at θˢ: its minimiser is ε A⁻¹ Σ_S ∇L, the influence shift.

    By an exact solve where one fits, else to the tolerance of an iterative one; or by the recipe at a tenth of its
    rate.
    """

    damping: float
    optimizer: Optimizer = field(default_factory=GaussNewton)
    name: ClassVar[str] = "linearized"
    fidelity: ClassVar[Fidelity] = "quadratic"
    start: ClassVar[Start] = "trained"

    def __post_init__(self) -> None:
        object.__setattr__(self, "damping", nonnegative(self.damping, "damping"))
        _check_optimizer(self.optimizer)


LABELS = {
    "cold_start": "cold start",
    "warm_start": "warm start",
    "two_stage": "two-stage",
    "proximal": "proximal",
    "proximal_bregman": "PBRF",
    "linearized": "linearised PBRF",
    "influence": "influence",
}


def _check_optimizer(optimizer: object) -> None:
    if optimizer != "recipe" and not isinstance(optimizer, GaussNewton):
        raise InvalidInput(f"optimizer is {optimizer!r}; expected dw.GaussNewton(…) or 'recipe'.")
