"""Which tensor of a source fills which leaf of a live state: planned from metadata, before any data is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name
from vescale_fsdp.checkpoint.moves.casting import CastRules, CastView, float_type
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, TensorView
from vescale_fsdp.checkpoint.state.match import Match, match
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.conversion.adapters.peft_names import one_adapter, trained_names
from vescale_fsdp.conversion.formats.huggingface.assets import Assets, own_config
from vescale_fsdp.conversion.formats.huggingface.tied_weights import left_out_by
from vescale_fsdp.conversion.live.live_state import LiveState
from vescale_fsdp.conversion.rules.apply_to_state import state_with_rules
from vescale_fsdp.conversion.rules.rule_file import load_rules
from vescale_fsdp.conversion.state.carried_state import CarriedState, whole_state
from vescale_fsdp.conversion.state.dequantized_weights import dequantized
from vescale_fsdp.conversion.state.model_names import ModelNames, container_of, split_entries
from vescale_fsdp.conversion.state.native_tree import native_tree
from vescale_fsdp.conversion.state.optimizers import home_of, optimizers_of
from vescale_fsdp.conversion.state.quantized_weights import find_quantized
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.layout.dtypes import dtype_from_torch

AS_STATE = "state"  # the cast to the types that the state has
LIVE = "the state to be filled"


@dataclass(frozen=True)
class Places:
    """Where a live state keeps its entries.

    Args:
        leaves: its leaves by path.
        models: containers of its modules; empty for a state of plain dicts, in which the model is looked for.
    """

    leaves: Mapping[Path, Any]
    models: tuple[Path, ...] = ()

    @cached_property
    def split(self) -> ModelNames:
        """Its entries, split as a source's are."""
        paths = {name_of(path): path for path in self.leaves}
        shapes = {name: leaf.shape for name, path in paths.items() if _is_tensor(leaf := self.leaves[path])}
        prefix = name_of(self.models[0]) if len(self.models) == 1 else None
        return split_entries(paths, shapes, prefix, LIVE)

    @cached_property
    def model(self) -> Path | None:
        """The container of the one model; None if there are several."""
        if self.models:
            return self.models[0] if len(self.models) == 1 else None
        if self.split.candidates:
            return None
        return container_of(self.split.prefix, self.leaves)

    @cached_property
    def optimizers(self) -> tuple[Path, ...]:
        """Containers of optimizers."""
        known = set(self.split.optimizer)
        homes = (home_of(path) for path in self.leaves if name_of(path) in known)
        return tuple(dict.fromkeys(home for home in homes if home is not None))

    def holds(self, path: Path) -> bool:
        """Whether the state takes an entry of this path: a leaf, or inside an object or an empty container."""
        return any(path[:depth] in self.leaves for depth in range(1, len(path) + 1))


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


