"""Convert live modules and optimizers in a state to the dicts by parameter name that a checkpoint stores.

    {"model": module, "optimizer": optimizer}

    {"model": {"a.weight": tensor, ..},
     "optimizer": {"state": {"a.weight": {"step": .., "exp_avg": tensor}, ..},
                   "param_groups": [{"params": ["a.weight", ..], "lr": .., ..}]}}

This is the form of torch's ``get_model_state_dict`` and ``get_optimizer_state_dict``. Unlike the latter, it runs no
optimizer step to create missing state. An optimizer's parameters are looked up by identity in the modules of the same
state. Name parts that ``torch.compile``, DDP and activation checkpointing add are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.manifest.state_tree import MAX_DEPTH, child_name, join_name
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of, without_wrappers
from vescale_fsdp.devices import current_device
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.torch_modes import NULL_CONTEXT
from vescale_fsdp.torch_private import is_wrapper, local_of, storage_id


@runtime_checkable
class ChecksStateDict(Protocol):
    """An optimizer that can check a state dict before its tensors are read."""

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the errors that ``load_state_dict`` would raise. Tensors of the state are None: not read yet."""


class ModuleState(NamedTuple):
    """A module's ``state_dict()`` under two sets of names; see `canonical_names`.

    Attributes:
        raw: ``module.state_dict()``.
        values: canonical name -> value.
        raw_names: canonical name -> name in ``raw``.
    """

    raw: dict[str, Any]
    values: dict[str, Any]
    raw_names: dict[str, str]


class NamedOptimizer(NamedTuple):
    """An optimizer's state and the names of its parameters.

    Attributes:
        names: names of each group's parameters.
        params: name -> parameter.
        numbers: name -> number of the parameter in ``optimizer.state_dict()``.
        raw: ``optimizer.state_dict()``.
    """

    optimizer: torch.optim.Optimizer
    names: list[list[str]]
    params: dict[str, torch.Tensor]
    numbers: dict[str, int]
    raw: dict[str, Any]

    def value(self) -> dict[str, Any]:
        """Return the state by parameter name, and the groups, in the form of torch's ``get_optimizer_state_dict``."""
        groups = zip(self.raw["param_groups"], self.names, strict=True)
        return {
            **self.raw,
            "state": {**self.state_of, **self.other_state},
            "param_groups": [{**group, "params": names} for group, names in groups],
        }

    @property
    def state_of(self) -> dict[str, Any]:
        """Parameter name -> state, for the parameters that have state."""
        state = self.raw["state"]
        return {name: state[number] for name, number in self.numbers.items() if number in state}

    @property
    def other_state(self) -> dict[Any, Any]:
        """The entries of the state that belong to no parameter, under the optimizer's own keys."""
        numbers = set(self.numbers.values())
        return {key: value for key, value in self.raw["state"].items() if key not in numbers}


