"""The entry point `fully_shard`: the arguments of torch's ``fully_shard``, plus ``granularity`` and ``padding_policy``.

A call collects the modules that no earlier call has sharded, plans groups and layouts of their parameters
(`plan_groups`: one group per dtype, trainability and mesh, so that a unit may mix dtypes), builds a `ParamGroup` from
each plan, and only then changes the model. If a call raises, the model is unchanged.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import ArgumentError, MisuseError, UnsupportedOpError, callers_level
from vescale_fsdp.layout.granularity import GranularityRule, check_patterns
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy
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
    check_collectives: int = ...,
    shard_optimizer_over: str | None = ...,
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
    check_collectives: int = ...,
    shard_optimizer_over: str | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
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
    check_collectives: int = 0,
    shard_optimizer_over: str | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard a module's parameters over a mesh; call it bottom-up, on each block and then on the root.

    Args:
        module: one module, or a list of modules that gather and reduce as one unit.
        mesh: 1-D (shard) or 2-D (axis 0 replicates, axis 1 shards); None makes a 1-D mesh over all ranks.
        reshard_after_forward: whether to free full parameters after the forward. None: free them, but keep the root's
            in a forward with gradients, because the backward begins with the root. A number n: between forward and
            backward, each group of n ranks together keeps one copy of the full parameters.
        shard_placement_fn: as in torch, called for each parameter. The results ``None`` and ``Shard(dim)`` change
            nothing; the units of a `RaggedShard` stay whole; a ``ShardPlacementResult`` gives the parameter a mesh of
            its own.
        dp_mesh_dims: a `DataParallelMeshDims` of torch. ``mesh`` is then the full mesh, and all parameters must be
            DTensors on this mesh that are Replicate on the data-parallel axes.
        mp_policy: a `MixedPrecisionPolicy` of torch: dtypes of compute, reduction, inputs and outputs.
        offload_policy: an `OffloadPolicy` of torch. With `CPUOffloadPolicy`, shards, gradients and optimizer state are
            on the host.
        ignored_params: parameters that are not sharded, not moved and not reduced.
        granularity: the blocks that must stay whole: a `Granularity`, a mapping from name patterns (fnmatch) to
            granularities, or a function ``(fqn, param) -> Granularity``. Names are relative to ``module``; every
            pattern must match at least one parameter, which may belong to a unit below. A text such as ``"rows:32"``
            means `Rows(32)`. None: cuts may fall between any two elements.
        padding_policy: whether tensors may be scattered, and from which amount of padding to warn or raise.
        check_collectives: N: check, in every N-th forward of the root and its backward, that gathers deliver the bits
            that ranks have sent, and that replicas are equal after an all-reduce; 0: never. Evaluation and each
            micro-batch count as forwards. Each check passes once over what was received, and the host waits for its
            result. Of 8-bit gathers, the codes and scales are checked.
        shard_optimizer_over: the name of axis 0 of a 2-D mesh, the nodes: a hybrid cut. As with HSDP, each node has all
            parameters, sharded over axis 1 and in the compute dtype, and gathers stay inside the node. But the stored
            weights, gradients and optimizer states are sharded over all ranks, so one gather and one reduction of each
            unit cross the nodes in a step (`FSDPModule.set_requires_all_reduce`). A write to a shard that torch does
            not count, such as ``p.to_local().data.zero_()``, may be missed by the next gather. On a mesh of one axis
            it changes nothing. Parameters with a mesh of their own keep that mesh.

    Returns:
        ``module``; its class is now an `FSDPModule` too, and its parameters are `RaggedDTensor`.

    Raises:
        ValueError: for containers without a forward, 0-dim parameters, a mesh of more than two axes, or an
            argument of the wrong type.
        NotImplementedError: for arguments or parameters that the runtime does not support.
        MisuseError: if a module is sharded twice, or another data parallelism of torch manages a part of it.
        CollectiveError: in a forward or backward, on all ranks, if a check finds other bits.
        LayoutError: if no layout satisfies the granularity, a pattern matches no parameter, or padding is above the
            policy's limit.

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
    if type(check_collectives) is not int or check_collectives < 0:
        raise ArgumentError(
            "check_collectives must be a number of forwards.",
            expected="an int of at least 0",
            got=repr(check_collectives),
            where="fully_shard(check_collectives=..)",
        )
    ignored = _ignored(ignored_params)
    check_policies(mp_policy, offload_policy)
    data = data_mesh(mesh if mesh is not None else default_mesh(), dp_mesh_dims, shard_optimizer_over)
    reshard = _reshard_choice(reshard_after_forward, data)
    if data.cut is not None and isinstance(mp_policy, GatherPolicy):
        raise UnsupportedOpError(
            "A gather policy cannot be combined with shard_optimizer_over: it gathers over all ranks at once.",
            expected="torch's own MixedPrecisionPolicy, or no shard_optimizer_over",
            got=f"{type(mp_policy).__name__} and shard_optimizer_over={shard_optimizer_over!r}",
            todo="use only one of the two",
        )
    device = device_of(data.mesh)
    check_patterns(granularity, _names(modules))  # a pattern without a match would silently do nothing
    _check_unmixed(modules)
    managed = _managed_modules(modules)
    rules = PlanRules(
        ignored, reshard_after_forward, shard_placement_fn, granularity, padding_policy, mp_policy
    )
    with outside_modes():  # shards made in inference mode could not be trained
        plans = plan_groups(managed, data, rules)
        groups = []
        for plan in plans:
            kind = SelfGatheringGroup if plan.is_hooked else ParamGroup
            # The shard of FakeTensor parameters must be a FakeTensor of the same mode.
            with fake_mode_of(next(iter(plan.params.values())).param):
                groups.append(kind(plan, mp_policy, offload_policy, device))
            if check_collectives:
                groups[-1].comm.change(check_every=check_collectives)
        buffers = _moved_buffers(managed, device)
    classes = [_sharded_class(type(each)) for each in modules]
    # All planning, checks and allocations are done: from here on nothing can fail, and the model changes.
    for owner, name, buffer in buffers:
        owner._buffers[name] = buffer
    for plan, group in zip(plans, groups, strict=True):
        for fqn, original in plan.params.items():
            # The step of an optimizer that was built from the original parameters must raise.
            note_replaced(original.param, fqn)
        group.install()
    for _, owner in managed:
        # torch.compile reads these attributes, which FSDP2 sets too (torch 2.13, `_fully_shard.py`, line 289).
        vars(owner)["_is_fsdp_managed_module"] = vars(owner)["_fsdp_use_orig_params"] = True
    state = FSDPState(modules, groups, mp_policy, reshard, device)  # its constructor stores it on the modules
    state.ignored_params = [weakref.ref(param) for param in ignored]
    state.ignored = frozenset(
        (owner, name) for _, owner in managed for name, param in owner._parameters.items() if param in ignored
    )
    for each, sharded_class in zip(modules, classes, strict=True):
        each.__class__ = sharded_class  # in place, because the caller and parent modules refer to this object
    return cast("FSDPModule | list[FSDPModule]", module)


# torch's fully_shard has this attribute too, and trainers call it: it returns a module's state, or None if not sharded.
vars(fully_shard)["state"] = state_of


def _check_kinds(mp_policy: object, offload_policy: object, padding_policy: object) -> None:
    """Raise for a policy that is a class or has another type: it would silently have no effect."""
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
                where=f"fully_shard({name}=..)",
            )


def _ignored(params: Iterable[nn.Parameter] | None) -> frozenset[nn.Parameter]:
    """Return the ignored parameters; raise for other values, such as names, which would silently have no effect."""
    given = () if params is None else tuple(params)
    for each in given:
        if not isinstance(each, nn.Parameter):
            raise ArgumentError(
                "ignored_params must contain parameters only.",
                expected="a set of nn.Parameter",
                got=f"{type(each).__name__} among {type(params).__name__}",
                todo="pass the objects: {model.get_parameter(name), ..} or set(module.parameters())",
                where="fully_shard(ignored_params=..)",
            )
    return frozenset(given)


def _check_unmixed(modules: tuple[nn.Module, ...]) -> None:
    """Raise for modules that another data parallelism of torch manages, in whole or in part."""
    for module in modules:
        for name, below in module.named_modules():
            manager = None
            # This package and torch's fully_shard both set this attribute on modules. Parameters that are DTensors but
            # not RaggedDTensors show that it was torch's.
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
    """Return whether to reshard after the forward; None means all units except the root.

    `plan_groups` checks that a number of ranks divides the number of shards.
    """
    if wanted is not None and not isinstance(wanted, int):
        raise ArgumentError(
            "reshard_after_forward must be a bool, a number of ranks or None.",
            expected="bool, int or None",
            got=repr(wanted),
            where="fully_shard(reshard_after_forward=..)",
        )
    if data.is_replicated_only:
        return False  # every rank's shard is the full parameters: there is nothing to free
    if wanted is None or isinstance(wanted, bool):  # before the tests of numbers, because True is an int
        return wanted
    if data.spmd is not None:
        raise UnsupportedOpError(
            "reshard_after_forward cannot be a number with dp_mesh_dims.",
            expected="True, False or None",
            got=wanted,
            todo="pass the data-parallel axes alone as mesh=",
        )
    if data.cut is not None and wanted != 1:
        raise UnsupportedOpError(
            "reshard_after_forward cannot be a number with shard_optimizer_over, which keeps gathers inside nodes.",
            expected="True, False or None",
            got=wanted,
            todo="pass True: the gathers of the backward do not leave the node either",
        )
    if wanted == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps full parameters: it means False", stacklevel=callers_level()
        )
    return wanted != 1  # with 1, each rank alone keeps a full copy, as with False


def _root_modules(module: object) -> tuple[nn.Module, ...]:
    """Return the modules of a call, without those that another of these modules contains, as in torch."""
    given: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in given:
        if not isinstance(each, nn.Module):
            raise ArgumentError(
                "fully_shard takes modules only.",
                expected="nn.Module or a list of them",
                got=type(each),
                where="fully_shard(module=..)",
            )
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ArgumentError(
                "fully_shard needs a module with a forward, because hooks around the forward gather the parameters.",
                expected="a module with a forward",
                got=type(each).__name__,
                todo="shard its elements one by one, or pass them as a list to make one unit of them",
                where="fully_shard(module=..)",
            )
        if state_of(each) is not None:
            raise MisuseError(
                "The module is sharded already.",
                expected="a module that is not sharded yet",
                got=type(each).__name__,
                todo="call fully_shard bottom-up, once per module",
            )
    # A list may contain a module and its parent (only the parent is kept), or a module twice.
    inside = {id(below) for each in given for below in each.modules() if below is not each}
    roots = tuple(dict.fromkeys(each for each in given if id(each) not in inside))
    if not roots:
        raise ArgumentError(
            "There is nothing to shard.",
            expected="at least one module",
            got=repr(module),
            where="fully_shard(module=..)",
        )
    return roots


def _managed_modules(modules: tuple[nn.Module, ...]) -> list[tuple[str, nn.Module]]:
    """Return (prefix of parameter names, module) for all modules of this unit.

    Modules that an earlier call or torch's ``replicate`` manages are left out, with the modules below them.
    """
    managed: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module) -> None:
        # `seen`, because a module may be a child of several modules.
        if module in seen or state_of(module) is not None or is_replicated(module):
            return
        seen.add(module)
        managed.append((prefix, module))
        for name, child in module.named_children():
            visit(f"{prefix}{name}.", child)

    for index, module in enumerate(modules):
        # The modules of a list may have equal names of parameters, so each name begins with the module's index.
        visit(f"{index}." if len(modules) > 1 else "", module)
    return managed


def _moved_buffers(
    managed: list[tuple[str, nn.Module]], device: torch.device
) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Copy buffers on other devices to ``device``; returns (module, name, copy). Shared buffers stay shared."""
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
    """Return the sharded class of ``cls``: the same for all its modules, because torch.compile recompiles per class."""
    known: type
    for known in cls.__subclasses__():
        if known.__bases__ == (FSDPModule, cls):
            return known
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def _names(modules: tuple[nn.Module, ...]) -> list[str]:
    """Return the names of all parameters, including the parameters of units below."""
    prefixes = [f"{index}." if len(modules) > 1 else "" for index in range(len(modules))]
    return [
        prefix + name
        for prefix, module in zip(prefixes, modules, strict=True)
        # A shared parameter has several names, and a pattern may match any of them.
        for name, _ in module.named_parameters(remove_duplicate=False)
    ]
