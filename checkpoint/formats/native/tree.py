"""The state tree and the manifest of a conversion's native checkpoint.

Values of plain types are encoded here without torch; other values by the encoder of live saves, which imports torch.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from vescale_fsdp.checkpoint.manifest.distribution import RankSet
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, build_manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json, join_name
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.checkpoint.state.nesting import Path, claim_name, nest
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum


class _TensorLeaf(NamedTuple):
    """Stands for a tensor in the nested state; ``name`` is its name in the source."""

    name: str


def native_tree(
    state: CarriedState, file_order: Callable[[str], Any], reserved: Iterable[str] = ()
) -> tuple[Json, list[tuple[str, str]]]:
    """The tree, and (stored name, name in the state) of every tensor in file order; tied tensors are listed once.

    Args:
        file_order: sort key of a tensor, by its name in the state; tensors with equal keys stay in the tree's order.
        reserved: names that the format uses itself.

    Raises:
        ConversionError: if two tensors would have one name in the format.
        CheckpointError: for values that the format cannot hold.
    """
    leaves: dict[Path, Any] = {state.path(name): _TensorLeaf(name) for name in state.views}
    leaves |= {state.path(name): read() for name, read in state.values.items()}
    tensors: list[tuple[str, str]] = []
    index_of: dict[str, int] = {}  # by name in the state; of tied tensors, by the first name
    nodes: list[dict[str, Any]] = []
    taken = set(reserved)

    def tensor_node(stored_name: str, leaf: _TensorLeaf) -> Json:
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
    for node in nodes:  # in place: a large tree is not copied
        node["i"] = new_index[node["i"]]
    return tree, [tensors[index] for index in order]


def _node(value: Any, name: str, tensor_node: Callable[[str, _TensorLeaf], Json]) -> Json:
    """The node of a value, as `capture.encode` makes it; ``name`` is the value's keys in the state, joined by ``/``."""
    kind = type(value)  # the exact type: numpy's float64 is a float, and goes to the encoder of live saves
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
        # The key $ marks nodes that are not dicts, so a dict whose keys begin with it is stored as pairs.
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(nodes)
        return {"$": "dict", "v": [[_node(key, f"{name} (a key)", tensor_node), item] for key, item in nodes]}
    from vescale_fsdp.checkpoint.state.capture import TreeSink, encode  # imports torch

    class NoLeaves(TreeSink):
        def tensor(self, name: str, tensor: object) -> NoReturn:
            raise AssertionError(f"{name}: a tensor is not a value")

        def per_rank(self, name: str, value: object) -> NoReturn:
            raise AssertionError(f"{name}: a source has no per-rank values")

    return encode(value, name, NoLeaves())


def native_manifest(form: str, structure: Structure, views: Iterable[TensorView], num_ranks: int) -> Manifest:
    """The manifest of a conversion's output.

    Its save id, and so all file names, follows from the input, so that an interrupted run can be resumed.

    Args:
        form: text that distinguishes outputs of different layouts.
    """
    identity = RunningChecksum(form.encode())
    identity.update(structure.document)
    for view in views:
        identity.update(view.identity().encode())
    ranks = RankSet.world(num_ranks)
    return build_manifest([(ranks, structure)], save_id=identity.hexdigest(), world_size=num_ranks)
