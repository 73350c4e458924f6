"""The copies that one rank sends, receives and keeps, and the order of its messages. Communicates nothing.

A `LeafCopy` is a `Copy` with its leaf: from the flat memory of the sender's piece of a source tensor to the flat memory
of the receiver's piece of a target tensor. `OrderedCopies` are all copies that a rank of the source sends over one
route, whose ranks store equal pieces. Wide items come first, so that every item is aligned wherever a message begins.
The sender and all ranks of the route derive equal copies in one order, because all evaluate one plan.

All messages of all ranks have one order, which prevents a deadlock. Messages are ordered by *round*, then by their
number in the stream. In round t, source number i sends to target number (i + t) modulo the number of rounds, which is
the larger of the numbers of sources and targets. So each sender has one receiver per round, and each receiver one
sender. Every rank starts its own messages in this order, a few at a time. So of all messages that have not arrived, the
first one in this order has been started by its sender and by its receiver, and will arrive.

A *relayed* message is received, and sent on along the route, at one place of this order: its hops are ordered by the
route. Sending on waits until the message has arrived. Meanwhile the next messages should arrive, so a rank starts to
receive a few later messages before it sends one on (`_MAX_AHEAD`). These do not wait for buffers of later messages than
the one that is sent on, because there are more buffers than messages ahead. So of all hops that have not arrived, the
first one has been started by both ranks, as before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from vescale_fsdp.layout.geometry import boxes_of_range, contiguous_strides
from vescale_fsdp.layout.region import Copy, Region, overlaps
from vescale_fsdp.transfer.demand import Ranks
from vescale_fsdp.transfer.links import Leaf, PlacedLeaf
from vescale_fsdp.transfer.plan import IN_FLIGHT, TransferPlan

_ALONE_BYTES = 256 << 10  # 256 KiB: copying more than this costs more than another message
_CACHED_BYTES = 1 << 20  # 1 MiB stays in a CPU cache from one copy to the next
_MAX_AHEAD = IN_FLIGHT - 1  # messages that a rank starts to receive before it sends an earlier one on
_MIN_RUN = 4  # fewer copies than this are made as fast one by one as by one copy, whose planning takes longer

Shape = tuple[int, ...]
LeafCopy = tuple[PlacedLeaf, Copy]  # a leaf, and a copy of items of the leaf


def nbytes_of(copies: Iterable[LeafCopy]) -> int:
    """Return the bytes of all copies as they are sent."""
    return sum(copy.numel * placed.itemsize for placed, copy in copies)


def _is_sent_alone(placed: PlacedLeaf, copy: Copy) -> bool:
    """Return whether a copy has messages of its own: it is large, and one rank or both need no buffer for it."""
    if copy.numel * placed.itemsize < _ALONE_BYTES:
        return False
    return contiguous_strides(copy.sizes) in (copy.source_strides, copy.target_strides)


def _between(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """Yield copies of the items [start, stop) of a copy, counted in the row-major order of its box."""
    if (start, stop) == (0, copy.numel):
        yield copy
        return
    for box in boxes_of_range(copy.sizes, start, stop):
        source = copy.source + _flat_index(box.offsets, copy.source_strides)
        target = copy.target + _flat_index(box.offsets, copy.target_strides)
        yield Copy.of(box.sizes, source, copy.source_strides, target, copy.target_strides)


def _flat_index(offsets: Shape, strides: Shape, origin: Shape | None = None) -> int:
    """Return the index of the item at ``offsets`` in a memory whose first item is at ``origin`` (default: zeros)."""
    index = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return index if origin is None else index - _flat_index(origin, strides)


def copies_between(source: Sequence[tuple[Region, int]], target: Region, leaf: Leaf) -> Iterator[Copy]:
    """Yield the copies of a leaf from one rank's piece of its source to one rank's piece of its target.

    Args:
        source: the regions of the sender's piece, each with its offset in the sender's flat memory.
        target: the region of the receiver's piece.
    """
    # The usual case, tensors with equal indices cut into flat ranges: one copy instead of a copy per pair of boxes.
    if leaf.is_identity and len(source) == 1 and source[0][0].box == target.box == leaf.box:
        region, base = source[0]
        yield from (copy.shift(base) for copy in overlaps(region, target))
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
                first = base + start + _flat_index(shared_box.offsets, strides, stored.offsets)
                target_first = target_start + _flat_index(into.offsets, target_strides, wanted.offsets)
                yield Copy.of(into.sizes, first, along_target, target_first, target_strides)


class OrderedCopies:
    """The plan of what one rank sends over a route: all copies, in the order of sending.

    Args:
        copies: the copies, in one order on both ranks.
    """

    def __init__(self, copies: Iterable[LeafCopy]) -> None:
        # Wide items first, so that every item is aligned in its message. Of items of one width, small copies last, so
        # that one message packs many of them; of these, equal sizes together, so that one call makes many of them.
        def order(item: LeafCopy) -> tuple[int, bool, Shape]:
            placed, copy = item
            is_alone = _is_sent_alone(placed, copy)
            return -placed.itemsize, not is_alone, () if is_alone else copy.sizes

        self.copies = sorted(copies, key=order)
        self._stops = list(accumulate(copy.numel * placed.itemsize for placed, copy in self.copies))

    @property
    def nbytes(self) -> int:
        """Total bytes of all copies."""
        return self._stops[-1] if self._stops else 0

    def between(self, low: int, high: int) -> Iterator[LeafCopy]:
        """Yield the bytes [low, high) of the stream, as copies.

        Both edges must be multiples of `ALIGN_BYTES` or the end of the stream, so that no item is cut.
        """
        # The first copy that ends after `low`.
        for number in range(bisect_right(self._stops, low), len(self.copies)):
            placed, copy = self.copies[number]
            start = self._stops[number - 1] if number else 0
            if start >= high:
                return
            first, stop = max(low, start) - start, min(high, self._stops[number]) - start
            for part in _between(copy, first // placed.itemsize, stop // placed.itemsize):
                yield placed, part

    def messages(self, message_bytes: int, *, is_coded: bool = False) -> list[tuple[LeafCopy, ...]]:
        """Return the copies of each message: at most ``message_bytes``.

        Args:
            is_coded: whether messages are encoded. Else a large copy has messages of its own, which may need no buffer.
        """
        edges = [0]  # bytes of the stream at which a message must end
        for item, (start, stop) in zip(self.copies, pairwise((0, *self._stops)), strict=True):
            if not is_coded and _is_sent_alone(*item):
                edges += [start, stop]
        edges.append(self.nbytes)
        return [
            tuple(self.between(start, min(start + message_bytes, high)))
            for low, high in pairwise(edges)
            for start in range(low, high, message_bytes)
        ]


class Batch(NamedTuple):
    """A job: adjacent copies of a message that one call makes, all of one shape or all 1D, and all of one dtype.

    Attributes:
        sent: the copies, as they are sent.
        copies: the copies that this rank makes. One copy stands for several in `sent` that are at regular distances in
            this rank's memory. Such a copy has one dim more, the leaf of the first copy, and stride 0 on a side that is
            not this rank's memory.
        nbytes: total bytes of the copies.
    """

    sent: tuple[LeafCopy, ...]
    copies: tuple[LeafCopy, ...]
    nbytes: int


class Message(NamedTuple):
    """A turn: one message between this rank and a peer, with the jobs that pack or unpack the message.

    Attributes:
        is_sent: whether this rank is the sender.
        number: index of the message among all messages from this sender to this receiver.
        is_relayed: whether this rank receives the message and sends it on, as two messages. All messages that it sends
            on have the order in which it receives them.
        num_before: number of ranks of the route that have the message before the receiver.
        stream: the stream of the message (`RankTransfers.streams`).
        copies: the copies whose bytes the message contains, in order.
        batches: the jobs that copy to or from a buffer; empty for a message in place.
        nbytes: total bytes of the copies.
        in_place: the message as one run, which needs no buffer, if this rank stores the bytes exactly as they are sent.
    """

    peer: int
    is_sent: bool
    number: int
    is_relayed: bool
    num_before: int
    stream: tuple[int, Ranks]
    copies: tuple[LeafCopy, ...]
    batches: tuple[Batch, ...]
    nbytes: int
    in_place: LeafCopy | None


class RankTransfers:
    """The messages and local copies of one rank, derived from a plan.

    Args:
        rank: the rank's number in the plan's descriptions.
        staged: where this rank has copies of its small source tensors, and of its small target tensors: the index of a
            tensor's first item in a buffer, by tensor number. Tensors without an index have memory of their own. Other
            ranks need not know the indices.
    """

    def __init__(
        self, plan: TransferPlan, rank: int, staged: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})
    ) -> None:
        self.plan = plan
        self.rank = rank
        self._staged_sources, self._staged_targets = staged
        self._target_regions: dict[tuple[int, Shape], Region] = {}  # the cache of `_target_region`

    @cached_property
    def streams(self) -> dict[tuple[int, Ranks], OrderedCopies]:
        """The streams of copies that this rank sends or receives, by (rank of the source, route)."""
        copies: dict[tuple[int, Ranks], list[LeafCopy]] = {}
        # Sorted, so that all ranks add copies to a stream in one order.
        for (ranks, route), wanted in sorted(self._wanted.items(), key=lambda item: item[0]):
            if route[0] in ranks:
                continue  # copied within this rank's memory
            for sender in (self.rank,) if self.rank in ranks else ranks:
                copies.setdefault((sender, route), []).extend(self._part(ranks, sender, route, wanted))
        return {key: OrderedCopies(copies[key]) for key in sorted(copies) if copies[key]}

    @cached_property
    def kept(self) -> list[LeafCopy]:
        """The copies within this rank's own memory."""
        wanted = (copies for (ranks, route), copies in self._wanted.items() if route[0] in ranks)
        return [item for copies in wanted for item in copies]

    def kept_batches(self) -> list[tuple[Batch, ...]]:
        """Return the copies within this rank's own memory, in chunks that fit a CPU cache."""
        chunks = OrderedCopies(self.kept).messages(min(_CACHED_BYTES, self.plan.message_bytes))
        return [self.batches(each, (True, False)) for each in chunks]

    def messages(self, without: Container[int] = ()) -> list[Message]:
        """Return this rank's messages, in the order in which this rank starts them (see the top of this file).

        Args:
            without: ranks of the target that get no messages. The other ranks of their routes do.
        """
        plan = self.plan
        sources = {rank: number for number, rank in enumerate(plan.source.all_ranks)}
        targets = {rank: number for number, rank in enumerate(plan.target.all_ranks)}
        num_rounds = max(len(sources), len(targets))
        keys: list[tuple[int, int, int, Ranks, Ranks, tuple[LeafCopy, ...]]] = []
        for (sender, route), stream in self.streams.items():
            receivers = tuple(rank for rank in route if rank not in without)
            if not receivers or self.rank not in (sender, *receivers):
                continue
            # In a round, each sender has one receiver, and each receiver one sender.
            round_number = (targets[route[0]] - sources[sender]) % num_rounds
            for number, copies in enumerate(stream.messages(plan.message_bytes_on(route))):
                keys.append((round_number, number, sender, route, receivers, copies))
        keys.sort(key=lambda key: key[:4])
        ordered: list[Message] = []
        # Messages to send on, each with the number of messages that this rank receives up to it.
        waiting: deque[tuple[Message, int]] = deque()
        num_received = 0
        num_between: Counter[tuple[int, bool]] = Counter()  # messages by peer and direction

        def append(message: Message) -> None:
            ordered.append(message._replace(number=num_between[message.peer, message.is_sent]))
            num_between[message.peer, message.is_sent] += 1

        def send_on(num_ahead: int) -> None:
            """Append the waiting messages behind which at least ``num_ahead`` messages are received."""
            while waiting and num_received - waiting[0][1] >= num_ahead:
                append(waiting.popleft()[0])

        for _, _, sender, stream_route, route, copies in keys:
            is_sent = sender == self.rank
            at = 0 if is_sent else route.index(self.rank)
            peer = route[0] if is_sent else route[at - 1] if at else sender
            # What is sent on keeps its place among all messages that this rank sends, and among those of one pair: they
            # arrive in the order of sending, and on NCCL a pair sends and receives in one order.
            if is_sent or any(message.peer == peer for message, _ in waiting):
                send_on(0)
            is_relayed = not is_sent and route[-1] != self.rank
            in_place = as_run(copies, is_sent)
            batches = () if in_place is not None else self.batches(copies, (is_sent,))
            nbytes = nbytes_of(copies)
            message = Message(
                peer, is_sent, 0, is_relayed, at, (sender, stream_route), copies, batches, nbytes, in_place
            )
            append(message)
            num_received += not is_sent
            if is_relayed:
                following = message._replace(peer=route[at + 1], is_sent=True, num_before=at + 1)
                waiting.append((following, num_received))
            send_on(_MAX_AHEAD)
        send_on(0)
        return ordered

    def batches(self, copies: Sequence[LeafCopy], sides: Sequence[bool]) -> tuple[Batch, ...]:
        """Divide the copies of a message into batches, in their order.

        Args:
            sides: the sides of the copies that are this rank's memory: True for the source, False for the target.
        """

        def kind(item: LeafCopy) -> tuple[object, ...]:
            placed, copy = item
            source, target = placed.source, self.plan.target.entries[placed.target]
            # A codec computes the codes of each copy alone. A copy with messages of its own may be transposed.
            is_alone = (source.codec is not None and not source.is_scales) or _is_sent_alone(placed, copy)
            sizes = None if len(copy.sizes) == 1 else copy.sizes
            return (
                item if is_alone else sizes,
                source.is_scales,
                source.dtype,
                placed.wire_dtype,
                target.dtype,
            )

        return tuple(
            Batch(tuple(sent), tuple(made), nbytes_of(sent))
            for _, group in groupby(copies, kind)
            for sent, made in self._runs(list(group), sides)
        )

    def _staged_index(self, placed: PlacedLeaf, copy: Copy, is_source: bool) -> int | None:
        """Return the index in the buffer of a copy's first item; None if the tensor has memory of its own."""
        if not is_source:
            start = self._staged_targets.get(placed.target)
            return None if start is None else start + copy.target
        # Codes and scales are computed, and not read from the buffer.
        start = None if placed.source.codec is not None else self._staged_sources.get(placed.source.number)
        return None if start is None else start + copy.source

    def _runs(
        self, copies: list[LeafCopy], sides: Sequence[bool]
    ) -> Iterator[tuple[list[LeafCopy], list[LeafCopy]]]:
        """Cut copies into runs at regular distances, and the copies between such runs.

        Yields:
            The copies of a run, and one copy in place of them; or the copies between two runs, and the same copies.
        """
        indices = [[self._staged_index(*item, is_source) for is_source in sides] for item in copies]

        def steps_after(number: int) -> dict[bool, int] | None:
            """Return the distances from a copy to the next copy, by side; None if no run contains both."""
            if number + 1 == len(copies):
                return None
            copy, after = copies[number][1], copies[number + 1][1]
            boxes = [(each.sizes, each.source_strides, each.target_strides) for each in (copy, after)]
            if boxes[0] != boxes[1]:
                return None
            steps = {True: 0, False: 0}
            for is_source, here, there in zip(sides, indices[number], indices[number + 1], strict=True):
                if here is None or there is None or there <= here:
                    return None
                steps[is_source] = there - here
            return steps

        between: list[LeafCopy] = []
        number = 0
        while number < len(copies):
            steps, stop = steps_after(number), number + 1
            while steps is not None and steps_after(stop - 1) == steps:
                stop += 1
            if steps is not None and stop - number >= _MIN_RUN:
                if between:
                    yield between, between
                    between = []
                placed, (sizes, source, strides, target, target_strides) = copies[number]
                one = Copy(
                    (stop - number, *sizes),
                    source,
                    (steps[True], *strides),
                    target,
                    (steps[False], *target_strides),
                )
                yield copies[number:stop], [(placed, one)]
            else:
                stop = number + 1  # the next copy may begin a longer run
                between.append(copies[number])
            number = stop
        if between:
            yield between, between

    def _part(self, ranks: Ranks, sender: int, route: Ranks, copies: list[LeafCopy]) -> Iterable[LeafCopy]:
        """Return the share that ``sender`` sends of ``copies``, which a route takes from the set ``ranks``."""
        if len(ranks) == 1:  # the only sender
            return copies
        low, high = self.plan.byte_range(ranks, sender, route)
        return OrderedCopies(copies).between(low, high) if low < high else ()

    @cached_property
    def _wanted(self) -> dict[tuple[Ranks, Ranks], list[LeafCopy]]:
        """All copies that this rank may send, receive or make locally, by (set of senders, route).

        The route of local copies is this rank alone, which is in the set. Copies are in the order of leaves. A rank
        stores at most one piece of each tensor, so a route takes at most one piece of a leaf from a set. Therefore the
        ranks of the route and of the set derive one order of copies.
        """
        plan, rank = self.plan, self.rank
        wanted: dict[tuple[Ranks, Ranks], list[LeafCopy]] = {}
        routes_of: dict[
            tuple[Ranks, Ranks], list[Ranks]
        ] = {}  # of this rank, by set and ranks of the target's piece
        for placed in plan.leaves:
            source, leaf, receivers = placed.source, placed.leaf, plan.target.holders_of(placed.target)
            own, filled = source.holders.position(rank), receivers.position(rank)
            # Pairs of pieces that may share items: coordinates of the source's piece, and of the target's piece.
            pairs: set[tuple[Shape, Shape]] = set()
            if own is not None:
                for region, _ in source.regions(own[0]):
                    for box in filter(None, (leaf.to_target(piece) for piece, _ in region.pieces())):
                        whole = Region.of_box(box)
                        pairs.update((own[0], at) for at in plan.target.touching(placed.target, whole))
            if filled is not None:
                pieces = self._target_region(placed.target, filled[0]).pieces()
                for box in filter(None, (leaf.to_source(piece) for piece, _ in pieces)):
                    pairs.update((at, filled[0]) for at in source.touching(box))
            for source_at, target_at in sorted(pairs):  # one order on all ranks
                key = tuple(source.holders.ranks_at(source_at)), tuple(receivers.ranks_at(target_at))
                if key not in routes_of:
                    routes_of[key] = self._own_routes(*key)
                if routes_of[key]:
                    stored, target = source.regions(source_at), self._target_region(placed.target, target_at)
                    copies = [(placed, copy) for copy in copies_between(stored, target, leaf)]
                    # `touching` also gives pieces that share no items
                    for route in routes_of[key] if copies else ():
                        wanted.setdefault((key[0], route), []).extend(copies)
        return wanted

    def _own_routes(self, ranks: Ranks, takers: Ranks) -> list[Ranks]:
        """Return the routes on which this rank sends or receives bytes that ``takers`` need of the set ``ranks``."""
        receivers = tuple(taker for taker in takers if taker not in ranks)
        routes = list(self.plan.demand.routes_of(receivers)) if receivers else []
        if self.rank in ranks:
            return [*routes, (self.rank,)] if self.rank in takers else routes
        return [route for route in routes if self.rank in route]

    def _target_region(self, number: int, coordinates: Shape) -> Region:
        """Return the region of target tensor ``number`` at ``coordinates``; cached, since all its leaves need it."""
        key = (number, coordinates)
        if key not in self._target_regions:
            self._target_regions[key] = self.plan.target.region(number, coordinates)
        return self._target_regions[key]


def as_run(copies: Sequence[LeafCopy], is_sent: bool) -> LeafCopy | None:
    """Return copies as one run, if this rank stores their bytes in one tensor, exactly as they are sent; else None."""
    placed, first = copies[0]
    # A cast or a codec computes new bytes, which need a buffer.
    if placed.narrowed or placed.source.codec is not None if is_sent else placed.widened:
        return None
    stop = first.source if is_sent else first.target
    for each, copy in copies:
        start, strides = (copy.source, copy.source_strides) if is_sent else (copy.target, copy.target_strides)
        if each is not placed or start != stop or strides != contiguous_strides(copy.sizes):
            return None
        stop = start + copy.numel
    return placed, Copy.run(first.source, first.target, sum(copy.numel for _, copy in copies))
