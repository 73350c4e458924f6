"""Views that move items: any part of any of them equals numpy's, so that a tensor may be cut anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.array_views import ArrayView
from vescale_fsdp.conversion.engine.casting import CastView
from vescale_fsdp.conversion.engine.tensor_view import (
    MappedView,
    TensorView,
    ZerosView,
    read_range,
)
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.layout.index_maps import Concat, Index, Interleave, Pad, Permute, Reshape, Slice, Stack


class _Array(ArrayView):
    """A tensor in memory."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__("x", array.astype(np.int32))


def _count(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape)


A, B = _count(6, 8), _count(6, 8) + 1000
VIEWS: dict[str, tuple[TensorView, np.ndarray]] = {
    "concat 0": (MappedView(Concat(0), (_Array(A), _Array(B[:2]))), np.concatenate([A, B[:2]])),
    "concat 1": (MappedView(Concat(1), (_Array(A), _Array(B))), np.concatenate([A, B], 1)),
    "slice": (MappedView(Slice(1, 3, 4), (_Array(A),)), A[:, 3:7]),
    "stack 0": (MappedView(Stack(0), (_Array(A), _Array(B))), np.stack([A, B])),
    "stack 1": (MappedView(Stack(1), (_Array(A), _Array(B))), np.stack([A, B], 1)),
    "stack of scalars": (MappedView(Stack(0), (_Array(np.array(3)), _Array(np.array(4)))), np.array([3, 4])),
    "index": (MappedView(Index(1, 2), (_Array(_count(3, 4, 5)),)), _count(3, 4, 5)[:, 2]),
    "permute": (
        MappedView(Permute((2, 0, 1)), (_Array(_count(3, 4, 5)),)),
        _count(3, 4, 5).transpose(2, 0, 1),
    ),
    "reshape": (MappedView(Reshape((6, 10)), (_Array(_count(3, 4, 5)),)), _count(6, 10)),
    "reshape of permuted": (
        MappedView(Reshape((2, 30)), (MappedView(Permute((1, 0, 2)), (_Array(_count(3, 4, 5)),)),)),
        _count(3, 4, 5).transpose(1, 0, 2).reshape(2, 30),
    ),
    "permute of reshape": (
        MappedView(Permute((2, 1, 0)), (MappedView(Reshape((3, 4, 5)), (_Array(_count(12, 5)),)),)),
        _count(3, 4, 5).transpose(2, 1, 0),
    ),
    "interleave": (
        MappedView(Interleave(0, 1, 2), (_Array(_count(12, 3)),)),
        _count(12, 3).reshape(2, 6, 3).swapaxes(0, 1).reshape(12, 3),
    ),
    "interleave back in groups": (
        MappedView(Interleave(1, 2, 3, back=True), (_Array(_count(3, 24)),)),
        _count(3, 24).reshape(3, 2, 4, 3).swapaxes(2, 3).reshape(3, 24),
    ),
    "interleave in groups": (
        MappedView(Interleave(0, 2, 3), (_Array(_count(24, 3)),)),
        _count(24, 3).reshape(2, 3, 4, 3).swapaxes(1, 2).reshape(24, 3),
    ),
    "interleave back": (
        MappedView(Interleave(0, 1, 2, back=True), (_Array(_count(12, 3)),)),
        _count(12, 3).reshape(6, 2, 3).swapaxes(0, 1).reshape(12, 3),
    ),
    "pad": (MappedView(Pad(0, 9), (_Array(A),)), np.pad(A, ((0, 3), (0, 0)))),
    "pad 1": (MappedView(Pad(1, 11), (_Array(A),)), np.pad(A, ((0, 0), (0, 3)))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_any_range_of_a_view_is_that_of_the_array(name: str) -> None:
    """Every flat range of every view equals numpy's, so cutting a tensor anywhere changes nothing."""
    view, expected = VIEWS[name]
    assert view.info.shape == expected.shape
    buffer = np.empty(4 * expected.size, dtype=np.uint8)
    for start in range(expected.size):
        for stop in range(start + 1, expected.size + 1):
            buffer.fill(0xEE)
            found = read_range(view, start, stop, buffer).view(np.int32)
            assert np.array_equal(found, expected.reshape(-1)[start:stop]), (start, stop)


@pytest.mark.parametrize("name", VIEWS)
def test_any_box_of_a_view_is_that_of_the_array(name: str) -> None:
    """Boxes too, into an array with strides of its own."""
    view, expected = VIEWS[name]
    rng = np.random.default_rng(0)
    for _ in range(50):
        offsets = tuple(int(rng.integers(0, n)) for n in expected.shape)
        sizes = tuple(int(rng.integers(1, n - o + 1)) for n, o in zip(expected.shape, offsets, strict=True))
        box = Box(offsets, sizes)
        out = np.empty(sizes[::-1], dtype=np.uint32).T
        view.read_into(box, out)
        assert np.array_equal(out.view(np.int32), expected[box.slices()])


@pytest.mark.parametrize("back", [False, True])
def test_a_small_part_of_a_large_group_reads_little(back: bool) -> None:
    """Interleaving the halves of a whole tensor must not read it whole for every part of it."""
    asked: list[int] = []

    class Counting(_Array):
        def read_into(self, box: Box, out: np.ndarray) -> None:
            asked.append(box.numel)
            super().read_into(box, out)

    view = MappedView(Interleave(0, 1, 2, back), (Counting(_count(1000, 4)),))
    view.read_into(Box((300, 0), (10, 4)), np.empty((10, 4), dtype=np.uint32))
    assert 40 <= sum(asked) <= 80


def test_a_misfit_names_the_input() -> None:
    """The number of the tensor that does not fit; None if all do."""
    tall = Stack(2).misfit([(3,), (3,)])
    wide = Pad(1, 4).misfit([(2, 5)])
    assert tall is not None and tall[0] == 0
    assert wide is not None and wide[0] == 0
    assert Pad(1, 5).misfit([(2, 5)]) is None


def test_views_of_other_values_have_other_identities() -> None:
    """A run resumes only if these are equal: every argument counts, and casts on the way to the same type."""
    a, f16, f32 = _Array(_count(4, 12)), dtype_from_torch("float16"), dtype_from_torch("float32")
    views: list[TensorView] = [
        a,
        *(
            MappedView(Interleave(dim, groups, 2, back), (a,))
            for dim in (0, 1)
            for groups in (1, 2)
            for back in (False, True)
        ),
        MappedView(Interleave(1, 1, 3), (a,)),
        *(MappedView(Slice(dim, start, size), (a,)) for dim in (0, 1) for start in (0, 1) for size in (1, 2)),
        *(MappedView(Index(dim, index), (a,)) for dim in (0, 1) for index in (0, 1)),
        *(MappedView(Pad(dim, size), (a,)) for dim in (0, 1) for size in (12, 13)),
        *(MappedView(Reshape(shape), (a,)) for shape in ((48,), (6, 8))),
        *(MappedView(Concat(dim), parts) for parts in ((a,), (a, a)) for dim in (0, 1)),
        *(MappedView(Stack(dim), parts) for parts in ((a,), (a, a)) for dim in (0, 1)),
        MappedView(Permute((1, 0)), (a,)),
        CastView(a, f32),
        CastView(CastView(a, f16), f32),
        ZerosView(a.info),
    ]
    assert len({view.identity() for view in views}) == len(views)
