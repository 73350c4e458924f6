"""What ``shard_placement_fn`` asks for, per parameter.

None, Shard(dim)                          nothing: people choose the dim to save padding or copies, and a planned
                                          layout has neither
RaggedShard(dims, units)                  what one unit holds stays whole; which rank holds how many units is
                                          the planner's choice, as it is with ``granularity=``
ShardPlacementResult(placement, info)     one of the above, over a mesh of the parameter's own: one group per
                                          set of ranks (torch 2.13, ``FS/_fsdp_init.py:478-533``)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from vescale_fsdp.errors import MisuseError, PlacementError
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.runtime.setup.data_mesh import DataMesh, mesh_of_info
from vescale_fsdp.torch_private import ShardPlacementResult


@dataclass(frozen=True)
class Wish:
    """Where one parameter is to go, and what must stay whole of it (None: whatever ``granularity`` says)."""

    data: DataMesh
    ragged: RaggedShard | None = None


class PlacementWishes:
    """The answers of a ``shard_placement_fn`` for one unit.

    Args:
        function: the user's, or None.
        default: the mesh of parameters for which it names no other.

    Raises:
        PlacementError: if all ranks hold everything, so that there is nothing to ask.
    """

    def __init__(self, function: Callable[[nn.Parameter], Any] | None, default: DataMesh) -> None:
        if function is not None and default.is_replicated_only:
            raise PlacementError(
                "shard_placement_fn needs an axis that shards.",
                expected="dp_mesh_dims with shard=",
                got=f"replication only, over {default.mesh}",
                todo="leave shard_placement_fn out",
            )
        self._function = function
        self._default = default
        # By the ranks that share a parameter: what the user gave for them, and what it means.
        self._known: dict[tuple[dist.ProcessGroup, ...], tuple[Any, DataMesh]] = {}

    def of(self, fqn: str, param: nn.Parameter) -> Wish:
        """What the function says of one parameter.

        Raises:
            MisuseError: if that is nothing it can say.
            PlacementError: for another mesh of the same ranks.
        """
        wanted = self._function(param) if self._function is not None else None
        info, placement = None, wanted
        if isinstance(wanted, ShardPlacementResult):
            info, placement = wanted.mesh_info, wanted.placement
        data = self._mesh(fqn, info)
        if isinstance(placement, RaggedShard) and placement.num_shards == data.num_shards:
            return Wish(data, placement)
        if placement is None or (isinstance(placement, Shard) and -param.ndim <= placement.dim < param.ndim):
            return Wish(data)
        raise MisuseError(
            "shard_placement_fn returned a placement that cannot be used.",
            expected=f"None, Shard of one of the {param.ndim} dims, RaggedShard with {data.num_shards} units, "
            "or a ShardPlacementResult of one of them",
            got=wanted,
            where=fqn,
            todo="say what must stay whole with granularity=",
        )

    def _mesh(self, fqn: str, info: Any) -> DataMesh:
        data = self._default if info is None else mesh_of_info(info)
        given, known = self._known.setdefault(_groups(data), (info, data))
        if given is info or known.mesh is data.mesh:
            return known
        raise PlacementError(
            "Two meshes of a unit stand for the same ranks.",
            expected="the same mesh_info object for all parameters of these ranks",
            got=f"{data.mesh} beside {known.mesh}",
            where=fqn,
            todo="make each FSDPMeshInfo once and return that object",
        )


def _groups(data: DataMesh) -> tuple[dist.ProcessGroup, ...]:
    return tuple(data.mesh.get_group(axis) for axis in range(data.mesh.ndim))
