"""DataMesh: the mesh axes that shard or replicate parameters. PriorSharding: how other parallelisms cut a parameter.

    the user's argument                       the mesh of a group's collectives
    mesh of one axis                          (shard,)
    mesh of two axes                          (replicate, shard): HSDP
    and shard_optimizer_over                  the same two axes, and a flat mesh over which pieces are cut: hybrid
    mesh and dp_mesh_dims                     the named axes of a full mesh; several sharding axes are flattened into
                                              one, several replicating axes too; without a sharding axis (DDP), the
                                              mesh is (replicate, shard of one rank)
    ShardPlacementResult for one parameter    the mesh of its mesh_info

The hybrid cut of N nodes with L ranks each, by `DataMesh.cut`: the buffer of a group has N * L slices, and local rank l
of node k owns slice l * N + k. So the ranks with local rank l, one per node, together own one contiguous part::

    N = 2, L = 3     node 0, ranks 0, 1, 2      slices 0 . 2 . 4 .        local ranks 0, 1, 2 of all nodes
                     node 1, ranks 3, 4, 5      slices . 1 . 3 . 5        own the parts [0, 2), [2, 4), [4, 6)

Each rank keeps its part in the compute dtype between optimizer steps (`runtime.kept_part`). So gathers over one node
fill the buffer. The optimizer steps slices, and one gather over the nodes follows each step.

Tensor or expert parallelism shards a parameter first; `fully_shard` cuts the part on this rank (`PriorSharding`):

    the module's parameter   DTensor on the tp mesh, say (Shard(0),)        local (rows / tp, cols)
    sharded parameter        RaggedDTensor on (dp, tp), (Ragged, Shard(0))  local 1-D piece
    unsharded parameter      DTensor on the tp mesh again, over a view of the full buffer

So a layout is planned for the local shape, and the module's tensor-parallel code gets the DTensor that it expects. The
gradient of this DTensor, often Partial over tp, is first redistributed to the parameter's own placements.

With ``dp_mesh_dims`` the module's parameter is a DTensor on the full mesh, dp included, as in torch 2.13
(fsdp/_fully_shard/_fsdp_param.py:345-430, _fsdp_init.py:108-149). `SpmdAxes` has the data-parallel axes of this mesh:

    the module's parameter   DTensor on (dp, tp), (Replicate, Shard(0))
    sharded parameter        RaggedDTensor on (dp, tp), (Ragged, Shard(0)); several dp axes count as one
    unsharded parameter      DTensor on (dp, tp), (Replicate, Shard(0)) again

The gradient of this parameter is Partial over dp as well; the reduction of the group sums over dp.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from vescale_fsdp.collectives.process_groups import new_group
from vescale_fsdp.devices import current_device
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import make_spec, ranks_by_group_rank, spec_with
from vescale_fsdp.errors import LifecycleError, PlacementError, UnsupportedOpError
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_modes import outside_fake_mode
from vescale_fsdp.torch_private import (
    DataParallelMeshDims,
    DTensorSpec,
    FSDPMeshInfo,
    concatenate_meshes,
    flatten_mesh,
    inherit_timeout,
    local_of,
    mesh_of_one,
    mesh_of_world,
    set_local,
    spec_of,
    spmd_mesh_of,
)


@dataclass(frozen=True)
class SpmdAxes:
    """The data-parallel axes of a full mesh (``dp_mesh_dims``), on which all parameters are DTensors.

    Args:
        mesh: the full mesh.
        shard: indices of the axes that shard; empty for replication only.
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
        mesh: 1-D (shard,) or 2-D (replicate, shard): the ranks of gathers and reductions.
        spmd: with ``dp_mesh_dims``: the full mesh, and the axes of ``mesh`` in it.
        cut: in a hybrid cut, the 1-D mesh of all ranks in the order of their slices; else None.
        over: the user's ``shard_optimizer_over``, for meshes that an elastic job makes later.

    Raises:
        PlacementError: if replicas would get different shards.
    """

    mesh: DeviceMesh
    spmd: SpmdAxes | None = None
    cut: DeviceMesh | None = None
    over: str | None = None

    def __post_init__(self) -> None:
        ranks_by_group_rank(self.mesh)  # raises if replicas would get different shards
        for axis in range(self.mesh.ndim):
            inherit_timeout(self.mesh.get_group(axis))

    @property
    def mesh_of_pieces(self) -> DeviceMesh:
        """The mesh of sharded parameters, whose last axis cuts them."""
        return self.mesh if self.cut is None else self.cut

    @property
    def num_shards(self) -> int:
        """Number of pieces that a parameter is cut into."""
        mesh = self.mesh_of_pieces
        return mesh.size(mesh.ndim - 1)

    @property
    def is_replicated_only(self) -> bool:
        """Whether every rank has full parameters (DDP)."""
        return self.spmd is not None and not self.spmd.shard


def default_mesh() -> DeviceMesh:
    """Create a 1-D mesh over all ranks, on the accelerator if there is one, and the process group if there is none.

    Raises:
        LifecycleError: if there is no process group, and torchrun's environment variables are missing.
    """
    # current_accelerator returns what torch was built for, also on a machine without such a device.
    accelerator = torch.accelerator.current_accelerator()
    device_type = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as unset:  # torch names the missing environment variable
            raise LifecycleError(
                "There is no process group, and the environment variables to initialize one are missing.",
                expected="a job under torchrun, a process group, or a mesh",
                got=str(unset),
                where="fully_shard(mesh=None)",
                todo="start the script with torchrun --nproc-per-node N, also for N = 1; or call "
                "torch.distributed.init_process_group with a store, rank and world_size first; or pass "
                "mesh=init_device_mesh(..)",
            ) from unset
    with outside_fake_mode():  # a mesh that is created under FakeTensorMode has no rank numbers
        return mesh_of_world(device_type)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes for a mesh."""
    return current_device(mesh.device_type)


