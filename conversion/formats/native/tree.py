"""The state tree and the manifest of a native checkpoint that a conversion writes.

The module encodes values of plain types without torch. Other values are encoded as in live saves, which imports torch.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from vescale_fsdp.checkpoint.manifest.manifest import Manifest, build_manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json, join_name
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.state.nesting import Path, claim_name, nest
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum
from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.errors import CheckpointError, ConversionError, option
from vescale_fsdp.layout.distribution import RankSet


class _TensorLeaf(NamedTuple):
    """Placeholder of a tensor in the nested state; ``name`` is the tensor's name in the source."""

    name: str


def native_tree(
    state: CarriedState, file_order: Callable[[str], Any], reserved: Iterable[str] = ()
) -> tuple[Json, list[tuple[str, str]]]:
    """Return the state tree, and (stored name, name in the state) of every tensor, in file order.

    Tied tensors are listed once.

    Args:
        file_order: takes a tensor's name in the state; returns its sort key in the file. Tensors with equal keys stay
            in the tree's order.
        reserved: names that the file format uses for entries that are not tensors.

    Raises:
        ConversionError: if two tensors would have the same name in the format, or for values that it cannot store.
    """
    leaves: dict[Path, Any] = {state.path(name): _TensorLeaf(name) for name in state.views}
    leaves |= {state.path(name): read() for name, read in state.values.items()}
    tensors: list[tuple[str, str]] = []
    index_of: dict[str, int] = {}  # name in the state (of tied tensors: the first) -> index in `tensors`
    nodes: list[dict[str, Any]] = []
    taken = set(reserved)

    def tensor_node(stored_name: str, leaf: _TensorLeaf) -> Json:
        """Return the node of a tensor; list the tensor unless it is tied to a listed one."""
        first = state.aliases.get(leaf.name, leaf.name)
        if first not in index_of:
            claim_name(stored_name, taken)
            taken.add(stored_name)
            index_of[first] = len(tensors)
            tensors.append((stored_name, leaf.name))
        nodes.append({"$": "tensor", "i": index_of[first]})
        return nodes[-1]

    tree = _node(nest(leaves), "", tensor_node)
    order = sorted(range(len(tensors)), key=lambda index: file_order(tensors[index][1]))
    new_index = {old: new for new, old in enumerate(order)}
    for node in nodes:  # changed in place, so that a large tree is not copied
        node["i"] = new_index[node["i"]]
    return tree, [tensors[index] for index in order]


def _node(value: Any, name: str, tensor_node: Callable[[str, _TensorLeaf], Json]) -> Json:
    """Return the tree node of a value, equal to the node that `capture.encode` returns.

    Args:
        name: the keys of the value in the state, joined by ``/``.
    """
    # The exact type, because numpy.float64, for example, is a float, but has another node.
    kind = type(value)
    if kind is _TensorLeaf:
        return tensor_node(name, value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        # JSON has no NaN and no infinities.
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if kind is list or kind is tuple:
        items = [_node(item, join_name(name, index), tensor_node) for index, item in enumerate(value)]
        return items if kind is list else {"$": "tuple", "v": items}
    if isinstance(value, Mapping):
        nodes = [(key, _node(item, join_name(name, key), tensor_node)) for key, item in value.items()]
        # The key $ marks nodes that are not plain dicts, so a dict with a key that begins with $ is stored as pairs.
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(nodes)
        return {"$": "dict", "v": [[_node(key, f"{name} (a key)", tensor_node), item] for key, item in nodes]}
    from vescale_fsdp.checkpoint.state.capture import TreeSink, encode  # imports torch

    class NoLeaves(TreeSink):
        """Asserts that a value contains no tensors and no `PerRank` values."""

        def tensor(self, name: str, tensor: object) -> NoReturn:
            raise AssertionError(f"{name}: a tensor is not a value")

        def per_rank(self, name: str, value: object) -> NoReturn:
            raise AssertionError(f"{name}: a source has no per-rank values")

    try:
        return encode(value, name, NoLeaves())
    except CheckpointError as error:  # its advice is about live objects
        raise ConversionError(
            "A value cannot be written in this format.",
            expected=error.expected,
            got=error.got,
            where=error.where,
            todo=f"leave the value out with {option('exclude')}",
        ) from error


def native_manifest(
    form: str, structure: Structure, views: Iterable[TensorView], num_ranks: int, metadata: Json
) -> Manifest:
    """Return the manifest of a conversion's output.

    The save id is a checksum of the input instead of a random number. An interrupted conversion then writes the same
    file names when it is run again, and can be resumed.

    Args:
        form: part of the checksum, so that forms of the same input get different save ids.
        metadata: the user's JSON of the source.
    """
    identity = RunningChecksum(form.encode())
    identity.update(structure.document)
    for view in views:
        identity.update(view.identity().encode())
    ranks = RankSet.world(num_ranks)
    return build_manifest(
        [(ranks, structure)], save_id=identity.hexdigest(), world_size=num_ranks, metadata=metadata
    )
