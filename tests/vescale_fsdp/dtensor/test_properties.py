"""Any shape, any cut, any number of ranks: ragged tensors beside plain ones, searched by hypothesis.

Rank 0 searches and sends each case to the others; all agree on the verdict, so that a case that fails anywhere fails
the search and can be shrunk. If every rank searched, they would draw different cases however they are seeded:
hypothesis takes constants out of the modules a process has imported, and kept ranks have imported different ones.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtensor_conformance import plain
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor, redistribute
from vescale_fsdp.layout.geometry import numel_of

SHAPES = st.one_of(
    st.lists(st.sampled_from([2, 3, 5, 7, 4, 1]), min_size=2, max_size=4),
    st.lists(st.sampled_from([7, 11, 1, 2]), min_size=1, max_size=1),
    st.lists(st.sampled_from([3, 1, 0]), min_size=1, max_size=4),
).map(tuple)
SEARCH = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> RaggedShard:
    """A cut of a tensor: between elements, between rows of some depth, by units, or not at all."""
    if draw(st.integers(0, 5)) == 0:
        owner = draw(st.integers(0, num_ranks - 1))
        return RaggedShard((), tuple(int(rank == owner) for rank in range(num_ranks)))
    depth = draw(st.sampled_from([len(shape), *range(1, len(shape) + 1)]))
    step = max(1, numel_of(shape[depth:]))
    count = numel_of(shape) // step
    edges = sorted(draw(st.lists(st.integers(0, count), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    return RaggedShard.from_piece_numels(shape, [(b - a) * step for a, b in pairwise((0, *edges, count))])


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> tuple[tuple[int, ...], RaggedShard, RaggedShard]:
    """A shape and two cuts of it."""
    shape = draw(SHAPES)
    return shape, draw(cuts(shape, num_ranks)), draw(cuts(shape, num_ranks))


def agreed(check: Callable[[], None]) -> None:
    """Run a check; if it fails on some rank, raise on all of them."""
    failure = ""
    try:
        check()
    except Exception as error:  # noqa: BLE001  whatever it is, all ranks must hear of it
        failure = f"{type(error).__name__}: {error}"
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text))


def search_together(
    strategy: st.SearchStrategy[Any], check: Callable[[Any], None], num_cases: int = SEARCH.max_examples
) -> None:
    """Run a check on cases of a strategy, the same ones on all ranks."""

    def on_all(case: Any) -> None:
        sent = [case]
        dist.broadcast_object_list(sent)
        if sent[0] is None:
            raise StopIteration
        agreed(lambda: check(sent[0]))

    if dist.get_rank() == 0:
        try:
            settings(SEARCH, max_examples=num_cases)(given(strategy)(on_all))()
        finally:
            with suppress(StopIteration):
                on_all(None)
        return
    with suppress(StopIteration):
        while True:
            with suppress(AssertionError):  # rank 0 raises it, for the smallest case
                on_all(None)


def check_case(shape: tuple[int, ...], cut: RaggedShard, other: RaggedShard, mesh: DeviceMesh) -> None:
    """Everything that must hold for one shape and two cuts."""
    full, second = plain(shape), plain(shape, 1)
    x = distribute_tensor(full, mesh, [cut])
    assert torch.equal(x.full_tensor(), full)
    numels = list(accumulate(cut.piece_numels(shape), initial=0))
    rank = dist.get_rank()
    assert x.to_local().reshape(-1).equal(full.reshape(-1)[numels[rank] : numels[rank + 1]])
    assert sum(box.numel for box in x.boxes) == x.to_local().numel() and len(x.boxes) <= 2 * len(shape) - 1
    moved = x.redistribute(placements=[other])
    assert isinstance(moved, RaggedDTensor) and torch.equal(moved.full_tensor(), full)
    assert moved.to_local().shape == distribute_tensor(full, mesh, [other]).to_local().shape
    for dim in range(len(shape)):
        there = x.redistribute(placements=[Shard(dim)])
        assert torch.equal(there.full_tensor(), full)
        assert torch.equal(redistribute(there, [other]).to_local(), moved.to_local())
    y = distribute_tensor(second, mesh, [cut])
    row = DTensor.from_local(second.sum(0, keepdim=True), mesh, [Replicate()])
    torch.testing.assert_close(
        (x * 2 + y / 3 - row).full_tensor(), full * 2 + second / 3 - second.sum(0, keepdim=True)
    )
    x.addcmul_(y, y).clamp_(-1, 1)
    torch.testing.assert_close(x.full_tensor(), full.addcmul(second, second).clamp(-1, 1))
    for order in (0.0, 1.0, 2.0):
        want = torch.linalg.vector_norm(second, order)
        torch.testing.assert_close(torch.linalg.vector_norm(y, order).full_tensor(), want)
    torch.testing.assert_close(y.sum().full_tensor(), second.sum())
    assert torch.equal(y, y.clone())
    if second.numel():
        assert torch.equal(y.amax().full_tensor(), second.amax())
        assert torch.equal(y.argmin().full_tensor(), second.argmin())
        torch.testing.assert_close(y.std(correction=0).full_tensor(), second.std(correction=0))
        assert torch.equal(y, y + 1) is False


def search() -> tuple[int, int]:
    """The search; how many cases had an empty rank, and how many a cut inside a row."""
    mesh = cpu_mesh()
    seen = {"empty": 0, "inside": 0}

    def check(case: tuple[tuple[int, ...], RaggedShard, RaggedShard]) -> None:
        shape, cut, other = case
        numels = cut.piece_numels(shape)
        seen["empty"] += 0 in numels
        seen["inside"] += any(n % max(1, numel_of(shape[1:])) for n in numels)
        check_case(shape, cut, other, mesh)

    search_together(cases(dist.get_world_size()), check)
    return seen["empty"], seen["inside"]


@pytest.mark.parametrize(
    "world", [3, *(pytest.param(world, marks=pytest.mark.part("numerics")) for world in (1, 2, 4, 5))]
)
def test_any_shape_and_cut(world: int) -> None:
    """Values, pieces, moves, arithmetic and reductions are those of plain tensors, empty ones included."""
    results = run_ranks(world, search, timeout_s=200.0)

    assert results == [results[0]] * world
    assert world == 1 or min(results[0]) >= 3, "the search must meet empty ranks and cuts inside rows"


@st.composite
def mesh_cases(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape whose dim is cut by Shard on one axis, and seeds of the ragged cut."""
    shape = draw(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3).map(tuple))
    return shape, draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 12))


