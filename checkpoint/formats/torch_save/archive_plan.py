"""Planning torch.save archives: zip files of stored records, whose tensor bytes stream through.

    local header | data.pkl | ... | local header, padded | storage 0 | descriptor | ... | directory | end

Sizes are known beforehand, checksums only after the bytes went by. So each storage is followed by a
descriptor with its CRC-32 (zip's way of streaming, and torch's own), and the directory at the end is
computed last. Storages begin at multiples of 64 bytes, as torch writes them, so that
``torch.load(mmap=True)`` gets aligned tensors. Format: PKWARE's APPNOTE, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from vescale_fsdp.checkpoint.moves.plan import ComputedBytes, Content, CrcOf, FixedBytes, TensorItems
from vescale_fsdp.checkpoint.storage.checksums import CRC32

_ALIGNMENT_BYTES = 64
_MAX_32 = 0xFFFFFFFF
_UTF8, _HAS_DESCRIPTOR = 0x0800, 0x0008
_VERSION_NEEDED = 45  # zip64
_PADDING_TAG = b"FB"


class _PlannedRecord(NamedTuple):
    name: bytes
    nbytes: int
    offset: int  # of the local header, in the archive
    crc: int  # 0 for a storage, whose stream tells
    storage: int | None = None

    @property
    def is_wide(self) -> bool:
        return self.nbytes >= _MAX_32

    @property
    def flags(self) -> int:
        return _UTF8 | (_HAS_DESCRIPTOR if self.storage is not None else 0)


def plan_archive(pickle: bytes, storages: Sequence[TensorItems], first_index: int) -> list[Content]:
    """Contents of one archive; storage i is record ``data/i`` and content ``first_index + 2 * i + 1``.

    Args:
        pickle: the content of ``data.pkl``.
        storages: the bytes of each storage.
        first_index: number of contents before the archive in its file.
    """
    sizes = tuple(items.nbytes for items in storages)
    # A checkpoint holds thousands of archives of one tensor, and few that differ in more than its items.
    plan = (_small_archive if len(sizes) < 2 else _ArchivePlan)(pickle, sizes)
    contents: list[Content] = [FixedBytes(plan.head)]
    for number, items in enumerate(storages):
        contents.append(TensorItems(items.view, items.start, items.stop, crc=CRC32))
        nbytes = plan.nbytes_after(number)
        contents.append(ComputedBytes(nbytes, partial(plan.after, number, first_index)))
    return contents


class _ArchivePlan:
    """One archive: the bytes before its first storage, and those between a storage and the next, or the end."""

    def __init__(self, pickle: bytes, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._records: list[_PlannedRecord] = []
        self._position = 0
        self._fixed = [b""]  # before the first storage, behind its descriptor, behind that of the second, ...
        self._add("data.pkl", pickle)
        self._add(".format_version", b"1")
        self._add(".storage_alignment", str(_ALIGNMENT_BYTES).encode())
        self._add("byteorder", b"little")
        for number, nbytes in enumerate(sizes):
            self._add_storage(number, nbytes)
        self._add("version", b"3\n")

    def _add(self, name: str, data: bytes) -> None:
        record = _PlannedRecord(f"archive/{name}".encode(), len(data), self._position, CRC32.of(data))
        self._append(record, _local_header(record) + data)

    def _add_storage(self, number: int, nbytes: int) -> None:
        record = _PlannedRecord(f"archive/data/{number}".encode(), nbytes, self._position, 0, number)
        self._append(record, _local_header(record))
        self._position += nbytes + _descriptor_bytes(nbytes)
        self._fixed.append(b"")

    def _append(self, record: _PlannedRecord, data: bytes) -> None:
        self._records.append(record)
        self._fixed[-1] += data
        self._position += len(data)

    @property
    def head(self) -> bytes:
        """What comes before the first storage: everything, if there is none."""
        return self._fixed[0] if self._sizes else self._fixed[0] + self._directory(lambda _: 0)

    def nbytes_after(self, number: int) -> int:
        """Bytes between a storage and the next, or the end."""
        is_last = number == len(self._sizes) - 1
        known = _descriptor_bytes(self._sizes[number]) + len(self._fixed[number + 1])
        return known + (self._directory_bytes if is_last else 0)

    def after(self, number: int, first_index: int, crc_of: CrcOf) -> bytes:
        """Those bytes; the archive's first content is number ``first_index`` of its file."""

        def crc_of_storage(storage: int) -> int:
            return crc_of(first_index + 2 * storage + 1)

        data = _descriptor(crc_of_storage(number), self._sizes[number]) + self._fixed[number + 1]
        return data + self._directory(crc_of_storage) if number == len(self._sizes) - 1 else data

    @cached_property
    def _directory_bytes(self) -> int:
        return len(self._directory(lambda _: 0))

    def _directory(self, crc_of_storage: CrcOf) -> bytes:
        entries = b"".join(
            _directory_entry(record, record.crc if record.storage is None else crc_of_storage(record.storage))
            for record in self._records
        )
        return entries + _end(len(self._records), len(entries), self._position)


_small_archive = lru_cache(maxsize=256)(_ArchivePlan)


def _local_header(record: _PlannedRecord) -> bytes:
    """The header, padded so that the data begins at a multiple of the alignment."""
    wide = struct.pack("<HHQQ", 1, 16, 0, 0) if record.is_wide else b""
    fixed = 30 + len(record.name) + len(wide)
    padding = -(record.offset + fixed + 4) % _ALIGNMENT_BYTES
    extra = wide + _PADDING_TAG + struct.pack("<H", padding) + b"Z" * padding
    known = record.nbytes if record.storage is None else _MAX_32 if record.is_wide else 0
    fields = _shared_fields(record, record.crc, known, extra)
    return struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", *fields) + record.name + extra


def _shared_fields(record: _PlannedRecord, crc: int, nbytes: int, extra: bytes) -> tuple[int, ...]:
    """What local header and directory say alike: version, flags, method, time, date, checksum, sizes, lengths."""
    date = 0x21  # 1 January 1980: results do not depend on when they were made
    lengths = (len(record.name), len(extra))
    return (_VERSION_NEEDED, record.flags, 0, 0, date, crc, nbytes, nbytes, *lengths)


def _descriptor(crc: int, nbytes: int) -> bytes:
    form = "<4sIQQ" if nbytes >= _MAX_32 else "<4sIII"
    return struct.pack(form, b"PK\x07\x08", crc, nbytes, nbytes)


def _descriptor_bytes(nbytes: int) -> int:
    return 24 if nbytes >= _MAX_32 else 16


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
