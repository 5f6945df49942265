"""Inner products between families of per-row gradients, block by block, in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from downweight.features import Features, RowGradients
from downweight.gradients import Gradients
from downweight.progress import track
from downweight.rows import chunks
from downweight.shapes import Float

# Parts of the room, a guess: features that are held of each of two families, activations and products at work.
_HOLD, _WORK = 0.35, 0.15
# More in one pass gains nothing, as in a product with the curvature.
_PASS_BYTES = {"cuda": 4 * 2**30, "cpu": 128 * 2**20}
# Temporaries of a product are at most this part of the block they are added to. A guess.
_STRIPS = 8


@dataclass(frozen=True)
class Kernel:
    """Gram matrices of families of gradients of one task.

    room: bytes that it may use beside its answers, where one row of each family fits;
    activation_bytes: what one row holds during a forward and backward pass.
    """

    formed: RowGradients
    room: int
    activation_bytes: int

    def gram(self, left: Gradients, right: Gradients) -> Float[Tensor, "n m"]:
        """⟨v, v'⟩ for all rows (and their r cotangents, row-major) of two families, float64.

        Groups are not summed here. The features of a family are formed once where they fit in
        memory, else again for every block of the other one.
        """
        same = left is right
        rows, columns = self._blocks(left), self._blocks(right)
        held = self._features(left, rows[0]) if len(rows) == 1 else None
        held_right = None
        if len(columns) == 1 and not same:
            held_right = self._features(right, columns[0])
        out: Tensor | None = None
        for i, block in enumerate(track(rows, f"Inner products of {left.what} and {right.what}")):
            mine = self._features(left, block) if held is None else held
            for j, other in enumerate(columns[: i + 1] if same else columns):
                theirs = mine if same and i == j else held_right or self._features(right, other)
                if out is None:
                    shape = (len(left.index) * mine.size, len(right.index) * theirs.size)
                    out = torch.zeros(shape, dtype=torch.float64, device=left.task.device)
                across = slice(int(block[0]) * mine.size, (int(block[-1]) + 1) * mine.size)
                along = slice(int(other[0]) * theirs.size, (int(other[-1]) + 1) * theirs.size)
                self._accumulate(out[across, along], mine, theirs)
                if same and i != j:
                    out[along, across] = out[across, along].T
                del theirs  # before the next are formed
            del mine
        assert out is not None  # a family has at least one row
        return out

    def squared_norms(self, family: Gradients) -> Float[Tensor, " n"]:
        """‖vₖ‖² of every vector of a family (summed over groups), float64."""
        if family.members is None:
            parts = [self._features(family, block).diagonal() for block in self._blocks(family)]
            return torch.cat(parts).flatten()
        size = self.pass_rows(1)
        parts = [
            family.only(place, place + 1).vectors(self.formed, size).double().square().sum(1)
            for place in range(len(family))
        ]
        return torch.cat(parts)

    def feature_bytes(self, family: Gradients, rows: int | None = None) -> int:
        """Bytes that the features of a family, or of so many of its rows, hold at a time."""
        rows = len(family.index) if rows is None else rows
        return min(rows, self._block_rows(family)) * self._row_bytes(family)

    def forming_bytes(self, family: Gradients, rows: int | None = None) -> int:
        """Bytes that forming these features takes beside them."""
        rows = min(len(family.index) if rows is None else rows, self._block_rows(family))
        passing = min(rows, self.pass_rows(family.cotangents))
        # A block that is formed in several passes has one of them twice.
        twice = passing * self._row_bytes(family) if passing < rows else 0
        return passing * self._pass_bytes(family.cotangents) + twice

    def pass_rows(self, size: int) -> int:
        """Rows that may pass the network at a time with `size` cotangents each."""
        room = min(int(_WORK * self.room), _PASS_BYTES.get(self.formed.task.device.type, 2**27))
        return max(1, room // self._pass_bytes(size))

    def _pass_bytes(self, size: int) -> int:
        """Bytes of forming one row's features, beside them: gradients formed explicitly are there twice."""
        explicit = self.formed.explicit_size * (self.formed.task.dtype.itemsize + 8)
        return self.activation_bytes * (2 + size) + size * explicit

    def _row_bytes(self, family: Gradients) -> int:
        return self._features(family, torch.zeros(1, dtype=torch.long)).nbytes

    def _block_rows(self, family: Gradients) -> int:
        return max(1, int(_HOLD * self.room) // self._row_bytes(family))

    def holds(self, family: Gradients) -> bool:
        """Whether the features of all its rows fit at a time."""
        return len(family.index) <= self._block_rows(family)

    def _blocks(self, family: Gradients) -> list[Tensor]:
        return list(chunks(torch.arange(len(family.index)), self._block_rows(family)))

    def _features(self, family: Gradients, block: Tensor) -> Features:
        part = family.rows_of(block)
        return Features.collect(self._passes(part), len(block))

    def _passes(self, family: Gradients) -> Iterator[Features]:
        with family.task.evaluating():
            for _, inputs, cotangent in family.chunks(self.pass_rows(family.cotangents)):
                yield self.formed.features(inputs, cotangent)

    def _accumulate(self, out: Tensor, left: Features, right: Features) -> None:
        """out += the inner products of two blocks, in strips whose temporaries stay small."""
        out = out.unflatten(0, (left.count, left.size)).unflatten(2, (right.count, right.size))
        room = min(out.nbytes // _STRIPS, int(_WORK * self.room))
        strip = max(1, room // right.temporary_bytes(left))
        for rows in chunks(torch.arange(left.count), strip):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            left.rows(part).gram_into(out[part], right)
