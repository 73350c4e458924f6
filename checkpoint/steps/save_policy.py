"""Save policies: when a run's state is saved. Combine them with ``|`` and ``&``, or write your own.

    EverySteps(1000) | EveryMinutes(30) | OnSignal()
    EverySteps(100) & AfterWarmup()

A policy answers from one rank's view. `save_schedule` first combines the answers that a policy gives on all ranks by
"any", and then applies ``|`` and ``&`` to the results. All ranks therefore make the same decision.
"""

from __future__ import annotations

import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vescale_fsdp.errors import ArgumentError
from vescale_fsdp.lazy import set_module


@dataclass(frozen=True)
class SaveContext:
    """The input of a policy: one step, as this rank sees it.

    Attributes:
        step, metric: the arguments of `CheckpointManager.save` or `should_save`.
        unix_s: the current time, in seconds since 1970.
        last_save_unix_s: time of this manager's last save; before the first save, the time of its creation.
        last_step: the last saved or restored step; None if there is none.
        known_metrics: metrics of the steps on disk.
        signals: name of each signal that the manager listens for (see `OnSignal`) -> whether it was received.

    Examples:
        >>> SaveContext(step=20, metric=0.5).last_step is None
        True
    """

    step: int
    metric: float | None = None
    unix_s: float = field(default_factory=time.time)
    last_save_unix_s: float = 0.0
    last_step: int | None = None
    known_metrics: Sequence[float] = ()
    signals: Mapping[str, bool] = field(default_factory=dict)


