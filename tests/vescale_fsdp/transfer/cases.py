"""Descriptions of states drawn by hypothesis, and a transfer between ranks that are arrays in one process."""

from __future__ import annotations

from collections import deque
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
from vescale_fsdp.transfer.plan import IN_FLIGHT, TransferPlan
from vescale_fsdp.transfer.rank_transfers import LeafCopy, Message, RankTransfers

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

    Ranks start their messages in their own order, with as few buffers as a rank has. Both ends of every message derive
    the message on their own; they must agree, and no rank may wait for ever.
    """
    targets: dict[int, dict[int, torch.Tensor]] = {rank: {} for rank in range(world_size)}
    for place, entry in enumerate(plan.target.entries):
        dtype = getattr(torch, entry.dtype)
        for rank in range(world_size):
            region = region_of(plan.target, place, rank)
            if region is not None:
                targets[rank][place] = torch.full((region.numel,), -1, dtype=dtype)

    def items_of(item: LeafCopy, sender: int) -> torch.Tensor:
        placed, copy = item
        held = region_of(plan.source, placed.source.number, sender)
        assert held is not None
        return copy.source_view(part_of(full[placed.source.name], held))

    def fill(item: LeafCopy, taker: int, items: torch.Tensor) -> None:
        placed, copy = item
        view = copy.target_view(targets[taker][placed.target])
        assert (view == -1).all() or view.dtype == torch.uint8, "received twice"
        view.copy_(items)

    parts = [RankTransfers(plan, rank) for rank in range(world_size)]
    for rank, part in enumerate(parts):
        for item in part.kept:
            fill(item, rank, items_of(item, rank))
    programs = [deque(part.messages()) for part in parts]
    in_buffers: list[dict[bool, deque[Message]]] = [{True: deque(), False: deque()} for _ in parts]
    relayed: list[deque[Message]] = [deque() for _ in parts]
    # By sender, receiver and number.
    sent: dict[tuple[int, int, int], Message] = {}
    received: dict[tuple[int, int, int], Message] = {}
    values: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def hop_of(rank: int, message: Message) -> tuple[int, int, int]:
        ends = (rank, message.peer) if message.is_sent else (message.peer, rank)
        return *ends, message.number

    def has_arrived(rank: int, message: Message) -> bool:
        return hop_of(rank, message) in sent.keys() & received.keys()

    def starts(rank: int) -> bool:
        """Start a rank's next message, unless it waits for another one."""
        message, hop = programs[rank][0], hop_of(rank, programs[rank][0])
        is_sent_on = message.is_sent and message.is_relayed
        if is_sent_on and not has_arrived(rank, relayed[rank][0]):
            return False
        queue = in_buffers[rank][message.is_sent]
        waiting = [] if message.is_sent else [each for each in relayed[rank] if each.in_place is None]
        if message.in_place is None and len(queue) + len(waiting) == IN_FLIGHT:
            if not has_arrived(rank, queue[0]):
                return False
            queue.popleft()
        if is_sent_on:
            values[hop] = values[hop_of(rank, relayed[rank].popleft())]
        elif message.is_sent:
            values[hop] = [items_of(item, rank) for item in message.copies]
        elif message.is_relayed:
            relayed[rank].append(message)
        if message.in_place is None and (message.is_sent or not message.is_relayed):
            queue.append(message)
        begun = sent if message.is_sent else received
        assert message.number == sum(each[:2] == hop[:2] for each in begun)  # they arrive in this order
        begun[hop] = programs[rank].popleft()
        if has_arrived(rank, message):
            assert [copy for _, copy in sent[hop].copies] == [copy for _, copy in received[hop].copies]
            for item, items in zip(received[hop].copies, values[hop], strict=True):
                fill(item, hop[1], items)
        return True

    while any(programs):
        begun_by = [starts(rank) for rank in range(world_size) if programs[rank]]
        assert any(begun_by), "all ranks wait"
    assert sent.keys() == received.keys()
    return targets
