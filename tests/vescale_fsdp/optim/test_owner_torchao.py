"""`OwnerOptimizer` with torchao's optimizers, which compile their steps and whose moments are tensor subclasses."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.optim import OwnerOptimizer

# The compiler and torchao warn of their own code.
pytestmark = [pytest.mark.part("numerics"), pytest.mark.filterwarnings("ignore")]
_STEPS = 4


def _class_of(name: str) -> Any:
    logging.getLogger("torchao").setLevel(logging.CRITICAL)  # reports kernels that this machine cannot load
    return getattr(importlib.import_module("torchao.optim"), name)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 128), nn.Linear(128, 128, bias=False)
    )  # moments of 4096 items are coded


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(name: str, folder: Path) -> list[torch.Tensor]:
    """Train, save after half of the steps, and go on from the save with a new model and optimizer."""
    for steps in (range(_STEPS // 2), range(_STEPS // 2, _STEPS)):
        model = _model()
        fully_shard(model, granularity="whole")
        optimizer = OwnerOptimizer(_class_of(name), model.parameters(), lr=3e-3)
        if steps.start:
            load(folder / name, {"model": model, "optimizer": optimizer})
        _train(model, optimizer, steps)
        save(folder / name, {"model": model, "optimizer": optimizer}, overwrite=True)
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_values_are_torchaos(name: str, tmp_path: Path) -> None:
    """To the bit, also over a save and a load."""
    pytest.importorskip("torchao", reason="the optimizers of these tests: pip install torchao")
    alone = _model()
    _train(alone, _class_of(name)(alone.parameters(), lr=3e-3), range(_STEPS))
    for values in run_ranks(2, _trained, name, tmp_path):
        assert all(torch.equal(own, param) for own, param in zip(values, alone.parameters(), strict=True))
