"""Sends and receives the messages of one transfer, through reused buffers or in place.

All tensor bytes that a transfer sends from device to device go through `Exchange`.

    packed     the items of a message are copied into a buffer of the pool, while earlier messages are sent
    unpacked   a received message is copied out of its buffer, the oldest first, while later messages arrive
    in place   without a buffer: messages are started in order, and the rank waits for all messages in place at the end
    sent on    a message that other ranks take too is sent from where it arrived, its buffer or the target

A rank that fails to pack or unpack, or loses the rank from which it should send a message on, continues to send and
receive, so that no other rank waits for it. The collective that ends the transfer raises the error on all ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.coordinator import UnreachableError
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.storage.checksums import checksum_of
from vescale_fsdp.collectives.slice_exchange import Work, receive_async, send_async, wait_for
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.torch_private import timeout_of
from vescale_fsdp.transfer.memory import Destination, Origin
from vescale_fsdp.transfer.plan import IN_FLIGHT, TransferPlan
from vescale_fsdp.transfer.rank_transfers import Batch, LeafCopy, Message

_LATER = timedelta(seconds=1)  # how much later a rank of a route finds a rank lost than the rank before it
_MAX_LATER = 10  # most such delays, which bounds how late the last rank of a long route is


class StagingPool:
    """Buffers for messages, reused by later transfers.

    Attributes:
        device: the device of the buffers.
        each_way: maximum number of buffers in use in each direction.
    """

    def __init__(self) -> None:
        self._buffer_bytes = 0
        self.each_way = IN_FLIGHT
        self.device = torch.device("cpu")
        self._free: list[torch.Tensor] = []

    def fit(self, buffer_bytes: int, device: torch.device, budget_bytes: int) -> None:
        """Make buffers at least ``buffer_bytes`` large, on ``device``, and set `each_way` as the budget allows.

        No buffer may be in use.
        """
        # Larger buffers, which another transfer has allocated, are reused unchanged.
        if buffer_bytes > self._buffer_bytes or device != self.device:
            self._free.clear()
            self._buffer_bytes, self.device = buffer_bytes, device
        # Half of the budget for each direction. All buffers that fit, not only `IN_FLIGHT`: with a free buffer, a
        # sender packs while gloo sends, which halves the number of thread switches. max(.., 1): no division by zero on
        # a rank that needs no buffer.
        self.each_way = max(IN_FLIGHT, budget_bytes // (2 * max(self._buffer_bytes, 1)))

    def take(self) -> torch.Tensor:
        """Take a free buffer, or allocate one: 1D uint8."""
        if self._free:
            return self._free.pop()
        return torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self.device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


class _Started(NamedTuple):
    """A message that has been started.

    Attributes:
        work: the send or receive in progress; None if the connection was lost before.
        data: the bytes of the message, in the buffer or in a tensor of this rank.
        buffer: the pool's buffer; None for a message in place.
        received: the message that this one sends on.
    """

    message: Message
    work: Work | None
    data: torch.Tensor
    buffer: torch.Tensor | None
    received: Message | None = None


class _Checksum(NamedTuple):
    """This rank's checksum of one message, with the message's `Message.number` and copies."""

    number: int
    value: int
    copies: Sequence[LeafCopy]


@dataclass
class Exchange:
    """One rank's messages in one run of a transfer.

    Args:
        origin, destination: this rank's source and target tensors.
        group: the process group for messages; None for a single rank, which sends no messages.
        verify: compare the sender's and the receiver's checksum of each message.

    Attributes:
        errors: the first error of this rank, kept until all messages have ended.
    """

    plan: TransferPlan
    rank: int
    origin: Origin
    destination: Destination
    group: dist.ProcessGroup | None
    pool: StagingPool
    verify: bool
    errors: FirstError = field(default_factory=FirstError)
    _checksums: dict[tuple[int, bool], list[_Checksum]] = field(default_factory=dict)  # by peer and direction

    def run(self, messages: Sequence[Message], kept: Sequence[Sequence[Batch]]) -> None:
        """Send and receive all messages, and copy ``kept`` within this rank's memory.

        Raises:
            BaseException: the first error of this rank, after all messages have ended: other ranks wait for them.
        """
        # `attempt` keeps an error for later: other ranks wait for this rank's messages.
        self.errors.attempt(lambda: self._copy_kept(kept))
        in_place: list[_Started] = []
        staged: dict[bool, deque[_Started]] = {True: deque(), False: deque()}  # by direction
        relayed: deque[_Started] = deque()  # received, to be sent on in this order
        for message in messages:
            self._take_turn(message, in_place, staged, relayed)
        for queue in staged.values():
            while queue:
                self._finish(queue.popleft())
        # Wait for the last message first: earlier messages have usually arrived by then, so this thread is woken once.
        while in_place:
            self._finish(in_place.pop())
        if self.verify:
            self._compare_checksums()
        self.errors.raise_kept()

    def _take_turn(
        self,
        message: Message,
        in_place: list[_Started],
        staged: dict[bool, deque[_Started]],
        relayed: deque[_Started],
    ) -> None:
        """Start a message, and add it to the messages that have been started."""
        queue = staged[message.is_sent]
        if message.in_place is None:
            in_use = len(queue)
            if not message.is_sent:
                in_use += sum(each.buffer is not None for each in relayed)
            if in_use >= self.pool.each_way:  # bounds the memory of buffers in use
                self._finish(queue.popleft())
        is_sent_on = message.is_sent and message.is_relayed
        started = self._send_on(message, relayed.popleft()) if is_sent_on else self._start(message)
        if message.is_relayed and not message.is_sent:
            relayed.append(started)
        elif message.in_place is not None:
            in_place.append(started)
        else:
            queue.append(started)

    def _start(self, message: Message) -> _Started:
        """Start to send or receive a message. A message to send is packed first, unless the message is in place."""
        buffer: torch.Tensor | None = None
        if message.in_place is not None:
            memory = self.origin if message.is_sent else self.destination
            data = memory.bytes_of(message.in_place)
        else:
            buffer = self.pool.take()
            data = buffer[: message.nbytes]
            if message.is_sent:
                self.errors.attempt(lambda: each_batch(self.origin.pack, message.batches, data))
        if message.is_sent:
            self._note_checksum(message, data)
        work = self._begin(data, message.peer, message.is_sent, num_before=message.num_before)
        return _Started(message, work, data, buffer)

    def _send_on(self, message: Message, arriving: _Started) -> _Started:
        """Wait for a message, start to send its bytes on as they have arrived, and unpack it meanwhile."""
        received, data = arriving.message, arriving.data
        self._wait_for(arriving)
        self._note_checksum(message, data)
        started = _Started(message, self._begin(data, message.peer, True), data, arriving.buffer, received)
        if arriving.buffer is not None:
            self.errors.attempt(lambda: each_batch(self.destination.unpack, received.batches, data))
        return started

    def _begin(
        self,
        data: torch.Tensor,
        peer: int,
        is_sent: bool,
        group: dist.ProcessGroup | None = None,
        num_before: int = 0,
    ) -> Work | None:
        """Start to send or receive ``data``. Returns None if the connection to ``peer`` is lost."""
        group = group or self.group
        assert group is not None
        with self._noting_loss_of(peer, 0 if is_sent else num_before):
            return (send_async if is_sent else receive_async)(data, group, peer)
        return None  # `_noting_loss_of` has suppressed an error

    @contextmanager
    def _noting_loss_of(self, peer: int, num_before: int = 0) -> Iterator[None]:
        """Suppress an error of the connection to ``peer``, and keep the error: other ranks still wait for messages.

        Args:
            num_before: number of ranks of the route that receive the messages of ``peer`` before this rank.
        """
        try:
            yield
        except RuntimeError as lost:  # torch's error for lost connections and time-outs
            if self.errors.error is None:  # later errors are usually consequences of the first
                self.errors.error = UnreachableError(
                    "A rank was lost during a transfer.",
                    rank=peer,
                    expected=f"rank {peer} to send and receive within the group's time-out",
                    got=f"{type(lost).__name__}: {lost}",
                    where=f"rank {self.rank}",
                    todo=f"look at the error of rank {peer}",
                )
                self.errors.error.__cause__ = lost
                if num_before:
                    # gloo closes all connections of a rank whose wait was too long, before the rank can report which
                    # rank is lost. The rank before this one reports it first.
                    time.sleep(_LATER.total_seconds())

    def _wait_for(self, started: _Started) -> None:
        """Wait until a message has been sent or has arrived."""
        message = started.message
        num_before = 0 if message.is_sent else message.num_before
        with self._noting_loss_of(message.peer, num_before):
            self._wait_behind(num_before, started.data, started.work)

    def _wait_behind(self, num_before: int, data: torch.Tensor, *works: Work | None) -> None:
        """Wait for the messages with ``data``, which ``num_before`` ranks of the route receive before this rank."""
        for work in works:
            # All ranks of a route wait if one stops. Those behind it must not be the first to find a rank lost: theirs
            # is another one. On an accelerator, a wait with a limit would block this thread.
            is_limited = num_before and data.device.type == "cpu" and self._timeout is not None
            if is_limited and isinstance(work, dist.Work):
                assert self._timeout is not None  # for type checkers: `is_limited`
                work.wait(self._timeout + min(num_before, _MAX_LATER) * _LATER)
            else:
                wait_for(work)

    @cached_property
    def _timeout(self) -> timedelta | None:
        """How long a rank waits for a message; None if the backend has no limit."""
        return None if self.group is None else timeout_of(self.group)

    def _finish(self, started: _Started) -> None:
        """Wait for a message, unpack it if it was received into a buffer, and return the buffer to the pool."""
        message = started.message
        self._wait_for(started)
        if started.received is not None:
            # Only now, since `_note_checksum` writes to the buffer that was sent.
            self._note_checksum(started.received, started.data)
        elif not message.is_sent:
            if started.buffer is not None:
                self.errors.attempt(
                    lambda: each_batch(self.destination.unpack, message.batches, started.data)
                )
            self._note_checksum(message, started.data)
        if started.buffer is not None:
            self.pool.give_back(started.buffer)

    def _copy_kept(self, kept: Sequence[Sequence[Batch]]) -> None:
        """Make copies from the source to the target on this rank, chunk by chunk through a buffer.

        Raises:
            CorruptCheckpointError: with ``verify``, if the target's bytes differ from the source's.
        """
        buffer = self.pool.take()
        for batches in kept:
            data = buffer[: sum(batch.nbytes for batch in batches)]
            each_batch(self.origin.pack, batches, data)
            checksum = checksum_of_bytes(data) if self.verify else 0
            each_batch(self.destination.unpack, batches, data)
            if self.verify:
                each_batch(self.destination.read_back, batches, data)
                if checksum_of_bytes(data) != checksum:
                    raise self._differs(self.rank, [item for batch in batches for item in batch.sent])
        self.pool.give_back(buffer)

    def _note_checksum(self, message: Message, data: torch.Tensor) -> None:
        """With ``verify``, keep the checksum of a sent message, or of the target's items that a message has filled."""
        if not self.verify:
            return
        if not message.is_sent and message.in_place is None:
            # Read back what `unpack` has stored, so that the checksum covers that copy too.
            self.errors.attempt(lambda: each_batch(self.destination.read_back, message.batches, data))
        noted = self._checksums.setdefault((message.peer, message.is_sent), [])
        noted.append(_Checksum(message.number, checksum_of_bytes(data), message.copies))

    def _compare_checksums(self) -> None:
        """Send the checksums of sent messages to their receivers, and compare those of received messages."""
        started = []

        def order(key: tuple[int, bool]) -> tuple[int, int, int]:
            # One order for all ranks: on NCCL two ranks that both send first would wait for each other.
            peer, is_sent = key
            return min(self.rank, peer), max(self.rank, peer), self.rank if is_sent else peer

        for peer, is_sent in sorted(self._checksums, key=order):
            noted = self._checksums[peer, is_sent]
            # Sender and receiver must use one order. Messages do not end in the order in which they start.
            noted.sort(key=lambda item: item.number)
            sent = torch.tensor([item.value for item in noted], dtype=torch.int64, device=self.pool.device)
            data = sent if is_sent else torch.empty_like(sent)
            started.append((peer, is_sent, data, self._begin(data, peer, is_sent)))
        for peer, is_sent, data, work in started:
            with self._noting_loss_of(peer):
                wait_for(work)
            for value, own in zip(data.tolist(), self._checksums[peer, is_sent], strict=True):
                if value != own.value and self.errors.error is None:
                    self.errors.error = self._differs(peer, own.copies)

    def _differs(self, peer: int, copies: Sequence[LeafCopy]) -> CorruptCheckpointError:
        """Make the error for a message from ``peer`` whose checksums differ; names at most 8 tensors."""
        target = self.plan.target.entries
        names = {target[placed.target].name for placed, _ in copies}
        return CorruptCheckpointError(
            "Data changed between two ranks.",
            expected="equal checksums on both ranks",
            got="different checksums",
            where=f"{', '.join(sorted(names)[:8])}: from rank {peer} to rank {self.rank}",
            todo="run the transfer again; if it happens again, test memory and network",
        )


def each_batch(
    work: Callable[[Batch, torch.Tensor], None], batches: Iterable[Batch], data: torch.Tensor
) -> None:
    """Call ``work`` with each batch and the batch's bytes in ``data``, the bytes of a message."""
    start = 0
    for batch in batches:
        work(batch, data[start : start + batch.nbytes])
        start += batch.nbytes


def checksum_of_bytes(data: torch.Tensor) -> int:
    """Return the checksum of a tensor's bytes."""
    return checksum_of(data.cpu().numpy().data) >> 1  # 63 bits, since it is sent in a tensor of int64
