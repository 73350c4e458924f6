"""Transfers that send only the items whose bits have changed since the last committed transfer.

    base       what ranks had when they committed: a sender the bits that it sent (`SentBits`), a receiver its target
    agree      the first collective of a run compares bases; a rank of the target with another base gets everything
    compare    each sender packs its items as for a whole message, and its base through the same boxes
    send       a header on the CPU (parts, bytes, checksum), then the patches of so many parts of a message (`patches`)
    stage      the receiver keeps patches as they arrived until all ranks have committed
    commit     positions go through the plan's boxes: of the target on receivers, of the source's base on senders

A base has the random number of the run that committed it, and not its version: a trainer that has gone back to an older
step reaches a version twice, with different bits.

Patches of one sender over one route are a *stream*. A stream is one turn in the order of all messages, at the place of
its first message (see `rank_transfers`): a rank receives it to its end, and sends it on, before its next turn. Whole
messages follow behind all streams. So of all streams and messages that have not arrived, the first one can always
arrive. If some ranks of a route have another base, patches go along the other ranks, and whole messages along these.

Staged patches take the buffers of the pool, which a run without whole messages does not need. Without ``keep_old``,
patches that do not fit are stored in the target at once, like whole messages. The base of a sender whose patches do not
fit is copied from the source after the commit.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, dtype_named
from vescale_fsdp.checkpoint.storage.checksums import checksum_of
from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Copy, Region
from vescale_fsdp.torch_private import memory_mark
from vescale_fsdp.transfer.agreement import SumAgreement, Sums
from vescale_fsdp.transfer.exchange import Exchange, StagingPool, checksum_of_bytes, each_batch
from vescale_fsdp.transfer.links import PlacedLeaf, links_to_json
from vescale_fsdp.transfer.memory import Destination, Origin, SourceWatch, Stage, in_order
from vescale_fsdp.transfer.packing import gather, scatter
from vescale_fsdp.transfer.patches import (
    ROW_BYTES,
    Change,
    Segment,
    bits_of,
    by_width,
    changes,
    data_bytes,
    decoded,
    encoded,
    indices_in,
    put,
)
from vescale_fsdp.transfer.plan import ALIGN_BYTES, IN_FLIGHT, TransferPlan
from vescale_fsdp.transfer.rank_transfers import (
    Batch,
    LeafCopy,
    Message,
    OrderedCopies,
    RankTransfers,
    as_run,
    nbytes_of,
)

# In collectives of int64 that return maxima: above all numbers of runs, and fits with its negative.
_NONE = 2**62
_COPIED_BYTES = 1 << 20  # 1 MiB: a base is copied from the source in chunks of this size
_HEADER_WORDS = 3  # number of parts, bytes of their patches, checksum

Part = tuple[Segment, ...]  # a message whose patch is encoded at once


class PatchStream(NamedTuple):
    """A turn: all patches of one sender over one route; of a rank to itself, if it stores both sides.

    Attributes:
        peer: the rank that this rank sends to, or receives from.
        is_sent: whether this rank is the sender.
        parts: the messages, of one sequence on all ranks.
        next_rank: the rank to which this rank sends on what it receives.
        num_before: number of ranks of the route that have the patches before this rank.
    """

    peer: int
    is_sent: bool
    parts: tuple[Part, ...]
    next_rank: int | None = None
    num_before: int = 0


class Delta:
    """What a rank remembers of the last committed transfer, so that the next one sends only what has changed.

    ``Transfer(plan, delta=True)`` makes one, as `Transfer.delta`. Pass it on to a new Transfer, such as after a loss:
    ``Transfer(plan, version=old.version, delta=old.delta)``. A rank of the target that was not lost then gets only
    changes. A Delta belongs to one rank's source and target, and to one Transfer at a time.

    Args:
        on_host: keep the sent bits in host memory. Default: on the device of the source.

    Attributes:
        sent_bytes: bytes of the messages that this rank sent in its last run.

    Examples:
        >>> from vescale_fsdp.transfer import Transfer, describe_states, plan_transfer
        >>> trained, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
        >>> transfer = Transfer(plan_transfer(*describe_states(trained, served)), delta=Delta(on_host=True))
        >>> transfer.run(trained, served)
        >>> transfer.delta.base_bytes
        16
    """

    def __init__(self, *, on_host: bool = False) -> None:
        self.on_host = on_host
        self.sent_bytes = 0
        # Of the source and of the target: the number of the committed run, None if there is none; and the digest of
        # the plan's entries that determine the bits.
        self.source_run: int | None = None
        self.target_run: int | None = None
        self.source_key = self.target_key = 0
        self.bits: SentBits | None = None
        self.marks: list[tuple[object, ...]] = []  # of the target's memory, as it was committed
        self.sums: Sums | None = None  # of the target as it was committed, with ``verify``

    @property
    def base_bytes(self) -> int:
        """Memory for the sent bits on this rank: of the tensors that it sends, as wide as they are sent."""
        return 0 if self.bits is None else self.bits.nbytes

    def forget(self) -> None:
        """Send everything in the next run, to all ranks."""
        self.source_run = self.target_run = None


def _overlap(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors share memory: two begin at one address, or one begins inside of a contiguous one.

    Others are taken for interleaved views, such as columns of one matrix.
    """
    last, end = -1, 0  # the last beginning, and the end of all contiguous tensors so far
    for tensor in sorted((each for each in tensors if each.numel()), key=torch.Tensor.data_ptr):
        start = tensor.data_ptr()
        if start == last or start < end:
            return True
        last, end = start, start + tensor.nbytes if tensor.is_contiguous() else end
    return False


