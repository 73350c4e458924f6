"""Packages whose public names are imported at their first use, so that tools without torch do not import it.

A lazy package lists its public names once, in the stub ``__init__.pyi`` next to its ``__init__.py``:

    from vescale_fsdp.layout.planner import TensorSpec as TensorSpec

Type checkers read the stub in place of the package, and `lazily_export` reads it when the package is imported.
``import vescale_fsdp`` then takes milliseconds instead of torch's seconds, and ``from vescale_fsdp.layout import
TensorSpec`` imports `vescale_fsdp.layout.planner` alone.

A function may have the name of the submodule that defines it (``fully_shard``). After the import system has loaded a
submodule, it sets the submodule as an attribute of the package, which would hide the function. A lazy package ignores
this assignment for its public names, so the name always means the function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

_Named = TypeVar("_Named", bound=Callable[..., Any])


class _LazyPackage(ModuleType):
    """A package whose exported names are imported at their first use."""

    __exports__: dict[str, str]  # public name -> module that defines it

    def __getattr__(self, name: str) -> Any:  # only called for names that are not bound yet
        if name not in self.__exports__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self.__exports__[name]), name)
        super().__setattr__(name, value)  # so later accesses skip `__getattr__`
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets each loaded submodule here; it must not hide the public name that it defines.
        if not (name in self.__exports__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__exports__})


def lazily_export(package: str, *, unlisted: Mapping[str, str] | None = None) -> None:
    """Let a package export the names in its stub, and set its ``__all__``. Packages call it in ``__init__``.

    The stub consists of ``from MODULE import NAME as NAME, ..`` statements.

    Args:
        package: the package's full name.
        unlisted: full name of a module -> names that are not in ``__all__``, separated by spaces: classes that pickles
            look up in the package.
    """
    module = sys.modules[package]
    assert module.__spec__ is not None and module.__file__ is not None
    # Read by the loader, because the package may be in a zip file. Split by hand, because importing `ast` would take
    # 5 ms per start.
    stub = module.__spec__.loader.get_data(f"{module.__file__}i").decode()  # type: ignore[union-attr]
    exports: dict[str, str] = {}
    for statement in stub.split("\nfrom ")[1:]:  # the first part is the stub's docstring
        source, items = statement.split("\n\n")[0].split(" import ")  # a blank line ends the statement
        exports |= {item.split()[0]: source for item in items.strip("(\n )").split(",") if item.strip()}
    hidden = {name: source for source, names in (unlisted or {}).items() for name in names.split()}
    # Set before the class, whose methods read `__exports__`.
    vars(module).update(__exports__={**exports, **hidden}, __all__=sorted(exports))
    module.__class__ = _LazyPackage  # see "Customizing module attribute access" in Python's reference


def set_module(package: str) -> Callable[[_Named], _Named]:
    """Return a decorator that sets ``__module__`` to the package that exports a class or function.

    Pickles then name the package, and stay readable when the class moves to another module of the package.
    """

    def apply(value: _Named) -> _Named:
        value.__module__ = package
        return value

    return apply


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function that, when called, imports a module and calls the module's function of this name."""
    return lambda *args, **kwargs: getattr(import_module(module), name)(*args, **kwargs)


def function_named(name: str) -> Callable[..., Any]:
    """Import the module of ``module:function``, and return the function."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]
