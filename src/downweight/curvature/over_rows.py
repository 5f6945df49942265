"""What every curvature of a task shares: chunks of rows, kept linearisations, the penalty."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from downweight.curvature.operator import Operator
from downweight.errors import InvalidInput
from downweight.linearization import Linearization
from downweight.memory import Budget, output_sizes
from downweight.rows import chunks
from downweight.shapes import Float, Int
from downweight.task import Task

# Of the memory that is available: for linearisations that are kept between products, and for one
# chunk at work. Guesses that leave room for the vectors of a solver.
_KEEP, _WORK = 0.25, 0.125
# More in one chunk gains nothing: large enough to fill a GPU (a guess); on a CPU 20 vectors cost a tenth less than at
# twice this size (benchmarks/product.py).
_CHUNK_BYTES = {"cuda": 4 * 2**30, "cpu": 128 * 2**20}


@dataclass(frozen=True)
class Chunk:
    """Rows linearised at θˢ, with what the loss needs of them."""

    linearization: Linearization
    targets: Tensor
    weights: Tensor | None


class OverRows(Operator):
    """(1/n) Σ of one term a row, plus l2 I, by chunks of rows and blocks of vectors.

    The linearisation of a chunk serves all vectors of a product, and all later products where
    the activations of all rows fit in a quarter of the available memory.
    """

    def __init__(
        self,
        task: Task,
        *,
        index: Int[Tensor, " n"] | None = None,
        memory_limit: int | None = None,
        keep: bool = True,
    ) -> None:
        self.task = task
        self.budget = Budget(task.device, memory_limit)
        self.size, self.dtype, self.device = task.size, task.dtype, task.device
        self._index = torch.arange(len(task)) if index is None else index.cpu()
        self.rows = len(self._index)
        available = self.budget.available()
        self.row_bytes, self.vector_bytes = task.row_bytes, task.size * task.dtype.itemsize
        self._work = min(int(_WORK * available), _CHUNK_BYTES.get(self.device.type, 2**27))
        # Where a vector alone takes that much, a quarter of one more is soon outweighed by fewer passes.
        room = max(self._work - self.vector_bytes, self.vector_bytes // 4)
        self.chunk_rows = max(1, min(self.rows, room // self.row_bytes))
        self.kept_bytes = self.rows * self.row_bytes + math.ceil(self.rows / self.chunk_rows) * self.vector_bytes
        if not keep or self.kept_bytes > _KEEP * available:
            self.kept_bytes = 0
        self._kept: dict[int, Chunk] = {}
        self._checked = not keep

    @abstractmethod
    def _linearize(self, chunk: Int[Tensor, " B"]) -> Chunk:
        """The chunk with what this curvature needs of it."""

    @abstractmethod
    def _product(self, chunk: Chunk, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        """Σ over the rows of the chunk of the term of each row times the vectors."""

    def product(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        if len(vectors) == 0:
            return torch.zeros_like(vectors)
        block = self.block
        with self.task.evaluating():
            if not self._checked:
                self._check_symmetric()
                self._checked = True
            total = self.task.mean(
                self._index,
                self.chunk_rows,
                lambda rows: self._over_vectors(self._chunk(rows), vectors, block),
            )
        return total.add_(vectors, alpha=self.task.l2) if self.task.l2 else total

    def _check_symmetric(self) -> None:
        """u·Cv = v·Cu on two rows: some operations of torch have no second derivative, and some a wrong one."""
        generator = torch.Generator().manual_seed(0)
        # One vector after the other: in float64 and all at a time they are more than a solver holds.
        pair = [
            torch.randn(1, self.size, generator=generator, dtype=torch.float64).to(self.device, self.dtype)
            for _ in range(2)
        ]
        try:
            chunk = self._linearize(self._index[:2])
            products = [self._product(chunk, vector) for vector in pair]
        except NotImplementedError as error:
            raise InvalidInput(
                f"{self.describe()} needs derivatives that torch does not have for this model: {error}. Its layers are "
                f"{self.task.layers}. Replace the one at fault, or use curvature='gauss_newton' with solver='dual', "
                "which differentiates once."
            ) from error
        one, other = _dot(pair[0], products[1]), _dot(pair[1], products[0])
        sizes = [math.sqrt(_dot(vector, vector)) for vector in (*pair, *products)]
        scale = max(sizes[0] * sizes[3], sizes[1] * sizes[2])
        # Wrong derivatives are off by O(1); rounding stays far below the root of eps.
        if abs(one - other) > torch.finfo(self.dtype).eps ** 0.5 * scale:
            raise InvalidInput(
                f"{self.describe()} comes out unsymmetric on two rows (u·Cv = {one:.6g}, v·Cu = {other:.6g}): torch's "
                f"second derivative of an operation in this model is wrong. Its layers are {self.task.layers}; "
                "torch's own weight normalisation is known for it. Write that layer in plain operations, or use "
                "curvature='gauss_newton' with solver='dual', which differentiates once."
            )

    @property
    def memory_limit(self) -> int | None:
        return self.budget.limit

    @property
    def block(self) -> int:
        """Vectors that pass a chunk at a time."""
        return max(1, self._work // (self.chunk_rows * max(self.row_bytes, self.pass_row_bytes)))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk linearised: the activations of its rows, and the gradient that is differentiated again."""
        return self.chunk_rows * self.row_bytes + self.vector_bytes

    def pass_bytes(self, count: int) -> int:
        """Bytes of taking `count` vectors through a linearised chunk, beside the vectors."""
        return self.chunk_rows * self.pass_row_bytes * min(count, self.block)

    @cached_property
    def pass_row_bytes(self) -> int:
        """Bytes of taking one vector through one linearised row."""
        # A pass holds the parts of the network it is at, not all of them: five eighths of what is kept of a row, or
        # twice its largest activation, which need not be kept (word vectors), as counted by benchmarks/memory.py; what
        # is done with the outputs takes two more of them in float64.
        outputs = 2 * 8 * math.prod(self.task.output_shape)
        return max(5 * self.row_bytes // 8, 2 * self._largest_activation()) + outputs

    def _largest_activation(self) -> int:
        """Bytes a row of the largest output of a module in a forward pass: what grows from one row to three."""
        found = []
        with self.task.evaluating(), torch.no_grad():
            for count in (1, 3):
                inputs, _ = self.task.rows.read(torch.arange(count) % len(self.task))
                with output_sizes() as sizes:
                    self.task.forward(self.task.params, inputs)
                found.append(sizes)
        return max(((large - small) // 2 for small, large in zip(*found, strict=False)), default=0)

    def product_bytes(self, count: int) -> int:
        """Bytes of a product with `count` vectors beside the vectors, kept linearisations included."""
        # The sum over several chunks holds the part of the one before beside that of the next.
        sums = count * self.vector_bytes if self.chunk_rows < len(self._index) else 0
        return (self.kept_bytes or self.chunk_bytes) + self.pass_bytes(count) + sums

    def _over_vectors(self, chunk: Chunk, vectors: Tensor, block: int) -> Tensor:
        if len(vectors) <= block:
            return self._product(chunk, vectors)
        out = torch.empty_like(vectors)
        for start in range(0, len(vectors), block):
            out[start : start + block] = self._product(chunk, vectors[start : start + block])
        return out

    def chunks(self) -> Iterator[Chunk]:
        """The linearised chunks of rows, in order."""
        for rows in chunks(self._index, self.chunk_rows):
            yield self._chunk(rows)

    def sample(self, rows: Int[Tensor, " B"]) -> Self:
        index = self._index[rows.cpu()]
        sample = type(self)(self.task, index=index, memory_limit=self.budget.limit, keep=False)
        sample.pass_row_bytes = self.pass_row_bytes
        return sample

    def _chunk(self, rows: Tensor) -> Chunk:
        first = int(rows[0])
        if first in self._kept:
            return self._kept[first]
        chunk = self._linearize(rows)
        self.task.check_chunk(self.task.rows, chunk.linearization.outputs, chunk.targets, rows, "train")
        if self.kept_bytes:
            self._kept[first] = chunk
        return chunk


def _dot(a: Float[Tensor, "1 d"], b: Float[Tensor, "1 d"]) -> float:
    """a · b in float64, without a float64 copy of either."""
    parts = zip(a[0].split(2**17), b[0].split(2**17), strict=True)
    return float(torch.stack([one.double() @ other.double() for one, other in parts]).sum())
