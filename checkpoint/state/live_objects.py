"""Live modules and optimizers in a state, as values that name parameters: what is stored of them on any ranks.

    {"model": module, "optimizer": optimizer}

    {"model": {"a.weight": tensor, ..},
     "optimizer": {"state": {"a.weight": {"step": .., "exp_avg": tensor}, ..},
                   "param_groups": [{"params": ["a.weight", ..], "lr": .., ..}]}}

This is the form of torch's ``get_model_state_dict`` and ``get_optimizer_state_dict``, without the optimizer step that
the latter takes where there is no state yet. An optimizer's parameters are looked up, by identity, in the modules of
the same state. Names are without the parts that ``torch.compile``, DDP and activation checkpointing add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from vescale_fsdp.checkpoint.manifest.state_tree import MAX_DEPTH, child_name, join_name
from vescale_fsdp.checkpoint.state.nesting import without_wrappers
from vescale_fsdp.errors import CheckpointError, some


@runtime_checkable
class ChecksStateDict(Protocol):
    """An optimizer that tells whether it takes a state before the state's tensors have been read."""

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what ``load_state_dict`` would; values of ``state_dict["state"]`` stand for tensors yet to come."""


class ModuleState(NamedTuple):
    """A module's ``state_dict()``, its values by canonical name, and its own name of each."""

    raw: dict[str, Any]
    values: dict[str, Any]
    raw_names: dict[str, str]


class NamedOptimizer(NamedTuple):
    """An optimizer's state with the names of its parameters.

    Attributes:
        names: of the parameters, by group.
        params: the parameters, by name.
        numbers: of the parameters in ``optimizer.state_dict()``, by name.
        raw: ``optimizer.state_dict()``.
    """

    optimizer: torch.optim.Optimizer
    names: list[list[str]]
    params: dict[str, torch.Tensor]
    numbers: dict[str, int]
    raw: dict[str, Any]

    def value(self) -> dict[str, Any]:
        """The state by parameter name, and the groups, in the form of torch's ``get_optimizer_state_dict``."""
        groups = zip(self.raw["param_groups"], self.names, strict=True)
        return {
            **self.raw,
            "state": {**self.state_of, **self.other_state},
            "param_groups": [{**group, "params": names} for group, names in groups],
        }

    @property
    def state_of(self) -> dict[str, Any]:
        """State by parameter name, of the parameters that have some."""
        state = self.raw["state"]
        return {name: state[number] for name, number in self.numbers.items() if number in state}

    @property
    def other_state(self) -> dict[Any, Any]:
        """State that belongs to no parameter, by the optimizer's own keys."""
        numbers = set(self.numbers.values())
        return {key: value for key, value in self.raw["state"].items() if key not in numbers}


class LiveObjects:
    """The modules and optimizers of one state.

    Args:
        state: whatever `save` and `load` take; searched through dicts, lists and tuples.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._module_states: dict[int, tuple[nn.Module, ModuleState]] = {}

    def module_state(self, module: nn.Module) -> ModuleState:
        """``module.state_dict()``, also under canonical names."""
        known = self._module_states.get(id(module))
        if known is None:
            raw = module.state_dict()
            names = canonical_names(module, raw)
            values = {names[name]: value for name, value in raw.items()}
            state = ModuleState(raw, values, {short: name for name, short in names.items()})
            self._module_states[id(module)] = known = (module, state)
        return known[1]

    def named(self, optimizer: torch.optim.Optimizer, where: str) -> NamedOptimizer | None:
        """An optimizer's state by parameter name; None for one whose ``state_dict()`` does not number parameters.

        Args:
            where: the optimizer's name in the state.

        Raises:
            CheckpointError: if a parameter belongs to no module of the state, or names are ambiguous.
        """
        raw = optimizer.state_dict()
        if not _numbers_parameters(raw, optimizer):
            return None
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        names = self._names_of(params, optimizer, where)
        numbers = chain.from_iterable(group["params"] for group in raw["param_groups"])
        rest = iter(names)
        by_group = [[next(rest) for _ in group["params"]] for group in optimizer.param_groups]
        return NamedOptimizer(
            optimizer,
            by_group,
            dict(zip(names, params, strict=True)),
            dict(zip(names, numbers, strict=True)),
            raw,
        )

    def _names_of(
        self, params: list[torch.Tensor], optimizer: torch.optim.Optimizer, where: str
    ) -> list[str]:
        """Names of an optimizer's parameters: of one module where that has them all, else with the modules' names."""
        wanted = {id(param) for param in params}
        fitting = [model for model in self._models if wanted <= model.names.keys()]
        if fitting:
            # The smallest: {"model": model, "head": model.head} with an optimizer of the head.
            chosen = min(fitting, key=lambda model: len(model.names))
            names = [chosen.names[id(param)] for param in params]
        else:
            owners = {id(param): model for model in reversed(self._models) for param in model.params}
            strangers = [param for param in params if id(param) not in owners]
            if strangers:
                raise _no_owner(
                    optimizer, strangers, len(params), [model.path for model in self._models], where
                )
            names = [f"{owners[id(p)].path}.{owners[id(p)].names[id(p)]}" for p in params]
        if len(set(names)) < len(names):
            raise CheckpointError(
                "Parameters of an optimizer have one name.",
                expected="a name of its own for each parameter",
                got=some(sorted({name for name in names if names.count(name) > 1})),
                where=where,
                todo="rename the keys under which the modules stand in the state",
            )
        return names

    @cached_property
    def _models(self) -> list[_Model]:
        found: dict[int, _Model] = {}
        for path, module in _modules(self._state, "", 0):
            if id(module) in found:
                continue
            self.module_state(module)  # its hooks put sharded parameters in place of gathered ones
            params = dict(module.named_parameters())
            names = canonical_names(module, params)
            by_id = {id(param): names[name] for name, param in params.items()}
            found[id(module)] = _Model(path, list(params.values()), by_id)
        return list(found.values())


class _Model(NamedTuple):
    """A module of the state: where it is, its parameters, and their names by id."""

    path: str
    params: list[nn.Parameter]
    names: dict[int, str]


def canonical_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of parameters and buffers without what wrappers of modules add to them.

    Args:
        names: as ``named_parameters()`` and ``state_dict()`` give them.

    Returns:
        The canonical name of each; its own where two would become one.
    """
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    starts = [
        f"{path}.module.".removeprefix(".")
        for path, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, parallel)
    ]
    found = {}
    for name in names:
        short = name
        for start in sorted(starts, key=len, reverse=True):
            if short.startswith(start):
                short = start.removesuffix("module.") + short.removeprefix(start)
        found[name] = without_wrappers(short)
    counts = Counter(found.values())
    return {name: short if counts[short] == 1 else name for name, short in found.items()}


