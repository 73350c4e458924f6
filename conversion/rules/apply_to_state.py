"""Key rules on a whole training state: the model's tensors, and the optimizer's state that belongs to them.

Moments have their parameter's shape and take the same rules. Step counters are one number per parameter: a
result gets the counter of the first tensor it was made from. CarriedState of any other shape (row factors,
quantised blocks) does not follow its parameter's items, so it is refused rather than guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from vescale_fsdp.checkpoint.moves.carried_state import (
    CarriedState,
    home_of,
    other_models,
    own_optimizer,
    parameter_key,
)
from vescale_fsdp.checkpoint.moves.source import StoredValue
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, TensorView, read_range
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.conversion.rules.apply_to_tensors import Applied, apply_rules
from vescale_fsdp.conversion.rules.rule_file import RuleSet
from vescale_fsdp.errors import ConversionError, some


@dataclass(frozen=True)
class _OptimizerEntry:
    """Where an optimizer entry speaks of a parameter: the path with the parameter's name cut out."""

    fqn: str
    rebuild: Callable[[str], Path]  # the path for another parameter
    slot: str  # equal for entries that differ in the parameter only


def state_with_rules(
    state: CarriedState,
    rules: RuleSet,
    config: Mapping[str, Any],
    *,
    to_hf: bool,
    on_disagreement: str = "refuse",
) -> CarriedState:
    """The same state in the other side's names and layouts.

    Args:
        on_disagreement: ``"refuse"`` parameters that rules join if their steps, options or groups differ; ``"first"``
            takes those of the first.

    Raises:
        ConversionError: if the rules do not fit the model, or optimizer state cannot follow them.
    """
    state.model.require_one("key rules rename only one", rules.name)
    container = state.container
    model = {fqn: state.views[name] for name, fqn in state.model.names.items()}
    own = own_optimizer(state, container, {fqn: view.info.shape for fqn, view in model.items()})
    applied = apply_rules(rules, model, config, to_hf=to_hf)
    made = _Made()
    for fqn, view in applied.views.items():
        made.add_view((*container, fqn), view, some(applied.origins.get(fqn, ("[[zeros]]",))))
    names = dict(zip(made.views, applied.views, strict=True))
    places = _find_entries(state, own, model)
    if on_disagreement == "refuse":
        _require_agreement(state, own, places, applied)
    moments: dict[str, dict[str, TensorView]] = defaultdict(dict)
    slots: dict[str, _OptimizerEntry] = {}
    for name, view in state.views.items():
        if name in state.is_model:
            continue
        place = places.get(name)
        if place is None:
            _require_no_numbers(state, name, own)
            made.add_view(state.path(name), view, name)
        else:
            moments[place.slot][place.fqn] = view
            slots[place.slot] = place
    for slot, views in moments.items():
        _apply_to_slot(slots[slot], views, model, applied, rules, config, made, to_hf=to_hf)
    for name, value in state.values.items():
        path, place = state.path(name), places.get(name)
        if name in own or home_of(path) is None:
            _add_value(path, value, place, applied, made)
        else:
            made.add_value(path, value, name)  # another model's optimizer
    left_out = (*state.left_out, *applied.dropped)
    kept = [name_of(other) for other in other_models(state)]
    warnings = [f"{some(kept)} kept their names: the rules are for the model alone"] if kept else []
    return replace(
        state,
        views=made.views,
        values=made.values,
        paths=made.paths,
        model=replace(state.model, names=names),
        is_model=frozenset(names),
        left_out=left_out,
        warnings=(*state.warnings, *applied.warnings, *warnings),
    )


def _require_agreement(
    state: CarriedState, own: Collection[str], places: Mapping[str, _OptimizerEntry], applied: Applied
) -> None:
    """Refuse to join parameters whose step counters, options or groups differ: the result has one of each."""
    joined = {
        fqn: names for fqn, names in applied.origins.items() if len(names) > 1 and fqn not in applied.twins
    }
    slots: dict[str, dict[str, str]] = defaultdict(dict)  # slot -> parameter -> entry
    for name, place in places.items():
        slots[place.slot][place.fqn] = name
    for slot, entries in slots.items():
        if any(name in state.views and state.views[name].info.numel != 1 for name in entries.values()):
            continue  # moments, which are joined as their parameters are
        for fqn, names in joined.items():
            found = {name: _value_of(state, entries[name]) if name in entries else None for name in names}
            if any(value != found[names[0]] for value in found.values()):
                raise _disagreement(fqn, slot, found)
    for name in own:
        path = state.path(name)
        if name in state.values and path[-1] == "params" and "param_groups" in path:
            members = set(state.values[name]())
            for fqn, names in joined.items():
                inside = {each: each in members for each in names}
                if len(set(inside.values())) > 1:
                    raise _disagreement(fqn, name, inside)


def _value_of(state: CarriedState, name: str) -> Any:
    """A value, or the bytes of a tensor of one item."""
    if name not in state.views:
        return state.values[name]()
    import numpy as np

    view = state.views[name]
    return read_range(view, 0, 1, np.empty(view.info.nbytes, dtype=np.uint8)).tobytes()


def _disagreement(fqn: str, slot: str, found: Mapping[str, Any]) -> ConversionError:
    return ConversionError(
        "Key rules join parameters whose optimizer state differs.",
        expected=f"one value of {slot} for all parameters that become {fqn}",
        got=", ".join(f"{name}: {value!r:.60}" for name, value in found.items()),
        where=fqn,
        todo="pass --on-disagreement first to take that of the first, or leave the optimizer out: --optimizer drop",
    )


