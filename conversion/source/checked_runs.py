"""Runs of bytes that were saved with one CRC each, proven while a conversion reads them in pieces.

A record of a torch.save archive or a chunk of a zarr array has one checksum, may have gigabytes, and is read in
whatever pieces suit the work, in any order, by several threads. CRCs of pieces join to that of the whole, so
each piece is summed up while it is in the cache, and the run is proven when the last one came by:

    run     |.......... saved with CRC c ..........|
    pieces  |--- 2 ---|-- 0 --|         |--- 1 ---|        crc(2) + crc(0) + ... = c ?
    unseen                    '---------'                  read at the end, if nobody needs these bytes
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from vescale_fsdp.conversion.source.crc import Crc
from vescale_fsdp.errors import CorruptCheckpointError

__all__ = ["CheckedRun", "CheckedRuns"]


@dataclass(frozen=True)
class CheckedRun:
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
        """End of the run in its file."""
        return self.start + self.nbytes


@dataclass
class _Progress:
    """What has been read of a run."""

    run: CheckedRun
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
        """Of the whole run, once all is seen."""
        found = 0
        for start, stop, crc in self.pieces:
            found = self.run.kind.combine(found, crc, stop - start)
        return found


class CheckedRuns:
    """All runs that were met so far, and what has been seen of each. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: dict[str, list[int]] = {}
        self._found: dict[str, list[_Progress]] = {}  # by file, in the order of the starts

    def add(self, run: CheckedRun) -> None:
        """Know a run from now on; runs of a file are equal or apart."""
        with self._lock:
            starts = self._starts.setdefault(run.file, [])
            place = bisect_left(starts, run.start)
            if run.nbytes and (place == len(starts) or starts[place] != run.start):
                starts.insert(place, run.start)
                self._found.setdefault(run.file, []).insert(place, _Progress(run))

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Bytes of a file went by.

        Raises:
            CorruptCheckpointError: if they complete a run whose bytes are not those that were saved.
        """
        stop = offset + len(data)
        for progress in self._within(file, offset, stop):
            low, high = max(offset, progress.run.start), min(stop, progress.run.stop)
            if not progress.is_proven:
                self._add_piece(progress, low, high, progress.run.kind.of(data[low - offset : high - offset]))

    def unseen(self, run: CheckedRun) -> list[tuple[int, int]]:
        """(first byte, end) of what must still be read to prove a run; empty if it is proven.

        Raises:
            CorruptCheckpointError: if all has been read and was not what was saved.
        """
        progress = next(p for p in self._within(run.file, run.start, run.stop) if p.run.start == run.start)
        with self._lock:
            ends = [run.start, *(stop for _, stop, _ in progress.pieces)]
            starts = [*(start for start, _, _ in progress.pieces), run.stop]
            gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        if not gaps and not progress.is_proven:
            self._prove(progress)
        return [] if progress.is_proven else gaps

    def _within(self, file: str, start: int, stop: int) -> list[_Progress]:
        with self._lock:
            starts = self._starts.get(file, [])
            first = max(0, bisect_right(starts, start) - 1)
            found = self._found.get(file, [])[first : bisect_left(starts, stop)]
        return [progress for progress in found if progress.run.stop > start]

    def _add_piece(self, progress: _Progress, start: int, stop: int, crc: int) -> None:
        with self._lock:
            if not progress.has_room(start, stop):
                return  # read twice; what overlaps is of no use, and what it leaves open is read at the end
            progress.pieces.insert(bisect_left(progress.pieces, (start,)), (start, stop, crc))
            progress.seen_bytes += stop - start
            is_last = progress.seen_bytes == progress.run.nbytes
        if is_last:
            self._prove(progress)

    def _prove(self, progress: _Progress) -> None:
        run, crc, saved = progress.run, progress.crc(), progress.run.saved()
        if crc != saved:
            raise CorruptCheckpointError(
                "The data of a checkpoint is not what was saved.",
                expected=f"bytes with the checksum {saved:08x}",
                got=f"{crc:08x}",
                where=f"{run.where}, bytes {run.start} to {run.stop}",
                todo="copy the file again from where it was saved, or use an older checkpoint",
            )
        progress.is_proven = True
