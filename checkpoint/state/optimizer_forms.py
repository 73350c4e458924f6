"""Optimizer state by parameter name: parse any of torch's three forms, and convert it to two of them.

    nested      {"state": {NAME: {"exp_avg": ..}}, "param_groups": [{"params": [NAME], "lr": ..}]}
    flattened   {"state.NAME.exp_avg": .., "param_groups.NAME.lr": ..}
    numbered    {"state": {0: {"exp_avg": ..}}, "param_groups": [{"params": [0], "lr": ..}]}

A live optimizer is stored as nested state. ``optimizer.state_dict()`` is numbered: a number is a parameter's position
in the order of the groups, so it is valid only for an optimizer with groups of the same sizes. Flattened state repeats
each group's options for each parameter; parameters with equal options form a group.

Leaves are nodes of a manifest's tree, or any objects that are neither dicts nor lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from vescale_fsdp.checkpoint.manifest.state_tree import Json, decode
from vescale_fsdp.errors import CheckpointError, some

_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True)
class OptimizerGroup:
    """A param group: the names or numbers of its parameters, and its options by name."""

    names: list[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, parsed from any of the forms.

    Attributes:
        state: parameter name -> kind of state, such as ``exp_avg`` -> node.
        groups: groups in the order of the saved optimizer; empty if unknown. Flattened state gives one group for each
            set of equal options.
        is_numbered: whether parameters have numbers instead of names.
        other_state: entries of ``state`` that belong to no parameter, under the optimizer's own keys.
        more: entries next to ``state`` and ``param_groups``.
    """

    state: dict[str, dict[Any, Json]]
    groups: list[OptimizerGroup]
    is_numbered: bool = False
    other_state: dict[Any, Json] = field(default_factory=dict)
    more: dict[Any, Json] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All parameters that have a group or state, in the order of the groups; each once."""
        return list(dict.fromkeys(chain(*(group.names for group in self.groups), self.state)))

    def renamed(self, names: Mapping[str, str]) -> OptimizerState:
        """Return the same state with other names for some parameters: old name -> new name."""
        return OptimizerState(
            {names.get(name, name): parts for name, parts in self.state.items()},
            [OptimizerGroup([names.get(n, n) for n in group.names], group.options) for group in self.groups],
            False,
            self.other_state,
            self.more,
        )

    def named(self, groups: Sequence[Sequence[str]], where: str) -> OptimizerState:
        """Return the same state with names instead of numbers.

        Args:
            groups: names of each group's parameters in the live optimizer.

        Raises:
            CheckpointError: if the groups have different sizes, so that numbers refer to different parameters.
        """
        if not self.is_numbered:
            if any(group.names for group in self.groups) or len(self.groups) != len(groups):
                return self
            # Some trainers store groups without their parameters. These groups get the live groups' names, by order.
            pairs = zip(self.groups, groups, strict=True)
            return replace(self, groups=[OptimizerGroup(list(own), group.options) for group, own in pairs])
        sizes, stored = [len(names) for names in groups], [len(group.names) for group in self.groups]
        if sizes != stored:
            raise CheckpointError(
                "The checkpoint numbers an optimizer's parameters. Numbers are valid only for groups of equal sizes.",
                expected=f"groups of {stored} parameters (as saved)",
                got=f"groups of {sizes}",
                where=where,
                todo="build the optimizer with the same groups as at the save, in the same order",
            )
        numbers = chain.from_iterable(group.names for group in self.groups)
        return self.renamed(dict(zip(numbers, chain.from_iterable(groups), strict=True)))

    def options_for(self, live: Sequence[Sequence[str]], number: int, where: str) -> dict[str, Json]:
        """Return the stored options for one group of the live optimizer; empty if unknown.

        A group without parameters gets those of the stored group without parameters at its place among them.

        Args:
            live: names of the parameters of each live group.

        Raises:
            CheckpointError: if the parameters have different options in the checkpoint.
        """
        names = live[number]
        wanted = set(names)
        groups = [group for group in self.groups if not wanted.isdisjoint(group.names)]
        if not wanted:
            empty = [at for at, own in enumerate(live) if not own]
            stored = [group for group in self.groups if not group.names]
            groups = [stored[empty.index(number)]] if len(stored) == len(empty) else []
        if not groups:
            return {}
        for other in groups[1:]:
            for option in dict.fromkeys([*groups[0].options, *other.options]):
                values = [group.options.get(option) for group in (groups[0], other)]
                if values[0] != values[1]:
                    raise CheckpointError(
                        "Parameters of one group have different options in the checkpoint.",
                        expected=f"one {option} for {some(names)}",
                        got=f"{values[0]} and {values[1]}",
                        where=where,
                        todo="build the optimizer with the same groups as at the save, or load only its state: "
                        "include='*.state.*'",
                    )
        return groups[0].options

    @property
    def _state_node(self) -> Json:
        parts = {name: _node(items) for name, items in self.state.items()}
        return _node({**parts, **self.other_state})

    def nested(self) -> Json:
        """Return the tree in the nested form."""
        return {
            **self.more,
            _STATE: self._state_node,
            _GROUPS: [{"params": group.names, **group.options} for group in self.groups],
        }

    def flattened(self) -> Json:
        """Return the tree in the flattened form, which has no place for ``more``."""
        parts = {f"{_STATE}.{name}": leaf for name, leaf in _flat(self._state_node, "")}
        options = {
            f"{_GROUPS}.{name}.{option}": value
            for group in self.groups
            for name in group.names
            for option, value in group.options.items()
        }
        return {**parts, **options}


def optimizer_state(node: Json, known: Collection[str] = ()) -> OptimizerState | None:
    """Parse a tree as optimizer state; returns None if it is not. The states in a list of trees are merged.

    Args:
        known: names of parameters, which show where a name ends in a flattened key, and the kind of state begins.
    """
    if isinstance(node, list) and node:
        states = [optimizer_state(item, known) for item in node]
        parts = [state for state in states if state is not None and not state.is_numbered]
        names = [name for part in parts for name in part.names]
        # Not merged if two optimizers have state of one parameter: the result could contain only one of the two.
        return _joined(parts) if len(parts) == len(node) and len(set(names)) == len(names) else None
    items = items_of_node(node)
    if items is None or isinstance(node, list):
        return None
    nodes = dict(items)
    if flattened_keys(nodes):
        return _from_flattened(nodes, known)
    groups = nodes.pop(_GROUPS, None)
    state = dict(items_of_node(nodes.pop(_STATE, {})) or ())
    groups = [] if groups is None and state else groups  # a dict with ``state`` alone is accepted too
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return None
    groups = [{"params": [], **group} for group in groups]  # some trainers leave the parameters out
    if not all(isinstance(group["params"], list) for group in groups):
        return None
    params = set(map(str, chain.from_iterable(group["params"] for group in groups))) or set(map(str, state))
    # The state of a parameter is a container; a plain value means that this dict only looks like optimizer state.
    if any(str(key) in params and items_of_node(item) is None for key, item in state.items()):
        return None
    return _from_nested(groups, state, nodes)


def flattened_keys(keys: Collection[Any]) -> bool:
    """Return whether there are keys, and all of them are keys of flattened optimizer state."""
    return bool(keys) and all(
        isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in keys
    )


def items_of_node(node: Json) -> Iterable[tuple[Any, Json]] | None:
    """Return the keys and nodes of a container in a manifest's tree; None for a leaf."""
    if isinstance(node, list):
        return enumerate(node)
    if isinstance(node, Mapping) and "$" not in node:
        return node.items()
    if isinstance(node, Mapping) and node["$"] == "dict":
        return [(decode(key, lambda leaf: None), item) for key, item in node["v"]]
    return None


