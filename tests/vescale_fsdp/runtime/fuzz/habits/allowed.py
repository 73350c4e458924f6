"""The errors that a program may end in, each with the sentence of docs/limits.md that says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.vescale_fsdp.runtime.fuzz.habits.program import Event, Program
from vescale_fsdp.errors import LifecycleError, MisuseError, UnsupportedOpError


class Limit(NamedTuple):
    """An error that is allowed.

    Attributes:
        sentence: a part of docs/limits.md.
        error: the class of the error.
        event: whether an event leads to it.
    """

    sentence: str
    error: type[Exception] | tuple[type[Exception], ...]
    event: Callable[[Program, Event], bool]

    def applies(self, program: Program) -> bool:
        """Whether something in a program leads to it."""
        return any(self.event(program, event) for event in program.events or (Event(),))

    def allows(self, program: Program, errors: Sequence[BaseException]) -> bool:
        """Whether a program may raise these."""
        return all(isinstance(error, self.error) for error in errors) and self.applies(program)


def may_raise(program: Program) -> bool:
    """Whether a program may end in an error."""
    return any(limit.applies(program) for limit in LIMITS)


def _copies_whole(program: Program, event: Event) -> bool:
    """A copy of a parameter that was whole then, which an average of sharded ones is computed with later."""
    is_sharded = event.moment in ("sharded", "micros", "graded") and not program.stays
    return event.habit == "copy.ema" and not is_sharded


def _writes_elements(program: Program, event: Event) -> bool:
    """A view that is no row of one rank: an element of a vector, or a row that other ranks have a part of."""
    is_row = event.habit in ("write.row", "data.row")
    return is_row and (program.unit == "tp" or event.target.startswith("norm"))


def _reads_another_unit(program: Program, event: Event) -> bool:
    """Code of the root computes with a weight of a unit below it, outside of that unit's forward."""
    return bool(program.reader) and program.reads == "head" and program.unit == "norm_head"


def _writes_what_gathers_itself(program: Program, event: Event) -> bool:
    is_gathered = event.moment in ("gathered", "gathered_graded", "forward", "middle", "backward", "broken")
    is_write = event.writes and event.target == "blocks.0.up.weight"
    return program.unit == "self_gathering" and is_write and is_gathered


def _reads_gradients_of_gathered(program: Program, event: Event) -> bool:
    is_gathered = event.moment == "gathered_graded" or program.stays or event.handle == "full"
    return (
        event.habit in ("read.grad", "clip.norm", "clip.value", "clip.hand")
        and event.handle != "kept"
        and is_gathered
    )


def _differentiates_what_was_kept(program: Program, event: Event) -> bool:
    """A backward of what a unit has kept, once the unit is resharded."""
    is_again = program.backward != "once" or bool(program.reader) or program.tiles
    return program.loss == "aside" and (bool(program.reshard) or is_again or program.unit == "nested")


def _leaves_a_penalty(program: Program, event: Event) -> bool:
    """A backward, or what reshards units, before the backward of a gradient penalty; or a second one."""
    is_between = event.moment == "middle" and event.habit in (
        "loss.direct",
        "copy.state",
        "load",
        "copy.model",
    )
    return program.penalty and (program.backward in ("twice", "ahead") or is_between)


LIMITS = (
    Limit(
        "Plain tensors as operands (`x @ p`) are refused, because they may differ between ranks.",
        UnsupportedOpError,
        lambda program, event: _copies_whole(program, event) or _reads_another_unit(program, event),
    ),
    Limit("Writes to such views (`p[:, 0].zero_()`) are refused", UnsupportedOpError, _writes_elements),
    Limit(
        "All ranks must make calls that communicate",
        LifecycleError,
        lambda program, event: event.meets,
    ),
    Limit(
        "A sharded module cannot be deep-copied",
        MisuseError,
        lambda program, event: event.habit == "copy.model" and event.moment != "before",
    ),
    Limit(
        "An optimizer built before `fully_shard` raises a `LifecycleError` at its first step",
        LifecycleError,
        lambda program, event: event.moment == "before" and event.habit == "optimizer.new",
    ),
    Limit(
        "Reading or clipping the gradient of a gathered parameter raises a `LifecycleError`",
        LifecycleError,
        _reads_gradients_of_gathered,
    ),
    Limit(
        "Parameters that gather themselves cannot be written while they are gathered",
        LifecycleError,
        _writes_what_gathers_itself,
    ),
    Limit(
        "`p.data = tensor` inside a forward or its backward, or between them, ends in the same error",
        RuntimeError,
        lambda program, event: (
            event.habit == "data.set" and event.moment in ("forward", "middle", "backward")
        ),
    ),
    Limit(
        "A loss on a tensor that a unit's forward stored outside of its output",
        (RuntimeError, UnsupportedOpError),
        _differentiates_what_was_kept,
    ),
    Limit(
        "A backward that contains a gradient penalty (`create_graph=True`)",
        (RuntimeError, UnsupportedOpError),
        _leaves_a_penalty,
    ),
    Limit(
        "After an exception in a backward, the next forward raises a `LifecycleError` unless `reset_iter_state()` was",
        LifecycleError,
        lambda program, event: program.breaks == "backward" and not program.resets,
    ),
)
