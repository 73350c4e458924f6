"""The shares that one rank sends, receives and keeps, and the order of its messages. Communicates nothing.

A `Share` is a box of items, with an offset and strides in two memories: in the flat memory of the sender's part of a
source tensor, and in the flat memory of the receiver's part of a target tensor. A `ShareStream` is all shares that one
rank sends to another. Wide items come first, so that every item is aligned wherever a message begins. Sender and
receiver derive the same shares in the same order, because both evaluate the same plan.

All messages of all ranks have one order, which prevents a deadlock. Messages are ordered by *turn*, then by their
number in the stream. In turn t, source number i sends to target number (i + t) modulo the number of turns, which is the
larger of the numbers of sources and targets. So each sender has one receiver per turn, and each receiver one sender.
Every rank starts its own messages in this order, a few at a time. So of all messages that have not arrived, the first
one in this order has been started by its sender and by its receiver, and will arrive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from vescale_fsdp.layout.geometry import FlatRange, boxes_of_range, contiguous_strides, numel_of
from vescale_fsdp.layout.region import Region
from vescale_fsdp.transfer.links import Leaf, PlacedLeaf
from vescale_fsdp.transfer.plan import Ranks, TransferPlan

_ALONE_BYTES = 256 << 10  # 256 KiB: copying more than this costs more than another message
_CACHED_BYTES = 1 << 20  # 1 MiB stays in a CPU cache from one copy to the next
_MIN_RUN = 4  # fewer shares than this are copied as fast by a list of boxes as by one box, whose planning takes longer

Shape = tuple[int, ...]


class Share(NamedTuple):
    """A box of items in two memories.

    Attributes:
        leaf: index in `TransferPlan.leaves`.
        itemsize: bytes of an item as it is sent.
        sizes: sizes of the box.
        source, source_strides: index of the box's first item in the sender's flat memory, and the box's strides there.
        target, target_strides: the same in the receiver's flat memory.
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
        """Number of items of the box."""
        return numel_of(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the box as it is sent."""
        return numel_of(self.sizes) * self.itemsize

    @property
    def is_source_run(self) -> bool:
        """Whether the source stores the items contiguously, in the order in which they are sent."""
        return self.source_strides == contiguous_strides(self.sizes)

    @property
    def is_target_run(self) -> bool:
        """Whether the target stores the items contiguously, in the order in which they are sent."""
        return self.target_strides == contiguous_strides(self.sizes)

    @property
    def is_sent_alone(self) -> bool:
        """Whether the share has messages of its own: it is large, and one side or both need no buffer to pack it."""
        return self.nbytes >= _ALONE_BYTES and (self.is_source_run or self.is_target_run)

    def between(self, start: int, stop: int) -> Iterator[Share]:
        """Yield the items [start, stop) of the box in row-major order, as shares: a range may need several boxes."""
        if (start, stop) == (0, self.numel):
            yield self
            return
        for box in boxes_of_range(self.sizes, start, stop):
            source = self.source + _flat_index(box.offsets, self.source_strides)
            target = self.target + _flat_index(box.offsets, self.target_strides)
            sizes, steps, target_steps = _joined(box.sizes, self.source_strides, self.target_strides)
            yield Share(self.leaf, self.itemsize, sizes, source, steps, target, target_steps)


def _flat_index(offsets: Shape, strides: Shape, origin: Shape | None = None) -> int:
    """Return the index of the item at ``offsets`` in a memory whose first item is at ``origin`` (default: zeros)."""
    index = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return index if origin is None else index - _flat_index(origin, strides)


def _joined(sizes: Shape, source_strides: Shape, target_strides: Shape) -> tuple[Shape, Shape, Shape]:
    """Merge adjacent dims of a box where the strides of both memories allow it. Returns the new sizes and strides."""
    dims: list[tuple[int, int, int]] = []  # size, stride in the source, stride in the target
    for size, step, target_step in zip(sizes, source_strides, target_strides, strict=True):
        if size == 1:  # its strides are never used
            continue
        if dims and dims[-1][1] == step * size and dims[-1][2] == target_step * size:
            dims[-1] = (dims[-1][0] * size, step, target_step)
        else:
            dims.append((size, step, target_step))
    # A box of one item has no dims left, and gets one of size 1.
    joined, steps, target_steps = zip(*(dims or [(1, 1, 1)]), strict=True)
    return joined, steps, target_steps


def shares_between(
    number: int, itemsize: int, source: Sequence[tuple[Region, int]], target: Region, leaf: Leaf
) -> Iterator[Share]:
    """Yield the shares that a leaf copies from one rank's part of its source to one rank's part of its target.

    Args:
        number: index of the leaf in `TransferPlan.leaves`.
        itemsize: bytes of an item as it is sent.
        source: the regions of the sender's part, each with its offset in the sender's flat memory.
        target: the region of the receiver's part.
    """
    # The usual case, tensors with equal indices cut into flat ranges: one share instead of a share per pair of boxes.
    if leaf.is_identity and len(source) == 1 and source[0][0].box == target.box == leaf.box:
        (region, base), shared = source[0], source[0][0].span.intersect(target.span)
        if shared.numel:  # flat ranges of one box are contiguous on both sides
            starts = shared.start - region.span.start + base, shared.start - target.span.start
            yield Share(number, itemsize, (shared.numel,), starts[0], (1,), starts[1], (1,))
        return
    for wanted, target_start in target.pieces():
        wanted_source = leaf.to_source(wanted)
        if wanted_source is None:
            continue
        for region, base in source:
            for stored, start in region.pieces():
                shared_box = wanted_source.intersect(stored)
                if shared_box is None:
                    continue
                into = leaf.to_target(shared_box)
                assert into is not None  # for type checkers: `shared_box` is inside of the leaf's box
                strides, target_strides = contiguous_strides(stored.sizes), contiguous_strides(wanted.sizes)
                # The source's strides, by dim of the target. A dim that the source lacks has one index, so any stride.
                along_target = tuple(0 if dim < 0 else strides[dim] for dim in leaf.dims)
                sizes, steps, target_steps = _joined(into.sizes, along_target, target_strides)
                first = base + start + _flat_index(shared_box.offsets, strides, stored.offsets)
                target_first = target_start + _flat_index(into.offsets, target_strides, wanted.offsets)
                yield Share(number, itemsize, sizes, first, steps, target_first, target_steps)


class ShareStream:
    """All shares that one rank sends to another, in the order of sending.

    Args:
        shares: the shares, in the same order on both ranks.
    """

    def __init__(self, shares: Iterable[Share]) -> None:
        # Wide items first, so that every item is aligned in its message. Of items of one width, small shares last, so
        # that one message packs many of them; of these, equal sizes together, so that one call copies many of them.
        def order(share: Share) -> tuple[int, bool, Shape]:
            return (
                (-share.itemsize, False, ()) if share.is_sent_alone else (-share.itemsize, True, share.sizes)
            )

        self.shares = sorted(shares, key=order)
        self._stops = list(accumulate(share.nbytes for share in self.shares))

    @property
    def nbytes(self) -> int:
        """Total bytes of all shares."""
        return self._stops[-1] if self._stops else 0

    def between(self, low: int, high: int) -> Iterator[Share]:
        """Yield the bytes [low, high) of the stream, as shares.

        Both edges must be multiples of `ALIGN_BYTES` or the end of the stream, so that no item is cut.
        """
        # The first share that ends after `low`.
        for number in range(bisect_right(self._stops, low), len(self.shares)):
            share = self.shares[number]
            start = self._stops[number] - share.nbytes
            if start >= high:
                return
            part = FlatRange(max(low, start), min(high, self._stops[number])).shift(-start)
            yield from share.between(part.start // share.itemsize, part.stop // share.itemsize)

    def messages(self, message_bytes: int) -> list[tuple[Share, ...]]:
        """Return the shares of each message: at most ``message_bytes``, and no other shares next to a large one."""
        edges = [0]  # bytes of the stream at which a message must end
        for share, stop in zip(self.shares, self._stops, strict=True):
            if share.is_sent_alone:
                edges += [stop - share.nbytes, stop]
        edges.append(self.nbytes)
        return [
            tuple(self.between(start, min(start + message_bytes, high)))
            for low, high in pairwise(edges)
            for start in range(low, high, message_bytes)
        ]


class LocalBox(NamedTuple):
    """A box of items in this rank's memory of one tensor, or of several small tensors at regular distances.

    Attributes:
        leaf: index in `TransferPlan.leaves` of the leaf whose tensor has the first item.
        sizes, strides: sizes of the box, and its strides in items.
        start: index of the first item in the tensor's flat memory.
    """

    leaf: int
    sizes: Shape
    strides: Shape
    start: int


class Batch(NamedTuple):
    """Adjacent shares of a message that one call copies: all of one shape or all 1D, and of the same dtypes.

    Attributes:
        leaf: index in `TransferPlan.leaves` of the first share's leaf; its dtypes and codec are those of all shares.
        nbytes: total bytes of the shares.
        sources, targets: the shares as boxes of this rank's memory, in which it packs and unpacks them. One box has
            several shares if they are at regular distances.
    """

    shares: tuple[Share, ...]
    leaf: int
    nbytes: int
    sources: tuple[LocalBox, ...]
    targets: tuple[LocalBox, ...]


class Staged(NamedTuple):
    """Where a rank has copies of its small tensors: index of the first item in a buffer, by tensor number.

    Tensors without an index have memory of their own.
    """

    sources: Mapping[int, int] = {}
    targets: Mapping[int, int] = {}

    def address(self, placed: PlacedLeaf, share: Share, *, is_source: bool) -> int | None:
        """Return the index in the buffer of a share's first item; None if its tensor has memory of its own."""
        if not is_source:
            start = self.targets.get(placed.target)
            return None if start is None else start + share.target
        # Codes and scales are computed, and not read from the buffer.
        start = None if placed.source.codec is not None else self.sources.get(placed.source.number)
        return None if start is None else start + share.source


def batches_of(
    plan: TransferPlan, shares: Iterable[Share], staged: Staged, *, is_sent: bool, is_received: bool
) -> tuple[Batch, ...]:
    """Divide the shares of a message into batches, in their order.

    Args:
        is_sent, is_received: whether this rank packs the shares, and whether it unpacks them.
    """

    def kind(share: Share) -> tuple[object, ...]:
        placed = plan.leaves[share.leaf]
        source, target = placed.source, plan.target.entries[placed.target]
        # A codec computes the codes of each share alone. So does a share of its own, which may be transposed.
        is_alone = (source.codec is not None and not source.is_scales) or share.is_sent_alone
        sizes = None if len(share.sizes) == 1 else share.sizes
        return (share if is_alone else sizes, source.is_scales, source.dtype, placed.wire_dtype, target.dtype)

    batches = []
    sides = [is_source for is_source, is_used in ((True, is_sent), (False, is_received)) if is_used]
    for _, group in groupby(shares, kind):
        for steps, run in _runs(plan, list(group), staged, sides):
            boxes = {
                is_source: (
                    (_box(run, is_source, steps[is_source]),)
                    if is_source in steps
                    else tuple(_box([share], is_source) for share in run)
                )
                for is_source in sides
            }
            nbytes = sum(share.nbytes for share in run)
            batches.append(Batch(tuple(run), run[0].leaf, nbytes, boxes.get(True, ()), boxes.get(False, ())))
    return tuple(batches)


def _runs(
    plan: TransferPlan, shares: list[Share], staged: Staged, sides: Sequence[bool]
) -> Iterator[tuple[dict[bool, int], list[Share]]]:
    """Cut shares into runs at regular distances, and the shares between such runs.

    Args:
        sides: True for the source's memory, False for the target's.

    Yields:
        The distance between two shares of a run in each of these memories, and the shares of the run; no distances for
        shares that are no run.
    """
    places = [
        [staged.address(plan.leaves[share.leaf], share, is_source=is_source) for is_source in sides]
        for share in shares
    ]

    def steps_after(number: int) -> dict[bool, int] | None:
        """Return the distances from a share to the next one; None if both cannot be in one box."""
        if number + 1 == len(shares):
            return None
        share, other = shares[number], shares[number + 1]
        alike = (share.sizes, share.source_strides, share.target_strides)
        if alike != (other.sizes, other.source_strides, other.target_strides):
            return None
        steps = {}
        for is_source, here, there in zip(sides, places[number], places[number + 1], strict=True):
            if here is None or there is None or there <= here:
                return None
            steps[is_source] = there - here
        return steps

    between: list[Share] = []
    number = 0
    while number < len(shares):
        steps, stop = steps_after(number), number + 1
        while steps is not None and steps_after(stop - 1) == steps:
            stop += 1
        if steps is not None and stop - number >= _MIN_RUN:
            if between:
                yield {}, between
                between = []
            yield steps, shares[number:stop]
        else:
            stop = number + 1  # the next share may begin a longer run
            between.append(shares[number])
        number = stop
    if between:
        yield {}, between


def _box(run: Sequence[Share], is_source: bool, step: int = 0) -> LocalBox:
    """Return the box of one share, or of shares of one shape whose first items are ``step`` items apart."""
    first = run[0]
    start, strides = (
        (first.source, first.source_strides) if is_source else (first.target, first.target_strides)
    )
    if len(run) == 1:
        return LocalBox(first.leaf, first.sizes, strides, start)
    return LocalBox(first.leaf, (len(run), *first.sizes), (step, *strides), start)


class Message(NamedTuple):
    """One message between this rank and another rank.

    Attributes:
        peer: the other rank.
        is_sent: whether this rank is the sender.
        number: index of the message among all messages from this sender to this receiver.
        shares: the shares whose bytes the message contains, in order.
        batches: the same shares, as they are copied to or from a buffer.
        nbytes: total bytes of the shares.
        is_in_place: whether this rank stores the bytes exactly as they are sent, so that it needs no buffer.
    """

    peer: int
    is_sent: bool
    number: int
    shares: tuple[Share, ...]
    batches: tuple[Batch, ...]
    nbytes: int
    is_in_place: bool


_NOT_STAGED = Staged()


class RankTransfers:
    """The messages and local copies of one rank, derived from a plan.

    Args:
        rank: the rank's number in the plan's descriptions.
        staged: the small tensors that this rank copies into a buffer. Other ranks need not know them.
    """

    def __init__(self, plan: TransferPlan, rank: int, staged: Staged = _NOT_STAGED) -> None:
        self.plan = plan
        self.rank = rank
        self._staged = staged
        self._target_regions: dict[tuple[int, Shape], Region] = {}  # the cache of `_target_region`

    @cached_property
    def sends(self) -> dict[int, ShareStream]:
        """The stream of shares that this rank sends, by receiver."""
        return self._streams(is_sent=True)

    @cached_property
    def receives(self) -> dict[int, ShareStream]:
        """The stream of shares that this rank receives, by sender."""
        return self._streams(is_sent=False)

    @cached_property
    def kept(self) -> list[Share]:
        """The shares that this rank copies within its own memory."""
        wanted = (
            (ranks, shares) for (ranks, receiver), shares in self._wanted.items() if receiver == self.rank
        )
        return [share for ranks, shares in wanted if self.rank in ranks for share in shares]

    def kept_batches(self) -> list[tuple[Batch, ...]]:
        """Return the shares that this rank copies within its own memory, in chunks that fit a CPU cache."""
        chunks = ShareStream(self.kept).messages(min(_CACHED_BYTES, self.plan.message_bytes))
        return [batches_of(self.plan, each, self._staged, is_sent=True, is_received=True) for each in chunks]

    def messages(self) -> list[Message]:
        """Return this rank's messages, in the order in which this rank starts them: by turn, number and sender.

        This is one order for the messages of all ranks, which prevents a deadlock (see the top of this file).
        """
        plan = self.plan
        sources = {rank: number for number, rank in enumerate(plan.source.all_ranks)}
        targets = {rank: number for number, rank in enumerate(plan.target.all_ranks)}
        num_turns = max(len(sources), len(targets))
        ordered: list[tuple[tuple[int, int, int], Message]] = []
        for is_sent, streams in ((True, self.sends), (False, self.receives)):
            for peer, stream in streams.items():
                sender, receiver = (self.rank, peer) if is_sent else (peer, self.rank)
                # In a turn, each sender has one receiver, and each receiver one sender.
                turn = (targets[receiver] - sources[sender]) % num_turns
                for number, shares in enumerate(stream.messages(plan.message_bytes)):
                    nbytes = sum(share.nbytes for share in shares)
                    is_in_place = _is_in_place(plan, shares, is_sent)
                    sides = {"is_sent": is_sent, "is_received": not is_sent}
                    batches = () if is_in_place else batches_of(plan, shares, self._staged, **sides)
                    message = Message(peer, is_sent, number, shares, batches, nbytes, is_in_place)
                    ordered.append(((turn, number, sources[sender]), message))
        ordered.sort(key=lambda item: item[0])  # keys are unique: turn and sender determine the receiver
        return [message for _, message in ordered]

    def _streams(self, *, is_sent: bool) -> dict[int, ShareStream]:
        """Return the streams to all receivers, or from all senders, by the other rank, ascending."""
        shares: dict[int, list[Share]] = {}
        # Sorted, so that sender and receiver add shares to their stream in the same order.
        for (ranks, receiver), wanted in sorted(self._wanted.items(), key=lambda item: item[0]):
            if is_sent == (receiver == self.rank) or receiver in ranks:
                continue  # the other direction, or copied within the receiver's own memory
            for sender in (self.rank,) if is_sent else ranks:
                peer = receiver if is_sent else sender
                shares.setdefault(peer, []).extend(self._part(ranks, sender, receiver, wanted))
        return {rank: ShareStream(shares[rank]) for rank in sorted(shares) if shares[rank]}

    def _part(self, ranks: Ranks, sender: int, receiver: int, shares: list[Share]) -> Iterable[Share]:
        """Return the part that ``sender`` sends of the ``shares`` that ``receiver`` takes from the set ``ranks``."""
        if len(ranks) == 1:  # the only sender
            return shares
        low, high = self.plan.byte_range(ranks, sender, receiver)
        return ShareStream(shares).between(low, high) if low < high else ()

    @cached_property
    def _wanted(self) -> dict[tuple[Ranks, int], list[Share]]:
        """All shares that this rank may send, receive or copy locally, by (set of senders, receiver).

        Shares are in the order of leaves. A rank stores at most one part of each tensor, so a receiver takes at most
        one part of a leaf from a set. Therefore the receiver and all ranks of the set get the same order of shares.
        """
        plan, rank = self.plan, self.rank
        wanted: dict[tuple[Ranks, int], list[Share]] = {}
        for number, placed in enumerate(plan.leaves):
            source, leaf, receivers = placed.source, placed.leaf, plan.target.holders_of(placed.target)
            own, filled = source.holders.position(rank), receivers.position(rank)
            # Pairs of parts that may share items: coordinates of the source's part, and of the target's part.
            parts: set[tuple[Shape, Shape]] = set()
            if own is not None:
                for region, _ in source.regions(own[0]):
                    for box in filter(None, (leaf.to_target(piece) for piece, _ in region.pieces())):
                        whole = Region(box, FlatRange(0, box.numel))
                        parts.update((own[0], at) for at in plan.target.touching(placed.target, whole))
            if filled is not None:
                pieces = self._target_region(placed.target, filled[0]).pieces()
                for box in filter(None, (leaf.to_source(piece) for piece, _ in pieces)):
                    parts.update((at, filled[0]) for at in source.touching(box))
            for source_at, target_at in sorted(parts):  # the same order on all ranks
                ranks = tuple(source.holders.ranks_at(source_at))
                takers = [
                    taker
                    for taker in receivers.ranks_at(target_at)
                    if taker == rank or (rank in ranks and taker not in ranks)
                ]
                if takers:
                    stored, target = source.regions(source_at), self._target_region(placed.target, target_at)
                    shares = list(shares_between(number, placed.itemsize, stored, target, leaf))
                    for taker in takers if shares else ():  # `touching` also gives parts that share no items
                        wanted.setdefault((ranks, taker), []).extend(shares)
        return wanted

    def _target_region(self, number: int, coordinates: Shape) -> Region:
        """Return the region of target tensor ``number`` at ``coordinates``; cached, since all its leaves need it."""
        key = (number, coordinates)
        if key not in self._target_regions:
            self._target_regions[key] = self.plan.target.region(number, coordinates)
        return self._target_regions[key]


def _is_in_place(plan: TransferPlan, shares: Sequence[Share], is_sent: bool) -> bool:
    """Return whether one tensor of this rank stores the shares contiguously, in the dtype in which they are sent."""
    placed = plan.leaves[shares[0].leaf]
    # A cast or a codec computes new bytes, which need a buffer.
    if placed.narrowed or placed.source.codec is not None if is_sent else placed.widened:
        return False
    stop: int | None = None
    for share in shares:
        start = share.source if is_sent else share.target
        is_run = share.is_source_run if is_sent else share.is_target_run
        if not is_run or share.leaf != shares[0].leaf or start != (start if stop is None else stop):
            return False
        stop = start + share.numel
    return True
