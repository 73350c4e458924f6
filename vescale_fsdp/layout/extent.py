"""Extents: bytes of a file; jobs: one read and its copies. Offsets and sizes count bytes, those of a region items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Generic, NamedTuple, Protocol, TypeVar


class Extent(NamedTuple):
    """The bytes [offset, offset + nbytes) of a file.

    Attributes:
        file: name of the file, relative to the folder that the reader or writer of the extent opens.
        offset: first byte, counted from the start of the file.
        nbytes: number of bytes; 0 for an empty extent.
    """

    file: str
    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        """End in the file: the byte after the last one."""
        return self.offset + self.nbytes

    def part(self, start: int, stop: int) -> Extent:
        """Return bytes [start, stop) of this extent, counted from its first byte and limited to its bytes.

        >>> Extent("a", 100, 8).part(-3, 2), Extent("a", 100, 8).part(6, 20)
        (Extent(file='a', offset=100, nbytes=2), Extent(file='a', offset=106, nbytes=2))
        """
        if start <= 0 and stop >= self.nbytes:
            return self
        start = min(max(start, 0), self.nbytes)
        return Extent(self.file, self.offset + start, max(start, min(stop, self.nbytes)) - start)

    def clip(self, start: int, stop: int) -> Extent:
        """Return the bytes of this extent that are in [start, stop) of the file.

        >>> Extent("a", 100, 8).clip(104, 200)
        Extent(file='a', offset=104, nbytes=4)
        """
        return self.part(start - self.offset, stop - self.offset)

    def split(self, nbytes: int) -> Iterator[Extent]:
        """Yield consecutive parts of ``nbytes`` each; the last part may be smaller. An empty extent has no parts.

        >>> [part.nbytes for part in Extent("a", 100, 8).split(3)]
        [3, 3, 2]
        """
        for start in range(0, self.nbytes, nbytes):
            yield self.part(start, start + nbytes)

    def joined(self, following: Extent) -> Extent | None:
        """Return both extents as one if ``following`` begins where this extent ends; None otherwise.

        >>> Extent("a", 0, 8).joined(Extent("a", 8, 4)), Extent("a", 0, 8).joined(Extent("b", 8, 4))
        (Extent(file='a', offset=0, nbytes=12), None)
        """
        if (following.file, following.offset) != (self.file, self.stop):
            return None
        return Extent(self.file, self.offset, self.nbytes + following.nbytes)


class FromFile(Protocol):
    """A copy that needs bytes [start, stop) of a file."""

    @property
    def start(self) -> int:
        """The first byte."""

    @property
    def stop(self) -> int:
        """The byte after the last one."""


S = TypeVar("S")
C = TypeVar("C", bound=FromFile)


class ReadJob(NamedTuple, Generic[S, C]):
    """A job: one read of an extent of ``source``, and the copies of its bytes, sorted by start.

    The copies may overlap, have gaps between them, and need bytes outside of the extent.
    """

    source: S
    extent: Extent
    copies: Sequence[C]


class CopyWalk(Generic[C]):
    """Finds the copies from byte ranges that are passed in ascending order, without a search from the start.

    Args:
        copies: sorted by start.
    """

    def __init__(self, copies: Sequence[C]) -> None:
        self._copies = copies
        self._first = 0

    def within(self, start: int, stop: int) -> list[C]:
        """Return the copies that need some of bytes [start, stop)."""
        copies = self._copies
        while self._first < len(copies) and copies[self._first].stop <= start:
            self._first += 1
        overlapping = takewhile(lambda copy: copy.start < stop, islice(copies, self._first, None))
        # Copies are not sorted by stop: a copy that follows a long copy may stop before the range.
        return [copy for copy in overlapping if copy.stop > start]
