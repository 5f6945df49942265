r"""Gradients of single rows, Jᵢᵀ u, in the form in which their inner products are cheap.

A linear layer's gradient for one row is an outer product δ aᵀ of its output gradient and its input,
so that inner products of two such gradients are (δ·δ')(a·a'): nobody needs the (o, i) matrix. A
convolution is a linear layer over its patches. A parameter takes this road only if a check on a
few rows gives what autograd gives; every other one (normalisation, embeddings, tied or bare
parameters, layers used twice) has its per-row gradient formed explicitly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from downweight.errors import InvalidInput
from downweight.linearization import batched_grad, quiet_batching
from downweight.memory import Budget
from downweight.rows import Inputs, map_tensors
from downweight.shapes import Float
from downweight.task import Task

# Cotangents of B rows, r a row, from their outputs: (r, B, *out).
Cotangent = Callable[[Tensor], Tensor]

_PROBE_ROWS = 3
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}  # wrong structure is off by O(1)


@dataclass(frozen=True)
class Layer:
    """One call of a linear map with covered parameters, by its position among such calls."""

    call: int
    weight: str | None
    bias: str | None
    groups: int
    explicit: bool = True  # form the per-row matrix; else keep the two factors


@dataclass(frozen=True)
class _Call:
    """What one linear map saw: its input and a zero added to its output, to differentiate by."""

    weight: str | None
    bias: str | None
    input: Tensor  # (B, G, T, i)
    version: int
    source: Tensor
    tap: Tensor
    outputs_last: bool  # features in the last dimension (linear) or the second (convolution)
    groups: int


class _Tapping(TorchFunctionMode):
    """Watches which covered parameters enter which operations during one forward pass."""

    def __init__(self, owners: dict[int, str], rows: int) -> None:
        super().__init__()
        self.owners, self.rows = owners, rows
        self.calls: list[_Call] = []
        self.elsewhere: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = {
            self.owners[id(leaf)]
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and id(leaf) in self.owners
        }
        if not found:
            return func(*args, **kwargs)
        arranged = _arrange(func, args, kwargs, self.rows)
        result = func(*args, **kwargs)
        if arranged is None:
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                self.elsewhere |= found
            return result
        source, weight, bias, patches, groups = arranged
        tap = torch.zeros_like(result, requires_grad=True)
        name, bias_name = self.owners.get(id(weight)), self.owners.get(id(bias))
        if id(source) in self.owners:  # a parameter that a layer is applied to
            self.elsewhere.add(self.owners[id(source)])
        self.calls.append(
            _Call(
                name,
                bias_name,
                patches,
                source._version,
                source,
                tap,
                func is F.linear,
                groups,
            )
        )
        # A sum of its own, so that an in-place activation cannot overwrite what the tap sees.
        return result + tap


def _bind(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _arrange(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], rows: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int] | None:
    """(input, weight, bias, input as (B, G, T, i), groups), or None where it is no such map."""
    if func is F.linear:
        call = _bind(("input", "weight", "bias"), args, kwargs)
        source = call["input"].detach()
        if source.dim() < 2 or len(source) != rows:
            return None
        arranged = source.reshape(rows, 1, -1, source.shape[-1])
        return call["input"], call["weight"], call.get("bias"), arranged, 1
    if func is F.conv2d or func is F.conv1d:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        call = _bind(names, args, kwargs)
        patches = _patches(call, flat=func is F.conv1d)
        if patches is None or len(patches) != rows:
            return None
        return call["input"], call["weight"], call.get("bias"), patches, call.get("groups", 1)
    return None


def _patches(call: dict[str, Any], flat: bool) -> Tensor | None:
    """The input of a convolution as (B, G, T, i): one line of i numbers an output position."""
    source, weight, groups = call["input"].detach(), call["weight"], call.get("groups", 1)
    if source.dim() != (3 if flat else 4) or isinstance(call.get("padding", 0), str):
        return None

    def pair(name: str, default: int) -> tuple[int, int]:
        value = call.get(name, default)
        value = (value,) if isinstance(value, int) else tuple(value)
        if flat:
            return (default, value[0])
        return (value[0], value[-1])

    kernel = tuple(weight.shape[2:])
    if flat:
        source, kernel = source.unsqueeze(2), (1, *kernel)
    patches = F.unfold(
        source,
        kernel,
        dilation=pair("dilation", 1),
        padding=pair("padding", 0),
        stride=pair("stride", 1),
    )
    rows, size, positions = patches.shape
    return patches.reshape(rows, groups, size // groups, positions).mT


@dataclass(frozen=True)
class Explicit:
    """Per-row gradients of some parameters as vectors, (B, r, D)."""

    vectors: Tensor
    tensors: ClassVar = ("vectors",)

    def gram_into(self, out: Tensor, other: "Explicit") -> None:
        left, right = self.vectors.flatten(0, 1), other.vectors.flatten(0, 1)
        out += (left @ right.T).view_as(out)

    def diagonal(self, other: "Explicit") -> Tensor:
        return torch.linalg.vecdot(self.vectors, other.vectors)

    def rows(self, part: slice) -> "Explicit":
        return Explicit(self.vectors[part])


@dataclass(frozen=True)
class Factors:
    """Per-row gradients of one linear map as factors: inputs (B, G, T, i), deltas (B, r, G, T, o)."""

    inputs: Tensor
    deltas: Tensor
    weight: bool
    bias: bool
    tensors: ClassVar = ("inputs", "deltas")

    def _positions(self, inputs: Tensor) -> Tensor:
        overlap = inputs if self.weight else torch.zeros_like(inputs)
        return overlap + 1 if self.bias else overlap

    def gram_into(self, out: Tensor, other: "Factors") -> None:
        """out (B, r, B', r') += Σ_g Σ_tt' (δ_t·δ'_t') (a_t·a'_t' [+ 1 for the bias])."""
        groups, steps, steps_other = self.inputs.shape[1], self.inputs.shape[2], other.inputs.shape[2]
        for group in range(groups):
            left, right = self.inputs[:, group], other.inputs[:, group]
            overlap = self._positions(left.flatten(0, 1) @ right.flatten(0, 1).T)
            deltas = self.deltas[:, :, group].flatten(0, 2) @ other.deltas[:, :, group].flatten(0, 2).T
            if steps == steps_other == 1:
                out.addcmul_(deltas.view_as(out), overlap[:, None, :, None])
                continue
            (rows, r, rows_other, r_other) = out.shape
            deltas = deltas.view(rows, r, steps, rows_other, r_other, steps_other)
            overlap = overlap.view(rows, 1, steps, rows_other, 1, steps_other)
            out += (deltas * overlap).sum((2, 5))

    def diagonal(self, other: "Factors") -> Tensor:
        overlap = self._positions(self.inputs @ other.inputs.mT)
        return (self.deltas @ other.deltas.mT * overlap[:, None]).sum((2, 3, 4))

    def rows(self, part: slice) -> "Factors":
        return replace(self, inputs=self.inputs[part], deltas=self.deltas[part])


