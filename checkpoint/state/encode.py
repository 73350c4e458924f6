"""From a live state to the JSON of its tree (see `state_tree`): what stands for itself, and what is refused.

Nothing is pickled: a type that is not listed there is refused, by name and place. Objects with ``state_dict``
and ``load_state_dict`` are stored as what ``state_dict()`` returns; modules and optimizers by the names of their
parameters (see `live_objects`).
"""

from __future__ import annotations

import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from vescale_fsdp.checkpoint.manifest.state_tree import MAX_DEPTH, Json, join_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, is_numpy_dtype
from vescale_fsdp.checkpoint.state.per_rank import PerRank
from vescale_fsdp.errors import CheckpointError

_MAX_INT_BITS = 8192  # Python reads and writes 4300 digits, of which this is about half


class TreeSink(ABC):
    """Takes the leaves that JSON cannot hold and returns the node that stands for each."""

    @abstractmethod
    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        """Node of a tensor leaf."""

    @abstractmethod
    def per_rank(self, name: str, value: PerRank) -> Json:
        """Node of a per-rank leaf."""

    def stateful(self, name: str, value: Stateful, depth: int) -> Json:
        """Node of an object with a state; ``depth`` as for `encode`."""
        return encode(value.state_dict(), name, self, depth + 1)


def is_stateful(value: object) -> bool:
    """Whether a value is stored as what its ``state_dict()`` returns."""
    return not isinstance(value, (torch.Tensor, Mapping)) and isinstance(value, Stateful)


def remade(like: tuple[Any, ...], items: Sequence[Any]) -> tuple[Any, ...]:
    """A tuple of the type of another one: plain, named, or one of torch's."""
    make = getattr(type(like), "_make", type(like))  # named tuples take their fields one by one
    return make(items)  # type: ignore[no-any-return]


class _HashableSink(TreeSink):
    """Refuses the leaves of keys and of sets: they are looked up by value, which tensors are not."""

    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        raise self._refused(name, "a tensor or an array")

    def per_rank(self, name: str, value: PerRank) -> Json:
        raise self._refused(name, "a PerRank value")

    def _refused(self, name: str, got: str) -> CheckpointError:
        return CheckpointError(
            "Keys and members of sets cannot be loaded in place.",
            expected="plain values",
            got=got,
            where=name,
            todo="keep it in a list, or as a dict's value",
        )


_hashable_sink = _HashableSink()


def encode(value: Any, name: str, sink: TreeSink, depth: int = 0) -> Json:
    """The JSON node of a value; tensors and per-rank values go to the sink.

    Args:
        depth: containers around it.

    Raises:
        CheckpointError: for what has no encoding or could not be loaded, naming it and its place.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        return _encode_int(value, name)
    if isinstance(value, torch.Tensor):
        return sink.tensor(name, value)
    if depth > MAX_DEPTH:
        raise _too_deep(name)
    if isinstance(value, Mapping):
        nodes = [(key, encode(item, join_name(name, key), sink, depth + 1)) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(nodes)
        return {"$": "dict", "v": [[_encode_key(key, name, depth + 1), node] for key, node in nodes]}
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if isinstance(value, PerRank):
        return sink.per_rank(name, value)
    if isinstance(value, list):
        return [encode(item, join_name(name, place), sink, depth + 1) for place, item in enumerate(value)]
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
        expected=f"integers of at most {_MAX_INT_BITS} bits, which readers of JSON take",
        got=f"{value.bit_length()} bits",
        where=name,
        todo="store its bytes",
    )


def _too_deep(name: str) -> CheckpointError:
    return CheckpointError(
        "The state is nested too deeply.",
        expected=f"at most {MAX_DEPTH} levels, and no container inside itself",
        got="more",
        where=f"{name[:60]} ..",
        todo="flatten it, or break the circle",
    )


def _encode_tuple(value: tuple[Any, ...], name: str, sink: TreeSink, depth: int) -> Json:
    if type(value) is not tuple:
        try:
            remade(value, list(value))
        except Exception as error:  # whatever its class makes of it, a load could not make one either
            raise _refuse(value, name) from error
    items = [encode(item, join_name(name, place), sink, depth) for place, item in enumerate(value)]
    return {"$": "tuple", "v": items}


def _encode_key(key: Any, name: str, depth: int) -> Json:
    plain = isinstance(key, (str, int, float, bool, tuple)) or key is None
    if not plain or _holds_nan(key):
        raise _refuse(key, f"{name} (a key)")
    return encode(key, name, _hashable_sink, depth)


def _holds_nan(key: Any) -> bool:
    """Whether a key is, or holds, a number that equals nothing: nobody could look it up again."""
    if isinstance(key, (tuple, frozenset)):
        return any(map(_holds_nan, key))
    return isinstance(key, (float, complex, np.inexact)) and bool(key != key)


def _encode_rare(value: Any, name: str, sink: TreeSink, depth: int) -> Json:
    if isinstance(value, (set, frozenset)):
        # Ordered as they are written: the repr of a set inside differs between processes.
        items = sorted((encode(item, name, _hashable_sink, depth) for item in value), key=json.dumps)
        return {"$": "frozenset" if isinstance(value, frozenset) else "set", "v": items}
    if isinstance(value, (bytes, bytearray)):
        flag = {"array": True} if isinstance(value, bytearray) else {}
        return {"$": "bytes", "v": base64.b64encode(value).decode(), **flag}
    if type(value) is complex:
        parts = [encode(part, name, sink) for part in (value.real, value.imag)]
        return {"$": "complex", "v": parts}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "v": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$": "device", "v": str(value)}
    masked = isinstance(value, np.ma.MaskedArray)  # its mask would be lost
    if isinstance(value, np.ndarray) and is_numpy_dtype(str(value.dtype)) and not masked:
        return {**sink.tensor(name, _tensor_of(value)), "numpy": True}
    if isinstance(value, np.generic) and is_numpy_dtype(str(value.dtype)):
        return {"$": "numpy", "dtype": str(value.dtype), "v": encode(value.item(), name, sink)}
    raise _refuse(value, name)


def _tensor_of(array: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    """The array's memory as a tensor; a copy where torch has no such strides, or would warn of writing to it."""
    in_order = np.asarray(array, order="C")  # of no dims, it stays so
    return torch.from_numpy(in_order if in_order.flags.writeable else in_order.copy())


def _refuse(value: object, name: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        "A value of this type cannot be saved: nothing is pickled.",
        expected="tensors, numbers, strings, bytes, None, dict, list, tuple, set, PerRank, "
        "or an object with state_dict and load_state_dict",
        got=f"{kind.__module__}.{kind.__qualname__}"
        + (f" of dtype {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""),
        where=name or "the state itself",
        todo="store its fields as plain values, or give its class state_dict and load_state_dict",
    )
