"""GroupPlan: which parameters of a unit form a group, the ranks that share them, and their layout.

Planning changes no module, so the model is unchanged if `fully_shard` raises.

What each result of ``shard_placement_fn`` for a parameter means:

    None, Shard(dim)                        no effect: users choose the dim to avoid padding or copies, which a planned
                                            layout avoids for every dim
    RaggedShard(dims, units)                a unit stays whole; the planner chooses how many units each rank gets, as
                                            with ``granularity=``
    ShardPlacementResult(placement, info)   one of the above, over the parameter's own mesh: one group per set of
                                            ranks (as in torch 2.13, fsdp/_fully_shard/_fsdp_init.py:478-533)

torch's policies are read field by field. A newer torch may add fields and classes; an unknown field raises unless it
has its default value. ``param_dtype_override_fn`` (torch 2.15) is supported: parameters that compute in different
dtypes form different groups, each with a policy of its own.

An optimizer built before `fully_shard` keeps the original parameters. These never get a gradient, so torch's optimizers
would silently skip them. Instead, the optimizer's first step raises: while original parameters are alive, a global hook
is registered that torch calls before every step of any optimizer.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, check_grad_dtype
from vescale_fsdp.dtensor.waiting_grad import waiting_in
from vescale_fsdp.errors import (
    ArgumentError,
    LayoutError,
    LifecycleError,
    MisuseError,
    PlacementError,
    UnsupportedOpError,
)
from vescale_fsdp.layout.granularity import Element, GranularityRule, resolve_granularity
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.padding import PaddingPolicy, check_padding
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.layout.planner import Scatter, TensorSpec, plan_buffers, plan_by_rows
from vescale_fsdp.runtime.all_gather_hooks import STAYS_WHOLE, check_hooks, has_hooks
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy
from vescale_fsdp.runtime.data_mesh import DataMesh, PriorSharding, local_part, mesh_of_info
from vescale_fsdp.torch_modes import eager, is_fake
from vescale_fsdp.torch_private import ShardPlacementResult, grad_dtype_of


@dataclass(frozen=True)
class PlanRules:
    """The arguments of `fully_shard` that decide groups and layouts, under the same names."""

    ignored_params: frozenset[nn.Parameter]
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    granularity: GranularityRule
    padding_policy: PaddingPolicy
    mp_policy: MixedPrecisionPolicy


class OriginalParam(NamedTuple):
    """A parameter before it is sharded, with its owners and its block size."""

    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]  # every module attribute that is this parameter
    prior: PriorSharding  # sharding by other parallelisms
    block_numel: int  # elements of a block that stays whole


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one group.

    Args:
        params: the original parameters by name, in the order of ``layout.slots``.
        layout: the layout of these parameters.
        data: the ranks that share the parameters.
        part_size: number of ranks that together keep one copy of the full parameters between forward and backward
            (``reshard_after_forward`` as a number); None: no copy is kept in parts.
        is_hooked: whether the parameters' class has all-gather hooks.
        param_dtype: dtype of compute; None: the dtype of the parameters.
        scatter, wanted_part_size: the user's arguments, from which a new plan is made when the number of ranks changes.
        together: names of all parameters that were planned together, in definition order. If they share one buffer,
            the names of ``params``; otherwise ``params`` has some of them, and a second group has the rest.
    """

    params: dict[str, OriginalParam]
    layout: GroupLayout
    data: DataMesh
    part_size: int | None
    is_hooked: bool
    param_dtype: torch.dtype | None
    scatter: Scatter
    wanted_part_size: int | None = None
    together: tuple[str, ...] = ()


class _GroupKey(NamedTuple):
    """The properties that all parameters of a group have in common; parameters are grouped by this key."""

    dtype: torch.dtype
    requires_grad: bool  # a group of frozen parameters is not reduced
    data: DataMesh
    is_hooked: bool
    param_dtype: torch.dtype | None


