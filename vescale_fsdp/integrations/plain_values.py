"""Selects and reads the values that a training stack saves in a checkpoint in addition to the shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vescale_fsdp.checkpoint.manifest.file_names import manifest_file
from vescale_fsdp.checkpoint.manifest.state_tree import Json, decode
from vescale_fsdp.checkpoint.native.read_state import CheckpointTensor, read_state
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.state.capture import TreeSink, encode
from vescale_fsdp.checkpoint.state.per_rank import PerRank
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError


class _AnySink(TreeSink):
    """A sink for `encode` that accepts every tensor and per-rank value and stores nothing."""

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        return None

    def per_rank(self, name: str, value: PerRank) -> Json:
        return None


def split_storable(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into those that a checkpoint can store, and all others. Returns two dicts."""
    stored, others = {}, {}
    for key, value in values.items():
        try:
            encode(value, key, _AnySink())  # a trial: nothing is stored
        except CheckpointError:  # raised by `encode` for a value that a checkpoint cannot store
            others[key] = value
        else:
            stored[key] = value
    return stored, others


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a path contains a checkpoint of this package. A collective, with the same result on all ranks.

    Raises:
        CheckpointError: if only some ranks find a checkpoint, as on a file system that is not shared.
    """
    alike: dict[str, Json] = {}  # its values are compared between ranks when the context ends
    with coordinator_for().together(f"looking for a checkpoint at {path}", "nothing was loaded", alike):
        alike["a manifest exists"] = manifest_file(open_storage(path)) is not None
    return bool(alike["a manifest exists"])


def read_values(path: str | os.PathLike[str], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Read top-level values of a checkpoint, with whole tensors. A collective: all ranks read the same values.

    Args:
        wanted: tells for each top-level key whether to read its value.

    Returns:
        The values by key.
    """
    with coordinator_for().together(f"reading values of {path}", "tensors were loaded"):
        reader = read_state(path)

        def leaf(node: Mapping[str, Any]) -> Any:
            if node["$"] != "tensor":  # a per-rank value is omitted, since ranks would read different values
                return None
            value = CheckpointTensor(reader, int(node["i"])).read()
            return value.numpy() if node.get("numpy") else value

        tree = reader.manifest.structure.tree
        return {key: decode(node, leaf, str(path)) for key, node in tree.items() if wanted(key)}
