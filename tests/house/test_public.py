"""The public names of the packages: exactly `__all__`, sorted, and nothing but re-exports."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

PACKAGES = [
    "vescale_fsdp",
    "vescale_fsdp.checkpoint",
    "vescale_fsdp.transfer",
    "vescale_fsdp.conversion",
    "vescale_fsdp.elastic",
    "vescale_fsdp.integrations",
    "vescale_fsdp.layout",
    "vescale_fsdp.optim",
    "vescale_fsdp.quantize",
]
# What runs when a package is imported: both cost microseconds.
PACKAGE_CALLS = {
    "vescale_fsdp": ["pickled_paths.install", "lazily_export"],
    "vescale_fsdp.checkpoint": ["lazily_export"],
    "vescale_fsdp.transfer": ["lazily_export"],
    "vescale_fsdp.conversion": ["lazily_export"],
    "vescale_fsdp.elastic": ["lazily_export"],
    "vescale_fsdp.integrations": ["lazily_export"],
    "vescale_fsdp.layout": ["lazily_export"],
}
PLUMBING = {"TYPE_CHECKING", "annotations", "lazily_export"}  # what `__init__` itself imports


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_what_is_public(name: str) -> None:
    """`__all__` is sorted and lists every public name but submodules, as far as there are any."""
    package = importlib.import_module(name)
    public = [key for key in dir(package) if not key.startswith("_")]
    names = sorted(key for key in public if not isinstance(getattr(package, key), ModuleType))

    assert sorted(vars(package).get("__all__", [])) == [n for n in names if n not in PLUMBING]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_only_re_exports(name: str) -> None:
    """The package file holds a docstring, imports (lazy or not) and `__all__`: work at import surprises."""
    file = Path(str(importlib.import_module(name).__file__))
    body = ast.parse(file.read_text()).body
    typed = [node for node in body if isinstance(node, ast.If)]
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr, ast.If)

    assert all(isinstance(node, allowed) for node in body)
    assert [ast.unparse(node.test) for node in typed] == ["TYPE_CHECKING"] * len(typed)
    assert all(isinstance(node, ast.ImportFrom) for block in typed for node in block.body)
    assert [ast.unparse(call.func) for call in calls] == PACKAGE_CALLS.get(name, [])
    assert [ast.unparse(t) for node in body if isinstance(node, ast.Assign) for t in node.targets] in (
        [],
        ["__all__"],
        ["__all__", "__version__"],
    )
