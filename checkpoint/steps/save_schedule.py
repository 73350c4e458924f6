"""`SaveSchedule` decides whether a step is saved. All ranks decide alike, and wait only at steps that may be saved.

Every call encodes the answers of this rank's policies in a few numbers, and starts an all-reduce of these numbers. The
all-reduce runs while training goes on; the next call reads the result.

    step                 n                       n + 1
    event                SIGTERM on rank 3
    all-reduce           starts ->               result: all ranks know of the signal, and save

A call waits for its own all-reduce if all ranks know that they may save this step: because of the step's number, a
metric or ``force``, or because a policy's answer is valid for this step only. The numbers also contain digests of the
arguments that must be the same on all ranks. Ranks with different steps raise at once if they wait, and otherwise at
their next call.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
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

# The lowest bits of a number are a rank, so that MAX also names a rank with the largest value.
_RANK_BITS = 20
_LARGEST_STEP = 2**42  # 43 bits; with 20 bits of a rank and the sign, a number fits an int64
_HEAD = 3  # an announcement starts with 3 numbers: failure, newest step, oldest step
_ALIKE = 9  # words that must be the same on all ranks: 4 of the step, `force`, 4 of the metric
_RAISED, _NO_BOOL = 1, 2  # how a policy failed: it raised, or returned something other than a bool
# Policies that do not use the metrics of the steps on disk. Policies of other classes, such as a user's, may use them.
_READ_NO_METRICS = (EverySteps, EveryMinutes, BeforeDeadline, OnSignal)

_Answers = Mapping[int, bool]  # `id` of a policy that is not a combination -> its answer


class Decision(NamedTuple):
    """Whether a step is saved, and whether that save is the last one of the run."""

    step: int
    is_due: bool
    is_final: bool = False
    metric: float | None = None


class _Announcement(NamedTuple):
    """A running all-reduce of the answers to one step.

    Attributes:
        step: the step of the call on this rank.
        all_wait: whether every rank waits for the all-reduce in the call that started it.
        error: the error of this rank's policies, if all ranks wait; otherwise None, because the call has raised it.
        finish: waits for the all-reduce, and returns the largest of each number.
    """

    step: int
    all_wait: bool
    error: BaseException | None
    finish: Callable[[], list[int]]


class SaveSchedule:
    """Applies the save policy of a run, with the same decision on all ranks.

    Args:
        coordinator: coordinator of the ranks that save; its group must not be used for anything else.
        known_metrics: takes the next step that may be saved; returns the metrics of the steps on disk; a collective.
        clock: returns the time in seconds since 1970.

    Attributes:
        should_stop: whether the final save of the run was decided.
    """

    def __init__(
        self,
        policy: SavePolicy,
        coordinator: Coordinator,
        known_metrics: Callable[[int], list[float]],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator, self._clock, self._policy = coordinator, clock, policy
        # By id, so that a policy is called once per step even if it occurs several times in the combination.
        self._leaves = {id(leaf): leaf for leaf in leaves_of(policy)}
        # A single process has no rank to wait for; some answers are valid only in the call that asks for them.
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
        self._pending: _Announcement | None = None
        self._has_begun = False
        # Step, metric and answers of the last call of this rank's policies: `save` repeats the call of `should_save`.
        self._answered: tuple[int, float | None, _Answers] | None = None
        self._decided: Decision | None = None  # the last decision, until the step is saved
        self._has_ended = False
        self.should_stop = False

    def decide(self, step: int, metric: float | None, *, force: bool, waits: bool = False) -> Decision:
        """Decide whether to save a step. A collective, which waits only if the step may be saved.

        Args:
            waits: wait in any case, because the caller runs another collective at this step.

        Raises:
            CheckpointError: if arguments of this or the previous call differ between ranks, a policy raised on another
                rank, or a policy with ``same_on_all_ranks`` answered differently.
            TypeError: if a policy returns something other than a bool, on any rank.
        """
        # If `save` follows `should_save` for a step, ranks have already decided; `save` may omit the metric.
        decided = self._decided
        if decided is not None and decided.step == step and not force and metric in (None, decided.metric):
            return decided
        self._read_metrics(step)
        # Cleared first: each result is read once, even if it raises.
        previous, self._pending = self._pending, None
        late = self._answers_of(previous) if previous is not None else dict.fromkeys(self._leaves, False)
        # Conditions that are the same on all ranks. The first call waits, because no earlier call has sent answers.
        all_wait = waits or force or self._always_waits or metric is not None or not self._has_begun
        self._has_begun = True
        answers, failed, error = self._ask(step, metric)
        current = self._start(
            step, metric, force, answers, failed, error if all_wait else None, all_wait=all_wait
        )
        is_due, is_final = force, False
        if all_wait or (error is None and self._is_likely(self._policy, answers, late)):
            now = self._answers_of(current)
            # An answer of the previous call counts only for policies that may be late.
            merged = {key: now[key] or (leaf.may_be_late and late[key]) for key, leaf in self._leaves.items()}
            wanted, is_final = self._combined(self._policy, merged)
            is_due = is_due or wanted
        else:
            self._pending = current
            if error is not None:
                raise error
        self.should_stop = self.should_stop or is_final
        self._decided = Decision(step, is_due, is_final, metric)
        return self._decided

    def refuse(self) -> None:
        """Announce an invalid step, so that other ranks fail instead of waiting for this rank."""
        self._read_metrics(-1)  # a collective, which the other ranks run in this call too
        # -1 differs from all valid steps, which are not negative.
        self._pending = self._start(-1, None, False, dict.fromkeys(self._leaves, False))

    def saved(self, decision: Decision) -> None:
        """Record that a step is saved, or that the save has started."""
        self._decided = self._answered = None
        self._last_save_s, self._last_step = self._clock(), decision.step
        self._has_ended = self._has_ended or decision.is_final
        if self._metrics is not None and decision.metric is not None:
            self._metrics.append(decision.metric)

    def restored(self, step: int) -> None:
        """Record that the run continues from a step. Metrics are read again, because later steps no longer count."""
        self._decided = self._answered = self._metrics = None
        self._last_step = step

    def close(self) -> None:
        """Stop listening for signals."""
        self._signals.close()

    def _read_metrics(self, step: int) -> None:
        """Read the metrics of the steps on disk, unless they are known or no policy's class uses metrics.

        Here, not when a policy asks for the metrics: the read is a collective, and a policy may ask on some ranks only.
        """
        if self._metrics is None and self._reads_metrics:
            self._metrics = self._known_metrics(step)

    def _ask(self, step: int, metric: float | None) -> tuple[_Answers, int, BaseException | None]:
        """Call this rank's policies once per step.

        Returns:
            (answer of each policy, how a policy failed or 0, the error or None). If a policy fails, all answers are
            False.
        """
        # `save` after `should_save`: policies are called once per step, because they may count their calls.
        if self._answered is not None and self._answered[0] == step and metric in (None, self._answered[1]):
            return self._answered[2], 0, None
        none = dict.fromkeys(self._leaves, False)
        try:
            context = SaveContext(
                step,
                metric,
                self._clock(),
                self._last_save_s,
                self._last_step,
                tuple(self._metrics or ()),
                {name: signal.Signals[name] in self._signals.received for name in self._signal_names},
            )
            answers: dict[int, object] = {
                key: leaf.should_save(context) for key, leaf in self._leaves.items()
            }
        except BaseException as caught:  # noqa: BLE001  Ctrl-C too: other ranks would wait for this rank's answers
            return none, _RAISED, caught
        for key, answer in answers.items():
            if not isinstance(answer, bool):
                leaf = type(self._leaves[key]).__qualname__
                where = f"{leaf}.should_save, step {step}, rank {self._coordinator.rank}"
                return none, _NO_BOOL, _no_bool(f"{answer!r}, of type {type(answer).__name__}", where)
        # After the final save, final policies are ignored.
        valid = {
            key: answers[key] is True and not (leaf.is_final and self._has_ended)
            for key, leaf in self._leaves.items()
        }
        self._answered = step, metric, valid
        return valid, 0, None

    def _is_likely(self, policy: SavePolicy, answers: _Answers, late: _Answers, *, now: bool = False) -> bool:
        """Return whether the step may be saved, so that ranks wait for each other's answers; the same on all ranks.

        Args:
            answers: this rank's answers, used for policies with ``same_on_all_ranks``.
            late: answers of all ranks in the previous call, combined by "any"; used for policies with ``may_be_late``.
            now: whether a late answer would be lost, because the policy is combined by ``&`` with a policy whose answer
                is valid for this step only.
        """
        if type(policy) is AnyOf:
            return any(self._is_likely(part, answers, late, now=now) for part in policy.policies)
        if type(policy) is AllOf:
            now = now or not all(leaf.may_be_late for leaf in leaves_of(policy))
            return all(self._is_likely(part, answers, late, now=now) for part in policy.policies)
        if policy.same_on_all_ranks:
            return answers[id(policy)]
        # A policy that may not be late can ask for a save on any rank, which this rank cannot know before it waits.
        return not policy.may_be_late or now or late[id(policy)]

    def _combined(self, policy: SavePolicy, answers: _Answers) -> tuple[bool, bool]:
        """Return whether to save the step, and whether that save is final, given the combined answers of all ranks."""
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
    ) -> _Announcement:
        """Start the all-reduce of this rank's arguments and answers."""
        rank = self._coordinator.rank
        number = min(step, _LARGEST_STEP)  # only for messages: `alike` compares the step itself
        # By MAX, the first becomes the newest step of all ranks, the second the negative of the oldest step.
        steps = [(number << _RANK_BITS) + rank, (-number << _RANK_BITS) + rank]
        alike = [*words_of({"step": step}), int(force), *words_of({"metric": metric})]
        # Two numbers per policy: their MAX gives the highest rank that answered True, and that answered False.
        votes = [
            (int(answers[key] is wanted) << _RANK_BITS) + rank
            for key in self._leaves
            for wanted in (True, False)
        ]
        numbers = [(failed << _RANK_BITS) + rank if failed else 0, *steps, *both_ways(alike), *votes]
        return _Announcement(step, all_wait, error, self._coordinator.begin_largest(numbers))

    def _answers_of(self, current: _Announcement) -> dict[int, bool]:
        """Wait for the answers of all ranks; returns, for each policy, whether any rank answered True.

        Raises:
            CheckpointError, TypeError: as `decide`.
        """
        numbers = current.finish()
        (failed, newest, oldest), rest = numbers[:_HEAD], numbers[_HEAD:]
        alike, votes = rest[: 2 * _ALIKE], rest[2 * _ALIKE :]
        # Compared first: a failure matters only if all ranks asked about the same step.
        if not is_same(alike):
            raise _unlike(current.step, alike, newest, oldest) from current.error
        if failed:
            self._raise_failed(current, failed >> _RANK_BITS, failed % (1 << _RANK_BITS))
        answers = {}
        for leaf, yes, no in zip(self._leaves.values(), votes[::2], votes[1::2], strict=True):
            answers[id(leaf)] = bool(yes >> _RANK_BITS)
            if leaf.same_on_all_ranks and yes >> _RANK_BITS and no >> _RANK_BITS:
                ranks = [code % (1 << _RANK_BITS) for code in (yes, no)]
                raise CheckpointError(
                    "A save policy with same_on_all_ranks = True answered differently on different ranks.",
                    expected="the same answer on all ranks",
                    got=f"True on ranks [{ranks[0]}]; False on ranks [{ranks[1]}]",
                    where=f"{type(leaf).__qualname__}.should_save, step {current.step}",
                    todo="answer only from values that are the same on all ranks, or set same_on_all_ranks = False, so "
                    "that the answers are combined by any(); nothing of this step was saved",
                )
        return answers

    def _raise_failed(self, current: _Announcement, kind: int, rank: int) -> NoReturn:
        """Raise on all ranks, after a policy has failed on a rank.

        Args:
            kind: `_RAISED` or `_NO_BOOL`.
            rank: the highest rank with a failure of the highest kind.
        """
        doing = f"asking the save policy about step {current.step}"
        try:
            if current.all_wait:  # otherwise the failed rank has raised its error in the previous call
                self._coordinator.raise_together(current.error, doing, "nothing of this step was saved")
            raise CheckpointError(
                f"Rank {rank} failed while {doing}.",
                expected="should_save to return a bool on all ranks",
                got="an error",
                where=f"rank {rank}",
                todo="see that rank's error; nothing of this step was saved",
            )
        except CheckpointError as error:
            if kind != _NO_BOOL or current.error is not None:
                raise
            # Ranks without an error raise the class that the failed rank raises.
            raise _no_bool(error.got, f"should_save, step {current.step}, rank {rank}") from None