@dataclass(frozen=True)
class Features:
    """Per-row gradients of B rows, r a row, as the parts whose inner products add up."""

    parts: tuple[Explicit | Factors, ...]
    count: int
    size: int  # r

    def gram_into(self, out: Float[Tensor, "B r C s"], other: "Features") -> None:
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.gram_into(out, theirs)  # pyright: ignore[reportArgumentType]  # same plan, same kinds

    def diagonal(self) -> Float[Tensor, "B r"]:
        """Squared norms of the gradients."""
        parts = [part.diagonal(part) for part in self.parts]  # pyright: ignore[reportArgumentType]
        return torch.stack(parts).sum(0)

    def rows(self, part: slice) -> "Features":
        parts = tuple(piece.rows(part) for piece in self.parts)
        return Features(parts, len(range(*part.indices(self.count))), self.size)

    @classmethod
    def collect(cls, blocks: "Iterable[Features]", count: int) -> "Features":
        """Those of `count` rows from blocks of them, one of which is there twice at a time."""
        whole, start = None, 0
        for block in blocks:
            if block.count == count:
                return block
            if whole is None:
                whole = cls(tuple(_resized(part, count) for part in block.parts), count, block.size)
            for part, piece in zip(whole.parts, block.parts, strict=True):
                for name in piece.tensors:
                    getattr(part, name)[start : start + block.count] = getattr(piece, name)
            start += block.count
        assert whole is not None  # a family has at least one row
        return whole

    @property
    def nbytes(self) -> int:
        return sum(getattr(part, name).nbytes for part in self.parts for name in part.tensors)

    def temporary_bytes(self, other: "Features") -> int:
        """Bytes that `gram_into` takes for one row of `other` against all of these."""
        steps = [part.inputs.shape[2] for part in self.parts if isinstance(part, Factors)]
        columns = self.count * self.size * other.size * max(steps, default=1) ** 2
        return 8 * columns * (3 if max(steps, default=1) > 1 else 2)


