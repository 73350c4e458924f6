"""Programs of user habits: what a training loop does to parameters, at which moment, and how the model is sharded.

``draw(seed)`` makes one. What differs from a default is what is printed, so that a failing program is a bug report that
runs: paste it into `kept.py`. ``smaller(program)`` yields the programs that have one thing less.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.vescale_fsdp.runtime.fuzz.program import Printed

# When an event happens. "gathered": between unshard() and reshard(), before the step's first forward;
# "gathered_graded": so behind its last backward; "middle": between forward and backward; "micros": between two
# micro-batches; "graded": between the last backward and the optimizer; "broken": after an exception.
MOMENTS = (
    "before",
    "sharded",
    "gathered",
    "gathered_graded",
    "forward",
    "middle",
    "backward",
    "micros",
    "graded",
    "broken",
)
READS = ("read.sum", "read.full", "read.rows", "read.grad")
WRITES = (
    "write.mul",
    "write.row",
    "write.init",
    "write.norm",
    "write.mask",
    "write.detach",
    "data.mul",
    "data.clamp",
    "data.copy",
    "data.set",
    "data.row",
    "load",
)
HOOKS = ("hook.mask", "hook.record", "hook.removed", "hook.after", "hook.after_scale", "hook.after_step")
ATTRIBUTES = ("attribute",)
OPTIMIZERS = ("optimizer.new", "optimizer.group", "optimizer.step")
ZEROS = ("zero.model", "zero.optimizer", "zero.optimizer_keep", "zero.none")
CLIPS = ("clip.norm", "clip.value", "clip.hand")
COPIES = ("copy.model", "copy.param", "copy.clone", "copy.state", "copy.optimizer", "copy.ema")
DIRECT = ("loss.direct",)  # a backward of a loss on the parameter alone
FREEZES = ("freeze.off", "freeze.on", "freeze.module")
HABITS = (
    *READS,
    *WRITES,
    *HOOKS,
    *ATTRIBUTES,
    *OPTIMIZERS,
    *ZEROS,
    *CLIPS,
    *COPIES,
    *FREEZES,
    *DIRECT,
)
_DRAWN = (
    "plain",
    "norm_head",
    "emb_head",
    "root",
    "nested",
    "hsdp",
    "tp",
    "offloaded",
    "self_gathering",
)
UNITS = (*_DRAWN, "hybrid", "zero1")  # the optimizer is sharded over two nodes: of two ranks, of one rank
PARAMS = (
    "emb.weight",
    "blocks.0.up.weight",
    "blocks.0.up.bias",
    "blocks.0.code",
    "blocks.1.down.weight",
    "norm.weight",
    "head.weight",
)
PLACES = ("blocks.0 begins", "blocks.0 ends", "blocks.1 begins", "blocks.1 ends", "root begins", "root ends")


@dataclass(frozen=True, repr=False)
class Event(Printed):
    """What a user does once.

    Args:
        moment: one of `MOMENTS`.
        habit: one of `HABITS`.
        target: a parameter of `PARAMS`; "all".
        handle: how the user holds the parameter: "now" (looked up at that moment), "kept" (since it was sharded),
            "full" (since it was gathered once).
        step: in which step.
        place: of a moment in forward or backward: one of `PLACES`; in backward the gradient of that place has come.
        alone: on rank 0 only.
    """

    moment: str = "sharded"
    habit: str = "read.sum"
    target: str = "blocks.0.up.weight"
    handle: str = "now"
    step: int = 0
    place: str = "blocks.0 begins"
    alone: bool = False

    @property
    def kind(self) -> str:
        """The first word of the habit."""
        return self.habit.partition(".")[0]

    @property
    def meets(self) -> bool:
        """Whether one rank starts a collective that others do not start."""
        is_sharded = self.moment in ("sharded", "middle", "micros", "graded") or self.handle == "kept"
        communicates = self.habit in (
            "read.sum",
            "read.full",
            "read.grad",
            "clip.norm",
            "clip.hand",
            "copy.state",
        )
        return self.alone and is_sharded and communicates

    @property
    def writes(self) -> bool:
        """Whether values of parameters change."""
        return self.habit in WRITES


@dataclass(frozen=True, repr=False)
class Program(Printed):
    """A model, how it is sharded, the loop, and what the user does beside it.

    Args:
        unit: one of `UNITS`: which modules are units, over which mesh, and how they gather.
        events: see there.
        tied: whether the head's matrix is the embedding's.
        reshard: reshard_after_forward.
        reader: who reads a weight of the root besides its modules: "hook" (of a block's gradient), "function" (an
            autograd function's backward), "recompute", "reentrant"; "" nobody.
        reads: whose weight: "emb", "head".
        reads_at: in which block.
        loss: "output", "fused" (the root computes it by the head's weight), "chunked" (so in parts, recomputed),
            "aside" (on a tensor that the model keeps), "both", "view" (the output is a view, and changed in place),
            "by_hand" (an autograd function computes the head's gradients in its forward), "early" (a backward inside
            of the forward).
        tiles: whether a block computes its rows in two parts, each recomputed (reentrant).
        penalty: whether gradients of the loss by inputs are a part of the loss.
        backward: "once", "twice" (with retain_graph), "ahead" (forwards of all micro-batches first).
        max_norm: whether the embedding renormalizes its rows.
        micros: number of micro-batches.
        sync: how all but the last are: "sync", "no_sync", "no_all_reduce" (over replicas).
        optimizer: "sgd", "adamw", "foreach".
        clips: "", "norm", "value".
        zeros: what follows the optimizer: "optimizer", "model", "keep" (set_to_none=False), "nothing".
        breaks: an exception in the first micro-batch of step 0: "", "forward", "backward".
        resets: whether reset_iter_state follows it.
        closes: whether reshard() follows unshard() before a forward.
        stays: set_reshard_after_backward(False) until the last micro-batch of a step.
        evaluates: whether each step begins with a forward without gradients.
        steps: number of steps.
    """

    unit: str = "plain"
    events: tuple[Event, ...] = ()
    tied: bool = False
    reshard: bool | None = None
    reader: str = ""
    reads: str = "head"
    reads_at: int = 0
    loss: str = "output"
    tiles: bool = False
    penalty: bool = False
    backward: str = "once"
    max_norm: bool = False
    micros: int = 1
    sync: str = "sync"
    optimizer: str = "sgd"
    clips: str = ""
    zeros: str = "optimizer"
    breaks: str = ""
    resets: bool = False
    closes: bool = True
    stays: bool = False
    evaluates: bool = False
    steps: int = 2

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the mesh."""
        return {"hsdp": (2, 2), "hybrid": (2, 2), "tp": (2, 2), "zero1": (2, 1)}.get(self.unit, (2,))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)

    def replica(self, rank: int) -> int:
        """Which inputs a rank has."""
        return rank // 2 if self.unit == "tp" else rank

    @property
    def is_alone(self) -> bool:
        """Whether one rank does what others do not."""
        return any(event.alone for event in self.events)

    @property
    def factors(self) -> list[str]:
        """What a table counts a program under."""
        named = [f"unit {self.unit}"]
        named += [f"moment {event.moment}" for event in self.events]
        named += [f"habit {event.kind}" for event in self.events]
        named += [f"handle {event.handle}" for event in self.events]
        named += ["one rank alone"] * self.is_alone
        named += [f"reader {self.reader}"] * bool(self.reader)
        named += [f"loss {self.loss}", f"backward {self.backward}"]
        for name in ("tied", "tiles", "penalty", "max_norm", "stays", "evaluates"):
            named += [name] * bool(getattr(self, name))
        named += [f"breaks {self.breaks}"] * bool(self.breaks)
        return sorted(set(named))

    def __str__(self) -> str:
        """As it is pasted."""
        text = (
            repr(self)
            .replace("events=(Event(", "events=(\n        Event(")
            .replace("), Event(", "),\n        Event(")
        )
        return text.replace(")), ", "),\n    ), ").replace("),), ", "),\n    ), ")


def is_sound(program: Program) -> bool:
    """Whether plain training defines what a program does, and ranks agree about it."""
    habits = {event.habit for event in program.events}
    return all(_is_sound_event(program, event) for event in program.events) and not any(
        (
            {"optimizer.new", "optimizer.group"} <= habits,  # of which the second has the parameter already
            program.tied and program.unit in ("norm_head", "self_gathering"),
            program.reads == "emb" and program.unit == "emb_head",
            program.max_norm and program.tied,
            program.unit == "tp"
            and program.penalty,  # torch's tensor parallelism has wrong second derivatives
            program.unit == "tp" and any(event.alone and not event.meets for event in program.events),
            program.penalty and (program.reader == "reentrant" or program.tiles),
            program.penalty and program.loss in ("aside", "chunked", "by_hand", "early"),
            program.sync == "no_all_reduce" and (not _replicates(program) or program.micros == 1),
            program.backward == "ahead" and (program.micros == 1 or bool(program.breaks)),
            program.backward == "twice" and (program.reader in ("recompute", "reentrant") or program.tiles),
            program.backward == "twice" and program.loss == "chunked",
            program.zeros == "nothing" and program.optimizer != "sgd",
        )
    )


def _replicates(program: Program) -> bool:
    return program.unit in ("hsdp", "hybrid", "zero1")


def _is_sound_event(program: Program, event: Event) -> bool:
    in_pass = event.moment in ("forward", "backward")
    return event.step < program.steps and not any(
        (
            event.moment == "micros" and program.micros == 1,
            event.moment == "broken" and (not program.breaks or event.step > 0),
            event.moment == "before" and (event.handle != "now" or event.step > 0),
            event.moment == "before" and (event.kind in ("zero", "clip") or event.habit == "optimizer.step"),
            event.habit == "read.grad" and event.moment not in ("sharded", "gathered_graded", "graded"),
            event.kind == "clip" and event.moment not in ("gathered_graded", "graded", "micros"),
            event.kind == "clip" and event.moment == "micros" and program.sync != "sync",
            event.habit in ("optimizer.new", "optimizer.group") and in_pass,
            event.habit == "optimizer.group"
            and (event.moment == "before" or event.target in ("all", "blocks.0.code")),
            event.kind == "zero" and event.moment == "backward",
            event.habit in ("copy.model", "copy.state", "copy.optimizer", "load", "optimizer.step")
            and in_pass,
            event.habit == "optimizer.step" and event.moment not in ("middle", "micros"),
            event.habit == "optimizer.step" and event.moment == "micros" and program.sync != "sync",
            event.habit == "optimizer.step"
            and event.moment == "middle"
            and (program.zeros != "nothing" or event.step == 0),
            # torch's own DTensors over two meshes, in one operator
            event.habit == "copy.ema" and program.unit == "tp",
            event.habit == "freeze.on" and event.target != "blocks.0.code",
            # plain training has a gradient for each part that is recomputed, sharded training one
            event.habit.startswith("hook.after") and (program.tiles or program.reader == "reentrant"),
            event.kind == "hook" and event.target in ("all", "blocks.0.code"),
            # which hooks have run before an exception depends on autograd's order
            event.habit.startswith("hook.after") and program.breaks == "backward",
            # torch's `parallelize_module` makes new Parameters, without hooks
            event.kind == "hook" and event.moment == "before" and program.unit == "tp",
            # dropped at the next pass, reshard or step: this loop reads the sharded gradient before
            event.kind == "zero" and event.handle == "full" and event.moment == "graded",
            event.kind in ("read", "write", "data", "loss") and event.target == "all",
            event.kind == "loss" and (in_pass or event.moment == "before"),
            event.habit in ("write.row", "data.row", "read.rows") and event.target.endswith(("bias", "code")),
            event.handle == "full"
            and event.kind in ("read", "write", "data", "copy", "loss")
            and "gathered" not in event.moment,
            event.alone and not event.meets and not _may_be_alone(program, event),
        )
    )


def _may_be_alone(program: Program, event: Event) -> bool:
    """Whether one rank can do it without a collective."""
    is_full = "gathered" in event.moment or (
        event.moment == "forward" and _owner(event.place) == _owner(event.target)
    )
    if event.habit in ("hook.mask", "hook.record", "hook.removed"):
        return True
    if event.kind == "zero":
        return event.moment == "micros" and program.sync == "no_sync"
    # Ranks do not notice the first write through .data by one rank alone, and take writes for different that change
    # nothing (`kept.WRONG`).
    is_noticed = event.kind in ("read", "write") or event.habit == "data.set"
    is_noticed = is_noticed and event.habit != "write.mask"
    return event.handle == "now" and is_full and is_noticed and event.habit != "read.grad"


def _owner(name: str) -> str:
    return ".".join(name.split(" ")[0].split(".")[:2]) if name.startswith("blocks") else "root"


def draw(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(f"habits {seed}")
    while True:
        program = _draw(dice)
        if is_sound(program):
            break
    other = random.Random(
        f"nodes {seed}"
    ).random()  # of its own, so that the rest of the programs stays as it was
    if program.unit == "hsdp" and other < 0.6:
        return replace(program, unit="hybrid")
    if program.unit == "plain" and not program.is_alone and other < 0.1:
        return replace(program, unit="zero1")
    return program


def _draw(dice: random.Random) -> Program:
    def often(share: float, *choices: Any) -> Any:
        """The first choice is the default; another one with this probability."""
        return dice.choice(choices[1:]) if dice.random() < share else choices[0]

    micros = often(0.4, 1, 2)
    program = Program(
        unit=often(0.7, *_DRAWN),
        tied=dice.random() < 0.25,
        reshard=often(0.3, None, True, False),
        reader=often(0.3, "", "hook", "function", "recompute", "reentrant"),
        reads=dice.choice(("head", "emb")),
        reads_at=dice.choice((0, 1)),
        loss=often(0.4, "output", "fused", "chunked", "aside", "both", "view", "by_hand", "early"),
        tiles=dice.random() < 0.1,
        penalty=dice.random() < 0.1,
        backward=often(0.2, "once", "twice", "ahead"),
        max_norm=dice.random() < 0.08,
        micros=micros,
        sync=often(0.5, "sync", "no_sync", "no_all_reduce") if micros > 1 else "sync",
        optimizer=often(0.4, "sgd", "adamw", "foreach"),
        clips=often(0.25, "", "norm", "value"),
        zeros=often(0.4, "optimizer", "model", "keep", "nothing"),
        breaks=often(0.15, "", "forward", "backward"),
        resets=dice.random() < 0.75,
        closes=dice.random() < 0.8,
        stays=micros > 1 and dice.random() < 0.3,
        evaluates=dice.random() < 0.12,
        steps=often(0.3, 2, 3),
    )
    events = tuple(_event(dice, program) for _ in range(often(0.4, 1, 0, 2, 2)))
    return replace(program, events=events)


def _event(dice: random.Random, program: Program) -> Event:
    kinds = (
        READS,
        WRITES,
        WRITES,
        HOOKS,
        HOOKS,
        ATTRIBUTES,
        OPTIMIZERS,
        ZEROS,
        CLIPS,
        COPIES,
        FREEZES,
        DIRECT,
    )
    while True:
        habit = dice.choice(dice.choice(kinds))
        if habit == "optimizer.step" and program.micros > 1 and program.sync == "sync":
            return Event(moment="micros", habit=habit, step=dice.randrange(program.steps))
        on_all = habit in (
            "clip.norm",
            "clip.value",
            "clip.hand",
            "load",
            "copy.model",
            "copy.state",
            "copy.optimizer",
        )
        event = Event(
            moment=dice.choice(MOMENTS),
            habit=habit,
            target="all" if on_all or habit.startswith(("zero", "optimizer.new")) else dice.choice(PARAMS),
            handle=dice.choice(("now", "now", "now", "kept", "full")),
            step=dice.randrange(program.steps),
            place=dice.choice(PLACES),
            alone=dice.random() < 0.1,
        )
        event = _tidy(event)
        if _is_sound_event(program, event) and not event.meets:
            return event


def _tidy(event: Event) -> Event:
    """Fields that do not matter are at their defaults."""
    default = Event()
    if event.moment not in ("forward", "backward"):
        event = replace(event, place=default.place)
    if event.moment in ("before", "broken"):
        event = replace(event, step=0)
    if event.habit == "freeze.on":
        event = replace(event, target="blocks.0.code")
    return event


def smaller(program: Program) -> Iterator[Program]:
    """Programs with an event less, or one thing at its default."""
    for place in range(len(program.events)):
        yield replace(program, events=program.events[:place] + program.events[place + 1 :])
    for candidate in _simpler(program):
        if is_sound(candidate):
            yield candidate
    for place, event in enumerate(program.events):
        for simple in _simpler(event):
            candidate = replace(
                program, events=(*program.events[:place], _tidy(simple), *program.events[place + 1 :])
            )
            if candidate != program and is_sound(candidate):
                yield candidate


def _simpler(value: Any) -> Iterator[Any]:
    for field in fields(value):
        if field.name not in ("events", "moment", "habit") and getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})