def _no_bool(got: object, where: str) -> ArgumentError:
    """Return the error for an answer that is not a bool."""
    return ArgumentError(
        "A save policy returned something other than a bool.",
        expected="True or False",
        got=got,
        where=where,
        todo="return a bool, such as bool(value); nothing of this step was saved",
    )


def _unlike(step: int, alike: list[int], newest: int, oldest: int) -> CheckpointError:
    """Return the error for ranks with different arguments, from the reduced numbers of `SaveSchedule._start`."""
    half = len(alike) // 2
    first = next(word for word in range(half) if alike[word] != -alike[half + word])
    name = "step" if first < 4 else "force" if first == 4 else "metric"  # in the order of `alike` in `_start`
    ends = [(-(oldest >> _RANK_BITS), oldest), (newest >> _RANK_BITS, newest)]
    shown = "; ".join(f"step {number} on ranks [{rank % (1 << _RANK_BITS)}]" for number, rank in ends)
    return CheckpointError(
        "Ranks called the manager with different steps, or with different arguments for one step.",
        expected="the same arguments on all ranks",
        got=f"from {shown}" if name == "step" else f"step {step}, but different values of {name}",
        where=f"the argument `{name}`",
        todo=(
            "reduce the metric over the ranks first (torch.distributed.all_reduce); nothing of this step was saved"
            if name == "metric"
            else "call should_save and save on all ranks at the same steps; nothing of this step was saved"
        ),
    )


