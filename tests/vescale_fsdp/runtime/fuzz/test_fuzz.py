"""Random programs train as plain data parallelism does; a failure prints the program, ready to be kept.

    make test-fuzz SEEDS=1000 START=0

FSDP2 is no reference here: where the two differed on programs like these, it was wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch

from tests.support.distributed import RankError, run_threads
from tests.vescale_fsdp.runtime.fuzz.kept import CURED, WRONG
from tests.vescale_fsdp.runtime.fuzz.mutants import MUTANTS, Mutant
from tests.vescale_fsdp.runtime.fuzz.plain import check
from tests.vescale_fsdp.runtime.fuzz.program import Program, draw
from tests.vescale_fsdp.runtime.fuzz.sharded import run
from vescale_fsdp.runtime.comm.dbuffer import DBuffer

START, SEEDS = int(os.environ.get("START", "0")), int(os.environ.get("SEEDS", "60"))
CORE = 26  # so many of them run in every `make test`

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of programs that are odd on purpose


@contextmanager
def nan_buffers() -> Iterator[None]:
    """Buffers begin with NaN whenever they take memory."""
    allocate = DBuffer.allocate

    def allocated(buffer: DBuffer) -> None:
        is_new = buffer.flat.untyped_storage().nbytes() == 0
        allocate(buffer)
        if is_new:
            with torch.no_grad():
                buffer.flat.fill_(torch.nan)

    with mock.patch.object(DBuffer, "allocate", allocated):
        yield


def wrongs(
    program: Program, timeout_s: float = 60.0, mistake: AbstractContextManager[object] | None = None
) -> list[str]:
    with TemporaryDirectory() as folder, nan_buffers(), mistake or nullcontext():
        seen = [
            run_threads(part.world, run, part, steps, Path(folder), timeout_s=timeout_s)
            for part, steps in program.parts
        ]
    return check(program, seen)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.part("numerics") if seed >= START + CORE else ())
        for seed in range(START, START + SEEDS)
    ],
)
def test_a_random_program_trains_as_plain_data_parallelism(seed: int) -> None:
    """Losses, gradients, norms, weights and optimizer state after every micro-batch and step, on every rank."""
    program = draw(seed)
    try:
        found = wrongs(program)
    except AssertionError as error:
        pytest.fail(f"seed {seed}\n{program}\n{error}")
    assert found == [], f"seed {seed}\n{program}"


@pytest.mark.parametrize("name", CURED)
def test_programs_that_were_wrong(name: str) -> None:
    """Each was found by a seed, and is right since."""
    assert wrongs(CURED[name]) == []


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="see kept.py")
def test_programs_that_are_wrong(name: str) -> None:
    """Each becomes a program that was wrong with its cure."""
    assert wrongs(WRONG[name], timeout_s=2.0) == []


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mistake_is_found(mutant: Mutant) -> None:
    """Negative control: the program is right, and with the mistake it is wrong or does not come through."""
    assert wrongs(mutant.program) == []
    try:
        found = wrongs(mutant.program, mistake=mutant.patch())
    except RankError:
        return
    assert found != []


def test_programs_are_all_different_and_meet_everything() -> None:
    """No field is left at its default by the seeds that always run, and every program prints what makes it anew."""
    programs = [draw(seed) for seed in range(CORE)]
    assert len(set(programs)) == CORE
    for program in programs:
        names = {kind.__name__: kind for kind in (Program, *map(type, (*program.blocks, *program.steps)))}
        names |= {type(micro).__name__: type(micro) for step in program.steps for micro in step.micros}
        assert eval(str(program), names) == program
    for name, default in vars(Program()).items():
        assert any(getattr(program, name) != default for program in programs), name
