"""Tensors inside what a module takes and returns: containers torch knows, and dataclasses, however nested; and the
autograd nodes put on them, which tell when a backward comes by.

torch's tree functions take a dataclass for a leaf unless somebody registered it. Models return such objects; a
gather for their backward hangs on the tensors inside (torch 2.13's FSDP2 looks into them as well).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vescale_fsdp.torch_private import pytree

TreeT = TypeVar("TreeT")
_SEQUENCES = (tuple, list)
_ATOMS = (type(None), bool, int, float, str, torch.Size)  # hold no tensors


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors of a tree, in a fixed order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    # Tuples, lists and dicts of tensors are what nearly every call passes, twice per unit and direction: torch's
    # tree functions describe the containers as well, which takes several times as long as this walk.
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif kind in _SEQUENCES:
        for item in tree:
            _collect(item, found)
    elif kind is dict:
        for item in tree.values():
            _collect(item, found)
    elif kind not in _ATOMS:
        leaves = pytree.tree_leaves(tree)
        if len(leaves) != 1 or leaves[0] is not tree:
            _collect(leaves, found)
        elif _is_dataclass(tree):
            _collect(_fields_of(tree), found)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: TreeT) -> TreeT:
    """The tree with ``function(tensor)`` for every tensor, in the order of `tensors_of`.

    A dataclass is replaced only if a tensor in it is: one without tensors keeps its identity.
    """
    return _convert(function, tree)  # type: ignore[no-any-return]


def _convert(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if kind in _SEQUENCES:
        return kind([_convert(function, item) for item in tree])
    if kind is dict:
        return {key: _convert(function, item) for key, item in tree.items()}
    if kind in _ATOMS:
        return tree
    leaves, spec = pytree.tree_flatten(tree)
    if len(leaves) != 1 or leaves[0] is not tree:
        return pytree.tree_unflatten(_convert(function, leaves), spec)
    return _map_fields(function, tree) if _is_dataclass(tree) else tree


def _map_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    before = _fields_of(value)
    after = {name: map_tensors(function, held) for name, held in before.items()}
    same = all(a is b for a, b in zip(tensors_of(before), tensors_of(after), strict=True))
    return value if same else dataclasses.replace(value, **after)


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class PostBackward(torch.autograd.Function):
    """Identity on the inputs of a module whose backward runs after everything inside, and calls ``callback()``."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.callback()
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, callback: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tangents


class PostBackwardInTransform(PostBackward):
    """The same in the form that ``torch.func`` can transform: calling it takes five times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(callback: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.callback = inputs[0]


class PreBackward(torch.autograd.Function):
    """Identity on an output whose backward runs before everything inside the module, as ``callback(grad)`` says."""

    generate_vmap_rule = True

    @staticmethod
    def forward(callback: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.callback = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, ctx.callback(grad)

    @staticmethod
    def jvp(ctx: Any, callback: None, tangent: torch.Tensor | None) -> Any:  # type: ignore[override]
        return None if tangent is None else PreBackward.apply(ctx.callback, tangent)
