"""Moving bytes: the parts of many files, by a few threads with one fixed buffer each.

A file is planned as a row of *parts* whose sizes are known beforehand: fixed bytes, tensors, and bytes that
are computed from checksums of tensors before them (zip directories need those). Every tensor is cut into
*segments*, runs of its flattened items that fit a buffer. A thread fills its buffer from the view and
writes it at the offset the plan gives; nothing else is held, so memory is the buffers, whatever the size of
the model or of its largest tensor.

    512 MiB budget, 4 threads -> 4 buffers of 8 MiB      64 MiB budget, 8 threads -> 8 buffers of 2 MiB

Files that accept writes in any order share all threads; files that are streams take one thread each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from vescale_fsdp.conversion.crc import Crc
from vescale_fsdp.conversion.store import OutputFile
from vescale_fsdp.conversion.view import TensorView, read_range
from vescale_fsdp.errors import ConversionError, explain

__all__ = [
    "ComputedPart",
    "CopyLimits",
    "FilePlan",
    "FixedPart",
    "Progress",
    "TensorPart",
    "copy_files",
    "segment_digest",
    "whole",
]

Progress = Callable[[int], None]  # called with tensor bytes done since the last call

_MAX_BUFFER_BYTES = 8 * 2**20  # 8 MiB: larger ones read no faster
_MIN_BUFFER_BYTES = 2**20
# A view that changes its tensor needs scratch as large as the buffer, up to three times (read, work, result).
_BUFFERS_PER_THREAD = 4


@dataclass(frozen=True)
class CopyLimits:
    """How much memory and how many threads a conversion may use.

    Args:
        memory_budget_bytes: for all working buffers together.
        threads: readers and writers at work at once.
    """

    memory_budget_bytes: int = 512 * 2**20
    threads: int = 4

    def __post_init__(self) -> None:
        least = _MIN_BUFFER_BYTES * _BUFFERS_PER_THREAD
        if self.memory_budget_bytes < least or self.threads < 1:
            raise ConversionError(
                explain(
                    "the memory budget is too small to work in",
                    expected=f"at least {least} bytes and one thread",
                    got=f"{self.memory_budget_bytes} bytes, {self.threads} threads",
                    todo="pass a --memory-budget of 64MB or more",
                )
            )

    @property
    def usable_threads(self) -> int:
        """Threads that the budget can give a buffer each."""
        most = self.memory_budget_bytes // (_MIN_BUFFER_BYTES * _BUFFERS_PER_THREAD)
        return min(self.threads, most)

    @property
    def buffer_bytes(self) -> int:
        """Size of one thread's buffer, a whole number of items of every type."""
        share = self.memory_budget_bytes // (self.usable_threads * _BUFFERS_PER_THREAD)
        return min(_MAX_BUFFER_BYTES, share) // 16 * 16


@dataclass(frozen=True)
class FixedPart:
    """Bytes known beforehand."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return len(self.data)


@dataclass(frozen=True)
class TensorPart:
    """Items [start, stop) of a flattened tensor."""

    view: TensorView
    start: int
    stop: int
    crc: Crc | None = None  # to be known to computed parts

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return (self.stop - self.start) * self.view.info.dtype.itemsize


@dataclass(frozen=True)
class ComputedPart:
    """Bytes made from the CRCs of tensor parts before it, keyed by their index in the file."""

    nbytes: int
    make: Callable[[dict[int, int]], bytes]


T = TypeVar("T")
Part = FixedPart | TensorPart | ComputedPart


def whole(view: TensorView) -> TensorPart:
    """The part that is all of a tensor."""
    return TensorPart(view, 0, view.info.numel)


@dataclass(frozen=True)
class FilePlan:
    """One output file: its name and its parts, front to back."""

    name: str
    parts: tuple[Part, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of every part."""
        found, position = [], 0
        for part in self.parts:
            found.append(position)
            position += part.nbytes
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes of tensors in the file."""
        return sum(part.nbytes for part in self.parts if isinstance(part, TensorPart))

    def segments(self, buffer_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(index of a tensor part, first item, stop item) of every piece of work, in file order."""
        for index, part in enumerate(self.parts):
            if isinstance(part, TensorPart):
                step = buffer_bytes // part.view.info.dtype.itemsize
                for start in range(part.start, part.stop, step):
                    yield index, start, min(start + step, part.stop)


