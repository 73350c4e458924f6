"""Renewal: a sharded model and its optimizer, put on other ranks in place.

    stays the same                                  is made anew
    modules, Parameter objects, hooks on them       mesh, layouts (planned for the new number of ranks), buffers
    the optimizer, its param groups                 the optimizer's state
    what the user has set on units                  the schedule: as before the first forward

Values are zeros afterwards; who calls this restores them. So nothing half done can be left of a step that was broken
off, and the model is what `fully_shard` would make of it on these ranks in a process of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from vescale_fsdp.checkpoint.state.per_rank import Resharded
from vescale_fsdp.checkpoint.state.reshardable_data import ReshardableLoader, ReshardableSampler
from vescale_fsdp.dtensor.piece_map import move_to
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.planner import TensorSpec, plan_buffers
from vescale_fsdp.optim.structured_optimizer import StructuredOptimizer
from vescale_fsdp.runtime.comm.group_comm import separate_reductions
from vescale_fsdp.runtime.data_mesh import DataMesh, PriorSharding
from vescale_fsdp.runtime.fsdp_state import states_of
from vescale_fsdp.runtime.group_plan import GroupPlan, OriginalParam
from vescale_fsdp.runtime.param_group import ManagedParam, ParamGroup, use_memory


def check_renewable(model: nn.Module, mesh: DeviceMesh) -> None:
    """Prove that a model can be put on other ranks later.

    Raises:
        UnsupportedOpError: naming the first parameter that cannot, and why.
    """
    for state in states_of(model):
        for group in state.groups:
            problem = None
            if type(group) is not ParamGroup:
                problem = "its tensor subclass gathers itself"
            elif group.data.mesh != mesh or group.data.spmd is not None:
                problem = f"it is sharded over {group.data.mesh}"
            elif group.wanted_part_size is not None:
                problem = f"reshard_after_forward={group.wanted_part_size}, which not every number of ranks divides by"
            elif any(param.prior.spec is not None for param in group.params):
                problem = "tensor or expert parallelism has cut it"
            if problem is not None:
                raise UnsupportedOpError(
                    "This model cannot be put on other ranks in place.",
                    expected=f"all units sharded over the mesh that `build` is given, {mesh}, and nothing else",
                    got=problem,
                    where=f"{group.params[0].slot.fqn} in {type(state.modules[0]).__name__}",
                    todo="restart the job when ranks are lost: CheckpointManager.restore goes on on any number of them",
                )


def renew_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Put a sharded model on another mesh; its values are zeros then. On all ranks of the mesh together.

    Args:
        model: its root, proven by `check_renewable`.
        mesh: 1-D (shard) or 2-D (replicate, shard), of any number of ranks.
    """
    data = DataMesh(mesh)
    states = states_of(model)
    for state in states:
        together: dict[tuple[str, ...], list[ParamGroup]] = {}
        for group in state.groups:
            together.setdefault(group.together, []).append(group)
        state.renew([group for olds in together.values() for group in _renewed(olds, data)])
    groups = [group for state in states for group in state.groups]
    separate_reductions(group.comm for group in groups if group.comm.settings.separate_reductions)
    for state in states:
        for kind in {group.comm.settings.memory for group in state.groups} - {None}:
            use_memory(state.groups, kind)  # all groups of a unit have the same


def _renewed(olds: list[ParamGroup], data: DataMesh) -> Iterator[ParamGroup]:
    """Groups of the same parameters over other ranks, installed: one or two, as their blocks go together there."""
    old = olds[0]
    params = {param.slot.fqn: param for group in olds for param in group.params}
    slots = [params[fqn].slot for fqn in old.together]
    specs = [TensorSpec(slot.fqn, slot.shape, slot.dtype, slot.block_numel) for slot in slots]
    for layout in plan_buffers(specs, data.num_shards, scatter=old.scatter):
        new = _new_group(old, layout, data, [params[slot.fqn] for slot in layout.slots])
        new.new_shard(old.shard.dtype, old.home)
        for param in new.params:
            before = params[param.slot.fqn]
            kept, made = before.sharded, param.sharded
            assert isinstance(kept, RaggedDTensor) and isinstance(made, RaggedDTensor)
            param.piece = new.shard[param.local]
            move_to(kept, made, param.piece)
            kept.grad = None
            param.take(kept)
        new.install()
        yield new


def _new_group(
    old: ParamGroup, layout: GroupLayout, data: DataMesh, params: Iterable[ManagedParam]
) -> ParamGroup:
    """A group like ``old`` for some of the parameters it was planned with, without values."""
    outlines = {}
    for param in params:
        slot = param.slot
        empty = torch.empty(slot.shape, dtype=old.shard.dtype, device="meta")
        outline = nn.Parameter(empty, param.sharded.requires_grad)
        outlines[slot.fqn] = OriginalParam(outline, param.owners, PriorSharding(data, None), slot.block_numel)
    plan = GroupPlan(
        params=outlines,
        layout=layout,
        data=data,
        part_size=None,
        is_hooked=False,
        param_dtype=old.mp_policy.param_dtype,
        scatter=old.scatter,
        together=old.together,
    )
    new = ParamGroup(plan, old.mp_policy, old.offload or OffloadPolicy(), old.device)
    new.comm.settings = old.comm.settings
    return new


def renew_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Forget the state of an optimizer whose parameters lie on other ranks now, as before its first step."""
    # What is derived from the state, such as plans of a step and flat views, goes as when another state is loaded.
    optimizer.__setstate__({"state": defaultdict(dict)})
    if isinstance(optimizer, StructuredOptimizer):
        optimizer.make_state()


def renew_data(more: Any, rank: int, num_ranks: int) -> None:
    """Make samplers and loaders in `Resharded` values those of another rank; a restore says where they go on."""
    if isinstance(more, Resharded) and isinstance(more.value, (ReshardableSampler, ReshardableLoader)):
        more.value.renew(rank, num_ranks)
    elif isinstance(more, Mapping):
        for value in more.values():
            renew_data(value, rank, num_ranks)
    elif isinstance(more, (list, tuple)):
        for value in more:
            renew_data(value, rank, num_ranks)
