"""JSON that others wrote, of which nothing is believed: keys that occur twice, numbers that are none, nesting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

MAX_DIMS = 64  # of a tensor, as in numpy and in torch's kernels
_LIMIT = 2**63  # of sizes and offsets, as in every library that reads these files
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, *, is_text: bool = False) -> Any:
    """What a JSON text stands for.

    Args:
        is_text: refuse strings with half of a surrogate pair, which have no UTF-8 (as Rust's parsers do).

    Raises:
        ValueError: if it is none, nested deeper than a parser can follow, or has a key twice in one object, of
            which readers may take one or the other.
    """
    if is_text and isinstance(data, bytes):
        data = data.decode(json.detect_encoding(data))
    try:
        found = json.loads(data, object_pairs_hook=_unique)
        if is_text and isinstance(data, str) and _SURROGATE.search(data):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return found


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


def tensor_shape(values: Iterable[Any]) -> tuple[int, ...]:
    """The shape of a tensor, bounded before anything is computed of it.

    Raises:
        ValueError: for anything but whole numbers, more than `MAX_DIMS` of them, or sizes whose product (zeros left
            out, as numpy and torch compute strides) is 2**63 or more.
    """
    found = values if type(values) is tuple else tuple(values)
    if len(found) > MAX_DIMS:
        raise ValueError(f"{len(found)} dims, of at most {MAX_DIMS}")
    numel = 1
    for size in whole_numbers(found):
        numel *= size or 1
    if numel >= _LIMIT:
        raise ValueError(f"{found!r:.80} has 2**63 elements or more")
    if isinstance(values, (str, dict)):
        raise ValueError(f"{values!r:.80} are no sizes")
    return found
