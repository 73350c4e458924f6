"""`RankFileReader` reads a rank's file that fits the manifest.

The module imports no torch, so that conversions and `verify` start fast.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.ranks.first_error import noting
from vescale_fsdp.checkpoint.storage.base import ALL_PROBLEMS, RESTORE_OLDER, Buffer, FileReader, Storage
from vescale_fsdp.checkpoint.storage.checksums import CHECKSUM_BYTES, RunningChecksum, checksum_of
from vescale_fsdp.errors import CorruptCheckpointError, some

_GONE = (FileNotFoundError, NotADirectoryError)  # NotADirectoryError: a file has the path of the folder


class RankFileReader:
    """Reads a rank's file. The constructor opens it, and checks size, header and checksum table against the manifest.

    Attributes:
        layout: the layout that the manifest implies.
        where: the file's path, for messages.
        file: the open file; the caller closes it.

    Raises:
        CorruptCheckpointError: if the file is missing, or does not fit the manifest.
    """

    def __init__(self, storage: Storage, layout: RankFile) -> None:
        self.layout = layout
        self.where = f"{storage.where}/{layout.name}"
        try:
            self.file: FileReader = storage.open_file(layout.name)
        except (*_GONE, ValueError) as error:  # ValueError: not a regular file
            raise self._unreadable(error) from error
        try:
            self._table = self._check()  # kept as bytes: a list of ints would need four times the memory
        except BaseException as error:  # closed here, since the caller gets no object to close
            with noting(error):
                self.file.close()
            raise

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Read consecutive bytes from an offset on, and fill the buffers one after another.

        Raises:
            CorruptCheckpointError: if the file has become too short, or was removed.
        """
        try:
            self.file.read_at(offset_bytes, buffers)
        except (*_GONE, EOFError) as error:
            raise self._unreadable(error) from error

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Return bytes [start, stop) of the file, read-only; mapped if possible (see `FileReader.view`).

        Raises:
            CorruptCheckpointError: if the file has become too short, or was removed.
        """
        try:
            return self.file.view(start_bytes, stop_bytes)
        except (*_GONE, EOFError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CorruptCheckpointError:
        """Return the error for a file that is missing or too short, from the storage's error."""
        if isinstance(error, EOFError):
            return self.corrupt("A file ended early.", f"{self.layout.total_bytes} bytes", str(error))
        return self.corrupt(
            "A file of the checkpoint is missing.",
            f"{self.layout.total_bytes} bytes with {some(self.layout.content_names)}",
            "no file" if isinstance(error, _GONE) else str(error),
        )

    def _check(self) -> bytes:
        """Compare size and header with the manifest. Returns the verified table of the stripes' checksums."""
        layout, size = self.layout, self.file.size_bytes
        if size != layout.total_bytes:
            lost = layout.names_in(min(size, layout.total_bytes), layout.table_start)
            raise self.corrupt(
                "A file of the checkpoint does not have the size that the manifest implies.",
                f"{layout.total_bytes} bytes",
                f"{size} bytes" + (f"; lost: {some(lost)}" if size < layout.total_bytes else ""),
            )
        # + 1: the last entry is the checksum of the table itself.
        header, table = bytearray(len(layout.header)), bytearray((layout.num_stripes + 1) * CHECKSUM_BYTES)
        self.read_at(0, [header])
        if header != layout.header:
            at = next(at for at, (a, b) in enumerate(zip(header, layout.header, strict=True)) if a != b)
            around = slice(max(0, at - 60), at + 60)  # enough bytes to show the tensor's entry in the JSON
            raise self.corrupt(
                "A file's header differs from the one that the manifest implies: it is damaged, or it is another "
                "checkpoint's file.",
                f".. {layout.header[around]!r} .. (tensors: {some(self.layout.content_names)})",
                f".. {bytes(header[around])!r} .. (first difference: byte {at})",
            )
        self.read_at(layout.table_start, [table])
        (own,) = struct.unpack_from("<Q", table, layout.num_stripes * CHECKSUM_BYTES)
        if checksum_of(memoryview(table)[:-CHECKSUM_BYTES]) != own:
            raise self.corrupt(
                "A file's table of checksums is damaged.", f"checksum {own:016x}", "another checksum"
            )
        return bytes(table)

    @property
    def stripe_bytes(self) -> int:
        """Size of a stripe; the last stripe may be shorter."""
        return self.layout.manifest.stripe_bytes

    @property
    def checked_bytes(self) -> int:
        """Number of bytes from the file's start that stripes cover; the checksum table follows."""
        return self.layout.table_start

    def verify_stripe(self, index: int, checksum: int) -> None:
        """Compare the checksum of a stripe with the saved one.

        Raises:
            CorruptCheckpointError: if the checksums differ; names the file, the bytes, and the tensors in these bytes.
        """
        (saved,) = struct.unpack_from("<Q", self._table, index * CHECKSUM_BYTES)
        if checksum != saved:
            _, start, nbytes = self.layout.stripe(index)
            stop = start + nbytes
            raise self.corrupt(
                f"Bytes [{start}, {stop}) differ from what was saved.",
                f"checksum {saved:016x}",
                f"{checksum:016x}; in them: {some(self.layout.names_in(start, stop))}",
            )

    def hash_stripe(self, index: int, scratch: Buffer) -> int:
        """Read a stripe through a buffer, and return its checksum."""
        state = RunningChecksum()
        for extent in self.layout.stripe(index).split(len(scratch)):
            part = memoryview(scratch)[: extent.nbytes]
            self.read_at(extent.offset, [part])
            state.update(part)
        return state.intdigest()

    def corrupt(self, problem: str, expected: str, got: str) -> CorruptCheckpointError:
        """Return an error that names this file."""
        todo = RESTORE_OLDER + ALL_PROBLEMS
        return CorruptCheckpointError(problem, expected=expected, got=got, where=self.where, todo=todo)
