"""Checked collectives: flipped bits are found in every unit and direction, and steps between checks cost nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.hooked_tensors import Int8Rows
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import ArgumentError, CollectiveError
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm import collective_check
from vescale_fsdp.runtime.comm.group_comm import GroupComm


class Flipping:
    """A user's all-gather that flips one bit of what rank 1 sends, or of what it has received."""

    def __init__(self, where: str) -> None:
        self.where, self.is_on = where, False

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        flips = self.is_on and dist.get_rank() == 1
        if flips and self.where == "before":
            input_tensor.view(torch.uint8)[3] ^= 128
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        if flips and self.where == "after":
            output_tensor.view(torch.uint8)[3] ^= 1  # of the first rank's slice
        if flips and self.where == "padding":
            output_tensor.view(torch.uint8)[-1] ^= 1
        return None


def _model(shape: tuple[int, ...], every: int, gather: Flipping | None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=cpu_mesh(*shape), check_collectives=every, **options)
    fully_shard(model, mesh=cpu_mesh(*shape), check_collectives=every, **options)
    if gather is not None:
        model[2].set_custom_all_gather(gather)
    return model


def _step(model: Any) -> float:
    loss = model(torch.ones(2, 7) * (1 + dist.get_rank())).float().square().sum()
    loss.backward()
    return float(loss)


def _flipped(where: str, reshard: bool | int, half: bool) -> tuple[str, ...]:
    gather = Flipping(where)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    model = _model(
        (4,) if type(reshard) is int else (2,), 1, gather, reshard_after_forward=reshard, mp_policy=policy
    )
    _step(model)
    gather.is_on = True
    with pytest.raises(CollectiveError) as caught:
        _step(model)
    return type(caught.value).__name__, str(caught.value.where)


def _evaluates_alone() -> list[float]:
    """Rank 0 alone runs forwards while weights are kept: every second forward of all ranks is checked as before."""
    model = _model((2,), 2, None, reshard_after_forward=False)
    losses = []
    for _ in range(4):
        model.zero_grad()
        loss = model(torch.ones(2, 7)).square().sum()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(2, 7))
        loss.backward()
        losses.append(float(loss))
    return losses


def test_a_forward_without_gathers_on_one_rank_is_not_counted() -> None:
    first, second = run_ranks(2, _evaluates_alone, timeout_s=30)
    assert first == second and len(first) == 4


@pytest.mark.parametrize("where", ["before", "after", "padding"])
def test_flipped_bits_of_a_gather_are_found_on_all_ranks(where: str) -> None:
    """Unit and rank are named: of a flip before the gather, the last of all ranks, since all receive it."""
    found = run_ranks(2, _flipped, where, True, where == "before")
    assert found == [("CollectiveError", "unit 2, rank 1")] * 2


def test_gathers_over_few_ranks_are_checked() -> None:
    assert {name for name, _ in run_ranks(4, _flipped, "after", 2, False)} == {"CollectiveError"}


def _replicas() -> CollectiveError:
    model = _model((2, 2), 2, None)
    reduce = GroupComm.finish_sum

    def flipped(comm: GroupComm, part: torch.Tensor, shard: torch.Tensor) -> object:
        work = reduce(comm, part, shard)
        if work is not None:
            work.wait()
        if dist.get_rank() == 2:
            shard.view(torch.uint8)[0] ^= 1
        return None

    with mock.patch.object(GroupComm, "finish_sum", flipped):
        _step(model)  # not a checked step
        with pytest.raises(CollectiveError) as caught:
            _step(model)
    return caught.value


def test_replicas_that_differ_are_found() -> None:
    """All four ranks raise, those of the other shard too; of two replicas, either may be the wrong one."""
    first, *others = run_ranks(4, _replicas)
    assert str(first.where).endswith(("rank 0", "rank 2")), str(first)
    assert [str(error) for error in others] == [str(first)] * 3


def _flipped_codes(where: str) -> tuple[str, ...]:
    """The third gather of a checked step, of 8-bit codes or of their scales, or of what a class sends."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 64, bias=False)
    if where == "hooks":
        layer.weight = nn.Parameter(Int8Rows(layer.weight.detach()))
        fully_shard(layer, mesh=cpu_mesh(2), check_collectives=1)
    else:
        codec = Fp8Blocks(8, 8)
        policy = QuantizedGather(codecs=codec, param_dtype=torch.bfloat16)
        fully_shard(
            layer, mesh=cpu_mesh(2), mp_policy=policy, granularity=codec.granularity, check_collectives=1
        )
    gather, calls = GroupComm.all_gather, 0
    flipped = {"codes": 1, "scales": 2, "hooks": 2}[where]

    def flipping(comm: GroupComm, full: torch.Tensor, own: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        work = gather(comm, full, own)
        if work is not None:
            work.wait()
        if calls == flipped and dist.get_rank() == 1:
            full.view(torch.uint8)[0] ^= 1
        return None

    layer(torch.ones(2, 32)).float().sum().backward()
    with mock.patch.object(GroupComm, "all_gather", flipping), pytest.raises(CollectiveError) as caught:
        layer(torch.ones(2, 32))
    return type(caught.value).__name__, str(caught.value.where).rpartition(" ")[2]


@pytest.mark.parametrize("where", ["codes", "scales", "hooks"])
def test_gathers_of_codes_are_checked(where: str) -> None:
    assert run_ranks(2, _flipped_codes, where) == [("CollectiveError", "1")] * 2


def _counted(every: int) -> tuple[list[int], list[float]]:
    """All-reduces of checks in each of six steps, and the losses."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        plain = getattr(collective_check, name)

        def call(*arguments: Any) -> Any:
            counts["all"] += 1
            return plain(*arguments)

        return call

    names = ("all_reduce_at_once", "all_reduce_in_place")
    with mock.patch.multiple(collective_check, **{name: counting(name) for name in names}):
        model = _model((2,), every, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen, losses = [], []
        for _ in range(6):
            counts.clear()
            losses.append(_step(model))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(counts["all"])
    return seen, losses


def test_only_checked_steps_cost_messages() -> None:
    """Two small all-reduces for each gather: of two layers in the forward, and of those that are gathered again."""
    checked, losses = run_ranks(2, _counted, 3)[0]
    assert [bool(each) for each in checked] == [False, False, True, False, False, True]
    assert checked[2] == 2 * 4
    assert losses == run_ranks(2, _counted, 0)[0][1]


def test_a_number_of_steps_is_expected() -> None:
    for given in (-1, True, 1.5):
        with pytest.raises(ArgumentError):
            fully_shard(nn.Linear(2, 2), check_collectives=given)  # type: ignore[arg-type]
