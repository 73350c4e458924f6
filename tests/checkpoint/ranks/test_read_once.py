"""`read="once"`: what several ranks want is read by one of them, and no rank waits for one that fails."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.checkpoint import CheckpointManager, load
from vescale_fsdp.checkpoint.load import Read, Verify
from vescale_fsdp.checkpoint.native import read as native_read
from vescale_fsdp.checkpoint.native.read import plan_shared
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.ranks.exchange import Turn
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.storage import local as local_module
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, DamagedLoadError, PartialLoadError
from vescale_fsdp.layout.extent import Extent

_STRIPE = 64 << 10
_NUMEL = 300_000


def _state(seed: int, replicas: int) -> dict[str, Any]:
    """HSDP over ``replicas``: ragged, by rows, by columns; and tensors that every rank has whole."""
    generator = torch.Generator().manual_seed(seed)
    mesh = cpu_mesh(replicas, dist.get_world_size() // replicas)
    size, rank = mesh.size(1), mesh.get_local_rank(1)
    flat = torch.randn(_NUMEL, generator=generator)
    first = _NUMEL * 2 // 3 if size > 1 else _NUMEL
    numels = (
        [first, *(len(part) for part in torch.arange(_NUMEL - first).tensor_split(size - 1))]
        if size > 1
        else [first]
    )
    ragged = RaggedDTensor.from_local(
        flat.split(numels)[rank].clone(),
        mesh,
        [Replicate(), RaggedShard.from_piece_numels((_NUMEL,), numels)],
        shape=(_NUMEL,),
    )
    matrix = torch.randn(200, 150, generator=generator)
    return {
        "ragged": ragged,
        "rows": distribute_tensor(matrix, mesh, [Replicate(), Shard(0)]),
        "columns": distribute_tensor(matrix + 1, mesh, [Replicate(), Shard(1)]),
        "plain": torch.randn(_NUMEL // 2, generator=generator),
        "small": torch.randn(5, generator=generator),
        "step": seed,
    }


def _values(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}


def _assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in _values(expected).items():
        other = _values(found)[name]
        assert (
            torch.equal(value, other) and value.numel() if isinstance(value, torch.Tensor) else value == other
        ), name


def _save(path: Path, replicas: int) -> None:
    Saver(LocalStorage(path), coordinator_for(), stripe_bytes=_STRIPE).save(_state(1, replicas))


def _short_turns() -> AbstractContextManager[None]:
    """Three stripes are read and sent at once."""
    return patch.object(native_read, "_TURN_BYTES", 3 * _STRIPE + 5)


def _loads(path: Path, replicas: int) -> dict[tuple[Read, Verify], tuple[int, int]]:
    """Bytes read and received on this rank by every way to read and verify, once the values are compared."""
    found = {}
    reads: tuple[Read, ...] = ("once", "each", "auto")
    modes: tuple[Verify, ...] = ("while", "before", "never")
    for read in reads:
        for verify in modes:
            state = _state(2, replicas)
            with _short_turns():
                report = load(path, state, read=read, verify=verify)
            _assert_same(_state(1, replicas), state)
            found[read, verify] = report.num_bytes_read, report.num_bytes_received
    return found


def _total(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("data-*/*"))


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "replicas"),
    [
        (3, 4, 2),
        *(pytest.param(*row, marks=pytest.mark.part("faults")) for row in ((4, 3, 1), (4, 4, 2), (2, 4, 4))),
    ],
)
def test_each_byte_is_read_once(saved_by: int, loaded_by: int, replicas: int, tmp_path: Path) -> None:
    """Whatever the replicas and whoever saved, ranks read the checkpoint's bytes in all, and evenly."""
    run_ranks(saved_by, _save, tmp_path / "c", 2 if saved_by == 4 else 1)
    found = run_ranks(loaded_by, _loads, tmp_path / "c", replicas)
    total = _total(tmp_path / "c")
    assert total > 20 * _STRIPE

    def sums(read: Read, verify: Verify) -> tuple[int, int]:
        ranks = [rank[read, verify] for rank in found]
        return sum(own for own, _ in ranks), sum(received for _, received in ranks)

    for verify in ("while", "never"):
        own, received = sums("once", verify)
        assert 0.97 * total < own <= 1.01 * total and received > 0.3 * total
        each, nothing = sums("each", verify)
        assert each > 1.2 * total and nothing == 0
        if replicas > 1:
            assert max(rank["once", verify][0] for rank in found) < 1.4 * total / loaded_by
    assert sums("once", "before")[0] <= 2.02 * total
    assert sums("auto", "while") == sums("each", "while")  # a local disk


