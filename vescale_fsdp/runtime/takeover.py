"""Takeover: a group adopts parameters that users have set on modules in place of the group's own parameters.

    event                                            before the group's first gather     after the first gather
    load_state_dict(assign=True)                     adopted                             adopted
    .to(), to_empty(), swap_tensors                  adopted                             adopted
    module.weight = nn.Parameter(ragged tensor or    adopted                             raises
        DTensor.from_local of the piece, with the
        sharded parameter's placements)
    module.weight = nn.Parameter(full plain tensor)  this rank's piece is adopted        raises
    del module.weight, parametrizations              raises                              raises
    a trainable parameter that is new in the model   raises                              trains on this rank alone

A state may be loaded in several calls, module by module. A loaded piece stays in its own memory until all pieces of its
group have one device and one dtype. Then all pieces are copied into one shard, which a gather requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.half_loaded import half_loaded_in, mark_whole
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, check_grad_dtype
from vescale_fsdp.dtensor.spec import is_ragged_spec, spec_with
from vescale_fsdp.errors import LifecycleError, some
from vescale_fsdp.runtime.group_plan import note_replaced
from vescale_fsdp.runtime.param_group import ManagedParam, ParamGroup, managed_param_of
from vescale_fsdp.torch_private import (
    grad_dtype_of,
    is_noted_sharded,
    is_replicated,
    loads_what_it_is_given,
    local_of,
    set_local,
    spec_of,
    storage_id,
)

if TYPE_CHECKING:
    from vescale_fsdp.runtime.fsdp_state import FSDPState


def rebind(group: ParamGroup, *, is_whole: bool) -> None:
    """Adopt parameters that ``_apply`` or ``load_state_dict`` has replaced; later calls may replace the rest.

    Args:
        group: the group of the parameters.
        is_whole: whether a load has filled the whole group, which clears the marks of an earlier, failed load.
    """
    for param in group.params:
        replacements = param.replacements()
        if replacements:
            # Owners of a shared parameter may have different replacements. The last one is taken, as its values would
            # be in a load without assign=True.
            _take(group, param, replacements[-1], must_be_new=False)
        param.share_attributes()  # Module.to may have swapped them
        param.spec = spec_of(param.sharded)  # Module.to may have changed the dtype
        param.set_on_modules(param.sharded)
    _unite(group, all_needed=False)
    if is_whole:
        mark_whole(group.shard)


def refuse_full_tensors(module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Raise if a state has full plain tensors for sharded parameters; called before ``load_state_dict`` changes any.

    Args:
        module: a module of a unit; modules below it are checked as well.
        state: the state to load; its keys are ``prefix`` followed by names of the module's parameters.
        prefix: prefix of the keys.

    Raises:
        LifecycleError: with the names of the parameters.
    """
    full = []
    for path, owner in module.named_modules(prefix=prefix.removesuffix(".")):  # it adds dots itself
        # A module that changes loaded tensors (by a hook or a `_load_from_state_dict` of its own) may turn full tensors
        # into sharded ones, so it is not checked. The load hook that `fully_shard` registers changes no tensor.
        if not loads_what_it_is_given(owner, num_own_hooks=int(is_noted_sharded(owner))):
            continue
        # The outermost module's path may be empty; without removeprefix its keys would begin with a dot.
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
            expected="a sharded state, as model.state_dict() returns it",
            got=f"full tensors for {len(full)} parameters: {', '.join(full[:4])}",
            where=type(module).__name__,
            todo="call vescale_fsdp.checkpoint.state_dict.set_model_state_dict(model, state, options=StateDictOptions("
            "full_state_dict=True)), with broadcast_from_rank0=True if rank 0 alone has the tensors. For a checkpoint, "
            "call vescale_fsdp.checkpoint.load. For one tensor, use p.copy_(vescale_fsdp.distribute_tensor(full, "
            "p.device_mesh, p.placements)). Or load before fully_shard",
        )


def refuse_added_params(units: Iterable[FSDPState]) -> None:
    """Raise if modules have trainable parameters that no `fully_shard` call has seen, such as an adapter added later.

    No unit gathers or reduces these, so each rank would train its own values.

    Raises:
        LifecycleError: with the names of the parameters.
    """
    if all(group.data.mesh.size() == 1 for unit in units for group in unit.groups):
        return  # one rank has nothing to reduce
    known = {key for unit in units for key in unit.ignored}
    known.update(
        key for unit in units for group in unit.groups for param in group.params for key in param.owners
    )
    # By object too: code may move an ignored parameter to another module.
    ignored = {id(param) for unit in units for ref in unit.ignored_params if (param := ref()) is not None}
    added: dict[nn.Parameter, str] = {}
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> None:
        if module in seen or is_replicated(module):
            return
        seen.add(module)
        for name, param in module._parameters.items():
            is_plain = not isinstance(param, DTensor)  # tensor parallelism reduces its own
            if param is None or not param.requires_grad or not is_plain or id(param) in ignored:
                continue
            if (module, name) not in known:
                added.setdefault(param, f"{path}{name}")
        for name, child in module.named_children():
            visit(f"{path}{name}.", child)

    for unit in units:
        for module in unit.modules:
            visit("", module)
    if added:
        raise LifecycleError(
            "Parameters were added after fully_shard: no rank reduces their gradients.",
            expected="all trainable parameters in the model when fully_shard is called",
            got=some(list(added.values()), 4),
            where=f"{type(next(iter(units)).modules[0]).__name__}",
            todo="add them before fully_shard, for example with peft.get_peft_model (in ignored_params=.. if your code "
            "keeps them equal on all ranks), or freeze them with requires_grad_(False)",
        )


