"""Meshes that name their ranks out of order: training and checkpoints as on a sorted mesh, or a refusal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.collectives.process_groups import new_group
from vescale_fsdp.dtensor import redistribute
from vescale_fsdp.dtensor.spec import group_ranks_in, is_in_group_order, ranks_by_group_rank
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.torch_private import flatten_mesh

# Ranks, and whether each axis ascends.
MESHES = {
    "swapped": ([1, 0], (False,)),
    "replicas": ([[1], [0]], (False, True)),
    "both": ([[3, 1], [2, 0]], (False, False)),
    "rotated": ([2, 0, 1], (False,)),
    "sorted": ([[0, 2], [1, 3]], (True, True)),
}


def mesh_of(ranks: list[int] | list[list[int]]) -> DeviceMesh:
    names = ("replicate", "shard") if isinstance(ranks[0], list) else ("shard",)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def trained(shard: object, mesh: DeviceMesh) -> list[torch.Tensor]:
    """Loss, full parameters and full gradients of two steps."""
    model = models.build()
    for module in (*model.blocks, model):
        shard(module, mesh=mesh)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        loss = models.loss_of(model, models.batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(p.full_tensor().clone() for p in model.parameters())]  # type: ignore[operator]
        seen += [p.grad.full_tensor().clone() for p in model.parameters()]  # type: ignore[union-attr]
    return seen


def train_beside_fsdp2(name: str, folder: Path) -> None:
    ranks, ascending = MESHES[name]
    mesh = mesh_of(ranks)
    assert tuple(is_in_group_order(mesh, axis) for axis in range(mesh.ndim)) == ascending
    assert ranks_by_group_rank(mesh)[group_ranks_in(mesh)] == dist.get_rank()
    for ours, theirs in zip(trained(fully_shard, mesh), trained(torch_fully_shard, mesh), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert theirs.abs().sum() > 0
    save_and_read(mesh, folder)


def save_and_read(mesh: DeviceMesh, folder: Path) -> None:
    """Saved on this mesh, by DCP and natively; read on the sorted one."""
    full = torch.arange(240.0).view(12, 20)
    model = fully_shard(nn.Linear(20, 12, bias=False), mesh=mesh)
    weight = model.weight
    assert isinstance(weight, RaggedDTensor)
    start, stop = weight.piece
    with torch.no_grad():
        weight.to_local().copy_(full.view(-1)[start:stop])
    assert torch.equal(weight.full_tensor(), full)
    assert f"elements [{start}:{stop})" in repr(weight)
    dcp.save({"w": weight.detach()}, checkpoint_id=folder / "dcp")
    save(folder / "native", {"w": weight})
    world = dist.get_world_size()
    units = (1,) * (world - 1) + (12 - world + 1,)
    for read in (
        lambda state: dcp.load(state, checkpoint_id=folder / "dcp"),
        lambda s: load(folder / "native", s),
    ):
        target = distribute_tensor(torch.zeros(12, 20), cpu_mesh(), (RaggedShard((0,), units),))
        read({"w": target})
        assert torch.equal(target.full_tensor(), full)


@pytest.mark.part("numerics")
@pytest.mark.parametrize("name", MESHES)
def test_training_and_checkpoints(name: str, tmp_path: Path) -> None:
    """FSDP2's losses, parameters and gradients; a checkpoint that another mesh reads unchanged."""
    run_ranks(torch.tensor(MESHES[name][0]).numel(), train_beside_fsdp2, name, tmp_path)