def _from_nested(groups: list[Any], state: Mapping[Any, Json], more: dict[Any, Json]) -> OptimizerState:
    """Parse nested or numbered state. Without parameters in the groups, each key of ``state`` counts as a parameter."""
    params = [list(group["params"]) for group in groups]
    every = list(chain.from_iterable(params))
    known = set(map(str, every)) if every else set(map(str, state))
    parts = {key: dict(items_of_node(node) or ()) for key, node in state.items() if str(key) in known}
    return OptimizerState(
        {str(key): items for key, items in parts.items()},
        [
            OptimizerGroup(
                list(map(str, names)), {key: node for key, node in group.items() if key != "params"}
            )
            for names, group in zip(params, groups, strict=True)
        ],
        bool(every) and all(type(number) is int for number in every),
        {key: node for key, node in state.items() if key not in parts},
        more,
    )


def _from_flattened(nodes: Mapping[str, Json], known: Collection[str]) -> OptimizerState:
    """Parse flattened state. If no known name fits a key, the name is all of the key but its last part."""
    options: dict[str, dict[str, Json]] = {}
    for key, node in nodes.items():
        if key.startswith(f"{_GROUPS}."):
            rest = key.removeprefix(f"{_GROUPS}.")
            name = _parameter_of(rest, known) or rest.rpartition(".")[0]
            options.setdefault(name, {})[rest.removeprefix(f"{name}.")] = node
    names = {*known, *options}  # keys of options give further names: an option's own name has no dot
    state: dict[str, dict[Any, Json]] = {}
    for key, node in nodes.items():
        if key.startswith(f"{_STATE}."):
            rest = key.removeprefix(f"{_STATE}.")
            name = _parameter_of(rest, names) or rest.rpartition(".")[0]
            *path, last = rest.removeprefix(f"{name}.").split(".")
            container = state.setdefault(name, {})
            for part in path:
                container = container.setdefault(part, {})
            container[last] = node
    groups: list[OptimizerGroup] = []
    for name, own in options.items():
        group = next((group for group in groups if group.options == own), None)
        if group is None:
            groups.append(OptimizerGroup([name], own))
        else:
            group.names.append(name)
    return OptimizerState(state, groups)


def _parameter_of(text: str, names: Collection[str]) -> str | None:
    """Return the longest of the names that begins a text and is followed by a dot; None if there is none."""
    while "." in text:
        text = text.rpartition(".")[0]
        if text in names:
            return text
    return None


def _joined(parts: Sequence[OptimizerState]) -> OptimizerState:
    """Merge the states of several optimizers, which have no parameter in common."""
    return OptimizerState(
        {name: state for part in parts for name, state in part.state.items()},
        [group for part in parts for group in part.groups],
        False,
        {key: node for part in parts for key, node in part.other_state.items()},
        {key: node for part in parts for key, node in part.more.items()},
    )


def _node(items: Mapping[Any, Any]) -> Json:
    """Return the node of a dict. A dict with a key ``$`` becomes pairs, because ``$`` marks nodes of other kinds."""
    if "$" not in items:
        return dict(items)
    return {"$": "dict", "v": [[key, node] for key, node in items.items()]}


def _flat(node: Json, prefix: str) -> Iterable[tuple[str, Json]]:
    """Return (dotted name, leaf) pairs; lists are leaves."""
    items = items_of_node(node) if not isinstance(node, list) else None
    if items is None:
        return [(prefix, node)]
    return [pair for key, item in items for pair in _flat(item, f"{prefix}.{key}" if prefix else str(key))]
