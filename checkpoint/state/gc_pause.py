"""Pause Python's garbage collector during planning: its passes would take longer than the planning itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager: no cyclic garbage collection in the block. Plans create many small objects, but no cycles."""
    was_enabled = gc.isenabled()  # a caller may have disabled it
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
