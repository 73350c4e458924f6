"""`restore` where ranks see different steps, and where one meets an error."""

from __future__ import annotations

import errno
import itertools
import re
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.faults.saved_steps import WatchedRoot, outcome_of, save_steps, state_of
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, RamTier
from vescale_fsdp.checkpoint.load import Verify
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, PartialLoadError


def _damage(root: Path, step: int) -> None:
    (file,) = (root / f"step-{step:08d}").glob("data-*/*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class _Stale(LocalStorage):
    """A root of which some steps are not seen, for ever or for a number of listings."""

    def __init__(self, root: Path, unseen: Iterable[int], listings: int = 1 << 30) -> None:
        super().__init__(root)
        self.unseen = {f"step-{step:08d}" for step in unseen}
        self.listings = listings

    def list_folder(self, name: str) -> list[str]:
        self.listings -= 1
        found = super().list_folder(name)
        return [name for name in found if self.listings < 0 or name not in self.unseen]


def _every_view(root: Path) -> list[tuple[Any, ...]]:
    """What restoring ends in, for every set of steps that rank 1 may fail to see, and every step asked for."""
    steps = (2, 4, 6)
    found = []
    for unseen in itertools.chain.from_iterable(itertools.combinations(steps, n) for n in range(4)):
        storage = _Stale(root, unseen if dist.get_rank() else ())
        manager = CheckpointManager(storage)
        for wanted in (None, *steps, 9):
            found.append((unseen, wanted, *outcome_of(manager, step=wanted, patience_s=0.02)))
    return found


def test_ranks_that_see_different_steps(tmp_path: Path) -> None:
    """No rank takes an older step than another sees, nor none, without a word: all raise, and say who sees what."""
    save_steps(tmp_path, (2, 4, 6))
    by_rank = run_ranks(2, _every_view, tmp_path)

    raised = 0
    for one, other in zip(*by_rank, strict=True):
        unseen, wanted, outcome, text = one
        assert other[:3] == one[:3]
        if wanted == 9:
            assert outcome is CheckpointError and "[2, 4, 6]" in text
        elif (wanted or 6) in unseen:
            raised += 1
            assert outcome is CheckpointError and "patience_s" in text
            assert other[3] == text and "ranks 0" in text and "ranks 1" in text
        else:
            assert outcome == (wanted or 6)
    assert raised == 16


def _late_view(root: Path, listings: int) -> tuple[Any, list[str]]:
    storage = _Stale(root, (4, 6), listings if dist.get_rank() == 1 else 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = outcome_of(CheckpointManager(storage))
    return outcome, [str(one.message) for one in caught]


def test_a_stale_listing_is_listed_again(tmp_path: Path) -> None:
    """What a rank does not see at first is waited for, and that is said."""
    save_steps(tmp_path, (2, 4, 6))
    (first, said), *others = run_ranks(3, _late_view, tmp_path, 3)

    assert first == (6, "()") and re.search(r"ranks 1 .*\b2\b", said[0])
    assert others == [((6, "()"), [])] * 2
    assert run_ranks(3, _late_view, tmp_path, 0) == [((6, "()"), [])] * 3


def _nothing(root: Path) -> tuple[Any, Any]:
    manager = CheckpointManager(root / "none")
    step = 4 - 2 * dist.get_rank()
    return outcome_of(manager), outcome_of(CheckpointManager(root), step=step, patience_s=0.1)


def test_no_steps_and_different_wishes(tmp_path: Path) -> None:
    """Where no rank sees a step there is none, at once; ranks that ask for different steps are told so."""
    save_steps(tmp_path, (2, 4))
    for outcome, (kind, text) in run_ranks(2, _nothing, tmp_path):
        assert outcome == (None, "")
        assert kind is CheckpointError and "`step`" in text and "[1]" in text


def _older_unseen(root: Path) -> tuple[Any, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome_of(CheckpointManager(_Stale(root, (4,) if dist.get_rank() else ())), patience_s=0.1)


def test_falling_back_needs_all_ranks_too(tmp_path: Path) -> None:
    """When the newest step is damaged, the next older one counts, and not the one that all happen to see."""
    save_steps(tmp_path, (2, 4, 6))
    _damage(tmp_path, 6)
    for kind, text in run_ranks(2, _older_unseen, tmp_path):
        assert kind is PartialLoadError and re.search(
            r"ranks 1 .*\b2\b", text
        )  # step 6 has overwritten some by then


def _memory_lost(root: Path, on_disk: bool) -> tuple[int, str, list[str]]:
    tier = RamTier("run", keep_last=2, folder=root / f"node{dist.get_rank()}")
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as caught:
        patched.setenv("LOCAL_RANK", "0")  # each rank is the only one of its node
        warnings.simplefilter("always")
        manager = CheckpointManager(root / "steps", ram=tier)
        for step in (1, 2, 3):
            manager.save(step, state_of(step) | {"own": PerRank(step)})
        if dist.get_rank() == 1:
            shutil.rmtree(root / "node1" / "vescale-run" / "step-00000003")
            if not on_disk:
                shutil.rmtree(root / "steps" / "step-00000003")
        dist.barrier()
        restored = manager.restore(state_of(0) | {"own": PerRank(0)})
    assert restored is not None
    return restored.step, str(restored.skipped), [str(one.message) for one in caught]


def test_memory_that_is_lost_comes_from_disk_or_is_said(tmp_path: Path) -> None:
    """A step that a node lacks in memory comes from disk; one that the disk lacks too is skipped, and warned of."""
    for step, skipped, said in run_ranks(2, _memory_lost, tmp_path / "there", True):
        assert (step, skipped, said) == (3, "()", [])
    for rank, (step, skipped, said) in enumerate(run_ranks(2, _memory_lost, tmp_path / "lost", False)):
        assert step == 2 and skipped.count("rank 1") == 2
        assert [text[:12] for text in said] == (["step 3 (ram)"] if rank == 0 else [])


_READS = {"list_folder", "exists", "read_small", "open_file", "read_at", "view"}
_FAULTS = {
    "disk": OSError(errno.EIO, "Input/output error"),
    "rights": PermissionError(errno.EACCES, "Permission denied"),
    "time-out": TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
    "connection": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "stale": OSError(errno.ESTALE, "Stale file handle"),
    "memory": MemoryError("no memory"),
    "store": RuntimeError("503 Slow Down"),
    "stop": KeyboardInterrupt("stop"),
}


def _every_fault(
    root: Path, shm: Path, bad_rank: int, verify: Verify
) -> dict[str, list[tuple[str, Any, str]]]:
    """For every kind of error, what restoring ends in when it is met at the first, second, .. operation of a rank."""
    found: dict[str, list[tuple[str, Any, str]]] = {}
    for name, error in _FAULTS.items():
        for number in itertools.count():
            operations = iter(range(1 << 30))
            hit: list[str] = []

            def fail(
                operation: str,
                number: int = number,
                operations: Any = operations,
                hit: list[str] = hit,
                error: BaseException = error,
            ) -> None:
                if next(operations) == number and dist.get_rank() == bad_rank:
                    hit.append(operation)
                    raise error

            tier = RamTier("run", folder=shm)
            tier._root = WatchedRoot(tier._root.root, fail)
            manager = CheckpointManager(WatchedRoot(root, fail), ram=tier)
            outcome = outcome_of(manager, verify=verify)
            all_hit: list[list[str]] = [[], []]
            dist.all_gather_object(all_hit, hit)
            if not any(all_hit):
                assert outcome == (4, "()")
                break
            found.setdefault(name, []).append((all_hit[bad_rank][0], *outcome))
    return found


@pytest.mark.part("faults")
@pytest.mark.parametrize("verify", ["before", "while"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_whatever_one_rank_meets_all_raise(bad_rank: int, verify: Verify, tmp_path: Path) -> None:
    """At every operation: who is hit raises what it met, the others name it; nobody goes back to an older step.

    What it met comes in a `PartialLoadError` if tensors had been overwritten by then, and does so on all ranks.
    """
    save_steps(tmp_path / "run", (2, 4))
    save_steps(tmp_path / "shm" / "vescale-run", (3,))
    (tmp_path / "shm" / "vescale-run").chmod(0o700)
    by_rank = run_ranks(2, _every_fault, tmp_path / "run", tmp_path / "shm", bad_rank, verify)

    assert by_rank[0].keys() == _FAULTS.keys()
    for name, error in _FAULTS.items():
        own, others = by_rank[bad_rank][name], by_rank[1 - bad_rank][name]
        assert {operation for operation, *_ in own} == _READS
        for (operation, kind, text), (_, other_kind, other_text) in zip(own, others, strict=True):
            assert f"rank {bad_rank}: {type(error).__name__}: {error}" in other_text
            if other_kind is CheckpointError or name == "stop":
                assert (kind, text) == (type(error), str(error)), operation
                continue
            assert other_kind is kind is PartialLoadError and operation in ("read_at", "view")
            assert text.startswith(f"{type(error).__name__}: {error}\n  overwritten: ")
        assert any(kind is PartialLoadError for *_, kind, _ in others)


def test_impatience_is_refused(tmp_path: Path) -> None:
    """A time to wait is not negative, and a number."""
    for patience_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="patience_s"):
            CheckpointManager(tmp_path).restore({}, patience_s=patience_s)


def test_damage_in_memory_is_said(tmp_path: Path) -> None:
    """A damaged manifest in memory is skipped like any damage, with a warning."""
    manager = CheckpointManager(tmp_path / "run", ram=RamTier("run", folder=tmp_path))
    manager.save(3, state_of(3))
    (tmp_path / "vescale-run" / "step-00000003" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match=r"step 3 \(ram\)"):
        assert outcome_of(manager)[0] == 3
    shutil.rmtree(tmp_path / "run" / "step-00000003")
    with pytest.warns(UserWarning, match="damaged"):
        assert outcome_of(manager)[0] is CorruptCheckpointError
