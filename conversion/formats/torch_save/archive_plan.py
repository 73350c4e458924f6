"""Planning torch.save archives: zip files of stored records, whose tensor bytes stream through.

    local header | data.pkl | ... | local header, padded | storage 0 | descriptor | ... | directory | end

Sizes are known beforehand, checksums only after the bytes went by. So each storage is followed by a
descriptor with its CRC-32 (zip's way of streaming, and torch's own), and the directory at the end is
computed last. Storages begin at multiples of 64 bytes, as torch writes them, so that
``torch.load(mmap=True)`` gets aligned tensors. Format: PKWARE's APPNOTE, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.conversion.output.plan import ComputedBytes, Content, FixedBytes, TensorItems
from vescale_fsdp.conversion.source.crc import CRC32

__all__ = ["plan_archive"]

_ALIGNMENT_BYTES = 64
_MAX_32 = 0xFFFFFFFF
_UTF8, _HAS_DESCRIPTOR = 0x0800, 0x0008
_VERSION_NEEDED = 45  # zip64
_PADDING_TAG = b"FB"


@dataclass(frozen=True)
class _PlannedRecord:
    name: bytes
    nbytes: int
    offset: int  # of the local header, in the archive
    crc: int | None  # None while only the stream knows it
    content_index: int  # of its bytes, in the file

    @property
    def is_wide(self) -> bool:
        return self.nbytes >= _MAX_32

    @property
    def flags(self) -> int:
        return _UTF8 | (_HAS_DESCRIPTOR if self.crc is None else 0)


def plan_archive(pickle: bytes, storages: Sequence[TensorItems], first_index: int) -> list[Content]:
    """Contents of one archive; storage i is record ``data/i``.

    Args:
        pickle: the content of ``data.pkl``.
        storages: the bytes of each storage.
        first_index: number of contents before the archive in its file.
    """
    plan = _ArchivePlan(first_index)
    plan.add_bytes("data.pkl", pickle)
    plan.add_bytes(".format_version", b"1")
    plan.add_bytes(".storage_alignment", str(_ALIGNMENT_BYTES).encode())
    plan.add_bytes("byteorder", b"little")
    for number, storage in enumerate(storages):
        plan.add_tensor(f"data/{number}", storage)
    plan.add_bytes("version", b"3\n")
    plan.add_directory()
    return plan.contents


class _ArchivePlan:
    def __init__(self, first_index: int) -> None:
        self.contents: list[Content] = []
        self._first = first_index
        self._records: list[_PlannedRecord] = []
        self._position = 0

    def _add(self, content: Content) -> None:
        self.contents.append(content)
        self._position += content.nbytes

    def add_bytes(self, name: str, data: bytes) -> None:
        record = self._record(name, len(data), zlib.crc32(data))
        self._add(FixedBytes(_local_header(record) + data))

    def add_tensor(self, name: str, items: TensorItems) -> None:
        record = self._record(name, items.nbytes, None, bytes_follow=True)
        self._add(FixedBytes(_local_header(record)))
        index = record.content_index
        self._add(TensorItems(items.view, items.start, items.stop, crc=CRC32))
        nbytes = items.nbytes
        size = 24 if record.is_wide else 16
        self._add(ComputedBytes(size, lambda crcs: _descriptor(crcs[index], nbytes)))

    def _record(
        self, name: str, nbytes: int, crc: int | None, *, bytes_follow: bool = False
    ) -> _PlannedRecord:
        index = self._first + len(self.contents) + (1 if bytes_follow else 0)
        record = _PlannedRecord(f"archive/{name}".encode(), nbytes, self._position, crc, index)
        self._records.append(record)
        return record

    def add_directory(self) -> None:
        records, start = tuple(self._records), self._position

        def make(crcs: dict[int, int]) -> bytes:
            entries = b"".join(
                _directory_entry(r, crcs[r.content_index] if r.crc is None else r.crc) for r in records
            )
            return entries + _end(len(records), len(entries), start)

        blank = dict.fromkeys((r.content_index for r in records), 0)
        self._add(ComputedBytes(len(make(blank)), make))


def _local_header(record: _PlannedRecord) -> bytes:
    """The header, padded so that the data begins at a multiple of the alignment."""
    wide = struct.pack("<HHQQ", 1, 16, 0, 0) if record.is_wide else b""
    fixed = 30 + len(record.name) + len(wide)
    padding = -(record.offset + fixed + 4) % _ALIGNMENT_BYTES
    extra = wide + _PADDING_TAG + struct.pack("<H", padding) + b"Z" * padding
    known = record.nbytes if record.crc is not None else _MAX_32 if record.is_wide else 0
    fields = _shared_fields(record, record.crc or 0, known, extra)
    return struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", *fields) + record.name + extra


def _shared_fields(record: _PlannedRecord, crc: int, nbytes: int, extra: bytes) -> tuple[int, ...]:
    """What local header and directory say alike: version, flags, method, time, date, checksum, sizes, lengths."""
    date = 0x21  # 1 January 1980: results do not depend on when they were made
    lengths = (len(record.name), len(extra))
    return (_VERSION_NEEDED, record.flags, 0, 0, date, crc, nbytes, nbytes, *lengths)


def _descriptor(crc: int, nbytes: int) -> bytes:
    form = "<4sIQQ" if nbytes >= _MAX_32 else "<4sIII"
    return struct.pack(form, b"PK\x07\x08", crc, nbytes, nbytes)


def _directory_entry(record: _PlannedRecord, crc: int) -> bytes:
    wide = [record.nbytes, record.nbytes] if record.is_wide else []
    far = record.offset >= _MAX_32
    values = [*wide, *([record.offset] if far else [])]
    extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    fields = _shared_fields(record, crc, _MAX_32 if record.is_wide else record.nbytes, extra)
    ends = (0, 0, 0, 0, _MAX_32 if far else record.offset)
    head = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", _VERSION_NEEDED, *fields, *ends)
    return head + record.name + extra


def _end(count: int, nbytes: int, start: int) -> bytes:
    wide = b""
    if count >= 0xFFFF or nbytes >= _MAX_32 or start >= _MAX_32:
        wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, start)
        wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + nbytes, 1)
    short = (min(count, 0xFFFF), min(count, 0xFFFF), min(nbytes, _MAX_32), min(start, _MAX_32))
    return wide + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *short, 0)
