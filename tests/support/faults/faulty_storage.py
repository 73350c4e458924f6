"""A storage that fails on purpose: an error, a full disk or slowness at the k-th operation."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence

from tests.support.faults.passing_storage import PassingStorage
from vescale_fsdp.checkpoint.storage.base import Buffer, FileReader, FileWriter, Storage


def disk_full() -> OSError:
    """What a full disk says."""
    return OSError(errno.ENOSPC, "No space left on device")


def read_only() -> OSError:
    """What a read-only folder says."""
    return OSError(errno.EROFS, "Read-only file system")


class FaultyStorage(PassingStorage):
    """Passes everything on to ``inner``; operation number ``fail_at`` and all later ones raise.

    Args:
        inner: the real storage.
        fail_at: number of the first operation that fails, counted from 0; None never fails.
        error: makes the error.
        only: names of operations that count; default: all that write.
        pause_s: slowness of every write.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        fail_at: int | None = None,
        error: Callable[[], Exception] = disk_full,
        only: tuple[str, ...] = ("create", "write_at", "close", "commit", "sync_folder", "list_folder"),
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self.num_operations = 0
        self._fail_at, self._error, self._only, self._pause_s = fail_at, error, only, pause_s
        self._lock = threading.Lock()

    def step(self, operation: str) -> None:
        """Count an operation, and fail if its turn has come."""
        if operation not in self._only:
            return
        with self._lock:
            number = self.num_operations
            self.num_operations += 1
        if self._pause_s:
            time.sleep(self._pause_s)
        if self._fail_at is not None and number >= self._fail_at:
            raise self._error()

    def beside(self, name: str) -> Storage:
        return _FaultySibling(self, self.inner.beside(name))

    def take_over(self, other: Storage, last: str = "") -> None:
        self.inner.take_over(other.inner if isinstance(other, FaultyStorage) else other, last)

    def create(self, name: str, size_bytes: int) -> FileWriter:
        self.step("create")
        return _FaultyWriter(self, self.inner.create(name, size_bytes))

    def open_file(self, name: str) -> FileReader:
        self.step("open_file")
        return self.inner.open_file(name)

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        self.step("read_small")
        return self.inner.read_small(name, limit_bytes=limit_bytes)

    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        self.step("commit")
        self.inner.commit(name, data, replace=replace)

    def list_folder(self, name: str) -> list[str]:
        self.step("list_folder")
        return self.inner.list_folder(name)

    def sync_folder(self, name: str) -> None:
        self.step("sync_folder")
        self.inner.sync_folder(name)


class _FaultySibling(FaultyStorage):
    """A sibling folder, whose operations are counted with those of the folder that it belongs to."""

    def __init__(self, owner: FaultyStorage, inner: Storage) -> None:
        super().__init__(inner)
        self._owner = owner

    def step(self, operation: str) -> None:
        self._owner.step(operation)


class _FaultyWriter(FileWriter):
    def __init__(self, storage: FaultyStorage, inner: FileWriter) -> None:
        self._storage, self._inner = storage, inner

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        self._storage.step("write_at")
        self._inner.write_at(offset_bytes, buffers)

    def close(self) -> None:
        self._storage.step("close")
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()
