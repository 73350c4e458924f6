r"""Plan the jobs that fill an output file: the bytes to read, their order, and their offsets in the output.

Most conversions change no byte of a tensor: they copy runs of bytes from source files to offsets in the output. Their
`CopyJob`\ s follow the order of the *source*. The disk then reads forward, many small tensors share a read, and each
stripe of a file with checksums is read and hashed once, whichever tensors are in it:

    source file   |  q  |  k  | v |     o     |  gap  | up ...       one copy per run of bytes
                  '---- cell 0 ----'---- cell 1 ----'- ...           one job per cell: copies are cut at its ends
    output        | header |  k  |     o     |  q  | ...

The remaining jobs are extents of the *output*, whose bytes one thread assembles and writes front to back. Computed
tensors (casts, concatenations, strided boxes) are split into extents of one buffer. An output file that stores
checksums of its own stripes is split into *stretches*, which are hashed while they are written; the table of checksums
is written last. Usually the source has the order of a stretch, and is then read forward too.

    file         | header |   a   |       b       |    c    | table |
    stretches    |------ 0 -------|------ 1 -------|-- 2 ---|           ends at multiples of `FilePlan.stretch_bytes`

All jobs depend only on the plan and the buffer size. A resumed conversion can therefore recompute the bounds of all
writes, which its digests depend on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.storage.base import reading_source
from vescale_fsdp.conversion.engine.plan import FilePlan, FixedBytes, TensorItems
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.tensor_view import TensorView, read_range
from vescale_fsdp.conversion.engine.verified_reads import Begun, VerifiedReads
from vescale_fsdp.layout.extent import CopyWalk, Extent, ReadJob
from vescale_fsdp.layout.geometry import round_up

_CELL_BYTES = 4 * 2**20  # 4 MiB of a source file per job
_STEP_BYTES = 2**20  # 1 MiB is read, hashed and written at a time, so that it stays in the CPU's cache
# 64 KiB: gaps up to this size are read and discarded, as another read would cost more.
_MAX_GAP_BYTES = 64 * 2**10


class ByteCopy(NamedTuple):
    """A copy of bytes: a run that is contiguous in the source file and in the output."""

    start: int  # byte offset in the source file
    target: int  # byte offset in the output
    nbytes: int

    @property
    def stop(self) -> int:
        """End in the source file."""
        return self.start + self.nbytes

    def clip(self, start: int, stop: int) -> ByteCopy:
        """Return the copy of the bytes in [start, stop) of the source file."""
        low = max(start, self.start)
        return ByteCopy(low, self.target + low - self.start, min(stop, self.stop) - low)


CopyJob = ReadJob[Source, ByteCopy]

Job = CopyJob | Extent
"""A read of the source with its copies, or an extent of the output to assemble."""


def jobs_of(plan: FilePlan, buffer_bytes: int, *, in_order: bool) -> Iterator[Job]:
    """Return the jobs of a file: its stretches, or the jobs in the order of the source.

    Args:
        in_order: whether the output is a stream, which is written front to back.
    """
    if in_order:
        yield from jobs_in_order(plan, buffer_bytes)
    elif plan.stretch_bytes:
        # Without the last content, the table that is computed from the bytes of the stretches.
        yield from Extent(plan.name, 0, plan.offsets[-1]).split(plan.stretch_bytes)
    else:
        yield from _jobs_by_source(plan, buffer_bytes)


def jobs_in_order(plan: FilePlan, buffer_bytes: int) -> Iterator[Extent]:
    """Return the extents of a file's tensors front to back, for outputs that are streams."""
    for index, _ in plan.tensors:
        yield from _tensor_extents(plan, index, buffer_bytes)


def _jobs_by_source(plan: FilePlan, buffer_bytes: int) -> Iterator[Job]:
    """Return the jobs of a file in the order of the source, followed by the jobs of computed tensors."""
    sources: dict[tuple[int, str], Source] = {}
    copies: dict[tuple[int, str], list[ByteCopy]] = {}
    computed: list[int] = []
    for index, items in plan.tensors:
        stored = items.view.extents(items.start, items.stop)
        if stored is None:
            computed.append(index)
            continue
        target, (source, extents) = plan.offsets[index], stored
        for file, offset, nbytes in extents:
            sources[id(source), file] = source  # by id: a `Source` is not hashable
            copies.setdefault((id(source), file), []).append(ByteCopy(offset, target, nbytes))
            target += nbytes
    for key, of_file in copies.items():
        yield from _copy_jobs(sources[key], key[1], of_file, min(_CELL_BYTES, buffer_bytes))
    for index in computed:
        yield from _tensor_extents(plan, index, buffer_bytes)


