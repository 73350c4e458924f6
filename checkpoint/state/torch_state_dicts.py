"""torch's ``get_*_state_dict`` and ``set_*_state_dict``, with setters that load a full state into any sharding.

The getters call torch's, and their ranks meet once for all tensors (see `vescale_fsdp.dtensor.meeting`); in torch's own
getters ranks meet once per tensor. `get_optimizer_state_dict` takes no step of an optimizer. `set_optimizer_state_dict`
keeps the dtypes of state, and the state of frozen parameters. With ``full_state_dict=True``, torch's setters call
``distribute_tensor``, which refuses placements of other libraries. The setters here first cut each full tensor to this
rank's region, and then pass a sharded state to torch's setters. Their signatures are torch's.

    options                                what each rank passes             what is sent between ranks
    full_state_dict                        the whole state                   nothing
    full_state_dict, broadcast_from_rank0  rank 0: the whole state           one tensor at a time
    neither                                a sharded state                   nothing

A full state can also fill a model on the meta device, as with torch's setters: tensors that the state contains are
allocated, in the model's dtypes; all other tensors stay on the meta device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict as _torch_get_model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as _torch_get_optimizer
from torch.distributed.checkpoint.state_dict import set_model_state_dict as _torch_set_model
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as _torch_set_optimizer
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.manifest.state_tree import child_name
from vescale_fsdp.checkpoint.state.live_objects import home_device, undo_casts
from vescale_fsdp.checkpoint.state.optimizer_forms import optimizer_state
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.collectives.process_groups import backends_of
from vescale_fsdp.devices import current_device
from vescale_fsdp.dtensor.meeting import meet, one_meeting
from vescale_fsdp.dtensor.ragged_dtensor import wrap_like
from vescale_fsdp.errors import ArgumentError, CheckpointError
from vescale_fsdp.torch_private import create_optimizer_state, fqn_of, local_of, spec_of

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Given = ParamSpec("Given")
T = TypeVar("T")


def _in_one_meeting(function: Callable[Given, T]) -> Callable[Given, T]:
    """Return a function whose ranks meet once, for all tensors that it gathers or sends."""

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> T:
        with one_meeting(function.__name__):
            return function(*args, **kwargs)

    return call


get_model_state_dict = _in_one_meeting(_torch_get_model)


@_in_one_meeting
def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a model's state, full or sharded, into a model with any sharding.

    Raises:
        CheckpointError: if the shape of a full tensor differs from that of the parameter.

    Examples:
        >>> from torch.distributed.checkpoint.state_dict import StateDictOptions
        >>> model, full = nn.Linear(3, 2), {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
        >>> _ = set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
        >>> model.weight.sum().item()
        6.0
    """
    _check_model(model, "set_model_state_dict(model, model_state_dict)")
    plain, full = _split_options(options)
    if full is not None:
        template = get_model_state_dict(model)
        model_state_dict = _cut(template, model_state_dict, full.broadcast_from_rank0)
        _materialize(model, template, model_state_dict)
    return _torch_set_model(model, model_state_dict, options=plain)


def _check_model(model: object, call: str) -> None:
    """Raise ArgumentError for a state in the place of the model."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            "The model comes first.",
            expected="an nn.Module",
            got=type(model).__name__,
            todo=f"call {call}",
            where="model=..",
        )


def _materialize(model: nn.Module, template: dict[str, Any], state: dict[str, Any]) -> None:
    """Replace the model's tensors on the meta device by tensors of the state."""
    missing = {fqn for fqn, value in template.items() if isinstance(value, torch.Tensor) and value.is_meta}
    values = {}
    for name in model.state_dict() if missing else ():
        fqn = fqn_of(model, name)
        if fqn in missing and fqn in state:
            value = state[fqn]
            if not isinstance(value, DTensor):  # the caller's own tensor, which the model must not share
                value = value.detach().to(home_device(template), template[fqn].dtype, copy=True)
            values[name] = value
    if values:
        # assign=True: values cannot be copied into a tensor on the meta device.
        model.load_state_dict(values, strict=False, assign=True)


@_in_one_meeting
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of optimizers by parameter name; optimizers and parameters do not change.

    An optimizer has no state before its first step. The result then has the state that it begins with, which `dcp.load`
    can fill. torch's function takes a step instead: counts begin at 1, moments with those of a weight decay, and the
    optimizer keeps them.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = get_optimizer_state_dict(model, optimizer)["state"]["weight"]
        >>> state["step"].item(), state["exp_avg"].any().item(), len(optimizer.state)
        (0.0, False, 0)
    """
    optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    with ExitStack() as after:
        for optimizer in optimizers:
            if _begin_state(optimizer):
                after.callback(optimizer.state.clear)
        return _torch_get_optimizer(model, optimizers, submodules=submodules, options=options)


@_in_one_meeting
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of `get_model_state_dict` and `get_optimizer_state_dict`.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> weights, moments = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> list(weights), list(moments)
        (['weight', 'bias'], ['state', 'param_groups'])
    """
    weights = get_model_state_dict(model, submodules=submodules, options=options)
    return weights, get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)


