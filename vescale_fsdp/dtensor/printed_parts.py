"""The parts of a printed ragged tensor: an axis of the mesh with its placement, a box as an index."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.layout.placement import RaggedShard, StridedRaggedShard

__all__ = ["axes_of", "axis_text", "index_text"]


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


def index_text(box: Box) -> str:
    """The part of a tensor that a box is, as one would write it in brackets."""
    parts = (f"{o}" if n == 1 else f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes, strict=True))
    return f"[{', '.join(parts)}]"
