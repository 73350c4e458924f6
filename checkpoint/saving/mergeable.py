"""Whether `Resharded` values can be put together again: asked when they are saved, not when other ranks need them.

Every rank sends its parts, some hundred bytes each; the first rank that has a value merges the parts of all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vescale_fsdp.checkpoint.manifest.state_tree import decode
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.state.capture import TakenState
from vescale_fsdp.checkpoint.state.per_rank import Reshardable, leaf_of, pack_blob, unpack_blob
from vescale_fsdp.errors import CheckpointError, some


def prove_mergeable(taken: TakenState, coordinator: Coordinator) -> None:
    """Merge the parts of all ranks as a load on other ranks would, and drop the result. A collective.

    Raises:
        CheckpointError: on all ranks, if a value's ``merge`` raises; names the value and the ranks that have it.
    """
    mine = pack_blob({name: taken.per_rank[name] for name in taken.resharded})
    blobs = coordinator.everyone(mine)
    with coordinator.together("putting the parts of Resharded values together"):
        found = [_values(blob, rank) for rank, blob in enumerate(blobs)] if taken.resharded else []
        for name, value in taken.resharded.items():
            holders = [rank for rank, values in enumerate(found) if name in values]
            if holders[0] == coordinator.rank:
                _merge(name, value, holders, [found[rank][name] for rank in holders])


def _values(blob: bytes, rank: int) -> dict[str, Any]:
    where = f"rank {rank}"
    packed = unpack_blob(memoryview(blob), where=where)
    return {name: decode(tree, partial(leaf_of, tensors), where) for name, (tree, tensors) in packed.items()}


def _merge(name: str, value: Reshardable, holders: list[int], parts: list[Any]) -> None:
    try:
        value.merge(parts)
    except Exception as error:  # of whatever kind a value's own code raises
        raise CheckpointError(
            "The parts of a Resharded value cannot be put together: other ranks could not go on from this checkpoint.",
            expected=f"{len(parts)} parts that its merge() takes",
            got=f"{type(error).__name__}: {error}",
            where=f"{name} of ranks {some(map(str, holders), 16)}",
            todo="make the values of all ranks alike and save them together, at one place in the data; "
            "or save PerRank(value), which only as many ranks can load",
        ) from error
