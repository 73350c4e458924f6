"""Apply key rules to a training state: the model's tensors, and the optimizer's state of its parameters.

Moments have the shape of their parameter, so they are converted by the same rules. A step counter is one number per
parameter: a new parameter gets the counter of the first parameter that it was made from. Optimizer state of any other
shape (row factors, quantized blocks) is refused, since rules do not define how it changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.conversion.engine.carried_state import (
    CarriedState,
    optimizer_container,
    other_models,
    own_optimizer,
    parameter_key,
)
from vescale_fsdp.conversion.engine.source import StoredValue
from vescale_fsdp.conversion.engine.tensor_view import RenamedView, TensorView, read_range
from vescale_fsdp.conversion.rules.apply_to_tensors import Applied, apply_rules
from vescale_fsdp.conversion.rules.rule_file import RuleSet
from vescale_fsdp.errors import ConversionError, option, some


@dataclass(frozen=True)
class _OptimizerEntry:
    """An optimizer entry of one parameter.

    Attributes:
        fqn: the parameter's name.
        rebuild: returns the path of this entry for another parameter's name.
        slot: the entry's name with ``*`` in place of the parameter's name, so that all parameters have the same slots.
    """

    fqn: str
    rebuild: Callable[[str], Path]
    slot: str


def state_with_rules(
    state: CarriedState,
    rules: RuleSet,
    config: Mapping[str, Any],
    *,
    to_hf: bool,
    on_disagreement: str = "refuse",
) -> CarriedState:
    """Convert a state to the names and layouts of the other side.

    Args:
        state: the state to convert.
        config: the model's config.json, from which the rules compute sizes.
        to_hf: whether to convert from ours to hf; otherwise from hf to ours.
        on_disagreement: what to do if rules join parameters whose steps, options or groups differ: ``"refuse"``, or
            ``"first"`` to use the values of the first parameter.

    Raises:
        ConversionError: if the rules do not fit the model, or cannot be applied to the optimizer state.
    """
    state.model.require_one("key rules rename only one", rules.name)
    container = state.container
    model = {fqn: state.views[name] for name, fqn in state.model.names.items()}
    own = own_optimizer(state, container, {fqn: view.info.shape for fqn, view in model.items()})
    applied = apply_rules(rules, model, config, to_hf=to_hf)
    result = _Entries()
    for fqn, view in applied.views.items():
        result.add_view((*container, fqn), view, some(applied.origins.get(fqn, ("[[zeros]]",))))
    # Both dicts have the same order: so far, ``result`` contains only the model.
    names = dict(zip(result.views, applied.views, strict=True))
    entries = _find_entries(state, own, model)
    if on_disagreement == "refuse":
        _check_agreement(state, own, entries, applied)
    moments: dict[str, dict[str, TensorView]] = defaultdict(dict)
    slots: dict[str, _OptimizerEntry] = {}
    for name, view in state.views.items():
        if name in state.is_model:
            continue
        entry = entries.get(name)
        if entry is None:
            _check_has_name(state, name, own)
            result.add_view(state.path(name), view, name)
        else:
            moments[entry.slot][entry.fqn] = view
            slots[entry.slot] = entry
    for slot, views in moments.items():
        _apply_to_slot(slots[slot], views, model, applied, rules, config, result, to_hf=to_hf)
    for name, value in state.values.items():
        path, entry = state.path(name), entries.get(name)
        if name in own or optimizer_container(path) is None:
            _add_value(path, value, entry, applied, result)
        else:
            result.add_value(path, value, name)  # the optimizer of another model keeps its names
    dropped = (*state.dropped, *applied.dropped)
    kept = [name_of(other) for other in other_models(state)]
    warnings = [f"{some(kept)} kept their names: the rules apply only to the model"] if kept else []
    return replace(
        state,
        views=result.views,
        values=result.values,
        paths=result.paths,
        model=replace(state.model, names=names),
        is_model=frozenset(names),
        dropped=dropped,
        warnings=(*state.warnings, *applied.warnings, *warnings),
    )


def _check_agreement(
    state: CarriedState, own: Collection[str], entries: Mapping[str, _OptimizerEntry], applied: Applied
) -> None:
    """Refuse to join parameters whose step counters, options or groups differ: the result has only one of each."""
    # An alias has no optimizer state of its own.
    joined = {
        fqn: names for fqn, names in applied.origins.items() if len(names) > 1 and fqn not in applied.aliases
    }
    slots: dict[str, dict[str, str]] = defaultdict(dict)  # slot -> parameter -> entry
    for name, entry in entries.items():
        slots[entry.slot][entry.fqn] = name
    for slot, by_fqn in slots.items():
        if any(name in state.views and state.views[name].info.numel != 1 for name in by_fqn.values()):
            continue  # moments have one value per item, like their parameters, and are joined like them
        for fqn, names in joined.items():
            values = {name: _value_of(state, by_fqn[name]) if name in by_fqn else None for name in names}
            if any(value != values[names[0]] for value in values.values()):
                raise _disagreement(fqn, slot, values)
    # Parameters that are joined must be in the same parameter groups.
    for name in own:
        path = state.path(name)
        if name in state.values and path[-1] == "params" and "param_groups" in path:
            members = set(state.values[name]())
            for fqn, names in joined.items():
                is_member = {each: each in members for each in names}
                if len(set(is_member.values())) > 1:
                    raise _disagreement(fqn, name, is_member)


def _value_of(state: CarriedState, name: str) -> Any:
    """Return the value of an entry; for a tensor of one item its number, or its bytes if numpy lacks the type."""
    if name not in state.views:
        return state.values[name]()
    item, dtype = read_range(state.views[name], 0, 1), state.views[name].info.dtype
    return item.view(dtype.name)[0].item() if dtype.is_numpy else item.tobytes()


def _disagreement(fqn: str, slot: str, values: Mapping[str, Any]) -> ConversionError:
    return ConversionError(
        "Key rules join parameters whose optimizer state differs.",
        expected=f"one value of {slot} for all parameters that become {fqn}",
        got=", ".join(f"{name}: {value!r:.60}" for name, value in values.items()),
        where=fqn,
        todo=f"pass {option('on_disagreement', 'first')} to use the first value, or leave the optimizer out: "
        f"{option('optimizer', 'drop')}",
    )


class _Entries:
    """Collects the entries of the result; refuses two entries with the same name."""

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
                "Two entries would get the same name.",
                expected="rules that make each name once, and no name of another entry",
                got=f"{self._origins[name]} and {origin} become {name}",
                todo="correct the rules",
            )
        self._origins[name], self.paths[name] = origin, path
        return name


def _check_has_name(state: CarriedState, name: str, own: Collection[str]) -> None:
    """Refuse moments that identify their parameter by number, since rules need its name."""
    path = state.path(name)
    container = optimizer_container(path) if name in own else None
    # One number, such as a step counter, can be copied to any parameter.
    if container is None or state.views[name].info.numel == 1:
        return
    key = parameter_key(path, container)
    if key is not None and key.split(".", 1)[0].isdecimal():
        raise ConversionError(
            "Optimizer state does not say which parameter it belongs to.",
            expected="names of parameters, which key rules can rename and reorder",
            got=f"number {key}",
            where=name,
            todo="save it with torch.distributed.checkpoint.state_dict, or leave it out: "
            f"{option('optimizer', 'drop')}",
        )


def _find_entries(
    state: CarriedState, own: Collection[str], fqns: Iterable[str]
) -> dict[str, _OptimizerEntry]:
    """Find the optimizer entries that belong to a single parameter; returns them by entry name.

    In the nested form, the parameter's name is one part of the path. In the flattened form, it is inside the last part.
    """
    known = set(fqns)
    lengths = {fqn.count(".") + 1 for fqn in known}
    entries: dict[str, _OptimizerEntry] = {}
    for name in (*state.views, *state.values):
        if name not in own:
            continue
        path = state.path(name)
        # An option of a group is no parameter, whatever parameters are called: param_groups, 0, lr.
        found = [
            i for i, part in enumerate(path) if part in known and "param_groups" not in path[i - 2 : i - 1]
        ]
        if found:
            # A parameter may be called "state" too: the one after the optimizer's key counts.
            entries[name] = _nested_entry(path, next((i for i in found if path[i - 1] == "state"), found[0]))
            continue
        last = str(path[-1])
        fqn = _longest_inside(_without_key(last), known, lengths) or _longest_inside(last, known, lengths)
        if fqn is not None:
            entries[name] = _flat_entry(path, last, fqn)
    return entries


def _without_key(text: str) -> str:
    """Return a flattened entry's name without the optimizer's own key at its beginning."""
    return text.removeprefix("state.") if text.startswith("state.") else text.removeprefix("param_groups.")


def _longest_inside(text: str, known: Collection[str], lengths: Iterable[int]) -> str | None:
    """Return the longest known name inside a dotted text; None if there is none.

    A name at the end of the text does not count, since the entry's own name follows the parameter's name.

    Args:
        lengths: the numbers of dotted parts of the known names.
    """
    parts = text.split(".")
    runs = (".".join(parts[at : at + length]) for length in lengths for at in range(len(parts) - length))
    # max: a parameter's name may contain the name of another parameter.
    return max((run for run in runs if run in known), key=len, default=None)


def _nested_entry(path: Path, at: int) -> _OptimizerEntry:
    """Make the entry of a path whose part ``at`` is the parameter's name."""
    slot = name_of((*path[:at], "*", *path[at + 1 :]))
    return _OptimizerEntry(str(path[at]), lambda fqn: (*path[:at], fqn, *path[at + 1 :]), slot)


