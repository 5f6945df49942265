"""Rows of data: tensors, or any map-style dataset, read in chunks of row indices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from downweight.errors import InvalidInput, InvalidType, NonFinite
from downweight.memory import free_bytes

Inputs = Tensor | dict[str, Tensor] | tuple[Tensor, ...]

# A dataset smaller than this part of the free memory is read once and kept.
_KEEP_FRACTION = 0.25


def map_tensors(function: Any, inputs: Inputs) -> Inputs:
    """The same structure with `function` applied to every tensor."""
    if isinstance(inputs, Mapping):
        return {name: function(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(function(value) for value in inputs)
    return function(inputs)


def tensors_of(inputs: Inputs) -> list[tuple[str, Tensor]]:
    """(name, tensor) for every tensor of the inputs."""
    if isinstance(inputs, Mapping):
        return [(f"inputs[{name!r}]", value) for name, value in inputs.items()]
    if isinstance(inputs, tuple):
        return [(f"inputs[{position}]", value) for position, value in enumerate(inputs)]
    return [("inputs", inputs)]


def _as_tensors(inputs: Any, what: str) -> Inputs:
    if isinstance(inputs, np.ndarray):
        return torch.from_numpy(inputs)
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping):
        return {str(name): _one_tensor(value, what) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(value, Tensor | np.ndarray) for value in inputs):
        return tuple(_one_tensor(value, what) for value in inputs)
    raise InvalidType(
        f"{what}: inputs are a {type(inputs).__name__}; expected a tensor, a dict of tensors or a "
        "tuple of tensors, one line a row."
    )


def _one_tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Tensor):
        return value
    raise InvalidType(f"{what}: expected tensors, got a {type(value).__name__}.")


@runtime_checkable
class Rows(Protocol):
    """N rows that can be read by index, on the model's device and in its dtype."""

    def __len__(self) -> int: ...
    def read(self, index: Tensor) -> tuple[Inputs, Tensor]: ...


@dataclass(frozen=True)
class TensorRows:
    """Rows held as tensors; moved to the device and to the dtype of the model chunk by chunk."""

    inputs: Inputs
    targets: Tensor
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: Tensor) -> tuple[Inputs, Tensor]:
        def part(tensor: Tensor) -> Tensor:
            chosen = tensor[index.to(tensor.device)].to(self.device)
            return chosen.to(self.dtype) if chosen.is_floating_point() else chosen

        # Targets keep their own precision: the loss is computed in float64.
        return map_tensors(part, self.inputs), self.targets[index.to(self.targets.device)].to(self.device)


@dataclass(frozen=True)
class DatasetRows:
    """Rows of a map-style dataset of (input, target), read anew in every pass."""

    dataset: Any
    device: torch.device
    dtype: torch.dtype
    what: str

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: Tensor) -> tuple[Inputs, Tensor]:
        rows = _read_items(self.dataset, index.tolist(), self.what)
        held = TensorRows(*rows, self.device, self.dtype)
        _check_finite(held.inputs, self.what, index)
        return held.read(torch.arange(len(index)))


def _read_items(dataset: Any, index: Sequence[int], what: str) -> tuple[Inputs, Tensor]:
    items = [dataset[position] for position in index]
    if any(not isinstance(item, list | tuple) or len(item) != 2 for item in items):
        raise InvalidType(
            f"{what}: the dataset must give (input, target) pairs, got a "
            f"{type(items[0]).__name__}. Wrap it in a Dataset that returns two things."
        )
    try:
        inputs, targets = default_collate([tuple(item) for item in items])
    except (TypeError, RuntimeError, KeyError) as error:
        raise InvalidInput(
            f"{what}: rows {index[0]} to {index[-1]} cannot be stacked ({error}). All rows need one shape, and "
            "tensors, arrays or numbers in it; pad them to one length."
        ) from error
    return _as_tensors(inputs, what), _one_tensor(targets, what)


