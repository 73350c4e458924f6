"""Reading JSON that others wrote; and values that are no tensors, as JSON that gives them back with their types.

JSON stands for itself; what it lacks is an object with the single key ``$``: tuples, bytes, special floats,
and dicts whose keys are no strings (or that look like such an object).
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, explain

__all__ = ["from_json", "parse_json", "to_json"]


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


def to_json(value: Any, *, where: str) -> Any:
    """Plain JSON for a value.

    Raises:
        ConversionError: for anything but None, bool, numbers, strings, bytes, lists, tuples and dicts.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$": ["float", repr(value)]}
    if isinstance(value, bytes):
        return {"$": ["bytes", base64.b64encode(value).decode()]}
    if isinstance(value, list):
        return [to_json(item, where=where) for item in value]
    if isinstance(value, tuple):
        return {"$": ["tuple", [to_json(item, where=where) for item in value]]}
    if isinstance(value, dict):
        pairs = [(to_json(k, where=where), to_json(v, where=where)) for k, v in value.items()]
        if all(isinstance(key, str) and key != "$" for key in value):
            return dict(pairs)
        return {"$": ["dict", [list(pair) for pair in pairs]]}
    raise ConversionError(
        explain(
            "a value cannot be written as JSON",
            expected="numbers, strings, bytes, lists, tuples and dicts",
            got=f"{type(value).__module__}.{type(value).__qualname__}",
            where=where,
            todo="leave the value out with --exclude",
        )
    )


def from_json(data: Any) -> Any:
    """The value `to_json` was given.

    Raises:
        CorruptCheckpointError: for an unknown marker.
    """
    if isinstance(data, list):
        return [from_json(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$" not in data:
        return {key: from_json(value) for key, value in data.items()}
    match data["$"]:
        case ["float", str(text)]:
            return float(text)
        case ["bytes", str(text)]:
            return base64.b64decode(text)
        case ["tuple", list(items)]:
            return tuple(from_json(item) for item in items)
        case ["dict", list(pairs)]:
            return {from_json(key): from_json(value) for key, value in pairs}
    raise CorruptCheckpointError(
        explain(
            "a stored value is damaged", expected="a known marker", got=data["$"], todo="use another copy"
        )
    )
