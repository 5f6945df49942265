"""The package as a user has it: without the run-time check of annotations that the other tests run under.

A wrong type must be refused by the package itself; under the check it never gets that far. `use` is a fixture that
swaps the unchecked copy in for one test.
"""

import importlib
import sys
from types import ModuleType

import pytest


def _ours() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "downweight"}


def _import_unchecked() -> dict[str, ModuleType]:
    """Every module of a second copy of the package, imported past the hook; the first copy stays in place."""
    before, finders = _ours(), list(sys.meta_path)
    try:
        for name in before:
            del sys.modules[name]
        sys.meta_path[:] = [finder for finder in finders if "jaxtyping" not in type(finder).__module__]
        importlib.import_module("downweight")
        return _ours()
    finally:
        for name in _ours():
            del sys.modules[name]
        sys.modules.update(before)
        sys.meta_path[:] = finders


MODULES = _import_unchecked()
downweight = MODULES["downweight"]


@pytest.fixture
def use(monkeypatch) -> None:
    """For one test `import downweight` gives the unchecked copy, here and in the tables of cases."""
    for name in _ours():
        monkeypatch.delitem(sys.modules, name)
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    return
