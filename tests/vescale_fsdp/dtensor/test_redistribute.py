"""What redistribution moves: exactly what changes owner, by one collective; its asynchronous form; gradients."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtensor_conformance import plain
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor
from vescale_fsdp.dtensor.ragged_dtensor import redistribute as move
from vescale_fsdp.errors import PlacementError, UnsupportedOpError

# The package's attribute of that name is the function.
redistribute = importlib.import_module("vescale_fsdp.dtensor.redistribute")

SHAPE = (6, 5)
COLLECTIVES = (
    "all_gather_into",
    "all_reduce_in_place",
    "broadcast_in_place",
    "reduce_in_place",
    "reduce_scatter_into",
)


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Which collectives ran, and how many elements this rank sent to others in every all-to-all."""
    calls: dict[str, list[int]] = {}
    exchange = redistribute.all_to_all_into

    def counting(name: str) -> object:
        real = vars(redistribute)[name]

        def call(*args: object) -> object:
            calls.setdefault(name, []).append(0)
            return real(*args)

        return call

    def all_to_all(
        received: torch.Tensor, sent: torch.Tensor, incoming: list[int], outgoing: list[int], group: object
    ) -> object:
        rank = dist.get_rank()
        assert outgoing[rank] == incoming[rank] == 0 and sent.numel() == sum(outgoing)
        calls.setdefault("all_to_all_into", []).append(sent.numel())
        return exchange(received, sent, incoming, outgoing, group)

    with (
        mock.patch.multiple(redistribute, **{name: counting(name) for name in COLLECTIVES}),
        mock.patch.object(redistribute, "all_to_all_into", all_to_all),
    ):
        yield calls


def moved(source: Placement, target: Placement) -> tuple[dict[str, list[int]], int, int]:
    """Collectives of one move; elements this rank held, and of those how many it holds afterwards."""
    mesh = cpu_mesh()
    numbers = torch.arange(math.prod(SHAPE), dtype=torch.float32).view(SHAPE)
    stock = DTensor.from_local(numbers, mesh, [Replicate()], run_check=False)
    tensor = move(stock, [source])
    with counted() as calls:
        there = move(tensor, [target])
    assert torch.equal(there.full_tensor(), numbers)
    held = set(tensor.to_local().reshape(-1).tolist())
    return calls, len(held), len(held & set(there.to_local().reshape(-1).tolist()))


OWNER = RaggedShard((), (0, 1, 0))
ROWS = RaggedShard((0,), (1, 0, 5))
CUTS = RaggedShard((0, 1), (13, 8, 9))


@pytest.mark.parametrize(
    "source, target",
    [
        (ROWS, CUTS),
        (CUTS, ROWS),
        (CUTS, OWNER),
        (OWNER, CUTS),
        (CUTS, Shard(0)),
        (Shard(1), CUTS),
        (ROWS, Shard(1)),
    ],
    ids=str,
)
def test_one_all_to_all_of_what_changes_owner(source: Placement, target: Placement) -> None:
    """Between cuts, every rank sends exactly the elements it loses, in one all-to-all."""
    results = run_ranks(3, moved, source, target)

    for calls, held, kept in results:
        assert calls == {"all_to_all_into": [held - kept]}
    assert sum(held - kept for _, held, kept in results) > 0


@pytest.mark.parametrize(
    "source, target, expected",
    [
        (CUTS, Replicate(), {"all_gather_into": 1}),
        (OWNER, Replicate(), {"broadcast_in_place": 1}),
        (ROWS, Replicate(), {"broadcast_in_place": 2}),
        (Replicate(), CUTS, {}),
        (CUTS, CUTS, {}),
    ],
    ids=str,
)
def test_collectives_to_and_from_replicate(
    source: Placement, target: Placement, expected: dict[str, int]
) -> None:
    """Even pieces are gathered at once, few owners broadcast, and to cut a replica costs nothing."""
    for calls, _, _ in run_ranks(3, moved, source, target):
        assert {name: len(sent) for name, sent in calls.items()} == expected