def plan_groups(
    managed: Iterable[tuple[str, nn.Module]], data: DataMesh, rules: PlanRules
) -> list[GroupPlan]:
    """Plan the groups of one unit: one per stored dtype, compute dtype, trainability, mesh and all-gather hooks.

    Parameters of one such group are split into two groups if their blocks would need much padding in one buffer.

    Args:
        managed: (prefix, module) for each module of the unit. Names of its parameters begin with the prefix.
        data: the default mesh; ``shard_placement_fn`` may give a parameter another mesh.
        rules: the arguments of `fully_shard`.

    Raises:
        LayoutError, MisuseError, PlacementError, UnsupportedOpError: for a parameter that these rules cannot shard.
    """
    groups: dict[_GroupKey, dict[str, OriginalParam]] = {}
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    wishes = _PlacementWishes(rules.shard_placement_fn, data)
    for prefix, module in managed:
        for name, param in module._parameters.items():
            if param is None or param in rules.ignored_params:
                continue
            if param in owners:  # a shared parameter has one slot and several owners
                owners[param].append((module, name))
                continue
            fqn = prefix + name
            _check_param(fqn, param)
            wanted_data, ragged = wishes.of(fqn, param)
            prior = PriorSharding.of(fqn, param, wanted_data)
            is_hooked = has_hooks(local_part(param))
            param_dtype = param_dtype_of(rules.mp_policy, fqn, param)
            key = _GroupKey(param.dtype, param.requires_grad, wanted_data, is_hooked, param_dtype)
            owners[param] = [(module, name)]
            block_numel = _block_numel(fqn, param, ragged, rules)
            original = OriginalParam(param, owners[param], prior, block_numel)
            groups.setdefault(key, {})[fqn] = original
    return [plan for key, params in groups.items() for plan in _plans(key, params, rules)]


def _plans(key: _GroupKey, params: dict[str, OriginalParam], rules: PlanRules) -> Iterator[GroupPlan]:
    """Yield the one or two plans of the parameters of one key."""
    specs = [
        TensorSpec(
            fqn,
            tuple(local_part(original.param).shape),
            str(key.dtype).removeprefix("torch."),  # layouts use names, to not import torch
            original.block_numel,
        )
        for fqn, original in params.items()
    ]
    num_shards = key.data.num_shards
    part_size = _part_size(rules.reshard_after_forward, num_shards)
    layouts: Iterable[GroupLayout]
    if key.is_hooked:
        _check_hooked(key.data, params, part_size)
        layouts = (plan_by_rows(specs, num_shards),)  # hooks are written for whole rows
    else:
        layouts = plan_buffers(specs, num_shards, scatter=rules.padding_policy.scatter)
        for layout in layouts:
            # All ranks raise if padding is above the limit, but only rank 0 warns.
            check_padding(layout, rules.padding_policy, warn=dist.get_rank() == 0)
    wanted = rules.reshard_after_forward
    for layout in layouts:
        yield GroupPlan(
            params={slot.fqn: params[slot.fqn] for slot in layout.slots},
            layout=layout,
            data=key.data,
            part_size=part_size,
            is_hooked=key.is_hooked,
            param_dtype=key.param_dtype,
            scatter=rules.padding_policy.scatter,
            wanted_part_size=None if isinstance(wanted, bool) else wanted,
            together=tuple(params),
        )


def _block_numel(fqn: str, param: nn.Parameter, ragged: RaggedShard | None, rules: PlanRules) -> int:
    """Return the number of elements of a parameter's block.

    It is a block of the local tensor, the part that other parallelisms have left on this rank.
    """
    shape = tuple(local_part(param).shape)
    granularity = resolve_granularity(rules.granularity, fqn, param)
    if ragged is None:
        return granularity.block_numel(shape)
    if granularity != Element():
        raise LayoutError(
            "Two rules give different blocks for one parameter.",
            expected="granularity= or a RaggedShard from shard_placement_fn",
            got=f"{granularity} and {ragged}",
            where=fqn,
            todo="use only one of the two for this parameter",
        )
    return max(1, ragged.unit_numel(shape))  # a unit of an empty part has 0 elements


