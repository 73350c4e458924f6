"""Packages whose public names load on first use, so that a tool which needs no torch does not import it.

    lazily_export(__name__, {"vescale_fsdp.layout.planner": "TensorSpec plan_group"})

``import vescale_fsdp`` then costs milliseconds instead of torch's seconds, and ``from vescale_fsdp import
plan_group`` imports `vescale_fsdp.layout.planner` alone. Type checkers read the same names from imports under
``TYPE_CHECKING``.

A function may share its name with the submodule that holds it (``fully_shard``). The import system binds every
submodule it loads to the package under that name, whenever anything first imports it; a lazy package refuses
this binding for the names it exports, so that the name means the function in whatever order things load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package with names that are looked up when first asked for."""

    __exports__: dict[str, str]  # public name -> module that defines it

    def __getattr__(self, name: str) -> Any:  # only reached for names that are not bound yet
        if name not in self.__exports__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self.__exports__[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self.__exports__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__exports__})


def lazily_export(package: str, names: Mapping[str, str]) -> None:
    """Let a package offer names that other modules define; called by its ``__init__``.

    Args:
        package: the package's full name.
        names: full name of a module -> what of it is public, separated by spaces.
    """
    module = sys.modules[package]
    vars(module)["__exports__"] = {
        name: source for source, public in names.items() for name in public.split()
    }
    module.__class__ = _LazyPackage  # documented: "Customizing module attribute access"


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when the function is called."""
    return lambda *args, **kwargs: getattr(import_module(module), name)(*args, **kwargs)


def function_named(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; its module is imported now."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]