def same_names(own: Iterable[Any], stored: Iterable[Any]) -> dict[Any, Any]:
    """Names of a checkpoint that differ from those of a state in what wrappers add: the state's name of each.

    >>> same_names(["a.weight", "step"], ["_orig_mod.a.weight", "step"])
    {'_orig_mod.a.weight': 'a.weight'}
    """
    mine, theirs = [_short_names(names) for names in (own, stored)]
    left = mine.keys() - theirs.keys()
    by_short: dict[str, list[str]] = {}
    for name, short in theirs.items():
        if name not in mine:
            by_short.setdefault(short, []).append(name)
    found = {name: by_short[mine[name]] for name in left if mine[name] in by_short}
    counts = Counter(mine[name] for name in left)
    return {names[0]: name for name, names in found.items() if len(names) == 1 == counts[mine[name]]}


def _short_names(names: Iterable[Any]) -> dict[str, str]:
    """Names without what wrappers add; ``module.`` too, where all that have dots begin with it."""
    found = {name: without_wrappers(name) for name in names if isinstance(name, str)}
    dotted = [short for short in found.values() if "." in short]
    if dotted and all(short.startswith("module.") for short in dotted):
        found = {name: short.removeprefix("module.") for name, short in found.items()}
    return found


def has_meta_modules(state: Any) -> bool:
    """Whether a module of a state has parameters or buffers on the meta device."""
    return any(
        tensor.device.type == "meta"
        for _, module in _modules(state, "", 0)
        for tensor in (*module.parameters(), *module.buffers())
    )


def _modules(value: Any, name: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    elif depth > MAX_DEPTH:  # whoever walks the state itself refuses it
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _modules(item, child_name(name, join_name("", key)), depth + 1)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _modules(item, child_name(name, place), depth + 1)


def _numbers_parameters(raw: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``raw`` has torch's form, with a number for each of the optimizer's parameters."""
    if not isinstance(raw, dict) or not {"state", "param_groups"} <= raw.keys():
        return False
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group.get("params", ())) for group in raw["param_groups"]] != sizes:
        return False
    return all(type(number) is int for group in raw["param_groups"] for number in group["params"])


def _no_owner(
    optimizer: torch.optim.Optimizer,
    strangers: list[torch.Tensor],
    num_params: int,
    models: list[str],
    where: str,
) -> CheckpointError:
    shapes = some([str(tuple(param.shape)) for param in strangers])
    return CheckpointError(
        "Parameters of an optimizer belong to no module of the state.",
        expected="the modules next to their optimizers, such as {'model': model, 'optimizer': optimizer}",
        got=f"{len(strangers)} of the {num_params} parameters of {type(optimizer).__name__}, of shapes {shapes}, "
        f"are in none of the modules {some([repr(model) for model in models]) if models else '(there are none)'}",
        where=where or "the state itself",
        todo="put the module itself into the state, not its state_dict(); if fully_shard or to() has replaced its "
        "parameters, make the optimizer afterwards",
    )
