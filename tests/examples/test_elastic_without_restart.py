"""The example's one command, as a user would run it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_command

ROOT = Path(__file__).parents[2]


@pytest.mark.part("jobs")
def test_a_rank_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    """4, 3 and 4 ranks in turn, of the same processes but for the killed one and the one that joins."""
    command = [
        sys.executable,
        "-m",
        "examples.elastic_without_restart",
        "--out",
        str(tmp_path),
        "--seq-len",
        "16",
    ]
    done = run_command(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout_s=500,
        logs=lambda: tmp_path.glob("log*"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout and "restarted" in done.stdout

    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    ranks = [line["ranks"] for line in lines]
    first_of_three = ranks.index(3)
    assert ranks[0] == ranks[-1] == 4 and first_of_three >= 6
    assert (
        lines[first_of_three]["step"] >= lines[first_of_three - 1]["step"]
    )  # the step under way, and no other
    # Ranks follow the processes' ports, so the process that joins may become rank 0. Each process has one log.
    assert lines[0]["pid"] not in {line["pid"] for line in lines[first_of_three:]}
    assert len(list(tmp_path.glob("log*"))) == 5
    assert lines[-1]["loss"] < lines[0]["loss"]
