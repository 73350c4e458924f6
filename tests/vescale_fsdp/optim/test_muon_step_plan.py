"""Owners are balanced by work and the same everywhere; matrices are flat ranges. No process group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.dtensor.piece_map import PieceMap
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import RunLengths
from vescale_fsdp.optim.muon_plan import (
    Matrix,
    SteppedParam,
    assign_owners,
    matrices_of,
    plan_step,
)


def llama_3_8b_matrices() -> list[tuple[int, int]]:
    """The 224 hidden matrices of Llama-3-8B."""
    layer = [
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        (14336, 4096),
        (14336, 4096),
        (4096, 14336),
    ]
    return layer * 32


@pytest.mark.parametrize(
    ("num_ranks", "most"), [(2, 1.001), (8, 1.001), (32, 1.001), (64, 1.06), (128, 1.06)]
)
def test_llama_is_balanced(num_ranks: int, most: float) -> None:
    """Llama-3-8B's iterations are spread evenly up to 32 ranks, and within 6 % up to 128."""
    flops = [Matrix(0, rows, cols).flops(5) for rows, cols in llama_3_8b_matrices()]
    owners = assign_owners(flops, [{}] * len(flops), [0] * num_ranks)
    loads = [sum(f for f, o in zip(flops, owners, strict=True) if o == rank) for rank in range(num_ranks)]

    assert sum(flops) == pytest.approx(666e12, rel=0.01)
    assert max(loads) / (sum(loads) / num_ranks) <= most


@given(
    flops=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    num_ranks=st.integers(1, 6),
)
def test_owners_are_within_the_bound(flops: list[int], num_ranks: int) -> None:
    """Longest processing time first: no rank has more than the mean plus one matrix."""
    owners = assign_owners(flops, [{}] * len(flops), [0] * num_ranks)
    loads = [sum(f for f, o in zip(flops, owners, strict=True) if o == rank) for rank in range(num_ranks)]

    assert max(loads) <= sum(flops) / num_ranks + max(flops)


def test_owners_take_what_they_hold_and_respect_fixed_work() -> None:
    """Among idle ranks the one that holds most of a matrix takes it; a busy rank is passed over."""
    assert assign_owners([5], [{0: 1, 1: 3, 2: 2}], [0, 0, 0]) == [1]
    assert assign_owners([5], [{0: 1, 1: 3, 2: 2}], [0, 9, 0]) == [2]


@given(st.data())
def test_the_rank_with_the_least_work_takes_the_next_matrix(data: st.DataObject) -> None:
    """The owners are those of the rule's plain words, asked of every rank for every matrix."""
    num_ranks = data.draw(st.integers(1, 6))
    ranks = range(num_ranks)
    flops = data.draw(st.lists(st.integers(0, 4), max_size=20))
    held = [data.draw(st.dictionaries(st.sampled_from(ranks), st.integers(1, 5), max_size=3)) for _ in flops]
    loads = data.draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    owners = assign_owners(flops, held, loads)

    for index in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        assert owners[index] == min(ranks, key=lambda r: (loads[r], -held[index].get(r, 0), r))
        loads[owners[index]] += flops[index]


def test_work_of_a_matrix() -> None:
    """5 steps on 2 x 3: 5 * (4 * 4 * 3 + 2 * 8), the same for its transpose."""
    assert Matrix(0, 2, 3).flops(5) == Matrix(0, 3, 2).flops(5) == 320


def test_matrices_are_flat_ranges() -> None:
    """Experts and fused blocks follow each other in the flattened tensor."""
    assert matrices_of((4, 3)) == (Matrix(0, 4, 3),)
    assert matrices_of((2, 4, 3)) == (Matrix(0, 4, 3), Matrix(12, 4, 3))
    assert matrices_of((2, 4, 3), (3, 1)) == (
        Matrix(0, 3, 3),
        Matrix(9, 1, 3),
        Matrix(12, 3, 3),
        Matrix(21, 1, 3),
    )
    assert matrices_of((0, 3)) == ()
    with pytest.raises(LayoutError) as caught:
        matrices_of((2, 2, 2, 2))
    assert caught.value.got == "shape (2, 2, 2, 2)"


def test_a_matrix_on_one_rank_stays_there() -> None:
    """Plain tensors and whole matrices are planned where they lie; nothing travels."""
    pieces = PieceMap((4, 3), RunLengths.of([12]))
    plan = plan_step([SteppedParam(pieces, matrices_of((4, 3), None, i), 5) for i in range(2)], 1 << 20, {})

    assert plan.here == (Matrix(0, 4, 3, 0), Matrix(0, 4, 3, 1))
    assert plan.buckets == ()
    assert plan.gathered == ()


def test_holder_of_a_range() -> None:
    """A range inside one piece has a holder; one that crosses a cut has none; empty pieces hold nothing."""
    pieces = PieceMap((4, 3), RunLengths.of([6, 0, 6]))
    assert pieces.holder_of(Matrix(0, 2, 3).range) == 0
    assert pieces.holder_of(Matrix(6, 2, 3).range) == 2
    assert pieces.holder_of(Matrix(3, 2, 3).range) is None
    assert list(pieces.holders_of(Matrix(3, 2, 3).range)) == [0, 2]
