"""What must be the same on all ranks: compared by digest, and where it is not, the first difference is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

from vescale_fsdp.checkpoint.checksums import digest_of
from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.errors import CheckpointError

Alike = Mapping[str, Json]
_ABSENT = "nothing"  # stands for a key that a rank does not have


def words_of(alike: Alike | bytes) -> list[int]:
    """Four numbers that are the same for equal arguments, or of a digest; the order of keys counts for nothing."""
    if not isinstance(alike, bytes):
        alike = digest_of(json.dumps(alike, sort_keys=True, default=repr).encode())
    return list(struct.unpack("<4I", alike))


def both_ways(words: list[int]) -> list[int]:
    """Numbers whose maximum over ranks tells whether all ranks have the same words; `is_same` looks at it."""
    return [*words, *(-word for word in words)]


def is_same(found: Sequence[int]) -> bool:
    """Whether all ranks had the same words, by the maximum of `both_ways`."""
    half = len(found) // 2
    return all(high == -low for high, low in zip(found[:half], found[half:], strict=True))


def unlike(everyone: Sequence[Json]) -> CheckpointError:
    """The error for arguments, by rank, that are not the same."""
    name, values = _first_difference(everyone, "")
    ranks_by_text: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_text.setdefault(repr(value), []).append(rank)
    shown = [f"{text[:200]} on ranks {ranks[:16]}" for text, ranks in ranks_by_text.items()]
    return CheckpointError(
        "Ranks disagree about an argument.",
        expected="the same arguments on all ranks",
        got="; ".join(shown[:4]),
        where=f"the argument `{name}`",
        todo="pass the same on every rank; nothing was written or overwritten. What is each rank's own goes "
        "into the state, as PerRank(value)",
    )


def _first_difference(values: Sequence[Json], name: str) -> tuple[str, Sequence[Json]]:
    """Name and values, by rank, of the first place where the ranks' values differ."""
    keys: Sequence[object] = []
    if all(isinstance(value, dict) for value in values):
        keys = sorted({key for value in values for key in value})
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        keys = range(len(values[0]))
    for key in keys:
        items = [value.get(key, _ABSENT) if isinstance(value, dict) else value[key] for value in values]
        if len({tuple(words_of({"": item})) for item in items}) > 1:
            return _first_difference(items, child_name(name, key))
    return name, values
