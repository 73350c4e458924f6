"""On gloo gradients wait for their reduction, and travel, in autograd's dtype; they are summed in the reduction's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.runtime.comm import group_comm
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(function: Any = fully_shard, dtype: torch.dtype = torch.bfloat16) -> models.Stack:
    model = models.build()
    for module in (*model.blocks, model):
        function(module, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    return model


def groups_of(model: nn.Module) -> list[ParamGroup]:
    states = [state_of(module) for module in model.modules()]
    return [group for state in states if state is not None for group in state.groups]


def backward(model: Any, number: int) -> None:
    models.loss_of(model, models.batch(number, dist.get_rank())).backward()


def accumulate(model: Any, numbers: list[int]) -> dict[str, torch.Tensor]:
    """Full gradients of several batches, of which the last one reduces."""
    for number in numbers:
        model.set_requires_gradient_sync(number == numbers[-1])
        backward(model, number)
    grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    model.zero_grad()
    return grads


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[bool]:
    return [torch.equal(ours[name], grad) for name, grad in theirs.items()]


def compare(dtype: torch.dtype, steps: list[list[int]]) -> list[torch.dtype]:
    """FSDP2's gradients to the last bit, step by step; dtypes that ours were reduced from, of the first unit."""
    ours, theirs = shard(dtype=dtype), shard(torch_fully_shard, dtype)
    reduced = []
    start = ParamGroup.start_reduce

    def watched(group: ParamGroup, source: DBuffer, *results: torch.Tensor) -> Any:
        found = start(group, source, *results)
        assert found.shard.dtype is torch.float32
        if group is groups_of(ours.blocks[0])[0]:
            reduced.append(found.source.flat.dtype)
        return found

    with mock.patch.object(ParamGroup, "start_reduce", watched):
        for numbers in steps:
            assert all(equal(accumulate(ours, numbers), accumulate(theirs, numbers)))
    spares = [spare for group in groups_of(ours) for spare in group.grads.spare[dtype]]
    assert spares and not any(spare.flat.untyped_storage().nbytes() for spare in spares)
    return reduced


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_widened_on_their_way(dtype: torch.dtype) -> None:
    """What is reduced after each backward travels as it is; what is summed before it, in fp32 (from then on)."""
    for reduced in run_ranks(2, compare, dtype, [[0], [1], [2, 3, 4], [5]]):
        assert reduced == [dtype, dtype, torch.float32, torch.float32]


def sums_in_bf16() -> bool:
    with mock.patch.object(ParamGroup, "grad_dtype", torch.bfloat16):
        return all(equal(accumulate(shard(), [2, 3, 4]), accumulate(shard(torch_fully_shard), [2, 3, 4])))


def test_sums_in_bf16_would_differ() -> None:
    """The case above tells a sum of micro-batches in bf16 from one in fp32."""
    assert run_ranks(2, sums_in_bf16) == [False, False]


class Own:
    """A reduce-scatter that reads what it sums in."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        assert input_tensor.dtype is output_tensor.dtype is torch.float32
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def change_reductions() -> None:
    ours, theirs = shard(), shard(torch_fully_shard)
    for model in (ours, theirs):
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        backward(model, 0)
    for module in (*ours.blocks, ours):
        module.set_custom_reduce_scatter(Own())  # type: ignore[operator]
    assert all(equal(accumulate(ours, [1]), accumulate(theirs, [1])))
    early = shard()
    for module in (*early.blocks, early):
        module.set_custom_reduce_scatter(Own())  # type: ignore[operator]
    assert all(equal(accumulate(early, [2]), accumulate(theirs, [2])))


def test_a_users_reduction_reads_what_it_sums_in() -> None:
    """Also the gradients that were there before it was set."""
    run_ranks(2, change_reductions)


class Either(nn.Module):
    """Uses the layers it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        for number in numbers:
            x = self.layers[number](x)
        return x


# By rank and backward: rank 0 has a second gradient for every parameter, rank 1 for none.
USED = [[[0, 1], [0, 1]], [[0], [1]]]


def use_unequally() -> torch.dtype:
    torch.manual_seed(0)
    model: Any = fully_shard(Either(), mesh=cpu_mesh(), mp_policy=MIXED)
    rank = dist.get_rank()
    reduced = []
    scatter = group_comm.reduce_scatter_into

    def watched(shard: torch.Tensor, full: torch.Tensor, *rest: Any) -> Any:
        reduced.append(full.dtype)
        return scatter(shard, full, *rest)

    with mock.patch("vescale_fsdp.runtime.comm.group_comm.reduce_scatter_into", watched):
        for number in (0, 1):
            model.set_requires_gradient_sync(number == 1)
            model(models.batch(number, rank), USED[rank][number]).sum().backward()
    torch.manual_seed(0)
    plain = Either()
    sums = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    plain.bfloat16()
    for of_rank, backwards in enumerate(USED):
        for number, layers in enumerate(backwards):
            plain.zero_grad()
            plain(models.batch(number, of_rank).bfloat16(), layers).sum().backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    sums[name] += param.grad.float()
    for name, param in model.named_parameters():
        assert torch.equal(param.grad.full_tensor(), sums[name] / 2) and sums[name].abs().sum() > 0
    (dtype,) = reduced
    return dtype


def test_ranks_agree_on_what_they_reduce_from() -> None:
    """Also where one of them has summed two backwards and the other had one gradient of each parameter."""
    assert run_ranks(2, use_unequally) == [torch.float32, torch.float32]
