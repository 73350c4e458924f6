"""What users do to parameters works as in plain training, or ends in an error that the page of limits lists.

    make test-habits SEEDS=2000 START=0
    python -m tests.vescale_fsdp.runtime.fuzz.habits.report random 2000     the same, with tables

FSDP2 is run where this library is not right: an error is not allowed for what FSDP2 does right.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.vescale_fsdp.runtime.fuzz.habits import program as programs
from tests.vescale_fsdp.runtime.fuzz.habits.allowed import LIMITS, Limit, may_raise
from tests.vescale_fsdp.runtime.fuzz.habits.kept import ALONE, CURED, WRONG, WRONG_SEEDS
from tests.vescale_fsdp.runtime.fuzz.habits.program import Event, Program, draw, smaller
from tests.vescale_fsdp.runtime.fuzz.habits.verdict import judge

START, SEEDS = int(os.environ.get("START", "0")), int(os.environ.get("SEEDS", "400"))
LIMITS_PAGE = Path(__file__).parents[5] / "docs/limits.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # of programs that are odd on purpose


@pytest.mark.parametrize("seed", range(START, START + SEEDS))
def test_a_random_program_of_habits_is_right(seed: int) -> None:
    """What the user sees: losses, gradients, norms, what hooks and reads get, and weights at the end, on every rank."""
    program = draw(seed)
    verdict = judge(program)
    is_wrong = verdict.word == "wrong"
    assert is_wrong == (seed in WRONG_SEEDS), f"seed {seed}\n{program}\n{verdict}"


@pytest.mark.parametrize("name", CURED)
def test_programs_that_were_wrong(name: str) -> None:
    """Each is the smallest program of what was once wrong."""
    verdict = judge(CURED[name])
    assert verdict.word in ("right", "allowed"), verdict


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="see kept.py")
def test_programs_that_are_wrong(name: str) -> None:
    """Each becomes a program that was wrong with its cure."""
    verdict = judge(WRONG[name])
    assert verdict.word in ("right", "allowed"), verdict


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_alone_ends_in_an_error_of_all_ranks(name: str) -> None:
    """Or is right: the ranks are processes, because gloo's collectives are what mixes up."""
    verdict = judge(ALONE[name])
    assert verdict.word in ("right", "allowed"), verdict


@pytest.mark.parametrize(
    "program",
    [
        Program(events=(Event("gathered", "write.mul"),)),
        Program(events=(Event("before", "hook.mask"),)),
        Program(events=(Event("before", "attribute"),)),
        Program(events=(Event("middle", "load", "all"),)),
        Program(unit="root", loss="aside"),
        Program(penalty=True),
    ],
    ids=lambda program: repr(program),
)
def test_a_mistake_is_found(program: Program) -> None:
    """Negative control: FSDP2 in this library's place is found wrong where it is."""
    assert judge(program, engine="fsdp2").word == "wrong"


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.sentence[:40])
def test_every_allowed_error_is_on_the_page_of_limits(limit: Limit) -> None:
    """And some program is allowed to end in it, or one in which a rank is alone."""
    page = " ".join(LIMITS_PAGE.read_text().split())
    assert limit.sentence in page
    assert any(limit.applies(program) for program in (*map(draw, range(2000)), *ALONE.values()))


def test_errors_are_allowed_to_few_programs() -> None:
    """Refusing everything is no result: of all programs a seventh may raise, of those of a factor two thirds."""
    drawn = [draw(seed) for seed in range(2000)]
    assert sum(map(may_raise, drawn)) < len(drawn) / 7
    total = Counter(factor for program in drawn for factor in program.factors)
    raising = Counter(factor for program in drawn if may_raise(program) for factor in program.factors)
    shares = {factor: raising[factor] / total[factor] for factor in total}
    assert {factor: share for factor, share in shares.items() if share > 2 / 3} == {}


def test_programs_meet_every_factor_and_print_themselves() -> None:
    """The seeds that always run have every habit, moment and way; a program's text makes it anew."""
    drawn = [draw(seed) for seed in range(400)]
    names = {"Program": Program, "Event": Event}
    for program in drawn:
        assert eval(str(program), names) == eval(repr(program), names) == program
    events = [event for program in drawn for event in program.events]
    assert {event.moment for event in events} == set(programs.MOMENTS)
    assert {event.habit for event in events} == set(programs.HABITS)
    assert {program.unit for program in drawn} == set(programs.UNITS)
    for name, default in vars(Program()).items():
        assert any(getattr(program, name) != default for program in drawn), name


def test_a_program_gets_smaller_until_nothing_is_left() -> None:
    """Every step down leaves something out, so shrinking ends."""
    program = draw(8)
    while rest := list(smaller(program)):
        assert all(len(repr(each)) < len(repr(program)) for each in rest)
        program = rest[-1]
    assert program == Program()
