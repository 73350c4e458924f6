"""Reading JSON that others wrote; and values that are no tensors, as nodes of a native checkpoint's state tree.

Plain kinds are written here, since the engine's own encoder needs torch; all other kinds go to it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from vescale_fsdp.checkpoint.manifest.state_tree import Json, join_name
from vescale_fsdp.errors import CorruptCheckpointError, explain

__all__ = ["from_json_1", "parse_json", "to_node"]


def parse_json(data: bytes | str) -> Any:
    """What a JSON text stands for.

    Raises:
        ValueError: if it is none, nested deeper than a parser can follow, or has a key twice in one object, of
            which readers may take one or the other.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def to_node(value: Any, name: str, tensor: Callable[[str, Any], Json | None]) -> Json:
    """The node of a value, as `checkpoint.encoding.encode` makes it.

    Args:
        name: where it is, keys joined by ``/``.
        tensor: asked first, with the name and the value: the node if the value stands for a tensor, else None.

    Raises:
        CheckpointError: for kinds that have no encoding.
    """
    node = tensor(name, value)
    if node is not None:
        return node
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if kind is list or kind is tuple:
        items = [to_node(item, join_name(name, place), tensor) for place, item in enumerate(value)]
        return items if kind is list else {"$": "tuple", "v": items}
    if isinstance(value, Mapping):
        nodes = [(key, to_node(item, join_name(name, key), tensor)) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(nodes)
        return {"$": "dict", "v": [[to_node(key, f"{name} (a key)", tensor), item] for key, item in nodes]}
    return _rare_node(value, name)


def _rare_node(value: Any, name: str) -> Json:
    from vescale_fsdp.checkpoint.state.encode import TreeSink, encode  # brings torch

    class NoLeaves(TreeSink):
        def tensor(self, name: str, tensor: object) -> NoReturn:
            raise AssertionError(f"{name}: a tensor is no value")

        def per_rank(self, name: str, value: object) -> NoReturn:
            raise AssertionError(f"{name}: a source has no per-rank values")

    return encode(value, name, NoLeaves())


def from_json_1(data: Any) -> Any:
    """A value as to-zarr wrote it before it wrote native checkpoints.

    JSON stands for itself; what it lacks is an object with the single key ``$``: tuples, bytes, special floats,
    and dicts whose keys are no strings (or that look like such an object).

    Raises:
        CorruptCheckpointError: for an unknown marker.
    """
    if isinstance(data, list):
        return [from_json_1(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$" not in data:
        return {key: from_json_1(value) for key, value in data.items()}
    match data["$"]:
        case ["float", str(text)]:
            return float(text)
        case ["bytes", str(text)]:
            return base64.b64decode(text)
        case ["tuple", list(items)]:
            return tuple(from_json_1(item) for item in items)
        case ["dict", list(pairs)]:
            return {from_json_1(key): from_json_1(value) for key, value in pairs}
    raise CorruptCheckpointError(
        explain(
            "A stored value is damaged.", expected="a known marker", got=data["$"], todo="use another copy"
        )
    )
