"""The cases of `tools.gpu.parity`: switches of `fully_shard` and of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from vescale_fsdp import FSDPModule, PaddingPolicy, Rows
from vescale_fsdp.collectives.operations import all_gather_into, reduce_scatter_into
from vescale_fsdp.collectives.slice_exchange import Work
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm.streams import streams_of

Act = Callable[[FSDPModule], object]


def _reduces_last(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


@dataclass(frozen=True)
class Case:
    """Options of sharding and of training.

    Args:
        options: arguments of `fully_shard`.
        of_model: more arguments, computed from the model or the ranks.
        prepare: changes both models before one is sharded.
        set_up: sets switches of the sharded model.
        before_backward: called with the model, and whether an optimizer step follows this micro-batch.
        after_backward, after_step: called with the sharded model.
        inner: whether layers inside blocks are units too.
        compiled: backend of torch.compile for each block.
        in_backward: whether AdamW steps in the backward; without clipping.
        apart: allowed difference of weights at the end: rounding of sums, or of 16 or 8 bits.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    of_model: Callable[[Any], dict[str, Any]] | None = None
    prepare: Callable[[Any], object] | None = None
    set_up: Act | None = None
    before_backward: Callable[[FSDPModule, bool], None] = _reduces_last
    after_backward: Act | None = None
    after_step: Act | None = None
    inner: bool = False
    recompute: bool = False
    microbatches: int = 1
    compiled: str = ""
    in_backward: bool = False
    apart: float = 2e-5


def _units(model: FSDPModule) -> Iterator[FSDPModule]:
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def _each(act: Act) -> Act:
    """A switch that is set on each unit."""
    return lambda model: [act(unit) for unit in _units(model)]


def _prefetch(model: FSDPModule) -> None:
    blocks = list(model.blocks)  # type: ignore[arg-type]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _half_of_the_ranks() -> int:
    world = dist.get_world_size()
    return world // 2 if world % 2 == 0 else 1


def _replicas(model: nn.Module) -> dict[str, Any]:
    """A mesh with two replicas, if the number of ranks is even."""
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    return {"mesh": init_device_mesh(_device_of(model).type, shape, mesh_dim_names=("replicate", "shard"))}


def _over_nodes(model: nn.Module) -> dict[str, Any]:
    """Two nodes, if the number of ranks is even, over which the optimizer is sharded too."""
    return _replicas(model) | {"shard_optimizer_over": "replicate"}


def _halve(shard: torch.Tensor) -> None:
    shard.mul_(0.5)


def _halves_together(unit: FSDPModule) -> None:
    """The mean over two halves of the ranks: an all-reduce hook that halves the sum, on a separate stream if any."""
    streams = streams_of(_device_of(unit))
    stream = None if streams is None else streams.new()
    unit.set_gradient_divide_factor(dist.get_world_size() / 2)
    unit.set_all_reduce_hook(_halve, stream=stream)


def _leave_event(model: FSDPModule) -> None:
    streams = streams_of(_device_of(model))
    if streams is not None:
        model.set_post_optim_event(streams.current().record_event())  # type: ignore[arg-type]


