"""GaussNewtonMatrix: (1/N) Σ wᵢ Jᵢᵀ H_y Jᵢ + ρI, the curvature that a convex loss keeps positive."""

import torch
from torch import Tensor

from downweight.curvature.over_rows import Chunk, OverRows
from downweight.losses import check_convex
from downweight.shapes import Float, Int
from downweight.task import Task

_CONVEXITY_SAMPLE = 256  # rows; a guess that costs less than one product


class GaussNewtonMatrix(OverRows):
    r"""G v = (1/N) Σᵢ wᵢ Jᵢᵀ H_y Jᵢ v + ρ v, H_y the loss's Hessian in the outputs at θˢ.

    Not the empirical Fisher: no outer products of gradients with the data's labels. For the
    cross-entropy it is the true Fisher. A loss of one's own is checked for convexity in the
    outputs on a sample of the training rows, and refused where it fails.
    """

    positive = True

    def __init__(
        self,
        task: Task,
        *,
        index: Int[Tensor, " n"] | None = None,
        memory_limit: int | None = None,
        keep: bool = True,
    ) -> None:
        super().__init__(task, index=index, memory_limit=memory_limit, keep=keep)
        if index is None and not task.loss.convex:
            self._check_convex()

    def _check_convex(self) -> None:
        sample = torch.linspace(0, len(self.task) - 1, min(_CONVEXITY_SAMPLE, len(self.task)))
        inputs, targets = self.task.rows.read(sample.round().long())
        with self.task.evaluating(), torch.no_grad():
            outputs = self.task.forward(self.task.params, inputs).double()
        with torch.enable_grad():
            check_convex(self.task.loss, outputs, targets)

    def _linearize(self, chunk: Int[Tensor, " B"]) -> Chunk:
        inputs, targets = self.task.rows.read(chunk)
        return Chunk(self.task.linearize(inputs), targets, self.task.weights_of(chunk))

    def _product(self, chunk: Chunk, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        at = chunk.linearization
        curved = self.task.output_product(at.outputs, chunk.targets, at.push(vectors), chunk.weights)
        return at.pull(curved)

    def describe(self) -> str:
        return f"Gauss-Newton + l2 {self.task.l2:g} I" if self.task.l2 else "Gauss-Newton"
