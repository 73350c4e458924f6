"""Capture a live state: its structure for the manifest, and this rank's local tensors and per-rank values.

No tensor is copied, and ranks do not communicate. The structure contains nothing rank-specific, so that ranks can
compare a digest of it.
"""

from __future__ import annotations

import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from vescale_fsdp.checkpoint.manifest.rank_file import RESERVED_NAMES
from vescale_fsdp.checkpoint.manifest.state_tree import MAX_DEPTH, Json, dotted_name, join_name
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure, renumber
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, is_numpy_dtype
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects, remade
from vescale_fsdp.checkpoint.state.per_rank import PerRank, Reshardable, Resharded
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.distribution import Axes, LayoutCut

_MAX_INT_BITS = 8192  # 2467 digits; Python's conversions between int and text refuse more than 4300


class TreeSink(ABC):
    """Collects the leaves that JSON cannot represent. Each method returns the JSON node that refers to the leaf."""

    @abstractmethod
    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        """Collect a tensor, and return its JSON node."""

    @abstractmethod
    def per_rank(self, name: str, value: PerRank) -> Json:
        """Collect a per-rank value, and return its JSON node."""

    def stateful(self, name: str, value: Stateful, depth: int) -> Json:
        """Return the JSON node of the object's state dict. ``depth``: the number of containers around the object."""
        return encode(value.state_dict(), name, self, depth + 1)


def is_stateful(value: object) -> bool:
    """Return whether a value is stored as the result of its ``state_dict()``."""
    # `Stateful` is a protocol, so tensors and mappings with its methods would match too; they are stored as such.
    return not isinstance(value, (torch.Tensor, Mapping)) and isinstance(value, Stateful)


class _HashableSink(TreeSink):
    """The sink for dict keys and members of sets: raises for tensors and per-rank values."""

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        raise self._refused(name, "a tensor or an array")

    def per_rank(self, name: str, value: PerRank) -> Json:
        raise self._refused(name, "a PerRank value")

    def _refused(self, name: str, got: str) -> CheckpointError:
        return CheckpointError(
            "Keys and members of sets cannot be loaded in place.",
            expected="plain values",
            got=got,
            where=dotted_name(name),
            todo="keep it in a list, or as a dict's value",
        )


_hashable_sink = _HashableSink()


