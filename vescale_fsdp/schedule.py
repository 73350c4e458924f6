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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from vescale_fsdp.param_group import GroupState, ParamGroup, ReducedShard
from vescale_fsdp.torch_private import autograd_engine_callback

__all__ = ["Schedule", "Unit"]


class Unit(Protocol):
    """What the schedule must know of a unit (`vescale_fsdp.module.FSDPState` is the only one)."""

    groups: list[ParamGroup]
    forward_prefetch: list[Any] | None
    backward_prefetch: list[Any] | None
    unshard_in_backward: bool

    def end_backward(self) -> None:
        """Called when the whole backward pass is over."""


class Schedule:
    """Order, streams and what is in flight, for all units under one root.

    Args:
        device: where the units compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.units: list[Unit] = []
        self.in_backward = False
        self.is_last_backward = True
        self.max_reductions = 1
        self._order: list[Unit] = []  # of this forward
        self._previous_order: list[Unit] = []  # of the forward before
        self._in_flight: list[tuple[ParamGroup, ReducedShard]] = []
        self._freed: torch.Event | None = None  # the compute stream's last use of a freed buffer
        self._gather_stream: torch.Stream | None = None
        self._reduce_stream: torch.Stream | None = None
        if device.type not in ("cpu", "meta"):
            self._gather_stream = torch.Stream(device=device, priority=-1)
            self._reduce_stream = torch.Stream(device=device, priority=-1)

    # -- streams --------------------------------------------------------------------------------------

    @staticmethod
    def _current(stream: torch.Stream) -> torch.Stream:
        return torch.accelerator.current_stream(stream.device)

    @contextmanager
    def _on(self, stream: torch.Stream | None) -> Iterator[None]:
        with stream if stream is not None else nullcontext():
            yield

    def wait_for_compute(self) -> None:
        """Let the gather stream wait for what the compute stream has been given (the optimizer's step)."""
        if self._gather_stream is not None:
            self._gather_stream.wait_stream(self._current(self._gather_stream))

    def wait_for_event(self, event: torch.Event) -> None:
        """Let the gather stream wait for a user's event instead of the whole compute stream."""
        if self._gather_stream is not None:
            self._gather_stream.wait_event(event)

    # -- gather and reshard ---------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Start the all-gathers of a unit."""
        if all(group.state is not GroupState.SHARDED for group in unit.groups):
            return
        if self._gather_stream is not None and self._freed is not None:
            self._gather_stream.wait_event(self._freed)
        with self._on(self._gather_stream):
            for group in unit.groups:
                group.unshard()

    def reshard(self, unit: Unit) -> None:
        """Free a unit's full parameters once the compute stream is done with them."""
        if self._gather_stream is not None:
            self._freed = self._current(self._gather_stream).record_event()
        for group in unit.groups:
            group.reshard()

    # -- forward --------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root starts a forward: remember the last order."""
        if self._order:
            self._previous_order = self._order
        self._order = []

    def enter_forward(self, unit: Unit) -> None:
        """A unit starts its forward: gather it, and the unit that comes next."""
        self.gather(unit)
        for group in unit.groups:
            group.wait_unsharded()
        if not self.in_backward:
            for following in self._next_in_forward(unit):
                self.gather(following)
            if unit not in self._order:
                self._order.append(unit)

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
            for group in unit.groups:
                group.wait_unsharded()
        for following in self._next_in_backward(unit):
            if following.unshard_in_backward:
                self.gather(following)

    def _next_in_backward(self, unit: Unit) -> Sequence[Unit]:
        if unit.backward_prefetch is not None:
            return unit.backward_prefetch
        if unit not in self._order:
            return ()
        position = self._order.index(unit)
        return self._order[position - 1 : position] if position else ()

    def reduce(self, group: ParamGroup) -> None:
        """Start a group's reduction; at most ``max_reductions`` stay in flight."""
        while len(self._in_flight) >= self.max_reductions:
            self._finish_one()
        if self._reduce_stream is not None:
            self._reduce_stream.wait_stream(self._current(self._reduce_stream))
        with self._on(self._reduce_stream):
            self._in_flight.append((group, group.start_reduce()))

    def _finish_one(self) -> None:
        group, reduced = self._in_flight.pop(0)
        with self._on(self._reduce_stream):
            group.finish_reduce(reduced)
        if self._reduce_stream is not None:
            # The gradient buffer was allocated on the compute stream: it may be reused there only after
            # the reduction has read it.
            self._current(self._reduce_stream).wait_stream(self._reduce_stream)

    def _end_backward(self) -> None:
        # Reverse order of the forward: the same on every rank, whatever autograd did not reach.
        for unit in [*reversed(self._order), *self.units]:
            unit.end_backward()
        while self._in_flight:
            self._finish_one()
        self.in_backward = False
        if self.is_last_backward and self._order:
            self._previous_order, self._order = self._order, []

    def reset(self) -> None:
        """Forget everything in flight after an exception; gradients not yet reduced are dropped."""
        for group, reduced in self._in_flight:
            for work in reduced.works:
                work.wait()
            group.drop_grads()
        self._in_flight.clear()
        for unit in self.units:
            for group in unit.groups:
                group.drop_grads()
            self.reshard(unit)
        self.in_backward = False
        self._order = []