class SignalWatch:
    """Records signals that announce the end of a job, without ending the process.

    The previous handlers are called too, and `close` restores them. Forked processes, such as data loader workers,
    inherit the handler. In these processes, and after `close`, a signal has its default effect, so that ``terminate()``
    ends a worker.

    Args:
        names: names of signals, such as SIGTERM; may be empty.

    Attributes:
        received: numbers of the signals that were received.

    Raises:
        ValueError: for any signal outside of the main thread, where Python cannot set signal handlers.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.received: set[int] = set()
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._is_closed = False
        if names and threading.current_thread() is not threading.main_thread():
            raise ArgumentError(
                "Signals can be handled in the main thread only.",
                expected="a manager with OnSignal() to be created in the main thread",
                got=f"thread {threading.current_thread().name}",
                where="CheckpointManager(save_policy=..)",
            )
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        is_ours = not self._is_closed and os.getpid() == self._process
        if is_ours:
            self.received.add(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not is_ours:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)  # sent again, now with the default effect

    def close(self) -> None:
        """Restore the previous handlers, except for a signal whose handler was replaced since."""
        if self._is_closed:
            return
        self._is_closed = True
        for number, before in self._before.items():
            # None: the previous handler was not set from Python, and Python cannot restore it. `==`, not `is`: each
            # access to a method creates a new object.
            if signal.getsignal(number) == self._handle and before is not None:
                signal.signal(number, before)
