"""Files that go from one rank's storage to another's, over the ranks' own group, in bounded memory.

Each rank sends at most one file and receives at most one at a time. Such a set of moves is a *wave*; the two ranks of
each move go through the file in step, piece by piece: its size, its bytes, and whether all went well. All ranks know
all moves, and walk the waves in the same order.

A file appears under its name when all of it has come. Whoever cannot read or write goes on sending and receiving, so
that nobody waits for it, and says what it met when all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.storage.base import FileReader, FileWriter, Storage

__all__ = ["FROM_DISK", "FileMove", "move_files", "waves_of"]

_PIECE_BYTES = 8 << 20  # 8 MiB, for each file that a rank sends or receives


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
            try:
                _run_in_step(coordinator, ends)
            finally:
                for end in ends:
                    end.close()
            error = error or next((end.error for end in ends if end.error), None)
            num_bytes += sum(end.num_bytes for end in ends if isinstance(end, _Receiver))
        if error is not None:
            raise error
    return num_bytes


class _End:
    """A rank's part in a move: buffers to send or to fill, one after another, each used until the next is asked for."""

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

    def pieces(self) -> Iterator[torch.Tensor]:
        """The file's buffers."""
        scratch = torch.empty(min(_PIECE_BYTES, self.num_bytes), dtype=torch.uint8)
        for start in range(0, self.num_bytes, _PIECE_BYTES):
            yield from self.piece(start, scratch[: self.num_bytes - start])

    def piece(self, start: int, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """The buffer from byte ``start`` of the file on."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing open, and nothing half done."""
        raise NotImplementedError


class _Sender(_End):
    _file: FileReader | None = None

    def _open(self) -> None:
        self._file = self.storage.open_file(self.move.name)
        self.num_bytes = self._file.size_bytes

    def pieces(self) -> Iterator[torch.Tensor]:
        self.attempt(self._open)
        yield torch.tensor([self.num_bytes])
        yield from super().pieces()
        yield torch.tensor([self.error is None])

    def piece(self, start: int, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        if (file := self._file) is not None:
            self.attempt(lambda: file.read_at(start, [memory.numpy()]))
        yield memory

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Receiver(_End):
    _file: FileWriter | None = None
    _is_whole = False

    @property
    def _working_name(self) -> str:
        return self.storage.working_name(self.move.name, f"from{self.move.sender}")

    def _open(self) -> None:
        self.storage.remove(self._working_name)  # of a run that was killed
        self._file = self.storage.create(self._working_name, self.num_bytes)

    def pieces(self) -> Iterator[torch.Tensor]:
        size, verdict = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
        yield size
        self.num_bytes = int(size)
        self.attempt(self._open)
        yield from super().pieces()
        yield verdict
        self._is_whole = bool(verdict)

    def piece(self, start: int, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        yield memory
        if (file := self._file) is not None:
            self.attempt(lambda: file.write_at(start, [memory.numpy()]))

    def close(self) -> None:
        if self._file is not None and self._is_whole:
            self.attempt(self._file.close)
            self.attempt(lambda: self.storage.rename(self._working_name, self.move.name))
        if self._file is not None and (self.error or not self._is_whole):
            self._file.abort()


def _run_in_step(coordinator: Coordinator, ends: Sequence[_End]) -> None:
    """Send and receive the buffers of a rank's moves of one wave, the n-th ones together."""
    walks = [(end, end.pieces()) for end in ends]
    while walks:
        pieces = [(end, piece, walk) for end, walk in walks if (piece := next(walk, None)) is not None]
        coordinator.exchange(
            [(piece, end.move.receiver) for end, piece, _ in pieces if isinstance(end, _Sender)],
            [(piece, end.move.sender) for end, piece, _ in pieces if isinstance(end, _Receiver)],
        )
        walks = [(end, walk) for end, _, walk in pieces]
