"""Layouts: what may exist, who owns what, and JSON there and back."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range, numel_of
from vescale_fsdp.layout.group_layout import GroupLayout, ModelLayout, Piece, PieceRun, TensorSlot
from vescale_fsdp.layout.planner import TensorSpec, plan_group

DRAWN = GroupLayout(
    num_shards=3,
    shard_numel=12,
    slots=(
        TensorSlot("w", (7, 2), "float32", 2, 0),
        TensorSlot("b", (5,), "float32", 1, 14),
        TensorSlot("v", (4, 4), "float32", 4, 20),
    ),
)


def slot(fqn: str, numel: int, block_numel: int, offset: int) -> TensorSlot:
    """A 1-D float32 slot."""
    return TensorSlot(fqn, (numel,), "float32", block_numel, offset)


@st.composite
def planned_layouts(draw: st.DrawFn) -> GroupLayout:
    """A layout of up to six tensors of mixed shapes and blocks, empty ones included."""
    tensor_shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    specs = [
        TensorSpec(f"t{i}", shape, "float32", draw(st.integers(1, max(1, numel_of(shape)))))
        for i, shape in enumerate(draw(st.lists(tensor_shapes, max_size=6)))
    ]
    return plan_group(specs, draw(st.integers(1, 6)), align_numel=draw(st.sampled_from([1, 2, 8])))


@pytest.mark.parametrize(
    ("change", "got", "where"),
    [
        ({"shard_numel": 40}, "40", None),
        ({"slots": (slot("w", 40, 1, 0), slot("b", 5, 1, 40))}, "40", "b"),
        ({"slots": (replace(slot("w", 20, 1, 8), runs=(PieceRun(0, 2, 10, 8),)),)}, "8", "w"),
        (
            {"slots": (replace(slot("w", 20, 1, 0), runs=(PieceRun(0, 1, 10, 0), PieceRun(1, 1, 10, 4))),)},
            "run (1, 1, 10, 4) does not start at a multiple of 16",
            "w",
        ),
        ({"align_numel": 0}, "num_shards=2, shard_numel=64, align_numel=0", None),
    ],
)
def test_what_says_that_it_is_aligned_is(change: dict[str, Any], got: str, where: str | None) -> None:
    """The proof looks at shards, starts and pieces; without the promise the same numbers are read."""
    good = GroupLayout(2, 64, (slot("w", 40, 1, 0), slot("b", 5, 1, 48)), 16)
    with pytest.raises(LayoutError) as error:
        replace(good, **change)

    assert (str(error.value.got), error.value.where) == (got, where)
    unaligned = replace(good, **{**change, "align_numel": 1})
    assert GroupLayout.from_json(unaligned.to_json()) == unaligned
    assert GroupLayout.from_json(good.to_json()) == good != replace(good, align_numel=1)


def test_drawing_of_the_module() -> None:
    """The numbers of the drawing in layout's docstring."""
    w, b, v = DRAWN.slots

    assert [tuple(s.span) for s in (w, b, v)] == [(0, 14), (14, 19), (20, 36)]
    assert [DRAWN.piece(w, rank).range for rank in range(3)] == [(0, 12), (12, 14), (0, 0)]
    assert [DRAWN.piece(v, rank) for rank in (1, 2)] == [
        Piece(Range(0, 4), 8),
        Piece(Range(4, 16), 0),
    ]
    assert DRAWN.piece_numels(b) == (0, 5, 0)
    assert (DRAWN.numel, DRAWN.payload_numel) == (36, 35)
    assert DRAWN.padding_ratio == 1 / 35


def test_pieces_of_a_rank_in_buffer_order() -> None:
    """Non-empty pieces only, ordered by where they start in the shard."""
    held = [[(s.fqn, p.local_offset, p.numel) for s, p in DRAWN.pieces_of(rank)] for rank in range(3)]

    assert held == [[("w", 0, 12)], [("w", 0, 2), ("b", 2, 5), ("v", 8, 4)], [("v", 0, 12)]]


