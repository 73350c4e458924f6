"""Files that go from one rank's storage to another's, over the ranks' own group, in bounded memory.

Each rank sends at most one file and receives at most one at a time. Such a set of moves is a *wave*; the two ranks of
each move go through the file in step, piece by piece: its size, its bytes, and whether all went well. While one piece
travels the sender reads the next and the receiver writes the last. All ranks know all moves, and walk the waves in the
same order.

A file appears under its name when all of it has come. Whoever cannot read or write goes on sending and receiving, so
that nobody waits for it, and says what it met when all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.storage.base import FileReader, FileWriter, Storage

_PIECE_BYTES = 4 << 20  # 4 MiB, twice for each file that a rank sends or receives


FROM_DISK = -1  # in place of a sender, of a file that no rank had


class FileMove(NamedTuple):
    """A file of ``sender``'s storage that is to lie in ``receiver``'s as well."""

    name: str
    sender: int
    receiver: int


def waves_of(moves: Sequence[FileMove]) -> list[list[FileMove]]:
    """Moves in few waves: each in the first one in which both of its ranks are free."""
    waves: list[list[FileMove]] = []
    first_free: dict[tuple[str, int], int] = {}
    for move in moves:
        ends = ("sends", move.sender), ("receives", move.receiver)
        number = max(first_free.get(end, 0) for end in ends)
        waves.extend([] for _ in range(number + 1 - len(waves)))
        waves[number].append(move)
        first_free.update(dict.fromkeys(ends, number + 1))
    return waves


def move_files(coordinator: Coordinator, storage: Storage, moves: Sequence[FileMove], doing: str) -> int:
    """Do all moves; a collective, which ends in one meeting.

    Args:
        storage: this rank's.
        moves: all of them, the same on all ranks.
        doing: for the message of an error.

    Returns:
        Bytes that this rank has received.

    Raises:
        CheckpointError: if another rank could not read or write; one that could not raises what it met.
    """
    num_bytes = 0
    with coordinator.together(doing, "files that had come whole are kept"):
        error: BaseException | None = None
        for wave in waves_of(moves):
            ends: list[_End] = [
                _Receiver(storage, move) for move in wave if move.receiver == coordinator.rank
            ]
            ends += [_Sender(storage, move) for move in wave if move.sender == coordinator.rank]
            _run_in_step(coordinator, ends)
            error = error or next((end.error for end in ends if end.error), None)
            num_bytes += sum(end.num_bytes for end in ends if isinstance(end, _Receiver))
        if error is not None:
            raise error
    return num_bytes


class _End:
    """A rank's part in a move: pieces of the file, read or written in two buffers in turn."""

    def __init__(self, storage: Storage, move: FileMove) -> None:
        self.storage, self.move = storage, move
        self.error: BaseException | None = None
        self.num_bytes = 0

    def attempt(self, work: Callable[[], None]) -> None:
        """Do something, unless this end has failed already; what it raises is kept."""
        if self.error is None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  the other end must not wait: `move_files` raises it
                self.error = error

    def attempt_always(self, work: Callable[[], None]) -> None:
        """The same, also after a failure; the first error is kept."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  as above: there are more waves
            self.error = self.error or error

    @property
    def num_pieces(self) -> int:
        """Of the file, once both ends know its size."""
        return -(-self.num_bytes // _PIECE_BYTES)

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        nbytes = min(_PIECE_BYTES, self.num_bytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), torch.empty(
            nbytes, dtype=torch.uint8, device="cpu"
        )

    def _memory(self, number: int) -> torch.Tensor:
        return self._buffers[number % 2][: self.num_bytes - number * _PIECE_BYTES]

    def size(self) -> torch.Tensor:
        """What travels first."""
        raise NotImplementedError

    def began(self, size: torch.Tensor) -> None:
        """The size has travelled."""

    def piece(self, number: int) -> torch.Tensor:
        """The buffer of a piece, which is not on its way yet."""
        return self._memory(number)

    def travelled(self, number: int) -> None:
        """A piece has."""

    def verdict(self) -> torch.Tensor:
        """What travels last: whether the sender could read all."""
        raise NotImplementedError

    def close(self, verdict: torch.Tensor | None) -> None:
        """Leave nothing open, and nothing half done; without a verdict the move has been broken off."""
        raise NotImplementedError


class _Sender(_End):
    _file: FileReader | None = None

    def _open(self) -> None:
        self._file = self.storage.open_file(self.move.name)
        self.num_bytes = self._file.size_bytes

    def size(self) -> torch.Tensor:
        self.attempt(self._open)
        return torch.tensor([self.num_bytes], dtype=torch.int64, device="cpu")

    def piece(self, number: int) -> torch.Tensor:
        memory = self._memory(number)
        if (file := self._file) is not None:
            self.attempt(lambda: file.read_at(number * _PIECE_BYTES, [memory.numpy()]))
        return memory

    def verdict(self) -> torch.Tensor:
        return torch.tensor([self.error is None], dtype=torch.bool, device="cpu")

    def close(self, verdict: torch.Tensor | None) -> None:
        if self._file is not None:
            self.attempt_always(self._file.close)


class _Receiver(_End):
    _file: FileWriter | None = None

    @property
    def _working_name(self) -> str:
        return self.storage.working_name(self.move.name, f"from{self.move.sender}")

    def _open(self) -> None:
        self.storage.remove(self._working_name)  # of a run that was killed
        self._file = self.storage.create(self._working_name, self.num_bytes)

    def size(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64, device="cpu")

    def began(self, size: torch.Tensor) -> None:
        self.num_bytes = int(size)
        self.attempt(self._open)

    def travelled(self, number: int) -> None:
        if (file := self._file) is not None:
            memory = self._memory(number).numpy()
            self.attempt(lambda: file.write_at(number * _PIECE_BYTES, [memory]))

    def verdict(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.bool, device="cpu")

    def close(self, verdict: torch.Tensor | None) -> None:
        is_whole = verdict is not None and bool(verdict)
        if self._file is not None and is_whole:
            self.attempt(self._file.close)
            self.attempt(lambda: self.storage.rename(self._working_name, self.move.name))
        if self._file is not None and (self.error or not is_whole):
            self.attempt_always(self._file.abort)


def _run_in_step(coordinator: Coordinator, ends: Sequence[_End]) -> None:
    """Do this rank's moves of one wave, the n-th pieces together; while a piece is on its way, the one before it is
    written, and the one behind it read."""
    verdicts: list[torch.Tensor] | None = None
    try:
        sizes = [end.size() for end in ends]
        _begin(coordinator, ends, sizes)()
        for end, size in zip(ends, sizes, strict=True):
            end.began(size)
        finish: Callable[[], None] | None = None
        for number in range(max((end.num_pieces for end in ends), default=0)):
            moving = [end for end in ends if number < end.num_pieces]
            begun = _begin(coordinator, moving, [end.piece(number) for end in moving])
            if finish is not None:
                finish()
            finish = partial(_finish, begun, moving, number)
        if finish is not None:
            finish()
        verdicts = [end.verdict() for end in ends]
        _begin(coordinator, ends, verdicts)()
    finally:
        for number, end in enumerate(ends):
            end.close(None if verdicts is None else verdicts[number])


def _begin(
    coordinator: Coordinator, ends: Sequence[_End], memories: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Let each end's memory travel."""
    pairs = list(zip(ends, memories, strict=True))
    return coordinator.begin_exchange(
        [(memory, end.move.receiver) for end, memory in pairs if isinstance(end, _Sender)],
        [(memory, end.move.sender) for end, memory in pairs if isinstance(end, _Receiver)],
    )


def _finish(begun: Callable[[], None], ends: Sequence[_End], number: int) -> None:
    begun()
    for end in ends:
        end.travelled(number)