def search_beside_shard() -> int:
    """Ragged beside Shard on a 2 x 2 mesh, even or not: exact, in both orders of the axes."""
    mesh = cpu_mesh(2, 2)
    count = 0

    def check(case: tuple[tuple[int, ...], int, int]) -> None:
        nonlocal count
        shape, dim, seed = case
        if shape[dim] % 2:
            return  # units are the same on all ranks, so what they cut must be alike
        inner = (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :])
        first = seed % (math.prod(inner) + 1)
        cut = RaggedShard.from_piece_numels(inner, (first, math.prod(inner) - first))
        full = plain(shape)
        for placements in ([cut, Shard(dim)], [Shard(dim), cut]):
            x = distribute_tensor(full, mesh, placements)
            assert torch.equal(x.full_tensor(), full)
            torch.testing.assert_close((x * x).sum().full_tensor(), (full * full).sum())
            assert torch.equal(x.amax().full_tensor(), full.amax())
            back = redistribute(x.redistribute(placements=[Replicate()] * 2), placements)
            assert torch.equal(back.to_local(), x.to_local())
        count += 1

    search_together(mesh_cases(), check)
    return count


@pytest.mark.part("numerics")
def test_any_cut_beside_shard() -> None:
    """Composition with Shard(0) and Shard(d) reconstructs exactly, whichever axis comes first."""
    assert min(run_ranks(4, search_beside_shard)) >= 15


def _fails_on_one_rank() -> list[int]:
    """Which cases each rank has seen of a search for one that rank 1 does not like."""
    seen: list[int] = []
    if dist.get_rank() == 1:
        importlib.import_module("tests.support.models")  # only here: constants for hypothesis to draw

    def check(case: int) -> None:
        seen.append(case)
        assert dist.get_rank() != 1 or case < 1000

    if dist.get_rank() == 0:
        with pytest.raises(AssertionError, match="rank 1"):
            search_together(st.integers(0, 10**9), check)
    else:
        search_together(st.integers(0, 10**9), check)
    return seen


def test_ranks_search_the_same_cases() -> None:
    """Whatever modules a rank has imported; and what fails on another rank than 0 fails the search."""
    one, two = run_ranks(2, _fails_on_one_rank)

    assert one == two and max(one) >= 1000 and len(set(one)) > 10
