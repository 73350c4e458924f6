"""Messages of one transfer: sent from where the items are stored, or packed and unpacked in memory that is reused.

    packing    the next message, into a buffer of the pool, while those before it are sent
    unpacking  the oldest message that arrived, while those after it arrive
    in place   messages that need no buffer: each is started in its turn, and all are waited for at the end

A rank that fails to pack or unpack continues to send and receive, so that no other rank waits for it. Its error is
raised on all ranks when they meet at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.checksums import checksum_of
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.transfer.memory import Destination, Origin
from vescale_fsdp.checkpoint.transfer.plan import IN_FLIGHT, TransferPlan
from vescale_fsdp.checkpoint.transfer.rank_transfers import Message, Share
from vescale_fsdp.collectives import Work, receive_async, send_async, wait_for
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError

_CACHED_BYTES = 1 << 20  # 1 MiB


class StagingPool:
    """Buffers for messages, kept from one transfer to the next.

    Attributes:
        device: of the buffers.
        each_way: how many messages may be sent at the same time, and as many received.
    """

    def __init__(self) -> None:
        self._buffer_bytes = 0
        self.each_way = IN_FLIGHT
        self.device = torch.device("cpu")
        self._free: list[torch.Tensor] = []

    def fit(self, buffer_bytes: int, device: torch.device, budget_bytes: int) -> None:
        """Provide buffers of this size, as many as fit a budget. No buffer may be in use."""
        if buffer_bytes > self._buffer_bytes or device != self.device:
            self._free.clear()
            self._buffer_bytes, self.device = buffer_bytes, device
        # A sender that need not wait for buffers packs on while gloo sends: half the switches between threads.
        self.each_way = max(IN_FLIGHT, budget_bytes // (2 * max(self._buffer_bytes, 1)))

    def take(self) -> torch.Tensor:
        """1D bytes, for one message."""
        if self._free:
            return self._free.pop()
        return torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self.device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


class _Started(NamedTuple):
    """A message that was started, and its buffer; None if it is sent or received in place."""

    message: Message
    work: Work | None
    data: torch.Tensor
    buffer: torch.Tensor | None


class _Verified(NamedTuple):
    """A message's number in its stream, its checksum on this rank, and its shares."""

    number: int
    checksum: int
    shares: Sequence[Share]


