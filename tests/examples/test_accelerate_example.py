"""accelerate's example: its package is small, so every run of the tests has it. All of it is in tests/stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.stacks.options import Options
from examples.stacks.train_accelerate import train
from tests.stacks.jobs.example_ranks import LARGEST, divide_once_more, run_example


@pytest.mark.part("jobs")
def test_losses_are_fsdp2s(tmp_path: Path) -> None:
    """A few clipped steps of two micro-batches and a save: stock FSDP2's bits, which wrongly divided gradients miss."""
    clip = {"norm_type": LARGEST, "max_norm": 0.05}
    stock, ours, control = (
        run_example(2, train, Options(tmp_path / name, runtime, steps, 2, **clip), **more)
        for name, runtime, steps, more in (
            ("stock", "fsdp2", 4, {}),
            ("ours", "vescale", 4, {}),
            ("control", "vescale", 2, {"prepared": divide_once_more}),
        )
    )

    assert len(stock) == 4 and stock[1] != stock[0]
    assert ours == stock
    assert control[0][0] == stock[0][0] and control[1] != stock[1]