@given(planned_layouts())
def test_every_element_has_one_owner(layout: GroupLayout) -> None:
    """The shards' pieces cover every element of every tensor once, at the place the offset says."""
    seen: Counter[tuple[str, int]] = Counter()
    for rank in range(layout.num_shards):
        for tensor, piece in layout.pieces_of(rank):
            for step in range(piece.numel):
                element = piece.range.start + step
                seen[tensor.fqn, element] += 1
                place = rank * layout.shard_numel + piece.local_offset + step
                assert tensor.is_scattered or place == tensor.offset + element

    assert seen == Counter((tensor.fqn, i) for tensor in layout.slots for i in range(tensor.numel))


@given(planned_layouts())
def test_pieces_lie_inside_the_shard_and_do_not_overlap(layout: GroupLayout) -> None:
    """Pieces of a rank follow each other inside [0, S); their sizes are those of piece_numels."""
    for rank in range(layout.num_shards):
        end = 0
        for tensor, piece in layout.pieces_of(rank):
            assert piece.local_offset >= end
            assert piece.numel == layout.piece_numels(tensor)[rank] > 0
            end = piece.local_offset + piece.numel
        assert end <= layout.shard_numel
    assert all(sum(layout.piece_numels(tensor)) == tensor.numel for tensor in layout.slots)


@given(
    num_shards=st.integers(1, 4),
    shard_numel=st.integers(1, 12),
    numel=st.integers(0, 40),
    block=st.integers(1, 8),
    offset=st.integers(0, 12),
)
def test_a_layout_exists_exactly_if_no_block_is_cut(
    num_shards: int, shard_numel: int, numel: int, block: int, offset: int
) -> None:
    """The proof agrees with looking at every boundary inside the tensor."""
    inside = [k * shard_numel for k in range(num_shards + 1) if offset < k * shard_numel < offset + numel]
    legal = offset + numel <= num_shards * shard_numel and all((k - offset) % block == 0 for k in inside)
    if legal:
        assert GroupLayout(num_shards, shard_numel, (slot("t", numel, block, offset),)).payload_numel == numel
    else:
        with pytest.raises(LayoutError):
            GroupLayout(num_shards, shard_numel, (slot("t", numel, block, offset),))


@pytest.mark.parametrize(
    ("num_shards", "shard_numel", "slots", "got", "where"),
    [
        (0, 8, (), "num_shards=0", None),
        (2, -1, (), "shard_numel=-1", None),
        (2, 8, (slot("t", 4, 1, -1),), "offset=-1", "t"),
        (2, 8, (slot("t", 4, 0, 0),), "block_numel=0", "t"),
        (2, 8, (slot("t", -4, 1, 0),), "shape=(-4,)", "t"),
        (2, 8, (slot("t", 17, 1, 0),), "[0, 17)", "t"),
        (2, 8, (slot("t", 12, 3, 0),), "slot [0, 12)", "t"),
        (3, 8, (slot("t", 20, 3, 2),), "slot [2, 22)", "t"),
        (2, 8, (slot("a", 4, 1, 0), slot("b", 4, 1, 3)), "a (0, 4) and b (3, 7)", None),
        (2, 8, (slot("b", 4, 1, 3), slot("a", 4, 1, 0)), "a (0, 4) and b (3, 7)", None),
        (2, 8, (slot("a", 4, 1, 0), slot("a", 4, 1, 8)), "['a']", None),
    ],
)
def test_layouts_that_cannot_be(
    num_shards: int, shard_numel: int, slots: tuple[TensorSlot, ...], got: str, where: str | None
) -> None:
    """A layout that breaks an invariant is refused when built, naming the tensor and the numbers."""
    with pytest.raises(LayoutError) as refused:
        GroupLayout(num_shards, shard_numel, slots)
    assert got in str(refused.value.got) and refused.value.where == where


def test_empty_tensors_take_no_room() -> None:
    """A slot without elements may share its offset, is held by nobody, and needs no shard at all."""
    layout = GroupLayout(2, 4, (slot("none", 0, 1, 3), slot("t", 6, 1, 2)))
    nothing = GroupLayout(3, 0, (slot("none", 0, 1, 0),))

    assert layout.piece_numels(layout.slot("none")) == (0, 0)
    assert [s.fqn for s, _ in layout.pieces_of(0)] == ["t"]
    assert (nothing.numel, nothing.padding_ratio, list(nothing.pieces_of(1))) == (0, 0.0, [])


