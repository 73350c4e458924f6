"""Exchange of data between ranks, in waves and in bounded memory: one rank reads a part, and other ranks receive it.

    wave 0      0 sends part 0 to 2              2 sends part 8 to 0
    wave 1      0 sends part 1 to 2              2 sends part 9 to 0

A *turn* is a message that one rank reads from storage and sends to its receivers. All ranks plan the same waves, and
each rank processes its own turns in that order. In a wave a rank sends at most one turn and receives a bounded number
of turns. While the turns of one wave are sent, the previous wave's turns are processed and the next wave's are read.

A rank that fails to read or to process a turn continues to send and receive, so that no other rank waits for it. One
byte after the turn's data is 1 if the sender could read the turn; receivers ignore the turn if the byte is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

import torch

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.storage.base import FileReader, FileWriter, Storage

_PIECE_BYTES = 4 << 20  # 4 MiB: most bytes of a file in one message, which bounds the memory for messages
FROM_DISK = -1  # in place of a sending rank: the file was rebuilt from disk


class Turn(Protocol):
    """A message from one rank to one or more ranks."""

    @property
    def sender(self) -> int:
        """The rank that reads and sends the turn."""

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that receive the turn."""


T = TypeVar("T", bound=Turn)


def waves_of(turns: Iterable[T], max_incoming: int) -> list[list[T]]:
    """Assign turns to waves, in order: each to the first wave in which its sender is free and its receivers have room.

    Args:
        max_incoming: most turns that a rank receives in one wave.

    Returns:
        The turns of each wave.
    """
    waves: list[list[T]] = []
    sends_next: dict[int, int] = {}  # the first wave in which a rank is free to send
    # For each rank, the last wave in which it receives, and the number of turns that it receives in that wave.
    receives: dict[int, tuple[int, int]] = {}
    for turn in turns:
        number = sends_next.get(turn.sender, 0)
        for rank in turn.receivers:
            wave, count = receives.get(rank, (0, 0))
            number = max(number, wave + (count == max_incoming))  # the next wave, if the last one is full
        for rank in turn.receivers:
            wave, count = receives.get(rank, (0, 0))
            receives[rank] = (number, count + 1 if number == wave else 1)
        waves.extend([] for _ in range(number + 1 - len(waves)))
        waves[number].append(turn)
        sends_next[turn.sender] = number + 1
    return waves


def exchange(
    coordinator: Coordinator,
    waves: Sequence[Sequence[T]],
    size_of: Callable[[T], int],
    read: Callable[[T, memoryview], bool],
    take: Callable[[T, memoryview], object],
    *,
    threads: int,
) -> int:
    """Read and send this rank's turns, and receive turns of other ranks. A collective.

    Args:
        waves: the turns that this rank sends or receives, in the order that all ranks follow.
        size_of: returns the size of a turn in bytes.
        read: reads a turn into memory and returns whether the read succeeded; must not raise.
        take: processes the bytes of a turn, both of turns that this rank read and of turns that it received; must not
            raise.
        threads: number of turns that are read at the same time, ahead of their wave.

    Returns:
        The number of bytes that this rank has received.
    """
    rank, received = coordinator.rank, 0
    own = iter([turn for wave in waves for turn in wave if turn.sender == rank])
    # One size for all buffers, so that any free buffer fits any turn.
    most_bytes = max((size_of(turn) for wave in waves for turn in wave), default=0)
    free: list[torch.Tensor] = []  # buffers for reuse: the page faults of a new buffer cost as much as a copy

    def memory() -> torch.Tensor:
        try:
            return free.pop()
        except IndexError:  # no `if free` before `pop`: another thread could take the last buffer in between
            # + 1: the byte that tells receivers whether the sender could read the turn.
            return torch.empty(most_bytes + 1, dtype=torch.uint8, device="cpu")

    def bytes_of(turn: T, data: torch.Tensor) -> memoryview:
        return data.numpy().data.cast("B")[: size_of(turn)]

    def filled(turn: T) -> torch.Tensor:
        data = memory()
        data[size_of(turn)] = read(turn, bytes_of(turn, data))
        return data

    def take_all(turns: Iterable[tuple[T, torch.Tensor]]) -> None:
        for turn, data in turns:
            if data[size_of(turn)]:
                take(turn, bytes_of(turn, data))
            free.append(data)  # also the buffer of a turn that its sender could not read

    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
        ahead: deque[Future[torch.Tensor]] = deque(pool.submit(filled, turn) for turn in islice(own, threads))
        before: list[tuple[T, torch.Tensor]] = []  # the turns of the previous wave, which have arrived
        for wave in waves:
            current: list[tuple[T, torch.Tensor]] = []
            outgoing: list[tuple[torch.Tensor, int]] = []
            incoming: list[tuple[torch.Tensor, int]] = []
            for turn in wave:
                nbytes = size_of(turn) + 1  # with the byte that says whether the sender could read the turn
                if turn.sender == rank:
                    data = ahead.popleft().result()
                    # Read one more turn ahead, in place of the turn just taken.
                    ahead.extend(pool.submit(filled, following) for following in islice(own, 1))
                    outgoing += [(data[:nbytes], receiver) for receiver in turn.receivers]
                else:
                    data = memory()
                    incoming.append((data[:nbytes], turn.sender))
                    received += nbytes - 1  # without the byte after the turn's data
                current.append((turn, data))
            finish = coordinator.begin_exchange(outgoing, incoming)
            # Before `finish`, so that the previous wave is processed while this wave is sent.
            take_all(before)
            finish()
            before = current
        take_all(before)
    return received


