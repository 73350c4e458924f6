"""The two shapes in which torch saves optimizer state, and the way from one to the other.

    nested      (optimizer, state, FQN, exp_avg)    (optimizer, param_groups, 0, lr)    (..., 0, params) =
    FQNs flattened   (optimizer, state.FQN.exp_avg)      (optimizer, param_groups.FQN.lr)    for every
    parameter

Tensors have the same names in both; only the paths differ. Flattening repeats each group's options for each
of its parameters. The way back groups parameters with equal options: the order of groups, and empty ones,
are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from vescale_fsdp.checkpoint.moves.source import StoredValue
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.conversion.state.carried_state import CarriedState
from vescale_fsdp.conversion.state.nesting import ListIndex, Path, name_of
from vescale_fsdp.conversion.state.optimizer_owners import home_of
from vescale_fsdp.errors import ConversionError


def with_optimizer_form(state: CarriedState, form: str) -> CarriedState:
    """The same state with its optimizer's entries in another form, or without them.

    Raises:
        ConversionError: if the optimizer's entries have neither form.
    """
    if form == "keep":
        return state
    if form == "drop":
        return _without_optimizer(state)
    known, homes = set(state.model.optimizer), dict[Path, list[str]]()
    for name in (*state.views, *state.values):
        home = home_of(state.path(name))
        if home is not None and (name in known or name not in state.is_model):
            homes.setdefault(home, []).append(name)
    if not homes:
        return state
    mine = dict.fromkeys(name for names in homes.values() for name in names)
    rest = _Entries(state, [name for name in (*state.views, *state.values) if name not in mine])
    others = [name for name in state.model.optimizer if name in rest.paths]
    found = [_in_form(_Entries(state, names), form, state) for names in homes.values()]
    made = [name for entries in found for name in entries.paths]
    state = replace(state, model=replace(state.model, optimizer=(*others, *made)))
    for entries in found:
        rest.views |= entries.views
        rest.values |= entries.values
        rest.paths |= entries.paths
    return replace(state, views=rest.views, values=rest.values, paths=rest.paths)


def _without_optimizer(state: CarriedState) -> CarriedState:
    """The rest: whatever form the optimizer's entries have, torch's or not."""
    gone = set(state.model.optimizer)
    return replace(
        state,
        views={name: view for name, view in state.views.items() if name not in gone},
        values={name: value for name, value in state.values.items() if name not in gone},
        paths={name: path for name, path in state.paths.items() if name not in gone},
        left_out=(*state.left_out, *(n for n in (*state.views, *state.values) if n in gone)),
    )


def _in_form(entries: _Entries, form: str, state: CarriedState) -> _Entries:
    """One optimizer's entries in the other form, unless they have it."""
    is_nested = all(len(path) - _depth(path) >= 3 for path in entries.paths.values())
    if is_nested == (form == "nested"):
        return entries
    return _flattened(entries) if is_nested else _nested(entries, _model_fqns(state))


class _Entries:
    """Some entries of a state."""

    def __init__(self, state: CarriedState | None = None, names: Iterable[str] = ()) -> None:
        self.views: dict[str, TensorView] = {}
        self.values: dict[str, StoredValue] = {}
        self.paths: dict[str, Path] = {}
        for name in names:
            assert state is not None
            self.add(name, state.path(name), state.views.get(name), state.values.get(name))

    def add(self, name: str, path: Path, view: TensorView | None, value: StoredValue | None) -> None:
        self.paths[name] = path
        if view is not None:
            self.views[name] = view
        if value is not None:
            self.values[name] = value


def _depth(path: Path) -> int:
    """Length of the path of an optimizer's container."""
    return len(home_of(path) or ())


def _model_fqns(state: CarriedState) -> frozenset[str]:
    """Names of parameters."""
    return frozenset(str(state.path(name)[-1]) for name in state.is_model)


def _flattened(entries: _Entries) -> _Entries:
    found = _Entries()
    groups: dict[Path, dict[str, StoredValue]] = {}
    for name, path in entries.paths.items():
        depth = _depth(path)
        if path[depth] == "state":
            flat = (*path[:depth], name_of(path[depth:]))
            found.add(name, flat, entries.views.get(name), entries.values.get(name))
        else:
            groups.setdefault(path[: depth + 2], {})[name_of(path[depth + 2 :])] = entries.values[name]
    for group, options in groups.items():
        depth = _depth(group)
        fqns = options["params"]() if "params" in options else []
        for fqn in fqns:
            for option, value in options.items():
                if option != "params":
                    path = (*group[:depth], f"param_groups.{fqn}.{option}")
                    found.add(name_of(path), path, None, value)
    return found


def _parameter_of(text: str, fqns: Collection[str]) -> str | None:
    """The parameter whose name, and more, a flattened entry begins with; the longest that fits."""
    while "." in text:
        text = text.rpartition(".")[0]
        if text in fqns:
            return text
    return None


def _nested(entries: _Entries, fqns: Collection[str]) -> _Entries:
    found = _Entries()
    options: dict[Path, dict[str, dict[str, Any]]] = {}  # container -> parameter -> option -> value
    for name, path in entries.paths.items():
        depth = _depth(path)
        kind, rest = str(path[depth]).split(".", 1)
        fqn = _parameter_of(rest, fqns)
        if fqn is None:
            raise ConversionError(
                "An optimizer entry belongs to no parameter.",
                expected="state.PARAMETER.KIND or param_groups.PARAMETER.OPTION",
                got=name,
                todo="keep the form (--optimizer keep), or leave the entry out with --exclude",
            )
        last = rest[len(fqn) + 1 :]
        if kind == "state":
            deep = (*path[:depth], "state", fqn, last)
            found.add(name, deep, entries.views.get(name), entries.values.get(name))
        else:
            options.setdefault(path[:depth], {}).setdefault(fqn, {})[last] = entries.values[name]()
    for container, by_fqn in options.items():
        _add_groups(found, container, by_fqn)
    return found


def _add_groups(found: _Entries, container: Path, by_fqn: Mapping[str, dict[str, Any]]) -> None:
    """One group for each set of equal options, in the order in which they appear."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for fqn, options in by_fqn.items():
        for known, fqns in groups:
            if known == options:
                fqns.append(fqn)
                break
        else:
            groups.append((options, [fqn]))
    for number, (options, fqns) in enumerate(groups):
        for option, value in {"params": fqns, **options}.items():
            path = (*container, "param_groups", ListIndex(number), option)
            found.add(name_of(path), path, None, lambda value=value: value)  # type: ignore[misc]
