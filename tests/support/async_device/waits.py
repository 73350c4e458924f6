"""Waits of the product for streams and events: where they are, which ones a program executes, and a run without one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
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


def all_waits() -> list[Wait]:
    """Every call of a stream's or event's wait in the package, by file and line."""
    found = []
    for folder in ("vescale_fsdp", "checkpoint"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if file.startswith(("vescale_fsdp/checkpoint", "vescale_fsdp/conversion")):  # links
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(func=ast.Attribute(attr=method)) if method in _METHODS:
                        last = node.end_lineno or node.lineno
                        found.append(Wait(file, node.lineno, last, ast.unparse(node)))
    return sorted(found)


_removed: Wait | None = None
executed: set[tuple[str, int]] = (
    set()
)  # file and line of each wait of the product that this process has called


def is_removed() -> bool:
    """Whether the wait that calls this function's caller is the one that is removed."""
    frame = sys._getframe(2)
    path = Path(frame.f_code.co_filename).resolve()
    if ROOT not in path.parents:
        return False
    file, line = str(path.relative_to(ROOT)), frame.f_lineno
    executed.add((file, line))
    return _removed is not None and file == _removed.file and _removed.first <= line <= _removed.last


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """A context in which this call does nothing."""
    global _removed
    _removed = wait
    try:
        yield
    finally:
        _removed = None
