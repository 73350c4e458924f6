"""Descriptions: the names, shapes, dtypes, distributions and ranks of a state's tensors, without their values.

`describe_states` describes two live states, the source and the target of a transfer. It is a collective, with one or
two small messages per state (`Coordinator.agree`). `StateDescription.of` makes a description without running ranks, so
that transfers can be planned in advance or simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp.checkpoint.manifest.state_tree import child_name
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure, check_complete, merge_structures
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.state.tensor_description import Described, Describer
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.distribution import Axes, Distribution, Holders, RankSet
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.region import Region
from vescale_fsdp.torch_private import persistent_buffers

Ranks = Coordinator | dist.ProcessGroup | None


class DescribedTensor(NamedTuple):
    """One tensor of a description, and the ranks that store it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    distribution: Distribution
    ranks: RankSet


@dataclass(frozen=True)
class StateDescription:
    """Which ranks store which pieces of a state. The size of a description does not depend on the number of ranks.

    Args:
        structure: the tensors, and the tables of axes and layouts that tensors index; without a tree of nested keys.
        ranks: for each tensor, the ranks that store pieces of the tensor.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.transfer import describe_states
        >>> source, target = describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)})
        >>> source.entries[0].name, source.all_ranks
        ('w', (0,))
    """

    structure: Structure
    ranks: tuple[RankSet, ...]

    @classmethod
    def of(cls, tensors: Iterable[DescribedTensor], layouts: Sequence[GroupLayout] = ()) -> StateDescription:
        """Make the description of given tensors.

        Args:
            layouts: the layouts that the `LayoutCut` cuts of the tensors refer to by number.
        """
        tensors = list(tensors)
        structure = _structure(((tensor.name, tensor) for tensor in tensors), layouts)
        return cls(structure, tuple(tensor.ranks for tensor in tensors))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Name, dtype, shape, axes and cuts of each tensor."""
        return self.structure.entries

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each tensor."""
        return tuple(dtype_named(entry.dtype) for entry in self.entries)

    @cached_property
    def distributions(self) -> tuple[Distribution, ...]:
        """Axes and cuts of each tensor."""
        return tuple(map(self.structure.distribution, self.entries))

    @cached_property
    def numbers_by_name(self) -> dict[str, int]:
        """The number of each tensor by its name: the first number, if ranks distribute the tensor in several ways."""
        numbers: dict[str, int] = {}
        for number, entry in enumerate(self.entries):
            numbers.setdefault(entry.name, number)
        return numbers

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        """Ranks that store anything, ascending."""
        # `set` first: most tensors are on equal ranks, so few sets of ranks are left to expand.
        return tuple(sorted({rank for ranks in set(self.ranks) for rank in ranks.ranks}))

    @cached_property
    def _holders(self) -> dict[tuple[RankSet, int], Holders]:
        """The cache of `holders_of`."""
        return {}  # a cached property, since a frozen dataclass cannot set attributes

    def holders_of(self, number: int) -> Holders:
        """Return which rank stores which piece of a tensor; one object for all tensors with equal ranks and axes."""
        key = (self.ranks[number], self.entries[number].axes)
        if key not in self._holders:
            self._holders[key] = Holders(self.ranks[number], self.structure.axes[key[1]])
        return self._holders[key]

    def region(self, number: int, coordinates: tuple[int, ...]) -> Region:
        """Return the region of tensor ``number`` that the ranks at ``coordinates`` on its axes store."""
        shape, layouts = self.entries[number].shape, self.structure.layouts
        return self.distributions[number].region(shape, coordinates, layouts)

    def touching(self, number: int, region: Region) -> Iterator[tuple[int, ...]]:
        """Return the coordinates whose ranks may store items of ``region`` of tensor ``number``."""
        shape, layouts = self.entries[number].shape, self.structure.layouts
        return (at for at, _ in self.distributions[number].touching(shape, region, layouts))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, which are equal exactly if descriptions are."""
        table: dict[RankSet, int] = {}  # distinct sets only: most tensors are on equal ranks
        numbers = [table.setdefault(ranks, len(table)) for ranks in self.ranks]
        return {
            "tensors": [entry.to_json() for entry in self.entries],
            "axes": [[axis.to_json() for axis in axes] for axes in self.structure.axes],
            "layouts": [layout.to_json() for layout in self.structure.layouts],
            "rank_sets": [ranks.to_json() for ranks in table],
            "ranks": numbers,
        }


def _structure(
    tensors: Iterable[tuple[str, DescribedTensor | Described]], layouts: Sequence[GroupLayout]
) -> Structure:
    """Make a structure of named tensors, with one table entry for all tensors with equal axes."""
    axes: dict[Axes, int] = {}
    entries = []
    for name, tensor in tensors:
        number = axes.setdefault(tensor.distribution.axes, len(axes))  # equal axes get one number
        entries.append(Entry(name, tensor.dtype, tensor.shape, number, tensor.distribution.cuts))
    return Structure(None, tuple(entries), tuple(axes), tuple(layouts))


def named_tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested mappings, lists and tuples, each with its name: its keys and indices, joined by dots.

    The tensors of a module are its parameters, shared ones once, and its persistent buffers.

    Raises:
        CheckpointError: for a leaf that is not a tensor.
    """
    if isinstance(state, torch.Tensor):
        yield name, state
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    elif isinstance(state, nn.Module):
        items = chain(state.named_parameters(), persistent_buffers(state))
    else:
        raise CheckpointError(
            "A transfer moves tensors only.",
            expected="modules, and nested dicts and lists of tensors",
            got=type(state).__name__,
            where=name or "the state itself",
            todo="leave this value out of the state, and send it separately",
        )
    for key, item in items:
        if isinstance(item, torch.Tensor):  # without a generator of its own: every run lists all tensors
            yield child_name(name, key), item
        else:
            yield from named_tensors(item, child_name(name, key))


