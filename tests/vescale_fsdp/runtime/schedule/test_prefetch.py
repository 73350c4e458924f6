"""Which unit is gathered ahead: of units inside units, and in forwards that leave the way of the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.support.async_device.stream_recorder import recording
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.runtime.fsdp_state import FSDPState
from vescale_fsdp.runtime.schedule import Schedule


class Nested(nn.Module):
    """A block with a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.experts(self.first(x)))
        return y


class Chain(nn.Module):
    """Blocks, of which a forward runs those it is told to."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        for number in numbers:
            x = self.blocks[number](x)
        y: torch.Tensor = self.head(x)
        return y


def sharded(make: Callable[[], nn.Module], count: int) -> Any:
    model = Chain(make, count)
    for block in model.blocks:
        if isinstance(block, Nested):
            fully_shard(block.experts, mesh=cpu_mesh())
        fully_shard(block, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


class Watched:
    """Units gathered, and those whose forward or backward found them ungathered, in order."""

    def __init__(self) -> None:
        self.gathered: list[str] = []
        self.exposed: list[str] = []

    def patches(self) -> list[Any]:
        gather = Schedule.gather

        def watched(schedule: Schedule, unit: FSDPState) -> bool:
            started = gather(schedule, unit)
            if started:
                self.gathered.append(unit.label)
            return started

        def entering(enter: Any) -> Any:
            def entered(schedule: Schedule, unit: FSDPState) -> None:
                if any(group.state.is_sharded for group in unit.groups):
                    self.exposed.append(unit.label)
                enter(schedule, unit)

            return entered

        names = ("enter_forward", "enter_backward")
        return [
            mock.patch.object(Schedule, "gather", watched),
            *(mock.patch.object(Schedule, name, entering(vars(Schedule)[name])) for name in names),
        ]

    def clear(self) -> None:
        self.gathered.clear()
        self.exposed.clear()


def backward_of_nested() -> tuple[list[str], list[str]]:
    model, seen = sharded(Nested, 3), Watched()
    gather, *entering = seen.patches()
    with recording(model) as recorder, gather, entering[0], entering[1]:
        for _ in range(2):
            out = model(torch.randn(2, 8, requires_grad=True), [0, 1, 2]).sum()
            seen.clear()
            out.backward()
    assert recorder.hazards == []
    return seen.gathered, seen.exposed


def test_inner_units_are_gathered_ahead() -> None:
    """By the end of forwards, as FSDP2: block 2, its experts, block 1, ..; the root is there from the forward."""
    order = [f"blocks.{number}{inner}" for number in (2, 1, 0) for inner in ("", ".experts")]
    for gathered, exposed in run_ranks(1, backward_of_nested):
        assert gathered == order
        assert exposed == []


def by_start_of_forwards() -> list[str]:
    def before(schedule: Schedule, unit: FSDPState) -> tuple[FSDPState, ...]:
        position = schedule._order.index(unit)
        return tuple(schedule._order[position - 1 : position]) if position else ()

    with mock.patch.object(Schedule, "_next_in_backward", before):
        return backward_of_nested()[1]


def test_the_order_of_starts_would_expose_gathers() -> None:
    """What the case above tells apart."""
    for exposed in run_ranks(1, by_start_of_forwards):
        assert len(exposed) >= 3


def other_ways() -> tuple[list[list[str]], list[list[str]], int]:
    model, seen = sharded(lambda: nn.Linear(8, 8), 5), Watched()
    gathered, exposed = [], []
    gather, *entering = seen.patches()
    with recording(model) as recorder, gather, entering[0], entering[1], torch.no_grad():
        recorder.counted = [
            group for group in recorder.groups if group.layout.slots[0].fqn.startswith("weight")
        ]
        for numbers in ([0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4]):
            seen.clear()
            model(torch.ones(2, 8), numbers)
            gathered.append([label.removeprefix("blocks.") for label in seen.gathered[1:]])
            exposed.append([label.removeprefix("blocks.") for label in seen.exposed[1:]])
    assert recorder.hazards == []
    assert all(group.state.is_sharded for group in recorder.groups)
    return gathered, exposed, recorder.most_full


def test_forwards_that_leave_the_way() -> None:
    """Behind a block that is left out gathers are ahead again; a wrong one is freed at once: two buffers at most."""
    for gathered, exposed, most_full in run_ranks(1, other_ways):
        assert list(map("".join, gathered)) == ["01234", "01234", "021234", "012434"]
        assert list(map("".join, exposed)) == ["01234", "2", "14", "3"]
        assert most_full == 2
