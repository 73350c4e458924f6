"""Verify reads of a checkpoint's files with the format's checksums, if possible without reading bytes twice.

A *range* has one CRC: a record of a torch.save archive, or a chunk of a zarr array. It may have gigabytes, and several
threads read its pieces in any order. The CRC of each piece is computed while the piece is in the CPU's cache. When the
last piece has been read, the CRCs of the pieces are combined and compared with the CRC of the range:

    range   |.......... saved with CRC c ..........|
    pieces  |--- 2 ---|-- 0 --|         |--- 1 ---|        crc(2) + crc(0) + ... = c ?
    unread                    '---------'                  read at the end, if no tensor needs these bytes

*Stripes* are equal parts of a file with an xxh3-64 each. These hashes cannot be combined from pieces. A thread that
reads forward hashes a stripe part by part. A stripe that a thread reads only in part is read again as a whole:

    stripe  |---------- 7 ----------|---------- 8 ----------|
    reads   |  1  |  2  |  3  |  4  |  5  |  6  |            7 is verified; 8 is incomplete and is read again
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import Crc, RunningChecksum
from vescale_fsdp.errors import CorruptCheckpointError

_SCRATCH_BYTES = 2**20  # 1 MiB is read and hashed at a time, so that it stays in the CPU's cache

# (file, stripe) -> the checksum so far, and the offset of the next byte to hash.
Begun = dict[tuple[str, int], tuple[RunningChecksum, int]]


@dataclass(frozen=True, slots=True)  # slots: one for each record of a torch archive
class CheckedRange:
    """Bytes [start, start + nbytes) of a file with one CRC.

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


class SeenPieces(NamedTuple):
    """The pieces of a range that a process has read.

    Attributes:
        file, start: file and first byte of the range, which identify it.
        pieces: (first byte, end, CRC) of each piece.
    """

    file: str
    start: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass
class _Seen:
    """The pieces of a range that have been read, disjoint and in order."""

    checked: CheckedRange
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # (first byte, end, CRC)
    seen_bytes: int = 0
    is_verified: bool = False

    def has_room(self, start: int, stop: int) -> bool:
        """Return whether no byte of [start, stop) has been read yet."""
        after = bisect_left(self.pieces, (start,))  # (start,) sorts before every piece that begins there
        return (after == 0 or self.pieces[after - 1][1] <= start) and (
            after == len(self.pieces) or stop <= self.pieces[after][0]
        )

    def verify(self) -> None:
        """Compare the CRC of the range, whose bytes have all been read, with the saved CRC.

        Raises:
            CorruptCheckpointError: if they differ.
        """
        checked, saved = self.checked, self.checked.saved()
        crc = checked.kind.join((crc, stop - start) for start, stop, crc in self.pieces)
        if crc != saved:
            raise CorruptCheckpointError(
                "The data of a checkpoint differs from the saved data.",
                expected=f"bytes with the checksum {saved:08x}",
                got=f"{crc:08x}",
                where=f"{checked.where}, bytes {checked.start} to {checked.stop}",
                todo="copy the file again from its original location, or use an older checkpoint",
            )
        self.is_verified = True


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
        self._starts: dict[str, list[int]] = {}  # file -> first bytes of its ranges, sorted for `bisect`
        self._ranges: dict[str, list[_Seen]] = {}  # file -> its ranges, in the order of `_starts`
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
            starts = self._starts.setdefault(checked.file, [])
            index = bisect_left(starts, checked.start)
            if checked.nbytes and (index == len(starts) or starts[index] != checked.start):
                starts.insert(index, checked.start)
                self._ranges.setdefault(checked.file, []).insert(index, _Seen(checked))

    def note(self, file: str, offset: int, data: memoryview) -> None:
        """Add bytes that were read from a file to the CRCs of its ranges.

        Raises:
            CorruptCheckpointError: if the bytes complete a range and its CRC does not match.
        """
        stop = offset + len(data)
        for seen in self._within(file, offset, stop):
            low, high = max(offset, seen.checked.start), min(stop, seen.checked.stop)
            if not seen.is_verified:
                self._add_piece(seen, low, high, seen.checked.kind.of(data[low - offset : high - offset]))

    def unread(self, checked: CheckedRange) -> list[tuple[int, int]]:
        """Return first byte and end of each unread part of a range; empty if the range is verified.

        Raises:
            CorruptCheckpointError: if all bytes of the range have been read and its CRC does not match.
        """
        if not checked.nbytes:
            return []
        seen = self._seen_of(checked.file, checked.start)
        with self._lock:
            ends = [checked.start, *(stop for _, stop, _ in seen.pieces)]
            starts = [*(start for start, _, _ in seen.pieces), checked.stop]
            gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        if not gaps and not seen.is_verified:
            seen.verify()
        return [] if seen.is_verified else gaps

    def verify_range(self, checked: CheckedRange) -> None:
        """Read the bytes of a range that no thread has read, which verifies it; raises the same errors as `read`."""
        # Repeated, because CRCs of pieces that overlap reads of other threads are not used: a gap may remain.
        while gaps := self.unread(checked):
            for gap in gaps:
                for start in range(*gap, _SCRATCH_BYTES):
                    nbytes = min(_SCRATCH_BYTES, gap[1] - start)
                    self.read(checked.file, start, memoryview(bytearray(nbytes)))

    def seen_in_part(self) -> list[SeenPieces]:
        """Return the pieces, read so far, of all ranges that are not verified yet."""
        with self._lock:
            return [
                SeenPieces(file, seen.checked.start, tuple(seen.pieces))
                for file, ranges in sorted(self._ranges.items())  # in the same order on all ranks
                for seen in ranges
                if seen.pieces and not seen.is_verified
            ]

    def verify_with(self, others: Iterable[SeenPieces]) -> None:
        """Verify ranges that several processes have read in part; raises the same errors as `read`.

        Args:
            others: the pieces that other processes have read, from their `seen_in_part`.
        """
        known: dict[tuple[str, int], CheckedRange] = {}
        for file, first, pieces in others:
            seen = self._seen_of(file, first)
            known[file, first] = seen.checked
            for piece in pieces:
                self._add_piece(seen, *piece)
        for checked in known.values():
            self.verify_range(checked)

    def _seen_of(self, file: str, start: int) -> _Seen:
        """Return the registered range that begins at byte ``start`` of a file."""
        with self._lock:
            return self._ranges[file][bisect_left(self._starts[file], start)]

    def _within(self, file: str, start: int, stop: int) -> list[_Seen]:
        """Return the registered ranges that share bytes with [start, stop) of a file."""
        with self._lock:
            starts = self._starts.get(file, [])
            first = max(0, bisect_right(starts, start) - 1)  # the last range that begins at or before `start`
            ranges = self._ranges.get(file, [])[first : bisect_left(starts, stop)]
        return [seen for seen in ranges if seen.checked.stop > start]

    def _add_piece(self, seen: _Seen, start: int, stop: int, crc: int) -> None:
        """Add a piece to a range, and verify the range if this was its last piece."""
        with self._lock:
            if not seen.has_room(start, stop):
                return  # CRCs of overlapping pieces cannot be combined; `verify_range` reads the gaps
            seen.pieces.insert(bisect_left(seen.pieces, (start,)), (start, stop, crc))
            seen.seen_bytes += stop - start
            is_last = seen.seen_bytes == seen.checked.nbytes
        if is_last:
            seen.verify()
