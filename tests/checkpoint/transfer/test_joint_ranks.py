"""Two jobs that share no process group: they meet in a file or over TCP, and one sends the other its weights."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp.checkpoint.transfer.joint_ranks import joint_ranks
from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import plan_transfer
from vescale_fsdp.checkpoint.transfer.transfer import Transfer, describe_states
from vescale_fsdp.dtensor.ragged_dtensor import distribute_tensor
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.placement import RaggedShard


def two_jobs(folder: str, rendezvous: tuple[str, ...]) -> int:
    """Of three ranks the first two become one job and the third another; both number their ranks from 0."""
    rank = dist.get_rank()
    is_trainer = rank < 2
    dist.barrier()  # all have come, so none finds the others gone
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/job{int(is_trainer)}", 2 if is_trainer else 1)
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2 if is_trainer else 1)
    mesh = cpu_mesh()
    full = torch.arange(48.0).view(8, 6)
    sent = 0
    for where in rendezvous:
        ranks = joint_ranks(where, first_rank=0 if is_trainer else 2, num_ranks=3, timeout_s=60)
        assert (ranks.rank, ranks.world_size) == (rank, 3)
        state = {"w": distribute_tensor(full, mesh, [RaggedShard((0,), (3, 5))])} if is_trainer else None
        into = (
            None
            if is_trainer
            else {"w": distribute_stock(full * 0, mesh, [Shard(1)]), "b": torch.zeros(8, 6)}
        )
        described = describe_states(state, into, ranks=ranks)
        plan = plan_transfer(*described, links={"b": "w"})
        Transfer(plan, ranks=ranks, verify=True).run(state, into)
        if into is not None:
            assert torch.equal(into["w"].full_tensor(), full) and torch.equal(into["b"], full)
        dist.all_reduce(torch.ones(1))  # the job's own group goes on
        assert distribute_stock(full, mesh, [Replicate()]).to_local().equal(full)
        sent += int(plan.demand.sent.sum())
    with pytest.raises(PlacementError, match="not among those"):
        joint_ranks(rendezvous[0], first_rank=2, num_ranks=2)
    with pytest.raises(PlacementError, match="Nobody can meet there"):
        joint_ranks("http://here", first_rank=0, num_ranks=2)
    return sent


def test_weights_between_two_jobs(tmp_path: Path) -> None:
    """Over a file and over TCP, one after the other, the same plan moves the weights."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = (f"file://{tmp_path}/meet", f"tcp://127.0.0.1:{port}")

    assert run_ranks(3, two_jobs, str(tmp_path), where) == [2 * 2 * 48 * 4] * 3
