"""A sample of faults in which every two values of their factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.faults.fault_matrix import Cell


def pairwise(cells: Sequence[Cell], limit: int, seed: int) -> list[Cell]:
    """At most ``limit`` cells in which every two values of factors meet that meet in any; the rest at random."""
    drawn = random.Random(seed)
    pool = list(cells)
    drawn.shuffle(pool)
    pairs = {cell: set(itertools.combinations(cell.factors, 2)) for cell in pool}
    missing = set().union(*pairs.values())
    chosen: list[Cell] = []
    while missing and len(chosen) < limit:
        best = max(drawn.sample(pool, min(len(pool), 400)), key=lambda cell: len(pairs[cell] & missing))
        if not pairs[best] & missing:
            best = next(cell for cell in pool if pairs[cell] & missing)
        missing -= pairs[best]
        chosen.append(best)
    assert not missing, f"{len(missing)} pairs do not fit into {limit} cells"
    return chosen
