"""`Storage`: the operations of a disk or an object store that saving, loading and conversion use.

The interface is small, so that tests can replace a store by a faulty one:

    create     start a new file, written at any offset, or front to back where `in_order` is True
    retrying   repeat work after transient errors
    open_file  open an existing file, read at any offset
    commit     write one small object, whole or not at all, durable on return; can refuse to replace an existing one
    lock       keep other jobs out of the folder, where the store supports locks

A conversion writes each file under a `working_name` and renames it when it is complete. A stream appears when it is
closed: its working name is its own name. Small files are *staged*: all of them are written before the first is
published. Reads are exact: `read_into` fills the buffer or raises, so that a truncated file is never read as a shorter
tensor.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError

_MKDIR_TRIES = 5  # a conversion process that fails may remove a folder that this process has just made


class MadeFolders:
    """The folders that a storage has made, parents of its root included; a failed conversion removes the empty ones.

    Args:
        root: the storage's folder; None for stores without folders.
        sync: makes the names in a folder durable.
    """

    def __init__(self, root: Path | None = None, sync: Callable[[Path], object] = lambda _: None) -> None:
        self._root, self._sync = root, sync
        self._made: set[Path] = set()

    @property
    def levels(self) -> int:
        """How many folders among the root and its parents were made."""
        return len(self._made.intersection(self._upwards()))

    def adopt_levels(self, levels: int) -> None:
        """Count the lowest ``levels`` folders of the root and its parents as made, by the run that is resumed."""
        self._made.update(self._upwards()[:levels])

    def adopt_parents(self, files: Iterable[str]) -> None:
        """Count the folders between the root and these files as made."""
        if self._root:
            for file in files:
                self._made.update((self._root / file).parents[: file.count("/")])

    def _upwards(self) -> list[Path]:
        return [self._root, *self._root.parents] if self._root else []

    def using(self, folder: Path, action: Callable[[], T]) -> T:
        """Make the folder and its parents, and call ``action``, which makes a file in the folder."""
        for _ in range(_MKDIR_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):
                self.make(folder)
                return action()
        self.make(folder)
        return action()

    def make(self, folder: Path | None = None) -> None:
        """Make a folder (default: the root) and its parents; names of new folders are durable on return."""
        missing, at = [], folder or self._root
        while at is not None and not at.is_dir():
            missing.append(at)
            at = at.parent
        for absent in reversed(missing):  # outer folders first
            try:
                absent.mkdir()
            except FileExistsError:  # another process was faster
                if not absent.is_dir():
                    raise
            else:
                self._made.add(absent)
            self._sync(absent.parent)  # another process may have made the folder and not synced it yet

    def remove_empty(self) -> None:
        """Remove the made folders that are empty."""
        for folder in sorted(self._made, key=lambda path: -len(path.parts)):  # inner folders first
            with contextlib.suppress(OSError):  # not empty, or already removed by another process
                folder.rmdir()


T = TypeVar("T")

_PIECE_BYTES = 4 << 20  # 4 MiB: bounds the memory of `read_pieces`
_COPY_AGAIN = "copy the file again from where it was saved, or use an older checkpoint"

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a uint8 array."""


class FileInfo(NamedTuple):
    """A file's size, and a stamp: a text that changes when the file is replaced. Neither needs a read of the file."""

    size_bytes: int
    stamp: str


class StorageError(CheckpointError):
    """A storage cannot be used: it is full, denies access, is locked by another job or cannot be opened.

    Callers treat it like an OSError.
    """


ALLOW_WRITES = (
    "let this job's user write to it (chown, chmod), mount it for writing"  # an argument of `bad_root`
)


def bad_root(where: str, problem: str, cure: str) -> StorageError:
    """The error for a path that cannot be saved to; ``cure`` says what to do."""
    return StorageError(
        "This path cannot be saved to.",
        expected="a folder, or a prefix of an object store, to read and write",
        got=problem,
        where=where,
        todo=f"{cure}, or pass another path",
    )


class SourceError(Exception):
    """Carries an error of the data source through `Storage.retrying`, which does not retry it; see `reading_source`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def reading_source() -> Iterator[None]:
    """Marks the reads of a data source inside work for `Storage.retrying`, which does not retry their errors."""
    try:
        yield
    except Exception as error:
        raise SourceError(error) from error


class FileWriter(ABC):
    """A file being written. Readers see it only after `close` has returned.

    The context manager closes the file, or aborts it after an error.
    """

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:  # a file that is not complete must not stay
            self.abort()
            raise

    @abstractmethod
    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after another, starting at an offset; thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file and make it durable."""

    @abstractmethod
    def abort(self) -> None:
        """Discard the file; never raises."""


