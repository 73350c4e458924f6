"""A rollback lasts: the first save after it abandons the later steps, on disk and in memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

from tests.support.distributed import forkserver
from tests.support.processes import receive
from vescale_fsdp.checkpoint import BestOf, CheckpointManager, EverySteps, RamTier, latest, load
from vescale_fsdp.checkpoint.steps.run_file import RunFile, read_run_file
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError


def _state(step: float) -> dict[str, Any]:
    return {"w": torch.full((64,), float(step))}


def _run(root: Path, *steps: int, **options: Any) -> None:
    manager = CheckpointManager(root, **options)
    for step in steps:
        manager.save(step, _state(step))
    manager.close()


def _restored(root: Path, step: int | None = None, **options: Any) -> int:
    state = _state(-1)
    restored = CheckpointManager(root, **options).restore(state, step=step, read_only=True)
    assert restored is not None and state["w"].numel() and state["w"].eq(restored.step).all()
    return restored.step


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_rollback_lasts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Restoring writes nothing; the next save abandons later steps, which are kept; a step saved again is live."""
    _run(tmp_path, 80, 90, 100, 110)
    before = _files(tmp_path)
    manager = CheckpointManager(tmp_path, retention=2)
    manager.restore(_state(0), step=90)
    assert _files(tmp_path) == before and _restored(tmp_path) == 110  # nobody else sees anything of it yet
    with caplog.at_level(logging.WARNING):
        manager.save(93, _state(93))
    (said,) = [record.getMessage() for record in caplog.records if "abandoned" in record.getMessage()]
    assert "100, 110" in said
    manager.close()

    assert manager.steps() == [90, 93]  # abandoned steps take no live step's place
    assert str(latest(tmp_path)).endswith("step-00000093") and _restored(tmp_path) == 93
    assert {one.step for one in manager.history() if one.abandoned} == {100, 110}
    load(tmp_path / "step-00000110", state := _state(0))
    assert state["w"].eq(110).all()  # kept
    _run(tmp_path, 100)
    assert _restored(tmp_path) == 100 and CheckpointManager(tmp_path).steps() == [90, 93, 100]
    manager.remove(110)
    assert not (tmp_path / "step-00000110").exists()


def test_going_back_to_an_abandoned_step(tmp_path: Path) -> None:
    """Asked for by number it is restored, and from the next save on it is live again."""
    _run(tmp_path, 1, 2, 3)
    manager = CheckpointManager(tmp_path)
    manager.restore(_state(0), step=1)
    manager.save(4, _state(4))
    assert manager.steps() == [1, 4]
    manager.restore(_state(0), step=3)
    assert manager.steps() == [1, 4]
    manager.save(5, _state(5))
    manager.close()

    assert manager.steps() == [1, 3, 5]
    with pytest.raises(CheckpointError):
        manager.restore(_state(0), step=9)


def test_who_only_reads_marks_nothing(tmp_path: Path) -> None:
    """Neither a restore with read_only=True before a save, nor a plain restart from the newest step."""
    _run(tmp_path, 1, 2)
    reader = CheckpointManager(tmp_path)
    reader.restore(_state(0), step=1, read_only=True)
    reader.save(3, _state(3))
    reader.restore(_state(0))
    reader.save(4, _state(4))
    reader.close()
    assert reader.steps() == [1, 2, 3, 4] and not (tmp_path / "run.json").exists()


def _hold(root: Path, pipe: Connection) -> None:
    manager = CheckpointManager(root)
    manager.save(3, _state(3))
    pipe.send("held")
    pipe.recv()


@contextmanager
def _other_job(root: Path) -> Iterator[None]:
    """Another process that has saved to the root, and goes on."""
    ours, theirs = Pipe()
    job = forkserver().Process(target=_hold, args=(root, theirs), daemon=True)
    job.start()
    receive(ours, "the save of the other job")
    try:
        yield
    finally:
        ours.send("end")
        job.join(60)
        assert job.exitcode == 0


