"""The spec of a ragged tensor: which mesh axis is cut raggedly, and what part of the tensor a rank holds.

A `RaggedShard` is applied after the placements of all other mesh axes, whatever their order (this is how
tensor or expert parallelism, applied to the module first, composes with sharding). So a rank's part is found
in two steps: the other axes leave it a box of the tensor, the *inner* box; the ragged placement cuts the
flattened inner box, and the rank's *piece* is a flat range of it::

    shape (6, 4) on a (2, 2) mesh, placements (RaggedShard((0,), (1, 2)), Shard(0))
        mesh coordinate (0, 0): inner rows [0, 3), piece [0, 4)  = row 0
        mesh coordinate (1, 0): inner rows [0, 3), piece [4, 12) = rows 1, 2
        mesh coordinate (0, 1): inner rows [3, 6), piece [0, 4)  = row 3
        mesh coordinate (1, 1): inner rows [3, 6), piece [4, 12) = rows 4, 5

In the flat order of the full tensor, rank 0 of the ragged axis then holds two runs, not one: `make_spec` says
so by turning the placement into `StridedRaggedShard`, whose ``split_factor`` is the number of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Shard

from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box, FlatRange, boxes_of_range, contiguous_strides, whole_box
from vescale_fsdp.layout.placement import RaggedShard, StridedRaggedShard
from vescale_fsdp.torch_modes import outside_fake_mode
from vescale_fsdp.torch_private import DTensorSpec, TensorMeta, printoptions


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


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """A spec of a row-major tensor of this global shape; ragged placements come out in canonical form.

    Raises:
        PlacementError: if the placements do not fit the mesh, the shape or each other.
    """
    shape = torch.Size(shape)
    strides = contiguous_strides([max(1, n) for n in shape])  # torch's rule: a size of 0 counts as 1
    meta = TensorMeta(shape, strides, dtype)
    return DTensorSpec(mesh, _canonical(mesh, tuple(placements), shape), tensor_meta=meta)


def spec_with(
    spec: DTensorSpec,
    *,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensorSpec:
    """The same spec with other placements or another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if placements is None and (dtype is None or dtype == meta.dtype):
        return spec
    return make_spec(
        spec.mesh,
        spec.placements if placements is None else placements,
        meta.shape,
        meta.dtype if dtype is None else dtype,
    )


def is_ragged_spec(placements: Sequence[Placement]) -> bool:
    """Whether some mesh axis is cut raggedly."""
    return any(isinstance(placement, RaggedShard) for placement in placements)


def ragged_axis(placements: Sequence[Placement]) -> tuple[int, RaggedShard]:
    """The mesh axis that is cut raggedly, and its placement.

    Raises:
        PlacementError: unless exactly one placement is a RaggedShard.
    """
    found = [(axis, p) for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if len(found) != 1:
        raise PlacementError(
            "A ragged tensor must have exactly one RaggedShard.",
            expected="exactly one",
            got=tuple(placements),
        )
    return found[0]


def inner_box(spec: DTensorSpec) -> Box:
    """What the axes other than the ragged one leave to this rank: the box that the ragged placement cuts."""
    box = whole_box(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            box = box.chunk(placement.dim, spec.mesh.size(axis), spec.mesh.get_local_rank(axis))
    return box


def piece_of(spec: DTensorSpec) -> FlatRange:
    """Range of the flattened inner box that this rank holds: of the flat tensor, if nothing else cuts it."""
    axis, placement = ragged_axis(spec.placements)
    return placement.piece(inner_box(spec).sizes, spec.mesh.get_local_rank(axis))


def boxes_of(spec: DTensorSpec) -> tuple[Box, ...]:
    """Boxes of the global tensor that this rank holds, in the order of its local elements; none if empty."""
    inner = inner_box(spec)
    return tuple(
        Box(tuple(a + b for a, b in zip(box.offsets, inner.offsets, strict=True)), box.sizes)
        for box in boxes_of_range(inner.sizes, *piece_of(spec))
    )


def local_shape(placement: RaggedShard, shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Shape of a rank's local tensor: 1-D, except that ``dims=()`` keeps the owner's tensor whole."""
    numel = placement.piece(shape, rank).numel
    return tuple(shape) if not placement.dims and placement.units[rank] else (numel,)


def _canonical(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> tuple[Placement, ...]:
    if len(placements) != mesh.ndim:
        raise PlacementError(
            "Every mesh axis needs a placement.", expected=f"{mesh.ndim} placements", got=placements
        )
    if not is_ragged_spec(placements):
        return placements
    axis, placement = ragged_axis(placements)
    _check_beside(mesh, placements, axis, placement, shape)
    split = math.prod(
        mesh.size(other)
        for other, p in enumerate(placements)
        if isinstance(p, Shard) and p.dim % len(shape) == 0
    )
    if isinstance(placement, StridedRaggedShard) and placement.split_factor != split:
        raise PlacementError(
            "The split factor does not match the other axes.",
            expected=f"split_factor {split}: the ranks that share dim 0 by Shard(0) beside it",
            got=placement,
            where=str(placements),
            todo="give RaggedShard; the split factor is filled in",
        )
    ragged = placement.with_split_factor(split)
    positive = [Shard(p.dim % len(shape)) if isinstance(p, Shard) else p for p in placements]
    return tuple(ragged if other == axis else p for other, p in enumerate(positive))


def _check_beside(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    axis: int,
    placement: RaggedShard,
    shape: torch.Size,
) -> None:
    """Refuse meshes, shapes and neighbours that a ragged placement cannot stand beside."""
    if placement.num_shards != mesh.size(axis):
        raise PlacementError(
            "The units do not match the number of ranks.",
            expected=f"{mesh.size(axis)} units, one per rank of mesh axis {axis}",
            got=placement.local_units,
        )
    if not shape:
        raise PlacementError(
            "A 0-d tensor has nothing to cut.",
            expected="a tensor of at least one dim",
            got="shape ()",
            todo="use Replicate, or a 1-D tensor of one element",
        )
    for other, p in enumerate(placements):
        plain_shard = type(p) is Shard and -len(shape) <= p.dim < len(shape)
        if other != axis and not (p.is_replicate() or p.is_partial() or plain_shard):
            raise PlacementError(
                "This placement cannot stand beside a RaggedShard.",
                expected="Replicate, Partial or Shard(d) of an existing dim",
                got=p,
                where=f"mesh axis {other} of {placements}",
                todo="redistribute that axis first",
            )
        if plain_shard and other != axis and not ascends(mesh, other):
            raise PlacementError(
                "A Shard on a mesh axis whose ranks are out of order is not defined: torch cuts it by the order of "
                "the mesh and gathers it by that of the ranks.",
                expected="ranks in ascending order along the axis",
                got=ranks_in(mesh),
                where=f"mesh axis {other} of {placements}",
                todo="name the ranks in ascending order: init_device_mesh does",
            )


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
