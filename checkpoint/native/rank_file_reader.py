"""`OpenRankFile`: a rank's file that is open for reading and fits the manifest.

The module imports no torch, so that conversions and `verify` start fast.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.ranks.first_error import noting
from vescale_fsdp.checkpoint.storage.base import ALL_PROBLEMS, Buffer, FileReader, Storage
from vescale_fsdp.checkpoint.storage.checksums import CHECKSUM_BYTES, RunningChecksum, checksum_of
from vescale_fsdp.errors import CorruptCheckpointError, some

_GONE = (FileNotFoundError, NotADirectoryError)  # NotADirectoryError: a file has the path of the folder


class OpenRankFile:
    """An open rank's file. The constructor checks size, header and checksum table against the manifest.

    Attributes:
        file: the layout that the manifest implies.
        where: the file's path, for messages.
        reader: the open file; the caller closes it.

    Raises:
        CorruptCheckpointError: if the file is missing, or does not fit the manifest.
    """

    def __init__(self, storage: Storage, file: RankFile) -> None:
        self.file = file
        self.where = f"{storage.where}/{file.name}"
        try:
            self.reader: FileReader = storage.open_file(file.name)
        except (*_GONE, ValueError) as error:  # ValueError: not a regular file
            raise self._unreadable(error) from error
        try:
            self._table = self._check()  # kept as bytes: a list of ints would need four times the memory
        except BaseException as error:  # closed here, since the caller gets no object to close
            with noting(error):
                self.reader.close()
            raise

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        """Read consecutive bytes from an offset on, and fill the buffers one after another.

        Raises:
            CorruptCheckpointError: if the file has become too short, or was removed.
        """
        try:
            self.reader.read_at(offset_bytes, buffers)
        except (*_GONE, EOFError) as error:
            raise self._unreadable(error) from error

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Return bytes [start, stop) of the file, read-only; mapped if possible (see `FileReader.view`).

        Raises:
            CorruptCheckpointError: if the file has become too short, or was removed.
        """
        try:
            return self.reader.view(start_bytes, stop_bytes)
        except (*_GONE, EOFError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CorruptCheckpointError:
        """Return the error for a file that is missing or too short, from the storage's error."""
        if isinstance(error, EOFError):
            return self.corrupt("A file ended early.", f"{self.file.total_bytes} bytes", str(error))
        return self.corrupt(
            "A file of the checkpoint is missing.",
            f"{self.file.total_bytes} bytes with {some(self.file.tensor_names)}",
            "no file" if isinstance(error, _GONE) else str(error),
        )

    def _check(self) -> bytes:
        """Compare size and header with the manifest. Returns the verified table of the stripes' checksums."""
        file, size = self.file, self.reader.size_bytes
        if size != file.total_bytes:
            lost = file.names_in(min(size, file.total_bytes), file.table_start)
            raise self.corrupt(
                "A file of the checkpoint does not have the size that the manifest implies.",
                f"{file.total_bytes} bytes",
                f"{size} bytes" + (f"; lost: {some(lost)}" if size < file.total_bytes else ""),
            )
        # + 1: the last entry is the checksum of the table itself.
        header, table = bytearray(len(file.header)), bytearray((file.num_stripes + 1) * CHECKSUM_BYTES)
        self.read_at(0, [header])
        if header != file.header:
            at = next(at for at, (a, b) in enumerate(zip(header, file.header, strict=True)) if a != b)
            around = slice(max(0, at - 60), at + 60)  # enough bytes to show the tensor's entry in the JSON
            raise self.corrupt(
                "A file's header differs from the one that the manifest implies: it is damaged, or it is another "
                "checkpoint's file.",
                f".. {file.header[around]!r} .. (tensors: {some(self.file.tensor_names)})",
                f".. {bytes(header[around])!r} .. (first difference: byte {at})",
            )
        self.read_at(file.table_start, [table])
        (own,) = struct.unpack_from("<Q", table, file.num_stripes * CHECKSUM_BYTES)
        if checksum_of(memoryview(table)[:-CHECKSUM_BYTES]) != own:
            raise self.corrupt(
                "A file's table of checksums is damaged.", f"checksum {own:016x}", "another checksum"
            )
        return bytes(table)

    @property
    def stripe_bytes(self) -> int:
        """Size of a stripe; the last stripe may be shorter."""
        return self.file.manifest.stripe_bytes

    @property
    def checked_bytes(self) -> int:
        """Number of bytes from the file's start that stripes cover; the checksum table follows."""
        return self.file.table_start

    def verify_stripe(self, index: int, checksum: int) -> None:
        """Compare the checksum of a stripe with the saved one.

        Raises:
            CorruptCheckpointError: if the checksums differ; names the file, the bytes, and the tensors in these bytes.
        """
        (saved,) = struct.unpack_from("<Q", self._table, index * CHECKSUM_BYTES)
        if checksum != saved:
            start, stop = self.file.stripe(index)
            raise self.corrupt(
                f"Bytes [{start}, {stop}) differ from what was saved.",
                f"checksum {saved:016x}",
                f"{checksum:016x}; in them: {some(self.file.names_in(start, stop))}",
            )

    def hash_stripe(self, index: int, scratch: Buffer) -> int:
        """Read a stripe through a buffer, and return its checksum."""
        start, stop = self.file.stripe(index)
        state = RunningChecksum()
        for at in range(start, stop, len(scratch)):
            part = memoryview(scratch)[: min(len(scratch), stop - at)]
            self.read_at(at, [part])
            state.update(part)
        return state.intdigest()

    def corrupt(self, problem: str, expected: str, got: str) -> CorruptCheckpointError:
        """Return an error that names this file."""
        todo = f"restore an older step{ALL_PROBLEMS}"
        return CorruptCheckpointError(problem, expected=expected, got=got, where=self.where, todo=todo)
