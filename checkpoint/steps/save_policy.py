"""When a run's state is saved: policies, combined with ``|`` and ``&``, and your own.

    EverySteps(1000) | EveryMinutes(30) | OnSignal()
    EverySteps(100) & AfterWarmup()

A policy decides with the knowledge of one rank. `save_schedule` first combines each policy's answers of all ranks by
"any", then applies ``|`` and ``&``. So all ranks decide the same.
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
    """The input of a policy: this rank's view of one step.

    Attributes:
        step, metric: as given to `CheckpointManager.save`.
        unix_s: the time, in seconds since 1970.
        last_save_unix_s: when this manager last saved; before the first save, when it was made.
        last_step: the last step saved or restored; None if there is none.
        known_metrics: metrics of the steps on disk.
        signals: name of each signal that an `OnSignal` of the manager's policy listens for -> whether it was received.

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
    """When to save. Subclasses define `should_save`; ``|`` and ``&`` combine any policies.

    `should_save` is called for every step that is passed to `CheckpointManager.should_save` or `save`, once, on every
    rank, in any combination of policies; so a policy may count its calls. The answers of all ranks are combined by
    "any". An error, or an answer that is not a bool, is raised on all ranks.

    Class attributes:
        same_on_all_ranks: the answer depends only on values that are the same on all ranks, such as the step. Ranks
            then do not wait for each other at steps that are not saved. Different answers are an error on all ranks.
        may_be_late: an answer of True is repeated until a save. It may then take effect one call later, which saves
            waiting too.
        is_final: a save for this policy is the last one of the run, and the policy is ignored afterwards; see
            `CheckpointManager.should_stop`.

    A subclass that overrides `should_save` does not inherit the first two.

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
        if "should_save" in vars(cls):
            cls.same_on_all_ranks = vars(cls).get("same_on_all_ranks", False)
            cls.may_be_late = vars(cls).get("may_be_late", False)

    @abstractmethod
    def should_save(self, context: SaveContext) -> bool:
        """Whether this rank asks for a save of the step."""

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
    """A combination of policies."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy) -> None:
        _check(bool(policies), f"{type(self).__name__} combines policies.", "at least one", policies)
        object.__setattr__(self, "policies", tuple(map(check_policy, policies)))  # the class is frozen

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"


class AnyOf(_Combined):
    """When any of several policies asks for a save: ``a | b``.

    Examples:
        >>> AnyOf(EverySteps(2), EverySteps(3)) == EverySteps(2) | EverySteps(3)
        True
    """

    def should_save(self, context: SaveContext) -> bool:
        answers = [
            policy.should_save(context) for policy in self.policies
        ]  # each is called, also after a True
        return any(answers)


class AllOf(_Combined):
    """When all of several policies ask for a save, on whichever ranks: ``a & b``.

    Examples:
        >>> AllOf(EverySteps(2), EverySteps(3)).should_save(SaveContext(step=6))
        True
    """

    def should_save(self, context: SaveContext) -> bool:
        answers = [policy.should_save(context) for policy in self.policies]
        return all(answers)


