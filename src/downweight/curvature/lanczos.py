"""Lanczos: the extreme eigenvalues of an operator, with error bounds."""

from dataclasses import dataclass

import torch

from downweight.curvature.operator import Operator
from downweight.errors import InvalidInput, NonFinite
from downweight.shapes import Float


@dataclass(frozen=True)
class Spectrum:
    """The extreme Ritz values, each within its error of an eigenvalue.

    A Ritz value lies inside the spectrum: `smallest` is never below the smallest eigenvalue and
    `largest` never above the largest (up to the rounding of the products). So a clearly negative
    `smallest` proves that the matrix is indefinite, and a positive one proves nothing by itself.
    """

    smallest: float
    largest: float
    smallest_error: float
    largest_error: float
    steps: int

    @property
    def norm(self) -> float:
        return max(abs(self.smallest), abs(self.largest))


def lanczos(
    operator: Operator,
    *,
    steps: int = 100,
    seed: int = 0,
    tolerance: float = 1e-6,
    until_negative: bool = False,
) -> Spectrum:
    r"""Extreme eigenvalues of the operator after at most `steps` products with one vector.

    With an orthonormal basis Q of the Krylov space of a random start vector, A Q = Q T + β q eᵀ
    with T tridiagonal. For an eigenpair T s = θ s the vector Q s has ‖A Q s − θ Q s‖ = β |s_last|,
    and that is the error: some eigenvalue of A lies within it. The iteration stops when the errors
    of both ends are below `tolerance` · max(|smallest|, |largest|), or, with `until_negative`, as
    soon as the smallest Ritz value is negative beyond that.

    Full reorthogonalisation, so that no eigenvalue appears twice; the basis is float64 also where
    the products are float32, and takes 8 · steps · d bytes. The surprise: an end of the spectrum
    that is crowded (a Hessian's, near zero) is still approached from inside when `steps` run out;
    its error then says so.
    """
    if steps < 1:
        raise InvalidInput(f"steps is at least 1, got {steps}.")
    if not tolerance > 0:
        raise InvalidInput(f"tolerance is positive, got {tolerance:g}.")
    steps = min(steps, operator.size)
    eps, product_eps = torch.finfo(torch.float64).eps, torch.finfo(operator.dtype).eps
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(operator.size, generator=generator, dtype=torch.float64)
    vector = (vector / vector.norm()).to(operator.device)
    basis = vector.new_empty(min(steps, 16), operator.size)
    diagonal: list[float] = []
    offdiagonal: list[float] = []
    scale = 0.0
    for step in range(1, steps + 1):
        if step > basis.shape[0]:
            basis = torch.cat([basis, basis.new_empty(min(steps, 2 * step) - step + 1, operator.size)])
        basis[step - 1] = vector
        known = basis[:step]
        rest = operator.product(vector.to(operator.dtype)[None])[0].detach().to(torch.float64)
        along = vector @ rest
        for _ in range(2):  # twice is enough (Parlett, The Symmetric Eigenvalue Problem, 6.9)
            rest -= known.T @ (known @ rest)
        length = rest.norm()
        alpha, beta = torch.stack([along, length]).tolist()
        if not (abs(alpha) < float("inf") and beta < float("inf")):
            raise NonFinite(f"A product with {operator.describe()} holds NaN or infinity.")
        diagonal.append(alpha)
        scale = max(scale, abs(alpha) + beta)
        # Nothing new is left in the Krylov space: what it holds is exact.
        exhausted = beta <= 100 * eps * scale
        if exhausted or step == steps or step <= 10 or step % 5 == 0:
            values, last = _ritz(diagonal, offdiagonal)
            norm = float(values.abs().max())
            errors = beta * last.abs() + product_eps * norm
            spectrum = Spectrum(float(values[0]), float(values[-1]), float(errors[0]), float(errors[-1]), step)
            reached = max(spectrum.smallest_error, spectrum.largest_error) <= tolerance * norm
            negative = until_negative and spectrum.smallest < -max(tolerance, 100 * product_eps) * norm
            if exhausted or reached or negative or step == steps:
                return spectrum
        offdiagonal.append(beta)
        vector = rest / length
    raise AssertionError("unreachable: the last step returns")


def _ritz(
    diagonal: list[float], offdiagonal: list[float]
) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, " k"]]:
    """Eigenvalues of the tridiagonal matrix, ascending, and the last components of its eigenvectors."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if offdiagonal:
        side = torch.tensor(offdiagonal, dtype=torch.float64)
        matrix += torch.diag(side, 1) + torch.diag(side, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[-1]