def data_mesh(mesh: DeviceMesh, dims: Any = None, over: str | None = None) -> DataMesh:
    """Return the data-parallel axes of a mesh. It may create process groups: a collective call.

    Args:
        mesh: 1-D or 2-D; with ``dims``, a mesh of any number of named axes.
        dims: a `DataParallelMeshDims` of torch, or None.
        over: the replicating axis of a 2-D mesh over which the optimizer is sharded too (a hybrid cut), or None. On a
            mesh of one axis it changes nothing.

    Raises:
        PlacementError: if ``mesh`` is not a mesh, does not contain this rank, or lacks axes that ``dims`` or ``over``
            names.
        UnsupportedOpError: if ``dims`` and ``over`` are both given.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlacementError(
            "mesh= must be a device mesh.",
            expected="a torch.distributed.device_mesh.DeviceMesh, or None for a mesh over all ranks",
            got=repr(mesh),
            todo="make one: init_device_mesh(device_type, (dist.get_world_size(),)), with device_type='cpu' on gloo",
        )
    if mesh.get_coordinate() is None:
        raise PlacementError(
            "This rank is not in the mesh.",
            expected="a mesh of all ranks that shard the module",
            got=f"{mesh} on rank {dist.get_rank()}",
            todo="call fully_shard only on ranks of the mesh, or add this rank to the mesh",
        )
    if dims is None:
        if mesh.ndim not in (1, 2):
            raise PlacementError(
                "The mesh must be 1-D or 2-D.",
                expected="(shard,) or (replicate, shard)",
                got=f"{mesh.ndim} axes: {mesh}",
                todo="slice the data-parallel axes out of the mesh by name, or name them with dp_mesh_dims",
            )
        if over is None or mesh.ndim == 1:
            return DataMesh(mesh, over=over)
        return DataMesh(mesh, None, _mesh_by_slices(mesh, over), over)
    if over is not None:
        raise UnsupportedOpError(
            "dp_mesh_dims cannot be combined with shard_optimizer_over.",
            expected="a mesh of the two data-parallel axes",
            got=f"dp_mesh_dims={dims}, shard_optimizer_over={over!r}",
            todo="pass the data-parallel axes alone as mesh=, and leave dp_mesh_dims out",
        )
    axes = _spmd_axes(mesh, dims)
    if not dims.shard_names:
        # Replication only is handled as HSDP, with a sharding axis of one rank.
        replicated = _one_axis(mesh, dims.replicate_names)
        one = mesh_of_one(mesh, f"{'_'.join(dims.replicate_names)}_shard", partial(_group_over, mesh))
        return DataMesh(concatenate_meshes(replicated, one), axes)
    sharded = _one_axis(mesh, dims.shard_names)
    if not dims.replicate_names:
        return DataMesh(sharded, axes)
    return DataMesh(concatenate_meshes(_one_axis(mesh, dims.replicate_names), sharded), axes)


def _mesh_by_slices(mesh: DeviceMesh, over: str) -> DeviceMesh:
    """Return the 1-D mesh of a hybrid cut, whose coordinates are the numbers of slices. A collective call."""
    names = mesh.mesh_dim_names
    if names is None or names[0] != over:
        raise PlacementError(
            "shard_optimizer_over must name the replicating axis of the mesh.",
            expected=f"the name of the first of two axes: {(names or ('an axis of a mesh with names',))[0]}",
            got=repr(over),
            where=str(mesh),
            todo="init_device_mesh(device_type, (nodes, ranks_per_node), mesh_dim_names=('node', 'local')), and "
            "shard_optimizer_over='node'",
        )

    def group_of(ranks: list[int]) -> dist.ProcessGroup:
        """Return a group that lists the ranks in this order: an axis's, if there is one rank per node or one node."""
        for axis in range(mesh.ndim):
            if dist.get_process_group_ranks(mesh.get_group(axis)) == ranks:
                return mesh.get_group(axis)
        return new_group(mesh.get_group(0), ranks)

    with outside_fake_mode():  # a mesh that is created under FakeTensorMode has no rank numbers
        return flatten_mesh(mesh, f"{names[1]}_by_{names[0]}", group_of, last_first=True)


