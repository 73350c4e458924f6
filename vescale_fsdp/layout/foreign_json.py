"""Parse untrusted JSON and check the sizes in it. Repeated keys, non-integers and deep nesting raise ValueError."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

MAX_DIMS = 64  # most dims of a tensor, as in numpy and in torch's kernels
_LIMIT = 2**63  # sizes and offsets are below this, as in all libraries that read these files
# The escape of a surrogate, such as \ud83d. JSON may contain one without its partner, which is no valid character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, *, is_text: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        data: the text, or its bytes.
        is_text: refuse strings with an unpaired surrogate, as Rust's parsers do. Such strings have no UTF-8 encoding.

    Raises:
        ValueError: if the text is not JSON, is nested too deeply, or repeats a key in one object. Of a repeated key,
            some readers use the first value and others the last.
    """
    if is_text and isinstance(data, bytes):
        # `decode` is strict, while `json.loads` lets encoded surrogates pass.
        data = data.decode(json.detect_encoding(data))
    try:
        value = json.loads(data, object_pairs_hook=_unique)
        if is_text and isinstance(data, str) and _SURROGATE.search(data):
            # `encode` raises UnicodeEncodeError, a ValueError, for an unpaired surrogate.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:  # callers treat bad input as ValueError
        raise ValueError("nested too deeply") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. A plain ``dict`` would keep the last of two equal keys."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def whole_numbers(values: Iterable[Any], count: int | None = None) -> tuple[int, ...]:
    """Return sizes or offsets from a file as integers. Floats are not rounded, and ``true`` is not a number.

    Raises:
        ValueError: for anything but integers from 0 to 2**63 - 1, or if their number is not ``count``.
    """
    numbers = values if type(values) is tuple else tuple(values)
    # Iterating a str or dict would give characters or keys. `type` instead of isinstance, because True is an int.
    if isinstance(values, (str, dict)) or any(type(n) is not int or not 0 <= n < _LIMIT for n in numbers):
        # The message is cut to 80 characters, because a file may contain a value of any length.
        raise ValueError(f"{values!r:.80} are not sizes")
    if count is not None and len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers instead of {count}")
    return numbers


def tensor_shape(values: Iterable[Any]) -> tuple[int, ...]:
    """Return the shape of a tensor from a file, after all bounds are checked.

    Raises:
        ValueError: for anything but integers, for more than `MAX_DIMS` sizes, or if the product of the non-zero sizes
            is 2**63 or more. Zero sizes are skipped, because numpy and torch skip them when they compute strides.
    """
    # `whole_numbers` refuses str and dict.
    sizes = values if isinstance(values, (tuple, str, dict)) else tuple(values)
    if len(sizes) > MAX_DIMS:  # checked first, because a file may list any number of sizes
        raise ValueError(f"{len(sizes)} dims, of at most {MAX_DIMS}")
    shape = whole_numbers(sizes)
    if math.prod(size or 1 for size in shape) >= _LIMIT:
        raise ValueError(f"{shape!r:.80} has 2**63 elements or more")
    return shape