def _flat_entry(path: Path, last: str, fqn: str) -> _OptimizerEntry:
    """Make the entry of a path whose last part contains the parameter's name."""
    # The name is searched between dots, so that it does not match a part of a longer name.
    rest = _without_key(last)
    rest = rest if f".{fqn}." in f".{rest}" else last
    before, after = f".{rest}".split(f".{fqn}.", 1)
    before, after = last.removesuffix(rest) + (before and f"{before[1:]}."), f".{after}"
    slot = name_of((*path[:-1], f"{before}*{after}"))
    return _OptimizerEntry(fqn, lambda new: (*path[:-1], f"{before}{new}{after}"), slot)


def _apply_to_slot(
    entry: _OptimizerEntry,
    views: dict[str, TensorView],
    model: Mapping[str, TensorView],
    applied: Applied,
    rules: RuleSet,
    config: Mapping[str, Any],
    result: _Entries,
    *,
    to_hf: bool,
) -> None:
    """Apply the rules to one slot of the optimizer, such as all ``exp_avg``, and add the results to ``result``.

    Args:
        entry: any entry of the slot.
        views: the slot's tensors, by parameter.
        applied: the result of the rules for the model.
    """
    has_shapes = all(view.info.shape == model[fqn].info.shape for fqn, view in views.items())
    # One number per parameter, such as a step counter: copied from the first parameter that a result is made from.
    if not has_shapes and all(view.info.numel == 1 for view in views.values()):
        for fqn, origin in applied.made_from(views):
            result.add_view(entry.rebuild(fqn), views[origin], views[origin].info.name)
        return
    for fqn, view in views.items():
        if view.info.shape != model[fqn].info.shape:
            raise ConversionError(
                "Optimizer state does not have the shape of its parameter.",
                expected=f"shape {model[fqn].info.shape}, the shape of {fqn}",
                got=f"shape {view.info.shape}",
                where=view.info.name,
                todo=f"leave the optimizer out: {option('optimizer', 'drop')}",
            )
    kept = {fqn: view for fqn, view in views.items() if fqn not in applied.dropped}
    # partial: an optimizer need not have state for every parameter.
    for fqn, view in apply_rules(rules, kept, config, to_hf=to_hf, partial=True).views.items():
        result.add_view(entry.rebuild(fqn), view, f"{entry.slot} of {fqn}")


