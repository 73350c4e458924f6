"""GroupPlan: which parameters form a group, over which ranks, and how they will lie there.

Planning changes nothing: a call of `fully_shard` that is refused, for whatever reason, leaves the model as it
was. Only once every group of a unit has its plan are the groups built (`ParamGroup`) and handed to the modules.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from vescale_fsdp.dtensor.grad_dtype import check_grad_dtype
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import (
    ArgumentError,
    LayoutError,
    LifecycleError,
    MisuseError,
    PlacementError,
    UnsupportedOpError,
)
from vescale_fsdp.layout.buffers import plan_buffers
from vescale_fsdp.layout.granularity import Element, GranularityRule, resolve_granularity
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.padding import PaddingPolicy, check_padding
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.layout.planner import Scatter, TensorSpec, plan_by_rows
from vescale_fsdp.runtime.all_gather_hooks import check_hooks, has_hooks
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy
from vescale_fsdp.runtime.data_mesh import DataMesh, PriorSharding, local_part, mesh_of_info
from vescale_fsdp.torch_modes import is_fake
from vescale_fsdp.torch_private import ShardPlacementResult, grad_dtype_of


@dataclass(frozen=True)
class Wish:
    """Where one parameter is to go, and what must stay whole of it (None: whatever ``granularity`` says)."""

    data: DataMesh
    ragged: RaggedShard | None = None


class PlacementWishes:
    """The answers of a ``shard_placement_fn`` for one unit.

    Args:
        function: the user's, or None.
        default: the mesh of parameters for which it names no other.

    Raises:
        PlacementError: if all ranks hold everything, so that there is nothing to ask.
    """

    def __init__(self, function: Callable[[nn.Parameter], Any] | None, default: DataMesh) -> None:
        if function is not None and default.is_replicated_only:
            raise PlacementError(
                "shard_placement_fn needs an axis that shards.",
                expected="dp_mesh_dims with shard=",
                got=f"replication only, over {default.mesh}",
                todo="leave shard_placement_fn out",
            )
        self._function = function
        self._default = default
        # By the ranks that share a parameter: what the user gave for them, and what it means.
        self._known: dict[tuple[dist.ProcessGroup, ...], tuple[Any, DataMesh]] = {}

    def of(self, fqn: str, param: nn.Parameter) -> Wish:
        """What the function says of one parameter.

        Raises:
            MisuseError: if that is nothing it can say.
            PlacementError: for another mesh of the same ranks.
        """
        wanted = self._function(param) if self._function is not None else None
        info, placement = None, wanted
        if isinstance(wanted, ShardPlacementResult):
            info, placement = wanted.mesh_info, wanted.placement
        data = self._mesh(fqn, info)
        if isinstance(placement, RaggedShard) and placement.num_shards == data.num_shards:
            return Wish(data, placement)
        if placement is None or (isinstance(placement, Shard) and -param.ndim <= placement.dim < param.ndim):
            return Wish(data)
        raise MisuseError(
            "shard_placement_fn returned a placement that cannot be used.",
            expected=f"None, Shard of one of the {param.ndim} dims, RaggedShard with {data.num_shards} units, "
            "or a ShardPlacementResult of one of them",
            got=wanted,
            where=fqn,
            todo="say what must stay whole with granularity=",
        )

    def _mesh(self, fqn: str, info: Any) -> DataMesh:
        data = self._default if info is None else mesh_of_info(info)
        given, known = self._known.setdefault(_groups(data), (info, data))
        if given is info or known.mesh is data.mesh:
            return known
        raise PlacementError(
            "Two meshes of a unit stand for the same ranks.",
            expected="the same mesh_info object for all parameters of these ranks",
            got=f"{data.mesh} beside {known.mesh}",
            where=fqn,
            todo="make each FSDPMeshInfo once and return that object",
        )


def _groups(data: DataMesh) -> tuple[dist.ProcessGroup, ...]:
    return tuple(data.mesh.get_group(axis) for axis in range(data.mesh.ndim))


_OVERRIDE = "param_dtype_override_fn"
_FOLLOWED: dict[type, set[str]] = {
    MixedPrecisionPolicy: {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", _OVERRIDE},
    CPUOffloadPolicy: {"pin_memory"},
    OffloadPolicy: set(),
}


def check_policies(mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> None:
    """Refuse what a policy asks for and nobody here follows.

    Raises:
        UnsupportedOpError: for a kind of policy, a field that holds another value than its default, or policies that
            exclude each other.
    """
    offload = CPUOffloadPolicy if isinstance(offload_policy, CPUOffloadPolicy) else OffloadPolicy
    if offload is OffloadPolicy and type(offload_policy) is not OffloadPolicy:
        raise UnsupportedOpError(
            "This offload_policy is of a kind that is not supported.",
            expected="OffloadPolicy or CPUOffloadPolicy",
            got=f"{type(offload_policy).__module__}.{type(offload_policy).__name__}",
        )
    if offload is CPUOffloadPolicy and isinstance(mp_policy, GatherPolicy):
        raise UnsupportedOpError(
            "A gather policy reads shards on the device that computes with them.",
            expected="no CPU offload (cpu_offload, offload_policy), or torch's own MixedPrecisionPolicy",
            got=f"{offload_policy} beside {mp_policy}",
            todo="leave one of them out",
        )
    _check_fields("mp_policy", mp_policy, MixedPrecisionPolicy)
    _check_fields("offload_policy", offload_policy, offload)


def _check_fields(argument: str, policy: Any, kind: type) -> None:
    """Of torch's class only: a subclass that has fields of its own knows what they mean."""
    for each in dataclasses.fields(kind):
        value = vars(policy).get(each.name, each.default)
        if each.name not in _FOLLOWED[kind] and value != each.default:
            raise UnsupportedOpError(
                f"{kind.__name__}.{each.name} is not supported.",
                expected=f"{each.name}={each.default!r}",
                got=f"{each.name}={value!r}",
                where=argument,
                todo="leave it out",
            )