def _spmd_axes(mesh: DeviceMesh, dims: Any) -> SpmdAxes:
    """Return the axes of a full mesh that ``dims`` names; raise PlacementError if they do not match the mesh."""
    if not isinstance(dims, DataParallelMeshDims):
        raise PlacementError(
            "dp_mesh_dims must name axes of the mesh.",
            expected="torch.distributed.fsdp.DataParallelMeshDims(shard=..., replicate=...)",
            got=repr(dims),
        )
    names = mesh.mesh_dim_names or ()
    wanted = (*dims.shard_names, *dims.replicate_names)
    if not wanted or any(name not in names for name in wanted) or len(set(wanted)) < len(wanted):
        raise PlacementError(
            "dp_mesh_dims does not match the mesh.",
            expected=f"at least one of the axes {names}, each once",
            got=f"shard={dims.shard_names}, replicate={dims.replicate_names}",
            where=str(mesh),
            todo="pass the full mesh, created with mesh_dim_names, and names of its axes",
        )
    shard, replicate = (
        tuple(names.index(name) for name in kind) for kind in (dims.shard_names, dims.replicate_names)
    )
    return SpmdAxes(mesh, shard, replicate)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a 1-D mesh of the named axes."""
    # A single axis is sliced, because its process group exists already. Flattening creates a group.
    if len(names) == 1:
        return mesh[names[0]]
    return flatten_mesh(mesh[names], "_".join(names), partial(_group_over, mesh))


def _group_over(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup:
    """Return the default group if these are all ranks, else a new group with the timeout of the mesh's groups."""
    # Sorted, as torch sorts the ranks of its groups.
    world = dist.group.WORLD if len(ranks) == dist.get_world_size() else None
    return world or new_group(mesh.get_group(0), sorted(ranks))


def mesh_of_info(info: Any) -> DataMesh:
    """Return the data-parallel axes of a parameter's own ``mesh_info`` (torch's FSDPMeshInfo, HSDPMeshInfo).

    Raises:
        PlacementError: for any other class, or if the axes are not in the order (replicate, shard).
    """
    # The indices that (replicate, shard) must have: groups expect the sharding axis last.
    axes = (None, 0) if isinstance(info, FSDPMeshInfo) and info.mesh.ndim == 1 else (0, 1)
    if not isinstance(info, FSDPMeshInfo) or (info.replicate_mesh_dim, info.shard_mesh_dim) != axes:
        raise PlacementError(
            "A parameter's own mesh must have one axis that shards.",
            expected="FSDPMeshInfo of a 1-D mesh, or HSDPMeshInfo of a 2-D mesh (replicate, shard)",
            got=info,
            todo="return FSDPMeshInfo(mesh, shard_mesh_dim=0) or HSDPMeshInfo(mesh, 1, replicate_mesh_dim=0)",
        )
    full_mesh = spmd_mesh_of(info)
    if full_mesh is None:
        return DataMesh(info.mesh, None)
    return DataMesh(info.mesh, _spmd_axes(full_mesh, info.dp_mesh_dims))  # type: ignore[attr-defined]  # torch 2.11


