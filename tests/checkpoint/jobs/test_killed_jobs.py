"""Jobs killed with SIGKILL that go on with other numbers of workers: ranks, and torchrun jobs at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoint.jobs.elastic_job import train
from tests.support.distributed import RankError, run_ranks
from tests.support.processes import wait_until
from tools.torchrun_job import Job
from vescale_fsdp.checkpoint import CheckpointManager

STEPS, FEW_STEPS = 40, 10


def _job(folder: Path, workers: int, *args: str, restarts: int = 0) -> Job:
    # torch 2.13: restarted gloo workers find their predecessors' addresses in the store they share with torchrun.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    arguments = [str(folder), str(STEPS), *args]
    options = [f"--max-restarts={restarts}"]
    logs = folder / "logs" / secrets.token_hex(4)
    return Job(
        "tests.checkpoint.jobs.elastic_job", workers, arguments, logs, options=options, environment=own_store
    )


def _losses(folder: Path) -> dict[int, float]:
    """The last loss logged for each step; a line torn by a kill is not counted."""
    found = {}
    if (folder / "log").exists():
        for line in (folder / "log").read_text().splitlines():
            words = line.split()
            if len(words) == 3:
                found[int(words[0])] = float(words[1])
    return found


def _last_saved(folder: Path) -> int:
    """The last step that `save` has returned from."""
    saved = folder / "saved"
    return max((int(line) for line in saved.read_text().splitlines()), default=-1) if saved.exists() else -1


def _wait_for_step(folder: Path, step: int, job: Job | None = None) -> None:
    """Return when a step is saved."""

    def is_saved() -> bool:
        return _last_saved(folder) >= step

    def is_saved_or_over() -> bool:
        return is_saved() or (job is not None and job.process.poll() is not None)

    wait_until(is_saved_or_over, f"step {step}", limit_s=120, state=job.output if job else str)
    assert is_saved(), job and job.output()


def _kill_workers(folder: Path) -> None:
    """SIGKILL for every worker, as when the machine stops."""
    for path in (folder / "pids").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)
    shutil.rmtree(folder / "pids")


@pytest.mark.part("jobs")
def test_killed_ranks_go_on_as_three(tmp_path: Path) -> None:
    """Two ranks are killed in the middle: with those of three, the loss curve is that of one run."""
    run_ranks(2, train, tmp_path / "whole", FEW_STEPS, None)
    killed = tmp_path / "killed"
    killed.mkdir()
    with ThreadPoolExecutor(1) as killer:

        def kill() -> None:
            _wait_for_step(killed, 3)
            _kill_workers(killed)

        killing = killer.submit(kill)
        with pytest.raises(RankError):
            run_ranks(2, train, killed, FEW_STEPS, None)
        killing.result(0)
    run_ranks(3, train, killed, FEW_STEPS, None)

    whole, losses = _losses(tmp_path / "whole"), _losses(killed)
    assert sorted(losses) == sorted(whole) == list(range(FEW_STEPS)) and whole[FEW_STEPS - 1] < whole[0]
    assert losses == pytest.approx(whole, rel=1e-4)
    ((step, _, world),) = [line.split() for line in (killed / "restored").read_text().splitlines()]
    assert world == "3" and int(step) >= 1
    assert CheckpointManager(killed / "steps").steps()[-1] == FEW_STEPS - 1


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run of two workers that nobody disturbs, without torchrun."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks(2, train, folder, STEPS, None)
    losses = _losses(folder)
    assert len(losses) == STEPS and losses[STEPS - 1] < losses[0]
    return losses


@pytest.mark.part("jobs")
def test_killed_jobs_go_on_with_other_numbers_of_workers(
    uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    """2, 3 and 1 workers in turn, all killed in the middle: the loss curve is that of one run."""
    moments = random.Random(3)
    for workers, step in ((2, 8), (3, 17), (1, 26)):
        with _job(tmp_path, workers) as job:
            _wait_for_step(tmp_path, step, job)
            time.sleep(moments.uniform(0, 0.05))  # any moment of a step
            _kill_workers(tmp_path)
    _job(tmp_path, 2).wait()

    losses = _losses(tmp_path)
    assert sorted(losses) == list(range(STEPS))
    for step, loss in losses.items():
        assert loss == pytest.approx(uninterrupted[step], rel=1e-4), step
    restored = [line.split() for line in (tmp_path / "restored").read_text().splitlines()]
    assert [world for _, _, world in restored] == ["3", "1", "2"]
    assert all(int(step) >= at - 2 for (step, _, _), at in zip(restored, (8, 17, 26), strict=True))
    assert CheckpointManager(tmp_path / "steps").steps()[-1] == STEPS - 1


@pytest.mark.part("jobs")
def test_a_killed_worker_is_restarted_from_memory(uninterrupted: dict[int, float], tmp_path: Path) -> None:
    """torchrun restarts the workers in place; they go on from the node's memory, not from the older disk step."""
    name = f"test-{os.getpid()}-{tmp_path.name}"
    try:
        with _job(tmp_path, 2, name, restarts=2) as job:
            _wait_for_step(tmp_path, 14, job)
            os.kill(int((tmp_path / "pids" / "1").read_text()), signal.SIGKILL)
            job.wait()
    finally:
        shutil.rmtree(f"/dev/shm/vescale-{name}", ignore_errors=True)

    losses = _losses(tmp_path)
    assert sorted(losses) == list(range(STEPS))
    for step, loss in losses.items():
        assert loss == pytest.approx(uninterrupted[step], rel=1e-4), step
    ((step, tier, world),) = [line.split() for line in (tmp_path / "restored").read_text().splitlines()]
    assert (tier, world) == ("ram", "2") and int(step) >= 13
