"""Cholesky: the explicit (d, d) matrix, factored once in float64."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from downweight.curvature.lanczos import Spectrum
from downweight.curvature.operator import Damped, Operator
from downweight.errors import InvalidInput, SingularSystem
from downweight.memory import Budget, parse_bytes
from downweight.shapes import Float, Int
from downweight.solvers.solver import (
    Indefinite,
    Result,
    Solution,
    check_indefinite,
    check_rtol,
    clearly_negative,
    exponents,
    indefinite_system,
    multiply,
    norms,
    require_finite_product,
    shifted,
    stationary_message,
    with_message,
)


@dataclass(frozen=True)
class Cholesky:
    r"""The exact solution through A = L Lᵀ, or through A = L D Lᵀ where indefinite is allowed.

    A is built from products with the columns of the identity, made symmetric, stored and factored
    in float64, also where the products are float32 (the matrix then keeps their rounding). One
    step of refinement with the operator itself follows, so the residual is that of the operator
    and not of the stored copy. Needs 2 · 8 · d² bytes, 3 · 8 · d² with
    `indefinite="allow"`, and d products.

    - `memory_limit`: bytes (or "8GiB") that the matrix may use; None is the free memory.
    - `rtol`: a residual above it is returned as STAGNATED instead of DIRECT: the system is so badly
      conditioned that rounding spoils an exact factor. None is 1e-8 in float64, 1e-3 in float32 (a guess).

    With `indefinite="allow"` all eigenvalues are computed as well, which takes several times as
    long as the factor; `stats` has the smallest and the number of negative ones.
    """

    # Blocks of vectors at work, the right-hand sides among them, in units of the network's dtype; counted in float32,
    # where most of them are float64.
    blocks_held: ClassVar[float] = 10.0

    memory_limit: int | str | None = None
    rtol: float | None = None

    def __post_init__(self):
        parse_bytes(self.memory_limit)
        check_rtol(self.rtol)

    @staticmethod
    def least_bytes(size: int, indefinite: Indefinite = "raise") -> int:
        """The matrix and its factor in float64, and a third (d, d) where the eigenvalues of both are asked for."""
        return (2 if indefinite == "raise" else 3) * 8 * size**2

    def init(self, operator: Operator, *, indefinite: Indefinite = "raise") -> "Factor":
        check_indefinite(indefinite)
        size = operator.size
        budget = Budget(operator.device, parse_bytes(self.memory_limit) or operator.memory_limit)
        least = self.least_bytes(size, indefinite)
        _require_memory(size, least, budget)
        width = _columns(operator, min(budget.available(), least))
        vectors = 3 * width * size * operator.dtype.itemsize  # columns, their products, and the parts of these
        set_up = max(least, 8 * size**2 + vectors + operator.product_bytes(width))
        matrix = _assemble(operator, width)
        stats: dict[str, Any] = {"matvecs": size}
        lower = matrix.clone().T  # column-major, as LAPACK wants it, so that nothing is copied again
        failed = torch.empty((), dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(lower, out=(lower, failed))
        diagonal = lower.diagonal()
        # A pivot is never below the smallest eigenvalue nor above the largest, so their ratio
        # bounds the condition number from below: past 1 / (d eps) no digit of a solution is right.
        singular = not bool(failed) and bool(
            (diagonal.min() / diagonal.max()) ** 2 < size * torch.finfo(matrix.dtype).eps
        )
        if not bool(failed) and not singular:
            if indefinite == "allow":
                stats |= _sign_stats(torch.linalg.eigvalsh(matrix))
            return Factor(operator, self._rtol(operator), lower, None, stats, set_up)
        del lower, diagonal
        eigenvalues = torch.linalg.eigvalsh(matrix)
        if indefinite == "raise":
            raise _reason(operator, eigenvalues)
        if float(eigenvalues.abs().min()) <= size * torch.finfo(matrix.dtype).eps * float(eigenvalues.abs().max()):
            raise _singular_system(operator, eigenvalues)
        stats |= _sign_stats(eigenvalues)
        compact, pivots = torch.linalg.ldl_factor(matrix)
        return Factor(operator, self._rtol(operator), compact, pivots, stats, set_up)

    def compute(self, state: "Factor", vectors: Float[Tensor, "K d"]) -> Solution:
        powers = exponents(vectors)
        count, size = vectors.shape
        value = torch.empty_like(vectors)
        residual = torch.zeros(count, dtype=torch.float64, device=vectors.device)
        # Some float64 temporaries of 256 MiB each at most, and always one vector.
        width = max(1, 2**25 // size)
        for start in range(0, count, width):
            piece = slice(start, start + width)
            scaled = shifted(vectors[piece], powers[piece], -1)
            solution, residual[piece] = state.solve(scaled)
            value[piece] = shifted(solution, powers[piece], 1)
        result = []
        stalled = 0
        for power, left in zip(powers, residual.tolist(), strict=True):
            if power is None:
                result.append(Result.ZERO)
            elif left <= state.rtol:
                result.append(Result.DIRECT)
            else:
                result.append(Result.STAGNATED)
                stalled += 1
        stats = dict(state.stats) | {"matvecs": state.stats["matvecs"] + 2 * count}
        if stalled:
            stats = with_message(
                stats,
                f"the condition number and the precision leave a residual above {state.rtol:g} even with an exact "
                "factor; raise the damping" + ("" if vectors.dtype == torch.float64 else " or use float64"),
            )
        return Solution(
            value, residual, torch.ones(count, dtype=torch.long, device=vectors.device), tuple(result), stats
        )

    def _rtol(self, operator: Operator) -> float:
        if self.rtol is not None:
            return self.rtol
        return 1e-8 if operator.dtype == torch.float64 else 1e-3


@dataclass(frozen=True, eq=False)
class Factor:
    """L of L Lᵀ, or with `pivots` the compact L and D of L D Lᵀ, in float64."""

    operator: Operator
    rtol: float
    factor: Float[Tensor, "d d"]
    pivots: Int[Tensor, " d"] | None
    stats: Mapping[str, Any]
    set_up_bytes: int  # the peak before there was a factor

    @property
    def held_bytes(self) -> int:
        return self.factor.nbytes

    def solve(self, vectors: Float[Tensor, "K d"]) -> tuple[Float[Tensor, "K d"], Float[Tensor, " K"]]:
        """Solutions after one step of refinement, where it halved the residual, and their relative residuals.

        The sum x + e is formed in float64 and rounded to the dtype of the operator once. A step that
        gains less corrects by the rounding of the product: in float32 it leaves the residual as it was
        and makes the solution worse by up to the condition number.
        """
        wanted = vectors.double()
        first = self._apply(wanted).to(vectors.dtype)
        missing = self._missing(wanted, first)
        second = (first.double() + self._apply(missing)).to(vectors.dtype)
        before, after = norms(missing), norms(self._missing(wanted, second))
        better = after <= before / 2
        sizes = norms(vectors)
        residual = torch.where(better, after, before) / torch.where(sizes > 0, sizes, 1.0)
        return torch.where(better[:, None], second, first), residual.nan_to_num(nan=torch.inf)

    def _missing(self, wanted: Tensor, value: Tensor) -> Tensor:
        product = multiply(self.operator, value)
        require_finite_product(self.operator, product)
        return wanted - product.double()

    def _apply(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        if self.pivots is None:
            return torch.cholesky_solve(vectors.T, self.factor).T
        return torch.linalg.ldl_solve(self.factor, self.pivots, vectors.T.contiguous()).T


def _require_memory(size: int, least: int, budget: Budget) -> None:
    fits = int(size * (budget.available() / least) ** 0.5)
    budget.require(
        least,
        f"Cholesky of a matrix of size {size} ({least // (8 * size**2)} · 8 · d² bytes)",
        f"d ≤ {fits} would fit. Use Dual() where N·C is smaller than d, CG() otherwise, or name fewer parameters.",
    )


def _columns(operator: Operator, room: int) -> int:
    """Columns of the matrix to compute at a time, in what the factor will take later."""
    # A block, its product and what the product needs inside: twelve blocks, as counted on a small network.
    size = operator.size
    return max(1, min(size, 512, (room - 8 * size**2) // (12 * size * operator.dtype.itemsize)))


def _assemble(operator: Operator, width: int) -> Float[Tensor, "d d"]:
    """The matrix in float64 from products with blocks of the identity, made symmetric in place."""
    size = operator.size
    matrix = torch.empty(size, size, dtype=torch.float64, device=operator.device)
    for start in range(0, size, width):
        columns = torch.zeros(min(width, size - start), size, dtype=operator.dtype, device=operator.device)
        columns.diagonal(offset=start).fill_(1.0)
        product = multiply(operator, columns)
        require_finite_product(operator, product)
        matrix[start : start + width] = product
    largest, asymmetry = float(matrix.abs().max()), 0.0
    width = max(1, min(size, 512))
    for start in range(0, size, width):
        rows = matrix[start : start + width, start:]
        columns = matrix[start:, start : start + width].T
        asymmetry = max(asymmetry, float((rows - columns).abs().max()))
        mean = (rows + columns) / 2
        rows.copy_(mean)
        columns.copy_(mean)
    if asymmetry > torch.finfo(operator.dtype).eps ** 0.5 * largest:
        raise InvalidInput(
            f"{operator.describe()} is not symmetric: its products give entries that differ by up to "
            f"{asymmetry:.2g} from their mirror images, of {largest:.2g} at most."
        )
    return matrix


def _sign_stats(eigenvalues: Float[Tensor, " d"]) -> dict[str, Any]:
    smallest = float(eigenvalues[0])
    stats: dict[str, Any] = {
        "smallest_eigenvalue": smallest,
        "smallest_eigenvalue_error": 0.0,
        "negative_eigenvalues": int((eigenvalues < 0).sum()),
    }
    if smallest < 0:
        stats["message"] = stationary_message(smallest)
    return stats


def _reason(operator: Operator, eigenvalues: Float[Tensor, " d"]) -> Exception:
    """Why there is no Cholesky factor: a negative eigenvalue, or one too near zero to tell."""
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    if clearly_negative(smallest, max(abs(smallest), abs(largest)), operator.dtype):
        return indefinite_system(operator, Spectrum(smallest, largest, 0.0, 0.0, 0), exact=True)
    return _singular_system(operator, eigenvalues)


def _singular_system(operator: Operator, eigenvalues: Float[Tensor, " d"]) -> SingularSystem:
    damping = operator.damping if isinstance(operator, Damped) else 0.0
    nearest = float(eigenvalues[eigenvalues.abs().argmin()])
    largest = float(eigenvalues.abs().max())
    word = str(operator.dtype).removeprefix("torch.")
    return SingularSystem(
        f"The system ({operator.describe()}) is singular to the precision of {word}: an eigenvalue is "
        f"{nearest:.2g} beside a largest of {largest:.3g}, so a solution would be rounding noise along its direction. "
        f"Raise the damping (now {damping:g}; {1e-6 * largest:.1g} would give a condition number of a million)"
        + ("." if operator.dtype == torch.float64 else ", or use float64.")
    )
