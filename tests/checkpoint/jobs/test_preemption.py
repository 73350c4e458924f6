"""Jobs that are sent SIGTERM while they save: the final step is there, whole, and nobody hangs."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoint.jobs.preempted_job import FIRST_SAVE, train
from tests.support.distributed import run_ranks
from tests.support.processes import wait_until
from tools.torchrun_job import Job, JobFailed
from vescale_fsdp.checkpoint import CheckpointManager, latest, read_state, verify


def _workers(folder: Path) -> list[int]:
    return [int((folder / "pids" / str(rank)).read_text()) for rank in range(2)]


def _check_final_step(folder: Path, told: str = "") -> None:
    """All ranks ended after one step, which is saved and whole."""
    ended = sorted((folder / "ended").iterdir())
    assert len(ended) == 2 and len({path.read_text() for path in ended}) == 1, told
    step = int(ended[0].read_text())
    assert step > FIRST_SAVE and CheckpointManager(folder / "steps").steps()[-1] == step, told
    newest = latest(folder / "steps")
    assert newest is not None and verify(newest).ok
    assert torch.equal(read_state(newest)["w"].read(), torch.full((1000,), step))


def test_ranks_that_are_to_end_save_once_more(tmp_path: Path) -> None:
    """The signal comes to one rank, during a save behind training."""
    with ThreadPoolExecutor(1) as signaller:

        def end() -> None:
            wait_until((tmp_path / "writing").exists, "a save")
            os.kill(_workers(tmp_path)[1], signal.SIGTERM)

        ending = signaller.submit(end)
        run_ranks(2, train, tmp_path, True)
        ending.result(0)
    _check_final_step(tmp_path)


@pytest.mark.part("jobs")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_that_is_to_end_saves_once_more(mode: str, tmp_path: Path) -> None:
    """The signal comes during a save; behind training it comes twice, to all processes at once as from Slurm."""
    arguments = [str(tmp_path), mode]
    with Job("tests.checkpoint.jobs.preempted_job", 2, arguments, tmp_path / "logs") as job:
        wait_until((tmp_path / "writing").exists, "a save", limit_s=120, state=job.output)
        for process in _workers(tmp_path) if mode == "async" else []:
            os.kill(process, signal.SIGTERM)
        job.process.send_signal(signal.SIGTERM)
        with pytest.raises(JobFailed):  # torchrun's status, after a signal
            job.wait()
        _check_final_step(tmp_path, job.output())
