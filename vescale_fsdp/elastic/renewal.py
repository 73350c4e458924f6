"""Renewal: moves a sharded model and its optimizer to other ranks, with the same Parameter and optimizer objects.

    stays the same                                  is created again
    modules, Parameter objects, hooks on them       mesh, layouts (planned for the new number of ranks), buffers
    the optimizer and its param groups              the optimizer's state
    settings of units                               the schedule of collectives: as before the first forward
    averages and other tensors that are sharded     their layouts: those of the parameters that they are sharded like
    like parameters, anywhere in the state

All values are zeros afterwards, until the caller restores a checkpoint. So nothing remains of an interrupted step, and
the model is sharded as `fully_shard` would shard it in a new process on these ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.state.per_rank import Resharded
from vescale_fsdp.checkpoint.state.reshardable_data import ReshardableLoader, ReshardableSampler
from vescale_fsdp.dtensor.piece_map import become_zeros_like, move_to
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.planner import TensorSpec, plan_buffers
from vescale_fsdp.optim.structured_optimizer import StructuredOptimizer
from vescale_fsdp.runtime.comm.group_comm import separate_reductions
from vescale_fsdp.runtime.data_mesh import DataMesh, PriorSharding, data_mesh
from vescale_fsdp.runtime.fsdp_state import states_of
from vescale_fsdp.runtime.group_plan import GroupPlan, OriginalParam
from vescale_fsdp.runtime.param_group import ManagedParam, ParamGroup

T = TypeVar("T")


def check_renewable(model: nn.Module, mesh: DeviceMesh) -> None:
    """Check that a model can be moved to other ranks later.

    Raises:
        UnsupportedOpError: names the first parameter that cannot be moved, and the reason.
    """
    for state in states_of(model):
        for group in state.groups:
            problem = None
            # Not isinstance: groups of a subclass of ParamGroup have tensors that gather themselves.
            if type(group) is not ParamGroup:
                problem = "its tensor subclass gathers itself"
            elif group.data.mesh != mesh or group.data.spmd is not None:
                problem = f"it is sharded over {group.data.mesh}"
            elif group.wanted_part_size is not None:
                problem = (
                    f"reshard_after_forward={group.wanted_part_size} does not divide every number of ranks"
                )
            elif any(param.prior.spec is not None for param in group.params):
                problem = "it is sharded by tensor or expert parallelism"
            if problem is not None:
                raise UnsupportedOpError(
                    "This model cannot be moved to other ranks in place.",
                    expected=f"all units sharded over the mesh that `build` receives, {mesh}, and over no other mesh",
                    got=problem,
                    where=f"{group.params[0].slot.fqn} in {type(state.modules[0]).__name__}",
                    todo="do not use ElasticJob for this model; restart the job when ranks are lost: "
                    "CheckpointManager.restore works on any number of ranks",
                )


def renew_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Move a sharded model to another mesh, and set all values to zero. A collective of all ranks of the new mesh.

    Args:
        model: the root module; `check_renewable` must have accepted it.
        mesh: the new mesh, 1-D (shard) or 2-D (replicate, shard), of any number of ranks. Units with
            ``shard_optimizer_over`` have a hybrid cut on a mesh of two axes, and are sharded over a mesh of one axis.
    """
    states = states_of(model)
    meshes = {
        over: data_mesh(mesh, over=over)
        for over in dict.fromkeys(group.data.over for state in states for group in state.groups)
    }
    for state in states:
        # Groups of one unit that were planned together must be planned together again: the planner may divide the same
        # parameters into other groups for another number of ranks.
        together: dict[tuple[str, ...], list[ParamGroup]] = {}
        for group in state.groups:
            together.setdefault(group.together, []).append(group)
        state.renew(
            [group for olds in together.values() for group in _renewed(olds, meshes[olds[0].data.over])]
        )
    groups = [group for state in states for group in state.groups]
    # One call for all units, so that groups over the same ranks share one new communicator.
    separate_reductions(group.comm for group in groups if group.comm.settings.separate_reductions)


