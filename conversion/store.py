"""Files of a checkpoint by relative name: read byte ranges, write new files, on disk or at any fsspec URL.

A `Store` is a folder. Reads are positional and exact: they fill the buffer or raise, so a truncated file can
never pass for a shorter tensor. A file being written has no final name until `OutputFile.commit`.

    store        data goes to             commit
    local        .NAME.partial, pwrite    rename to NAME (atomic)
    remote       one stream, in order     closing the stream (objects appear whole or not at all)

Small files are *staged*: all of them are written, under names of their own, before the first gets its final one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from vescale_fsdp.checkpoint.storage.created_folders import MadeFolders
from vescale_fsdp.errors import CorruptCheckpointError, explain

__all__ = ["OutputFile", "StagedFile", "Store", "partial_name"]

_PIECE_BYTES = 4 * 2**20  # 4 MiB


def partial_name(name: str, owner: str = "") -> str:
    """The name a local file has until it is committed (hidden, same folder, so that rename is atomic).

    ``owner`` tells apart those who may be writing the same file at once.
    """
    folder, _, base = name.rpartition("/")
    hidden = f".{base}.{owner}.partial" if owner else f".{base}.partial"
    return f"{folder}/{hidden}" if folder else hidden


class OutputFile(ABC):
    """A file that does not exist under its name yet."""

    needs_order: bool  # whether offsets must be written front to back without gaps

    @abstractmethod
    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at byte ``offset``. Safe from several threads unless `needs_order`."""

    @abstractmethod
    def finish(self) -> None:
        """All bytes are written: release the handle. The file keeps its partial name where it has one."""

    @abstractmethod
    def abort(self) -> None:
        """Give up: leave nothing behind."""


class StagedFile(ABC):
    """A small file ready to appear."""

    @abstractmethod
    def commit(self) -> None:
        """Give it its final name, over an older file."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing of it behind, unless it was committed."""


class Store(ABC):
    """A folder of files, by relative names with forward slashes."""

    url: str

    @property
    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Where it is, in comparable components: a store inside of this one begins with the same ones."""

    @abstractmethod
    def list_files(self) -> list[str]:
        """Names of all regular files, in subfolders too, sorted; empty if the folder does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file, or None if there is no such file."""

    @abstractmethod
    def stamp(self, name: str) -> str:
        """A text that changes when the file is replaced; raises as `required_size`."""

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a small file under its final name, making it if needed."""

    @abstractmethod
    def stage(self, name: str, pieces: Iterable[bytes], owner: str = "") -> StagedFile:
        """Prepare a small file; ``pieces`` are read now where a file can wait under another name, else when it
        is committed. ``owner`` as for `partial_name`."""

    @property
    @abstractmethod
    def folders(self) -> MadeFolders | None:
        """The folders made for its files; None where there are no folders."""

    @abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (flat, 1 byte per item) from byte ``offset`` of a file.

        Raises:
            CorruptCheckpointError: if the file is missing or ends too early.
        """

    @abstractmethod
    def create(self, name: str, nbytes: int = 0) -> OutputFile:
        """Start writing a file; folders are made as needed, and room for ``nbytes`` bytes where possible.

        Raises:
            OSError: if there is no space.
        """

    @abstractmethod
    def commit(self, name: str) -> None:
        """Give a finished file its final name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    @property
    @abstractmethod
    def renames(self) -> bool:
        """Whether a file can be written under a partial name and committed by an atomic rename."""

    def working_name(self, name: str) -> str:
        """The name a finished but uncommitted file has."""
        return partial_name(name) if self.renames else name

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes at ``offset``; raises as `read_into`."""
        buffer = bytearray(nbytes)
        if nbytes:
            self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_file(self, name: str) -> bytes:
        """The whole of a (small) file; raises as `read_into`."""
        return self.read(name, 0, self.required_size(name))

    def required_size(self, name: str) -> int:
        """`size`, but a missing file raises CorruptCheckpointError."""
        size = self.size(name)
        if size is None:
            raise CorruptCheckpointError(
                explain(
                    "a file of the checkpoint is missing",
                    expected=f"a file {name}",
                    got="no such file",
                    where=self.url,
                    todo="copy the checkpoint again, with all its files",
                )
            )
        return size

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """The whole of a file, a few MiB at a time; raises as `read_into`."""
        nbytes = self.required_size(name)
        for start in range(0, nbytes, _PIECE_BYTES):
            yield self.read(name, start, min(_PIECE_BYTES, nbytes - start))

    def write_file(self, name: str, data: bytes) -> None:
        """Write and commit a small file."""
        staged = self.stage(name, (data,))
        try:
            staged.commit()
        except BaseException:
            staged.abort()
            raise

    def _too_short(self, name: str, offset: int, wanted: int, got: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            explain(
                "a file of the checkpoint is truncated",
                expected=f"{wanted} bytes at offset {offset}",
                got=f"{got} bytes before the end of the file",
                where=f"{self.url}/{name}",
                todo="copy the file again from where it was saved, or use an older checkpoint",
            )
        )