def _add_value(
    path: Path, value: StoredValue, entry: _OptimizerEntry | None, applied: Applied, result: _Entries
) -> None:
    """Add a value that is not a tensor to the result, under its new name."""
    if entry is not None:  # an option of one parameter, in flattened form
        for fqn in applied.by_first_origin.get(entry.fqn, ()):
            result.add_value(entry.rebuild(fqn), value, name_of(path))
    elif path[-1] == "params" and "param_groups" in path:
        result.add_value(path, lambda: _renamed(value(), applied), name_of(path))
    else:
        result.add_value(path, value, name_of(path))


def _renamed(names: Any, applied: Applied) -> Any:
    """Convert a group's list of parameters to the new names, in the order of their first origins."""
    known = {*chain.from_iterable(applied.origins.values()), *applied.dropped}
    if unknown := [str(name) for name in names if name not in known]:
        raise ConversionError(
            "A group of the optimizer has parameters that the model lacks.",
            expected="names of the model's parameters, since key rules change names and order",
            got=some(unknown),
            todo="save it with torch.distributed.checkpoint.state_dict, or leave it out: "
            f"{option('optimizer', 'drop')}",
        )
    order = {name: index for index, name in enumerate(names)}
    renamed = sorted(applied.made_from(order), key=lambda pair: order[pair[1]])
    return [fqn for fqn, _ in renamed]
