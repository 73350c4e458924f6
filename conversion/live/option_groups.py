"""An optimizer's options, from the groups of parameters that a source has to those that a live optimizer has.

source   0: a, b  lr 0.1     1: c, d  lr 0.2
live     0: a  lr 0.1     1: b  lr 0.1     2: c, d  lr 0.2        or     0: c, d, a  of which lr: refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vescale_fsdp.conversion.source.source import StoredValue
from vescale_fsdp.conversion.state.carried_state import CarriedState
from vescale_fsdp.conversion.state.nesting import ListIndex, Path, name_of
from vescale_fsdp.conversion.views.tensor_view import TensorView
from vescale_fsdp.errors import ConversionError, some

__all__ = ["regrouped"]

_Option = TensorView | StoredValue


def regrouped(state: CarriedState, home: Path, groups: Sequence[Sequence[str]]) -> CarriedState:
    """Nested optimizer state, each live group with the options that its parameters have in the source.

    Args:
        home: where the optimizer sits.
        groups: names of each live group's parameters.

    Raises:
        ConversionError: if parameters of one live group have different options in the source.
    """
    depth = len(home) + 2
    inside = (*home, "param_groups")
    found: dict[Any, dict[Path, _Option]] = {}
    names = [n for n in (*state.views, *state.values) if state.path(n)[: depth - 1] == inside]
    for name in names:
        path = state.path(name)
        if len(path) > depth:
            found.setdefault(path[depth - 1], {})[path[depth:]] = state.views.get(name) or state.values[name]
    source = [(_params(options), options) for options in found.values()]
    if not all(params for params, _ in source) or [p for p, _ in source] == [list(g) for g in groups]:
        return state
    views = {name: view for name, view in state.views.items() if name not in names}
    values = {name: value for name, value in state.values.items() if name not in names}
    paths = {name: path for name, path in state.paths.items() if name not in names}
    for number, params in enumerate(groups):
        options = [options for held, options in source if not set(params).isdisjoint(held)]
        for rest, option in _common(options, params, name_of(home)).items():
            path = (*inside, ListIndex(number), *rest)
            paths[name_of(path)] = path
            if isinstance(option, TensorView):
                views[name_of(path)] = option
            else:
                values[name_of(path)] = option
    return replace(state, views=views, values=values, paths=paths)


def _params(options: Mapping[Path, _Option]) -> list[str]:
    named = options.get(("params",))
    return [] if named is None or isinstance(named, TensorView) else list(map(str, named()))


def _common(
    options: Sequence[Mapping[Path, _Option]], params: Sequence[str], where: str
) -> dict[Path, _Option]:
    """Options that several groups agree on, for one of these parameters."""
    if not options:
        return {}
    for rest in dict.fromkeys(rest for each in options for rest in each if rest != ("params",)):
        said = [_said(each.get(rest)) for each in options]
        if any(other != said[0] for other in said):
            raise ConversionError(
                "Parameters of one group have different options in the source.",
                expected=f"one {name_of(rest)} for {some(list(params))}",
                got=", ".join(dict.fromkeys(map(str, said))),
                where=where,
                todo="make the optimizer with the groups that it had, or take its state alone: include='*/state/*'",
            )
    chosen = list(params)
    return {**options[0], ("params",): lambda: chosen}


def _said(option: _Option | None) -> object:
    if option is None:
        return "nothing"
    return option.identity() if isinstance(option, TensorView) else option()
