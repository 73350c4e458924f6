"""The steps of `make check` that are not tests themselves: format, lint, types."""

from __future__ import annotations

import pytest

from tools.check import run_step


@pytest.mark.timeout(600)  # mypy takes a minute where it has no cache
@pytest.mark.parametrize("step", ["types", "lint", "format"])
def test_a_step_of_the_gate_passes(step: str) -> None:
    """What a failed step prints is in this test's output."""
    assert run_step(step)