@dataclass(frozen=True)
class PriorSharding:
    """How tensor or expert parallelism has sharded a parameter before `fully_shard`.

    Args:
        data: the mesh over which `fully_shard` shards the parameter's local part.
        spec: DTensor spec of the parameter that the module's code gets; None if it is a plain tensor.
    """

    data: DataMesh
    spec: DTensorSpec | None

    @staticmethod
    def of(fqn: str, param: nn.Parameter, data: DataMesh) -> PriorSharding:
        """Return the prior sharding of a parameter, after a check that its mesh axes are compatible with ``data``.

        Raises:
            PlacementError: if the parameter is sharded by `fully_shard` already, has placements other than Shard and
                Replicate, or is on incompatible mesh axes.
        """
        problem = _problem(param, data)
        if problem is None:
            return PriorSharding(data, spec_of(param) if isinstance(param, DTensor) else None)
        if isinstance(param, RaggedDTensor):
            expected = "a module whose parameters no fully_shard call has sharded"
            todo = (
                "shard from the inside out: the blocks first and the root last, each module once; modules with tied "
                "parameters belong in one unit: tie first, then fully_shard([a, b])"
            )
        elif data.spmd is None:
            expected = "Shard or Replicate on other axes of one named mesh"
            todo = 'create one mesh with names; pass mesh["dp"] to fully_shard and mesh["tp"] to tensor parallelism'
        else:
            expected = "a DTensor on the same mesh object as mesh=, Replicate on its data-parallel axes"
            todo = "put parameters on the full mesh first: torch.distributed.tensor.distribute_module"
        got = "a plain tensor"
        if isinstance(param, DTensor):
            got = f"placements {param.placements} on {param.device_mesh}"
        raise PlacementError(
            f"This parameter cannot be sharded: {problem}.",
            expected=expected,
            got=got,
            where=f"{fqn}, to be sharded over {data.mesh}",
            todo=todo,
        )

    def sharded_spec(self, ragged: RaggedShard, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
        """Return the DTensor spec of the sharded parameter, on the data-parallel axes and the parameter's own axes.

        Args:
            ragged: placement of the pieces of the local part.
            shape: global shape.
            dtype: dtype of the shard.
        """
        mesh = self.data.mesh_of_pieces
        own = (*(Replicate() for _ in range(mesh.ndim - 1)), ragged)  # the last axis shards
        if self.spec is None:
            return make_spec(mesh, own, shape, dtype)
        if self.data.spmd is None:
            joint = concatenate_meshes(mesh, self.spec.mesh)
            return make_spec(joint, (*own, *self.spec.placements), shape, dtype)
        joint, placements = _on_full_mesh(mesh, self.data.spmd, own, self.spec.placements)
        return make_spec(joint, placements, shape, dtype)

    def full_parameter(self, view: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return the unsharded parameter over a view of the full buffer: a DTensor if the original was a DTensor."""
        if self.spec is None:
            return nn.Parameter(view, requires_grad)
        tensor = DTensor(view, spec_with(self.spec, dtype=view.dtype), requires_grad=False)  # type: ignore[call-arg]
        full = nn.Parameter(tensor, requires_grad)
        full.__class__ = GatheredDTensor  # type: ignore[assignment]
        return full

    def own_grad(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part of an unsharded gradient, summed over the axes of other parallelisms.

        Args:
            grad: a DTensor if the parameter is one, else returned as it is.
            dtype: dtype of the sum, if it is wider than the gradient's.
        """
        if self.spec is None or not isinstance(grad, DTensor):
            return grad
        # Data-parallel axes keep their placement, often Partial, because the reduction sums over them.
        data_axes = self.data.spmd.data if self.data.spmd is not None else ()
        wanted = [
            now if axis in data_axes else own
            for axis, (now, own) in enumerate(zip(grad.placements, self.spec.placements, strict=True))
        ]
        if wanted == list(grad.placements):
            return local_of(grad)
        if any(placement.is_partial() for placement in grad.placements):
            dtype = torch.promote_types(grad.dtype, dtype)
            spec = spec_with(spec_of(grad), dtype=dtype)
            grad = DTensor(local_of(grad).to(dtype), spec, requires_grad=False)  # type: ignore[call-arg]
        return local_of(grad.redistribute(placements=wanted))


class GatheredDTensor(DTensor):
    """An unsharded parameter that another parallelism has cut: a DTensor whose ``.data`` can be assigned.

    torch's own setter changes the metadata of a DTensor and silently keeps its values.
    """

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without autograd, in shared memory, as in torch."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor) or (value.shape, value.dtype) != (self.shape, self.dtype):
            raise PlacementError(
                "A tensor that is assigned to .data must be placed like the tensor itself.",
                expected=f"a DTensor of shape {tuple(self.shape)}, {self.dtype}",
                got=f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}",
                todo="use copy_, or distribute the tensor with torch.distributed.tensor.distribute_tensor",
            )
        moved = value.redistribute(self.device_mesh, self.placements)
        set_local(self, local_of(moved).detach())

    # Copies and pickles are DTensors: they are no unsharded parameters, and a reader of a pickle may lack this class.

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = memo.setdefault(id(self), copy.deepcopy(self._as_dtensor(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_dtensor().__reduce_ex__(protocol)

    def _as_dtensor(self) -> nn.Parameter:
        return nn.Parameter(
            DTensor(local_of(self).detach(), spec_of(self), requires_grad=False),  # type: ignore[call-arg]
            self.requires_grad,
        )


def local_part(param: nn.Parameter) -> torch.Tensor:
    """Return the part of a parameter that other parallelisms have left on this rank: n-d, detached."""
    return local_of(param).detach()


def _problem(param: nn.Parameter, data: DataMesh) -> str | None:
    """Return the reason why a parameter cannot be sharded over ``data``, or None if it can."""
    spmd, names = data.spmd, data.mesh.mesh_dim_names
    if not isinstance(param, DTensor):
        return None if spmd is None else "with dp_mesh_dims all parameters must be DTensors"
    if isinstance(param, RaggedDTensor):
        return "it is sharded already, by fully_shard of an outer module or by hand"
    if spmd is not None:
        if param.device_mesh is not spmd.mesh:
            return "it is on another mesh object"
        axes = [axis for axis in sorted(spmd.data) if not param.placements[axis].is_replicate()]
        if axes:
            return (
                f"it is not Replicate on {', '.join((spmd.mesh.mesh_dim_names or ())[axis] for axis in axes)}"
            )
    # Exactly the class Shard: its subclasses cut a dim in other ways.
    if not all(placement.is_replicate() or type(placement) is Shard for placement in param.placements):
        return "only Shard and Replicate can be combined with a ragged placement"
    if spmd is None:
        own_names = param.device_mesh.mesh_dim_names
        if not names or not own_names:
            return "the axes of both meshes need names, to distinguish them"
        if set(names) & set(own_names):
            return "it is already sharded or replicated over an axis of mesh="
    return None


def _on_full_mesh(
    mesh: DeviceMesh, spmd: SpmdAxes, own: Sequence[Placement], given: Sequence[Placement]
) -> tuple[DeviceMesh, list[Placement]]:
    """Return the mesh and the placements of a sharded parameter whose original parameter is on a full mesh.

    If exactly one axis of the full mesh shards, this is the full mesh, with the ragged placement on this axis.
    Otherwise the axes of ``mesh`` replace all data-parallel axes, at the position of the first of them.

    Args:
        mesh: the mesh of the group's collectives, (shard,) or (replicate, shard).
        spmd: the data-parallel axes of the full mesh.
        own: placements on ``mesh``, the last is ragged.
        given: placements of the original parameter on the full mesh.
    """
    if len(spmd.shard) == 1:
        return spmd.mesh, [own[-1] if axis in spmd.shard else p for axis, p in enumerate(given)]
    names = spmd.mesh.mesh_dim_names
    assert names is not None
    others = [axis for axis in range(spmd.mesh.ndim) if axis not in spmd.data]
    before = [axis for axis in others if axis < min(spmd.data)]
    after = others[len(before) :]
    meshes = [*(spmd.mesh[names[i]] for i in before), mesh, *(spmd.mesh[names[i]] for i in after)]
    placements = [*(given[i] for i in before), *own, *(given[i] for i in after)]
    return concatenate_meshes(*meshes), placements
