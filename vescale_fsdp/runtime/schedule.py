"""Schedule: when units gather, reshard and reduce. One per tree of sharded modules, shared by its units.

What overlaps with what, on an accelerator (c = compute stream, g = gather stream, r = reduce stream)::

    forward    g  gather 1 | gather 2        | gather 3 ..
               c           | compute 1       | compute 2 ..      2 buffers alive at most
    backward   g  gather 3 | gather 2        | gather 1
               c           | compute 3       | compute 2 ..
               r                             | reduce 3 ..       1 reduction in flight at most

Replicas' all-reduces have a stream of their own beside r, copies of offloaded shards from the host one beside g.

The next unit is gathered while the current one computes: in the forward the one that followed it in the last forward
that had both (or the user's list), in the backward the one whose forward ended before its own did. Of units inside
units that is the inner one, which the forward began later. How streams wait for each other is `CommContext`'s affair.

Ranks may differ in which outputs their losses use, and still have to issue the same collectives in the same order. So a
forward leaves a `Trace`: where units began and ended. Autograd comes by these moments in reverse order; those that it
skips on this rank are made up for when it comes by an earlier one, or ends: the unit is gathered and reduces zeros at
the place where other ranks gather it and reduce what they have::

    forward                           begin A  end A  begin B  end B  begin C  end C
    backward where B is used          C: gather, reduce | B: gather, reduce | A: gather, reduce
    backward where B is not used      C: gather, reduce | A is reached: B: gather, reduce zeros | A: gather, reduce
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.comm.gradients import UsedFlags
from vescale_fsdp.runtime.comm_context import CommContext, GradientReductionHandle
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup
from vescale_fsdp.torch_modes import profiled
from vescale_fsdp.torch_private import autograd_engine_callback


class Unit(Protocol):
    """What the schedule must know of a unit (`vescale_fsdp.runtime.fsdp_state.FSDPState` is the only one)."""

    groups: list[ParamGroup]
    label: str
    shown: str  # the label in parentheses
    forward_prefetch: list[Any] | None
    backward_prefetch: list[Any] | None
    unshard_in_backward: bool
    requires_gradient_sync: bool

    @property
    def stays_gathered(self) -> bool:
        """Whether its full parameters last from a forward to its backward."""

    def finish_forward(self) -> None:
        """Called when the root's forward ends."""

    def end_backward(self, *, is_last: bool) -> None:
        """Called when the whole backward pass is over."""


class Moment:
    """Where a call of a unit's forward began or ended.

    Args:
        trace: of the root's forward around it.
        place: in the trace.
        make_up: what the backward does there.
    """

    __slots__ = ("is_passed", "make_up", "place", "trace")

    def __init__(self, trace: Trace, place: int, make_up: Callable[[], None]) -> None:
        self.trace, self.place, self.make_up = trace, place, make_up
        self.is_passed = False  # by a backward


