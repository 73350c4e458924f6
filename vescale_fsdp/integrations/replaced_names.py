"""StandIn: a function that replaces a function of another package, in every module that exports that function.

This is the only file that assigns to names of other packages (`tests/house/test_layering.py`).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple


class StandIn(NamedTuple):
    """A function, its replacement, and the modules and classes that export the function: its homes.

    Attributes:
        is_needed: whether modules that keep the original must be told. False: its results are the same.
    """

    original: Callable[..., Any]
    ours: Callable[..., Any]
    homes: tuple[str, ...]  # ``module`` or ``module:Class``; homes that are not imported are skipped
    is_needed: bool = True

    @property
    def name(self) -> str:
        """The name of the function, which is the same in all homes."""
        return self.original.__name__


_lock = threading.RLock()  # installations may begin and end in several threads
# Active replacements of each function in each home. The original is restored at zero.
_counts: Counter[tuple[Callable[..., Any], str]] = Counter()


def replace(stand_ins: Iterable[StandIn]) -> None:
    """Replace each function in its imported homes, and count the replacement."""
    with _lock:
        for stand_in in stand_ins:
            for home in stand_in.homes:
                _counts[stand_in.original, home] += 1
                _swap(home, stand_in.name, stand_in.original, stand_in.ours)


def restore(stand_ins: Iterable[StandIn]) -> None:
    """Undo one `replace`. An original is restored in a home when no replacement of it is left there."""
    with _lock:
        for stand_in in stand_ins:
            for home in stand_in.homes:
                _counts[stand_in.original, home] -= 1
                if _counts[stand_in.original, home] == 0:
                    del _counts[stand_in.original, home]
                    # Also if `replace` has not found the home: one that was imported later has copied the replacement.
                    _swap(home, stand_in.name, stand_in.ours, stand_in.original)


def _swap(home: str, name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Assign ``new`` to ``name`` in a home (``module`` or ``module:Class``) that is imported and has ``old`` there."""
    module, _, class_name = home.partition(":")
    if module not in sys.modules:
        return
    owner = getattr(sys.modules[module], class_name) if class_name else sys.modules[module]
    if vars(owner).get(name) is old:  # otherwise another package has patched the name
        setattr(owner, name, new)


class AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported, unless `end` came first.

    Args:
        module: full name of a module that is not imported yet.
        call: called without arguments, in the thread that imports the module.
    """

    def __init__(self, module: str, call: Callable[[], None]) -> None:
        self._module, self._call = module, call
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Stop waiting for the module. A second call does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as Python does, with a loader that calls the function at its end."""
        if fullname != self._module:
            return None
        self.end()
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            self._call()

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


def bound_names(stand_ins: Iterable[StandIn]) -> dict[str, list[str]]:
    """Find modules that have imported a function to be replaced, and so keep the original.

    Returns:
        For each such module, the names under which it has the originals. Homes, torch and this package are skipped.
    """
    stand_ins = tuple(stand_ins)
    # Compared by id, since values in modules may define == in any way.
    originals = {id(stand_in.original) for stand_in in stand_ins if stand_in.is_needed}
    homes = {home for stand_in in stand_ins for home in stand_in.homes}
    names_by_module: dict[str, list[str]] = {}
    # A copy of the table, because other threads may import while this loop runs.
    for path, module in list(sys.modules.items()):
        is_other = path.split(".")[0] not in ("torch", "vescale_fsdp") and path not in homes
        for name, value in list(vars(module).items()) if is_other and isinstance(module, ModuleType) else ():
            if id(value) in originals and value.__module__ != path:  # the defining module is not an importer
                names_by_module.setdefault(path, []).append(name)
    return {path: sorted(names) for path, names in names_by_module.items()}
