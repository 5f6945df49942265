"""Small operators with known answers for the tests of the solvers; nothing here uses a solver."""

from collections.abc import Sequence

import torch
from torch import Tensor

from downweight.curvature.operator import Operator


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors_of(count: int, size: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, size, generator=seeded(seed), dtype=torch.float64).to(dtype)


def basis_of(size: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix; its columns are the eigenvectors of `matrix_with(…, seed)`."""
    return torch.linalg.qr(torch.randn(size, size, generator=seeded(seed), dtype=torch.float64))[0]


def matrix_with(eigenvalues: Tensor | Sequence[float], seed: int = 0) -> Tensor:
    """A dense symmetric float64 matrix with these eigenvalues."""
    eigenvalues = torch.as_tensor(eigenvalues, dtype=torch.float64)
    basis = basis_of(len(eigenvalues), seed)
    matrix = (basis * eigenvalues) @ basis.T
    return (matrix + matrix.T) / 2


def spread(size: int, condition: float) -> Tensor:
    """Eigenvalues from 1 / condition to 1 in equal ratios."""
    return torch.logspace(-torch.log10(torch.tensor(condition)).item(), 0, size, dtype=torch.float64)


def signed(size: int, condition: float) -> Tensor:
    """The same, every third one negative."""
    eigenvalues = spread(size, condition)
    eigenvalues[::3] *= -1
    return eigenvalues


def dense_solution(matrix: Tensor, vectors: Tensor) -> Tensor:
    return torch.linalg.solve(matrix.double(), vectors.double().T).T


def relative_error(value: Tensor, truth: Tensor) -> float:
    """The largest ‖x − x*‖ / ‖x*‖ over the block."""
    return float(((value.double() - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


class Rows(Operator):
    """(1/N) Σ JᵢJᵢᵀ + λI, with λ in the open; remembers the rows of every sample that was taken."""

    positive = True

    def __init__(self, jacobian: Tensor, damping: float = 0.0, log: list[Tensor] | None = None):
        self.jacobian, self.damping = jacobian, damping
        self.count, self.size = jacobian.shape
        self.rows = self.count
        self.dtype, self.device = jacobian.dtype, jacobian.device
        self.log = [] if log is None else log

    def matrix(self) -> Tensor:
        eye = torch.eye(self.size, dtype=self.dtype)
        return self.jacobian.T @ self.jacobian / self.count + self.damping * eye

    def product(self, vectors: Tensor) -> Tensor:
        return vectors @ self.jacobian.T @ self.jacobian / self.count + self.damping * vectors

    def sample(self, rows: Tensor) -> "Rows":
        self.log.append(rows)
        return Rows(self.jacobian[rows], self.damping)

    def describe(self) -> str:
        return "rows"


class Spy(Operator):
    """A matrix, taken at its word about `positive`, that counts; from product `breaks_at` on it gives NaN."""

    rows = None

    def __init__(self, matrix: Tensor, *, positive: bool = True, breaks_at: int | None = None):
        self.matrix, self.positive, self.breaks_at = matrix, positive, breaks_at
        self.size, self.dtype, self.device = matrix.shape[0], matrix.dtype, matrix.device
        self.blocks: list[int] = []

    def product(self, vectors: Tensor) -> Tensor:
        self.blocks.append(vectors.shape[0])
        product = vectors @ self.matrix.T
        if self.breaks_at is not None and len(self.blocks) >= self.breaks_at:
            product[-1, 0] = torch.nan
        return product

    def sample(self, rows: Tensor) -> "Spy":
        return self

    def describe(self) -> str:
        return "a matrix under test"


class Drifting(Spy):
    """Off by a factor of 1 + 1e-6 for its first products: a recurrence comes to believe in another matrix."""

    def __init__(self, matrix: Tensor, products: int):
        super().__init__(matrix)
        self.products = products

    def product(self, vectors: Tensor) -> Tensor:
        product = super().product(vectors)
        return product * (1 + 1e-6) if len(self.blocks) <= self.products else product
