"""JSON that others wrote, of which nothing is believed: keys that occur twice, numbers that are none, nesting."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["parse_json", "whole_numbers"]

_LIMIT = 2**63  # of sizes and offsets, as in every library that reads these files


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


def whole_numbers(values: Iterable[Any], count: int | None = None) -> tuple[int, ...]:
    """Sizes or offsets as a file has them: nothing is rounded, and true is not a number.

    Raises:
        ValueError: for anything but whole numbers from 0 to 2**63 - 1, or another count of them.
    """
    found = values if type(values) is tuple else tuple(values)
    for number in found:
        if type(number) is not int or not 0 <= number < _LIMIT:
            raise ValueError(f"{found!r:.80} are no sizes")
    if isinstance(values, (str, dict)):
        raise ValueError(f"{values!r:.80} are no sizes")
    if count is not None and len(found) != count:
        raise ValueError(f"{len(found)} numbers instead of {count}")
    return found
