"""Operator: a symmetric matrix known by its products; Damped: the same matrix plus λI."""

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import final

import torch
from torch import Tensor

from downweight.errors import InvalidInput, InvalidType
from downweight.shapes import Float, Int


class Operator(ABC):
    """A symmetric (d, d) matrix that nobody has to store.

    A subclass gives `size` (d), `dtype` and `device` of the vectors it takes, and

    - `positive`: known to be positive semidefinite *by construction*. False means unknown;
    - `rows`: the N rows that its mean runs over, None where there are none.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    positive: bool
    rows: int | None

    @property
    def memory_limit(self) -> int | None:
        """Bytes that solving with this matrix may take; None is the free memory of its device."""
        return None

    def product_bytes(self, count: int) -> int:
        """Bytes that a product with so many vectors takes beside the vectors; 0 where nobody has counted."""
        return 0

    @abstractmethod
    def product(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        """A vₖ for every row vₖ. The result is new memory, which the caller may overwrite."""

    @abstractmethod
    def sample(self, rows: Int[Tensor, " B"]) -> "Operator":
        """The same operator with its mean over these rows only."""

    @abstractmethod
    def describe(self) -> str:
        """What this matrix is, for messages: "Gauss-Newton + 0.001 I"."""

    @final
    def __matmul__(self, vectors: Float[Tensor, "*K d"]) -> Float[Tensor, "*K d"]:
        if vectors.ndim not in (1, 2) or vectors.shape[-1] != self.size:
            raise InvalidInput(
                f"{self.describe()} multiplies vectors of shape ({self.size},) or "
                f"(K, {self.size}), got {tuple(vectors.shape)}."
            )
        if vectors.ndim == 1:
            return self.product(vectors[None])[0]
        return self.product(vectors)


class Damped(Operator):
    """A = C + λI, with λ ≥ 0 absolute (not relative to the eigenvalues of C)."""

    def __init__(self, operator: Operator, damping: float | int):
        if isinstance(damping, bool) or not isinstance(damping, Real):
            raise InvalidType(f"damping is a number, got {damping!r}.")
        if not (math.isfinite(damping) and damping >= 0):
            raise InvalidInput(
                f"damping is finite and not negative, got {damping:g}. It is the absolute λ that "
                "is added to every eigenvalue; a negative one can make the system singular."
            )
        self.operator = operator
        self.damping = float(damping)
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device
        self.positive, self.rows = operator.positive, operator.rows

    def product(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        return self.operator.product(vectors).add_(vectors, alpha=self.damping)

    @property
    def memory_limit(self) -> int | None:
        return self.operator.memory_limit

    def product_bytes(self, count: int) -> int:
        return self.operator.product_bytes(count)

    def sample(self, rows: Int[Tensor, " B"]) -> "Damped":
        return Damped(self.operator.sample(rows), self.damping)

    def describe(self) -> str:
        return f"{self.operator.describe()} + {self.damping:g} I"
