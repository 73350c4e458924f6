"""`SaveSchedule`: whether a step is saved, decided alike on all ranks, without waiting at steps that are not.

Every call says what this rank wants in a few numbers. They *ride along*: an all-reduce starts behind training and is
looked at in the next call.

    step                 n                          n + 1
    what happened        SIGTERM on rank 3
    numbers              (final) start -> .. ->     come: all ranks know, and save

Where a rank knows by itself that there is something to do for all, by the step's number, by a metric or by ``force``,
it waits for the numbers of this very call. They also hold what must be the same on all ranks, so that ranks which
come with different steps hear of it at their next call, and who waits for the others at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vescale_fsdp.checkpoint.ranks.alike import both_ways, is_same, words_of
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.steps.save_when import (
    BeforeDeadline,
    BestOf,
    EveryMinutes,
    EverySteps,
    OnSignal,
    SaveWhen,
)
from vescale_fsdp.checkpoint.steps.signal_watch import SignalWatch
from vescale_fsdp.errors import CheckpointError

__all__ = ["Decision", "SaveSchedule"]

_RANK_BITS = 20  # a step and a rank that has it go together in a signed number of 64 bits
_LARGEST_STEP = 2**42


class Decision(NamedTuple):
    """What becomes of a step."""

    step: int
    is_due: bool
    is_final: bool = False
    metric: float | None = None


class _Ride(NamedTuple):
    """Numbers on their way."""

    step: int
    arrive: Callable[[], list[int]]


class SaveSchedule:
    """The rules of a run and what the ranks have agreed on.

    Args:
        coordinator: the ranks that save together; its group must serve nothing else.
        known_metrics: those of the steps there are; asked once, on all ranks together.
    """

    def __init__(
        self,
        rules: Sequence[SaveWhen],
        coordinator: Coordinator,
        known_metrics: Callable[[], list[float]],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator, self._clock = coordinator, clock
        self._intervals = [rule.steps for rule in rules if isinstance(rule, EverySteps)]
        self._pauses_s = [rule.minutes * 60 for rule in rules if isinstance(rule, EveryMinutes)]
        self._best = [rule for rule in rules if isinstance(rule, BestOf)]
        self._ends_s = [rule.unix_s - rule.margin_s for rule in rules if isinstance(rule, BeforeDeadline)]
        names = [name for rule in rules if isinstance(rule, OnSignal) for name in rule.names]
        self._signals = SignalWatch(dict.fromkeys(names))
        self._known_metrics = known_metrics
        self._metrics: list[float] | None = None
        self._last_save_s = clock()
        self._ride: _Ride | None = None
        self._made: Decision | None = None  # not carried out yet
        self._has_ended = False
        self.should_stop = False

    def decide(self, step: int, metric: float | None, *, force: bool, waits: bool = False) -> Decision:
        """Whether a step is to be saved; a collective, which waits only where the step may be.

        Args:
            waits: whether all ranks do something else together at this step.

        Raises:
            CheckpointError: if ranks came with different arguments, here or in the call before.
        """
        made = self._made
        if made is not None and made.step == step and not force and metric in (None, made.metric):
            return made
        is_due = force or any(step % interval == 0 for interval in self._intervals)
        before, self._ride = self._ride, None
        is_late, is_last = self._arrived(before) if before is not None else (False, False)
        ride = self._start(step, metric, force)
        if waits or is_due or is_late or is_last or metric is not None or before is None:
            late_now, last_now = self._arrived(ride)
            is_late, is_last = is_late or late_now, is_last or last_now
        else:
            self._ride = ride
        is_best = metric is not None and self._is_among_best(metric)
        self.should_stop = self.should_stop or is_last
        self._made = Decision(step, is_due or is_late or is_last or is_best, is_last, metric)
        return self._made

    def refuse(self) -> None:
        """This rank raises something of its own: the others hear of it as of a step that is none."""
        self._ride = self._start(-1, None, False)

    def saved(self, decision: Decision) -> None:
        """A step has been saved, or is saved behind training."""
        self._made = None
        self._last_save_s = self._clock()
        self._has_ended = self._has_ended or decision.is_final
        if self._metrics is not None and decision.metric is not None:
            self._metrics.append(decision.metric)

    def close(self) -> None:
        """Hear no more signals."""
        self._signals.close()

    def _start(self, step: int, metric: float | None, force: bool) -> _Ride:
        now_s = self._clock()
        is_late = any(now_s - self._last_save_s >= pause_s for pause_s in self._pauses_s)
        is_over = self._signals.heard or any(now_s >= end_s for end_s in self._ends_s)
        is_last = is_over and not self._has_ended
        place = (min(step, _LARGEST_STEP) << _RANK_BITS) + self._coordinator.rank
        shown = [
            place,
            place - 2 * (place >> _RANK_BITS << _RANK_BITS),
        ]  # of the newest step and of the oldest
        alike = [*words_of({"step": step}), int(force), *words_of({"metric": metric})]
        return _Ride(
            step, self._coordinator.begin_largest([int(is_late), int(is_last), *shown, *both_ways(alike)])
        )

    def _arrived(self, ride: _Ride) -> tuple[bool, bool]:
        """Whether on any rank it is time for a save, and for the last one."""
        is_late, is_last, newest, oldest, *alike = ride.arrive()
        if is_same(alike):
            return bool(is_late), bool(is_last)
        half = len(alike) // 2
        differs = next(place for place in range(half) if alike[place] != -alike[half + place])
        name = "step" if differs < 4 else "force" if differs == 4 else "metric"
        ends = [(-(oldest >> _RANK_BITS), oldest), (newest >> _RANK_BITS, newest)]
        told = "; ".join(f"step {step} on ranks [{rank % (1 << _RANK_BITS)}]" for step, rank in ends)
        raise CheckpointError(
            "Ranks came to the manager with different steps, or with different arguments for one.",
            expected="the same on all ranks",
            got=f"from {told}" if name == "step" else f"step {ride.step}, but not the same {name}",
            where=f"the argument `{name}`",
            todo="call should_save and save on all ranks at the same steps; nothing of this one was saved",
        )

    def _is_among_best(self, metric: float) -> bool:
        if not self._best:
            return False
        if self._metrics is None:
            self._metrics = self._known_metrics()
        return any(rule.takes(metric, self._metrics) for rule in self._best)