def is_own_state(group: ParamGroup, state: Mapping[str, Any]) -> bool:
    """Return whether any tensor of a state is in the memory of the group's own shard."""
    own = storage_id(group.shard)
    return any(isinstance(each, DTensor) and storage_id(local_of(each)) == own for each in state.values())


def adopt_replaced_params(group: ParamGroup) -> None:
    """Adopt parameters that users have set on modules in place of the group's own ones. Called before each gather.

    Raises:
        LifecycleError: if a parameter was replaced by a value that the group cannot adopt, is still on the meta device,
            or was partly overwritten by a load that failed.
    """
    if half_loaded_in(group.shard):
        raise LifecycleError(
            "A failed load has overwritten these parameters in part: on at least one rank they mix values of two "
            "states.",
            expected="parameters of one state",
            got=", ".join(half_loaded_in(group.shard)[:4]),
            where=group.label,
            todo="load a complete checkpoint, by vescale_fsdp.checkpoint or load_state_dict; if none is left, call "
            "to_empty() and initialize, then load its undamaged tensors, as the page 'When something breaks' "
            "(docs/faults.md) shows",
        )
    if group.is_intact():
        return
    for param in group.params:
        replacements = param.replacements()
        if not replacements:
            continue
        new = replacements[0]
        if len(replacements) < len(param.owners) or any(each is not new for each in replacements):
            _refuse(param, new, "in only some of the modules that share it")
        _take(group, param, new, must_be_new=True)
        param.set_on_modules(param.sharded)
    _unite(group, all_needed=True)


def _take(group: ParamGroup, param: ManagedParam, new: nn.Parameter | None, *, must_be_new: bool) -> None:
    """Adopt ``new``, which users have set on modules in place of ``param``.

    Args:
        group: the group of ``param``.
        param: the parameter that was replaced.
        new: the replacement; None if the modules have no parameter of this name any more.
        must_be_new: whether to raise after the group's first gather.
    """
    if new is None:
        _refuse(param, new, "by None: it was deleted, or a parametrization moved it")
    tied = managed_param_of(new)
    if tied is not None and tied is not param:
        raise LifecycleError(
            "A sharded parameter was assigned to another sharded parameter's name. Each has its own memory, so they "
            "can no longer be tied.",
            expected="parameters that were tied before fully_shard",
            got=f"{tied.slot.fqn} of {_owners(tied)}",
            where=f"{param.slot.fqn} of {_owners(param)}",
            todo="tie first (model.tie_weights(), b.weight = a.weight), then shard, with both modules in one unit: the "
            "root's, or fully_shard([a, b])",
        )
    if must_be_new and group.was_gathered:
        _refuse(param, new, "after the model's first use")
    check_grad_dtype(grad_dtype_of(new), new.dtype, param.slot.fqn)
    new = _as_ragged(param, new)
    if isinstance(new, RaggedDTensor):
        expected = param.spec.mesh, param.spec.placements, param.sharded.shape
        if (new.device_mesh, new.placements, new.shape) != expected:
            placed = tuple(map(str, new.placements))
            _refuse(param, new, f"by a parameter of shape {tuple(new.shape)} placed {placed}")
        # The step of an optimizer that has the old sharded parameter must raise.
        note_replaced(param.sharded, param.slot.fqn)
        param.take(new)
    else:
        _take_plain(group, param, new)
    group.adopted.append(param.slot.fqn)


def _as_ragged(param: ManagedParam, new: nn.Parameter) -> nn.Parameter:
    """Return a RaggedDTensor for a plain DTensor with ragged placements, as loaders make with ``DTensor.from_local``.

    A parameter of any other kind is returned unchanged.
    """
    if not isinstance(new, DTensor) or isinstance(new, RaggedDTensor) or not is_ragged_spec(new.placements):
        return new
    ours, local = param.sharded, local_of(new)
    if local.numel() != local_of(ours).numel() or new.placements != param.spec.placements:
        _refuse(param, new, f"by a parameter whose local tensor has shape {tuple(local.shape)}")
    spec = spec_with(param.spec, dtype=local.dtype)
    ragged = RaggedDTensor.wrap(local.reshape(-1), spec, layout_ref=ours.layout_ref)  # type: ignore[attr-defined]
    return nn.Parameter(ragged, requires_grad=new.requires_grad)


