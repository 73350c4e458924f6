"""Suggest key rules for a checkpoint: reads the names and shapes of both sides, and no tensor."""

from __future__ import annotations

from typing import Any

from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion.engine.carried_state import model_state
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.formats.huggingface.model_class import files_of_class, known_class
from vescale_fsdp.conversion.formats.huggingface.repository import (
    CONFIG_FILE,
    config_class,
    is_weight_file,
    own_config,
)
from vescale_fsdp.conversion.formats.huggingface.tied_weights import declared_ties, tied_aliases
from vescale_fsdp.conversion.rules.suggest import NamedShapes, Shape, suggest_rules
from vescale_fsdp.errors import ConversionError


def suggest(source: Source, model: str, model_prefix: str | None = None) -> str:
    """Return the text of a rule file for the tensors of a checkpoint (ours) whose names differ from a model's (hf).

    Args:
        source: the checkpoint.
        model: path or URL of the model: a Hugging Face folder, a config.json, or a checkpoint of any format.
        model_prefix: prefix of the model's names in ``source``; None to detect it.

    Raises:
        ConversionError: if the names of the model cannot be found out.
    """
    return suggest_rules(model_state(source, model_prefix).views, _named_shapes(model))


def _named_shapes(model: str) -> NamedShapes:
    folder = model.removesuffix(CONFIG_FILE).rstrip("/") or "." if model.endswith(CONFIG_FILE) else model
    store = open_store(folder)
    files = store.list_files()
    if CONFIG_FILE in files and (folder != model or not any(map(is_weight_file, files))):
        return _of_class(own_config(store), model)
    state = model_state(opened := open_source(model))
    config = own_config(opened.store)
    shapes = {name: view.info.shape for name, view in state.views.items()}
    ties = tied_aliases(config, shapes)
    return NamedShapes(shapes | {alias: shapes[name] for alias, name in ties.items()}, ties, config)


def _of_class(config: dict[str, Any], where: str) -> NamedShapes:
    """Return the tensors that the class in a config.json has in files."""
    class_name = config_class(config)
    if class_name is None:
        raise _unknown("a config.json with architectures, the name of the model's class", "none", where)
    shapes: dict[str, Shape]
    if (known := known_class(config, class_name)) is not None:
        shapes = dict(known.forms[-1])
    elif "unknown" in (answer := files_of_class(config, class_name)):
        raise _unknown(f"a class {class_name} that transformers can build", answer["unknown"], where)
    else:
        shapes = {name: tuple(shape) for name, shape in answer["forms"][-1].items()}
    ties = {alias: name for alias, name in declared_ties(config, shapes)[0].items() if name in shapes}
    return NamedShapes(shapes | {alias: shapes[name] for alias, name in ties.items()}, ties, config)


def _unknown(expected: str, got: object, where: str) -> ConversionError:
    return ConversionError(
        "The names of the model's tensors are not known.",
        expected=expected,
        got=got,
        where=where,
        todo="pass a folder with the model's weights, or a checkpoint that has the names you want",
    )
