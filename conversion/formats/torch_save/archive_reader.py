"""Read a torch.save archive (a zip of stored, uncompressed records) by byte ranges.

    archive/data.pkl      the object, with references to storages
    archive/data/KEY      the bytes of one storage
    central directory     offset, size and CRC-32 of every record; at the end of the file

Only the directory, ``data.pkl`` and the requested bytes are read. So an archive of any size, whether it is a file, a
URL or a part of a ``.distcp`` file, is opened with a few small reads.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vescale_fsdp.checkpoint.storage.checksums import CRC32
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk
from vescale_fsdp.conversion.engine.verified_reads import CheckedRange
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import (
    TensorRef,
    how_to_trust,
    load_plain_pickle,
    load_tensor_pickle,
)
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, option
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box

ReadRange = Callable[[int, int], bytes]  # (offset, nbytes) -> exactly these bytes

# The first 4 KiB of an archive of one tensor contain its pickle, and the header of its data: they take one read.
_HEAD_BYTES = 4096
_READ_BYTES = 2**20  # 1 MiB: bounds the memory of `find_crc`
# The last 4 KiB of an archive of one tensor contain its directory; a larger directory takes a second read.
_TAIL_BYTES = 4096
# Headers of a zip archive, each with the signature with which it begins: PKWARE's APPNOTE, sections 4.3.7 to 4.3.16.
LOCAL_HEADER, LOCAL_SIGNATURE = struct.Struct("<4sHHHHHIIIHH"), b"PK\x03\x04"
CENTRAL_HEADER, CENTRAL_SIGNATURE = struct.Struct("<4sHHHHHHIIIHHHHHII"), b"PK\x01\x02"
END, END_SIGNATURE = struct.Struct("<4sHHHHIIH"), b"PK\x05\x06"
END64, END64_SIGNATURE = struct.Struct("<4sQHHIIQQQQ"), b"PK\x06\x06"
END64_LOCATOR, END64_LOCATOR_SIGNATURE = struct.Struct("<4sIQI"), b"PK\x06\x07"
MAX_32 = 0xFFFFFFFF  # in a 32-bit field, this means that the value is in the zip64 field
ZIP64_TAG = 1  # the tag of the zip64 field among a record's extra fields
# Archives that are not files of torch.save: (a record of every such archive, what wrote it, how to get the weights).
_PROGRAMS = (
    ("constants.pkl", "torch.jit.save", "torch.jit.load({}, map_location='cpu').state_dict()"),
    ("archive_format", "torch.export.save", "torch.export.load({}).state_dict"),
)


@dataclass(frozen=True, slots=True)  # slots: an archive may have a hundred thousand records
class ZipRecord:
    """An extent of an archive, as the archive's directory describes it: a record with its CRC-32."""

    header_offset: int  # of the local header, in the archive
    nbytes: int
    crc: int | None  # None while the data is not written
    is_stored: bool = True

    @property
    def is_wide(self) -> bool:
        """Whether the size does not fit into 32 bits."""
        return self.nbytes >= MAX_32


