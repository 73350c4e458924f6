"""Ranks of a running job are killed with SIGKILL; those that live go on, with the bits of a restarted job.

``FAULTS=all`` runs twenty kills more, at places and moments drawn by ``FAULTS_SEED``.
"""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.vescale_fsdp.elastic.killed_ranks import PLACES, Death, launch, prove_equal

_ALL = os.environ.get("FAULTS") == "all"
_SEED = int(os.environ.get("FAULTS_SEED", "0"))


# Rank 0 dies in its optimizer's step, another while those that are left recover; later ranks 2 and 3 at once, which
# keep each other's copies.
CHOSEN = [
    Death(0, 4, "optimizer", 4),
    Death(2, 4, "restore", 3),
    Death(2, 14, "forward", 4),
    Death(3, 14, "forward", 4),
]


def _drawn() -> list[Death]:
    """Any rank, rank 0 at least four times; at least four in the optimizer's step, others wherever."""
    drawn = random.Random(_SEED)
    places = [*(["optimizer"] * 4), *(drawn.choice(PLACES[:5]) for _ in range(16))]
    ranks = [*([0] * 4), *(drawn.randrange(4) for _ in range(16))]
    drawn.shuffle(places)
    drawn.shuffle(ranks)
    pairs = zip(ranks, places, strict=True)
    return [Death(rank, 4 + 8 * number, place, 4) for number, (rank, place) in enumerate(pairs)]


@pytest.mark.parametrize("deaths", [CHOSEN, *([_drawn()] if _ALL else [])], ids=len)
@pytest.mark.timeout(3600 if _ALL else 300)
def test_survivors_go_on(tmp_path: Path, deaths: list[Death]) -> None:
    """Killed ranks are replaced after the others have continued: from memory, or from disk if a clique is lost."""
    steps = deaths[-1].step + 6
    assert launch(tmp_path, 4, steps, deaths, limit_s=3000) == len(deaths)

    epochs = prove_equal(tmp_path, steps)
    assert {seen.world for seen in epochs} >= ({2, 4} if deaths is CHOSEN else {3, 4})
    if deaths is CHOSEN:
        last = epochs.pop()
        # On a slow machine they may die just behind a step that the disk has too: memory's lost half is made of it.
        assert last.world == 2 and last.tier in ("disk", "ram") and last.step in (4, 8, 12, 16)
    assert epochs[0].tier == "start" and len(epochs) > 2
    for before, after in pairwise(epochs):
        # Before a step begins, the copies of the step before have been made: no more than that is done twice.
        assert (after.tier, after.step >= before.last_begun - 1) == ("ram", True)