def numbered_as_listed(folder: Path) -> None:
    """A mesh whose group lists ranks as the mesh does: ranks own, gather, reduce and save pieces in this order."""
    grid = cpu_mesh(2, 2, names=("node", "local"))
    mesh = flatten_mesh(grid, "listed", partial(new_group, grid.get_group(0)), last_first=True)
    ranks = [0, 2, 1, 3]
    assert mesh.mesh.tolist() == ranks_by_group_rank(mesh).tolist() == ranks
    assert group_ranks_in(mesh) == (ranks.index(dist.get_rank()),) and is_in_group_order(mesh, 0)
    full = torch.arange(240.0).view(12, 20)
    ragged = (RaggedShard((0,), (1, 2, 4, 5)),)
    weight = distribute_tensor(full, mesh, ragged)
    assert weight.numel() == 240 and weight.boxes[0].offsets[0] == (0, 1, 3, 7)[ranks.index(dist.get_rank())]
    assert torch.equal(weight.full_tensor(), full)
    stock = weight.redistribute(placements=[Shard(0)])
    assert torch.equal(stock.full_tensor(), full) and torch.equal(
        redistribute(stock, ragged).full_tensor(), full
    )
    one = distribute_tensor(full * (dist.get_rank() + 1), mesh, ragged, src_data_rank=1)
    assert torch.equal(one.full_tensor(), full * 3)  # rank 2 is the second of the group
    partial_sums = DTensor.from_local(full, mesh, [Partial()], run_check=False)
    assert torch.equal(redistribute(partial_sums, ragged).full_tensor(), full * 4)
    save(folder / "native", {"w": weight, "s": stock})
    dcp.save({"w": weight, "s": stock}, checkpoint_id=folder / "dcp")
    for read in (
        lambda state: dcp.load(state, checkpoint_id=folder / "dcp"),
        lambda state: load(folder / "native", state),
    ):
        even = (RaggedShard((0,), (3, 3, 3, 3)),)
        state = {name: distribute_tensor(torch.zeros(12, 20), cpu_mesh(), even) for name in ("w", "s")}
        read(state)
        assert all(torch.equal(target.full_tensor(), full) for target in state.values())


def test_a_group_that_lists_ranks_as_the_mesh_does(tmp_path: Path) -> None:
    """The order of a hybrid cut."""
    run_ranks(4, numbered_as_listed, tmp_path)


def from_one_source() -> None:
    full = torch.arange(12.0).view(6, 2) * (dist.get_rank() + 1)
    first = distribute_tensor(
        full, mesh_of([[3, 1], [2, 0]]), (Replicate(), RaggedShard((0,), (1, 2))), src_data_rank=0
    )
    assert torch.equal(
        first.full_tensor(), torch.arange(12.0).view(6, 2)
    )  # rank 0 is first in both its groups


def test_values_of_one_source() -> None:
    """The source is the rank that is first in the groups of all axes."""
    run_ranks(4, from_one_source)


def refuse(folder: Path) -> None:
    crossed = mesh_of([[0, 3], [2, 1]])
    for call in (
        lambda: fully_shard(nn.Linear(4, 4), mesh=crossed),
        lambda: save(
            folder, {"w": distribute_tensor(torch.ones(4), crossed, (Replicate(), RaggedShard((0,), (1, 3))))}
        ),
    ):
        with pytest.raises(PlacementError) as caught:
            call()
        assert caught.value.got == str([[0, 3], [2, 1]]) and "init_device_mesh" in (caught.value.todo or "")
    swapped = mesh_of([[1, 0], [3, 2]])
    with pytest.raises(PlacementError) as caught:
        distribute_tensor(torch.ones(4, 4), swapped, (RaggedShard((0,), (1, 1)), Shard(0)))
    assert caught.value.got == str([[1, 0], [3, 2]]) and "mesh axis 1" in str(caught.value.where)
    stock = torch_distribute(torch.arange(8.0), swapped, (Replicate(), Shard(0)), src_data_rank=None)
    assert stock.full_tensor()[0] != 0, "torch gathers what it cut in another order"
    with pytest.raises(CheckpointError) as unsaved:
        save(folder, {"w": stock})
    assert (unsaved.value.got, unsaved.value.where) == (str([[1, 0], [3, 2]]), "w, mesh axis 1")


def test_what_has_no_order_is_refused(tmp_path: Path) -> None:
    """Replicas that would hold different shards, and torch's own Shard where it contradicts itself."""
    run_ranks(4, refuse, tmp_path / "none")