class TorchArchive:
    """One torch.save archive.

    Args:
        read: reads bytes of the archive.
        nbytes: size of the archive.
        where: the archive, for messages.
        trust, stand_ins: as in `load_tensor_pickle`.

    Raises:
        CorruptCheckpointError: from any method, if the bytes are not a torch.save archive.
    """

    def __init__(
        self, read: ReadRange, nbytes: int, *, where: str, trust: bool = False, stand_ins: bool = False
    ) -> None:
        self._read_raw, self.nbytes, self._where, self._trust = read, nbytes, where, trust
        self._stand_ins = stand_ins
        is_small = nbytes <= _HEAD_BYTES + _TAIL_BYTES  # small enough to read the whole archive at once
        self._tail_offset = 0 if is_small else nbytes - _TAIL_BYTES
        self._tail = self._read_raw(self._tail_offset, nbytes - self._tail_offset)

    @cached_property
    def content(self) -> Any:
        """The saved object, with a stand-in such as `TensorRef` for each tensor."""
        return load_tensor_pickle(
            self.pickle, where=self._where, trust=self._trust, stand_ins=self._stand_ins
        )

    @property
    def pickle(self) -> bytes:
        """The saved object's pickle.

        Raises:
            ConversionError: if the archive is a program of torch.jit or torch.export.
        """
        for record, saved_by, how_to_read in _PROGRAMS:
            if any(name.endswith(f"/{record}") for name in self._records):
                weights = how_to_read.format(repr(self._where))
                raise ConversionError(
                    "The file is a program with its weights, not a state dict.",
                    expected="a file of torch.save",
                    got=f"one of {saved_by}",
                    where=self._where,
                    todo=f"save its weights: torch.save({weights}, {f'{self._where}.weights.pt'!r})",
                )
        return self._record_bytes(f"{self._prefix}/data.pkl")

    def storage_range(self, key: str) -> tuple[int, int]:
        """Return (offset, nbytes) of a storage's data in the archive."""
        record = self._storage(key)
        return self._data_offset(record), record.nbytes

    def _storage(self, key: str) -> ZipRecord:
        record = self._records.get(f"{self._prefix}/data/{key}")
        if record is None:
            raise self._damaged(f"a record for storage {key}", "no such record")
        return record

    def storage_crc(self, key: str) -> int | None:
        """Return the CRC-32 that the archive records for a storage; None if the archive has no checksums."""
        return self._storage(key).crc if self._has_crcs else None

    @cached_property
    def _has_crcs(self) -> bool:
        """Whether the archive has checksums.

        With ``torch.serialization.set_crc32_options(False)`` all CRCs are 0, also that of ``data.pkl``, which is never
        empty.
        """
        return any(record.crc for record in self._records.values())

    def find_crc(self, key: str) -> int:
        """Read all bytes of a storage and return their CRC-32."""
        start, nbytes = self.storage_range(key)
        crc = 0
        for at in range(start, start + nbytes, _READ_BYTES):
            data = self._read(at, min(_READ_BYTES, start + nbytes - at))
            crc = CRC32.combine(crc, CRC32.of(data), len(data))
        return crc

    def chunk(self, box: Box, archive: Extent, ref: TensorRef, where: str) -> StoredChunk:
        """Describe where a tensor's items are stored, with the checksum of their storage if there is one.

        Args:
            box: the position of the items in the whole tensor.
            archive: the archive's own extent.
            ref: the tensor in the archive.
            where: the tensor, for messages.
        """
        offset, nbytes = self.storage_range(ref.storage_key)
        crc = self.storage_crc(ref.storage_key)
        file, start, _ = archive
        checked = None
        if crc is not None:
            # `__index__` returns the number; a lambda for each record would take four times the memory.
            checked = CheckedRange(file, start + offset, nbytes, CRC32, crc.__index__, where)
        # Items of a view are copied as they are, without a swap of bytes.
        if self._byteorder != "little":
            raise self._damaged("little-endian data", f"{self._byteorder}-endian data")
        itemsize = ref.dtype.itemsize
        last = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))  # index of the last item
        stop = ref.storage_offset + (0 if 0 in ref.shape else last + 1)
        if ref.storage_offset < 0 or min(ref.strides, default=0) < 0 or stop * itemsize > nbytes:
            raise self._damaged(f"a storage of at least {stop * itemsize} bytes", f"{nbytes} bytes")
        extent = Extent(file, start + offset + ref.storage_offset * itemsize, box.numel * itemsize)
        return StoredChunk(box, extent, ref.strides, checked, ref.signs)

    @cached_property
    def _prefix(self) -> str:
        """The folder of all records in the archive, which torch names after the saved file."""
        name = next((name for name in self._records if name.endswith("/data.pkl")), None)
        if name is None:
            raise self._damaged("an archive with a data.pkl record", f"records {sorted(self._records)[:5]}")
        return name.removesuffix("/data.pkl")

    @cached_property
    def _byteorder(self) -> str:
        name = f"{self._prefix}/byteorder"
        # Versions of torch before 2.1 wrote no such record.
        return self._record_bytes(name).decode("ascii", "replace") if name in self._records else "little"

    def _read(self, offset: int, nbytes: int) -> bytes:
        """Read bytes of the archive; from memory if they are in its head or tail."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise self._damaged(f"records within its {self.nbytes} bytes", f"one at {offset}+{nbytes}")
        if offset >= self._tail_offset:
            return self._tail[offset - self._tail_offset : offset - self._tail_offset + nbytes]
        if offset + nbytes <= _HEAD_BYTES:
            return self._head[offset : offset + nbytes]
        return self._read_raw(offset, nbytes)

    @cached_property
    def _head(self) -> bytes:
        return self._read_raw(0, _HEAD_BYTES)

    def _record_bytes(self, name: str) -> bytes:
        """Read the data of a record, and verify its checksum."""
        record = self._records[name]
        data = self._read(self._data_offset(record), record.nbytes)
        if self._has_crcs and (crc := CRC32.of(data)) != record.crc:
            raise self._damaged(f"CRC-32 {record.crc:08x} of {name}", f"{crc:08x}")
        return data

    def _data_offset(self, record: ZipRecord) -> int:
        """Return the offset of a record's data, which follows its local header."""
        if not record.is_stored:
            raise self._damaged("stored (uncompressed) records", "a compressed one")
        header = LOCAL_HEADER.unpack(self._read(record.header_offset, LOCAL_HEADER.size))
        if header[0] != LOCAL_SIGNATURE:
            raise self._damaged("a record header", repr(header[0]))
        # header[9], header[10]: lengths of the name and of the extra field. The latter is not taken from the directory,
        # since torch pads the extra field of the local header only.
        start = record.header_offset + LOCAL_HEADER.size + header[9] + header[10]
        if start + record.nbytes > self.nbytes:
            raise self._damaged(f"records within its {self.nbytes} bytes", f"one to {start + record.nbytes}")
        return start

    @cached_property
    def _records(self) -> dict[str, ZipRecord]:
        """All records of the archive by name, from its directory."""
        offset, nbytes = self._directory_range()
        data = self._read(offset, nbytes)
        records: dict[str, ZipRecord] = {}
        position = 0
        while position + CENTRAL_HEADER.size <= len(data):
            head = CENTRAL_HEADER.unpack_from(data, position)
            if head[0] != CENTRAL_SIGNATURE:
                raise self._damaged("a directory entry", repr(head[0]))
            name_end = position + CENTRAL_HEADER.size + head[10]
            name = data[position + CENTRAL_HEADER.size : name_end].decode("utf-8", "replace")
            extra = data[name_end : name_end + head[11]]
            records[name] = self._entry(head, extra)
            position = name_end + head[11] + head[12]  # lengths of the extra field and of the comment
        return records

    def _entry(self, head: tuple[Any, ...], extra: bytes) -> ZipRecord:
        """Parse a directory entry, given its fixed fields and its extra fields."""
        nbytes, header_offset = head[9], head[16]
        # For size, compressed size and offset of the local header: whether the value is in the zip64 field.
        is_wide = [field == MAX_32 for field in (head[9], head[8], header_offset)]
        if any(is_wide):  # the zip64 field has only the values that do not fit into 32 bits, in this order
            values = iter(_zip64_values(extra))
            try:
                nbytes = next(values) if is_wide[0] else nbytes
                _ = next(values) if is_wide[1] else None  # the compressed size
                header_offset = next(values) if is_wide[2] else header_offset
            except StopIteration:  # the zip64 field has fewer values
                raise self._damaged("a complete zip64 field", repr(extra)) from None
        return ZipRecord(header_offset, nbytes, head[7], head[4] == 0)  # compression method 0: stored

    def _directory_range(self) -> tuple[int, int]:
        """Return (offset, nbytes) of the central directory."""
        at = self._tail.rfind(END_SIGNATURE)  # the last one, since data of tensors may contain the same bytes
        if at < 0 or at + END.size > len(self._tail):
            raise self._damaged("a torch.save archive", "bytes without a zip directory at their end")
        end = END.unpack_from(self._tail, at)
        nbytes, offset = end[5], end[6]
        locator_at = at - END64_LOCATOR.size
        if locator_at >= 0 and self._tail[locator_at : locator_at + 4] == END64_LOCATOR_SIGNATURE:
            end64_at = END64_LOCATOR.unpack_from(self._tail, locator_at)[2]
            end64 = END64.unpack(self._read(end64_at, END64.size))
            nbytes, offset = end64[8], end64[9]
        return int(offset), int(nbytes)

    def _damaged(self, expected: str, got: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            "A torch.save archive cannot be read.", expected=expected, got=got, where=self._where
        )


