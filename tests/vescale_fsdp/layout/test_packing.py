"""Packing against brute force: greedy placement is exact, folding changes nothing, gaps are what is free."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vescale_fsdp.layout.group_layout import PieceRun
from vescale_fsdp.layout.packing import (
    RepeatedSizes,
    TensorSize,
    fold_repeats,
    free_gaps,
    place_in_order,
    place_scattered,
    starts_of,
)

ALL_SIZES = [TensorSize(numel, block) for numel in range(1, 7) for block in range(1, numel + 1)]


def fits(sizes: list[TensorSize], num_shards: int, shard_numel: int, start: int = 0) -> bool:
    """Whether any starts, tried one after the other, place the tensors in this order without a cut block."""
    if not sizes:
        return True
    (numel, block), rest = sizes[0], sizes[1:]
    for begin in range(start, num_shards * shard_numel - numel + 1):
        boundaries = range(-(-(begin + 1) // shard_numel) * shard_numel, begin + numel, shard_numel)
        whole = all((boundary - begin) % block == 0 for boundary in boundaries)
        if whole and fits(rest, num_shards, shard_numel, begin + numel):
            return True
    return False


@pytest.mark.parametrize("shard_numel", range(1, 9))
def test_greedy_placement_is_exact(shard_numel: int) -> None:
    """For a fixed order and S, earliest legal starts exist exactly where some starts do: all pairs of sizes."""
    for sizes in itertools.product(ALL_SIZES, repeat=2):
        for num_shards in range(1, 5):
            placed = place_in_order(fold_repeats(sizes, 1), num_shards, shard_numel, 1)
            assert (placed is not None) == fits(list(sizes), num_shards, shard_numel), (sizes, num_shards)


@given(st.lists(st.sampled_from(ALL_SIZES), min_size=3, max_size=4), st.integers(1, 6), st.integers(1, 10))
def test_greedy_placement_is_exact_for_more_tensors(
    sizes: list[TensorSize], num_shards: int, shard_numel: int
) -> None:
    """The same for three and four tensors, sampled."""
    placed = place_in_order(fold_repeats(sizes, 1), num_shards, shard_numel, 1)

    assert (placed is not None) == fits(sizes, num_shards, shard_numel)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 60),
    st.sampled_from([1, 2, 4]),
)
def test_folding_repetitions_changes_no_start(
    part: list[tuple[int, int]], repeats: int, num_shards: int, shard_units: int, align: int
) -> None:
    """Sizes folded into patterns are placed exactly like the same sizes one by one."""
    sizes = [TensorSize(numel * align, min(block, numel * align)) for numel, block in part] * repeats
    folded = fold_repeats(sizes, align)

    one_by_one = place_in_order(
        [RepeatedSizes((size,), 1) for size in sizes], num_shards, shard_units * align, align
    )
    at_once = place_in_order(folded, num_shards, shard_units * align, align)

    assert [size for sizes_, count in folded for size in sizes_ * count] == sizes
    assert (at_once is None) == (one_by_one is None)
    if at_once is not None and one_by_one is not None:
        assert list(starts_of(at_once)) == list(starts_of(one_by_one))


def test_experts_fold_into_one_pattern() -> None:
    """The repeated sizes of experts are one pattern, whatever stands around them."""
    experts = (TensorSize(64, 8), TensorSize(64, 8), TensorSize(32, 4))
    sizes = [TensorSize(8, 1), *experts * 16, TensorSize(16, 1)]

    assert fold_repeats(sizes, 8) == [
        RepeatedSizes((TensorSize(8, 1),), 1),
        RepeatedSizes(experts, 16),
        RepeatedSizes((TensorSize(16, 1),), 1),
    ]


@given(st.sets(st.integers(0, 39)), st.integers(1, 8))
def test_gaps_are_the_free_elements(used: set[int], shard_numel: int) -> None:
    """The gaps between spans hold exactly the elements that no span holds."""
    num_shards = -(-40 // shard_numel)

    one = RepeatedSizes((TensorSize(1, 1),), 1)
    gaps = free_gaps(dict.fromkeys(sorted(used), one), num_shards, shard_numel, 1, 1)

    free = {
        (gap.first_rank + i) * shard_numel + element
        for gap in gaps
        for i in range(gap.num_ranks)
        for element in range(gap.local_offset, gap.local_offset + gap.piece_numel)
    }
    assert free == set(range(num_shards * shard_numel)) - used


gap_lists = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(0, 5), st.integers(1, 8)), max_size=5
)


@given(gap_lists, st.integers(1, 30), st.integers(1, 6))
def test_scattered_pieces_lie_in_gaps(rows: list[tuple[int, int, int, int]], numel: int, block: int) -> None:
    """Pieces are whole blocks in rank order, one per rank, inside gaps; what they leave stays free."""
    gaps = [PieceRun(first, ranks, width, start) for first, ranks, start, width in rows]
    before = _elements(gaps)
    assume(len(before) == sum(gap.numel for gap in gaps))  # disjoint

    found = place_scattered(numel, min(block, numel), gaps, 1)

    if found is None:
        return
    runs, remaining = found
    ranks = [run.first_rank + i for run in runs for i in range(run.num_ranks)]
    taken = {
        (run.first_rank + i, run.local_offset + element)
        for run in runs
        for i in range(run.num_ranks)
        for element in range(run.piece_numel)
    }
    pieces = [run.piece_numel for run in runs for _ in range(run.num_ranks)]
    assert ranks == sorted(set(ranks))
    assert sum(pieces) == len(taken) == numel
    assert all(piece % min(block, numel) == 0 for piece in pieces[:-1])
    assert taken <= before
    assert _elements(remaining) == before - taken


def _elements(gaps: list[PieceRun]) -> set[tuple[int, int]]:
    return {
        (gap.first_rank + i, element)
        for gap in gaps
        for i in range(gap.num_ranks)
        for element in range(gap.local_offset, gap.local_offset + gap.piece_numel)
    }
