"""What a thing is, as a hash: tensors by their bits, functions and objects by their code and what they hold."""

import functools
import hashlib
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEPTH = 8  # objects within objects that are looked into; a guess that ends also where someone holds the whole program


def digest(*things: Any) -> str:
    """The SHA-256 of these things together."""
    total = hashlib.sha256()
    for thing in things:
        absorb(total, thing)
    return total.hexdigest()


def absorb(total: "hashlib._Hash", thing: Any) -> None:
    """Add a thing to a hash that may go on."""
    for part in _parts(thing, {}, _DEPTH):
        total.update(part)


def outline(module: nn.Module) -> str:
    """The layers of a module and their settings, without the numbers in them."""
    return _ADDRESS.sub("", repr(module))


def _parts(thing: Any, seen: dict[int, Any], depth: int) -> Iterator[bytes]:
    """The bytes that tell a thing from others, as far as can be told, the same in every process.

    What a function finds in global variables, what a compiled object hides, and what lies deeper are not seen.
    """
    if thing is None or isinstance(thing, bool | int | float | complex | str | bytes | torch.dtype | np.number):
        yield f"{type(thing).__name__} {thing!r};".encode()
        return
    if isinstance(thing, Tensor):
        yield f"{thing.dtype}{tuple(thing.shape)}".encode()
        yield thing.detach().cpu().to_dense().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return
    if id(thing) in seen:
        yield b"again;"
        return
    seen[id(thing)] = thing  # held, so that its address is not used again
    yield f"{_name(thing)}(".encode()
    for part in _held(thing) if depth else ():
        yield from _parts(part, seen, depth - 1)
    yield b")"


def _held(thing: Any) -> list[Any]:
    """What a thing is made of."""
    if isinstance(thing, Mapping):
        return [part for item in thing.items() for part in item]
    if isinstance(thing, list | tuple):
        return list(thing)
    if isinstance(thing, np.ndarray):
        return thing.tolist() if thing.dtype == object else [str(thing.dtype), thing.shape, thing.tobytes()]
    if isinstance(thing, Set):
        return sorted(thing, key=repr)
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return [_code(thing), *_cells(thing), thing.__defaults__, thing.__kwdefaults__]
    if isinstance(thing, nn.Module):
        return [outline(thing), *thing.named_parameters(), *thing.named_buffers()]
    if isinstance(thing, type | types.BuiltinFunctionType | types.ModuleType):
        return []  # its name says it
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [
        type(thing).__dict__.get("__call__"),
        getattr(thing, "__dict__", {}),
        *(getattr(thing, name, None) for name in slots),
    ]


def _code(function: types.FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return _ADDRESS.sub("", repr((function.__code__.co_code, function.__code__.co_consts)))


def _cells(function: types.FunctionType) -> list[Any]:
    """The values of the variables that a function has from the functions around it."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            values.append(None)
    return values


def _name(thing: Any) -> str:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"
