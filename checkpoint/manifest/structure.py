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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from sys import intern
from typing import Any

from vescale_fsdp.checkpoint.checksums import digest_of
from vescale_fsdp.checkpoint.manifest.distribution import Axes, Axis, Cut, Distribution, cut_from_json
from vescale_fsdp.checkpoint.manifest.state_tree import Json, dotted_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
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
    def label(self) -> str:
        """The name in messages and reports, with dots."""
        return dotted_name(self.name)

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
