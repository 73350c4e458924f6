"""Regions, copies, rank sets and distributions against brute force over every element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.checkpoint.state.tensor_description import axes_of_ranks
from vescale_fsdp.layout.distribution import (
    Axis,
    Cut,
    Distribution,
    Holders,
    LayoutCut,
    RankSet,
    ShardCut,
    UnitsCut,
    cut_from_json,
    shard_order,
)
from vescale_fsdp.layout.geometry import Box, Range
from vescale_fsdp.layout.group_layout import GroupLayout, PieceRun, TensorSlot
from vescale_fsdp.layout.planner import TensorSpec, plan_group
from vescale_fsdp.layout.region import Copy, Region, compose, overlaps


def elements(shape: tuple[int, ...], region: Region) -> np.ndarray:  # type: ignore[type-arg]
    """Flat indices of a region's elements, in its own order."""
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    return whole[region.box.slices()].reshape(-1)[region.span.start : region.span.stop]


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A region of a tensor of this shape, large enough to meet others."""
    offsets = tuple(draw(st.integers(0, n // 2)) for n in shape)
    sizes = tuple(n - o - draw(st.integers(0, (n - o) // 2)) for n, o in zip(shape, offsets, strict=True))
    box = Box(offsets, sizes)
    start = draw(st.integers(0, box.numel // 2))
    return Region(box, Range(start, box.numel - draw(st.integers(0, (box.numel - start) // 2))))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    """A shape and two regions of it; often of one box."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=draw(st.integers(0, 3)), max_size=3)))
    source = draw(regions(shape))
    return shape, source, draw(regions(shape))


@given(pairs())
def test_overlaps_move_exactly_the_shared_elements(case: tuple[tuple[int, ...], Region, Region]) -> None:
    """Copies move what copying element by element moves."""
    _prove_overlaps(*case)


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)])
def test_overlaps_of_all_small_regions(shape: tuple[int, ...]) -> None:
    """The same for every region of two small shapes, each against regions of all kinds."""
    found = list(_all_regions(shape))
    assert len(found) > 100
    for place, source in enumerate(found):
        for target in found[place % 7 :: 7]:
            _prove_overlaps(shape, source, target)


def _all_regions(shape: tuple[int, ...]) -> Iterator[Region]:
    starts = itertools.product(*(range(n) for n in shape))
    for offsets in starts:
        for sizes in itertools.product(*(range(1, n - o + 1) for n, o in zip(shape, offsets, strict=True))):
            box = Box(offsets, sizes)
            for start, stop in itertools.combinations(range(box.numel + 1), 2):
                yield Region(box, Range(start, stop))


def _prove_overlaps(shape: tuple[int, ...], source: Region, target: Region) -> None:
    have, want = torch.from_numpy(elements(shape, source)), elements(shape, target)
    # Both memories begin in the middle of a storage, as a part of a buffer does.
    got = torch.full((len(want) + 3,), -1)[3:]
    have = torch.cat([torch.tensor([-2, -2]), have])[2:]
    copies = overlaps(source, target)
    for copy in copies:
        assert (copy.target_view(got) == -1).all()  # no item is copied twice
        copy.target_view(got).copy_(copy.source_view(have))

    assert np.array_equal(np.where(np.isin(want, have), want, -1), got.numpy())
    for copy in copies:
        moved = _moved(copy)
        assert len(moved) == copy.numel
        assert copy.is_run == (moved == [(copy.source + i, copy.target + i) for i in range(copy.numel)])
    # A run that could be joined with the run before it is joined.
    for one, two in itertools.pairwise(copies):
        ends = one.source + one.numel, one.target + one.numel
        assert not (one.is_run and two.is_run and ends == (two.source, two.target))


def _moved(copy: Copy) -> list[tuple[int, int]]:
    """(source item, target item) of each item of a copy, element by element."""
    return [
        (
            copy.source + sum(i * step for i, step in zip(index, copy.source_strides, strict=True)),
            copy.target + sum(i * step for i, step in zip(index, copy.target_strides, strict=True)),
        )
        for index in np.ndindex(*copy.sizes)
    ]