def _parts_of(policy: SavePolicy, kind: type[_Combined]) -> tuple[SavePolicy, ...]:
    return policy.policies if type(policy) is kind else (policy,)  # type: ignore[attr-defined]


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """At steps divisible by ``steps``.

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
        _check(self.steps >= 1, "EverySteps needs a number of steps.", "steps >= 1", self.steps)

    def should_save(self, context: SaveContext) -> bool:
        return context.step % self.steps == 0


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class EveryMinutes(SavePolicy):
    """When so many minutes have passed on any rank since the last save, or since the manager was made.

    Examples:
        >>> EveryMinutes(30)
        EveryMinutes(minutes=30)
    """

    may_be_late = True
    minutes: float

    def __post_init__(self) -> None:
        _check(self.minutes > 0, "EveryMinutes needs a time.", "minutes > 0", self.minutes)

    def should_save(self, context: SaveContext) -> bool:
        return context.unix_s - context.last_save_unix_s >= self.minutes * 60


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class BestOf(SavePolicy):
    """When a step's metric is among the best ``count`` of all steps on disk, which are kept.

    A metric that is not a finite number is never among the best.

    Attributes:
        mode: "min" if less is better, as of a loss, or "max".

    Examples:
        >>> BestOf(2).takes(0.5, known=[0.4, 0.9]), BestOf(2, mode="max").takes(0.3, known=[0.4, 0.9])
        (True, False)
    """

    same_on_all_ranks = True
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check(self.count >= 1, "BestOf keeps at least one step.", "count >= 1", self.count)
        _check(self.mode in ("min", "max"), "There is no such mode.", "'min' or 'max'", repr(self.mode))

    def should_save(self, context: SaveContext) -> bool:
        return self.takes(context.metric, context.known_metrics)

    def order(self, metric: float) -> float:
        """A sort key: lower is better."""
        return metric if self.mode == "min" else -metric

    def takes(self, metric: float | None, known: Iterable[float]) -> bool:
        """Whether a metric is among the best, given the known ones."""
        if metric is None or not math.isfinite(metric):
            return False
        return sum(self.order(other) <= self.order(metric) for other in known) < self.count


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class BeforeDeadline(SavePolicy):
    """Once, as the final save, before the time of a job is over.

    Attributes:
        unix_s: end of the job, in seconds since 1970, as by `time.time`; Slurm sets SLURM_JOB_END_TIME to it.
        margin_s: seconds before the end: at least the time of two steps and a save.

    Examples:
        >>> import time
        >>> policy = BeforeDeadline(unix_s=time.time() + 3600, margin_s=300)
    """

    may_be_late = is_final = True
    unix_s: float
    margin_s: float = 300.0

    def __post_init__(self) -> None:
        _check(math.isfinite(self.unix_s), "A deadline is a time.", "seconds since 1970", self.unix_s)

    def should_save(self, context: SaveContext) -> bool:
        return context.unix_s >= self.unix_s - self.margin_s


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class OnSignal(SavePolicy):
    """Once, as the final save, when any rank receives one of these signals.

    torchrun, Kubernetes and Slurm send SIGTERM before they end a job; SIGUSR1 is the usual choice for ``sbatch
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
            bool(self.names) and not unknown, "OnSignal needs names of signals.", "SIGTERM, ..", self.names
        )

    def should_save(self, context: SaveContext) -> bool:
        unwatched = [name for name in self.names if name not in context.signals]
        _check(
            not unwatched,
            "The manager does not listen for these signals.",
            "OnSignal to be combined with other policies by | or &, or to stand alone",
            unwatched,
        )
        return any(context.signals[name] for name in self.names)


def check_policy(policy: object) -> SavePolicy:
    """Check the type of a policy, and return it.

    Raises:
        TypeError: if it is not a `SavePolicy`.
    """
    if not isinstance(policy, SavePolicy):
        raise ArgumentError(
            "This is not a save policy.",
            expected="a SavePolicy, such as EverySteps(n)",
            got=repr(policy),
            where="the argument `save_policy`",
            todo="combine several with | and &; a policy of your own subclasses SavePolicy",
        )
    return policy


def leaves_of(policy: SavePolicy) -> Iterator[SavePolicy]:
    """The combined policies, left to right. A subclass of `AnyOf` or `AllOf` counts as one policy."""
    if type(policy) in (AnyOf, AllOf):
        for part in policy.policies:  # type: ignore[attr-defined]
            yield from leaves_of(part)
    else:
        yield policy


def shape_of(policy: SavePolicy) -> str:
    """The class names of a policy, which ranks compare: their answers are sent as numbers in this order."""
    name = type(policy).__qualname__
    if type(policy) in (AnyOf, AllOf):
        return f"{name}({', '.join(map(shape_of, policy.policies))})"  # type: ignore[attr-defined]
    return name


def _check(is_true: bool, problem: str, expected: str, got: object) -> None:
    if not is_true:
        raise ArgumentError(problem, expected=expected, got=got)
