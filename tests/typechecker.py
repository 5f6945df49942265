"""The run-time check of annotations that the tests switch on: beartype, where an int may stand for a float."""

from collections.abc import Callable
from typing import Any, Self

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable) -> Callable:
    """`function` with its annotations checked; `Self`, which beartype reads in whole classes only, passes unchecked."""
    for name, annotation in function.__annotations__.items():
        if annotation is Self:
            function.__annotations__[name] = Any
    return _beartype(function)