def _check_finite(inputs: Inputs, what: str, index: Tensor | None = None) -> None:
    for name, tensor in tensors_of(inputs):
        if not tensor.is_floating_point():
            continue
        finite = tensor.isfinite().reshape(len(tensor), -1).all(1)
        if not bool(finite.all()):
            bad = (~finite).nonzero().flatten().cpu()
            bad = bad if index is None else index.cpu()[bad]
            raise NonFinite(
                f"{what}: {len(bad)} rows have NaN or infinite values in {name} (first: row "
                f"{int(bad[0])}). Remove or repair them before computing influence."
            )


def as_rows(data: Any, device: torch.device, dtype: torch.dtype, what: str) -> Rows:
    """Rows from (inputs, targets) or from a map-style dataset; `what` names them in errors."""
    if isinstance(data, DataLoader):
        raise InvalidType(
            f"{what} is a DataLoader, whose order and batching are its own; pass its dataset "
            "(loader.dataset): rows are chunked here."
        )
    if isinstance(data, IterableDataset):
        raise InvalidType(f"{what} is an IterableDataset; rows are needed by index (map-style).")
    if isinstance(data, list | tuple) and len(data) == 2:
        return _tensor_rows(data[0], data[1], device, dtype, what)
    if (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, Tensor | Mapping | list | tuple | str | np.ndarray)
    ):
        return _dataset_rows(data, device, dtype, what)
    raise InvalidType(
        f"{what} is a {type(data).__name__}; expected a pair (inputs, targets) or a map-style "
        "dataset of (input, target)."
    )


def _tensor_rows(inputs: Any, targets: Any, device: torch.device, dtype: torch.dtype, what: str) -> TensorRows:
    inputs, targets = _as_tensors(inputs, what), _one_tensor(targets, what)
    if targets.dim() == 0 or any(tensor.dim() == 0 for _, tensor in tensors_of(inputs)):
        raise InvalidInput(f"{what}: inputs and targets need a first dimension over rows.")
    lengths = {name: len(tensor) for name, tensor in tensors_of(inputs)} | {"targets": len(targets)}
    if len(set(lengths.values())) > 1:
        raise InvalidInput(f"{what}: inputs and targets differ in length: {lengths}.")
    if len(targets) == 0:
        raise InvalidInput(f"{what} are empty: at least one row is needed.")
    for name, tensor in [*tensors_of(inputs), ("targets", targets)]:
        if tensor.is_complex():
            raise InvalidType(f"{what}: {name} are complex; real numbers are needed.")
    _check_finite(inputs, what)
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(inputs))
    if device.type != "cpu" and size < _KEEP_FRACTION * free_bytes(device):
        inputs = map_tensors(lambda tensor: tensor.detach().to(device), inputs)
        targets = targets.to(device)
    return TensorRows(map_tensors(lambda tensor: tensor.detach(), inputs), targets.detach(), device, dtype)


def _dataset_rows(dataset: Any, device: torch.device, dtype: torch.dtype, what: str) -> Rows:
    if len(dataset) == 0:
        raise InvalidInput(f"{what} are empty: at least one row is needed.")
    first, target = _read_items(dataset, [0], what)
    again, _ = _read_items(dataset, [0], what)
    for (name, one), (_, two) in zip(tensors_of(first), tensors_of(again), strict=True):
        if not torch.equal(one, two):
            raise InvalidInput(
                f"{what}: reading row 0 twice gave different {name}: the dataset is random "
                "(augmentation?). Influence needs fixed rows; pass the dataset without the random "
                "transforms."
            )
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(first))
    size = len(dataset) * (size + target.numel() * target.element_size())
    if size < _KEEP_FRACTION * free_bytes(torch.device("cpu")):
        inputs, targets = _read_items(dataset, range(len(dataset)), what)
        return _tensor_rows(inputs, targets, device, dtype, what)
    return DatasetRows(dataset, device, dtype, what)


def chunks(index: Tensor, size: int) -> Iterator[Tensor]:
    """Consecutive parts of `index` of nearly equal length, none longer than `size`."""
    count = max(1, math.ceil(len(index) / size))
    return iter(torch.tensor_split(index, count))