@st.composite
def nested_copies(draw: st.DrawFn) -> Copy:
    """A copy that reads its source front to back, with gaps between rows, planes and single items."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides: list[int] = []
    numel = 1  # of one index of the dim
    for size in reversed(sizes):
        strides.insert(0, numel + draw(st.integers(0, 5)))
        numel = size * strides[0]
    # The target's dims are permuted, as for a transposed tensor.
    order = draw(st.permutations(range(len(sizes))))
    target = [0] * len(sizes)
    step = 1
    for dim in order:
        target[dim] = step
        step *= sizes[dim]
    return Copy(tuple(sizes), draw(st.integers(0, 9)), tuple(strides), draw(st.integers(0, 9)), tuple(target))


@given(nested_copies(), st.integers(-2, 300), st.integers(-2, 300))
def test_the_copy_of_a_range_of_the_source(copy: Copy, start: int, stop: int) -> None:
    """The copies of a range move each item in the range once, and are few."""
    parts = list(copy.within(start, stop))

    inside = [pair for pair in _moved(copy) if start <= pair[0] < stop]
    assert sorted(pair for part in parts for pair in _moved(part)) == sorted(inside)
    assert len(parts) <= 2 * len(copy.sizes) - 1


@given(nested_copies())
def test_joining_dims_changes_no_item(copy: Copy) -> None:
    """A copy with fewer dims moves the same items in the same order."""
    joined = Copy.of(*copy)

    assert _moved(joined) == _moved(copy)
    assert len(joined.sizes) <= len(copy.sizes)
    assert joined.sizes == (1,) or 1 not in joined.sizes
    assert joined.is_run == (_moved(copy) == [(copy.source + i, copy.target + i) for i in range(copy.numel)])


@st.composite
def spread_out(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a box without two items at one place: its dims in any order, maybe with gaps."""
    strides, step = [0] * len(sizes), 1
    for dim in draw(st.permutations(range(len(sizes)))):
        strides[dim] = step
        step = step * sizes[dim] + draw(st.sampled_from((0, 0, 0, 1, 2)))
    return tuple(strides)


@st.composite
def two_copies(draw: st.DrawFn) -> tuple[Copy, Copy]:
    """A copy, and another that reads some of what it has written; the second may read items several times."""
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
    shapes, starts = (draw(sizes), draw(sizes)), st.integers(0, 8)
    memories = [(draw(starts), draw(spread_out(shape))) for shape in shapes for _ in range(2)]
    first, second = (Copy(shape, *memories[2 * at], *memories[2 * at + 1]) for at, shape in enumerate(shapes))
    repeated = draw(st.sets(st.integers(0, 2)))
    again = tuple(0 if dim in repeated else stride for dim, stride in enumerate(second.source_strides))
    return first, second._replace(source_strides=again)


@given(two_copies())
def test_two_copies_are_composed(copies: tuple[Copy, Copy]) -> None:
    """What both move, one after the other, the compositions move, each item once."""
    first, second = map(_moved, copies)
    wanted = [(source, into) for source, at in first for read, into in second if read == at]
    assert sorted(item for copy in compose(*copies) for item in _moved(copy)) == sorted(wanted)


def test_a_copy_needs_a_stride_for_each_dim() -> None:
    """Sizes and strides that do not fit each other, and empty copies, are refused where a copy is made."""
    with pytest.raises(ValueError, match="zip"):
        Copy.of((2, 3), 0, (3, 1), 0, (1,))
    with pytest.raises(ValueError, match="0"):
        Copy.of((2, 0), 0, (3, 1), 0, (3, 1))


@given(nested_copies(), st.integers(0, 40))
def test_source_ranges_cover_a_copy(copy: Copy, gap: int) -> None:
    """Ranges have every item of the copy, are farther apart than the gap, and include no larger gap."""
    copy = Copy.of(*copy)
    inside = {source for source, _ in _moved(copy)}

    ranges = list(copy.source_ranges(gap))

    covered = [item for start, stop in ranges for item in range(start, stop)]
    assert inside <= set(covered) and len(covered) == len(set(covered))
    assert all(b.start - a.stop > gap for a, b in itertools.pairwise(ranges))
    for start, stop in ranges:
        held = [item for item in range(start, stop) if item in inside]
        assert held[0] == start and held[-1] == stop - 1
        assert all(b - a - 1 <= gap for a, b in itertools.pairwise(held))
    if gap == 0:
        assert set(covered) == inside


@given(st.sets(st.integers(0, 60), max_size=40))
def test_rank_sets_hold_what_they_are_made_of(ranks: set[int]) -> None:
    """Runs of runs name exactly the ranks, and survive JSON."""
    found = RankSet.from_json(RankSet.of(ranks).to_json())

    assert tuple(sorted(ranks)) == found.ranks
    assert all((rank in found) == (rank in ranks) for rank in range(61))


def test_regular_rank_sets_stay_small() -> None:
    """Stages, strides and two of every eight are one run, whatever the world size."""
    for ranks in (range(4096, 8192), range(3, 16_384, 8), [r for r in range(16_384) if r % 8 in (2, 3)]):
        assert len(RankSet.of(ranks).runs) == 1


