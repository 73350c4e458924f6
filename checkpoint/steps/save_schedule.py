"""`SaveSchedule`: whether a step is saved, decided alike on all ranks, without waiting at steps that are not.

Every call says what this rank's policies answer in a few numbers. They *ride along*: an all-reduce starts behind
training and is looked at in the next call.

    step                 n                          n + 1
    what happened        SIGTERM on rank 3
    numbers              (final) start -> .. ->     come: all ranks know, and save

Where a rank knows by itself that there is something to do for all, by the step's number, by a metric or by ``force``,
it waits for the numbers of this very call; so it does where a policy's answer counts for this step alone. The numbers
also hold what must be the same on all ranks, so that ranks which come with different steps hear of it at their next
call, and who waits for the others at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, both_ways, is_same, words_of
from vescale_fsdp.checkpoint.steps.save_policy import (
    AllOf,
    AnyOf,
    BeforeDeadline,
    EveryMinutes,
    EverySteps,
    OnSignal,
    SaveContext,
    SavePolicy,
    leaves_of,
)
from vescale_fsdp.errors import ArgumentError, CheckpointError

_RANK_BITS = 20  # a step and a rank that has it go together in a signed number of 64 bits
_LARGEST_STEP = 2**42
_HEAD = 3  # numbers before the words that must be alike
_ALIKE = 9  # words of a step, of force and of a metric
_RAISED, _NO_BOOL = 1, 2  # what a policy did instead of answering
_READ_NO_METRICS = (EverySteps, EveryMinutes, BeforeDeadline, OnSignal)

_Answers = Mapping[int, bool]  # by id of a policy that is not a combination of others


class Decision(NamedTuple):
    """What becomes of a step."""

    step: int
    is_due: bool
    is_final: bool = False
    metric: float | None = None


class _Ride(NamedTuple):
    """Numbers on their way.

    Attributes:
        all_wait: whether every rank waits for them in the call that started them.
        error: what asking this rank's policies has raised, where all ranks wait.
    """

    step: int
    all_wait: bool
    error: BaseException | None
    arrive: Callable[[], list[int]]


class SaveSchedule:
    """The save policy of a run, and what the ranks have agreed on.

    Args:
        coordinator: the ranks that save together; its group must serve nothing else.
        known_metrics: those of the steps on disk; called on all ranks together.
    """

    def __init__(
        self,
        policy: SavePolicy,
        coordinator: Coordinator,
        known_metrics: Callable[[], list[float]],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator, self._clock, self._policy = coordinator, clock, policy
        # Each is asked once, however often it stands there.
        self._leaves = {id(leaf): leaf for leaf in leaves_of(policy)}
        self._always_waits = coordinator.world_size == 1 or any(
            not (leaf.same_on_all_ranks or leaf.may_be_late) for leaf in self._leaves.values()
        )
        names = [name for leaf in self._leaves.values() if isinstance(leaf, OnSignal) for name in leaf.names]
        self._signals, self._signal_names = SignalWatch(dict.fromkeys(names)), names
        self._known_metrics = known_metrics
        self._reads_metrics = any(type(leaf) not in _READ_NO_METRICS for leaf in self._leaves.values())
        self._metrics: list[float] | None = None
        self._last_save_s = clock()
        self._last_step: int | None = None
        self._ride: _Ride | None = None
        self._has_begun = False
        self._asked: tuple[int, float | None, _Answers] | None = None  # step, metric
        self._made: Decision | None = None  # not carried out yet
        self._has_ended = False
        self.should_stop = False

    def decide(self, step: int, metric: float | None, *, force: bool, waits: bool = False) -> Decision:
        """Whether a step is to be saved; a collective, which waits only where the step may be.

        Args:
            waits: whether all ranks do something else together at this step.

        Raises:
            CheckpointError: if ranks came with different arguments, here or in the call before, or a policy raised on
                another rank, or answered differently on ranks where that must not be.
            TypeError: if a policy answers with something else than a bool, on any rank.
        """
        made = self._made
        if made is not None and made.step == step and not force and metric in (None, made.metric):
            return made
        self._read_metrics()
        before, self._ride = self._ride, None
        late = self._arrived(before) if before is not None else dict.fromkeys(self._leaves, False)
        all_wait = waits or force or self._always_waits or metric is not None or not self._has_begun
        self._has_begun = True
        answers, failed, error = self._ask(step, metric)
        ride = self._start(
            step, metric, force, answers, failed, error if all_wait else None, all_wait=all_wait
        )
        is_due, is_final = force, False
        if all_wait or (error is None and self._is_likely(self._policy, answers, late)):
            found = self._arrived(ride)
            together = {
                key: found[key] or (leaf.may_be_late and late[key]) for key, leaf in self._leaves.items()
            }
            wanted, is_final = self._combined(self._policy, together)
            is_due = is_due or wanted
        else:
            self._ride = ride
            if error is not None:
                raise error
        self.should_stop = self.should_stop or is_final
        self._made = Decision(step, is_due, is_final, metric)
        return self._made

    def refuse(self) -> None:
        """Announce an invalid step, so that other ranks fail instead of waiting."""
        self._read_metrics()
        self._ride = self._start(-1, None, False, dict.fromkeys(self._leaves, False))

    def saved(self, decision: Decision) -> None:
        """A step has been saved, or is saved behind training."""
        self._made = self._asked = None
        self._last_save_s, self._last_step = self._clock(), decision.step
        self._has_ended = self._has_ended or decision.is_final
        if self._metrics is not None and decision.metric is not None:
            self._metrics.append(decision.metric)

    def restored(self, step: int) -> None:
        """The run goes on from a step; other metrics may count as known from now on."""
        self._made = self._asked = self._metrics = None
        self._last_step = step

    def close(self) -> None:
        """Stop listening for signals."""
        self._signals.close()

    def _read_metrics(self) -> None:
        """In the first call, since whether a policy reads them may depend on the rank."""
        if self._metrics is None and self._reads_metrics:
            self._metrics = self._known_metrics()

    def _ask(self, step: int, metric: float | None) -> tuple[_Answers, int, BaseException | None]:
        """What this rank's policies answer: all of them, since they may count how often they are asked. If one fails,
        all answers are False, with what it did and the error to raise for it."""
        if self._asked is not None and self._asked[0] == step and metric in (None, self._asked[1]):
            return self._asked[2], 0, None
        none = dict.fromkeys(self._leaves, False)
        try:
            context = SaveContext(
                step,
                metric,
                self._clock(),
                self._last_save_s,
                self._last_step,
                tuple(self._metrics or ()),
                {name: signal.Signals[name] in self._signals.heard for name in self._signal_names},
            )
            answers: dict[int, object] = {
                key: leaf.should_save(context) for key, leaf in self._leaves.items()
            }
        except BaseException as caught:  # noqa: BLE001  all ranks hear of it
            return none, _RAISED, caught
        for key, answer in answers.items():
            if not isinstance(answer, bool):
                leaf = type(self._leaves[key]).__qualname__
                where = f"{leaf}.should_save, step {step}, rank {self._coordinator.rank}"
                return none, _NO_BOOL, _no_bool(f"{answer!r}, of type {type(answer).__name__}", where)
        found = {
            key: answers[key] is True and not (leaf.is_final and self._has_ended)
            for key, leaf in self._leaves.items()
        }
        self._asked = step, metric, found
        return found, 0, None

    def _is_likely(self, policy: SavePolicy, answers: _Answers, late: _Answers, *, now: bool = False) -> bool:
        """Whether to wait for other ranks' answers; the same on all ranks.

        Args:
            late: all ranks' answers to the call before, of policies whose answers may be late.
            now: whether a late answer would be lost, because something beside it counts for this step alone.
        """
        if type(policy) is AnyOf:
            return any(self._is_likely(part, answers, late, now=now) for part in policy.policies)
        if type(policy) is AllOf:
            now = now or not all(leaf.may_be_late for leaf in leaves_of(policy))
            return all(self._is_likely(part, answers, late, now=now) for part in policy.policies)
        if policy.same_on_all_ranks:
            return answers[id(policy)]
        return not policy.may_be_late or now or late[id(policy)]

    def _combined(self, policy: SavePolicy, answers: _Answers) -> tuple[bool, bool]:
        """Whether a step is to be saved, and whether finally, by the answers of all ranks."""
        if type(policy) not in (AnyOf, AllOf):
            return answers[id(policy)], answers[id(policy)] and policy.is_final
        parts = [self._combined(part, answers) for part in policy.policies]  # type: ignore[attr-defined]
        is_due = (any if type(policy) is AnyOf else all)(due for due, _ in parts)
        return is_due, is_due and any(is_final for _, is_final in parts)

    def _start(
        self,
        step: int,
        metric: float | None,
        force: bool,
        answers: _Answers,
        failed: int = 0,
        error: BaseException | None = None,
        *,
        all_wait: bool = False,
    ) -> _Ride:
        rank = self._coordinator.rank
        place = (min(step, _LARGEST_STEP) << _RANK_BITS) + rank
        shown = [
            place,
            place - 2 * (place >> _RANK_BITS << _RANK_BITS),
        ]  # of the newest step and of the oldest
        alike = [*words_of({"step": step}), int(force), *words_of({"metric": metric})]
        # Of each answer a rank that says yes, and one that says no.
        asked = [
            (int(answers[key] is wanted) << _RANK_BITS) + rank
            for key in self._leaves
            for wanted in (True, False)
        ]
        numbers = [(failed << _RANK_BITS) + rank if failed else 0, *shown, *both_ways(alike), *asked]
        return _Ride(step, all_wait, error, self._coordinator.begin_largest(numbers))

    def _arrived(self, ride: _Ride) -> dict[int, bool]:
        """What any rank's policies have answered."""
        numbers = ride.arrive()
        (failed, newest, oldest), rest = numbers[:_HEAD], numbers[_HEAD:]
        alike, answers = rest[: 2 * _ALIKE], rest[2 * _ALIKE :]
        if not is_same(alike):
            raise _unlike(ride.step, alike, newest, oldest) from ride.error
        if failed:
            self._raise_failed(ride, failed >> _RANK_BITS, failed % (1 << _RANK_BITS))
        found = {}
        for leaf, yes, no in zip(self._leaves.values(), answers[::2], answers[1::2], strict=True):
            found[id(leaf)] = bool(yes >> _RANK_BITS)
            if leaf.same_on_all_ranks and yes >> _RANK_BITS and no >> _RANK_BITS:
                ranks = [code % (1 << _RANK_BITS) for code in (yes, no)]
                raise CheckpointError(
                    "A save policy answered differently on ranks, though it is marked as the same on all of them.",
                    expected="same_on_all_ranks to be true of it",
                    got=f"True on ranks [{ranks[0]}]; False on ranks [{ranks[1]}]",
                    where=f"{type(leaf).__qualname__}.should_save, step {ride.step}",
                    todo="answer by what all ranks know alike, or leave same_on_all_ranks = False, so that any rank's "
                    "True counts; nothing of this step was saved",
                )
        return found

    def _raise_failed(self, ride: _Ride, kind: int, rank: int) -> NoReturn:
        """Raise, after a policy has failed on a rank."""
        doing = f"asking the save policy about step {ride.step}"
        try:
            if ride.all_wait:  # else the rank is gone by now
                self._coordinator.raise_together(ride.error, doing, "nothing of this step was saved")
            raise CheckpointError(
                f"Rank {rank} failed while {doing}.",
                expected="should_save to return a bool on all ranks",
                got="an error",
                where=f"rank {rank}",
                todo="see what that rank raised; nothing of this step was saved",
            )
        except CheckpointError as error:
            if kind != _NO_BOOL or ride.error is not None:
                raise
            raise _no_bool(error.got, f"should_save, step {ride.step}, rank {rank}") from None


