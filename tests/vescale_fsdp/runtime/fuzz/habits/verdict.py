"""What became of a program on each engine, and whether that is right.

========================  =====================================  ===================================================
plain training            this library                           verdict
========================  =====================================  ===================================================
runs                      sees the same on every rank            right
runs                      raises what `allowed.py` lists         allowed, unless FSDP2 sees the same as plain training
raises                    raises                                 right
ranks end up different    raises on all ranks                    right; anything else has no reference
anything                  an error about freed storage, a hang,  wrong
                          an error on one rank only
========================  =====================================  ===================================================
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.support.distributed import RankError, RankTimeout, run_ranks, run_threads
from tests.support.meetings import short_waits
from tests.vescale_fsdp.runtime.fuzz.habits.allowed import LIMITS, Limit
from tests.vescale_fsdp.runtime.fuzz.habits.engines import ENGINES
from tests.vescale_fsdp.runtime.fuzz.habits.loop import Loop, Seen
from tests.vescale_fsdp.runtime.fuzz.habits.program import Program, smaller
from vescale_fsdp.errors import VescaleError

RANKS_TOGETHER_S = 2.0  # how long the others may take to raise, once one rank has raised
TIMEOUT_S = {"plain": 20.0, "ours": 20.0, "fsdp2": 10.0}
ALONE_S = 1.0  # in place of the 30 s after which ranks that differ raise
ALONE_TIMEOUT_S = 15.0
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


@dataclass
class Rank:
    """What became of one rank.

    Attributes:
        error: what it raised, if it did so by itself.
        is_victim: whether another rank's end ended it.
    """

    seen: Seen = field(default_factory=dict)
    place: str = ""
    error: BaseException | None = None
    text: str = ""
    is_victim: bool = False
    ended: bool = False


class Outcome(NamedTuple):
    """What became of a program on an engine."""

    ranks: Sequence[Rank]
    hangs: bool

    @property
    def errors(self) -> list[BaseException]:
        """What ranks raised by themselves."""
        return [rank.error for rank in self.ranks if rank.error is not None]

    @property
    def is_about_storage(self) -> bool:
        """Whether a raw error of torch about a freed buffer reached the user."""
        return any("setStorage" in str(error) for error in self.errors)

    @property
    def is_alone(self) -> bool:
        """Whether some ranks raised, and others waited for them."""
        return bool(self.errors) and any(
            rank.error is None and (rank.is_victim or not rank.ended) for rank in self.ranks
        )


class _Race:
    """Which rank ends first in an error."""

    def __init__(self, world: int) -> None:
        self.ranks = [Rank() for _ in range(world)]
        self.is_released = threading.Event()
        self._ends = [threading.Event() for _ in range(world)]

    def end(self, rank: int) -> None:
        """A rank has ended."""
        self.ranks[rank].ended = True
        self._ends[rank].set()

    def wait(self) -> None:
        """Wait until all ranks have ended by themselves, or are held to wait for this one."""
        deadline = time.monotonic() + RANKS_TOGETHER_S
        for end in self._ends:
            end.wait(max(0.0, deadline - time.monotonic()))
        self.is_released.set()


def _run(program: Program, engine: str, race: _Race) -> None:
    number = dist.get_rank()
    rank, loop = race.ranks[number], Loop(program, ENGINES[engine]())
    rank.seen = loop.seen
    try:
        loop.run()
    except BaseException as error:
        rank.is_victim = race.is_released.is_set()
        rank.error = None if rank.is_victim else error
        rank.place, rank.text = loop.place, traceback.format_exc()
        race.end(number)
        race.wait()
        raise
    race.end(number)


def outcome(program: Program, engine: str) -> Outcome:
    """Run a program on an engine."""
    race = _Race(program.world)
    try:
        run_threads(program.world, _run, program, engine, race, timeout_s=TIMEOUT_S[engine])
    except RankTimeout:
        return Outcome(race.ranks, True)
    except RankError:
        pass
    return Outcome(race.ranks, False)


def _run_process(program: Program) -> Rank:
    """This library on one rank that is a process; waits are short."""
    loop, rank = Loop(program, ENGINES["ours"]()), Rank()
    with short_waits(order=ALONE_S, report=ALONE_S):
        try:
            loop.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what became of the rank
            rank.error = error if isinstance(error, VescaleError) else RuntimeError(repr(error))
            rank.place, rank.text = loop.place, traceback.format_exc()
    return replace(rank, seen=loop.seen, ended=True)


def alone(program: Program) -> Outcome:
    """Run a program on this library where one rank starts a collective alone: ranks are processes."""
    try:
        return Outcome(run_ranks(program.world, _run_process, program, timeout_s=ALONE_TIMEOUT_S), False)
    except RankError as error:  # a process died
        return Outcome([Rank(error=error, text=str(error), ended=True) for _ in range(program.world)], False)
    except RankTimeout as error:
        return Outcome([Rank(text=str(error)) for _ in range(program.world)], True)


def difference(found: Outcome, plain: Outcome) -> str:
    """The first label whose values differ, in the order in which plain training saw them; "" if none."""
    for rank, (mine, reference) in enumerate(zip(found.ranks, plain.ranks, strict=True)):
        for label in (*reference.seen, *mine.seen):
            ours, theirs = mine.seen.get(label, []), reference.seen.get(label, [])
            if len(ours) != len(theirs):
                return f"{label} on rank {rank}: {len(ours)} times, not {len(theirs)}"
            for time_, (value, right) in enumerate(zip(ours, theirs, strict=True)):
                if value.shape != right.shape or not torch.allclose(value.double(), right.double(), **CLOSE):
                    return f"{label} on rank {rank}, its time {time_}"
    return ""


def replicas_agree(plain: Outcome) -> bool:
    """Whether all ranks of plain training have ended up with the same weights."""
    first = plain.ranks[0].seen
    labels = [label for label in first if label.startswith("weight ")]
    return all(
        torch.allclose(rank.seen[label][0], first[label][0], **CLOSE)
        for rank in plain.ranks
        for label in labels
    )


class Told(NamedTuple):
    """What became of a program on an engine, beside plain training.

    Attributes:
        end: "right", "differs", "raises", "hangs", "goes on" (plain training raises), "not run".
        what: the first label that differs, or the class of the error.
        place: what the loop did.
        storage: whether the error is a raw one about a freed buffer.
        alone: whether some ranks raised, and others waited for them.
    """

    end: str
    what: str = ""
    place: str = ""
    storage: bool = False
    alone: bool = False

    def __str__(self) -> str:
        notes = [" (freed storage)"] * self.storage + [" (some ranks only)"] * self.alone
        return (
            " ".join(filter(None, (self.end, self.what)))
            + (f" at {self.place}" if self.place else "")
            + "".join(notes)
        )

    @property
    def sign(self) -> str:
        """One letter."""
        if self.end == "hangs" or self.alone:
            return "h"
        return "s" if self.storage else "e" if self.end == "raises" else "x"


class Verdict(NamedTuple):
    """Whether a program is right on this library.

    Attributes:
        word: "right", "allowed", "wrong", or "undefined" where plain training gives no reference.
        ours, theirs: what happened on this library and on FSDP2.
        limit: the limit that allows it.
        text: the traceback of the first rank that raised.
    """

    word: str
    ours: Told
    theirs: Told
    limit: Limit | None = None
    text: str = ""

    @property
    def kind(self) -> tuple[object, ...]:
        """What a smaller program has to have in common."""
        error = self.ours.what if self.ours.end == "raises" else ""
        return self.word, self.ours.end, error, self.ours.storage, self.ours.alone

    def __str__(self) -> str:
        return f"{self.word}: ours {self.ours} | FSDP2 {self.theirs}\n{self.text}"


def judge(program: Program, *, engine: str = "ours", always: bool = False) -> Verdict:
    """Run a program on all engines and compare.

    Args:
        engine: which is judged.
        always: run it on FSDP2 even if the verdict does not depend on it.
    """
    plain = outcome(program, "plain")
    meets = any(event.meets for event in program.events)
    # What one rank alone has written is compared by the watch, which ranks that are threads do not have.
    apart = engine == "ours" and any(
        event.alone and (event.meets or event.writes) for event in program.events
    )
    ours = alone(program) if apart else outcome(program, engine)
    told, theirs = _told(ours, plain), Told("not run")
    if (always or told.end != "right") and not meets:  # FSDP2 hangs there, or mixes up values
        theirs = _told(outcome(program, "fsdp2"), plain)
    limit = next((limit for limit in LIMITS if ours.errors and limit.allows(program, ours.errors)), None)
    text = next((rank.text for rank in ours.ranks if rank.error is not None), "")
    return Verdict(_word(program, plain, told, theirs, limit), told, theirs, limit, text)


def _told(found: Outcome, plain: Outcome) -> Told:
    if found.errors:
        place = next(rank.place for rank in found.ranks if rank.error is not None)
        name = type(found.errors[0]).__name__
        return Told("raises", name, place, found.is_about_storage, found.is_alone)
    if found.hangs:
        return Told("hangs")
    if plain.errors:
        return Told("goes on")
    differs = difference(found, plain)
    return Told("differs", differs) if differs else Told("right")


def _word(program: Program, plain: Outcome, ours: Told, theirs: Told, limit: Limit | None) -> str:
    if plain.hangs or plain.is_alone:
        return "undefined"
    # A RankError is a process that has died, in place of an error on all ranks.
    if ours.end == "hangs" or ours.storage or ours.alone or ours.what == RankError.__name__:
        return "wrong"
    if plain.errors:
        return "right" if ours.end == "raises" else "wrong"
    if not replicas_agree(plain):
        must_raise = any(event.alone and event.writes for event in program.events)
        return "right" if ours.end == "raises" else "wrong" if must_raise else "undefined"
    if ours.end == "right":
        return "right"
    return "allowed" if limit and theirs.end != "right" else "wrong"


def shrink(program: Program, verdict: Verdict) -> tuple[Program, Verdict]:
    """The smallest program on the way down that is wrong in the same way."""
    while True:
        for candidate in smaller(program):
            found = judge(candidate)
            if found.kind == verdict.kind:
                program, verdict = candidate, found
                break
        else:
            return program, verdict
