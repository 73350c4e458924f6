"""Ranges of bytes that were saved with one CRC each, proven while a conversion reads them in pieces.

A record of a torch.save archive or a chunk of a zarr array has one checksum, may have gigabytes, and is read in
whatever pieces suit the work, in any order, by several threads. CRCs of pieces join to that of the whole, so
each piece is summed up while it is in the cache, and the range is proven when the last one came by:

    range   |.......... saved with CRC c ..........|
    pieces  |--- 2 ---|-- 0 --|         |--- 1 ---|        crc(2) + crc(0) + ... = c ?
    unseen                    '---------'                  read at the end, if nobody needs these bytes
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vescale_fsdp.checkpoint.checksums import Crc
from vescale_fsdp.errors import CorruptCheckpointError


@dataclass(frozen=True)
class CheckedRange:
    """Bytes [start, start + nbytes) of a file and how to learn the CRC that they were saved with.

    Args:
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


class SeenPieces(NamedTuple):
    """What a process has read of a range: its file and first byte, and (first byte, end, CRC) of each piece."""

    file: str
    start: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass
class _Seen:
    """What has been read of a range."""

    checked: CheckedRange
    pieces: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # (first byte, end, CRC), apart, in order
    seen_bytes: int = 0
    is_proven: bool = False

    def has_room(self, start: int, stop: int) -> bool:
        """Whether no byte of [start, stop) has been seen."""
        after = bisect_left(self.pieces, (start,))
        return (after == 0 or self.pieces[after - 1][1] <= start) and (
            after == len(self.pieces) or stop <= self.pieces[after][0]
        )

    def crc(self) -> int:
        """Of the whole range, once all is seen."""
        return self.checked.kind.join((crc, stop - start) for start, stop, crc in self.pieces)


class CheckedRanges:
    """All ranges that were met so far, and what has been seen of each. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: dict[str, list[int]] = {}
        self._found: dict[str, list[_Seen]] = {}  # by file, in the order of the starts

    def add(self, checked: CheckedRange) -> None:
        """Know a range from now on; ranges of a file are equal or apart."""
        with self._lock:
            starts = self._starts.setdefault(checked.file, [])
            place = bisect_left(starts, checked.start)
            if checked.nbytes and (place == len(starts) or starts[place] != checked.start):
                starts.insert(place, checked.start)
                self._found.setdefault(checked.file, []).insert(place, _Seen(checked))

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Bytes of a file went by.

        Raises:
            CorruptCheckpointError: if they complete a range whose bytes are not those that were saved.
        """
        stop = offset + len(data)
        for seen in self._within(file, offset, stop):
            low, high = max(offset, seen.checked.start), min(stop, seen.checked.stop)
            if not seen.is_proven:
                self._add_piece(seen, low, high, seen.checked.kind.of(data[low - offset : high - offset]))

    def unseen(self, checked: CheckedRange) -> list[tuple[int, int]]:
        """(first byte, end) of what must still be read to prove a range; empty if it is proven.

        Raises:
            CorruptCheckpointError: if all has been read and was not what was saved.
        """
        seen = next(
            p
            for p in self._within(checked.file, checked.start, checked.stop)
            if p.checked.start == checked.start
        )
        with self._lock:
            ends = [checked.start, *(stop for _, stop, _ in seen.pieces)]
            starts = [*(start for start, _, _ in seen.pieces), checked.stop]
            gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        if not gaps and not seen.is_proven:
            self._prove(seen)
        return [] if seen.is_proven else gaps

    def seen_in_part(self) -> list[SeenPieces]:
        """What was seen of ranges that are not proven."""
        with self._lock:
            return [
                SeenPieces(file, seen.checked.start, tuple(seen.pieces))
                for file, found in sorted(self._found.items())
                for seen in found
                if seen.pieces and not seen.is_proven
            ]

    def learn(self, others: Iterable[SeenPieces]) -> list[CheckedRange]:
        """Take in what other processes have seen of ranges that are known here; these.

        Raises:
            CorruptCheckpointError: if that completes a range whose bytes are not those that were saved.
        """
        known: dict[tuple[str, int], CheckedRange] = {}
        for file, first, pieces in others:
            seen = next(seen for seen in self._within(file, first, first + 1) if seen.checked.start == first)
            known[file, first] = seen.checked
            for start, stop, crc in pieces:
                self._add_piece(seen, start, stop, crc)
        return list(known.values())

    def _within(self, file: str, start: int, stop: int) -> list[_Seen]:
        with self._lock:
            starts = self._starts.get(file, [])
            first = max(0, bisect_right(starts, start) - 1)
            found = self._found.get(file, [])[first : bisect_left(starts, stop)]
        return [seen for seen in found if seen.checked.stop > start]

    def _add_piece(self, seen: _Seen, start: int, stop: int, crc: int) -> None:
        with self._lock:
            if not seen.has_room(start, stop):
                return  # read twice; what overlaps is of no use, and what it leaves open is read at the end
            seen.pieces.insert(bisect_left(seen.pieces, (start,)), (start, stop, crc))
            seen.seen_bytes += stop - start
            is_last = seen.seen_bytes == seen.checked.nbytes
        if is_last:
            self._prove(seen)

    def _prove(self, seen: _Seen) -> None:
        checked, crc, saved = seen.checked, seen.crc(), seen.checked.saved()
        if crc != saved:
            raise CorruptCheckpointError(
                "The data of a checkpoint is not what was saved.",
                expected=f"bytes with the checksum {saved:08x}",
                got=f"{crc:08x}",
                where=f"{checked.where}, bytes {checked.start} to {checked.stop}",
                todo="copy the file again from where it was saved, or use an older checkpoint",
            )
        seen.is_proven = True
