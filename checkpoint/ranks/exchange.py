"""Exchange of tensor bytes between ranks, in bounded memory: one rank reads bytes, and other ranks receive them.

    turns of all ranks, in order     a: 0 -> 1 and 2     b: 1 -> 2     c: 2 -> 0     d: 0 -> 1
    rank 0 lists                     a                                 c             d
    rank 1 lists                     a                   b                           d

A *turn* is a job whose bytes one rank reads and sends, and its receivers take. Each rank lists only its own turns, in
an order that all ranks share, and starts them in this order, a few at a time. No ranks wait for each other in a cycle:
of all turns that are not done, the first one has been started on every rank that lists that turn.

A rank that fails to read or take a turn continues to send and receive messages of the planned sizes, so that no rank
waits for it. One byte after the turn's data is 0 if the sender has failed; receivers ignore the turn then. The error is
kept, and raised at the ranks' next meeting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, zip_longest
from typing import Generic, NamedTuple, TypeVar

import torch

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.storage.base import FileReader, FileWriter, Storage
from vescale_fsdp.layout.extent import Extent

MOST_TURNS = 4  # turns in flight on one rank, unless turns are large: more buffers leave the cache
_MOST_BYTES = 16 << 20  # 16 MiB: bytes in flight on one rank; always at least two turns
_TURN_BYTES = 4 << 20  # 4 MiB: most bytes of a file in one message, which bounds the memory for messages
FROM_DISK = -1  # in place of a sending rank: the file was rebuilt from disk

J = TypeVar("J")


class Turn(NamedTuple, Generic[J]):
    """A job whose bytes one rank reads and sends, and its receivers take.

    Attributes:
        job: says what to read, and where the bytes go.
        sender: the rank that reads the bytes.
        receivers: the ranks that take the bytes. The sender takes its own bytes if it is a receiver too.
        nbytes: number of bytes. A turn without bytes, from a rank to itself, is work between messages.
    """

    job: J
    sender: int
    receivers: tuple[int, ...]
    nbytes: int


class TurnExchange(Generic[J]):
    """This rank's turns, and their buffers.

    The constructor allocates the buffers, because a rank without memory must not fail between turns.

    Args:
        turns: the turns that this rank sends or takes, in the order that all ranks share.
        threads: number of turns that are read ahead, each by a thread. 0: the calling thread reads a turn when it is
            sent.
    """

    def __init__(self, coordinator: Coordinator, turns: Sequence[Turn[J]], *, threads: int) -> None:
        self._coordinator, self.turns, self._threads = coordinator, turns, threads
        # One size for all buffers, so that any free buffer fits any turn.
        most_bytes = max((turn.nbytes for turn in turns), default=0)
        self._most_turns = max(2, min(MOST_TURNS, _MOST_BYTES // max(1, most_bytes)))
        # Reused, because the page faults of a new buffer cost as much as a copy.
        self._free = [
            # + 1: the byte that tells receivers whether the sender could read the turn.
            torch.empty(most_bytes + 1, dtype=torch.uint8, device="cpu")
            for _ in range(min(len(turns), self._most_turns + threads))
        ]

    def run(
        self,
        read: Callable[[Turn[J], memoryview], object],
        take: Callable[[Turn[J], memoryview], object],
        kept_of: Callable[[Turn[J]], FirstError],
    ) -> int:
        """Read and send this rank's turns, and take turns of other ranks. A collective.

        Args:
            read: reads the bytes of a turn into memory, on the sender.
            take: processes the bytes of a turn, on the receivers, in the order of the turns.
            kept_of: returns where errors of a turn are kept. Turns that keep their errors in one place fail together:
                after the first error, later turns are neither read nor taken.

        Returns:
            The number of bytes that this rank has received.
        """
        rank, received = self._coordinator.rank, 0
        own = iter([turn for turn in self.turns if turn.sender == rank])
        in_flight: deque[tuple[Turn[J], torch.Tensor, Callable[[], None]]] = deque()

        def filled(turn: Turn[J]) -> torch.Tensor:
            data, kept = self._free.pop(), kept_of(turn)
            kept.attempt(partial(read, turn, _bytes_of(turn, data)))
            data[turn.nbytes] = kept.error is None
            return data

        def finish_first() -> None:
            turn, data, finish = in_flight.popleft()
            finish()
            if rank in turn.receivers and data[turn.nbytes]:
                # Later turns are sent and received meanwhile.
                kept_of(turn).attempt(partial(take, turn, _bytes_of(turn, data)))
            self._free.append(data)

        # The executor serves only this exchange: turns are sent in order, and must not queue behind the writes of taken
        # turns. With 0 threads the executor is not used.
        with ThreadPoolExecutor(max(1, self._threads), thread_name_prefix="checkpoint-read") as pool:
            ahead = deque(pool.submit(filled, turn) for turn in islice(own, self._threads))
            for turn in self.turns:
                if len(in_flight) == self._most_turns:
                    finish_first()
                outgoing: list[tuple[torch.Tensor, int]] = []
                incoming: list[tuple[torch.Tensor, int]] = []
                nbytes = turn.nbytes + 1  # with the byte that says whether the sender could read the turn
                if turn.sender != rank:
                    data = self._free.pop()
                    incoming.append((data[:nbytes], turn.sender))
                    received += turn.nbytes
                else:
                    data = ahead.popleft().result() if ahead else filled(turn)
                    if self._threads:  # one more turn is read ahead, in place of this one
                        ahead.extend(pool.submit(filled, following) for following in islice(own, 1))
                    outgoing += [(data[:nbytes], receiver) for receiver in turn.receivers if receiver != rank]
                in_flight.append((turn, data, self._coordinator.begin_exchange(outgoing, incoming)))
            while in_flight:
                finish_first()
        return received


def _bytes_of(turn: Turn[J], data: torch.Tensor) -> memoryview:
    """Return the bytes of a turn in its buffer."""
    return data.numpy().data.cast("B")[: turn.nbytes]


class FileMove(NamedTuple):
    """A turn of a whole file: copied from the storage of rank ``sender`` to the storage of rank ``receiver``."""

    name: str
    sender: int
    receiver: int


def waves_of(moves: Sequence[FileMove]) -> list[list[FileMove]]:
    """Assign moves to waves, in order: each to the first wave in which its sender and its receiver are free.

    Returns:
        The moves of each wave. In one wave, a rank sends at most one file, and receives at most one file.
    """
    waves: list[list[FileMove]] = []
    # For each rank, the first wave in which it is free.
    sends, receives = Counter[int](), Counter[int]()
    for move in moves:
        number = max(sends[move.sender], receives[move.receiver])
        waves.extend([] for _ in range(number + 1 - len(waves)))
        waves[number].append(move)
        sends[move.sender] = receives[move.receiver] = number + 1
    return waves


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
        ends = {move: _End(storage, move) for move in moves if rank in (move.sender, move.receiver)}
        sent = [(number, ends[move].size()) for number, move in enumerate(moves) if move.sender == rank]
        for sizes in coordinator.everyone(sent) if moves else ():
            for number, nbytes in sizes:
                if moves[number] in ends:
                    ends[moves[number]].num_bytes = nbytes
        # Files of one wave alternate, so that ranks send and receive at the same time. A rank lists only its own
        # turns: with huge files and thousands of ranks, all ranks together have millions of turns.
        turns = [
            turn
            for wave in waves_of(moves)
            for alternating in zip_longest(*(ends[move].turns() for move in wave if move in ends))
            for turn in alternating
            if turn is not None
        ]

        def end_of(turn: Turn[Extent]) -> _End:
            return ends[FileMove(turn.job.file, turn.sender, *turn.receivers)]

        try:
            # One thread, because `_End` opens its file without a lock.
            received = TurnExchange(coordinator, turns, threads=1).run(
                lambda turn, data: end_of(turn).read(turn.job, data),
                lambda turn, data: end_of(turn).write(turn.job, data),
                lambda turn: end_of(turn).kept,
            )
        finally:
            for end in ends.values():
                end.close()
        for end in ends.values():
            end.kept.raise_kept()
    return received


class _End:
    """This rank's end of a move: the file that the rank reads as sender, or writes as receiver."""

    def __init__(self, storage: Storage, move: FileMove) -> None:
        self._storage, self.move = storage, move
        self.kept = FirstError()
        self.num_bytes = -1  # size of the file; -1 while unknown, and if the sender cannot find the file
        self._written_bytes = 0
        self._reader: FileReader | None = None
        self._writer: FileWriter | None = None

    def size(self) -> int:
        """Return the file's size in bytes on the sender; -1 if the file is missing, which `kept` records as error."""
        num_bytes = self.kept.attempt(lambda: self._storage.required_info(self.move.name).size_bytes)
        return -1 if num_bytes is None else num_bytes

    def turns(self) -> Iterator[Turn[Extent]]:
        """Yield the turns of the file's extents; none if the size is unknown.

        An empty file has one turn, so that it is created.
        """
        if self.num_bytes >= 0:
            whole = Extent(self.move.name, 0, self.num_bytes)
            for extent in whole.split(_TURN_BYTES) if self.num_bytes else (whole,):
                yield Turn(extent, self.move.sender, (self.move.receiver,), extent.nbytes)

    def read(self, extent: Extent, data: memoryview) -> None:
        """Read an extent of the file into ``data``."""
        if self._reader is None:
            self._reader = self._storage.open_file(extent.file)
        self._reader.read_at(extent.offset, [data])

    def write(self, extent: Extent, data: memoryview) -> None:
        """Write an extent. After the last extent, the file is closed and renamed to its final name."""
        working_name = self._storage.working_name(extent.file, f"from{self.move.sender}")
        if self._writer is None:
            self._storage.remove(working_name)  # a killed run may have left such a file
            self._writer = self._storage.create(working_name, self.num_bytes)
        self._writer.write_at(extent.offset, [data])
        self._written_bytes += extent.nbytes
        if self._written_bytes == self.num_bytes:
            self._writer.close()  # before the rename, so that an incomplete file never has the final name
            self._writer = None
            self._storage.rename(working_name, extent.file)

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
