"""Training, saves, loads and transfers on a device whose streams run in any order: values, and no unordered access.

`make test` runs a sample of drawn programs and of switches, which changes with the seed; `make test-device` runs every
switch in 12 fixed orders, and 500 drawn programs.
"""

from __future__ import annotations

import os
import random
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.support.async_device import ORDERS, TYPE, Order, hazards, in_order, needs_device, run_on_device
from tests.vescale_fsdp.device.programs import (
    EVENTS,
    MODELS,
    MOMENTS,
    OPTIMIZERS,
    POLICIES,
    WIDTH,
    Program,
    draw,
    sgd,
    shard,
    train,
)
from tools.gpu import parity
from tools.gpu.switches import CASES
from vescale_fsdp.errors import LifecycleError

pytestmark = needs_device()

IS_LONG = os.environ.get("DEVICE") == "all"
NUM_DRAWN = 500 if IS_LONG else 24
FIRST_SEED = 1000 * int(os.environ.get("SEED", "0"))
PARITY = {case.name: case for case in CASES}


def world_size(program: str | Program) -> int:
    """Number of ranks of a program, or of the switch of that name."""
    return 2 if isinstance(program, str) else program.world_size


def needs_fresh(program: str | Program) -> bool:
    """Whether a program needs new processes: see `run_on_device`."""
    return not isinstance(program, str) and program.is_fresh


@cache
def _reference(program: Program) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return program.run(torch.device("cpu"))


def run(program: str | Program, order: Order) -> list[str]:
    """Run a program, or the switch of that name, in an order; returns what was wrong."""
    device = torch.device(TYPE, 0)
    if isinstance(program, str):
        with in_order(order):
            found = parity.compare(PARITY[program], device)
        wrong = [] if found.is_right else [str(found)]
    else:
        expected = _reference(program)
        with in_order(order):
            torch.manual_seed(0)
            results = program.run(device)
        apart = parity.largest_difference(results, expected)
        wrong = [] if apart <= program.apart else [f"{apart} from the CPU's values"]
    return wrong + hazards()


def _switches() -> list[tuple[str, Order]]:
    """A third of the switches, each in an order that a seed draws; in the long run, all in every order."""
    if IS_LONG:
        return [(name, order) for name in PARITY for order in ORDERS]
    pick = random.Random(FIRST_SEED)
    names = pick.sample([case.name for case in CASES if not case.compiled], len(CASES) // 3)
    return [(name, pick.choice(ORDERS)) for name in names]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "order"), _switches(), ids=lambda value: str(value).replace("'", ""))
def test_a_switch_is_right_in_every_order(name: str, order: Order) -> None:
    """Weights are a plain model's, and events order all accesses of memory."""
    assert run_on_device(2, run, name, order) == [[]] * 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_DRAWN))
def test_a_drawn_program_is_right_in_a_drawn_order(seed: int) -> None:
    """Its values are those of the CPU, and events order all accesses of memory."""
    program, pick = draw(seed), random.Random(-1 - seed)
    order = pick.choice((*ORDERS, ("random", pick.randrange(100, 10**6))))
    results = run_on_device(program.world_size, run, program, order, timeout_s=300, fresh=program.is_fresh)

    assert results == [[]] * program.world_size, (program, order)


def test_programs_reach_every_event_and_model() -> None:
    """What is drawn in the long run has everything that can be drawn."""
    programs = [draw(seed) for seed in range(500)]

    assert {program.model for program in programs} == set(MODELS)
    assert {program.policy for program in programs} == set(POLICIES)
    assert {program.optimizer for program in programs} >= set(OPTIMIZERS) - {"Shampoo"}
    assert {event for program in programs for _, _, event in program.events} == set(EVENTS)
    assert {moment for program in programs for _, moment, _ in program.events} == set(MOMENTS)
    assert {program.world_size for program in programs} == {2, 3, 4, 8}


class _Pair(torch.nn.Module):
    """Two equal units, which run in one of two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.units = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.is_swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in reversed(self.units) if self.is_swapped else self.units:
            x = unit(x)
        return x


def _swapped(order: Order) -> tuple[str, bool]:
    """The second rank runs the units in the other order: the error, and whether weights are those before the step."""
    device, model = torch.device(TYPE, 0), _Pair()
    optimizer = sgd(shard(model, list(model.units), device))
    model.is_swapped = dist.get_rank() == 1
    with in_order(order):
        before = [param.to_local().clone() for param in model.parameters()]  # type: ignore[operator]
        try:  # in the first step, in which no rank prefetches by the order of the last step
            train(model, optimizer, device, [0])
        except LifecycleError as error:
            now = [param.to_local() for param in model.parameters()]  # type: ignore[operator]
            return f"{error.expected} {error.got}", all(map(torch.equal, before, now))
    return "", False


def test_no_optimizer_steps_with_mixed_gradients() -> None:
    """Ranks compare the order of collectives on the device, and read the result before the backward returns."""
    for text, is_unchanged in run_on_device(2, _swapped, ("late", 0)):
        assert "units.0" in text
        assert "units.1" in text
        assert is_unchanged
