"""Checksums of byte ranges that are read in pieces, by several readers."""

from __future__ import annotations

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.checkpoint.storage.checksums import CRC32
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.conversion.engine.verified_reads import CheckedRange, VerifiedReads
from vescale_fsdp.errors import CorruptCheckpointError

DATA = bytes(range(100)) * 2
CUTS = st.lists(st.tuples(st.integers(0, 199), st.integers(1, 200)), max_size=12)


@given(CUTS, st.sets(st.sampled_from([0, 40, 41, 150])), st.none() | st.integers(0, 199))
def test_pieces_in_any_order_prove_a_run_once_all_are_read(
    cuts: list[tuple[int, int]], starts: set[int], flipped: int | None
) -> None:
    """Whatever overlaps or is left out: what is unread is the rest, and reading it decides."""
    data = bytearray(DATA)
    if flipped is not None:
        data[flipped] ^= 1
    bounds = sorted({*starts, 180})
    spans = [(a, b) for a, b in pairwise(bounds) if b - a != 109]  # one gap between runs
    runs = [
        CheckedRange("f", a, b - a, CRC32, lambda a=a, b=b: zlib.crc32(DATA[a:b]), "here") for a, b in spans
    ]  # type: ignore[misc]
    checks = VerifiedReads(LocalStorage("."), lambda _: None)
    for run in runs:
        checks.add(run)
    damaged = {r.start for r in runs if flipped is not None and r.start <= flipped < r.stop}
    refused = set()
    for start, nbytes in cuts:
        try:
            checks.note("f", start, memoryview(data)[start : start + nbytes])
        except CorruptCheckpointError:
            refused |= damaged
    for run in runs:
        try:
            for _ in range(20):
                for _, start, nbytes in checks.unread(run):
                    checks.note("f", start, memoryview(data)[start : start + nbytes])
            assert checks.unread(run) == []
        except CorruptCheckpointError:
            refused.add(run.start)
    assert refused == damaged
