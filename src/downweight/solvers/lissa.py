"""LiSSA: a truncated Neumann series over mini-batches."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from downweight.curvature.lanczos import lanczos
from downweight.curvature.operator import Damped, Operator
from downweight.errors import InvalidInput, SingularSystem
from downweight.progress import track
from downweight.settings import number, whole
from downweight.shapes import Float
from downweight.solvers.solver import (
    Indefinite,
    Result,
    Solution,
    check_count,
    check_rtol,
    clearly_negative,
    examine_sign,
    exponents,
    multiply,
    norms,
    relative_residual,
    require_finite_product,
    shifted,
    with_message,
)

# Batches looked at to find a scale, and Lanczos steps for each: the scale has a factor of two to
# spare (see LiSSA), so this only has to be right within that. A guess that worked.
SAMPLES = 5
SCALE_STEPS = 20


@dataclass(frozen=True)
class LiSSA:
    r"""The paper's estimate of A⁻¹v, each step with a mini-batch B of rows.

        x₀ = v,   xₜ₊₁ = v + (I − A_B / σ) xₜ,   x_T / σ = σ⁻¹ Σₜ₌₀^T (I − A / σ)ᵗ v  →  A⁻¹ v

    A_B is the *damped* matrix over the batch, so that λ too is divided by σ: any σ at least half
    the largest eigenvalue of every A_B has the same limit. (The paper's sums start at t = 1; they
    start at 0.) The answer is the mean over `repeats`, each with batches of its own.

    Wrong in a way that is easily missed: a direction with eigenvalue μ converges as (1 − μ/σ)^T,
    the flat ones of a network not at all at the usual depth, and mini-batches leave noise besides.
    So the true residual over all rows is computed, and above `rtol` the result is STEPS.

    - `scale` (σ): None is 1.1 times the largest eigenvalue found over all rows and five batches.
    - `depth` (T), `repeats`: 5000 and 5, the paper's for its regression and Transformer tasks; it
      uses 10000 for the others (appendix "Experimental set-up").
    - `batch_size`: drawn without replacement within an epoch, the ragged end dropped; all vectors
      share a batch. The paper gives none for LiSSA; 128 is its batch in training. With None, or as
      many as there are rows, every step takes all of them: then one repeat suffices, ‖xₜ₊₁ − xₜ‖ is
      the residual, and a vector stops at `rtol`.
    - `seed`: the same seed gives the same bits, in every call of `compute`.

    Divergence is noticed at the step where it shows: while ‖I − A_B/σ‖ ≤ 1 holds,
    ‖xₜ‖ ≤ (t + 1) ‖v‖. The vector then gets NaN, an infinite residual, and the message has the
    scale that would work.
    """

    # Blocks of vectors at work, the right-hand sides among them; measured by benchmarks/memory.py.
    blocks_held: ClassVar[float] = 8.75

    scale: float | int | None = None
    depth: int = 5000
    repeats: int = 5
    batch_size: int | None = 128
    seed: int = 0
    rtol: float = 1e-2

    def __post_init__(self):
        if self.scale is not None and number(self.scale, "scale") <= 0:
            raise InvalidInput(f"scale is positive and finite, or None to find one; got {self.scale!r}.")
        check_count("depth", self.depth)
        check_count("repeats", self.repeats)
        check_count("batch_size", self.batch_size)
        whole(self.seed, "seed", 0)
        check_rtol(self.rtol)

    def init(self, operator: Operator, *, indefinite: Indefinite = "raise") -> "Series":
        if indefinite == "allow" and not operator.positive:
            raise InvalidInput(
                f'LiSSA cannot take indefinite="allow": {operator.describe()} is not known to be '
                "positive, and along a negative eigenvalue the series diverges at every scale. "
                "Use MINRES() or Cholesky()."
            )
        stats = examine_sign(operator, indefinite)
        rows, batch_size = operator.rows, self.batch_size
        if rows is None or batch_size is None or batch_size >= rows:
            batch_size = None
        scale = _working_scale(operator, batch_size, self.seed) if self.scale is None else self.scale
        return Series(
            operator, float(scale), batch_size, stats | {"scale": float(scale), "batch_size": batch_size or rows}
        )

    def compute(self, state: "Series", vectors: Float[Tensor, "K d"]) -> Solution:
        operator = state.operator
        powers = exponents(vectors)
        count = len(powers)
        scaled = shifted(vectors, powers, -1)
        repeats = 1 if state.batch_size is None else self.repeats
        generator = torch.Generator().manual_seed(self.seed)
        total = torch.zeros_like(vectors)
        steps = [0] * count
        diverged: dict[int, Operator] = {}
        for _ in range(repeats):
            batches = _batches(operator, state.batch_size, generator)
            remaining = [k for k, power in enumerate(powers) if power is not None and k not in diverged]
            if not remaining:
                break
            run = _series(batches, scaled[remaining], state.scale, self.depth, self.rtol, state.batch_size is None)
            total[remaining] += run.value
            for place, k in enumerate(remaining):
                steps[k] += run.steps[place]
                culprit = run.diverged[place]
                if culprit is not None:
                    diverged[k] = culprit
        value = total.div_(repeats * state.scale)
        nonzero = [k for k, power in enumerate(powers) if power is not None and k not in diverged]
        residual = torch.zeros(count, dtype=torch.float64, device=vectors.device)
        if nonzero:
            residual[nonzero] = relative_residual(operator, scaled[nonzero], value[nonzero])
        value = shifted(value, powers, 1)
        if diverged:
            lost = list(diverged)
            value[lost], residual[lost] = torch.nan, torch.inf

        result = []
        for k, left in enumerate(residual.tolist()):
            if powers[k] is None:
                result.append(Result.ZERO)
            elif k in diverged:
                result.append(Result.DIVERGED)
            elif left <= self.rtol:
                result.append(Result.CONVERGED)
            elif state.batch_size is None and steps[k] < self.depth:
                result.append(Result.STAGNATED)
            else:
                result.append(Result.STEPS)
        stats = {
            **state.stats,
            "matvecs": sum(steps) + len(nonzero),
            "depth": self.depth,
            "repeats": repeats,
            "seed": self.seed,
        }
        if diverged:
            stats |= self._advice(state, next(iter(diverged.values())))
        elif Result.STEPS in result:
            stats = with_message(stats, self._short_message(state))
        return Solution(
            value, residual, torch.tensor(steps, dtype=torch.long, device=vectors.device), tuple(result), stats
        )

    def _advice(self, state: "Series", culprit: Operator) -> dict[str, Any]:
        """The message of a divergence, from the batch at which it showed."""
        spectrum = lanczos(culprit)
        if clearly_negative(spectrum.smallest, spectrum.norm, culprit.dtype):
            message = (
                f"diverged at scale {state.scale:g}: the matrix over a batch has the negative eigenvalue "
                f"{spectrum.smallest:.3g}, and no scale works; use the Gauss-Newton curvature or more damping"
            )
            return {"message": message, "smallest_eigenvalue": spectrum.smallest}
        scale = max(
            1.1 * (spectrum.largest + spectrum.largest_error),
            _working_scale(state.operator, state.batch_size, self.seed),
        )
        message = (
            f"diverged at scale {state.scale:g}: the largest eigenvalue over a batch is {spectrum.largest:.3g}, "
            f"more than twice that; a scale of {scale:.3g} would work"
        )
        return {"message": message, "suggested_scale": scale}

    def _short_message(self, state: "Series") -> str:
        message = f"the series stopped at depth {self.depth} with a residual above {self.rtol:g}"
        if isinstance(state.operator, Damped) and state.operator.damping > 0:
            needed = state.scale / state.operator.damping * math.log(1 / self.rtol)
            if needed > self.depth:
                message += f"; flat directions need about {needed:.0f} steps at this damping and scale"
        if state.batch_size is not None:
            message += ", and mini-batches leave noise at any depth (more repeats, larger batches)"
        return message


@dataclass(frozen=True)
class Series:
    """A ready LiSSA: `batch_size` is None where every step takes all rows."""

    operator: Operator
    scale: float
    batch_size: int | None
    stats: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One repeat: x_T (not yet over σ), its steps, and for a vector that diverged the operator that did it."""

    value: Float[Tensor, "K d"]
    steps: list[int]
    diverged: list[Operator | None]