def test_a_scalar_is_one_element() -> None:
    """A 0-d tensor has one element and one owner."""
    layout = GroupLayout(2, 1, (TensorSlot("scale", (), "float32", 1, 1),))

    assert layout.piece_numels(layout.slot("scale")) == (0, 1)


def test_unknown_name_is_refused() -> None:
    """Asking for a tensor the group does not hold names those it holds."""
    with pytest.raises(LayoutError) as refused:
        DRAWN.slot("x")
    assert refused.value.got == "'x'" and "['b', 'v', 'w']" in str(refused.value.expected)


@given(planned_layouts())
def test_json_round_trip(layout: GroupLayout) -> None:
    """Through JSON text and back it is the same value, with the same hash."""
    back = GroupLayout.from_json(json.loads(json.dumps(layout.to_json())))
    model = ModelLayout.of([("one", layout), ("two", back)])

    assert back == layout
    assert hash(back) == hash(layout)
    assert ModelLayout.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_json_is_proven_again() -> None:
    """A layout read from a file that was tampered with is refused like any other."""
    data = DRAWN.to_json()
    data["slots"][2]["offset"] = 19
    with pytest.raises(LayoutError) as refused:
        GroupLayout.from_json(data)
    assert (refused.value.got, refused.value.where) == ("slot [19, 35)", "v")


@pytest.mark.parametrize("size", [1.5, 32.0, True, "32", None])
@pytest.mark.parametrize(
    "path",
    [("num_shards",), ("shard_numel",), ("align_numel",), ("slots", 0, "offset"), ("slots", 0, "shape", 0)],
)
def test_sizes_in_json_are_integers(path: tuple[Any, ...], size: object) -> None:
    """Any other value is refused by name."""
    data: Any = GroupLayout(2, 32, (TensorSlot("w", (4, 4), "float32", 4, 0),)).to_json()
    GroupLayout.from_json(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = size
    with pytest.raises(LayoutError) as caught:
        GroupLayout.from_json(data)
    assert repr(size) in str(caught.value.got)


def test_json_of_the_drawing() -> None:
    """The exact JSON, which checkpoints of every later version must be able to read."""
    assert DRAWN.to_json() == {
        "num_shards": 3,
        "shard_numel": 12,
        "slots": [
            {"fqn": "w", "shape": [7, 2], "dtype": "float32", "block_numel": 2, "offset": 0},
            {"fqn": "b", "shape": [5], "dtype": "float32", "block_numel": 1, "offset": 14},
            {"fqn": "v", "shape": [4, 4], "dtype": "float32", "block_numel": 4, "offset": 20},
        ],
        "align_numel": 1,
    }


def test_layouts_are_values() -> None:
    """Pickle and deepcopy give equal values, also after cached answers were asked for."""
    DRAWN.slot("w")
    twins = [pickle.loads(pickle.dumps(DRAWN)), copy.deepcopy(DRAWN)]

    assert twins == [DRAWN, DRAWN]
    assert len({DRAWN, *twins}) == 1
    assert GroupLayout(3, 12, DRAWN.slots[:2]) != DRAWN


def test_model_layout_adds_up_groups() -> None:
    """Padding of a model is that of all groups over all payload; names are distinct."""
    full = GroupLayout(2, 5, (slot("t", 10, 1, 0),))

    assert ModelLayout.of([("a", DRAWN), ("b", full)]).padding_ratio == pytest.approx(1 / 45)
    assert ModelLayout.of([]).padding_ratio == 0.0
    with pytest.raises(LayoutError) as refused:
        ModelLayout.of([("a", DRAWN), ("a", full)])
    assert refused.value.got == "['a', 'a']"


def test_json_size_does_not_depend_on_the_number_of_shards() -> None:
    """A layout of 16,384 shards is written in as many slots as one of 2, digits apart."""
    specs = [TensorSpec(f"t{i}", (1000, 64), "float32", 64) for i in range(50)]
    sizes = [len(json.dumps(plan_group(specs, shards).to_json())) for shards in (2, 16384)]

    assert abs(sizes[1] - sizes[0]) <= 0.01 * sizes[0]
