"""CheckpointManager: intervals, retention, fallback, asynchronous saves, the tier in memory."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_states import erase, mixed_state
from tests.support.distributed import run_ranks
from tests.support.faults.faulty_storage import FaultyStorage
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    EverySteps,
    PerRank,
    RamTier,
    RetentionPolicy,
    async_save,
    load,
    read_state,
    save,
    verify,
)
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, CheckpointError, CorruptCheckpointError, DamagedLoadError


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50, 40), value), "step": int(value)}


def _damage(root: Path, step: int) -> None:
    (file,) = (root / f"step-{step:08d}").glob("data-*/*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_metrics_are_those_of_the_last_save(tmp_path: Path, asynchronous: bool) -> None:
    """Empty at first; then step, bytes and seconds of the newest committed step, and how long its save took here."""
    with CheckpointManager(tmp_path, save_policy=EverySteps(5), asynchronous=asynchronous) as manager:
        assert manager.metrics() == {}
        for step in range(1, 12):
            manager.save(step, _state(step))
            if step == 4:
                assert manager.metrics() == {}
    found, record = manager.metrics(), manager.history()[-1]
    assert found["checkpoint/step"] == 10 == record.step
    assert found["checkpoint/bytes"] == record.num_bytes and record.num_bytes >= 50 * 40 * 4
    assert record.seconds is not None and 0 < record.seconds <= found["checkpoint/save_seconds"] < 60
    assert 0 < found["checkpoint/stall_seconds"] < 60


class _SlowSteps(LocalStorage):
    """Locking the root, and committing the manifest of a step, take a second each on the test's clock."""

    clock_s = 0.0

    @contextmanager
    def lock(self) -> Iterator[None]:
        _SlowSteps.clock_s += self.root.name == "run"
        with super().lock():
            yield

    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        super().commit(name, data, replace=replace)
        _SlowSteps.clock_s += name == "manifest.json"

    def child(self, name: str) -> LocalStorage:
        return _SlowSteps(self.root / name)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_takes_from_the_call_to_the_commit(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What precedes the writing, such as the root's lock, and the commit itself are part of the save's seconds."""
    monkeypatch.setattr(_SlowSteps, "clock_s", 0.0)
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + _SlowSteps.clock_s)
    with CheckpointManager(_SlowSteps(tmp_path / "run"), asynchronous=asynchronous) as manager:
        manager.save(1, _state(1))
        manager.wait()
        found, (record,) = manager.metrics(), manager.history()
    assert 2 <= found["checkpoint/save_seconds"] < 60
    assert record.seconds is not None and 1 <= record.seconds < found["checkpoint/save_seconds"]


def test_intervals_and_retention(tmp_path: Path) -> None:
    """Only due steps are saved; the newest and every n-th stay; foreign folders are left alone."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "step-old").mkdir()
    manager = CheckpointManager(
        tmp_path, retention=RetentionPolicy(keep_last=2, keep_every=20), save_policy=EverySteps(5)
    )
    for step in range(41):
        manager.save(step, _state(step))
    manager.save(43, _state(43), force=True)

    assert manager.steps() == [0, 20, 40, 43]
    assert (tmp_path / "mine").exists() and (tmp_path / "step-old").exists()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 6


def test_newer_steps_are_not_ours_to_remove(tmp_path: Path) -> None:
    """A run that went back to an older step removes older ones only."""
    for step in (1, 2, 9):
        CheckpointManager(tmp_path).save(step, _state(step))
    CheckpointManager(tmp_path, retention=2).save(3, _state(3))

    assert [one.step for one in CheckpointManager(tmp_path).history()] == [2, 3, 9]  # 9 is none of the two


class _Watched(LocalStorage):
    """A root that writes down what is removed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.removed: list[str] = []

    def remove(self, name: str) -> None:
        self.removed.append(name)
        super().remove(name)


def test_a_step_is_removed_manifest_first(tmp_path: Path) -> None:
    """A crash in between then leaves a torn step, which nobody takes for good."""
    root = _Watched(tmp_path)
    manager = CheckpointManager(root, retention=1)
    manager.save(1, _state(1))
    manager.save(2, _state(2))

    assert root.removed == ["step-00000001/manifest.json", "step-00000001"]


def test_restore_falls_back_and_says_so(tmp_path: Path) -> None:
    """Damaged and torn steps are skipped with a warning; a run without a good step raises; one without any does not."""
    manager = CheckpointManager(tmp_path)
    assert manager.restore(_state(0)) is None
    for step in (1, 2, 3, 4):
        manager.save(step, _state(step), metadata={"seen": step * 100})
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    _damage(tmp_path, 3)
    state = _state(0)

    with pytest.warns(UserWarning, match=r"step 3 .*damaged"):
        restored = manager.restore(state)

    assert restored is not None
    assert (restored.step, restored.tier, restored.report.metadata) == (2, "disk", {"seen": 200})
    assert [step for step, _ in restored.skipped] == [3]
    assert torch.equal(_state(2)["w"], state["w"]) and state["step"] == 2
    _damage(tmp_path, 1)
    _damage(tmp_path, 2)
    state = _state(0)
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(CorruptCheckpointError, check=lambda error: error.where == str(tmp_path)),
    ):
        manager.restore(state, verify="before")
    assert torch.equal(_state(0)["w"], state["w"])
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(DamagedLoadError) as caught,
    ):
        manager.restore(state)
    assert caught.value.overwritten == ("w",) and (_state(0)["w"] != state["w"]).any()


def test_a_damaged_step_that_was_asked_for_is_named_alone(tmp_path: Path) -> None:
    """Other steps may be good, and without ``step=`` one of them is restored."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, _state(step))
    _damage(tmp_path, 3)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CorruptCheckpointError) as caught:
        manager.restore(_state(0), step=3, verify="before")
    with pytest.warns(UserWarning, match="damaged"):
        restored = manager.restore(_state(0))
    assert restored is not None and restored.step == 2
    for step in (1, 2):
        _damage(tmp_path, step)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CorruptCheckpointError) as of_all:
        manager.restore(_state(0), verify="before")
    assert caught.value.problem != of_all.value.problem and "step=" in str(caught.value.todo)
    assert "step 2" not in str(caught.value.got) and "step 2" in str(of_all.value.got)


