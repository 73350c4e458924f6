"""Which tensor of a source fills which leaf of a live state: planned from metadata, before any data is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from vescale_fsdp.checkpoint.formats.huggingface.repository import Assets, own_config
from vescale_fsdp.checkpoint.formats.huggingface.tied_weights import left_out_by
from vescale_fsdp.checkpoint.formats.native.tree import native_tree
from vescale_fsdp.checkpoint.load import SourceOptions
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name
from vescale_fsdp.checkpoint.moves.carried_state import (
    CarriedState,
    ModelNames,
    container_of,
    split_entries,
    whole_state,
)
from vescale_fsdp.checkpoint.moves.casting import CastRules, CastView, float_type
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, TensorView
from vescale_fsdp.checkpoint.state.match import Match, match
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.conversion.formats.peft import one_adapter, trained_names
from vescale_fsdp.conversion.live.live_state import LiveState
from vescale_fsdp.conversion.rules.apply_to_state import state_with_rules
from vescale_fsdp.conversion.rules.rule_file import load_rules
from vescale_fsdp.conversion.state.optimizers import home_of, optimizers_of
from vescale_fsdp.conversion.state.quantized_weights import dequantized, find_quantized
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
    """Arguments of `checkpoint.load`, see there."""

    source: SourceOptions
    casts: tuple[str, ...] = ()
    include: tuple[str, ...] | None = None
    strict: bool = True
    init: Callable[[nn.Module], object] | None = None


@dataclass
class LiveMatch:
    """A source and a state side by side.

    Attributes:
        found: leaves that are missing, unexpected, or of another kind; and what finishes plain values.
        reads: (leaf, view, tensor) of what is to be filled.
        views: the source's tensors, by number in its tree: what fills the new tensors of ``found.fresh``.
        left_out: entries of the source that the state cannot take.
        ties: names of leaves that are one tensor, by each of them.
    """

    found: Match
    reads: list[tuple[str, TensorView, torch.Tensor]] = field(default_factory=list)
    views: Sequence[TensorView] = ()
    left_out: tuple[str, ...] = ()
    ties: Mapping[str, list[str]] = field(default_factory=dict)


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
    is_coded = options.source.dequantize is None
    infos = [view.info for name, view in carried.views.items() if name in carried.is_model]
    quantized = find_quantized(infos, _config(source, options)) if is_coded else frozenset()
    texts = [text for text in options.casts if text != AS_STATE]
    if texts:
        rules = CastRules.parse(texts)
        carried = carried.with_model_views(lambda views: rules.apply(views, quantized))
    places = Places(live.leaves(), tuple(live.models))
    carried, adapter = _as_trained(carried, places)
    carried = _arranged(carried, places)
    tree, names = native_tree(carried, lambda _: 0)
    views = [carried.views[name] for _, name in names]
    found = match(live.tree, tree, options.include, within=live.state)
    made = LiveMatch(found, [], views, carried.left_out, live.ties())
    found.require_fit(source.url, strict=False)
    for read in found.reads:
        view = views[read.place]
        if AS_STATE in options.casts and view.info.name not in quantized:
            view = _as_state(view, read.tensor)
        if found.fits(read, view.info.dtype.name, view.info.shape):
            made.reads.append((read.name, view, read.tensor))
    filled = {name for name, _, _ in made.reads}
    found.missing = [  # a name whose tensor is filled under another one is not missing
        name for name in found.missing if not filled.intersection(made.ties.get(name, ()))
    ]
    if adapter:  # alone: the base keeps its values
        found.missing = [name for name in found.missing if name in adapter]
    return made


def _as_trained(carried: CarriedState, places: Places) -> tuple[CarriedState, frozenset[str]]:
    """An adapter from a folder of peft under the names that it has in the state, and those names in full.

    Raises:
        ConversionError: if the state has several adapters.
    """
    trained = trained_names(places.split.names.values())
    stored = {name.saved for name in trained.values()}.intersection(carried.is_model).difference(trained)
    if not stored:
        return carried, frozenset()
    held = {saved: name for name, saved in one_adapter(trained, None, LIVE).items()}
    made = {held[name]: (RenamedView(carried.views[name], held[name]), name) for name in stored}
    return carried.with_replaced(made, stored), frozenset(
        f"{places.split.prefix}{name}" for name in held.values()
    )


def _carried(source: Source, options: LiveOptions) -> CarriedState:
    """The source's state in the names of the live one's side."""
    carried = whole_state(source, options.source.model_prefix)
    if options.source.dequantize is not None:
        carried = dequantized(carried, _config(source, options), float_type(options.source.dequantize))
    if options.source.rules is not None:
        rules, config = load_rules(options.source.rules), _config(source, options)
        carried = state_with_rules(carried, rules, config, to_hf=options.source.rules_to == "hf")
    return carried


def _config(source: Source, options: LiveOptions) -> dict[str, Any]:
    return (
        own_config(source.store)
        if options.source.config is None
        else Assets(options.source.config).config or {}
    )


def _as_state(view: TensorView, tensor: torch.Tensor) -> TensorView:
    wanted = dtype_from_torch(dtype_name(tensor.dtype))
    kinds = {view.info.dtype.kind, wanted.kind}
    return CastView(view, wanted) if kinds == {"float"} and view.info.dtype != wanted else view


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
