"""Match a state with a checkpoint's catalogue: which stored tensor fills which leaf. Nothing is overwritten yet.

`match` walks the state and the catalogue's tree together and returns a `Match`: the tensors to fill in place, the
leaves that are missing or unexpected, and a `finish` that assigns plain values after all bytes are read. Checkpoints of
all formats are matched here; who reads the bytes is decided afterwards.

    catalogue      what a checkpoint has: the tree, and each tensor's shape, dtype and identity
    match          containers and modules
    leaves         tensors, per-rank values, plain values, and leaves that only the checkpoint has
    optimizers     optimizers, by the names of their parameters
    shared_memory  tensors of the state that share memory, whose stored values must be equal
    result         the result, and the errors if the checkpoint does not fit
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn

from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.state.capture import is_stateful
from vescale_fsdp.checkpoint.state.class_init import starts_from_base
from vescale_fsdp.checkpoint.state.live_objects import (
    LiveObjects,
    aliases_of,
    is_meta,
    load_into,
    remade,
    require_memory,
    same_names,
)
from vescale_fsdp.checkpoint.state.matching.catalogue import Catalogue
from vescale_fsdp.checkpoint.state.matching.leaves import Items, LeafMatcher, holds_tensors, kind_of_node
from vescale_fsdp.checkpoint.state.matching.optimizers import OptimizerMatcher
from vescale_fsdp.checkpoint.state.matching.result import Finish, Match
from vescale_fsdp.checkpoint.state.optimizer_forms import items_of_node
from vescale_fsdp.checkpoint.state.per_rank import PerRank


def match(
    state: Any, catalogue: Catalogue, include: tuple[str, ...] | None, *, live: LiveObjects | None = None
) -> Match:
    """Match a state with what a checkpoint has; overwrites nothing.

    Args:
        include: name patterns; only leaves that match a pattern are loaded. None for all leaves.
        live: the state's modules and optimizers; None to collect them here.
    """
    live = LiveObjects(state) if live is None else live
    leaves = LeafMatcher(catalogue, include)
    matched = leaves.matched
    matched.finish = _Matcher(leaves, live).visit(state, catalogue.tree, "", False)
    matched.ignored = [*catalogue.ignored, *matched.ignored]
    matched.reads = [read for read in matched.reads if matched.fits(read)]
    if matched.missing:
        _excuse_missing(matched, live)
    return matched


def _excuse_missing(matched: Match, live: LiveObjects) -> None:
    """Remove the leaves from ``missing`` that get a value nevertheless, or that the checkpoint may lack."""
    catalogue, filled = matched.catalogue, {read.name for read in matched.reads}
    aliases = aliases_of(live.leaves)
    # A tied tensor is filled if any of its names is.
    missing = [name for name in matched.missing if filled.isdisjoint(aliases.get(name, ()))]
    missing = [name for name in missing if not catalogue.may_lack(name)]
    matched.of_class = [name for name in missing if catalogue.leaves_to_class(name)]
    matched.of_adapter = [name for name in missing if catalogue.leaves_to_adapter(name)]
    if matched.of_adapter and any(map(starts_from_base, live.modules.values())):
        matched.of_adapter = []
    excused = {*matched.of_class, *matched.of_adapter}
    matched.missing = [name for name in missing if name not in excused]


class _Matcher:
    """Walks a state and a manifest's tree; ``leaves`` collects the result."""

    def __init__(self, leaves: LeafMatcher, live: LiveObjects) -> None:
        self._leaves, self._matched = leaves, leaves.matched
        self._live = live
        self._optimizers = OptimizerMatcher(leaves, self.visit)

    def visit(self, target: Any, node: Json, name: str, stateful: bool) -> Finish:
        """Match one value with a node. Returns a function that returns the loaded value, after all tensors are read.

        Args:
            stateful: whether the value is part of an object's state dict; entries that only the checkpoint has are then
                added to it.
        """
        kind = node.get("$") if isinstance(node, Mapping) else None
        if is_stateful(target):
            return self._stateful(target, node, name)
        if isinstance(target, PerRank) or kind == "per_rank":
            return self._leaves.per_rank(target, node, name)
        if isinstance(target, (torch.Tensor, np.ndarray)) or kind in ("tensor", "absent"):
            return self._leaves.tensor(target, node, name)
        if isinstance(target, Mapping):
            # The checkpoint may have optimizer state in another form than this dict: see `optimizer_state`.
            node = self._optimizers.in_form_of(target, node, name, stateful)
            kind = node.get("$") if isinstance(node, Mapping) else None
        if isinstance(target, Mapping) and isinstance(node, Mapping) and kind in (None, "dict"):
            return self._mapping(target, node, name, stateful)
        # The checkpoint may have one dict for several optimizers: torch's get_optimizer_state_dict merges their states.
        if (
            isinstance(target, (list, tuple))
            and isinstance(node, Mapping)
            and (target and all(isinstance(item, torch.optim.Optimizer) for item in target))
        ):
            for each in target:
                require_memory(each, name)
            owners = [
                (child_name(name, index), self._live.named(each, name)) for index, each in enumerate(target)
            ]
            finishers = self._optimizers.match(
                [(n, named) for n, named in owners if named is not None], node, name
            )
            if finishers is not None and len(finishers) == len(target):
                # The index selects `target`; the list is built only to call each `finish`.
                return lambda: (target, [finish() for finish in finishers])[0]
        # A list may be loaded from a tuple, and a tuple from a list.
        items = node.get("v") if kind == "tuple" and isinstance(node, Mapping) else node
        if isinstance(target, (list, tuple)) and isinstance(items, list) and len(items) == len(target):
            return self._sequence(target, items, name, stateful)
        return self._leaves.plain(target, node, name, stateful)

    def _mapping(
        self,
        target: Mapping[Any, Any],
        node: Mapping[str, Any],
        name: str,
        stateful: bool,
        opaque: Collection[Any] = (),
    ) -> Finish:
        """Match a dict. The values of ``opaque`` keys are matched with ``stateful=True``, see `visit`."""
        self._matched.containers.add(name)
        nodes = dict(items_of_node(node) or ())
        # torch.compile and other wrappers may have been added or removed since.
        renamed = same_names(target, nodes)
        nodes = {renamed.get(key, key): item for key, item in nodes.items()}
        finishers: dict[Any, Finish] = {}
        dropped = []
        matched = self._matched
        num_missing, num_stored = len(matched.missing), len(matched.unexpected) + len(matched.ignored)
        for key, value in target.items():
            if key in nodes:
                inner = child_name(name, key)
                finishers[key] = self.visit(value, nodes[key], inner, stateful or key in opaque)
            # Of an object's state, only missing tensors are reported; plain entries that were not saved are ignored.
            elif not stateful or holds_tensors(value):
                self._matched.missing += self._leaves.leaf_names(
                    value, child_name(name, key), self._items_of_value
                )
            elif (
                self._leaves.includes_all
            ):  # with `include`, the object's entries that are not loaded are kept
                dropped.append(key)
        for key, item in nodes.items():
            inner = child_name(name, key)
            if key not in target and stateful:
                # The object's load_state_dict accepts or refuses it.
                finishers[key] = self._leaves.fresh(item, inner)
            elif key not in target:
                is_ignored = name == "" and not (kind_of_node(item) == "a tensor" and _has_tensor(target))
                names = self._matched.ignored if is_ignored else self._matched.unexpected
                names += self._leaves.leaf_names(item, inner, items_of_node)
        has_more = len(matched.unexpected) + len(matched.ignored) > num_stored
        if not stateful and has_more and _has_tensor(target) and nodes.keys().isdisjoint(target):
            matched.apart[name] = matched.missing[num_missing:]

        def finish() -> Any:
            done = {key: finisher() for key, finisher in finishers.items()}
            # An object's load_state_dict gets only the stored entries. Other entries are deleted from a copy, because
            # state_dict() may have returned the object's own dict.
            taker = copy.copy(target) if dropped else target
            if isinstance(taker, MutableMapping):
                for key in dropped:
                    del taker[key]
                for key, value in done.items():  # not update(), which adds the counts of a Counter
                    taker[key] = value
                return taker
            # A mapping that cannot be changed is replaced.
            return {key: value for key, value in {**taker, **done}.items() if key not in dropped}

        return finish

    def _sequence(self, target: Any, items: list[Json], name: str, stateful: bool) -> Finish:
        finishers = [
            self.visit(value, item, child_name(name, index), stateful)
            for index, (value, item) in enumerate(zip(target, items, strict=True))
        ]

        def finish() -> Any:
            done = [finisher() for finisher in finishers]
            if isinstance(target, list):
                target[:] = done
                return target
            return remade(target, done)

        return finish

    def _items_of_value(self, value: Any) -> Items | None:
        """Return the keys and values of a container of the state; None for a leaf."""
        if isinstance(value, nn.Module):
            value = self._live.module_state(value).values
        if isinstance(value, Mapping):
            return value.items()
        return enumerate(value) if isinstance(value, (list, tuple)) else None

    def _stateful(self, target: Any, node: Json, name: str) -> Finish:
        if isinstance(target, nn.Module):
            return self._module(target, node, name)
        if isinstance(target, torch.optim.Optimizer):
            require_memory(target, name)
            named = self._live.named(target, name)
            finishers = None if named is None else self._optimizers.match([(name, named)], node, name)
            if finishers is not None:
                return finishers[0]
            if named is not None:  # the node is not optimizer state
                return self._leaves.record_other_kind(target, node, name)
        inner = self.visit(target.state_dict(), node, name, True)
        return lambda: load_into(target, inner(), name)

    def _module(self, module: nn.Module, node: Json, name: str) -> Finish:
        if not isinstance(node, Mapping) or node.get("$") not in (None, "dict"):
            return self._leaves.record_other_kind(module, node, name)
        state = self._live.module_state(module)
        opaque = [key for key, value in state.values.items() if not isinstance(value, torch.Tensor)]
        inner = self._mapping(state.values, node, name, False, opaque)

        def finish() -> Any:
            state.raw.update({state.raw_names[short]: value for short, value in inner().items()})
            # Tensors are filled in place, but a module's hooks may have put copies into its state dict, which only its
            # load_state_dict takes back. Tensors that stay on the meta device have no value to give.
            values = {name: value for name, value in state.raw.items() if not _is_meta(value)}
            is_whole = len(values) == len(state.raw)
            return load_into(module, values, name, **({} if is_whole else {"strict": False}))

        return finish


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_meta(value)


def _has_tensor(target: Mapping[Any, Any]) -> bool:
    """Return whether a dict has tensors of its own, like a module's state dict, and not only in other containers."""
    return any(isinstance(value, (torch.Tensor, np.ndarray)) for value in target.values())
