"""The number of threads that copy."""

from __future__ import annotations

from vescale_fsdp.conversion.engine.copying import CopyLimits


def test_threads_have_an_end() -> None:
    """Whatever is asked for, and however large the budget."""
    assert CopyLimits(1 << 60, threads=10**9).usable_threads == 1024
    assert CopyLimits(1 << 60, threads=7).usable_threads == 7