class _PlacementWishes:
    """Calls a ``shard_placement_fn`` for the parameters of one unit, and checks its results.

    Args:
        function: the user's function, or None.
        default: the mesh of parameters to which the function gives no mesh of their own.

    Raises:
        PlacementError: if ``default`` only replicates, so that no axis shards.
    """

    def __init__(self, function: Callable[[nn.Parameter], Any] | None, default: DataMesh) -> None:
        if function is not None and default.is_replicated_only:
            raise PlacementError(
                "shard_placement_fn requires a mesh axis that shards.",
                expected="dp_mesh_dims with shard=",
                got=f"replication only, over {default.mesh}",
                todo="do not pass shard_placement_fn",
            )
        self._function = function
        self._default = default
        # Process groups of a mesh -> the first mesh info that the user returned for these ranks, and its mesh. A
        # parameter group has one mesh, so a second mesh over the same ranks is refused.
        self._first: dict[tuple[dist.ProcessGroup, ...], tuple[Any, DataMesh]] = {}

    def of(self, fqn: str, param: nn.Parameter) -> tuple[DataMesh, RaggedShard | None]:
        """Return a parameter's mesh, and the placement whose units stay whole (None: ``granularity`` decides blocks).

        Raises:
            MisuseError: if the function returns another type of value.
            PlacementError: if the function returned another mesh of the same ranks before.
        """
        result = self._function(param) if self._function is not None else None
        info, placement = None, result
        if isinstance(result, ShardPlacementResult):
            info, placement = result.mesh_info, result.placement
        data = self._default if info is None else mesh_of_info(info)
        ranks = tuple(data.mesh.get_group(axis) for axis in range(data.mesh.ndim))
        first_info, first_data = self._first.setdefault(ranks, (info, data))
        if first_info is not info and first_data.mesh is not data.mesh:
            raise PlacementError(
                "Two meshes of a unit have the same ranks.",
                expected="the same mesh_info object for all parameters of these ranks",
                got=f"{data.mesh} and {first_data.mesh}",
                where=fqn,
                todo="create each FSDPMeshInfo once, and return the same object for all parameters",
            )
        if isinstance(placement, RaggedShard) and placement.num_shards == first_data.num_shards:
            return first_data, placement
        if placement is None or (isinstance(placement, Shard) and -param.ndim <= placement.dim < param.ndim):
            return first_data, None
        raise MisuseError(
            "shard_placement_fn returned a placement that cannot be used.",
            expected=f"None, Shard of one of the {param.ndim} dims, RaggedShard with {first_data.num_shards} units, "
            "or a ShardPlacementResult of one of them",
            got=result,
            where=fqn,
            todo="use granularity= for the blocks that must stay whole",
        )


def _check_hooked(data: DataMesh, names: Iterable[str], part_size: int | None) -> None:
    """Raise for settings that parameters with all-gather hooks do not support."""
    problem = None
    if data.cut is not None:
        problem = f"shard_optimizer_over={data.over!r}: hooks gather all rows over all ranks"
    elif part_size is not None:
        problem = f"reshard_after_forward={part_size}: hooks gather all rows or none"
    elif data.mesh.ndim == 2 and not data.mesh.mesh_dim_names:
        problem = "a mesh without names: hooks get the sharding axis as a mesh, which is sliced by name"
    if problem is not None:
        raise UnsupportedOpError(
            "These settings do not support parameters whose class has all-gather hooks.",
            expected="reshard_after_forward True, False or None, no shard_optimizer_over, and names for the axes of a "
            "2-D mesh",
            got=problem,
            where=", ".join(names),
        )


def _part_size(wanted: bool | int | None, num_shards: int) -> int | None:
    """Return ``reshard_after_forward`` if it is a number of ranks above 1 and below ``num_shards``, else None."""
    if wanted is None or isinstance(wanted, bool):
        return None
    if wanted < 1 or num_shards % wanted:
        raise ArgumentError(
            "reshard_after_forward as a number of ranks must divide the number of ranks that shard.",
            expected=f"a divisor of {num_shards}, the number of ranks that shard",
            got=wanted,
            todo="give the number of accelerators per node",
            where="fully_shard(reshard_after_forward=..)",
        )
    return wanted if 1 < wanted < num_shards else None  # 1 means False, all ranks mean True