def _no_bool(got: object, where: str) -> ArgumentError:
    """The error for an answer that is none."""
    return ArgumentError(
        "A save policy answered with something else than a bool.",
        expected="True or False",
        got=got,
        where=where,
        todo="return a bool, such as bool(value); nothing of this step was saved",
    )


def _unlike(step: int, alike: list[int], newest: int, oldest: int) -> CheckpointError:
    """The error for ranks that came with different arguments."""
    half = len(alike) // 2
    differs = next(place for place in range(half) if alike[place] != -alike[half + place])
    name = "step" if differs < 4 else "force" if differs == 4 else "metric"
    ends = [(-(oldest >> _RANK_BITS), oldest), (newest >> _RANK_BITS, newest)]
    shown = "; ".join(f"step {number} on ranks [{rank % (1 << _RANK_BITS)}]" for number, rank in ends)
    return CheckpointError(
        "Ranks came to the manager with different steps, or with different arguments for one.",
        expected="the same on all ranks",
        got=f"from {shown}" if name == "step" else f"step {step}, but not the same {name}",
        where=f"the argument `{name}`",
        todo="call should_save and save on all ranks at the same steps; nothing of this one was saved",
    )


class SignalWatch:
    """Remembers which of some signals came.

    Args:
        names: such as SIGTERM.

    Attributes:
        heard: numbers of those that came.

    Raises:
        ValueError: outside of the main thread, where Python lets nobody listen.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.heard: set[int] = set()
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._is_closed = False
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError(
                "Signals can be heard in the main thread only.",
                expected="a manager with OnSignal() to be made there",
                got=f"thread {threading.current_thread().name}",
            )
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        is_ours = not self._is_closed and os.getpid() == self._process
        if is_ours:
            self.heard.add(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not is_ours:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Give signals back to whoever had them; whoever listens by now goes on to."""
        if self._is_closed:
            return
        self._is_closed = True
        for number, before in self._before.items():
            # None: it was not Python that listened, and nothing can bring that back.
            if signal.getsignal(number) == self._hear and before is not None:
                signal.signal(number, before)
