"""Live states on any meshes of a world, drawn by hypothesis as values that every rank builds for itself."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.layout import TensorSpec, plan_group
from vescale_fsdp.layout.geometry import numel_of

Shape = tuple[int, ...]
# Meshes of four ranks: all, halves, neighbors that overlap both, one alone.
MESHES = ([0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 1], [2, 3], [1, 2], [0, 1, 3], [2])


class Placed(NamedTuple):
    """Mesh and placements of a tensor: the mesh by number, or None for a plain tensor on some ranks."""

    mesh: int | None
    placements: tuple[Placement, ...] = ()
    ranks: tuple[int, ...] = ()


@st.composite
def placed(draw: st.DrawFn, shape: Shape) -> Placed:
    """Any distribution of a tensor of this shape."""
    if draw(st.integers(0, 4)) == 0:
        return Placed(None, (), tuple(draw(st.sets(st.integers(0, 3), min_size=1))))
    mesh = draw(st.integers(0, len(MESHES) - 1))
    sizes = torch.tensor(MESHES[mesh]).shape
    outer = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    if len(sizes) == 1:
        inner = [*outer, draw(ragged(shape, sizes[0]))] if shape else outer
        return Placed(mesh, (draw(st.sampled_from(inner)),))
    first = draw(st.sampled_from(outer))
    if isinstance(first, Replicate) and shape:
        return Placed(mesh, (first, draw(st.sampled_from([*outer, draw(ragged(shape, sizes[1]))]))))
    return Placed(mesh, (first, draw(st.sampled_from(outer))))


@st.composite
def ragged(draw: st.DrawFn, shape: Shape, num_ranks: int) -> RaggedShard:
    """Pieces of any size, or as planned for a tensor between other tensors."""
    numel = numel_of(shape)
    if draw(st.booleans()) and numel:
        specs = [
            TensorSpec("before", (draw(st.integers(1, 9)),), "float32", 1),
            TensorSpec("w", shape, "float32", 1),
        ]
        layout = plan_group(specs, num_ranks, align_numel=1)
        return RaggedShard.from_piece_numels(shape, list(layout.piece_numels(layout.slot("w"))))
    edges = sorted(draw(st.lists(st.integers(0, numel), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    return RaggedShard.from_piece_numels(shape, [b - a for a, b in pairwise((0, *edges, numel))])


def all_meshes() -> list[DeviceMesh]:
    """The meshes; a collective of all ranks."""
    return [DeviceMesh("cpu", ranks) for ranks in MESHES]


def held(full: torch.Tensor, how: Placed, meshes: list[DeviceMesh]) -> torch.Tensor | None:
    """This rank's tensor; None if this rank stores no part."""
    rank = dist.get_rank()
    if how.mesh is None:
        return full.clone() if rank in how.ranks else None
    mesh = meshes[how.mesh]
    if mesh.get_coordinate() is None:
        return None
    if any(isinstance(placement, RaggedShard) for placement in how.placements):
        return distribute_tensor(full.clone(), mesh, list(how.placements))
    return distribute_stock(full.clone(), mesh, list(how.placements), src_data_rank=None)


def state_of(
    fulls: dict[str, torch.Tensor], hows: dict[str, Placed], meshes: list[DeviceMesh]
) -> dict[str, torch.Tensor]:
    """This rank's part of some tensors."""
    found = {name: held(full, hows[name], meshes) for name, full in fulls.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
