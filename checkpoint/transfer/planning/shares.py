"""What one rank's memory gives to another's: strided boxes, in one order on both sides, cut into messages.

A `Share` is a box of items, described twice by offset and strides: in the flat memory of the source's part of
a tensor, and in that of the target's. A `ShareStream` is all that goes from one rank to another, one share after the
other as they lie on the wire, wide items first, so that every item is aligned wherever a message begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.transfer.planning.links import Leaf
from vescale_fsdp.layout.geometry import Box, FlatRange, boxes_of_range, contiguous_strides, numel_of

ALIGN_BYTES = 16  # of the widest item: what cuts of a stream are multiples of

_ALONE_BYTES = 256 << 10  # 256 KiB: copying so much costs more than one more message

Shape = tuple[int, ...]
Holding = Sequence[tuple[Region, int]]  # regions of one tensor, each with its place in one flat memory


class Share(NamedTuple):
    """A box of items in two memories.

    Attributes:
        leaf: number of the leaf of the plan that it belongs to.
        itemsize: bytes of an item on the wire.
        sizes: of the box.
        source, source_strides: its first item's place in the source's flat memory, and steps there.
        target, target_strides: likewise in the target's.
    """

    leaf: int
    itemsize: int
    sizes: Shape
    source: int
    source_strides: Shape
    target: int
    target_strides: Shape

    @property
    def numel(self) -> int:
        """Items of the box."""
        return numel_of(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return numel_of(self.sizes) * self.itemsize

    @property
    def is_source_run(self) -> bool:
        """Whether the items lie one after the other in the source, in the order of the wire."""
        return self.source_strides == contiguous_strides(self.sizes)

    @property
    def is_target_run(self) -> bool:
        """Whether they do in the target."""
        return self.target_strides == contiguous_strides(self.sizes)

    @property
    def travels_alone(self) -> bool:
        """Whether it is sent from where it lies, or received where it belongs, in messages of its own."""
        return self.nbytes >= _ALONE_BYTES and (self.is_source_run or self.is_target_run)

    def between(self, start: int, stop: int) -> Iterator[Share]:
        """Items [start, stop) of the box's, in its order."""
        if (start, stop) == (0, self.numel):
            yield self
            return
        for box in boxes_of_range(self.sizes, start, stop):
            source = self.source + _flat(box.offsets, self.source_strides)
            target = self.target + _flat(box.offsets, self.target_strides)
            joined = _joined(box.sizes, self.source_strides, self.target_strides)
            yield Share(self.leaf, self.itemsize, joined[0], source, joined[1], target, joined[2])


def _flat(offsets: Shape, strides: Shape) -> int:
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))


def shares_between(
    number: int, itemsize: int, source: Holding, target: Region, leaf: Leaf
) -> Iterator[Share]:
    """What a rank's regions of a leaf's source bring into another rank's region of its target.

    Args:
        number: of the leaf.
        itemsize: bytes of an item on the wire.
    """
    if leaf.is_identity and len(source) == 1 and source[0][0].box == target.box == leaf.box:
        (region, base), shared = source[0], source[0][0].span.intersect(target.span)
        if shared.numel:  # flat pieces of one box: a run of both
            places = shared.start - region.span.start + base, shared.start - target.span.start
            yield Share(number, itemsize, (shared.numel,), places[0], (1,), places[1], (1,))
        return
    for wanted, target_place in target.pieces():
        box = leaf.to_source(wanted)
        if box is None:
            continue
        for region, base in source:
            for held, place in region.pieces():
                shared_box = box.intersect(held)
                if shared_box is not None:
                    yield _share(
                        (number, itemsize), leaf, shared_box, held, base + place, wanted, target_place
                    )


def _share(
    head: tuple[int, int], leaf: Leaf, shared: Box, held: Box, source: int, wanted: Box, target: int
) -> Share:
    """A box of the source's items, held in one contiguous box and wanted in another."""
    source_strides, target_strides = contiguous_strides(held.sizes), contiguous_strides(wanted.sizes)
    into = leaf.to_target(shared)
    assert into is not None
    moved = tuple(a - b for a, b in zip(shared.offsets, held.offsets, strict=True))
    moved_to = tuple(a - b for a, b in zip(into.offsets, wanted.offsets, strict=True))
    steps = tuple(0 if dim < 0 else source_strides[dim] for dim in leaf.dims)
    source, target = source + _flat(moved, source_strides), target + _flat(moved_to, target_strides)
    joined = _joined(into.sizes, steps, target_strides)
    return Share(*head, joined[0], source, joined[1], target, joined[2])


def _joined(sizes: Shape, source_strides: Shape, target_strides: Shape) -> tuple[Shape, Shape, Shape]:
    """A box with neighbouring dims joined where both sides step through them as through one."""
    dims: list[tuple[int, int, int]] = []
    for size, step, target_step in zip(sizes, source_strides, target_strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == step * size and dims[-1][2] == target_step * size:
            dims[-1] = (dims[-1][0] * size, step, target_step)
        else:
            dims.append((size, step, target_step))
    joined, steps, target_steps = zip(*(dims or [(1, 1, 1)]), strict=True)
    return joined, steps, target_steps


class ShareStream:
    """Shares as they follow each other from one rank to another.

    Args:
        shares: in the order in which both ranks find them.
    """

    def __init__(self, shares: Iterable[Share]) -> None:
        # Small shares come last of their width, so that one message takes many of them.
        self.shares = sorted(shares, key=lambda share: (-share.itemsize, not share.travels_alone))
        self._stops = list(accumulate(share.nbytes for share in self.shares))

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self._stops[-1] if self._stops else 0

    def between(self, low: int, high: int) -> Iterator[Share]:
        """What lies in bytes [low, high); both are multiples of `ALIGN_BYTES`, or the end."""
        for place in range(bisect_right(self._stops, low), len(self.shares)):
            share = self.shares[place]
            start = self._stops[place] - share.nbytes
            if start >= high:
                return
            wanted = FlatRange(max(low, start), min(high, self._stops[place])).shift(-start)
            yield from share.between(wanted.start // share.itemsize, wanted.stop // share.itemsize)

    def messages(self, message_bytes: int) -> list[tuple[Share, ...]]:
        """The stream in messages of at most ``message_bytes``.

        A large share that is a run on a side travels alone: there it is sent from where it is, or received where it
        belongs.
        """
        found: list[tuple[Share, ...]] = []
        for low, high in self._batches():
            for start in range(low, high, message_bytes):
                found.append(tuple(self.between(start, min(start + message_bytes, high))))
        return found

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Bytes of what may share messages."""
        low = 0
        for share, stop in zip(self.shares, self._stops, strict=True):
            if share.travels_alone:
                start = stop - share.nbytes
                yield from ((low, start), (start, stop))
                low = stop
        yield low, self.nbytes
