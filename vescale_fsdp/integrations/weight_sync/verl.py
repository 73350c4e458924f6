"""verl: what its sharded weight sync asks of a training engine, of parameters that are cut anywhere.

    from verl.workers.engine.spec import ShardSpec

    def get_per_tensor_param_shard(self):
        return shard_specs(self.module.named_parameters(), ShardSpec)

verl derives boxes from a DTensor's placements, which a ragged piece has none of; but it takes a flat offset from those
who know theirs (``ShardSpec(place=<int>)``). Written for verl at e39177f13beb (pull request 7324), whose ``ShardSpec``
has ``contributes``; it has not run with verl itself, which needs GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vescale_fsdp.dtensor.piece_map import pieces_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.torch_private import local_of


def shard_specs(
    tensors: Iterable[tuple[str, torch.Tensor]], spec_class: Any
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Each tensor's name, this rank's part of it, and a ``ShardSpec`` that says where that lies.

    Args:
        tensors: names and tensors, in an order that is the same on all ranks: ``model.named_parameters()``.
        spec_class: verl's ``ShardSpec``.

    Raises:
        PlacementError: for a tensor whose pieces are no flat ranges: one that is sharded on a second axis too.

    Examples:
        >>> def specs(model, ShardSpec):
        ...     return list(shard_specs(model.named_parameters(), ShardSpec))
    """
    for name, tensor in tensors:
        local = local_of(tensor).detach()
        if not isinstance(tensor, RaggedDTensor):
            yield name, local, spec_class.from_param(tensor)
            continue
        pieces = pieces_of(tensor)
        if pieces is None:
            raise PlacementError(
                "verl has no name for these pieces.",
                expected="one flat range of the tensor on each rank",
                got=tuple(map(str, tensor.placements)),
                where=name,
                todo="send it by vescale_fsdp.Transfer, or whole (WholeTensors)",
            )
        if pieces.cut_over is None:
            yield name, local, spec_class(full_shape=pieces.shape)
            continue
        mesh, axis = pieces.cut_over
        first = [mesh.get_local_rank(other) == 0 for other in range(mesh.ndim) if other != axis]
        # A replica says so: values that come twice would be taken for changes twice.
        yield (
            name,
            local.view(-1),
            spec_class(
                full_shape=pieces.shape,
                place=pieces.own_piece.start,
                gather_group=mesh.get_group(axis),
                contributes=all(first),
            ),
        )
