"""Match optimizers, by the names of their parameters, with state in any form of `optimizer_state`.

State that a live optimizer does not have yet is created with the checkpoint's shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.state.live_objects import (
    ChecksStateDict,
    NamedOptimizer,
    load_optimizer,
    same_names,
)
from vescale_fsdp.checkpoint.state.matching.leaves import LeafMatcher
from vescale_fsdp.checkpoint.state.matching.new_tensor import NewTensor
from vescale_fsdp.checkpoint.state.matching.result import Finish, TensorRead
from vescale_fsdp.checkpoint.state.optimizer_forms import (
    OptimizerGroup,
    OptimizerState,
    flattened_keys,
    items_of_node,
    optimizer_state,
)
from vescale_fsdp.errors import CheckpointError


class OptimizerMatcher:
    """Matches live optimizers, and dicts of optimizer state.

    Args:
        leaves: matches leaves, and collects the result.
        visit: matches any value, see `_Matcher.visit`.
    """

    def __init__(self, leaves: LeafMatcher, visit: Callable[[Any, Json, str, bool], Finish]) -> None:
        self._leaves, self._visit, self._matched = leaves, visit, leaves.matched

    def match(self, targets: list[tuple[str, NamedOptimizer]], node: Json, name: str) -> list[Finish] | None:
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
                self._matched.unexpected += self._leaves.leaf_names(
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
            key: self._leaves.fresh(item, child_name(name, key))
            for key, item in stored.more.items()
            if self._leaves.selects(child_name(name, key))
        }
        of_no_parameter = {
            key: self._visit(named.other_state[key], item, where, True)
            if key in named.other_state
            else self._leaves.fresh(item, where)
            for key, item in stored.other_state.items()
            if self._leaves.selects(where := child_name(child_name(name, "state"), key))
        }
        # Nothing is loaded into the optimizer, so its load_state_dict is not called.
        if not any((more, of_no_parameter, *options)) and not any(p.is_changed for p in state.values()):
            return lambda: named.optimizer
        matched = _MatchedOptimizer(state, options, more, of_no_parameter)
        if isinstance(named.optimizer, ChecksStateDict):
            # Here, not in `finish`, so that errors are raised before anything is overwritten.
            named.optimizer.check_state_dict(matched.state_dict(named))

        def finish() -> Any:
            whole = matched.state_dict(named)
            given = {param: whole["state"].get(named.numbers[fqn], {}) for fqn, param in named.params.items()}
            load_optimizer(named.optimizer, whole, given, name)
            for own, group in zip(named.raw["param_groups"], named.optimizer.param_groups, strict=True):
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
            self._matched.missing += [name] if self._leaves.selects(name) else []
            return _ParameterState(kept, False)
        parts = stored.state.get(fqn, {})
        is_changed = False
        for kind in [*parts, *(kind for kind in own if kind not in parts)]:
            inner = child_name(name, kind)
            if not self._leaves.selects(inner):
                continue
            is_changed = True
            if kind not in parts:
                del kept[kind]
                continue
            item, value = parts[kind], own.get(kind)
            is_leaf = isinstance(item, Mapping) and item.get("$") == "tensor"
            if is_leaf and isinstance(value, torch.Tensor) and value.ndim:
                self._matched.reads.append(TensorRead(inner, int(item["i"]), value))
            elif is_leaf:
                # Each parameter gets its own tensor, even if the checkpoint shares one between parameters: an optimizer
                # that steps many parameters in one call would increment a shared step several times.
                new = NewTensor(inner, int(item["i"]), named.params[fqn], str(kind), named.optimizer)
                self._leaves.add_new(new)
                kept[kind] = partial(getattr, new, "value")  # read late: allocated after the match
            elif isinstance(value, Mapping):
                kept[kind] = self._visit(value, item, inner, True)
            else:
                kept[kind] = self._leaves.fresh(item, inner, (named, fqn))
        return _ParameterState(kept, is_changed or not own)

    def _options(
        self, named: NamedOptimizer, stored: OptimizerState, number: int, name: str
    ) -> dict[str, Finish]:
        """Return the options of a param group to load: name -> function that returns the value."""
        own = named.raw["param_groups"][number]
        # First, because `options_for` raises if stored groups disagree: no error if no option is to be loaded.
        if not self._leaves.includes_all and not any(
            self._leaves.selects(child_name(name, option)) for option in own
        ):
            return {}
        stored_options = stored.options_for(named.names, number, name)
        loaded: dict[str, Finish] = {}
        for option, node in stored_options.items():
            inner = child_name(name, option)
            # Parameters and their names stay those of the live group.
            if option not in ("params", "param_names") and self._leaves.selects(inner):
                fresh = self._leaves.fresh(node, inner)
                loaded[option] = partial(lambda own, fresh: _like(own, fresh()), own.get(option), fresh)
        # A flag (bool) may be missing, because versions of torch differ in flags; a number is missing only in the state
        # of another class of optimizer.
        lacking = [
            option
            for option in named.optimizer.defaults
            if isinstance(own.get(option), (int, float, tuple)) and not isinstance(own[option], bool)
            if stored_options and option not in stored_options
            if self._leaves.selects(child_name(name, option))
        ]
        self._matched.missing += [child_name(name, option) for option in lacking]
        if others := [option for option in loaded if option not in own]:
            self._matched.other_classes += [(name, type(named.optimizer).__name__, lacking, others)] * bool(
                lacking
            )
        return loaded

    def in_form_of(self, target: Mapping[Any, Any], node: Json, name: str, stateful: bool) -> Json:
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
        leaves = self._leaves.leaf_names(node, name, items_of_node) if is_short and not stateful else []
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
        regrouped = [
            OptimizerGroup(names, stored.options_for(groups, number, name))
            for number, names in enumerate(groups)
        ]
        return replace(stored, groups=regrouped).nested()


class _ParameterState(NamedTuple):
    """The new state of a parameter by kind, and whether the optimizer's ``load_state_dict`` must be called for it."""

    kinds: dict[Any, Finish]
    is_changed: bool


class _MatchedOptimizer(NamedTuple):
    """The new parts of an optimizer's state.

    Attributes:
        state: parameter name -> its state.
        options: options of each param group.
        more: entries next to ``state`` and ``param_groups``.
        other_state: entries of ``state`` that belong to no parameter.
    """

    state: dict[str, _ParameterState]
    options: list[dict[str, Finish]]
    more: dict[Any, Finish]
    other_state: dict[Any, Finish]

    def state_dict(self, named: NamedOptimizer) -> dict[str, Any]:
        """Return the whole state dict to load. Tensors that have not been allocated yet are None."""
        groups = zip(named.raw["param_groups"], self.options, strict=True)
        loaded = ((named.numbers[fqn], each.kinds) for fqn, each in self.state.items() if each.kinds)
        state = {number: _finished(kinds) for number, kinds in loaded}
        state = {**named.other_state, **_finished(self.other_state), **state}
        param_groups = [{**own, **_finished(options)} for own, options in groups]
        return {**named.raw, **_finished(self.more), "state": state, "param_groups": param_groups}


def _finished(finishers: Mapping[Any, Finish]) -> dict[Any, Any]:
    """Return the loaded value of each key."""
    return {key: finish() for key, finish in finishers.items()}


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
