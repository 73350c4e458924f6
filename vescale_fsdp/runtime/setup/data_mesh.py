"""DataMesh: which axes of a device mesh shard parameters and which replicate them.

    what the user gives                       the mesh a group's collectives run over
    mesh of one axis                          (shard,)
    mesh of two axes                          (replicate, shard): HSDP
    mesh and dp_mesh_dims                     the named axes of a full mesh; several of a kind are flattened into
                                              one; replicate only is (replicate, shard of one rank): DDP
    ShardPlacementResult for one parameter    that of its mesh_info

With ``dp_mesh_dims`` parameters are DTensors on the full mesh already, Replicate on its data-parallel axes (torch
2.13, ``FS/_fsdp_param.py:345-430`` and ``FS/_fsdp_init.py:108-149``); `SpmdAxes` says which axes those are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp.dtensor.spec import ranks_by_group_rank
from vescale_fsdp.errors import LifecycleError, PlacementError
from vescale_fsdp.torch_modes import outside_fake_mode
from vescale_fsdp.torch_private import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    concatenate_meshes,
    flatten_mesh,
    groups_as_patient_as,
    spmd_mesh_of,
    unflatten_mesh,
)


@dataclass(frozen=True)
class SpmdAxes:
    """Where the data-parallel axes lie in a full mesh that parameters are DTensors on.

    Args:
        mesh: the full mesh.
        shard: indices of the axes that shard; empty if all replicate.
        replicate: indices of the axes that replicate.
    """

    mesh: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]

    @property
    def data(self) -> frozenset[int]:
        """Indices of all data-parallel axes."""
        return frozenset((*self.shard, *self.replicate))


@dataclass(frozen=True)
class DataMesh:
    """The ranks that share a group of parameters.

    Args:
        mesh: 1-D (shard,) or 2-D (replicate, shard).
        spmd: where its axes lie in the full mesh, if parameters are DTensors on that.

    Raises:
        PlacementError: if ranks that replicate each other would hold different shards.
    """

    mesh: DeviceMesh
    spmd: SpmdAxes | None = None

    def __post_init__(self) -> None:
        ranks_by_group_rank(self.mesh)

    @property
    def num_shards(self) -> int:
        """Ranks that hold one copy of the parameters between them."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def is_replicated_only(self) -> bool:
        """Whether every rank holds everything (DDP)."""
        return self.spmd is not None and not self.spmd.shard


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks, on the accelerator if there is one; starts the process group if need be."""
    accelerator = torch.accelerator.current_accelerator()
    device_type = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as unset:  # a variable that torchrun sets
            raise LifecycleError(
                "There is no process group, and nothing to make one of.",
                expected="a job under torchrun, a process group, or a mesh",
                got=str(unset),
                where="fully_shard(mesh=None)",
                todo="start the script with torchrun --nproc-per-node N, also for N = 1; or call "
                "torch.distributed.init_process_group with a store, rank and world_size first; or pass "
                "mesh=init_device_mesh(..)",
            ) from unset
    assert dist.group.WORLD is not None
    with groups_as_patient_as(dist.group.WORLD), outside_fake_mode():
        return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def data_mesh(mesh: DeviceMesh, dims: Any) -> DataMesh:
    """The data-parallel axes of a mesh.

    Args:
        mesh: 1-D or 2-D; with ``dims`` any mesh with names.
        dims: torch's `DataParallelMeshDims`, or None.

    Raises:
        PlacementError: if it is no mesh, does not hold this rank, or has other axes than asked for.
    """
    _check_mesh(mesh)
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise PlacementError(
            "The mesh must be 1-D or 2-D.",
            expected="(shard,) or (replicate, shard)",
            got=f"{mesh.ndim} axes: {mesh}",
            todo="slice the data-parallel axes out of the mesh by name, or name them with dp_mesh_dims",
        )
    return DataMesh(mesh)


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise PlacementError(
            "mesh= takes a device mesh.",
            expected="a torch.distributed.device_mesh.DeviceMesh, or None for one over all ranks",
            got=repr(mesh),
            todo='make one: init_device_mesh("cuda", (dist.get_world_size(),)), with "cpu" on gloo',
        )
    if mesh.get_coordinate() is None:
        raise PlacementError(
            "This rank is not in the mesh.",
            expected="a mesh that holds every rank that shards the module",
            got=f"{mesh} on rank {dist.get_rank()}",
            todo="call fully_shard on the ranks of the mesh alone, or make the mesh of more ranks",
        )


def _named_axes(mesh: DeviceMesh, dims: Any) -> DataMesh:
    axes = _spmd_axes(mesh, dims)
    if not dims.shard_names:
        replicated = _one_axis(mesh, dims.replicate_names)
        name = replicated.mesh_dim_names[0] if replicated.mesh_dim_names else "replicate"
        # An axis of one rank shards: then nothing else need know that all ranks hold everything.
        return DataMesh(unflatten_mesh(replicated, (replicated.size(), 1), (name, f"{name}_shard")), axes)
    sharded = _one_axis(mesh, dims.shard_names)
    if not dims.replicate_names:
        return DataMesh(sharded, axes)
    return DataMesh(concatenate_meshes(_one_axis(mesh, dims.replicate_names), sharded), axes)


def _spmd_axes(mesh: DeviceMesh, dims: Any) -> SpmdAxes:
    if not isinstance(dims, DataParallelMeshDims):
        raise PlacementError(
            "dp_mesh_dims must name axes of the mesh.",
            expected="torch.distributed.fsdp.DataParallelMeshDims(shard=..., replicate=...)",
            got=repr(dims),
        )
    names = mesh.mesh_dim_names or ()
    asked = (*dims.shard_names, *dims.replicate_names)
    if not asked or any(name not in names for name in asked) or len(set(asked)) < len(asked):
        raise PlacementError(
            "dp_mesh_dims does not go with the mesh.",
            expected=f"at least one of the axes {names}, each once",
            got=f"shard={dims.shard_names}, replicate={dims.replicate_names}",
            where=str(mesh),
            todo="give the full mesh, made with mesh_dim_names, and names of its axes",
        )
    shard, replicate = (
        tuple(names.index(name) for name in kind) for kind in (dims.shard_names, dims.replicate_names)
    )
    return SpmdAxes(mesh, shard, replicate)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """A 1-D mesh of the named axes, in this order."""
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names], "_".join(names))


def mesh_of_info(info: Any) -> DataMesh:
    """The data-parallel axes that a parameter's own ``mesh_info`` means (torch's FSDPMeshInfo, HSDPMeshInfo).

    Raises:
        PlacementError: for anything else, and for axes in another order than (replicate, shard).
    """
    axes = (None, 0) if isinstance(info, FSDPMeshInfo) and info.mesh.ndim == 1 else (0, 1)
    if not isinstance(info, FSDPMeshInfo) or (info.replicate_mesh_dim, info.shard_mesh_dim) != axes:
        raise PlacementError(
            "A parameter's own mesh must say which axis shards.",
            expected="FSDPMeshInfo of a 1-D mesh, or HSDPMeshInfo of a 2-D mesh (replicate, shard)",
            got=info,
            todo="FSDPMeshInfo(mesh, shard_mesh_dim=0), HSDPMeshInfo(mesh, 1, replicate_mesh_dim=0)",
        )
    full_mesh = spmd_mesh_of(info)
    return DataMesh(info.mesh, None if full_mesh is None else _spmd_axes(full_mesh, info.dp_mesh_dims))
