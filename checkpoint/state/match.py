"""Matching a state with a manifest's tree: what to read where, before anything is touched.

`match` walks both side by side and returns a `Match`: the tensors to fill in place, the leaves that are
missing or unexpected, and an `apply` that puts plain values into the containers once all bytes are read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.state_tree import Json, decode, has_tensors, join_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import is_numpy_dtype
from vescale_fsdp.checkpoint.state.encode import is_stateful, remade
from vescale_fsdp.checkpoint.state.per_rank import PerRank
from vescale_fsdp.errors import CheckpointError

__all__ = ["Match", "TensorRead", "match"]

Finish = Callable[[], Any]
_Items = Iterable[tuple[Any, Any]]


class TensorRead(NamedTuple):
    """One tensor of the state to be filled from tensor number ``place`` of the manifest."""

    name: str
    place: int
    tensor: torch.Tensor


@dataclass
class Match:
    """What a state and a manifest have to do with each other.

    Attributes:
        reads: tensors of the state and the manifest leaves that fill them.
        fresh: tensors that a Stateful object needs and does not have; made by the caller, by leaf index.
        per_rank: per-rank leaves of the state by the manifest's name.
        missing: leaves of the state that the checkpoint lacks.
        unexpected: leaves of the checkpoint that the state lacks.
        problems: (name, expected, got) of leaves that cannot be matched at all.
        unused: name patterns that fitted no leaf of either.
        finish: puts plain values in place; to be called once, when all tensors are read.
    """

    reads: list[TensorRead] = field(default_factory=list)
    fresh: dict[int, torch.Tensor | None] = field(default_factory=dict)
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    per_rank_values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    finish: Finish = field(default=lambda: None)


def match(state: Any, tree: Json, include: tuple[str, ...] | None) -> Match:
    """Match a state with a tree; with ``include``, only leaves whose names fit one of the patterns."""
    matcher = _Matcher(include)
    matcher.found.finish = matcher.visit(state, tree, "", False)
    return matcher.found


class _Matcher:
    def __init__(self, include: tuple[str, ...] | None) -> None:
        self._include = include
        self.found = Match(unused=set(include or ()))

    def _selected(self, name: str) -> bool:
        if self._include is None:
            return True
        fitting = [pattern for pattern in self._include if fnmatchcase(name, pattern)]
        self.found.unused.difference_update(fitting)
        return bool(fitting)

    def visit(self, target: Any, node: Json, name: str, stateful: bool) -> Finish:
        """Match one value; what is returned yields the value that belongs in its place."""
        kind = node.get("$") if isinstance(node, Mapping) else None
        if is_stateful(target):
            inner = self.visit(target.state_dict(), node, name, True)
            return lambda: _give(target, inner(), name)
        if isinstance(target, PerRank) or kind == "per_rank":
            return self._per_rank(target, node, name)
        if isinstance(target, (torch.Tensor, np.ndarray)) or kind in ("tensor", "absent"):
            return self._tensor(target, node, name)
        if isinstance(target, Mapping) and isinstance(node, Mapping) and kind in (None, "dict"):
            return self._mapping(target, node, name, stateful)
        items = node.get("v") if kind == "tuple" and isinstance(node, Mapping) else node
        if isinstance(target, (list, tuple)) and isinstance(items, list) and len(items) == len(target):
            return self._sequence(target, items, name, stateful)
        return self._plain(target, node, name, stateful)

    def _per_rank(self, target: Any, node: Json, name: str) -> Finish:
        if not self._selected(name):
            return lambda: target
        if not isinstance(target, PerRank) or not isinstance(node, Mapping) or node.get("$") != "per_rank":
            return self._unlike(target, node, name)
        stored = str(node["name"])
        self.found.per_rank[stored] = target

        def finish() -> PerRank:
            if stored in self.found.per_rank_values:
                target.value = _filled(target.value, self.found.per_rank_values[stored], name)
            return target

        return finish

    def _tensor(self, target: Any, node: Json, name: str) -> Finish:
        if not self._selected(name):
            return lambda: target
        is_leaf = isinstance(node, Mapping) and node.get("$") == "tensor"
        if isinstance(target, np.ndarray) and is_leaf and _can_be_filled(target):
            self.found.reads.append(TensorRead(name, int(node["i"]), torch.from_numpy(target)))
        elif isinstance(target, torch.Tensor) and is_leaf:
            self.found.reads.append(TensorRead(name, int(node["i"]), target))
        else:
            return self._unlike(target, node, name)
        return lambda: target

    def _unlike(self, target: Any, node: Json, name: str) -> Finish:
        self.found.problems.append((name, _kind_of_node(node), _kind_of(target)))
        return lambda: target

    def _mapping(
        self, target: Mapping[Any, Any], node: Mapping[str, Any], name: str, stateful: bool
    ) -> Finish:
        nodes = dict(_items_of_node(node) or ())
        finishers: dict[Any, Finish] = {}
        dropped = []
        for key, value in target.items():
            if key in nodes:
                finishers[key] = self.visit(value, nodes[key], join_name(name, key), stateful)
            elif not stateful or _holds_tensors(value):
                self.found.missing += self._leaves(value, join_name(name, key), _items_of_value)
            elif self._include is None:
                dropped.append(key)
        for key, item in nodes.items():
            if key not in target:
                self._surplus(item, join_name(name, key), stateful, finishers, key)

        def finish() -> Any:
            done = {key: finisher() for key, finisher in finishers.items()}
            # An object gets what it once gave, without what it holds now; its own dict may be what it gave us.
            taker = copy.copy(target) if dropped else target
            if isinstance(taker, MutableMapping):
                for key in dropped:
                    del taker[key]
                for key, value in done.items():  # not update(), which adds to what a Counter has
                    taker[key] = value
                return taker
            return {key: value for key, value in {**taker, **done}.items() if key not in dropped}

        return finish

    def _surplus(self, node: Json, name: str, stateful: bool, finishers: dict[Any, Finish], key: Any) -> None:
        """A key that only the checkpoint has: a Stateful object takes it, everything else is reported."""
        if stateful:
            finishers[key] = self._fresh(node)
        else:
            self.found.unexpected += self._leaves(node, name, _items_of_node)

    def _fresh(self, node: Json) -> Finish:
        def note(leaf: Mapping[str, Any]) -> None:
            if leaf["$"] == "tensor":
                self.found.fresh[int(leaf["i"])] = None

        decode(node, note)
        return lambda: decode(node, lambda leaf: self.found.fresh.get(int(leaf.get("i", -1))))

    def _sequence(self, target: Any, items: list[Json], name: str, stateful: bool) -> Finish:
        finishers = [
            self.visit(value, item, join_name(name, place), stateful)
            for place, (value, item) in enumerate(zip(target, items, strict=True))
        ]

        def finish() -> Any:
            done = [finisher() for finisher in finishers]
            if isinstance(target, list):
                target[:] = done
                return target
            return remade(target, done)

        return finish

    def _plain(self, target: Any, node: Json, name: str, stateful: bool) -> Finish:
        if not self._selected(name):
            return lambda: target
        if stateful and has_tensors(node):
            return self._fresh(node)
        if has_tensors(node) or _holds_tensors(target):
            return self._unlike(target, node, name)
        value = decode(node, lambda leaf: None)  # now, while an error has not cost anything yet
        return lambda: value

    def _leaves(self, value: Any, name: str, items_of: Callable[[Any], _Items | None]) -> list[str]:
        """Selected names of the leaves of a value or a node."""
        items = items_of(value)
        if items is None:
            return [name] if self._selected(name) else []
        return [leaf for key, item in items for leaf in self._leaves(item, join_name(name, key), items_of)]


def _items_of_value(value: Any) -> _Items | None:
    """Keys and values of a container of a state; None for a leaf."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else None