def _delays_replicas(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def _tells_the_last(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)


def _keeps_between(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


class _OwnGather:
    """A user's all-gather."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As `vescale_fsdp.runtime.comm.group_comm.AllGather`."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Work | None:
        """As `vescale_fsdp.runtime.comm.group_comm.AllGather`."""
        return all_gather_into(output_tensor, input_tensor, group)


class _OwnReduction(_OwnGather):
    """A user's reduce-scatter."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """As `vescale_fsdp.runtime.comm.group_comm.ReduceScatter`."""
        return reduce_scatter_into(output_tensor, input_tensor, op, group)


def _brings_collectives(unit: FSDPModule) -> None:
    unit.set_custom_all_gather(_OwnGather())  # type: ignore[arg-type]
    unit.set_custom_reduce_scatter(_OwnReduction())  # type: ignore[arg-type]


def _freeze_head(model: Any) -> None:
    model.head.bias.requires_grad_(False)


ROUNDED = 0.1  # in 16 bits
HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
IN_BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
IN_FP16 = {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
CASES = (
    Case("fp32"),
    Case("bf16, fp32 reduction", HALF, apart=ROUNDED),
    Case("bf16, bf16 reduction", IN_BF16, apart=ROUNDED),
    Case(
        "bf16, narrow reduction", HALF, set_up=lambda model: model.set_narrow_reduction(True), apart=ROUNDED
    ),
    Case("fp16", IN_FP16, apart=ROUNDED),
    Case(
        "codes of 8 bits",
        {"mp_policy": QuantizedGather(codecs=Fp8Blocks(1, 4)), "granularity": Rows(1)},
        apart=ROUNDED,
    ),
    Case("kept after the forward", {"reshard_after_forward": False}),
    Case("kept after all", set_up=lambda model: model.set_reshard_after_forward(False)),
    Case("kept between micro-batches", microbatches=3, before_backward=_keeps_between),
    Case(
        "parts kept after the forward",
        of_model=lambda model: {"reshard_after_forward": _half_of_the_ranks()},
    ),
    Case(
        "addresses that stay",
        {"reshard_after_forward": False},
        set_up=lambda model: model.set_keep_unsharded_storage(True),
    ),
    Case("by rows", {"granularity": Rows(4)}),
    Case("by rows, padded", {"granularity": Rows(4), "padding_policy": PaddingPolicy(scatter="never")}),
    Case("checked collectives", {"check_collectives": 1}),
    Case("as FSDP2 cuts", {"shard_placement_fn": lambda param: Shard(0)}),
    Case("replicas", of_model=_replicas),
    Case(
        "bf16, replicas reduced late",
        HALF,
        of_model=_replicas,
        before_backward=_delays_replicas,
        microbatches=2,
        apart=ROUNDED,
    ),
    Case("optimizer over nodes", of_model=_over_nodes),
    Case(
        "bf16, optimizer over nodes, nodes reduced late",
        HALF,
        of_model=_over_nodes,
        before_backward=_delays_replicas,
        microbatches=3,
        apart=ROUNDED,
    ),
    Case("optimizer over nodes, offload", OFFLOAD, of_model=_over_nodes),
    Case(
        "a parameter left out",
        of_model=lambda model: {"ignored_params": {model.head.bias}},
        prepare=_freeze_head,
    ),
    Case("units inside units", inner=True),
    Case("recompute", recompute=True),
    Case("accumulation", microbatches=3),
    Case("accumulation, told which is last", microbatches=3, before_backward=_tells_the_last),
    Case("bf16, accumulation", HALF, microbatches=3, apart=ROUNDED),
    Case(
        "finalized by hand",
        set_up=lambda model: model.set_manual_backward_finalization(True),
        after_backward=lambda model: model.finalize_backward(),
    ),
    Case("prefetch lists", set_up=_prefetch),
    Case("gathered by the backward itself", set_up=lambda model: model.set_unshard_in_backward(True)),
    Case("behind the optimizer's event", after_step=_leave_event),
    Case("reduction group of its own", set_up=lambda model: model.set_separate_reduce_scatter_group(True)),
    Case("two reductions in flight", set_up=lambda model: model.set_reduce_scatter_max_input_buffers(2)),
    Case("zeros for what is unused", set_up=lambda model: model.set_reduce_scatter_unused_params(True)),
    Case("sums instead of means", set_up=_each(lambda unit: unit.set_force_sum_reduction_for_comms(True))),
    Case("a factor and a hook", set_up=_each(_halves_together)),
    Case("collectives of the user's", set_up=_each(_brings_collectives)),
    Case("offload", OFFLOAD),
    Case("bf16, offload, accumulation", {**HALF, **OFFLOAD}, microbatches=2, apart=ROUNDED),
    Case("steps in the backward", in_backward=True),
    Case("compiled by AOTAutograd", compiled="aot_eager"),
)
INDUCTOR = Case("compiled by Inductor", compiled="inductor")