def _check_param(fqn: str, param: nn.Parameter) -> None:
    """Raise if a parameter cannot be sharded."""
    taken_by = _replaced.name_of(param)
    if taken_by is not None:
        raise LayoutError(
            "A parameter is shared by modules of two units; each would train its own copy.",
            expected="all modules that share a parameter in one unit",
            got=f"a parameter that another fully_shard call has sharded as {taken_by!r}",
            where=fqn,
            todo="pass these modules as a list, fully_shard([a, b]), or shard only their parent",
        )
    local = local_part(param)
    if has_hooks(local):
        check_hooks(fqn, local)
    elif type(local) is not torch.Tensor and not isinstance(param, RaggedDTensor) and not is_fake(local):
        # FakeTensors are sharded like plain tensors; `PriorSharding.of` raises for RaggedDTensors.
        raise UnsupportedOpError(
            "A parameter of a tensor subclass cannot be sharded: its pieces would be plain tensors.",
            expected="plain tensors, DTensors of other parallelisms, or a subclass with all-gather hooks",
            got=f"{type(local).__name__} without fsdp_pre_all_gather and fsdp_post_all_gather",
            where=fqn,
            todo=f"{STAYS_WHOLE}; or shard first and convert afterwards, or gather 8-bit codes with "
            "vescale_fsdp.quantize",
        )
    check_grad_dtype(grad_dtype_of(param), param.dtype, fqn)
    if param.ndim == 0:
        raise LayoutError(
            "A 0-dim parameter cannot be sharded.",
            expected="at least one dim",
            got="shape ()",
            where=fqn,
            todo="make it a 1-D tensor of one element",
        )
    if not param.is_contiguous():
        raise UnsupportedOpError(
            "A parameter must be contiguous, because it is cut in memory order.",
            expected="row-major strides",
            got=f"shape {tuple(param.shape)}, strides {param.stride()}",
            where=fqn,
            todo="replace it by param.contiguous() before fully_shard",
        )


