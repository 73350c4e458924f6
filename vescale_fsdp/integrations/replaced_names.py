"""StandIn: a function under another one's name, in every place that offers that name; counted, and put back.

The only file that assigns to names of other people's modules (`tests/house/test_layering.py`).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple


class StandIn(NamedTuple):
    """A function, what stands in for it, and who offers it to others."""

    original: Callable[..., Any]
    ours: Callable[..., Any]
    homes: tuple[str, ...]  # modules, or ``module:Class``; those that are not loaded need nothing

    @property
    def name(self) -> str:
        """The name it has in all its homes."""
        return self.original.__name__

    def loaded_homes(self) -> Iterator[Any]:
        """The modules and classes themselves, as far as they are loaded."""
        for home in self.homes:
            module, _, class_name = home.partition(":")
            if module in sys.modules:
                yield getattr(sys.modules[module], class_name) if class_name else sys.modules[module]


_lock = threading.RLock()
_standing: Counter[StandIn] = Counter()


def replace(stand_ins: Iterable[StandIn]) -> None:
    """Put each in place, or count that once more is asked for it."""
    with _lock:
        for stand_in in stand_ins:
            _standing[stand_in] += 1
            _swap(stand_in, stand_in.original, stand_in.ours)


def put_back(stand_ins: Iterable[StandIn]) -> None:
    """Undo one `replace`: the originals come back where nobody else asks for the stand-in."""
    with _lock:
        for stand_in in stand_ins:
            _standing[stand_in] -= 1
            if _standing[stand_in] == 0:
                del _standing[stand_in]
                _swap(stand_in, stand_in.ours, stand_in.original)


def _swap(stand_in: StandIn, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    # All homes each time: one that was first imported meanwhile has taken the stand-in from another home.
    for home in stand_in.loaded_homes():
        if vars(home).get(stand_in.name) is old:
            setattr(home, stand_in.name, new)


def bound_names(stand_ins: Iterable[StandIn]) -> dict[str, list[str]]:
    """Modules that hold another one's original, besides the homes, torch and this package; and under which names."""
    stand_ins = tuple(stand_ins)
    found: dict[str, list[str]] = {}
    originals = {id(stand_in.original) for stand_in in stand_ins}
    homes = {home for stand_in in stand_ins for home in stand_in.homes}
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] in ("torch", "vescale_fsdp") or path in homes:
            continue
        if isinstance(module, ModuleType):
            names = [
                name
                for name, value in list(vars(module).items())
                if id(value) in originals and value.__module__ != path  # its own module
            ]
            if names:
                found[path] = sorted(names)
    return found
