"""Names for shapes in annotations: jaxtyping's where it is loaded, free stand-ins elsewhere.

`Float[Tensor, "K d"]` is checked at run time only by the test suite, which imports jaxtyping
before the package. In production the same annotation is simply `Tensor`, and jaxtyping need not
be installed.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.modules.get("jaxtyping"):
    from jaxtyping import Bool, Float, Int, Shaped
else:

    class _Unchecked:
        def __class_getitem__(cls, item):
            array, _ = item
            return array

    class Bool(_Unchecked):
        pass

    class Float(_Unchecked):
        pass

    class Int(_Unchecked):
        pass

    class Shaped(_Unchecked):
        pass


__all__ = ["Bool", "Float", "Int", "Shaped"]