def param_dtype_of(policy: MixedPrecisionPolicy, fqn: str, param: nn.Parameter) -> torch.dtype | None:
    """The dtype that a parameter computes in; None: its own.

    Raises:
        ValueError: if ``param_dtype_override_fn`` gives something else than None, ``param_dtype`` or its own.
    """
    override = vars(policy).get(_OVERRIDE)
    wanted = override(param) if override is not None else None
    if wanted is None:
        return policy.param_dtype
    if wanted not in (policy.param_dtype, param.dtype):
        raise ArgumentError(
            f"{_OVERRIDE} gives a parameter another dtype than it may.",
            expected=f"None, {policy.param_dtype} (param_dtype) or {param.dtype} (its own)",
            got=repr(wanted),
            where=fqn,
        )
    return policy.param_dtype if wanted is (policy.param_dtype or param.dtype) else param.dtype


def policy_of_group(policy: MixedPrecisionPolicy, param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """The policy of a group whose parameters all compute in ``param_dtype``."""
    if vars(policy).get(_OVERRIDE) is None:
        return policy
    changes: dict[str, Any] = {"param_dtype": param_dtype, _OVERRIDE: None}
    return dataclasses.replace(policy, **changes)


class _Replaced:
    """The replaced parameters that somebody still holds, each with its name in the unit that took it."""

    def __init__(self) -> None:
        self._alive: dict[
            int, tuple[weakref.ref[torch.Tensor], str]
        ] = {}  # by id; entries go with their tensors
        self._hook: RemovableHandle | None = None

    def add(self, param: torch.Tensor, fqn: str) -> None:
        key = id(param)
        self._alive[key] = (weakref.ref(param, lambda _: self._gone(key)), fqn)
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(_check_step)

    def _gone(self, key: int) -> None:
        self._alive.pop(key, None)
        if not self._alive and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def name_of(self, param: torch.Tensor) -> str | None:
        found = self._alive.get(id(param))
        return found[1] if found is not None and found[0]() is param else None


_replaced = _Replaced()


def note_replaced(param: torch.Tensor, fqn: str) -> None:
    """Remember that a sharded parameter stands in place of this one."""
    _replaced.add(param, fqn)


def replaced_as(param: torch.Tensor) -> str | None:
    """The name under which a unit took this parameter, or None."""
    return _replaced.name_of(param)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch before every optimizer's step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = [name for param in params if (name := replaced_as(param)) is not None]
    if stale:
        raise LifecycleError(
            "The optimizer holds parameters that the model no longer has: its step would train nothing.",
            expected="an optimizer of the sharded parameters",
            got=f"{len(stale)} of {len(params)} replaced since it was built: {', '.join(stale[:4])}",
            where=type(optimizer).__name__,
            todo="build the optimizer after fully_shard (and after tensors were assigned to the model), from "
            "model.parameters()",
        )


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
