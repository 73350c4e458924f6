"""`Storage`: the operations of a disk or an object store that saving, loading and conversion use.

The interface is small, so that tests can replace a store by a faulty one:

    create     start a new file, which is written at any offset, or front to back if `in_order` is True
    retrying   repeat work after transient errors
    open_file  open an existing file, which is read at any offset
    commit     write one small object atomically, durable on return; can refuse to replace an existing object
    lock       keep other jobs out of the folder, if the store supports locks

A conversion writes each file under a `working_name` and renames it when it is complete. A *stream* (a file of an object
store) becomes visible only when it is closed, so its working name is its final name. Small files are *staged*: all of
them are written before the first one is published. Reads are exact: `read_into` fills the buffer or raises, so that a
truncated file is never read as a shorter tensor.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vescale_fsdp.errors import CorruptCheckpointError, StorageError

_MKDIR_TRIES = 5  # another process that fails may remove a folder just after this process has made it


class MadeFolders:
    """The folders that a storage has made, so that a failed conversion can remove those that are empty.

    Args:
        root: the storage's folder, whose parents are made too; None for stores without folders.
        sync: makes the names in a folder durable.
    """

    def __init__(self, root: Path | None = None, sync: Callable[[Path], object] = lambda _: None) -> None:
        self._root, self._sync = root, sync
        self._made: set[Path] = set()

    @property
    def levels(self) -> int:
        """Number of folders among the root and its parents that were made."""
        return len(self._made.intersection(self._upwards()))

    def adopt_levels(self, levels: int) -> None:
        """Treat the lowest ``levels`` folders of the root and its parents as made: by the run that is resumed."""
        self._made.update(self._upwards()[:levels])

    def adopt_parents(self, files: Iterable[str]) -> None:
        """Treat the folders between the root and these files as made."""
        if self._root:
            for file in files:
                self._made.update((self._root / file).parents[: file.count("/")])

    def _upwards(self) -> list[Path]:
        return [self._root, *self._root.parents] if self._root else []

    def using(self, folder: Path, action: Callable[[], T]) -> T:
        """Make a folder and its parents, then return the result of ``action``, which makes a file in the folder."""
        for _ in range(_MKDIR_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):
                self.make(folder)
                return action()
        self.make(folder)
        return action()

    def make(self, folder: Path | None = None) -> None:
        """Make a folder (by default the root) and its parents, durably."""
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
            # Also if another process made the folder: it may not have synced it yet.
            self._sync(absent.parent)

    def remove_empty(self) -> None:
        """Remove the folders that this storage has made and that are empty."""
        for folder in sorted(self._made, key=lambda path: -len(path.parts)):  # inner folders first
            with contextlib.suppress(OSError):  # not empty, or already removed by another process
                folder.rmdir()


T = TypeVar("T")

_PIECE_BYTES = 4 << 20  # 4 MiB: bounds the memory of `read_pieces`
# Advice in errors about damaged bytes.
RESTORE_OLDER = (
    "restore an older step: CheckpointManager.restore(state) does so by itself if step= is not passed; if there is "
    "none, the page 'When something breaks' (docs/faults.md) shows how to read the undamaged elements"
)
ALL_PROBLEMS = "; verify(path) lists all problems"  # end of the advice in errors of loads; `verify` omits it

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a uint8 array."""


class FileInfo(NamedTuple):
    """A file's size, and a stamp: text that changes when the file is replaced. Both come from metadata."""

    size_bytes: int
    stamp: str


# A `cure` for `bad_root`.
ALLOW_WRITES = "let this job's user write to it (chown, chmod), mount it for writing"


def bad_root(where: str, problem: str, cure: str) -> StorageError:
    """Return the error for a path that cannot be saved to; ``cure`` is advice to the user."""
    return StorageError(
        "This path cannot be saved to.",
        expected="a folder, or a prefix of an object store, to read and write",
        got=problem,
        where=where,
        todo=f"{cure}, or pass another path",
    )


