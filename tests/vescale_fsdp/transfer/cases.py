"""Descriptions of states drawn by hypothesis, and a transfer between ranks that are arrays in one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import torch

from vescale_fsdp import RaggedShard
from vescale_fsdp.checkpoint.state.tensor_description import axes_of_ranks
from vescale_fsdp.layout import GroupLayout, TensorSpec, plan_group
from vescale_fsdp.layout.distribution import (
    Axis,
    Cut,
    Distribution,
    LayoutCut,
    RankSet,
    ShardCut,
    UnitsCut,
)
from vescale_fsdp.layout.geometry import Range, numel_of
from vescale_fsdp.layout.region import Region
from vescale_fsdp.transfer.description import DescribedTensor, StateDescription
from vescale_fsdp.transfer.plan import TransferPlan
from vescale_fsdp.transfer.rank_transfers import LeafCopy, RankTransfers

Shape = tuple[int, ...]
MESHES = ((1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 1, 2))


class Ranks(NamedTuple):
    """A mesh of a world's ranks."""

    numbers: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """One per dim of the mesh."""
        return axes_of_ranks(np.array(self.numbers).reshape(self.shape))


@st.composite
def meshes(draw: st.DrawFn, world_size: int) -> Ranks:
    """Some ranks of a world, in some shape, anywhere in it."""
    shape = draw(st.sampled_from([shape for shape in MESHES if numel_of(shape) <= world_size]))
    size = numel_of(shape)
    if draw(st.booleans()):
        first = draw(st.integers(0, world_size - size))
        return Ranks(tuple(range(first, first + size)), shape)
    return Ranks(tuple(sorted(draw(st.permutations(range(world_size)))[:size])), shape)


@st.composite
def distributions(draw: st.DrawFn, shape: Shape, mesh: Ranks, layouts: list[GroupLayout]) -> Distribution:
    """Any distribution: each axis replicates, shards a dim, or (the last that cuts) cuts flat pieces."""
    pairs: list[tuple[Axis, Cut]] = []
    box = shape
    for axis in draw(st.permutations(mesh.axes)):
        kind = draw(st.sampled_from(["replicate", "shard", "shard", "layout", "units"]))
        if kind == "replicate" or axis.size == 1:
            continue
        if kind == "shard" and shape:
            pairs.append((axis, ShardCut(draw(st.integers(0, len(shape) - 1)))))
            continue
        if kind == "layout" and not pairs and shape:
            pairs.append((axis, draw(layout_cuts(shape, axis.size, layouts))))
            break
        if kind == "units" and shape:
            # the same units must do for every box that earlier cuts left, so they are of the first dim's kind
            if pairs:
                continue
            pairs.append((axis, draw(unit_cuts(box, axis.size))))
            break
    return Distribution(tuple(axis for axis, _ in pairs), tuple(cut for _, cut in pairs))


@st.composite
def layout_cuts(draw: st.DrawFn, shape: Shape, num_shards: int, layouts: list[GroupLayout]) -> LayoutCut:
    """The tensor in a group, between two other tensors."""
    row = max(numel_of(shape[1:]), 1)
    specs = [
        TensorSpec("before", (draw(st.integers(1, 9)),), "float32", 1),
        TensorSpec("w", shape, "float32", draw(st.sampled_from([1, row, 2 * row]))),
        TensorSpec("behind", (draw(st.integers(1, 9)),), "float32", 1),
    ]
    layout = plan_group(specs, num_shards, align_numel=1)
    layouts.append(layout)
    return LayoutCut(len(layouts) - 1, [slot.fqn for slot in layout.slots].index("w"))


@st.composite
def unit_cuts(draw: st.DrawFn, shape: Shape, num_ranks: int) -> UnitsCut:
    """Flat pieces of any size, empty ones included."""
    numel = numel_of(shape)
    edges = sorted(draw(st.lists(st.integers(0, numel), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    placement = RaggedShard.from_piece_numels(shape, [b - a for a, b in pairwise((0, *edges, numel))])
    return UnitsCut(placement.dims, tuple((1, units) for units in placement.local_units))


@st.composite
def descriptions(
    draw: st.DrawFn, tensors: Sequence[tuple[str, str, Shape]], world_size: int
) -> StateDescription:
    """A description of these tensors, each on one of two meshes of the world."""
    choice = [draw(meshes(world_size)), draw(meshes(world_size))]
    layouts: list[GroupLayout] = []
    held = []
    for name, dtype, shape in tensors:
        mesh = draw(st.sampled_from(choice))
        distribution = draw(distributions(shape, mesh, layouts))
        held.append(DescribedTensor(name, dtype, shape, distribution, RankSet.of(mesh.numbers)))
    return StateDescription.of(held, layouts)


def region_of(description: StateDescription, place: int, rank: int) -> Region | None:
    """The part of a tensor that a rank stores; None if it stores none."""
    position = description.holders_of(place).position(rank)
    if position is None:
        return None
    shape, layouts = description.entries[place].shape, description.structure.layouts
    return description.distributions[place].region(shape, position[0], layouts)


def part_of(full: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a whole tensor, flat."""
    span = Range(*region.span)
    return full[region.box.slices()].reshape(-1)[span.start : span.stop].clone()


def moved(
    plan: TransferPlan, full: dict[str, torch.Tensor], world_size: int
) -> dict[int, dict[int, torch.Tensor]]:
    """Each rank's part of each tensor of the target after a transfer; -1 where no item was received.

    Both ends of every stream find it on their own; they must agree, message by message.
    """
    parts = [RankTransfers(plan, rank) for rank in range(world_size)]
    targets: dict[int, dict[int, torch.Tensor]] = {rank: {} for rank in range(world_size)}
    for place, entry in enumerate(plan.target.entries):
        dtype = getattr(torch, entry.dtype)
        for rank in range(world_size):
            region = region_of(plan.target, place, rank)
            if region is not None:
                targets[rank][place] = torch.full((region.numel,), -1, dtype=dtype)

    def move(item: LeafCopy, sender: int, taker: int) -> None:
        placed, copy = item
        held = region_of(plan.source, placed.source.number, sender)
        assert held is not None
        source = part_of(full[placed.source.name], held)
        copy.target_view(targets[taker][placed.target]).copy_(copy.source_view(source))

    for sender in range(world_size):
        for item in parts[sender].kept:
            move(item, sender, sender)
        assert set(parts[sender].sends) == {r for r in range(world_size) if sender in parts[r].receives}
        for taker, stream in parts[sender].sends.items():
            messages = stream.messages(plan.message_bytes)
            assert messages == parts[taker].receives[sender].messages(plan.message_bytes)
            for item in (item for message in messages for item in message):
                move(item, sender, taker)
    return targets
