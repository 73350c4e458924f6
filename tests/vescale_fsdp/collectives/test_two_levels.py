"""Collectives within nodes, then across them: values, the order of sums, bytes that cross the network, agreement."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.distributed import cpu_mesh, run_ranks
from tests.vescale_fsdp.collectives.slices import (
    GATHERED,
    MEAN,
    PAIRS,
    SUM,
    allocations,
    same_bits,
    started_gathers,
    to_gather,
    to_sum,
)
from vescale_fsdp import fully_shard
from vescale_fsdp.collectives import slice_exchange
from vescale_fsdp.collectives.operations import reduce_scatter_into
from vescale_fsdp.collectives.process_groups import Nodes, ranks_per_node, set_hosts, set_nodes, two_levels
from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.runtime.comm.unsharded_grads import ReducedShard
from vescale_fsdp.runtime.comm_context import CommContext, _Reduction
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup

PER_NODE = 2
ROOM_BYTES = 8 << 10  # 8 KiB


@contextmanager
def bytes_across() -> Iterator[Counter[str]]:
    """Bytes that this rank sends to ranks of its own node and of others."""
    sent: Counter[str] = Counter()
    isend = dist.isend

    def counted(tensor: torch.Tensor, *args: Any, group_dst: int, **kwargs: Any) -> Any:
        is_across = group_dst // PER_NODE != dist.get_rank() // PER_NODE
        sent["across" if is_across else "within"] += tensor.numel() * tensor.element_size()
        return isend(tensor, *args, group_dst=group_dst, **kwargs)

    with mock.patch.object(dist, "isend", counted):
        yield sent


def gathers(numel: int) -> list[Counter[str]]:
    """Two gathers under way at once, whose ends some ranks await in the other order; bytes sent, by dtype."""
    set_nodes(dist.group.WORLD, PER_NODE)
    counts = []
    for dtype in GATHERED:
        expected = to_gather(numel, dtype)
        for within in (True, False):
            fulls = [torch.zeros_like(values) for values in expected]
            with bytes_across() as sent:
                works = started_gathers(fulls, expected, numel, within=within)
                wait_for(*(works if dist.get_rank() else reversed(works)))
            assert same_bits(fulls, expected), (dtype, within)
        counts.append(sent)
    return counts


def beside(per_node: int, in_rounds: bool, measure: Callable[..., Any], *args: object) -> Any:
    """What one of the functions here measures, with slices of any size sent in rounds, or none."""
    with (
        mock.patch(f"{__name__}.PER_NODE", per_node),
        mock.patch.object(slice_exchange, "_ROUND_BYTES", 0 if in_rounds else 1 << 30),
    ):
        return measure(*args)


@pytest.mark.parametrize("in_rounds", [False, True])
def test_slices_are_sent_directly_between_nodes_of_one_rank(in_rounds: bool) -> None:
    """To every node once, or around the ring of nodes; nothing else is sent on."""
    sent = {"across": 2 * 2 * 100 * GATHERED[0].itemsize}
    assert [counts[0] for counts in run_ranks(3, beside, 1, in_rounds, gathers, 100)] == [sent] * 3


@pytest.mark.parametrize(
    "world, numel, in_rounds",
    [
        (4, 1000, False),
        *(pytest.param(6, 77, in_rounds, marks=pytest.mark.part("numerics")) for in_rounds in (False, True)),
    ],
)
def test_gathered_slices_cross_to_a_node_once(world: int, numel: int, in_rounds: bool) -> None:
    """Every rank sends a slice to each other node, and to its node's ranks what they lack."""
    nodes = world // PER_NODE
    for counts in run_ranks(world, beside, PER_NODE, in_rounds, gathers, numel):
        for dtype, sent in zip(GATHERED, counts, strict=True):
            slice_bytes = 2 * numel * dtype.itemsize  # of two gathers
            assert sent == {"across": (nodes - 1) * slice_bytes, "within": nodes * slice_bytes}, dtype


def sums(numel: int) -> list[tuple[int, Counter[str]]]:
    """Sums and means of every pair of dtypes; bytes of room and bytes sent for each."""
    set_nodes(dist.group.WORLD, PER_NODE)
    found = []
    for narrow, wide in PAIRS:
        full, total = to_sum(numel, narrow, wide)
        for op in [SUM] if wide is torch.int64 else [SUM, MEAN]:
            shard = torch.full((numel,), 7, dtype=wide)
            with (
                allocations() as made,
                bytes_across() as sent,
                mock.patch.object(slice_exchange, "_ROOM_BYTES", ROOM_BYTES),
            ):
                wait_for(reduce_scatter_into(shard, full.clone(), op, dist.group.WORLD))
            torch.testing.assert_close(shard, total if op == SUM else total / dist.get_world_size())
        found.append((sum(made), sent))
    return found


