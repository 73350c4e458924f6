"""GroupPlan: which parameters form a group, over which ranks, and how they will lie there.

Planning changes nothing: a call of `fully_shard` that is refused, for whatever reason, leaves the model as it
was. Only once every group of a unit has its plan are the groups built (`ParamGroup`) and handed to the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, check_grad_dtype
from vescale_fsdp.errors import ArgumentError, LayoutError, UnsupportedOpError
from vescale_fsdp.layout.granularity import Element, GranularityRule, resolve_granularity
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.padding import PaddingPolicy, check_padding
from vescale_fsdp.layout.planner import Scatter, TensorSpec, plan_buffers, plan_by_rows
from vescale_fsdp.runtime.setup.all_gather_hooks import check_hooks, has_hooks
from vescale_fsdp.runtime.setup.data_mesh import DataMesh
from vescale_fsdp.runtime.setup.policies import param_dtype_of
from vescale_fsdp.runtime.setup.replaced_params import note_replaced, replaced_as
from vescale_fsdp.runtime.setup.shard_placement_fn import PlacementWishes, Wish
from vescale_fsdp.runtime.setup.tensor_parallel import PriorSharding, local_part
from vescale_fsdp.torch_modes import is_fake
from vescale_fsdp.torch_private import grad_dtype_of


@dataclass(frozen=True)
class PlanRules:
    """What the user said about layouts (the arguments of `fully_shard` with these names)."""

    ignored_params: frozenset[nn.Parameter]
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    granularity: GranularityRule
    padding_policy: PaddingPolicy
    mp_policy: MixedPrecisionPolicy


@dataclass(frozen=True)
class GroupPlan:
    """One group to be.

    Args:
        params: the original parameters by name, in the order of ``layout.slots``.
        owners: per name, every (module, attribute) that is this parameter.
        priors: per name, how other parallelisms have cut it before.
        layout: where each will lie.
        data: the ranks that share them.
        part_size: ranks of the smaller groups that hold full parameters between forward and backward, or None.
        is_hooked: whether the parameters are of tensor subclasses that gather themselves.
        param_dtype: what the parameters compute in; None: their own dtype.
        scatter, wanted_part_size: what the user said, for whoever plans anew for other ranks.
        together: all names that were planned with these, in definition order: more than ``params`` where their
            blocks do not go together and the rest lies in another buffer, so in another group.
    """

    params: dict[str, nn.Parameter]
    owners: dict[str, list[tuple[nn.Module, str]]]
    priors: dict[str, PriorSharding]
    layout: GroupLayout
    data: DataMesh
    part_size: int | None
    is_hooked: bool
    param_dtype: torch.dtype | None
    scatter: Scatter
    wanted_part_size: int | None = None
    together: tuple[str, ...] = ()


@dataclass
class _GroupParams:
    """Parameters that will form one group."""

    data: DataMesh
    is_hooked: bool
    param_dtype: torch.dtype | None
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    owners: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    priors: dict[str, PriorSharding] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)  # elements of a parameter's blocks


def plan_groups(
    managed: Iterable[tuple[str, nn.Module]], data: DataMesh, rules: PlanRules
) -> list[GroupPlan]:
    """Plan the groups of one unit: one per dtype (stored and computed in), trainability and mesh.

    Two, where the blocks of such parameters do not go together in one buffer.

    Args:
        managed: the modules whose own parameters the unit takes, with the prefix of their names.
        data: what they are sharded over, where ``shard_placement_fn`` says nothing else.
        rules: the user's.

    Raises:
        LayoutError, PlacementError, UnsupportedOpError: for a parameter that cannot be sharded so.
    """
    return [plan for group in _params_by_group(managed, data, rules) for plan in _plans(group, rules)]


def mark_taken(plan: GroupPlan) -> None:
    """Remember on the original parameters that a unit has them: another one must not."""
    for fqn, param in plan.params.items():
        note_replaced(param, fqn)


def _params_by_group(
    managed: Iterable[tuple[str, nn.Module]], data: DataMesh, rules: PlanRules
) -> list[_GroupParams]:
    """Parameters by what a group shares, each once, with every attribute that holds it."""
    groups: dict[tuple[Any, ...], _GroupParams] = {}
    placed: dict[nn.Parameter, tuple[_GroupParams, str]] = {}
    wishes = PlacementWishes(rules.shard_placement_fn, data)
    for prefix, module in managed:
        for name, param in module._parameters.items():
            if param is None or param in rules.ignored_params:
                continue
            if param in placed:
                group, fqn = placed[param]
                group.owners[fqn].append((module, name))
                continue
            fqn = prefix + name
            _check_param(fqn, param)
            wish = wishes.of(fqn, param)
            prior = PriorSharding.of(fqn, param, wish.data)
            is_hooked = has_hooks(local_part(param))
            param_dtype = param_dtype_of(rules.mp_policy, fqn, param)
            key = (param.dtype, param.requires_grad, wish.data, is_hooked, param_dtype)
            group = groups.setdefault(key, _GroupParams(wish.data, is_hooked, param_dtype))
            group.params[fqn] = param
            group.owners[fqn] = [(module, name)]
            group.priors[fqn] = prior
            group.blocks[fqn] = _block_numel(fqn, param, wish, rules)
            placed[param] = (group, fqn)
    return list(groups.values())


def _block_numel(fqn: str, param: nn.Parameter, wish: Wish, rules: PlanRules) -> int:
    """Elements that stay whole, of what other parallelisms have left of the parameter."""
    shape = tuple(local_part(param).shape)
    granularity = resolve_granularity(rules.granularity, fqn, param)
    if wish.ragged is None:
        return granularity.block_numel(shape)
    if granularity != Element():
        raise LayoutError(
            "Two rules say what must stay whole of one parameter.",
            expected="granularity= or a RaggedShard of shard_placement_fn",
            got=f"{granularity} and {wish.ragged}",
            where=fqn,
            todo="leave one of them out",
        )
    return max(1, wish.ragged.unit_numel(shape))


def _plans(group: _GroupParams, rules: PlanRules) -> Iterator[GroupPlan]:
    specs = [
        TensorSpec(
            fqn,
            tuple(local_part(param).shape),
            str(param.dtype).removeprefix("torch."),
            group.blocks[fqn],
        )
        for fqn, param in group.params.items()
    ]
    num_shards = group.data.num_shards
    part_size = _part_size(rules.reshard_after_forward, num_shards)
    layouts: Iterable[GroupLayout]
    if group.is_hooked:
        _check_hooked(group, part_size)
        layouts = (plan_by_rows(specs, num_shards),)
    else:
        layouts = plan_buffers(specs, num_shards, scatter=rules.padding_policy.scatter)
        for layout in layouts:
            check_padding(layout, rules.padding_policy, warn=dist.get_rank() == 0)
    for layout in layouts:
        names = [slot.fqn for slot in layout.slots]
        yield GroupPlan(
            {fqn: group.params[fqn] for fqn in names},
            {fqn: group.owners[fqn] for fqn in names},
            {fqn: group.priors[fqn] for fqn in names},
            layout,
            group.data,
            part_size,
            group.is_hooked,
            group.param_dtype,
            rules.padding_policy.scatter,
            None if isinstance(rules.reshard_after_forward, bool) else rules.reshard_after_forward,
            tuple(group.params),
        )


def _check_hooked(group: _GroupParams, part_size: int | None) -> None:
    """What parameters that gather themselves cannot go with."""
    problem = None
    if part_size is not None:
        problem = f"reshard_after_forward={part_size}: their hooks gather all rows or none"
    elif group.data.mesh.ndim == 2 and not group.data.mesh.mesh_dim_names:
        problem = "a mesh without names: their hooks are given the axis that shards"
    if problem is not None:
        raise UnsupportedOpError(
            "Parameters with all-gather hooks of their own cannot be sharded so.",
            expected="reshard_after_forward True, False or None, and names for the axes of a 2-D mesh",
            got=problem,
            where=", ".join(group.params),
        )


def _part_size(wanted: bool | int | None, num_shards: int) -> int | None:
    """``reshard_after_forward`` as a number, where that means a smaller group than all ranks that shard."""
    if wanted is None or isinstance(wanted, bool):
        return None
    if wanted < 1 or num_shards % wanted:
        raise ArgumentError(
            "reshard_after_forward as a number is the size of a smaller group of ranks.",
            expected=f"a divisor of {num_shards}, the ranks that shard",
            got=wanted,
            todo="give the number of accelerators per node",
        )
    return wanted if 1 < wanted < num_shards else None


def _check_param(fqn: str, param: nn.Parameter) -> None:
    taken_by = replaced_as(param)
    if taken_by is not None:
        raise LayoutError(
            "A parameter is shared by modules of two units; each would train its own copy.",
            expected="all modules that share a parameter in one unit",
            got=f"one that fully_shard has already taken as {taken_by!r}",
            where=fqn,
            todo="pass those modules as a list, fully_shard([a, b]), or leave both to their parent",
        )
    local = local_part(param)
    if has_hooks(local):
        check_hooks(fqn, local)
    elif type(local) is not torch.Tensor and not isinstance(param, RaggedDTensor) and not is_fake(local):
        raise UnsupportedOpError(
            "A parameter of a tensor subclass cannot be sharded: its pieces would lose what it adds.",
            expected="plain tensors, DTensors of other parallelisms, or a subclass with all-gather hooks",
            got=f"{type(local).__name__} without fsdp_pre_all_gather and fsdp_post_all_gather",
            where=fqn,
            todo="shard first and convert after, or gather 8-bit codes with vescale_fsdp.quantize",
        )
    check_grad_dtype(grad_dtype_of(param), param.dtype, fqn)
    if param.ndim == 0:
        raise LayoutError(
            "A parameter without dims cannot be sharded.",
            expected="at least one dim",
            got="shape ()",
            where=fqn,
            todo="make it a 1-D tensor of one element",
        )
    if not param.is_contiguous():
        raise UnsupportedOpError(
            "A parameter must be contiguous: its rows are cut as they lie in memory.",
            expected="row-major strides",
            got=f"shape {tuple(param.shape)}, strides {param.stride()}",
            where=fqn,
            todo="replace it by param.contiguous() before fully_shard",
        )
