"""From a live state to the JSON of its tree (see `tree`): what stands for itself, and what is refused.

Nothing is pickled: a type that is not listed there is refused, by name and place. Objects with ``state_dict``
and ``load_state_dict`` are stored as what ``state_dict()`` returns.
"""

from __future__ import annotations

import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from vescale_fsdp.checkpoint.dtypes import dtype_name, is_numpy_dtype
from vescale_fsdp.checkpoint.per_rank import PerRank
from vescale_fsdp.checkpoint.tree import Json, join_name
from vescale_fsdp.errors import CheckpointError, explain

__all__ = ["TreeSink", "encode", "is_stateful"]


class TreeSink(ABC):
    """Takes the leaves that JSON cannot hold and returns the node that stands for each."""

    @abstractmethod
    def tensor(self, name: str, tensor: torch.Tensor) -> Json:
        """Node of a tensor leaf."""

    @abstractmethod
    def per_rank(self, name: str, value: PerRank) -> Json:
        """Node of a per-rank leaf."""


def is_stateful(value: object) -> bool:
    """Whether a value is stored as what its ``state_dict()`` returns."""
    return isinstance(value, Stateful) and not isinstance(value, (torch.Tensor, Mapping))


def encode(value: Any, name: str, sink: TreeSink) -> Json:
    """The JSON node of a value; tensors and per-rank values go to the sink.

    Raises:
        CheckpointError: for a type that has no encoding, naming it and its place.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return sink.tensor(name, value)
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, sink)
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if isinstance(value, PerRank):
        return sink.per_rank(name, value)
    if isinstance(value, list):
        return [encode(item, join_name(name, place), sink) for place, item in enumerate(value)]
    if isinstance(value, tuple):
        items = [encode(item, join_name(name, place), sink) for place, item in enumerate(value)]
        return {"$": "tuple", "v": items}
    if is_stateful(value):
        return encode(value.state_dict(), name, sink)
    return _encode_rare(value, name, sink)


def _encode_mapping(value: Mapping[Any, Any], name: str, sink: TreeSink) -> Json:
    nodes = [(key, encode(item, join_name(name, key), sink)) for key, item in value.items()]
    if all(type(key) is str and not key.startswith("$") for key in value):
        return dict(nodes)
    for key in value:
        if not isinstance(key, (str, int, float, bool, tuple)) and key is not None:
            raise _refuse(key, f"{name} (a key)")
    return {"$": "dict", "v": [[encode(key, name, sink), node] for key, node in nodes]}


def _encode_rare(value: Any, name: str, sink: TreeSink) -> Json:
    if isinstance(value, (set, frozenset)):
        # Ordered as they are written: the repr of a set inside differs between processes.
        items = sorted((encode(item, name, sink) for item in value), key=json.dumps)
        return {"$": "frozenset" if isinstance(value, frozenset) else "set", "v": items}
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if type(value) is complex:
        parts = [encode(part, name, sink) for part in (value.real, value.imag)]
        return {"$": "complex", "v": parts}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "v": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$": "device", "v": str(value)}
    if isinstance(value, np.ndarray) and is_numpy_dtype(str(value.dtype)):
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
        explain(
            "A value of this type cannot be saved: nothing is pickled.",
            expected="tensors, numbers, strings, bytes, None, dict, list, tuple, set, PerRank, "
            "or an object with state_dict and load_state_dict",
            got=f"{kind.__module__}.{kind.__qualname__}"
            + (f" of dtype {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""),
            where=name or "the state itself",
            todo="store its fields as plain values, or give its class state_dict and load_state_dict",
        )
    )
