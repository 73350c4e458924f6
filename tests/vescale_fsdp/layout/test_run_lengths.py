"""RunLengths is the tuple it stands for, and what is made of it does not grow with the ranks."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.layout.geometry import Range, RunLengths
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.layout.planner import TensorSpec, plan_group

values = st.lists(st.sampled_from((0, 0, 1, 1, 3, 7)), max_size=12).map(tuple)


@given(values, st.slices(12))
def test_it_behaves_as_the_tuple(expected: tuple[int, ...], part: slice) -> None:
    """Length, items from both ends, slices, iteration, search and sums are the tuple's."""
    found = RunLengths.of(expected)

    assert tuple(found) == expected and len(found) == len(expected)
    assert [found[place] for place in range(-len(expected), len(expected))] == [*expected, *expected]
    assert tuple(found[part]) == expected[part]
    assert [*reversed(found)] == [*reversed(expected)]
    assert [found.count(v) for v in (0, 3, 9)] == [expected.count(v) for v in (0, 3, 9)]
    assert (9 in found, 3 in found) == (False, 3 in expected)
    assert found.distinct == set(expected) and found.total == sum(expected)
    assert [found.start(place) for place in range(len(expected) + 1)] == [0, *accumulate(expected)]
    assert tuple(found.map(lambda value: value % 3)) == tuple(value % 3 for value in expected)
    for outside in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            found[outside]


@given(values, values)
def test_equality_is_that_of_the_values(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Equal ints are equal runs with one hash, however they were given, and other ints are not."""
    found = RunLengths.of(one)
    singly = RunLengths(tuple((count, value) for value in one for count in (0, 1)))

    assert found == singly and hash(found) == hash(singly) and RunLengths.of(found) is found
    assert (found == RunLengths.of(other)) == (one == other)
    assert [pickle.loads(pickle.dumps(found, 0)), copy.deepcopy(found)] == [found, found]


@given(values, st.integers(0, 40), st.integers(0, 40))
def test_holders_are_those_that_a_walk_finds(numels: tuple[int, ...], start: int, stop: int) -> None:
    """A range's holders are the places whose elements it meets; empty places hold nothing."""
    found = RunLengths.of(numels)
    pieces = [Range(found.start(place), found.start(place + 1)) for place in range(len(numels))]
    wanted = Range(start, stop)

    assert [*found.holders(start, stop)] == [
        p for p, piece in enumerate(pieces) if piece.intersect(wanted).numel
    ]


def test_a_placement_keeps_what_was_published() -> None:
    """Fields, repr and the pickled arguments are those of the tuple; a list or runs give the same value."""
    placement = RaggedShard.of_runs((0,), RunLengths(((2, 1), (3, 0))))

    assert placement.local_units == (1, 1, 0, 0, 0) and type(placement.local_units) is tuple
    assert len({placement, RaggedShard((0,), (1, 1, 0, 0, 0)), RaggedShard((0,), (1, 1, 0, 0))}) == 2
    assert repr(placement) == "RaggedShard(dims=(0,), local_units=(1, 1, 0, 0, 0))"
    assert placement.__reduce__() == (RaggedShard, ((0,), (1, 1, 0, 0, 0)))
    assert b"run_lengths" not in pickle.dumps(placement)
    with pytest.raises(AttributeError, match="units_of"):
        placement.units_of  # type: ignore[attr-defined]  # noqa: B018


def _peak_bytes(num_shards: int) -> tuple[int, int]:
    """Most memory while the placements of a group are made and asked; how many runs they have."""
    specs = [TensorSpec(f"w{i}", (300 + i, 700), "float32", 1) for i in range(100)]
    layout = plan_group(specs, num_shards)
    tracemalloc.start()
    placements = [
        RaggedShard.from_piece_numels(slot.shape, layout.piece_lengths(slot)) for slot in layout.slots
    ]
    for slot, placement in zip(layout.slots, placements, strict=True):
        assert placement.piece(slot.shape, num_shards - 1) == layout.piece(slot, num_shards - 1).range or (
            layout.piece(slot, num_shards - 1).numel == 0
        )
    assert len(set(placements)) > 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, sum(len(placement.units.runs) for placement in placements)


def test_placements_do_not_grow_with_the_ranks() -> None:
    """100 tensors' placements take as many runs and bytes over 16,384 ranks as over 1,024."""
    (few_bytes, few_runs), (many_bytes, many_runs) = _peak_bytes(1024), _peak_bytes(16_384)

    assert 100 <= few_runs <= 500 and many_runs <= 500
    assert many_bytes <= 1.2 * few_bytes
    assert many_bytes < 16_384 * 8  # the control: what one of them would take, written out