def summed(target: Placement, op: str) -> dict[str, list[int]]:
    """Partial to ragged: every rank's own values, reduced."""
    mesh = cpu_mesh()
    own = plain(SHAPE, 10 + dist.get_rank())
    every = torch.stack([plain(SHAPE, 10 + rank) for rank in range(3)])
    tensor = DTensor.from_local(own, mesh, [Partial(op)], run_check=False)
    with counted() as calls:
        there = move(tensor, [target])
    assert isinstance(there, RaggedDTensor)
    want = {"sum": every.sum(0), "avg": every.mean(0), "max": every.amax(0), "min": every.amin(0)}[op]
    torch.testing.assert_close(there.full_tensor(), want)
    assert torch.equal(own, plain(SHAPE, 10 + dist.get_rank()))
    return calls


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_partial_to_ragged_is_a_reduce_scatter(op: str) -> None:
    """Sums become pieces by one reduce-scatter; the source is left alone."""
    for calls in run_ranks(3, summed, CUTS, op):
        assert {name: len(sent) for name, sent in calls.items()} == {"reduce_scatter_into": 1}


@pytest.mark.parametrize("target, owners", [(OWNER, 1), (ROWS, 2)], ids=str)
def test_partial_to_few_owners_is_a_reduction_each(target: Placement, owners: int) -> None:
    """Where padding would more than double the traffic, each owner's piece is reduced onto it."""
    for calls in run_ranks(3, summed, target, "sum"):
        assert {name: len(sent) for name, sent in calls.items()} == {"reduce_in_place": owners}


@pytest.mark.parametrize("op", ["max", "min"])
def test_maxima_and_minima_are_reduced(op: str) -> None:
    """Maxima and minima come out right as well."""
    run_ranks(3, summed, CUTS, op)


def hybrid_reduction() -> dict[str, list[int]]:
    """(Partial, Partial) to (Replicate, Ragged), as HSDP reduces gradients."""
    mesh = cpu_mesh(2, 2)
    own = plain(SHAPE, dist.get_rank())
    tensor = DTensor.from_local(own, mesh, [Partial(), Partial()], run_check=False)
    sizes: list[int] = []
    real = redistribute.all_reduce_in_place

    def all_reduce(piece: torch.Tensor, *args: object) -> object:
        sizes.append(piece.numel())
        return real(piece, *args)  # type: ignore[arg-type]

    with counted() as calls, mock.patch.object(redistribute, "all_reduce_in_place", all_reduce):
        there = move(tensor, [Replicate(), RaggedShard((0,), (2, 1))])
    want = sum((plain(SHAPE, rank) for rank in range(4)), torch.zeros(SHAPE))
    torch.testing.assert_close(there.full_tensor(), want)
    assert sizes == [there.to_local().numel()]
    return calls


def test_hybrid_reduces_pieces_over_replicas() -> None:
    """The reduce-scatter comes first, so that only pieces are all-reduced over the replicas."""
    for calls in run_ranks(4, hybrid_reduction):
        assert {name: len(sent) for name, sent in calls.items()} == {"reduce_scatter_into": 1}


def hybrid_averages() -> None:
    """Averages over both axes, in one step and in two; a Partial ragged tensor sums itself before a product."""
    mesh = cpu_mesh(2, 2)
    own = plain(SHAPE, dist.get_rank())
    every = torch.stack([plain(SHAPE, rank) for rank in range(4)]).view(2, 2, *SHAPE)
    cut = RaggedShard((0,), (2, 1))
    tensor = DTensor.from_local(own, mesh, [Partial("avg"), Partial("sum")], run_check=False)
    there = move(tensor, [Replicate(), cut])
    torch.testing.assert_close(there.full_tensor(), every.sum(1).mean(0))
    halfway = move(tensor, [Partial("avg"), cut])
    assert isinstance(halfway, RaggedDTensor) and halfway.placements[0].is_partial()
    torch.testing.assert_close((halfway * halfway).full_tensor(), every.sum(1).mean(0) ** 2)
    torch.testing.assert_close(halfway.sum().full_tensor(), every.sum(1).mean(0).sum())
    with pytest.raises(UnsupportedOpError) as caught:
        halfway.add_(1)
    assert caught.value.got == "aten.add_.Tensor"


