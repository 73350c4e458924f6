"""Tensors inside what a module takes and returns: containers torch knows, and dataclasses, however nested.

torch's tree functions take a dataclass for a leaf unless somebody registered it. Models return such objects; a
gather for their backward hangs on the tensors inside (torch 2.13's FSDP2 looks into them as well).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vescale_fsdp.torch_private import pytree

__all__ = ["map_tensors", "tensors_of"]

TreeT = TypeVar("TreeT")


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors of a tree, in a fixed order."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif _is_dataclass(leaf):
            found += tensors_of(_fields_of(leaf))
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: TreeT) -> TreeT:
    """The tree with ``function(tensor)`` for every tensor, in the order of `tensors_of`.

    A dataclass is replaced only if a tensor in it is: one without tensors keeps its identity.
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        return _map_fields(function, leaf) if _is_dataclass(leaf) else leaf

    return pytree.tree_map(convert, tree)  # type: ignore[no-any-return]


def _map_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    before = _fields_of(value)
    after = {name: map_tensors(function, held) for name, held in before.items()}
    same = all(a is b for a, b in zip(tensors_of(before), tensors_of(after), strict=True))
    return value if same else dataclasses.replace(value, **after)


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
