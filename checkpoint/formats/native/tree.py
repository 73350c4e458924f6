"""The state tree of a native checkpoint, made from a state that is carried over.

Plain kinds of values are written here, since the engine's own encoder needs torch; all other kinds go to it.
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
    """Stands for a tensor while the tree is made."""

    name: str  # in the state


def native_tree(
    state: CarriedState, file_order: Callable[[str], Any], reserved: Iterable[str] = ()
) -> tuple[Json, list[tuple[str, str]]]:
    """The tree, and (name in the format, name in the state) of every tensor in file order; tied ones are one.

    Args:
        state: what is carried over.
        file_order: sort key of a tensor, by its name in the state; equal ones stay in the order of the tree.
        reserved: names that the format keeps for itself.

    Raises:
        ConversionError: if two tensors would have one name in the format.
        CheckpointError: for values that the format cannot hold.
    """
    leaves: dict[Path, Any] = {state.path(name): _TensorLeaf(name) for name in state.views}
    leaves |= {state.path(name): read() for name, read in state.values.items()}
    found: list[tuple[str, str]] = []
    numbers: dict[str, int] = {}
    nodes: list[dict[str, Any]] = []
    taken = set(reserved)

    def number(name: str, leaf: _TensorLeaf) -> Json:
        first = state.aliases.get(leaf.name, leaf.name)
        if first not in numbers:
            claim_name(name, taken)
            taken.add(name)
            numbers[first] = len(found)
            found.append((name, leaf.name))
        nodes.append({"$": "tensor", "i": numbers[first]})
        return nodes[-1]

    tree = _node(nest(leaves), "", number)
    order = sorted(range(len(found)), key=lambda place: file_order(found[place][1]))
    number_of = {old: new for new, old in enumerate(order)}
    for node in nodes:  # in place: a copy of a large tree is large
        node["i"] = number_of[node["i"]]
    return tree, [found[place] for place in order]


def _node(value: Any, name: str, number: Callable[[str, _TensorLeaf], Json]) -> Json:
    """The node of a value, as the engine's `encode` makes it; ``name`` is where it is, keys joined by ``/``."""
    kind = type(value)
    if kind is _TensorLeaf:
        return number(name, value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if kind is list or kind is tuple:
        items = [_node(item, join_name(name, place), number) for place, item in enumerate(value)]
        return items if kind is list else {"$": "tuple", "v": items}
    if isinstance(value, Mapping):
        nodes = [(key, _node(item, join_name(name, key), number)) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(nodes)
        return {"$": "dict", "v": [[_node(key, f"{name} (a key)", number), item] for key, item in nodes]}
    return _rare_node(value, name)


def _rare_node(value: Any, name: str) -> Json:
    from vescale_fsdp.checkpoint.state.capture import TreeSink, encode  # brings torch

    class NoLeaves(TreeSink):
        def tensor(self, name: str, tensor: object) -> NoReturn:
            raise AssertionError(f"{name}: a tensor is no value")

        def per_rank(self, name: str, value: object) -> NoReturn:
            raise AssertionError(f"{name}: a source has no per-rank values")

    return encode(value, name, NoLeaves())


def native_manifest(form: str, structure: Structure, views: Iterable[TensorView], num_ranks: int) -> Manifest:
    """The manifest of a result; the same input makes the same names, so that an interrupted run can go on."""
    identity = RunningChecksum(form.encode())
    identity.update(structure.document)
    for view in views:
        identity.update(view.identity().encode())
    ranks = RankSet.world(num_ranks)
    return build_manifest([(ranks, structure)], save_id=identity.hexdigest(), world_size=num_ranks)
