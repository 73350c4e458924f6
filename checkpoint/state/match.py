"""Match a state with a manifest's tree: which stored tensor fills which leaf. Nothing is overwritten yet.

`match` walks the state and the tree together and returns a `Match`: the tensors to fill in place, the leaves that are
missing or unexpected, and a `finish` that assigns plain values after all bytes are read. Live optimizers are matched by
the names of their parameters (`live_objects`); the checkpoint may have their state in any form of `optimizer_state`.
State that a live optimizer does not have yet is created with the checkpoint's shapes and dtypes.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name, decode, dotted_name, has_tensors
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, is_numpy_dtype
from vescale_fsdp.checkpoint.state.capture import is_stateful, remade
from vescale_fsdp.checkpoint.state.live_objects import (
    ChecksStateDict,
    LiveObjects,
    NamedOptimizer,
    same_names,
)
from vescale_fsdp.checkpoint.state.optimizer_state import (
    OptimizerGroup,
    OptimizerState,
    flattened_keys,
    items_of_node,
    optimizer_state,
)
from vescale_fsdp.checkpoint.state.per_rank import PerRank
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.torch_modes import NULL_CONTEXT

Finish = Callable[[], Any]
Strict = bool | Literal["missing"]
# Limits the time to find a renamed prefix: this many missing names are compared, each with as many unexpected names.
_TRIED_NAMES = 64
_Items = Iterable[tuple[Any, Any]]


class TensorRead(NamedTuple):
    """A read of the manifest's tensor ``number`` into ``tensor``, which has ``name`` in the state."""

    name: str
    number: int
    tensor: torch.Tensor


