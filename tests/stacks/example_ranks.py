"""run_example: an example's `train` on ranks of the test harness, as torchrun would start it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from tests.support.distributed import run_ranks
from vescale_fsdp import FSDPModule
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.integrations import uninstall

__all__ = ["divide_once_more", "run_example", "run_on_ranks"]


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
    while True:
        try:
            uninstall()
        except LifecycleError:
            return


def divide_once_more(model: nn.Module) -> None:
    """The control: gradients left at 1/N of what they should be, as where a stack takes ours for no FSDP2."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(dist.get_world_size() ** 2))