class LiveObjects:
    """The modules and optimizers of one state, with their state under parameter names.

    Args:
        state: the state passed to `save` or `load`; searched through dicts, lists and tuples.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._module_states: dict[int, tuple[nn.Module, ModuleState]] = {}

    def module_state(self, module: nn.Module) -> ModuleState:
        """Return ``module.state_dict()`` under raw and canonical names; computed once per module."""
        known = self._module_states.get(id(module))
        if known is None:
            raw = module.state_dict()
            names = canonical_names(module, raw)
            values = {names[name]: value for name, value in raw.items()}
            state = ModuleState(raw, values, {short: name for name, short in names.items()})
            # The entry refers to the module, so that the id in its key is not reused.
            self._module_states[id(module)] = known = (module, state)
        return known[1]

    @cached_property
    def modules(self) -> dict[Path, nn.Module]:
        """The modules in the state's dicts, by path."""
        modules: dict[Path, nn.Module] = {}

        def visit(value: Any, path: Path) -> None:
            if isinstance(value, nn.Module):
                modules[path] = value
            elif isinstance(value, Mapping):
                for key, item in value.items():
                    visit(item, (*path, key))

        visit(self._state, ())
        return modules

    @cached_property
    def leaves(self) -> dict[Path, Any]:
        """The leaves of the state by path; modules and optimizers count as dicts of their state."""

        def opened(value: Any, name: str) -> Any:
            if isinstance(value, nn.Module):
                return self.module_state(value).values
            if isinstance(value, torch.optim.Optimizer):
                named = self.named(value, name)
                return value.state_dict() if named is None else named.value()
            if isinstance(value, Mapping):
                return {key: opened(item, child_name(name, key)) for key, item in value.items()}
            return value

        tree = opened(self._state, "")
        return flatten(
            tree if isinstance(tree, Mapping) else {"state": tree},
            lambda value: isinstance(value, torch.Tensor),
        )

    def named(self, optimizer: torch.optim.Optimizer, where: str) -> NamedOptimizer | None:
        """Return an optimizer's state by parameter name.

        Returns None if its ``state_dict()`` does not number the parameters as torch's optimizers do.

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
        """Return the names of an optimizer's parameters, in order.

        If one module has all parameters, these are its names for them. Otherwise each name starts with the path of the
        parameter's module in the state.
        """
        wanted = {id(param) for param in params}
        fitting = [model for model in self._models if wanted <= model.names.keys()]
        if fitting:
            # The smallest one: of {"model": model, "head": model.head}, the head for an optimizer of head parameters.
            chosen = min(fitting, key=lambda model: len(model.names))
            names = [chosen.names[id(param)] for param in params]
        else:
            # Reversed, so that the first of several modules with a parameter wins.
            owners = {id(param): model for model in reversed(self._models) for param in model.params}
            unknown = [param for param in params if id(param) not in owners]
            if unknown:
                raise _no_owner(
                    optimizer, unknown, len(params), [model.path for model in self._models], where
                )
            names = [f"{owners[id(p)].path}.{owners[id(p)].names[id(p)]}" for p in params]
        if len(set(names)) < len(names):
            raise CheckpointError(
                "Several parameters of an optimizer have the same name.",
                expected="different names",
                got=some(sorted({name for name in names if names.count(name) > 1})),
                where=where,
                todo="rename the modules' keys in the state",
            )
        return names

    @cached_property
    def _models(self) -> list[_Model]:
        """The distinct modules of the state, with the names of their parameters."""
        found: dict[int, _Model] = {}
        for path, module in _modules(self._state, "", 0):
            if id(module) in found:
                continue
            # First: hooks of state_dict() replace gathered parameters by sharded ones.
            self.module_state(module)
            params = dict(module.named_parameters())
            names = canonical_names(module, params)
            by_id = {id(param): names[name] for name, param in params.items()}
            found[id(module)] = _Model(path, list(params.values()), by_id)
        return list(found.values())


class _Model(NamedTuple):
    """A module of the state, with its parameters and their names."""

    path: str  # in the state
    params: list[nn.Parameter]
    names: dict[int, str]  # id of a parameter -> its canonical name


def canonical_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return names of parameters and buffers without the parts that module wrappers, such as DDP, add.

    Args:
        names: names from ``named_parameters()`` or ``state_dict()``.

    Returns:
        Given name -> canonical name. Names whose canonical names would be equal are kept as they are.
    """
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    starts = [
        f"{path}.module.".removeprefix(".")
        # With duplicates: a module with two paths gives its parameters names under both.
        for path, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, parallel)
    ]
    canonical = {}
    for name in names:
        short = name
        # Inner wrappers first: outer paths then still match.
        for start in sorted(starts, key=len, reverse=True):
            if short.startswith(start):
                short = start.removesuffix("module.") + short.removeprefix(start)
        canonical[name] = without_wrappers(short)
    counts = Counter(canonical.values())
    return {name: short if counts[short] == 1 else name for name, short in canonical.items()}


