"""Process groups that units make, where ranks have made other groups before, or do not train."""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.units import groups_of
from vescale_fsdp import DataParallelMeshDims, fully_shard
from vescale_fsdp.torch_private import newer_class


def filled() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.sin(torch.arange(param.numel()) * 1.3 + number).view(param.shape))
    return model


def grads(members: list[int], way: str) -> list[torch.Tensor] | None:
    """Gradients of a step, after some ranks have made groups; None on ranks that do not train."""
    rank = dist.get_rank()
    extra: Any = None
    # On all ranks, and before ranks have different numbers of groups: torch names a mesh's groups by their number.
    mesh = DeviceMesh("cpu", members if way != "replicas" else [members[:2], members[2:]], _init_backend=True)
    if rank in (0, 1):
        extra = dist.new_group([0, 1])  # counted by torch on these ranks only
    if rank not in members:
        return None
    if way == "destroyed" and rank == 0:
        dist.destroy_process_group(extra)
    model: Any = filled()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=2)
    if way == "separate":
        model.set_separate_reduce_scatter_group()
    rows = torch.linspace(-1, 1, 30).view(5, 6) + rank
    for _ in range(2):
        model.zero_grad()
        model(rows).square().sum().backward()
    comm = groups_of(model)[0].comm
    assert (comm.part_size == 2) == (mesh.size(mesh.ndim - 1) == 4)
    made = comm.process_groups()
    # The watch closes connections of groups whose backend is "gloo", to end waits for a lost rank.
    assert len(made) > 1 or way != "separate"
    assert {dist.get_backend(group) for group in made} == {"gloo"}
    return [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize(
    "members, way",
    [
        *(([0, 1, 2, 3], way) for way in ("plain", "separate", "destroyed", "replicas")),
        *(([0, 2], way) for way in ("plain", "separate", "destroyed")),
    ],
)
def test_ranks_with_different_numbers_of_groups_train(members: list[int], way: str) -> None:
    """Names of groups come from their members, so no rank waits under another name; gradients are right."""
    plain = filled()
    for rank in members:
        (plain(torch.linspace(-1, 1, 30).view(5, 6) + rank).square().sum() / len(members)).backward()
    for rank, found in enumerate(run_ranks(4, grads, members, way)):
        assert (found is None) == (rank not in members)
        for mine, param in zip(found or [], plain.parameters(), strict=found is not None):
            torch.testing.assert_close(mine, param.grad)


FLATTENED = {
    "two axes that shard": {"shard": ("a", "b")},
    "two axes of replicas": {"shard": "c", "replicate": ("a", "b")},
    "replicas alone": {"replicate": ("a", "b")},
    "replicas on one axis": {"replicate": "a"},
}


def grads_over_axes(way: str) -> list[torch.Tensor]:
    """Gradients of a step over axes of a mesh, after ranks 0 and 1 have made groups for themselves."""
    rank = dist.get_rank()
    mesh = cpu_mesh(2, 1, 1, 2, names=("a", "b", "c", "tp"))
    if rank in (0, 1):  # counted by torch on these ranks only
        first, _ = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank == 0:
            dist.destroy_process_group(first)
    model = nn.Linear(6, 4)
    for name, param in filled()[0].named_parameters():
        whole = distribute_tensor(param.detach()[:4].clone(), mesh, [Replicate()] * 4)
        setattr(model, name, nn.Parameter(whole))
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**FLATTENED[way]))
    rows = DTensor.from_local(
        torch.linspace(-1, 1, 30).view(5, 6) + rank // 2, mesh, [Shard(0), *[Replicate()] * 3]
    )
    model(rows).square().sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.skipif(
    DataParallelMeshDims.__module__ == newer_class.__module__, reason="this torch has no DataParallelMeshDims"
)
@pytest.mark.parametrize("way", FLATTENED)
def test_axes_are_flattened_after_ranks_have_made_different_groups(way: str) -> None:
    """The flattened axis is a part of the ranks, and its group is found by all of its members."""
    plain = filled()[0]
    for replica in range(2):
        rows = torch.linspace(-1, 1, 30).view(5, 6) + replica
        ((rows @ plain.weight[:4].T + plain.bias[:4]).square().sum() / 2).backward()
    for found in run_ranks(4, grads_over_axes, way):
        for mine, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, param.grad[:4])


def warnings_of_hosts(per_node: str) -> list[str]:
    """Texts of warnings at the first forward of ranks that are on two machines."""
    host = mock.patch.object(socket, "gethostname", return_value=f"machine {dist.get_rank() // 2}")
    environment = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=per_node)
    model = fully_shard(filled(), mesh=cpu_mesh())
    with host, environment, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(torch.ones(1, 6))
    return [str(each.message) for each in found if "LOCAL_WORLD_SIZE" in str(each.message)]


@pytest.mark.parametrize("per_node, is_warned", [("", True), ("2", False)])
def test_machines_that_cannot_be_known_are_a_warning(per_node: str, is_warned: bool) -> None:
    """On one rank."""
    assert [len(found) for found in run_ranks(4, warnings_of_hosts, per_node)] == [int(is_warned), 0, 0, 0]
