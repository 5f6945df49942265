"""A task's network at R parameter vectors at once: stacked parameters, one batched forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from downweight.linearization import quiet_batching
from downweight.rows import Inputs, Rows, map_tensors
from downweight.shapes import Float, Int, Shaped
from downweight.task import Task

Stacked = dict[str, Tensor]  # one (R, *shape) a parameter or buffer

# On a CPU batched products of wide layers are no faster than one after the other, and those of narrow layers are
# (1.2 times on a quiet machine, benchmarks/replicas.py). A rule of the model alone: how many replicas run together
# must not change their bits.
_NARROW = 300_000
_CONVOLUTIONS = nn.modules.conv._ConvNd
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


def stack(task: Task, count: int, flat: Float[Tensor, "R d"] | None = None) -> Stacked:
    """`count` copies of a task's parameters, or the rows of `flat`, as stacked tensors of their own."""
    params = task.params
    if flat is None:
        return {name: value.expand(count, *value.shape).clone() for name, value in params.items()}
    pieces = flat.to(task.device, task.dtype).split([value.numel() for value in params.values()], dim=1)
    return {
        name: piece.reshape(count, *value.shape).clone()
        for (name, value), piece in zip(params.items(), pieces, strict=True)
    }


def unstack(stacked: Stacked) -> Float[Tensor, "R d"]:
    return torch.cat([value.detach().flatten(1) for value in stacked.values()], 1)


def part(stacked: Stacked, rows: slice) -> Stacked:
    return {name: value[rows] for name, value in stacked.items()}


@dataclass(frozen=True)
class Stack:
    """How R replicas pass the network: together by `vmap`, or one after the other.

    A replica's numbers do not depend on how many pass with it, if at least two do: a batched product of one matrix
    takes another road through the libraries than that of several. On a CPU they are then the same bits where the
    matrices of all layers and batches fill whole lines of 64 bytes; elsewhere MKL may round a last digit otherwise at
    another place in the stack (not with MKL_CBWR=AUTO,STRICT in the environment).
    """

    task: Task
    batched: bool

    @classmethod
    def of(cls, task: Task) -> "Stack":
        """Together where that is faster and gives what the network gives alone."""
        on_cpu = task.device.type == "cpu"
        # Batch norm over stacked replicas is one over more channels, whose rounding depends on a channel's place; and
        # without a momentum it needs a number that a batch of replicas does not have.
        alone = (
            isinstance(module, _CONVOLUTIONS)
            or (isinstance(module, _BATCH_NORM) and (on_cpu or module.momentum is None))
            for module in task.model.modules()
        )
        if (on_cpu and task.size > _NARROW) or any(alone):
            return cls(task, False)
        inputs, _ = task.rows.read(torch.arange(min(3, len(task))))
        with task.evaluating(), torch.no_grad():
            alone = task.forward(task.params, inputs)
            try:
                together = cls(task, True).outputs(stack(task, 2), {}, inputs, shared=True)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                return cls(task, False)  # an operation that vmap does not know
        close = torch.allclose(together[1], alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))
        return cls(task, close)

    @property
    def at_least(self) -> int:
        """Replicas that must pass together for their numbers not to depend on their count."""
        return 2 if self.batched and self.task.device.type == "cpu" else 1

    def outputs(self, params: Stacked, buffers: Stacked, inputs: Inputs, *, shared: bool) -> Shaped[Tensor, "R B *out"]:
        """Outputs of every replica: on the same inputs (B, …) where `shared`, else on its own of (R, B, …)."""
        if self.batched:

            def one(params: Stacked, buffers: Stacked, inputs: Inputs) -> Tensor:
                return self.task.forward(params | buffers, inputs)

            with quiet_batching():
                across = torch.func.vmap(one, in_dims=(0, 0, None if shared else 0), randomness="same")
                return across(params, buffers, inputs)
        count = len(next(iter(params.values())))
        outputs = []
        for replica in range(count):
            values = {name: value[replica] for name, value in (params | buffers).items()}
            own = inputs if shared else map_tensors(lambda tensor, at=replica: tensor[at], inputs)
            outputs.append(self.task.forward(values, own))
        return torch.stack(outputs)

    def blocks(self, count: int) -> list[slice]:
        """Replicas whose forward and backward pass run as one."""
        return [slice(0, count)] if self.batched else [slice(place, place + 1) for place in range(count)]


def read(rows: Rows, index: Int[Tensor, "*R B"]) -> tuple[Inputs, Tensor]:
    """Inputs and targets of an index of any shape, in that shape."""
    inputs, targets = rows.read(index.flatten())
    if index.dim() == 1:
        return inputs, targets
    return map_tensors(lambda tensor: tensor.unflatten(0, index.shape), inputs), targets.unflatten(0, index.shape)


def learning_modules(task: Task, *, statistics: bool, dropout: bool) -> Sequence[nn.Module]:
    """The modules that train in train mode: batch norm where its statistics are learned, dropout where asked for."""

    def kinds() -> Iterator[type[nn.Module]]:
        if statistics:
            yield _BATCH_NORM
        if dropout:
            yield nn.modules.dropout._DropoutNd

    return [module for module in task.model.modules() if isinstance(module, tuple(kinds()))]
