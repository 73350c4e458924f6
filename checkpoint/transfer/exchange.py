"""Messages on their way: sent from where they lie, or packed and unpacked a few at a time, in memory that is kept.

    packing    the next message, into one of several rooms, while those before it are sent
    unpacking  the oldest that arrived, while those behind it arrive
    in place   messages that need no room are all started as their turn comes, and waited for at the end

A rank that fails at either goes on sending and receiving, so that others do not wait for it; what it met is raised
on all ranks when they meet at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.checksums import checksum_of
from vescale_fsdp.checkpoint.transfer.memories import Destination, Origin
from vescale_fsdp.checkpoint.transfer.planning.message_order import Message
from vescale_fsdp.checkpoint.transfer.planning.shares import Share
from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import IN_FLIGHT, TransferPlan
from vescale_fsdp.collectives import Work, receive_async, send_async, wait_for
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError

_CACHED_BYTES = 1 << 20  # 1 MiB


class Rooms:
    """Memory for messages, kept from one transfer to the next.

    Attributes:
        device: on which it lies.
        each_way: how many messages may be under way to others, and as many from them.
    """

    def __init__(self) -> None:
        self._room_bytes = 0
        self.each_way = IN_FLIGHT
        self.device = torch.device("cpu")
        self._free: list[torch.Tensor] = []

    def fit(self, room_bytes: int, device: torch.device, budget_bytes: int) -> None:
        """Have rooms for messages of this size, as many as fit a budget; none may be taken meanwhile."""
        if room_bytes > self._room_bytes or device != self.device:
            self._free.clear()
            self._room_bytes, self.device = room_bytes, device
        # A sender that need not wait for rooms packs on while gloo sends: half the switches between threads.
        self.each_way = max(IN_FLIGHT, budget_bytes // (2 * max(self._room_bytes, 1)))

    def take(self) -> torch.Tensor:
        """1D bytes, for one message."""
        if self._free:
            return self._free.pop()
        return torch.empty(self._room_bytes, dtype=torch.uint8, device=self.device)

    def give(self, room: torch.Tensor) -> None:
        """Hand one back."""
        self._free.append(room)


class _Moving(NamedTuple):
    """A message under way, and the room it lies in; None where it lies in a state."""

    message: Message
    work: Work | None
    data: torch.Tensor
    room: torch.Tensor | None


class Exchange:
    """One transfer of one rank.

    Args:
        group: over which messages go.
        verify: compare what was packed with what was filled.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        origin: Origin,
        destination: Destination,
        *,
        group: dist.ProcessGroup | None,
        rooms: Rooms,
        verify: bool,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._origin = origin
        self._destination = destination
        self._group = group
        self._rooms = rooms
        self._verify = verify
        self._in_rooms: dict[bool, deque[_Moving]] = {True: deque(), False: deque()}  # by direction
        self._in_place: list[_Moving] = []
        self._noted: dict[
            tuple[int, bool], list[tuple[int, int, Sequence[Share]]]
        ] = {}  # by peer and direction
        self.error: BaseException | None = None  # the first that was met

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do something that may fail here alone; nothing more once something has failed, as the values are lost."""
        if self.error is not None:
            return
        try:
            work()
        except BaseException as caught:  # noqa: BLE001  whatever it is, all ranks hear of it at the end
            self.error = caught

    def run(self, messages: Sequence[Message], kept: Sequence[Share]) -> None:
        """Move everything; `error` tells what went wrong."""
        self._attempt(lambda: self._keep(kept))
        for message in messages:
            if message.lies_whole:
                self._in_place.append(self._start(message))
                continue
            queue = self._in_rooms[message.is_sent]
            if len(queue) == self._rooms.each_way:
                self._finish(queue.popleft())
            queue.append(self._start(message))
        for queue in self._in_rooms.values():
            while queue:
                self._finish(queue.popleft())
        # From the last one on: when that has arrived so have those before it, and the thread was woken once.
        while self._in_place:
            self._finish(self._in_place.pop())
        if self._verify:
            self._compare()

    def _start(self, message: Message) -> _Moving:
        room: torch.Tensor | None = None
        if message.lies_whole:
            first = message.shares[0]
            memory = self._origin if message.is_sent else self._destination
            data = memory.run(first, message.nbytes // first.itemsize)
        else:
            room = self._rooms.take()
            data = room[: message.nbytes]
            if message.is_sent:
                self._attempt(lambda: self._pack(message.shares, data))
        if message.is_sent:
            self._note(message, data)
        return _Moving(message, self._begin(data, message.peer, message.is_sent), data, room)

    def _begin(self, data: torch.Tensor, peer: int, is_sent: bool) -> Work | None:
        assert self._group is not None
        try:
            return (send_async if is_sent else receive_async)(data, self._group, peer)
        except RuntimeError as lost:
            self._lost(peer, lost)
            return None

    def _await(self, work: Work | None, peer: int) -> None:
        try:
            wait_for(work)
        except RuntimeError as lost:
            self._lost(peer, lost)

    def _finish(self, moving: _Moving) -> None:
        message = moving.message
        self._await(moving.work, message.peer)
        if not message.is_sent:
            if moving.room is not None:
                self._attempt(lambda: self._unpack(message.shares, moving.data))
            self._note(message, moving.data)
        if moving.room is not None:
            self._rooms.give(moving.room)

    def _lost(self, peer: int, lost: RuntimeError) -> None:
        if self.error is None:
            self.error = CheckpointError(
                "A rank was lost during a transfer.",
                expected=f"rank {peer} to send and receive within the group's time-out",
                got=f"{type(lost).__name__}: {lost}",
                where=f"rank {self._rank}",
                todo="see what that rank says",
            )
            self.error.__cause__ = lost

    def _pack(self, shares: Sequence[Share], data: torch.Tensor) -> None:
        at = 0
        for share in shares:
            self._origin.pack(share, data[at : at + share.nbytes], self._rank)
            at += share.nbytes

    def _unpack(self, shares: Sequence[Share], data: torch.Tensor) -> None:
        at = 0
        for share in shares:
            self._destination.unpack(share, data[at : at + share.nbytes])
            at += share.nbytes

    def _read_back(self, shares: Sequence[Share], data: torch.Tensor) -> None:
        at = 0
        for share in shares:
            self._destination.read_back(share, data[at : at + share.nbytes])
            at += share.nbytes

    def _keep(self, kept: Sequence[Share]) -> None:
        """Bring what this rank holds itself where it belongs, through a room, as much at a time as a cache holds."""
        room = self._rooms.take()
        for share in kept:
            step = min(len(room), _CACHED_BYTES) // share.itemsize
            for start in range(0, share.numel, step):
                shares = tuple(share.between(start, min(start + step, share.numel)))
                data = room[: sum(part.nbytes for part in shares)]
                self._pack(shares, data)
                sent = _hash(data) if self._verify else 0
                self._unpack(shares, data)
                if self._verify:
                    self._read_back(shares, data)
                    if _hash(data) != sent:
                        raise self._differs(self._rank, shares)
        self._rooms.give(room)

    def _note(self, message: Message, data: torch.Tensor) -> None:
        """Remember the checksum of what was sent, or of what is now where it belongs."""
        if not self._verify:
            return
        if not message.is_sent and not message.lies_whole:
            self._attempt(lambda: self._read_back(message.shares, data))
        noted = self._noted.setdefault((message.peer, message.is_sent), [])
        noted.append((message.number, _hash(data), message.shares))

    def _compare(self) -> None:
        """Send checksums after their messages, and compare them where those have gone."""
        moving = []
        for (peer, is_sent), noted in self._noted.items():
            noted.sort(key=lambda item: item[0])  # messages end in another order than they begin
            numbers = torch.tensor(
                [number for _, number, _ in noted], dtype=torch.int64, device=self._rooms.device
            )
            numbers = numbers if is_sent else torch.empty_like(numbers)
            moving.append((peer, is_sent, numbers, self._begin(numbers, peer, is_sent)))
        for peer, is_sent, numbers, work in moving:
            self._await(work, peer)
            if not is_sent:
                self._attempt(lambda: self._prove(peer, numbers.tolist()))  # noqa: B023  called at once

    def _prove(self, peer: int, sent: Sequence[int]) -> None:
        for number, (_, own, shares) in zip(sent, self._noted[peer, False], strict=True):
            if number != own:
                raise self._differs(peer, shares)

    def _differs(self, peer: int, shares: Sequence[Share]) -> CorruptCheckpointError:
        target = self._plan.target.entries
        names = {target[self._plan.leaves[share.leaf].target].name for share in shares}
        return CorruptCheckpointError(
            "What was sent is not what has arrived.",
            expected="equal checksums at both ends",
            got="others",
            where=f"{', '.join(sorted(names)[:8])}: from rank {peer} to rank {self._rank}",
            todo="run the transfer again; if it happens again, test memory and network",
        )


def _hash(data: torch.Tensor) -> int:
    """The checksum of bytes, as torch's integers hold it."""
    number = checksum_of(data.cpu().numpy().data)
    return number - (1 << 64) if number >> 63 else number