def _series(
    batches: Callable[[], Operator],
    vectors: Float[Tensor, "K d"],
    scale: float,
    depth: int,
    rtol: float,
    full: bool,
) -> Run:
    """`depth` steps of xₜ₊₁ = v + (I − A_B / σ) xₜ for the block; no graph is kept."""
    value = torch.zeros_like(vectors)
    steps = [0] * vectors.shape[0]
    diverged: list[Operator | None] = [None] * vectors.shape[0]
    active = list(range(vectors.shape[0]))
    v, x, sizes = vectors, vectors.clone(), norms(vectors)
    for step in track(range(1, depth + 1), "Steps of LiSSA"):
        if not active:
            break
        operator = batches()
        product = multiply(operator, x)
        # xₜ₊₁ − xₜ. With all rows it is also v − A (xₜ / σ), the residual, and never grows.
        change = (product / -scale).add_(v)
        x = x.add_(change)
        size = norms(change if full else x)
        # A hundredth of slack: rounding over thousands of steps stays far below it.
        broken = ~(size <= 1.01 * (1 if full else step + 1) * sizes)
        reached = (size <= 0.9 * rtol * sizes) if full else torch.zeros_like(broken)
        broken_, reached_ = torch.stack([broken, reached]).tolist()
        if any(broken_):
            require_finite_product(operator, product)
        over = [broken_[place] or reached_[place] or step == depth for place in range(len(active))]
        for place, k in enumerate(active):
            steps[k] = step
            if broken_[place]:
                diverged[k] = operator
        if any(over):
            going = [place for place in range(len(active)) if not over[place]]
            value[active] = x  # those that go on are overwritten later
            active = [active[place] for place in going]
            keep = torch.tensor(going, dtype=torch.long, device=vectors.device)
            v, x, sizes = v[keep], x[keep], sizes[keep]
    return Run(value, steps, diverged)


def _batches(operator: Operator, batch_size: int | None, generator: torch.Generator) -> Callable[[], Operator]:
    """The operator of the next batch at every call: an epoch's rows in random order, cut into equal parts."""
    rows = operator.rows
    if batch_size is None or rows is None:
        return lambda: operator

    def epochs() -> Iterator[Operator]:
        while True:
            order = torch.randperm(rows, generator=generator)
            for start in range(0, rows - batch_size + 1, batch_size):
                yield operator.sample(order[start : start + batch_size])

    return epochs().__next__


def _working_scale(operator: Operator, batch_size: int | None, seed: int) -> float:
    """1.1 times the largest eigenvalue over all rows and a few batches."""
    generator = torch.Generator().manual_seed(seed)
    seen = [operator]
    if batch_size is not None:
        batches = _batches(operator, batch_size, generator)
        seen += [batches() for _ in range(SAMPLES)]
    largest = 0.0
    for sample in seen:
        spectrum = lanczos(sample, steps=SCALE_STEPS, seed=seed, tolerance=1e-2)
        largest = max(largest, spectrum.largest + spectrum.largest_error)
    if largest <= 0:
        raise SingularSystem(
            f"LiSSA finds no scale: {operator.describe()} has no positive eigenvalue. Raise the damping."
        )
    return 1.1 * largest