def _distributions() -> tuple[list[tuple[tuple[int, ...], Distribution, int]], tuple[GroupLayout, ...]]:
    layout = plan_group([TensorSpec("a", (7, 6), "float32", 6), TensorSpec("b", (5,), "float32", 1)], 4)
    whole = TensorSlot("a", (5, 4), "float32", 4, 0)
    scattered = TensorSlot("u", (6, 5), "float32", 5, 24, (PieceRun(2, 3, 10, 0),))
    second = GroupLayout(5, 12, (whole, scattered))
    two = (Axis(4, 1),)
    grid = (Axis(2, 3), Axis(3, 1))
    cases: list[tuple[tuple[int, ...], tuple[Axis, ...], tuple[Cut, ...], int]] = [
        ((7, 6), two, (LayoutCut(0, 0),), 4),
        ((5,), two, (LayoutCut(0, 1),), 4),
        ((7, 6), two, (ShardCut(1),), 4),
        ((3, 2), two, (ShardCut(0),), 4),
        ((7, 6), two, (UnitsCut((0,), ((1, 3), (1, 0), (2, 2))),), 4),
        ((7, 6), grid, (ShardCut(1), ShardCut(0)), 6),
        ((7, 6), grid, (ShardCut(0), ShardCut(0)), 6),
        ((4, 6), (Axis(2, 2), Axis(2, 1)), (ShardCut(1), UnitsCut((0,), ((1, 1), (1, 3)))), 4),
        ((6, 5), (Axis(5, 1),), (LayoutCut(1, 1),), 5),
        ((), (), (), 2),
    ]
    return [(shape, Distribution(axes, cuts), size) for shape, axes, cuts, size in cases], (layout, second)


def test_regions_of_all_coordinates_tile_the_tensor() -> None:
    """Every element is held by exactly one place, and `touching` finds exactly the places that matter."""
    cases, layouts = _distributions()
    for shape, distribution, _ in cases:
        numel = int(np.prod(shape))
        everywhere = list(np.ndindex(*(axis.size for axis in distribution.axes)))
        held = {c: distribution.region(shape, c, layouts) for c in everywhere}
        seen = np.concatenate([elements(shape, region) for region in held.values()])
        assert sorted(seen.tolist()) == list(range(numel))
        for wanted in held.values():
            touched = dict(distribution.touching(shape, wanted, layouts))
            for coordinates, region in held.items():
                if overlaps(region, wanted):
                    assert touched[coordinates] == region
        for cut in distribution.cuts:
            assert cut_from_json(cut.to_json()) == cut


def test_a_strided_overlap() -> None:
    """Columns 1 and 2 of a (2, 4) tensor whose first three columns are stored: one copy, which is not a run."""
    stored = Region(Box((0, 0), (2, 3)), Range(0, 6))
    wanted = Region(Box((0, 1), (2, 2)), Range(0, 4))

    assert overlaps(stored, wanted) == [Copy((2, 2), 1, (3, 1), 0, (2, 1))]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 4), (4, 2, 2), (2, 1, 3)])
def test_the_order_of_shards(sizes: tuple[int, ...]) -> None:
    """Every order of three axes over one dim is told by its split factors; other factors tell none."""
    for wanted in itertools.permutations(range(3)):
        factors = [
            math.prod(sizes[other] for other in wanted[: wanted.index(axis)] if other > axis)
            for axis in range(3)
        ]
        found = shard_order({axis: (0, factor) for axis, factor in enumerate(factors)}, sizes)
        assert found == [axis for axis in wanted if sizes[axis] > 1]
    assert shard_order({0: (0, 5), 2: (0, 1)}, sizes) is None
    assert shard_order({0: (0, sizes[2]), 2: (1, 1)}, sizes) is None  # of another dim
    assert shard_order({0: (1, 1), 2: (0, 1)}, sizes) == [0, 2]
    assert shard_order({}, sizes) == []


def test_axes_of_meshes() -> None:
    """Meshes that follow a rule are described by it, sub-meshes alike; others by a table."""
    world = np.arange(24).reshape(2, 3, 4)
    sub = [axes_of_ranks(world[:, 1, :]), axes_of_ranks(world[:, 2, :])]
    odd = axes_of_ranks(np.array([5, 1, 7]))

    assert axes_of_ranks(world) == (Axis(2, 12), Axis(3, 4), Axis(4, 1))
    assert sub[0] == sub[1] == (Axis(2, 12), Axis(4, 1))
    assert axes_of_ranks(np.array([1, 2])) == (Axis(2, 1, 1),)
    hybrid = axes_of_ranks(12 + np.arange(24).reshape(2, 6, 2).transpose(1, 0, 2).reshape(12, 2))
    assert hybrid == (Axis(12, 2, 12, None, (2, 12)), Axis(2, 1))
    assert hybrid[0].coordinates([12, 13, 24, 14, 35]) == [0, 0, 1, 2, 11]
    assert Axis.from_json(hybrid[0].to_json()) == hybrid[0] != Axis(12, 2, 12)
    assert odd[0].table == ((1, 1), (5, 0), (7, 2))
    assert odd[0].coordinates([5, 6, 7]) == [0, -1, 2]
    assert Axis.from_json(odd[0].to_json()) == odd[0]


def test_holders_number_replicas_in_rank_order() -> None:
    """Ranks at one place come in order; a place nobody takes is named."""
    holders = Holders(RankSet.world(8), (Axis(2, 2),))

    assert [holders.ranks_at((c,)) for c in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert holders.position(6) == ((1,), 2, 4)
    assert holders.missing_cell() is None
    assert Holders(RankSet.of([0, 1, 4]), (Axis(2, 2),)).missing_cell() == 1
    assert Holders(RankSet.of([0, 1]), ()).position(3) is None