@dataclass(frozen=True)
class LiveOptions:
    """The arguments of `load_from`, see there."""

    rules: str | None = None
    rules_to: str = "ours"
    config: str | None = None
    dequantize: str | None = None
    casts: tuple[str, ...] = ()
    include: tuple[str, ...] | None = None
    strict: bool = True
    init: Callable[[nn.Module], object] | None = None
    model_prefix: str | None = None

    def to_json(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        return {
            "rules": self.rules,
            "rules_to": self.rules_to,
            "config": self.config,
            "dequantize": self.dequantize,
            "dtype": list(self.casts),
            "include": self.include,
            "strict": self.strict,
            "init": self.init is not None,
            "model_prefix": self.model_prefix,
        }


@dataclass
class LiveMatch:
    """A source and a state side by side.

    Attributes:
        found: leaves that are missing, unexpected, or of another kind; and what finishes plain values.
        reads: (leaf, view, tensor) of what is to be filled.
        fresh: what fills tensors that a Stateful object will be given, by number in the source's tree.
        mismatched: leaves that do not fit, each with what the source and the state have.
        left_out: entries of the source that the state has no place for.
        ties: names of leaves that are one tensor, by each of them.
    """

    found: Match
    reads: list[tuple[str, TensorView, torch.Tensor]] = field(default_factory=list)
    fresh: dict[int, TensorView] = field(default_factory=dict)
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    ties: Mapping[str, list[str]] = field(default_factory=dict)

    def require_fit(self, where: str) -> None:
        """Refuse a source that does not have what the state has.

        Raises:
            CheckpointError: naming the leaves.
        """
        found, problem = self.found, None
        if self.mismatched:
            name, (stored, held) = next(iter(self.mismatched.items()))
            todo = "build the model as it was saved"
            if stored.split(" ", 1)[1] == held.split(" ", 1)[1]:
                todo = f"pass dtype={AS_STATE!r} to cast floats to the types that the state has"
            problem = f"{len(self.mismatched)} tensors have another shape or type than in the source."
            raise CheckpointError(
                problem,
                expected=f"{held}, as the state has",
                got=stored,
                where=f"{name} in {where}",
                todo=todo,
            )
        if found.unused:
            raise CheckpointError(
                "A name pattern fits no leaf.",
                expected="patterns for names of leaves: their keys, joined by '/'",
                got=", ".join(map(repr, sorted(found.unused))),
                where=where,
                todo="'*' fits '/' and '.' too; strict=False allows patterns for nothing",
            )
        if found.missing or found.unexpected:
            raise CheckpointError(
                "The state and the source do not hold the same leaves.",
                expected="equal names",
                got=f"missing in the source: {some(found.missing, 5)}; "
                f"unexpected, only in the source: {some(found.unexpected, 5)}",
                where=where,
                todo="pass rules= if the source has other names, include= for a part of the state, or strict=False "
                "to load what both have",
            )

    def require_kinds(self, where: str) -> None:
        """Refuse leaves that are tensors on one side only.

        Raises:
            CheckpointError: naming the first.
        """
        if self.found.problems:
            name, stored, held = self.found.problems[0]
            raise CheckpointError(
                f"{len(self.found.problems)} leaves of the state are of another kind than in the source.",
                expected=f"{held}, as the state has",
                got=stored,
                where=f"{name} in {where}",
                todo="build the state as it was when it was saved",
            )


def match_source(source: Source, live: LiveState, options: LiveOptions) -> LiveMatch:
    """Plan what fills each leaf.

    Raises:
        ConversionError: if rules or casts do not fit the source.
        CheckpointError: for leaves that are tensors on one side only.
    """
    carried = _carried(source, options)
    told = carried.warnings
    made = _match(source, carried, live, options)
    if made.found.missing:
        # What the state has twice, untied, and a folder once. Asked last: transformers is slow to come.
        twins, unsaid = left_out_by(source, carried.views)
        told += unsaid
        if twins:
            made = _match(source, carried.with_names_of(twins), live, options)
    for text in told:
        warnings.warn(text, stacklevel=4)
    return made


def _match(source: Source, carried: CarriedState, live: LiveState, options: LiveOptions) -> LiveMatch:
    # What has been dequantised leaves no codes, whatever config.json says.
    is_coded = options.dequantize is None
    quantized = find_quantized(_model_infos(carried), _config(source, options)) if is_coded else frozenset()
    texts = [text for text in options.casts if text != AS_STATE]
    if texts:
        rules = CastRules.parse(texts)
        carried = carried.with_model_views(lambda views: rules.apply(views, quantized))
    places = Places(live.leaves(), tuple(live.models))
    carried, adapter = _as_trained(carried, places)
    carried = _arranged(carried, places)
    tree, names = native_tree(carried, lambda _: 0)
    views = [carried.views[name] for _, name in names]
    made = LiveMatch(
        match(live.tree, tree, options.include, within=live.state),
        left_out=carried.left_out,
        ties=live.ties(),
    )
    made.require_kinds(source.url)
    for name, place, tensor in made.found.reads:
        view = views[place]
        if AS_STATE in options.casts and view.info.name not in quantized:
            view = _as_state(view, tensor)
        stored, held = (
            _told(view.info.shape, view.info.dtype.name),
            _told(tensor.shape, dtype_name(tensor.dtype)),
        )
        if stored == held:
            made.reads.append((name, view, tensor))
        else:
            made.mismatched[name] = (stored, held)
    made.fresh = {new.place: views[new.place] for new in made.found.fresh}
    _forgive_ties(made)
    if adapter:  # alone: the base keeps its values
        made.found.missing = [name for name in made.found.missing if name.rpartition("/")[2] in adapter]
    return made


def _as_trained(carried: CarriedState, places: Places) -> tuple[CarriedState, frozenset[str]]:
    """An adapter from a folder of peft under the names that it has in the state, and those names.

    Raises:
        ConversionError: if the state has several adapters.
    """
    trained = trained_names(places.split.names.values())
    stored = {name.saved for name in trained.values()}.intersection(carried.is_model).difference(trained)
    if not stored:
        return carried, frozenset()
    held = {saved: name for name, saved in one_adapter(trained, None, LIVE).items()}
    made = {held[name]: (RenamedView(carried.views[name], held[name]), name) for name in stored}
    return carried.with_replaced(made, stored), frozenset(held.values())


def _carried(source: Source, options: LiveOptions) -> CarriedState:
    """The source's state in the names of the live one's side."""
    carried = whole_state(source, options.model_prefix)
    if options.dequantize is not None:
        carried = dequantized(carried, _config(source, options), float_type(options.dequantize))
    if options.rules is not None:
        rules, config = load_rules(options.rules), _config(source, options)
        carried = state_with_rules(carried, rules, config, to_hf=options.rules_to == "hf")
    return carried


def _config(source: Source, options: LiveOptions) -> dict[str, Any]:
    return own_config(source.store) if options.config is None else Assets(options.config).config or {}


def _model_infos(carried: CarriedState) -> Iterator[Any]:
    return (view.info for name, view in carried.views.items() if name in carried.is_model)


def _as_state(view: TensorView, tensor: torch.Tensor) -> TensorView:
    wanted = dtype_from_torch(dtype_name(tensor.dtype))
    kinds = {view.info.dtype.kind, wanted.kind}
    return CastView(view, wanted) if kinds == {"float"} and view.info.dtype != wanted else view


def _told(shape: tuple[int, ...] | torch.Size, dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def _forgive_ties(made: LiveMatch) -> None:
    """A name is not missing if what it shares its tensor with is there."""
    read = {name for name, _, _ in made.reads}
    made.found.missing = [
        name for name in made.found.missing if not read.intersection(made.ties.get(name, ()))
    ]


def _arranged(state: CarriedState, places: Places) -> CarriedState:
    """A source's entries, after key rules, at the paths where a live state keeps its own.

        source   pytorch_model_fsdp_0.a.weight      optimizer.state.0.exp_avg      (of two parameters, by number)
        state    model.a.weight                     optim.state.a.weight.exp_avg   (by name, nested or flattened)

    A state of one model takes the source's model whatever either calls it, and a state of one optimizer its optimizer.
    Entries that the state cannot take (a scheduler, an optimizer when the state is a lone model) are left out.
    """
    if places.model is not None and not state.model.candidates:
        state = _moved(state, dict.fromkeys(state.is_model, state.container), places.model)
    homes = optimizers_of(state)
    if places.optimizers and len(homes) == len(places.optimizers) == 1:
        (home,), names = places.optimizers, next(iter(homes.values()))
        state = _moved(state, dict.fromkeys(names, next(iter(homes))), home)
        homes = optimizers_of(state)
    optimizer = {name for names in homes.values() for name in names}
    kept = {
        name
        for name in (*state.views, *state.values)
        if name in state.is_model
        or (name in optimizer and places.optimizers)
        or places.holds(state.path(name))
    }
    return replace(
        state,
        views={name: view for name, view in state.views.items() if name in kept},
        values={name: value for name, value in state.values.items() if name in kept},
        left_out=(*state.left_out, *(n for n in (*state.views, *state.values) if n not in kept)),
    )


def _moved(state: CarriedState, homes: Mapping[str, Path], new: Path) -> CarriedState:
    """Entries from their containers into another; a model's dict of names stays one, whatever dots it had."""
    paths = dict(state.paths)
    for name, home in homes.items():
        rest = state.path(name)[len(home) :]
        paths[name] = (*new, name_of(rest)) if name in state.is_model else (*new, *rest)
    return replace(state, paths=paths)
