"""A folder whose files are streams, as objects of a store are, but on disk, where all ranks see them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.faults.passing_storage import PassingStorage
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage


class StreamStorage(PassingStorage):
    """Files are written front to back by one writer, appear when closed, and neither they nor folders are renamed.

    Args:
        wrote: called with offset and number of bytes when they have been written.
        pause_s: how long each write takes.
    """

    def __init__(
        self, root: Path, wrote: Callable[[int, int], None] = lambda *_: None, pause_s: float = 0.0
    ) -> None:
        super().__init__(LocalStorage(root, durable=False))
        self.in_order, self.write_threads = True, 1
        self.root, self.wrote, self.pause_s = root, wrote, pause_s

    def create(self, name: str, size_bytes: int) -> FileWriter:
        return _Stream(self, name, self.inner.create(f"{name}.upload-{os.getpid()}", size_bytes))

    def lay_out(self, name: str, size_bytes: int) -> FileWriter:
        return Storage.lay_out(self, name, size_bytes)

    def beside(self, name: str) -> Storage:
        return Storage.beside(self, name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        yield


class _Stream(FileWriter):
    def __init__(self, storage: StreamStorage, name: str, out: FileWriter) -> None:
        self._storage, self._name, self._out, self._at = storage, name, out, 0

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        assert offset_bytes == self._at, f"{self._name}: written at {offset_bytes} after {self._at} bytes"
        time.sleep(self._storage.pause_s)
        self._out.write_at(offset_bytes, buffers)
        nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._at += nbytes
        self._storage.wrote(offset_bytes, nbytes)

    def close(self) -> None:
        self._out.close()
        os.replace(self._storage.root / f"{self._name}.upload-{os.getpid()}", self._storage.root / self._name)

    def abort(self) -> None:
        self._out.abort()
