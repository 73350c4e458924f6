"""torch's ``get_*_state_dict`` and ``set_*_state_dict`` with one gap closed: full state into any sharding.

The getters are torch's own. torch's setters, given ``full_state_dict=True``, call its ``distribute_tensor``,
which refuses foreign placements. Those here cut full tensors by this rank's own region first, tensor by
tensor, and hand torch a state that is sharded already. Signatures are torch's.

    options                                what each rank brings             what travels
    full_state_dict                        the whole state                   nothing
    full_state_dict, broadcast_from_rank0  rank 0: the whole state           one tensor at a time
    neither                                a sharded state                   nothing

A full state also fills a model on the meta device, as with torch's: what it names is made, in the model's dtypes, and
the rest stays meta.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict import set_model_state_dict as _torch_set_model
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as _torch_set_optimizer
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.state.live_objects import home_device
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.dtensor.ragged_dtensor import wrap_like
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import fqn_of, local_of, spec_of

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a model's state, full or sharded, into a model of any sharding.

    Raises:
        CheckpointError: if a full tensor has another shape than the parameter.

    Examples:
        >>> from torch.distributed.checkpoint.state_dict import StateDictOptions
        >>> model, full = nn.Linear(3, 2), {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
        >>> _ = set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
        >>> model.weight.sum().item()
        6.0
    """
    plain, full = _split_options(options)
    if full is not None:
        template = get_model_state_dict(model)
        model_state_dict = _cut(template, model_state_dict, full.broadcast_from_rank0)
        _materialise(model, template, model_state_dict)
    return _torch_set_model(model, model_state_dict, options=plain)


def _materialise(model: nn.Module, template: dict[str, Any], state: dict[str, Any]) -> None:
    """Put what the state has in place of tensors on the meta device."""
    missing = {fqn for fqn, held in template.items() if isinstance(held, torch.Tensor) and held.is_meta}
    found = {}
    for name in model.state_dict() if missing else ():
        fqn = fqn_of(model, name)
        if fqn in missing and fqn in state:
            value = state[fqn]
            # A plain one is the caller's own.
            found[name] = value if isinstance(value, DTensor) else _copy_at_home(template, fqn, value)
    if found:
        model.load_state_dict(found, strict=False, assign=True)


def _copy_at_home(template: dict[str, Any], fqn: str, value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(home_device(template), template[fqn].dtype, copy=True)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load optimizers' state, full or sharded, nested or flattened, into optimizers of any sharding.

    Raises:
        CheckpointError: if a full tensor has another shape than the optimizer's.

    Examples:
        >>> from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> saved = get_optimizer_state_dict(model, optimizer)
        >>> set_optimizer_state_dict(model, optimizer, saved)
    """
    optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    plain, full = _split_options(options)
    if full is not None:
        template = get_optimizer_state_dict(model, optimizers, options=plain)
        optim_state_dict = _cut(template, optim_state_dict, full.broadcast_from_rank0)
    _torch_set_optimizer(model, optimizers, optim_state_dict, options=plain)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load the state of a model and its optimizers; see the two functions above. An empty model state is no state.

    Examples:
        >>> from torch.distributed.checkpoint.state_dict import get_state_dict
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> weights, moments = get_state_dict(model, optimizer)
        >>> _ = set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    """
    has_model = [bool(model_state_dict)]
    if options is not None and options.broadcast_from_rank0 and dist.is_initialized():
        dist.broadcast_object_list(has_model, src=0)  # the others bring nothing
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    if has_model[0]:
        return set_model_state_dict(model, model_state_dict, options=options)
    return _torch_set_model(model, {}, options=StateDictOptions(strict=False))  # loads nothing


def _split_options(options: StateDictOptions | None) -> tuple[StateDictOptions, StateDictOptions | None]:
    """Options for torch, told that the state is sharded; and the caller's, if the state is full."""
    options = options if options is not None else StateDictOptions()
    if not (options.full_state_dict or options.broadcast_from_rank0):
        return options, None
    plain = dataclasses.replace(options, full_state_dict=False, broadcast_from_rank0=False, cpu_offload=False)
    return plain, options


class _Stub(NamedTuple):
    """A tensor of rank 0, before its values have come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _cut(template: Any, full: Any, broadcast: bool) -> Any:
    """The full state with every tensor cut as the template's is."""
    describer = Describer()
    home = home_device(template)
    if not broadcast or not dist.is_initialized() or dist.get_world_size() == 1:
        return _walk(describer, home, template, full, full, "", broadcast=False)
    skeleton = [_stubs(full) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(skeleton, src=0)
    values = full if dist.get_rank() == 0 else None
    return _walk(describer, home, template, skeleton[0], values, "", broadcast=True)


def _stubs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Stub(tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return {key: _stubs(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_stubs, value))
    return value


def _walk(
    describer: Describer,
    home: torch.device,
    template: Any,
    skeleton: Any,
    full: Any,
    name: str,
    *,
    broadcast: bool,
) -> Any:
    if isinstance(skeleton, Mapping):
        known = template if isinstance(template, Mapping) else {}
        return {
            key: _walk(
                describer,
                home,
                known.get(key),
                item,
                None if full is None else full[key],
                f"{name}.{key}" if name else str(key),
                broadcast=broadcast,
            )
            for key, item in skeleton.items()
        }
    if not isinstance(skeleton, (_Stub, torch.Tensor)):
        return skeleton
    if broadcast:
        device = template.device if isinstance(template, torch.Tensor) else torch.device("cpu")
        if device.type == "meta":
            device = home
        if device.type == "cpu" and dist.get_backend() == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        value = (
            full.detach().to(device)
            if full is not None
            else torch.empty(skeleton.shape, dtype=skeleton.dtype, device=device)
        )
        value = value.contiguous()
        dist.broadcast(value, src=0)
    else:
        value = full
    if isinstance(template, DTensor) and not isinstance(value, DTensor):
        return _cut_tensor(describer, home, template, value, name)
    return value


def _cut_tensor(
    describer: Describer, home: torch.device, template: DTensor, full: torch.Tensor, name: str
) -> torch.Tensor:
    """A tensor sharded like the template, with this rank's region of the full values."""
    if tuple(template.shape) != tuple(full.shape):
        raise CheckpointError(
            "A full tensor has another shape than the one it is loaded into.",
            expected=tuple(template.shape),
            got=tuple(full.shape),
            where=name,
            todo="load the state of the same model",
        )
    if template.is_meta:
        local = torch.empty_like(local_of(template), device=home, requires_grad=False)
        result: torch.Tensor = wrap_like(local, spec_of(template), like=template)
    else:
        result = torch.empty_like(template, dtype=full.dtype, requires_grad=False)
    described = describer.describe(name, result)
    if described.local is None:
        return result
    region = describer.region(described, dist.get_rank())
    into = described.local.view(-1)
    for box, at in region.pieces():
        into[at : at + box.numel].view(box.sizes).copy_(full[box.slices()])
    return result
