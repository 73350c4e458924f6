"""fully_shard: the entry point. Same arguments as torch's, plus ``granularity`` and ``padding_policy``.

It collects the parameters no earlier call has taken, groups them (one group per dtype and trainability, so
that mixed dtypes in one unit need no care), asks the planner for a layout per group, and hands the result to
a `ParamGroup` and the module's state. All decisions are made here, once; training repeats them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp.errors import LayoutError, LifecycleError, PlacementError, UnsupportedOpError, explain
from vescale_fsdp.granularity import GranularityRule, check_patterns, resolve_granularity
from vescale_fsdp.group_comm import GroupComm
from vescale_fsdp.layout import GroupLayout
from vescale_fsdp.module import FSDPModule
from vescale_fsdp.outer import check_outer, local_part
from vescale_fsdp.padding import PaddingPolicy, check_padding
from vescale_fsdp.param_group import ParamGroup
from vescale_fsdp.planner import TensorSpec, plan_group
from vescale_fsdp.unit import FSDPState, attach_state, state_of

__all__ = ["fully_shard"]

_TAKEN = "_vescale_fsdp_taken_as"  # set on an original parameter: the name under which a unit took it
ModuleT = TypeVar("ModuleT", bound="nn.Module | list[nn.Module]")


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
        reshard_after_forward: whether to free full parameters after the forward; None means yes, except
            for the root. A number keeps them between forward and backward over groups of so many ranks.
        shard_placement_fn: torch's, asked for each parameter. None and ``Shard(dim)`` are accepted and change
            nothing: people choose the dim to save padding or copies, and a planned layout has neither.
        dp_mesh_dims: torch's; not supported yet.
        mp_policy: dtypes of compute, reduction, inputs and outputs (torch's class).
        offload_policy: torch's class; with `CPUOffloadPolicy` shards, gradients and the optimizer live on
            the host.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.
        granularity: what must stay whole: a `Granularity`, a mapping from name patterns (fnmatch) to
            granularities, or a function ``(fqn, param) -> Granularity``. Names are relative to ``module``;
            every pattern must match one of its parameters, be it in a unit further in. None: cuts may
            fall between any two elements.
        padding_policy: whether tensors may be scattered, and the padding that warns or is refused.

    Returns:
        ``module``, whose class now also is an `FSDPModule` and whose parameters are `RaggedDTensor`.

    Raises:
        ValueError: for containers without a forward, 0-dim parameters, or a mesh of more than two axes.
        NotImplementedError: for what the runtime does not support.
        LifecycleError: if a module is sharded twice.
        LayoutError: if no layout can be made, a pattern matches nothing, or padding is above the policy.
    """
    _refuse_mesh_dims(dp_mesh_dims)
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    for each in modules:
        _check_module(each)
    mesh = mesh if mesh is not None else _default_mesh()
    _check_mesh(mesh)
    reshard, part_size = _reshard_choice(reshard_after_forward, mesh)
    device = _device_of(mesh)
    ignored = ignored_params or set()
    _move_buffers(modules, ignored, device)
    check_patterns(granularity, _names(modules))
    buckets = _bucket_params(modules, ignored, mesh)
    if shard_placement_fn is not None:
        _check_placements(shard_placement_fn, buckets)
    groups = []
    for bucket in buckets:
        comm = GroupComm(mesh, part_size)
        layout = _plan(bucket, comm.num_shards, granularity, padding_policy)
        owned = (bucket.params, bucket.owners)
        groups.append(ParamGroup(layout, comm, *owned, mp_policy, offload_policy, device))
    for bucket in buckets:
        for fqn, param in bucket.params.items():
            vars(param)[_TAKEN] = fqn
    state = FSDPState(modules, groups, mp_policy, reshard, device)
    for each in modules:
        attach_state(each, state)
        cls = type(each)
        each.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    return module


def _refuse_mesh_dims(dp_mesh_dims: object) -> None:
    if dp_mesh_dims is not None:
        raise UnsupportedOpError(
            explain(
                "fully_shard does not support dp_mesh_dims.",
                expected="mesh= with the data-parallel axes only",
                got=dp_mesh_dims,
                todo='slice them out of the full mesh by name: mesh["replicate", "shard"]',
            )
        )


def _check_placements(function: Callable[[nn.Parameter], Any], buckets: list[_Bucket]) -> None:
    for bucket in buckets:
        for fqn, param in bucket.params.items():
            wanted = function(param)
            if wanted is None or (isinstance(wanted, Shard) and -param.ndim <= wanted.dim < param.ndim):
                continue
            raise UnsupportedOpError(
                explain(
                    "shard_placement_fn asks for what fully_shard cannot do.",
                    expected=f"None, or Shard of one of the {param.ndim} dims",
                    got=wanted,
                    where=fqn,
                    todo="say what must stay whole with granularity=; give experts their own mesh and call",
                )
            )


