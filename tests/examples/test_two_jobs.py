"""The example of a trainer and an engine that separate torchrun commands start."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tools.torchrun_job import Job


@pytest.mark.part("jobs")
@pytest.mark.parametrize(("trainers", "engines"), [(2, 1), (1, 2)])
def test_the_engine_has_the_weights_of_every_step(tmp_path: Path, trainers: int, engines: int) -> None:
    """Both jobs compute the same bits from each version, and every version is another one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = [f"--meet=tcp://127.0.0.1:{port}", f"--trainers={trainers}", f"--engines={engines}"]

    def start(job: str, ranks: int) -> Job:
        arguments = [job, *shared, f"--outputs={tmp_path / job}.json"]
        return Job("examples.two_jobs", ranks, arguments, tmp_path / job)

    with start("serve", engines) as engine, start("train", trainers) as trainer:
        trainer.wait()
        engine.wait()

    trained, served = (json.loads((tmp_path / f"{job}.json").read_text()) for job in ("train", "serve"))
    assert trained == served
    assert [version for version, _ in served] == [1, 2, 3, 4, 5]
    assert len({output for _, output in served}) == 5