def _zip64_values(extra: bytes) -> list[int]:
    """Find the zip64 field among a record's extra fields and return its values; empty if there is no such field."""
    position = 0
    while position + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, position)
        if tag == ZIP64_TAG:
            body = extra[position + 4 : position + 4 + size]
            # Cut to whole values, as `iter_unpack` requires.
            return [v for (v,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
        position += 4 + size
    return []


def load_torch_bytes(data: bytes, *, where: str, trust: bool = False) -> Any:
    """Read the object in a torch.save archive: plain values without torch, other objects with ``torch.load``.

    Args:
        data: the archive.
        where: the archive, for messages.
        trust: let ``torch.load`` run code from the pickle; otherwise it loads with ``weights_only=True``.

    Raises:
        ConversionError: if the archive is damaged, or contains objects that torch refuses.
    """
    try:
        archive = TorchArchive(lambda offset, nbytes: data[offset : offset + nbytes], len(data), where=where)
        return load_plain_pickle(archive.pickle, where=where)
    except (LookupError, CorruptCheckpointError):
        pass  # torch.load supports more types and older formats, and its errors say what is damaged
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trust)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        first_line = (str(error).splitlines() or [""])[0]  # then follows advice for callers of torch.load
        raise ConversionError(
            "A stored value cannot be read safely.",
            expected="numbers, strings, lists and dicts",
            got=f"{type(error).__name__}: {first_line}",
            where=where,
            todo=f"leave the value out with {option('exclude')}; or, {how_to_trust()}",
        ) from error
