"""fully_shard: the entry point. It has the arguments of torch's fully_shard, ``granularity`` and ``padding_policy``.

A call collects the modules that no earlier call has sharded, plans groups and layouts of their parameters
(`plan_groups`: one group per dtype and trainability, so that a unit may mix dtypes), builds a `ParamGroup` from each
plan, and only then changes the model. If a call raises, the model is as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import ArgumentError, MisuseError, UnsupportedOpError
from vescale_fsdp.layout.granularity import GranularityRule, check_patterns
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.data_mesh import DataMesh, data_mesh, default_mesh, device_of
from vescale_fsdp.runtime.fsdp_module import FSDPModule
from vescale_fsdp.runtime.fsdp_state import FSDPState, state_of
from vescale_fsdp.runtime.group_plan import PlanRules, check_policies, note_replaced, plan_groups
from vescale_fsdp.runtime.param_group import ParamGroup
from vescale_fsdp.runtime.self_gathering_group import SelfGatheringGroup
from vescale_fsdp.torch_modes import fake_mode_of, outside_modes
from vescale_fsdp.torch_private import is_noted_sharded, is_replicated


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    granularity: GranularityRule = ...,
    padding_policy: PaddingPolicy = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    granularity: GranularityRule = ...,
    padding_policy: PaddingPolicy = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> Any:
    """Shard a module's parameters over a mesh; call it bottom-up, on each block and then on the root.

    Args:
        module: one module, or a list of modules that gather and reduce as one unit.
        mesh: 1-D (shard) or 2-D (axis 0 replicates, axis 1 shards); None makes a 1-D mesh over all ranks.
        reshard_after_forward: whether to free full parameters after the forward. None: free them, but keep the root's
            in a forward with gradients, because the backward begins with the root. A number n: between forward and
            backward, each group of n ranks together keeps one copy of the full parameters.
        shard_placement_fn: as in torch, called for each parameter. ``None`` and ``Shard(dim)`` change nothing; the
            units of a `RaggedShard` stay whole; a ``ShardPlacementResult`` gives the parameter a mesh of its own.
        dp_mesh_dims: torch's `DataParallelMeshDims`: ``mesh`` is then the full mesh, on which all parameters are
            DTensors that are Replicate on the axes named here.
        mp_policy: torch's class: dtypes of compute, reduction, inputs and outputs.
        offload_policy: torch's class; with `CPUOffloadPolicy`, shards, gradients and optimizer state are on the host.
        ignored_params: parameters that are not sharded, not moved and not reduced.
        granularity: the blocks that must stay whole: a `Granularity`, a mapping from name patterns (fnmatch) to
            granularities, or a function ``(fqn, param) -> Granularity``. Names are relative to ``module``; every
            pattern must match a parameter, which may belong to a unit below. A text such as ``"rows:32"`` means
            `Rows(32)`. None: cuts may fall between any two elements.
        padding_policy: whether tensors may be scattered, and how much padding warns or raises.

    Returns:
        ``module``; its class is now an `FSDPModule` too, and its parameters are `RaggedDTensor`.

    Raises:
        ValueError: for containers without a forward, 0-dim parameters, a mesh of more than two axes, or an
            argument of the wrong type.
        NotImplementedError: for arguments or parameters that the runtime does not support.
        MisuseError: if a module is sharded twice, or another data parallelism of torch manages a part of it.
        LayoutError: if there is no layout, a pattern matches no parameter, or padding is above the policy's limit.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import Rows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        >>> for layer in (model[0], model[2]):
        ...     _ = fully_shard(layer, granularity=Rows(4))
        >>> _ = fully_shard(model)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> model[0].weight.grad.full_tensor().shape
        torch.Size([64, 8])
    """
    modules = _root_modules(module)
    _check_kinds(mp_policy, offload_policy, padding_policy)
    ignored = _ignored(ignored_params)
    check_policies(mp_policy, offload_policy)
    data = data_mesh(mesh if mesh is not None else default_mesh(), dp_mesh_dims)
    reshard = _reshard_choice(reshard_after_forward, data)
    device = device_of(data.mesh)
    check_patterns(granularity, _names(modules))
    _check_unmixed(modules)
    managed = _managed_modules(modules)
    rules = PlanRules(
        ignored,
        reshard_after_forward,
        shard_placement_fn,
        granularity,
        padding_policy,
        mp_policy,
    )
    with outside_modes():  # shards made in inference mode could not be trained
        plans = plan_groups(managed, data, rules)
        groups = []
        for plan in plans:
            kind = SelfGatheringGroup if plan.is_hooked else ParamGroup
            # Parameters that are FakeTensors get a shard that is a FakeTensor.
            with fake_mode_of(next(iter(plan.params.values())).param):
                groups.append(kind(plan, mp_policy, offload_policy, device))
        buffers = _moved_buffers(managed, device)
    classes = [_sharded_class(type(each)) for each in modules]
    # All planning, checks and allocations are done: from here on nothing can fail, and the model changes.
    for owner, name, buffer in buffers:
        owner._buffers[name] = buffer
    for plan, group in zip(plans, groups, strict=True):
        for fqn, original in plan.params.items():
            note_replaced(original.param, fqn)
        group.install()
    for _, owner in managed:
        # torch.compile reads these attributes of FSDP2's modules (torch 2.13, FS/_fully_shard.py:283).
        vars(owner)["_is_fsdp_managed_module"] = vars(owner)["_fsdp_use_orig_params"] = True
    FSDPState(modules, groups, mp_policy, reshard, device)  # stored on the modules
    for each, sharded_class in zip(modules, classes, strict=True):
        each.__class__ = sharded_class  # in place: the caller refers to this object
    return module


# torch's fully_shard has this attribute, which trainers call: the state of a module, None if it is not sharded.
vars(fully_shard)["state"] = state_of


def _check_kinds(mp_policy: object, offload_policy: object, padding_policy: object) -> None:
    """Refuse a class in place of an instance, and values of other types: they would silently have no effect."""
    for name, given, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
        ("padding_policy", padding_policy, PaddingPolicy),
    ):
        if not isinstance(given, kind):
            raise ArgumentError(
                f"{name} must be an instance of {kind.__name__}.",
                expected=f"a {kind.__name__}",
                got=f"the class {given.__name__}" if isinstance(given, type) else repr(given),
                todo=f"make one: {given.__name__ if isinstance(given, type) else kind.__name__}(..)",
            )


def _ignored(params: Iterable[nn.Parameter] | None) -> frozenset[nn.Parameter]:
    """The ignored parameters; other values, such as names, would silently have no effect and are refused."""
    given = () if params is None else tuple(params)
    for each in given:
        if not isinstance(each, nn.Parameter):
            raise ArgumentError(
                "ignored_params must contain parameters only.",
                expected="a set of nn.Parameter",
                got=f"{type(each).__name__} among {type(params).__name__}",
                todo="pass the objects: {model.get_parameter(name), ..} or set(module.parameters())",
            )
    return frozenset(given)


def _check_unmixed(modules: tuple[nn.Module, ...]) -> None:
    """Refuse modules that another data parallelism of torch manages, in whole or in part."""
    for module in modules:
        for name, below in module.named_modules():
            manager = None
            # Both torch's fully_shard and this library set this mark on the modules of a unit. But only torch's leaves
            # DTensors that are no RaggedDTensors.
            is_fsdp2s = vars(below).get("_is_fsdp_managed_module", False) and any(
                isinstance(param, DTensor) and not isinstance(param, RaggedDTensor)
                for param in below._parameters.values()
            )
            if isinstance(below, DistributedDataParallel):
                manager = f"torch.nn.parallel.{type(below).__name__}"
            elif isinstance(below, FullyShardedDataParallel):
                manager = f"torch.distributed.fsdp.{type(below).__name__} (FSDP1)"
            elif (is_noted_sharded(below) and state_of(below) is None) or is_fsdp2s:
                manager = "torch.distributed.fsdp.fully_shard (FSDP2)"
            if manager is not None:
                raise MisuseError(
                    f"One model cannot be sharded by vescale_fsdp and by {manager}.",
                    expected="vescale_fsdp.fully_shard for every unit of the model",
                    got=f"{name or 'the module itself'} ({type(below).__name__}), managed by {manager}",
                    where=type(module).__name__,
                    todo="remove the other wrapper, and import fully_shard from vescale_fsdp wherever the model is "
                    "sharded",
                )


def _reshard_choice(wanted: bool | int | None, data: DataMesh) -> bool | None:
    """Whether to reshard after the forward; None: all units but the root. `plan_groups` checks a number of ranks."""
    if wanted is not None and not isinstance(wanted, int):
        raise ArgumentError(
            "reshard_after_forward must be a bool, a number of ranks or None.",
            expected="bool, int or None",
            got=repr(wanted),
        )
    if data.is_replicated_only:
        return False  # every rank's shard is the full parameters: there is nothing to free
    if wanted is None or isinstance(wanted, bool):
        return wanted
    if data.spmd is not None:
        raise UnsupportedOpError(
            "reshard_after_forward cannot be a number with dp_mesh_dims.",
            expected="True, False or None",
            got=wanted,
            todo="pass the data-parallel axes alone as mesh=",
        )
    if wanted == 1:
        warnings.warn("reshard_after_forward=1 keeps full parameters: it means False", stacklevel=3)
    return wanted != 1


def _root_modules(module: object) -> tuple[nn.Module, ...]:
    """The modules of a call, without modules that are inside another one of them, as in torch."""
    given: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in given:
        if not isinstance(each, nn.Module):
            raise ArgumentError(
                "fully_shard takes modules.", expected="nn.Module or a list of them", got=type(each)
            )
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ArgumentError(
                "fully_shard needs a module with a forward, because hooks around the forward gather the parameters.",
                expected="a module with a forward",
                got=type(each).__name__,
                todo="shard its elements one by one, or pass them as a list to make one unit of them",
            )
        if state_of(each) is not None:
            raise MisuseError(
                "The module is sharded already.",
                expected="a module fully_shard was not called on",
                got=type(each).__name__,
                todo="call fully_shard bottom-up, once per module",
            )
    # A set of ids, and each module once: a list may contain a module and its parent, or a module twice.
    inside = {id(below) for each in given for below in each.modules() if below is not each}
    roots = tuple(dict.fromkeys(each for each in given if id(each) not in inside))
    if not roots:
        raise ArgumentError("There is nothing to shard.", expected="at least one module", got=repr(module))
    return roots


def _managed_modules(modules: tuple[nn.Module, ...]) -> list[tuple[str, nn.Module]]:
    """The modules of this unit with their names: all that neither an earlier call nor torch's ``replicate`` manages."""
    managed: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module) -> None:
        if module in seen or state_of(module) is not None or is_replicated(module):
            return
        seen.add(module)
        managed.append((prefix, module))
        for name, child in module.named_children():
            visit(f"{prefix}{name}.", child)

    for index, module in enumerate(modules):
        visit(f"{index}." if len(modules) > 1 else "", module)
    return managed


def _moved_buffers(
    managed: list[tuple[str, nn.Module]], device: torch.device
) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Copies on ``device`` of buffers on other devices: (module, name, copy). Shared buffers stay shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    copies = []
    for _, module in managed:
        for name, buffer in module._buffers.items():
            # Meta buffers stay meta until `to_empty`, as meta parameters do.
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                copies.append((module, name, moved[buffer]))
    return copies


def _sharded_class(cls: type) -> type:
    """The sharded class of ``cls``: one for all modules of ``cls``, because torch.compile recompiles per class."""
    known: type
    for known in cls.__subclasses__():
        if known.__bases__ == (FSDPModule, cls):
            return known
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def _names(modules: tuple[nn.Module, ...]) -> list[str]:
    """Names of all parameters, including the parameters of units below."""
    prefixes = [f"{index}." if len(modules) > 1 else "" for index in range(len(modules))]
    return [
        prefix + name
        for prefix, module in zip(prefixes, modules, strict=True)
        # A pattern may match any name of a shared parameter.
        for name, _ in module.named_parameters(remove_duplicate=False)
    ]
