"""Reads of a checkpoint's files, compared with the checksums that its format has, so that each byte is read once.

*Ranges* have one CRC each: a record of a torch.save archive, a chunk of a zarr array. They may have gigabytes, and are
read in whatever pieces suit the work, in any order, by several threads. CRCs of pieces join to that of the range, so
each piece is summed up while it is in the cache, and the range is verified when the last piece has been read:

    range   |.......... saved with CRC c ..........|
    pieces  |--- 2 ---|-- 0 --|         |--- 1 ---|        crc(2) + crc(0) + ... = c ?
    unread                    '---------'                  read at the end, if no tensor needs these bytes

*Stripes* cut a file into equal parts with an xxh3-64 each, and these do not join. A thread that reads forward hashes a
stripe part by part; a stripe that it reads only some of is read again:

    stripe  |---------- 7 ----------|---------- 8 ----------|
    reads   |  1  |  2  |  3  |  4  |  5  |  6  |            7 is verified; 8 was begun and is read again
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

_SCRATCH_BYTES = 2**20  # 1 MiB: hashed while in the cache

# (file, stripe) -> its checksum so far, and the first byte that is not in it.
Begun = dict[tuple[str, int], tuple[RunningChecksum, int]]


@dataclass(frozen=True)
class CheckedRange:
    """Bytes [start, start + nbytes) of a file with one CRC.

    Args:
        saved: reads the CRC that they were saved with.
        where: what they are, for messages.
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
    """A file whose bytes have checksums, one per stripe."""

    @property
    def stripe_bytes(self) -> int:
        """Size of a stripe; the last may be short."""

    @property
    def checked_bytes(self) -> int:
        """Bytes from the file's start that stripes cover."""

    def hash_stripe(self, index: int, scratch: bytearray) -> int:
        """xxh3-64 of a stripe's bytes as they are, read through ``scratch``."""

    def verify_stripe(self, index: int, checksum: int) -> None:
        """Raise CorruptCheckpointError if the stripe was saved with another checksum."""


class SeenPieces(NamedTuple):
    """What a process has read of a range: its file and first byte, and (first byte, end, CRC) of each piece."""

    file: str
    start: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass
class _Seen:
    """What has been read of a range; the pieces are disjoint and in order."""

    checked: CheckedRange
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # (first byte, end, CRC)
    seen_bytes: int = 0
    is_verified: bool = False

    def has_room(self, start: int, stop: int) -> bool:
        """Whether no byte of [start, stop) has been read."""
        after = bisect_left(self.pieces, (start,))  # (start,) sorts before every piece that begins there
        return (after == 0 or self.pieces[after - 1][1] <= start) and (
            after == len(self.pieces) or stop <= self.pieces[after][0]
        )

    def verify(self) -> None:
        """Compare the CRC of the range, all of which has been read."""
        checked, saved = self.checked, self.checked.saved()
        crc = checked.kind.join((crc, stop - start) for start, stop, crc in self.pieces)
        if crc != saved:
            raise CorruptCheckpointError(
                "The data of a checkpoint is not what was saved.",
                expected=f"bytes with the checksum {saved:08x}",
                got=f"{crc:08x}",
                where=f"{checked.where}, bytes {checked.start} to {checked.stop}",
                todo="copy the file again from where it was saved, or use an older checkpoint",
            )
        self.is_verified = True


