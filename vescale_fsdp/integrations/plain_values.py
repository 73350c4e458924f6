"""Selects and reads the values of a training stack that are saved next to the shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vescale_fsdp.checkpoint.formats.read_state import CheckpointTensor, read_state
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.state_tree import Json, decode
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.state.capture import TreeSink, encode
from vescale_fsdp.checkpoint.state.per_rank import PerRank
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError


class _AnySink(TreeSink):
    """Accepts every tensor and per-rank value, and stores none."""

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        return None

    def per_rank(self, name: str, value: PerRank) -> Json:
        return None


def split_storable(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into those that a checkpoint can store and all others."""
    stored, others = {}, {}
    for key, value in values.items():
        try:
            encode(value, key, _AnySink())
        except CheckpointError:  # raised by `encode` for values that a checkpoint cannot store
            others[key] = value
        else:
            stored[key] = value
    return stored, others


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path contains a checkpoint of this package, on all ranks. A collective.

    Raises:
        CheckpointError: if only some ranks see a checkpoint.
    """
    alike: dict[str, Json] = {}  # compared among the ranks when the context ends
    with coordinator_for().together(f"looking for a checkpoint at {path}", "nothing was loaded", alike):
        alike["manifest.json exists"] = open_storage(path).exists(MANIFEST_NAME)
    return bool(alike["manifest.json exists"])


def read_values(path: str | os.PathLike[str], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Top-level values of a checkpoint by key, with whole tensors. A collective: all ranks read the same values."""
    with coordinator_for().together(f"reading values of {path}", "tensors were loaded"):
        reader = read_state(path)

        def leaf(node: Mapping[str, Any]) -> Any:
            if node["$"] != "tensor":  # a per-rank value, which is not the same on all ranks
                return None
            value = CheckpointTensor(reader, int(node["i"])).read()
            return value.numpy() if node.get("numpy") else value

        tree = reader.manifest.structure.tree
        return {key: decode(node, leaf, str(path)) for key, node in tree.items() if wanted(key)}
