"""What accelerate, Trainer and TRL must all show: stock FSDP2's losses, resumes, and saves that open anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from click.testing import CliRunner

from examples.stack_options import Options
from tests.stacks.example_ranks import divide_once_more, run_example
from vescale_fsdp.conversion.cli.main import cli as vescale_convert

__all__ = ["HALF", "KINDS", "LARGEST", "History", "check_losses", "control_of", "converted"]

HALF = 25
KINDS = [("SHARDED_STATE_DICT", False), ("FULL_STATE_DICT", True)]  # and cpu_ram_efficient_loading
# Clips the largest gradient, whose value does not depend on how gradients are cut: a sum of squares does, in its last
# bits.
LARGEST = math.inf

History = list[tuple[float, float]]
Train = Callable[..., History]


def check_losses(train: Train, options: Options, saved: str, stock: History) -> None:
    """Two ranks have stock's bits, resumed in the middle too, and three ranks go on from there."""
    whole = run_example(2, train, options)
    again = replace(options, out=options.out / "again", resume=options.out / saved)
    resumed = run_example(2, train, again)
    others = run_example(3, train, replace(again, out=options.out / "others"))

    assert len(stock) == 2 * HALF and stock[-1][0] < stock[0][0]
    assert sum(norm > options.max_norm for _, norm in stock) > HALF // 2  # clipped often
    assert whole == stock
    assert resumed[-HALF:] == stock[HALF:]
    torch.testing.assert_close(torch.tensor(others[-HALF:]), torch.tensor(stock[HALF:]), rtol=2e-3, atol=1e-4)


def control_of(train: Train, options: Options) -> History:
    """Ten steps with gradients divided by the number of ranks once more, the first of which has stock's loss."""
    few = replace(options, out=options.out / "control", steps=10, save_at=100)
    return run_example(2, train, few, prepared=divide_once_more)


def converted(saved: Path, out: Path) -> dict[str, torch.Tensor]:
    """The model of a save, which ``vescale-convert inspect`` shows, as ``to-torch`` writes it."""
    for arguments in (["inspect", str(saved)], ["to-torch", str(saved), str(out)]):
        done = CliRunner().invoke(vescale_convert, arguments)
        assert done.exit_code == 0, done.output
    state: dict[str, dict[str, torch.Tensor]] = torch.load(out)
    return state["model"]
