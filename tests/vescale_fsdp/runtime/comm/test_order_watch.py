"""Order of collectives: compared once per backward without the store, and before mixed gradients are used."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.collectives import group_log
from vescale_fsdp.collectives.operations import max_apart
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.dtensor import meeting
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.optim import step_in_backward
from vescale_fsdp.runtime.comm import order_watch
from vescale_fsdp.torch_private import default_store


class CountingStore:
    """The store of the default group, with its requests counted by name."""

    def __init__(self) -> None:
        self.store, self.requests = default_store(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.store, name)


class Rows(nn.Module):
    """Units of equal sizes, which run in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, order: str = "012") -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.units[int(number)](x))
        return x


def sharded(mesh: Any) -> Any:
    model = Rows()
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def requests_of_steps(shape: tuple[int, ...]) -> list[int]:
    """Requests to the store of each step, with accumulation and evaluation."""
    store = CountingStore()
    with (
        mock.patch.object(order_watch, "default_store", return_value=store),
        mock.patch.object(group_log, "default_store", return_value=store),
        mock.patch.object(meeting, "default_store", return_value=store),
    ):
        model = sharded(cpu_mesh(*shape))
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(4):
            before = store.requests.total()
            for is_last in (False, True):
                model.set_requires_gradient_sync(is_last)
                model(torch.ones(2, 6)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 6))
            found.append(store.requests.total() - before)
        return found


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_steps_ask_the_store_nothing(shape: tuple[int, ...]) -> None:
    """Only the first step does, in which ranks compare how they have sharded the model."""
    for first, *others in run_ranks(len(shape) * 2, requests_of_steps, shape):
        assert first > 0
        assert others == [0, 0, 0]


@mock.patch.object(
    order_watch, "BOUND_S", 4.0
)  # ranks that wait for each other in a gather are found in half of it
def swapped(way: str) -> tuple[str, bool]:
    """The last rank goes another way in the second step: the error, and whether no weight has changed in that step."""
    model = sharded(cpu_mesh())
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if way == "steps in backward":
        step_in_backward(model, optimizer)
    weights: list[torch.Tensor] = []
    try:
        for step in range(3):
            weights = [param.to_local().clone() for param in model.parameters()]
            out = model(torch.ones(2, 6), "102" if way != "factor" and step and is_odd else "012")
            if way == "factor" and step and is_odd:
                model.units[1].set_gradient_divide_factor(3.0)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except LifecycleError as error:
        now = [param.to_local() for param in model.parameters()]
        return f"{error.expected} {error.got}", all(map(torch.equal, weights, now))
    return "", False


@pytest.mark.parametrize("way", ["order", "steps in backward", "factor"])
def test_no_optimizer_steps_with_mixed_gradients(way: str) -> None:
    """All ranks raise in the backward, also if a setting was changed between forward and backward."""
    for text, is_unchanged in run_ranks(2, swapped, way):
        assert "units.1" in text
        assert is_unchanged


def many_forwards(is_odd_way: bool) -> str:
    """Forwards without a backward; the last rank runs another unit first in one of them."""
    model = sharded(cpu_mesh())
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(order_watch, "_MOST_ENTRIES", 12), torch.no_grad():
        try:
            for step in range(12):
                model(torch.ones(2, 6), "102" if is_odd_way and step == 1 and is_odd else "012")
        except LifecycleError as error:
            return f"{error.expected} {error.got}"
    return ""


def test_forwards_alone_are_compared() -> None:
    """Without gradients ranks compare once their logs are long."""
    assert run_ranks(2, many_forwards, False) == ["", ""]
    assert all("units.1" in text for text in run_ranks(2, many_forwards, True))


def largest(group: Any = None) -> tuple[list[int], list[int]]:
    """The maximum over ranks, in flight together with an all-reduce that some ranks start first."""
    rank, group = dist.get_rank(), dist.group.WORLD
    values = torch.tensor([(7 * rank) % 5, -rank, 2**62 + rank])
    large = torch.full((1000,), float(rank))
    works = []
    starts = [
        lambda: works.append(max_apart(values, group)),
        lambda: works.append(dist.all_reduce(large, async_op=True)),
    ]
    for start in starts if rank % 2 else reversed(starts):
        start()
    wait_for(*works)
    ranks = range(dist.get_world_size())
    expected = [max((7 * each) % 5 for each in ranks), 0, 2**62 + len(ranks) - 1]
    assert large.eq(sum(ranks)).all()
    return values.tolist(), expected


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_maximum_by_messages(world_size: int) -> None:
    """It is right for any number of ranks, whatever other collectives are in flight."""
    for found, expected in run_ranks(world_size, largest):
        assert found == expected
