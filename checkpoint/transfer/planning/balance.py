"""Which of several ranks that hold the same items sends them: levelled loads, few messages, nothing to exchange.

Ranks that hold the same part of a tensor are a *set*. All that the ranks of a target want from a set, one after the
other in rank order, is a line of bytes. The line is cut into one stretch per rank of the set:

    set (0, 4), wanted by ranks 8, 9, 10       8888888899999999....10101010
    loads 0 and 0, so equal stretches          000000000000|444444444444444

so a rank sends to few others, and at most one of them gets a tensor from two. Where sets overlap, stretches are
chosen such that no rank sends what a less loaded one could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Ranks = tuple[int, ...]
Shares = Mapping[Ranks, tuple[int, ...]]

_MAX_ROUNDS = 200
_TOLERANCE_BYTES = 64


def equal_shares(nbytes: int, count: int) -> tuple[int, ...]:
    """Bytes that each of several ranks sends."""
    return tuple(nbytes * (place + 1) // count - nbytes * place // count for place in range(count))


def levelled_shares(wanted: Mapping[Ranks, int]) -> dict[Ranks, tuple[int, ...]]:
    """Bytes that each rank of each set sends, such that loads are as level as they can be.

    One set after the other is levelled beside what the others leave on its ranks, until nothing moves: a descent on
    the sum of squared loads, which is convex.

    Args:
        wanted: bytes wanted from each set.

    Returns:
        For each set, one number per rank, which add up to what is wanted.
    """
    shares = {ranks: equal_shares(nbytes, len(ranks)) for ranks, nbytes in wanted.items()}
    loads: dict[int, int] = {}
    for ranks, sent in shares.items():
        for rank, nbytes in zip(ranks, sent, strict=True):
            loads[rank] = loads.get(rank, 0) + nbytes
    several = [ranks for ranks in shares if len(ranks) > 1]
    for _ in range(_MAX_ROUNDS):
        moved = 0
        for ranks in several:
            others = [loads[rank] - nbytes for rank, nbytes in zip(ranks, shares[ranks], strict=True)]
            level = [loads[rank] for rank in ranks]
            if max(level) - min(level) <= _TOLERANCE_BYTES:
                continue
            found = _filled(others, wanted[ranks])
            moved = max(moved, *(abs(a - b) for a, b in zip(found, shares[ranks], strict=True)))
            shares[ranks] = found
            for rank, other, nbytes in zip(ranks, others, found, strict=True):
                loads[rank] = other + nbytes
        if moved <= _TOLERANCE_BYTES:
            break
    return shares


def _filled(loads: Sequence[int], nbytes: int) -> tuple[int, ...]:
    """What is poured on each load, the lowest first, like water."""
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    poured = [0] * len(loads)
    for count in range(1, len(order) + 1):
        under = order[:count]
        volume = sum(loads[place] for place in under) + nbytes
        if count == len(order) or volume <= loads[order[count]] * count:
            level, spare = divmod(volume, count)
            for number, place in enumerate(under):
                poured[place] = level + (number < spare) - loads[place]
            break
    return tuple(poured)