class SourceError(Exception):
    """Carries an error of the data source through `Storage.retrying`, without a retry; see `reading_source`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def reading_source() -> Iterator[None]:
    """Mark reads of a data source inside the work of `Storage.retrying`.

    Writing again would not repair the source, so `retrying` raises the errors of these reads at once.
    """
    try:
        yield
    except Exception as error:  # any class: `retrying` must not retry it
        raise SourceError(error) from error


class FileWriter(ABC):
    """A file being written. The context manager closes the file, or aborts it after an error."""

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:  # such as a full disk: an incomplete file must not stay
            self.abort()
            raise

    @abstractmethod
    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers one after another from an offset on. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file and make it durable."""

    @abstractmethod
    def abort(self) -> None:
        """Discard the file; never raises."""


class FileReader(ABC):
    """A file that is open for reading at any offset, from any thread.

    Attributes:
        looks_in_place: whether `view` maps the page cache instead of copying bytes.
    """

    looks_in_place: bool = False

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of the file in bytes."""

    @abstractmethod
    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers one after another with the file's bytes from an offset on.

        Raises:
            EOFError: if the file ends before the last buffer is full.
        """

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Return bytes [start, stop) of the file. They may be mapped from the page cache, so never write to them.

        Raises:
            EOFError: if the file ends before ``stop_bytes``.
        """
        data = memoryview(bytearray(stop_bytes - start_bytes))
        self.read_at(start_bytes, [data])
        return data

    def is_at_hand(self, start_bytes: int, stop_bytes: int) -> bool:
        """Return whether a read of these bytes would be fast because they are in the page cache."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class Storage(ABC):
    """One folder, of a checkpoint or of a run's steps. Names of files are relative, with ``/``."""

    # Whether files are streams: written front to back, visible only when closed, never renamed.
    in_order: bool = False
    # 64 KiB: to read and discard a gap of this size costs less than a second read.
    max_gap_bytes: int = 64 << 10
    write_threads: int = 4
    read_threads: int = 4  # for bytes in the page cache
    far_read_threads: int = 4  # for all other bytes: some threads wait while other threads copy
    is_shared: bool = False  # whether all ranks read the same files over a network
    # Temporary files of this age are not in use if no job has locked the folder.
    abandoned_after_s: float = 60.0
    visible_is_durable: bool = False  # whether every file that can be read survives a power loss
    revision: str = ""  # the commit that the files are of, if the store has such; ranks must read the same
    folders: MadeFolders = MadeFolders()  # the folders that this storage has made; empty for object stores

    @property
    @abstractmethod
    def where(self) -> str:
        """The folder, for messages."""

    @abstractmethod
    def child(self, name: str) -> Storage:
        """Return the storage of a folder inside this folder."""

    @abstractmethod
    def create(self, name: str, size_bytes: int) -> FileWriter:
        """Start a new file. ``size_bytes`` is the planned size, for reserving space; 0 if it is not known."""

    @abstractmethod
    def open_file(self, name: str) -> FileReader:
        """Open a file for reading.

        Raises:
            FileNotFoundError: if there is no file of this name.
            ValueError: if the name belongs to a folder, a pipe or anything else that is not a regular file.
        """

    @abstractmethod
    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        """Read all bytes of a small file.

        Args:
            limit_bytes: maximum size, so that a hostile file cannot fill the memory.

        Raises:
            FileNotFoundError: if there is no file of this name.
            ValueError: if the file is larger than the limit, or is not a regular file.
        """

    @abstractmethod
    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        """Write a small object atomically; it is durable on return.

        After an error the object may exist or not; a read shows which.

        Raises:
            FileExistsError: if the object exists and ``replace`` is False.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether a file exists now, without using cached listings."""

    def lay_out(self, name: str, size_bytes: int) -> FileWriter:
        """Start a new file that several processes write: set its size, and reserve its blocks.

        Raises:
            UnsupportedOperation: if files are streams, which have only one writer.
        """
        raise UnsupportedOperation(f"{self.where}: a file has one writer")

    def join(self, name: str) -> FileWriter:
        """Open a file that another process has laid out, for writing; `abort` keeps it. Raises as `lay_out`."""
        raise UnsupportedOperation(f"{self.where}: a file has one writer")

    def beside(self, name: str) -> Storage:
        """Return the storage of a sibling folder. Raises as `take_over`."""
        raise UnsupportedOperation(f"{self.where}: folders are not renamed")

    def take_over(self, other: Storage, last: str = "") -> None:
        """Replace this folder by its sibling ``other``, atomically where possible, and remove the sibling.

        Args:
            last: the file that makes the folder a checkpoint. If files must be moved one by one, it is removed first
                and moved last.

        Raises:
            UnsupportedOperation: if the store cannot rename folders.
        """
        raise UnsupportedOperation(f"{self.where}: folders are not renamed")

    def check_not_planted(self) -> None:  # noqa: B027  object stores have no links
        """Check that another user has not created this folder, whose name can be predicted.

        Raises:
            CheckpointError: if the folder is a link, or belongs to another user.
        """

    def is_link(self, name: str) -> bool:
        """Return whether a folder inside this one is a symbolic link."""
        return False

    @abstractmethod
    def list_folder(self, name: str) -> list[str]:
        """Return the names directly inside a folder, sorted; empty if there is no such folder."""

    @abstractmethod
    def sync_folder(self, name: str) -> None:
        """Make the names inside a folder durable."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, a folder with its content, or a link (not its target); do nothing if the name is absent."""

    def remove_empty(self, name: str) -> None:  # noqa: B027  object stores have no folders
        """Remove a folder if it is empty."""

    def check_bucket(self) -> None:  # noqa: B027  only object stores have buckets
        """Raise a `StorageError` if the bucket does not exist; without a bucket, do nothing."""

    def check_root(self) -> str | None:
        """Check before training that a run can be saved here. Writes nothing.

        Returns:
            None if the folder can be written to; otherwise the reason, if the folder has content that can be read.

        Raises:
            StorageError: if the folder can be neither written nor read, or is empty and cannot be written.
        """
        return None

    def is_older(self, name: str, seconds: float) -> bool:
        """Return whether a file, or everything in a folder, has not changed for ``seconds``; False if unknown."""
        return False

    def remove_abandoned(self, folders: Sequence[str], older_than_s: float) -> list[str]:
        """Remove temporary files and uploads of killed processes.

        Args:
            folders: folders to search for files; "" is this folder. Uploads are searched everywhere inside this folder.
            older_than_s: minimum age; younger files and uploads may be in use.

        Returns:
            Names of the removed files and uploads.
        """
        return []

    @property
    @abstractmethod
    def location(self) -> tuple[str, ...]:
        """Components of the location; locations of folders inside this folder begin with the same components."""

    @abstractmethod
    def list_files(self) -> list[str]:
        """Return the names of all files in the folder and its subfolders, sorted; empty if there is no folder."""

    @abstractmethod
    def info(self, name: str) -> FileInfo | None:
        """Return the size and stamp of a file; None if there is no file of this name."""

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Append to a small file, which is created if it does not exist."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file; an existing file of the new name is replaced.

        Does nothing if the names are equal, or if another process has already renamed the file.

        Raises:
            UnsupportedOperation: if files are streams, which cannot be renamed.
        """
        if old != new:
            raise UnsupportedOperation(f"{self.where}: files keep their names")

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if there is no such file."""
        info = self.info(name)
        return info.size_bytes if info else None

    def required_info(self, name: str) -> FileInfo:
        """Return `info` of a file that belongs to the checkpoint.

        Raises:
            CorruptCheckpointError: if there is no such file.
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
            )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` of a file.

        Raises:
            CorruptCheckpointError: if the file is missing or ends too early.
        """
        try:
            self._reader(name).read_at(offset, [buffer])
        except (FileNotFoundError, NotADirectoryError) as error:  # the second: a parent of the name is a file
            raise self._missing(name) from error
        except EOFError as error:
            raise CorruptCheckpointError(
                "A file of the checkpoint is truncated.",
                expected=f"{len(buffer)} bytes at offset {offset}",
                got=error,
                where=f"{self.where}/{name}",
            ) from error

    def _reader(self, name: str) -> FileReader:
        """Return a reader. Stores may override this to save the request for the file's size."""
        return self.open_file(name)

    def _missing(self, name: str) -> CorruptCheckpointError:
        """Return the error for a missing file."""
        return CorruptCheckpointError(
            "A file of the checkpoint is missing.",
            expected=f"a file {name}",
            got="no such file",
            where=self.where,
        )

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read ``nbytes`` bytes at ``offset``; by default all bytes of a (small) file. Raises as `read_into`."""
        buffer = bytearray(self.required_info(name).size_bytes if nbytes is None else nbytes)
        if buffer:  # not for 0 bytes, which need no request
            self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Read a whole file, a few MiB at a time; raises as `read_into`."""
        nbytes = self.required_info(name).size_bytes
        for start in range(0, nbytes, _PIECE_BYTES):
            yield self.read(name, start, min(_PIECE_BYTES, nbytes - start))

    def working_name(self, name: str, owner: str = "") -> str:
        """Return the name of a file until it is published: a hidden name in the same folder, or, for streams, ``name``.

        Args:
            owner: distinguishes processes that write the same file.
        """
        folder, slash, base = name.rpartition("/")
        hidden = f"{folder}{slash}.{base}.{owner}.partial" if owner else f"{folder}{slash}.{base}.partial"
        return name if self.in_order else hidden

    def stage(self, name: str, pieces: Callable[[], Iterable[bytes]], owner: str = "") -> StagedFile:
        """Prepare a small file for publication.

        Args:
            pieces: returns the content; called now, or, for streams, at publication.
            owner: as for `working_name`.
        """
        return StagedFile(self, name, pieces, owner)

    def retrying(self, work: Callable[[], T]) -> T:
        """Call ``work`` and return its result; remote stores call it again after transient errors.

        Raises:
            ConnectionError: if the store could not be reached in any try; its content may be sound.
        """
        try:
            return work()
        except SourceError as carried:
            # The source's own error: `SourceError` only carries it. `from` keeps its first cause.
            raise carried.error from carried.error.__cause__

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Write a whole file durably, with the storage's retries."""

        def write() -> None:
            with self.create(name, sum(memoryview(buffer).nbytes for buffer in buffers)) as writer:
                writer.write_at(0, buffers)

        self.retrying(write)

    @property
    def free_bytes(self) -> int | None:
        """Free space in bytes; None if unknown."""
        return None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other jobs out of the folder during the block; stores without locks do nothing.

        Raises:
            BlockingIOError: if another job has locked the folder.
        """
        yield


class StagedFile:
    """A small file whose content is written, but not yet visible under its name."""

    def __init__(
        self, storage: Storage, name: str, pieces: Callable[[], Iterable[bytes]], owner: str
    ) -> None:
        self._storage, self._name, self._pieces = storage, name, pieces
        self._working = storage.working_name(name, owner)
        if not storage.in_order:  # a stream would be visible at once, so `publish` writes it
            storage.remove(self._working)  # left by a killed run; `create` refuses existing files
            storage.retrying(lambda: self._write(self._working))

    def _write(self, name: str) -> None:
        """Write the content to a file of this name."""
        with self._storage.create(name, 0) as file:  # 0: the size is not known yet
            position, pieces = 0, iter(self._pieces())
            while True:
                with reading_source():  # pieces may be read from the source of a conversion
                    piece = next(pieces, None)
                if piece is None:
                    return
                file.write_at(position, [piece])
                position += len(piece)

    def publish(self) -> None:
        """Make the file visible under its final name; replaces an older file."""
        if self._storage.in_order:
            self._storage.retrying(lambda: self._write(self._name))
        else:
            self._storage.rename(self._working, self._name)

    def abort(self) -> None:
        """Remove the file, unless it was published."""
        if not self._storage.in_order:
            self._storage.remove(self._working)
