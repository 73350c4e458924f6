"""The pieces of work that fill an output file: which bytes to read, in which order, and where they go.

Most conversions change no byte of a tensor: runs of bytes move from files of the source to places in the output.
These are read in the order of the *source*, so that a disk reads forward, small tensors come many at a time,
and each stripe of a file with checksums is read and hashed once, whichever tensors are in it, several to a job:

    source file   |  q  |  k  | v |     o     |  gap  | up ...       one Move per run of bytes
                  '---- cell 0 ----'---- cell 1 ----'- ...           one job per cell: moves are cut at its ends
    output        | header |  k  |     o     |  q  | ...

What a view computes (casts, joins, strided boxes) is instead cut into *segments*, runs of the items of the
result. A file that stores checksums of its own stripes is cut into *stretches*: runs of its bytes, each put together,
hashed and written from front to back by one thread; the checksums come last. Where the source has the same order, as it
mostly has, it is read forward too.

    file         | header |   a   |       b       |    c    | table |
    stretches    |------ 0 -------|------ 1 -------|-- 2 ---|           ends at multiples of `FilePlan.stretch_bytes`

Everything here follows from the plan and the buffer size alone: a resumed run cuts as the first one did.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.moves.plan import FilePlan, FixedBytes, TensorItems
from vescale_fsdp.checkpoint.moves.source import ByteRange, Source
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView, read_range
from vescale_fsdp.checkpoint.moves.verified_reads import Begun, VerifiedReads
from vescale_fsdp.checkpoint.storage.base import reading_source
from vescale_fsdp.layout.geometry import round_up

_CELL_BYTES = 4 * 2**20  # 4 MiB of a source file per job
_STEP_BYTES = 2**20  # 1 MiB is read, hashed and written while it is in the cache
_MAX_GAP_BYTES = 64 * 2**10  # 64 KiB: reading over less costs less than another read


class Segment(NamedTuple):
    """Items [start, stop) of the tensor that is content number ``content``."""

    content: int
    start: int
    stop: int

    def place(self, plan: FilePlan) -> tuple[int, int]:
        """(byte offset in the output, bytes)."""
        items = plan.tensor(self.content)
        itemsize = items.view.info.dtype.itemsize
        offset = plan.offsets[self.content] + (self.start - items.start) * itemsize
        return offset, (self.stop - self.start) * itemsize


class Move(NamedTuple):
    """A run of bytes that goes as it is from a source file to the output; of content number ``content``."""

    offset: int  # in the source file
    target: int  # in the output
    nbytes: int
    content: int


class MoveJob(NamedTuple):
    """Bytes [start, stop) of a source file and what of them goes where.

    Attributes:
        moves: by offset; they may overlap, and there may be gaps between them.
    """

    source: Source
    file: str
    start: int
    stop: int
    moves: tuple[Move, ...]


Job = Segment | MoveJob


def jobs_in_order(plan: FilePlan, buffer_bytes: int) -> Iterator[Segment]:
    """All of a file, front to back, for outputs that are streams."""
    for index, items in plan.tensors:
        yield from _segments(index, items, buffer_bytes)


def jobs_by_source(plan: FilePlan, buffer_bytes: int) -> Iterator[Job]:
    """All of a file, in the order that suits the source."""
    sources: dict[tuple[int, str], Source] = {}
    moves: dict[tuple[int, str], list[Move]] = {}
    computed: list[tuple[int, TensorItems]] = []
    for index, items in plan.tensors:
        ranges = items.view.byte_ranges(items.start, items.stop)
        if ranges is None:
            computed.append((index, items))
            continue
        target = plan.offsets[index]
        for source, file, offset, nbytes in ranges:
            sources[id(source), file] = source
            moves.setdefault((id(source), file), []).append(Move(offset, target, nbytes, index))
            target += nbytes
    for key, found in moves.items():
        yield from _move_jobs(sources[key], key[1], sorted(found), min(_CELL_BYTES, buffer_bytes))
    for index, items in computed:
        yield from _segments(index, items, buffer_bytes)


def _segments(index: int, items: TensorItems, buffer_bytes: int) -> Iterator[Segment]:
    step = buffer_bytes // items.view.info.dtype.itemsize
    for start in range(items.start, items.stop, step):
        yield Segment(index, start, min(start + step, items.stop))


def _move_jobs(source: Source, file: str, moves: list[Move], cell_bytes: int) -> Iterator[MoveJob]:
    checked = source.checked(file)
    unit, end, max_gap = 1, sys.maxsize, _MAX_GAP_BYTES
    if checked is not None:
        # 0: whole stripes inside a gap would be read and hashed in vain.
        unit, end, max_gap = checked.stripe_bytes, checked.checked_bytes, 0
    size = unit * max(1, cell_bytes // unit)
    cells: dict[int, list[Move]] = {}
    for move in moves:
        for piece in _cut(move, size):
            cells.setdefault(piece.offset // size, []).append(piece)
    for cell in sorted(cells):  # so that a disk reads forward
        for start, stop, group in _groups(cells[cell], unit, end, max_gap):
            yield MoveJob(source, file, start, stop, tuple(group))


def _cut(move: Move, size: int) -> Iterator[Move]:
    """A move in pieces that do not cross multiples of ``size`` in the source file."""
    offset, stop = move.offset, move.offset + move.nbytes
    while offset < stop:
        end = min(stop, (offset // size + 1) * size)
        yield Move(offset, move.target + offset - move.offset, end - offset, move.content)
        offset = end


def _groups(moves: list[Move], unit: int, end: int, max_gap: int) -> Iterator[tuple[int, int, list[Move]]]:
    """(first byte, end, moves) of groups with no larger gap inside, rounded out to units of a file's first bytes."""
    group: list[Move] = []
    first = last = 0
    for move in sorted(moves):
        start = move.offset // unit * unit
        stop = min(round_up(move.offset + move.nbytes, unit), end)
        if group and start - last > max_gap:
            yield first, last, group
            group = []
        first, last = (first, max(last, stop)) if group else (start, stop)
        group.append(move)
    yield first, last, group


