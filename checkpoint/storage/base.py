"""Where checkpoints live: what the engine and the converter ask of a disk or an object store.

The contract is small, so that a test can put a faulty store in place of a real one:

    create     a new file, written at any offset (or only in order, where `in_order` says so)
    retrying   work that may be done again from its start, done again where what stopped it may pass
    open_file  an existing file, read at any offset
    commit     one small object, whole or not at all, durable when the call returns; may refuse to replace
    lock       keeps a second job out of the folder, where the store can

A converter's files wait under a `working_name` until `rename` gives them their own, or under the name itself where
files are streams that appear when they are closed. Its small files are *staged*: all of them are written before the
first is published. What it reads is exact: `read_into` fills the buffer or raises, so that a truncated file can
never pass for a shorter tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import UnsupportedOperation
from typing import Any, NamedTuple, TypeVar

from vescale_fsdp.checkpoint.storage.created_folders import MadeFolders
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError

T = TypeVar("T")

_PIECE_BYTES = 4 << 20  # 4 MiB
_COPY_AGAIN = "copy the file again from where it was saved, or use an older checkpoint"

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a uint8 array."""

StoragePath = "str | os.PathLike[str] | Storage"


class FileInfo(NamedTuple):
    """What a store knows of a file without reading it; the stamp is a text that changes when the file is replaced."""

    size_bytes: int
    stamp: str


class StorageError(CheckpointError):
    """A storage that cannot be used: it has no room, refuses access, or another job holds it. As an OSError is."""


ALLOW_WRITES = "let this job's user write to it (chown, chmod), mount it for writing"  # a cure for `bad_root`


def bad_root(where: str, problem: str, cure: str) -> StorageError:
    """The error of a path that nothing can be saved to."""
    return StorageError(
        "This path cannot be saved to.",
        expected="a folder, or a prefix of an object store, to read and write",
        got=problem,
        where=where,
        todo=f"{cure}, or pass another path",
    )


