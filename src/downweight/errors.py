"""The exceptions and the one warning of the package.

DownweightError
├── InvalidInput      (ValueError)    an argument that makes no sense here
├── InvalidType       (TypeError)     an argument of the wrong type or dtype
├── NonFinite         (ValueError)    NaN or infinity in data, parameters or a product
├── SingularSystem    (ValueError)    the matrix has no inverse to working precision
├── IndefiniteSystem  (ValueError)    the matrix has a negative eigenvalue
├── NotConverged      (RuntimeError)  only where the caller asked for `throw=True`
├── MemoryLimit       (MemoryError)   would not fit; refused before anything was allocated
├── DamagedResult     (ValueError)    a file that is incomplete or changed
├── ForeignResult     (ValueError)    a file that belongs to another task
└── MissingDependency (ImportError)   an optional package is not installed
"""

import sys
import warnings


class DownweightError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidInput(DownweightError, ValueError):
    pass


class InvalidType(DownweightError, TypeError):
    pass


class NonFinite(DownweightError, ValueError):
    pass


class SingularSystem(DownweightError, ValueError):
    pass


class IndefiniteSystem(DownweightError, ValueError):
    """The matrix has a negative eigenvalue, `smallest_eigenvalue` (None where it is not known)."""

    def __init__(self, message: str, smallest_eigenvalue: float | None = None):
        super().__init__(message, smallest_eigenvalue)
        self.smallest_eigenvalue = smallest_eigenvalue

    def __str__(self) -> str:
        return self.args[0]


class NotConverged(DownweightError, RuntimeError):
    pass


class MemoryLimit(DownweightError, MemoryError):
    pass


class DamagedResult(DownweightError, ValueError):
    pass


class ForeignResult(DownweightError, ValueError):
    pass


class MissingDependency(DownweightError, ImportError):
    pass


class DownweightWarning(UserWarning):
    """The one category of every warning of this package."""


def warn(message: str) -> None:
    """A DownweightWarning at the user's line: the nearest one outside this package and torch's decorators."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("downweight", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, DownweightWarning, stacklevel=level)
