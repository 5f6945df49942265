"""HessianMatrix: the second derivative of the whole cost, which need not be positive away from a minimum."""

from torch import Tensor

from downweight.curvature.over_rows import Chunk, OverRows
from downweight.shapes import Float, Int


class HessianMatrix(OverRows):
    r"""H v = (1/N) Σᵢ wᵢ (Jᵢᵀ H_y Jᵢ v + Σ_c (∂L/∂y_c) ∇²y_c v) + ρ v.

    The first term is Gauss-Newton's; the second is what it leaves out, and may be indefinite.
    """

    positive = False

    def _linearize(self, chunk: Int[Tensor, " B"]) -> Chunk:
        inputs, targets = self.task.rows.read(chunk)
        weights = self.task.weights_of(chunk)
        linearization = self.task.linearize(
            inputs, lambda outputs: self.task.output_gradient(outputs, targets, weights)
        )
        return Chunk(linearization, targets, weights)

    def _product(self, chunk: Chunk, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        at = chunk.linearization
        pushed, bent = at.push_and_bend(vectors)
        curved = self.task.output_product(at.outputs, chunk.targets, pushed, chunk.weights)
        return at.pull(curved).add_(bent)

    def describe(self) -> str:
        return f"Hessian + l2 {self.task.l2:g} I" if self.task.l2 else "Hessian"
