"""When a run's state is saved: small values, put together with ``|`` or given as a sequence.

    EverySteps(1000) | EveryMinutes(30) | OnSignal()
    [BestOf(3), BeforeDeadline(float(os.environ["SLURM_JOB_END_TIME"]))]

A rule says what it wants of what one rank knows; `save_schedule` makes the ranks agree. `OnSignal` and `BeforeDeadline`
ask for a *final* save: one that is done when `CheckpointManager.save` returns, after which the run is to end.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vescale_fsdp.errors import ArgumentError

__all__ = [
    "AnyOf",
    "BeforeDeadline",
    "BestOf",
    "EveryMinutes",
    "EverySteps",
    "OnSignal",
    "SaveWhen",
    "save_rules",
]


class SaveWhen:
    """A rule. Two of them are put together with ``|``: saved is when either says so.

    Examples:
        >>> EverySteps(1000) | EveryMinutes(30)
        AnyOf(rules=(EverySteps(steps=1000), EveryMinutes(minutes=30)))
    """

    def __or__(self, other: SaveWhen) -> AnyOf:
        return AnyOf((self, other))


@dataclass(frozen=True)
class AnyOf(SaveWhen):
    """When any of these says so."""

    rules: tuple[SaveWhen, ...]


@dataclass(frozen=True)
class EverySteps(SaveWhen):
    """At steps that are divisible by ``steps``.

    Examples:
        >>> from vescale_fsdp.checkpoint import CheckpointManager
        >>> manager = CheckpointManager("run", save_when=EverySteps(2))
        >>> [manager.should_save(step) for step in (1, 2)]
        [False, True]
        >>> manager.close()
    """

    steps: int

    def __post_init__(self) -> None:
        _prove(self.steps >= 1, "EverySteps needs a number of steps.", "steps >= 1", self.steps)


@dataclass(frozen=True)
class EveryMinutes(SaveWhen):
    """When so many minutes have passed on any rank since the last save, or since the manager was made.

    Examples:
        >>> EveryMinutes(30)
        EveryMinutes(minutes=30)
    """

    minutes: float

    def __post_init__(self) -> None:
        _prove(self.minutes > 0, "EveryMinutes needs a time.", "minutes > 0", self.minutes)


@dataclass(frozen=True)
class BestOf(SaveWhen):
    """When a step's metric is among the best ``count`` of all steps there are; those are kept.

    A metric that is no finite number is never among the best.

    Attributes:
        mode: "min" if less is better, as of a loss, or "max".

    Examples:
        >>> BestOf(2).takes(0.5, known=[0.4, 0.9]), BestOf(2, mode="max").takes(0.3, known=[0.4, 0.9])
        (True, False)
    """

    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _prove(self.count >= 1, "BestOf keeps at least one step.", "count >= 1", self.count)
        _prove(self.mode in ("min", "max"), "There is no such mode.", "'min' or 'max'", repr(self.mode))

    def order(self, metric: float) -> float:
        """What is least of the best."""
        return metric if self.mode == "min" else -metric

    def takes(self, metric: float | None, known: Iterable[float]) -> bool:
        """Whether a metric is among the best, beside those that are known."""
        if metric is None or not math.isfinite(metric):
            return False
        return sum(self.order(other) <= self.order(metric) for other in known) < self.count


@dataclass(frozen=True)
class BeforeDeadline(SaveWhen):
    """Once, finally, before the time of a job is over.

    Attributes:
        unix_s: when that is, in seconds since 1970, as `time.time` counts; Slurm puts it into SLURM_JOB_END_TIME.
        margin_s: how long before: as long as two steps and a save take.

    Examples:
        >>> import time
        >>> rule = BeforeDeadline(unix_s=time.time() + 3600, margin_s=300)
    """

    unix_s: float
    margin_s: float = 300.0

    def __post_init__(self) -> None:
        _prove(math.isfinite(self.unix_s), "A deadline is a time.", "seconds since 1970", self.unix_s)


@dataclass(frozen=True)
class OnSignal(SaveWhen):
    """Once, finally, when any rank gets one of these signals.

    SIGTERM comes from torchrun, Kubernetes and Slurm when a job is to end; SIGUSR1 is what ``sbatch --signal`` is
    mostly given.

    Examples:
        >>> from vescale_fsdp.checkpoint import CheckpointManager
        >>> manager = CheckpointManager("run", save_when=EverySteps(100) | OnSignal())
        >>> manager.should_stop
        False
        >>> manager.close()
    """

    names: tuple[str, ...] = ("SIGTERM", "SIGUSR1")

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in signal.Signals.__members__]
        _prove(
            bool(self.names) and not unknown, "OnSignal needs names of signals.", "SIGTERM, ..", self.names
        )


def save_rules(when: SaveWhen | Sequence[SaveWhen]) -> tuple[SaveWhen, ...]:
    """The single rules, none of which is `AnyOf`.

    Raises:
        TypeError: for what is no rule.
    """
    if isinstance(when, AnyOf):
        return save_rules(when.rules)
    if isinstance(when, SaveWhen):
        return (when,)
    if isinstance(when, str) or not isinstance(when, Sequence):
        raise ArgumentError(
            "This is no rule of when to save.", expected="such as EverySteps(n)", got=repr(when)
        )
    return tuple(rule for part in when for rule in save_rules(part))


def _prove(is_true: bool, problem: str, expected: str, got: object) -> None:
    if not is_true:
        raise ArgumentError(problem, expected=expected, got=got)
