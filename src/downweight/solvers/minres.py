"""MINRES: minimal residuals for symmetric systems that need not be positive."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from downweight.curvature.operator import Operator
from downweight.progress import track
from downweight.shapes import Float
from downweight.solvers.solver import (
    ROUNDING,
    Correction,
    Indefinite,
    Iteration,
    Solution,
    check_count,
    check_rtol,
    dot,
    examine_sign,
    iteration,
    multiply,
    norms,
    refine,
    require_finite_product,
)


@dataclass(frozen=True)
class MINRES:
    r"""Minimal residuals (Paige and Saunders 1975): symmetric A, indefinite or singular allowed.

    The residual never rises from step to step. A consistent singular system gets a solution; an
    inconsistent one the least-squares solution, which does not satisfy A x = v and is returned as
    STAGNATED. With `indefinite="allow"` on an indefinite matrix the solution is a stationary
    point of ½ xᵀAx − vᵀx and not a minimum; `stats` says so, with the smallest eigenvalue.

    - `rtol`: the true ‖A x − v‖ / ‖v‖ to reach; None is 1e-10 in float64, 1e-5 in float32.
    - `max_steps`: products per vector, over all restarts; None is min(10 d, 2000).

    Rounding costs MINRES up to the square of the condition number where CG pays it once
    (Sleijpen, van der Vorst and Modersitzki 2000); the restarts of `solver.refine` win it back.
    Memory: ten blocks (K, d) beside the vectors.
    """

    # Blocks of vectors at work, the right-hand sides among them; measured by benchmarks/memory.py.
    blocks_held: ClassVar[float] = 10.5

    rtol: float | None = None
    max_steps: int | None = None

    def __post_init__(self):
        check_rtol(self.rtol)
        check_count("max_steps", self.max_steps)

    def init(self, operator: Operator, *, indefinite: Indefinite = "raise") -> Iteration:
        return iteration(operator, self.rtol, self.max_steps, examine_sign(operator, indefinite))

    def compute(self, state: Iteration, vectors: Float[Tensor, "K d"]) -> Solution:
        def correct(rest: Tensor, target: Tensor, budget: list[int]) -> Correction:
            return _minimal_residuals(state.operator, rest, target, budget)

        return refine(state, vectors, correct)


def _minimal_residuals(
    operator: Operator,
    rest: Float[Tensor, "K d"],
    target: Float[Tensor, " K"],
    budget: list[int],
) -> Correction:
    r"""e with A e ≈ rest, from e = 0; overwrites rest.

    Lanczos in three terms, with v₁ = rest / β₁:

        β₊ v₊ = A v − α v − β v₋,   α = vᵀAv

    makes a tridiagonal T, which plane rotations (c, s) turn into an upper triangle of bandwidth
    three, column by column:

        δ  = c δ̄ + s α      above the diagonal, from the last rotation (δ̄ = −c β of the step before)
        γ̄  = s δ̄ − c α      on the diagonal before the new rotation
        γ  = √(γ̄² + β₊²),   c = γ̄ / γ,   s = β₊ / γ
        φ  = c φ̄,   φ̄ ← s φ̄          φ̄ is the norm of the residual
        w  = (v − ε₋ w₋₋ − δ w₋) / γ,   e ← e + φ w

    A w is a unit vector, so a w without bound shows a direction in which A is zero: then the rest
    of the residual is out of reach and e is the least-squares solution.
    """
    eps = torch.finfo(operator.dtype).eps
    solution = torch.zeros_like(rest)
    steps = [0] * len(budget)
    singular = False
    active = list(range(len(budget)))

    beta = dot(rest, rest).sqrt()
    v, v_before = rest.div_(_column(beta, rest)), torch.zeros_like(rest)
    w, w_before, e = torch.zeros_like(rest), torch.zeros_like(rest), torch.zeros_like(rest)
    phi_bar = beta.clone()
    beta = torch.zeros_like(beta)
    c, s = -torch.ones_like(beta), torch.zeros_like(beta)
    delta_bar, epsilon, norm = torch.zeros_like(beta), torch.zeros_like(beta), torch.zeros_like(beta)
    for step in track(range(1, max(budget) + 1), "Steps of MINRES"):
        if not active:
            break
        u = multiply(operator, v)
        alpha = dot(v, u)
        if not bool(torch.isfinite(alpha).all()):
            require_finite_product(operator, u)
        u.addcmul_(v_before, _column(beta, u), value=-1).addcmul_(v, _column(alpha, u), value=-1)
        beta_next = dot(u, u).sqrt()

        epsilon_before, delta, gamma_bar = epsilon, c * delta_bar + s * alpha, s * delta_bar - c * alpha
        epsilon, delta_bar = s * beta_next, -c * beta_next
        norm = torch.maximum(norm, (alpha**2 + beta**2 + beta_next**2).sqrt())
        gamma = (gamma_bar**2 + beta_next**2).sqrt()
        gamma = torch.where(gamma > 0, gamma, torch.finfo(gamma.dtype).tiny)
        w_next = w_before.mul_(_column(-epsilon_before, u)).add_(v).addcmul_(w, _column(delta, u), value=-1)
        # A w / γ is a unit vector, so w / γ longer than 1 / (rounding · ‖A‖) says that A is zero along w as far as
        # its products can tell: the residual is the smallest there is, and a step would add noise without end.
        null = ROUNDING * eps * norm * norms(w_next) >= gamma
        c, s = gamma_bar / gamma, beta_next / gamma
        phi = torch.where(null, 0.0, c * phi_bar)
        phi_bar = torch.where(null, phi_bar, s * phi_bar)
        w_next.div_(_column(gamma, u))
        e.addcmul_(w_next, _column(phi, u))
        w_before, w = w, w_next
        v_before, v = v, u.div_(_column(torch.where(beta_next > 0, beta_next, 1.0), u))
        beta = beta_next

        reached, stuck = torch.stack([phi_bar <= target, null]).tolist()
        over = []
        for place, k in enumerate(active):
            steps[k] = step
            singular |= stuck[place] and not reached[place]
            over.append(reached[place] or stuck[place] or step >= budget[k])
        if any(over):
            going = [place for place in range(len(active)) if not over[place]]
            solution[active] = e  # those that go on are overwritten later
            active = [active[place] for place in going]
            keep = torch.tensor(going, dtype=torch.long, device=rest.device)
            v, v_before, w, w_before, e = v[keep], v_before[keep], w[keep], w_before[keep], e[keep]
            beta, c, s, phi_bar, delta_bar = beta[keep], c[keep], s[keep], phi_bar[keep], delta_bar[keep]
            epsilon, norm, target = epsilon[keep], norm[keep], target[keep]
    message = (
        "the system is singular to working precision and a vector lies outside the range of the "
        "matrix: its value is a least-squares solution; raise the damping"
    )
    return Correction(solution, steps, message if singular else None)


def _column(scalars: Float[Tensor, " K"], like: Tensor) -> Tensor:
    return scalars.to(like.dtype)[:, None]
