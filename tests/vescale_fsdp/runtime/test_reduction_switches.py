"""FSDP2's switches of reductions: what they divide by, who carries them out, when replicas are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.grads import all_wait
from tests.support.models import check_steps, shard
from tests.support.units import groups_of
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.unsharded_grads import UnshardedGrads
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.torch_private import foreach_zero_


def divided() -> None:
    model = shard(models.build())
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
    check_steps(model, models.build(), scale=2.0)
    forced = shard(models.build())
    for module in (*forced.blocks, forced):
        module.set_force_sum_reduction_for_comms(True)
    check_steps(forced, models.build())


def test_divide_factor_and_forced_sums() -> None:
    """A factor of 1 gives sums; forced sums divide afterwards."""
    run_ranks(2, divided)


def half_reduction() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model, reference = shard(models.build(), mp_policy=policy), models.build()
    _, grads = models.reference_grads(reference, 0, 4)
    models.loss_of(model, models.batch(0, dist.get_rank())).backward()
    for name, param in model.named_parameters():
        assert param.grad.dtype is torch.float32
        torch.testing.assert_close(param.grad.full_tensor(), grads[name], rtol=2e-2, atol=2e-3, msg=name)


def test_fp16_reduction_divides_before_and_after() -> None:
    """fp16 gradients come out as the average."""
    run_ranks(4, half_reduction)


class Custom:
    """Counts calls; stands for AllGather and ReduceScatter both."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self.collective = collective
        self.calls = self.buffers = 0

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **rest: Any) -> Any:
        self.calls += 1
        return self.collective(output_tensor, input_tensor, group=group, **rest)


def custom_comm() -> None:
    model = shard(models.build())
    # The names before torch 2.13, and since.
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    if "all_gather_single" in vars(dist):
        names = ("all_gather_single", "reduce_scatter_single")
    gather, reduce = (Custom(vars(dist)[name]) for name in names)
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(reduce)
    reduced: list[int] = []
    model.blocks[1].set_all_reduce_hook(lambda shard: reduced.append(shard.numel()))
    check_steps(model, models.build(), 2)
    assert (gather.calls, gather.buffers) == (4, 1)
    assert (reduce.calls, reduce.buffers) == (2, 3)  # one gradient buffer for all, a result for each
    assert reduced == [groups_of(model.blocks[1])[0].layout.shard_numel] * 2


def test_custom_collectives_and_hooks() -> None:
    """A user's gather and reduce objects are called, and the hook sees the reduced shard."""
    run_ranks(2, custom_comm)


def partial_all_reduce() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model, reference = shard(models.build(), mesh), models.build()
    rank = dist.get_rank()
    model.set_requires_all_reduce(False)
    models.loss_of(model, models.batch(0, rank)).backward()
    assert all_wait(model)
    model.set_requires_all_reduce(True)
    model.blocks[0].requires_grad_(False)
    models.loss_of(model, models.batch(1, rank)).backward()
    for step in range(2):
        reference.blocks[0].requires_grad_(step == 0)
        losses = [models.loss_of(reference, models.batch(step, r)) for r in range(4)]
        (torch.stack(losses).sum() / 4).backward()
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(param.grad.full_tensor(), expected, msg=name)


def test_hsdp_accumulates_without_all_reduce() -> None:
    """Sums over shards wait for the all-reduce of a later backward, also those of a unit that is frozen meanwhile."""
    run_ranks(4, partial_all_reduce)


def own_communicator() -> None:
    model = shard(models.build())
    model.set_separate_reduce_scatter_group()
    groups = {id(groups_of(m)[0].comm.reduce_group) for m in (*model.blocks, model)}
    assert len(groups) == 1
    assert groups_of(model)[0].comm.reduce_group is not groups_of(model)[0].comm.shard_group
    check_steps(model, models.build())


def test_separate_communicator_for_reductions() -> None:
    """One communicator per rank set, and the same gradients."""
    run_ranks(2, own_communicator)


def limits() -> list[int]:
    """How many reductions the root allows in flight, before and after its first forward."""
    model = shard(models.build())
    root = state_of(model)
    assert root is not None
    found = []
    for number in (3, 2):
        model.set_reduce_scatter_max_input_buffers(number)
        models.loss_of(model, models.batch(0, 0)).backward()
        found.append(root.comm.max_reductions)
    model.blocks[0].set_reduce_scatter_max_input_buffers(4)
    found.append(root.comm.max_reductions)
    model.set_reduce_scatter_max_input_buffers(1)
    return [*found, root.comm.max_reductions]


def test_the_number_of_reductions_in_flight_is_lowered_again() -> None:
    """The largest value of all units holds, and not the largest there ever was."""
    assert run_ranks(1, limits) == [[3, 2, 4, 1]]


class FillsWithNaN(Custom):
    """Reduces from and to memory that holds NaN when it is handed out."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return super().allocate(size, dtype=dtype, device=device).fill_(torch.nan)


def visible_padding(is_clean: bool) -> tuple[int, int]:
    """Elements of padding that users' code was given, and how many of them were not zero."""
    model = models.build()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh(), granularity=Rows(2))
    padding, dirty = 0, 0

    def see(buffer: torch.Tensor, parts: list[torch.Tensor]) -> None:
        nonlocal padding, dirty
        for part in parts:
            padding += part.numel()
            dirty += int((part != 0).sum())  # so is NaN

    def reduce(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **rest: Any) -> Any:
        group = groups[input_tensor.untyped_storage().data_ptr()]
        see(input_tensor, group.padding())
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, **rest)

    groups: dict[int, DBuffer] = {}
    complete = UnshardedGrads.complete

    def noted(grads: UnshardedGrads) -> DBuffer:
        buffer = complete(grads)
        groups[buffer.flat.untyped_storage().data_ptr()] = buffer
        return buffer

    for module in (*model.blocks, model):
        module.set_custom_reduce_scatter(FillsWithNaN(reduce))
        module.set_all_reduce_hook(lambda shard: see(shard, [shard[shard.isnan()]]))
    with mock.patch.object(UnshardedGrads, "complete", noted):
        for number in range(2):
            with mock.patch(
                "vescale_fsdp.runtime.param_group.foreach_zero_", foreach_zero_ if is_clean else len
            ):
                models.loss_of(model, models.batch(number, dist.get_rank())).backward()
    return padding, dirty


def test_users_code_sees_zeros_in_the_padding() -> None:
    """Gradient buffers and reduced shards have no arbitrary memory between tensors; the control has NaN there."""
    for padding, dirty in run_ranks(2, visible_padding, True):
        assert padding > 0 and dirty == 0
    assert all(dirty > 0 for _, dirty in run_ranks(2, visible_padding, False))