def test_averages_and_unfinished_sums() -> None:
    """Averages divide by their own axis only; sums that are not done are done before anything reads them."""
    run_ranks(4, hybrid_averages)


PLACEMENTS_2D: list[tuple[Placement, Placement]] = [
    (Replicate(), Replicate()),
    (Replicate(), RaggedShard((0, 1), (13, 17))),
    (RaggedShard((0,), (1, 2)), Replicate()),
    (RaggedShard((0,), (1, 2)), Shard(0)),
    (RaggedShard((0, 1), (7, 8)), Shard(0)),
    (RaggedShard((0,), (1, 1)), Shard(1)),
    (Shard(0), RaggedShard((0, 1), (0, 1))),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
]


def all_pairs() -> int:
    """Every placement of a 2-D mesh to every other, forwards and as gradients."""
    mesh = cpu_mesh(2, 2)
    full, weight = plain(SHAPE), plain(SHAPE, 1)
    stock = DTensor.from_local(full, mesh, [Replicate()] * 2, run_check=False)
    weights = {p: move(DTensor.from_local(weight, mesh, [Replicate()] * 2), p) for p in PLACEMENTS_2D}
    pairs = 0
    for source in PLACEMENTS_2D:
        for target in PLACEMENTS_2D:
            tensor = move(stock, source).detach().requires_grad_()
            there = move(tensor, target)
            assert torch.equal(there.full_tensor(), full), (source, target)
            assert there.placements == weights[target].placements
            assert torch.equal(move(tensor.detach(), target, async_op=True).wait().full_tensor(), full)
            there.backward(weights[target])
            assert isinstance(tensor.grad, DTensor) and tensor.grad.placements == tensor.placements
            assert torch.equal(tensor.grad.full_tensor(), weight), (source, target)
            pairs += 1
    return pairs


@pytest.mark.part("numerics")
def test_all_pairs_on_a_2d_mesh() -> None:
    """Values and gradients survive every move between ten kinds of placements."""
    assert run_ranks(4, all_pairs) == [100] * 4


def overlapping() -> bool:
    """Several moves in flight at once; the values of each."""
    mesh = cpu_mesh()
    fulls = [plain(SHAPE, i) for i in range(4)]
    tensors = [distribute_tensor(full, mesh, [CUTS]) for full in fulls]
    targets = [ROWS, OWNER, Replicate(), Shard(1)]
    pending = [move(t, [target], async_op=True) for t, target in zip(tensors, targets, strict=True)]
    arrived = [p.wait() for p in pending]
    assert torch.equal(arrived[0].to_local(), pending[0].wait().to_local())
    return all(torch.equal(a.full_tensor(), full) for a, full in zip(arrived, fulls, strict=True))


def test_four_moves_are_under_way_at_once() -> None:
    """Four moves can be under way at the same time."""
    assert run_ranks(3, overlapping) == [True] * 3


def gradients_of_sums() -> None:
    """full_tensor with Partial gradients sums them by a reduce-scatter, as data parallelism wants."""
    mesh = cpu_mesh()
    leaf = distribute_tensor(plain(SHAPE), mesh, [CUTS]).requires_grad_()
    own = plain(SHAPE, 20 + dist.get_rank())
    assert isinstance(leaf, RaggedDTensor)
    with counted() as calls:
        (leaf.full_tensor(grad_placements=[Partial()]) * own).sum().backward()
    assert {name: len(sent) for name, sent in calls.items()} == {
        "all_gather_into": 1,
        "reduce_scatter_into": 1,
    }
    assert isinstance(leaf.grad, RaggedDTensor)
    want = sum((plain(SHAPE, 20 + rank) for rank in range(3)), torch.zeros(SHAPE))
    torch.testing.assert_close(leaf.grad.full_tensor(), want)


def test_gradients_are_reduce_scattered() -> None:
    """The backward pass of a gather is a reduce-scatter where the gradient is Partial."""
    run_ranks(3, gradients_of_sums)


