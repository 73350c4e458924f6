"""What ranks hold of a state, as a value: names, shapes, dtypes, distributions and sets of ranks. No bytes.

`describe_states` makes the descriptions of two live states, the one that is read and the one that is filled, on
every rank of a group (one or two small messages, see `coordinator.agree`). `StateDescription.of` makes one of
ranks that do not exist, to plan and to simulate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.distribution import Axes, Distribution, Holders, RankSet
from vescale_fsdp.checkpoint.manifest.state_tree import join_name
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure, check_complete, merge_structures
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.group_layout import GroupLayout


class DescribedTensor(NamedTuple):
    """One tensor of a description that is made without ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    distribution: Distribution
    ranks: RankSet


@dataclass(frozen=True)
class StateDescription:
    """Who holds what of a state; does not grow with the number of ranks.

    Args:
        structure: the tensors, with the tables they point into; its tree is empty.
        ranks: for each tensor, the ranks that hold it.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import describe_states
        >>> source, target = describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)})
        >>> source.entries[0].name, source.all_ranks
        ('w', (0,))
    """

    structure: Structure
    ranks: tuple[RankSet, ...]

    @classmethod
    def of(cls, tensors: Iterable[DescribedTensor], layouts: Sequence[GroupLayout] = ()) -> StateDescription:
        """The description of these tensors; cuts by a layout point into ``layouts``."""
        axes: dict[Axes, int] = {}
        entries, ranks = [], []
        for name, dtype, shape, distribution, holders in tensors:
            number = axes.setdefault(distribution.axes, len(axes))
            entries.append(Entry(name, dtype, shape, number, distribution.cuts))
            ranks.append(holders)
        return cls(Structure(None, tuple(entries), tuple(axes), tuple(layouts)), tuple(ranks))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors."""
        return self.structure.entries

    @cached_property
    def distributions(self) -> tuple[Distribution, ...]:
        """Axes and cuts of each tensor."""
        return tuple(map(self.structure.distribution, self.entries))

    @cached_property
    def places_by_name(self) -> dict[str, int]:
        """Number of the tensor of each name; the first one, where ranks hold it in several ways."""
        return {entry.name: place for place, entry in reversed(list(enumerate(self.entries)))}

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        """Ranks that hold anything, ascending."""
        return tuple(sorted({rank for ranks in set(self.ranks) for rank in ranks.ranks}))

    @cached_property
    def _holders(self) -> dict[tuple[RankSet, int], Holders]:
        return {}

    def holders_of(self, place: int) -> Holders:
        """Who holds tensor number ``place``."""
        key = (self.ranks[place], self.entries[place].axes)
        found = self._holders.get(key)
        if found is None:
            found = self._holders[key] = Holders(self.ranks[place], self.structure.axes[key[1]])
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back without loss."""
        table: dict[RankSet, int] = {}
        numbers = [table.setdefault(ranks, len(table)) for ranks in self.ranks]
        return {
            "tensors": [entry.to_json() for entry in self.entries],
            "axes": [[axis.to_json() for axis in axes] for axes in self.structure.axes],
            "layouts": [layout.to_json() for layout in self.structure.layouts],
            "rank_sets": [ranks.to_json() for ranks in table],
            "ranks": numbers,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateDescription:
        """Inverse of `to_json`."""
        table = [RankSet.from_json(ranks) for ranks in data["rank_sets"]]
        structure = Structure.from_json({**data, "state": None})
        return cls(structure, tuple(table[number] for number in data["ranks"]))


_EMPTY = Structure(None, (), (), ())


def named_tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested mappings and sequences, each under the keys on its way.

    Raises:
        CheckpointError: for a leaf that is no tensor.
    """
    if isinstance(state, torch.Tensor):
        yield name, state
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        raise CheckpointError(
            "A transfer moves tensors alone.",
            expected="nested dicts and lists of tensors",
            got=type(state).__name__,
            where=name or "the state itself",
            todo="leave it out, and send it as an object",
        )
    for key, item in items:
        yield from named_tensors(item, join_name(name, key))


def _structure(state: Any, rank_of: dict[int, int] | None) -> Structure:
    """What this rank holds of a state."""
    describer = Describer(rank_of)
    axes: dict[Axes, int] = {}
    entries: dict[str, Entry] = {}
    for name, tensor in named_tensors(state):
        if name in entries:
            raise CheckpointError("Two tensors have one name.", expected="keys that differ", got=repr(name))
        dtype, shape, distribution, local = describer.describe(name, tensor)
        if local is not None:
            number = axes.setdefault(distribution.axes, len(axes))
            entries[name] = Entry(name, dtype, shape, number, distribution.cuts)
    return Structure(None, tuple(entries.values()), tuple(axes), describer.layouts)


def describe_states(
    source: Any | None, target: Any | None, coordinator: Coordinator
) -> tuple[StateDescription, StateDescription]:
    """The descriptions of a state that is read and of one that is filled. All ranks of the group call this.

    Args:
        source: nested dicts and lists of tensors; None on ranks that hold nothing of it.
        target: likewise.
        coordinator: of the ranks of both; rank numbers of the descriptions are places in its group.

    Raises:
        CheckpointError: on all ranks, if a state cannot be described or ranks disagree about one.
    """
    return _describe(source, coordinator), _describe(target, coordinator)


def _describe(state: Any | None, coordinator: Coordinator) -> StateDescription:
    structure: Structure | None = None
    error: BaseException | None = None
    try:
        structure = _EMPTY if state is None else _structure(state, coordinator.rank_of)
    except Exception as caught:  # noqa: BLE001  whatever it is, all ranks hear of it in `agree`
        error = caught
    classes = coordinator.agree(structure, 0, error).classes
    joined, ranks = merge_structures(classes)
    check_complete(joined, ranks, classes)
    _prove_alike(joined)
    return StateDescription(joined, ranks)


def _prove_alike(structure: Structure) -> None:
    """Refuse one name for tensors of several shapes or dtypes."""
    known: dict[str, Entry] = {}
    for entry in structure.entries:
        first = known.setdefault(entry.name, entry)
        if (first.shape, first.dtype) != (entry.shape, entry.dtype):
            raise CheckpointError(
                "Ranks disagree about a tensor.",
                expected=f"the same on all ranks: {first.dtype} {first.shape}",
                got=f"{entry.dtype} {entry.shape}",
                where=entry.name,
                todo="describe shards that are plain tensors by DTensor.from_local",
            )