def steps(job: MoveJob, buffer_bytes: int) -> Iterator[tuple[int, int, list[Move]]]:
    """(first byte, end, moves cut to it) of each read of a job; together they cover all its bytes."""
    size = min(_STEP_BYTES, buffer_bytes)
    first = 0
    for start in range(job.start, job.stop, size):
        stop = min(start + size, job.stop)
        found = []
        while first < len(job.moves) and job.moves[first].offset + job.moves[first].nbytes <= start:
            first += 1
        for move in job.moves[first:]:
            if move.offset >= stop:
                break
            low, high = max(start, move.offset), min(stop, move.offset + move.nbytes)
            if low < high:
                found.append(Move(low, move.target + low - move.offset, high - low, move.content))
        yield start, stop, found


def writes(plan: FilePlan, jobs: Iterator[Job], buffer_bytes: int) -> list[tuple[int, int]]:
    """(byte offset in the output, bytes) of every write that the jobs make, in file order."""
    found: list[tuple[int, int]] = []
    for job in jobs:
        if isinstance(job, Segment):
            found.append(job.place(plan))
        else:
            for _, _, moves in steps(job, buffer_bytes):
                found += [(move.target, move.nbytes) for move in moves]
    return sorted(found)


class Stretch(NamedTuple):
    """Bytes [start, stop) of the output."""

    start: int
    stop: int


def stretches(plan: FilePlan) -> Iterator[Stretch]:
    """All of a file but its last content, which is computed from the others."""
    end = plan.offsets[-1]
    for start in range(0, end, plan.stretch_bytes):
        yield Stretch(start, min(start + plan.stretch_bytes, end))


def stretch_steps(plan: FilePlan, stretch: Stretch, buffer_bytes: int) -> Iterator[tuple[int, int]]:
    """(first byte, end) of each write. Computed tensors want large ones: much may be read for the sake of few items."""
    step = _STEP_BYTES if plan.is_moved else buffer_bytes
    for start in range(stretch.start, stretch.stop, step):
        yield start, min(start + step, stretch.stop)


class StretchFiller:
    """Puts the bytes of one stretch together.

    Args:
        plan: the file.
    """

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._begun: dict[VerifiedReads, Begun] = {}

    def fill(self, start: int, data: memoryview) -> int:
        """Fill ``data`` with the file's bytes from ``start`` on; returns how many of them are of tensors."""
        plan, stop, nbytes = self._plan, start + len(data), 0
        runs: list[tuple[int, ByteRange]] = []  # what is read, by its place in the data
        for index in range(bisect_right(plan.offsets, start) - 1, len(plan.contents)):
            content, offset = plan.contents[index], plan.offsets[index]
            if offset >= stop:
                break
            low, high = max(start, offset), min(stop, offset + content.nbytes)
            if low >= high:
                continue
            if isinstance(content, FixedBytes):
                data[low - start : high - start] = content.data[low - offset : high - offset]
                continue
            assert isinstance(content, TensorItems), f"{plan.name}: content {index} is computed"
            itemsize, place = content.view.info.dtype.itemsize, low - start
            first, end = (content.start + (at - offset) // itemsize for at in (low, high))
            ranges = content.view.byte_ranges(first, end)
            if ranges is None:
                compute_items(content.view, first, end, data[place : high - start])
            for piece in ranges or ():
                _append(runs, place, piece)
                place += piece.nbytes
            nbytes += high - low
        with reading_source():
            for place, run in runs:
                reads, part = run.source.reads, data[place : place + run.nbytes]
                reads.read(run.file, run.offset, part, self._begun.setdefault(reads, {}))
        return nbytes

    def finish(self) -> None:
        """Verify what was read."""
        with reading_source():
            for reads, begun in self._begun.items():
                reads.finish(begun)


def compute_items(view: TensorView, first: int, stop: int, data: memoryview) -> None:
    """Fill ``data`` with items [first, stop) of a view that changes its tensor."""
    import numpy as np  # only such views need it

    with reading_source():
        read_range(view, first, stop, np.frombuffer(data, dtype=np.uint8))


def _append(runs: list[tuple[int, ByteRange]], place: int, piece: ByteRange) -> None:
    """Add bytes that go to ``place``. They join the last run where they follow it on both sides: small tensors are one
    read."""
    if runs:
        at, last = runs[-1]
        follows = (last.file, last.offset + last.nbytes, at + last.nbytes) == (
            piece.file,
            piece.offset,
            place,
        )
        if follows and last.source is piece.source:
            runs[-1] = at, last._replace(nbytes=last.nbytes + piece.nbytes)
            return
    runs.append((place, piece))
