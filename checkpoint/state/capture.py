"""Taking a live state apart: its structure, and beside it this rank's bytes, local tensors and per-rank values.

Nothing is copied and nothing is communicated. The structure says nothing of this rank alone, so that ranks
can compare a digest of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.stateful import Stateful

from vescale_fsdp.checkpoint.manifest.distribution import Axes, LayoutCut
from vescale_fsdp.checkpoint.manifest.rank_file import RESERVED_NAMES
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure, renumber
from vescale_fsdp.checkpoint.state.describe import Described, Describer
from vescale_fsdp.checkpoint.state.encode import TreeSink, encode
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.per_rank import PerRank
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError, explain

__all__ = ["TakenState", "take_state"]


class TakenState(NamedTuple):
    """A rank's structure, its tensors by name, and its per-rank values by name (encoded tree, tensors)."""

    structure: Structure
    locals_by_name: dict[str, torch.Tensor]
    per_rank: dict[str, tuple[Json, list[torch.Tensor]]]


def take_state(state: Any, *, rank_of: dict[int, int] | None = None) -> TakenState:
    """Walk a live state; nothing is copied and nothing is communicated.

    Args:
        state: any nesting of what `tree` lists; usually a dict.
        rank_of: number within the checkpoint's world of each global rank, where they differ.

    Raises:
        CheckpointError: for values or tensors that cannot be stored, naming the first.
    """
    taker = _Taker(Describer(rank_of))
    try:
        with gc_paused():
            return taker.taken(encode(state, "", taker))
    except RecursionError as error:
        raise CheckpointError(
            explain(
                "The state is nested too deeply.",
                expected="at most 100 levels, and no container inside itself",
                got=str(error),
                where="the state itself",
                todo="flatten it, or break the circle",
            )
        ) from error


class _Taken(NamedTuple):
    """A tensor met on the walk."""

    entry: Entry
    local: torch.Tensor
    role: str
    offset: int


class _Taker(TreeSink):
    def __init__(self, describer: Describer) -> None:
        self._describer = describer
        self._axes: dict[Axes, int] = {}
        self._found: list[_Taken] = []
        self._names: set[str] = set()
        self._by_memory: dict[tuple[Any, ...], list[int]] = {}
        self._per_rank: dict[str, tuple[Json, list[torch.Tensor]]] = {}
        self._roles: dict[str, int] = {}

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        described = self._describer.describe(name, tensor)
        if described.local is None:
            return {"$": "absent"}
        axes = self._axes.setdefault(described.distribution.axes, len(self._axes))
        key = _memory_key(tensor, described, axes)
        alike = self._by_memory.setdefault(key, []) if key is not None else []
        for place in alike:
            if self._found[place].local.is_set_to(described.local):
                return {"$": "tensor", "i": place}
        self._claim(name)
        entry = Entry(name, described.dtype, described.shape, axes, described.distribution.cuts)
        role, offset = self._role(entry)
        place = len(self._found)
        self._found.append(_Taken(entry, described.local, role, offset))
        alike.append(place)
        return {"$": "tensor", "i": place}

    def per_rank(self, name: str, value: PerRank) -> Json:
        self._claim(name)
        leaf = _LeafTaker()
        self._per_rank[name] = (encode(value.value, name, leaf), leaf.tensors)
        return {"$": "per_rank", "name": name}

    def _claim(self, name: str) -> None:
        if name in RESERVED_NAMES:
            raise CheckpointError(
                explain(
                    "A leaf of the state has a name that the files keep for themselves.",
                    expected=f"none of {', '.join(RESERVED_NAMES)}",
                    got=repr(name),
                    todo="rename the key",
                )
            )
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise CheckpointError(
                explain(
                    "A leaf of the state has a name that is no text.",
                    expected="keys without half a surrogate pair, which no file can name",
                    got=repr(name),
                    todo="rename the key",
                )
            )
        if name in self._names:
            raise CheckpointError(
                explain(
                    "Two leaves of the state have one name.",
                    expected="keys that differ as text",
                    got=f"two times {name!r}",
                    todo="rename one of the keys (1 and '1' are the same name)",
                )
            )
        self._names.add(name)

    def _role(self, entry: Entry) -> tuple[str, int]:
        """What a tensor is to its group (weights, one kind of moments), and where it lies in the buffer."""
        cut = entry.cuts[-1] if entry.cuts else None
        if not isinstance(cut, LayoutCut):
            return "", 0
        slot = self._describer.layouts[cut.layout].slots[cut.slot]
        role = f"{cut.layout}:" + entry.name.replace(slot.fqn, "*", 1)
        self._roles.setdefault(role, len(self._roles))
        return role, slot.offset

    def taken(self, tree: Json) -> TakenState:
        """Everything found, with the tensors brought into file order."""

        # Falling item sizes keep every tensor aligned in its file; then groups, roles, buffer order.
        def file_order(place: int) -> tuple[int, int, int, int]:
            item = self._found[place]
            return (-item.entry.itemsize, self._roles.get(item.role, len(self._roles)), item.offset, place)

        order = sorted(range(len(self._found)), key=file_order)
        number_of = {place: number for number, place in enumerate(order)}
        entries = tuple(self._found[place].entry for place in order)
        structure = Structure(renumber(tree, number_of), entries, tuple(self._axes), self._describer.layouts)
        found = {item.entry.name: item.local for item in self._found}
        return TakenState(structure, found, self._per_rank)


class _LeafTaker(TreeSink):
    """Numbers the tensors of one per-rank value; a DTensor gives its local part."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._inside = False  # an object

    def stateful(self, name: str, value: Stateful, depth: int) -> Json:
        # A load gives an object what was stored for it without asking what it holds now: a data loader would start.
        if self._inside:
            raise CheckpointError(
                explain(
                    "An object lies in the state of another one, inside a PerRank.",
                    expected="a state_dict() of plain values, tensors and containers",
                    got=f"a {type(value).__qualname__}",
                    where=name,
                    todo="let the outer object's state_dict() return the inner one's",
                )
            )
        self._inside = True
        node = super().stateful(name, value, depth)
        self._inside = False
        return node

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        local = Describer().describe(name, tensor).local
        self.tensors.append(torch.empty(0) if local is None else local)
        return {"$": "tensor", "i": len(self.tensors) - 1}

    def per_rank(self, name: str, value: PerRank) -> Json:
        raise CheckpointError(
            explain(
                "A PerRank value lies inside another.",
                expected="one PerRank around both",
                got="two",
                where=name,
            )
        )


def _memory_key(tensor: torch.Tensor, described: Described, axes: int) -> tuple[Any, ...] | None:
    """Key under which tensors that share memory meet; None for tensors that are never taken for shared.

    All ranks must come to the same answer, also those whose piece is empty and has no address: a ragged
    piece is therefore shared only with one of the same slot, and not at all if its slot is unknown.
    """
    local = described.local
    assert local is not None
    slot = None
    if isinstance(tensor, RaggedDTensor):
        if tensor.layout_ref is None:
            return None
        slot = (id(tensor.layout_ref[0]), tensor.layout_ref[1])
    return (local.data_ptr(), described.shape, described.dtype, axes, described.distribution.cuts, slot)
