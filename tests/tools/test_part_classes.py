"""`tools.part_classes` finds classes by their fields, and names for tuples of numbers."""

from __future__ import annotations

from pathlib import Path

from tools.part_classes import part_classes, unnamed_tuples

PRODUCT = """
from dataclasses import dataclass
from typing import NamedTuple
Span = tuple[int, int]
Sizes = tuple[int, ...]

class Run(NamedTuple):
    first_rank: int
    piece_numel: int

class Job(NamedTuple):
    runs: tuple[Run, ...]
    start: int

class Turn(NamedTuple):
    job: Job | None
    sender: int

@dataclass
class Placed:
    name: str
    region: Region

@dataclass
class Writer:
    start: str
    sizes: tuple[int, ...]

class Slotted:
    __slots__ = ("first", "num_bytes")
    def __init__(self, first: int, num_bytes: int) -> None: ...

class Stop(NamedTuple):
    stop: int
    reason: str

class Box:
    start: int
    size: int

def cut(span: tuple[int, int], shape: tuple[int, ...]) -> list[tuple[int, int, int]]: ...
"""


def test_classes_by_their_fields(tmp_path: Path) -> None:
    """A position beside a size, a typed field, and what has such a class; a text or a lone number is no position."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "parts.py").write_text(PRODUCT)

    found = [kind.name for kind in part_classes(tmp_path.resolve())]

    assert sorted(found) == ["Job", "Placed", "Run", "Slotted", "Span", "Turn"]
    assert unnamed_tuples(PRODUCT) == 2
