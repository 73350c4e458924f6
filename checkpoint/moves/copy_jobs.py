"""The pieces of work that fill an output file: which bytes to read, in which order, and where they go.

Most conversions change no byte of a tensor: runs of bytes move from files of the source to places in the output.
These are read in the order of the *source*, so that a disk reads forward, small tensors come many at a time,
and each stripe of a file with checksums is read, hashed and proven once, whichever tensors it holds, several to a job:

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
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.moves.plan import FilePlan, FixedBytes, TensorItems
from vescale_fsdp.checkpoint.moves.source import ByteRange, ForwardReader, Source, StripedFile
from vescale_fsdp.checkpoint.storage.base import reading_source

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
        checked: the file's checksums, where it has them: the bytes are whole stripes of it then.
    """

    source: Source
    file: str
    start: int
    stop: int
    moves: tuple[Move, ...]
    checked: StripedFile | None


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
        unit, end, max_gap = checked.stripe_bytes, checked.checked_bytes, 0
    size = unit * max(1, cell_bytes // unit)
    cells: dict[int, list[Move]] = {}
    for move in moves:
        for piece in _cut(move, size):
            cells.setdefault(piece.offset // size, []).append(piece)
    for cell in sorted(cells):
        for start, stop, group in _groups(cells[cell], unit, end, max_gap):
            yield MoveJob(source, file, start, stop, tuple(group), checked)


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
        stop = min(-(-(move.offset + move.nbytes) // unit) * unit, end)
        if group and start - last > max_gap:
            yield first, last, group
            group = []
        first, last = (first, max(last, stop)) if group else (start, stop)
        group.append(move)
    yield first, last, group


def steps(job: MoveJob, buffer_bytes: int) -> Iterator[tuple[int, int, list[Move]]]:
    """(first byte, end, moves cut to it) of each read of a job; together they cover all its bytes.

    None goes beyond the end of a stripe.
    """
    size = min(_STEP_BYTES, buffer_bytes)
    whole = job.stop - job.start if job.checked is None else job.checked.stripe_bytes
    first = 0
    for start, stop in (
        (start, min(start + size, stripe + whole, job.stop))
        for stripe in range(job.start, job.stop, whole)
        for start in range(stripe, min(stripe + whole, job.stop), size)
    ):
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
        self._readers: dict[int, ForwardReader] = {}

    def fill(self, start: int, data: memoryview) -> int:
        """The file's bytes from ``start`` on; returns how many of them are of tensors."""
        plan, stop, nbytes = self._plan, start + len(data), 0
        run = _Run(data, self._read)
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
            self._fill_items(content, low - offset, low - start, high - low, run)
            nbytes += high - low
        run.flush()
        return nbytes

    def _fill_items(self, content: TensorItems, at: int, place: int, nbytes: int, run: _Run) -> None:
        """Bytes [at, at + nbytes) of a content, to ``place`` of the data."""
        size = content.view.info.dtype.itemsize
        first = content.start + at // size
        ranges = content.view.byte_ranges(first, first + nbytes // size)
        if ranges is not None:
            for each in ranges:
                run.add(place, each)
                place += each.nbytes
            return
        import numpy as np  # only views that change their tensor need it

        from vescale_fsdp.checkpoint.moves.tensor_view import read_range

        with reading_source():
            part = np.frombuffer(run.data[place : place + nbytes], dtype=np.uint8)
            read_range(content.view, first, first + nbytes // size, part)

    def _read(self, source: Source, file: str, offset: int, buffer: memoryview) -> None:
        if id(source) not in self._readers:
            self._readers[id(source)] = ForwardReader(source)
        with reading_source():
            self._readers[id(source)].read(file, offset, buffer)

    def finish(self) -> None:
        """Prove what was read."""
        with reading_source():
            for reader in self._readers.values():
                reader.finish()


class _Run:
    """Bytes that lie one after the other, in a source's file as in the output: small tensors are one read."""

    def __init__(self, data: memoryview, read: Callable[[Source, str, int, memoryview], None]) -> None:
        self.data = data
        self._read = read
        self._place = self._nbytes = 0
        self._first: ByteRange | None = None

    def add(self, place: int, found: ByteRange) -> None:
        """The next bytes, which go to ``place`` of the data."""
        first = self._first
        if (
            first is not None
            and found.source is first.source
            and (found.file, found.offset, place)
            == (first.file, first.offset + self._nbytes, self._place + self._nbytes)
        ):
            self._nbytes += found.nbytes
            return
        self.flush()
        self._place, self._nbytes, self._first = place, found.nbytes, found

    def flush(self) -> None:
        """Read what was added."""
        if self._first is not None:
            part = self.data[self._place : self._place + self._nbytes]
            self._read(self._first.source, self._first.file, self._first.offset, part)
            self._first = None