class SentBits:
    """The base of a sender: the bits of its source tensors as they were sent, cast or quantized, in the source's order.

    Small tensors are at the distances that they have in the stage, so that one operator reads many of them.

    Args:
        numels: number of this rank's items, by leaf that this rank reads.
        stage: the stage of the source.
        known: the bits of an earlier plan with equal leaves.
    """

    def __init__(self, numels: Mapping[PlacedLeaf, int], stage: Stage, known: SentBits | None) -> None:
        self._starts: dict[PlacedLeaf, tuple[Any, int]] = {}  # key of the memory, index of the first item
        # By key: one of the leaves, the index of its first item in the memory, number of items.
        self._whole: dict[Any, tuple[PlacedLeaf, int, int]] = {}
        for placed, numel in numels.items():
            source = placed.source
            start = None if source.codec is not None else stage.starts.get(source.number)
            if start is None:
                key: Any = source.coded_key or source.number, source.is_scales, placed.wire_dtype
                start = 0
            else:
                key = "stage", source.dtype, placed.wire_dtype
                numel = stage.nbytes // dtype_named(source.dtype).itemsize
            self._starts[placed] = key, start
            self._whole.setdefault(key, (placed, start, numel))
        self._memory: dict[Any, torch.Tensor] = {}  # by key: 1D, of a dtype of bits
        self._flats: dict[PlacedLeaf, torch.Tensor] = {}
        if known is not None and known._memory:
            self._bind(known._memory)

    def _bind(self, memory: dict[Any, torch.Tensor]) -> None:
        self._memory = memory
        self._flats = {placed: memory[key][start:] for placed, (key, start) in self._starts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all bits."""
        return sum(memory.nbytes for memory in self._memory.values())

    def fit(self, device: torch.device) -> bool:
        """Allocate the memory at first use, or on another device. Returns whether the bits are lost."""
        if not self._whole or (self._memory and self.device == device):
            return False
        empty = (
            (key, torch.empty(numel * placed.itemsize, dtype=torch.uint8, device=device), placed)
            for key, (placed, _, numel) in self._whole.items()
        )
        self._bind({key: bits_of(raw.view(dtype_named(placed.wire_dtype))) for key, raw, placed in empty})
        return True

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return next(iter(self._memory.values())).device

    def copy_from(self, origin: Origin, device: torch.device) -> None:
        """Make the bits of a source on a device the base."""
        for key, (placed, first, numel) in self._whole.items():
            bits = bytes_of(self._memory[key])
            step = _COPIED_BYTES // placed.itemsize
            for start in range(0, numel, step):
                copy = Copy.run(start - first, 0, min(step, numel - start))
                batch = Batch((), ((placed, copy),), copy.numel * placed.itemsize)
                out = bits[start * placed.itemsize :][: batch.nbytes]
                sent = out if out.device == device else torch.empty_like(out, device=device)
                origin.pack(batch, sent)
                if sent is not out:
                    out.copy_(sent)

    def read(self, segment: Segment, buffer: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a segment as they were sent, on the device of ``buffer``, which may have them."""
        is_here = self.device == buffer.device
        if segment.run is not None:
            placed, copy = segment.run
            here = bytes_of(copy.source_view(self._flats[placed]))
            return here if is_here else buffer.copy_(here)
        out = buffer if is_here else torch.empty_like(buffer, device="cpu")
        each_batch(self._pack, segment.batches, out)
        return out if is_here else buffer.copy_(out)

    def _pack(self, batch: Batch, out: torch.Tensor) -> None:
        boxes = [copy.source_view(self._flats[placed]) for placed, copy in batch.copies]
        gather(boxes, out.view(boxes[0].dtype))

    def unpack(self, batch: Batch, data: torch.Tensor) -> None:
        """Store the bytes of a whole batch."""
        boxes = [copy.source_view(self._flats[placed]) for placed, copy in batch.copies]
        scatter(data.to(boxes[0].device).view(boxes[0].dtype), boxes)

    def put(self, change: Change) -> None:
        """Store changed items."""
        flat = self._flats[change.copy[0]]
        here = Change(change.copy, change.positions.to(flat.device), change.values.to(flat.device))
        put(here, flat, here.values, is_source=True)


class _Patched(Protocol):
    """Memory that patches change: the target, or the base of a sender."""

    def unpack(self, batch: Batch, data: torch.Tensor) -> None: ...

    def put(self, change: Change) -> None: ...


class Staged:
    """Patches that wait for the commit, in buffers of the pool.

    Args:
        most: the largest number of buffers.
    """

    def __init__(self, pool: StagingPool, most: int) -> None:
        self._pool, self._most = pool, most
        self._buffers: list[torch.Tensor] = []
        self._used_bytes = 0  # of the last buffer
        self.patches: list[tuple[Sequence[Part], torch.Tensor]] = []

    def room(self, nbytes: int) -> torch.Tensor | None:
        """Return memory of this size, 1D uint8; None if the buffers are full."""
        if not self._buffers or self._used_bytes + nbytes > self._buffers[-1].numel():
            if len(self._buffers) == self._most:
                return None
            self._buffers.append(self._pool.take())
            self._used_bytes = 0
        start = self._used_bytes
        self._used_bytes = round_up(start + nbytes, ALIGN_BYTES)
        return self._buffers[-1][start : start + nbytes]

    def apply(self, memory: _Patched) -> None:
        """Store all patches in a target or a base."""
        for parts, data in self.patches:
            for segment, row, piece in segments_in(parts, data):
                _apply(segment, row, piece, memory)

    def clear(self) -> None:
        """Forget all patches, and return the buffers."""
        self.patches.clear()
        while self._buffers:
            self._pool.give_back(self._buffers.pop())


def segments_in(
    parts: Sequence[Part], data: torch.Tensor
) -> Iterator[tuple[Segment, list[int], torch.Tensor]]:
    """Yield the segments of patches that have changes, each with its row of the table and its data."""
    segments = [segment for part in parts for segment in part]
    start = ROW_BYTES * len(segments)
    table = data[:start].cpu().view(torch.int32).view(-1, 4).tolist()
    for segment, row in zip(segments, table, strict=True):
        stop = start + data_bytes(row, segment)
        if stop > start:
            yield segment, row, data[start:stop]
        start = stop


def _apply(segment: Segment, row: list[int], data: torch.Tensor, memory: _Patched) -> None:
    """Store the changes of one segment."""
    positions, values = decoded(data, row, segment)
    if positions is None:
        each_batch(memory.unpack, segment.batches, bytes_of(values))
        return
    stop = first = 0
    for batch in segment.batches:
        start, stop = stop, stop + batch.nbytes // segment.itemsize
        last = int(torch.searchsorted(positions, stop)) if stop < segment.numel else positions.numel()
        if first < last:
            for change in changes(batch.copies, positions[first:last] - start, values[first:last]):
                memory.put(change)
        first = last


@dataclass(kw_only=True)
class DeltaExchange(Exchange):
    """One rank's messages in one run, some of which are patches.

    Args:
        headers: the group for headers, of the CPU; None for a single rank.
        bits: this rank's base.
        own: the patches of this rank to itself, if it has the base.
        staged: for the patches that this rank receives.
        pending: for the patches that this rank sends, which change its base; None if the base is copied anyway.
        bundle_bytes: patches are sent together up to this size.
        is_patched: whether this rank's target gets patches.
        spill: called when patches do not fit in ``staged``: from now on, they are stored in ``destination`` at once.
        note: called with each changed segment, before it is stored.

    Attributes:
        sent_bytes: bytes of this rank's messages.
        is_spilled: whether patches are stored at once.
    """

    headers: dist.ProcessGroup | None
    bits: SentBits
    own: PatchStream | None
    staged: Staged
    pending: Staged | None
    bundle_bytes: int
    is_patched: bool
    spill: Callable[[], None]
    note: Callable[[Segment, list[int], torch.Tensor], None] | None
    sent_bytes: int = 0
    is_spilled: bool = False
    _scratch: torch.Tensor = field(init=False)
    # Headers and patches that are being sent on, each with the next rank. Their memory must stay until they are sent.
    _sent_on: deque[tuple[torch.Tensor, int, Work | None]] = field(default_factory=deque)

    def run(self, messages: Sequence[Message | PatchStream], kept: Sequence[Sequence[Batch]]) -> None:  # type: ignore[override]
        """Send and receive all messages and patches, and copy ``kept`` within this rank's memory."""
        self._scratch = self.pool.take()
        if self.is_patched:
            self.errors.attempt(lambda: self.destination.begin_patches(keep_old=False))
        if self.own is not None:
            self.errors.attempt(self._patch_own)
        super().run(messages, kept)  # type: ignore[arg-type]  # `_take_turn` takes both
        self.pool.give_back(self._scratch)

    def _take_turn(
        self,
        message: Message | PatchStream,
        in_place: list[Any],
        staged: dict[bool, deque[Any]],
        relayed: deque[Any],
    ) -> None:
        if isinstance(message, Message):
            self.sent_bytes += message.nbytes * message.is_sent
            super()._take_turn(message, in_place, staged, relayed)
        elif message.is_sent:
            self._send(message)
        else:
            self._receive(message)

    def close(self) -> int:
        """Return the buffers of patches to the pool. Returns the bytes that this rank has sent."""
        for staged in filter(None, (self.staged, self.pending)):
            staged.clear()
        return self.sent_bytes

    def _patch_own(self) -> None:
        """Stage the changes from the source to the target on this rank."""
        assert self.own is not None
        at = 0
        while at < len(self.own.parts):
            count, data = self._bundle(self.own.parts, at)
            if data.numel():
                room = self._room(data.numel())
                self._stage(self.own.parts[at : at + count], room.copy_(data))
            at += count

    def _send(self, stream: PatchStream) -> None:
        in_flight: deque[tuple[Work | None, ...]] = deque()
        at = 0
        while at < len(stream.parts):
            # After a failure, no part has changes: the receiver needs a header. The last collective reports the error.
            made = [(len(stream.parts) - at, torch.empty(0, dtype=torch.uint8, device=self.pool.device))]
            self.errors.attempt(lambda: made.append(self._bundle(stream.parts, at)))  # noqa: B023  called at once
            count, data = made[-1]
            checksum = checksum_of_bytes(data) if self.verify else 0
            header = torch.tensor([count, data.numel(), checksum], dtype=torch.int64, device="cpu")
            works = [self._begin_patches(header, stream.peer)]
            if data.numel():
                works.append(self._begin_patches(data, stream.peer))
            in_flight.append((*works,))
            at += count
            if len(in_flight) > IN_FLIGHT:
                self._wait(in_flight.popleft(), stream.peer)
        while in_flight:
            self._wait(in_flight.popleft(), stream.peer)

    def _begin_patches(self, data: torch.Tensor, peer: int) -> Work | None:
        """Start to send a header, which is on the CPU and has int64 numbers, or the bytes of patches."""
        self.sent_bytes += data.nbytes
        return self._begin(data, peer, True, self.headers if data.dtype == torch.int64 else None)

    def _wait(self, works: Sequence[Work | None], peer: int) -> bool:
        """Wait for messages. Returns False if they did not arrive."""
        with self._noting_loss_of(peer):
            wait_for(*works)
            return None not in works  # None: not started, because the connection was lost before
        return False  # `_noting_loss_of` has suppressed an error

    def _arrives(self, data: torch.Tensor, stream: PatchStream, group: dist.ProcessGroup | None) -> bool:
        """Receive a header or patches. Returns False if they did not arrive."""
        work = self._begin(data, stream.peer, False, group, stream.num_before)
        with self._noting_loss_of(stream.peer, stream.num_before):
            self._wait_behind(stream.num_before, data, work)
            return work is not None
        return False  # `_noting_loss_of` has suppressed an error

    def _bundle(self, parts: Sequence[Part], first: int) -> tuple[int, torch.Tensor]:
        """Encode parts from number ``first`` on.

        Returns:
            The number of parts, and their patches; no bytes if nothing has changed.
        """
        table: list[list[int]] = []
        pieces: list[torch.Tensor] = []
        number, nbytes = first, 0
        while number < len(parts):
            if number > first and nbytes + _largest(parts[number]) > self.bundle_bytes:
                break
            for segment in parts[number]:
                row, changed = encoded(*self._new_and_old(segment), segment.itemsize)
                table.append(row)
                pieces += changed
                nbytes += ROW_BYTES + sum(piece.numel() for piece in changed)
            number += 1
        count = number - first
        if not pieces:
            return count, torch.empty(0, dtype=torch.uint8, device=self.pool.device)
        rows = torch.tensor(table, dtype=torch.int32, device="cpu").view(torch.uint8).view(-1)
        room = None if self.pending is None else self.pending.room(nbytes)
        if room is None and self.pending is not None:
            self.pending.clear()
            self.pending = None
        if room is None:
            room = torch.empty(nbytes, dtype=torch.uint8, device=self.pool.device)
        data = torch.cat([rows.to(room.device), *pieces], out=room)
        if self.pending is not None:
            self.pending.patches.append((parts[first:number], data))
        return count, data

    def _new_and_old(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of a segment as they are sent now, and as they were sent before."""
        half = self._scratch.numel() // 2 // ALIGN_BYTES * ALIGN_BYTES
        new, old = self._scratch[: segment.nbytes], self._scratch[half : half + segment.nbytes]
        if segment.run is not None:
            new = self.origin.bytes_of(segment.run)
        else:
            each_batch(self.origin.pack, segment.batches, new)
        return new, self.bits.read(segment, old)

    def _receive(self, stream: PatchStream) -> None:
        at, is_connected = 0, True
        while at < len(stream.parts) and is_connected:
            header = torch.empty(_HEADER_WORDS, dtype=torch.int64, device="cpu")
            is_connected = self._arrives(header, stream, self.headers)
            if not is_connected:  # the next rank still waits for the rest: without changes
                header.copy_(torch.tensor([len(stream.parts) - at, 0, 0], dtype=torch.int64, device="cpu"))
            self._send_patches_on(header, stream)
            count, nbytes, checksum = header.tolist()
            if nbytes:
                data = self._room(nbytes)
                is_connected = self._arrives(data, stream, None)
                self._send_patches_on(data, stream)
                if is_connected and self.verify and checksum_of_bytes(data) != checksum:
                    copies = [
                        item
                        for part in stream.parts[at : at + count]
                        for each in part
                        for item in each.copies
                    ]
                    self.errors.attempt(lambda: self._refuse(stream.peer, copies))  # noqa: B023  called at once
                if is_connected:
                    self.errors.attempt(lambda: self._stage(stream.parts[at : at + count], data))  # noqa: B023
            at += count
            if not is_connected and at < len(stream.parts):
                rest = torch.tensor([len(stream.parts) - at, 0, 0], dtype=torch.int64, device="cpu")
                self._send_patches_on(rest, stream)
        self._finish_sending_on()

    def _send_patches_on(self, data: torch.Tensor, stream: PatchStream) -> None:
        """Start to send a header or patches to the next rank, if there is one."""
        if stream.next_rank is not None:
            work = self._begin_patches(data, stream.next_rank)
            self._sent_on.append((data, stream.next_rank, work))

    def _finish_sending_on(self) -> None:
        while self._sent_on:
            _, peer, work = self._sent_on.popleft()
            self._wait([work], peer)

    def _refuse(self, peer: int, copies: Sequence[LeafCopy]) -> None:
        raise self._differs(peer, copies)

    def _room(self, nbytes: int) -> torch.Tensor:
        """Return memory for patches that this rank receives."""
        if self.is_spilled:
            self._finish_sending_on()  # from the memory that is used again
            self.staged.clear()  # the last patches are stored
        room = self.staged.room(nbytes)
        if room is None:
            self.errors.attempt(self._spill)
            self._finish_sending_on()
            self.staged.clear()
            room = self.staged.room(nbytes)
        assert room is not None
        return room

    def _spill(self) -> None:
        self.is_spilled = True
        self.spill()
        self.staged.apply(self.destination)

    def _stage(self, parts: Sequence[Part], data: torch.Tensor) -> None:
        """Keep received patches, or store them if earlier ones did not fit."""
        if self.note is not None:
            for changed in segments_in(parts, data):
                self.note(*changed)
        self.staged.patches.append((parts, data))
        if self.is_spilled:
            self.staged.apply(self.destination)
            self.staged.patches.clear()


def _largest(part: Part) -> int:
    """Return the bytes of a part's patch if all its items have changed."""
    return sum(ROW_BYTES + segment.nbytes for segment in part)


def _segment(
    transfers: RankTransfers, items: tuple[int, tuple[LeafCopy, ...]], sides: tuple[bool, ...]
) -> Segment:
    """Make a segment of copies of one width."""
    itemsize, copies = items
    run = as_run(copies, is_sent=True) if sides[0] else None
    return Segment(itemsize, nbytes_of(copies) // itemsize, copies, transfers.batches(copies, sides), run)


class Agreed(NamedTuple):
    """What ranks have agreed on before they send anything.

    Attributes:
        run: the number of this run, which no other run has.
        patched: the ranks of the target whose base the senders have, and which get patches.
    """

    run: int
    patched: frozenset[int]


class DeltaPlan:
    """This rank's part of a Transfer with patches, planned once.

    Args:
        stages: of the source and of the target.
        delta: what this rank remembers; of an earlier Transfer, unless the tensors have changed.
        agreement: with ``verify``, the sums of the target's tensors.

    Attributes:
        buffer_bytes: least size of the pool's buffers.
    """

    def __init__(
        self,
        plan: TransferPlan,
        transfers: RankTransfers,
        stages: tuple[Stage, Stage],
        regions: Mapping[int, Region],
        delta: Delta,
        agreement: SumAgreement | None,
    ) -> None:
        self._plan, self._rank, self._delta, self._agreement = plan, transfers.rank, delta, agreement
        self._transfers = transfers
        self._bits: SentBits  # set by `_remember`
        self._sums: Sums | None = (
            None  # of the target, with ``verify``: before the run, then with its patches
        )
        self.buffer_bytes = plan.message_bytes
        # Small parts, because several numbers of 8 bytes per item are computed from them.
        self._bundle_bytes = max(plan.message_bytes // 4, 4 * ALIGN_BYTES)
        part_bytes = max(self._bundle_bytes // 2 // ALIGN_BYTES, 1) * ALIGN_BYTES

        def parts_of(copies: OrderedCopies, sides: tuple[bool, ...]) -> tuple[Part, ...]:
            parts = (
                tuple(_segment(transfers, each, sides) for each in by_width(message))
                for message in copies.messages(part_bytes, is_coded=True)
            )
            return tuple(parts)

        # By (sender, route); turns of a run are made of them.
        self._parts = {
            (sender, route): parts_of(copies, (sender == self._rank,))
            for (sender, route), copies in transfers.streams.items()
        }
        kept = OrderedCopies(transfers.kept)
        self._own = PatchStream(self._rank, True, parts_of(kept, (True, False))) if kept.nbytes else None
        sent = {key: copies for key, copies in transfers.streams.items() if key[0] == self._rank}
        # The ranks that get what this rank sends, by stream.
        self._receivers = [route for _, route in sent] + ([(self._rank,)] if kept.nbytes else [])
        self._is_receiver = len(sent) < len(self._parts) or kept.nbytes > 0
        read = [placed for copies in (*sent.values(), kept) for placed, _ in copies.copies]
        self._remember(dict.fromkeys(read), stages[0], regions)

    def _remember(self, read: Iterable[PlacedLeaf], stage: Stage, regions: Mapping[int, Region]) -> None:
        """Take from `Delta` what fits this plan."""
        delta, plan = self._delta, self._plan
        numels, leaves = {}, []
        for placed in read:
            position = placed.source.holders.position(self._rank)
            assert position is not None  # this rank reads the leaf
            own = [region for region, _ in placed.source.regions(position[0])]
            numels[placed] = sum(region.numel for region in own)
            start = stage.starts.get(placed.source.number)
            leaves.append(
                [links_to_json(placed.leaf.source), placed.source.number, placed.wire_dtype, start, str(own)]
            )
        states = [
            sorted({(entry.name, entry.dtype, entry.shape) for entry in state.entries})
            for state in (plan.source, plan.target)
        ]
        # Not how states are distributed: a base stays right if the trainer's ranks change.
        mapping = {"states": states, "links": links_to_json(plan.links), "cast": plan.cast}
        keys = [
            checksum_of(dump_json(each))
            for each in ({"leaves": leaves, "bytes": stage.nbytes}, mapping | {"regions": str(dict(regions))})
        ]
        if delta.source_key != keys[0]:
            delta.source_run = delta.bits = None
        if delta.target_key != keys[1]:
            delta.target_run = None
        delta.source_key, delta.target_key = keys
        delta.bits = self._bits = SentBits(numels, stage, delta.bits)

    @property
    def num_words(self) -> int:
        """Size of `words`, the same on all ranks."""
        return 3 + len(self._plan.target.all_ranks)

    def words(self, targets: Mapping[int, torch.Tensor], device: torch.device) -> list[int]:
        """Return what this rank passes to the first collective, which returns maxima.

        Args:
            targets: this rank's local tensors, by tensor number in the target's description.
            device: the device of the source.
        """
        delta = self._delta
        self._sums = None
        if self._bits.fit(torch.device("cpu") if delta.on_host else device):
            delta.source_run = None
        if delta.target_run is not None and not self._is_as_committed(targets):
            delta.target_run = None
        # The number of the senders' base, and its negative: both are equal only if all senders have one base.
        source = [-_NONE, -_NONE]  # this rank sends nothing
        if self._receivers:
            source = [_NONE, _NONE] if delta.source_run is None else [delta.source_run, -delta.source_run]
        words = [secrets.randbits(62), *source, *[-1] * len(self._plan.target.all_ranks)]
        if self._is_receiver and delta.target_run is not None:
            words[3 + self._plan.target.all_ranks.index(self._rank)] = delta.target_run
        return words

    def _is_as_committed(self, targets: Mapping[int, torch.Tensor]) -> bool:
        """Return whether the target has not changed since the last commit, as far as torch or the sums show it."""
        if self._delta.marks != [memory_mark(local) for local in targets.values()]:
            return False
        if self._agreement is None:
            return True
        sums = self._agreement.stored_sums(lambda number: in_order(targets[number]))
        known, self._sums = self._delta.sums, sums  # changed by the patches
        return known is not None and all(torch.equal(sums[number], known[number]) for number in sums)

    def agreed(self, words: Sequence[int]) -> Agreed:
        """Read the result of the first collective."""
        run, high, low, *bases = words
        ranks = self._plan.target.all_ranks
        patched = {rank for rank, base in zip(ranks, bases, strict=True) if base == high and high == -low}
        return Agreed(run, frozenset(patched))

    def turns(self, messages: Iterable[Message], agreed: Agreed) -> list[Message | PatchStream]:
        """Return the turns of a run: all streams of patches, then the messages to ranks that get everything.

        Args:
            messages: the messages of a run without patches.
        """
        patched, turns = agreed.patched, list[Message | PatchStream]()
        for sender, route in dict.fromkeys(message.stream for message in messages):
            ranks = tuple(rank for rank in route if rank in patched)
            parts = self._parts[sender, route]
            if sender == self._rank and ranks:
                turns.append(PatchStream(ranks[0], True, parts))
            elif self._rank in ranks:
                at = ranks.index(self._rank)
                following = None if ranks[-1] == self._rank else ranks[at + 1]
                turns.append(PatchStream(ranks[at - 1] if at else sender, False, parts, following, at))
        if patched.issuperset(self._plan.target.all_ranks):
            return turns
        # Only a run after a restart has both: its messages are planned again.
        return [*turns, *(self._transfers.messages(without=patched) if patched else messages)]

    def exchange(
        self,
        agreed: Agreed,
        memory: tuple[Origin, Destination],
        groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
        pool: StagingPool,
        *,
        verify: bool,
        spill: Callable[[], None],
    ) -> DeltaExchange:
        """Return the exchange of one run.

        Args:
            groups: for messages, and on the CPU for headers.
            spill: see `DeltaExchange`.
        """
        origin, destination = memory
        is_patched = self._rank in agreed.patched
        # Of all buffers, one is for packing, and as many as one are sent. Whole messages need those of their direction.
        most = pool.each_way - 1 if self._receivers and self._is_receiver else 2 * pool.each_way - 3
        if not is_patched:
            self._sums = None
        return DeltaExchange(
            self._plan,
            self._rank,
            origin,
            destination,
            groups[0],
            pool,
            verify,
            headers=groups[1],
            bits=self._bits,
            own=self._own if is_patched else None,
            staged=Staged(pool, most),
            pending=Staged(pool, most) if agreed.patched.issuperset(chain(*self._receivers)) else None,
            bundle_bytes=self._bundle_bytes,
            is_patched=is_patched,
            spill=spill,
            note=None if self._sums is None else partial(self._note, destination),
        )

    def _note(self, destination: Destination, segment: Segment, row: list[int], data: torch.Tensor) -> None:
        """Add the changes of a segment to the sums of the target."""
        assert self._agreement is not None and self._sums is not None
        positions, values = decoded(data, row, segment)
        if positions is None:
            positions = torch.arange(segment.numel, dtype=torch.int64, device=values.device)
        for change in changes(segment.copies, positions, values):
            placed, copy = change.copy
            indices = indices_in(copy.sizes, copy.target_strides, copy.target, change.positions)
            old = bits_of(destination.flat(placed.target)).take(indices)
            for sign, bits in ((1, destination.stored_bits(change)), (-1, old)):
                added = self._agreement.changed_sums(placed.target, indices, bits)
                self._sums[placed.target] += sign * added

    def sums(self, destination: Destination) -> Sums:
        """Return the sums that the target will have after the commit; with ``verify`` only."""
        assert self._agreement is not None
        if self._sums is None:
            self._sums = self._agreement.stored_sums(destination.flat)
        return self._sums

    def commit(
        self,
        exchange: DeltaExchange,
        agreed: Agreed,
        targets: Mapping[int, torch.Tensor],
        watch: SourceWatch | None,
    ) -> None:
        """Store the patches in the target, and make what was sent the base."""
        delta = self._delta
        delta.source_run = delta.target_run = None  # until both are as committed
        exchange.staged.apply(exchange.destination)
        exchange.destination.commit()
        if self._is_receiver:
            delta.marks = [memory_mark(local) for local in targets.values()]
            # Patches of two names of one memory would mix their sources; in a whole transfer one follows the other.
            delta.sums, delta.target_run = self._sums, None if _overlap(targets.values()) else agreed.run
        if not self._receivers:
            return
        if exchange.pending is not None:
            exchange.pending.apply(self._bits)
        else:
            self._bits.copy_from(exchange.origin, exchange.pool.device)
            if watch is not None and watch.is_written:
                return  # the bits may not be those that were sent, so the next run sends everything
        delta.source_run = agreed.run