def _tensor_extents(plan: FilePlan, index: int, buffer_bytes: int) -> Iterator[Extent]:
    """Split the extent of a tensor in the output into whole items of at most one buffer."""
    items = plan.tensor(index)
    itemsize = items.view.info.dtype.itemsize
    yield from Extent(plan.name, plan.offsets[index], items.nbytes).split(buffer_bytes // itemsize * itemsize)


def _copy_jobs(source: Source, file: str, copies: list[ByteCopy], cell_bytes: int) -> Iterator[CopyJob]:
    """Return the jobs for the copies from one source file, in the order of the file."""
    checked = source.checked(file)
    unit, end, max_gap = 1, sys.maxsize, _MAX_GAP_BYTES  # no stripes: jobs need no alignment
    if checked is not None:
        # Jobs cover whole stripes, so that each stripe is hashed in one job. No gaps are read (0), because whole
        # stripes in a gap would be read and hashed in vain.
        unit, end, max_gap = checked.stripe_bytes, checked.checked_bytes, 0
    size = unit * max(1, cell_bytes // unit)
    cells: dict[int, list[ByteCopy]] = {}
    for copy in copies:
        for cell in range(copy.start // size, -(-copy.stop // size)):
            cells.setdefault(cell, []).append(copy.clip(cell * size, (cell + 1) * size))
    for _, of_cell in sorted(cells.items()):  # in file order, so that the disk reads forward
        group: list[ByteCopy] = []
        first = last = 0  # the bytes to read for the group
        for copy in sorted(of_cell):  # by start, the first field
            start, stop = copy.start // unit * unit, min(round_up(copy.stop, unit), end)
            if group and start - last > max_gap:
                yield ReadJob(source, Extent(file, first, last - first), tuple(group))
                group = []
            first, last = (first, max(last, stop)) if group else (start, stop)
            group.append(copy)
        yield ReadJob(source, Extent(file, first, last - first), tuple(group))


def reads_of(job: CopyJob, buffer_bytes: int) -> Iterator[tuple[Extent, list[ByteCopy]]]:
    """Return the reads of a job: (extent, copies clipped to the extent). The reads cover all bytes of the job."""
    walk = CopyWalk(job.copies)
    for extent in job.extent.split(min(_STEP_BYTES, buffer_bytes)):
        start, stop = extent.offset, extent.stop
        yield extent, [copy.clip(start, stop) for copy in walk.within(start, stop)]


def steps(plan: FilePlan, job: Extent, buffer_bytes: int) -> Iterator[Extent]:
    """Return the extent of each write of an extent of the output.

    If the file has computed tensors, writes are as large as the buffer, because a small write may have to read many
    source bytes for a few items.
    """
    return job.split(_STEP_BYTES if plan.stretch_bytes and plan.is_moved else buffer_bytes)


def writes(plan: FilePlan, buffer_bytes: int, *, in_order: bool) -> list[Extent]:
    """Return the extent of every write of the jobs of `jobs_of`, in file order."""
    written: list[Extent] = []
    for job in jobs_of(plan, buffer_bytes, in_order=in_order):
        if isinstance(job, ReadJob):
            for _, copies in reads_of(job, buffer_bytes):
                written += (Extent(plan.name, copy.target, copy.nbytes) for copy in copies)
        else:
            written += steps(plan, job, buffer_bytes)
    return sorted(written)


class Assembler:
    """Assembles the bytes of one extent of the output, front to back.

    Args:
        plan: the file's plan.
    """

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._begun: dict[VerifiedReads, Begun] = {}

    def fill(self, start: int, data: memoryview) -> int:
        """Fill ``data`` with the file's bytes from ``start`` on; returns the number of tensor bytes in ``data``."""
        plan, stop, nbytes = self._plan, start + len(data), 0
        runs: list[tuple[int, Source, Extent]] = []  # offset in `data`, and the source bytes to read there
        for index in range(plan.content_at(start), len(plan.contents)):
            content, offset = plan.contents[index], plan.offsets[index]
            if offset >= stop:
                break
            low, high = max(start, offset), min(stop, offset + content.nbytes)
            if low >= high:  # an empty content
                continue
            if isinstance(content, FixedBytes):
                data[low - start : high - start] = content.data[low - offset : high - offset]
                continue
            # No job has computed bytes.
            assert isinstance(content, TensorItems), f"{plan.name}: content {index} is computed"
            itemsize, position = content.view.info.dtype.itemsize, low - start
            first, end = (content.start + (at - offset) // itemsize for at in (low, high))
            stored = content.view.extents(first, end)
            if stored is None:
                _compute_items(content.view, first, end, data[position : high - start])
            else:
                source, extents = stored
                for extent in extents:
                    _append(runs, position, source, extent)
                    position += extent.nbytes
            nbytes += high - low
        with reading_source():
            for position, source, run in runs:
                part = data[position : position + run.nbytes]
                source.reads.read(run.file, run.offset, part, self._begun.setdefault(source.reads, {}))
        return nbytes

    def finish(self) -> None:
        """Verify the stripes of the source that this assembler has read only in part."""
        with reading_source():
            for reads, begun in self._begun.items():
                reads.finish(begun)


def _compute_items(view: TensorView, first: int, stop: int, data: memoryview) -> None:
    """Fill ``data`` with items [first, stop) of a view whose items are computed."""
    import numpy as np  # imported late, because most conversions compute nothing

    with reading_source():
        read_range(view, first, stop, np.frombuffer(data, dtype=np.uint8))


def _append(runs: list[tuple[int, Source, Extent]], position: int, source: Source, extent: Extent) -> None:
    """Add an extent of a source that is to be read into ``position``.

    An extent that continues the last run, in the source and in the output, is joined with that run: adjacent small
    tensors then take one read.
    """
    if runs:
        at, before, last = runs[-1]
        joined = last.joined(extent)
        if joined is not None and before is source and at + last.nbytes == position:
            runs[-1] = at, source, joined
            return
    runs.append((position, source, extent))
