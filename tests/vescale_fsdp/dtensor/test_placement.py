"""RaggedShard as a value, its pieces, and the way from piece sizes back to a placement."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from vescale_fsdp import RaggedShard
from vescale_fsdp.errors import PlacementError, UnsupportedOpError
from vescale_fsdp.layout.geometry import Range, numel_of

placements = st.builds(
    RaggedShard,
    st.integers(1, 3).map(lambda depth: tuple(range(depth))),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any).map(tuple),
)


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and the sizes of consecutive pieces that make it up."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    numel = numel_of(shape)
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
    return shape, tuple(b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True))


def test_drawing_of_the_module() -> None:
    """The example in placement's docstring: 4 units of 2 rows on shape (8, 3)."""
    placement = RaggedShard((0,), (1, 2, 0, 1))
    rows = [tuple(bound // 3 for bound in placement.piece((8, 3), rank)) for rank in range(4)]

    assert placement.unit_numel((8, 3)) == 2 * 3
    assert rows == [(0, 2), (2, 6), (6, 6), (6, 8)]
    assert placement.owners((8, 3)) == (0, 1, 3)


@given(placements)
def test_placements_are_values(placement: RaggedShard) -> None:
    """Equal by content, hashable, and the same after pickle, deepcopy, copy and eval(repr)."""
    twins = [
        pickle.loads(pickle.dumps(placement)),
        copy.deepcopy(placement),
        copy.copy(placement),
        eval(repr(placement)),
        RaggedShard(list(placement.dims), list(placement.local_units)),  # type: ignore[arg-type]
    ]

    assert twins == [placement] * 5
    assert len({placement, *twins}) == 1
    assert all(type(twin) is RaggedShard for twin in twins)


def test_different_placements_differ() -> None:
    """Neither other units, other dims nor torch's placements are equal to it."""
    placement = RaggedShard((0,), (1, 2))

    assert placement not in (RaggedShard((0,), (2, 4)), RaggedShard((0, 1), (1, 2)), Shard(0), Replicate())
    assert placement != str(placement)  # type: ignore[comparison-overlap]


def test_torch_knows_it_is_no_placement_of_its_own() -> None:
    """It is a Placement whose kind tests do not crash (torch's class is C++): sharded, but not along one dim."""
    placement = RaggedShard((0,), (1, 2))

    assert isinstance(placement, Placement)
    assert placement.is_shard()
    for ask in (lambda: placement.is_shard(0), lambda: placement.dim, lambda: hasattr(placement, "dim")):
        with pytest.raises(UnsupportedOpError, check=lambda error: error.where == str(placement)):
            ask()
    assert not placement.is_replicate()
    assert not placement.is_partial()
    assert not isinstance(placement, Shard | Replicate | Partial)


def test_placements_are_frozen() -> None:
    """A field cannot be set after the value was proven."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        RaggedShard((0,), (1, 2)).local_units = (2, 1)  # type: ignore[misc]


def test_text_is_short_for_many_ranks() -> None:
    """str names dims and units, and does not list thousands of them."""
    assert str(RaggedShard((0,), (1, 2, 0, 1))) == "RaggedShard(dims=(0,), units=(1, 2, 0, 1))"
    assert str(RaggedShard((0,), (3,) * 4096)) == "RaggedShard(dims=(0,), units=(3, .., 3))"


@pytest.mark.parametrize(
    ("dims", "units", "got"),
    [
        ((1,), (1, 1), "(1,)"),
        ((0, 2), (1, 1), "(0, 2)"),
        ((1, 0), (1, 1), "(1, 0)"),
        ((-1,), (1, 1), "(-1,)"),
        ((0,), (), "()"),
        ((0,), (0, 0), "(0, 0)"),
        ((0,), (2, -1), "(2, -1)"),
        ((), (1, 1), "(1, 1)"),
    ],
)
def test_placements_that_cannot_be(dims: tuple[int, ...], units: tuple[int, ...], got: str) -> None:
    """Dims that are no prefix and units that give nothing, or take, are refused when built."""
    with pytest.raises(PlacementError) as caught:
        RaggedShard(dims, units)
    assert caught.value.got == got


@given(placements, st.lists(st.integers(1, 3), max_size=2), st.integers(1, 4))
def test_pieces_tile_the_tensor(placement: RaggedShard, rest: list[int], factor: int) -> None:
    """Pieces follow each other in rank order, units by units, from the first element to the last."""
    units = sum(placement.local_units)
    shape = (units * factor, *(1,) * (len(placement.dims) - 1), *rest)
    pieces = [placement.piece(shape, rank) for rank in range(placement.num_shards)]

    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == numel_of(shape)
    assert placement.piece_numels(shape) == tuple(piece.numel for piece in pieces)
    assert [numel * units for numel in placement.piece_numels(shape)] == [
        n * numel_of(shape) for n in placement.local_units
    ]
    assert placement.owners(shape) == tuple(r for r, piece in enumerate(pieces) if piece.numel)


def test_whole_tensor_on_one_rank() -> None:
    """dims=() keeps the tensor on the rank that has the unit, whatever its shape."""
    placement = RaggedShard((), (0, 0, 1))

    for shape in [(), (5,), (3, 7)]:
        assert placement.piece_numels(shape) == (0, 0, numel_of(shape))
    assert placement.piece((3, 7), 2) == Range(0, 21)


@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        (RaggedShard((0,), (1, 2)), (8, 3)),
        (RaggedShard((0, 1), (1, 1)), (8,)),
        (RaggedShard((0,), (1, 1)), ()),
        (RaggedShard((0,), (1, 2)), (4, 3)),  # 3 units of 4 elements would cut rows of 3
    ],
)
def test_shapes_that_do_not_divide_are_refused(placement: RaggedShard, shape: tuple[int, ...]) -> None:
    """The error names the units, the shape and the placement."""
    with pytest.raises(PlacementError) as caught:
        placement.piece(shape, 0)
    assert (caught.value.got, caught.value.where) == (f"shape {shape}", str(placement))
    assert f"{sum(placement.local_units)} units" in str(caught.value.expected)


@given(cut_shapes())
def test_placement_of_pieces_gives_the_pieces(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """from_piece_numels and piece_numels are inverse, for any cut of any shape."""
    shape, numels = case

    assert RaggedShard.from_piece_numels(shape, numels).piece_numels(shape) == numels


@given(cut_shapes())
def test_placement_of_pieces_is_canonical(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Units are coprime (as large as the cuts allow) and no dim more than needed is flattened."""
    shape, numels = case
    placement = RaggedShard.from_piece_numels(shape, numels)

    assert math.gcd(*placement.local_units) == 1
    if placement.dims:
        shallower = numel_of(shape[len(placement.dims) - 1 :])
        assert len(placement.dims) == 1 or placement.unit_numel(shape) % shallower


@pytest.mark.parametrize(("shape", "numels"), [((0,), (0, 0)), ((3, 0), (0,)), ((0, 4), (0, 0, 0))])
def test_empty_tensors_have_a_placement(shape: tuple[int, ...], numels: tuple[int, ...]) -> None:
    """A tensor without elements gives every rank an empty piece."""
    placement = RaggedShard.from_piece_numels(shape, numels)

    assert placement.piece_numels(shape) == numels
    assert placement.owners(shape) == ()


@pytest.mark.parametrize("numels", [(5, 6), (6, 7), (12, -1, 1)])
def test_pieces_that_do_not_add_up_are_refused(numels: tuple[int, ...]) -> None:
    """Too few or too many elements, or a negative piece, are no placement."""
    with pytest.raises(PlacementError):
        RaggedShard.from_piece_numels((4, 3), numels)
