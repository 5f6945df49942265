"""Families of gradients Σ Jᵢᵀ uᵢ (of rows, of groups of rows, of queries) that nobody has to store."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from downweight.errors import InvalidInput, InvalidType
from downweight.features import RowGradients
from downweight.rows import Inputs, Rows, chunks
from downweight.shapes import Float, Int
from downweight.task import Task

# (outputs, targets, positions of these rows in `rows`) -> cotangents (r, B, *out), float64.
RowCotangent = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Gradients:
    """Vectors vₖ = Σ_{i in group k} Jᵢᵀ uᵢ; without groups one (or r) a row.

    rows: where the inputs come from; index: which of them, each once;
    cotangent: uᵢ from outputs and targets; members: for groups, the group of every entry of
    `entries`, which are positions in `index`.
    """

    task: Task
    rows: Rows
    index: Int[Tensor, " n"]
    cotangent: RowCotangent
    what: str
    cotangents: int = 1
    entries: Int[Tensor, " e"] | None = None
    members: Int[Tensor, " e"] | None = None
    groups: int = 0

    def __len__(self) -> int:
        return len(self.index) if self.members is None else self.groups

    def chunks(self, size: int) -> Iterator[tuple[slice, Inputs, Callable[[Tensor], Tensor]]]:
        """(positions in `index`, inputs, outputs -> cotangents) by chunks of rows."""
        for part in chunks(torch.arange(len(self.index)), size):
            positions = self.index[part]
            inputs, targets = self.rows.read(positions)

            def cotangent(outputs: Tensor, targets: Tensor = targets, positions: Tensor = positions) -> Tensor:
                self.task.check_chunk(self.rows, outputs, targets, positions, self.what)
                return self.cotangent(outputs, targets, positions)

            yield slice(int(part[0]), int(part[-1]) + 1), inputs, cotangent

    def reduce(self, values: Tensor, dim: int) -> Tensor:
        """Sums over the rows of each group along `dim`; the values themselves without groups."""
        if self.members is None or self.entries is None:
            return values
        shape = list(values.shape)
        shape[dim] = self.groups
        chosen = values.index_select(dim, self.entries.to(values.device))
        return values.new_zeros(shape).index_add_(dim, self.members.to(values.device), chosen)

    def only(self, start: int, stop: int) -> "Gradients":
        """The vectors from `start` to `stop` as a family of their own."""
        if self.members is None or self.entries is None:
            return self.rows_of(torch.arange(start, stop))
        inside = (self.members >= start) & (self.members < stop)
        kept, entries = self.entries[inside].unique(return_inverse=True)
        return replace(
            self,
            index=self.index[kept],
            entries=entries,
            members=self.members[inside] - start,
            groups=stop - start,
        )

    def rows_of(self, positions: Int[Tensor, " k"]) -> "Gradients":
        """Some of the rows as a family of single rows, without groups."""
        return replace(self, index=self.index[positions], entries=None, members=None, groups=0)

    def vectors(self, formed: RowGradients, size: int) -> Float[Tensor, "n d"]:
        """The vectors themselves, in the model's dtype; `size` rows are at work at a time."""
        with self.task.evaluating():
            if self.members is None or self.entries is None:
                parts = [formed.vectors(inputs, u)[:, 0] for _, inputs, u in self.chunks(size)]
                return torch.cat(parts)
            shape = (self.groups, self.task.size)
            total = torch.zeros(shape, dtype=self.task.dtype, device=self.task.device)
            for part, inputs, cotangent in self.chunks(size):
                rows = formed.vectors(inputs, cotangent)[:, 0]
                inside = (self.entries >= part.start) & (self.entries < part.stop)
                chosen = rows[(self.entries[inside] - part.start).to(rows.device)]
                total.index_add_(0, self.members[inside].to(total.device), chosen)
            return total

    def dot(self, vectors: Float[Tensor, "K d"], size: int, block: int) -> Float[Tensor, "n K"]:
        """Inner products with any vectors, float64: (Jᵢ x)·uᵢ, without forming a gradient.

        `size` rows and `block` vectors are at work at a time.
        """
        parts = []
        with self.task.evaluating():
            for _, inputs, cotangent in self.chunks(size):
                at = self.task.linearize(inputs)
                u = cotangent(at.outputs)[0].flatten(1)
                pushed = torch.cat([at.push(part) for part in vectors.split(block)])
                parts.append(torch.einsum("kbo,bo->bk", pushed.flatten(2).double(), u))
        return self.reduce(torch.cat(parts), 0)


def roots(task: Task) -> Gradients:
    """Jᵢᵀ Rᵢᵀ of every training row: N r vectors whose outer products add up to N times G − ρI."""

    def cotangent(outputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        return task.output_root(outputs, targets, task.weights_of(positions))

    index = torch.arange(len(task))
    return Gradients(task, task.rows, index, cotangent, "train", cotangents=task.root_size)


def training(task: Task, removals: Sequence[Sequence[int]] | Tensor | None = None) -> Gradients:
    """wᵢ ∇L of every training row, of some rows (a tensor), or summed over groups (lists)."""

    def cotangent(outputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        return task.output_gradient(outputs, targets, task.weights_of(positions)).unsqueeze(0)

    if removals is None:
        return Gradients(task, task.rows, torch.arange(len(task)), cotangent, "train")
    if isinstance(removals, Tensor):
        return Gradients(task, task.rows, removals, cotangent, "train")
    flat = torch.tensor([row for group in removals for row in group])
    index, entries = flat.unique(return_inverse=True)
    members = torch.tensor([place for place, group in enumerate(removals) for _ in group])
    return Gradients(
        task,
        task.rows,
        index,
        cotangent,
        "train",
        entries=entries,
        members=members,
        groups=len(removals),
    )


def of_losses(task: Task, rows: Rows, what: str) -> Gradients:
    """∇L of rows outside the training set."""

    def cotangent(outputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        return task.output_gradient(outputs, targets).unsqueeze(0)

    return Gradients(task, rows, torch.arange(len(rows)), cotangent, what)


def check_removals(removals: Sequence[Sequence[int]], count: int, *, whole: bool = False) -> list[list[int]]:
    """Groups of row indices, checked one by one: in range, no duplicates, not empty, not all."""
    checked = []
    for place, group in enumerate(removals):
        rows = [_as_row(row, place) for row in group]
        if not rows:
            raise InvalidInput(f"Removal {place} is empty; name at least one row.")
        outside = [row for row in rows if row < 0 or row >= count]
        if outside:
            raise InvalidInput(f"Removal {place} names row {outside[0]}; the training rows are 0 to {count - 1}.")
        if len(set(rows)) < len(rows):
            repeated = next(row for row in rows if rows.count(row) > 1)
            raise InvalidInput(f"Removal {place} names row {repeated} twice.")
        if len(rows) == count and not whole:
            raise InvalidInput(f"Removal {place} is all {count} training rows; nothing would be left to learn from.")
        checked.append(rows)
    if not checked:
        raise InvalidInput("There are no removals; name at least one row or group of rows.")
    return checked


def _as_row(row: object, place: int) -> int:
    if isinstance(row, bool) or not hasattr(row, "__index__"):
        raise InvalidType(f"Removal {place} has the entry {row!r}; rows are named by whole numbers.")
    return row.__index__()  # pyright: ignore[reportAttributeAccessIssue]  # checked just above
