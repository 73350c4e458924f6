"""Examples on ranks of the test harness, and what accelerate, Trainer and TRL must all show."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from examples.stacks.options import Options
from tests.support.command import vescale_convert
from tests.support.distributed import run_ranks
from vescale_fsdp import FSDPModule
from vescale_fsdp.integrations import installation as installation_module

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
        done = vescale_convert(*arguments)
        assert done.exit_code == 0, done.output
    state: dict[str, dict[str, torch.Tensor]] = torch.load(out)
    return state["model"]


def run_example(world_size: int, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What rank 0 returns of ``train(*args, **kwargs)``, after all ranks have returned the same."""
    results = run_on_ranks(world_size, train, *args, **kwargs)
    assert all(result == results[0] for result in results)
    return results[0]


def run_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What each rank returns of ``fn(*args, **kwargs)``."""
    return run_ranks(world_size, _as_under_torchrun, fn, args, kwargs, timeout_s=300.0)


def _as_under_torchrun(train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from accelerate.state import AcceleratorState, GradientState  # only in the venv of the stacks

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    under_torchrun = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "OMP_NUM_THREADS": "1",
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with patch.dict(os.environ, under_torchrun):  # what plugins write there goes with it
        try:
            return train(*args, **kwargs)
        finally:
            _uninstall_all()


def _uninstall_all() -> None:
    for installation in list(installation_module._installed):  # those that examples leave active
        installation.uninstall()


def divide_once_more(model: nn.Module) -> None:
    """The control: gradients left at 1/N of what they should be, as where a stack takes ours for no FSDP2."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(dist.get_world_size() ** 2))
