"""What the page cache holds of a file, asked of a few pages by mincore(2).

The question starts no read-ahead, unlike a read that does not wait.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

_MIN_BYTES = 1 << 20  # 1 MiB: less is not worth the question
_SAMPLES = 4


@cache
def _mincore() -> Callable[..., int] | None:
    try:
        found = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return found  # type: ignore[no-any-return]


def is_cached(path: Path, start: int, stop: int) -> bool:
    """Whether the page cache holds most of a range of a file, judged by a few pages; True where nobody can tell."""
    mincore = _mincore()
    if mincore is None or stop - start < _MIN_BYTES:
        return True
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A private copy, of which nothing is ever written: ctypes tells the address of nothing that is read-only.
        pages = mmap.mmap(file, stop - first, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError):
        return True
    finally:
        os.close(file)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    num_pages, held = (stop - first) // mmap.PAGESIZE, 0
    for sample in range(_SAMPLES):
        answer = ctypes.create_string_buffer(1)
        at = (2 * sample + 1) * num_pages // (2 * _SAMPLES) * mmap.PAGESIZE
        held += mincore(address + at, mmap.PAGESIZE, answer) != 0 or answer.raw[0] & 1
    return 2 * held >= _SAMPLES
