"""The errors that a program may end in, each with the sentence of docs/limits.md that says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.vescale_fsdp.runtime.habits.program import Event, Program
from vescale_fsdp.errors import LifecycleError, MisuseError, UnsupportedOpError, VescaleError


class Limit(NamedTuple):
    """An error that is allowed.

    Attributes:
        sentence: a part of docs/limits.md.
        error: the class of the error.
        event: whether an event leads to it.
    """

    sentence: str
    error: type[VescaleError]
    event: Callable[[Program, Event], bool]

    def allows(self, program: Program, errors: Sequence[BaseException]) -> bool:
        """Whether a program may raise these."""
        return all(isinstance(error, self.error) for error in errors) and any(
            self.event(program, event) for event in program.events or (Event(),)
        )


def _copies_whole(program: Program, event: Event) -> bool:
    """A copy of a whole parameter, which an average of sharded ones is computed with later."""
    return event.habit == "copy.ema" and (event.moment == "before" or event.moment in FULL)


def _reads_another_unit(program: Program, event: Event) -> bool:
    """Code of the root computes with a weight of a unit below it, outside of that unit's forward."""
    return bool(program.reader) and program.reads == "head" and program.unit == "norm_head"


FULL = ("gathered", "gathered_graded", "forward", "backward")
LIMITS = (
    Limit(
        "Plain tensors as operands (`x @ p`) are refused, because they may differ between ranks.",
        UnsupportedOpError,
        lambda program, event: _copies_whole(program, event) or _reads_another_unit(program, event),
    ),
    Limit(
        "A sharded module cannot be deep-copied",
        MisuseError,
        lambda program, event: event.habit == "copy.model" and event.moment != "before",
    ),
    Limit(
        "After an exception in a backward, the next forward raises a `LifecycleError` unless `reset_iter_state()` was called",
        LifecycleError,
        lambda program, event: program.breaks == "backward" and not program.resets,
    ),
)
