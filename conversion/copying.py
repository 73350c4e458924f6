"""Moving bytes: many tensors into many files, by a few threads with one fixed buffer each.

Every tensor is cut into *segments*, runs of its flattened items that fit a buffer. A thread fills its
buffer from the view and writes it at the file offset the plan names; nothing else is held, so memory is the
buffers, whatever the size of the model or of its largest tensor. Files that accept writes in any order
share all threads; files that are streams (object stores) take one thread each.

    512 MiB budget, 2 threads -> 2 buffers of 16 MiB     64 MiB budget, 8 threads -> 8 buffers of 4 MiB
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from vescale_fsdp.conversion.store import OutputFile
from vescale_fsdp.conversion.view import TensorView, read_range
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["CopyLimits", "FileCopy", "Progress", "copy_files"]

Progress = Callable[[int], None]  # called with bytes done since the last call

_MAX_BUFFER_BYTES = 16 * 2**20  # 16 MiB: larger ones read no faster
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
class FileCopy:
    """One output file: bytes known beforehand, then tensors at their offsets, in file order."""

    out: OutputFile
    prefix: bytes
    tensors: Sequence[tuple[int, TensorView]]  # (byte offset in the file, tensor)


@dataclass(frozen=True)
class _Segment:
    out: OutputFile
    view: TensorView
    start: int  # item of the flattened tensor
    stop: int
    offset: int  # byte in the file


def copy_files(
    files: Sequence[FileCopy],
    limits: CopyLimits,
    progress: Progress,
    on_finished: Callable[[FileCopy], None] = lambda _: None,
) -> None:
    """Write all files; each is finished (not committed) when its last byte is down, then reported.

    Raises:
        Exception: the first error of any thread; the others stop. Outputs are not aborted.
    """
    copier = _Copier(limits, progress)
    with ThreadPoolExecutor(limits.usable_threads, thread_name_prefix="convert") as pool:
        streams = [file for file in files if file.out.needs_order]
        _wait([pool.submit(copier.write_stream, file, on_finished) for file in streams])
        for file in files:
            if file.out.needs_order:
                continue
            file.out.write_at(0, file.prefix)
            shared = _Shared(_segments(file, limits.buffer_bytes))
            _wait([pool.submit(copier.write, shared) for _ in range(limits.usable_threads)])
            file.out.finish()
            on_finished(file)


class _Copier:
    """What the threads of one conversion share: buffers, the progress callback, and the sign to stop."""

    def __init__(self, limits: CopyLimits, progress: Progress) -> None:
        self._limits, self._progress = limits, progress
        self._stop = threading.Event()
        self._buffers: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(limits.usable_threads):
            self._buffers.put(np.empty(limits.buffer_bytes, dtype=np.uint8))  # untouched pages cost nothing

    def write(self, segments: Iterator[_Segment]) -> bool:
        """Write segments until there are none; False if another thread failed meanwhile."""
        buffer = self._buffers.get()
        try:
            for segment in segments:
                if self._stop.is_set():
                    return False
                data = read_range(segment.view, segment.start, segment.stop, buffer)
                segment.out.write_at(segment.offset, data.data)
                self._progress(data.nbytes)
            return True
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._buffers.put(buffer)

    def write_stream(self, file: FileCopy, on_finished: Callable[[FileCopy], None]) -> None:
        """Write one file front to back; it is finished only if every byte of it went out."""
        if self._stop.is_set():
            return
        file.out.write_at(0, file.prefix)
        if self.write(_segments(file, self._limits.buffer_bytes)):
            file.out.finish()
            on_finished(file)


def _wait(pending: Sequence[Future[Any]]) -> None:
    wait(pending)
    for future in pending:
        future.result()


class _Shared:
    """One iterator, taken from by several threads."""

    def __init__(self, items: Iterator[_Segment]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> _Segment:
        with self._lock:
            return next(self._items)


def _segments(file: FileCopy, buffer_bytes: int) -> Iterator[_Segment]:
    for offset, view in file.tensors:
        info = view.info
        step = buffer_bytes // info.dtype.itemsize
        for start in range(0, info.numel, step):
            stop = min(start + step, info.numel)
            yield _Segment(file.out, view, start, stop, offset + start * info.dtype.itemsize)
