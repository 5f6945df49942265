"""CG: conjugate gradients for many right-hand sides at once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from downweight.curvature.lanczos import Spectrum, lanczos
from downweight.curvature.operator import Operator
from downweight.errors import InvalidInput
from downweight.progress import track
from downweight.shapes import Float
from downweight.solvers.solver import (
    Correction,
    Indefinite,
    Iteration,
    Solution,
    check_count,
    check_rtol,
    clearly_negative,
    dot,
    examine_sign,
    indefinite_system,
    iteration,
    multiply,
    refine,
    require_finite_product,
)

Preconditioner = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CG:
    r"""Conjugate gradients: for a positive definite A, one product per vector and step.

    Every vector is stopped by its own residual and leaves the block then, so that no product is
    spent on it. The true residual decides (see `solver.refine`). Memory: seven blocks (K, d) beside the vectors.

    - `rtol`: the true ‖A x − v‖ / ‖v‖ to reach; None is 1e-10 in float64, 1e-5 in float32.
    - `max_steps`: products per vector, over all restarts; None is min(10 d, 2000).
    - `preconditioner`: P(r) ≈ A⁻¹ r for a block (K, d), symmetric positive definite, the same for
      every vector. It changes the path, never the answer or the criterion.

    On an indefinite matrix CG can return a vector that only looks like an answer, so it refuses:
    at set-up if Lanczos finds a negative eigenvalue, later if it meets a direction with pᵀAp < 0.
    """

    # Blocks of vectors at work, the right-hand sides among them; measured by benchmarks/memory.py.
    blocks_held: ClassVar[float] = 8.5

    rtol: float | None = None
    max_steps: int | None = None
    preconditioner: Preconditioner | None = None

    def __post_init__(self):
        check_rtol(self.rtol)
        check_count("max_steps", self.max_steps)

    def init(self, operator: Operator, *, indefinite: Indefinite = "raise") -> Iteration:
        if indefinite == "allow" and not operator.positive:
            raise InvalidInput(
                f'CG cannot take indefinite="allow": {operator.describe()} is not known to be '
                "positive, and on an indefinite matrix CG breaks down. Use MINRES() or Cholesky()."
            )
        return iteration(operator, self.rtol, self.max_steps, examine_sign(operator, indefinite))

    def compute(self, state: Iteration, vectors: Float[Tensor, "K d"]) -> Solution:
        def correct(rest: Tensor, target: Tensor, budget: list[int]) -> Correction:
            return _conjugate_gradients(state.operator, rest, target, budget, self.preconditioner)

        return refine(state, vectors, correct)


def _conjugate_gradients(
    operator: Operator,
    rest: Float[Tensor, "K d"],
    target: Float[Tensor, " K"],
    budget: list[int],
    preconditioner: Preconditioner | None,
) -> Correction:
    r"""e with A e ≈ rest, from e = 0; overwrites rest.

        α = rᵀz / pᵀAp,   e ← e + α p,   r ← r − α Ap,   z = P(r),   p ← z + (rᵀz / rᵀz before) p

    Scalars are (K,) in float64; one small transfer to the host a step says who is finished.
    """
    apply = _Checked(operator, preconditioner)
    solution = torch.zeros_like(rest)
    steps = [0] * len(budget)
    active = list(range(len(budget)))
    e, r = torch.zeros_like(rest), rest
    z = apply.preconditioner(r)
    p, rz = z.clone(), dot(r, z)
    apply.check_preconditioner((rz > 0).tolist())
    for step in track(range(1, max(budget) + 1), "Steps of CG"):
        if not active:
            break
        product = multiply(operator, p)
        curvature = dot(p, product)
        usable = (curvature > 0) & (curvature < torch.inf)
        alpha = torch.where(usable, rz / curvature, 0.0).to(r.dtype)[:, None]
        e.addcmul_(p, alpha)
        r.addcmul_(product, alpha, value=-1)
        rr = dot(r, r)
        z = apply.preconditioner(r)
        before, rz = rz, (rr if preconditioner is None else dot(r, z))
        reached = rr <= target**2
        usable_, reached_, positive = torch.stack([usable, reached, (rz > 0) | reached | ~usable]).tolist()
        if not all(usable_):
            apply.check_curvature(p, product, curvature / dot(p, p))
        apply.check_preconditioner(positive)

        over = [reached_[place] or not usable_[place] or step >= budget[k] for place, k in enumerate(active)]
        for k in active:
            steps[k] = step
        if any(over):
            going = [place for place in range(len(active)) if not over[place]]
            solution[active] = e  # those that go on are overwritten later
            active = [active[place] for place in going]
            keep = torch.tensor(going, dtype=torch.long, device=rest.device)
            # One after the other, so that no more than one block is there twice.
            e = e[keep]
            r = r[keep]
            p = p[keep]
            z = r if preconditioner is None else z[keep]
            rz, before, target = rz[keep], before[keep], target[keep]
        if active:
            p.mul_((rz / before).to(p.dtype)[:, None]).add_(z)
    return Correction(solution, steps, apply.message)


class _Checked:
    """The operator and the preconditioner of one run, and what to say when they are not positive."""

    def __init__(self, operator: Operator, preconditioner: Preconditioner | None):
        self.operator = operator
        self.precondition = preconditioner
        self.spectrum: Spectrum | None = None
        self.message: str | None = None

    def preconditioner(self, r: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        if self.precondition is None:
            return r
        z = self.precondition(r)
        if not isinstance(z, Tensor) or z.shape != r.shape or z.dtype != r.dtype:
            raise InvalidInput(
                f"The preconditioner maps a block {tuple(r.shape)} of {r.dtype} to one like it, got "
                f"{f'{tuple(z.shape)} of {z.dtype}' if isinstance(z, Tensor) else type(z).__name__}."
            )
        return z.detach()

    def check_preconditioner(self, positive: list[bool]) -> None:
        if self.precondition is not None and not all(positive):
            raise InvalidInput(
                "The preconditioner is not positive definite: rᵀP(r) ≤ 0 for a residual r. It must be a "
                "symmetric positive definite map (K, d) -> (K, d) that treats every row alike."
            )

    def check_curvature(
        self, p: Float[Tensor, "K d"], product: Float[Tensor, "K d"], quotients: Float[Tensor, " K"]
    ) -> None:
        """Raise IndefiniteSystem unless pᵀAp ≤ 0 is what rounding makes of zero."""
        require_finite_product(self.operator, product)
        if self.spectrum is None:
            self.spectrum = lanczos(self.operator)
        spectrum = self.spectrum
        # pᵀAp / pᵀp bounds the smallest eigenvalue from above as a Ritz value does, and may be lower.
        lowest = float(quotients.min())
        if lowest < spectrum.smallest:
            spectrum = replace(spectrum, smallest=lowest, smallest_error=abs(lowest))
        if clearly_negative(spectrum.smallest, spectrum.norm, self.operator.dtype):
            raise indefinite_system(self.operator, spectrum, "CG met a direction of negative curvature. ")
        self.message = (
            "CG met a direction along which the matrix is zero to working precision: the system is singular or "
            "nearly so, raise the damping"
        )
