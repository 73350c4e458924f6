"""`restore` beside a job that saves: steps that vanish, or are saved anew, while they are read."""

from __future__ import annotations

import itertools
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.distributed import forkserver, run_ranks
from tests.support.faults.saved_steps import WatchedRoot, outcome_of, save_steps, state_of, value_of
from tests.support.processes import join, receive
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.checkpoint.load import Verify
from vescale_fsdp.checkpoint.steps.step_folders import remove_step
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError, PartialLoadError


class _Replaced:
    """Another job that keeps one step: at operation ``number`` of a restore it saves the next and removes the last."""

    def __init__(self, root: Path, first: int, number: int, same_step: bool) -> None:
        self.root, self.step, self.number, self.same_step = root, first, number, same_step
        self.count = 0
        self.seen: list[str] = []

    def __call__(self, operation: str) -> None:
        self.seen.append(operation)
        self.count += 1
        if self.count - 1 == self.number:
            if not self.same_step:
                # As a job removes it: with the manifest gone first, no reader meets a part of a step.
                assert remove_step(LocalStorage(self.root), self.step) is None
                self.step += 1
            save_steps(self.root, [self.step])


@pytest.mark.parametrize("verify", ["before", "while", "never"])
def test_a_step_that_vanishes_is_no_damage(verify: Verify, tmp_path: Path) -> None:
    """Whenever in a restore the step goes and the next one comes, the next one is restored, whole."""
    step = 1
    save_steps(tmp_path, [step])
    for number in itertools.count():
        job = _Replaced(tmp_path, step, number, same_step=False)
        # Only reading: else later steps are listed when the load is over.
        outcome = outcome_of(CheckpointManager(WatchedRoot(tmp_path, job)), verify=verify, read_only=True)
        if job.count <= number:
            break
        assert outcome[0] in (job.step, step) and outcome[1] == "()", job.seen
        assert outcome[0] == job.step or {*job.seen[number:]} <= {"read_at", "view"}
        step = job.step
    assert step == number + 1 and number > 6
    (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    assert outcome_of(CheckpointManager(tmp_path)) == (None, "")


def _replaced_on_ranks(root: Path, hit_rank: int, same_step: bool) -> int:
    step = 1
    for number in range(100):
        job = _Replaced(root, step, number if dist.get_rank() == hit_rank else -1, same_step)
        outcome = outcome_of(CheckpointManager(WatchedRoot(root, job)))
        found: list[Any] = [None, None]
        dist.all_gather_object(found, (job.count > job.number, job.step, outcome))
        assert found[0][2] == found[1][2], found
        if not found[hit_rank][0]:
            return number
        assert found[0][2][0] in (step, found[hit_rank][1]) and found[0][2][1] == "()", (found, job.seen)
        step = found[hit_rank][1]
    raise AssertionError("a restore of a hundred operations")


@pytest.mark.parametrize("same_step", [False, True])
def test_ranks_end_with_the_same_step(same_step: bool, tmp_path: Path) -> None:
    """Also where it vanishes, or is saved anew under its number, between what two ranks do."""
    for hit_rank in (0, 1):
        root = tmp_path / f"{hit_rank}"
        save_steps(root, [1])
        first, second = run_ranks(2, _replaced_on_ranks, root, hit_rank, same_step)
        assert first == second > 7


def _save_until_told(root: str, pipe: Connection) -> None:
    manager = CheckpointManager(root, retention=1)
    step = 0
    # Pauses of 20 ms: ranks list within fewer, and could never agree on a step that is gone before both have seen it.
    while not pipe.poll(0.02):
        step += 1
        manager.save(step, state_of(step))
        if step == 1:
            pipe.send(step)
    pipe.send(step)


def _restore_often(root: Path, times: int) -> list[int]:
    found: list[int] = []
    # However slowly the other job saves beside other work: all ranks restore the same steps, so all stop alike.
    while len(found) < times or len(set(found)) <= 10:
        state = state_of(0)
        restored = CheckpointManager(root).restore(state)
        assert restored is not None and not restored.skipped
        assert value_of(state) == restored.step
        found.append(restored.step)
    return found


@pytest.mark.parametrize(
    ("world", "times"),
    [(2, 30), *(pytest.param(*row, marks=pytest.mark.part("faults")) for row in ((1, 300), (2, 100)))],
)
def test_restoring_beside_a_job_that_saves(world: int, times: int, tmp_path: Path) -> None:
    """Hundreds of restores while another process saves and keeps one step: none fails, each is of one step."""
    context = forkserver()
    ours, theirs = context.Pipe()
    process = context.Process(target=_save_until_told, args=(str(tmp_path), theirs))
    process.start()
    try:
        assert receive(ours, "the first step") == 1
        found = run_ranks(world, _restore_often, tmp_path, times)
    finally:
        ours.send("stop")
        last = receive(ours, "the last step")
        join(process)
    assert all(steps == sorted(steps) and steps == found[0] for steps in found)
    assert len(found[0]) >= times and len(set(found[0])) > 10 and found[0][-1] <= last


def test_steps_that_vanish_for_good(tmp_path: Path) -> None:
    """If the only step goes while it is read, restoring raises and names what of the state may hold some of it."""
    save_steps(tmp_path, [1])

    seen: list[str] = []

    def remove(operation: str) -> None:
        seen.append(operation)
        if seen.count("read_at") == 3:  # the first two read the header
            shutil.rmtree(tmp_path / "step-00000001", ignore_errors=True)
            raise FileNotFoundError(tmp_path)

    kind, text = outcome_of(CheckpointManager(WatchedRoot(tmp_path, remove)))
    assert kind is PartialLoadError and str(tmp_path) in text and ": w, v" in text


def test_a_step_that_vanishes_every_time(tmp_path: Path) -> None:
    """Restoring gives up when its patience is over, and not before it has tried three times."""
    job = _Replaced(tmp_path, 1, -1, same_step=False)
    save_steps(tmp_path, [1])

    def replace(operation: str) -> None:
        if operation == "open_file":
            job.count, job.number = 0, 0
            job(operation)

    kind, text = outcome_of(CheckpointManager(WatchedRoot(tmp_path, replace)), patience_s=0)
    assert kind is CheckpointError and "patience_s" in text and job.step == 4
