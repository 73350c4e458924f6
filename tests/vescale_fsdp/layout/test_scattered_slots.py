"""Scattered slots: what may exist, who owns what, and JSON there and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.parts.model_shapes import LAYERS
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.layout.granularity import Rows
from vescale_fsdp.layout.group_layout import (
    GroupLayout,
    ModelLayout,
    Piece,
    PieceRun,
    TensorSlot,
    runs_between,
)
from vescale_fsdp.layout.planner import TensorSpec, plan_group

DRAWN = GroupLayout(
    num_shards=5,
    shard_numel=12,
    slots=(
        TensorSlot("a", (5, 4), "float32", 4, 0),
        TensorSlot("u", (6, 5), "float32", 5, 24, (PieceRun(2, 3, 10, 0),)),
    ),
)


def scattered(numel: int, block_numel: int, offset: int, *runs: tuple[int, int, int, int]) -> TensorSlot:
    """A 1-D scattered slot."""
    return TensorSlot("s", (numel,), "float32", block_numel, offset, tuple(PieceRun(*run) for run in runs))


def gpt_oss(num_shards: int) -> GroupLayout:
    """A real layer whose o_proj is scattered."""
    specs = [
        TensorSpec(fqn, shape, "bfloat16", Rows(128).block_numel(shape))
        for fqn, shape in LAYERS["gpt-oss-120B"].items()
    ]
    return plan_group(specs, num_shards, scatter="auto")


def test_drawing_of_the_module() -> None:
    """The numbers of the second drawing in layout's docstring."""
    a, u = DRAWN.slots

    assert DRAWN.piece_numels(a) == (12, 8, 0, 0, 0)
    assert DRAWN.piece_numels(u) == (0, 0, 10, 10, 10)
    assert [DRAWN.piece(u, rank) for rank in (1, 2, 4)] == [
        Piece(Range(0, 0), 0),
        Piece(Range(0, 10), 0),
        Piece(Range(20, 30), 0),
    ]
    assert [[slot.fqn for slot, _ in DRAWN.pieces_of(rank)] for rank in range(5)] == [
        ["a"],
        ["a"],
        *[["u"]] * 3,
    ]
    assert (a.is_scattered, u.is_scattered) == (False, True)
    assert (DRAWN.copied_numel, DRAWN.copied_ratio, DRAWN.padding_ratio) == (30, 0.6, 0.2)
    contiguous = [TensorSpec(slot.fqn, slot.shape, "float32", slot.block_numel) for slot in DRAWN.slots]
    assert plan_group(contiguous, 5, align_numel=1, scatter="never").shard_numel == 15


def test_pieces_follow_each_other_over_several_runs() -> None:
    """Ranges of the tensor run on from one run to the next, the last piece may be short."""
    layout = GroupLayout(6, 10, (scattered(25, 4, 2, (0, 2, 8, 2), (3, 1, 4, 6), (5, 1, 5, 0)),))
    (slot,) = layout.slots

    pieces = [layout.piece(slot, rank) for rank in range(6)]

    assert [tuple(piece.range) for piece in pieces] == [(0, 8), (8, 16), (0, 0), (16, 20), (0, 0), (20, 25)]
    assert [piece.local_offset for piece in pieces if piece.numel] == [2, 2, 6, 0]
    assert list(layout.holders(slot)) == [0, 1, 3, 5]
    assert layout.piece_numels(slot) == (8, 8, 0, 4, 0, 5)


def test_a_scattered_slot_has_no_span() -> None:
    """Whoever slices the buffer by a span is told that there is none."""
    with pytest.raises(LayoutError) as refused:
        _ = DRAWN.slot("u").span
    assert refused.value.where == "u"


