"""128 ranks as threads of one process: gather and reduction of a group, with most ranks holding nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

from vescale_fsdp.layout import GroupLayout, TensorSpec, plan_group
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.group_comm import GroupComm

WORLD = 128
TENSORS = [
    TensorSpec("up", (33, 17), "float32", 3 * 17),
    TensorSpec("bias", (5,), "float32", 1),
    TensorSpec("whole", (9, 9), "float32", 81),
    TensorSpec("flat", (2000,), "float32", 1),
]


def expected(layout: GroupLayout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {slot.fqn: torch.randn(slot.shape, generator=generator) for slot in layout.slots}


def gather_and_reduce(layout: GroupLayout, values: dict[str, torch.Tensor]) -> None:
    rank = dist.get_rank()
    comm = GroupComm(DeviceMesh("cpu", list(range(WORLD))))
    shard = torch.zeros(layout.shard_numel)
    for slot in layout.slots:
        piece = layout.piece(slot, rank)
        shard[piece.local_offset : piece.local_offset + piece.numel] = values[slot.fqn].reshape(-1)[
            piece.range.start : piece.range.stop
        ]
    full = DBuffer(layout, torch.zeros(layout.numel))
    full.start_gather(shard, comm.gather)
    full.wait_gather()
    for slot in layout.slots:
        assert torch.equal(full.view(slot), values[slot.fqn]), slot.fqn
    # Rank r contributes r + 1 times the values: the sum is known.
    full.flat.mul_(rank + 1)
    comm.change(force_sum=True)
    reduced = torch.empty(layout.shard_numel)
    work = comm.reduce_scatter(reduced, full.flat)
    if work is not None:
        work.wait()
    torch.testing.assert_close(reduced, shard * (WORLD * (WORLD + 1) / 2))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_of_a_group_on_128_ranks() -> None:
    """Every rank gathers all tensors whole, and reductions leave each rank its own piece's sum."""
    layout = plan_group(TENSORS, WORLD)
    empty = sum(1 for rank in range(WORLD) if not list(layout.pieces_of(rank)))
    assert 0 < empty < WORLD
    values = expected(layout)

    @spawn_threads_and_init_comms(world_size=WORLD)  # type: ignore[untyped-decorator]
    def run(self: object) -> None:
        gather_and_reduce(layout, values)

    run(None)
