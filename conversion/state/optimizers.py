"""The optimizers of a carried state: their form, and the model that each belongs to.

Key rules change one model's names, and the state of its optimizer with them; a state of several models has several
optimizers, whose entries may have the same names. An optimizer belongs to the model that has its parameters, in their
shapes. Among equal models the position decides (``{"generator": {"model": ..., "optimizer": ...}}``), then the name
(``optim_g``). Where neither decides, an error says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.moves.carried_state import CarriedState, is_optimizer, optimizer_homes
from vescale_fsdp.checkpoint.moves.source import constant
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of, nest
from vescale_fsdp.checkpoint.state.optimizer_state import optimizer_state
from vescale_fsdp.errors import ConversionError

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_BARE = {"opt", "optim", "optimizer", "optimizers", "model", "models", "module", "net", "state", "dict"}
_BARE |= {"pytorch", "fsdp"}

Shapes = Mapping[str, tuple[int, ...]]


def home_of(path: Path) -> Path | None:
    """The container of an optimizer's entry: what stands before ``state`` or ``param_groups``."""
    for depth, part in enumerate(path):
        if str(part).split(".", 1)[0] in ("state", "param_groups"):
            return path[:depth]
    return None


def optimizers_of(state: CarriedState) -> dict[Path, list[str]]:
    """Names of optimizer entries, by the container that they are in."""
    entries = {name: state.path(name) for name in (*state.views, *state.values) if name not in state.is_model}
    by_content, found = optimizer_homes(entries.values()), dict[Path, list[str]]()
    for name, path in entries.items():
        home = home_of(path)
        if home is not None and is_optimizer(path, by_content):
            found.setdefault(home, []).append(name)
    return found


class _Entry(NamedTuple):
    """A leaf of an optimizer's tree: the carried entry of this name."""

    name: str


def with_optimizer_form(state: CarriedState, form: str) -> CarriedState:
    """The same state with its optimizers' entries in another of torch's forms, or without them.

    Args:
        form: ``"keep"``, ``"drop"``, ``"nested"`` or ``"flattened"`` (see `optimizer_state`).

    Raises:
        ConversionError: if the optimizer's entries have neither form, or one belongs to no parameter.
    """
    if form == "keep":
        return state
    if form == "drop":  # whatever form they have, torch's or not
        gone = set(state.model.optimizer)
        return replace(
            state,
            views={name: view for name, view in state.views.items() if name not in gone},
            values={name: value for name, value in state.values.items() if name not in gone},
            paths={name: path for name, path in state.paths.items() if name not in gone},
            left_out=(*state.left_out, *(n for n in (*state.views, *state.values) if n in gone)),
        )
    params = frozenset(str(state.path(name)[-1]) for name in state.is_model)
    for home, names in optimizers_of(state).items():
        is_nested = all(len(state.path(name)) - len(home) >= 3 for name in names)
        if is_nested != (form == "nested"):
            state = _with_form(state, home, names, form, params)
    return state


def _with_form(
    state: CarriedState, home: Path, names: list[str], form: str, params: frozenset[str]
) -> CarriedState:
    """The state with one optimizer's entries in the other form."""
    leaves: dict[Path, Any] = {}
    for name in names:
        path = state.path(name)[len(home) :]
        is_option = str(path[0]).split(".", 1)[0] == "param_groups"  # groups are compared by their values
        leaves[path] = state.values[name]() if is_option and name in state.values else _Entry(name)
    found = optimizer_state(nest(leaves), params)
    stray = sorted(set(found.names) - params) if found is not None and form == "nested" else []
    if found is None or stray:
        raise ConversionError(
            "An optimizer entry belongs to no parameter.",
            expected="state.PARAMETER.KIND or param_groups.PARAMETER.OPTION",
            got=stray[0] if stray else name_of(home),
            todo="keep the form (--optimizer keep), or leave the entry out with --exclude",
        )
    tree = found.nested() if form == "nested" else found.flattened()
    if not found.groups:
        tree.pop("param_groups", None)
    views = {name: view for name, view in state.views.items() if name not in names}
    values = {name: value for name, value in state.values.items() if name not in names}
    paths = {name: path for name, path in state.paths.items() if name not in names}
    made = []
    for path, leaf in flatten(tree, lambda value: isinstance(value, _Entry)).items():
        paths[name := name_of((*home, *path))] = (*home, *path)
        made.append(name)
        if isinstance(leaf, _Entry) and leaf.name in state.views:
            views[name] = state.views[leaf.name]
        else:
            values[name] = state.values[leaf.name] if isinstance(leaf, _Entry) else constant(leaf)
    others = (name for name in state.model.optimizer if name not in names)
    model = replace(state.model, optimizer=(*others, *made))
    return replace(state, views=views, values=values, paths=paths, model=model)


