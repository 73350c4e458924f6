"""Waits of the product for streams and events: where they are, which ones a program executes, and a run with one
removed or late."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
_METHODS = {"wait_event", "wait_stream", "synchronize"}


class Wait(NamedTuple):
    """A call in a source of the product; lines count from 1, the last one included."""

    file: str
    first: int
    last: int
    text: str
    function: str  # its name


def all_waits() -> list[Wait]:
    """Every call of a stream's or event's wait in the package, by file and line."""
    found = []
    for folder in ("vescale_fsdp", "checkpoint"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if file.startswith(("vescale_fsdp/checkpoint", "vescale_fsdp/conversion")):  # links
                continue
            functions = [
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
            ]
            for function in functions:
                for node in ast.walk(function):
                    match node:
                        case ast.Call(func=ast.Attribute(attr=method)) if method in _METHODS:
                            last = node.end_lineno or node.lineno
                            found.append(Wait(file, node.lineno, last, ast.unparse(node), function.name))
    return sorted(found)


_changed: Wait | None = None
_is_late = False  # whether the changed wait is late, not removed
_late: list[Callable[[], None]] = []  # calls of the changed wait that are not made yet
executed: set[tuple[str, int]] = (
    set()
)  # file and line of each wait of the product that this process has called


def make_late_waits() -> None:
    """Make the calls of a late wait, where its stream may be used next."""
    while _late:
        _late.pop(0)()


def call(wait: Callable[[], None]) -> None:
    """Call a wait for the caller's caller, unless it is the changed one."""
    make_late_waits()
    frame = sys._getframe(2)
    path = Path(frame.f_code.co_filename).resolve()
    if ROOT in path.parents:
        file, line = str(path.relative_to(ROOT)), frame.f_lineno
        executed.add((file, line))
        if _changed is not None and file == _changed.file and _changed.first <= line <= _changed.last:
            if _is_late:
                _late.append(wait)
            return
    wait()


@contextmanager
def changed(wait: Wait, *, is_late: bool) -> Iterator[None]:
    """A context in which this call does nothing; if it is late, in which it waits only before the next use of streams.

    A late wait is in time for allocations of its stream, and too late for memory that is freed after it.
    """
    global _changed, _is_late
    _changed, _is_late = wait, is_late
    try:
        yield
    finally:
        _changed = None
        make_late_waits()
