"""Where parameters lie in the flat tensors that ZeRO's ranks hold of them.

    ZeRO-1, 2   one row of all parameters of a group, cut into a part per rank; parts may end inside a parameter
                a a a a|a b b b|b c . .          ranks 0, 1, 2; the end is padding, which is not stored

    ZeRO-3      each parameter is cut into a part per rank, of equal size, the last ones padded; a rank's parts make
                its row, which is stored in several tensors
                rank 0  a a a b b c      rank 1  a a . b b c      rank 2  . . . b . .

Pure arithmetic: numbers of elements in, runs out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class FlatRun(NamedTuple):
    """Elements of a parameter, one after the other, in one of a rank's flat tensors.

    Args:
        first: the run's first element, in the flattened parameter.
        numel: how many.
        rank: whose.
        part: which of the rank's tensors.
        start: where in it.
    """

    first: int
    numel: int
    rank: int
    part: int
    start: int


def runs_of_groups(
    numels: Sequence[int], paddings: Sequence[int], group: int, parts: Sequence[int]
) -> list[list[FlatRun]]:
    """Runs of each parameter of one group of ZeRO-1 or 2.

    Args:
        numels: of its parameters, in their order in the row.
        paddings: elements behind each.
        group: its number, which is that of the ranks' tensors.
        parts: elements that each rank holds.

    >>> runs_of_groups([5, 4], [0, 0], 0, [4, 4, 1])[1]
    [FlatRun(first=0, numel=3, rank=1, part=0, start=1), FlatRun(first=3, numel=1, rank=2, part=0, start=0)]
    """
    found, at, ends = [], 0, list(accumulate(parts))
    for numel, padding in zip(numels, paddings, strict=True):
        cut = _cut(ends, at, at + numel)
        found.append(
            [FlatRun(low - at, high - low, rank, group, low - start) for rank, start, low, high in cut]
        )
        at += numel + padding
    return found


def runs_of_parameters(numels: Sequence[int], ranks: int, parts: Sequence[int]) -> list[list[FlatRun]]:
    """Runs of each parameter of ZeRO-3.

    Args:
        numels: of all parameters, in their order in the rows.
        ranks: how many share each.
        parts: elements of each tensor that a rank's row is stored in.

    >>> runs_of_parameters([5, 5], 3, [4])[1][2]
    FlatRun(first=4, numel=1, rank=2, part=0, start=2)
    """
    found, at, ends = [], 0, list(accumulate(parts))
    for numel in numels:
        share = -(-numel // ranks)
        runs: list[FlatRun] = []
        for rank in range(ranks):
            first, held = rank * share, min(share, numel - rank * share)
            cut = _cut(ends, at, at + held)
            runs += [
                FlatRun(first + low - at, high - low, rank, n, low - start) for n, start, low, high in cut
            ]
        found.append(runs)
        at += share
    return found


def padded_ends(numel: int, align: int) -> int:
    """A number of elements with padding at the end.

    >>> padded_ends(9, 4)
    12
    """
    return -(-numel // align) * align


def _cut(ends: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """A range of tensors that lie one after the other and end there: (number, where it begins, from, to) of each."""
    number = bisect_right(ends, low)
    while low < high and number < len(ends):
        yield number, ends[number - 1] if number else 0, low, min(high, ends[number])
        low, number = ends[number], bisect_right(ends, ends[number])
