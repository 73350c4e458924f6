"""What a step launches on an accelerator: numbers that do not grow with the parameters."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.runtime.comm.test_launches import VIEWS, Launches
from vescale_fsdp.layout.granularity import Flat, Tiles
from vescale_fsdp.optim import AdamW8bit, adamw8bit
from vescale_fsdp.optim.muon.newton_schulz import NewtonSchulz

SHAPES = [(64, 96), (40, 96), (33, 96), (16,), (64, 256), (5, 96)]


def train(count: int, batched: bool, **options: Any) -> tuple[list[torch.Tensor], int]:
    """Three steps of so many times the parameters; all that the last one launches."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES * count]
    optimizer = AdamW8bit(params, lr=1e-2, **options)
    launched = 0
    with mock.patch.object(adamw8bit, "_launches", return_value=batched):
        for step in range(3):
            for number, param in enumerate(params):
                param.grad = None if number == 1 and step == 1 else torch.randn(param.shape)
            with Launches() as seen:
                optimizer.step()
            launched = sum(number for name, number in seen.names.items() if name not in VIEWS | HOST)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [param.detach() for param in params] + states, launched


HOST = {"aten.add_", "aten._local_scalar_dense", "aten.split", "aten.slice", "aten.reshape", "aten.alias"}


@pytest.mark.parametrize(
    ("block", "most"), [(Flat(32), 0), (Flat(50), 32), (Tiles(8, 32), 8), (Tiles(8, 20), 88)]
)
def test_8bit_steps_are_launched_once_for_all(block: Any, most: int) -> None:
    """Parameters with blocks alike are stepped as one, with the bits of one by one.

    Twelve parameters more launch nothing more, but a pad for each tensor whose blocks do not come out even.
    """
    options = {"block": block, "min_8bit_numel": 600}
    alone, many = train(2, batched=False, **options)
    together, _ = train(2, batched=True, **options)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert len(alone) > 60
    _, twice = train(4, batched=True, **options)
    _, once = train(2, batched=True, **options)
    assert twice - once <= most, (once, twice)
    assert once < many / 2


def test_8bit_batches_are_bounded() -> None:
    """More than a batch holds is stepped in several, with the same bits."""
    alone, _ = train(2, batched=False, min_8bit_numel=600)
    with mock.patch.object(adamw8bit, "_BATCH_NUMEL", 12_000):
        parts, few = train(2, batched=True, min_8bit_numel=600)
    _, one = train(2, batched=True, min_8bit_numel=600)
    assert all(torch.equal(*pair) for pair in zip(alone, parts, strict=True))
    assert few > one


def test_norms_of_a_stack_are_one_launch() -> None:
    """Newton-Schulz of many matrices launches as much as that of two."""
    counts = []
    for number in (2, 9):
        with Launches() as seen:
            NewtonSchulz()(torch.randn(number, 8, 12).bfloat16())
        counts.append(sum(n for name, n in seen.names.items() if name not in VIEWS))
    assert counts[0] == counts[1]