def test_steps_without_a_manifest_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By jobs that go on with the run, whose next save removes them; older ones do not concern the restart."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3, 4):
        manager.save(step, _state(step))

    def logged(**options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            CheckpointManager(tmp_path).restore(_state(0), **options)
        return [record.getMessage() for record in caplog.records]

    assert logged() == []
    for step in (1, 4):
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    (said,) = logged()
    assert re.findall(r"\b[1-4]\b", said.removeprefix(str(tmp_path))) == ["4"]
    assert logged(read_only=True) == logged(step=2) == []
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    (said,) = logged()
    assert re.findall(r"\b[1-4]\b", said.removeprefix(str(tmp_path))) == ["1", "2", "3", "4"]


def test_a_step_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    """A state of other shapes raises at once instead of walking back through all steps."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, _state(1))
    with pytest.raises(CheckpointError, check=lambda error: str(error.where).startswith("w in ")):
        manager.restore({"w": torch.zeros(3), "step": 0})
    with pytest.raises(CheckpointError, check=lambda error: error.got == 7):
        manager.restore(_state(0), step=7)


def test_retention_spares_the_only_good_step(tmp_path: Path) -> None:
    """When a save fails nothing is removed; the good step before stays."""
    storage = FaultyStorage(LocalStorage(tmp_path))
    manager = CheckpointManager(tmp_path, retention=1)
    manager.save(1, _state(1))
    manager._root = _FailingChildren(storage)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        manager.save(2, _state(2))

    assert CheckpointManager(tmp_path).steps() == [1]
    assert verify(tmp_path / "step-00000001").ok


class _FailingChildren(FaultyStorage):
    def __init__(self, storage: FaultyStorage) -> None:
        super().__init__(storage.inner)

    def child(self, name: str) -> FaultyStorage:
        return FaultyStorage(self.inner.child(name), fail_at=2)


def test_resaving_after_a_fallback(tmp_path: Path) -> None:
    """A step that turned out damaged is replaced when training reaches it again."""
    manager = CheckpointManager(tmp_path, retention=3)
    for step in (1, 2):
        manager.save(step, _state(step))
    _damage(tmp_path, 2)
    manager.save(2, _state(22))
    state = _state(0)

    restored = manager.restore(state)

    assert restored is not None and restored.step == 2 and not restored.skipped
    assert torch.equal(_state(22)["w"], state["w"])


class _Gate(LocalStorage):
    """A storage whose writes wait until the gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def create(self, name: str, size_bytes: int) -> Any:
        assert self.gate.wait(30)
        return super().create(name, size_bytes)


class _GatedSteps(_Gate):
    """A root whose steps wait at its gate."""

    def child(self, name: str) -> _Gate:
        step = _Gate(self.root / name)
        step.gate = self.gate
        return step


def test_async_save_takes_the_values_of_its_call(tmp_path: Path) -> None:
    """The state may change as soon as async_save returns; what is saved is what it was."""
    storage = _Gate(tmp_path / "c")
    state = _state(1)
    state["inner"] = {"list": [1, 2]}
    state["own"] = PerRank(torch.ones(3))

    handle = async_save(storage, state)
    state["w"].fill_(9)
    state["own"].value.fill_(9)
    state["inner"]["list"][0] = 9
    assert not handle.done()
    storage.gate.set()
    handle.wait()

    assert handle.done() and handle.exception() is None
    assert torch.equal(_state(1)["w"], read_state(tmp_path / "c")["w"].read())
    assert read_state(tmp_path / "c").tree()["inner"] == {"list": [1, 2]}
    assert torch.equal(torch.ones(3), read_state(tmp_path / "c").per_rank_values()[0]["own"])


def test_a_second_async_save_waits_for_the_first(tmp_path: Path) -> None:
    """Back-pressure: the staging buffer is not overwritten while a save reads from it."""
    first = _Gate(tmp_path / "a")
    one = async_save(first, _state(1))
    opener = threading.Timer(0.3, first.gate.set)
    opener.start()

    two = async_save(tmp_path / "b", _state(2))

    assert one.done()
    two.wait()
    assert torch.equal(_state(1)["w"], read_state(tmp_path / "a")["w"].read())
    assert torch.equal(_state(2)["w"], read_state(tmp_path / "b")["w"].read())


def test_restore_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    """The step that is being written is the one that is restored."""
    root = _GatedSteps(tmp_path)
    manager = CheckpointManager(root, asynchronous=True)
    manager.save(1, _state(1))
    threading.Timer(0.2, root.gate.set).start()
    state = _state(0)

    restored = manager.restore(state)

    assert restored is not None and restored.step == 1 and torch.equal(_state(1)["w"], state["w"])


def test_staging_memory_is_reused(tmp_path: Path) -> None:
    """A second save of the same state copies into the same memory."""
    manager = CheckpointManager(tmp_path, asynchronous=True)
    assert manager._async is not None
    manager.save(1, _state(1))
    manager.wait()
    address = manager._async._stager._buffer.data_ptr()
    manager.save(2, _state(2))
    manager.wait()

    assert manager._async._stager._buffer.data_ptr() == address
    assert manager._async._stager._buffer.numel() == 16_000


def _async_manager(root: Path) -> list[int]:
    manager = CheckpointManager(root, asynchronous=True, retention=2)
    state = mixed_state()
    for step in range(5):
        state["model"]["w"].to_local().fill_(step)
        assert manager.save(step, state) is not None
    manager.wait()
    erase(state)
    restored = manager.restore(state)
    assert restored is not None and restored.step == 4
    assert state["model"]["w"].to_local().eq(4).all()
    return manager.steps()


def test_async_manager_on_ranks(tmp_path: Path) -> None:
    """Saves behind training on several ranks, with retention, end in the right steps."""
    assert run_ranks(2, _async_manager, tmp_path / "run") == [[3, 4]] * 2


def _ram(root: Path, shm: Path, kill_node: bool) -> tuple[int, str]:
    tier = RamTier("run", interval=1, keep_last=2, folder=shm)
    manager = CheckpointManager(root, save_policy=EverySteps(4), ram=tier)
    state = mixed_state()
    for step in range(7):
        state["model"]["w"].to_local().fill_(step)
        manager.save(step, state)
    dist.barrier()
    if kill_node and dist.get_rank() == 0:
        tier.clear()
    dist.barrier()
    erase(state)
    restored = manager.restore(state)
    assert restored is not None
    assert state["model"]["w"].to_local().eq(restored.step).all()
    return restored.step, restored.tier


def test_the_tier_in_memory(tmp_path: Path) -> None:
    """The newest state comes from memory; from disk only when the node is lost."""
    assert run_ranks(2, _ram, tmp_path / "a", tmp_path / "shm", False) == [(6, "ram")] * 2
    assert sorted(path.name for path in (tmp_path / "shm" / "vescale-run").glob("step-*")) == [
        "step-00000005",
        "step-00000006",
    ]
    assert run_ranks(2, _ram, tmp_path / "b", tmp_path / "shm2", True) == [(4, "disk")] * 2


def _two_nodes(root: Path, shm: Path, lose: bool) -> tuple[int, str]:
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = "0"  # each rank is the only one of its node
    try:
        tier = RamTier("run", keep_last=1, folder=shm / f"node{rank}")
        manager = CheckpointManager(root, save_policy=EverySteps(4), ram=tier)
        state = mixed_state()
        for step in range(7):
            state["model"]["w"].to_local().fill_(step)
            state["stock"]["plain"].fill_(step)
            manager.save(step, state)
        if lose and rank == 1:
            tier.clear()
        dist.barrier()
        erase(state)
        restored = manager.restore(state)
    finally:
        del os.environ["LOCAL_RANK"]
    assert restored is not None
    assert state["model"]["w"].to_local().eq(restored.step).all()
    assert state["stock"]["plain"].eq(restored.step).all()
    assert state["stock"]["replicate"].to_local().any()
    return restored.step, restored.tier


def test_nodes_do_not_need_each_others_memory(tmp_path: Path) -> None:
    """With memory of its own each node restores its ranks; if one node is lost, all go to disk."""
    assert run_ranks(2, _two_nodes, tmp_path / "a", tmp_path / "shm", False) == [(6, "ram")] * 2
    assert run_ranks(2, _two_nodes, tmp_path / "b", tmp_path / "shm2", True) == [(4, "disk")] * 2


def _two_attempts(root: Path, shm: Path) -> tuple[int, str]:
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = "0"
    try:
        tier = RamTier("run", keep_last=2, folder=shm / f"node{rank}")
        manager = CheckpointManager(root, save_policy=EverySteps(4), ram=tier)
        state = mixed_state()
        for step in (4, 5):
            manager.save(step, state)
        step5 = shm / f"node{rank}" / "vescale-run" / "step-00000005"
        if rank == 1:
            shutil.copytree(step5, shm / "first attempt")
        manager.save(5, state)
        if rank == 1:
            shutil.rmtree(step5)
            shutil.copytree(shm / "first attempt", step5)
        dist.barrier()
        restored = manager.restore(state)
    finally:
        del os.environ["LOCAL_RANK"]
    assert restored is not None
    return restored.step, restored.tier


def test_two_attempts_at_a_step_are_never_mixed(tmp_path: Path) -> None:
    """If nodes hold different attempts of the newest step, the one before is restored."""
    assert run_ranks(2, _two_attempts, tmp_path / "a", tmp_path / "shm") == [(4, "ram")] * 2


def test_limits_are_checked(tmp_path: Path) -> None:
    """Impossible limits are refused by name."""
    with pytest.raises(ValueError, match="keep_last"):
        CheckpointManager(tmp_path, retention=0)
    with pytest.raises(ValueError, match="keep_every"):
        RetentionPolicy(keep_every=0)
    with pytest.raises(ArgumentError, check=lambda error: "../x" in str(error.got)):
        RamTier("../x")
    with pytest.raises(ArgumentError, check=lambda error: error.got == -1):
        CheckpointManager(tmp_path).save(-1, {})


def test_a_state_saved_by_hand_loads_beside(tmp_path: Path) -> None:
    """A step's folder is an ordinary checkpoint."""
    CheckpointManager(tmp_path).save(3, _state(3))
    state = _state(0)
    load(tmp_path / "step-00000003", state)
    save(tmp_path / "step-00000004", _state(4))

    assert state["step"] == 3
    assert CheckpointManager(tmp_path).steps() == [3, 4]
