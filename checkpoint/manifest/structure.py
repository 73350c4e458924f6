"""The structure of a state: all that ranks must agree on, and nothing that grows with them.

    state_tree     one value: how containers, plain values and references to tensors are written as JSON
    structure      one state: its tree, what is known of each tensor, how these are cut
    manifest       one checkpoint: a structure, and which ranks hold and wrote it, where

`Structure` is a value: the state tree, what is known of every tensor, and the layouts. Two ranks hold the
same kind of state exactly if their structures are equal, which a 16-byte digest tells. `capture.take_state`
finds it on a live state; reading one from a manifest needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from sys import intern
from typing import Any

from vescale_fsdp.checkpoint.checksums import digest_of
from vescale_fsdp.checkpoint.manifest.distribution import (
    Axes,
    Axis,
    Cut,
    Distribution,
    Holders,
    LayoutCut,
    RankSet,
    cut_from_json,
)
from vescale_fsdp.checkpoint.manifest.state_tree import Json, join_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.foreign_json import tensor_shape, whole_numbers
from vescale_fsdp.layout.group_layout import GroupLayout


def dump_json(value: Json) -> bytes:
    """The one way JSON is written here: compact, so that equal values have equal bytes."""
    return _encode(value).encode()


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one tensor: ``axes`` is a place in a table of mesh axes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: int
    cuts: tuple[Cut, ...]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return stored_dtype(self.dtype).itemsize

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back without loss."""
        cuts = [cut.to_json() for cut in self.cuts]
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "axes": self.axes,
            "cuts": cuts,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Inverse of `to_json`."""
        name, dtype = data["name"], data["dtype"]
        if not (isinstance(name, str) and isinstance(dtype, str)):
            raise TypeError(f"tensor {name!r:.80} of dtype {dtype!r:.80}")
        cuts = tuple(cut_from_json(cut) for cut in data["cuts"])
        axes = whole_numbers([data["axes"]])[0]
        return cls(name, intern(dtype), tensor_shape(data["shape"]), axes, cuts)


@dataclass(frozen=True)
class Structure:
    """State tree, tensors in file order, and the tables they point into."""

    tree: Json
    entries: tuple[Entry, ...]
    axes: tuple[Axes, ...]
    layouts: tuple[GroupLayout, ...]

    @property
    def document(self) -> bytes:
        """The structure as JSON, equal for equal structures; made anew each time, since it is large."""
        # Entry by entry: dicts of all at once are many times the text.
        tensors = b",".join(dump_json(entry.to_json()) for entry in self.entries)
        axes = dump_json([[axis.to_json() for axis in axes] for axes in self.axes])
        layouts = dump_json([layout.to_json() for layout in self.layouts])
        state = dump_json(self.tree)
        return b'{"state":%b,"tensors":[%b],"axes":%b,"layouts":%b}' % (state, tensors, axes, layouts)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ between different structures."""
        return digest_of(self.document)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Structure:
        """Inverse of `document`, which a manifest holds among other things."""
        return cls(
            data["state"],
            tuple(Entry.from_json(entry) for entry in data["tensors"]),
            tuple(tuple(Axis.from_json(axis) for axis in axes) for axes in data["axes"]),
            tuple(GroupLayout.from_json(layout) for layout in data["layouts"]),
        )

    def distribution(self, entry: Entry) -> Distribution:
        """Axes and cuts of one tensor."""
        return Distribution(self.axes[entry.axes], entry.cuts)