class _WorkingFile:
    """A file being written: what is left to do and the checksums so far."""

    def __init__(self, plan: FilePlan, out: OutputFile, buffer_bytes: int) -> None:
        self.plan, self.out = plan, out
        self._left = sum(1 for _ in plan.segments(buffer_bytes))
        self._lock = threading.Lock()
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}  # part -> (start item, crc, bytes)
        self._digests: list[tuple[int, int]] = []  # (byte offset, xxh3 of the segment)

    def write(self, segment: tuple[int, int, int], buffer: np.ndarray) -> tuple[int, bool]:
        """Do one segment; returns its bytes and whether it was the last of the file."""
        index, start, stop = segment
        part = self.plan.parts[index]
        assert isinstance(part, TensorPart)
        data = read_range(part.view, start, stop, buffer)
        offset = self.plan.offsets[index] + (start - part.start) * part.view.info.dtype.itemsize
        self.out.write_at(offset, data.data)
        digest = xxhash.xxh3_64_intdigest(data.data)
        crc = part.crc.of(data.data) if part.crc else 0
        with self._lock:
            self._digests.append((offset, digest))
            if part.crc:
                self._crcs.setdefault(index, []).append((start, crc, data.nbytes))
            self._left -= 1
            return data.nbytes, self._left == 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no tensor data to write."""
        return self._left == 0

    def write_known(self, first: int, stop: int) -> None:
        """Write fixed and computed parts among parts [first, stop)."""
        for index in range(first, stop):
            part = self.plan.parts[index]
            if isinstance(part, FixedPart):
                self.out.write_at(self.plan.offsets[index], part.data)
            elif isinstance(part, ComputedPart):
                data = part.make(self._part_crcs())
                assert len(data) == part.nbytes, f"{self.plan.name}: {len(data)} bytes, planned {part.nbytes}"
                self.out.write_at(self.plan.offsets[index], data)

    def _part_crcs(self) -> dict[int, int]:
        found = {i: 0 for i, part in enumerate(self.plan.parts) if isinstance(part, TensorPart)}
        for index, pieces in self._crcs.items():
            part = self.plan.parts[index]
            assert isinstance(part, TensorPart) and part.crc is not None
            for _, piece_crc, nbytes in sorted(pieces):
                found[index] = part.crc.combine(found[index], piece_crc, nbytes)
        return found

    def digest(self) -> str:
        """One checksum of all segments, in file order; `segment_digest` finds the same in the written
        file."""
        return _join_digests(digest for _, digest in sorted(self._digests))


def _join_digests(digests: Iterator[int]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(digest.to_bytes(8, "little") for digest in digests))


def segment_digest(plan: FilePlan, read: Callable[[int, int], bytes], buffer_bytes: int) -> str:
    """The checksum a finished file was recorded with, from its bytes as they are now."""

    def digests() -> Iterator[int]:
        for index, start, stop in plan.segments(buffer_bytes):
            part = plan.parts[index]
            assert isinstance(part, TensorPart)
            itemsize = part.view.info.dtype.itemsize
            offset = plan.offsets[index] + (start - part.start) * itemsize
            yield xxhash.xxh3_64_intdigest(read(offset, (stop - start) * itemsize))

    return _join_digests(digests())


@dataclass
class _Copier:
    """What the threads of one conversion share: buffers, the progress callback, and the sign to stop."""

    limits: CopyLimits
    create: Callable[[str], OutputFile]
    progress: Progress
    on_finished: Callable[[FilePlan, str], None]
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    buffers: SimpleQueue[np.ndarray] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        for _ in range(self.limits.usable_threads):
            self.buffers.put(
                np.empty(self.limits.buffer_bytes, dtype=np.uint8)
            )  # untouched pages cost nothing

    def open(self, plan: FilePlan) -> _WorkingFile:
        return _WorkingFile(plan, self.create(plan.name), self.limits.buffer_bytes)

    def close(self, file: _WorkingFile) -> None:
        file.out.finish()
        with self.lock:
            self.on_finished(file.plan, file.digest())

    def work(self, jobs: Iterator[tuple[_WorkingFile, tuple[int, int, int]]]) -> None:
        """Write segments of files that take them in any order, until there are none or a thread failed."""
        buffer = self.buffers.get()
        try:
            for file, segment in jobs:
                if self.stop.is_set():
                    return
                nbytes, is_last = file.write(segment, buffer)
                self.progress(nbytes)
                if is_last:
                    file.write_known(0, len(file.plan.parts))
                    self.close(file)
        except BaseException:
            self.stop.set()
            raise
        finally:
            self.buffers.put(buffer)

    def stream(self, plans: Iterator[FilePlan]) -> None:
        """Write whole files front to back, one after the other; a file is finished only if complete."""
        buffer = self.buffers.get()
        try:
            for plan in plans:
                file, known = self.open(plan), 0
                for segment in plan.segments(self.limits.buffer_bytes):
                    if self.stop.is_set():
                        return
                    file.write_known(known, segment[0])
                    known = segment[0]
                    self.progress(file.write(segment, buffer)[0])
                file.write_known(known, len(plan.parts))
                self.close(file)
        except BaseException:
            self.stop.set()
            raise
        finally:
            self.buffers.put(buffer)


def copy_files(
    plans: Sequence[FilePlan],
    limits: CopyLimits,
    *,
    create: Callable[[str], OutputFile],
    in_order: bool,
    progress: Progress,
    on_finished: Callable[[FilePlan, str], None] = lambda _plan, _digest: None,
) -> None:
    """Write all files.

    Args:
        plans: what to write.
        limits: memory and threads.
        create: opens an output by name; called when its first byte is about to be written.
        in_order: whether outputs must be written front to back.
        progress: called with bytes done since the last call, from several threads.
        on_finished: called, one at a time, with each finished (not committed) file and its digest.

    Raises:
        Exception: the first error of any thread; the others stop. Outputs are not aborted.
    """
    copier = _Copier(limits, create, progress, on_finished)
    with ThreadPoolExecutor(limits.usable_threads, thread_name_prefix="convert") as pool:
        if in_order:
            shared_plans = _Shared(iter(plans))
            _wait([pool.submit(copier.stream, shared_plans) for _ in range(limits.usable_threads)])
        else:
            shared_jobs = _Shared(_jobs(copier, plans))
            _wait([pool.submit(copier.work, shared_jobs) for _ in range(limits.usable_threads)])


def _jobs(copier: _Copier, plans: Sequence[FilePlan]) -> Iterator[tuple[_WorkingFile, tuple[int, int, int]]]:
    for plan in plans:
        file = copier.open(plan)
        if file.is_empty:
            file.write_known(0, len(plan.parts))
            copier.close(file)
        for segment in plan.segments(copier.limits.buffer_bytes):
            yield file, segment


def _wait(pending: Sequence[Future[Any]]) -> None:
    wait(pending)
    for future in pending:
        future.result()


class _Shared(Generic[T]):
    """One iterator, taken from by several threads."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> _Shared[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)
