"""Ranks of a running job are killed with SIGKILL; those that live go on, with the bits of a restarted job.

``FAULTS=all`` runs twenty kills more, at places and moments drawn by ``FAULTS_SEED``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.elastic_ranks import PLACES, Death, Seen, launch, prove_equal

_ALL = os.environ.get("FAULTS") == "all"
_SEED = int(os.environ.get("FAULTS_SEED", "0"))


def _prove_nothing_lost(epochs: list[Seen]) -> None:
    """Each epoch goes on from memory, at most one step behind what had begun: the step before has its copies."""
    for before, after in zip(epochs, epochs[1:], strict=False):
        assert after.tier == "ram"
        assert after.step >= before.last_begun - 1


@pytest.mark.timeout(300)
def test_survivors_go_on(tmp_path: Path) -> None:
    """Rank 0 dies in its optimizer's step, another while those left recover; both are replaced; a clique is lost."""
    steps = 18
    deaths = [
        Death(0, 4, "optimizer", 4),
        Death(2, 4, "restore", 3),
        Death(2, 12, "forward", 4),
        Death(3, 12, "forward", 4),
    ]
    assert launch(tmp_path, 4, steps, deaths) == len(deaths)

    epochs = prove_equal(tmp_path, steps)
    assert {seen.world for seen in epochs} >= {4, 2}
    assert epochs[-1].tier == "disk" and epochs[-1].step in (
        4,
        8,
        12,
    )  # ranks 2 and 3 kept each other's copies
    _prove_nothing_lost(epochs[:-1])


def _drawn() -> list[Death]:
    """Any rank, rank 0 at least four times; at least four in the optimizer's step, others wherever."""
    drawn = random.Random(_SEED)
    places = [*(["optimizer"] * 4), *(drawn.choice(PLACES[:5]) for _ in range(16))]
    ranks = [*([0] * 4), *(drawn.randrange(4) for _ in range(16))]
    drawn.shuffle(places)
    drawn.shuffle(ranks)
    pairs = zip(ranks, places, strict=True)
    return [Death(rank, 4 + 8 * number, place, 4) for number, (rank, place) in enumerate(pairs)]


# In `make test` one: rank 0, while it saves.
@pytest.mark.parametrize("deaths", [_drawn() if _ALL else [Death(0, 3, "save", 4)]], ids=len)
@pytest.mark.timeout(3600)
def test_no_step_is_lost(tmp_path: Path, deaths: list[Death]) -> None:
    """Killed one after another, each replaced once the others have gone on."""
    steps = deaths[-1].step + 4
    assert launch(tmp_path, 4, steps, deaths, limit_s=3000) == len(deaths)

    epochs = prove_equal(tmp_path, steps)
    assert len(epochs) > len(deaths) and {seen.world for seen in epochs} >= {3, 4}
    _prove_nothing_lost(epochs)
