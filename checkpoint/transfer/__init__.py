"""Transfers of tensors between running ranks. Here: the links that say what target tensors are made of.

links = {"qkv.weight": concatenate("q.weight", "k.weight", "v.weight")}
plan = vescale_fsdp.plan_transfer(source, target, links=links)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.transfer.links import (
        codes,
        concatenate,
        index,
        permute,
        scales,
        slice,
        stack,
    )

__all__ = ["codes", "concatenate", "index", "permute", "scales", "slice", "stack"]

lazily_export(
    __name__,
    {"vescale_fsdp.checkpoint.transfer.links": "codes concatenate index permute scales slice stack"},
)
