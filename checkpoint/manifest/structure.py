"""The structure of a state: the part that ranks must agree on. Its size does not depend on the number of ranks.

    state_tree     one value: containers, plain values and references to tensors as JSON
    structure      one state: its tree, the description of each tensor, how tensors are cut
    manifest       one checkpoint: a structure, the ranks that have and wrote each tensor, and the files

Two ranks have the same kind of state exactly if their structures are equal; ranks compare 16-byte digests of them.
`capture.take_state` builds the structure of a live state. Reading a structure from a manifest needs no torch.

Ranks with different state (pipeline stages, experts) have different structures, which `merge_structures` joins key by
key. A tensor may occur in several structures. If its descriptions are equal, it is stored once, with the ranks of all
these structures. If they differ, the ranks of each description must have the whole tensor; otherwise the ranks disagree
about the layout, and the save is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from sys import intern
from typing import Any

from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name, dotted_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.checkpoint.storage.checksums import digest_of
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.distribution import (
    Axes,
    Axis,
    Cut,
    Distribution,
    Holders,
    LayoutCut,
    RankSet,
    cut_from_json,
)
from vescale_fsdp.layout.foreign_json import tensor_shape, whole_numbers
from vescale_fsdp.layout.group_layout import GroupLayout


def dump_json(value: Json) -> bytes:
    """Return compact JSON; equal values with keys in the same order give equal bytes."""
    return _encode(value).encode()


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # NaN is not valid JSON


@dataclass(frozen=True, slots=True)
class Entry:
    """The description of one tensor. ``axes`` is an index into the table `Structure.axes`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: int
    cuts: tuple[Cut, ...]

    @property
    def label(self) -> str:
        """The name with dots, for messages and reports."""
        return dotted_name(self.name)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return stored_dtype(self.dtype).itemsize

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; `from_json` reads them back without loss."""
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
        """Return the value that `to_json` has described."""
        name, dtype = data["name"], data["dtype"]
        if not (isinstance(name, str) and isinstance(dtype, str)):
            # Cut to 80 characters: the file is not trusted, and may contain anything here.
            raise TypeError(f"tensor {name!r:.80} of dtype {dtype!r:.80}")
        cuts = tuple(cut_from_json(cut) for cut in data["cuts"])
        axes = whole_numbers([data["axes"]])[0]
        # `intern` saves memory: many tensors, few dtypes.
        return cls(name, intern(dtype), tensor_shape(data["shape"]), axes, cuts)


@dataclass(frozen=True)
class Structure:
    """A state tree, its tensors in file order, and the tables of axes and layouts to which the tensors refer."""

    tree: Json
    entries: tuple[Entry, ...]
    axes: tuple[Axes, ...]
    layouts: tuple[GroupLayout, ...]

    @property
    def document(self) -> bytes:
        """The structure as JSON; equal structures have equal bytes. Not cached, because the text is large."""
        # Entry by entry, because the dicts of all entries would need many times the memory of the text.
        tensors = b",".join(dump_json(entry.to_json()) for entry in self.entries)
        axes = dump_json([[axis.to_json() for axis in axes] for axes in self.axes])
        layouts = dump_json([layout.to_json() for layout in self.layouts])
        state = dump_json(self.tree)
        return b'{"state":%b,"tensors":[%b],"axes":%b,"layouts":%b}' % (state, tensors, axes, layouts)

    @cached_property
    def digest(self) -> bytes:
        """A 16-byte digest of the structure, which ranks compare."""
        return digest_of(self.document)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Structure:
        """Parse the JSON of `document`, or of a manifest, which has the same keys and more."""
        return cls(
            data["state"],
            tuple(Entry.from_json(entry) for entry in data["tensors"]),
            tuple(tuple(Axis.from_json(axis) for axis in axes) for axes in data["axes"]),
            tuple(GroupLayout.from_json(layout) for layout in data["layouts"]),
        )

    def distribution(self, entry: Entry) -> Distribution:
        """Return the axes and cuts of one tensor."""
        return Distribution(self.axes[entry.axes], entry.cuts)


def renumber(node: Json, number_of: Mapping[int, int]) -> Json:
    """Return a tree with new numbers in its tensor leaves: old number -> new number."""
    if isinstance(node, list):
        return [renumber(item, number_of) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") == "tensor":
        return {**node, "i": number_of[node["i"]]}
    return {key: renumber(item, number_of) for key, item in node.items()}


def merge_structures(classes: Sequence[tuple[RankSet, Structure]]) -> tuple[Structure, tuple[RankSet, ...]]:
    """Join the structures of all ranks.

    Args:
        classes: each distinct structure with the ranks that have it, in ascending order of their first ranks.

    Returns:
        The joined structure, with tensors in file order, and for each tensor the ranks that have it.

    Raises:
        CheckpointError: if ranks disagree; names the first difference.
    """
    tree: Json = None
    axes: dict[Axes, int] = {}
    layouts: dict[GroupLayout, int] = {}
    holders: dict[Entry, RankSet] = {}
    for ranks, structure in classes:
        # Numbers in the tables of this structure -> numbers in the joined tables.
        new_axes = [axes.setdefault(item, len(axes)) for item in structure.axes]
        new_layouts = [layouts.setdefault(item, len(layouts)) for item in structure.layouts]
        index_of = {entry: index for index, entry in enumerate(holders)}
        new_index = {}
        for index, entry in enumerate(structure.entries):
            cuts = tuple(
                LayoutCut(new_layouts[cut.layout], cut.slot) if isinstance(cut, LayoutCut) else cut
                for cut in entry.cuts
            )
            joined = replace(entry, axes=new_axes[entry.axes], cuts=cuts)
            known = holders.get(joined)
            holders[joined] = ranks if known is None else known.union(ranks)
            new_index[index] = index_of.setdefault(joined, len(index_of))
        renumbered = renumber(structure.tree, new_index)
        tree = renumbered if tree is None else _join(tree, renumbered, "", list(holders))
    entries = list(holders)
    # File order: descending item sizes, so that every piece of a file is aligned.
    order = sorted(range(len(entries)), key=lambda index: -entries[index].itemsize)
    tree = renumber(tree, {old: new for new, old in enumerate(order)})
    in_order = tuple(entries[index] for index in order)
    return Structure(tree, in_order, tuple(axes), tuple(layouts)), tuple(map(holders.__getitem__, in_order))


def _join(left: Json, right: Json, name: str, entries: Sequence[Entry]) -> Json:
    """Join two nodes with the same path; raises a CheckpointError if their plain values or tensors differ."""
    if left == right or _kind(right) == "absent":  # absent: the ranks are outside the tensor's mesh
        return left
    if _kind(left) == "absent":
        return right
    if _kind(left) == "tensor" and _kind(right) == "tensor":
        a, b = entries[left["i"]], entries[right["i"]]
        # Cuts may differ: `Manifest.indices_by_name` finds the other description by name.
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            return left
        raise _differ(name, f"{a.dtype} {a.shape}", f"{b.dtype} {b.shape}")
    if isinstance(left, dict) and isinstance(right, dict) and "$" not in left and "$" not in right:
        joined = dict(left)
        for key, item in right.items():
            joined[key] = _join(left[key], item, child_name(name, key), entries) if key in left else item
        return joined
    if _kind(left) == _kind(right) == "dict":
        # Keys are compared as text, because their nodes may be lists or dicts.
        pairs = {dump_json(key): [key, item] for key, item in left["v"]}
        for key, item in right["v"]:
            text = dump_json(key)
            if text in pairs:
                item = _join(pairs[text][1], item, child_name(name, key), entries)
            pairs[text] = [key, item]
        return {"$": "dict", "v": list(pairs.values())}
    items = [node["v"] if _kind(node) == "tuple" else node for node in (left, right)]
    if all(isinstance(item, list) for item in items) and len(items[0]) == len(items[1]):
        joined_items = [
            _join(a, b, child_name(name, index), entries)
            for index, (a, b) in enumerate(zip(*items, strict=True))
        ]
        return {"$": "tuple", "v": joined_items} if _kind(left) == "tuple" else joined_items
    raise _differ(name, left, right)


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


def check_complete(
    structure: Structure, sets: Sequence[RankSet], classes: Sequence[tuple[RankSet, Structure]]
) -> None:
    """Check that every part of every tensor is on a rank.

    Args:
        structure: the joined structure.
        sets: for each tensor, the ranks that have it.
        classes: each distinct structure with the ranks that have it, for the message.

    Raises:
        CheckpointError: if a part is on no rank; names the tensor, and the first difference between ranks.
    """
    checked: dict[tuple[RankSet, int], int | None] = {}  # most tensors have the same ranks and axes
    for entry, ranks in zip(structure.entries, sets, strict=True):
        key = (ranks, entry.axes)
        if key not in checked:
            checked[key] = Holders(ranks, structure.axes[entry.axes]).missing_cell()
        missing = checked[key]
        if missing is not None and entry.numel:
            raise CheckpointError(
                "Ranks disagree about the layout: part of a tensor is on no rank.",
                expected=f"a rank for each cell of a mesh of {[axis.size for axis in structure.axes[entry.axes]]}",
                got=f"no rank for cell {missing}; {_first_difference(entry.name, classes)}",
                where=entry.label,
                todo="shard the model the same way on all ranks of its mesh, and let all of them save",
            )


def _first_difference(name: str, classes: Sequence[tuple[RankSet, Structure]]) -> str:
    """Return text with the first two different descriptions of a tensor, each with a rank that has it."""
    described: dict[str, int] = {}  # description -> first rank that has it
    for ranks, structure in classes:
        described.setdefault(_description(name, structure), ranks.ranks[0])
    if len(described) < 2:
        saving_ranks = [ranks.ranks[0] for ranks, _ in classes][:4]
        return f"only ranks {saving_ranks} .. save, all with {next(iter(described))}"
    return "; ".join(f"rank {rank} has {text}" for text, rank in list(described.items())[:2])


def _description(name: str, structure: Structure) -> str:
    """Return text that describes a tensor in a structure: dtype, shape and cuts."""
    entry = next((entry for entry in structure.entries if entry.name == name), None)
    if entry is None:
        return "nothing"
    cuts = []
    for cut in entry.cuts:
        if isinstance(cut, LayoutCut):
            layout = structure.layouts[cut.layout]
            offset = layout.slots[cut.slot].offset
            cuts.append(f"shards of {layout.shard_numel} elements, offset {offset}")
        else:
            cuts.append(str(cut))
    return f"{entry.dtype} {list(entry.shape)} cut by ({', '.join(cuts)})"