def same_names(own: Iterable[Any], stored: Iterable[Any]) -> dict[Any, Any]:
    """Return stored name -> the state's name, for names that differ only in parts that wrappers add.

    A name that matches several names is left out.

    >>> same_names(["a.weight", "step"], ["_orig_mod.a.weight", "step"])
    {'_orig_mod.a.weight': 'a.weight'}
    """
    mine, theirs = [_short_names(names) for names in (own, stored)]
    left = mine.keys() - theirs.keys()  # equal names need no renaming
    by_short: dict[str, list[str]] = {}
    for name, short in theirs.items():
        if name not in mine:
            by_short.setdefault(short, []).append(name)
    found = {name: by_short[mine[name]] for name in left if mine[name] in by_short}
    counts = Counter(mine[name] for name in left)
    # Only where one stored name and one own name have the same short name.
    return {names[0]: name for name, names in found.items() if len(names) == 1 == counts[mine[name]]}


def _short_names(names: Iterable[Any]) -> dict[str, str]:
    """Return name -> name without wrappers' parts, and without ``module.`` if all dotted names begin with it.

    ``module.`` is the prefix that DDP adds to all names of a model.
    """
    short_names = {name: without_wrappers(name) for name in names if isinstance(name, str)}
    dotted = [short for short in short_names.values() if "." in short]
    if dotted and all(short.startswith("module.") for short in dotted):
        short_names = {name: short.removeprefix("module.") for name, short in short_names.items()}
    return short_names


def is_meta(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part of a tensor is on the meta device, and has no memory."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).is_meta


def aliases_of(leaves: Mapping[Path, Any]) -> dict[str, list[str]]:
    """Return name -> all names of the same tensor, for each leaf that has several names.

    Tied parameters on the meta device are included.
    """
    groups: dict[object, list[str]] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and leaf.numel():  # empty tensors share no elements
            local = local_of(leaf) if isinstance(leaf, DTensor) else leaf
            if is_wrapper(local):  # without a storage; `Describer` refuses it if it is to be filled
                continue
            # Empty pieces of different tensors may have the same address on this rank, but not the same layout name.
            slot = leaf.layout_ref if isinstance(leaf, RaggedDTensor) else None
            name = None if slot is None else slot[1]
            memory = storage_id(local), local.storage_offset(), tuple(leaf.shape), local.stride(), leaf.dtype
            groups.setdefault((memory, name), []).append(name_of(path))
    return {name: names for names in groups.values() if len(names) > 1 for name in names}


def load_into(target: Any, state: Any, name: str, **options: Any) -> Any:
    """Call an object's ``load_state_dict`` with ``options``, and return the object.

    Raises:
        CheckpointError: if ``load_state_dict`` raises an exception of any class.
    """
    # torch allows writes to inference tensors only in inference mode.
    is_inference = isinstance(target, nn.Module) and any(part.is_inference() for part in target.parameters())
    try:
        with torch.inference_mode() if is_inference else NULL_CONTEXT:
            target.load_state_dict(state, **options)
    except Exception as error:  # any class: load_state_dict may be the user's code
        raise CheckpointError(
            "An object's load_state_dict failed with the stored state.",
            expected=f"load_state_dict of {type(target).__qualname__} to return",
            got=f"{type(error).__name__}: {error}",
            where=name,
            todo="build the object as it was at the save; leaves that were loaded before it have new values",
        ) from error
    return target


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: Any, given: Mapping[torch.Tensor, Mapping[Any, Any]], name: str
) -> None:
    """Call an optimizer's ``load_state_dict``, and keep the dtypes of its state.

    Args:
        state: the state dict.
        given: parameter -> its state in ``state``.

    Raises:
        CheckpointError: if ``load_state_dict`` raises an exception of any class.
    """
    load_into(optimizer, state, name)
    undo_casts(optimizer, given)


def undo_casts(optimizer: torch.optim.Optimizer, given: Mapping[torch.Tensor, Mapping[Any, Any]]) -> None:
    """Give an optimizer's state the dtypes that it had when it was loaded.

    `torch.optim.Optimizer.load_state_dict` casts all state but ``step`` to the dtype of the parameter: the fp32 moments
    of a bf16 parameter lose precision, and a counter stands still at 256.

    Args:
        given: parameter -> the state that was loaded.
    """
    for param, kinds in given.items():
        held = optimizer.state.get(param, {})
        for kind in held.keys() & kinds.keys() - {"step"}:
            held[kind] = _uncast(held[kind], kinds[kind])


