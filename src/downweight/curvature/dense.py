"""Dense: a matrix that is already there."""

import torch
from torch import Tensor

from downweight.curvature.operator import Operator
from downweight.errors import InvalidInput, InvalidType, NonFinite
from downweight.shapes import Float, Int


class Dense(Operator):
    """A given symmetric matrix; `positive` is False because nobody has looked."""

    positive = False
    rows = None

    def __init__(self, matrix: Tensor):
        if not isinstance(matrix, Tensor):
            raise InvalidType(f"Dense holds a torch.Tensor, got {type(matrix).__name__}.")
        if matrix.dtype not in (torch.float32, torch.float64):
            raise InvalidType(f"Dense holds float32 or float64, got {matrix.dtype}.")
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
            raise InvalidInput(f"Dense holds a square matrix, got {tuple(matrix.shape)}.")
        matrix = matrix.detach()
        if not bool(torch.isfinite(matrix).all()):
            raise NonFinite("The matrix holds NaN or infinity.")
        asymmetry = float((matrix - matrix.T).abs().max())
        # A product JᵀHJ is symmetric up to the order of its sums, far inside √eps; a matrix that
        # is not symmetric by mistake is far outside.
        allowed = torch.finfo(matrix.dtype).eps ** 0.5 * float(matrix.abs().max())
        if asymmetry > allowed:
            raise InvalidInput(
                f"The matrix is not symmetric: entries differ from their mirror images by up to "
                f"{asymmetry:.2g}. Curvatures are symmetric; pass (M + M.T) / 2 if the difference "
                "is only rounding."
            )
        self.matrix = matrix
        self.size, self.dtype, self.device = matrix.shape[0], matrix.dtype, matrix.device

    def product(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        return vectors @ self.matrix

    def sample(self, rows: Int[Tensor, " B"]) -> "Dense":
        """Itself: a given matrix is not a mean over rows."""
        return self

    def describe(self) -> str:
        return f"dense matrix of size {self.size}"
