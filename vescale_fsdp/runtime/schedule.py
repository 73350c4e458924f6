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
no streams: collectives run in gloo's threads and `wait` is a wait. ``tests/runtime/comm/test_streams.py`` runs all of
this on recorded streams and finds every access and allocation in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch

from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.streams import Event, Stream, Streams
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup, ReducedShard
from vescale_fsdp.runtime.takeover import settle
from vescale_fsdp.torch_private import autograd_engine_callback, outside_modes, profiled

_SHARDED = (GroupState.SHARDED, GroupState.PARTLY_SHARDED)

__all__ = ["CommContext", "Schedule", "Unit"]


class Unit(Protocol):
    """What the schedule must know of a unit (`vescale_fsdp.runtime.fsdp_state.FSDPState` is the only one)."""

    groups: list[ParamGroup]
    label: str
    shown: str  # the label in parentheses
    forward_prefetch: list[Any] | None
    backward_prefetch: list[Any] | None
    unshard_in_backward: bool

    def finish_forward(self) -> None:
        """Called when the root's forward ends."""

    def end_backward(self, *, is_last: bool) -> None:
        """Called when the whole backward pass is over."""


class CommContext:
    """Streams and reductions in flight. Several roots may share one (`share_comm_ctx`).

    Who owns which memory (the caching allocator gives a freed block to the stream it was allocated on, at
    once, so every other stream that used it must be waited for first):

        gathered buffers, and what a gather needs beside them     g; reused behind the event ``freed``
        gradient buffers                                          c; freed once c waits for their reduction
        reduced shards, so sharded gradients                      r; r waits for c at the start of a reduction

    Args:
        streams: where streams come from; None on the CPU, where a wait is a wait.
    """

    def __init__(self, streams: Streams | None) -> None:
        self.streams = streams
        self.max_reductions = 1
        self.in_flight: list[tuple[ParamGroup, ReducedShard]] = []
        self.freed: Event | None = None  # the compute stream's last use of a freed buffer
        self._spare_grads: dict[GroupLayout, dict[torch.dtype, list[DBuffer]]] = {}
        self._kept: DBuffer | None = None  # the one of them that still has its memory
        self._host_copies: dict[Stream, Event] = {}  # the last copy from or to the host, by stream

    # Made when first asked for: every unit begins with a context of its own, and drops it for its root's.
    @cached_property
    def gather_stream(self) -> Stream | None:
        """Where gathers start, and the casts before and the decoding after them run."""
        return self.streams.new() if self.streams is not None else None

    @cached_property
    def reduce_stream(self) -> Stream | None:
        """Where reductions start, and what is done with a reduced shard runs."""
        return self.streams.new() if self.streams is not None else None

    def _on(self, stream: Stream | None) -> AbstractContextManager[Any]:
        return self.streams.on(stream) if self.streams is not None and stream is not None else nullcontext()

    def _compute_waits_for(self, stream: Stream | None) -> None:
        if self.streams is not None:
            self.streams.current().wait_stream(stream)

    def wait_for_compute(self) -> None:
        """Let the gather stream wait for what the compute stream has been given (the optimizer's step)."""
        if self.streams is not None and self.gather_stream is not None:
            self.gather_stream.wait_stream(self.streams.current())

    def wait_for_event(self, event: Event) -> None:
        """Let the gather stream wait for a user's event instead of the whole compute stream."""
        if self.gather_stream is not None:
            self.gather_stream.wait_event(event)

    # -- gather ---------------------------------------------------------------------------------------

    def gather(self, groups: Sequence[ParamGroup]) -> None:
        """Start all-gathers, once the buffers freed so far may be used again."""
        if self.gather_stream is not None and self.freed is not None:
            self.gather_stream.wait_event(self.freed)
        with self._on(self.gather_stream), outside_modes():
            for group in groups:
                if group.state in _SHARDED:
                    settle(group)
                group.unshard()
                if self.gather_stream is not None and group.state is GroupState.GATHERING:
                    # What decodes or copies out behind the collective uses memory of this stream: here, now.
                    group.finish_gather()
                    group.gathered = self.gather_stream.record_event()
        self._note_host_copy(self.gather_stream, groups)

    def wait(self, groups: Sequence[ParamGroup]) -> None:
        """Wait for the all-gathers under way and hand the unsharded parameters to the modules."""
        for group in groups:
            if group.state in (GroupState.GATHERING, GroupState.GATHERED):
                with outside_modes():
                    self.settle([group])
                    group.hand_over()

    def settle(self, groups: Sequence[ParamGroup]) -> None:
        """See to it that gathers under way have read their shards before the compute stream goes on."""
        for group in groups:
            if group.state is GroupState.GATHERING:
                group.finish_gather()
            elif self.streams is not None and group.gathered is not None:
                self.streams.current().wait_event(group.gathered)

    def reshard(self, groups: Sequence[ParamGroup], *, keep_part: bool = False) -> None:
        """Free full parameters; the next gather waits until the compute stream is done with them."""
        self.wait(groups)
        with outside_modes():
            for group in groups:
                group.reshard(keep_part=keep_part)
        if self.streams is not None:
            self.freed = self.streams.current().record_event()

    # -- gradient buffers -------------------------------------------------------------------------------

    def adopt(self, group: ParamGroup) -> None:
        """Let a group share gradient buffers with those of equal layout: the layers of a model."""
        group.take_spare = self._take_spare
        if group.comm.custom_reduce_scatter is None:
            group.spare_grads = self._spare_grads.setdefault(group.layout, {})

    def _take_spare(self, spares: list[DBuffer]) -> DBuffer | None:
        """One of these buffers, if there is one; on the CPU, once the reductions in flight are done.

        There a wait costs little, since the cores that would overlap with it do the reduction, and the buffer
        that was reduced goes, memory and all, to the next unit: a fresh one would cost a page fault for every
        4 KiB. On an accelerator the reduction runs beside the next unit's backward, and its buffer with it.
        """
        if self.streams is None:
            while self.in_flight:
                self.finish_reduction()
        spare = spares.pop() if spares else None
        if spare is self._kept:
            self._kept = None
        else:
            self._let_go()
        return spare

    def _recycle(self, group: ParamGroup, buffer: DBuffer) -> None:
        """Keep a gradient buffer that was reduced: its tensors, and on the CPU its memory until the next one."""
        group.spare_grads.setdefault(buffer.flat.dtype, []).append(buffer)
        self._let_go()
        if self.streams is None:
            self._kept = buffer
        else:
            buffer.free()

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.free()
            self._kept = None

    # -- reduce ---------------------------------------------------------------------------------------

    def make_way(self) -> None:
        """Finish reductions until one more may start: at most ``max_reductions`` stay in flight."""
        while len(self.in_flight) >= self.max_reductions:
            self.finish_reduction()

    def reduce(self, group: ParamGroup) -> None:
        """Start a reduction."""
        self.make_way()
        self._let_go()  # nobody took it: the root's gradients, for one, have their memory since the loss
        if self.streams is not None and self.reduce_stream is not None:
            self.reduce_stream.wait_stream(self.streams.current())
        with self._on(self.reduce_stream):
            self.in_flight.append((group, group.start_reduce()))

    def finish_reduction(self) -> None:
        """Finish the oldest reduction in flight, for the streams: the host goes on at once."""
        group, reduced = self.in_flight.pop(0)
        with self._on(self.reduce_stream):
            reduced.wait()
        # Only now may the compute stream, which owns the gradient buffer, use its memory again. What follows
        # (the replicas' all-reduce, casts) need not be waited for before the next reduction has run.
        self._compute_waits_for(self.reduce_stream)
        self._recycle(group, reduced.source)
        with self._on(self.reduce_stream):
            group.finish_reduce(reduced)
        self._note_host_copy(self.reduce_stream, [group])

    def finish_reductions(self) -> None:
        """Finish all of them; the compute stream may read the sharded gradients behind this."""
        while self.in_flight:
            self.finish_reduction()
        self._let_go()
        self._compute_waits_for(self.reduce_stream)

    def drop_reductions(self) -> None:
        """Forget all reductions in flight, once they no longer touch their buffers."""
        with self._on(self.reduce_stream):
            for _, reduced in self.in_flight:
                reduced.wait()
        self._compute_waits_for(self.reduce_stream)
        self.in_flight.clear()

    def run_beside(self, stream: Stream | None, work: Callable[[], None]) -> None:
        """Do a user's work on a stream of theirs (None: where we are), in order with what is before and after."""
        if self.streams is None or stream is None:
            work()
            return
        here = self.streams.current()
        stream.wait_stream(here)
        with self._on(stream):
            work()
        here.wait_stream(stream)

    # -- host -----------------------------------------------------------------------------------------

    def _note_host_copy(self, stream: Stream | None, groups: Sequence[ParamGroup]) -> None:
        if stream is not None and any(group.is_offloaded for group in groups):
            self._host_copies[stream] = stream.record_event()

    def wait_for_host_copies(self) -> None:
        """Block until copies from and to the host are done: it may then write shards and read gradients."""
        for event in self._host_copies.values():
            event.synchronize()
        self._host_copies.clear()


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
        self._guessed: set[Unit] = set()  # gathered because they came next in the previous order

    def gather(self, unit: Unit) -> bool:
        """Start the all-gathers of a unit; False if they are under way or done."""
        if not any(group.state in _SHARDED for group in unit.groups):
            return False
        with profiled("FSDP::all_gather ", unit.shown):
            self.comm.gather(unit.groups)
        return True

    def wait(self, unit: Unit) -> None:
        """Wait for the all-gathers of a unit; its modules then hold full parameters."""
        with profiled(
            "FSDP::all_gather_copy_out ", unit.shown
        ):  # the name trace tools know; nothing is copied
            self.comm.wait(unit.groups)

    # -- forward --------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root starts a forward: remember the last order, drop what the optimizer may have overtaken."""
        for unit in self.units:
            parts = [group for group in unit.groups if group.state is GroupState.PARTLY_SHARDED]
            if parts:
                self.comm.reshard(parts)
        for unit in self._guessed:  # and did not run: out of date as well
            self.comm.reshard(unit.groups)
        self._guessed.clear()
        if self._order:
            self._previous_order = self._order
        self._order = []

    def enter_forward(self, unit: Unit) -> None:
        """A unit starts its forward: gather it, and the unit that comes next."""
        self.gather(unit)
        self.wait(unit)
        self._guessed.discard(unit)
        if not self.in_backward:
            for following in self._next_in_forward(unit):
                with profiled("FSDP::forward_prefetch for ", following.label):
                    if self.gather(following) and unit.forward_prefetch is None:
                        self._guessed.add(following)
            if unit not in self._order:
                self._order.append(unit)

    def end_forward(self) -> None:
        """The root's forward ends: units of which it ran only some modules are through as well."""
        for unit in self.units:
            unit.finish_forward()
        # What was gathered ahead may be used later, or never; the caller may change the parameters now.
        self.comm.settle([group for unit in self._guessed for group in unit.groups])
        if not torch.is_grad_enabled():
            self.comm.wait_for_host_copies()

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
            self.wait(unit)
        # On the CPU the gather ahead waits for `leave_backward`: see there.
        if self.comm.streams is not None or unit.backward_prefetch is not None:
            self._prefetch_in_backward(unit)

    def leave_backward(self, unit: Unit) -> None:
        """A unit's backward is through and its full parameters are freed; its reduction starts next.

        On the CPU the next unit is gathered here, beside the reduction: any earlier, its buffer would lie
        beside this one's and the gradients, and the gather would take the cores that compute.
        """
        if self.comm.streams is None and unit.backward_prefetch is None:
            self._prefetch_in_backward(unit)

    def _prefetch_in_backward(self, unit: Unit) -> None:
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
                # A gather nobody waited for must not read a shard that the optimizer is about to write.
                self.comm.wait(unit.groups)
            self.comm.finish_reductions()
            self.comm.wait_for_host_copies()
        self.in_backward = False
        if self.is_last_backward and self._order:
            self._previous_order, self._order = self._order, []

    def reset(self) -> None:
        """Forget everything in flight after an exception; gradients not yet reduced are dropped."""
        self.comm.drop_reductions()
        for unit in self.units:
            for group in unit.groups:
                group.drop_grads()
            self.comm.reshard(unit.groups)
        self.in_backward = False
        self._order = []
        self._guessed.clear()
