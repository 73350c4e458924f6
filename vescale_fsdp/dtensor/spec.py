"""The spec of a ragged tensor: which mesh axis has the `RaggedShard`, and which elements each rank owns.

A `RaggedShard` is applied after the placements of all other mesh axes, whatever their order, because tensor and expert
parallelism are applied to the module before it is sharded. So a rank's elements follow in two steps. The placements of
the other axes give the rank a box of the tensor, the *inner* box. The ragged placement cuts the flattened inner box,
and the rank's *piece* is a flat range of the inner box::

    shape (6, 4) on a (2, 2) mesh, placements (RaggedShard((0,), (1, 2)), Shard(0))
        mesh coordinate (0, 0): inner rows [0, 3), piece [0, 4)  = row 0
        mesh coordinate (1, 0): inner rows [0, 3), piece [4, 12) = rows 1, 2
        mesh coordinate (0, 1): inner rows [3, 6), piece [0, 4)  = row 3
        mesh coordinate (1, 1): inner rows [3, 6), piece [4, 12) = rows 4, 5

In the flat order of the full tensor, rank 0 of the ragged axis then owns two runs, not one. `make_spec` records this by
replacing the placement with a `StridedRaggedShard`, whose ``split_factor`` is the number of runs.

The order of ranks. A rank's *group rank* is its number in the process group of a mesh axis. Collectives use it, and so
do pieces: the rank with group rank r owns piece r, whatever its global rank. `ranks_by_group_rank` is the one place
that knows these numbers of other ranks. Two kinds of groups have another order than global ranks or coordinates:

    DeviceMesh("cpu", [1, 0])     torch (2.11-2.15) makes groups of ascending ranks, so rank 0, which is listed second
                                  and has coordinate 1, has group rank 0
    the mesh of a hybrid cut      its group lists ranks as the mesh does (`runtime.data_mesh`), such as 0, 2, 1, 3, so
                                  group ranks are the coordinates

FSDP2 and this library distribute and gather shards by group rank. torch's ``redistribute`` cuts a ``Shard`` by
coordinate, but ``full_tensor`` gathers it by group rank, and DCP takes offsets from coordinates. Where the two differ,
chunks come back swapped, also from FSDP2's checkpoints (torch 2.13). This library refuses a stock ``Shard`` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Shard

from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box, Range, boxes_of_range, contiguous_strides, whole_box
from vescale_fsdp.layout.placement import RaggedShard, StridedRaggedShard
from vescale_fsdp.torch_modes import outside_fake_mode
from vescale_fsdp.torch_private import DTensorSpec, TensorMeta, printoptions

# -- ranks of a mesh ------------------------------------------------------------------------------------


def ranks_in(mesh: DeviceMesh) -> list[Any]:
    """Return the global ranks of a mesh by coordinate: a list that is nested once per axis."""
    with outside_fake_mode():  # under a fake mode, tensors have no values to read
        return mesh.mesh.tolist()


def is_in_group_order(mesh: DeviceMesh, axis: int) -> bool:
    """Return whether coordinates along an axis equal group ranks."""
    with outside_fake_mode():  # under a fake mode, tensors have no values to read
        return bool((mesh.mesh.diff(dim=axis) > 0).all()) or _lists_as_mesh(mesh, axis)


def _lists_as_mesh(mesh: DeviceMesh, axis: int) -> bool:
    """Return whether the process group of an axis lists this rank's line in the order of the mesh, not ascending."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside the mesh has none of its groups
        return False
    index: list[Any] = [*coordinate]
    index[axis] = slice(None)
    line = mesh.mesh[tuple(index)].tolist()
    return line != sorted(line) and line == dist.get_process_group_ranks(mesh.get_group(axis))


def group_ranks_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's number in the process group of each mesh axis."""
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


