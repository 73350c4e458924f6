"""Key rules on a whole training state: the model's tensors, and the optimizer's state that belongs to them.

Moments have their parameter's shape and take the same rules. Step counters are one number per parameter: a
result gets the counter of the first tensor it was made from. State of any other shape (row factors,
quantised blocks) does not follow its parameter's items, so it is refused rather than guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vescale_fsdp.conversion.box_maps import RenameView
from vescale_fsdp.conversion.key_rules import RuleSet
from vescale_fsdp.conversion.nesting import Path, name_of
from vescale_fsdp.conversion.rule_application import Applied, apply_rules
from vescale_fsdp.conversion.source import StoredValue
from vescale_fsdp.conversion.state import State
from vescale_fsdp.conversion.view import TensorView
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["state_with_rules"]


@dataclass(frozen=True)
class _Place:
    """Where an optimizer entry speaks of a parameter: the path with the parameter's name cut out."""

    fqn: str
    rebuild: Callable[[str], Path]  # the path for another parameter
    slot: str  # equal for entries that differ in the parameter only


def state_with_rules(state: State, rules: RuleSet, config: Mapping[str, Any], *, to_hf: bool) -> State:
    """The same state in the other side's names and layouts.

    Raises:
        ConversionError: if the rules do not fit the model, or optimizer state cannot follow them.
    """
    model = {_fqn(state, name): view for name, view in state.views.items() if name in state.is_model}
    container = next((state.path(name)[:-1] for name in state.is_model), ())
    applied = apply_rules(rules, model, config, to_hf=to_hf)
    made = _Made()
    for fqn, view in applied.views.items():
        made.add_view((*container, fqn), view)
    is_model = frozenset(made.views)
    places = _find_places(state, model)
    moments: dict[str, dict[str, TensorView]] = defaultdict(dict)
    slots: dict[str, _Place] = {}
    for name, view in state.views.items():
        if name in state.is_model:
            continue
        place = places.get(name)
        if place is None:
            made.add_view(state.path(name), view)
        else:
            moments[place.slot][place.fqn] = view
            slots[place.slot] = place
    for slot, views in moments.items():
        _apply_to_slot(slots[slot], views, model, applied, rules, config, made, to_hf=to_hf)
    for name, value in state.values.items():
        _add_value(state.path(name), value, places.get(name), applied, made)
    left_out = (*state.left_out, *applied.dropped)
    return replace(
        state,
        views=made.views,
        values=made.values,
        paths=made.paths,
        is_model=is_model,
        left_out=left_out,
        warnings=(*state.warnings, *applied.warnings),
    )


class _Made:
    def __init__(self) -> None:
        self.views: dict[str, TensorView] = {}
        self.values: dict[str, StoredValue] = {}
        self.paths: dict[str, Path] = {}

    def add_view(self, path: Path, view: TensorView) -> None:
        name = name_of(path)
        self.views[name], self.paths[name] = RenameView(view, name), path

    def add_value(self, path: Path, value: StoredValue) -> None:
        name = name_of(path)
        self.values[name], self.paths[name] = value, path


def _fqn(state: State, name: str) -> str:
    return str(state.path(name)[-1])


def _find_places(state: State, fqns: Iterable[str]) -> dict[str, _Place]:
    """Optimizer entries that belong to one parameter, nested (a part of the path) or flattened (inside
    one)."""
    longest_first = sorted(fqns, key=lambda fqn: -len(fqn))
    known = set(longest_first)
    optimizer = set(state.model.optimizer)
    found: dict[str, _Place] = {}
    for name in (*state.views, *state.values):
        if name not in optimizer:
            continue
        path = state.path(name)
        at = next((i for i, part in enumerate(path) if part in known), None)
        if at is not None:
            found[name] = _nested_place(path, at)
            continue
        last = str(path[-1])
        fqn = next((f for f in longest_first if f".{f}." in f".{last}"), None)
        if fqn is not None:
            found[name] = _flat_place(path, last, fqn)
    return found


def _nested_place(path: Path, at: int) -> _Place:
    slot = name_of((*path[:at], "*", *path[at + 1 :]))
    return _Place(str(path[at]), lambda fqn: (*path[:at], fqn, *path[at + 1 :]), slot)


def _flat_place(path: Path, last: str, fqn: str) -> _Place:
    before, after = last.split(fqn, 1) if last.startswith(fqn) else last.split(f".{fqn}.", 1)
    before, after = (before and f"{before}."), f".{after.lstrip('.')}"
    slot = name_of((*path[:-1], f"{before}*{after}"))
    return _Place(fqn, lambda new: (*path[:-1], f"{before}{new}{after}"), slot)


def _apply_to_slot(
    place: _Place,
    views: dict[str, TensorView],
    model: Mapping[str, TensorView],
    applied: Applied,
    rules: RuleSet,
    config: Mapping[str, Any],
    made: _Made,
    *,
    to_hf: bool,
) -> None:
    """One kind of optimizer state, such as all ``exp_avg``."""
    follows = all(view.info.shape == model[fqn].info.shape for fqn, view in views.items())
    if not follows and all(view.info.numel == 1 for view in views.values()):
        for fqn, origin in applied.made_from(views):
            made.add_view(place.rebuild(fqn), views[origin])
        return
    for fqn, view in views.items():
        if view.info.shape != model[fqn].info.shape:
            raise ConversionError(
                explain(
                    "optimizer state does not follow its parameter",
                    expected=f"shape {model[fqn].info.shape}, as {fqn} has",
                    got=f"shape {view.info.shape}",
                    where=view.info.name,
                    todo="leave the optimizer out: --exclude 'optimizer.*'",
                )
            )
    kept = {fqn: view for fqn, view in views.items() if fqn not in applied.dropped}
    for fqn, view in apply_rules(rules, kept, config, to_hf=to_hf, partial=True).views.items():
        made.add_view(place.rebuild(fqn), view)


def _add_value(path: Path, value: StoredValue, place: _Place | None, applied: Applied, made: _Made) -> None:
    if place is not None:  # an option of one parameter, in flattened form
        for fqn, _ in applied.made_from({place.fqn}):
            made.add_value(place.rebuild(fqn), value)
    elif path[-1] == "params" and "param_groups" in path:
        made.add_value(path, lambda: _renamed(value(), applied))
    else:
        made.add_value(path, value)


def _renamed(names: Any, applied: Applied) -> Any:
    """The list of a group's parameters, in the new names."""
    return [fqn for fqn, _ in applied.made_from(set(names))]
