"""A user's state as nested dicts of tensors and values: modules opened up, memory allocated.

    {"model": module, "optimizer": optimizer, "step": 3}
    {"model": {"a.weight": tensor, ..}, "optimizer": optimizer, "step": 3}

Tensors of the second are those that the first holds, so what fills them fills the user's. Optimizers are matched by
the engine of `load` itself (see `checkpoint.state.live_objects`); their leaves are those that they have so far.
Parameters that are one are found by their memory, which parameters on the meta device have too, though no bytes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.formats.dcp.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    home_device,
    set_model_state_dict,
)
from vescale_fsdp.checkpoint.manifest.state_tree import child_name
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import apply_to_tensors, fqn_of, local_of, storage_id


@dataclass
class LiveState:
    """The opened state.

    Attributes:
        tree: what is filled.
        models: where modules were.
    """

    state: Any
    tree: Any = None
    models: dict[Path, nn.Module] = field(default_factory=dict)
    _copies: list[tuple[Any, dict[Any, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Make the tree of what modules and optimizers hold now."""
        self.models, self._copies = dict(_modules(self.state, ())), []
        self.tree = self._opened(self.state, ())

    def _opened(self, value: Any, path: Path) -> Any:
        if isinstance(value, nn.Module):
            return get_model_state_dict(value)
        if isinstance(value, torch.optim.Optimizer):
            _require_memory(value, path)
        if not isinstance(value, Mapping):
            return value
        opened = {key: self._opened(item, (*path, key)) for key, item in value.items()}
        if all(opened[key] is item for key, item in value.items()):
            return value
        self._copies.append((value, opened))
        return opened

    def leaves(self) -> dict[Path, Any]:
        """Leaves of the tree by path."""
        tree = self.tree if isinstance(self.tree, Mapping) else {"state": self.tree}
        tree = _with_optimizer_state(tree, LiveObjects(self.state), "")
        return flatten(tree, lambda value: isinstance(value, torch.Tensor))

    def ties(self) -> dict[str, list[str]]:
        """Names that share one tensor, by each of them; those of others are left out."""
        groups: dict[object, list[str]] = {}
        for path, leaf in self.leaves().items():
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                groups.setdefault(_memory_of(leaf), []).append(name_of(path))
        return {name: names for names in groups.values() if len(names) > 1 for name in names}

    def bare_buffers(self) -> dict[str, nn.Module]:
        """Buffers on the meta device that no checkpoint holds, and the module of each."""
        found = {}
        for model in self.models.values():
            if not any(buffer.is_meta for buffer in model.buffers()):
                continue
            held = get_model_state_dict(model)
            for path, owner in model.named_modules():
                for name, buffer in owner.named_buffers(recurse=False):
                    full = f"{path}.{name}".removeprefix(".")
                    if buffer.is_meta and fqn_of(model, full) not in held:
                        found[full] = owner
        return found

    def allocate(self, names: Iterable[str], bare: Iterable[str]) -> Callable[[], None]:
        """Give tensors of modules that are on the meta device memory, and open the state anew.

        Args:
            names: of leaves of the tree.
            bare: names of buffers that are no leaves.

        Returns:
            What puts them back on the meta device, for when they could not be filled.
        """
        wanted, others = set(names), set(bare)
        undo: list[Callable[[], None]] = []
        for path, model in self.models.items():
            chosen = {
                name
                for name, tensor in _tensors(model)
                if tensor.is_meta and (name_of((*path, fqn_of(model, name))) in wanted or name in others)
            }
            if chosen:
                home = home_device(get_model_state_dict(model))
                _move(model, chosen, home)
                undo.append(lambda model=model, chosen=chosen: _move(model, chosen, torch.device("meta")))  # type: ignore[misc]
        if undo:
            self.open()

        def put_back() -> None:
            for each in undo:
                each()

        return put_back

    def give_back(self) -> None:
        """Hand what was filled in the tree to whom it belongs: plain values."""
        for owner, opened in self._copies:
            for key, value in opened.items():
                if not isinstance(owner[key], (nn.Module, torch.optim.Optimizer, Mapping)):
                    owner[key] = value
        for path, model in self.models.items():
            extra = {key: v for key, v in _at(self.tree, path).items() if not isinstance(v, torch.Tensor)}
            if extra:  # of get_extra_state
                set_model_state_dict(model, extra, options=StateDictOptions(strict=False))


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether this rank has no memory for a tensor that it ought to have."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).is_meta


def _modules(value: Any, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _modules(item, (*path, key))


def _require_memory(optimizer: torch.optim.Optimizer, path: Path) -> None:
    if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
        raise CheckpointError(
            "An optimizer has parameters on the meta device, which it would not have once they are made.",
            expected="an optimizer of parameters that have memory",
            got=f"{type(optimizer).__name__} of parameters on the meta device",
            where=".".join(map(str, path)),
            todo="load the model first, then make the optimizer and load both; or call to_empty()",
        )


def _with_optimizer_state(value: Any, objects: LiveObjects, name: str) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        named = objects.named(value, name)
        return value.state_dict() if named is None else named.value()
    if isinstance(value, Mapping):
        return {k: _with_optimizer_state(item, objects, child_name(name, k)) for k, item in value.items()}
    return value


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _memory_of(tensor: torch.Tensor) -> object:
    """Equal for tensors that are one; their addresses would be too where a rank's pieces are empty."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    slot = tensor.layout_ref if isinstance(tensor, RaggedDTensor) else None
    name = slot[1] if slot is not None else None
    return (
        storage_id(local),
        local.storage_offset(),
        tuple(tensor.shape),
        local.stride(),
        tensor.dtype,
        name,
    )


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All parameters and buffers by every name that they have."""
    params = model.named_parameters(remove_duplicate=False)
    return [*params, *model.named_buffers(remove_duplicate=False)]


def _move(model: nn.Module, names: set[str], device: torch.device) -> None:
    """Put some tensors of a model in new memory, with whatever values; those that are one stay one."""
    before = _tensors(model)
    chosen = {id(tensor) for name, tensor in before if name in names}
    apply_to_tensors(model, lambda t: torch.empty_like(t, device=device) if id(t) in chosen else t)
    first: dict[int, torch.Tensor] = {}
    for (name, old), (_, new) in zip(before, _tensors(model), strict=True):
        kept = first.setdefault(id(old), new)
        if kept is not new:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, kept)