def ranks_by_group_rank(mesh: DeviceMesh) -> torch.Tensor:
    """Return the global ranks of a mesh, indexed by group rank instead of by coordinate.

    Raises:
        PlacementError: if lines along one axis list their ranks in different orders. Then ranks with equal shards would
            not form a process group.
    """
    with outside_fake_mode():  # under a fake mode, tensors have no values to read
        ranks = mesh.mesh
        for axis in range(mesh.ndim):
            if _lists_as_mesh(mesh, axis):
                continue
            # For each line along the axis, the order that sorts its ranks: one column per line.
            order = ranks.argsort(dim=axis).movedim(axis, 0).reshape(ranks.shape[axis], -1)
            if not torch.equal(order, order[:, :1].expand_as(order)):
                raise PlacementError(
                    "An axis of the mesh lists its ranks in different orders: replicas would own different shards.",
                    expected="every line of an axis in the same order, preferably ascending",
                    got=ranks_in(mesh),
                    where=f"mesh axis {axis}",
                    todo="list the ranks in ascending order: init_device_mesh does",
                )
            ranks = ranks.index_select(axis, order[:, 0])
        return ranks


# -- specs ----------------------------------------------------------------------------------------------


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a row-major tensor. A ragged placement gets its split factor, and dims become non-negative.

    Raises:
        PlacementError: if the placements do not fit the mesh, the shape or each other.
    """
    shape, placements = torch.Size(shape), tuple(placements)
    if len(placements) != mesh.ndim:
        raise PlacementError(
            "Every mesh axis needs a placement.", expected=f"{mesh.ndim} placements", got=placements
        )
    if is_ragged_spec(placements):
        placements = _canonical(mesh, placements, shape)
    strides = contiguous_strides([max(1, n) for n in shape])  # torch's rule: a size of 0 counts as 1
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, strides, dtype))


def spec_with(
    spec: DTensorSpec, *, placements: Sequence[Placement] | None = None, dtype: torch.dtype | None = None
) -> DTensorSpec:
    """Return the spec with other placements or another dtype, or ``spec`` itself if nothing changes."""
    meta = spec.tensor_meta
    assert meta is not None
    # The same object lets operators compare specs by identity, which is fast.
    if placements is None and (dtype is None or dtype == meta.dtype):
        return spec
    return make_spec(
        spec.mesh, spec.placements if placements is None else placements, meta.shape, dtype or meta.dtype
    )


def replaced(placements: Sequence[Placement], axis: int, placement: Placement) -> list[Placement]:
    """Return the placements with ``placement`` in place of the one on mesh axis ``axis``."""
    return [*placements[:axis], placement, *placements[axis + 1 :]]


def is_ragged_spec(placements: Sequence[Placement]) -> bool:
    """Return whether one of the placements is a RaggedShard."""
    return any(isinstance(placement, RaggedShard) for placement in placements)


def ragged_axis(placements: Sequence[Placement]) -> tuple[int, RaggedShard]:
    """Return the mesh axis that has the RaggedShard, and this placement.

    Raises:
        PlacementError: unless exactly one placement is a RaggedShard.
    """
    ragged = [(axis, p) for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if len(ragged) != 1:
        raise PlacementError(
            "A ragged tensor must have exactly one RaggedShard.",
            expected="exactly one",
            got=tuple(placements),
        )
    return ragged[0]


def _canonical(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> tuple[Placement, ...]:
    """Return the placements with non-negative dims, and with the split factor of the ragged placement.

    Raises:
        PlacementError: if the placements do not fit the mesh, the shape or each other.
    """
    axis, placement = ragged_axis(placements)
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
    canonical, split_factor = list(placements), 1
    for other, p in enumerate(placements):
        if other == axis or p.is_replicate() or p.is_partial():
            continue
        # The exact class is required, because under torch's _StridedShard a rank's part is not one box.
        if type(p) is not Shard or not -len(shape) <= p.dim < len(shape):
            raise PlacementError(
                "This placement cannot be combined with a RaggedShard.",
                expected="Replicate, Partial or Shard(d) of an existing dim",
                got=p,
                where=f"mesh axis {other} of {placements}",
                todo="redistribute that axis first",
            )
        if not is_in_group_order(mesh, other):
            raise PlacementError(
                "A Shard on a mesh axis whose ranks are out of order is not defined: torch cuts it by coordinate and "
                "gathers it by group rank.",
                expected="ranks in ascending order along the axis",
                got=ranks_in(mesh),
                where=f"mesh axis {other} of {placements}",
                todo="list the ranks in ascending order: init_device_mesh does",
            )
        canonical[other] = Shard(p.dim % len(shape))  # users may pass a negative dim
        if p.dim % len(shape) == 0:
            split_factor *= mesh.size(other)
    if isinstance(placement, StridedRaggedShard) and placement.split_factor != split_factor:
        raise PlacementError(
            "The split factor does not match the other axes.",
            expected=f"split_factor {split_factor}: the ranks that share dim 0 by Shard(0) on other axes",
            got=placement,
            where=str(placements),
            todo="pass RaggedShard; the split factor is filled in",
        )
    # The split factor depends on the other axes only, so one that the caller passed is dropped here.
    canonical[axis] = RaggedShard.of_runs(placement.dims, placement.units)
    if split_factor > 1:  # other axes cut dim 0 before the ragged placement
        canonical[axis] = StridedRaggedShard(placement.dims, placement.units, split_factor)  # type: ignore[arg-type]
    return tuple(canonical)


# -- what a rank owns -------------------------------------------------------------------------------------


def inner_box(spec: DTensorSpec) -> Box:
    """Return this rank's box under the placements of all other axes; the ragged placement cuts this box."""
    box = whole_box(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            box = box.chunk(placement.dim, spec.mesh.size(axis), spec.mesh.get_local_rank(axis))
    return box


def piece_of(spec: DTensorSpec) -> Range:
    """Return this rank's range of the flattened inner box, which is the whole tensor if no other axis cuts it."""
    axis, placement = ragged_axis(spec.placements)
    return placement.piece(inner_box(spec).sizes, spec.mesh.get_local_rank(axis))


def boxes_of(spec: DTensorSpec) -> tuple[Box, ...]:
    """Return this rank's boxes of the global tensor, in the order of its local elements; () if it owns no element."""
    inner = inner_box(spec)
    return tuple(
        Box(tuple(a + b for a, b in zip(box.offsets, inner.offsets, strict=True)), box.sizes)
        for box in boxes_of_range(inner.sizes, *piece_of(spec))
    )


def local_shape(placement: RaggedShard, shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's local tensor: 1-D, except that under ``dims=()`` the owner keeps ``shape``."""
    numel = placement.piece(shape, rank).numel
    return tuple(shape) if not placement.dims and placement.units[rank] else (numel,)


def shape_of_local(spec: DTensorSpec) -> tuple[int, ...]:
    """Return the shape of this rank's local tensor."""
    sizes = inner_box(spec).sizes
    if not is_ragged_spec(spec.placements):
        return sizes
    axis, placement = ragged_axis(spec.placements)
    return local_shape(placement, sizes, spec.mesh.get_local_rank(axis))


# -- in words -----------------------------------------------------------------------------------------


def axis_text(axis: str, num_ranks: int, placement: Placement) -> str:
    """Return a placement over a mesh axis in words, for ``repr``."""
    over = f"over the {num_ranks} ranks of mesh axis {axis}"
    if not isinstance(placement, RaggedShard):
        return f"{'the same' if placement.is_replicate() else placement} {over}"
    units = placement.units
    # Of more than 8 ranks only the first and last are printed: there may be thousands.
    ratio = ":".join(map(str, units if len(units) <= 8 else (*units[:4], "..", *units[-3:])))
    dims = f"dim {placement.dims[0]}" if len(placement.dims) == 1 else f"dims {placement.dims} as one"
    chunks = ""
    if isinstance(placement, StridedRaggedShard):
        chunks = f", each of {placement.split_factor} chunks"
    return f"{dims if placement.dims else 'the whole'} cut {ratio}{chunks} {over}"


def piece_text(spec: DTensorSpec, local: torch.Tensor) -> str:
    """Return this rank's piece and some of its values in words, for ``repr``."""
    if spec.mesh.get_coordinate() is None:  # this rank is not in the mesh
        return f"not on this rank: mesh {spec.mesh}"
    ranks = group_ranks_in(spec.mesh)
    where = f"rank {ranks[0] if len(ranks) == 1 else ranks} of {spec.mesh.shape}"
    start, stop = piece_of(spec)
    if start == stop:
        return f"{where} holds nothing"
    boxes = []
    for box in boxes_of(spec):
        dims = zip(box.offsets, box.sizes, strict=True)
        boxes.append("[" + ", ".join(f"{o}" if n == 1 else f"{o}:{o + n}" for o, n in dims) + "]")
    with printoptions(threshold=6, edgeitems=3):
        values = " ".join(str(local.detach()).split())  # puts torch's lines on one line
    return f"{where} holds elements [{start}:{stop}) = {', '.join(boxes)},\n  local={values}"