class _Made:
    def __init__(self) -> None:
        self.views: dict[str, TensorView] = {}
        self.values: dict[str, StoredValue] = {}
        self.paths: dict[str, Path] = {}

        self._origins: dict[str, str] = {}

    def add_view(self, path: Path, view: TensorView, origin: str) -> None:
        name = self._add(path, origin)
        self.views[name] = RenamedView(view, name)

    def add_value(self, path: Path, value: StoredValue, origin: str) -> None:
        self.values[self._add(path, origin)] = value

    def _add(self, path: Path, origin: str) -> str:
        name = name_of(path)
        if name in self._origins:
            raise ConversionError(
                "Two entries would get one name.",
                expected="rules that make each name once, and none that another entry has",
                got=f"{self._origins[name]} and {origin} become {name}",
                todo="correct the rules, or leave one of the two out with --exclude",
            )
        self._origins[name], self.paths[name] = origin, path
        return name


def _require_no_numbers(state: CarriedState, name: str, own: Collection[str]) -> None:
    """Refuse moments of a parameter that is a number: rules move tensors, and nothing says which it is."""
    path = state.path(name)
    home = home_of(path) if name in own else None
    if home is None or state.views[name].info.numel == 1:
        return
    key = parameter_key(path, home)
    if key is not None and key.split(".", 1)[0].isdecimal():
        raise ConversionError(
            "Optimizer state does not say which parameter it belongs to.",
            expected="names of parameters, since key rules change names and order",
            got=f"number {key}",
            where=name,
            todo="save it with torch.distributed.checkpoint.state_dict, or leave it out: --optimizer drop",
        )


def _find_entries(
    state: CarriedState, own: Collection[str], fqns: Iterable[str]
) -> dict[str, _OptimizerEntry]:
    """Optimizer entries that belong to one parameter, nested (a part of the path) or flattened (inside
    one)."""
    known = set(fqns)
    lengths = {fqn.count(".") + 1 for fqn in known}
    found: dict[str, _OptimizerEntry] = {}
    for name in (*state.views, *state.values):
        if name not in own:
            continue
        path = state.path(name)
        at = next((i for i, part in enumerate(path) if part in known), None)
        if at is not None:
            found[name] = _nested_entry(path, at)
            continue
        last = str(path[-1])
        fqn = _longest_inside(last, known, lengths)
        if fqn is not None:
            found[name] = _flat_entry(path, last, fqn)
    return found


def _longest_inside(text: str, known: Collection[str], lengths: Iterable[int]) -> str | None:
    """The longest of the known names that lies in a dotted text, with something behind it.

    Args:
        lengths: numbers of parts that known names have.
    """
    parts = text.split(".")
    runs = (".".join(parts[at : at + length]) for length in lengths for at in range(len(parts) - length))
    return max((run for run in runs if run in known), key=len, default=None)


def _nested_entry(path: Path, at: int) -> _OptimizerEntry:
    slot = name_of((*path[:at], "*", *path[at + 1 :]))
    return _OptimizerEntry(str(path[at]), lambda fqn: (*path[:at], fqn, *path[at + 1 :]), slot)


def _flat_entry(path: Path, last: str, fqn: str) -> _OptimizerEntry:
    before, after = last.split(fqn, 1) if last.startswith(fqn) else last.split(f".{fqn}.", 1)
    before, after = (before and f"{before}."), f".{after.lstrip('.')}"
    slot = name_of((*path[:-1], f"{before}*{after}"))
    return _OptimizerEntry(fqn, lambda new: (*path[:-1], f"{before}{new}{after}"), slot)


def _apply_to_slot(
    place: _OptimizerEntry,
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
            made.add_view(place.rebuild(fqn), views[origin], views[origin].info.name)
        return
    for fqn, view in views.items():
        if view.info.shape != model[fqn].info.shape:
            raise ConversionError(
                "Optimizer state does not follow its parameter.",
                expected=f"shape {model[fqn].info.shape}, as {fqn} has",
                got=f"shape {view.info.shape}",
                where=view.info.name,
                todo="leave the optimizer out: --exclude 'optimizer.*'",
            )
    kept = {fqn: view for fqn, view in views.items() if fqn not in applied.dropped}
    for fqn, view in apply_rules(rules, kept, config, to_hf=to_hf, partial=True).views.items():
        made.add_view(place.rebuild(fqn), view, f"{place.slot} of {fqn}")


def _add_value(
    path: Path, value: StoredValue, place: _OptimizerEntry | None, applied: Applied, made: _Made
) -> None:
    if place is not None:  # an option of one parameter, in flattened form
        for fqn in applied.by_first_origin.get(place.fqn, ()):
            made.add_value(place.rebuild(fqn), value, name_of(path))
    elif path[-1] == "params" and "param_groups" in path:
        made.add_value(path, lambda: _renamed(value(), applied), name_of(path))
    else:
        made.add_value(path, value, name_of(path))


def _renamed(names: Any, applied: Applied) -> Any:
    """The list of a group's parameters, in the new names."""
    known = {*chain.from_iterable(applied.origins.values()), *applied.dropped}
    if unknown := [str(name) for name in names if name not in known]:
        raise ConversionError(
            "A group of the optimizer has parameters that the model lacks.",
            expected="names of the model's parameters, since key rules change names and order",
            got=some(unknown),
            todo="save it with torch.distributed.checkpoint.state_dict, or leave it out: --optimizer drop",
        )
    places = {name: place for place, name in enumerate(names)}
    made = sorted(applied.made_from(places), key=lambda pair: places[pair[1]])
    return [fqn for fqn, _ in made]
