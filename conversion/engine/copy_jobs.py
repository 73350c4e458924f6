"""Plan the jobs that fill an output file: the bytes to read, their order, and their offsets in the output.

Most conversions change no byte of a tensor: they copy runs of bytes from source files to offsets in the output. These
jobs follow the order of the *source*. The disk then reads forward, many small tensors share a read, and each stripe of
a file with checksums is read and hashed once, whichever tensors are in it:

    source file   |  q  |  k  | v |     o     |  gap  | up ...       one Move per run of bytes
                  '---- cell 0 ----'---- cell 1 ----'- ...           one job per cell: moves are cut at its ends
    output        | header |  k  |     o     |  q  | ...

Computed tensors (casts, concatenations, strided boxes) are split into *segments* instead: runs of items of the result.
An output file that stores checksums of its own stripes is split into *stretches*: byte ranges of the output. One thread
assembles, hashes and writes each stretch front to back; the table of checksums is written last. Usually the source has
the same order, and is then read forward too.

    file         | header |   a   |       b       |    c    | table |
    stretches    |------ 0 -------|------ 1 -------|-- 2 ---|           ends at multiples of `FilePlan.stretch_bytes`

All jobs depend only on the plan and the buffer size. A resumed conversion can therefore recompute the bounds of all
writes, which its digests depend on.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.storage.base import reading_source
from vescale_fsdp.conversion.engine.plan import FilePlan, FixedBytes, TensorItems
from vescale_fsdp.conversion.engine.source import ByteRange, Source
from vescale_fsdp.conversion.engine.tensor_view import TensorView, read_range
from vescale_fsdp.conversion.engine.verified_reads import Begun, VerifiedReads
from vescale_fsdp.layout.geometry import round_up

_CELL_BYTES = 4 * 2**20  # 4 MiB of a source file per job
_STEP_BYTES = 2**20  # 1 MiB is read, hashed and written at a time, so that it stays in the CPU's cache
# 64 KiB: gaps up to this size are read and discarded, as another read would cost more.
_MAX_GAP_BYTES = 64 * 2**10


class Segment(NamedTuple):
    """Items [start, stop) of the flattened tensor that is content number ``content`` of a file."""

    content: int
    start: int
    stop: int

    def place(self, plan: FilePlan) -> tuple[int, int]:
        """Return the byte offset in the output, and the size in bytes."""
        items = plan.tensor(self.content)
        itemsize = items.view.info.dtype.itemsize
        offset = plan.offsets[self.content] + (self.start - items.start) * itemsize
        return offset, (self.stop - self.start) * itemsize


class Move(NamedTuple):
    """A run of bytes, of content number ``content``, that is copied unchanged from a source file to the output."""

    offset: int  # byte offset in the source file
    target: int  # byte offset in the output
    nbytes: int
    content: int


class MoveJob(NamedTuple):
    """Bytes [start, stop) of a source file, and the moves that copy them to the output.

    Attributes:
        moves: sorted by offset; they may overlap or have gaps between them.
    """

    source: Source
    file: str
    start: int
    stop: int
    moves: tuple[Move, ...]


Job = Segment | MoveJob


def jobs_in_order(plan: FilePlan, buffer_bytes: int) -> Iterator[Segment]:
    """Return the jobs of a file front to back, for outputs that are streams."""
    for index, items in plan.tensors:
        yield from _segments(index, items, buffer_bytes)


def jobs_by_source(plan: FilePlan, buffer_bytes: int) -> Iterator[Job]:
    """Return the jobs of a file in the order of the source, followed by the jobs of computed tensors."""
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
            sources[id(source), file] = source  # by id: a `Source` is not hashable
            moves.setdefault((id(source), file), []).append(Move(offset, target, nbytes, index))
            target += nbytes
    for key, file_moves in moves.items():
        yield from _move_jobs(sources[key], key[1], sorted(file_moves), min(_CELL_BYTES, buffer_bytes))
    for index, items in computed:
        yield from _segments(index, items, buffer_bytes)


def _segments(index: int, items: TensorItems, buffer_bytes: int) -> Iterator[Segment]:
    """Split the items of a content into segments of at most one buffer."""
    step = buffer_bytes // items.view.info.dtype.itemsize
    for start in range(items.start, items.stop, step):
        yield Segment(index, start, min(start + step, items.stop))


def _move_jobs(source: Source, file: str, moves: list[Move], cell_bytes: int) -> Iterator[MoveJob]:
    """Return the jobs for the moves from one source file, in the order of the file."""
    checked = source.checked(file)
    unit, end, max_gap = 1, sys.maxsize, _MAX_GAP_BYTES  # no stripes: jobs need no alignment
    if checked is not None:
        # Jobs cover whole stripes, so that each stripe is hashed in one job. No gaps are read (0), because whole
        # stripes in a gap would be read and hashed in vain.
        unit, end, max_gap = checked.stripe_bytes, checked.checked_bytes, 0
    size = unit * max(1, cell_bytes // unit)
    cells: dict[int, list[Move]] = {}
    for move in moves:
        for piece in _cut(move, size):
            cells.setdefault(piece.offset // size, []).append(piece)
    for cell in sorted(cells):  # in file order, so that the disk reads forward
        for start, stop, group in _groups(cells[cell], unit, end, max_gap):
            yield MoveJob(source, file, start, stop, tuple(group))


def _cut(move: Move, size: int) -> Iterator[Move]:
    """Split a move at multiples of ``size`` in the source file."""
    offset, stop = move.offset, move.offset + move.nbytes
    while offset < stop:
        end = min(stop, (offset // size + 1) * size)
        yield Move(offset, move.target + offset - move.offset, end - offset, move.content)
        offset = end


def _groups(moves: list[Move], unit: int, end: int, max_gap: int) -> Iterator[tuple[int, int, list[Move]]]:
    """Group moves, so that no group has a gap of more than ``max_gap`` bytes.

    Returns:
        (first byte, end, moves) of each group. First byte and end are rounded outward to multiples of ``unit``, but the
        end is at most ``end``.
    """
    group: list[Move] = []
    first = last = 0
    for move in sorted(moves):  # by offset, the first field
        start = move.offset // unit * unit
        stop = min(round_up(move.offset + move.nbytes, unit), end)
        if group and start - last > max_gap:
            yield first, last, group
            group = []
        first, last = (first, max(last, stop)) if group else (start, stop)
        group.append(move)
    yield first, last, group


def steps(job: MoveJob, buffer_bytes: int) -> Iterator[tuple[int, int, list[Move]]]:
    """Return the reads of a job: (first byte, end, moves clipped to this range). They cover all bytes of the job."""
    size = min(_STEP_BYTES, buffer_bytes)
    first = 0
    for start in range(job.start, job.stop, size):
        stop = min(start + size, job.stop)
        clipped = []
        # Moves that end before this range are skipped for good, so that a job takes linear time.
        while first < len(job.moves) and job.moves[first].offset + job.moves[first].nbytes <= start:
            first += 1
        for move in job.moves[first:]:
            if move.offset >= stop:
                break
            low, high = max(start, move.offset), min(stop, move.offset + move.nbytes)
            if low < high:
                clipped.append(Move(low, move.target + low - move.offset, high - low, move.content))
        yield start, stop, clipped


def writes(plan: FilePlan, jobs: Iterator[Job], buffer_bytes: int) -> list[tuple[int, int]]:
    """Return the output's byte offset and the size of every write of the jobs, in file order."""
    written: list[tuple[int, int]] = []
    for job in jobs:
        if isinstance(job, Segment):
            written.append(job.place(plan))
        else:
            for _, _, moves in steps(job, buffer_bytes):
                written += [(move.target, move.nbytes) for move in moves]
    return sorted(written)