class Trace:
    """The moments of one forward of the root, and of calls behind it. Args: number, growing from forward to forward."""

    __slots__ = ("_moments", "_num_noted", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._moments: list[Moment] = []  # in order; the last ones go once the backward is past them
        self._num_noted = 0

    def note(self, make_up: Callable[[], None]) -> Moment:
        """Another moment."""
        moment = Moment(self, self._num_noted, make_up)
        self._moments.append(moment)
        self._num_noted += 1
        return moment

    def make_up(self, behind: int = -1) -> None:
        """Do, last first, what the backward has skipped of the moments behind a place."""
        while self._moments and self._moments[-1].place > behind:
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
        self.units: list[Unit] = []
        self.in_backward = False
        self.is_last_backward = True
        self.finalizes_by_hand = False  # the user calls `finalize_backward`
        self._unfinalized = False  # and has not yet, since the last backward
        self._order: list[Unit] = []  # in which units began this forward
        self._through: list[Unit] = []  # in which they ended it
        self._begun: set[Unit] = set()  # their backward
        self._successors: dict[Unit, Unit] = {}  # what began next in the last forward that had the unit
        self._guessed: set[Unit] = set()  # gathered because they are successors
        self._left: set[Unit] = set()  # gathered by forwards without gradients
        self._trace = Trace(0)  # of the last forward
        self._reached: dict[Trace, None] = {}  # by this backward

    def gather(self, unit: Unit) -> bool:
        """Start the all-gathers of a unit; False if they are under way or done."""
        if not any(group.state.is_sharded for group in unit.groups):
            return False
        try:
            with profiled("FSDP::all_gather ", unit.shown):
                self.comm.gather(unit.groups, lasting=unit.stays_gathered and not self.in_backward)
        except RuntimeError as error:
            self.comm.explain(error)
            raise
        return True

    def wait(self, unit: Unit) -> None:
        """Wait for the all-gathers of a unit; its modules then hold full parameters."""
        try:
            with profiled(
                "FSDP::all_gather_copy_out ", unit.shown
            ):  # the name trace tools know; nothing is copied
                self.comm.wait(unit.groups)
        except RuntimeError as error:
            self.comm.explain(error)
            raise

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
        if torch.is_grad_enabled():
            for (
                unit
            ) in self._left:  # and the weights may have been others for that forward alone, as averages are
                self.comm.reshard(unit.groups)
            self._left.clear()
        self._forget_order()
        self._trace = Trace(self._trace.number + 1)

    def _forget_order(self) -> None:
        """This forward is a past one, of which remains what followed what."""
        self._successors.update(pairwise(self._order))
        self._order, self._through = [], []

    def enter_forward(self, unit: Unit) -> None:
        """A unit starts its forward: gather it, and the unit that comes next."""
        self.gather(unit)
        self.wait(unit)
        self._guessed.discard(unit)
        if not self.in_backward:
            for wrong in self._guessed:  # this forward takes another way; they would be one buffer too many
                self.comm.reshard(wrong.groups)
            self._guessed.clear()
            for following in self._next_in_forward(unit):
                with profiled("FSDP::forward_prefetch for ", following.label):
                    if self.gather(following) and unit.forward_prefetch is None:
                        self._guessed.add(following)
            if unit not in self._order:
                self._order.append(unit)

    def leave_forward(self, unit: Unit, *, reshards: bool) -> None:
        """A unit's forward is through."""
        if self.in_backward:  # recomputed: its backward follows
            return
        if unit in self._through:
            self._through.remove(unit)
        self._through.append(unit)
        if reshards:
            self.comm.reshard(unit.groups, keep_part=True, lingers=True)

    def end_forward(self) -> None:
        """The root's forward ends: units of which it ran only some modules are through as well."""
        for unit in self.units:
            unit.finish_forward()
        self.comm.free_lingering()
        # What was gathered ahead may be used later, or never; the caller may change the parameters now.
        self.comm.settle([group for unit in self._guessed for group in unit.groups])
        if not torch.is_grad_enabled():
            self._end_forward_without_grads()
            return
        for watch in self.comm.watches.values():
            watch.note(self._what_follows())
            watch.end_step(then_reduces=True)

    def _what_follows(self) -> str:
        """What decides over the backward of this forward, and has to be alike on all ranks."""
        run = ", ".join([unit.label for unit in self._order])
        unsynced = ", ".join([unit.label for unit in self.units if not unit.requires_gradient_sync])
        return f"forward of {run}; without gradient sync: {unsynced}; last backward: {self.is_last_backward}"

    def _end_forward_without_grads(self) -> None:
        """No backward will reshard what this forward leaves gathered, and an optimizer may change it before it is used.

        So it goes at once where gradients are there to be stepped with, else before the next forward with gradients: a
        row of forwards without them gathers once, if the user wants it so.
        """
        for unit in self.units:
            if any(param.sharded.grad is not None for group in unit.groups for param in group.params):
                self.comm.reshard(unit.groups)
            elif not all(group.state.is_sharded for group in unit.groups):
                self._left.add(unit)
        self.comm.wait_for_host_copies()

    def _next_in_forward(self, unit: Unit) -> Sequence[Unit]:
        if unit.forward_prefetch is not None:
            return unit.forward_prefetch
        following = self._successors.get(unit)
        if following is None or unit in self._order or following in self._order:
            return ()
        return (following,)

    def note(self, make_up: Callable[[], None]) -> Moment:
        """A call of a unit begins or ends; ``make_up`` is done where a backward skips it. A recomputed one is apart."""
        return (Trace(self._trace.number) if self.in_backward else self._trace).note(make_up)

    # -- backward -------------------------------------------------------------------------------------

    def pass_by(self, moment: Moment) -> None:
        """The backward comes by a moment of a forward."""
        moment.is_passed = True
        self._reached[moment.trace] = None
        if self.is_last_backward:
            self._make_up(trace for trace in self._reached if trace.number > moment.trace.number)
            moment.trace.make_up(behind=moment.place)

    def _make_up(self, traces: Iterable[Trace]) -> None:
        """Make up for all that was skipped of forwards, the last one first."""
        for trace in sorted(traces, key=lambda trace: -trace.number):
            trace.make_up()

    def enter_backward(self, unit: Unit) -> None:
        """A unit's outputs have gradients: gather it, and the unit whose turn comes next."""
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
        if unit not in self._through:
            return ()
        before = reversed(self._through[: self._through.index(unit)])
        return tuple(islice((each for each in before if each not in self._begun), 1))

    def set_finalizes_by_hand(self, enabled: bool) -> None:
        """Who calls `finalize_backward`: the user, or the end of every backward."""
        if enabled != self.finalizes_by_hand and (self.in_backward or self._unfinalized):
            raise LifecycleError(
                "Who finalizes a backward cannot change before it is finalized.",
                expected="set_manual_backward_finalization before the backward, or behind finalize_backward",
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
        """Reduce what the backward left, and wait: sharded gradients may be read behind this."""
        self.start_finalizing(is_last=self.is_last_backward).wait()

    def start_finalizing(self, *, is_last: bool) -> GradientReductionHandle:
        """Begin the reductions that are left, and return what waits for them."""
        with profiled("FSDP::root_post_backward_callback", ""):
            # Reverse order of the forward: the same on every rank, whatever autograd did not reach.
            for unit in dict.fromkeys([*reversed(self._order), *self.units]):
                unit.end_backward(is_last=is_last)
                # A gather nobody waited for must not read a shard that the optimizer is about to write.
                self.comm.wait(unit.groups)
        if is_last:
            self._forget_order()
        self._unfinalized = False
        for watch in self.comm.watches.values():
            watch.end_step()
        try:
            told = self._tell_used()
        except RuntimeError as error:
            self.comm.explain(error)
            raise
        return GradientReductionHandle(self.comm, told)

    def _tell_used(self) -> list[tuple[UsedFlags, list[ParamGroup]]]:
        """Send the other ranks which parameters of what was reduced this one has used."""
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
        """Forget everything in flight after an exception; gradients not yet reduced are dropped."""
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