@pytest.mark.parametrize(
    ("slot", "got"),
    [
        (scattered(12, 4, 0, (0, 2, 4, 0)), "8 elements"),  # less than the tensor
        (scattered(8, 4, 0, (0, 3, 4, 0)), "12 elements"),  # more than the tensor
        (scattered(8, 4, 0, (0, 1, 2, 0), (1, 1, 6, 0)), "inside a block, at element 2"),
        (scattered(9, 4, 0, (0, 3, 3, 0)), "cuts blocks of 4"),
        (scattered(8, 4, 14, (1, 1, 4, 4), (0, 1, 4, 0)), "not after rank 1"),
        (scattered(8, 4, 0, (0, 1, 4, 0), (0, 1, 4, 4)), "not after rank 0"),
        (scattered(8, 4, 0, (0, 1, 8, 0), (1, 0, 4, 0)), "empty"),
        (scattered(8, 4, 8, (0, 1, 8, 8)), "leaves its shard"),
        (scattered(8, 4, 20, (2, 2, 4, 0)), "ranks below 4"),
        (scattered(8, 4, 3, (0, 2, 4, 0)), "offset 3"),
    ],
)
def test_runs_that_cannot_be(slot: TensorSlot, got: str) -> None:
    """A scattered slot that breaks an invariant is refused when built, naming tensor and run."""
    with pytest.raises(LayoutError) as refused:
        GroupLayout(3, 10, (slot,))
    assert got in str(refused.value.got) and refused.value.where == "s"


@given(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 5)),
    st.integers(0, 40),
    st.integers(0, 20),
)
def test_runs_overlap_ranges_exactly_if_they_share_an_element(
    run: tuple[int, int, int, int], start: int, numel: int
) -> None:
    """The closed form agrees with looking at every element."""
    first, ranks, piece_numel, local_offset = run
    shard_numel = local_offset + piece_numel
    held = {
        (first + i) * shard_numel + local_offset + element
        for i in range(ranks)
        for element in range(piece_numel)
    }

    others = runs_between(start, start + numel, shard_numel) if numel else ()
    found = any(PieceRun(*run).overlaps(other) for other in others)

    assert found == bool(held & set(range(start, start + numel)))


@pytest.mark.parametrize(
    "other",
    [
        TensorSlot("t", (3,), "float32", 1, 18),  # into the second piece
        TensorSlot("t", (20,), "float32", 1, 4),  # over both
        TensorSlot("t", (8,), "float32", 4, 22, (PieceRun(2, 2, 4, 2),)),  # shares rank 2
    ],
)
def test_overlaps_are_refused(other: TensorSlot) -> None:
    """A scattered slot shares no element with another slot, contiguous or scattered."""
    slots = (scattered(12, 4, 0, (0, 3, 4, 0)), other)
    with pytest.raises(LayoutError) as refused:
        GroupLayout(4, 10, slots)
    assert {word for word in str(refused.value.got).split() if word in "st"} == {"s", "t"}
    beside = TensorSlot("t", (12,), "float32", 4, 6, (PieceRun(0, 3, 4, 6),))
    assert GroupLayout(4, 10, (slots[0], beside)).copied_numel == 24


@pytest.mark.parametrize("num_shards", [768, 1024, 2048])
def test_json_round_trip(num_shards: int) -> None:
    """Through JSON text and back a layout with scattered slots is the same value; its runs are a few."""
    layout = gpt_oss(num_shards)
    back = GroupLayout.from_json(json.loads(json.dumps(layout.to_json())))

    assert layout.copied_numel == 2880 * 4096
    assert (back, hash(back)) == (layout, hash(layout))
    assert max(len(slot.runs) for slot in layout.slots) <= 4
    assert ModelLayout.of([("layer", layout)]).copied_numel == layout.copied_numel


def test_json_of_the_drawing() -> None:
    """The exact JSON; a slot without runs reads as before there were scattered slots."""
    plain, runs = DRAWN.to_json()["slots"]

    assert "runs" not in plain
    assert runs == {
        "fqn": "u",
        "shape": [6, 5],
        "dtype": "float32",
        "block_numel": 5,
        "offset": 24,
        "runs": [[2, 3, 10, 0]],
    }