class FileMove(NamedTuple):
    """A file to copy from the storage of rank ``sender`` to the storage of rank ``receiver``."""

    name: str
    sender: int
    receiver: int

    @property
    def receivers(self) -> tuple[int, ...]:
        """The rank that receives the file, as a tuple."""
        return (self.receiver,)


def move_files(coordinator: Coordinator, storage: Storage, moves: Sequence[FileMove], doing: str) -> int:
    """Copy files between the storages of ranks. A collective.

    A file appears under its name when it has arrived completely. An error in one file does not stop the other files.

    Args:
        storage: this rank's storage.
        moves: all moves, the same on all ranks.
        doing: description of the action, for error messages.

    Returns:
        The number of bytes that this rank has received.

    Raises:
        CheckpointError: if another rank failed to read or write. The failed rank raises its own error.
    """
    rank = coordinator.rank
    with coordinator.together(doing, "completely received files are kept"):
        ends = {move: _End(storage, move, rank) for move in moves if rank in (move.sender, move.receiver)}
        sent = [(number, ends[move].size()) for number, move in enumerate(moves) if move.sender == rank]
        for sizes in coordinator.everyone(sent) if moves else ():
            for number, nbytes in sizes:
                if moves[number] in ends:
                    ends[moves[number]].num_bytes = nbytes
        # Each wave of files becomes waves of pieces. A rank lists only the pieces that it sends or receives: with huge
        # files and thousands of ranks, all ranks together have millions of pieces.
        waves = [
            [_Piece(end, number) for end in own if number < end.num_pieces]
            for wave in waves_of(moves, 1)
            if (own := [ends[move] for move in wave if move in ends])
            for number in range(max(end.num_pieces for end in own))
        ]
        try:
            # One thread, because `_End` opens its file without a lock.
            received = exchange(coordinator, waves, _Piece.size, _Piece.read, _Piece.take, threads=1)
        finally:
            for end in ends.values():
                end.close()
        for end in ends.values():
            end.kept.raise_kept()
    return received


class _End:
    """This rank's end of a move: the file that the rank reads as sender, or writes as receiver."""

    def __init__(self, storage: Storage, move: FileMove, rank: int) -> None:
        self._storage, self.move = storage, move
        self.is_receiver = rank == move.receiver
        self.kept = FirstError()
        self.num_bytes = -1  # size of the file; -1 while unknown, and if the sender cannot find the file
        self._num_written = 0
        self._reader: FileReader | None = None
        self._writer: FileWriter | None = None

    def size(self) -> int:
        """Return the file's size in bytes on the sender; -1 if the file is missing, which `kept` records as error."""
        num_bytes = self.kept.attempt(lambda: self._storage.required_info(self.move.name).size_bytes)
        return -1 if num_bytes is None else num_bytes

    @property
    def num_pieces(self) -> int:
        """Number of the file's pieces; 0 if the size is unknown. An empty file has one piece, so that it is created."""
        return 0 if self.num_bytes < 0 else max(1, -(-self.num_bytes // _PIECE_BYTES))

    def read(self, number: int, data: memoryview) -> None:
        """Read piece ``number`` into ``data``."""
        if self._reader is None:
            self._reader = self._storage.open_file(self.move.name)
        self._reader.read_at(number * _PIECE_BYTES, [data])

    def write(self, number: int, data: memoryview) -> None:
        """Write piece ``number``. After the last piece, the file is closed and renamed to its final name."""
        working_name = self._storage.working_name(self.move.name, f"from{self.move.sender}")
        if self._writer is None:
            self._storage.remove(working_name)  # a killed run may have left such a file
            self._writer = self._storage.create(working_name, self.num_bytes)
        self._writer.write_at(number * _PIECE_BYTES, [data])
        self._num_written += 1
        if self._num_written == self.num_pieces:
            self._writer.close()  # before the rename, so that an incomplete file never has the final name
            self._writer = None
            self._storage.rename(working_name, self.move.name)

    def close(self) -> None:
        """Close the file. A file that is incomplete is removed."""
        ends: list[Callable[[], object]] = []
        if self._reader is not None:
            ends.append(self._reader.close)
        if self._writer is not None:
            ends.append(self._writer.abort)
        for end in ends:
            try:
                end()
            except BaseException as error:  # noqa: BLE001  kept: `move_files` raises it after all files are closed
                self.kept.error = self.kept.error or error


class _Piece(NamedTuple):
    """A piece of a file, as a `Turn`."""

    end: _End
    number: int

    @property
    def sender(self) -> int:
        """The rank that sends the file."""
        return self.end.move.sender

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that receive the file."""
        return self.end.move.receivers

    def size(self) -> int:
        """Return the size of the piece in bytes; the last piece of a file may be short."""
        return min(_PIECE_BYTES, self.end.num_bytes - self.number * _PIECE_BYTES)

    def read(self, data: memoryview) -> bool:
        """Read the piece into ``data``; returns whether all reads of this file have succeeded so far."""
        self.end.kept.attempt(lambda: self.end.read(self.number, data))
        return self.end.kept.error is None

    def take(self, data: memoryview) -> None:
        """Write the piece if this rank is the receiver."""
        if self.end.is_receiver:
            self.end.kept.attempt(lambda: self.end.write(self.number, data))
