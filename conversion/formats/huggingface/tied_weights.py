"""Tied weights: several names of one tensor. Hugging Face folders store only one of the names.

    folder           model.embed_tokens.weight                     config.json names the model's class
    class            lm_head.weight is model.embed_tokens.weight   known to transformers, see `declared_ties`
    other formats    both names, with the same bytes               as `save` and torch.save write a tied model

When a Hugging Face folder is written, a tie of the class counts only if the bytes of both tensors are equal. If the
bytes differ (training untied the tensors, or config.json belongs to another model), both tensors are written with a
warning, and the new config.json declares no ties.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.tensor_view import TensorView, pieces_of
from vescale_fsdp.conversion.formats.huggingface.model_class import memory_names, ties_of_class
from vescale_fsdp.conversion.formats.huggingface.repository import KINDS, config_class, own_config

Compare = Callable[[TensorView, TensorView], bool]
"""Whether two tensors have the same bytes."""

_COMPARE_BYTES = 4 * 2**20  # 4 MiB per side
# Tied name -> candidates for the stored name, in common model families; used if transformers gives no answer.
_PAIRS = {
    "lm_head.weight": ("model.embed_tokens.weight", "shared.weight", "transformer.wte.weight"),
    "embed_out.weight": ("gpt_neox.embed_in.weight",),
    "encoder.embed_tokens.weight": ("shared.weight",),
    "decoder.embed_tokens.weight": ("shared.weight",),
    "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
}


def declared_ties(
    config: Mapping[str, Any], names: Collection[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Find the ties that a config.json declares.

    The class in config.json is looked up in the shipped table, or instantiated by transformers on the meta device. If
    config.json says that no embeddings are tied, the class is not used.

    Args:
        config: a config.json.
        names: names of the model's tensors: they may be those in memory or those in files. Without transformers, ties
            are recognized by them.

    Returns:
        Alias -> stored name; and warnings if the class gave no answer.
    """
    declared, classes = set(_tie_settings(config)), config.get("architectures")
    classes = classes if isinstance(classes, list) else ()
    # False at the root unties the model, unless the config of one of its parts (text, vision) ties weights.
    is_untied = config.get("tie_word_embeddings") is False and True not in declared
    if is_untied or (True not in declared and not classes):
        return {}, ()
    ties, warnings = ties_of_class(config, str(classes[0]), names) if classes else (None, ())
    if ties is None:  # without the class, only ties that tie_word_embeddings declares
        known = set(names)
        ties = {
            alias: stored
            for alias, candidates in _PAIRS.items()
            if True in declared and (stored := next((name for name in candidates if name in known), None))
        }
    return ties, warnings


def _tie_settings(config: Any) -> Iterator[bool | None]:
    """Yield each ``tie_word_embeddings`` of a config.json and its parts (text, vision); None for an invalid value."""
    for key, value in config.items():
        if key == "tie_word_embeddings":
            yield value if isinstance(value, bool) else None
        elif isinstance(value, dict):
            yield from _tie_settings(value)


def tied_aliases_of(
    source: Source, names: Collection[str], *, in_memory: bool = False
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Find the aliases of tied tensors that a Hugging Face folder does not store.

    Args:
        names: names of the folder's tensors.
        in_memory: whether ``names`` are those that the class has in memory. By default they may be those in files, too,
            and so may the aliases.

    Returns:
        Alias -> the one of ``names`` that the folder stores, empty for other formats; and warnings.
    """
    if source.kind not in KINDS:  # others store a tied tensor under all its names
        return {}, ()
    config = own_config(source.store)
    ties, warnings = declared_ties(config, names)
    aliases = _aliases_of(ties, names)
    own = memory_names(config, config_class(config)) if in_memory and aliases else None
    return aliases if own is None else {name: kept for name, kept in aliases.items() if name in own}, warnings


def tied_aliases(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the names of tied tensors that are missing in ``names`` -> the one of ``names`` to which each is tied."""
    return _aliases_of(declared_ties(config, names)[0], names)


def _aliases_of(ties: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Map each name that is missing in ``names`` to a name in ``names`` of the same tensor.

    A folder may store a tensor under any of its names, so all names are compared.
    """
    groups: dict[str, list[str]] = {}  # the end of a chain of ties -> all names of this tensor
    for alias, target in ties.items():
        chain = {alias: None, target: None}
        # A target may itself be tied to another name. Two names that are tied to each other have no end of a chain.
        while target in ties and ties[target] not in chain:
            target = ties[target]
            chain[target] = None
        if target in ties:
            target = min(chain)
        groups.setdefault(target, [target]).append(alias)
    known = set(names)
    aliases: dict[str, str] = {}
    for group in groups.values():
        stored = [name for name in group if name in known]
        if stored:
            aliases |= {name: stored[0] for name in group if name not in known}
    return aliases


def find_ties(
    views: Mapping[str, TensorView], config: Mapping[str, Any] | None, is_equal: Compare | None = None
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Find the tied tensors that a Hugging Face folder must not store twice.

    Args:
        views: all tensors of the model, by name.
        config: the config.json of the folder; None if it has none.
        is_equal: compares two tensors; None for `equal_bytes`.

    Returns:
        Name to omit -> stored name; warnings; and the declared ties whose tensors have different bytes.
    """
    is_equal = is_equal or equal_bytes
    declared, class_warnings = declared_ties(config or {}, views)
    ties: dict[str, str] = {}
    warnings = list(class_warnings)
    differing: dict[str, str] = {}
    for alias, target in declared.items():
        if alias not in views or target not in views:
            continue
        if is_equal(views[alias], views[target]):
            ties[alias] = target
        else:
            differing[alias] = target
            warnings.append(
                f"config.json ties {alias} to {target}, but their bytes differ: both are written, and the result's "
                "config.json says tie_word_embeddings: false"
            )
    return ties, warnings, differing


def equal_bytes(left: TensorView, right: TensorView) -> bool:
    """Whether two tensors have the same shape, dtype and bytes; reads a few MiB at a time.

    If both are names of one stored tensor, nothing is read.
    """
    import numpy as np

    if (left.info.shape, left.info.dtype) != (right.info.shape, right.info.dtype):
        return False
    if left.identity() == right.identity():
        return True
    pieces = zip(pieces_of(left, _COMPARE_BYTES), pieces_of(right, _COMPARE_BYTES), strict=True)
    return all(np.array_equal(a, b) for a, b in pieces)