def _endings(path: Path) -> dict[str, tuple[str, str]]:
    """The errors of loads of which one rank's storage, or one file, is bad; then a good one."""
    rank, found = dist.get_rank(), {}

    def attempt(name: str, storage: Any, verify: Verify) -> None:
        with _short_turns(), pytest.raises(CheckpointError) as caught:
            load(storage, _state(2, 2), read="once", verify=verify)
        found[name] = type(caught.value).__name__, str(caught.value)

    class Fails(LocalStorage):
        def open_file(self, name: str) -> Any:
            reader = super().open_file(name)
            whole = reader.read_at

            def read_at(offset: int, buffers: Any) -> None:
                if sum(map(len, buffers)) >= _STRIPE and offset > 3 * _STRIPE:
                    raise OSError("planted")
                whole(offset, buffers)

            reader.read_at = read_at  # type: ignore[method-assign]
            return reader

    attempt("cable", (Fails if rank == 1 else LocalStorage)(path), "never")
    (file,) = path.glob("data-*/00002-*")
    good = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(
            good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :]
        )
    dist.barrier()
    attempt("while", path, "while")
    attempt("before", path, "before")
    dist.barrier()
    if rank == 0:
        file.write_bytes(good)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_module, "_file_system_of", lambda folder: "nfs4")
        state = _state(2, 2)
        report = load(path, state)
    _assert_same(_state(1, 2), state)
    assert report.num_bytes_received
    (path.parent / "steps").mkdir(exist_ok=True)
    (path.parent / "steps" / "step-00000001").symlink_to(path) if rank == 0 else None
    dist.barrier()
    restored = CheckpointManager(path.parent / "steps").restore(state, read="once")
    assert restored is not None and restored.report.num_bytes_received
    return found


def test_a_reader_that_fails(tmp_path: Path) -> None:
    """All ranks hear of it; "before" nothing is overwritten; a network disk is read once unasked."""
    run_ranks(4, _save, tmp_path / "c", 2)
    found = run_ranks(4, _endings, tmp_path / "c", timeout_s=100.0)
    for rank in found:
        assert rank["cable"][0] == PartialLoadError.__name__ and "planted" in rank["cable"][1]
        assert rank["while"][0] == DamagedLoadError.__name__ and "00002-of-00004" in rank["while"][1]
        assert rank["before"][0] == CorruptCheckpointError.__name__ and "00002-of-00004" in rank["before"][1]


def test_the_plan_gives_each_wish_one_reader_and_even_work() -> None:
    """What several want has one reader, work is even, and all ranks list their turns in one order."""
    everyone = [[_stripes(0, 0, 100), _stripes(7, 3, 4)] for _ in range(30)]
    everyone[5] = [_stripes(0, 10, 20), _stripes(3, 0, 5)]
    own = [plan_shared(everyone, _LARGE_STRIPE, rank) for rank in range(30)]
    shared = {turn for turns in own for turn in turns}

    stripes = {
        (turn.job.file, number): turn
        for turn in shared
        for number in range(turn.job.offset // _LARGE_STRIPE, turn.job.stop // _LARGE_STRIPE)
    }
    assert set(stripes) == {*(("0", number) for number in range(100)), ("7", 3)}
    assert all(turn.nbytes == turn.job.nbytes for turn in shared)
    assert sum(turn.nbytes for turn in shared) == 101 * _LARGE_STRIPE
    assert max(turn.nbytes for turn in shared) == 3 * _LARGE_STRIPE  # 4 MiB hold three stripes
    load_of = Counter[int]()
    for (file, number), turn in stripes.items():
        assert turn.sender in turn.receivers and len(set(turn.receivers)) == len(turn.receivers)
        assert (5 in turn.receivers) == (file == "0" and 10 <= number < 20)
        load_of[turn.sender] += 1
    assert max(load_of.values()) <= 5 and len(load_of) >= 29
    for rank, turns in enumerate(own):
        assert set(turns) == {turn for turn in shared if rank in turn.receivers}
    _assert_one_order(own)
    for rank in range(2):
        assert plan_shared([[_stripes(0, 0, 4)], [_stripes(0, 4, 9)]], _LARGE_STRIPE, rank) == []


def test_a_short_last_stripe_is_shared_whole() -> None:
    """The file's last stripe is short; the turns of two readers cover all bytes, and cut no stripe."""
    for nbytes in (1, _LARGE_STRIPE - 16, _LARGE_STRIPE + 16, 5 * _LARGE_STRIPE + 16):
        turns = plan_shared([[Extent("0", _LARGE_STRIPE, nbytes)]] * 2, _LARGE_STRIPE, 1)
        jobs = sorted(turn.job for turn in turns)
        assert [job.offset % _LARGE_STRIPE for job in jobs] == [0] * len(jobs)
        assert [job.stop for job in jobs] == [*(job.offset for job in jobs[1:]), _LARGE_STRIPE + nbytes]


_LARGE_STRIPE = 5 << 18  # 1.25 MiB


def _stripes(file: int, first: int, stop: int) -> Extent:
    """Stripes [first, stop) of a file."""
    return Extent(str(file), first * _LARGE_STRIPE, (stop - first) * _LARGE_STRIPE)


def _assert_one_order(own: list[list[Turn[Extent]]]) -> None:
    """Assert that some order of all turns contains each rank's list; else ranks would wait in a cycle."""
    before = {turn: set[Turn[Extent]]() for turns in own for turn in turns}
    for turns in own:
        for first, second in pairwise(turns):
            before[second].add(first)
    assert len([*TopologicalSorter(before).static_order()]) == len(before)


def test_a_rank_of_many_lists_its_own_turns() -> None:
    """64 shards, each with 16 replicas: a rank lists the turns of its own file alone, not those of all 64."""
    by_rank = [[Extent(str(rank % 64), 0, 512 << 20)] for rank in range(1024)]
    own = [plan_shared(by_rank, 1 << 20, rank) for rank in (0, 64, 1023)]
    assert [len(turns) for turns in own] == [128, 128, 128]  # 512 stripes of one file, four in each turn
    assert {turn.job.file for turn in own[2]} == {"63"} and own[0] == own[1]
