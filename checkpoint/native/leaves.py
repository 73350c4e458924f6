"""`NativeLeaves`: the leaves of a native checkpoint by flattened name, as its manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.manifest.fingerprints import Fingerprint, TensorFingerprint
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import decode
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.state.nesting import flatten, name_of


class _NumberedTensor(NamedTuple):
    """A tensor leaf of the decoded state; ``place`` is its number in the structure."""

    place: int


class _PerRankLeaf(NamedTuple):
    """A `PerRank` leaf of the decoded state."""

    name: str


class NativeLeaves:
    """The leaves of a native checkpoint's state, by flattened name.

    Args:
        structure: contains the state's tree.
        where: the checkpoint's path, for messages.

    Attributes:
        tensors: name -> number of the tensor in the structure.
        values: name -> leaf that is not a tensor.
        paths: name -> path of the leaf in the nested state.
        per_rank: names of `PerRank` values, which only native checkpoints can store.
    """

    def __init__(self, structure: Structure, where: str) -> None:
        self.tensors: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.per_rank: list[str] = []
        state = decode(structure.tree, _leaf, where)
        # A state that is a list or a single tensor gets a key, so that every leaf has a name.
        nested = state if isinstance(state, Mapping) else {"state": state}
        for path, leaf in flatten(
            nested, lambda value: isinstance(value, (_NumberedTensor, _PerRankLeaf))
        ).items():
            name = name_of(path)
            self.paths[name] = path
            if isinstance(leaf, _NumberedTensor):
                self.tensors[name] = leaf.place
            elif isinstance(leaf, _PerRankLeaf):
                self.per_rank.append(name)
            else:
                self.values[name] = leaf


def _leaf(node: Mapping[str, Any]) -> Any:
    """Return the leaf for a node of the state tree; None for a tensor that is absent."""
    if node["$"] == "tensor":
        return _NumberedTensor(int(node["i"]))
    return _PerRankLeaf(str(node["name"])) if node["$"] == "per_rank" else None


def fingerprint_in(manifest: Manifest, sums: Sequence[str]) -> Fingerprint:
    """Return the fingerprints of a manifest's tensor leaves, from the sums of its tensors."""
    entries = manifest.entries
    leaves = NativeLeaves(manifest.structure, "the state").tensors
    return Fingerprint(
        {
            name: TensorFingerprint(entries[index].dtype, entries[index].shape, sums[index])
            for name, index in leaves.items()
        }
    )
