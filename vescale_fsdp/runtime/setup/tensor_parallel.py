"""Parameters that tensor or expert parallelism has cut already, as DTensors on a mesh of their own.

Those axes cut first, `fully_shard` cuts what they left on this rank (`PriorSharding` says what that is):

    the module's parameter   DTensor on the tp mesh, say (Shard(0),)        local (rows / tp, cols)
    sharded parameter        RaggedDTensor on (dp, tp), (Ragged, Shard(0))  local 1-D piece
    unsharded parameter      DTensor on the tp mesh again, over a view of the full buffer

So a layout is planned for the local shape, and the module's own parallel code sees the DTensor it expects.
A gradient arrives as a DTensor, often Partial over tp; it is brought to the parameter's own placements first.

With ``dp_mesh_dims`` the module's parameter is a DTensor on the full mesh, dp included:

    the module's parameter   DTensor on (dp, tp), (Replicate, Shard(0))
    sharded parameter        RaggedDTensor on (dp, tp), (Ragged, Shard(0)); several dp axes count as one
    unsharded parameter      DTensor on (dp, tp), (Replicate, Shard(0)) again

Its gradient is Partial over dp as well. Those sums are what the reduction is for, so they are left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import make_spec, spec_with
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.runtime.setup.data_mesh import DataMesh, SpmdAxes
from vescale_fsdp.torch_private import DTensorSpec, concatenate_meshes, local_of, spec_of


@dataclass(frozen=True)
class PriorSharding:
    """What other parallelisms have done to a parameter, and what that means for its shards and gradients.

    Args:
        data: what the parameter is to be sharded over besides.
        spec: of the parameter as the module's code sees it; None for a plain tensor, which nobody has cut.
    """

    data: DataMesh
    spec: DTensorSpec | None

    @staticmethod
    def of(fqn: str, param: nn.Parameter, data: DataMesh) -> PriorSharding:
        """How a parameter was cut, once it is proven that its own mesh axes can stand beside those of ``data``.

        Raises:
            PlacementError: if it is sharded already, has sums that are not done, or the axes do not go together.
        """
        spmd = data.spmd
        problem = _problem_on_full_mesh(param, spmd) if spmd is not None else _problem(param, data.mesh)
        if problem is not None:
            raise _refusal(problem, fqn, param, data)
        return PriorSharding(data, spec_of(param) if isinstance(param, DTensor) else None)

    def sharded_spec(self, ragged: RaggedShard, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
        """The spec of the sharded parameter, on the axes it is sharded over and on its own.

        Args:
            ragged: how its local part is cut.
            shape: global shape.
            dtype: of the shard.
        """
        mesh = self.data.mesh
        own = (*(Replicate() for _ in range(mesh.ndim - 1)), ragged)
        if self.spec is None:
            return make_spec(mesh, own, shape, dtype)
        if self.data.spmd is None:
            joint = concatenate_meshes(mesh, self.spec.mesh)
            return make_spec(joint, (*own, *self.spec.placements), shape, dtype)
        joint, placements = _on_full_mesh(mesh, self.data.spmd, own, self.spec.placements)
        return make_spec(joint, placements, shape, dtype)

    def full_parameter(self, view: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """The unsharded parameter over a view of the full buffer, as the module's parallel code expects it."""
        if self.spec is None:
            return nn.Parameter(view, requires_grad)
        tensor = DTensor(view, spec_with(self.spec, dtype=view.dtype), requires_grad=False)  # type: ignore[call-arg]
        return nn.Parameter(tensor, requires_grad)

    def own_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's part of an unsharded gradient, its sums over the axes of other parallelisms done."""
        if self.spec is None or not isinstance(grad, DTensor):
            return grad
        # The sums over data-parallel axes of the same mesh are what the reduction is for.
        data_axes = self.data.spmd.data if self.data.spmd is not None else ()
        wanted = [
            now if axis in data_axes else own
            for axis, (now, own) in enumerate(zip(grad.placements, self.spec.placements, strict=True))
        ]
        return local_of(grad if wanted == list(grad.placements) else grad.redistribute(placements=wanted))


_SHARDED = "it is sharded already, with a module further out or by hand"


def local_part(param: nn.Parameter) -> torch.Tensor:
    """What they left of it on this rank, without gradient: ND, the whole parameter if they did nothing."""
    return local_of(param).detach()


def _refusal(problem: str, fqn: str, param: nn.Parameter, data: DataMesh) -> PlacementError:
    if isinstance(param, RaggedDTensor):
        expected = "a module whose parameters no fully_shard call has taken"
        todo = "go from the inside out: shard the blocks first and the root last, each module once; what is tied to a "
        todo += "parameter of a block goes into one unit with it: tie first, then fully_shard([a, b])"
    elif data.spmd is None:
        expected = "Shard or Replicate on other axes of one named mesh"
        todo = 'make one mesh with names, and pass mesh["dp"] here and mesh["tp"] there'
    else:
        expected = "a DTensor on the very mesh given as mesh=, Replicate on its data-parallel axes"
        todo = "put parameters on the full mesh first: torch.distributed.tensor.distribute_module"
    got = "a plain tensor"
    if isinstance(param, DTensor):
        got = f"placements {param.placements} on {param.device_mesh}"
    return PlacementError(
        f"This parameter cannot be sharded: {problem}.",
        expected=expected,
        got=got,
        where=f"{fqn}, to be sharded over {data.mesh}",
        todo=todo,
    )


def _problem(param: nn.Parameter, mesh: DeviceMesh) -> str | None:
    """What speaks against a DTensor on a mesh of its own."""
    if not isinstance(param, DTensor):
        return None
    if isinstance(param, RaggedDTensor):
        return _SHARDED
    if not all(_is_plain(placement) for placement in param.placements):
        return "only Shard and Replicate can stand beside a ragged cut"
    if not mesh.mesh_dim_names or not param.device_mesh.mesh_dim_names:
        return "the axes of both meshes need names, to be told apart"
    if set(mesh.mesh_dim_names) & set(param.device_mesh.mesh_dim_names):
        return "it lives on an axis that it is to be sharded over"
    return None


def _problem_on_full_mesh(param: nn.Parameter, spmd: SpmdAxes) -> str | None:
    """What speaks against a parameter under ``dp_mesh_dims``."""
    if not isinstance(param, DTensor):
        return "with dp_mesh_dims all parameters must be DTensors"
    if isinstance(param, RaggedDTensor):
        return _SHARDED
    if param.device_mesh is not spmd.mesh:
        return "it is on another mesh object"
    names = spmd.mesh.mesh_dim_names or ()
    cut = [names[axis] for axis in sorted(spmd.data) if not param.placements[axis].is_replicate()]
    if cut:
        return f"it is not Replicate on {', '.join(cut)}"
    if not all(_is_plain(placement) for placement in param.placements):
        return "only Shard and Replicate can stand beside a ragged cut"
    return None


def _is_plain(placement: Placement) -> bool:
    return placement.is_replicate() or type(placement) is Shard


def _on_full_mesh(
    mesh: DeviceMesh, spmd: SpmdAxes, own: Sequence[Placement], given: Sequence[Placement]
) -> tuple[DeviceMesh, list[Placement]]:
    """The full mesh and its placements, with a ragged cut on its sharding axis.

    Several sharding axes become one, and a mesh that only replicates gets one; both as in ``mesh``, which
    stands where the first data-parallel axis stood.
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
