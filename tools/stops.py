"""How many functions a tensor passes on its way through a save and a conversion: what a newcomer has to follow.

    python tools/stops.py                  the three ways as indented lists, with file:line, and totals
    python tools/stops.py --only save      one of them: save, save-zarr, to-hf
    python tools/stops.py --json           the same as JSON

One tensor is saved, and converted, in this process, once to warm caches up and once under a profiler, which sees
every call between functions of `vescale_fsdp`, `checkpoint` and `conversion`. A **stop** is a function among them
that passes the work on (calls another of them) or that is given the tensor or its bytes (a tensor or a memory view
among its arguments, in its object or in what it returns). One that does neither only answers a question, such as a
size or a name: who follows the tensor need not open it. Each function is one stop, however often it is
called; one of more than 60 lines counts as several, 60 lines each, so that merging functions into long ones
wins nothing.

No stops of their own: properties, lambdas, comprehensions, functions inside functions and methods with names in
double underscores. What those call is counted as called by the function around them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import vescale_fsdp
from vescale_fsdp.checkpoint import save
from vescale_fsdp.conversion import convert, open_source

__all__ = ["WAYS", "Stop", "Way", "follow"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(vescale_fsdp.__file__).resolve().parent
# The two linked folders: beside the package in a checkout, inside it where it is installed.
SOURCES = [PACKAGE, (PACKAGE / "checkpoint").resolve(), (PACKAGE / "conversion").resolve()]
LINES_PER_STOP = 60
BYTES = (torch.Tensor, memoryview, bytearray)


@dataclass(frozen=True)
class Stop:
    """A function that a tensor passes."""

    name: str
    file: str
    line: int
    lines: int
    depth: int  # how many functions were around it at its first call

    @property
    def weight(self) -> int:
        """What it counts for."""
        return -(-self.lines // LINES_PER_STOP)


@dataclass
class Way:
    """What one run entered."""

    entered: dict[CodeType, int] = field(default_factory=dict)  # in order of first calls -> depth
    calling: set[CodeType] = field(default_factory=set)
    holding: set[CodeType] = field(default_factory=set)

    def stops(self) -> list[Stop]:
        """The functions that count, in the order of their first calls."""
        return [
            _stop(code, depth)
            for code, depth in self.entered.items()
            if code in self.calling or code in self.holding
        ]

    def profile(self, frame: FrameType, event: str, returned: Any) -> None:
        """The profiler: notes who calls and who holds the tensor."""
        code = frame.f_code
        if not _is_followed(code):
            return
        if event == "call":
            around = _around(frame)
            self.entered.setdefault(code, len(around))
            if around and around[0] is not code:
                self.calling.add(around[0])
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given: Any = [frame.f_locals[name] for name in names if name in frame.f_locals]
        else:
            given = [returned] if event == "return" else []
        if any(_holds(value) for value in given):
            self.holding.add(code)


def follow(work: Callable[[], object]) -> Way:
    """What a call enters, in all threads that it starts."""
    way = Way()
    threading.setprofile(way.profile)
    sys.setprofile(way.profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return way


@cache
def _file(name: str) -> Path | None:
    """The source file of ours that code comes from."""
    file = Path(name).resolve()
    return file if any(file.is_relative_to(folder) for folder in SOURCES) else None


@cache
def _properties(file: Path) -> frozenset[int]:
    """Where the properties of a file begin: lines of their first decorators."""
    lines = file.read_text().splitlines()
    return frozenset(
        number for number, line in enumerate(lines, 1) if line.strip() in ("@property", "@cached_property")
    )


@cache
def _is_followed(code: CodeType) -> bool:
    file = _file(code.co_filename)
    if file is None or code.co_name.startswith(("<", "__")) or "<locals>" in code.co_qualname:
        return False
    return code.co_firstlineno not in _properties(file)


def _around(frame: FrameType) -> list[CodeType]:
    """The functions of ours around a call, the nearest first."""
    found = []
    outer = frame.f_back
    while outer is not None:
        if _is_followed(outer.f_code):
            found.append(outer.f_code)
        outer = outer.f_back
    return found


def _holds(value: object) -> bool:
    """Whether a value is a tensor or bytes of one, or has one as an item or attribute."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(each, BYTES) for each in value)
    if isinstance(value, dict):
        return any(isinstance(each, BYTES) for each in list(value.values()))
    if type(value).__module__.startswith("vescale_fsdp."):
        own = getattr(value, "__dict__", {})
        return any(isinstance(each, BYTES) for each in list(own.values()))
    return isinstance(value, BYTES)


def _stop(code: CodeType, depth: int) -> Stop:
    file = _file(code.co_filename)
    assert file is not None
    lines = len(inspect.getsourcelines(code)[0])
    base = ROOT if file.is_relative_to(ROOT) else PACKAGE.parent
    return Stop(code.co_qualname, str(file.relative_to(base)), code.co_firstlineno, lines, depth)


def _save(folder: Path, form: str, attempt: int) -> None:
    save(folder / f"{form}-{attempt}", {"weight": torch.arange(64.0).view(8, 8)}, format=form)  # type: ignore[arg-type]


def _to_hf(folder: Path, attempt: int) -> None:
    source = folder / "source"
    if not source.exists():
        save(source, {"weight": torch.arange(64.0).view(8, 8)})
    convert(open_source(str(source)), str(folder / f"hf-{attempt}"), "hf")


WAYS: dict[str, Callable[[Path, int], None]] = {
    "save": lambda folder, attempt: _save(folder, "native", attempt),
    "save-zarr": lambda folder, attempt: _save(folder, "zarr", attempt),
    "to-hf": _to_hf,
}


def measure(name: str) -> list[Stop]:
    """The stops of one of `WAYS`."""
    with tempfile.TemporaryDirectory() as folder:
        work = partial(WAYS[name], Path(folder))
        work(0)  # imports and caches are no part of the way
        return follow(partial(work, 1)).stops()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="count the functions that a tensor passes")
    parser.add_argument("--only", choices=WAYS, action="append", help="this way alone (repeatable)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = {name: measure(name) for name in options.only or WAYS}
    totals = {name: sum(stop.weight for stop in stops) for name, stops in found.items()}
    if options.json:
        ways = {name: [{**vars(stop), "weight": stop.weight} for stop in found[name]] for name in found}
        print(json.dumps({"totals": totals, "ways": ways}, indent=1))
        return
    for name, stops in found.items():
        print(f"{name}: {totals[name]} stops")
        for stop in stops:
            times = f" x {stop.weight}" if stop.weight > 1 else ""
            print(f"{'  ' * (stop.depth + 1)}{stop.name}{times}  {stop.file}:{stop.line}")


if __name__ == "__main__":
    main()
