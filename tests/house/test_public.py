"""The public names: listed once per package, and enough to name what the public functions take and return."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.house.conftest import failures
from tests.house.docs.public_names import MODULES, PACKAGES, PUBLIC

# What runs when a package is imported; each takes microseconds.
CALLS = {"lazily_export"}
PLUMBING = {"annotations", "lazily_export"}  # what `__init__` itself imports


def test_all_is_what_is_public() -> None:
    """`__all__` is sorted, every name is there, and a package has no other public name but its submodules."""
    assert not (failed := failures(_check_all, [*PACKAGES, *MODULES])), failed


def _check_all(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(getattr(module, key) is not None for key in module.__all__)
    if name in PACKAGES:
        public = {key for key in dir(module) if not key.startswith("_")}
        values = {key for key in public if not isinstance(getattr(module, key), ModuleType)}
        others = {key: getattr(module, key).__module__ for key in values - PLUMBING - set(module.__all__)}
        assert set(others.values()) <= set(PACKAGES), others  # classes that pickles name by a package


def test_packages_only_re_export() -> None:
    """A package's file has a docstring, imports (lazy or not) and `__all__`: work at import surprises."""
    assert not (failed := failures(_check_statements, PACKAGES)), failed


def _check_statements(name: str) -> None:
    body = ast.parse(Path(str(importlib.import_module(name).__file__)).read_text()).body
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    targets = [ast.unparse(t) for node in body if isinstance(node, ast.Assign) for t in node.targets]

    assert all(isinstance(node, ast.ImportFrom | ast.Assign | ast.Expr) for node in body)
    assert {ast.unparse(call.func) for call in calls} <= CALLS
    assert set(targets) <= {"__all__", "__version__"}


def _classes_in(hint: object) -> Iterator[type]:
    """The classes of a type hint, also inside unions, generics and callables."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        yield hint
    for part in typing.get_args(hint):
        for item in part if isinstance(part, list) else [part]:
            yield from _classes_in(item)


def _hints_of(function: object) -> dict[str, object]:
    """Type hints. A name that its module imports for type checkers alone has to be a public one."""
    names = {value.__name__: value for value in PUBLIC.values() if isinstance(value, type)}
    names |= vars(sys.modules[function.__module__])
    hints = inspect.get_annotations(function)  # type: ignore[arg-type]
    return {name: eval(hint, names) if isinstance(hint, str) else hint for name, hint in hints.items()}


FUNCTIONS = {
    name: value
    for name, value in PUBLIC.items()
    if inspect.isfunction(value) and value.__module__.startswith("vescale_fsdp")
}


def test_classes_of_public_functions_are_public() -> None:
    """Every class of ours that a public function takes or returns, or a subclass of it, can be imported publicly."""
    assert FUNCTIONS
    assert not (failed := failures(_check_classes, FUNCTIONS)), failed


def _check_classes(name: str) -> None:
    classes = {kind for hint in _hints_of(FUNCTIONS[name]).values() for kind in _classes_in(hint)}
    ours = {
        kind for kind in classes if kind.__module__.startswith("vescale_fsdp") and kind.__name__[0] != "_"
    }
    public = [value for value in PUBLIC.values() if isinstance(value, type)]

    assert {
        kind.__qualname__
        for kind in ours
        if not any(kind in value.__mro__ for value in public)
        and not any(getattr(sys.modules[module], kind.__name__, None) is kind for module in MODULES)
    } == set()
