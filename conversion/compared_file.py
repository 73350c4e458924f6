"""A file that is there already, compared with what a conversion would write."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, Storage


class OtherBytesError(Exception):
    """A file has other bytes than those that were to be written."""


class ComparedFile(FileWriter):
    """Takes the place of an output; raises `OtherBytesError` where the file does not have the bytes."""

    def __init__(self, store: Storage, name: str) -> None:
        self._store, self._name = store, name

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            wanted = memoryview(buffer).cast("B")
            size = self._store.required_info(self._name).size_bytes
            if offset_bytes + len(wanted) > size:
                raise OtherBytesError(self._name)
            if self._store.read(self._name, offset_bytes, len(wanted)) != wanted:
                raise OtherBytesError(self._name)
            offset_bytes += len(wanted)

    def close(self) -> None:
        """Nothing was opened."""

    def abort(self) -> None:
        """Nothing was written."""