def local_round_trip() -> None:
    """from_local and to_local are differentiable and share memory."""
    mesh = cpu_mesh()
    full = plain(SHAPE)
    piece = distribute_tensor(full, mesh, [CUTS]).to_local().clone().requires_grad_()
    tensor = RaggedDTensor.from_local(piece, mesh, [CUTS], shape=SHAPE)
    assert torch.equal(tensor.full_tensor(), full)
    (tensor * 3).to_local().sum().backward()
    assert piece.grad is not None and torch.equal(piece.grad, torch.full_like(piece, 3.0))
    assert tensor.detach().to_local().data_ptr() == piece.data_ptr()
    losses = (tensor.detach().requires_grad_() ** 2).sum()
    assert isinstance(losses, DTensor)
    leaf = distribute_tensor(full, mesh, [CUTS]).requires_grad_()
    ((leaf**2).sum() + leaf.mean() * 2).backward()
    assert isinstance(leaf.grad, DTensor)
    torch.testing.assert_close(leaf.grad.full_tensor(), 2 * full + 2 / 30)
    with pytest.raises(PlacementError) as caught:
        RaggedDTensor.from_local(piece.detach()[:-1], mesh, [CUTS], shape=SHAPE)
    assert caught.value.got == f"shape ({piece.numel() - 1},), strides (1,)"


def test_local_pieces_go_in_and_out_with_gradients() -> None:
    """Pieces go in and out, with gradients; a piece of another size is refused."""
    run_ranks(3, local_round_trip)


def scattered(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], source: int) -> None:
    """Only the source rank has the values."""
    mesh = cpu_mesh(*mesh_shape)
    coordinate = mesh.get_coordinate()
    full = plain(SHAPE) if list(coordinate or ()) == [source] * mesh.ndim else torch.full(SHAPE, math.nan)
    tensor = distribute_tensor(full, mesh, placements, src_data_rank=source)
    assert torch.equal(tensor.full_tensor(), plain(SHAPE))
    assert tensor.to_local().untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "mesh_shape, placements",
    [
        ((3,), (CUTS,)),
        ((3,), (OWNER,)),
        ((2, 2), (Replicate(), RaggedShard((0, 1), (13, 17)))),
        ((2, 2), (RaggedShard((0,), (1, 2)), Shard(0))),
        ((2, 2), (Shard(1), RaggedShard((0,), (1, 2)))),
    ],
    ids=str,
)
@pytest.mark.parametrize("source", [0, 1])
def test_values_of_one_rank(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], source: int
) -> None:
    """With src_data_rank, one rank's values are scattered to all."""
    run_ranks(math.prod(mesh_shape), scattered, mesh_shape, placements, source)


def bad_moves() -> list[tuple[object, object]]:
    """What was expected and got where something cannot be moved."""
    mesh = cpu_mesh()
    tensor = distribute_tensor(plain(SHAPE), mesh, [CUTS])
    other: DeviceMesh = cpu_mesh(3, 1)
    calls = [
        lambda: tensor.redistribute(placements=[Partial()]),
        lambda: tensor.redistribute(placements=[RaggedShard((0,), (1, 1))]),
        lambda: tensor.redistribute(placements=[RaggedShard((0,), (1, 2, 2))]),
        lambda: tensor.redistribute(placements=[Replicate(), Replicate()]),
        lambda: tensor.redistribute(other, [CUTS, Replicate()]),
        lambda: distribute_tensor(torch.tensor(1.0), mesh, [RaggedShard((), (1, 0, 0))]),
        lambda: distribute_tensor(plain(SHAPE), other, [CUTS, CUTS]),
    ]
    refused: list[tuple[object, object]] = []
    for call in calls:
        with pytest.raises((PlacementError, UnsupportedOpError)) as caught:
            call()
        refused.append((caught.value.expected, caught.value.got))
    return refused


def test_what_cannot_be_moved_says_so() -> None:
    """Targets that do not fit the mesh, the shape or the data are refused, with what was expected."""
    for expected, got in run_ranks(3, bad_moves)[0]:
        assert expected is not None and got is not None
