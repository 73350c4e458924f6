"""`Allocation`: memory for the modules on the meta device that a load fills, and what of it gets no value.

    on the meta device                    after the load
    in the checkpoint                     the stored value
    not in it, with an initializer        what the initializer writes: that of the model's class, or ``init`` of `load`
    not in it, without an initializer     still on the meta device
    not selected, or of another shape     still on the meta device

Memory that no stored value fills first gets a pattern. Where the pattern is found after the initializers have run, the
tensor would have kept whatever its memory contained:

    floats        one NaN, whose bits no computation makes: each element is checked
    bools         bytes that are neither 0 nor 1: each element is checked
    other types   bytes that depend on their position: each element of at least 4 bytes is checked, and every 8 bytes in
                  a row of smaller ones
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of
from vescale_fsdp.checkpoint.state.class_init import ClassInitializer
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects, home_device
from vescale_fsdp.checkpoint.state.nesting import name_of
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.torch_private import apply_to_tensors, local_of

# A NaN of each float dtype, and the integers that carry its bits.
_NANS = {
    torch.float64: (torch.int64, 0x7FF8_5EED_5EED_5EED),
    torch.float32: (torch.int32, 0x7FD5_5EED),
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.float16: (torch.int16, 0x7ED5),
}
_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
_PERIOD_BYTES = 96
_CHUNK_BYTES = _PERIOD_BYTES << 17  # 12 MiB: how much of a tensor is written and checked at once
_RUN_BYTES = 8  # so many bytes of the pattern in a row are no coincidence


class MetaTensor(NamedTuple):
    """A parameter or buffer on the meta device, under one of its names.

    Attributes:
        name: name in the state, as reports have it.
        model: the module of the state.
        path: path of the tensor's owner in ``model``.
        key: name in the owner.
        is_saved: whether ``model.state_dict()`` contains it.
        tensor: the tensor on the meta device.
    """

    name: str
    model: nn.Module
    path: str
    key: str
    is_saved: bool
    tensor: torch.Tensor

    @property
    def now(self) -> Any:
        """The tensor that is now in its place."""
        return getattr(self.model.get_submodule(self.path), self.key)

    def put(self, param: Any) -> None:
        """Put a parameter in its place, unseen by the module."""
        self.model.get_submodule(self.path)._parameters[self.key] = param


def meta_tensors(live: LiveObjects) -> list[MetaTensor]:
    """Return the tensors on the meta device of the state's modules; tied ones under each of their names."""
    found = []
    for at, model in live.modules.items():
        on_meta = [(name, tensor) for name, tensor in _tensors(model) if tensor.is_meta]
        if not on_meta:  # spares a call of state_dict()
            continue
        short_names = {raw: short for short, raw in live.module_state(model).raw_names.items()}
        for name, tensor in on_meta:
            path, _, key = name.rpartition(".")
            full = name_of((*at, short_names.get(name, name)))
            found.append(MetaTensor(full, model, path, key, name in short_names, tensor))
    return found


class Allocation:
    """Allocates the tensors on the meta device that get values.

    Args:
        tensors: all tensors on the meta device.
        live: the state's objects; outdated afterwards.
        filled: names of the leaves that stored values fill.
        missing: names of leaves that the checkpoint lacks; they stay on the meta device without an initializer.
        unsaved: names of tensors that no checkpoint contains: buffers of no state dict, and weights that the class of
            the model computes.
        init: the caller's initializer, called with each module that owns a tensor without a stored value; None if there
            is none.
        adapter: names of the tensors of an adapter that the checkpoint lacks, since it has only the base model.
    """

    def __init__(
        self,
        tensors: Sequence[MetaTensor],
        live: LiveObjects,
        filled: Collection[str],
        missing: Collection[str],
        unsaved: Collection[str],
        init: Callable[[nn.Module], object] | None,
        *,
        adapter: Collection[str] = (),
    ) -> None:
        self._init = init
        stored = {id(each.tensor) for each in tensors if each.name in filled}
        rest = [each for each in tensors if id(each.tensor) not in stored]
        self._unsaved = [each for each in rest if each.name in unsaved]
        self._of_adapter = [each for each in rest if each.name in adapter]
        lacking = [*self._unsaved, *self._of_adapter, *(each for each in rest if each.name in missing)]
        self._classes = {
            model: ClassInitializer(model) for model in dict.fromkeys(each.model for each in lacking)
        }
        # Without an initializer, they stay on the meta device: a use of them is an error.
        self._watched = [
            each for each in lacking if init is not None or self._classes[each.model].covers(each.path)
        ]
        chosen = stored.union(id(each.tensor) for each in self._watched)
        self._moved = [each for each in tensors if id(each.tensor) in chosen]
        devices = {each.model: home_device(live.module_state(each.model).values) for each in self._moved}
        _replace(chosen, devices)
        # Kept by their tensors on the meta device; as long as they live, no other tensor gets their memory.
        self._memory = {id(each.tensor): local_of(each.now) for each in self._watched}
        for local in self._memory.values():
            _write_pattern(local)

    def undo(self) -> None:
        """Move the tensors back to the meta device: after a load that failed, their values are not the checkpoint's."""
        devices = {each.model: torch.device("meta") for each in self._moved}
        _replace({id(each.now) for each in self._moved}, devices)

    def initialize(self) -> None:
        """Call the initializers of the modules that own tensors without a stored value: their classes', then ``init``.

        A class may initialize tensors of the modules inside, so the modules around an owner follow while tensors of the
        owner lack values.
        """
        owners = dict.fromkeys((each.model, each.path) for each in self._watched)
        modules = list(
            dict.fromkeys(model.get_submodule(path) for model, path in owners)
        )  # some have two paths
        computed = [each for each in self._unsaved if id(each.tensor) in self._memory]
        with _unchanged(modules, {id(each.now) for each in self._moved}), self._unsharded(computed):
            own = {id(each.now) for each in self._watched}
            for model, by_class in self._classes.items():
                others = [tensor for _, tensor in _tensors(model) if id(tensor) not in own]
                with by_class.sparing(others):
                    by_class.run(path for of, path in owners if of is model)
                    around = {at for each in self._missing(model) for at in _paths_around(each.path)}
                    for path in sorted(around, key=len, reverse=True):
                        if self._missing(model):
                            by_class.run([path])
            for module in modules:
                if self._init is not None:
                    self._init(module)

    @contextmanager
    def _unsharded(self, tensors: Iterable[MetaTensor]) -> Iterator[None]:
        """Context manager that replaces sharded weights by full ones, and copies each rank's part back.

        For weights that a class computes, such as tables of positions: it writes whole tensors into them.
        """
        describer, sharded = Describer(), []
        for each in tensors:
            now = each.now
            if isinstance(now, DTensor):
                full = torch.empty(now.shape, dtype=now.dtype, device=local_of(now).device)
                _write_pattern(full)
                sharded.append((each, now, full))
        for each, _, full in sharded:
            each.put(nn.Parameter(full, requires_grad=False))
            self._memory[id(each.tensor)] = full
        try:
            yield
        finally:
            for each, now, _ in sharded:
                each.put(now)
                self._memory[id(each.tensor)] = local_of(now)
        for each, now, full in sharded:
            describer.copy_part(each.name, full, now)

    def _missing(self, model: nn.Module) -> list[MetaTensor]:
        return [each for each in self._watched if each.model is model and self._is_unfilled(each)]

    def unfilled(self) -> list[str]:
        """Return the names of the tensors that still have no value."""
        return [
            each.name
            for each in dict.fromkeys((*self._unsaved, *self._of_adapter, *self._watched))
            if self._is_unfilled(each)
        ]

    def _is_unfilled(self, each: MetaTensor) -> bool:
        now = each.now
        if now is None or now.is_meta:  # None: an initializer has removed it
            return now is not None
        # An initializer may have put another tensor in its place.
        local = local_of(now)
        return local.data_ptr() == self._memory[id(each.tensor)].data_ptr() and has_pattern(local)


