"""Match single leaves: tensors, per-rank values, plain values, and leaves that the state lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name, decode, dotted_name, has_tensors
from vescale_fsdp.checkpoint.manifest.torch_dtypes import is_numpy_dtype
from vescale_fsdp.checkpoint.state.capture import is_stateful
from vescale_fsdp.checkpoint.state.live_objects import NamedOptimizer, load_into
from vescale_fsdp.checkpoint.state.matching.catalogue import Catalogue
from vescale_fsdp.checkpoint.state.matching.new_tensor import NewTensor
from vescale_fsdp.checkpoint.state.matching.result import Finish, Match, TensorRead
from vescale_fsdp.checkpoint.state.per_rank import PerRank

Items = Iterable[tuple[Any, Any]]


def fitting(name: str, include: tuple[str, ...] | None) -> set[str]:
    """Return the patterns that match a name; ``{name}`` without patterns, which selects all names."""
    # A pattern may also be in the manifest's spelling: keys joined by "/", with "~1" for a "/" inside a key.
    return {
        pattern
        for pattern in ((name,) if include is None else include)
        if pattern == name or fnmatchcase(name, pattern) or fnmatchcase(name, dotted_name(pattern))
    }


class LeafMatcher:
    """Matches leaves with nodes, and collects the result in ``matched``.

    Args:
        include: name patterns; only leaves that match a pattern are loaded. None for all leaves.
    """

    def __init__(self, catalogue: Catalogue, include: tuple[str, ...] | None) -> None:
        self.matched = Match(catalogue, unused=set(include or ()))
        self._shared_new: dict[int, NewTensor] = {}  # by number in the manifest
        self._include = include

    @property
    def includes_all(self) -> bool:
        """Whether all leaves are loaded, because there are no name patterns."""
        return self._include is None

    def selects(self, name: str) -> bool:
        """Return whether ``include`` selects a leaf; patterns that match its name are no longer ``unused``."""
        if self._include is None:
            return True
        patterns = fitting(name, self._include)
        self.matched.unused -= patterns
        return bool(patterns)

    def tensor(self, target: Any, node: Json, name: str) -> Finish:
        """Match a tensor or an array, which the load fills in place."""
        if not self.selects(name):
            return lambda: target
        is_leaf = isinstance(node, Mapping) and node.get("$") == "tensor"
        if isinstance(target, np.ndarray) and is_leaf and _is_fillable(target):
            # `from_numpy` shares the array's memory, so the read fills the array.
            self.matched.reads.append(TensorRead(name, int(node["i"]), torch.from_numpy(target)))
        elif isinstance(target, torch.Tensor) and is_leaf:
            self.matched.reads.append(TensorRead(name, int(node["i"]), target))
        else:
            return self.record_other_kind(target, node, name)
        return lambda: target

    def per_rank(self, target: Any, node: Json, name: str) -> Finish:
        """Match a `PerRank` value; the returned function sets its ``value``."""
        if not self.selects(name):
            return lambda: target
        if not isinstance(target, PerRank) or not isinstance(node, Mapping) or node.get("$") != "per_rank":
            return self.record_other_kind(target, node, name)
        stored = str(node["name"])
        self.matched.per_rank[stored] = target

        def finish() -> PerRank:
            if stored in self.matched.per_rank_values:  # else no saved rank has a value for this rank
                target.value = _filled(target.value, self.matched.per_rank_values[stored], name)
            return target

        return finish

    def plain(self, target: Any, node: Json, name: str, stateful: bool) -> Finish:
        """Match a value of any other kind, which is replaced.

        Args:
            stateful: whether the value is part of an object's state dict; it may then be replaced by tensors.
        """
        if not self.selects(name):
            return lambda: target
        if stateful and has_tensors(node):
            return self.fresh(node, name)
        if has_tensors(node) or holds_tensors(target):
            return self.record_other_kind(target, node, name)
        # Decoded here, not in the returned function, so that errors are raised before anything is overwritten.
        value = decode(node, lambda leaf: None)
        return lambda: value

    def record_other_kind(self, target: Any, node: Json, name: str) -> Finish:
        """Record that a value and its node are of different kinds; the value is kept."""
        self.matched.problems.append((name, kind_of_node(node), _kind_of(target)))
        return lambda: target

    def leaf_names(self, value: Any, name: str, items_of: Callable[[Any], Items | None]) -> list[str]:
        """Return the names of those leaves of a value, or of a node, that ``include`` selects."""
        items = items_of(value)
        if items is None:
            return [name] if self.selects(name) else []
        self.matched.containers.add(name)
        return [
            leaf for key, item in items for leaf in self.leaf_names(item, child_name(name, key), items_of)
        ]

    def fresh(self, node: Json, name: str, owner: tuple[NamedOptimizer, str] | None = None) -> Finish:
        """Return a function that creates a new value from a node. Tensors that shared memory when saved share it again.

        Args:
            owner: the optimizer and the parameter's name, if the node is a parameter's state.
        """
        if has_tensors(node):
            # Registers the new tensors in `matched.fresh`; the result, without values, is discarded.
            decode(node, lambda leaf: self._shared(leaf, name, owner))
        return lambda: decode(node, lambda leaf: self._shared(leaf, name, owner))

    def _shared(
        self, leaf: Mapping[str, Any], name: str, owner: tuple[NamedOptimizer, str] | None
    ) -> torch.Tensor | None:
        """Return the new tensor of a leaf, one per number; None before its allocation, and for other leaves."""
        if leaf["$"] != "tensor":
            return None
        number = int(leaf["i"])
        if number not in self._shared_new:
            new = NewTensor(name, number)
            if owner is not None:
                named, fqn = owner
                new = NewTensor(name, number, named.params[fqn], optimizer=named.optimizer)
            self._shared_new[number] = new
            self.add_new(new)
        return self._shared_new[number].value

    def add_new(self, tensor: NewTensor) -> None:
        """Register a tensor that is allocated after the match."""
        self.matched.fresh.append(tensor)


def _filled(target: Any, value: Any, name: str) -> Any:
    """Return the new per-rank value. Stateful objects in the target are kept, and load the stored state."""
    if is_stateful(target):
        return load_into(target, value, name)
    if isinstance(target, Mapping) and type(value) is dict:
        return {key: _filled(target.get(key), item, name) for key, item in value.items()}
    if isinstance(target, (list, tuple)) and type(value) in (list, tuple) and len(target) == len(value):
        return type(value)(_filled(inner, item, name) for inner, item in zip(target, value, strict=True))
    return value


def holds_tensors(value: Any) -> bool:
    """Return whether a value of the state contains a tensor or a per-rank value at any depth."""
    if isinstance(value, Mapping):
        return any(holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(item) for item in value)
    return isinstance(value, (torch.Tensor, PerRank))


def _is_fillable(array: np.ndarray) -> bool:  # type: ignore[type-arg]
    """Return whether torch can write to an array's memory: not if it is read-only or has negative strides."""
    return array.flags.writeable and min(array.strides, default=0) >= 0 and is_numpy_dtype(str(array.dtype))


def _kind_of(value: object) -> str:
    if isinstance(value, np.ndarray):
        writeable = "writeable" if value.flags.writeable else "read-only"
        return f"a {writeable} ndarray of dtype {value.dtype} and strides {value.strides}"
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def kind_of_node(node: Json) -> str:
    """Return the kind of a node, as errors name it."""
    if isinstance(node, Mapping) and "$" in node:
        return {"tensor": "a tensor", "per_rank": "a PerRank value"}.get(node["$"], f"a {node['$']}")
    return f"a {type(node).__name__}"
