"""The device itself: what it must detect, and that it does not hang where a GPU would not."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from tests.support.async_device import (
    ORDERS,
    TYPE,
    Order,
    counts,
    hazards,
    in_order,
    library,
    needs_device,
    run_on_device,
)
from tests.support.distributed import RankError

pytestmark = needs_device()


def _device() -> torch.device:
    return torch.device(TYPE, 0)


def _side() -> torch.Stream:
    return torch.get_device_module(TYPE).Stream()


def _on(stream: torch.Stream) -> torch.Stream:
    return torch.get_device_module(TYPE).stream(stream)  # type: ignore[no-any-return]


def _current() -> torch.Stream:
    return torch.get_device_module(TYPE).current_stream()  # type: ignore[no-any-return]


def _compute(order: Order) -> tuple[float, float, list[str]]:
    with in_order(order):
        x = torch.arange(6.0).view(2, 3).to(_device()).requires_grad_()
        y = (x @ x.t()).relu().sum()
        y.backward()
        dist.all_reduce(x.grad)
        return y.item(), x.grad.cpu().sum().item(), hazards()  # type: ignore[union-attr]


def test_values_do_not_depend_on_the_order() -> None:
    for order in ORDERS:
        assert run_on_device(2, _compute, order) == [(83.0, 120.0, [])] * 2


def _free_too_early() -> tuple[bool, bool, list[str], list[str]]:
    side, found = _side(), []
    for waits in (True, False):
        with in_order(("sides last", 0)):
            x = torch.ones(1000, device=_device())
            side.wait_stream(_current())
            with _on(side):
                y = x * 2
            if waits:
                _current().wait_stream(side)
            x.untyped_storage().resize_(0)
            torch.zeros(4, device=_device())  # may be given x's memory
            _current().wait_stream(side)
            found += [bool(y.cpu().isnan().any()), hazards()]
    return tuple(found)  # type: ignore[return-value]


def test_memory_that_is_freed_too_early_becomes_nan_and_is_a_hazard() -> None:
    ((right, none, wrong, reported),) = run_on_device(1, _free_too_early)

    assert (right, none) == (False, [])
    assert wrong and len(reported) == 1


def _unordered(order: Order) -> list[list[str]]:
    side, found = _side(), []
    with in_order(order):
        for waits in (True, False):
            x = torch.ones(8, device=_device())
            if waits:
                side.wait_stream(_current())
            with _on(side):
                x.add_(1)
            if waits:
                _current().wait_stream(side)
            x[:4].mul_(2)
            found.append(hazards())
    return found


def test_an_access_that_no_event_orders_is_a_hazard_in_every_order() -> None:
    for order in ORDERS[:4]:
        ((ordered, unordered),) = run_on_device(1, _unordered, order)

        assert ordered == []
        assert {line.split()[0] for line in unordered} == {"aten::add", "aten::mul"}


def _two_communicators(order: Order, is_crossed: bool) -> list[float]:
    groups = [dist.new_group(), dist.new_group()]
    library().set_patience(3.0 if is_crossed else 60.0)
    side = _side()
    with in_order(order):
        sums = [torch.full((8,), 1.0 + dist.get_rank(), device=_device()) for _ in groups]
        # On each rank in another order: on two streams as NCCL allows, on one stream a deadlock.
        for number in (0, 1) if dist.get_rank() else (1, 0):
            side.wait_stream(_current())
            with _on(side if number and not is_crossed else _current()):
                dist.all_reduce(sums[number], group=groups[number])
        _current().wait_stream(side)
        return [each.cpu().sum().item() for each in sums]


def test_communicators_on_two_streams_do_not_wait_for_each_other() -> None:
    for order in ORDERS:
        assert run_on_device(2, _two_communicators, order, False) == [[24.0, 24.0]] * 2


def test_a_deadlock_says_who_waits_for_whom() -> None:
    with pytest.raises(RankError) as caught:
        run_on_device(2, _two_communicators, ("late", 0), True)

    waits = re.findall(r"rank (\d): .* communicator (\S+) waits for rank (\d)", str(caught.value))
    assert len({(rank, name, other) for rank, name, other in waits}) == 2
    assert {(rank, other) for rank, _, other in waits} == {("0", "1"), ("1", "0")}


def _differ(kind: str) -> None:
    rank = dist.get_rank()
    x = torch.zeros(16, dtype=torch.bfloat16 if kind == "dtype" and rank else torch.float32, device=_device())
    y = torch.zeros(32, device=_device()) if kind == "size" and rank else x
    if kind == "collective" and rank:
        dist.broadcast(x, 0)
    elif kind == "alignment":
        dist.all_reduce(torch.zeros(4001, device=_device())[1:])
    elif kind == "contiguity":
        dist.all_reduce(torch.zeros(4, 4, device=_device()).t())
    else:
        dist.all_reduce(y)
    library().synchronize()


@pytest.mark.parametrize("kind", ["dtype", "size", "collective", "alignment", "contiguity"])
def test_a_broken_rule_of_nccl_is_an_error(kind: str) -> None:
    with pytest.raises(RankError):
        run_on_device(2, _differ, kind)


def _host_waits() -> tuple[int, int]:
    x = torch.ones(8, device=_device())
    counts()
    for _ in range(3):
        x = x * 2
    none = sum(count for name, count in counts().items() if name.startswith("sync"))
    x.sum().item()
    x.nonzero()
    return none, sum(count for name, count in counts().items() if name.startswith("sync"))


def test_waits_of_the_host_are_counted() -> None:
    assert run_on_device(1, _host_waits) == [(0, 2)]
