"""Processes of a running job are killed in every phase; the others go on, with the bits of a restarted job.

``FAULTS=all`` runs 100 cells of phase, victims and replacement, in an order drawn by ``FAULTS_SEED``.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from tests.vescale_fsdp.elastic.killed_ranks import Cell, drawn, launch, prove_equal, step_of

_ALL = os.environ.get("FAULTS") == "all"
_SEED = int(os.environ.get("FAULTS_SEED", "0"))

CORE = [Cell("transit", "node", True)]
# A kill at the end must be the last cell of its job.
END = [Cell("formation", "rank", True), Cell("forward", "rank", True), Cell("finish", "rank", False)]
FAULTS = [
    Cell("backward", "node", False),
    Cell("optimizer", "rank", False),
    Cell("wait", "rank", True),
    Cell("connect", "two", True),
    Cell("renewal", "node", True),
    Cell("restore", "two", False),
    Cell("finish", "node", True),
]


@pytest.mark.parametrize(
    "cells",
    [
        CORE,
        *(
            pytest.param(cells, marks=pytest.mark.part("faults"))
            for cells in (END, FAULTS, *(drawn(_SEED) if _ALL else []))
        ),
    ],
    ids=lambda cells: str(len(cells)),
)
@pytest.mark.timeout(900 if _ALL else 300)
def test_the_others_go_on(tmp_path: Path, cells: list[Cell]) -> None:
    """Every step counts once; losses and the final state have the bits of a job restarted from the same steps."""
    num_steps = step_of(len(cells) - 1) + 4
    launch(tmp_path, cells, num_steps, limit_s=600 if _ALL else 240)

    marks = {mark.name for mark in tmp_path.glob("cell-*")}
    expected = {
        f"cell-{number}-{slot}"
        for number, cell in enumerate(cells)
        for slot in (*cell.trigger(number), *cell.victims(number))
    }
    assert marks == expected
    epochs = prove_equal(tmp_path, num_steps)
    assert epochs[0].tier == "start" and not any(epoch.tier == "start" for epoch in epochs[1:])
    for before, after in pairwise(epochs):
        if after.tier == "disk":
            # Replacements that come when the others have finished have nobody's memory.
            assert not before.processes & after.processes, (before, after)
            assert before.last_begun == num_steps - 1, (before, after)
        else:
            # Before a step begins, the copies of the step before have been made: no more than that is done twice.
            assert (after.tier, after.step >= before.last_begun - 1) == ("ram", True), (before, after)
