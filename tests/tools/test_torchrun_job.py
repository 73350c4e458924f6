"""Jobs under torchrun: each rank's output is apart, and a job that hangs ends with the stacks of all ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tools.torchrun_job import Job, JobFailed

MODULE = """
import os
import sys
import time
from pathlib import Path

def waits_for_ever():
    (Path(sys.argv[1]) / os.environ["RANK"]).touch()
    while True:
        time.sleep(1)

print("rank", os.environ["RANK"])
waits_for_ever()
"""


@pytest.mark.part("jobs")
def test_a_job_that_hangs_shows_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    """At its deadline; no process is left."""
    (tmp_path / "hangs.py").write_text(MODULE)
    job = Job("hangs", 2, [str(tmp_path)], tmp_path / "logs", folder=tmp_path)
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "ranks", state=job.output)
    job.deadline_s = time.monotonic()

    with pytest.raises(JobFailed):
        job.wait()
    logs = [file.read_text() for file in sorted((tmp_path / "logs").rglob("stderr.log"))]
    assert len(logs) == 2 and all("waits_for_ever" in log for log in logs)
    assert all(log in job.output() for log in logs)
    assert job.process.poll() is not None
