"""Jobs that are sent SIGTERM while they save: the final step is there, whole, and nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoint.jobs.preempted_job import FIRST_SAVE, train
from tests.support.distributed import run_ranks
from vescale_fsdp.checkpoint import CheckpointManager, latest, read_state, verify

ROOT = Path(__file__).parents[3]


def _wait_for(path: Path, has_ended: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        if has_ended() or time.monotonic() > deadline:
            raise AssertionError(
                f"{path} is missing\n{output.read_text()[-3000:] if output.exists() else ''}"
            )
        time.sleep(0.01)


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
            _wait_for(tmp_path / "writing", lambda: False, tmp_path / "output")
            os.kill(_workers(tmp_path)[1], signal.SIGTERM)

        ending = signaller.submit(end)
        run_ranks(2, train, tmp_path, True)
        ending.result()
    _check_final_step(tmp_path)


@pytest.mark.part("jobs")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_that_is_to_end_saves_once_more(mode: str, tmp_path: Path) -> None:
    """The signal comes during a save; behind training it comes twice, to all processes at once as from Slurm."""
    output = tmp_path / "output"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--monitor-interval=0.2", "-m", "tests.checkpoint.jobs.preempted_job", str(tmp_path), mode]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(output, "wb") as file:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        _wait_for(tmp_path / "writing", lambda: job.poll() is not None, output)
        for process in _workers(tmp_path) if mode == "async" else []:
            os.kill(process, signal.SIGTERM)
        job.send_signal(signal.SIGTERM)
        job.wait(60)
    finally:
        job.kill()
        job.wait()

    _check_final_step(tmp_path, output.read_text()[-3000:])