@pytest.mark.parametrize(
    "world, numel, in_rounds",
    [
        (4, 0, False),
        (4, 1, False),
        (4, 5000, False),
        (6, 700, True),
        pytest.param(6, 700, False, marks=pytest.mark.part("numerics")),
    ],
)
def test_sums_of_a_node_cross_once(world: int, numel: int, in_rounds: bool) -> None:
    """Unless the slices of its two ranks have no more bytes than their sum, whose order is then that of one level."""
    nodes = world // PER_NODE
    for found in run_ranks(world, beside, PER_NODE, in_rounds, sums, numel):
        for (narrow, wide), (room_bytes, sent) in zip(PAIRS, found, strict=True):
            one_level = wide.itemsize >= PER_NODE * narrow.itemsize
            crossing = PER_NODE * narrow.itemsize if one_level else wide.itemsize
            assert sent["across"] == (nodes - 1) * numel * crossing, (narrow, wide)
            assert sent["within"] == (1 if one_level else nodes) * numel * narrow.itemsize
            assert room_bytes <= ROOM_BYTES


def order_of_sums(narrow: torch.dtype) -> float:
    """1, 0, 2^-24, 2^-24 in fp32: 1 if the small ones are added to it one by one."""
    value = (1.0, 0.0, 2.0**-24, 2.0**-24)[dist.get_rank()]
    set_nodes(dist.group.WORLD, PER_NODE)
    shard = torch.empty(1)
    full = torch.full((4,), value, dtype=narrow)
    wait_for(reduce_scatter_into(shard, full, SUM, dist.group.WORLD))
    return shard.item()


def test_the_order_of_sums_is_that_of_ranks_within_nodes() -> None:
    """The same on all ranks; bf16 slices of two ranks per node are summed one by one, as on one node."""
    assert run_ranks(4, order_of_sums, torch.float32) == [1 + 2.0**-23] * 4
    assert run_ranks(4, order_of_sums, torch.bfloat16) == [1.0] * 4


def nodes_found() -> list[Nodes | None]:
    """The nodes of some groups of four ranks."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2], [0, 2], [0, 1])]
    mine = [each for each in groups if dist.get_rank() in dist.get_process_group_ranks(each)]
    found = []
    for each in mine:
        for per_node in (0, 1, 2, 4):
            set_nodes(each, per_node)
            found.append(two_levels(each, sent_bytes=4, summed_bytes=4))
    return found


def test_groups_with_and_without_two_levels() -> None:
    """Two levels take several nodes of equally many ranks, at least two."""
    found = run_ranks(4, nodes_found)[0]
    # torch sorts the ranks of a group: the second is the first.
    none = [None] * 4
    assert found == [None, None, (2, 2), None, None, None, (2, 2), None, *none, *none, *none]


class Step(NamedTuple):
    """A step with gradients of two backwards, where LOCAL_WORLD_SIZE may differ between ranks."""

    in_two_levels: bool  # whether reductions of fp32 would be
    overlaps: set[bool]  # whether reductions were in flight while the next unit computed
    full: set[int]  # units in full at that moment
    waiting: int  # the most units in full, or being gathered, while the host waited for a gather
    grads: list[torch.Tensor]


def trained(per_node: list[str], policy: MixedPrecisionPolicy) -> Step:
    """A step of three units."""
    torch.manual_seed(0)
    mesh = cpu_mesh()
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 40), torch.nn.Linear(40, 8))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    units = [state_of(module) for module in model]
    overlaps: set[bool] = set()
    full: set[int] = set()
    waiting = [0]
    finish_gather = ParamGroup.finish_gather

    def num_full() -> int:
        return sum(group.state is not GroupState.SHARDED for unit in units for group in unit.groups)

    def watch(grad: torch.Tensor) -> None:  # the unit behind has ended its backward
        overlaps.update(each.reduced.work is not None for each in units[0].comm.in_flight)
        full.add(num_full())

    def wait_and_count(group: ParamGroup) -> None:
        waiting.append(num_full())
        finish_gather(group)

    model[0].register_forward_hook(lambda module, args, output: output.register_hook(watch) and None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=per_node[dist.get_rank()]),
        mock.patch.object(ParamGroup, "finish_gather", wait_and_count),
    ):
        for _ in range(2):
            model(torch.randn(5, 24, generator=generator)).float().pow(2).mean().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    in_two_levels = two_levels(mesh.get_group(), sent_bytes=4, summed_bytes=4) is not None
    return Step(in_two_levels, overlaps, full, max(waiting), grads)


def test_a_step_has_the_gradients_of_one_level() -> None:
    """Up to the order of fp32 sums, and with the same bits where ranks of two per node send bf16 gradients."""
    for policy in (MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy()):
        expected = run_ranks(4, trained, [""] * 4, policy)[0].grads
        exact = {"rtol": 0, "atol": 0} if policy.param_dtype is torch.bfloat16 else {}
        for step in run_ranks(4, trained, ["2"] * 4, policy):
            assert step.in_two_levels and step.overlaps == {True}
            torch.testing.assert_close(step.grads, expected, **exact)


@pytest.mark.parametrize("per_node, overlaps", [("1", True), ("2", False), ("", False)])
def test_collectives_overlap_between_nodes_only(per_node: str, overlaps: bool) -> None:
    """With the same bits, and no more than two units in full; the next gather begins before the wait for the last."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    expected = run_ranks(2, trained, [""] * 2, policy)[0].grads
    for step in run_ranks(2, trained, [per_node] * 2, policy):
        assert step.overlaps == {overlaps} and not step.in_two_levels
        assert max(step.full) <= 2 and step.waiting == 1 + overlaps
        assert all(map(torch.equal, step.grads, expected))


