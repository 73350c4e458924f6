"""Parameters that tensor or expert parallelism has cut already, as DTensors on a mesh of their own.

Those axes cut first, `fully_shard` cuts what they left on this rank (the *outer* spec says what that is):

    the module's parameter   DTensor on the tp mesh, say (Shard(0),)        local (rows / tp, cols)
    sharded parameter        RaggedDTensor on (dp, tp), (Ragged, Shard(0))  local 1-D piece
    unsharded parameter      DTensor on the tp mesh again, over a view of the full buffer

So a layout is planned for the local shape, and the module's own parallel code sees the DTensor it expects.
A gradient arrives as a DTensor, often Partial over tp; it is brought to the parameter's own placements first.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from vescale_fsdp.dtensor import RaggedDTensor
from vescale_fsdp.errors import PlacementError, explain
from vescale_fsdp.spec import make_spec, spec_with
from vescale_fsdp.torch_private import DTensorSpec, concatenate_meshes, local_of

__all__ = ["check_outer", "full_parameter", "joint_spec", "local_grad", "local_part", "outer_of"]


def outer_of(param: nn.Parameter) -> DTensorSpec | None:
    """How other parallelisms have cut a parameter; None if they have not."""
    return param._spec if isinstance(param, DTensor) else None


def local_part(param: nn.Parameter) -> torch.Tensor:
    """What they left of it on this rank, without gradient: ND, the whole parameter if they did nothing."""
    return local_of(param).detach() if isinstance(param, DTensor) else param.detach()


def check_outer(fqn: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Prove that a parameter's own mesh axes can stand beside those it is to be sharded over.

    Raises:
        PlacementError: if it is sharded already, has sums that are not done, or the axes do not go together.
    """
    outer = outer_of(param)
    if outer is None:
        return
    problem = None
    if isinstance(param, RaggedDTensor):
        problem = "it is sharded already"
    elif not all(p.is_replicate() or type(p) is Shard for p in outer.placements):
        problem = "only Shard and Replicate can stand beside a ragged cut"
    elif not mesh.mesh_dim_names or not outer.mesh.mesh_dim_names:
        problem = "the axes of both meshes need names, to be told apart"
    elif set(mesh.mesh_dim_names) & set(outer.mesh.mesh_dim_names):
        problem = "it lives on an axis that it is to be sharded over"
    if problem is not None:
        raise PlacementError(
            explain(
                f"This DTensor cannot be sharded: {problem}.",
                expected="Shard or Replicate on other axes of one named mesh",
                got=f"placements {outer.placements} on {outer.mesh}",
                where=f"{fqn}, to be sharded over {mesh}",
                todo='make one mesh with names, and pass mesh["dp"] here and mesh["tp"] there',
            )
        )


def joint_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], param: nn.Parameter, dtype: torch.dtype
) -> DTensorSpec:
    """The spec of the sharded parameter: its own axes behind those it is sharded over.

    Args:
        mesh: what it is sharded over.
        placements: on that mesh, one of them a RaggedShard that cuts its local part.
        param: the module's parameter.
        dtype: of the shard.
    """
    outer = outer_of(param)
    if outer is None:
        return make_spec(mesh, placements, param.shape, dtype)
    joint = concatenate_meshes(mesh, outer.mesh)
    return make_spec(joint, (*placements, *outer.placements), param.shape, dtype)


def full_parameter(view: torch.Tensor, outer: DTensorSpec | None) -> nn.Parameter:
    """The unsharded parameter over a view of the full buffer, as the module's parallel code expects it."""
    if outer is None:
        return nn.Parameter(view, requires_grad=False)
    tensor = DTensor(view, spec_with(outer, dtype=view.dtype), requires_grad=False)  # type: ignore[call-arg]
    return nn.Parameter(tensor, requires_grad=False)


def local_grad(grad: torch.Tensor, outer: DTensorSpec | None) -> torch.Tensor:
    """This rank's part of an unsharded gradient, its sums over the outer axes done."""
    if outer is None or not isinstance(grad, DTensor):
        return grad
    return local_of(grad.redistribute(placements=outer.placements))
