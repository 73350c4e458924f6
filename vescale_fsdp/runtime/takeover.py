"""Takeover: what modules hold in place of the parameters a group gave them.

    what happened                                    before the group's first gather     after it
    load_state_dict(assign=True)                     taken over                          taken over
    .to(), to_empty(), swap_tensors                  taken over                          taken over
    module.weight = nn.Parameter(ragged, placed      taken over                          refused
        as the sharded parameter is; torch's
        DTensor.from_local of the piece too)
    module.weight = nn.Parameter(full plain tensor)  cut, this rank keeps its piece      refused
    del module.weight, parametrizations              refused                             refused

Loading may come in parts, module by module and call by call. A piece that has been loaded stays where it is until all
pieces of its group are on one device and in one dtype; then they are copied into one shard. A gather insists on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.half_loaded import half_loaded_in, mark_whole
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, check_grad_dtype
from vescale_fsdp.dtensor.spec import is_ragged_spec, spec_with
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.param_group import ParamGroup
from vescale_fsdp.runtime.setup.managed_param import ManagedParam, home_of
from vescale_fsdp.runtime.setup.replaced_params import note_replaced
from vescale_fsdp.torch_private import (
    grad_dtype_of,
    is_noted_sharded,
    loads_what_it_is_given,
    local_of,
    set_local,
    spec_of,
    storage_id,
)


def rebind(group: ParamGroup, *, is_whole: bool) -> None:
    """Take over what the modules hold, after ``_apply`` or ``load_state_dict``; pieces may still be missing.

    Args:
        is_whole: all of it has been loaded, whatever a load before has left.
    """
    for param in group.params:
        found = param.foreign()
        if found:
            _take(group, param, found[-1], must_be_new=False)  # as without assign: the last one loaded counts
        param.spec = spec_of(param.sharded)
        param.set_on_modules(param.sharded)
    _unite(group, all_needed=False)
    if is_whole:
        mark_whole(group.shard)


def refuse_full_tensors(module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Before ``load_state_dict`` copies: refuse full plain tensors for sharded parameters, all of them at once.

    Args:
        module: a unit's, with what is below it.
        state: what is loaded, its names those of the module behind ``prefix``.
        prefix: of the module's names.

    Raises:
        LifecycleError: if there are any.
    """
    full = []
    for path, owner in module.named_modules(prefix=prefix.removesuffix(".")):
        if not loads_what_it_is_given(owner, num_own_hooks=int(is_noted_sharded(owner))):
            continue
        names = {name: f"{path}.{name}".removeprefix(".") for name in owner._parameters}
        full += [
            key
            for name, key in names.items()
            if isinstance(owner._parameters[name], RaggedDTensor)
            and isinstance(state.get(key), torch.Tensor)
            and not isinstance(state[key], DTensor)
        ]
    if full:
        raise LifecycleError(
            "Sharded parameters cannot be loaded from full plain tensors.",
            expected="a sharded state, as model.state_dict() gives it",
            got=f"full tensors for {len(full)} parameters: {', '.join(full[:4])}",
            where=type(module).__name__,
            todo="vescale_fsdp.checkpoint.set_model_state_dict(model, state, options=StateDictOptions("
            "full_state_dict=True)), with broadcast_from_rank0=True if rank 0 alone has the tensors; a checkpoint: "
            "vescale_fsdp.checkpoint.load; one tensor: copy_ of vescale_fsdp.distribute_tensor(full, p.device_mesh, "
            "p.placements). Or load before fully_shard",
        )


def gives_own(group: ParamGroup, state: Mapping[str, Any]) -> bool:
    """Whether a state holds tensors of the group's own memory."""
    own = storage_id(group.shard)
    return any(isinstance(each, DTensor) and storage_id(local_of(each)) == own for each in state.values())


def settle(group: ParamGroup) -> None:
    """See to it, before a gather, that the modules' parameters are what the shard holds.

    Raises:
        LifecycleError: if a parameter was replaced by what the group cannot take, is still on the meta device, or was
            left half overwritten by a load.
    """
    if half_loaded_in(group.shard):
        _refuse_half_loaded(group)
    if group.is_intact():
        return
    for param in group.params:
        found = param.foreign()
        if not found:
            continue
        if len(found) < len(param.owners) or any(each is not found[0] for each in found):
            _refuse(param, found[0], "at some of the places that share it")
        _take(group, param, found[0], must_be_new=True)
        param.set_on_modules(param.sharded)
    _unite(group, all_needed=True)


def _refuse_half_loaded(group: ParamGroup) -> NoReturn:
    raise LifecycleError(
        "A load has failed after it had begun to overwrite these parameters: they hold values of two states, here or "
        "on other ranks.",
        expected="parameters of one state",
        got=", ".join(half_loaded_in(group.shard)[:4]),
        where=group.label,
        todo="load a good checkpoint, by vescale_fsdp.checkpoint or load_state_dict, or call to_empty() and initialise",
    )


def _take(group: ParamGroup, param: ManagedParam, held: nn.Parameter | None, *, must_be_new: bool) -> None:
    """Make one parameter of the group of what a module holds in its place."""
    if held is None:
        _refuse(param, held, "by nothing: it was deleted, or a parametrization moved it")
    home = home_of(held)
    if home is not None and home is not param:
        _refuse_tied(param, home)
    if must_be_new and group.was_gathered:
        _refuse(param, held, "after the model's first use")
    check_grad_dtype(grad_dtype_of(held), held.dtype, param.slot.fqn)
    held = _as_ragged(param, held)
    if isinstance(held, RaggedDTensor):
        same = (held.device_mesh, held.placements, held.shape)
        if same != (param.spec.mesh, param.spec.placements, param.sharded.shape):
            _refuse(
                param, held, f"by one of shape {tuple(held.shape)} placed {tuple(map(str, held.placements))}"
            )
        note_replaced(param.sharded, param.slot.fqn)
        param.take(held)
    else:
        _take_plain(group, param, held)
    group.taken_over.append(param.slot.fqn)