def _reshard_choice(wanted: bool | int | None, mesh: DeviceMesh) -> tuple[bool | None, int | None]:
    """(reshard after forward, ranks of the group that keeps the full parameters in between)."""
    if wanted is None or isinstance(wanted, bool):
        return wanted, None
    num_shards = mesh.size(mesh.ndim - 1)
    if wanted < 1 or num_shards % wanted:
        raise ValueError(
            explain(
                "reshard_after_forward as a number is the size of a smaller group of ranks.",
                expected=f"a divisor of {num_shards}, the ranks that shard",
                got=wanted,
                todo="give the number of accelerators per node",
            )
        )
    if wanted == 1:
        warnings.warn("reshard_after_forward=1 keeps full parameters: it means False", stacklevel=3)
        return False, None
    return True, wanted if wanted < num_shards else None


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(
            explain("fully_shard shards modules.", expected="nn.Module or a list of them", got=type(module))
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(
            explain(
                "fully_shard needs a module whose forward runs: its hooks gather the parameters.",
                expected="a module with a forward",
                got=type(module).__name__,
                todo="shard its elements one by one, or pass them as a list to make one unit of them",
            )
        )
    if state_of(module) is not None:
        raise LifecycleError(
            explain(
                "A module is sharded once.",
                expected="a module fully_shard was not called on",
                got=type(module).__name__,
                todo="call fully_shard bottom-up, once per module",
            )
        )


def _default_mesh() -> DeviceMesh:
    accelerator = torch.accelerator.current_accelerator()
    device_type = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise PlacementError(
            explain(
                "The mesh must be 1-D or 2-D.",
                expected="(shard,) or (replicate, shard)",
                got=f"{mesh.ndim} axes: {mesh}",
                todo="slice the data-parallel axes out of the mesh by name",
            )
        )


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _managed_modules(modules: tuple[nn.Module, ...]) -> list[tuple[str, nn.Module]]:
    """The modules of this unit with their names: everything below that no earlier call has taken."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module) -> None:
        if module in seen or (state_of(module) is not None):
            return
        seen.add(module)
        found.append((prefix, module))
        for name, child in module.named_children():
            visit(f"{prefix}{name}.", child)

    for index, module in enumerate(modules):
        visit(f"{index}." if len(modules) > 1 else "", module)
    return found


def _move_buffers(modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], device: torch.device) -> None:
    for _, module in _managed_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)


@dataclass
class _Bucket:
    """Parameters that will form one group."""

    params: dict[str, nn.Parameter] = field(default_factory=dict)
    owners: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)


def _bucket_params(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], mesh: DeviceMesh
) -> list[_Bucket]:
    """Parameters by (dtype, trainable), each once, with every attribute that holds it."""
    buckets: dict[tuple[torch.dtype, bool], _Bucket] = {}
    placed: dict[nn.Parameter, tuple[_Bucket, str]] = {}
    for prefix, module in _managed_modules(modules):
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            if param in placed:
                bucket, fqn = placed[param]
                bucket.owners[fqn].append((module, name))
                continue
            fqn = prefix + name
            _check_param(fqn, param, mesh)
            bucket = buckets.setdefault((param.dtype, param.requires_grad), _Bucket())
            bucket.params[fqn] = param
            bucket.owners[fqn] = [(module, name)]
            placed[param] = (bucket, fqn)
    return list(buckets.values())


def _check_param(fqn: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    check_outer(fqn, param, mesh)
    taken_by = vars(param).get(_TAKEN)
    if taken_by is not None:
        raise LayoutError(
            explain(
                "A parameter is shared by modules of two units; each would train its own copy.",
                expected="all modules that share a parameter in one unit",
                got=f"one that fully_shard has already taken as {taken_by!r}",
                where=fqn,
                todo="pass those modules as a list, fully_shard([a, b]), or leave both to their parent",
            )
        )
    if type(param.data) is not torch.Tensor and not isinstance(param, DTensor):
        raise UnsupportedOpError(
            explain(
                "A parameter of a tensor subclass cannot be sharded: its pieces would lose what it adds.",
                expected="plain tensors, or DTensors of other parallelisms",
                got=f"{type(param.data).__name__} (fsdp_pre_all_gather and the like are not called)",
                where=fqn,
                todo="shard first and convert after, or gather 8-bit codes with vescale_fsdp.quantize",
            )
        )
    if param.ndim == 0:
        raise LayoutError(
            explain(
                "A parameter without dims cannot be sharded.",
                expected="at least one dim",
                got="shape ()",
                where=fqn,
                todo="make it a 1-D tensor of one element",
            )
        )
    if not param.is_contiguous():
        raise UnsupportedOpError(
            explain(
                "A parameter must be contiguous: its rows are cut as they lie in memory.",
                expected="row-major strides",
                got=f"shape {tuple(param.shape)}, strides {param.stride()}",
                where=fqn,
                todo="replace it by param.contiguous() before fully_shard",
            )
        )


def _names(modules: tuple[nn.Module, ...]) -> list[str]:
    """Names of all parameters, those of units further in included."""
    prefixes = [f"{index}." if len(modules) > 1 else "" for index in range(len(modules))]
    return [
        prefix + name
        for prefix, module in zip(prefixes, modules, strict=True)
        for name, _ in module.named_parameters(remove_duplicate=False)
    ]


def _plan(
    bucket: _Bucket, num_shards: int, granularity: GranularityRule, padding_policy: PaddingPolicy
) -> GroupLayout:
    specs = [
        TensorSpec(
            fqn,
            tuple(local_part(param).shape),
            str(param.dtype).removeprefix("torch."),
            resolve_granularity(granularity, fqn, param).block_numel(tuple(local_part(param).shape)),
        )
        for fqn, param in bucket.params.items()
    ]
    layout = plan_group(specs, num_shards, scatter=padding_policy.scatter)
    check_padding(layout, padding_policy, warn=dist.get_rank() == 0)
    return layout
