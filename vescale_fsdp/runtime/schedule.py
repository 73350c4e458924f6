"""Schedule: when units gather, reshard and reduce. All units under one root share one `Schedule`.

Overlap on an accelerator (c = compute stream, g = gather stream, r = reduce stream)::

    forward    g  gather 1 | gather 2        | gather 3 ..
               c           | compute 1       | compute 2 ..      2 buffers alive at most
    backward   g  gather 3 | gather 2        | gather 1
               c           | compute 3       | compute 2 ..
               r                             | reduce 3 ..       1 reduction in flight at most

All-reduces of replicas and copies of offloaded shards run on two more streams. `CommContext` orders the streams.

The next unit is gathered while the current unit computes. In the forward, the next unit is the unit that followed the
current unit in an earlier forward, or the units of the user's list. In the backward, the next unit is the unit whose
forward ended just before the current unit's forward. The forward of an inner unit ends before the forward of the unit
around it, so the inner unit's backward comes later.

Ranks may use different outputs in their losses, and must still issue the same collectives in the same order. So each
forward records a `Trace` of the moments at which units begin and end. Autograd reaches these moments in reverse order.
A rank on which autograd skips a moment does the moment's work late: once autograd reaches an earlier moment, or ends.
It gathers the unit and reduces zeros, while other ranks gather the unit and reduce their gradients::

    forward                           begin A  end A  begin B  end B  begin C  end C
    backward where B is used          C: gather, reduce | B: gather, reduce | A: gather, reduce
    backward where B is not used      C: gather, reduce | A is reached: B: gather, reduce zeros | A: gather, reduce
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.dtensor.meeting import meet
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.comm.unsharded_grads import UsedFlags
from vescale_fsdp.runtime.comm_context import CommContext, GradientReductionHandle
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup
from vescale_fsdp.torch_modes import is_fake, profiled
from vescale_fsdp.torch_private import autograd_engine_callback

if TYPE_CHECKING:
    from vescale_fsdp.runtime.fsdp_state import FSDPState


class Moment:
    """The begin or the end of one call of a unit's forward.

    Args:
        trace: trace of the root's forward that contains the call.
        index: index of this moment in the trace.
        make_up: does the work of the backward at this moment; called if autograd skips the moment.
    """

    __slots__ = ("index", "is_passed", "make_up", "trace")

    def __init__(self, trace: Trace, index: int, make_up: Callable[[], None]) -> None:
        self.trace, self.index, self.make_up = trace, index, make_up
        self.is_passed = False  # whether a backward has reached this moment


class Trace:
    """The moments of one forward of the root, and of calls of units between this forward and the next.

    Args:
        number: number of the forward; later traces have larger numbers.
    """

    __slots__ = ("_moments", "_num_noted", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._moments: list[Moment] = []  # oldest first; the backward removes moments from the end
        self._num_noted = 0  # moments added so far; not the length of the list, which the backward shortens

    def note(self, make_up: Callable[[], None]) -> Moment:
        """Add and return a moment; ``make_up`` is the work to do if a backward skips the moment."""
        moment = Moment(self, self._num_noted, make_up)
        self._moments.append(moment)
        self._num_noted += 1
        return moment

    def make_up(self, after: int = -1) -> None:
        """Do the work of skipped moments with an index larger than ``after``, newest first."""
        while self._moments and self._moments[-1].index > after:
            moment = self._moments.pop()
            if not moment.is_passed:
                moment.is_passed = True
                moment.make_up()


class Schedule:
    """Decides the order of collectives, and which units to prefetch, for all units under one root.

    Args:
        comm: streams and collectives in flight.
        units: the units; the root sets all units of its tree at the first forward.
    """

    def __init__(self, comm: CommContext, units: Sequence[FSDPState] = ()) -> None:
        self.comm = comm
        self.units = list(units)
        self.in_forward = self.in_backward = False  # whether a forward of the root, or a backward, runs
        # `_end_backward` of the running backward: autograd drops it, uncalled, if the backward ends in an error.
        self._ending: Callable[[], object] = lambda: None
        self.is_last_backward = True
        self.finalizes_by_hand = False  # whether the user calls `finalize_backward` after backwards
        # Whether a backward has ended since the user's last call of `finalize_backward`.
        self._unfinalized = False
        self._order: list[FSDPState] = []  # units that ran in this forward, in the order in which they began
        self._ended: list[FSDPState] = []  # units that ran in this forward, in the order in which they ended
        self._begun: set[FSDPState] = set()  # units whose backward has begun
        # Unit -> the unit that began next, in the last forward that ran the key.
        self._successors: dict[FSDPState, FSDPState] = {}
        self._guessed: set[FSDPState] = set()  # units prefetched because they are a successor
        # Units that a backward with create_graph=True has gathered, which stay gathered until the next backward.
        self._kept: set[FSDPState] = set()
        self._is_differentiable = False  # whether the running backward is one with create_graph=True
        self.has_grads = False  # whether a gradient of a parameter has arrived in the running backward
        self._trace = Trace(0)  # trace of the last forward
        # Traces of which this backward has reached a moment; a dict keeps their order.
        self._reached: dict[Trace, None] = {}

    def gather(self, unit: FSDPState) -> bool:
        """Start the all-gathers of a unit; return False if the unit is gathered or its gathers are in flight."""
        for group in unit.groups:
            # Outside of a forward and its backward the part may be stale: an optimizer may have stepped.
            is_outside = not self.in_forward and not self.in_backward
            if group.state is GroupState.PARTLY_SHARDED and is_outside:
                self.comm.reshard([group])
            if group.state.is_sharded:
                if group.kept is not None and not group.kept.is_due and group.is_kept_stale():
                    # Written since ranks have agreed. A rank that gathered over nodes alone would wait for ever.
                    self._meet_to_gather_again(group)
                continue
            # An optimizer or a load has written the shard since the gather, or a user has set ``p.data = tensor``: its
            # values must be in the buffer before autograd saves the parameter.
            if group.is_stale() or (not self.in_backward and group.has_other_data()):
                self._meet_to_gather_again(group)
                self.comm.reshard([group])
            elif group.state is GroupState.UNSHARDED and not self.in_backward:
                group.follow_requires_grad()
        if not any(group.state.is_sharded for group in unit.groups):
            return False
        try:
            with profiled("FSDP::all_gather ", unit.shown):
                self.comm.gather(unit.groups, lasting=unit.stays_gathered and not self.in_backward)
        except RuntimeError as error:  # torch raises it if a collective fails
            self.comm.explain(error)
            raise
        return True

    def _meet_to_gather_again(self, group: ParamGroup) -> None:
        """Let ranks compare that all of them have written: a gather by one rank alone would end its process."""
        if not is_fake(group.shard):
            ranks = [group.comm.shard_group]
            if group.kept is not None and group.comm.replicate_group is not None:
                ranks.append(group.comm.replicate_group)
            meet(ranks, f"gather of {group.label[1:-1]} after a write to its parameters")
        if group.kept is not None and group.is_kept_stale():
            group.kept.is_due = True

    def gather_again(self, group: ParamGroup) -> None:
        """Gather a group whose shard was written while its unit's forward or backward runs.

        Raises:
            LifecycleError: if not all ranks have written.
        """
        self._meet_to_gather_again(group)
        self.comm.reshard([group])
        self.comm.gather([group])
        self.comm.wait([group])
        group.computes = True

    def wait(self, unit: FSDPState) -> None:
        """Wait for the all-gathers of a unit and set the full parameters on its modules."""
        try:
            # The range has FSDP2's name, which trace tools search for, though nothing is copied here.
            with profiled("FSDP::all_gather_copy_out ", unit.shown):
                self.comm.wait(unit.groups)
        except RuntimeError as error:  # torch raises it if a collective fails
            self.comm.explain(error)
            raise

    def check_not_failed(self) -> None:
        """Check that the last backward has not ended in an error, which leaves units gathered and gradients unreduced.

        Raises:
            LifecycleError: if it has, and `FSDPModule.reset_iter_state` was not called since.
        """
        if self.in_backward and self._ending() is None:
            raise LifecycleError(
                "The last backward ended in an error, and left gradients that are not reduced.",
                expected="reset_iter_state() of the root on all ranks, after an error in a backward",
                got="another forward or backward",
                todo="call it, then zero_grad() of the optimizer, before the next forward",
            )

    # -- forward --------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin the root's forward: store the order of the last forward, and free full parameters that may be stale."""
        self.in_forward = True
        for unit in self.units:
            unit.begin_forward()
            # Parts kept for a backward that did not come: an optimizer may have stepped since.
            parts = [group for group in unit.groups if group.state is GroupState.PARTLY_SHARDED]
            if parts:
                self.comm.reshard(parts)
        for unit in self._guessed:  # units that the last forward prefetched and then did not run
            self.comm.reshard(unit.groups)
        self._guessed.clear()
        self._forget_order()
        self._trace = Trace(self._trace.number + 1)
        hybrid = [group for unit in self.units for group in unit.groups if group.kept is not None]
        if hybrid:
            self.comm.agree_on_kept(hybrid)

    def _forget_order(self) -> None:
        """Store which unit followed which in this forward, and clear the order."""
        self._successors.update(pairwise(self._order))
        self._order, self._ended = [], []

    def enter_forward(self, unit: FSDPState) -> None:
        """Enter a unit in the forward: gather the unit, and prefetch the next unit."""
        self.gather(unit)
        unit.overlaps = any(map(self.comm.overlaps, unit.groups))
        # On the CPU between nodes the next gather starts before this wait, so that the network is never idle.
        waits_last = unit.overlaps and not self.in_backward
        if not waits_last:
            self.wait(unit)
        self._guessed.discard(unit)
        if self.in_backward:  # a recomputed forward; `enter_backward` prefetches
            return
        # Free prefetched units other than this unit: the guess was wrong, and a third full buffer would raise the peak.
        for other in self._guessed:
            self.comm.reshard(other.groups)
        self._guessed.clear()
        next_units: Sequence[FSDPState] = unit.forward_prefetch or ()
        if unit.forward_prefetch is None:
            successor = self._successors.get(unit)
            # A unit that runs several times in one forward has no single successor: its later calls prefetch nothing.
            if successor is not None and unit not in self._order and successor not in self._order:
                next_units = (successor,)
        for following in next_units:
            with profiled("FSDP::forward_prefetch for ", following.label):
                if self.gather(following) and unit.forward_prefetch is None:
                    self._guessed.add(following)
        if waits_last:
            self.wait(unit)
        for group in unit.groups:
            group.computes = True
        if unit not in self._order:
            self._order.append(unit)

    def leave_forward(self, unit: FSDPState, *, reshards: bool) -> None:
        """Leave a unit in the forward; free the unit's full parameters if ``reshards``."""
        if self.in_backward:  # a recomputed forward: the unit's backward follows and needs full parameters
            return
        if unit in self._ended:
            self._ended.remove(unit)  # of several calls of a unit, the backward reaches the last call first
        self._ended.append(unit)
        for group in unit.groups:
            group.check_not_stale("forward")
            group.computes = False
            if not reshards:
                group.expose()
        if reshards and unit not in self._kept:
            self.comm.reshard(unit.groups, keep_part=True, lingers=True)

    def end_forward(self) -> list[FSDPState]:
        """End the root's forward, and the forward of each unit of several modules of which only some ran.

        Returns:
            These units.
        """
        late = [unit for unit in self.units if unit.finish_forward()]
        self.in_forward = False
        self.comm.free_lingering()
        # The caller may change parameters from now on, so prefetches in flight must have read the shards.
        self.comm.wait_for_reads([group for unit in self._guessed for group in unit.groups])
        if not torch.is_grad_enabled():
            self.comm.wait_for_host_copies()  # otherwise the end of a backward does this
        elif self.comm.watches:
            # The order decides which collectives the backward issues, so it must be the same on all ranks.
            run = ", ".join([unit.label for unit in self._order])
            for watch in self.comm.watches.values():
                watch.note(f"forward of {run}")
        full = [watch for watch in self.comm.watches.values() if watch.is_full]
        if full:
            self.comm.compare_order(full)
        return late

    def note(self, make_up: Callable[[], None]) -> Moment:
        """Record that a call of a unit begins or ends; ``make_up`` is called if a backward skips this moment.

        A call that activation checkpointing recomputes in the backward gets a trace of its own, because the backward is
        already removing moments from the end of the forward's trace.
        """
        return (Trace(self._trace.number) if self.in_backward else self._trace).note(make_up)

    # -- backward -------------------------------------------------------------------------------------

    def pass_by(self, moment: Moment) -> None:
        """Mark a moment as reached; in the last backward, do the work of later moments that autograd skipped."""
        moment.is_passed = True
        self._reached[moment.trace] = None
        if self.is_last_backward:
            # Autograd reaches the newest forward first, so it has left all forwards after this moment's.
            self._make_up(trace for trace in self._reached if trace.number > moment.trace.number)
            moment.trace.make_up(after=moment.index)

    def _make_up(self, traces: Iterable[Trace]) -> None:
        """Do the work of all skipped moments of these traces, the newest trace first."""
        for trace in sorted(traces, key=lambda trace: -trace.number):
            trace.make_up()

    def begin_backward(self) -> None:
        """Begin a backward, which may reach a gradient of a parameter before any output of a unit; else a no-op."""
        self.check_not_failed()
        if self.in_backward:
            return
        self.in_backward, self.has_grads = True, False
        self.comm.begin_backward()
        self._is_differentiable = torch.is_grad_enabled()  # create_graph=True
        if not self._is_differentiable:
            self._kept.clear()  # units are resharded once this backward has left them
        ending = partial(self._end_backward)  # referred to only by the backward
        self._ending = weakref.ref(ending)
        autograd_engine_callback(ending)  # called once, after the whole backward
        self._compare_order()

    def _compare_order(self) -> None:
        """Compare with other ranks what this rank has started so far, and what decides about the backward."""
        if not self.comm.watches:
            return
        groups = [group for unit in self.units for group in unit.groups]
        unsynced = ", ".join([unit.label for unit in self.units if not unit.requires_gradient_sync])
        changes = [(group.label, group.comm.settings.changes) for group in groups]
        changed = ", ".join([label + text for label, text in changes if text])
        # Not of other roots with the same context: not all ranks of their meshes may run this backward.
        watches = dict.fromkeys([group.comm.watch for group in groups if group.comm.watch is not None])
        for watch in watches:
            watch.note(
                f"backward without gradient sync of: {unsynced}; last backward: {self.is_last_backward}; "
                f"settings: {changed}"
            )
        self.comm.compare_order(watches)

    def enter_differentiable(self, unit: FSDPState) -> None:
        """Begin a unit's backward with create_graph=True: gather the unit, which then stays gathered.

        The nodes that this backward creates have saved the unit's full parameters, and no hook of this package is on
        these nodes. So the memory is as with ``reshard_after_forward=False``, until the next backward has ended.
        """
        self.begin_backward()
        self._kept.add(unit)
        self.gather(unit)
        self.wait(unit)

    def is_kept(self, unit: FSDPState) -> bool:
        """Return whether a unit stays gathered for the backward of a backward."""
        return unit in self._kept

    def has_begun(self, unit: FSDPState) -> bool:
        """Return whether the running backward has begun a unit."""
        return unit in self._begun

    def enter_backward(self, unit: FSDPState) -> None:
        """Begin a unit's backward, once its outputs have gradients: gather the unit, and prefetch the next unit."""
        self.begin_backward()
        for group in unit.groups:
            group.begin_backward()
        self._begun.add(unit)
        if unit.unshard_in_backward:
            self.gather(unit)
            if not unit.overlaps:
                self.wait(unit)
        # If nothing overlaps, `leave_backward` gathers the next unit, unless the user asked for it here.
        if self.comm.streams is not None or unit.overlaps or unit.backward_prefetch is not None:
            self._prefetch_in_backward(unit)
        if unit.overlaps and unit.unshard_in_backward:
            self.wait(unit)
        for group in unit.groups:
            group.computes = unit.unshard_in_backward

    def leave_backward(self, unit: FSDPState) -> None:
        """End a unit's backward, after its full parameters are freed: reduce, and on the CPU of one host prefetch.

        Not in `enter_backward`: the next unit's full buffer would be in memory together with this unit's full buffer
        and gradients, and the gather would use the cores that compute. Nor before the reduction, which has then ended:
        its receive buffer would be in memory, too.
        """
        unit.reduce()
        if self.comm.streams is None and not unit.overlaps and unit.backward_prefetch is None:
            self._prefetch_in_backward(unit)

    def _prefetch_in_backward(self, unit: FSDPState) -> None:
        for following in self._next_in_backward(unit):
            if following.unshard_in_backward:
                with profiled("FSDP::backward_prefetch for ", following.label):
                    self.gather(following)

    def _next_in_backward(self, unit: FSDPState) -> Sequence[FSDPState]:
        """Return the user's list, or the unit whose forward ended just before, without units that have begun."""
        if unit.backward_prefetch is not None:
            return unit.backward_prefetch
        if unit in self._ended:
            for earlier in reversed(self._ended[: self._ended.index(unit)]):
                if earlier not in self._begun:
                    return (earlier,)
        return ()

    def set_finalizes_by_hand(self, enabled: bool) -> None:
        """Set whether the user calls `finalize_backward`, which then replaces the work at the end of each backward.

        Raises:
            LifecycleError: between a backward and its finalization.
        """
        if enabled != self.finalizes_by_hand and (self.in_backward or self._unfinalized):
            raise LifecycleError(
                "Manual finalization cannot be switched before the last backward is finalized.",
                expected="set_manual_backward_finalization before the backward, or after finalize_backward",
                got=f"set_manual_backward_finalization({enabled})",
            )
        self.finalizes_by_hand = enabled

    def _end_backward(self) -> None:
        """Do the work of moments that autograd has skipped, and finalize; autograd calls this when a backward ends."""
        if self._is_differentiable and not self.has_grads:
            # Gradients of inputs, such as forces: the backward of the loss on them follows, and reduces.
            self.in_backward = self._is_differentiable = False
            return
        if (
            self._is_differentiable
        ):  # backward(create_graph=True): it has the gradients of parameters, of first order
            self._kept.clear()
        self._is_differentiable = False
        if self.is_last_backward and not self.finalizes_by_hand:
            self._make_up(self._reached)
        self._reached.clear()
        self.in_backward = False
        self._begun.clear()
        self._unfinalized = self.finalizes_by_hand
        if not self.finalizes_by_hand:
            self.finalize_backward()
        else:
            self.hold_grads()

    def hold_grads(self) -> None:
        """Show gradients that wait for a later reduction as ``.grad`` of their parameters."""
        for unit in self.units:
            for group in unit.groups:
                group.hold_grads()

    def finalize_backward(self) -> None:
        """Reduce the remaining gradients and wait for all reductions; sharded gradients may be read after this."""
        self.start_finalizing(is_last=self.is_last_backward).wait()

    def start_finalizing(self, *, is_last: bool) -> GradientReductionHandle:
        """Start the remaining reductions, and return the handle that waits for them.

        Args:
            is_last: whether no other backward of this forward follows. Then units that no backward has reached are
                reduced too.
        """
        with profiled("FSDP::root_post_backward_callback", ""):
            # In the reverse order of the forward, which is the same on all ranks, whichever units autograd has reached.
            # Units that the forward did not run come last.
            for unit in dict.fromkeys([*reversed(self._order), *self.units]):
                unit.end_backward(is_last=is_last)
                # The optimizer writes shards next, so wait for prefetches that are still reading them.
                self.comm.wait(unit.groups)
        if is_last:  # later backwards of the same forward need the order
            self._forget_order()
        self._unfinalized = False
        try:
            return GradientReductionHandle(self.comm, self._send_used(), self.hold_grads)
        except RuntimeError as error:  # torch raises it if a collective fails
            self.comm.explain(error)
            raise

    def _send_used(self) -> list[tuple[UsedFlags, list[ParamGroup]]]:
        """Send flags that say which reduced parameters this rank has used; return the messages, one per mesh."""
        by_mesh: dict[DeviceMesh, tuple[list[ParamGroup], list[bool]]] = {}
        for unit in self.units:
            for group in unit.groups:
                used = group.take_used()
                if used is not None:
                    groups, flags = by_mesh.setdefault(group.data.mesh, ([], []))
                    groups.append(group)
                    flags.extend(used)
                    flags.append(group.writes.take_raw())
        return [
            (self.comm.send_used(mesh, flags, groups[0].device), groups)
            for mesh, (groups, flags) in by_mesh.items()
        ]

    def reset(self) -> None:
        """Drop all collectives in flight, and gradients that are not yet reduced, after an exception."""
        if self.comm.streams is not None:
            # The exception may have come between a model's work on another stream and the wait for this stream.
            self.comm.streams.synchronize()
        self.comm.drop_reductions()  # first, because it waits until buffers are no longer in use
        for unit in self.units:
            for group in unit.groups:
                group.drop_grads()
            self.comm.reshard(unit.groups)
        self.in_forward = self.in_backward = self._unfinalized = False
        self._order, self._ended = [], []
        self._begun.clear()
        self._guessed.clear()
        self._kept.clear()
        self._reached.clear()
        self._trace = Trace(self._trace.number + 1)  # drops the moments of the failed forward
