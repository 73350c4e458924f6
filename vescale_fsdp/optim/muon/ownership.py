"""Who orthogonalises which matrix: longest processing time first, by Newton-Schulz FLOPs. Integers only.

The same input gives the same owners on every rank and every run, so owners are never communicated and
never saved; after a load on another number of ranks they are simply computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign_owners", "newton_schulz_flops"]


def newton_schulz_flops(rows: int, cols: int, steps: int) -> int:
    """Floating-point operations of ``steps`` quintic iterations on a rows x cols matrix.

    With s the short and l the long side, a step is X X' and B X (2 s s l each) and one A A (2 s s s).
    """
    short, long = sorted((rows, cols))
    return steps * (4 * short * short * long + 2 * short**3)


def assign_owners(
    flops: Sequence[int], held_numels: Sequence[Sequence[int]], fixed_loads: Sequence[int]
) -> list[int]:
    """The owner of each matrix: the heaviest first, each to the rank with the least work so far.

    Args:
        flops: work of each matrix.
        held_numels: elements of each matrix that each rank holds already; among ranks with equally little
            work the one that holds most of the matrix takes it, because what it holds need not travel.
        fixed_loads: work that each rank has anyway (matrices it holds whole).

    Returns:
        One rank per matrix.
    """
    loads = list(fixed_loads)
    owners = [0] * len(flops)
    for index in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        held = held_numels[index]
        owner = min(range(len(loads)), key=lambda rank: (loads[rank], -held[rank], rank))
        owners[index] = owner
        loads[owner] += flops[index]
    return owners