_OVERRIDE = "param_dtype_override_fn"
_FOLLOWED: dict[type, set[str]] = {  # class of torch's policies -> the fields that this package implements
    MixedPrecisionPolicy: {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", _OVERRIDE},
    CPUOffloadPolicy: {"pin_memory"},
    OffloadPolicy: set(),
}


def check_policies(mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> None:
    """Raise for policies that this package does not implement.

    Raises:
        UnsupportedOpError: for an unknown class of offload policy, a field that is not implemented and does not have
            its default value, or two policies that exclude each other.
    """
    offload = CPUOffloadPolicy if isinstance(offload_policy, CPUOffloadPolicy) else OffloadPolicy
    # Only the class OffloadPolicy itself means no offload; an unknown subclass may mean any kind of offload.
    if offload is OffloadPolicy and type(offload_policy) is not OffloadPolicy:
        raise UnsupportedOpError(
            "The class of this offload_policy is not supported.",
            expected="OffloadPolicy or CPUOffloadPolicy",
            got=f"{type(offload_policy).__module__}.{type(offload_policy).__name__}",
        )
    if offload is CPUOffloadPolicy and isinstance(mp_policy, GatherPolicy):
        raise UnsupportedOpError(
            "A gather policy does not support CPU offload: it reads shards on the device that computes.",
            expected="no CPU offload (cpu_offload, offload_policy), or torch's own MixedPrecisionPolicy",
            got=f"{offload_policy} and {mp_policy}",
            todo="use only one of the two",
        )
    policies: tuple[tuple[str, Any, type], ...] = (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, offload),
    )
    for argument, policy, kind in policies:
        for each in dataclasses.fields(kind):  # torch's fields; a user's subclass may add fields of its own
            value = vars(policy).get(each.name, each.default)
            if each.name not in _FOLLOWED[kind] and value != each.default:
                raise UnsupportedOpError(
                    f"{kind.__name__}.{each.name} is not supported.",
                    expected=f"{each.name}={each.default!r}",
                    got=f"{each.name}={value!r}",
                    where=argument,
                    todo="do not set this field",
                )


def param_dtype_of(policy: MixedPrecisionPolicy, fqn: str, param: nn.Parameter) -> torch.dtype | None:
    """Return the compute dtype of a parameter; None: the dtype in which the parameter is stored.

    Raises:
        ValueError: if ``param_dtype_override_fn`` returns a dtype other than ``param_dtype`` and the parameter's own.
    """
    override = vars(policy).get(_OVERRIDE)  # vars, because torch before 2.15 has no such field
    wanted = override(param) if override is not None else None
    if wanted is None:
        return policy.param_dtype
    if wanted not in (policy.param_dtype, param.dtype):
        raise ArgumentError(
            f"{_OVERRIDE} returned a dtype that is not allowed.",
            expected=f"None, {policy.param_dtype} (param_dtype) or {param.dtype} (its own)",
            got=repr(wanted),
            where=fqn,
        )
    # If the override changes nothing, return the policy's own value, even None: the result is part of a group's key,
    # and the parameter must join the group of parameters without an override.
    return policy.param_dtype if wanted is (policy.param_dtype or param.dtype) else param.dtype


def policy_of_group(policy: MixedPrecisionPolicy, param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the policy of a group whose parameters all compute in ``param_dtype``."""
    if vars(policy).get(_OVERRIDE) is None:  # vars, because torch before 2.15 has no such field
        return policy
    changes: dict[str, Any] = {"param_dtype": param_dtype, _OVERRIDE: None}
    return dataclasses.replace(policy, **changes)


class HasSharded(Protocol):
    """Has the sharded Parameter of a gathered one, as `ManagedParam` does."""

    sharded: nn.Parameter


class _NotTrained:
    """Parameters that a step would not train, as long as they are alive, each with its name in its unit.

    They are parameters that sharded parameters have replaced, and the full parameters of gathered units.
    """

    def __init__(self) -> None:
        # The keys are ids, because tensors compare element by element. The weak reference keeps no parameter alive, and
        # removes the entry when the parameter is freed.
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], str, Callable[[], HasSharded | None]]] = {}
        self._hook: RemovableHandle | None = None

    def add(
        self, param: torch.Tensor, fqn: str, managed: Callable[[], HasSharded | None] = lambda: None
    ) -> None:
        """Record that a step would not train ``param``.

        Args:
            fqn: its name in its unit.
            managed: returns the owner of the sharded parameter that a step would train; None if there is none.
        """
        key = id(param)
        self._alive[key] = (weakref.ref(param, lambda _: self._remove(key)), fqn, managed)
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(_check_step)

    def _remove(self, key: int) -> None:
        self._alive.pop(key, None)
        if not self._alive and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def name_of(self, param: torch.Tensor) -> str | None:
        """Return the name that a parameter has in its unit; None for a parameter that was not added."""
        entry = self._alive.get(id(param))
        # Compare the objects too: Python may have given the id of a freed parameter to this one.
        return entry[1] if entry is not None and entry[0]() is param else None

    def sharded_of(self, param: torch.Tensor) -> nn.Parameter | None:
        """Return the sharded parameter of a gathered one; None for a parameter that was not added."""
        entry = self._alive.get(id(param))
        managed = entry[2]() if entry is not None and entry[0]() is param else None
        return None if managed is None else managed.sharded


_replaced, _gathered = _NotTrained(), _NotTrained()
note_replaced, note_gathered = _replaced.add, _gathered.add


def _take_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Replace gathered parameters of an optimizer by the sharded ones; False, without a change, if it has used them."""
    taken = {id(param) for group in optimizer.param_groups for param in group["params"]}
    changes: list[tuple[list[Any], int, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if _gathered.name_of(param) is None:
                continue
            sharded = _gathered.sharded_of(param)
            if sharded is None or param in optimizer.state or id(sharded) in taken:
                return False
            changes.append((group["params"], index, sharded))
    for params, index, sharded in changes:
        params[index] = sharded
    return True


@eager
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if a step would not train parameters, or has gradients that are not reduced.

    torch calls this before every step of every optimizer. A step that fails in the middle would have changed counters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = [name for param in params if (name := _replaced.name_of(param)) is not None]
    if stale:
        raise LifecycleError(
            "The optimizer has parameters that are no longer in the model, so its step would not train them.",
            expected="an optimizer of the sharded parameters",
            got=f"{len(stale)} of {len(params)} parameters were replaced after it was built: {', '.join(stale[:4])}",
            where=type(optimizer).__name__,
            todo="build the optimizer after fully_shard (and after tensors were assigned to the model), from "
            "model.parameters()",
        )
    full = [name for param in params if (name := _gathered.name_of(param)) is not None]
    if full and not _take_sharded(optimizer):
        raise LifecycleError(
            "The optimizer has parameters that were gathered when it got them, and has made state for them.",
            expected="an optimizer of the sharded parameters",
            got=f"{len(full)} of {len(params)} parameters are gathered ones: {', '.join(full[:4])}",
            where=type(optimizer).__name__,
            todo="build the optimizer (or call add_param_group) right after fully_shard, before the first forward, or "
            "after module.reshard() of every gathered unit (the root stays gathered from a forward to the backward)",
        )
    for param in [param for group in optimizer.param_groups for param in group["params"]]:
        waiting = waiting_in(param.grad)
        if waiting is not None:
            raise waiting.refusal(type(optimizer).__name__)
