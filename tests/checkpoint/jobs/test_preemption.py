"""Real torchrun jobs that are sent SIGTERM while they save: the final step is there, whole, and nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.jobs.preempted_job import FIRST_SAVE
from vescale_fsdp.checkpoint import CheckpointManager, latest, read_state, verify

ROOT = Path(__file__).parents[3]


def _wait_for(path: Path, job: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert job.poll() is None and time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.01)


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
        _wait_for(tmp_path / "writing", job, output)
        workers = [int((tmp_path / "pids" / str(rank)).read_text()) for rank in range(2)]
        for process in workers if mode == "async" else []:
            os.kill(process, signal.SIGTERM)
        job.send_signal(signal.SIGTERM)
        job.wait(60)
    finally:
        job.kill()
        job.wait()

    told = output.read_text()[-3000:]
    ended = sorted((tmp_path / "ended").iterdir())
    assert len(ended) == 2 and len({path.read_text() for path in ended}) == 1, told
    step = int(ended[0].read_text())
    assert step > FIRST_SAVE and CheckpointManager(tmp_path / "steps").steps()[-1] == step, told
    newest = latest(tmp_path / "steps")
    assert newest is not None and verify(newest).ok
    assert torch.equal(read_state(newest)["w"].read(), torch.full((1000,), step))