class Exchange:
    """One transfer of one rank.

    Args:
        group: over which messages are sent.
        verify: compare checksums of what was packed and of what was filled.

    Attributes:
        errors: keeps the first error of this rank.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        origin: Origin,
        destination: Destination,
        *,
        group: dist.ProcessGroup | None,
        pool: StagingPool,
        verify: bool,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._origin = origin
        self._destination = destination
        self._group = group
        self._pool = pool
        self._verify = verify
        self._verified: dict[tuple[int, bool], list[_Verified]] = {}  # by peer and direction
        self.errors = FirstError()

    def run(self, messages: Sequence[Message], kept: Sequence[Share]) -> None:
        """Send and receive everything.

        Raises:
            BaseException: the first error of this rank, when no other rank needs it any more.
        """
        self.errors.attempt(lambda: self._copy_kept(kept))
        in_place: list[_Started] = []
        staged: dict[bool, deque[_Started]] = {True: deque(), False: deque()}  # by direction
        for message in messages:
            if message.is_in_place:
                in_place.append(self._start(message))
                continue
            queue = staged[message.is_sent]
            if len(queue) == self._pool.each_way:
                self._finish(queue.popleft())
            queue.append(self._start(message))
        for queue in staged.values():
            while queue:
                self._finish(queue.popleft())
        # The last one first: when it has arrived, so have those before it, and this thread was woken once.
        while in_place:
            self._finish(in_place.pop())
        if self._verify:
            self._compare_checksums()
        self.errors.raise_kept()

    def _start(self, message: Message) -> _Started:
        buffer: torch.Tensor | None = None
        if message.is_in_place:
            first = message.shares[0]
            memory = self._origin if message.is_sent else self._destination
            data = memory.run(first, message.nbytes // first.itemsize)
        else:
            buffer = self._pool.take()
            data = buffer[: message.nbytes]
            if message.is_sent:
                self.errors.attempt(lambda: _each(self._origin.pack, message.shares, data))
        if message.is_sent:
            self._note_checksum(message, data)
        return _Started(message, self._begin(data, message.peer, message.is_sent), data, buffer)

    def _begin(self, data: torch.Tensor, peer: int, is_sent: bool) -> Work | None:
        assert self._group is not None
        try:
            return (send_async if is_sent else receive_async)(data, self._group, peer)
        except RuntimeError as lost:
            self._note_lost(peer, lost)
            return None

    def _await(self, work: Work | None, peer: int) -> None:
        try:
            wait_for(work)
        except RuntimeError as lost:
            self._note_lost(peer, lost)

    def _note_lost(self, peer: int, lost: RuntimeError) -> None:
        if self.errors.error is None:
            self.errors.error = CheckpointError(
                "A rank was lost during a transfer.",
                expected=f"rank {peer} to send and receive within the group's time-out",
                got=f"{type(lost).__name__}: {lost}",
                where=f"rank {self._rank}",
                todo="look at that rank's own error",
            )
            self.errors.error.__cause__ = lost

    def _finish(self, started: _Started) -> None:
        message = started.message
        self._await(started.work, message.peer)
        if not message.is_sent:
            if started.buffer is not None:
                self.errors.attempt(lambda: _each(self._destination.unpack, message.shares, started.data))
            self._note_checksum(message, started.data)
        if started.buffer is not None:
            self._pool.give_back(started.buffer)

    def _copy_kept(self, kept: Sequence[Share]) -> None:
        """Copy what this rank has of both sides, through a buffer, as much at a time as fits a cache."""
        buffer = self._pool.take()
        for share in kept:
            step = min(len(buffer), _CACHED_BYTES) // share.itemsize
            for start in range(0, share.numel, step):
                shares = tuple(share.between(start, min(start + step, share.numel)))
                data = buffer[: sum(part.nbytes for part in shares)]
                _each(self._origin.pack, shares, data)
                checksum = _hash(data) if self._verify else 0
                _each(self._destination.unpack, shares, data)
                if self._verify:
                    _each(self._destination.read_back, shares, data)
                    if _hash(data) != checksum:
                        raise self._differs(self._rank, shares)
        self._pool.give_back(buffer)

    def _note_checksum(self, message: Message, data: torch.Tensor) -> None:
        """Keep the checksum of what was sent, or of what the target now has."""
        if not self._verify:
            return
        if not message.is_sent and not message.is_in_place:
            self.errors.attempt(lambda: _each(self._destination.read_back, message.shares, data))
        verified = self._verified.setdefault((message.peer, message.is_sent), [])
        verified.append(_Verified(message.number, _hash(data), message.shares))

    def _compare_checksums(self) -> None:
        """Send the checksums of this rank's messages to their receivers, and compare those that it receives."""
        started = []
        for (peer, is_sent), verified in self._verified.items():
            verified.sort(key=lambda item: item.number)  # messages end in another order than they begin
            checksums = torch.tensor(
                [item.checksum for item in verified], dtype=torch.int64, device=self._pool.device
            )
            checksums = checksums if is_sent else torch.empty_like(checksums)
            started.append((peer, is_sent, checksums, self._begin(checksums, peer, is_sent)))
        for peer, is_sent, checksums, work in started:
            self._await(work, peer)
            if not is_sent:
                self.errors.attempt(lambda: self._verify_from(peer, checksums.tolist()))  # noqa: B023  called at once

    def _verify_from(self, peer: int, checksums: Sequence[int]) -> None:
        for sent, own in zip(checksums, self._verified[peer, False], strict=True):
            if sent != own.checksum:
                raise self._differs(peer, own.shares)

    def _differs(self, peer: int, shares: Sequence[Share]) -> CorruptCheckpointError:
        target = self._plan.target.entries
        names = {target[self._plan.leaves[share.leaf].target].name for share in shares}
        return CorruptCheckpointError(
            "Data changed between two ranks.",
            expected="equal checksums at both ends",
            got="different ones",
            where=f"{', '.join(sorted(names)[:8])}: from rank {peer} to rank {self._rank}",
            todo="run the transfer again; if it happens again, test memory and network",
        )


def _each(work: Callable[[Share, torch.Tensor], None], shares: Iterable[Share], data: torch.Tensor) -> None:
    """Do some work with each share and its bytes of a message."""
    start = 0
    for share in shares:
        work(share, data[start : start + share.nbytes])
        start += share.nbytes


def _hash(data: torch.Tensor) -> int:
    """The checksum of bytes, as a signed integer of torch."""
    number = checksum_of(data.cpu().numpy().data)
    return number - (1 << 64) if number >> 63 else number
