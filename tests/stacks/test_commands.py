"""Each example by the command of its docstring, under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.torchrun_job import Job

SAVES_IN_THE_MIDDLE = ("accelerate", "automodel", "trainer", "trl_lora", "verl")


@pytest.mark.parametrize("stack", [*SAVES_IN_THE_MIDDLE, "fabric", "lightning"])
def test_the_command_trains(stack: str, tmp_path: Path) -> None:
    """Losses fall, without a warning of this library."""
    out, arguments = tmp_path / "run", ["--steps", "12"]
    if stack in SAVES_IN_THE_MIDDLE:
        arguments += ["--save-at", "6"]
    job = Job(f"examples.stacks.train_{stack}", 2, ["--out", str(out), *arguments], tmp_path / "logs")
    job.wait()

    first, *_, last = json.loads((out / "losses.json").read_text())
    assert last < first  # by the loss, which stands before the norm of gradients
    assert "BoundNamesWarning" not in job.output() and "UntriedVersionWarning" not in job.output()
