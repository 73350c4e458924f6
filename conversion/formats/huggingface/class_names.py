"""Names in files and names in memory: what a class of transformers renames, joins and splits.

    file      model.layers.0.block_sparse_moe.experts.3.w1.weight      a matrix per expert
    memory    model.layers.0.mlp.experts.gate_up_proj                  one tensor of all experts

transformers converts names and layouts when it loads and saves a model. `class_child` lets the class convert tensors
without data, which record where their items come from. This module makes views from that record, so tensors are
converted like those of key rules: while they are read, within the memory budget, and never by transformers.

Only the model is converted. The optimizer of a training run has the names in memory, whatever folder it is stored in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import name_of
from vescale_fsdp.conversion.engine.carried_state import CarriedState, InMemory
from vescale_fsdp.conversion.engine.tensor_view import MappedView, RenamedView, TensorView
from vescale_fsdp.conversion.formats.huggingface.model_class import (
    files_of_class,
    has_names_of_files,
    memory_of_class,
)
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.index_maps import Concat, Index, IndexMap, Permute, Reshape, Slice, Stack

_MAPS: Mapping[str, type[IndexMap]] = {
    "concat": Concat,
    "stack": Stack,
    "slice": Slice,
    "index": Index,
    "permute": Permute,
    "reshape": Reshape,
}
_MOST_PROBLEMS = 8  # that an error lists


def class_of(module: object) -> tuple[str, dict[str, Any]] | None:
    """Return the class of a live model, or of a peft model's base, and its settings; None for other models."""
    transformers = sys.modules.get("transformers")  # not imported: then there is no model of it
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.PeftModel):
        module = module.get_base_model()
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    # The class itself may be one that `fully_shard` or the user has derived.
    own = (each for each in type(module).__mro__ if getattr(transformers, each.__name__, None) is each)
    found = next(own)
    return None if found is transformers.PreTrainedModel else (found.__name__, module.config.to_dict())


def in_memory(state: CarriedState, config: Mapping[str, Any], class_name: str, where: str) -> InMemory:
    """Convert the model of a Hugging Face folder to the names and layouts that its class has in memory.

    Names that the class does not load stay as they are.

    Args:
        state: the folder's tensors.
        config: the settings of the model, as in config.json.
        class_name: the class of transformers.
        where: the folder, for messages.

    Raises:
        ConversionError: if the class cannot make some of its tensors from those of the folder.
    """
    views = {fqn: state.views[name] for name, fqn in state.model.names.items()}
    if has_names_of_files(config, class_name, views):
        return InMemory(state)
    # A dtype that torch lacks is a weight's.
    stored = {fqn: (v.info.shape, v.info.dtype.torch_name or "float32") for fqn, v in views.items()}
    answer = memory_of_class(config, class_name, stored)
    if "unknown" in answer:
        return InMemory(state, unknown=str(answer["unknown"]))
    made, problems = dict(answer["in_memory"]), list(answer["problems"])
    problems += [
        f"{name} is computed from other weights" for name, expression in made.items() if expression is None
    ]
    if problems:
        raise _not_made(class_name, problems, where)
    converted = _converted(state, views, made)
    full = {fqn: name for name, fqn in converted.model.names.items()}
    ignored = frozenset(full[fqn] for fqn in answer["ignored"])
    return InMemory(converted, ignored, frozenset(answer["computed"]))


def in_files(state: CarriedState, config: Mapping[str, Any], class_name: str) -> CarriedState:
    """Convert a model from the names and layouts of its class in memory to those in its files.

    A state with names of files stays as it is, and so does one of a class that cannot be asked.

    Raises:
        ConversionError: if the class computes some tensors of its files.
    """
    views = {fqn: state.views[name] for name, fqn in state.model.names.items()}
    if has_names_of_files(config, class_name, views):
        return state
    answer = files_of_class(config, class_name)
    if "unknown" in answer:
        return state
    made, memory = answer["in_files"], answer["forms"][0]
    if not views.keys().isdisjoint(made.keys() - memory.keys()):  # at least one name that only files have
        return state
    unsaved = views.keys() & set(answer["unsaved"])
    possible = {}
    for name, expression in made.items():
        if expression is None:
            raise _not_made(class_name, [f"{name} is computed from other weights"], "its files")
        if views.keys() >= set(_names_in(expression)):
            possible[name] = expression
    converted = _converted(state, views, possible)
    full = {fqn: name for name, fqn in converted.model.names.items()}
    dropped = {full[fqn] for fqn in unsaved}
    return converted.restricted_to({*converted.views, *converted.values} - dropped) if dropped else converted


def _not_made(class_name: str, problems: list[str], where: str) -> ConversionError:
    return ConversionError(
        "The model's class cannot convert these weights.",
        expected=f"weights from which {class_name} of config.json makes its own",
        got=some(problems, _MOST_PROBLEMS),
        where=where,
        todo="pass the model's own config.json, or key rules; rules with keep_others = true and nothing else keep the "
        "names of the files",
    )


def _converted(state: CarriedState, views: Mapping[str, TensorView], made: Mapping[str, Any]) -> CarriedState:
    """Return the state with the tensors that the expressions describe, instead of those that they use.

    Args:
        views: the model's tensors by their names in the model.
        made: name in the model -> expression.
    """
    changed = {name: expression for name, expression in made.items() if expression != name}
    if not changed:
        return state
    used = {name for expression in changed.values() for name in _names_in(expression)}
    # A tensor may keep its name and also be a part of another one.
    gone = used - {name for name, expression in made.items() if expression == name}
    container = state.container
    paths = {name: (*container, name) for name in changed}
    new = {
        name_of(path): RenamedView(_view(changed[name], views), name_of(path)) for name, path in paths.items()
    }
    dropped = {name for name, fqn in state.model.names.items() if fqn in gone}
    names = {name: fqn for name, fqn in state.model.names.items() if name not in dropped}
    names |= {name_of(path): name for name, path in paths.items()}
    return replace(
        state,
        views={**{name: view for name, view in state.views.items() if name not in dropped}, **new},
        paths={**state.paths, **{name_of(path): path for path in paths.values()}},
        model=replace(state.model, names=names),
        is_model=frozenset(names),
    )


def _names_in(expression: Any) -> Iterator[str]:
    """Yield the names of the tensors that an expression uses."""
    if isinstance(expression, str):
        yield expression
    else:
        for part in expression[2]:
            yield from _names_in(part)


def _view(expression: Any, views: Mapping[str, TensorView]) -> TensorView:
    """Return the view that an expression describes."""
    if isinstance(expression, str):
        return views[expression]
    operation, arguments, inputs = expression
    values = (tuple(value) if isinstance(value, list) else value for value in arguments)
    return MappedView(_MAPS[operation](*values), tuple(_view(each, views) for each in inputs))
