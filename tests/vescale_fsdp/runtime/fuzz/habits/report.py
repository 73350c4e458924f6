"""Tables of what programs do.

``python -m tests.vescale_fsdp.runtime.fuzz.habits.report`` with one of

random SEEDS [START]   wrong programs, shrunk, and shares by factor
grid [UNIT]            every habit at every moment, one event each
walk                   readers, losses and backwards, on all units
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import replace

import torch

from tests.vescale_fsdp.runtime.fuzz.habits.program import (
    HABITS,
    MOMENTS,
    UNITS,
    Event,
    Program,
    draw,
    is_sound,
)
from tests.vescale_fsdp.runtime.fuzz.habits.verdict import Verdict, judge, shrink

LOSSES = ("output", "fused", "chunked", "aside", "both", "view", "by_hand", "early")
SIGNS = {"right": ".", "allowed": "a", "undefined": "u"}


def random_programs(seeds: int, start: int = 0) -> None:
    """Judge the programs of some seeds."""
    words: Counter[str] = Counter()
    factors: dict[str, Counter[str]] = defaultdict(Counter)
    classes: dict[str, list[int]] = defaultdict(list)
    theirs: Counter[str] = Counter()
    begin = time.perf_counter()
    for seed in range(start, start + seeds):
        program = draw(seed)
        verdict = judge(program, always=True)
        words[verdict.word] += 1
        theirs[verdict.theirs.end] += 1
        for factor in program.factors:
            factors[factor][verdict.word] += 1
        if verdict.word == "wrong":
            program, verdict = shrink(program, verdict)
            classes[_line(program, verdict)].append(seed)
        if verdict.word in ("wrong", "undefined"):
            print(f"seed {seed} {verdict.word}: {_line(program, verdict)}", flush=True)
    print(f"\n{seeds} programs in {time.perf_counter() - begin:.0f} s: {dict(words)}; FSDP2 {dict(theirs)}\n")
    print("| factor | programs | right | allowed | wrong | undefined |\n|---|---|---|---|---|---|")
    for factor, counts in sorted(factors.items()):
        shares = " | ".join(str(counts[word]) for word in ("right", "allowed", "wrong", "undefined"))
        print(f"| {factor} | {sum(counts.values())} | {shares} |")
    print()
    for line, found in sorted(classes.items(), key=lambda item: -len(item[1])):
        print(f"{len(found)} x, first seed {found[0]}: {line}")


def grid(unit: str = "plain") -> None:
    """Judge every habit at every moment and by every handle.

    A cell has a sign for "now", "kept" and "full": "." right, "a" an allowed error, "e" another error, "s" one about
    freed storage, "x" silently wrong, "h" a hang, or an error of some ranks only, "u" undefined. A capital: right on
    FSDP2.
    """
    lines: list[str] = []
    print(f"| {unit} | {' | '.join(MOMENTS)} |\n|---|{'---|' * len(MOMENTS)}")
    for habit in HABITS:
        cells = []
        for moment in MOMENTS:
            cell = ""
            for handle in ("now", "kept", "full"):
                program = one(unit, moment, habit, handle)
                if program is None:
                    continue
                verdict = judge(program, always=True)
                cell += _sign(verdict)
                if verdict.word == "wrong":
                    lines.append(_line(program, verdict))
            cells.append(cell)
        print(f"| {habit} | {' | '.join(cells)} |", flush=True)
    print()
    print(*lines, sep="\n")


def walk() -> None:
    """Judge readers, losses and backwards on every unit; signs as of `grid`."""
    rows: dict[str, dict[str, object]] = {
        f"{reader} reads {reads} in block {place}": {"reader": reader, "reads": reads, "reads_at": place}
        for reader in ("hook", "function", "recompute", "reentrant")
        for reads in ("head", "emb")
        for place in (0, 1)
    }
    rows |= {f"loss {loss}": {"loss": loss} for loss in LOSSES}
    rows["tiles"] = {"tiles": True}
    rows |= {
        f"{loss}, twice": {"loss": loss, "backward": "twice"}
        for loss in ("output", "fused", "aside", "view", "early")
    }
    rows |= {
        f"{loss}, ahead": {"loss": loss, "backward": "ahead", "micros": 2}
        for loss in ("output", "fused", "view", "early")
    }
    rows |= {
        f"{loss}, penalty": {"loss": loss, "penalty": True} for loss in ("output", "fused", "both", "view")
    }
    rows["output, penalty, stays"] = {"penalty": True, "reshard": False}
    rows["max_norm"] = {"max_norm": True}
    lines = []
    units = [*UNITS, "plain tied", "emb_head tied"]
    print(f"| | {' | '.join(units)} |\n|---|{'---|' * len(units)}")
    for name, options in rows.items():
        cells = []
        for unit in units:
            program = Program(unit=unit.split()[0], tied="tied" in unit, **options)  # type: ignore[arg-type]
            verdict = judge(program, always=True) if is_sound(program) else None
            cells.append(_sign(verdict) if verdict else "")
            if verdict and verdict.word == "wrong":
                lines.append(_line(program, verdict))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print()
    print(*lines, sep="\n")


def one(unit: str, moment: str, habit: str, handle: str) -> Program | None:
    """The program of one event; None where there is no such one."""
    on_all = habit.startswith(
        ("clip", "load", "copy.model", "copy.state", "copy.optimizer", "zero", "optimizer.new")
    )
    target = "all" if on_all else "blocks.0.code" if habit == "freeze.on" else Event().target
    place = "blocks.0 ends" if moment == "backward" else "blocks.0 begins"
    event = Event(moment=moment, habit=habit, handle=handle, target=target, place=place)
    micros = 2 if moment == "micros" else 1
    if habit == "optimizer.step":
        event = replace(event, step=int(moment == "middle"))
    sync = "no_sync" if micros == 2 and habit.startswith("zero") else "sync"
    breaks = "forward" if moment == "broken" else ""
    zeros = "nothing" if habit == "optimizer.step" else "optimizer"
    program = Program(unit=unit, events=(event,), micros=micros, sync=sync, breaks=breaks, zeros=zeros)
    if handle != "now" and habit.startswith(
        ("load", "copy.model", "copy.state", "copy.optimizer", "optimizer.step")
    ):
        return None
    return program if is_sound(program) and program != replace(program, events=()) else None


def _sign(verdict: Verdict) -> str:
    sign = SIGNS.get(verdict.word, verdict.ours.sign)
    return sign.upper() if verdict.word == "wrong" and verdict.theirs.end == "right" else sign


def _line(program: Program, verdict: Verdict) -> str:
    return f"ours {verdict.ours} | FSDP2 {verdict.theirs} | {program!r}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1] == "walk":
        walk()
    elif sys.argv[1] == "grid":
        grid(*sys.argv[2:])
    else:
        random_programs(*map(int, sys.argv[2:]))