class Stretch(NamedTuple):
    """Bytes [start, stop) of the output, which one thread assembles and writes front to back."""

    start: int
    stop: int


def stretches(plan: FilePlan) -> Iterator[Stretch]:
    """Return the stretches of a file. They exclude its last content, the table that is computed from their bytes."""
    end = plan.offsets[-1]
    for start in range(0, end, plan.stretch_bytes):
        yield Stretch(start, min(start + plan.stretch_bytes, end))


def stretch_steps(plan: FilePlan, stretch: Stretch, buffer_bytes: int) -> Iterator[tuple[int, int]]:
    """Return first byte and end of each write of a stretch.

    If the file has computed tensors, writes are as large as the buffer, because a small write may have to read many
    source bytes for a few items.
    """
    step = _STEP_BYTES if plan.is_moved else buffer_bytes
    for start in range(stretch.start, stretch.stop, step):
        yield start, min(start + step, stretch.stop)


class StretchFiller:
    """Assembles the bytes of one stretch.

    Args:
        plan: the file's plan.
    """

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._begun: dict[VerifiedReads, Begun] = {}

    def fill(self, start: int, data: memoryview) -> int:
        """Fill ``data`` with the file's bytes from ``start`` on; returns the number of tensor bytes in them."""
        plan, stop, nbytes = self._plan, start + len(data), 0
        runs: list[tuple[int, ByteRange]] = []  # offset in `data`, and the source bytes to read there
        for index in range(bisect_right(plan.offsets, start) - 1, len(plan.contents)):
            content, offset = plan.contents[index], plan.offsets[index]
            if offset >= stop:
                break
            low, high = max(start, offset), min(stop, offset + content.nbytes)
            if low >= high:  # an empty content
                continue
            if isinstance(content, FixedBytes):
                data[low - start : high - start] = content.data[low - offset : high - offset]
                continue
            # Only the last content is computed, which stretches exclude.
            assert isinstance(content, TensorItems), f"{plan.name}: content {index} is computed"
            itemsize, position = content.view.info.dtype.itemsize, low - start
            first, end = (content.start + (at - offset) // itemsize for at in (low, high))
            ranges = content.view.byte_ranges(first, end)
            if ranges is None:
                compute_items(content.view, first, end, data[position : high - start])
            for piece in ranges or ():
                _append(runs, position, piece)
                position += piece.nbytes
            nbytes += high - low
        with reading_source():
            for position, run in runs:
                reads, part = run.source.reads, data[position : position + run.nbytes]
                reads.read(run.file, run.offset, part, self._begun.setdefault(reads, {}))
        return nbytes

    def finish(self) -> None:
        """Verify the stripes of the source that this stretch has read only in part."""
        with reading_source():
            for reads, begun in self._begun.items():
                reads.finish(begun)


def compute_items(view: TensorView, first: int, stop: int, data: memoryview) -> None:
    """Fill ``data`` with items [first, stop) of a view whose items are computed."""
    import numpy as np  # imported late, because most conversions compute nothing

    with reading_source():
        read_range(view, first, stop, np.frombuffer(data, dtype=np.uint8))


def _append(runs: list[tuple[int, ByteRange]], position: int, piece: ByteRange) -> None:
    """Add a run of source bytes that is to be read into ``position``.

    A run that continues the last run, in the source and in the output, is merged with it: adjacent small tensors then
    take one read.
    """
    if runs:
        at, last = runs[-1]
        follows = (last.file, last.offset + last.nbytes, at + last.nbytes) == (
            piece.file,
            piece.offset,
            position,
        )
        if follows and last.source is piece.source:
            runs[-1] = at, last._replace(nbytes=last.nbytes + piece.nbytes)
            return
    runs.append((position, piece))
