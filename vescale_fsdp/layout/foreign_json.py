"""Untrusted JSON: parsing and checks of sizes. Repeated keys, non-integers and deep nesting are refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

MAX_DIMS = 64  # of a tensor, as in numpy and in torch's kernels
_LIMIT = 2**63  # of sizes and offsets, as in all libraries that read these files
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, *, is_text: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        is_text: refuse strings with an unpaired surrogate, which have no UTF-8 encoding (as Rust's parsers do).

    Raises:
        ValueError: if it is not JSON, is nested too deeply, or repeats a key in one object (readers would differ in
            which of the two values they use).
    """
    if is_text and isinstance(data, bytes):
        data = data.decode(json.detect_encoding(data))  # strict; `json.loads` lets surrogates pass
    try:
        value = json.loads(data, object_pairs_hook=_unique)
        if is_text and isinstance(data, str) and _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # raises for an unpaired one
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def whole_numbers(values: Iterable[Any], count: int | None = None) -> tuple[int, ...]:
    """Sizes or offsets from a file, as integers: nothing is rounded, and ``true`` is not a number.

    Raises:
        ValueError: for anything but integers from 0 to 2**63 - 1, or if there are not ``count`` of them.
    """
    numbers = values if type(values) is tuple else tuple(values)
    # Iterating text or a dict would give characters or keys. `type`, not isinstance, because True is an int.
    if isinstance(values, (str, dict)) or any(type(n) is not int or not 0 <= n < _LIMIT for n in numbers):
        raise ValueError(f"{values!r:.80} are not sizes")  # .80: a file may contain a value of any length
    if count is not None and len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers instead of {count}")
    return numbers


def tensor_shape(values: Iterable[Any]) -> tuple[int, ...]:
    """The shape of a tensor from a file, checked against bounds before any use.

    Raises:
        ValueError: for anything but integers, for more than `MAX_DIMS` of them, or if the product of the non-zero ones
            is 2**63 or more. Zeros are left out because numpy and torch leave them out of strides.
    """
    sizes = values if isinstance(values, (tuple, str, dict)) else tuple(values)
    if len(sizes) > MAX_DIMS:  # checked first, because there may be any number of sizes
        raise ValueError(f"{len(sizes)} dims, of at most {MAX_DIMS}")
    shape = whole_numbers(sizes)
    if math.prod(size or 1 for size in shape) >= _LIMIT:
        raise ValueError(f"{shape!r:.80} has 2**63 elements or more")
    return shape
