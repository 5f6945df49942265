"""Numbers as users give them: Python's, numpy's, or a tensor of one element."""

import math
import operator
from numbers import Real
from typing import Any

from torch import Tensor

from downweight.errors import InvalidInput, InvalidType


def number(value: Any, name: str) -> float:
    """The finite number that a setting is."""
    one = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(one, bool) or not isinstance(one, Real):
        raise InvalidType(f"{name} is {value!r}; expected a number.")
    if not math.isfinite(one):
        raise InvalidInput(f"{name} is {one}; expected a finite number.")
    return float(one)


def nonnegative(value: Any, name: str) -> float:
    """The finite number >= 0 that a setting is."""
    found = number(value, name)
    if found < 0:
        raise InvalidInput(f"{name} is {found:g}; expected a number >= 0.")
    return found


def whole(value: Any, name: str, least: int) -> int:
    """The whole number that a setting is."""
    try:
        found = operator.index(value)
    except (TypeError, ValueError):
        found = None
    if found is None or isinstance(value, bool):
        raise InvalidType(f"{name} is {value!r}; expected a whole number >= {least}.")
    if found < least:
        raise InvalidInput(f"{name} is {found}; expected a whole number >= {least}.")
    return found


def rows_in(size: object, rows: int) -> int:
    """A number of rows: `size` itself, or below 1 that part of all rows."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise InvalidType(f"size is {size!r}; expected a number of rows, or a part of them below 1.")
    return round(size * rows) if size < 1 else int(size)
