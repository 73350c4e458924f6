"""Tensors inside a module's inputs and outputs, and autograd nodes that call a function when a backward reaches them.

Inputs and outputs are nested containers of the kinds that torch's tree functions know, and dataclasses. The tree
functions treat a dataclass as a leaf unless it was registered. But models return dataclasses, and the hooks that gather
parameters for the backward must be on the tensors inside (torch 2.13's FSDP2 searches dataclasses, too).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vescale_fsdp.torch_private import pytree

TreeT = TypeVar("TreeT")
_SEQUENCES = (tuple, list)  # not subclasses: the constructor of a named tuple takes its fields, not one list
_ATOMS = (type(None), bool, int, float, str, torch.Size)  # types without tensors inside


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return all tensors of a tree, in a fixed order."""
    tensors: list[torch.Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[torch.Tensor]) -> None:
    """Append all tensors of a tree to ``tensors``."""
    # Tuples, lists and dicts have a fast path, because nearly all trees consist of them, and each unit goes through
    # several trees per step. torch's tree functions also describe the containers, which takes several times as long.
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
    elif kind in _SEQUENCES:
        for item in tree:
            _collect(item, tensors)
    elif kind is dict:
        for item in tree.values():
            _collect(item, tensors)
    elif kind not in _ATOMS:
        leaves = pytree.tree_leaves(tree)
        if len(leaves) != 1 or leaves[0] is not tree:  # a container: a leaf is its own only leaf
            _collect(leaves, tensors)
        elif _is_dataclass(tree):
            _collect(_fields_of(tree), tensors)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: TreeT) -> TreeT:
    """Return the tree with ``function(tensor)`` in place of every tensor; called in the order of `tensors_of`.

    A dataclass is copied only if one of its tensors is replaced; otherwise the result contains the same object.
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
    if len(leaves) != 1 or leaves[0] is not tree:  # a container: a leaf is its own only leaf
        return pytree.tree_unflatten(_convert(function, leaves), spec)
    if not _is_dataclass(tree):
        return tree
    before = _fields_of(tree)
    after = {name: _convert(function, value) for name, value in before.items()}
    same = all(a is b for a, b in zip(tensors_of(before), tensors_of(after), strict=True))
    return tree if same else dataclasses.replace(tree, **after)


def _fields_of(value: Any) -> dict[str, Any]:
    # Without fields that __init__ does not take, which `dataclasses.replace` refuses.
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _is_dataclass(value: Any) -> bool:
    # `is_dataclass` is also True for a class, which has no field values.
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class PostBackward(torch.autograd.Function):
    """The identity on a module's inputs. Its backward runs after the module's backward, and calls ``callback()``."""

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
    """`PostBackward` in a form that ``torch.func`` can transform; a call takes five times as long as without it."""

    # torch.func requires a separate `setup_context`; torch.vmap also requires this flag or a rule of its own.
    generate_vmap_rule = True

    @staticmethod
    def forward(callback: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.callback = inputs[0]


class PreBackward(torch.autograd.Function):
    """The identity on a module's output. Its backward runs before the module's, and calls ``callback(grad)``."""

    generate_vmap_rule = True  # torch.vmap requires this flag or a rule of its own

    @staticmethod
    def forward(callback: Callable[[torch.Tensor], None], output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.callback = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        ctx.callback(grad)
        return None, grad

    @staticmethod
    def jvp(ctx: Any, callback: None, tangent: torch.Tensor | None) -> Any:  # type: ignore[override]
        return None if tangent is None else PreBackward.apply(ctx.callback, tangent)
