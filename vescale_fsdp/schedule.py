"""Schedule: when units gather, reshard and reduce. One per tree of sharded modules, shared by its units.

What overlaps with what, on an accelerator (c = compute stream, g = gather stream, r = reduce stream; the
collectives themselves run on the process groups' own streams)::

    forward    g  gather 1 | gather 2        | gather 3 ..
               c           | compute 1       | compute 2 ..      2 buffers alive at most
    backward   g  gather 3 | gather 2        | gather 1
               c           | compute 3       | compute 2 ..
               r                             | reduce 3 ..       1 reduction in flight at most

The next unit is gathered while the current one computes: in the forward by the order of the previous
iteration (or the user's list), in the backward by the reverse of this forward's order. Memory is freed
deterministically, without ``record_stream``: a buffer is given back when the compute stream is done with it
as an event says, and the gather stream waits for that event before it allocates again. On the CPU there are
no streams: collectives run in gloo's threads and `wait` is a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from vescale_fsdp.param_group import GroupState, ParamGroup, ReducedShard
from vescale_fsdp.torch_private import autograd_engine_callback, profiled

_SHARDED = (GroupState.SHARDED, GroupState.PARTLY_SHARDED)

__all__ = ["CommContext", "Schedule", "Unit"]


class Unit(Protocol):
    """What the schedule must know of a unit (`vescale_fsdp.unit.FSDPState` is the only one)."""

    groups: list[ParamGroup]
    label: str
    forward_prefetch: list[Any] | None
    backward_prefetch: list[Any] | None
    unshard_in_backward: bool

    def finish_forward(self) -> None:
        """Called when the root's forward ends."""

    def end_backward(self, *, is_last: bool) -> None:
        """Called when the whole backward pass is over."""


class CommContext:
    """Streams and reductions in flight. Several roots may share one (`share_comm_ctx`)."""

    def __init__(self, device: torch.device) -> None:
        self.max_reductions = 1
        self.in_flight: list[tuple[ParamGroup, ReducedShard]] = []
        self.freed: torch.Event | None = None  # the compute stream's last use of a freed buffer
        self.gather_stream: torch.Stream | None = None
        self.reduce_stream: torch.Stream | None = None
        if device.type not in ("cpu", "meta"):
            self.gather_stream = torch.Stream(device=device, priority=-1)
            self.reduce_stream = torch.Stream(device=device, priority=-1)

    @staticmethod
    def compute_stream(beside: torch.Stream) -> torch.Stream:
        """The stream that the caller computes on."""
        return torch.accelerator.current_stream(beside.device)

    def wait_for_compute(self) -> None:
        """Let the gather stream wait for what the compute stream has been given (the optimizer's step)."""
        if self.gather_stream is not None:
            self.gather_stream.wait_stream(self.compute_stream(self.gather_stream))

    def wait_for_event(self, event: torch.Event) -> None:
        """Let the gather stream wait for a user's event instead of the whole compute stream."""
        if self.gather_stream is not None:
            self.gather_stream.wait_event(event)

    def gather(self, groups: Sequence[ParamGroup]) -> None:
        """Start all-gathers, once the buffers freed so far may be used again."""
        if self.gather_stream is not None and self.freed is not None:
            self.gather_stream.wait_event(self.freed)
        with _on(self.gather_stream):
            for group in groups:
                group.unshard()

    def reshard(self, groups: Sequence[ParamGroup], *, keep_part: bool = False) -> None:
        """Free full parameters; the next gather waits until the compute stream is done with them."""
        for group in groups:
            group.reshard(keep_part=keep_part)
        if self.gather_stream is not None:
            self.freed = self.compute_stream(self.gather_stream).record_event()

    def reduce(self, group: ParamGroup) -> None:
        """Start a reduction; at most ``max_reductions`` stay in flight."""
        while len(self.in_flight) >= self.max_reductions:
            self.finish_reduction()
        if self.reduce_stream is not None:
            self.reduce_stream.wait_stream(self.compute_stream(self.reduce_stream))
        with _on(self.reduce_stream):
            self.in_flight.append((group, group.start_reduce()))

    def make_room(self) -> None:
        """Before a gradient buffer is allocated: on the CPU, let go of the one still being reduced.

        There a wait costs little, since the cores that would overlap with it do the reduction. On an
        accelerator the reduction runs beside the next unit's backward, and its buffer with it.
        """
        if self.reduce_stream is None:
            while self.in_flight:
                self.finish_reduction()

    def finish_reduction(self) -> None:
        """Finish the oldest reduction in flight."""
        group, reduced = self.in_flight.pop(0)
        with _on(self.reduce_stream):
            group.finish_reduce(reduced)
        if self.reduce_stream is not None:
            # The gradient buffer belongs to the compute stream: its memory may be reused there only after
            # the reduction has read it.
            self.compute_stream(self.reduce_stream).wait_stream(self.reduce_stream)
        group.recycle(reduced.source)