def _paths_around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, from the inside out."""
    while path:
        path = path.rpartition(".")[0]
        yield path


@contextmanager
def _unchanged(modules: Iterable[nn.Module], excepted: Collection[int]) -> Iterator[None]:
    """Context manager that restores the values of the modules' own tensors, except those with these ids."""
    kept = [
        (module, name, tensor.detach().clone())
        for module in modules
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if not tensor.is_meta and id(tensor) not in excepted
    ]
    try:
        yield
    finally:
        for module, name, value in kept:
            getattr(module, name).detach().copy_(value)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers; tied ones under each of their names."""
    params = model.named_parameters(remove_duplicate=False)
    return [*params, *model.named_buffers(remove_duplicate=False)]


def _replace(chosen: Collection[int], devices: dict[nn.Module, torch.device]) -> None:
    """Replace tensors, given by id, of several modules by uninitialized tensors on devices. Tied tensors stay tied."""
    first: dict[int, torch.Tensor] = {}
    for model, device in devices.items():
        before = _tensors(model)
        apply_to_tensors(model, lambda t: torch.empty_like(t, device=device) if id(t) in chosen else t)  # noqa: B023
        for (name, old), (_, new) in zip(before, _tensors(model), strict=True):
            kept = first.setdefault(id(old), new)
            if kept is not new:  # `apply_to_tensors` gave this name of a tied tensor a tensor of its own
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, kept)


def _write_pattern(local: torch.Tensor) -> None:
    """Fill the memory of a new tensor with the pattern of its dtype."""
    memory, dtype = bytes_of(local.detach()), _PARTS.get(local.dtype, local.dtype)
    if dtype in _NANS:
        carrier, bits = _NANS[dtype]
        memory.view(carrier).fill_(bits)
        return
    pattern = _pattern(memory)
    for chunk in memory.split(_CHUNK_BYTES):
        chunk.copy_(pattern[: chunk.numel()])


def has_pattern(local: torch.Tensor) -> bool:
    """Return whether any part of a tensor still has the pattern that `Allocation` has written."""
    memory, dtype = bytes_of(local.detach()), _PARTS.get(local.dtype, local.dtype)
    if not memory.numel():
        return False
    if dtype in _NANS:
        carrier, bits = _NANS[dtype]
        return bool((memory.view(carrier) == bits).any())
    # The number of bytes that must have the pattern, counted from multiples of `step`.
    size = step = local.dtype.itemsize
    if size < 4 and dtype != torch.bool:
        size, step = min(_RUN_BYTES, memory.numel()), 1
    pattern = _pattern(memory)
    return any(
        bool((chunk == pattern[: chunk.numel()]).unfold(0, size, step).all(1).any())
        for chunk in memory.split(_CHUNK_BYTES)
        if chunk.numel() >= size
    )


def _pattern(memory: torch.Tensor) -> torch.Tensor:
    """Return the bytes from 128 to 223, in another order, as often as they fit into the memory or a chunk of it."""
    period = (
        torch.arange(_PERIOD_BYTES, dtype=torch.int64, device=memory.device) * 37 % _PERIOD_BYTES + 128
    ).to(torch.uint8)
    return period.repeat(-(-min(memory.numel(), _CHUNK_BYTES) // _PERIOD_BYTES))