class VerifiedReads:
    """The reads of one checkpoint. Safe from several threads.

    Args:
        store: where its files are.
        striped: the stripes of a file, if it has some.
    """

    def __init__(self, store: Storage, striped: Callable[[str], StripedFile | None]) -> None:
        self._store, self._striped = store, striped
        # The first is never held during a read.
        self._lock, self._rereading = threading.Lock(), threading.Lock()
        self._starts: dict[str, list[int]] = {}
        self._ranges: dict[str, list[_Seen]] = {}  # by file, in the order of the starts
        self._verified: dict[str, set[int]] = {}  # stripes, by file

    def read(self, file: str, offset: int, buffer: memoryview, begun: Begun | None = None) -> None:
        """Fill ``buffer`` from a file. Ranges are verified when the last of their bytes has been read.

        Args:
            begun: the stripes that this thread has read in part, which `finish` verifies; None to verify them at once.

        Raises:
            CorruptCheckpointError: if the file is too short, or a stripe or range that is complete by now is not what
                was saved.
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
        verified = self._verified.setdefault(file, set())
        stripe_bytes, stop = striped.stripe_bytes, min(offset + len(data), striped.checked_bytes)
        while offset < stop:
            index = offset // stripe_bytes
            first, end = index * stripe_bytes, min((index + 1) * stripe_bytes, striped.checked_bytes)
            part = data[: end - offset]
            if index not in verified:
                checksum, following = begun.pop((file, index), (RunningChecksum(), first))
                if following != offset:  # bytes before it were not read by this thread
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
        """Verify stripes that were read in part.

        Raises:
            CorruptCheckpointError: if one is not what was saved.
        """
        for file, index in begun:
            striped = self._striped(file)
            assert striped is not None, f"{file} had stripes"
            self._reread(striped, file, index)
        begun.clear()

    def _reread(self, striped: StripedFile, file: str, index: int) -> None:
        verified = self._verified.setdefault(file, set())
        with self._rereading:  # threads that each have a part of the stripe read it once between them
            if index not in verified:
                striped.verify_stripe(index, striped.hash_stripe(index, bytearray(_SCRATCH_BYTES)))
                verified.add(index)

    def add(self, checked: CheckedRange) -> None:
        """Compare this range from now on; ranges of a file are equal or disjoint."""
        with self._lock:
            starts = self._starts.setdefault(checked.file, [])
            index = bisect_left(starts, checked.start)
            if checked.nbytes and (index == len(starts) or starts[index] != checked.start):
                starts.insert(index, checked.start)
                self._ranges.setdefault(checked.file, []).insert(index, _Seen(checked))

    def note(self, file: str, offset: int, data: memoryview) -> None:
        """Sum up bytes that were read from a file.

        Raises:
            CorruptCheckpointError: if they complete a range whose bytes are not those that were saved.
        """
        stop = offset + len(data)
        for seen in self._within(file, offset, stop):
            low, high = max(offset, seen.checked.start), min(stop, seen.checked.stop)
            if not seen.is_verified:
                self._add_piece(seen, low, high, seen.checked.kind.of(data[low - offset : high - offset]))

    def unread(self, checked: CheckedRange) -> list[tuple[int, int]]:
        """(first byte, end) of what must still be read to verify a range; empty if it is verified.

        Raises:
            CorruptCheckpointError: if all has been read and was not what was saved.
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
        """Read the bytes of a range that no thread has read; raises as `read`."""
        while gaps := self.unread(checked):  # other threads may read some of them meanwhile
            for gap in gaps:
                for start in range(*gap, _SCRATCH_BYTES):
                    nbytes = min(_SCRATCH_BYTES, gap[1] - start)
                    self.read(checked.file, start, memoryview(bytearray(nbytes)))

    def seen_in_part(self) -> list[SeenPieces]:
        """What was read of ranges that are not verified."""
        with self._lock:
            return [
                SeenPieces(file, seen.checked.start, tuple(seen.pieces))
                for file, ranges in sorted(self._ranges.items())
                for seen in ranges
                if seen.pieces and not seen.is_verified
            ]

    def verify_with(self, others: Iterable[SeenPieces]) -> None:
        """Verify ranges of which other processes have read parts; raises as `read`."""
        known: dict[tuple[str, int], CheckedRange] = {}
        for file, first, pieces in others:
            seen = self._seen_of(file, first)
            known[file, first] = seen.checked
            for piece in pieces:
                self._add_piece(seen, *piece)
        for checked in known.values():
            self.verify_range(checked)

    def _seen_of(self, file: str, start: int) -> _Seen:
        with self._lock:
            return self._ranges[file][bisect_left(self._starts[file], start)]

    def _within(self, file: str, start: int, stop: int) -> list[_Seen]:
        with self._lock:
            starts = self._starts.get(file, [])
            first = max(0, bisect_right(starts, start) - 1)
            ranges = self._ranges.get(file, [])[first : bisect_left(starts, stop)]
        return [seen for seen in ranges if seen.checked.stop > start]

    def _add_piece(self, seen: _Seen, start: int, stop: int, crc: int) -> None:
        with self._lock:
            if not seen.has_room(start, stop):
                return  # read twice: a CRC of overlapping pieces does not join; gaps that remain are read at the end
            seen.pieces.insert(bisect_left(seen.pieces, (start,)), (start, stop, crc))
            seen.seen_bytes += stop - start
            is_last = seen.seen_bytes == seen.checked.nbytes
        if is_last:
            seen.verify()