def test_nodes_of_different_sizes_use_one_level() -> None:
    """LOCAL_WORLD_SIZE then differs between ranks, which is no error."""
    plain = MixedPrecisionPolicy()
    expected = run_ranks(4, trained, [""] * 4, plain)[0].grads
    for step in run_ranks(4, trained, ["2", "2", "1", "1"], plain):
        assert not step.in_two_levels and step.overlaps == {False}
        assert all(map(torch.equal, step.grads, expected))


def trained_with_replicas(per_node: str, fails: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Backwards of five units over two replicas: how many all-reduces of replicas were in flight, and gradients."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(5)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    state = state_of(model[0])
    in_flight: list[int] = []

    def watch(grad: torch.Tensor) -> None:
        in_flight.append(len(state.comm._replicating))

    model[0].register_forward_hook(lambda module, args, output: output.register_hook(watch) and None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(5, 12, generator=generator) for _ in range(3)]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=per_node):
        model(batches[0]).pow(2).mean().backward()
        if fails:  # in the middle of a backward, on all ranks
            handle = model[1].register_full_backward_pre_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(batches[1]).mean().backward()
            handle.remove()
            model.reset_iter_state()
            model.zero_grad()
            assert not state.comm._replicating
        model.set_requires_all_reduce(False)
        model(batches[1]).pow(2).mean().backward()
        model.set_requires_all_reduce(True)
        model(batches[2]).pow(2).mean().backward()
    assert not state.comm._replicating
    return in_flight, [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("fails", [False, True])
def test_all_reduces_of_replicas_overlap_between_nodes_only(fails: bool) -> None:
    """With the same bits, in order, at most two at a time; also after a backward that failed."""
    expected = run_ranks(4, trained_with_replicas, "", fails)
    results = run_ranks(4, trained_with_replicas, "2", fails)
    for (without, grads), (beside, found) in zip(expected, results, strict=True):
        assert set(without) == {0} and max(beside) in (1, 2)
        assert all(grad.abs().sum() > 0 for grad in found)
        assert all(map(torch.equal, found, grads))


class _Recorded:
    """A work object whose wait is noted, and fails if it has to."""

    def __init__(self, name: str, waited: list[str], *, fails: bool = False) -> None:
        self._name, self._waited, self._fails = name, waited, fails

    def wait(self) -> None:
        self._waited.append(self._name)
        if self._fails:
            raise ConnectionError(self._name)


def test_dropping_waits_for_all_reduces_of_replicas_after_one_that_fails() -> None:
    """Otherwise gloo would still write into a shard, or read a gradient buffer, that the next step reuses."""
    waited: list[str] = []
    comm = CommContext(None)
    for number in range(2):
        work = _Recorded(f"all-reduce {number}", waited, fails=number == 0)
        comm._replicating.append((mock.Mock(), mock.Mock(), cast(Work, work)))
    comm.in_flight = [
        _Reduction(mock.Mock(), cast(ReducedShard, _Recorded("reduction", waited)), None, None, None)
    ]
    with pytest.raises(ConnectionError):
        comm.drop_reductions()
    assert waited == ["all-reduce 0", "all-reduce 1", "reduction"]
    assert not comm._replicating and not comm.in_flight


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabb", 2), ("aabbcc", 2), ("abcd", 1), ("aaaa", 4), ("aabc", 0), ("abab", 0), ("", 8)],
)
def test_hosts_of_a_membership_count_before_the_variable_of_the_launcher(hosts: str, expected: int) -> None:
    """If each has as many ranks, and they follow each other; without hosts the variable counts."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8"):
        set_hosts(hosts)
        try:
            assert ranks_per_node() == expected
        finally:
            set_hosts("")