class SourceError(Exception):
    """Takes the error of what is to be written out of the tries to write it: see `reading_source`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def reading_source() -> Iterator[None]:
    """Inside of work for `Storage.retrying`: errors in here are not the storage's, and come through at once."""
    try:
        yield
    except Exception as error:
        raise SourceError(error) from error


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

    def is_at_hand(self, start_bytes: int, stop_bytes: int) -> bool:
        """Whether these bytes are in memory already, so that reading them waits for nothing."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class Storage(ABC):
    """One folder that holds one checkpoint. Names are relative, with ``/``."""

    in_order: bool = (
        False  # whether files are written from front to back, appear when closed, and keep their names
    )
    max_gap_bytes: int = 64 << 10  # 64 KiB: it is cheaper to read over a gap of this size than to ask twice
    write_threads: int = 4
    read_threads: int = 4  # of what is at hand, or all that there may be
    far_read_threads: int = 4  # of what is not: some wait while others work
    is_shared: bool = False  # whether all ranks read it over a network
    abandoned_after_s: float = (
        60.0  # what a job without a lock here has not touched for so long is not in use
    )
    visible_is_durable: bool = False  # whether what can be read is proof against a loss of power
    folders: MadeFolders = MadeFolders()  # those made for its files

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
            ValueError: if a folder, a pipe or anything else that is not a file has its name.
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

    def lay_out(self, name: str, size_bytes: int) -> FileWriter:
        """Start a new file that several processes write: it has its size, and blocks, before any of them does.

        Raises:
            UnsupportedOperation: where files are streams, which have one writer.
        """
        raise UnsupportedOperation(f"{self.where}: a file has one writer")

    def join(self, name: str) -> FileWriter:
        """Write into a file that another process has laid out; to give it up leaves it there. Raises as `lay_out`."""
        raise UnsupportedOperation(f"{self.where}: a file has one writer")

    def beside(self, name: str) -> Storage:
        """The storage of another folder in the folder that this one lies in. Raises as `take_over`."""
        raise UnsupportedOperation(f"{self.where}: folders are not renamed")

    def take_over(self, other: Storage, last: str = "") -> None:
        """Hold what another folder beside this one holds, at once; what was here is gone, and that folder too.

        Args:
            last: the file that comes last where that takes more than one call; until then it is not here.

        Raises:
            UnsupportedOperation: where folders cannot be renamed.
        """
        raise UnsupportedOperation(f"{self.where}: folders are not renamed")

    def check_not_planted(self) -> None:  # noqa: B027  only folders on disks can be
        """Verify that the folder, which has a predictable name, is no link and no other user's.

        Raises:
            CheckpointError: if it is.
        """

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

    def remove_empty(self, name: str) -> None:  # noqa: B027  object stores have no folders
        """Remove a folder that holds nothing; else nothing happens."""

    def check_root(self) -> str | None:
        """Verify that a run can be saved here, before it has trained. Writes nothing.

        Returns:
            Why nothing can be written to a folder that holds something to read; else None.

        Raises:
            StorageError: if it cannot be used, with the cure.
        """
        return None

    def is_older(self, name: str, seconds: float) -> bool:
        """Whether nothing in a folder, or of a file, has changed for so long; False where that is not known."""
        return False

    def remove_abandoned(self, folders: Sequence[str], older_than_s: float) -> list[str]:
        """Remove temporary files, and uploads, that processes which were killed have left.

        Args:
            folders: where files are looked for, "" for this one; uploads everywhere inside of it.
            older_than_s: younger ones may be in use.

        Returns:
            Names of what was removed.
        """
        return []

    @property
    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Where it is, in comparable components: a storage inside of this one begins with the same ones."""

    @abstractmethod
    def list_files(self) -> list[str]:
        """Names of all files, in subfolders too, sorted; empty if there is no such folder."""

    @abstractmethod
    def info(self, name: str) -> FileInfo | None:
        """Size and stamp of a file; None if there is no file of that name."""

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a small file, making it if needed."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, over an older file; nothing happens if it has that name, or if another process has
        done it.

        Raises:
            UnsupportedOperation: where files are streams, which keep their names.
        """
        if old != new:
            raise UnsupportedOperation(f"{self.where}: files keep their names")

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        found = self.info(name)
        return found.size_bytes if found else None

    def required_info(self, name: str) -> FileInfo:
        """`info` of a file that must be there.

        Raises:
            CorruptCheckpointError: if it is not.
        """
        found = self.info(name)
        if found is None:
            raise self._missing(name)
        return found

    def prove_size(self, name: str, nbytes: int) -> None:
        """Raise CorruptCheckpointError unless a file is there and has so many bytes."""
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
        """Of a file whose size nobody asks for."""
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
        """Exactly ``nbytes`` bytes at ``offset``, or the whole of a (small) file; raises as `read_into`."""
        buffer = bytearray(self.required_info(name).size_bytes if nbytes is None else nbytes)
        if buffer:
            self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """The whole of a file, a few MiB at a time; raises as `read_into`."""
        nbytes = self.required_info(name).size_bytes
        for start in range(0, nbytes, _PIECE_BYTES):
            yield self.read(name, start, min(_PIECE_BYTES, nbytes - start))

    def working_name(self, name: str, owner: str = "") -> str:
        """The name that a finished file has until it is published: a hidden one beside its own, where files can be
        renamed; ``owner`` tells apart those who may be writing the same file at once."""
        folder, slash, base = name.rpartition("/")
        hidden = f"{folder}{slash}.{base}.{owner}.partial" if owner else f"{folder}{slash}.{base}.partial"
        return name if self.in_order else hidden

    def stage(self, name: str, pieces: Callable[[], Iterable[bytes]], owner: str = "") -> StagedFile:
        """Prepare a small file; ``owner`` as for `working_name`. Pieces are taken now, or when it is published where
        it cannot wait under another name."""
        return StagedFile(self, name, pieces, owner)

    def retrying(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; where a store can lose a connection, called again after it did.

        Raises:
            ConnectionError: if the store could not be reached in all tries. It says nothing of what lies there.
        """
        try:
            return work()
        except SourceError as carried:
            raise carried.error from carried.error.__cause__

    @property
    def free_bytes(self) -> int | None:
        """Room for what is to be written; None where that is not known."""
        return None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder against other jobs.

        Raises:
            BlockingIOError: if another job holds it.
        """
        yield


class StagedFile:
    """A small file ready to appear."""

    def __init__(
        self, storage: Storage, name: str, pieces: Callable[[], Iterable[bytes]], owner: str
    ) -> None:
        self._storage, self._name, self._pieces = storage, name, pieces
        self._working = storage.working_name(name, owner)
        if not storage.in_order:
            storage.remove(self._working)  # of a run that was killed
            storage.retrying(lambda: self._write(self._working))

    def _write(self, name: str) -> None:
        with self._storage.create(name, 0) as file:
            position, pieces = 0, iter(self._pieces())
            while True:
                with reading_source():
                    piece = next(pieces, None)
                if piece is None:
                    return
                file.write_at(position, [piece])
                position += len(piece)

    def publish(self) -> None:
        """Give it its own name, over an older file."""
        if self._storage.in_order:
            self._storage.retrying(lambda: self._write(self._name))
        else:
            self._storage.rename(self._working, self._name)

    def abort(self) -> None:
        """Leave nothing of it behind, unless it was published."""
        if not self._storage.in_order:
            self._storage.remove(self._working)