def _on(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return stream if stream is not None else nullcontext()


class Schedule:
    """Order and prefetch, for all units under one root.

    Args:
        comm: streams and what is in flight.
    """

    def __init__(self, comm: CommContext) -> None:
        self.comm = comm
        self.units: list[Unit] = []
        self.in_backward = False
        self.is_last_backward = True
        self._order: list[Unit] = []  # of this forward
        self._previous_order: list[Unit] = []  # of the forward before

    def gather(self, unit: Unit) -> None:
        """Start the all-gathers of a unit (nothing if they are under way or done)."""
        if any(group.state in _SHARDED for group in unit.groups):
            self.comm.gather(unit.groups)

    def _wait(self, unit: Unit) -> None:
        for group in unit.groups:
            group.wait_unsharded()

    # -- forward --------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root starts a forward: remember the last order, drop parts the optimizer may have overtaken."""
        for unit in self.units:
            for group in unit.groups:
                if group.state is GroupState.PARTLY_SHARDED:
                    group.reshard()
        if self._order:
            self._previous_order = self._order
        self._order = []

    def enter_forward(self, unit: Unit) -> None:
        """A unit starts its forward: gather it, and the unit that comes next."""
        self.gather(unit)
        self._wait(unit)
        if not self.in_backward:
            for following in self._next_in_forward(unit):
                with profiled("FSDP::forward_prefetch for ", following.label):
                    self.gather(following)
            if unit not in self._order:
                self._order.append(unit)

    def end_forward(self) -> None:
        """The root's forward ends: units of which it ran only some modules are through as well."""
        for unit in self.units:
            unit.finish_forward()

    def _next_in_forward(self, unit: Unit) -> Sequence[Unit]:
        if unit.forward_prefetch is not None:
            return unit.forward_prefetch
        position = len(self._order)
        order = self._previous_order
        # Only where this forward has followed the last one so far: a wrong guess would gather in vain.
        if position + 1 < len(order) and order[position] is unit and unit not in self._order:
            return order[position + 1 : position + 2]
        return ()

    # -- backward -------------------------------------------------------------------------------------

    def enter_backward(self, unit: Unit) -> None:
        """A unit's outputs have gradients: gather it, and the unit whose turn comes next."""
        if not self.in_backward:
            self.in_backward = True
            autograd_engine_callback(self._end_backward)
        if unit.unshard_in_backward:
            self.gather(unit)
            self._wait(unit)
        for following in self._next_in_backward(unit):
            if following.unshard_in_backward:
                with profiled("FSDP::backward_prefetch for ", following.label):
                    self.gather(following)

    def _next_in_backward(self, unit: Unit) -> Sequence[Unit]:
        if unit.backward_prefetch is not None:
            return unit.backward_prefetch
        if unit not in self._order:
            return ()
        position = self._order.index(unit)
        return self._order[position - 1 : position] if position else ()

    def _end_backward(self) -> None:
        with profiled("FSDP::root_post_backward_callback", ""):
            # Reverse order of the forward: the same on every rank, whatever autograd did not reach.
            for unit in dict.fromkeys([*reversed(self._order), *self.units]):
                unit.end_backward(is_last=self.is_last_backward)
            while self.comm.in_flight:
                self.comm.finish_reduction()
            for unit in self.units:
                for group in unit.groups:
                    group.wait_host_copy()
        self.in_backward = False
        if self.is_last_backward and self._order:
            self._previous_order, self._order = self._order, []

    def reset(self) -> None:
        """Forget everything in flight after an exception; gradients not yet reduced are dropped."""
        for _, reduced in self.comm.in_flight:
            if reduced.work is not None:
                reduced.work.wait()
        self.comm.in_flight.clear()
        for unit in self.units:
            for group in unit.groups:
                group.drop_grads()
            self.comm.reshard(unit.groups)
        self.in_backward = False
        self._order = []