def _renewed(olds: list[ParamGroup], data: DataMesh) -> Iterator[ParamGroup]:
    """Shard the parameters of groups that were planned together over ``data``.

    Args:
        olds: the groups on the old ranks.

    Yields:
        Each new group, filled with zeros and installed in its modules. There may be more or fewer groups than ``olds``.
    """
    old = olds[0]
    params = {param.slot.fqn: param for group in olds for param in group.params}
    # In the order of the first planning, so that the layouts are those of `fully_shard` on these ranks.
    slots = [params[fqn].slot for fqn in old.together]
    specs = [TensorSpec(slot.fqn, slot.shape, slot.dtype, slot.block_numel) for slot in slots]
    for layout in plan_buffers(specs, data.num_shards, scatter=old.scatter):
        new = _new_group(old, layout, data, [params[slot.fqn] for slot in layout.slots])
        new.new_shard(old.shard.dtype, old.home)  # allocates the shard, which was on the meta device
        for param in new.params:
            # The optimizer and hooks refer to the old Parameter object, so it gets the new placement and memory.
            kept, created = params[param.slot.fqn].sharded, param.sharded
            assert isinstance(kept, RaggedDTensor) and isinstance(created, RaggedDTensor)
            param.piece = new.shard[param.local]
            move_to(kept, created, param.piece)
            kept.grad = None  # drops the gradient of the interrupted step
            param.take(kept)
        new.install()
        yield new


def _new_group(
    old: ParamGroup, layout: GroupLayout, data: DataMesh, params: Iterable[ManagedParam]
) -> ParamGroup:
    """Make a group with the settings of ``old`` for some of its parameters. Its shard is on the meta device."""
    outlines = {}
    # No prior sharding (None), since `check_renewable` refuses tensor and expert parallelism.
    for param in params:
        slot = param.slot
        # On the meta device: only shape and dtype are needed.
        empty = torch.empty(slot.shape, dtype=old.shard.dtype, device="meta")
        outline = nn.Parameter(empty, param.sharded.requires_grad)
        outlines[slot.fqn] = OriginalParam(outline, param.owners, PriorSharding(data, None), slot.block_numel)
    plan = GroupPlan(
        params=outlines,
        layout=layout,
        data=data,
        part_size=None,  # `check_renewable` refuses other values
        is_hooked=False,  # `check_renewable` refuses subclasses that gather themselves
        param_dtype=old.mp_policy.param_dtype,
        scatter=old.scatter,
        together=old.together,
    )
    new = ParamGroup(plan, old.mp_policy, old.offload or OffloadPolicy(), old.device)
    new.comm.settings = old.comm.settings
    return new


