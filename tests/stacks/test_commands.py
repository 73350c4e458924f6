"""Each example by the command of its docstring, under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.torchrun_job import Job


@pytest.mark.parametrize("stack", ["accelerate", "automodel", "trainer", "trl_lora"])
def test_the_command_runs(stack: str, tmp_path: Path) -> None:
    """It trains and learns, without a warning of ours."""
    arguments = ["--out", str(tmp_path / "run"), "--steps", "12", "--save-at", "6"]
    Job(f"examples.{stack}.train", 2, arguments, tmp_path / "log").wait()

    log = (tmp_path / "log").read_text()
    (result, *_) = [json.loads(line) for line in log.splitlines() if line.startswith('{"first"')]
    assert result["last"][0] < result["first"][0]
    assert "BoundNames" not in log and "Untried" not in log
