"""Files that go between ranks piece by piece: what arrives, what is done meanwhile, and what an error leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import RankError, run_ranks
from vescale_fsdp.checkpoint.ranks import exchange
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.ranks.exchange import FileMove, Turn, TurnExchange, move_files
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.layout.extent import Extent

PIECE = 1000
SIZES = (0, 1, PIECE, PIECE + 1, 7 * PIECE // 2)


def _bytes_of(rank: int, size: int) -> bytes:
    return bytes((rank + 7 * place) % 251 for place in range(size))


def _move_in_rings(folder: Path) -> tuple[dict[str, bytes], int, list[int]]:
    """Every rank sends its files to the next one; returns a rank's files, bytes, and turns that nothing followed."""
    coordinator = coordinator_for(None)
    rank, world = coordinator.rank, coordinator.world_size
    here = folder / str(rank)
    here.mkdir()
    for size in SIZES:
        (here / f"{size}-{rank}").write_bytes(_bytes_of(rank, size))
    moves = [
        FileMove(f"{size}-{sender}", sender, (sender + 1) % world)
        for size in SIZES
        for sender in range(world)
    ]
    idle: list[int] = []
    begin, write, begun, waited = type(coordinator).begin_exchange, exchange._End.write, [0], [0]

    def begin_noted(self: Coordinator, *sides: Any) -> Callable[[], None]:
        begun[0] += 1
        finish = begin(self, *sides)

        def finish_noted() -> None:
            finish()
            waited[0] += 1

        return finish_noted

    def write_noted(self: Any, extent: Extent, data: memoryview) -> None:
        if begun[0] == waited[0]:  # nothing is in flight while this extent is written
            idle.append(extent.offset // PIECE)
        write(self, extent, data)

    with (
        mock.patch.object(exchange, "_TURN_BYTES", PIECE),
        mock.patch.object(type(coordinator), "begin_exchange", begin_noted),
        mock.patch.object(exchange._End, "write", write_noted),
    ):
        received = move_files(coordinator, LocalStorage(here, durable=False), moves, "moving")
    return {file.name: file.read_bytes() for file in here.iterdir()}, received, idle


def test_files_arrive_whole_and_nobody_idles(tmp_path: Path) -> None:
    """Each rank has its neighbor's files; while a piece is written, later ones are on their way."""
    for rank, (files, received, idle) in enumerate(run_ranks(3, _move_in_rings, tmp_path)):
        owners = (rank, (rank - 1) % 3)
        assert files == {f"{size}-{owner}": _bytes_of(owner, size) for size in SIZES for owner in owners}
        assert received == sum(SIZES)
        assert idle in ([], [3])  # but for the last of all


def _random_turns(world: int, seed: int) -> list[Turn[int]]:
    """Turns of all ranks: of all sizes, to any ranks, the sender included or not, and work without bytes."""
    draw = random.Random(seed)
    turns = []
    for number in range(60):
        sender = draw.randrange(world)
        if draw.random() < 0.2:
            turns.append(Turn(number, sender, (sender,), 0))
        else:
            receivers = tuple(sorted(draw.sample(range(world), draw.randint(1, world))))
            turns.append(Turn(number, sender, receivers, draw.choice((0, 1, 100, 70_000))))
    return turns


def _exchange_all(threads: int, failures: list[tuple[int, str, int] | None]) -> list[Any]:
    """For each failure (rank, end, job): jobs and bytes that this rank took, in order, and the error it kept."""
    coordinator = coordinator_for(None)
    rank, outcomes = coordinator.rank, []
    for seed, failure in enumerate(failures):
        taken: list[tuple[int, bytes]] = []
        kept = FirstError()

        def read(turn: Turn[int], data: memoryview, failure: object = failure) -> None:
            if failure == (rank, "read", turn.job):
                raise MemoryError("planted")
            data[:] = bytes([turn.job]) * len(data)

        def take(
            turn: Turn[int], data: memoryview, failure: object = failure, taken: list[Any] = taken
        ) -> None:
            if failure == (rank, "take", turn.job):
                raise MemoryError("planted")
            taken.append((turn.job, bytes(data)))

        def kept_of(turn: Turn[int], kept: FirstError = kept) -> FirstError:
            return kept

        own = [
            turn
            for turn in _random_turns(coordinator.world_size, seed)
            if rank in (turn.sender, *turn.receivers)
        ]
        with mock.patch.object(exchange, "_MOST_BYTES", 200_000):
            received = TurnExchange(coordinator, own, threads=threads).run(read, take, kept_of)
        assert received == sum(turn.nbytes for turn in own if turn.sender != rank)
        outcomes.append((taken, repr(kept.error)))
    return outcomes


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_turns_reach_their_receivers_in_order_and_nobody_waits_for_a_failed_rank(threads: int) -> None:
    """Without a failure, all bytes arrive; with one, other ranks get the turns of good ranks, and go on to the end."""
    failures: list[tuple[int, str, int] | None] = [None, None]
    for seed in range(2, 10):
        turn = random.Random(seed).choice(_random_turns(3, seed))
        end = ("read", "take")[seed % 2]
        failures.append((turn.sender if end == "read" else turn.receivers[-1], end, turn.job))
    outcomes = run_ranks(3, _exchange_all, threads, failures, timeout_s=60)
    for seed, failure in enumerate(failures):
        for rank, of_rank in enumerate(outcomes):
            taken, error = of_rank[seed]
            wanted = [
                (turn.job, bytes([turn.job]) * turn.nbytes)
                for turn in _random_turns(3, seed)
                if rank in turn.receivers
            ]
            if failure is None:
                assert taken == wanted and error == "None"
            elif failure[0] == rank:
                assert "planted" in error and taken == wanted[: len(taken)]
            else:
                good = [turn.job for turn in _random_turns(3, seed) if turn.sender != failure[0]]
                assert error == "None" and [job for job, _ in taken if job in good] == [
                    job for job, _ in wanted if job in good
                ]
                assert all(item in wanted for item in taken)


def _move_what_fails(folder: Path, end: str) -> list[str]:
    coordinator = coordinator_for(None)
    here = folder / str(coordinator.rank)
    here.mkdir()
    (here / f"file{coordinator.rank}").write_bytes(_bytes_of(coordinator.rank, 4 * PIECE))
    real = getattr(exchange._End, end)

    def failing(self: Any, extent: Extent, data: memoryview) -> None:
        assert extent.offset != 2 * PIECE or coordinator.rank != 0, "planted"
        real(self, extent, data)

    moves = [FileMove("file0", 0, 1), FileMove("file1", 1, 0)]
    with mock.patch.object(exchange, "_TURN_BYTES", PIECE), mock.patch.object(exchange._End, end, failing):
        try:
            move_files(coordinator, LocalStorage(here, durable=False), moves, "moving")
        finally:
            (folder / f"left{coordinator.rank}").write_text(
                " ".join(sorted(file.name for file in here.iterdir()))
            )
    return []


@pytest.mark.parametrize("end", ["read", "write"])
def test_one_end_fails_in_the_middle(tmp_path: Path, end: str) -> None:
    """Nobody waits, both ranks hear of it, the file that could not be moved is not there, the other one is."""
    with pytest.raises(RankError, match="planted"):
        run_ranks(2, _move_what_fails, tmp_path, end)
    left = [(tmp_path / f"left{rank}").read_text() for rank in (0, 1)]
    assert left == (["file0 file1", "file1"] if end == "read" else ["file0", "file0 file1"])