def test_a_root_that_another_job_holds(tmp_path: Path) -> None:
    """The rollback marks nothing there, and says so; steps saved after the restore are never marked."""
    _run(tmp_path, 1, 2)
    with _other_job(tmp_path):
        manager = CheckpointManager(tmp_path)
        manager.restore(_state(0), step=1)
        with pytest.warns(UserWarning, match=re.escape(str(tmp_path))) as caught:
            manager.save(4, _state(4))
        assert caught[0].filename == __file__  # the line that calls `save`
        assert manager.steps() == [1, 2, 3, 4]
        manager.restore(_state(0), step=1)
    _run(tmp_path, 5)
    manager.save(2, _state(2))
    assert manager.steps() == [1, 2, 5]  # 3 and 4 were there at the restore, 5 was not; 2 is saved again
    manager.close()


def test_a_run_that_restores_nothing_abandons_later_steps_of_an_older_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It restarts from its own steps, and keeps as many as it should; steps that it saves again are live."""
    _run(tmp_path, 5, 900, 1000)
    with caplog.at_level(logging.WARNING), CheckpointManager(tmp_path, retention=2) as manager:
        for step in (10, 20, 15, 30):
            manager.save(step, _state(step))
        assert manager.steps() == [20, 30]
        assert {one.step for one in manager.history() if one.abandoned} == {900, 1000}  # kept
    (said,) = [record.getMessage() for record in caplog.records if "abandoned" in record.getMessage()]
    assert "900, 1000" in said
    assert _restored(tmp_path) == 30 and _restored(tmp_path, step=1000) == 1000
    _run(tmp_path, 1000)
    assert _restored(tmp_path) == 1000


@pytest.mark.parametrize("begin", ["restored", "read only", "nothing to restore", "saved"])
def test_steps_that_a_manager_knows_of_are_not_an_older_runs(begin: str, tmp_path: Path) -> None:
    """After a restore, whatever it found, and after the first save, other jobs' steps are theirs."""
    if begin != "nothing to restore":
        _run(tmp_path, 1, 900) if begin == "read only" else _run(tmp_path, 1)
    manager = CheckpointManager(tmp_path)
    if begin == "saved":
        manager.save(2, _state(2))
        manager.close()  # others may hold the root
    else:
        manager.restore(_state(0), read_only=begin == "read only")
    _run(tmp_path, 1000)
    manager.save(10, _state(10))
    manager.close()
    assert manager.steps()[-2:] == [900 if begin == "read only" else 10, 1000]


def test_a_root_that_another_job_writes_keeps_its_steps(tmp_path: Path) -> None:
    """A second job that restores nothing marks no step of a live one, and says so."""
    with _other_job(tmp_path):
        with (
            pytest.warns(UserWarning, match=re.escape(str(tmp_path))),
            CheckpointManager(tmp_path) as manager,
        ):
            manager.save(1, _state(1))
        assert manager.steps() == [1, 3] and not (tmp_path / "run.json").exists()


def test_memory_of_an_older_run_is_not_restored(tmp_path: Path) -> None:
    """A run that restores nothing has a branch of its own, also if no step on disk is later."""

    def ram() -> RamTier:
        return RamTier("run", folder=tmp_path / "shm", keep_last=9)

    never = EverySteps(10)
    _run(tmp_path / "run", 11, 12, ram=ram(), save_policy=never)
    _run(tmp_path / "run", 10, 11, ram=ram(), save_policy=never)
    state = _state(-1)
    restored = CheckpointManager(tmp_path / "run", ram=ram()).restore(state, read_only=True)
    assert restored is not None and (restored.step, restored.tier) == (11, "ram")


def test_memory_of_a_node_that_returns_is_not_restored(tmp_path: Path) -> None:
    """The run has gone on from the disk without the node, also if no rank saw any later step meanwhile."""

    def manager() -> CheckpointManager:
        ram = RamTier("run", folder=tmp_path / "shm", keep_last=9)
        return CheckpointManager(tmp_path / "run", ram=ram, save_policy=EverySteps(10))

    def go_on(*steps: int) -> int:
        with manager() as running:
            restored = running.restore(_state(-1))
            for step in steps:
                running.save(step, _state(step))
        return restored.step if restored is not None else 0

    lost = tmp_path / "lost"
    assert go_on(10, 11, 15) == 0
    (tmp_path / "shm").rename(lost)
    assert go_on() == 10
    rmtree(tmp_path / "shm")
    lost.rename(tmp_path / "shm")
    assert go_on() == 15  # the run has not gone on meanwhile
    (tmp_path / "shm").rename(lost)
    assert go_on(11, 12) == 10
    returned = "vescale-run/step-00000015"
    (lost / returned).rename(tmp_path / "shm" / returned)
    assert go_on(13) == 12
    assert go_on() == 13
    assert not (tmp_path / "shm" / returned).exists()  # removed by the save


