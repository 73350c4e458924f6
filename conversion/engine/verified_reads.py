"""Verify reads of a checkpoint's files with the format's checksums, if possible without reading bytes twice.

A *checked range* has one CRC: a record of a torch.save archive, or a chunk of a zarr array. It may have gigabytes, and
several threads read its bytes in any order. The CRC of each read is computed while the bytes are in the CPU's cache.
When the last byte has been read, the CRCs of the reads are combined and compared with the CRC of the range:

    range   |.......... saved with CRC c ..........|
    reads   |--- 2 ---|-- 0 --|         |--- 1 ---|        crc(2) + crc(0) + ... = c ?
    unread                    '---------'                  read at the end, if no tensor needs these bytes

*Stripes* are equal parts of a file with an xxh3-64 each. These hashes cannot be combined. A thread that
reads forward hashes a stripe part by part. A stripe that a thread reads only in part is read again as a whole:

    stripe  |---------- 7 ----------|---------- 8 ----------|
    reads   |  1  |  2  |  3  |  4  |  5  |  6  |            7 is verified; 8 is incomplete and is read again
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import Crc, RunningChecksum
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.extent import Extent

_SCRATCH_BYTES = 2**20  # 1 MiB is read and hashed at a time, so that it stays in the CPU's cache

# (file, stripe) -> the checksum so far, and the offset of the next byte to hash.
Begun = dict[tuple[str, int], tuple[RunningChecksum, int]]

SeenReads = list[tuple[int, int, int]]
"""The reads of a checked range, disjoint and in order: (first byte, end, CRC) of each."""

_start_of = attrgetter("start")


@dataclass(frozen=True, slots=True)  # slots: one for each record of a torch archive
class CheckedRange:
    """An extent with one CRC: bytes [start, start + nbytes) of a file.

    Args:
        kind: the kind of CRC.
        saved: returns the stored CRC.
        where: description of the bytes, for messages.
    """

    file: str
    start: int
    nbytes: int
    kind: Crc
    saved: Callable[[], int]
    where: str

    @property
    def stop(self) -> int:
        """End of the range in its file."""
        return self.start + self.nbytes


class StripedFile(Protocol):
    """A file with one checksum per stripe."""

    @property
    def stripe_bytes(self) -> int:
        """Size of a stripe in bytes; the last stripe may be shorter."""

    @property
    def checked_bytes(self) -> int:
        """Number of bytes, from the start of the file, that stripes cover."""

    def hash_stripe(self, index: int, scratch: bytearray) -> int:
        """Read a stripe through ``scratch``, and return its xxh3-64."""

    def verify_stripe(self, index: int, checksum: int) -> None:
        """Raise CorruptCheckpointError if ``checksum`` differs from the saved checksum of the stripe."""


class VerifiedReads:
    """The reads of one checkpoint. Thread-safe.

    Args:
        store: the folder that contains the files.
        striped: returns the stripes of a file, or None.
    """

    def __init__(self, store: Storage, striped: Callable[[str], StripedFile | None]) -> None:
        self._store, self._striped = store, striped
        # `_lock` protects the dicts and is never held during a read; `_rereading` is held during second reads.
        self._lock, self._rereading = threading.Lock(), threading.Lock()
        self._ranges: dict[str, list[CheckedRange]] = {}  # file -> its ranges, in order
        # (file, first byte) of a range -> its reads, or None if it is verified; and its number of unread bytes.
        self._seen: dict[tuple[str, int], SeenReads | None] = {}
        self._unread_bytes: dict[tuple[str, int], int] = {}
        self._verified: dict[str, set[int]] = {}  # file -> indices of its verified stripes

    def read(self, file: str, offset: int, buffer: memoryview, begun: Begun | None = None) -> None:
        """Fill ``buffer`` from a file. A range or stripe is verified when its last byte has been read.

        Args:
            begun: the stripes that this thread has read in part, updated by this call. The thread passes the dict to
                all its reads, and then to `finish`, which verifies these stripes. None: they are verified at once.

        Raises:
            CorruptCheckpointError: if the file is too short, or the checksum of a completed stripe or range does not
                match.
        """
        self._store.read_into(file, offset, buffer)
        striped = self._striped(file)
        if striped is None:
            self.note(file, offset, buffer)
        elif begun is not None:
            self._hash_stripes(striped, file, offset, buffer, begun)
        else:
            self._hash_stripes(striped, file, offset, buffer, begun := {})
            self.finish(begun)

    def _hash_stripes(
        self, striped: StripedFile, file: str, offset: int, data: memoryview, begun: Begun
    ) -> None:
        """Hash the stripes of bytes that were just read, and verify the stripes that are complete."""
        # No lock: at worst, two threads verify the same stripe.
        verified = self._verified.setdefault(file, set())
        # Bytes after `checked_bytes`, such as the table of checksums itself, have no stripe.
        stripe_bytes, stop = striped.stripe_bytes, min(offset + len(data), striped.checked_bytes)
        while offset < stop:
            index = offset // stripe_bytes
            first, end = index * stripe_bytes, min((index + 1) * stripe_bytes, striped.checked_bytes)
            part = data[: end - offset]
            if index not in verified:
                checksum, following = begun.pop((file, index), (RunningChecksum(), first))
                if following != offset:  # this thread has not read the stripe's bytes before `offset`
                    self._reread(striped, file, index)
                else:
                    checksum.update(part)
                    if len(part) == end - offset:
                        striped.verify_stripe(index, checksum.intdigest())
                        verified.add(index)
                    else:
                        begun[file, index] = checksum, offset + len(part)
            offset, data = end, data[len(part) :]

    def finish(self, begun: Begun) -> None:
        """Verify the stripes that were read only in part, by reading them again; clears ``begun``.

        Raises:
            CorruptCheckpointError: if a checksum does not match.
        """
        for file, index in begun:
            striped = self._striped(file)
            assert striped is not None, f"{file} had stripes"
            self._reread(striped, file, index)
        begun.clear()

    def _reread(self, striped: StripedFile, file: str, index: int) -> None:
        """Read a whole stripe and verify it, unless another thread has done so."""
        verified = self._verified.setdefault(file, set())
        with self._rereading:  # several threads may share a stripe, which only one of them should read again
            if index not in verified:
                striped.verify_stripe(index, striped.hash_stripe(index, bytearray(_SCRATCH_BYTES)))
                verified.add(index)

    def add(self, checked: CheckedRange) -> None:
        """Register a range to verify. Two ranges of a file must be equal or disjoint."""
        with self._lock:
            ranges = self._ranges.setdefault(checked.file, [])
            index = bisect_left(ranges, checked.start, key=_start_of)
            if checked.nbytes and (index == len(ranges) or ranges[index].start != checked.start):
                ranges.insert(index, checked)

    def note(self, file: str, offset: int, data: memoryview) -> None:
        """Add the CRC of bytes that were read from a file to the reads of its ranges.

        Raises:
            CorruptCheckpointError: if the bytes complete a range and its CRC does not match.
        """
        stop = offset + len(data)
        for checked in self._within(file, offset, stop):
            if self._seen.get((file, checked.start), ()) is not None:  # None: the range is verified
                low, high = max(offset, checked.start), min(stop, checked.stop)
                self._add_read(checked, low, high, checked.kind.of(data[low - offset : high - offset]))

    def unread(self, checked: CheckedRange) -> list[Extent]:
        """Return the unread bytes of a range; empty if the range is verified.

        Raises:
            CorruptCheckpointError: if all bytes of the range have been read and its CRC does not match.
        """
        with self._lock:
            seen = self._seen.get((checked.file, checked.start), [])
            if seen is None or not checked.nbytes:
                return []
            ends = [checked.start, *(stop for _, stop, _ in seen)]
            starts = [*(start for start, _, _ in seen), checked.stop]
        pairs = zip(ends, starts, strict=True)
        gaps = [Extent(checked.file, end, start - end) for end, start in pairs if end < start]
        if not gaps:
            self._compare(checked, seen)
        return gaps

    def verify_range(self, checked: CheckedRange) -> None:
        """Read the bytes of a range that no thread has read, which verifies it; raises the same errors as `read`."""
        # Repeated, because CRCs of reads that overlap reads of other threads are not used: a gap may remain.
        while gaps := self.unread(checked):
            for gap in gaps:
                for file, offset, nbytes in gap.split(_SCRATCH_BYTES):
                    self.read(file, offset, memoryview(bytearray(nbytes)))

    def seen_in_part(self) -> dict[tuple[str, int], SeenReads]:
        """Return the reads so far of each range that is not verified yet, by the range's file and first byte."""
        with self._lock:
            return {key: list(seen) for key, seen in sorted(self._seen.items()) if seen}

    def verify_with(self, others: Iterable[tuple[tuple[str, int], SeenReads]]) -> None:
        """Verify ranges that several processes have read in part; raises the same errors as `read`.

        Args:
            others: reads of other processes, from the items of their `seen_in_part`.
        """
        known: dict[tuple[str, int], CheckedRange] = {}
        for (file, start), seen in others:
            (known[file, start],) = self._within(file, start, start + 1)
            for read in seen:
                self._add_read(known[file, start], *read)
        for checked in known.values():
            self.verify_range(checked)

    def _within(self, file: str, start: int, stop: int) -> list[CheckedRange]:
        """Return the registered ranges that share bytes with [start, stop) of a file."""
        with self._lock:
            ranges = self._ranges.get(file, [])
            # From the last range that begins at or before `start`.
            first = max(0, bisect_right(ranges, start, key=_start_of) - 1)
            found = ranges[first : bisect_left(ranges, stop, key=_start_of)]
        return [checked for checked in found if checked.stop > start]

    def _add_read(self, checked: CheckedRange, start: int, stop: int, crc: int) -> None:
        """Add a read of a range, and verify the range if this was its last unread part."""
        key = checked.file, checked.start
        with self._lock:
            seen = self._seen.setdefault(key, [])
            if seen is None:  # the range is verified
                return
            after = bisect_left(seen, (start,))  # (start,) sorts before every read that begins there
            if (after and seen[after - 1][1] > start) or (after < len(seen) and seen[after][0] < stop):
                return  # CRCs of overlapping reads cannot be combined; `verify_range` reads the gaps
            seen.insert(after, (start, stop, crc))
            self._unread_bytes[key] = self._unread_bytes.get(key, checked.nbytes) - (stop - start)
            is_last = not self._unread_bytes[key]
        if is_last:
            self._compare(checked, seen)

    def _compare(self, checked: CheckedRange, seen: SeenReads) -> None:
        """Compare the CRC of a range, all of whose bytes are in ``seen``, with the saved CRC.

        Raises:
            CorruptCheckpointError: if they differ.
        """
        saved, crc = checked.saved(), checked.kind.join((crc, stop - start) for start, stop, crc in seen)
        if crc != saved:
            raise CorruptCheckpointError(
                "The data of a checkpoint differs from the saved data.",
                expected=f"bytes with the checksum {saved:08x}",
                got=f"{crc:08x}",
                where=f"{checked.where}, bytes {checked.start} to {checked.stop}",
            )
        self._seen[checked.file, checked.start] = None