def renumber(node: Json, number_of: Mapping[int, int]) -> Json:
    """A tree whose tensor leaves carry new numbers."""
    if isinstance(node, list):
        return [renumber(item, number_of) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") == "tensor":
        return {**node, "i": number_of[node["i"]]}
    return {key: renumber(item, number_of) for key, item in node.items()}


class _Merged:
    """Joined tree and tables; ``entries`` are the tensors with the ranks that hold each."""

    def __init__(self) -> None:
        self.tree: Json = None
        self.axes: dict[Axes, int] = {}
        self.layouts: dict[GroupLayout, int] = {}
        self.entries: dict[Entry, RankSet] = {}


def merge_structures(classes: Sequence[tuple[RankSet, Structure]]) -> tuple[Structure, tuple[RankSet, ...]]:
    """Join the structures of all ranks.

    Args:
        classes: each distinct structure with the ranks that have it, in order of their first rank.

    Returns:
        The joined structure, tensors in file order, and the ranks that hold each of them.

    Raises:
        CheckpointError: if ranks disagree, naming the first difference.
    """
    merged = _Merged()
    for ranks, structure in classes:
        _add(merged, structure, ranks)
    found = list(merged.entries)
    order = sorted(range(len(found)), key=lambda place: -found[place].itemsize)
    tree = renumber(merged.tree, {place: number for number, place in enumerate(order)})
    entries = tuple(found[place] for place in order)
    holders = tuple(merged.entries[entry] for entry in entries)
    return Structure(tree, entries, tuple(merged.axes), tuple(merged.layouts)), holders


def _add(merged: _Merged, structure: Structure, ranks: RankSet) -> None:
    axes = [merged.axes.setdefault(item, len(merged.axes)) for item in structure.axes]
    layouts = [merged.layouts.setdefault(item, len(merged.layouts)) for item in structure.layouts]
    numbers = {}
    places = {entry: place for place, entry in enumerate(merged.entries)}
    for place, entry in enumerate(structure.entries):
        moved = replace(
            entry, axes=axes[entry.axes], cuts=tuple(_move_cut(cut, layouts) for cut in entry.cuts)
        )
        known = merged.entries.get(moved)
        merged.entries[moved] = ranks if known is None else known.union(ranks)
        numbers[place] = places.setdefault(moved, len(places))
    tree = renumber(structure.tree, numbers)
    merged.tree = tree if merged.tree is None else _join(merged.tree, tree, "", list(merged.entries))


def _move_cut(cut: Cut, layouts: Sequence[int]) -> Cut:
    return LayoutCut(layouts[cut.layout], cut.slot) if isinstance(cut, LayoutCut) else cut


def _join(left: Json, right: Json, name: str, entries: Sequence[Entry]) -> Json:
    """Join two nodes of one place of the tree."""
    if left == right or _kind(right) == "absent":
        return left
    if _kind(left) == "absent":
        return right
    if _kind(left) == "tensor" and _kind(right) == "tensor":
        a, b = entries[left["i"]], entries[right["i"]]
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            return left
        raise _differ(name, f"{a.dtype} {a.shape}", f"{b.dtype} {b.shape}")
    if isinstance(left, dict) and isinstance(right, dict) and "$" not in left and "$" not in right:
        joined = dict(left)
        for key, item in right.items():
            joined[key] = _join(left[key], item, join_name(name, key), entries) if key in left else item
        return joined
    if _kind(left) == _kind(right) == "dict":
        return {"$": "dict", "v": _join_items(left["v"], right["v"], name, entries)}
    items = [node["v"] if _kind(node) == "tuple" else node for node in (left, right)]
    if all(isinstance(item, list) for item in items) and len(items[0]) == len(items[1]):
        joined_items = [
            _join(a, b, join_name(name, place), entries)
            for place, (a, b) in enumerate(zip(*items, strict=True))
        ]
        return {"$": "tuple", "v": joined_items} if _kind(left) == "tuple" else joined_items
    raise _differ(name, left, right)


def _join_items(left: Any, right: Any, name: str, entries: Sequence[Entry]) -> list[Any]:
    joined = {dump_json(key): (key, item) for key, item in left}
    for key, item in right:
        text = dump_json(key)
        if text in joined:
            item = _join(joined[text][1], item, join_name(name, key), entries)
        joined[text] = (key, item)
    return [[key, item] for key, item in joined.values()]


def _kind(node: Json) -> str | None:
    return node.get("$") if isinstance(node, Mapping) else None


def _differ(name: str, left: object, right: object) -> CheckpointError:
    return CheckpointError(
        "Ranks disagree about the state; the first difference is named below.",
        expected=f"the same on all ranks: {_short(left)}",
        got=_short(right),
        where=name or "the state itself",
        todo="give all ranks the same value, or wrap it in PerRank(value)",
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def prove_complete(
    structure: Structure, sets: Sequence[RankSet], classes: Sequence[tuple[RankSet, Structure]]
) -> None:
    """Refuse a state of which part of a tensor is held by no rank.

    Raises:
        CheckpointError: naming the tensor, and the first difference between ranks.
    """
    checked: dict[tuple[RankSet, int], int | None] = {}
    for entry, ranks in zip(structure.entries, sets, strict=True):
        key = (ranks, entry.axes)
        if key not in checked:
            checked[key] = Holders(ranks, structure.axes[entry.axes]).missing_place()
        missing = checked[key]
        if missing is not None and entry.numel:
            raise CheckpointError(
                "Ranks disagree about the layout: part of a tensor is held by no rank.",
                expected=f"all places of axes {[axis.size for axis in structure.axes[entry.axes]]} taken",
                got=f"nobody at place {missing}; {_first_difference(entry.name, classes)}",
                where=entry.name,
                todo="shard the model the same way on all ranks of its mesh, and let all of them save",
            )


def _first_difference(name: str, classes: Sequence[tuple[RankSet, Structure]]) -> str:
    """What the ranks of the first two differing structures say of one tensor."""
    said: list[tuple[int, str]] = []
    for ranks, structure in classes:
        first_rank = ranks.ranks[0]
        for text in _descriptions(name, structure):
            if all(text != other for _, other in said):
                said.append((first_rank, text))
    if len(said) < 2:
        return f"only ranks {[r.ranks[0] for r, _ in classes][:4]} .. were asked, all of them said {said}"
    return "; ".join(f"rank {rank} says {text}" for rank, text in said[:2])


def _descriptions(name: str, structure: Structure) -> Iterator[str]:
    for entry in structure.entries:
        if entry.name == name:
            cuts = []
            for cut in entry.cuts:
                if isinstance(cut, LayoutCut):
                    layout = structure.layouts[cut.layout]
                    slot = layout.slots[cut.slot]
                    cuts.append(f"shards of {layout.shard_numel} elements, offset {slot.offset}")
                else:
                    cuts.append(str(cut))
            yield f"{entry.dtype} {list(entry.shape)} cut by ({', '.join(cuts)})"
            return
    yield "nothing"