def encode(value: Any, name: str, sink: TreeSink, depth: int = 0) -> Json:
    """Return the JSON node of a value; tensors and per-rank values are passed to the sink.

    Args:
        depth: number of containers around the value.

    Raises:
        CheckpointError: for a value that has no encoding or could not be loaded; names its type.
    """
    kind = type(value)  # exact types: an enum that is also an int or a str would lose its class
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        return _encode_int(value, name)
    if isinstance(value, torch.Tensor):
        return sink.tensor(name, value)
    if depth > MAX_DEPTH:  # a load recurses deeper per level, and could not read what this walk can write
        raise _too_deep(f"{dotted_name(name)[:60]} ..")  # the start is enough to find the value
    if isinstance(value, Mapping):
        nodes = [(key, encode(item, join_name(name, key), sink, depth + 1)) for key, item in value.items()]
        # A "$" key marks nodes of other kinds, so dicts with such keys are stored as pairs, like those with other keys.
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(nodes)
        return {"$": "dict", "v": [[_encode_key(key, name, depth + 1), node] for key, node in nodes]}
    if kind is float:
        # JSON has no NaN and no infinities.
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if isinstance(value, PerRank):
        return sink.per_rank(name, value)
    if isinstance(value, list):
        return [encode(item, join_name(name, index), sink, depth + 1) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return _encode_tuple(value, name, sink, depth + 1)
    if is_stateful(value):
        return sink.stateful(name, value, depth)
    return _encode_rare(value, name, sink, depth + 1)


def _encode_int(value: int, name: str) -> int:
    if value.bit_length() <= _MAX_INT_BITS:
        return value
    raise CheckpointError(
        "A number is too long to be saved.",
        expected=f"integers of at most {_MAX_INT_BITS} bits: JSON parsers refuse very long numbers",
        got=f"{value.bit_length()} bits",
        where=dotted_name(name),
        todo="store the number as bytes",
    )


def _too_deep(where: str, got: str = "more") -> CheckpointError:
    return CheckpointError(
        "The state is nested too deeply.",
        expected=f"at most {MAX_DEPTH} levels, and no container inside itself",
        got=got,
        where=where,
        todo="flatten the state, or remove a container's reference to itself",
    )


def _encode_tuple(value: tuple[Any, ...], name: str, sink: TreeSink, depth: int) -> Json:
    if type(value) is not tuple:  # a named tuple, or a torch class such as torch.Size
        try:
            remade(value, list(value))  # tried here, because a load creates the tuple in this way
        except Exception as error:  # the class may raise any error
            raise _refuse(value, name) from error
    items = [encode(item, join_name(name, index), sink, depth) for index, item in enumerate(value)]
    return {"$": "tuple", "v": items}


def _encode_key(key: Any, name: str, depth: int) -> Json:
    plain = isinstance(key, (str, int, float, bool, tuple)) or key is None
    if not plain or _holds_nan(key):
        raise _refuse(key, f"{name} (a key)")
    return encode(key, name, _hashable_sink, depth)


def _holds_nan(key: Any) -> bool:
    """Return whether a key is or contains NaN. NaN does not equal itself, so a load could not find the entry."""
    if isinstance(key, (tuple, frozenset)):
        return any(map(_holds_nan, key))
    return isinstance(key, (float, complex, np.inexact)) and bool(key != key)  # only NaN differs from itself


def _encode_rare(value: Any, name: str, sink: TreeSink, depth: int) -> Json:
    if isinstance(value, (set, frozenset)):
        # Sorted by JSON text: the iteration order of a set differs between processes, and ranks compare digests.
        items = sorted((encode(item, name, _hashable_sink, depth) for item in value), key=json.dumps)
        return {"$": "frozenset" if isinstance(value, frozenset) else "set", "v": items}
    if isinstance(value, (bytes, bytearray)):
        flag = {"array": True} if isinstance(value, bytearray) else {}  # a load then creates a bytearray
        return {"$": "bytes", "v": base64.b64encode(value).decode(), **flag}
    if type(value) is complex:  # not isinstance: numpy's complex128, a subclass, keeps its dtype below
        parts = [encode(part, name, sink) for part in (value.real, value.imag)]
        return {"$": "complex", "v": parts}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "v": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$": "device", "v": str(value)}
    masked = isinstance(value, np.ma.MaskedArray)  # not supported: its mask would be lost
    if isinstance(value, np.ndarray) and is_numpy_dtype(str(value.dtype)) and not masked:
        return {**sink.tensor(name, _tensor_of(value)), "numpy": True}
    if isinstance(value, np.generic) and is_numpy_dtype(str(value.dtype)):
        return {"$": "numpy", "dtype": str(value.dtype), "v": encode(value.item(), name, sink)}
    raise _refuse(value, name)


def _tensor_of(array: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    """Return a tensor over the array's memory, or over a copy if the array is read-only or not C-contiguous."""
    # torch has no negative strides. np.ascontiguousarray would make a 0-d array 1-D.
    in_order = np.asarray(array, order="C")
    # A copy, because torch warns about read-only memory.
    return torch.from_numpy(in_order if in_order.flags.writeable else in_order.copy())


def _refuse(value: object, name: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        "A value of this type cannot be saved: nothing is pickled.",
        expected="tensors, numbers, strings, bytes, None, dict, list, tuple, set, PerRank, "
        "or an object with state_dict and load_state_dict",
        got=f"{kind.__module__}.{kind.__qualname__}"
        + (f" of dtype {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""),
        where=dotted_name(name) or "the state itself",
        todo="store its fields as plain values, or give its class state_dict and load_state_dict",
    )


class TakenState(NamedTuple):
    """The result of `take_state` on one rank.

    Attributes:
        structure: the state's structure, without rank-specific parts.
        locals_by_name: name -> local tensor.
        per_rank: name -> encoded tree and tensors of a per-rank value.
        resharded: name -> value of a `Resharded` leaf.
    """

    structure: Structure
    locals_by_name: dict[str, torch.Tensor]
    per_rank: dict[str, tuple[Json, list[torch.Tensor]]]
    resharded: dict[str, Reshardable]


def take_state(state: Any, *, rank_of: dict[int, int] | None = None) -> TakenState:
    """Capture a live state. No tensor is copied, and ranks do not communicate.

    Args:
        state: any nesting of the types that `state_tree` lists; usually a dict.
        rank_of: global rank -> rank in the checkpoint's world; None if they are equal.

    Raises:
        CheckpointError: for the first value or tensor that cannot be stored; names it.
    """
    taker = _Taker(state, Describer(rank_of))
    try:
        with gc_paused():  # the walk creates many small objects and no cycles
            tree = encode(state, "", taker)
            order = taker.file_order()  # differs from the order of the walk, so the tree is renumbered
            number_of = {index: number for number, index in enumerate(order)}
            structure = Structure(
                renumber(tree, number_of),
                tuple(taker.tensors[index][0] for index in order),
                tuple(taker.axes),
                taker.describer.layouts,
            )
    except RecursionError as error:
        # MAX_DEPTH limits neither the caller's stack nor the stack of a state_dict().
        raise _too_deep("the state itself", str(error)) from error
    locals_by_name = {entry.name: local for entry, local in taker.tensors}
    return TakenState(structure, locals_by_name, taker.per_rank_values, taker.resharded)


class _Taker(TreeSink):
    """Captures one state: `encode` passes each tensor and per-rank value to this sink."""

    def __init__(self, state: Any, describer: Describer) -> None:
        self._live = LiveObjects(state)
        self.describer = describer
        self.axes: dict[Axes, int] = {}
        self.tensors: list[tuple[Entry, torch.Tensor]] = []  # (description, this rank's tensor)
        self.per_rank_values: dict[str, tuple[Json, list[torch.Tensor]]] = {}
        self.resharded: dict[str, Reshardable] = {}
        self._names: set[str] = set()
        self._by_memory: dict[tuple[Any, ...], list[int]] = {}

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        dtype, shape, distribution, local = self.describer.describe(name, tensor)
        if local is None:  # this rank is outside the tensor's mesh
            return {"$": "absent"}
        axes = self.axes.setdefault(distribution.axes, len(self.axes))
        # Tensors that share memory are stored once. All ranks must agree on which tensors these are, but an empty piece
        # has no address to compare. A ragged piece is therefore compared only with pieces of the same slot, and is
        # stored separately if its slot is unknown.
        alike: list[int] = []
        slot = tensor.layout_ref if isinstance(tensor, RaggedDTensor) else ()  # None: unknown; (): not ragged
        if slot is not None:
            slot_key = (id(slot[0]), slot[1]) if slot else ()
            alike = self._by_memory.setdefault(
                (local.data_ptr(), shape, dtype, axes, distribution.cuts, slot_key), []
            )
        for index in alike:
            if self.tensors[index][1].is_set_to(local):
                return {"$": "tensor", "i": index}
        self._claim(name)  # only now: a second name of the same memory is not a name in the files
        entry = Entry(name, dtype, shape, axes, distribution.cuts)
        alike.append(len(self.tensors))
        self.tensors.append((entry, local))
        return {"$": "tensor", "i": alike[-1]}

    def stateful(self, name: str, value: Stateful, depth: int) -> Json:
        if isinstance(value, nn.Module):
            return encode(self._live.module_state(value).values, name, self, depth + 1)
        if isinstance(value, torch.optim.Optimizer):
            named = self._live.named(value, dotted_name(name))
            if named is not None:  # None: state_dict() does not number parameters, and is stored unchanged
                return encode(named.value(), name, self, depth + 1)
        return super().stateful(name, value, depth)

    def per_rank(self, name: str, value: PerRank) -> Json:
        self._claim(name)
        leaf = _LeafTaker()
        self.per_rank_values[name] = (encode(value.value, name, leaf), leaf.tensors)
        if isinstance(value, Resharded):
            self.resharded[name] = value.value
        return {"$": "per_rank", "name": name}

    def _claim(self, name: str) -> None:
        """Reserve a name for a leaf.

        Raises:
            CheckpointError: if the name is already used, reserved, or not valid text.
        """
        problem = None
        if name in RESERVED_NAMES:
            problem = (
                "a name that the file format reserves",
                f"a name other than {', '.join(RESERVED_NAMES)}",
            )
        # `isascii` first, because it is fast: an ASCII name has no surrogates.
        elif not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            problem = (
                "a name that is not valid text",
                "keys without lone surrogates, which UTF-8 cannot encode",
            )
        elif name in self._names:
            problem = ("the name of another leaf", "keys that differ as text (1 and '1' give the same name)")
        if problem is not None:
            title, expected = problem
            raise CheckpointError(
                f"A leaf of the state has {title}.",
                expected=expected,
                got=repr(dotted_name(name)),
                todo="rename the key",
            )
        self._names.add(name)

    def file_order(self) -> list[int]:
        """Return the indices of the tensors in file order.

        Descending item sizes keep every tensor aligned in its file. Tensors of one role follow each other in the order
        of their group's buffer; tensors in no group come last. All weights of a group have the same role; so do all
        optimizer states of one kind.
        """
        roles: dict[tuple[int, str], int] = {}  # role -> its number, in the order of the walk
        keys: list[tuple[int, float, int]] = []
        layouts = self.describer.layouts
        for entry, _ in self.tensors:
            cut = entry.cuts[-1] if entry.cuts else None  # a layout's cut is applied last
            if not isinstance(cut, LayoutCut):
                keys.append((-entry.itemsize, math.inf, 0))
                continue
            slot = layouts[cut.layout].slots[cut.slot]
            # The name without the parameter's part is equal for all tensors of a role: optimizer/state/*/exp_avg.
            role = (cut.layout, entry.name.replace(slot.fqn, "*", 1))
            keys.append((-entry.itemsize, roles.setdefault(role, len(roles)), slot.offset))
        return sorted(range(len(keys)), key=keys.__getitem__)  # stable: else in the order of the walk


class _LeafTaker(TreeSink):
    """Collects the tensors of one per-rank value; of a DTensor, the local part."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._inside = False  # whether the walk is inside a Stateful object

    def stateful(self, name: str, value: Stateful, depth: int) -> Json:
        # A load finds objects without a call of state_dict(), which could start a data loader: not the inner object.
        if self._inside:
            raise CheckpointError(
                "A Stateful object is nested in the state of another Stateful object, inside a PerRank.",
                expected="a state_dict() of plain values, tensors and containers",
                got=f"a {type(value).__qualname__}",
                where=dotted_name(name),
                todo="let the outer object's state_dict() include the result of the inner object's state_dict()",
            )
        self._inside = True
        node = super().stateful(name, value, depth)
        self._inside = False
        return node

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        local = Describer().describe(name, tensor).local
        # On a rank outside the tensor's mesh, an empty tensor gives the leaf a number.
        self.tensors.append(torch.empty(0, dtype=torch.float32, device="cpu") if local is None else local)
        return {"$": "tensor", "i": len(self.tensors) - 1}

    def per_rank(self, name: str, value: PerRank) -> Json:
        raise CheckpointError(
            "A PerRank value is nested in another PerRank value.",
            expected="one PerRank around both",
            got="two",
            where=dotted_name(name),
        )
