"""Files that go between ranks piece by piece: what arrives, what is done meanwhile, and what an error leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import RankError, run_ranks
from vescale_fsdp.checkpoint.ranks import exchange
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.ranks.exchange import FileMove, move_files
from vescale_fsdp.checkpoint.storage.local import LocalStorage

PIECE = 1000
SIZES = (0, 1, PIECE, PIECE + 1, 7 * PIECE // 2)


def _bytes_of(rank: int, size: int) -> bytes:
    return bytes((rank + 7 * place) % 251 for place in range(size))


def _move_in_rings(folder: Path) -> tuple[dict[str, bytes], int, list[str]]:
    """Every rank sends its files to the next one, of all sizes; what a rank has then, and the order of its work."""
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
    seen: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(f"{name} {args[1]}" if name == "write" else name)
            return work(*args)

        return call

    begin = type(coordinator).begin_exchange

    def begin_noted(self: Coordinator, *sides: Any) -> Callable[[], None]:
        seen.append("begin")
        return noted("wait", begin(self, *sides))

    with (
        mock.patch.object(exchange, "_PIECE_BYTES", PIECE),
        mock.patch.object(type(coordinator), "begin_exchange", begin_noted),
        mock.patch.object(exchange._End, "write", noted("write", exchange._End.write)),
    ):
        received = move_files(coordinator, LocalStorage(here, durable=False), moves, "moving")
    return {file.name: file.read_bytes() for file in here.iterdir()}, received, seen


def test_files_arrive_whole_and_nobody_idles(tmp_path: Path) -> None:
    """Each rank has its neighbor's files; while a piece is sent the one before is written."""
    for rank, (files, received, seen) in enumerate(run_ranks(3, _move_in_rings, tmp_path)):
        owners = (rank, (rank - 1) % 3)
        assert files == {f"{size}-{owner}": _bytes_of(owner, size) for size in SIZES for owner in owners}
        assert received == sum(SIZES)
        of_four_pieces = "begin, write 1, wait" + "".join(f", begin, write {n}, wait" for n in (0, 1, 2))
        assert ", ".join(seen).endswith(of_four_pieces + ", write 3")


def _move_what_fails(folder: Path, end: str) -> list[str]:
    coordinator = coordinator_for(None)
    here = folder / str(coordinator.rank)
    here.mkdir()
    (here / f"file{coordinator.rank}").write_bytes(_bytes_of(coordinator.rank, 4 * PIECE))
    real = getattr(exchange._End, end)

    def failing(self: Any, number: int, data: memoryview) -> None:
        assert number != 2 or coordinator.rank != 0, "planted"
        real(self, number, data)

    moves = [FileMove("file0", 0, 1), FileMove("file1", 1, 0)]
    with mock.patch.object(exchange, "_PIECE_BYTES", PIECE), mock.patch.object(exchange._End, end, failing):
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