def _uncast(held: Any, given: Any) -> Any:
    """Return a value as it was given if ``held`` has been made from it by a cast; else return ``held``."""
    if isinstance(held, torch.Tensor) and isinstance(given, torch.Tensor):
        own, loaded = local_of(held), local_of(given)
        if own.dtype == loaded.dtype or held.shape != given.shape or own.shape != loaded.shape:
            return held
        cast = loaded.to(own.device, own.dtype)
        is_cast = bool(((own == cast) | ((own != own) & (cast != cast))).all())  # NaNs too
        return given.to(held.device) if is_cast else held
    if isinstance(held, dict) and isinstance(given, Mapping):
        return {key: _uncast(value, given[key]) if key in given else value for key, value in held.items()}
    if isinstance(held, (list, tuple)) and isinstance(given, (list, tuple)) and len(held) == len(given):
        return remade(held, [_uncast(*pair) for pair in zip(held, given, strict=True)])
    return held


def remade(like: Any, items: Sequence[Any]) -> Any:
    """Return ``items`` in a container of the type of ``like``: a list, a tuple, a named one, or such as torch.Size."""
    make = getattr(type(like), "_make", type(like))  # a named tuple's constructor takes separate arguments
    return make(items)


def home_device(state: Mapping[str, Any]) -> torch.device:
    """Return the device of a state's tensors; if all are on the meta device, the device of their mesh, or the CPU."""
    # 0-d tensors are left out: torch's optimizers keep step counts on the CPU.
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
    there = [tensor.device for tensor in tensors if not tensor.is_meta]
    if there:
        return there[0]
    kind = next((tensor.device_mesh.device_type for tensor in tensors if isinstance(tensor, DTensor)), "cpu")
    return current_device(kind)


def require_memory(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise a CheckpointError if an optimizer has parameters on the meta device."""
    if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
        raise CheckpointError(
            "An optimizer has parameters on the meta device. A load replaces them in the model, not in the optimizer.",
            expected="an optimizer of allocated parameters",
            got=f"{type(optimizer).__name__} with parameters on the meta device",
            where=name,
            todo="load the model first, then create the optimizer and load both; or call to_empty()",
        )


def _modules(value: Any, name: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each module in dicts, lists and tuples of a state."""
    if isinstance(value, nn.Module):
        yield name, value
    elif depth > MAX_DEPTH:
        return  # no error here: `encode` and `match` raise one for such a state
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _modules(item, child_name(name, join_name("", key)), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _modules(item, child_name(name, index), depth + 1)


def _numbers_parameters(raw: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``raw`` has torch's form: its groups have a number for each of the optimizer's parameters."""
    if not isinstance(raw, dict) or not {"state", "param_groups"} <= raw.keys():
        return False
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group.get("params", ())) for group in raw["param_groups"]] != sizes:
        return False
    return all(type(number) is int for group in raw["param_groups"] for number in group["params"])


def _no_owner(
    optimizer: torch.optim.Optimizer,
    unknown: list[torch.Tensor],
    num_params: int,
    models: list[str],
    where: str,
) -> CheckpointError:
    shapes = some([str(tuple(param.shape)) for param in unknown])
    return CheckpointError(
        "Parameters of an optimizer belong to no module of the state.",
        expected="the modules next to their optimizers, such as {'model': model, 'optimizer': optimizer}",
        got=f"{len(unknown)} of the {num_params} parameters of {type(optimizer).__name__}, of shapes {shapes}, "
        f"are in none of the modules {some([repr(model) for model in models]) if models else '(there are none)'}",
        where=where or "the state itself",
        todo="put the module itself into the state, not its state_dict(); if fully_shard or to() has replaced its "
        "parameters, create the optimizer afterwards",
    )