def _begin_state(optimizer: torch.optim.Optimizer) -> bool:
    """Create the state that an optimizer begins with; return whether it had none.

    Optimizers of classes that torch does not define take a step with gradients, learning rates and weight decays of 0,
    whose counts are reset.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # As in torch: with gradients, an optimizer without state needs none. LBFGS cannot step without a closure.
    if (
        optimizer.state
        or any(param.grad is not None for param in params)
        or isinstance(optimizer, torch.optim.LBFGS)
    ):
        return False
    trained = [param for param in params if param.requires_grad]
    try:
        for param in trained:  # optimizers create no state for parameters without gradients
            param.grad = torch.zeros_like(param)
        if not create_optimizer_state(optimizer):
            _step_by_nothing(optimizer)
    finally:
        for param in trained:
            param.grad = None
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for param in group["params"] if group["momentum"] else ():
            if param.requires_grad:  # the first step would create the buffer
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return True


@torch.no_grad()
def _step_by_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that changes no parameter, and reset the counts of steps."""
    params = [
        param for group in optimizer.param_groups for param in group["params"] if param.grad is not None
    ]
    rates = [
        (group, name) for group in optimizer.param_groups for name in ("lr", "weight_decay") if name in group
    ]
    # In fp16, eps is 0, and a rate of 0 times 0/0 makes NaNs of the parameters.
    values, before = [param.clone() for param in params], [group[name] for group, name in rates]
    try:
        for group, name in rates:
            group[name] = torch.zeros_like(group[name]) if isinstance(group[name], torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for (group, name), rate in zip(rates, before, strict=True):
            group[name] = rate
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    for parts in optimizer.state.values():
        if "step" in parts:
            parts["step"] = torch.zeros_like(parts["step"]) if isinstance(parts["step"], torch.Tensor) else 0


@_in_one_meeting
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of optimizers, full or sharded, nested or flattened, into optimizers with any sharding.

    Raises:
        CheckpointError: if the shape of a full tensor differs from that of the optimizer's tensor.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> saved = get_optimizer_state_dict(model, optimizer)
        >>> set_optimizer_state_dict(model, optimizer, saved)
    """
    _check_model(model, "set_optimizer_state_dict(model, optimizers, optim_state_dict)")
    optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    plain, full = _split_options(options)
    if full is not None:
        template = get_optimizer_state_dict(model, optimizers, options=plain)
        optim_state_dict = _cut(template, optim_state_dict, full.broadcast_from_rank0)
    given = _state_of_params(model, optimizers, optim_state_dict)
    frozen = [param for param in given if not param.requires_grad and param.is_floating_point()]
    with ExitStack() as after:
        for param in frozen:  # torch drops the state of parameters without gradients
            param.requires_grad_(True)
            after.callback(param.requires_grad_, False)
        for optimizer in optimizers:
            _begin_state(optimizer)  # else torch would take a step
        _torch_set_optimizer(model, optimizers, optim_state_dict, options=plain)
    for optimizer in optimizers:
        undo_casts(optimizer, given)


def _state_of_params(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], state: dict[str, Any]
) -> dict[torch.Tensor, Mapping[Any, Any]]:
    """Return the part of a state dict that belongs to each parameter of the optimizers."""
    owned = {param for each in optimizers for group in each.param_groups for param in group["params"]}
    names = {param: fqn_of(model, name) for name, param in model.named_parameters() if param in owned}
    parsed = optimizer_state(state, names.values())
    if parsed is None or parsed.is_numbered:
        return {}
    return {param: parsed.state[name] for param, name in names.items() if parsed.state.get(name)}


@_in_one_meeting
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Call `set_optimizer_state_dict` and `set_model_state_dict`; an empty model state is skipped.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> weights, moments = get_state_dict(model, optimizer)
        >>> _ = set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    """
    has_model = [bool(model_state_dict)]  # a list, since the broadcast writes its result in place
    if options is not None and options.broadcast_from_rank0 and dist.is_initialized():
        # Rank 0 decides, since other ranks pass empty dicts also if there is a model state.
        _meet_all()
        dist.broadcast_object_list(has_model, src=0)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    if has_model[0]:
        return set_model_state_dict(model, model_state_dict, options=options)
    # Loads nothing; called for the value that torch's setter returns in this case.
    return _torch_set_model(model, {}, options=StateDictOptions(strict=False))


def _split_options(options: StateDictOptions | None) -> tuple[StateDictOptions, StateDictOptions | None]:
    """Return the options for torch's setter, which gets a sharded state, and the options for cutting a full state.

    The latter are the caller's options; None if the caller's state is sharded.
    """
    options = options if options is not None else StateDictOptions()
    if not (options.full_state_dict or options.broadcast_from_rank0):
        return options, None
    plain = dataclasses.replace(options, full_state_dict=False, broadcast_from_rank0=False, cpu_offload=False)
    return plain, options


def _meet_all() -> None:
    """Return once all ranks have come, before rank 0 sends a state to them."""
    assert dist.group.WORLD is not None
    meet([dist.group.WORLD], "broadcast_from_rank0")


class _Stub(NamedTuple):
    """The description of a tensor on rank 0, which other ranks get before its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _stubs(value: Any) -> Any:
    """Return the state with a stub in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return _Stub(tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return {key: _stubs(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_stubs, value))
    return value


def _cut(template: Any, full: Any, broadcast: bool) -> Any:
    """Return the full state with each tensor sharded like the tensor at the same place in the template.

    Args:
        template: a sharded state of the same model or optimizer.
        full: the full state; ignored on ranks other than 0 if ``broadcast``.
        broadcast: whether only rank 0 has the full state, and sends it to all ranks.
    """
    describer, home = Describer(), home_device(template)
    broadcast = broadcast and dist.is_initialized() and dist.get_world_size() > 1
    skeleton = full  # the structure of the state on all ranks
    if broadcast:  # rank 0 sends the structure, with stubs in place of tensors
        full = full if dist.get_rank() == 0 else None
        from_rank_0 = [None if full is None else _stubs(full)]
        _meet_all()
        dist.broadcast_object_list(from_rank_0, src=0)
        skeleton = from_rank_0[0]

    def cut(template: Any, skeleton: Any, value: Any, name: str) -> Any:
        if isinstance(skeleton, Mapping):
            known = template if isinstance(template, Mapping) else {}
            return {
                key: cut(known.get(key), item, None if value is None else value[key], child_name(name, key))
                for key, item in skeleton.items()
            }
        # Only with ``broadcast``: param_groups may contain tensors, which are sent.
        if isinstance(skeleton, list) and broadcast:
            unknown = [None] * len(skeleton)
            templates = template if isinstance(template, list) and len(template) == len(skeleton) else unknown
            items = zip(templates, skeleton, unknown if value is None else value, strict=True)
            return [cut(*item, child_name(name, index)) for index, item in enumerate(items)]
        if not isinstance(skeleton, (_Stub, torch.Tensor)):
            return skeleton
        if isinstance(skeleton, _Stub):
            value = _broadcast(skeleton, value, template, home)
        if isinstance(template, DTensor) and not isinstance(value, DTensor):
            return _cut_tensor(describer, home, template, value, name)
        return value

    return cut(template, skeleton, full, "")


def _broadcast(stub: _Stub, value: torch.Tensor | None, template: Any, home: torch.device) -> torch.Tensor:
    """Send a tensor from rank 0 to all ranks, and return it on the template's device.

    Args:
        stub: the description of the tensor.
        value: the tensor on rank 0, None on other ranks.
        template: the tensor that the result is for; other leaves are received on the CPU.
        home: the device to use in place of the meta device.
    """
    device = template.device if isinstance(template, torch.Tensor) else torch.device("cpu")
    if device.type == "meta":
        device = home
    backends = backends_of(dist.group.WORLD)
    if device.type not in backends:
        device = current_device(next(iter(backends)))
    if value is None:
        value = torch.empty(stub.shape, dtype=stub.dtype, device=device)
    value = value.detach().to(device).contiguous()  # collectives accept only contiguous tensors
    dist.broadcast(value, src=0)
    return value


def _cut_tensor(
    describer: Describer, home: torch.device, template: DTensor, full: torch.Tensor, name: str
) -> torch.Tensor:
    """Make a tensor that is sharded like the template and has this rank's region of the full tensor.

    Args:
        home: the device to use if the template is on the meta device.
        name: the tensor's name, for messages.
    """
    if tuple(template.shape) != tuple(full.shape):
        raise CheckpointError(
            "The shape of a full tensor differs from that of the tensor that it is loaded into.",
            expected=tuple(template.shape),
            got=tuple(full.shape),
            where=name,
            todo="load the state of the same model",
        )
    if template.is_meta:
        # In the template's dtype, since `_materialize` assigns the tensor, which casts nothing.
        local = torch.empty_like(local_of(template), device=home, requires_grad=False)
        result: torch.Tensor = wrap_like(local, spec_of(template), like=template)
    else:
        # In the dtype of the full tensor, since torch's setter copies the values, which casts them.
        result = torch.empty_like(template, dtype=full.dtype, requires_grad=False)
    describer.copy_part(name, full, result)
    return result
