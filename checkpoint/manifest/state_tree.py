"""The state tree: a nesting of containers and values as JSON, which refers to tensors and per-rank values.

Plain values are JSON values. Other values are JSON objects with a ``"$"`` key:

    {"$": "tensor", "i": 7}     tensor number 7                      {"$": "per_rank", "name": "rng"}
    {"$": "tuple", "v": [..]}   also set, frozenset                  {"$": "dict", "v": [[key, value], ..]}
    {"$": "float", "v": "nan"}  also "inf", "-inf"                   {"$": "bytes", "v": base64}
    {"$": "complex", "v": [re, im]}   {"$": "dtype", "v": "int8"}    {"$": "device", "v": "cpu"}
    {"$": "absent"}             a tensor whose mesh does not include this rank

A ``bytearray`` is stored as bytes with ``"array": true``. Nothing is pickled, so that opening a checkpoint cannot run
code from it. `decode` reads nodes, `state.capture` writes them. torch and numpy are imported only for values of their
types.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named, is_numpy_dtype
from vescale_fsdp.errors import CorruptCheckpointError

Json = Any
# Maximum depth of nested containers that a save accepts. A load needs more stack per level: it could not load deeper
# states.
MAX_DEPTH = 100
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def child_name(parent: str, key: object) -> str:
    """Return the name of a child for arguments, reports and messages: keys joined by dots."""
    return f"{parent}.{key}" if parent else str(key)


def join_name(parent: str, key: object) -> str:
    """Return the name of a child in files: keys joined by ``/``; in keys, ``~`` and ``/`` become ``~0`` and ``~1``.

    Different paths of text keys give different names. With dots, ``{"a.b": x}`` and ``{"a": {"b": x}}`` give one name.
    """
    text = str(key).replace("~", "~0").replace("/", "~1")  # ~ first, or the escapes would be escaped
    return f"{parent}/{text}" if parent else text


def split_name(name: str) -> tuple[str, ...]:
    """Return the keys, as text, that `join_name` has joined."""
    # ~0 last, because ~01 is the escape of a key's "~1".
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))


def dotted_name(name: str) -> str:
    """Return the name with dots for a name from `join_name`."""
    return ".".join(split_name(name))


def decode(node: Json, tensor: Callable[[Mapping[str, Any]], Any], where: str = "manifest") -> Any:
    """Return the value of a node.

    Args:
        tensor: called with each tensor leaf, per-rank leaf and absent leaf; returns the leaf's value.

    Raises:
        CorruptCheckpointError: for a node of unknown kind.
        ValueError, TypeError: for nodes with malformed content; `Manifest.from_bytes` refuses such nodes.
    """
    if isinstance(node, list):
        return [decode(item, tensor, where) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: decode(item, tensor, where) for key, item in node.items()}
    kind, value = node["$"], node.get("v")
    if kind in ("tensor", "per_rank", "absent"):
        return tensor(node)
    if kind == "dict" and isinstance(value, list):
        decoded = {decode(key, tensor, where): decode(item, tensor, where) for key, item in value}
        if len(decoded) != len(value):
            raise ValueError("a key occurs twice")
        return decoded
    if isinstance(kind, str) and kind in _SEQUENCES and isinstance(value, list):
        return _SEQUENCES[kind]([decode(item, tensor, where) for item in value])
    if kind == "float" and value in ("nan", "inf", "-inf"):
        return float(value)
    if kind == "bytes" and isinstance(value, str):
        # Without `validate`, b64decode skips characters that are not base64, and damage would go unnoticed.
        data = base64.b64decode(value, validate=True)
        return bytearray(data) if node.get("array") is True else data
    if kind == "complex" and isinstance(value, list):
        return complex(*(decode(part, tensor, where) for part in value))
    if kind == "dtype" and isinstance(value, str):
        return dtype_named(value)
    if kind == "device" and isinstance(value, str):
        import torch

        return torch.device(value)
    if kind == "numpy" and is_numpy_dtype(str(node.get("dtype"))):
        import numpy as np

        return np.dtype(node["dtype"]).type(decode(value, tensor, where))
    raise CorruptCheckpointError(
        "The state tree has a node of unknown kind.",
        expected="a kind that FORMAT.md lists",
        got=kind,
        where=where,
    )


def depth_of(value: Json) -> int:
    """Return the number of levels of containers in a JSON value; 0 for a value that is not a container."""
    if not isinstance(value, (list, dict)):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


def has_tensors(node: Json) -> bool:
    """Return whether a node is or contains a tensor leaf, a per-rank leaf or an absent leaf."""
    if isinstance(node, list):
        return any(has_tensors(item) for item in node)
    if not isinstance(node, Mapping):
        return False
    if node.get("$") in ("tensor", "per_rank", "absent"):
        return True
    return any(has_tensors(item) for item in node.values() if isinstance(item, (list, Mapping)))