def _resized(part: Explicit | Factors, count: int) -> Explicit | Factors:
    """The same part with room for so many rows."""
    room = {name: getattr(part, name) for name in part.tensors}
    return replace(part, **{name: tensor.new_empty(count, *tensor.shape[1:]) for name, tensor in room.items()})


class RowGradients:
    """How the per-row gradients of a task are formed: made once, checked, used for any rows."""

    def __init__(self, task: Task, budget: Budget | None = None) -> None:
        self.task, self._budget = task, budget
        self._params = task.params
        self._vmapped = True
        self.layers: tuple[Layer, ...] = ()
        self.rest: tuple[str, ...] = task.names
        with task.evaluating():
            self._plan()

    @property
    def plan_bytes(self) -> int:
        """Bytes that making the plan takes; counted for linear, convolutional and embedding layers."""
        return self.least_plan_bytes(self.task) + 6 * self.explicit_size * self.task.dtype.itemsize

    @staticmethod
    def least_plan_bytes(task: Task) -> int:
        """The same where every parameter has structure."""
        return 7 * task.size * task.dtype.itemsize + 5 * _PROBE_ROWS * task.row_bytes

    @property
    def explicit_size(self) -> int:
        """Numbers in the gradient of one row that are formed without structure."""
        return sum(self._params[name].numel() for name in self.rest)

    def describe(self) -> str:
        structured = [name for layer in self.layers for name in (layer.weight, layer.bias) if name]
        return f"{len(structured)} parameters by layer structure, {len(self.rest)} explicitly"

    def last_layer(self) -> tuple[str, ...]:
        """The covered parameters of the linear layer whose output is the model's output."""
        inputs, _ = self.task.rows.read(torch.arange(1))
        with self.task.evaluating():
            calls, _, outputs = self._tap(inputs, 1)
        for layer in self.layers:
            call = calls[layer.call]
            if layer.call == len(calls) - 1 and layer.weight and call.outputs_last:
                made = call.input[:, 0] @ self._params[layer.weight].T
                if layer.bias:
                    made = made + self._params[layer.bias]
                if torch.allclose(made.reshape(outputs.shape), outputs, rtol=1e-3, atol=1e-5):
                    return tuple(name for name in (layer.weight, layer.bias) if name)
        raise InvalidInput(
            "representer_points needs a model whose outputs are those of a linear layer with covered "
            f"parameters; {type(self.task.model).__name__} does not end in one."
        )

    # -- making the plan --------------------------------------------------------------------

    def _plan(self) -> None:
        count = min(_PROBE_ROWS, len(self.task))
        index = torch.arange(_PROBE_ROWS) % count
        inputs, _ = self.task.rows.read(index)
        calls, elsewhere, outputs = self._tap(inputs, _PROBE_ROWS)
        uses = [name for call in calls for name in (call.weight, call.bias) if name is not None]

        def once(name: str | None) -> str | None:
            single = name is not None and name not in elsewhere and uses.count(name) == 1
            return name if single else None

        self.layers = tuple(
            Layer(place, once(call.weight), once(call.bias), call.groups, _prefers_explicit(call))
            for place, call in enumerate(calls)
        )
        generator = torch.Generator().manual_seed(0)
        shape = (2, *outputs.shape)
        seeds = torch.randn(shape, generator=generator, dtype=torch.float64).to(outputs)
        self._keep_only(set(uses))
        if self._budget is not None:
            self._budget.require(
                self.plan_bytes,
                f"Checking how the gradients of single rows are formed, for {self.task.size:,} parameters,",
                "Raise memory_limit, or name fewer parameters (parameters=[...] of the task).",
            )
        wrong = self._wrong(inputs, seeds)
        if wrong:
            self._keep_only(set(uses) - wrong)
            if self._wrong(inputs, seeds):
                self._vmapped = False
                wrong = self._wrong(inputs, seeds)
        if wrong := self._wrong(inputs, seeds):
            raise InvalidInput(
                f"The gradient of single rows in {sorted(wrong)} does not agree with autograd's: "
                "rows interact, or the forward pass changes from call to call. Exclude these with "
                "parameters=, or use solver='cg'."
            )

    def _keep_only(self, names: set[str]) -> None:
        kept = [
            replace(
                layer,
                weight=layer.weight if layer.weight in names else None,
                bias=layer.bias if layer.bias in names else None,
            )
            for layer in self.layers
        ]
        self.layers = tuple(layer for layer in kept if layer.weight or layer.bias)
        structured = {name for layer in self.layers for name in (layer.weight, layer.bias)}
        self.rest = tuple(name for name in self.task.names if name not in structured)

    def _reference(self, inputs: Inputs, seeds: Tensor) -> Iterator[list[Tensor]]:
        """(r, *shape) a parameter, for one row after the other by autograd."""
        leaves = {name: value.detach().requires_grad_() for name, value in self._params.items()}
        outputs = self.task.forward(leaves, inputs)
        for row in range(len(outputs)):
            masked = torch.zeros_like(seeds)
            masked[:, row] = seeds[:, row]
            parts = batched_grad([outputs], list(leaves.values()), [masked])
            yield self._filled(parts, list(leaves.values()), len(seeds))

    @staticmethod
    def _filled(parts: Sequence[Tensor | None], like: Sequence[Tensor], count: int) -> list[Tensor]:
        """Zeros where a parameter plays no part in these rows."""
        return [
            template.new_zeros(count, *template.shape) if part is None else part
            for part, template in zip(parts, like, strict=True)
        ]

    def _wrong(self, inputs: Inputs, seeds: Tensor) -> set[str]:
        """Names whose per-row gradient is not autograd's on these rows."""
        layers, _ = self._structured(inputs, lambda _: seeds)
        try:
            rest = self._explicit(inputs, seeds, seeds.shape[1])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # An operation that cannot run over single rows in vmap: form them in a loop.
            if not self._vmapped:
                raise
            self._vmapped = False
            rest = self._explicit(inputs, seeds, seeds.shape[1])
        largest = torch.zeros(2, len(self.task.names), dtype=torch.float64)  # of the errors and of the entries
        for row, reference in enumerate(self._reference(inputs, seeds)):
            expected = dict(zip(self.task.names, reference, strict=True))
            part = slice(row, row + 1)
            # One layer of one row after the other: all gradients of the probe at a time may not fit.
            formed = (_layer_gradients(layer, ins[part], outs[part]) for layer, ins, outs in layers)
            others = zip(self.rest, (gradients[part] for gradients in rest), strict=True)
            for name, mine in chain(chain.from_iterable(formed), others):
                theirs = expected.pop(name)
                if theirs.numel():
                    sizes = (mine.reshape(theirs.shape) - theirs).abs().max(), theirs.abs().max()
                    place = self.task.names.index(name)
                    seen = torch.stack(sizes).double().cpu()
                    largest[:, place] = torch.maximum(largest[:, place], seen)
        bound = _PROBE_TOLERANCE[self.task.dtype] * largest[1].clamp_min(1e-30)
        return {name for name, fine in zip(self.task.names, (largest[0] <= bound).tolist(), strict=True) if not fine}

    # -- using it ---------------------------------------------------------------------------

    def features(self, inputs: Inputs, cotangent: Cotangent) -> Features:
        """Per-row gradients of these rows for the cotangents of their outputs, in float64."""
        layers, rest, (count, size) = self._parts(inputs, cotangent)
        parts: list[Explicit | Factors] = []
        for layer, activations, deltas in layers:
            activations, deltas = activations.double(), deltas.double().contiguous()
            if layer.explicit:
                matrices = _layer_gradients(layer, activations, deltas)
                parts.append(Explicit(torch.cat([part.flatten(2) for _, part in matrices], 2)))
            else:
                parts.append(Factors(activations, deltas, layer.weight is not None, layer.bias is not None))
        if rest:
            parts.append(Explicit(torch.cat([part.reshape(count, size, -1).double() for part in rest], 2)))
        return Features(tuple(parts), count, size)

    def vectors(self, inputs: Inputs, cotangent: Cotangent) -> Float[Tensor, "B r d"]:
        """The per-row gradients themselves, in the flat order and the model's dtype."""
        layers, rest, (count, size) = self._parts(inputs, cotangent)
        formed = dict(zip(self.rest, rest, strict=True))
        for layer, activations, deltas in layers:
            formed |= dict(_layer_gradients(layer, activations, deltas))
        return torch.cat([formed[name].reshape(count, size, -1) for name in self.task.names], 2)

    def _parts(
        self, inputs: Inputs, cotangent: Cotangent
    ) -> tuple[list[tuple[Layer, Tensor, Tensor]], list[Tensor], tuple[int, int]]:
        count = len(tree_leaves(inputs)[0])
        layers, seeds = self._structured(inputs, cotangent)
        return layers, self._explicit(inputs, seeds, count), (count, len(seeds))

    def _structured(self, inputs: Inputs, cotangent: Cotangent) -> tuple[list[tuple[Layer, Tensor, Tensor]], Tensor]:
        """Input and output gradient of every layer on these rows, and the cotangents (r, B, *out)."""
        count = len(tree_leaves(inputs)[0])
        calls, _, outputs = self._tap(inputs, count)
        seeds = cotangent(outputs.detach()).to(outputs.dtype)
        layers: list[tuple[Layer, Tensor, Tensor]] = []
        if self.layers:
            if len(calls) <= self.layers[-1].call:
                raise InvalidInput(
                    "The model's forward pass calls different layers for different rows; use "
                    "solver='cg', which does not rely on its structure."
                )
            taps = [calls[layer.call].tap for layer in self.layers]
            deltas = self._filled(batched_grad([outputs], taps, [seeds]), taps, len(seeds))
            for layer, delta in zip(self.layers, deltas, strict=True):
                call = calls[layer.call]
                if call.source._version != call.version:
                    raise InvalidInput(
                        f"The input of the layer of {layer.weight or layer.bias} is overwritten "
                        "after its use; autograd cannot differentiate that either."
                    )
                layers.append((layer, call.input, _arrange_deltas(delta, call)))
        return layers, seeds

    def _tap(self, inputs: Inputs, count: int) -> tuple[list[_Call], set[str], Tensor]:
        params = {name: value.detach() for name, value in self._params.items()}
        with _Tapping({id(value): name for name, value in params.items()}, count) as tapping:
            outputs = self.task.forward(params, inputs)
        return tapping.calls, tapping.elsewhere, outputs

    def _explicit(self, inputs: Inputs, seeds: Tensor, count: int) -> list[Tensor]:
        """(B, r, *shape) for every parameter without structure."""
        if not self.rest:
            return []
        fixed = {name: value.detach() for name, value in self._params.items()}
        chosen = {name: fixed[name] for name in self.rest}

        def one(row: Inputs, seed: Tensor) -> dict[str, Tensor]:
            def outputs(part: dict[str, Tensor]) -> Tensor:
                single = map_tensors(lambda tensor: tensor.unsqueeze(0), row)
                return self.task.forward(fixed | part, single).squeeze(0)

            pull = torch.func.vjp(outputs, chosen)[1]
            return torch.func.vmap(lambda vector: pull(vector)[0])(seed)

        if self._vmapped:
            with quiet_batching():
                formed = torch.func.vmap(one, in_dims=(0, 1))(inputs, seeds)
            return [formed[name] for name in self.rest]
        leaves = {name: value.requires_grad_() for name, value in chosen.items()}
        rows = []
        for row in range(count):
            single = map_tensors(lambda tensor, at=row: tensor[at : at + 1], inputs)
            outputs = self.task.forward(fixed | leaves, single)
            parts = batched_grad([outputs], list(leaves.values()), [seeds[:, row : row + 1]])
            rows.append(self._filled(parts, list(leaves.values()), len(seeds)))
        return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def _prefers_explicit(call: _Call) -> bool:
    """Whether inner products through the per-row (o, i) matrix take fewer operations."""
    groups, steps, size = call.input.shape[1:]
    outputs = call.tap.numel() // (len(call.tap) * steps * groups)
    return steps * steps * (outputs + size + 1) >= outputs * size


def _arrange_deltas(delta: Tensor, call: _Call) -> Tensor:
    """(B, r, G, T, o) from the gradient at a layer's output, (r, *output shape)."""
    rows, groups = call.input.shape[:2]
    if call.outputs_last:
        arranged = delta.reshape(len(delta), rows, 1, -1, delta.shape[-1])
    else:
        channels = delta.shape[2] // groups
        arranged = delta.reshape(len(delta), rows, groups, channels, -1).mT
    return arranged.transpose(0, 1)


def _layer_gradients(layer: Layer, inputs: Tensor, deltas: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, (B, r, …)) for the weight and the bias of one linear map."""
    if layer.weight is not None:
        yield layer.weight, torch.einsum("brgto,bgti->brgoi", deltas, inputs)
    if layer.bias is not None:
        yield layer.bias, deltas.sum(3)
