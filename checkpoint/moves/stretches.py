"""Stretches: runs of an output file's bytes, each put together and written from front to back by one thread.

    file         | header |   a   |       b       |    c    | table |
    stretches    |------ 0 -------|------ 1 -------|-- 2 ---|           ends at multiples of `FilePlan.stretch_bytes`

For files that hold checksums of their own stripes, which are hashed as they are written, and computed last. Where the
source has the same order, as it mostly has, it is read forward too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.storage.base import reading_source
from vescale_fsdp.checkpoint.moves.plan import FilePlan, FixedBytes, TensorItems
from vescale_fsdp.checkpoint.moves.forward_reader import ForwardReader
from vescale_fsdp.checkpoint.moves.source import ByteRange, Source

_STEP_BYTES = 2**20  # 1 MiB is read, hashed and written while it is in the cache


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
