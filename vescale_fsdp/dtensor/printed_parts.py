"""The parts of a printed ragged tensor: an axis of the mesh with its placement, a box as an index, a rank's piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dtensor.mesh_order import place_in
from vescale_fsdp.dtensor.spec import boxes_of, piece_of
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.layout.placement import RaggedShard, StridedRaggedShard
from vescale_fsdp.torch_private import DTensorSpec, printoptions


def axes_of(mesh: DeviceMesh) -> tuple[Sequence[str], Sequence[int]]:
    """What to call the axes of a mesh, and their sizes."""
    return [repr(name) for name in mesh.mesh_dim_names or range(mesh.ndim)], mesh.shape


def axis_text(axis: str, num_ranks: int, placement: Placement) -> str:
    """What a placement does over a mesh axis, in words."""
    over = f"over the {num_ranks} ranks of mesh axis {axis}"
    if isinstance(placement, RaggedShard):
        dims = f"dim {placement.dims[0]}" if len(placement.dims) == 1 else f"dims {placement.dims} as one"
        units = placement.units
        ratio = ":".join(map(str, units if len(units) <= 8 else (*units[:4], "..", *units[-3:])))
        strided = (
            f", each of {placement.split_factor} chunks" if isinstance(placement, StridedRaggedShard) else ""
        )
        return f"{dims if placement.dims else 'the whole'} cut {ratio}{strided} {over}"
    return f"{'the same' if placement.is_replicate() else placement} {over}"


def _index_text(box: Box) -> str:
    """The part of a tensor that a box is, as one would write it in brackets."""
    parts = (f"{o}" if n == 1 else f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes, strict=True))
    return f"[{', '.join(parts)}]"


def piece_text(spec: DTensorSpec, local: torch.Tensor) -> str:
    """What this rank holds, with some of its values."""
    if spec.mesh.get_coordinate() is None:
        return f"not on this rank: mesh {spec.mesh}"
    place = place_in(spec.mesh)
    where = f"rank {place[0] if len(place) == 1 else place} of {spec.mesh.shape}"
    start, stop = piece_of(spec)
    if start == stop:
        return f"{where} holds nothing"
    boxes = ", ".join(map(_index_text, boxes_of(spec)))
    with printoptions(threshold=6, edgeitems=3):
        values = " ".join(str(local.detach()).split())
    return f"{where} holds elements [{start}:{stop}) = {boxes},\n  local={values}"