def _items_of_node(node: Json) -> _Items | None:
    """Keys and nodes of a container of a manifest's tree; None for a leaf."""
    if isinstance(node, list):
        return enumerate(node)
    if isinstance(node, Mapping) and "$" not in node:
        return node.items()
    if isinstance(node, Mapping) and node["$"] == "dict":
        return [(decode(key, lambda leaf: None), item) for key, item in node["v"]]
    return None


def _give(target: Any, state: Any, name: str) -> Any:
    """An object that has taken its state."""
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            "An object did not take the state that was stored for it.",
            expected=f"load_state_dict of {type(target).__qualname__} to return",
            got=f"{type(error).__name__}: {error}",
            where=name,
            todo="build the object as it was when it was saved; what was loaded before it holds new values",
        ) from error
    return target


def _filled(target: Any, value: Any, name: str) -> Any:
    """A per-rank value, in which the target's objects take what was stored of them."""
    if is_stateful(target):
        return _give(target, value, name)
    if isinstance(target, Mapping) and type(value) is dict:
        return {key: _filled(target.get(key), item, name) for key, item in value.items()}
    if isinstance(target, (list, tuple)) and type(value) in (list, tuple) and len(target) == len(value):
        return type(value)(_filled(inner, item, name) for inner, item in zip(target, value, strict=True))
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, (torch.Tensor, PerRank))


def _can_be_filled(array: np.ndarray) -> bool:  # type: ignore[type-arg]
    """Whether torch can write to an array's memory."""
    return array.flags.writeable and min(array.strides, default=0) >= 0 and is_numpy_dtype(str(array.dtype))


def _kind_of(value: object) -> str:
    if isinstance(value, np.ndarray):
        writeable = "writeable" if value.flags.writeable else "read-only"
        return f"a {writeable} ndarray of dtype {value.dtype} and strides {value.strides}"
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _kind_of_node(node: Json) -> str:
    if isinstance(node, Mapping) and "$" in node:
        return {"tensor": "a tensor", "per_rank": "a PerRank value"}.get(node["$"], f"a {node['$']}")
    return f"a {type(node).__name__}"