def transfer_ranks(ranks: Ranks) -> Coordinator:
    """Return the coordinator of some ranks: ``ranks`` itself, or that of a process group (default: all ranks)."""
    return ranks if isinstance(ranks, Coordinator) else coordinator_for(ranks, use="transfer")


def describe_states(
    source: Any | None, target: Any | None, *, ranks: Ranks = None
) -> tuple[StateDescription, StateDescription]:
    """Describe the state that a transfer reads and the state that it fills. A collective of all ranks of both states.

    Args:
        source: nested dicts and lists of tensors and DTensors, or a module; None on ranks that store nothing of the
            source. A plain tensor is assumed to have equal values on all ranks that store the tensor. Wrap plain shards
            with ``DTensor.from_local``.
        target: the state that is filled, in the form of ``source``.
        ranks: the ranks of both states: a process group (default: all ranks), or the result of `joint_ranks`. The
            descriptions use the rank numbers of this group.

    Returns:
        The descriptions of source and target, equal on all ranks.

    Raises:
        CheckpointError: on all ranks, if a state cannot be described, or ranks have different shapes or dtypes for one
            tensor.

    Examples:
        >>> trainer, engine = describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)})
        >>> trainer.entries[0].name
        'w'
    """
    coordinator = transfer_ranks(ranks)
    return _describe(source, coordinator), _describe(target, coordinator)


def _describe(state: Any | None, coordinator: Coordinator) -> StateDescription:
    """Describe one state. A collective."""
    structure: Structure | None = None
    error: BaseException | None = None
    try:
        structure = _local_structure(state, coordinator.rank_of)
    except Exception as caught:  # noqa: BLE001  raised on all ranks by `agree`, where other ranks wait
        error = caught
    classes = coordinator.agree(structure, 0, error).classes
    joined, ranks = merge_structures(classes)
    check_complete(joined, ranks, classes)
    # A tensor has several entries if ranks distribute it in several ways. `check_complete` has checked each entry
    # alone, but not that entries of one name describe one tensor.
    first_entries: dict[str, Entry] = {}
    for entry in joined.entries:
        first = first_entries.setdefault(entry.name, entry)
        if (first.shape, first.dtype) != (entry.shape, entry.dtype):
            raise CheckpointError(
                "Ranks disagree about a tensor.",
                expected=f"the same on all ranks: {first.dtype} {first.shape}",
                got=f"{entry.dtype} {entry.shape}",
                where=entry.name,
                todo="wrap shards that are plain tensors with DTensor.from_local",
            )
    # Engines read tensors in the order of the model, not in that of files.
    names = (entry.name for _, structure in classes for entry in structure.entries)
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    order = sorted(range(len(ranks)), key=lambda number: places[joined.entries[number].name])
    entries = tuple(joined.entries[number] for number in order)
    return StateDescription(replace(joined, entries=entries), tuple(ranks[number] for number in order))


def _local_structure(state: Any | None, rank_of: dict[int, int] | None) -> Structure:
    """Make the structure of the tensors of a state of which this rank stores a piece.

    Raises:
        CheckpointError: if two tensors have one name.
    """
    describer = Describer(rank_of)
    tensors: dict[str, Described] = {}
    for name, tensor in named_tensors({} if state is None else state):
        if name in tensors:  # possible, since keys may contain dots: {"a": {"b": t}, "a.b": u}
            raise CheckpointError(
                "Two tensors of a state have the same name.",
                expected="different names (a name is all keys of a tensor, joined by dots)",
                got=f"{name!r} twice",
                todo="rename a key that contains a dot",
            )
        described = describer.describe(name, tensor)
        if described.local is not None:
            tensors[name] = described
    return _structure(tensors.items(), describer.layouts)
