"""Open a checkpoint of any format for `checkpoint.load`, dequantized and renamed by key rules if requested."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from vescale_fsdp.conversion.engine.carried_state import InMemory, whole_state
from vescale_fsdp.conversion.engine.casting import float_type
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.formats.huggingface.class_names import class_of, in_memory
from vescale_fsdp.conversion.formats.huggingface.repository import (
    KINDS,
    NAMES_OF_FILES,
    Assets,
    config_class,
    own_config,
)
from vescale_fsdp.conversion.formats.huggingface.tied_weights import tied_aliases_of
from vescale_fsdp.conversion.formats.peft import names_in_training, names_over_base
from vescale_fsdp.conversion.live.viewed_checkpoint import OpenedSource
from vescale_fsdp.conversion.quantization.dequantize import dequantized
from vescale_fsdp.conversion.quantization.names import find_quantized
from vescale_fsdp.conversion.rules.apply_to_state import state_with_rules
from vescale_fsdp.conversion.rules.rule_file import load_rules

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.foreign import SourceOptions


def open_for_load(url: str, options: SourceOptions) -> OpenedSource:
    """Open a checkpoint and plan how its tensors are read; reads only metadata.

    Raises:
        ConversionError: if the files have no known format, or the options do not apply to them.
    """
    source = open_source(url)
    # The folder's own config.json, unless the caller names a folder with another one.
    config = own_config(source.store) if options.config is None else Assets(options.config).config or {}
    state = whole_state(source, options.model_prefix)
    if options.dequantize is not None:
        state = dequantized(state, config, float_type(options.dequantize))
    if options.rules is not None:  # after dequantization, since rules do not convert scales
        to_hf = options.rules_to == "hf"
        state = state_with_rules(state, load_rules(options.rules), config, to_hf=to_hf)
    infos = [view.info for name, view in state.views.items() if name in state.is_model]
    # After dequantization there are no codes, even if config.json has a quantization config.
    quantized = find_quantized(infos, config) if options.dequantize is None else frozenset[str]()
    # The class converts weights, not the codes and scales of a quantized release.
    has_names_of_files = source.kind in NAMES_OF_FILES and options.rules is None and not quantized

    def named(modules: Collection[object]) -> InMemory | None:
        if not has_names_of_files:
            return None
        live = [each for each in map(class_of, modules) if each is not None]
        if modules:
            class_name, settings = live[0] if len(live) == 1 else (None, {})
        else:
            class_name, settings = config_class(config), config
        return None if class_name is None else in_memory(state, settings, class_name, url)

    def aliases(names: Collection[str], are_in_memory: bool) -> tuple[dict[str, str], tuple[str, ...]]:
        return tied_aliases_of(source, names, in_memory=are_in_memory)

    def adapter_names(live: Collection[str], stored: Collection[str]) -> dict[str, str]:
        is_folder = source.kind == "adapter"
        return names_in_training(live, stored, options.adapter_name, url, is_folder=is_folder)

    return OpenedSource(
        source, state, quantized, aliases, adapter_names, names_over_base, named, source.kind in KINDS
    )
