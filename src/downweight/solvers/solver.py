"""What every solver promises (Solver, Solution, Result) and the steps that several of them share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from downweight.curvature.lanczos import Spectrum, lanczos
from downweight.curvature.operator import Damped, Operator
from downweight.errors import IndefiniteSystem, InvalidInput, NonFinite
from downweight.memory import Budget
from downweight.settings import number
from downweight.shapes import Bool, Float, Int

Indefinite = Literal["raise", "allow"]
State = TypeVar("State")

# A product is taken to be right to this many units of rounding (eps) of ‖A‖. A guess with room
# to spare: a matrix product is right to a few, a pass through a deep network to a few more.
ROUNDING = 100.0


# A residual so far above 1, that of the zero vector, is no answer cut short. The first steps of CG may exceed 1
# by less (the root of the condition number bounds them; a few were seen). A guess.
DIVERGED_ABOVE = 1e3


class Result(Enum):
    """Why a solver stopped; the value is the sentence for humans. A value that DIVERGED is worth nothing."""

    CONVERGED = "reached the tolerance"
    DIRECT = "exact factorisation"
    STEPS = "reached max_steps before the tolerance"
    STAGNATED = "rounding stops further progress"
    DIVERGED = "the iteration diverges"
    ZERO = "the vector is zero; so is the solution"

    @property
    def ok(self) -> bool:
        return self in (Result.CONVERGED, Result.DIRECT, Result.ZERO)


@dataclass(frozen=True, eq=False)
class Solution:
    """xₖ with A xₖ ≈ vₖ, and for each k how near it came.

    `residual` is the true ‖A xₖ − vₖ‖ / ‖vₖ‖ of the value that is returned (0 for vₖ = 0,
    infinite where the value is not finite), never the one that a recurrence carried along.
    """

    value: Float[Tensor, "*K d"]
    residual: Float[Tensor, " K"]
    steps: Int[Tensor, " K"]
    result: tuple[Result, ...]
    stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def converged(self) -> Bool[Tensor, " K"]:
        flags = [result.ok for result in self.result]
        return torch.tensor(flags, dtype=torch.bool, device=self.residual.device)


@dataclass(frozen=True, eq=False)
class Pairing:
    """vᵀ A⁻¹ v' between two families (or vᵀ A⁻¹ v of one), and how far to believe it.

    `residual` and `result` are one a solved system; `solved` says for which family, "left" or
    "right", the systems were solved.
    """

    value: Float[Tensor, "*L R"]
    residual: Float[Tensor, " K"]
    result: tuple[Result, ...]
    solved: Literal["left", "right"]
    stats: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Solver(Protocol[State]):
    """Set-up and use are split, so that a factorisation is paid once for many vectors."""

    def init(self, operator: Operator, *, indefinite: Indefinite = "raise") -> State: ...

    def compute(self, state: State, vectors: Float[Tensor, "K d"]) -> Solution: ...


# --- settings ------------------------------------------------------------------------------------


def check_indefinite(indefinite: str) -> None:
    if indefinite not in ("raise", "allow"):
        raise InvalidInput(f'indefinite is "raise" or "allow", got {indefinite!r}.')


def check_rtol(rtol: float | None) -> None:
    if rtol is not None and not 0 < number(rtol, "rtol") < 1:
        raise InvalidInput(f"rtol is the relative residual to reach, between 0 and 1; got {rtol!r}.")


def check_count(name: str, count: int | None) -> None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise InvalidInput(f"{name} is a whole number and at least 1, got {count!r}.")


@dataclass(frozen=True)
class Iteration:
    """A ready iterative solver: the system, when to stop, and what set-up found out."""

    operator: Operator
    rtol: float
    max_steps: int
    stats: Mapping[str, Any]


def iteration(operator: Operator, rtol: float | None, max_steps: int | None, stats: Mapping[str, Any]) -> Iteration:
    """The defaults of CG and MINRES filled in for this operator.

    rtol: 1e-10 in float64 and 1e-5 in float32, a few digits above what rounding allows for a
    condition number of a thousand. max_steps: both methods end after d steps in exact arithmetic
    and need a few times as many with rounding, so 10 d where d is small; 2,000 products above
    that, enough for 1e-10 at a condition number of 28,000 whatever the spectrum
    (½ √κ ln(2 / rtol) steps), and for far larger ones when the eigenvalues gather near λ.
    """
    if rtol is None:
        rtol = 1e-10 if operator.dtype == torch.float64 else 1e-5
    if max_steps is None:
        max_steps = min(10 * operator.size, 2000)
    return Iteration(operator, rtol, max_steps, stats)


# --- the sign of the spectrum --------------------------------------------------------------------


def clearly_negative(eigenvalue: float, norm: float, dtype: torch.dtype) -> bool:
    """Negative beyond what the rounding of a product could produce."""
    return eigenvalue < -ROUNDING * torch.finfo(dtype).eps * norm


def examine_sign(operator: Operator, indefinite: Indefinite) -> dict[str, Any]:
    """What set-up finds out about the smallest eigenvalue; raises IndefiniteSystem unless allowed.

    An operator that is positive by construction is not examined when `indefinite` is "raise".
    Lanczos (at most 100 products with one vector) otherwise: a negative eigenvalue that it finds
    is there; one that it does not find in a crowded spectrum may be there all the same.
    """
    check_indefinite(indefinite)
    if operator.positive and indefinite == "raise":
        return {}
    # The basis may take half of what is free, but ten vectors are needed for a useful answer.
    affordable = Budget(operator.device, operator.memory_limit).available() // (2 * 8 * operator.size)
    spectrum = lanczos(operator, steps=max(10, min(100, affordable)))
    negative = clearly_negative(spectrum.smallest, spectrum.norm, operator.dtype)
    if negative and indefinite == "raise":
        raise indefinite_system(operator, spectrum)
    stats: dict[str, Any] = {
        "smallest_eigenvalue": spectrum.smallest,
        "smallest_eigenvalue_error": spectrum.smallest_error,
        "lanczos_steps": spectrum.steps,
    }
    if negative:
        stats["message"] = stationary_message(spectrum.smallest)
    return stats


def with_message(stats: Mapping[str, Any], *messages: str) -> dict[str, Any]:
    """The stats with these sentences behind the ones that are there, each once."""
    parts = dict.fromkeys([*filter(None, [stats.get("message")]), *messages])
    return {**stats, "message": "; ".join(parts)} if parts else dict(stats)


def stationary_message(smallest: float) -> str:
    return (
        f"the system is indefinite (smallest eigenvalue {smallest:.3g}): the solution is a "
        "stationary point of the quadratic, not its minimum"
    )


def indefinite_system(operator: Operator, spectrum: Spectrum, why: str = "", exact: bool = False) -> IndefiniteSystem:
    """The error that names the smallest eigenvalue and the damping that would make it positive."""
    damping = operator.damping if isinstance(operator, Damped) else 0.0
    origin = "" if exact else f" (± {spectrum.smallest_error:.1g}, Lanczos)"
    return IndefiniteSystem(
        f"The system ({operator.describe()}) is indefinite: its smallest eigenvalue is "
        f"{spectrum.smallest:.3g}{origin}. {why}"
        "CG cannot be used on it: it would return a vector that only looks like an answer. "
        "Use the Gauss-Newton curvature, which is never indefinite; or a damping of "
        f"{sufficient_damping(damping, spectrum):g} or more; or, if a stationary point of the "
        'quadratic is what you want, MINRES() or Cholesky() with indefinite="allow".',
        spectrum.smallest,
    )


def sufficient_damping(damping: float, spectrum: Spectrum) -> float:
    """A damping, rounded up to two digits, at which the smallest eigenvalue is positive by a tenth."""
    # The Ritz value lies above the eigenvalue, by at most its error.
    needed = damping + 1.1 * (spectrum.smallest_error - spectrum.smallest)
    unit = 10.0 ** (math.floor(math.log10(needed)) - 1)
    return float(f"{math.ceil(needed / unit) * unit:.2g}")


# --- vectors -------------------------------------------------------------------------------------


def dot(a: Float[Tensor, "K d"], b: Float[Tensor, "K d"]) -> Float[Tensor, " K"]:
    """aₖ · bₖ for every k, accumulated in float64 without a float64 copy of the whole block."""
    count, size = a.shape
    # On two CPU cores temporaries of 1 or 2 MiB, which stay in the cache, took 26 ms for 20 float32 vectors of
    # 2,000,000, those of 8 MiB 66 ms and of 32 MiB 290 ms (measured once); a GPU wants few launches instead (not
    # measured), with three temporaries that are still less than the block.
    pieces = 2**17 if a.device.type == "cpu" else min(2**24, max(2**17, a.numel() // 8))
    width = max(1, pieces // max(count, 1))
    total = a.new_zeros(count, dtype=torch.float64)
    for start in range(0, size, width):
        piece = slice(start, start + width)
        total += (a[:, piece].double() * b[:, piece].double()).sum(1)
    return total


def norms(vectors: Float[Tensor, "K d"]) -> Float[Tensor, " K"]:
    return dot(vectors, vectors).sqrt()


def exponents(vectors: Float[Tensor, "K d"]) -> list[int | None]:
    """eₖ with 2^(eₖ−1) ≤ max |vₖ| < 2^eₖ, None for a zero vector.

    Solvers work on 2^−eₖ vₖ, so that the gradient of a confident row (entries of 1e-30, squares of
    1e-60) neither underflows nor is treated differently; a power of two rounds nothing.
    """
    if vectors.shape[0] == 0:
        return []
    largest = torch.linalg.vector_norm(vectors, ord=float("inf"), dim=1).tolist()
    if not all(map(math.isfinite, largest)):
        broken = [k for k, value in enumerate(largest) if not math.isfinite(value)]
        raise NonFinite(f"Right-hand side {broken[0]} holds NaN or infinity ({len(broken)} of {len(largest)} do).")
    return [math.frexp(value)[1] if value else None for value in largest]


def shifted(vectors: Float[Tensor, "K d"], powers: list[int | None], sign: Literal[-1, 1]) -> Float[Tensor, "K d"]:
    """2^(± powerₖ) vₖ. In two halves, because 2^1074 is not a number and 2^537 is."""
    signed = [sign * (power or 0) for power in powers]
    first = vectors.new_tensor([math.ldexp(1.0, power // 2) for power in signed])
    second = vectors.new_tensor([math.ldexp(1.0, power - power // 2) for power in signed])
    return (vectors * first[:, None]).mul_(second[:, None])


def multiply(operator: Operator, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
    """A vₖ without a graph, so that memory does not grow with the steps whatever the operator does."""
    return operator.product(vectors).detach()


def relative_residual(
    operator: Operator, vectors: Float[Tensor, "K d"], value: Float[Tensor, "K d"]
) -> Float[Tensor, " K"]:
    """‖A xₖ − vₖ‖ / ‖vₖ‖ by a fresh product; 0 where both vanish, infinite where xₖ is not finite."""
    powers = exponents(vectors)
    scaled = shifted(vectors, powers, -1)
    missing = scaled - multiply(operator, shifted(value, powers, -1))
    residual = norms(missing) / norms(scaled)
    residual[torch.tensor([power is None for power in powers], device=residual.device)] = 0.0
    return residual.nan_to_num(nan=math.inf)


def require_finite_product(operator: Operator, product: Float[Tensor, "K d"]) -> None:
    if not bool(torch.isfinite(product).all()):
        raise NonFinite(
            f"A product with {operator.describe()} holds NaN or infinity, though the vectors do not. "
            "Look for them in the data, the parameters and the loss."
        )


# --- refinement ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Correction:
    """An approximate solution of A e = r with the steps that each vector took."""

    value: Float[Tensor, "K d"]
    steps: list[int]
    message: str | None = None


# correct(rest, target, budget), which may overwrite rest: e with ‖rest − A e‖ ≤ target as far as the recurrence knows
Correct = Callable[[Float[Tensor, "K d"], Float[Tensor, " K"], list[int]], Correction]


def refine(ready: Iteration, vectors: Float[Tensor, "K d"], correct: Correct) -> Solution:
    r"""Solutions whose *true* residual decides, by restarts of an iteration that only believes.

    x ← x + e with A e ≈ r and r = v − A x computed afresh. The residual that a Krylov recurrence
    carries goes to zero even where rounding holds the true one up; when the true one is not below
    rtol the iteration starts again from x, and stops with STAGNATED when a round gains less than a
    factor of two. `max_steps` counts over all rounds of a vector.
    """
    operator, rtol = ready.operator, ready.rtol
    powers = exponents(vectors)
    count = len(powers)
    result = [Result.ZERO] * count
    residual = [0.0] * count
    steps = [0] * count
    matvecs = rounds = 0
    messages: list[str] = []

    def scaled(chosen: list[int]) -> Tensor:
        # Made again when it is needed, not kept: a block is memory and a product far more work.
        return shifted(vectors[chosen], [powers[k] for k in chosen], -1)

    value = torch.zeros_like(vectors)
    active = [k for k, power in enumerate(powers) if power is not None]
    for k in active:
        residual[k] = 1.0
    rest = scaled(active)
    sizes = torch.zeros(count, dtype=torch.float64, device=vectors.device)
    sizes[active] = norms(rest)
    while active:
        rounds += 1
        index = torch.tensor(active, device=vectors.device)
        # 0.9: the recurrence may be off in its last digits, and a round more costs far more.
        correction = correct(rest, 0.9 * rtol * sizes[index], [ready.max_steps - steps[k] for k in active])
        trial = value[index] + correction.value
        product = multiply(operator, trial)
        rest = scaled(active) - product
        after = (norms(rest) / sizes[index]).tolist()
        if not all(map(math.isfinite, after)):
            require_finite_product(operator, product)
        matvecs += sum(correction.steps) + len(active)
        if correction.message:
            messages.append(correction.message)
        accepted, going = [], []
        for place, k in enumerate(active):
            steps[k] += correction.steps[place]
            gained = after[place] <= residual[k] / 2
            # The first iterate stands even where its residual exceeds that of zero: CG brings down
            # the error in the norm of A from the first step, while its residual may rise at first.
            # A later one that gains less than that only adds rounding along flat directions.
            if gained or after[place] <= rtol or (rounds == 1 and math.isfinite(after[place])):
                residual[k] = after[place]
                accepted.append(place)
            if residual[k] <= rtol:
                result[k] = Result.CONVERGED
            elif steps[k] >= ready.max_steps:
                result[k] = Result.STEPS
            elif not gained:
                result[k] = Result.STAGNATED
            else:
                going.append(place)
        value[index[accepted]] = trial[accepted]
        rest = rest[going]
        active = [active[place] for place in going]

    if max(residual, default=0.0) > DIVERGED_ABOVE:
        result = [
            Result.DIVERGED if left > DIVERGED_ABOVE else found for left, found in zip(residual, result, strict=True)
        ]
        messages.append("the solution grew without bound, which says that the system is singular; raise the damping")
    value = shifted(value, powers, 1)
    if not bool(torch.isfinite(value).all()):
        raise NonFinite(f"A solution exceeds the range of {vectors.dtype}; use float64 or scale the vectors.")
    stats = {**ready.stats, "matvecs": matvecs, "rounds": rounds}
    if not all(entry.ok for entry in result):
        stats = with_message(stats, *messages)
    return Solution(
        value,
        torch.tensor(residual, dtype=torch.float64, device=vectors.device),
        torch.tensor(steps, dtype=torch.long, device=vectors.device),
        tuple(result),
        stats,
    )
