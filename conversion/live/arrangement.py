"""A source's entries at the places where a live state keeps its own: model, optimizer, everything else.

    source   pytorch_model_fsdp_0.a.weight      optimizer.state.0.exp_avg      (of two parameters, by number)
    state    model.a.weight                     optim.state.a.weight.exp_avg   (by name, nested or flattened)

A state of one model takes the source's model whatever either calls it, and the same holds for the one optimizer. What
the state has no place for at all (a scheduler, an optimizer beside a lone model) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView, ZerosView
from vescale_fsdp.conversion.state.carried_state import CarriedState
from vescale_fsdp.conversion.state.model_names import ModelNames, find_model
from vescale_fsdp.conversion.state.nesting import Path, name_of
from vescale_fsdp.conversion.state.optimizer_owners import home_of
from vescale_fsdp.layout.dtypes import dtype_from_torch


@dataclass(frozen=True)
class Places:
    """Where a live state has what.

    Args:
        leaves: its leaves by path.
        models: containers of models, as far as modules told; none to find out.
    """

    leaves: Mapping[Path, Any]
    models: tuple[Path, ...] = ()

    url: str = "the state to be filled"

    @cached_property
    def tensors(self) -> dict[str, TensorView]:
        """By flattened name; stand-ins, of which nobody asks more than the shape."""
        found = {name_of(p): leaf for p, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}
        infos = (
            TensorInfo(n, tuple(t.shape), dtype_from_torch(dtype_name(t.dtype))) for n, t in found.items()
        )
        return {info.name: ZerosView(info) for info in infos}

    @cached_property
    def values(self) -> dict[str, Any]:
        """Everything else."""
        return {name_of(p): leaf for p, leaf in self.leaves.items() if not isinstance(leaf, torch.Tensor)}

    @cached_property
    def _paths(self) -> dict[str, Path]:
        return {name_of(path): path for path in self.leaves}

    def path(self, name: str) -> Path:
        """Where an entry sits in the state."""
        return self._paths[name]

    @cached_property
    def split(self) -> ModelNames:
        """Its entries as a source's are split."""
        return find_model(self, name_of(self.models[0]) if len(self.models) == 1 else None)

    @cached_property
    def model(self) -> Path | None:
        """The container of the one model; None if there are several."""
        if self.models:
            return self.models[0] if len(self.models) == 1 else None
        if self.split.rivals:
            return None
        whole, short = next(iter(self.split.names.items()))
        path = self.path(whole)
        return next((path[:at] for at in range(len(path)) if name_of(path[at:]) == short), path[:-1])

    @cached_property
    def optimizers(self) -> tuple[Path, ...]:
        """Containers of optimizers."""
        known = set(self.split.optimizer)
        homes = (home_of(path) for path in self.leaves if name_of(path) in known)
        return tuple(dict.fromkeys(home for home in homes if home is not None))

    def holds(self, path: Path) -> bool:
        """Whether an entry of this path has a place: a leaf, or inside an object or an empty container."""
        return any(path[:depth] in self.leaves for depth in range(1, len(path) + 1))


def arranged(state: CarriedState, places: Places) -> CarriedState:
    """What a source holds, after key rules, at the places of a live state."""
    if places.model is not None and not state.model.rivals:
        state = _moved(state, dict.fromkeys(state.is_model, state.container), places.model)
    homes = _optimizers(state)
    if places.optimizers and len(homes) == len(places.optimizers) == 1:
        (home,), names = places.optimizers, next(iter(homes.values()))
        state = _moved(state, dict.fromkeys(names, next(iter(homes))), home)
        homes = _optimizers(state)
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


def _optimizers(state: CarriedState) -> dict[Path, list[str]]:
    """Names of optimizer entries by container."""
    found: dict[Path, list[str]] = {}
    for name in (*state.views, *state.values):
        home = home_of(state.path(name)) if name not in state.is_model else None
        if home is not None:
            found.setdefault(home, []).append(name)
    return found
