"""Several compute streams: full parameters are freed on both, gradients made on one and reduced from the other."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support import models
from tests.support.async_device.stream_recorder import RecordedStream, StreamRecorder, recording
from tests.support.distributed import cpu_mesh, run_ranks
from tests.vescale_fsdp.runtime.schedule.test_streams import shard, step
from vescale_fsdp import fully_shard
from vescale_fsdp.runtime.comm.unsharded_grads import UnshardedGrads
from vescale_fsdp.runtime.comm_context import CommContext
from vescale_fsdp.runtime.param_group import GradHook, ParamGroup


def free_at_once(comm: CommContext, groups: Sequence[ParamGroup], read: Any) -> None:
    """Free full buffers without waits."""
    CommContext._free_full(comm, groups, None)


class RemembersTheLastFree(CommContext):
    """Gathers wait for the stream that has freed last, and for no other."""

    last: Any = None

    def reshard(self, groups: Sequence[ParamGroup], **options: bool) -> None:
        with mock.patch.object(self, "_free_full", functools.partial(free_at_once, self)):
            super().reshard(groups, **options)
        self.last = self.streams.current().record_event()  # type: ignore[union-attr]

    def gather(self, groups: Sequence[ParamGroup], *, lasting: bool = False) -> None:
        if self.last is not None:
            self.gather_stream.wait_event(self.last)  # type: ignore[union-attr]
        super().gather(groups, lasting=lasting)


def two_towers(context: type[CommContext]) -> list[str]:
    """Two blocks are used on two streams and freed there, then a third is gathered."""
    model = shard()
    with recording(model, context=context) as recorder, torch.no_grad():
        models.loss_of(model, models.batch(0, 0))
        assert recorder.hazards == []
        other = RecordedStream(recorder, "other tower")
        model.blocks[0].unshard()
        model.blocks[1].unshard()
        other.wait_stream(recorder.current())
        for param in model.blocks[0].parameters():
            param * 1
        with recorder.on(other):
            for param in model.blocks[1].parameters():
                param * 1
        model.blocks[0].reshard()
        with recorder.on(other):
            model.blocks[1].reshard()
            model.blocks[2].unshard()
    return recorder.hazards


@pytest.mark.parametrize(("context", "is_safe"), [(CommContext, True), (RemembersTheLastFree, False)])
def test_buffers_are_freed_on_two_streams(context: type[CommContext], is_safe: bool) -> None:
    """The next gather waits for both, not for the last one alone."""
    for hazards in run_ranks(1, two_towers, context):
        assert (hazards == []) == is_safe
        assert all("stream1" in hazard and "compute" in hazard for hazard in hazards)


class Towers(nn.Module):
    """Three units; each call is given which of them run, in which order, and which on the side stream."""

    waits_for_readers = True

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.turns: tuple[tuple[int, bool], ...] = ()
        self.recorder: StreamRecorder | None = None
        self.here: Any = None
        self.side: Any = None
        self.is_read_twice = False  # by the other stream as well, while the unit runs

    def read_beside(self, unit: nn.Linear, *unused: Any) -> None:
        """A hook of a unit, inside of its own: the stream that does not run it reads its weights, and is waited for."""
        if not self.is_read_twice:
            return
        assert self.recorder is not None and self.side is not None
        here = self.recorder.current()
        other = self.side if here.name != "side" else self.here
        other.wait_stream(here)
        with self.recorder.on(other):
            unit.weight * 0.5
        if self.waits_for_readers:
            here.wait_stream(other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.recorder is not None
        self.here, self.side = here, side = self.recorder.current(), RecordedStream(self.recorder, "side")
        side.wait_stream(here)
        values = {False: x, True: x}
        for number, is_aside in self.turns:
            with self.recorder.on(side if is_aside else here):
                values[is_aside] = self.units[number](values[is_aside])
        here.wait_stream(side)
        return values[False] + values[True]


ORDERS = [
    tuple(zip(order, aside, strict=True))
    for order in itertools.product(range(3), repeat=3)
    for aside in itertools.product((False, True), repeat=3)
    if not aside[0]  # the other half is the same with streams exchanged
]


class FreesForTheCurrentStream(CommContext):
    """Gathers wait for the stream that is current when memory goes, not for the one that has read it."""

    def free_lingering(self) -> None:
        if self._lingering:
            assert self.streams is not None
            self._lingering_read = self.streams.current().record_event()
        super().free_lingering()


# The mesh, whether full parameters are kept in parts, and whether both streams read them.
KINDS: dict[str, tuple[tuple[int, ...], int | None, bool]] = {
    "shards": ((1,), None, False),
    "read twice": ((1,), None, True),
    "replicas": ((2, 2), None, False),
    "parts": ((4,), 2, False),
}


def towers(context: type[CommContext], kind: str, orders: list[Any]) -> dict[Any, list[str]]:
    """Hazards of a first forward in each order, and of one that follows a forward in another order."""
    found = {}
    shape, parts, is_read_twice = KINDS[kind]
    mesh = cpu_mesh(*shape)
    for number, turns in enumerate(orders):
        model = Towers()
        for unit in model.units:
            unit.register_forward_hook(model.read_beside)  # called before the hook that reshards
        for module in (*model.units, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=parts)
        model.is_read_twice = is_read_twice
        with recording(model, context=context) as recorder, torch.set_grad_enabled(number % 4 == 0):
            model.recorder = recorder
            for model.turns in (turns, ORDERS[number * 31 % len(ORDERS)]):
                out = model(torch.ones(2, 16))
                if out.requires_grad:
                    out.sum().backward()
        assert len(recorder.collectives) >= 3 and recorder.work["compute"] > 3
        if recorder.hazards:
            found[turns] = recorder.hazards
    return found


# On several ranks, whose collectives take longer: one order in 13, in which are each unit, stream and place.
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        pytest.param("shards", 1, marks=pytest.mark.part("numerics")),
        pytest.param("read twice", 1, marks=pytest.mark.part("numerics")),
        ("replicas", 13),
        pytest.param("parts", 13, marks=pytest.mark.part("numerics")),
        pytest.param("replicas", 3, marks=pytest.mark.part("numerics")),
        pytest.param("parts", 3, marks=pytest.mark.part("numerics")),
    ],
)
def test_units_on_two_streams_in_any_order(kind: str, every: int) -> None:
    """Full parameters are freed behind the streams that read them, where no order of units is known or another one."""
    world = math.prod(KINDS[kind][0])
    assert run_ranks(world, towers, CommContext, kind, ORDERS[::every]) == [{}] * world


def test_memory_is_freed_behind_its_reader() -> None:
    """Negative control: a wait for the current stream leaves memory that the other one still reads."""
    (found,) = run_ranks(1, towers, FreesForTheCurrentStream, "shards", ORDERS)
    assert len(found) > len(ORDERS) / 10
    hazards = [text for texts in found.values() for text in texts]
    assert all("freed" in text and "used" in text for text in hazards)


def towers_with_readers_left_alone() -> dict[Any, list[str]]:
    with mock.patch.object(Towers, "waits_for_readers", False):
        return towers(CommContext, "read twice", ORDERS[::3])


def test_a_second_reader_is_seen() -> None:
    """Negative control: a stream that reads a unit and is not waited for is a hazard."""
    (found,) = run_ranks(1, towers_with_readers_left_alone)
    assert len(found) > len(ORDERS[::3]) / 4


class DoesNotWaitForMakers(UnshardedGrads):
    def write_kept(self) -> None:
        self._made_on = {}
        super().write_kept()


class MakersDoNotWait(UnshardedGrads):
    def write_kept(self) -> None:
        with mock.patch.object(RecordedStream, "wait_stream", wait_unless_it_is_a_side):
            super().write_kept()


def wait_unless_it_is_a_side(stream: RecordedStream, other: Any) -> None:
    if stream.name != "side":
        stream.wait_event(other.record_event())


def gradients_on_a_side(kind: type[UnshardedGrads]) -> set[str]:
    """Every second gradient is made on another stream, as where a forward has used one for a part of a unit."""
    model = shard()
    with recording(model) as recorder:
        for group in recorder.groups:
            group.grads.__class__ = kind
        with mock.patch.object(GradHook, "__call__", on_a_side(recorder)):
            for number in range(3):
                step(model, number)
    assert recorder.work["side"] > 20
    return {text.split(" [")[0].split(" bytes ")[-1] for text in recorder.hazards}


def on_a_side(recorder: StreamRecorder) -> Any:
    side, call, count = RecordedStream(recorder, "side"), GradHook.__call__, [0]

    def called(hook: GradHook, unsharded: nn.Parameter) -> None:
        count[0] += 1
        if count[0] % 2:
            call(hook, unsharded)
            return
        with recorder.on(side):
            unsharded.grad = torch.zeros(
                unsharded.shape, dtype=unsharded.dtype
            )  # not behind any other stream
            call(hook, unsharded)

    return called


@pytest.mark.parametrize(
    ("kind", "hazards"),
    [
        (UnshardedGrads, set()),
        (DoesNotWaitForMakers, {"aten._foreach_copy_.default on compute reads what side may still be using"}),
        (MakersDoNotWait, {"freed to side are still used by"}),
    ],
)
def test_gradients_are_made_on_two_streams(kind: type[UnshardedGrads], hazards: set[str]) -> None:
    """They are read behind the stream that made them, which gets its memory back behind the copy."""
    for found in run_ranks(1, gradients_on_a_side, kind):
        assert found >= hazards and bool(found) == bool(hazards), found


def several_before_a_reduction() -> tuple[set[float], set[float]]:
    """One parameter's gradients, three of them, and what the buffer has for it and for another one."""
    model = shard()
    with recording(model) as recorder:
        group = recorder.groups[0]
        assert group.grads.streams is not None, "else each is written at once"
        taken, other = group.layout.slots[:2]
        for value in (1.0, 2.0, 4.0):
            group.grads.take(taken, torch.full(taken.shape, value, dtype=torch.bfloat16))
        buffer = group.grads.complete()
        return tuple(set(buffer.view(slot).flatten().tolist()) for slot in (taken, other))  # type: ignore[return-value]


def test_several_gradients_before_a_reduction_are_summed() -> None:
    """What is kept is not replaced: a nested backward, as of a recomputation, brings a parameter's gradient twice."""
    assert run_ranks(1, several_before_a_reduction) == [({7.0}, {0.0})]
