"""Gathers and reductions on gloo, slice by slice: any dtype, one order of sums, room of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from vescale_fsdp.collectives import slice_exchange
from vescale_fsdp.collectives.operations import all_gather_into, reduce_scatter_into
from vescale_fsdp.collectives.slice_exchange import wait_for

SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG
ROOM_BYTES = 3 << 10  # of which three ranks make pieces of 384 elements of fp32

# What travels, and what it is summed in.
PAIRS = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.int64, torch.int64),
    (torch.complex64, torch.complex64),
]


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Bytes of the tensors that are made like another."""
    made: list[int] = []
    new_empty = torch.Tensor.new_empty

    def making(like: torch.Tensor, *sizes: int) -> torch.Tensor:
        room = new_empty(like, *sizes)
        made.append(room.numel() * room.element_size())
        return room

    with mock.patch.object(torch.Tensor, "new_empty", making):
        yield made


def sums(numel: int) -> list[int]:
    """Sums and means of every pair of dtypes; the bytes of room for each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rooms = []
    for narrow, wide in PAIRS:
        fulls = [(torch.arange(world * numel) * (r + 1) % 61 - 30).to(narrow) for r in range(world)]
        total = torch.stack([full.to(wide) for full in fulls]).sum(0)[rank * numel : (rank + 1) * numel]
        for op in [SUM] if wide is torch.int64 else [SUM, MEAN]:
            shard, full = torch.full((numel,), 7, dtype=wide), fulls[rank].clone()
            with allocations() as made, mock.patch.object(slice_exchange, "_ROOM_BYTES", ROOM_BYTES):
                wait_for(reduce_scatter_into(shard, full, op, dist.group.WORLD))
            torch.testing.assert_close(shard, total if op == SUM else total / world)
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


GATHERED = [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64]


def gathers(numel: int) -> None:
    """Of shards that lie in the buffer and of others; two under way at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in GATHERED:
        values = torch.arange(world * numel) % 61
        expected = [values.to(dtype), values.flip(0).to(dtype)]
        fulls = [torch.zeros_like(found) for found in expected]
        mine = slice(rank * numel, (rank + 1) * numel)
        for within in (True, False):
            works = []
            for full, found in zip(fulls, expected, strict=True):
                shard = full[mine] if within else found[mine].clone()
                shard.copy_(found[mine])
                with allocations() as made:
                    works.append(all_gather_into(full, shard, dist.group.WORLD))
                assert not made
            wait_for(*works)
            for full, found in zip(fulls, expected, strict=True):
                assert torch.equal(full.view(torch.uint8), found.view(torch.uint8)), (dtype, within)
                full.zero_()


@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_gathers_of_slices(numel: int) -> None:
    """Any dtype, from wherever the shard lies; nothing is allocated."""
    run_ranks(3, gathers, numel)