class FileReader(ABC):
    """A file open for reading at any offset, from any thread.

    Attributes:
        looks_in_place: whether `view` maps the page cache and does not copy.
    """

    looks_in_place: bool = False

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of the file."""

    @abstractmethod
    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Fill writable buffers one after another, starting at an offset.

        Raises:
            EOFError: if the file ends before the last buffer is full.
        """

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Bytes [start, stop). They may be mapped from the page cache, and must not be written to.

        Raises:
            EOFError: if the file ends before ``stop_bytes``.
        """
        data = memoryview(bytearray(stop_bytes - start_bytes))
        self.read_at(start_bytes, [data])
        return data

    def is_at_hand(self, start_bytes: int, stop_bytes: int) -> bool:
        """Whether these bytes are in the page cache."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class Storage(ABC):
    """One folder that contains one checkpoint, or the steps of a run. Names are relative, with ``/``."""

    # Whether files are streams: written front to back, visible when they are closed, never renamed.
    in_order: bool = False
    max_gap_bytes: int = 64 << 10  # 64 KiB: reading over a gap of this size costs less than a second request
    write_threads: int = 4
    read_threads: int = 4  # for cached bytes
    far_read_threads: int = 4  # for bytes that are not cached: some threads wait while other threads copy
    is_shared: bool = False  # whether all ranks read the same files over a network
    abandoned_after_s: float = (
        60.0  # temporary files of this age are not in use if no job has locked the folder
    )
    visible_is_durable: bool = False  # whether every file that can be read survives a loss of power
    folders: MadeFolders = MadeFolders()  # the folders that this storage has made

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
            ValueError: if the name is that of a folder, a pipe or another thing that is not a regular file.
        """

    @abstractmethod
    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        """All bytes of a small file.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if the file is larger than the limit, or is not a regular file.
        """

    @abstractmethod
    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        """Write a small object, whole or not at all, durable on return.

        After an error the object may or may not exist: only a read shows which.

        Raises:
            FileExistsError: if it exists and ``replace`` is False.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether a file exists now; cached listings are not used."""

    def lay_out(self, name: str, size_bytes: int) -> FileWriter:
        """Start a new file that several processes write; its size is set and its blocks are reserved.

        Raises:
            UnsupportedOperation: where files are streams, which have one writer.
        """
        raise UnsupportedOperation(f"{self.where}: a file has one writer")

    def join(self, name: str) -> FileWriter:
        """Open a file that another process has laid out; `abort` does not remove it. Raises as `lay_out`."""
        raise UnsupportedOperation(f"{self.where}: a file has one writer")

    def beside(self, name: str) -> Storage:
        """The storage of a sibling folder. Raises as `take_over`."""
        raise UnsupportedOperation(f"{self.where}: folders are not renamed")

    def take_over(self, other: Storage, last: str = "") -> None:
        """Replace the content of this folder by that of a sibling, atomically where possible; the sibling is removed.

        Args:
            last: the file that is moved last where the replacement is not atomic; it is missing until then.

        Raises:
            UnsupportedOperation: where folders cannot be renamed.
        """
        raise UnsupportedOperation(f"{self.where}: folders are not renamed")

    def check_not_planted(self) -> None:  # noqa: B027  object stores have no links
        """Check that the folder, which has a predictable name, is not a link and does not belong to another user.

        Raises:
            CheckpointError: if it is a link, or belongs to another user.
        """

    def is_link(self, name: str) -> bool:
        """Whether a folder is a symbolic link."""
        return False

    @abstractmethod
    def list_folder(self, name: str) -> list[str]:
        """Names directly inside a folder, sorted; empty if there is no such folder."""

    @abstractmethod
    def sync_folder(self, name: str) -> None:
        """Make the names inside a folder durable."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, a link or a whole folder, if it exists. Links are not followed."""

    def remove_empty(self, name: str) -> None:  # noqa: B027  object stores have no folders
        """Remove a folder if it is empty."""

    def check_root(self) -> str | None:
        """Check that a run can be saved here, before it trains. Writes nothing.

        Returns:
            The reason why a folder with content can only be read; None if it can be written.

        Raises:
            StorageError: if the folder can be neither read nor written.
        """
        return None

    def is_older(self, name: str, seconds: float) -> bool:
        """Whether a file, or everything in a folder, has not changed for ``seconds``; False if that is not known."""
        return False

    def remove_abandoned(self, folders: Sequence[str], older_than_s: float) -> list[str]:
        """Remove temporary files and uploads of killed processes.

        Args:
            folders: where to search for files; "" is this folder. Uploads are removed everywhere inside this folder.
            older_than_s: younger files and uploads may be in use.

        Returns:
            Names of removed files and uploads.
        """
        return []

    @property
    @abstractmethod
    def location(self) -> tuple[str, ...]:
        """The location as components; the location of a folder inside this one begins with the same components."""

    @abstractmethod
    def list_files(self) -> list[str]:
        """Names of all files, in subfolders too, sorted; empty if there is no such folder."""

    @abstractmethod
    def info(self, name: str) -> FileInfo | None:
        """Size and stamp of a file; None if there is no file of that name."""

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Append to a small file; the file is created if it does not exist."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file; an existing file of the new name is replaced.

        Does nothing if the names are equal, or another process has renamed the file.

        Raises:
            UnsupportedOperation: where files are streams, which keep their names.
        """
        if old != new:
            raise UnsupportedOperation(f"{self.where}: files keep their names")

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        info = self.info(name)
        return info.size_bytes if info else None

    def required_info(self, name: str) -> FileInfo:
        """`info` of a file that must be there.

        Raises:
            CorruptCheckpointError: if it is not.
        """
        info = self.info(name)
        if info is None:
            raise self._missing(name)
        return info

    def check_size(self, name: str, nbytes: int) -> None:
        """Raise CorruptCheckpointError unless a file exists and has ``nbytes`` bytes."""
        size = self.required_info(name).size_bytes
        if size != nbytes:
            raise CorruptCheckpointError(
                "A file of the checkpoint has the wrong size.",
                expected=f"{nbytes} bytes",
                got=f"{size} bytes",
                where=f"{self.where}/{name}",
                todo=_COPY_AGAIN,
            )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` of a file.

        Raises:
            CorruptCheckpointError: if the file is missing or ends too early.
        """
        try:
            self._reader(name).read_at(offset, [buffer])
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._missing(name) from error
        except EOFError as error:
            raise CorruptCheckpointError(
                "A file of the checkpoint is truncated.",
                expected=f"{len(buffer)} bytes at offset {offset}",
                got=error,
                where=f"{self.where}/{name}",
                todo=_COPY_AGAIN,
            ) from error

    def _reader(self, name: str) -> FileReader:
        """A reader for callers that do not need the file's size."""
        return self.open_file(name)

    def _missing(self, name: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            "A file of the checkpoint is missing.",
            expected=f"a file {name}",
            got="no such file",
            where=self.where,
            todo="copy the checkpoint again, with all its files",
        )

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read ``nbytes`` bytes at ``offset``; by default all bytes of a (small) file. Raises as `read_into`."""
        buffer = bytearray(self.required_info(name).size_bytes if nbytes is None else nbytes)
        if buffer:
            self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Read a whole file, a few MiB at a time; raises as `read_into`."""
        nbytes = self.required_info(name).size_bytes
        for start in range(0, nbytes, _PIECE_BYTES):
            yield self.read(name, start, min(_PIECE_BYTES, nbytes - start))

    def working_name(self, name: str, owner: str = "") -> str:
        """The name of a file until it is published: a hidden name in the same folder, where files can be renamed.

        Args:
            owner: differs between processes that write the same file.
        """
        folder, slash, base = name.rpartition("/")
        hidden = f"{folder}{slash}.{base}.{owner}.partial" if owner else f"{folder}{slash}.{base}.partial"
        return name if self.in_order else hidden

    def stage(self, name: str, pieces: Callable[[], Iterable[bytes]], owner: str = "") -> StagedFile:
        """Prepare a small file for publication.

        Args:
            pieces: returns the content; called now, or at publication where files cannot be renamed.
            owner: as for `working_name`.
        """
        return StagedFile(self, name, pieces, owner)

    def retrying(self, work: Callable[[], T]) -> T:
        """Call ``work`` and return its result; remote stores call it again after transient errors.

        Raises:
            ConnectionError: if no try could reach the store; the store's content may be sound.
        """
        try:
            return work()
        except SourceError as carried:
            # The source's error as it was raised: `SourceError` is only its carrier.
            raise carried.error from carried.error.__cause__

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Write a whole file, durably, with the storage's retries."""

        def write() -> None:
            with self.create(name, sum(memoryview(buffer).nbytes for buffer in buffers)) as writer:
                writer.write_at(0, buffers)

        self.retrying(write)

    @property
    def free_bytes(self) -> int | None:
        """Free space; None where that is not known."""
        return None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other jobs.

        Raises:
            BlockingIOError: if another job has locked it.
        """
        yield


class StagedFile:
    """A small file that is ready to be published."""

    def __init__(
        self, storage: Storage, name: str, pieces: Callable[[], Iterable[bytes]], owner: str
    ) -> None:
        self._storage, self._name, self._pieces = storage, name, pieces
        self._working = storage.working_name(name, owner)
        if not storage.in_order:
            storage.remove(self._working)  # left by a killed run
            storage.retrying(lambda: self._write(self._working))

    def _write(self, name: str) -> None:
        with self._storage.create(name, 0) as file:  # 0: the size is not known yet
            position, pieces = 0, iter(self._pieces())
            while True:
                with reading_source():
                    piece = next(pieces, None)
                if piece is None:
                    return
                file.write_at(position, [piece])
                position += len(piece)

    def publish(self) -> None:
        """Make the file visible under its name; replaces an older file."""
        if self._storage.in_order:
            self._storage.retrying(lambda: self._write(self._name))
        else:
            self._storage.rename(self._working, self._name)

    def abort(self) -> None:
        """Remove the file, unless it was published."""
        if not self._storage.in_order:
            self._storage.remove(self._working)
