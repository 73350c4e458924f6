"""A replay takes as long as the program itself, on a device whose tasks have durations on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support.async_device import TYPE, Order, in_order, needs_device, run_on_device, timed
from tools.bench.parts.simulated_accelerator import fake_group
from tools.replay.queue import replay
from tools.replay.recording import Item, Recording, record
from vescale_fsdp import fully_shard

pytestmark = needs_device()

LIBRARIES = {"ours": fully_shard, "FSDP2": torch_fully_shard}
# By the device's name, and by the recording's.
NAMES = {
    "aten::mm": "mm",
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
}
# Bound by products, by gathers, by reductions, and by nothing.
DURATIONS = ((9, 2, 3), (2, 30, 2), (3, 4, 40), (7, 11, 13))


class Layer(nn.Module):
    """Two products, of which the backward makes four."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.tanh(self.up(rows)))  # type: ignore[no-any-return]


def program(library: str, mesh: DeviceMesh, device: torch.device) -> Callable[[int], None]:
    """A step of four layers and their root, with one batch."""
    function = cast(Callable[..., Any], LIBRARIES[library])
    with device:
        model = nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(16, 16, bias=False))
    for layer in [*model][:4]:
        function(layer, mesh=mesh)
    function(model, mesh=mesh)

    def step(size: int) -> None:
        rows = torch.ones(4 * size, 16, device=device)
        model(rows).sum().backward()
        model.zero_grad()

    return step


def on_device(library: str, orders: list[Order]) -> list[float]:
    """Seconds of a rank's second step, with all durations in all orders."""
    mesh = init_device_mesh(TYPE, (2,))
    step = program(library, mesh, torch.device(TYPE, 0))
    step(1)
    found = []
    for durations in DURATIONS:
        for order in orders:
            with in_order(order):
                found.append(timed(dict(zip(NAMES, durations, strict=True)), partial(step, 1)))
    return found


def recorded(library: str) -> Recording:
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))

        (recording,) = record(lambda: program(library, mesh, torch.device("cpu")))
        return recording


@pytest.mark.parametrize("library", ["ours", pytest.param("FSDP2", marks=pytest.mark.part("numerics"))])
def test_a_replay_takes_as_long_as_the_device(library: str) -> None:
    orders: list[Order] = [("early", 0), ("late", 0), ("random", 3)]
    ranks = run_on_device(2, on_device, library, orders)
    recording = recorded(library)
    replays = []
    for durations in DURATIONS:
        seconds = dict(zip(NAMES.values(), durations, strict=True))

        def seconds_of(item: Item, seconds: dict[str, int] = seconds) -> float:
            return seconds.get(item.name, 0)

        replays += [replay(recording, seconds_of).total] * len(orders)
    assert ranks == [replays, replays]
    assert len(set(replays)) == len(DURATIONS)