def _as_ragged(param: ManagedParam, held: nn.Parameter) -> nn.Parameter:
    """What torch's ``DTensor.from_local`` makes of a piece and our placements, as loaders call it: the same, ragged."""
    if (
        not isinstance(held, DTensor)
        or isinstance(held, RaggedDTensor)
        or not is_ragged_spec(held.placements)
    ):
        return held
    ours, local = param.sharded, local_of(held)
    if local.numel() != local_of(ours).numel() or held.placements != param.spec.placements:
        _refuse(param, held, f"by one whose local tensor has shape {tuple(local.shape)}")
    spec = spec_with(param.spec, dtype=local.dtype)
    ragged = RaggedDTensor.wrap(local.reshape(-1), spec, layout_ref=ours.layout_ref)  # type: ignore[attr-defined]
    return nn.Parameter(ragged, requires_grad=held.requires_grad)


@torch.no_grad()
def _take_plain(group: ParamGroup, param: ManagedParam, held: nn.Parameter) -> None:
    """Keep this rank's piece of a full tensor that all ranks have put in a parameter's place."""
    plain = not isinstance(held, DTensor) and type(held.data) is torch.Tensor and not held.is_meta
    if not plain or group.was_gathered or param.prior.spec is not None or not group.takes_plain:
        _refuse(param, held, f"by a {type(held).__name__} on {held.device}")
    ours = param.sharded
    if (held.shape, held.dtype) != (ours.shape, ours.dtype):
        _refuse(param, held, f"by a tensor of shape {tuple(held.shape)}, {held.dtype}")
    start, stop = group.layout.piece(param.slot, group.comm.rank).range
    piece = held.detach().reshape(-1)[start:stop]
    if ours.is_meta:
        local = piece.to(group.home, copy=True)
        ragged = RaggedDTensor.wrap(local, param.spec, layout_ref=ours.layout_ref)  # type: ignore[attr-defined]
        note_replaced(ours, param.slot.fqn)
        param.take(nn.Parameter(ragged, requires_grad=held.requires_grad))
    else:
        # In place, so that an optimizer that has the parameter goes on with the new values.
        local_of(ours).copy_(piece)
        ours.requires_grad_(held.requires_grad)
    note_replaced(held, param.slot.fqn)


def _unite(group: ParamGroup, *, all_needed: bool) -> None:
    """Bring pieces that left the shard into a new one, so that the group stays one allocation."""
    locals_ = [local_of(param.sharded) for param in group.params]
    meta = [param.slot.fqn for param, local in zip(group.params, locals_, strict=True) if local.is_meta]
    kinds = dict.fromkeys((local.dtype, local.device) for local in locals_)
    if len(kinds) > 1:
        if all_needed:
            _refuse_mixed(meta, [f"{dtype} on {device}" for dtype, device in kinds])
        return
    if all(
        _lies_in(group.shard, param.local, local) for param, local in zip(group.params, locals_, strict=True)
    ):
        for param, local in zip(group.params, locals_, strict=True):
            param.piece = local
        return
    group.new_shard(*next(iter(kinds)))
    for param, local in zip(group.params, locals_, strict=True):
        view = group.shard[param.local]
        if not local.is_meta:
            view.copy_(local.reshape(-1))
        set_local(param.sharded, view)
        param.piece = view
    group.forget_full()


def _lies_in(shard: torch.Tensor, at: slice, local: torch.Tensor) -> bool:
    return (
        storage_id(local) == storage_id(shard)
        and local.storage_offset() == shard.storage_offset() + at.start
        and local.dtype == shard.dtype
    )


def _refuse_mixed(meta: list[str], kinds: list[str]) -> NoReturn:
    if meta:
        raise LifecycleError(
            "Parameters are still on the meta device.",
            expected="all parameters of the unit materialised before the first forward",
            got=", ".join(meta[:4]),
            todo="load them too, or call model.to_empty(device=...) and initialise",
        )
    raise LifecycleError(
        "The parameters of a group took different dtypes or devices.",
        expected="one dtype on one device",
        got=kinds,
        todo="convert or load the whole sharded module, not a part of it",
    )


def _refuse_tied(param: ManagedParam, home: ManagedParam) -> NoReturn:
    raise LifecycleError(
        "A sharded parameter was put in the place of another one: each has its own memory, so they cannot be tied now.",
        expected="parameters that were tied before fully_shard",
        got=f"{home.slot.fqn} of {', '.join(type(m).__name__ for m, _ in home.owners)}",
        where=f"{param.slot.fqn}, held by {', '.join(type(m).__name__ for m, _ in param.owners)}",
        todo="tie first (model.tie_weights(), b.weight = a.weight), then shard, with both modules in one unit: the "
        "root's, or fully_shard([a, b])",
    )


def _refuse(param: ManagedParam, held: object, how: str) -> NoReturn:
    raise LifecycleError(
        f"A sharded parameter was replaced {how}.",
        expected=f"the parameter of shape {tuple(param.sharded.shape)}, {param.sharded.dtype}, "
        f"placed {tuple(map(str, param.spec.placements))}",
        got=type(held).__name__,
        where=f"{param.slot.fqn}, held by {', '.join(type(m).__name__ for m, _ in param.owners)}",
        todo="write values into it: load_state_dict, vescale_fsdp.checkpoint.set_model_state_dict, or copy_ of a "
        "tensor that vescale_fsdp.distribute_tensor made. Replace, delete or parametrize before fully_shard",
    )
