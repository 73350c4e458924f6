"""StandIn: a function that replaces a function of another package in every module that exports it.

This is the only file that assigns to names of other packages (`tests/house/test_layering.py`).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple


class StandIn(NamedTuple):
    """A function, its replacement, and the modules that export the function."""

    original: Callable[..., Any]
    ours: Callable[..., Any]
    homes: tuple[str, ...]  # modules, or ``module:Class``; a home that is not imported is skipped

    @property
    def name(self) -> str:
        """The function's name, the same in all homes."""
        return self.original.__name__

    def loaded_homes(self) -> Iterator[Any]:
        """The modules and classes that are imported."""
        for home in self.homes:
            module, _, class_name = home.partition(":")
            if module in sys.modules:
                yield getattr(sys.modules[module], class_name) if class_name else sys.modules[module]


_lock = threading.RLock()  # installations may begin and end in several threads
_counts: Counter[StandIn] = Counter()


def replace(stand_ins: Iterable[StandIn]) -> None:
    """Replace each function, and count how often it was replaced."""
    with _lock:
        for stand_in in stand_ins:
            _counts[stand_in] += 1
            _swap(stand_in, stand_in.original, stand_in.ours)


def restore(stand_ins: Iterable[StandIn]) -> None:
    """Undo one `replace`: the originals are restored when the count is zero."""
    with _lock:
        for stand_in in stand_ins:
            _counts[stand_in] -= 1
            if _counts[stand_in] == 0:
                del _counts[stand_in]
                _swap(stand_in, stand_in.ours, stand_in.original)


def _swap(stand_in: StandIn, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    # Every call swaps all homes: a home that was imported in between has copied the replacement from another home.
    for home in stand_in.loaded_homes():
        if vars(home).get(stand_in.name) is old:  # else another package has patched the name
            setattr(home, stand_in.name, new)


def bound_names(stand_ins: Iterable[StandIn]) -> dict[str, list[str]]:
    """Module -> names under which it has imported an original, except homes, torch and this package."""
    stand_ins = tuple(stand_ins)
    # By id: values of modules may define any ==
    originals = {id(stand_in.original) for stand_in in stand_ins}
    homes = {home for stand_in in stand_ins for home in stand_in.homes}
    names_by_module: dict[str, list[str]] = {}
    # Copy the table, because other threads may import while this loop runs.
    for path, module in list(sys.modules.items()):
        is_other = path.split(".")[0] not in ("torch", "vescale_fsdp") and path not in homes
        for name, value in list(vars(module).items()) if is_other and isinstance(module, ModuleType) else ():
            if id(value) in originals and value.__module__ != path:  # skip the module that defines it
                names_by_module.setdefault(path, []).append(name)
    return {path: sorted(names) for path, names in names_by_module.items()}