def renew_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Reset an optimizer, whose parameters have moved to other ranks, to its initial state."""
    # Not ``state.clear()``: `__setstate__` also drops data that classes derive from the state.
    optimizer.__setstate__({"state": defaultdict(dict)})
    if isinstance(optimizer, StructuredOptimizer):
        optimizer.make_state()


def check_more(model: nn.Module, more: Any, mesh: DeviceMesh) -> None:
    """Check that all sharded modules in ``more``, and all sharded tensors beside parameters, can be moved later.

    Args:
        model: the root module, which `check_renewable` has accepted.
        more: any nested value, as for `renew_more`.

    Raises:
        UnsupportedOpError: names the first one that cannot be moved, and the reason.
    """
    modules, tensors = _sharded_in(model, more)
    for module in modules:
        check_renewable(module, mesh)
    known = _params_by_layout([model, *modules])
    for name, tensor in tensors:
        if isinstance(tensor, RaggedDTensor) and tensor.layout_ref in known:
            continue
        raise UnsupportedOpError(
            "A tensor of the training state cannot be moved to other ranks.",
            expected="a plain tensor, or one that is sharded like a parameter, such as param.detach().clone()",
            got=f"a DTensor of {tuple(tensor.shape)}, placed {tensor.placements}, like no parameter",
            where=name,
            todo="make the tensor from a parameter, or keep the tensor out of TrainingState and make it anew "
            "in on_renewal",
        )


def renew_more(model: nn.Module, more: Any, mesh: DeviceMesh) -> None:
    """Move a model, and all that is sharded in ``more``, to another mesh. A collective of all ranks of the new mesh.

    Sharded modules, such as a reference policy, are moved like the model. Tensors, such as an average of the weights,
    are sharded like their parameters again. Optimizers are reset. All values are zeros afterwards.

    Args:
        model: the root module; `check_renewable` and `check_more` must have accepted model and ``more``.
        more: any nested value, searched through mappings, lists, tuples, modules and what ``state_dict()`` of other
            objects returns; these must not communicate, since ranks that join do not call them.
        mesh: as for `renew_model`.
    """
    modules, tensors = _sharded_in(model, more)
    known = _params_by_layout([model, *modules])  # before the parameters move
    targets = [
        (tensor, known[tensor.layout_ref]) for _, tensor in tensors if isinstance(tensor, RaggedDTensor)
    ]
    moved: set[int] = set()
    for module in [model, *modules]:
        found = {id(state) for state in states_of(module)}
        if not found <= moved:  # not a part of a module that has moved
            renew_model(module, mesh)
            moved |= found
    for tensor, param in targets:
        become_zeros_like(tensor, param)
    for optimizer in {id(each): each for each in _leaves(more, torch.optim.Optimizer)}.values():
        renew_optimizer(optimizer)


def _params_by_layout(modules: Iterable[nn.Module]) -> dict[object, RaggedDTensor]:
    """Return a parameter for each layout and name in the layout. Parameters with equal ones stay alike when moved."""
    params = [
        param.sharded
        for module in modules
        for state in states_of(module)
        for g in state.groups
        for param in g.params
    ]
    return {param.layout_ref: param for param in params if isinstance(param, RaggedDTensor)}


def _sharded_in(model: nn.Module, more: Any) -> tuple[list[nn.Module], list[tuple[str, DTensor]]]:
    """Return the sharded modules in ``more``, and by name the DTensors that no sharded module and no optimizer manages.

    Those may be in ``more`` or in modules: buffers of the model, for example.
    """
    modules, tensors = [], dict[int, tuple[str, DTensor]]()
    for name, leaf in chain([("model", model)], _named_leaves(more)):
        if isinstance(leaf, DTensor):
            tensors.setdefault(id(leaf), (name, leaf))
        elif isinstance(leaf, nn.Module):
            managed = {id(p.sharded) for state in states_of(leaf) for g in state.groups for p in g.params}
            if managed and leaf is not model:
                modules.append(leaf)
            for key, tensor in chain(leaf.named_parameters(), leaf.named_buffers()):
                if isinstance(tensor, DTensor) and id(tensor) not in managed:
                    tensors.setdefault(id(tensor), (f"{name}.{key}", tensor))
    return modules, list(tensors.values())


def _leaves(more: Any, kind: type[T]) -> list[T]:
    return [leaf for _, leaf in _named_leaves(more) if isinstance(leaf, kind)]


def _named_leaves(more: Any, name: str = "more") -> Iterator[tuple[str, Any]]:
    """Yield the values in mappings, lists, tuples and states of objects, each with its name: keys joined by dots."""
    if isinstance(more, Mapping):
        for key, value in more.items():
            yield from _named_leaves(value, f"{name}.{key}")
    elif isinstance(more, (list, tuple)):
        for index, value in enumerate(more):
            yield from _named_leaves(value, f"{name}.{index}")
    elif isinstance(more, (torch.Tensor, nn.Module, torch.optim.Optimizer, Resharded)):
        yield name, more
    elif isinstance(more, Stateful):  # an object of the user's, whose state refers to its tensors
        yield from _named_leaves(more.state_dict(), name)


def renew_data(more: Any, rank: int, num_ranks: int) -> None:
    """Give samplers and loaders in `Resharded` values their new rank. A restore then sets their position.

    Args:
        more: any nested value, as for `renew_more`.
    """
    for resharded in _leaves(more, Resharded):
        if isinstance(resharded.value, (ReshardableSampler, ReshardableLoader)):
            resharded.value.renew(rank, num_ranks)
