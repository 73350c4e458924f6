"""Samples of faults: in which every two values of their factors meet, or the few of them that `make test` runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.faults.fault_matrix import Cell


def every_pair(cell: Cell) -> set[Any]:
    """Every two values of the cell's factors."""
    return set(itertools.combinations(cell.factors, 2))


def core_pairs(cell: Cell) -> set[Any]:
    """Call, way and error, each with rank and moment; and the setting, which is way and store."""
    values = dict(cell.factors)
    pairs = itertools.product(("call", "way", "error"), ("rank", "after"))
    return {cell.setting, *((first, values[first], second, values[second]) for first, second in pairs)}


def sample(cells: Sequence[Cell], pairs_of: Callable[[Cell], set[Any]], limit: int, seed: int) -> list[Cell]:
    """At most ``limit`` cells in which all pairs meet that meet in any cell; which cells is drawn at random."""
    drawn = random.Random(seed)
    pool = list(cells)
    drawn.shuffle(pool)
    pairs = {cell: pairs_of(cell) for cell in pool}
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
