"""The model of a config.json on the meta device, for plans: transformers' own class, no weights, no download."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion.formats.huggingface.class_child import on_meta, transformers_class
from vescale_fsdp.conversion.formats.huggingface.repository import (
    CONFIG_FILE,
    config_class,
    config_in,
    own_settings,
)
from vescale_fsdp.errors import ConversionError


def meta_model(src: str) -> Any:
    """Build the model that a config.json describes, with fp32 parameters on the meta device.

    Args:
        src: path or URL of a Hugging Face folder, or of a config.json, under any name with this ending. Weights are not
            read.

    Raises:
        ConversionError: if there is no config.json, transformers is not installed, has no such class, or cannot build
            it. Code of a repository is never run.
    """
    folder, slash, name = src.rpartition("/")
    if name.endswith(".json"):
        store = open_store(folder or slash or ".")
        settings = None if store.size(name) is None else store
    else:
        store, name = open_store(src), CONFIG_FILE
        settings = own_settings(store)
    if settings is None:
        raise ConversionError(
            "There is no config.json to build the model from.",
            expected=f"a Hugging Face folder, or a {CONFIG_FILE}",
            got=f"{len(store.list_files())} other files",
            where=src,
            todo=f"pass the folder of the model's {CONFIG_FILE}, or plan layouts alone: vescale-convert plan SRC "
            "--shards 8",
        )
    config = config_in(settings, name)
    class_name = config_class(config)
    if class_name is None:
        raise ConversionError(
            "The config.json does not name the model's class.",
            expected='"architectures", a list with the name of a class of transformers',
            got=f"the keys {', '.join(sorted(config)[:8])}",
            where=src,
            todo='add "architectures", such as ["LlamaForCausalLM"]',
        )
    model_class = transformers_class(config, class_name)
    if isinstance(model_class, str):
        raise ConversionError(
            "The model's class cannot be imported.",
            expected="a class of the installed transformers",
            got=model_class,
            where=src,
            todo="install transformers, or a newer one: pip install -U 'vescale-fsdp[hf]'; build a model of "
            "other code on the meta device, and call vescale_fsdp.plan_training",
        )
    try:
        model = on_meta(model_class, config)
    except Exception as error:
        raise ConversionError(
            f"{class_name} cannot be built with these settings.",
            expected="settings of this class",
            got=f"{type(error).__name__}: {error}",
            where=src,
            todo="correct config.json",
        ) from error
    model.config.use_cache = False  # a cache of keys and values is for generation
    return model.float()


def token_batch(model: Any, tokens: int) -> Mapping[str, Any] | None:
    """Return arguments of a model of transformers for one sequence of tokens; None if it takes no tokens.

    Labels are included if the model has an output head, so that its own loss is computed.
    """
    import torch

    if model.main_input_name != "input_ids":
        return None
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    has_loss = (
        model.get_output_embeddings() is not None and "labels" in inspect.signature(model.forward).parameters
    )
    return {"input_ids": ids, "labels": ids} if has_loss else {"input_ids": ids}
