"""Where checkpoints live: what the engine asks of a disk or an object store, and how a path finds its store.

The contract is small, so that a test can put a faulty store in place of a real one:

    create     a new file, written at any offset (or only in order, where `in_order` says so)
    retrying   work that may be done again from its start, done again where what stopped it may pass
    open_file  an existing file, read at any offset
    commit     one small object, whole or not at all, durable when the call returns; may refuse to replace
    lock       keeps a second job out of the folder, where the store can
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from vescale_fsdp.errors import explain

__all__ = ["Buffer", "FileReader", "FileWriter", "Storage", "StoragePath", "open_storage"]

T = TypeVar("T")

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a uint8 array."""

StoragePath = "str | os.PathLike[str] | Storage"


class FileWriter(ABC):
    """A file being written. It exists for readers only once `close` has returned.

    As a context manager it closes itself, or gives the file up after an error.
    """

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise

    @abstractmethod
    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after another from an offset on; any thread may call."""

    @abstractmethod
    def close(self) -> None:
        """Make the file durable."""

    @abstractmethod
    def abort(self) -> None:
        """Give the file up; never raises."""


class FileReader(ABC):
    """A file open for reading at any offset, from any thread.

    Attributes:
        looks_in_place: whether `view` shows bytes where the system has them, without bringing them anywhere.
    """

    looks_in_place: bool = False

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of the file."""

    @abstractmethod
    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Fill writable buffers one after another from an offset on.

        Raises:
            EOFError: if the file ends before the last buffer is full.
        """

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Bytes [start, stop) to look at; they may be the system's own copy and must not be written to.

        Raises:
            EOFError: if the file ends before.
        """
        data = memoryview(bytearray(stop_bytes - start_bytes))
        self.read_at(start_bytes, [data])
        return data

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class Storage(ABC):
    """One folder that holds one checkpoint. Names are relative, with ``/``."""

    in_order: bool = False  # whether files can only be written from front to back
    max_gap_bytes: int = 64 << 10  # 64 KiB: it is cheaper to read over a gap of this size than to ask twice
    write_threads: int = 4
    read_threads: int = 4
    visible_is_durable: bool = False  # whether what can be read is proof against a loss of power

    @property
    @abstractmethod
    def where(self) -> str:
        """The folder, for messages."""

    @abstractmethod
    def child(self, name: str) -> Storage:
        """The storage of a folder inside this one."""

    @abstractmethod
    def create(self, name: str, size_bytes: int) -> FileWriter:
        """Start a new file of a known size."""

    @abstractmethod
    def open_file(self, name: str) -> FileReader:
        """Open a file.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if a folder, a pipe or anything else that is no file has its name.
        """

    @abstractmethod
    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        """All bytes of a small file.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it is larger than the limit, or no file (as `open_file`).
        """

    @abstractmethod
    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        """Publish a small object, whole or not at all, durable on return.

        After an error it may be there all the same: readers tell.

        Raises:
            FileExistsError: if it exists and ``replace`` is False.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether a file exists, asked of the store itself and never of a cache."""

    def is_link(self, name: str) -> bool:
        """Whether a folder is a link to one that lies elsewhere."""
        return False

    @abstractmethod
    def list_folder(self, name: str) -> list[str]:
        """Names directly inside a folder, sorted; empty if there is no such folder."""

    @abstractmethod
    def sync_folder(self, name: str) -> None:
        """Make the names inside a folder durable."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, a link or a whole folder; nothing happens if there is none, or if it lies behind a link."""

    def retrying(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; where a store can lose a connection, called again after it did.

        Raises:
            ConnectionError: if the store could not be reached in all tries. It says nothing of what lies there.
        """
        return work()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder against other jobs.

        Raises:
            BlockingIOError: if another job holds it.
        """
        yield


def open_storage(path: str | os.PathLike[str] | Storage) -> Storage:
    """The storage behind a path, a URL (``s3://``, ``gs://``, ``memory://``, ..) or a storage itself."""
    if isinstance(path, Storage):
        return path
    text = os.fspath(path)
    if not text:
        raise ValueError(explain("A path is empty.", expected="a folder or a URL", got="''"))
    if "://" in text and not text.startswith("file://"):
        from vescale_fsdp.checkpoint.storage.remote import RemoteStorage

        return RemoteStorage(text)
    from vescale_fsdp.checkpoint.storage.local import LocalStorage

    return LocalStorage(text.removeprefix("file://"))