@torch.no_grad()
def _take_plain(group: ParamGroup, param: ManagedParam, new: nn.Parameter) -> None:
    """Adopt this rank's piece of a full plain tensor that every rank has set in place of a parameter."""
    # The type is read from `.data`, because that of a Parameter is Parameter for plain tensors and subclasses alike.
    plain = not isinstance(new, DTensor) and type(new.data) is torch.Tensor and not new.is_meta
    # Only before the first gather, and only if no other parallelism cuts the parameter: the layout's piece is then a
    # range of the full tensor.
    if not plain or group.was_gathered or param.prior.spec is not None or not group.takes_plain:
        _refuse(param, new, f"by a {type(new).__name__} on {new.device}")
    if not isinstance(new, nn.Parameter):  # it is there for one call: ours would keep its values
        _refuse(
            param, new, "by a tensor that is no Parameter, as torch.func.functional_call sets for one call"
        )
    ours = param.sharded
    if (new.shape, new.dtype) != (ours.shape, ours.dtype):
        _refuse(param, new, f"by a tensor of shape {tuple(new.shape)}, {new.dtype}")
    start, stop = group.layout.piece(param.slot, group.comm.rank).range
    piece = new.detach().reshape(-1)[start:stop]
    if ours.is_meta:
        local = piece.to(group.home, copy=True)  # a copy, because a view would keep the full tensor in memory
        ragged = RaggedDTensor.wrap(local, param.spec, layout_ref=ours.layout_ref)  # type: ignore[attr-defined]
        note_replaced(ours, param.slot.fqn)
        param.take(nn.Parameter(ragged, requires_grad=new.requires_grad))
    else:
        # Copy in place, not a new parameter, because an optimizer may already have the sharded parameter.
        local_of(ours).copy_(piece)
        ours.requires_grad_(new.requires_grad)
    # Only the values of ``new`` are used, so the step of an optimizer that has ``new`` must raise.
    note_replaced(new, param.slot.fqn)


def _unite(group: ParamGroup, *, all_needed: bool) -> None:
    """If pieces are no longer views of the shard, copy all pieces of the group into a new shard.

    Args:
        group: the group of the pieces.
        all_needed: whether to raise if pieces differ in dtype or device. False: do nothing then, because the rest may
            be loaded later.
    """
    pieces = [(param, local_of(param.sharded)) for param in group.params]
    kinds = dict.fromkeys((local.dtype, local.device) for _, local in pieces)
    if len(kinds) > 1:
        meta = [param.slot.fqn for param, local in pieces if local.is_meta]
        if all_needed and meta:
            raise LifecycleError(
                "Parameters are still on the meta device.",
                expected="all parameters of the unit materialized before the first forward",
                got=", ".join(meta[:4]),
                todo="load them too, or call model.to_empty(device=...) and initialize",
            )
        if all_needed:
            raise LifecycleError(
                "The parameters of a group have different dtypes or devices after a load or conversion.",
                expected="one dtype on one device",
                got=[f"{dtype} on {device}" for dtype, device in kinds],
                todo="convert or load the whole sharded module, not a part of it",
            )
        return
    shard = group.shard
    # Nothing to copy if every piece is still a view of the shard, at its own offset.
    if all(
        storage_id(local) == storage_id(shard)
        and local.storage_offset() == shard.storage_offset() + param.local.start
        and local.dtype == shard.dtype
        for param, local in pieces
    ):
        for param, local in pieces:
            param.take_piece(local)
        return
    group.new_shard(*next(iter(kinds)))
    for param, local in pieces:
        view = group.shard[param.local].data  # with a version counter of its own
        if not local.is_meta:  # a piece on meta has no values to copy
            view.copy_(local.reshape(-1))
        set_local(param.sharded, view)
        param.take_piece(view)
    group.follow_shard()


def _owners(param: ManagedParam) -> str:
    """Return the class names of the modules that own a parameter."""
    return ", ".join(type(module).__name__ for module, _ in param.owners)


def _refuse(param: ManagedParam, new: object, how: str) -> NoReturn:
    """Raise because a parameter was replaced; ``how`` ends the sentence "A sharded parameter was replaced .."."""
    raise LifecycleError(
        f"A sharded parameter was replaced {how}.",
        expected=f"the parameter of shape {tuple(param.sharded.shape)}, {param.sharded.dtype}, "
        f"placed {tuple(map(str, param.spec.placements))}",
        got=type(new).__name__,
        where=f"{param.slot.fqn} of {_owners(param)}",
        todo="write values into the sharded parameter: load_state_dict, "
        "vescale_fsdp.checkpoint.state_dict.set_model_state_dict, or copy_ of a tensor that "
        "vescale_fsdp.distribute_tensor made. Replace, delete or parametrize parameters before fully_shard",
    )