@dataclass
class Match:
    """The corresponding leaves of a state and a manifest.

    Attributes:
        reads: tensors of the state to fill, each with the number of the manifest's tensor.
        fresh: tensors of the checkpoint that an object of the state lacks; the caller allocates and fills them.
        per_rank: name in the manifest -> per-rank leaf of the state.
        per_rank_values: name in the manifest -> value to load; set by the caller.
        missing: leaves of the state that the checkpoint lacks.
        unexpected: leaves of the checkpoint that the state lacks in what it has, such as a module.
        left_out: leaves of the checkpoint under keys that the state lacks, such as another object's.
        problems: (name, kind in the checkpoint, kind in the state) of each leaf whose kinds differ.
        mismatched: tensors with different shapes or dtypes: name -> (in the checkpoint, in the state).
        containers: names of the dicts and lists that were visited, in the state or the checkpoint.
        unused: name patterns that match no leaf of the state or the checkpoint.
        finish: assigns plain values and loads the state of objects; called once, after all tensors are read.
    """

    reads: list[TensorRead] = field(default_factory=list)
    fresh: list[NewTensor] = field(default_factory=list)
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    per_rank_values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict)
    containers: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    finish: Finish = field(default=lambda: None)

    def fits(self, read: TensorRead, dtype: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor of the state has the stored dtype and shape; if not, add it to ``mismatched``."""
        stored = f"{dtype} {list(shape)}"
        own = f"{dtype_name(read.tensor.dtype)} {list(read.tensor.shape)}"
        if stored != own:
            self.mismatched[read.name] = (stored, own)
        return stored == own

    def require_fit(self, where: str, strict: Strict, *, whole: bool = False) -> None:
        """Check that the checkpoint fits the state.

        Args:
            where: the checkpoint.
            strict: False allows leaves that are missing, unexpected or mismatched, and patterns that match no leaf;
                ``"missing"`` allows only unexpected leaves.
            whole: whether leaves under keys that the state lacks are unexpected, too.

        Raises:
            CheckpointError: if the checkpoint does not fit; names the leaves.
        """
        if self.problems:  # even if not strict: no value of one kind can replace a value of the other
            name, stored, own = self.problems[0]
            raise CheckpointError(
                f"{len(self.problems)} leaves of the state are of another kind than in the checkpoint.",
                expected=f"{stored} (as saved)",
                got=own,
                where=f"{name} in {where}",
                todo="build the state as it was at the save",
            )
        if not strict and self.mismatched:
            # A warning, because strict=False is usually meant for different names: another shape may be a mistake.
            warnings.warn(
                f"{len(self.mismatched)} tensors keep their values, because they have another shape or dtype in "
                f"{where}: {some(self.mismatched)}",
                stacklevel=2,
            )
        if not strict:
            return
        if self.mismatched:
            name, (stored, own) = next(iter(self.mismatched.items()))
            # The shapes, which follow the dtypes in the text, are equal: only the dtypes differ.
            is_cast = stored.split(" ", 1)[1] == own.split(" ", 1)[1]
            raise CheckpointError(
                f"{len(self.mismatched)} tensors have another shape or dtype than in the checkpoint.",
                expected=f"{stored} (as saved)",
                got=own,
                where=f"{name} in {where}",
                todo="pass dtype='state' to cast floats to the state's dtypes"
                if is_cast
                else "build the state as it was at the save",
            )
        if self.unused:
            raise CheckpointError(
                "A name pattern matches no leaf.",
                expected="patterns for names of leaves: their keys, joined by dots",
                got=", ".join(map(repr, sorted(self.unused))),
                where=where,
                todo="'model.*' matches all leaves of 'model'; strict=False allows patterns that match none",
            )
        if self.missing or (strict != "missing" and (self._only_stored if whole else self.unexpected)):
            raise CheckpointError(
                "The state and the checkpoint do not have the same leaves.",
                expected="equal names",
                got=f"missing in the checkpoint: {some(self.missing, 5)}; "
                f"unexpected, only in the checkpoint: {some(self._only_stored, 5)}",
                where=where,
                todo=self._how_to_fit(),
            )

    @property
    def _only_stored(self) -> list[str]:
        """Names in the checkpoint alone. If leaves are missing, they may be stored under a key that is left out."""
        return [*self.unexpected, *self.left_out]

    def _how_to_fit(self) -> str:
        """Return what to do if the state and the checkpoint do not have the same leaves."""
        if not self.missing:
            return (
                "to load a part, pass include= with patterns ('model.*' for a model alone); "
                "or pass strict=False to load what both have"
            )
        if self._only_stored and self.renaming is None:
            return (
                "if leaves were renamed, rename them in a copy: vescale-convert to-vescale .. --rules FILE; "
                "or pass strict=False to load what both have and keep the values of missing leaves"
            )
        return (
            f"{self._how_to_rename()}pass strict=False to load what both have and keep the values of missing leaves, "
            "or include= with patterns"
        )

    @property
    def renaming(self) -> tuple[str, str] | None:
        """(prefix of missing names, the checkpoint's prefix for them); None if less than half of the missing names fit.

        >>> Match(missing=["model.0.bias", "model.1.bias"], unexpected=["model.m.0.bias", "model.m.1.bias"]).renaming
        ('model.', 'model.m.')
        """
        left, best, most = set(self._only_stored), None, 0
        # Last part -> names: two names with different prefixes have the same last part.
        by_end: dict[str, list[str]] = {}
        for name in self._only_stored:
            by_end.setdefault(name.rpartition(".")[2], []).append(name)
        tried: set[tuple[str, str]] = set()
        for name in self.missing[:_TRIED_NAMES]:  # a part of the names, because the loops take quadratic time
            for other in by_end.get(name.rpartition(".")[2], ())[:_TRIED_NAMES]:
                start = _different_starts(name, other)
                if start in tried:
                    continue
                tried.add(start)
                own, stored = start
                num = sum(m.startswith(own) and stored + m[len(own) :] in left for m in self.missing)
                if num > most:
                    best, most = start, num
        return best if 2 * most >= len(self.missing) else None

    def _how_to_rename(self) -> str:
        """Return advice for a message: how to load the checkpoint under its names; empty if `renaming` is None."""
        if self.renaming is None:
            return ""
        own, stored = self.renaming
        text = f"the checkpoint has {stored!r} where the state has {own!r}: "
        if stored[:-1] in self.containers and own == "":  # [:-1]: without the dot
            return f"{text}pass {{{stored[:-1]!r}: state}}, or "
        if own[:-1] in self.containers and stored == "":
            return f"{text}pass the value of the key {own[:-1]!r} as the state, or "
        container = self._container_of(own)
        if container and self._container_of(stored) == container:
            old, new = own[len(container) + 1 :], stored[len(container) + 1 :]
            named = (f"{new!r} + " if new else "") + (f"name.removeprefix({old!r})" if old else "name")
            renamed = f"{{{named}: value for name, value in model.state_dict().items()}}"
            return f"{text}pass {{{container!r}: {renamed}}}, or "
        return f"{text}rename it, or "

    def _container_of(self, start: str) -> str:
        """Return the innermost container whose children have this prefix; empty if there is none."""
        return max((name for name in self.containers if start.startswith(f"{name}.")), key=len, default="")


def _has_tensor(target: Mapping[Any, Any]) -> bool:
    """Return whether a dict has tensors of its own, like a module's state dict, and not only in other containers."""
    return any(isinstance(value, (torch.Tensor, np.ndarray)) for value in target.values())


def _different_starts(name: str, other: str) -> tuple[str, str]:
    """Return what is left of two names when their equal last parts are removed."""
    parts, others = (re.split(r"(?<=[.])", text) for text in (name, other))  # each part keeps its dot
    while parts and others and parts[-1] == others[-1]:
        parts.pop()
        others.pop()
    return "".join(parts), "".join(others)


def match(
    state: Any,
    tree: Json,
    include: tuple[str, ...] | None,
    *,
    live: LiveObjects | None = None,
    gives_modules: bool = True,
) -> Match:
    """Match a state with a manifest's tree; overwrites nothing.

    Args:
        include: name patterns; only leaves that match a pattern are loaded. None for all leaves.
        live: the state's modules and optimizers; None to collect them here.
        gives_modules: whether ``finish`` passes all entries to a module's ``load_state_dict``. Otherwise it passes only
            the entries that are not tensors, because tensors are filled in place.
    """
    matcher = _Matcher(LiveObjects(state) if live is None else live, include, gives_modules)
    matcher.matched.finish = matcher.visit(state, tree, "", False)
    return matcher.matched


class _Matcher:
    """Walks a state and a manifest's tree, and collects the result in ``matched``."""

    def __init__(self, live: LiveObjects, include: tuple[str, ...] | None, gives_modules: bool) -> None:
        self._live = live
        self._gives_modules = gives_modules
        self._shared_new: dict[int, NewTensor] = {}  # by number in the manifest
        self._include = include
        self.matched = Match(unused=set(include or ()))

    def _selected(self, name: str) -> bool:
        if self._include is None:
            return True
        # A pattern may also be in the manifest's spelling: keys joined by "/", with "~1" for a "/" inside a key.
        fitting = {
            pattern
            for pattern in self._include
            if fnmatchcase(name, pattern) or fnmatchcase(name, dotted_name(pattern))
        }
        self.matched.unused -= fitting
        return bool(fitting)

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
            return self._per_rank(target, node, name)
        if isinstance(target, (torch.Tensor, np.ndarray)) or kind in ("tensor", "absent"):
            return self._tensor(target, node, name)
        if isinstance(target, Mapping):
            # The checkpoint may have optimizer state in another form than this dict: see `optimizer_state`.
            node = self._in_form_of(target, node, name, stateful)
            kind = node.get("$") if isinstance(node, Mapping) else None
        if isinstance(target, Mapping) and isinstance(node, Mapping) and kind in (None, "dict"):
            return self._mapping(target, node, name, stateful)
        # The checkpoint may have one dict for several optimizers: torch's get_optimizer_state_dict merges their states.
        if (
            isinstance(target, (list, tuple))
            and isinstance(node, Mapping)
            and (target and all(isinstance(item, torch.optim.Optimizer) for item in target))
        ):
            owners = [
                (child_name(name, index), self._live.named(each, name)) for index, each in enumerate(target)
            ]
            finishers = self._optimizers([(n, named) for n, named in owners if named is not None], node, name)
            if finishers is not None and len(finishers) == len(target):
                # The index selects `target`; the list is built only to call each `finish`.
                return lambda: (target, [finish() for finish in finishers])[0]
        # A list may be loaded from a tuple, and a tuple from a list.
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
        self.matched.per_rank[stored] = target

        def finish() -> PerRank:
            if stored in self.matched.per_rank_values:  # else no saved rank has a value for this rank
                target.value = _filled(target.value, self.matched.per_rank_values[stored], name)
            return target

        return finish

    def _tensor(self, target: Any, node: Json, name: str) -> Finish:
        if not self._selected(name):
            return lambda: target
        is_leaf = isinstance(node, Mapping) and node.get("$") == "tensor"
        if isinstance(target, np.ndarray) and is_leaf and _is_fillable(target):
            # `from_numpy` shares the array's memory, so the read fills the array.
            self.matched.reads.append(TensorRead(name, int(node["i"]), torch.from_numpy(target)))
        elif isinstance(target, torch.Tensor) and is_leaf:
            self.matched.reads.append(TensorRead(name, int(node["i"]), target))
        else:
            return self._unlike(target, node, name)
        return lambda: target

    def _unlike(self, target: Any, node: Json, name: str) -> Finish:
        """Record that a value and its node are of different kinds; the value is kept."""
        self.matched.problems.append((name, _kind_of_node(node), _kind_of(target)))
        return lambda: target

    def _mapping(
        self,
        target: Mapping[Any, Any],
        node: Mapping[str, Any],
        name: str,
        stateful: bool,
        opaque: Collection[Any] = (),
    ) -> Finish:
        """Match a dict. The values of ``opaque`` keys are matched with ``stateful=True``, see `visit`."""
        self.matched.containers.add(name)
        nodes = dict(items_of_node(node) or ())
        # torch.compile and other wrappers may have been added or removed since.
        renamed = same_names(target, nodes)
        nodes = {renamed.get(key, key): item for key, item in nodes.items()}
        finishers: dict[Any, Finish] = {}
        dropped = []
        for key, value in target.items():
            if key in nodes:
                inner = child_name(name, key)
                finishers[key] = self.visit(value, nodes[key], inner, stateful or key in opaque)
            # Of an object's state, only missing tensors are reported; plain entries that were not saved are left out.
            elif not stateful or _holds_tensors(value):
                self.matched.missing += self._leaves(value, child_name(name, key), self._items_of_value)
            elif self._include is None:  # with `include`, the object's entries that are not loaded are kept
                dropped.append(key)
        for key, item in nodes.items():
            inner = child_name(name, key)
            if key not in target and stateful:
                # The object's load_state_dict accepts or refuses it.
                finishers[key] = self._fresh(item, inner)
            elif key not in target:
                is_left_out = name == "" and not (_kind_of_node(item) == "a tensor" and _has_tensor(target))
                names = self.matched.left_out if is_left_out else self.matched.unexpected
                names += self._leaves(item, inner, items_of_node)

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

    def _fresh(self, node: Json, name: str, owner: tuple[NamedOptimizer, str] | None = None) -> Finish:
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
            self._shared_new[number] = self._new(new)
        return self._shared_new[number].value

    def _new(self, tensor: NewTensor) -> NewTensor:
        self.matched.fresh.append(tensor)
        return tensor

    # -- live modules and optimizers --------------------------------------------------------------------

    def _stateful(self, target: Any, node: Json, name: str) -> Finish:
        if isinstance(target, nn.Module):
            return self._module(target, node, name)
        if isinstance(target, torch.optim.Optimizer):
            named = self._live.named(target, name)
            finishers = None if named is None else self._optimizers([(name, named)], node, name)
            if finishers is not None:
                return finishers[0]
            if named is not None:  # the node is not optimizer state
                return self._unlike(target, node, name)
        inner = self.visit(target.state_dict(), node, name, True)
        return lambda: _give(target, inner(), name)

    def _module(self, module: nn.Module, node: Json, name: str) -> Finish:
        if not isinstance(node, Mapping) or node.get("$") not in (None, "dict"):
            return self._unlike(module, node, name)
        state = self._live.module_state(module)
        opaque = [key for key, value in state.values.items() if not isinstance(value, torch.Tensor)]
        inner = self._mapping(state.values, node, name, False, opaque)

        def finish() -> Any:
            values = {state.raw_names[short]: value for short, value in inner().items()}
            if self._gives_modules:
                state.raw.update(values)
                return _give(module, state.raw, name)
            # The tensors are already filled in place. Not strict, because their names are left out.
            others = {raw: value for raw, value in values.items() if not isinstance(value, torch.Tensor)}
            return _give(module, others, name, strict=False) if others else module

        return finish

    def _optimizers(
        self, targets: list[tuple[str, NamedOptimizer]], node: Json, name: str
    ) -> list[Finish] | None:
        """Match optimizers with one node that has the state of all these optimizers.

        Returns None if the node is not optimizer state, or numbers the parameters of several optimizers.
        """
        known = [fqn for _, named in targets for fqn in named.params]
        stored = optimizer_state(node, known)
        if stored is None or (stored.is_numbered and len(targets) != 1):
            return None
        stored = stored.named(targets[0][1].names, name)
        stored = stored.renamed(same_names(known, stored.names))
        for fqn in stored.names:
            if fqn not in known:
                part = child_name(child_name(name, "state"), fqn)
                # `None` makes a parameter without state one leaf, under the parameter's name.
                self.matched.unexpected += self._leaves(
                    dict(stored.state.get(fqn, {})) or None, part, items_of_node
                )
        return [self._optimizer(named, stored, where) for where, named in targets]

    def _optimizer(self, named: NamedOptimizer, stored: OptimizerState, name: str) -> Finish:
        """Match one optimizer. The returned function calls the optimizer's ``load_state_dict``."""
        states = named.state_of
        state = {
            fqn: self._parameter_state(named, states, stored, fqn, child_name(child_name(name, "state"), fqn))
            for fqn in named.params
        }
        options = [
            self._options(named, stored, number, child_name(child_name(name, "param_groups"), number))
            for number in range(len(named.names))
        ]
        more = {
            key: self._fresh(item, child_name(name, key))
            for key, item in stored.more.items()
            if self._selected(child_name(name, key))
        }
        of_no_parameter = {
            key: self.visit(named.other_state[key], item, where, True)
            if key in named.other_state
            else self._fresh(item, where)
            for key, item in stored.other_state.items()
            if self._selected(where := child_name(child_name(name, "state"), key))
        }
        # Nothing is loaded into the optimizer, so its load_state_dict is not called.
        if not any((more, of_no_parameter, *options)) and not any(p.is_changed for p in state.values()):
            return lambda: named.optimizer
        own_groups = named.raw["param_groups"]

        def whole(value: Callable[[Finish], Any]) -> dict[str, Any]:
            return {
                **named.raw,
                **{key: value(finish) for key, finish in more.items()},
                "state": {
                    **named.other_state,
                    **{key: value(finish) for key, finish in of_no_parameter.items()},
                    **{
                        named.numbers[fqn]: {kind: value(finish) for kind, finish in parts.kinds.items()}
                        for fqn, parts in state.items()
                        if parts.kinds
                    },
                },
                "param_groups": [
                    {**own, **{option: value(finish) for option, finish in loaded.items()}}
                    for own, loaded in zip(own_groups, options, strict=True)
                ],
            }

        if isinstance(named.optimizer, ChecksStateDict):
            # Here, not in `finish`, so that errors are raised before anything is overwritten.
            named.optimizer.check_state_dict(whole(lambda finish: finish()))

        def finish() -> Any:
            loaded = whole(lambda finish: finish())
            _give(named.optimizer, loaded, name)
            for own, group in zip(own_groups, named.optimizer.param_groups, strict=True):
                for option, value in own.items():
                    if isinstance(value, torch.Tensor) and isinstance(group.get(option), torch.Tensor):
                        # In place, because a scheduler may have a reference to the option's tensor.
                        group[option] = value.copy_(group[option])
            return named.optimizer

        return finish

    def _parameter_state(
        self,
        named: NamedOptimizer,
        states: Mapping[str, Mapping[Any, Any]],
        stored: OptimizerState,
        fqn: str,
        name: str,
    ) -> _ParameterState:
        """Match the state of one parameter. Kinds that ``include`` does not select are kept; all others are replaced by
        the checkpoint's, and removed if the checkpoint lacks them.
        """
        own = states.get(fqn, {})
        kept: dict[Any, Finish] = {kind: partial(_identity, value) for kind, value in own.items()}
        if fqn not in stored.names:
            self.matched.missing += [name] if self._selected(name) else []
            return _ParameterState(kept, False)
        parts = stored.state.get(fqn, {})
        is_changed = False
        for kind in [*parts, *(kind for kind in own if kind not in parts)]:
            inner = child_name(name, kind)
            if not self._selected(inner):
                continue
            is_changed = True
            if kind not in parts:
                del kept[kind]
                continue
            item, value = parts[kind], own.get(kind)
            is_leaf = isinstance(item, Mapping) and item.get("$") == "tensor"
            if is_leaf and isinstance(value, torch.Tensor) and value.ndim:
                self.matched.reads.append(TensorRead(inner, int(item["i"]), value))
            elif is_leaf:
                # Each parameter gets its own tensor, even if the checkpoint shares one between parameters: an optimizer
                # that steps many parameters in one call would increment a shared step several times.
                new = NewTensor(inner, int(item["i"]), named.params[fqn], str(kind), named.optimizer)
                kept[kind] = partial(getattr, self._new(new), "value")  # read late: allocated after the match
            elif isinstance(value, Mapping):
                kept[kind] = self.visit(value, item, inner, True)
            else:
                kept[kind] = self._fresh(item, inner, (named, fqn))
        return _ParameterState(kept, is_changed or not own)

    def _options(
        self, named: NamedOptimizer, stored: OptimizerState, number: int, name: str
    ) -> dict[str, Finish]:
        """Return the options of a param group to load: name -> function that returns the value."""
        own, fqns = named.raw["param_groups"][number], named.names[number]
        # First, because `options_for` raises if stored groups disagree: no error if no option is to be loaded.
        if self._include is not None and not any(self._selected(child_name(name, option)) for option in own):
            return {}
        stored_options = stored.options_for(fqns, name)
        loaded: dict[str, Finish] = {}
        for option, node in stored_options.items():
            inner = child_name(name, option)
            # Parameters and their names stay those of the live group.
            if option not in ("params", "param_names") and self._selected(inner):
                fresh = self._fresh(node, inner)
                loaded[option] = partial(lambda own, fresh: _like(own, fresh()), own.get(option), fresh)
        for option in named.optimizer.defaults:
            # A flag (bool) may be missing, because versions of torch differ in flags; a number is missing only in the
            # state of another class of optimizer.
            is_number = isinstance(own.get(option), (int, float, tuple)) and not isinstance(own[option], bool)
            is_missing = bool(stored_options) and option not in stored_options
            if is_missing and is_number and self._selected(child_name(name, option)):
                self.matched.missing.append(child_name(name, option))
        return loaded

    def _in_form_of(self, target: Mapping[Any, Any], node: Json, name: str, stateful: bool) -> Json:
        """Convert a node of optimizer state to the target's form, if the target is a dict of optimizer state.

        Returns the node unchanged for other targets and nodes.

        Raises:
            CheckpointError: if the target has no entries for state that is to be loaded.
        """
        own_groups = target.get("param_groups")
        is_flat = flattened_keys(target)
        if not is_flat and not _are_groups(own_groups):
            return node
        groups = [] if is_flat else [list(group["params"]) for group in own_groups or ()]
        is_numbered = any(type(param) is int for params in groups for param in params)
        stored = optimizer_state(node, [str(param) for params in groups for param in params])
        if stored is None:
            return node
        has_room = any(key.startswith("state.") for key in target) if is_flat else bool(target.get("state"))
        # The target has no state yet, or numbers parameters that the checkpoint names. This is an error only if the
        # state is selected.
        is_short = stored.state and (not has_room or (is_numbered and not stored.is_numbered))
        leaves = self._leaves(node, name, items_of_node) if is_short and not stateful else []
        if any(".state." in f".{leaf.removeprefix(name)}." for leaf in leaves):
            raise _no_room(name, "numbers" if is_numbered else "names", has_room)
        # A dict alone does not say which name has which number.
        if is_numbered or (is_flat and stored.is_numbered):
            return node
        if is_flat:
            return (
                node
                if flattened_keys(dict(items_of_node(node) or ()))
                else replace(stored, other_state={}).flattened()
            )
        if isinstance(node, Mapping) and [group.names for group in stored.groups] == groups:
            return node if "param_groups" in node else stored.nested()
        stored = stored.named(groups, name)
        # The target's groups may differ from the stored ones: each gets the options of its own parameters.
        regrouped = [OptimizerGroup(names, stored.options_for(names, name)) for names in groups]
        return replace(stored, groups=regrouped).nested()

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

    def _plain(self, target: Any, node: Json, name: str, stateful: bool) -> Finish:
        if not self._selected(name):
            return lambda: target
        if stateful and has_tensors(node):
            return self._fresh(node, name)
        if has_tensors(node) or _holds_tensors(target):
            return self._unlike(target, node, name)
        # Decoded here, not in the returned function, so that errors are raised before anything is overwritten.
        value = decode(node, lambda leaf: None)
        return lambda: value

    def _leaves(self, value: Any, name: str, items_of: Callable[[Any], _Items | None]) -> list[str]:
        """Return the names of those leaves of a value, or of a node, that ``include`` selects."""
        items = items_of(value)
        if items is None:
            return [name] if self._selected(name) else []
        self.matched.containers.add(name)
        return [leaf for key, item in items for leaf in self._leaves(item, child_name(name, key), items_of)]

    def _items_of_value(self, value: Any) -> _Items | None:
        """Return the keys and values of a container of the state; None for a leaf."""
        if isinstance(value, nn.Module):
            value = self._live.module_state(value).values
        if isinstance(value, Mapping):
            return value.items()
        return enumerate(value) if isinstance(value, (list, tuple)) else None


class _ParameterState(NamedTuple):
    """The new state of a parameter by kind, and whether the optimizer's ``load_state_dict`` must be called for it."""

    kinds: dict[Any, Finish]
    is_changed: bool


def _identity(value: Any) -> Any:
    return value


def _like(own: Any, value: Any) -> Any:
    """Convert a loaded option to the type that the live optimizer has: number or tensor, list or tuple."""
    if isinstance(own, tuple) and isinstance(value, (list, tuple)) and len(own) == len(value):
        return tuple(_like(a, b) for a, b in zip(own, value, strict=True))
    if isinstance(own, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(own, value)
    if isinstance(own, (int, float)) and isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    return value


def _are_groups(value: Any) -> bool:
    """Return whether a value is an optimizer's list of param groups."""
    return isinstance(value, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in value
    )


def _no_room(name: str, kind: str, has_room: bool) -> CheckpointError:
    got = f"a dict with state by {kind}" + ("" if has_room else ", which has no state yet")
    return CheckpointError(
        "The checkpoint's optimizer state cannot be loaded into a dict of optimizer state.",
        expected="the optimizer itself, and its module: {'model': model, 'optimizer': optimizer}",
        got=got,
        where=name or "the state itself",
        todo="pass the optimizer instead of optimizer.state_dict(); strict=False does not help here",
    )


def _give(target: Any, state: Any, name: str, **options: Any) -> Any:
    """Call an object's ``load_state_dict`` with ``options``, and return the object."""
    # torch allows writes to inference tensors only in inference mode.
    is_inference = isinstance(target, nn.Module) and any(part.is_inference() for part in target.parameters())
    try:
        with torch.inference_mode() if is_inference else NULL_CONTEXT:
            target.load_state_dict(state, **options)
    except Exception as error:  # any class: load_state_dict may be the user's code
        raise CheckpointError(
            "An object's load_state_dict failed with the stored state.",
            expected=f"load_state_dict of {type(target).__qualname__} to return",
            got=f"{type(error).__name__}: {error}",
            where=name,
            todo="build the object as it was at the save; leaves that were loaded before it have new values",
        ) from error
    return target


def _filled(target: Any, value: Any, name: str) -> Any:
    """Return the new per-rank value. Stateful objects in the target are kept, and load the stored state."""
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


def _is_fillable(array: np.ndarray) -> bool:  # type: ignore[type-arg]
    """Return whether torch can write to an array's memory: not if it is read-only or has negative strides."""
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


# Kinds of state that are single numbers, even where the parameter is 0-d and its other state has the same shape.
_PER_PARAMETER = ("step", "eta", "mu", "mu_product")

# torch optimizers whose state has the parameter's shape or is a single number: other shapes are an error.
_SHAPED_AS_PARAMETERS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


@dataclass(eq=False)
class NewTensor:
    """A tensor that the state lacks, to be allocated and filled from the checkpoint.

    Attributes:
        name: name of the leaf.
        number: number of the tensor in the manifest.
        param: for optimizer state, the parameter; else None.
        kind: for optimizer state, its kind, such as ``exp_avg``.
        optimizer: for optimizer state, the optimizer.
        value: the tensor after `make`; None before.
    """

    name: str
    number: int
    param: torch.Tensor | None = None
    kind: str = ""
    optimizer: torch.optim.Optimizer | None = None
    value: torch.Tensor | None = None

    def make(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, is_sharded: bool, where: str
    ) -> torch.Tensor:
        """Allocate the tensor: sharded like the parameter if it has the parameter's shape, else unsharded.

        Args:
            shape, dtype: shape and dtype in the checkpoint.
            is_sharded: whether the tensor is sharded in the checkpoint.
            where: the checkpoint.

        Raises:
            CheckpointError: if the sharding is unknown, or the shape does not fit the parameter.
        """
        param = self.param
        if param is None:
            if is_sharded:
                raise CheckpointError(
                    "An object of the state lacks a sharded tensor of the checkpoint.",
                    expected="a tensor of that name in its state_dict(), which defines the sharding",
                    got="no such tensor",
                    where=f"{self.name} in {where}",
                    todo="for an optimizer, put the optimizer itself and its module into the state",
                )
            self.value = torch.empty(shape, dtype=dtype, device="cpu")
        elif tuple(param.shape) == shape and (shape or self.kind not in _PER_PARAMETER):
            self.value = torch.empty_like(param, dtype=dtype, requires_grad=False)
        # Single numbers, such as step counts, are on the CPU as in torch. Those of LBFGS are created below.
        elif not shape and not isinstance(self.optimizer, torch.optim.LBFGS):
            self.value = torch.empty((), dtype=dtype, device="cpu")
        elif isinstance(self.optimizer, _SHAPED_AS_PARAMETERS):
            raise CheckpointError(
                "Optimizer state in the checkpoint has another shape than its parameter.",
                expected=f"{list(param.shape)}, the parameter's",
                got=list(shape),
                where=f"{self.name} in {where}",
                todo="build the model as it was at the save",
            )
        elif not isinstance(param, DTensor):
            self.value = torch.empty(shape, dtype=dtype, device=param.device)
        elif is_sharded:
            raise CheckpointError(
                "The sharding of optimizer state is unknown: the state has another shape than its parameter.",
                expected="state in the optimizer, which defines the sharding",
                got=f"{list(shape)} for a parameter of {list(param.shape)}, and no state in the optimizer",
                where=f"{self.name} in {where}",
                todo="use an optimizer that creates its state when it is built",
            )
        else:
            # Replicated DTensors, also for numbers: LBFGS computes them from the gradients of all parameters.
            whole = torch.empty(shape, dtype=dtype, device=param.to_local().device)
            replicated = [Replicate()] * param.device_mesh.ndim
            # `run_check` would communicate.
            self.value = DTensor.from_local(whole, param.device_mesh, replicated, run_check=False)
        return self.value