def test_metrics_of_an_older_run_do_not_count(tmp_path: Path) -> None:
    """Of the steps that the first save will abandon."""
    policy = EverySteps(100) | BestOf(1)
    with CheckpointManager(tmp_path, save_policy=policy) as older:
        older.save(1000, _state(1000), metric=0.1)
    with CheckpointManager(tmp_path, save_policy=policy) as manager:
        assert manager.should_save(1, metric=1.0)
        manager.save(1, _state(1))
        assert not manager.should_save(2, metric=1.0) and manager.should_save(3, metric=0.5)


def test_metrics_of_an_abandoned_branch_do_not_count(tmp_path: Path) -> None:
    """A new branch has its own best steps."""
    manager = CheckpointManager(tmp_path, save_policy=EverySteps(10) | BestOf(1))
    for step, metric in ((10, 5.0), (20, 0.1)):
        manager.save(step, _state(step), metric=metric)
    manager.restore(_state(0), step=10)
    manager.save(11, _state(11), force=True)
    manager.close()
    again = CheckpointManager(tmp_path, save_policy=BestOf(1))
    assert again.should_save(12, metric=1.0)
    again.close()


def test_memory_follows_a_rollback_and_knows_its_run(tmp_path: Path) -> None:
    """Steps in memory of the branch that was left, and of another root's run, are neither restored nor kept."""

    def ram() -> RamTier:
        return RamTier("run", folder=tmp_path / "shm", keep_last=9)

    never = EverySteps(10)
    _run(tmp_path / "a", 10, 11, 12, ram=ram(), save_policy=never)
    assert _restored(tmp_path / "a", ram=ram()) == 12
    assert (
        CheckpointManager(tmp_path / "b", ram=ram()).restore(_state(0)) is None
    )  # another run, of the same name
    manager = CheckpointManager(tmp_path / "a", ram=ram(), save_policy=never)
    manager.restore(_state(0), step=10)
    manager.save(11, _state(11))
    manager.close()
    assert _restored(tmp_path / "a", ram=ram()) == 11
    held = sorted(path.name for path in (tmp_path / "shm" / "vescale-run").glob("step-*"))
    assert held == ["step-00000010", "step-00000011"]

    _run(tmp_path / "b", 1, ram=ram(), save_policy=never)
    assert _restored(tmp_path / "b", ram=ram()) == 1
    assert _restored(tmp_path / "a", ram=ram()) == 10  # from disk: the other run has taken the memory


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"branches": [], "abandoned": {}}', b'{"branches": [["x", null]], "abandoned": {}}']
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, raw: bytes) -> None:
    """It never stops a restore, and it is named."""
    _run(tmp_path, 1)
    (tmp_path / "run.json").write_bytes(raw)
    with pytest.warns(UserWarning, match=r"\brun\.json\b"):
        assert _restored(tmp_path) == 1


def test_a_flipped_bit_never_changes_which_steps_are_abandoned(tmp_path: Path) -> None:
    """Every byte has a part in the checksum: without it, another digest would make an abandoned step live again."""
    before = RunFile.new().rolled_back(90, {100: "0123456789abcdef" * 2})
    before.write(storage := LocalStorage(tmp_path))
    assert read_run_file(storage) == before
    raw = (tmp_path / "run.json").read_bytes()
    for at in range(len(raw)):
        (tmp_path / "run.json").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.warns(UserWarning, match=r"\brun\.json\b"):
            assert read_run_file(storage) is None


def test_branches() -> None:
    """Steps of a branch that was left count up to where it was left, however often that happens."""
    first = RunFile.new()
    second = first.rolled_back(90, {100: "d"})
    third = second.rolled_back(50, {})
    a, b, c = (run.branch + "0" * 8 for run in (first, second, third))
    assert len({a, b, c}) == 3
    assert [second.includes(90, a), second.includes(91, a), second.includes(91, b)] == [True, False, True]
    assert [third.includes(51, a), third.includes(51, b), third.includes(50, b), third.includes(51, c)] == [
        False,
        False,
        True,
        True,
    ]
    assert not third.includes(1, "f" * 16) or "f" * 8 in {first.branch, second.branch, third.branch}
    assert third.abandoned == {100: "d"} and second.rolled_back(100, {}).abandoned == {}