def own_optimizer(state: CarriedState, container: Path, params: Shapes) -> frozenset[str]:
    """Names of the optimizer entries that belong to the model in ``container`` with these parameters.

    Raises:
        ConversionError: if an optimizer may belong to this model or to another.
    """
    others, homes = other_models(state), optimizers_of(state)
    if not others:
        return frozenset(name for names in homes.values() for name in names)
    models = {container: params, **others}
    mine: set[str] = set()
    for home, names in homes.items():
        owners = _owners(state, home, names, models)
        if (len(owners) > 1 and container in owners) or not owners:
            raise _unclear(home, owners or list(models))
        if owners == [container]:
            mine.update(names)
    return frozenset(mine)


def other_models(state: CarriedState) -> dict[Path, Shapes]:
    """Containers of tensors that are neither the model nor an optimizer's."""
    known = {*state.is_model, *state.model.optimizer}
    found: dict[Path, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, view in state.views.items():
        path = state.path(name)
        if name not in known and len(path) > 1:
            found[path[:-1]][str(path[-1])] = view.info.shape
    return {home: shapes for home, shapes in found.items() if any(shapes.values())}


def _owners(
    state: CarriedState, home: Path, names: Iterable[str], models: Mapping[Path, Shapes]
) -> list[Path]:
    """Models that the optimizer may belong to; one, if anything tells."""
    spoken_of = [
        (rest, state.views[name].info.shape)
        for name in names
        if name in state.views and (rest := parameter_key(state.path(name), home)) is not None
    ]
    named = [model for model, params in models.items() if all(_find(rest, params) for rest, _ in spoken_of)]
    fitting = [
        model
        for model in named
        if all(
            shape in ((), (1,), models[model][str(_find(rest, models[model]))]) for rest, shape in spoken_of
        )
    ]
    found = fitting or named
    for tell in (_by_place, _by_name):
        if len(found) > 1:
            found = tell(home, found)
    return found


def parameter_key(path: Path, home: Path) -> str | None:
    """What an optimizer's tensor says of its parameter: its name, which is the whole text or its beginning."""
    kind, *rest = path[len(home) :]
    if kind == "state" and rest:
        return str(rest[0])
    return str(kind).removeprefix("state.") if str(kind).startswith("state.") else None


def _find(text: str, params: Shapes) -> str | None:
    """The parameter that a text names or begins with; the longest."""
    while text not in params and "." in text:
        text = text.rpartition(".")[0]
    return text if text in params else None


def _by_place(home: Path, models: list[Path]) -> list[Path]:
    shared = {model: _shared(home, model) for model in models}
    return [model for model in models if shared[model] == max(shared.values())]


def _shared(*paths: Path) -> int:
    """Number of parts that all paths begin with."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def _by_name(home: Path, models: list[Path]) -> list[Path]:
    common = _shared(home, *models)
    own = _words(home[common:])
    found = [model for model in models if _alike(own, _words(model[common:]))]
    return found if len(found) == 1 else models


def _words(path: Path) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name_of(path))) - _BARE


def _alike(left: frozenset[str], right: frozenset[str]) -> bool:
    if not left or not right:
        return left == right
    return any(a.startswith(b) or b.startswith(a) for a in left for b in right)


def _unclear(home: Path, owners: list[Path]) -> ConversionError:
    return ConversionError(
        "It is not clear which model an optimizer belongs to.",
        expected="an optimizer with the parameters of one model, beside it, or named after it",
        got=f"{name_of(home) or 'one at the root'}, which may belong to "
        + " or ".join(name_of(owner) or "the root" for owner in owners[:4]),
        todo="leave the optimizers out with --optimizer drop",
    )
