"""Each example by the command of its docstring, under torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.torchrun_job import Job

# Packages whose modules a stack imports if they are installed, and does not use on this model.
BESIDE = {"verl": ("nemo_automodel.", "megatron.")}
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
    output = job.output()
    assert "UntriedVersionWarning" not in output
    bound = re.findall(r"BoundNamesWarning:.*?\n *got: (.*?)\n", output, re.DOTALL)
    assert len(bound) == output.count("BoundNamesWarning:")
    modules = [module for text in bound for module in text.split("; ")]
    assert all(module.startswith(BESIDE.get(stack, ())) for module in modules), modules
