"""Flat ranges and boxes: compared with numpy's own indexing on every small case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.layout.geometry import (
    Box,
    Range,
    boxes_of_range,
    chunk_of,
    contiguous_strides,
    numel_of,
    run_start,
    whole_box,
)

SHAPES = [(), (1,), (7,), (4, 5), (1, 6), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2), (2, 1, 3, 1, 2)]
shapes = st.lists(st.integers(1, 5), max_size=5).map(tuple)


@st.composite
def ranged_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape and a flat range inside it."""
    shape = draw(shapes)
    start = draw(st.integers(0, numel_of(shape)))
    return shape, start, draw(st.integers(start, numel_of(shape)))


@st.composite
def boxed_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """A shape and two non-empty boxes inside it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    boxes = []
    for _ in range(2):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    return shape, boxes[0], boxes[1]


def _flat_indices(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> list[int]:
    """Flat element indices of the boxes, box after box, as numpy's slicing finds them."""
    flat = np.arange(numel_of(shape)).reshape(shape)
    return [int(index) for box in boxes for index in flat[box.slices()].ravel()]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_of_small_shapes(shape: tuple[int, ...]) -> None:
    """All ranges of all small shapes: the boxes list the range's elements once each, in order."""
    numel = numel_of(shape)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        boxes = boxes_of_range(shape, start, stop)

        assert _flat_indices(shape, boxes) == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(ranged_shapes())
def test_boxes_tile_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    """Boxes are non-empty, contiguous, within the bound on their number, and tile the range in order."""
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    ranges = [
        Range(first, first + box.numel) for box in boxes if (first := run_start(shape, box)) is not None
    ]

    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel == held.numel > 0 for box, held in zip(boxes, ranges, strict=True))
    assert [held.start for held in ranges] == [start, *(held.stop for held in ranges)][: len(ranges)]
    assert (ranges[-1].stop if ranges else start) == stop


def test_bound_on_boxes_is_reached() -> None:
    """2 * ndim - 1 boxes are needed for a range that starts and ends in the middle of every dim."""
    assert len(boxes_of_range((4, 5), 3, 17)) == 3
    assert len(boxes_of_range((4, 4, 4), 5, 59)) == 5
    assert len(boxes_of_range((3, 3, 3, 3), 14, 67)) == 7


def test_drawing_of_the_module() -> None:
    """The example in geometry's docstring: shape (4, 5), range [3, 17)."""
    assert boxes_of_range((4, 5), 3, 17) == (
        Box((0, 3), (1, 2)),
        Box((1, 0), (2, 5)),
        Box((3, 0), (1, 2)),
    )


def test_whole_tensor_is_one_box() -> None:
    """The range of everything is one box, and a scalar is a box without dims."""
    assert boxes_of_range((2, 3, 4), 0, 24) == (Box((0, 0, 0), (2, 3, 4)),)
    assert boxes_of_range((), 0, 1) == (Box((), ()),)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)])
def test_empty_tensor_has_no_boxes(shape: tuple[int, ...]) -> None:
    """A tensor without elements has one range, the empty one, and no boxes."""
    assert boxes_of_range(shape, 0, 0) == ()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13), (13, 13)])
def test_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    """A range that leaves the tensor, or runs backwards, is named in the error."""
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\).*\(3, 4\)"):
        boxes_of_range((3, 4), start, stop)


@given(boxed_shapes())
def test_box_intersection_is_the_common_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    """The intersection holds exactly the elements of both, either way round; None if there are none."""
    shape, one, two = case
    common = set(_flat_indices(shape, (one,))) & set(_flat_indices(shape, (two,)))
    both = one.intersect(two)

    assert both == two.intersect(one)
    assert set(_flat_indices(shape, (both,)) if both else []) == common


@given(boxed_shapes())
def test_slices_relative_to_an_origin(case: tuple[tuple[int, ...], Box, Box]) -> None:
    """Slices with an origin index the same elements inside a part that starts there."""
    shape, outer, other = case
    inner = outer.intersect(other)
    flat = np.arange(numel_of(shape)).reshape(shape)
    if inner is not None:
        assert np.array_equal(flat[outer.slices()][inner.slices(outer.offsets)], flat[inner.slices()])


@given(boxed_shapes())
def test_run_start_knows_contiguity(case: tuple[tuple[int, ...], Box, Box]) -> None:
    """A box is one run exactly if its flat indices have no gap."""
    shape, box, _ = case
    indices = _flat_indices(shape, (box,))
    is_run = indices == list(range(indices[0], indices[0] + len(indices)))

    assert run_start(shape, box) == (indices[0] if is_run else None)


@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 4))
def test_chunks_are_those_of_torch(numel: int, num_chunks: int, cols: int) -> None:
    """Each rank's chunk, of a dim and of a box, is what torch.chunk gives; ranks it gives nothing have none."""
    values = torch.arange(numel * cols).view(numel, cols)
    expected = [part.tolist() for part in values.chunk(num_chunks)] if numel else []
    boxes = [whole_box((numel, cols)).chunk(0, num_chunks, index) for index in range(num_chunks)]

    found = [values[box.slices()].tolist() for box in boxes if box.numel]
    assert found == expected
    assert [chunk_of(numel, num_chunks, index).numel for index in range(num_chunks)] == [
        box.sizes[0] for box in boxes
    ]
    shifted = Box((0, 3), (2, numel)).chunk(1, num_chunks, num_chunks - 1)
    last = chunk_of(numel, num_chunks, num_chunks - 1)
    assert shifted == Box((0, 3 + last.start), (2, last.numel))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(-3, 3))
def test_flat_range_algebra(a: int, b: int, c: int, d: int, by: int) -> None:
    """Intersection, numel and shift of ranges agree with sets of integers."""
    one, two = Range(a, b), Range(c, d)
    common = set(range(a, b)) & set(range(c, d))

    assert set(range(*one.intersect(two))) == common
    assert one.intersect(two).numel == len(common)
    assert one.intersect(two).start <= one.intersect(two).stop
    assert set(range(*one.shift(by))) == {element + by for element in range(a, b)}


@given(shapes)
def test_strides_are_numpys(shape: tuple[int, ...]) -> None:
    """Row-major strides in elements, as numpy has them (dims of size 1 included)."""
    assert contiguous_strides(shape) == tuple(s // 8 for s in np.zeros(shape, dtype=np.int64).strides)
    assert numel_of(shape) == np.zeros(shape).size
