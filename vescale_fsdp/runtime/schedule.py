"""Schedule: when units gather, reshard and reduce. One per tree of sharded modules, shared by its units.

Overlap on an accelerator (c = compute stream, g = gather stream, r = reduce stream)::

    forward    g  gather 1 | gather 2        | gather 3 ..
               c           | compute 1       | compute 2 ..      2 buffers alive at most
    backward   g  gather 3 | gather 2        | gather 1
               c           | compute 3       | compute 2 ..
               r                             | reduce 3 ..       1 reduction in flight at most

The all-reduces of replicas have a stream of their own next to r, copies of offloaded shards have one next to g.

The next unit is gathered while the current one computes. In the forward that is the unit that followed in the last
forward that had both (or the user's list); in the backward it is the unit whose forward ended before the current one's.
Of nested units that is the inner one, which the forward began later. `CommContext` orders the streams.

Ranks may use different outputs in their losses, and must still issue the same collectives in the same order. So a
forward leaves a `Trace` of where units began and ended. Autograd reaches these moments in reverse order. Moments that
it skips on this rank are made up for when it reaches an earlier one, or ends: the unit is gathered and reduces zeros at
the point where other ranks gather it and reduce their gradients::

    forward                           begin A  end A  begin B  end B  begin C  end C
    backward where B is used          C: gather, reduce | B: gather, reduce | A: gather, reduce
    backward where B is not used      C: gather, reduce | A is reached: B: gather, reduce zeros | A: gather, reduce
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.comm.gradients import UsedFlags
from vescale_fsdp.runtime.comm_context import CommContext, GradientReductionHandle
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup
from vescale_fsdp.torch_modes import profiled
from vescale_fsdp.torch_private import autograd_engine_callback

if TYPE_CHECKING:
    from vescale_fsdp.runtime.fsdp_state import FSDPState


class Moment:
    """Where a call of a unit's forward began or ended.

    Args:
        trace: of the root's forward around it.
        index: in the trace.
        make_up: the work of a backward at this moment, called if the backward skips it.
    """

    __slots__ = ("index", "is_passed", "make_up", "trace")

    def __init__(self, trace: Trace, index: int, make_up: Callable[[], None]) -> None:
        self.trace, self.index, self.make_up = trace, index, make_up
        self.is_passed = False  # by a backward


class Trace:
    """The moments of one forward of the root, and of calls after it. ``number`` grows from forward to forward."""

    __slots__ = ("_moments", "_num_noted", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._moments: list[Moment] = []  # in order; the backward pops the last ones
        self._num_noted = 0

    def note(self, make_up: Callable[[], None]) -> Moment:
        """Add a moment."""
        moment = Moment(self, self._num_noted, make_up)
        self._moments.append(moment)
        self._num_noted += 1
        return moment

    def make_up(self, after: int = -1) -> None:
        """Do the work of the moments after an index that the backward has skipped, the last one first."""
        while self._moments and self._moments[-1].index > after:
            moment = self._moments.pop()
            if not moment.is_passed:
                moment.is_passed = True
                moment.make_up()


class Schedule:
    """Order and prefetch, for all units under one root.

    Args:
        comm: streams and what is in flight.
    """

    def __init__(self, comm: CommContext) -> None:
        self.comm = comm
        self.units: list[FSDPState] = []
        self.in_backward = False
        self.is_last_backward = True
        self.finalizes_by_hand = False  # the user calls `finalize_backward`
        self._unfinalized = False  # the user has not called it since the last backward
        self._order: list[FSDPState] = []  # in which units began this forward
        self._through: list[FSDPState] = []  # in which they ended it
        self._begun: set[FSDPState] = set()  # their backward
        self._successors: dict[
            FSDPState, FSDPState
        ] = {}  # what began next in the last forward that had the unit
        self._guessed: set[FSDPState] = set()  # gathered because they are successors
        self._left: set[FSDPState] = set()  # gathered by forwards without gradients
        self._trace = Trace(0)  # of the last forward
        self._reached: dict[Trace, None] = {}  # by this backward

    def gather(self, unit: FSDPState) -> bool:
        """Start the all-gathers of a unit; False if they are in flight or done."""
        if not any(group.state.is_sharded for group in unit.groups):
            return False
        try:
            with profiled("FSDP::all_gather ", unit.shown):
                self.comm.gather(unit.groups, lasting=unit.stays_gathered and not self.in_backward)
        except RuntimeError as error:
            self.comm.explain(error)
            raise
        return True

    def wait(self, unit: FSDPState) -> None:
        """Wait for the all-gathers of a unit; its modules then hold full parameters."""
        try:
            # The name that trace tools know; nothing is copied.
            with profiled("FSDP::all_gather_copy_out ", unit.shown):
                self.comm.wait(unit.groups)
        except RuntimeError as error:
            self.comm.explain(error)
            raise

    # -- forward --------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root starts a forward: store the last order, free parameters that the optimizer may have made stale."""
        for unit in self.units:
            parts = [group for group in unit.groups if group.state is GroupState.PARTLY_SHARDED]
            if parts:
                self.comm.reshard(parts)
        for unit in self._guessed:  # gathered ahead, but did not run
            self.comm.reshard(unit.groups)
        self._guessed.clear()
        if torch.is_grad_enabled():
            # That forward may have had other weights, such as averages, for itself alone.
            for unit in self._left:
                self.comm.reshard(unit.groups)
            self._left.clear()
        self._forget_order()
        self._trace = Trace(self._trace.number + 1)

    def _forget_order(self) -> None:
        """End this forward; only which unit followed which is kept of it."""
        self._successors.update(pairwise(self._order))
        self._order, self._through = [], []

    def enter_forward(self, unit: FSDPState) -> None:
        """A unit starts its forward: gather it and the next unit."""
        self.gather(unit)
        self.wait(unit)
        self._guessed.discard(unit)
        if not self.in_backward:
            for wrong in self._guessed:  # this forward runs other units; these would be one buffer too many
                self.comm.reshard(wrong.groups)
            self._guessed.clear()
            for following in self._next_in_forward(unit):
                with profiled("FSDP::forward_prefetch for ", following.label):
                    if self.gather(following) and unit.forward_prefetch is None:
                        self._guessed.add(following)
            if unit not in self._order:
                self._order.append(unit)

    def leave_forward(self, unit: FSDPState, *, reshards: bool) -> None:
        """A unit's forward has ended."""
        if self.in_backward:  # recomputed: its backward follows
            return
        if unit in self._through:
            self._through.remove(unit)
        self._through.append(unit)
        if reshards:
            self.comm.reshard(unit.groups, keep_part=True, lingers=True)

    def end_forward(self) -> None:
        """The root's forward ends, and with it that of units of which only some modules ran."""
        for unit in self.units:
            unit.finish_forward()
        self.comm.free_lingering()
        # Units gathered ahead may be used later, or never; the caller may change the parameters now.
        self.comm.wait_for_reads([group for unit in self._guessed for group in unit.groups])
        if not torch.is_grad_enabled():
            self._end_forward_without_grads()
            return
        if self.comm.watches:
            # All that decides over the backward of this forward; it must be the same on all ranks.
            run = ", ".join([unit.label for unit in self._order])
            unsynced = ", ".join([unit.label for unit in self.units if not unit.requires_gradient_sync])
            for watch in self.comm.watches.values():
                watch.note(
                    f"forward of {run}; without gradient sync: {unsynced}; last backward: {self.is_last_backward}"
                )
                watch.end_step(then_reduces=True)

    def _end_forward_without_grads(self) -> None:
        """Free parameters that this forward leaves gathered: no backward will, and an optimizer may make them stale.

        Units that have gradients to be stepped with are freed at once, others before the next forward with gradients.
        So a row of forwards without gradients gathers once, if the user wants it so.
        """
        for unit in self.units:
            if any(param.sharded.grad is not None for group in unit.groups for param in group.params):
                self.comm.reshard(unit.groups)
            elif not all(group.state.is_sharded for group in unit.groups):
                self._left.add(unit)
        self.comm.wait_for_host_copies()

    def _next_in_forward(self, unit: FSDPState) -> Sequence[FSDPState]:
        if unit.forward_prefetch is not None:
            return unit.forward_prefetch
        following = self._successors.get(unit)
        if following is None or unit in self._order or following in self._order:
            return ()
        return (following,)

    def note(self, make_up: Callable[[], None]) -> Moment:
        """A call of a unit begins or ends; a backward that skips it calls ``make_up``.

        A recomputed call gets a trace of its own.
        """
        return (Trace(self._trace.number) if self.in_backward else self._trace).note(make_up)

    # -- backward -------------------------------------------------------------------------------------

    def pass_by(self, moment: Moment) -> None:
        """The backward reaches a moment of a forward."""
        moment.is_passed = True
        self._reached[moment.trace] = None
        if self.is_last_backward:
            self._make_up(trace for trace in self._reached if trace.number > moment.trace.number)
            moment.trace.make_up(after=moment.index)

    def _make_up(self, traces: Iterable[Trace]) -> None:
        """Make up for all skipped moments of these forwards, the last one first."""
        for trace in sorted(traces, key=lambda trace: -trace.number):
            trace.make_up()

    def enter_backward(self, unit: FSDPState) -> None:
        """A unit's outputs have gradients: gather it and the next unit."""
        if not self.in_backward:
            self.in_backward = True
            autograd_engine_callback(self._end_backward)
        self._begun.add(unit)
        if unit.unshard_in_backward:
            self.gather(unit)
            self.wait(unit)
        # On the CPU the gather ahead waits for `leave_backward`: see there.
        if self.comm.streams is not None or unit.backward_prefetch is not None:
            self._prefetch_in_backward(unit)

    def leave_backward(self, unit: FSDPState) -> None:
        """A unit's backward has ended and its full parameters are freed; its reduction starts next.

        On the CPU the next unit is gathered here, during the reduction. Any earlier, its buffer would be in memory
        together with this unit's and the gradients, and the gather would take the cores that compute.
        """
        if self.comm.streams is None and unit.backward_prefetch is None:
            self._prefetch_in_backward(unit)

    def _prefetch_in_backward(self, unit: FSDPState) -> None:
        for following in self._next_in_backward(unit):
            if following.unshard_in_backward:
                with profiled("FSDP::backward_prefetch for ", following.label):
                    self.gather(following)

    def _next_in_backward(self, unit: FSDPState) -> Sequence[FSDPState]:
        if unit.backward_prefetch is not None:
            return unit.backward_prefetch
        if unit not in self._through:
            return ()
        for before in reversed(self._through[: self._through.index(unit)]):
            if before not in self._begun:
                return (before,)
        return ()

    def set_finalizes_by_hand(self, enabled: bool) -> None:
        """Let the user call `finalize_backward`, or the end of every backward.

        Raises:
            LifecycleError: between a backward and its finalization.
        """
        if enabled != self.finalizes_by_hand and (self.in_backward or self._unfinalized):
            raise LifecycleError(
                "Who finalizes a backward cannot change before it is finalized.",
                expected="set_manual_backward_finalization before the backward, or after finalize_backward",
                got=f"set_manual_backward_finalization({enabled})",
            )
        self.finalizes_by_hand = enabled

    def _end_backward(self) -> None:
        if self.is_last_backward and not self.finalizes_by_hand:
            self._make_up(self._reached)
        self._reached.clear()
        self.in_backward = False
        self._begun.clear()
        self._unfinalized = self.finalizes_by_hand
        if not self.finalizes_by_hand:
            self.finalize_backward()

    def finalize_backward(self) -> None:
        """Reduce what the backward left, and wait: sharded gradients may be read after this."""
        self.start_finalizing(is_last=self.is_last_backward).wait()

    def start_finalizing(self, *, is_last: bool) -> GradientReductionHandle:
        """Start the reductions that are left, and return the handle that waits for them."""
        with profiled("FSDP::root_post_backward_callback", ""):
            # Reverse order of the forward: the same on every rank, whichever units autograd did not reach.
            for unit in dict.fromkeys([*reversed(self._order), *self.units]):
                unit.end_backward(is_last=is_last)
                # A gather that no unit waited for must not read a shard that the optimizer is about to write.
                self.comm.wait(unit.groups)
        if is_last:
            self._forget_order()
        self._unfinalized = False
        for watch in self.comm.watches.values():
            watch.end_step()
        try:
            return GradientReductionHandle(self.comm, self._send_used())
        except RuntimeError as error:
            self.comm.explain(error)
            raise

    def _send_used(self) -> list[tuple[UsedFlags, list[ParamGroup]]]:
        """Send the other ranks which of the reduced parameters this rank has used: one message per mesh."""
        by_mesh: dict[DeviceMesh, tuple[list[ParamGroup], list[bool]]] = {}
        for unit in self.units:
            for group in unit.groups:
                used = group.take_used()
                if used is not None:
                    groups, flags = by_mesh.setdefault(group.data.mesh, ([], []))
                    groups.append(group)
                    flags.extend(used)
        return [
            (UsedFlags(mesh, flags, groups[0].device), groups) for mesh, (groups, flags) in by_mesh.items()
        ]

    def reset(self) -> None:
        """Drop everything in flight after an exception, and gradients that are not yet reduced."""
        self.comm.drop_reductions()
        for unit in self.units:
            for group in unit.groups:
                group.drop_grads()
            self.comm.reshard(unit.groups)
        self.in_backward = self._unfinalized = False
        self._order, self._through = [], []
        self._begun.clear()
        self._guessed.clear()
        self._left.clear()
        self._reached.clear()
        self._trace = Trace(self._trace.number + 1)
