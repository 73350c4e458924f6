"""Gathers and reductions on gloo, slice by slice: any dtype, one order of sums, room of bounded size."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
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
from vescale_fsdp.collectives import slice_exchange
from vescale_fsdp.collectives.operations import reduce_scatter_into
from vescale_fsdp.collectives.slice_exchange import wait_for

ROOM_BYTES = 3 << 10  # of which three ranks make pieces of 384 elements of fp32


def sums(numel: int) -> list[int]:
    """Sums and means of every pair of dtypes; the bytes of room for each."""
    rooms = []
    for narrow, wide in PAIRS:
        full, total = to_sum(numel, narrow, wide)
        for op in [SUM] if wide is torch.int64 else [SUM, MEAN]:
            shard = torch.full((numel,), 7, dtype=wide)
            with allocations() as made, mock.patch.object(slice_exchange, "_ROOM_BYTES", ROOM_BYTES):
                wait_for(reduce_scatter_into(shard, full.clone(), op, dist.group.WORLD))
            torch.testing.assert_close(shard, total if op == SUM else total / dist.get_world_size())
            rooms.append(sum(made))
            assert sum(made) <= 2 * numel * narrow.itemsize, "no more than what comes"
    return rooms


@pytest.mark.parametrize("numel", [0, 1, 64, 5000])
def test_sums_of_slices(numel: int) -> None:
    """Any dtype, in one piece and in many: the sum is right, and what waits to be summed is bounded."""
    for rooms in run_ranks(3, sums, numel):
        assert len(rooms) == 2 * len(PAIRS) - 1
        assert all(0 < room <= ROOM_BYTES for room in rooms) if numel else rooms == [0] * len(rooms)


def order_of_sums(narrow: torch.dtype) -> list[float]:
    """1, 2^-24 and 2^-24 in fp32: 1 if the small ones are added to it one by one."""
    full = torch.full((3,), 1.0 if dist.get_rank() == 0 else 2.0**-24, dtype=narrow)
    shard = torch.empty(1)
    wait_for(reduce_scatter_into(shard, full, SUM, dist.group.WORLD))
    return shard.tolist()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_sums_have_one_order(narrow: torch.dtype) -> None:
    """That of the ranks, whoever owns the slice, whatever travels."""
    assert run_ranks(3, order_of_sums, narrow) == [[1.0]] * 3


def gathers(numel: int) -> None:
    """Of shards that lie in the buffer and of others; two under way at once."""
    for dtype in GATHERED:
        expected = to_gather(numel, dtype)
        for within in (True, False):
            fulls = [torch.zeros_like(values) for values in expected]
            with allocations() as made:
                works = started_gathers(fulls, expected, numel, within=within)
            assert not made
            wait_for(*works)
            assert same_bits(fulls, expected), (dtype, within)


@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_gathers_of_slices(numel: int) -> None:
    """Any dtype, from wherever the shard lies; nothing is allocated."""
    run_ranks(3, gathers, numel)
