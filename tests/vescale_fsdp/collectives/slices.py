"""What tests of slices share: dtypes, buffers with known sums and gathers, and the memory that a collective takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from vescale_fsdp.collectives.operations import all_gather_into
from vescale_fsdp.collectives.slice_exchange import Work

SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG
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
GATHERED = [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64]


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


def to_sum(numel: int, narrow: torch.dtype, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's slices for all ranks, and the sum of all ranks' slices for this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fulls = [(torch.arange(world * numel) * (r + 1) % 61 - 30).to(narrow) for r in range(world)]
    total = torch.stack([full.to(wide) for full in fulls]).sum(0)
    return fulls[rank], total[rank * numel : (rank + 1) * numel]


def to_gather(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two different results of a gather."""
    values = torch.arange(dist.get_world_size() * numel) % 61
    return [values.to(dtype), values.flip(0).to(dtype)]


def started_gathers(
    fulls: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], numel: int, *, within: bool
) -> list[Work | None]:
    """Start gathers of ``expected`` into ``fulls``, of shards that lie in the buffer or elsewhere."""
    rank, works = dist.get_rank(), []
    mine = slice(rank * numel, (rank + 1) * numel)
    for full, values in zip(fulls, expected, strict=True):
        shard = full[mine] if within else values[mine].clone()
        shard.copy_(values[mine])
        works.append(all_gather_into(full, shard, dist.group.WORLD))
    return works


def same_bits(fulls: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all bytes are equal."""
    return all(
        torch.equal(full.view(torch.uint8), values.view(torch.uint8))
        for full, values in zip(fulls, expected, strict=True)
    )