class SavePolicy(ABC):
    """The base class of save policies. Subclasses define `should_save`; ``|`` and ``&`` combine any policies.

    `should_save` is called once on every rank for each step that is passed to `CheckpointManager.should_save` or
    `save`, whatever policies it is combined with; a policy may therefore count its calls. The answers of all ranks are
    combined by "any". If a policy raises, or returns something other than a bool, all ranks raise.

    Class attributes:
        same_on_all_ranks: whether the answer depends only on values that are the same on all ranks, such as the step.
            Ranks then do not wait for each other at steps that are not saved. Different answers are an error on all
            ranks.
        may_be_late: whether the policy repeats an answer of True until a save. The answer may then take effect one call
            later, so that ranks do not wait for each other in the call.
        is_final: whether a save for this policy is the last one of the run; the policy is ignored afterwards. See
            `CheckpointManager.should_stop`.

    A subclass that overrides `should_save` does not inherit the first two attributes: it must set them itself.

    Examples:
        >>> class LossSpike(SavePolicy):
        ...     def should_save(self, context: SavePolicy.Context) -> bool:
        ...         return context.metric is not None and context.metric > 10
        >>> EverySteps(1000) & EveryMinutes(30) | LossSpike()  # doctest: +ELLIPSIS
        AnyOf(AllOf(EverySteps(steps=1000), EveryMinutes(minutes=30)), <...LossSpike object at ...>)
    """

    Context = SaveContext  # for annotations of subclasses

    same_on_all_ranks: ClassVar[bool] = False
    may_be_late: ClassVar[bool] = False
    is_final: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not inherited, because the base class's values describe its own `should_save`, not the subclass's.
        if "should_save" in vars(cls):
            cls.same_on_all_ranks = vars(cls).get("same_on_all_ranks", False)
            cls.may_be_late = vars(cls).get("may_be_late", False)

    @abstractmethod
    def should_save(self, context: SaveContext) -> bool:
        """Return whether this rank asks for a save of the step."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyOf(*_parts_of(self, AnyOf), *_parts_of(other, AnyOf))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AllOf(*_parts_of(self, AllOf), *_parts_of(other, AllOf))


@dataclass(frozen=True, init=False, repr=False)
class _Combined(SavePolicy):
    """The base class of `AnyOf` and `AllOf`."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy) -> None:
        _check(
            bool(policies),
            f"{type(self).__name__}(..)",
            f"{type(self).__name__} combines policies.",
            "at least one",
            policies,
        )
        # Not an assignment, because the dataclass is frozen.
        object.__setattr__(self, "policies", tuple(map(check_policy, policies)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"


class AnyOf(_Combined):
    """Save when any of several policies asks for a save: ``a | b``.

    Examples:
        >>> AnyOf(EverySteps(2), EverySteps(3)) == EverySteps(2) | EverySteps(3)
        True
    """

    def should_save(self, context: SaveContext) -> bool:
        # A list, not a generator, so that every policy is called, even after an answer of True.
        answers = [policy.should_save(context) for policy in self.policies]
        return any(answers)


class AllOf(_Combined):
    """Save when each of several policies asks for a save on at least one rank: ``a & b``.

    Examples:
        >>> AllOf(EverySteps(2), EverySteps(3)).should_save(SaveContext(step=6))
        True
    """

    def should_save(self, context: SaveContext) -> bool:
        # A list, not a generator, so that every policy is called, even after an answer of False.
        answers = [policy.should_save(context) for policy in self.policies]
        return all(answers)


def _parts_of(policy: SavePolicy, kind: type[_Combined]) -> tuple[SavePolicy, ...]:
    """Return the parts of a combination of this kind, so that ``a | b | c`` is one `AnyOf`; else the policy itself."""
    return policy.policies if type(policy) is kind else (policy,)  # type: ignore[attr-defined]


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Save at steps divisible by ``steps``.

    Examples:
        >>> from vescale_fsdp.checkpoint import CheckpointManager
        >>> manager = CheckpointManager("run", save_policy=EverySteps(2))
        >>> [manager.should_save(step) for step in (1, 2)]
        [False, True]
        >>> manager.close()
    """

    same_on_all_ranks = True
    steps: int

    def __post_init__(self) -> None:
        _check(
            self.steps >= 1,
            "EverySteps(steps=..)",
            "EverySteps needs a number of steps.",
            "steps >= 1",
            self.steps,
        )

    def should_save(self, context: SaveContext) -> bool:
        return context.step % self.steps == 0


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class EveryMinutes(SavePolicy):
    """Save when, on any rank, ``minutes`` have passed since the last save or since the manager was created.

    Examples:
        >>> EveryMinutes(30)
        EveryMinutes(minutes=30)
    """

    may_be_late = True
    minutes: float

    def __post_init__(self) -> None:
        _check(
            self.minutes > 0,
            "EveryMinutes(minutes=..)",
            "EveryMinutes needs a time.",
            "minutes > 0",
            self.minutes,
        )

    def should_save(self, context: SaveContext) -> bool:
        return context.unix_s - context.last_save_unix_s >= self.minutes * 60


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class BestOf(SavePolicy):
    """Save when a step's metric is among the best ``count`` of all steps on disk. Retention keeps these best steps.

    A metric that is not a finite number is never among the best.

    Attributes:
        count: number of best steps to keep.
        mode: "min" if lower is better, as for a loss; otherwise "max".

    Examples:
        >>> BestOf(2).takes(0.5, known=[0.4, 0.9]), BestOf(2, mode="max").takes(0.3, known=[0.4, 0.9])
        (True, False)
    """

    same_on_all_ranks = True
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check(
            self.count >= 1, "BestOf(count=..)", "BestOf keeps at least one step.", "count >= 1", self.count
        )
        _check(
            self.mode in ("min", "max"),
            "BestOf(mode=..)",
            "BestOf has an unknown mode.",
            "'min' or 'max'",
            repr(self.mode),
        )

    def should_save(self, context: SaveContext) -> bool:
        return self.takes(context.metric, context.known_metrics)

    def order(self, metric: float) -> float:
        """Return a sort key for a metric: lower is better."""
        return metric if self.mode == "min" else -metric

    def takes(self, metric: float | None, known: Iterable[float]) -> bool:
        """Return whether a metric is among the best ``count``, given the known metrics."""
        if metric is None or not math.isfinite(metric):  # NaN has no rank among other metrics
            return False
        # `<=`: a known step with an equal metric counts as better.
        return sum(self.order(other) <= self.order(metric) for other in known) < self.count


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class BeforeDeadline(SavePolicy):
    """Save once, as the final save, before a job's time limit.

    Attributes:
        unix_s: end of the job in seconds since 1970, as in `time.time`; Slurm's SLURM_JOB_END_TIME has this value.
        margin_s: seconds between the final save and the end of the job: at least the time of two steps and a save.

    Examples:
        >>> import time
        >>> policy = BeforeDeadline(unix_s=time.time() + 3600, margin_s=300)
    """

    may_be_late = is_final = True
    unix_s: float
    margin_s: float = 300.0

    def __post_init__(self) -> None:
        _check(
            math.isfinite(self.unix_s),
            "BeforeDeadline(unix_s=..)",
            "A deadline is a time.",
            "seconds since 1970",
            self.unix_s,
        )

    def should_save(self, context: SaveContext) -> bool:
        return context.unix_s >= self.unix_s - self.margin_s


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class OnSignal(SavePolicy):
    """Save once, as the final save, when any rank receives one of the signals in ``names``.

    torchrun, Kubernetes and Slurm send SIGTERM before they end a job. SIGUSR1 is the usual choice for ``sbatch
    --signal``.

    Examples:
        >>> from vescale_fsdp.checkpoint import CheckpointManager
        >>> manager = CheckpointManager("run", save_policy=EverySteps(100) | OnSignal())
        >>> manager.should_stop
        False
        >>> manager.close()
    """

    may_be_late = is_final = True
    names: tuple[str, ...] = ("SIGTERM", "SIGUSR1")

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in signal.Signals.__members__]
        _check(
            bool(self.names) and not unknown,
            "OnSignal(names=..)",
            "OnSignal needs names of signals.",
            "SIGTERM, ..",
            self.names,
        )

    def should_save(self, context: SaveContext) -> bool:
        # The manager listens only for the policies that `leaves_of` finds: not for one inside a user's own policy.
        unwatched = [name for name in self.names if name not in context.signals]
        _check(
            not unwatched,
            "save_policy=..",
            "The manager does not listen for these signals.",
            "OnSignal used alone, or combined with other policies by | or &",
            unwatched,
        )
        return any(context.signals[name] for name in self.names)


def check_policy(policy: object) -> SavePolicy:
    """Return the policy if it is a `SavePolicy`.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(policy, SavePolicy):
        raise ArgumentError(
            "This is not a save policy.",
            expected="a SavePolicy, such as EverySteps(n)",
            got=repr(policy),
            where="save_policy=..",
            todo="combine policies with | and &; to write your own, subclass SavePolicy",
        )
    return policy


def leaves_of(policy: SavePolicy) -> Iterator[SavePolicy]:
    """Yield the policies in a combination, left to right. A subclass of `AnyOf` or `AllOf` counts as one policy."""
    if type(policy) in (AnyOf, AllOf):  # not isinstance: a subclass may define its own `should_save`
        for part in policy.policies:  # type: ignore[attr-defined]
            yield from leaves_of(part)
    else:
        yield policy


def shape_of(policy: SavePolicy) -> str:
    """Return the class names in a policy. Ranks compare this text, because the order of their answers depends on it."""
    name = type(policy).__qualname__
    if type(policy) in (AnyOf, AllOf):
        return f"{name}({', '.join(map(shape_of, policy.policies))})"  # type: ignore[attr-defined]
    return name


def _check(is_true: bool, where: str, problem: str, expected: str, got: object) -> None:
    """Raise an ArgumentError unless a condition is true."""
    if not is_true:
        raise ArgumentError(problem, expected=expected, got=got, where=where)
