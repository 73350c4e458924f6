"""Where a rank stands in a mesh: by its number in the process group of each axis, not by where the mesh names it.

torch (2.11-2.15) makes the groups of a mesh from ranks in ascending order. So on a mesh that names them in another
order the two differ, and collectives go by the group::

    DeviceMesh("cpu", [1, 0])     rank 0: named second, coordinate 1     first of its group, place 0

FSDP2 hands out and gathers shards by place, and so do we. torch's ``redistribute`` cuts by coordinate, but its
``full_tensor`` gathers by place, and DCP takes offsets from coordinates: a stock ``Shard`` comes back with its chunks
exchanged (torch 2.13, FSDP2's checkpoints too). There we refuse it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.errors import PlacementError
from vescale_fsdp.torch_modes import outside_fake_mode


def ranks_in(mesh: DeviceMesh) -> list[Any]:
    """The ranks of a mesh as it names them: a list, nested as deep as the mesh has axes."""
    with outside_fake_mode():
        return mesh.mesh.tolist()


def ascends(mesh: DeviceMesh, axis: int) -> bool:
    """Whether places along an axis are coordinates: its ranks are named in ascending order."""
    with outside_fake_mode():
        return bool((mesh.mesh.diff(dim=axis) > 0).all())


def place_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's place on every axis of a mesh it is in."""
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


def ranks_by_place(mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of a mesh, each at its place.

    Raises:
        PlacementError: if the result is not a grid, because an axis names its ranks in this order here and that order
            there: the ranks that hold equal shards would not form a group.
    """
    with outside_fake_mode():
        ranks = mesh.mesh
        for axis in range(mesh.ndim):
            order = ranks.argsort(dim=axis).movedim(axis, 0).reshape(ranks.shape[axis], -1)
            if not torch.equal(order, order[:, :1].expand_as(order)):
                raise PlacementError(
                    "An axis of the mesh names its ranks in different orders: replicas would hold different shards.",
                    expected="every line of an axis in the same order, best ascending",
                    got=ranks_in(mesh),
                    where=f"mesh axis {axis}",
                    todo="name the ranks in ascending order: init_device_mesh does",
                )
            ranks = ranks.index_select(axis, order[:, 0])
        return ranks
