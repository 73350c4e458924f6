"""Tied weights: several names of one tensor, of which Hugging Face folders store one.

    folder       model.embed_tokens.weight                     and config.json, which names the model's class
    class        lm_head.weight is model.embed_tokens.weight   transformers knows, see `declared_ties`
    elsewhere    both names, and one tensor                    as `save` and torch.save write a tied model

Other formats keep the tie as data: both names lead to the same bytes. A folder is not made by what the class says
alone: the bytes must be equal. If they differ (training untied them, or the config is another model's) both are
kept, a warning says so, and the result's config.json ties nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from vescale_fsdp.checkpoint.formats.huggingface.model_class import ties_of_class
from vescale_fsdp.checkpoint.formats.huggingface.repository import own_config
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView, pieces_of

Compare = Callable[[TensorView, TensorView], bool]
"""Whether two tensors have the same bytes."""

_FOLDERS = ("hf", "safetensors", "shards", "bin")  # kinds of sources that leave out names
_COMPARE_BYTES = 4 * 2**20  # 4 MiB per side
# Where transformers is not installed: names of the output projection and of the input embedding in common families.
_PAIRS = {
    "lm_head.weight": ("model.embed_tokens.weight", "shared.weight", "transformer.wte.weight"),
    "embed_out.weight": ("gpt_neox.embed_in.weight",),
    "encoder.embed_tokens.weight": ("shared.weight",),
    "decoder.embed_tokens.weight": ("shared.weight",),
    "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
}


def declared_ties(
    config: Mapping[str, Any], names: Iterable[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Names that folders leave out -> the name that stands for them; and warnings, if it could not be found out.

    transformers is asked, if it is installed, what the class that config.json names does with these settings: the
    model is made on the meta device, which takes no memory. It is not imported for settings that tie nothing.

    Args:
        config: a config.json.
        names: of the tensors at hand, for where transformers is not installed.
    """
    said, classes = set(_settings(config)), config.get("architectures")
    classes = classes if isinstance(classes, list) else ()
    # Only what is said of the whole model says no: its parts may be untied in themselves.
    says_no = config.get("tie_word_embeddings") is False and True not in said
    if says_no or (True not in said and not classes):
        return {}, ()
    found, warnings = ties_of_class(config, str(classes[0])) if classes else (None, ())
    if found is None:
        known = set(names)
        found = {
            twin: kept
            for twin, candidates in _PAIRS.items()
            if True in said and (kept := next((name for name in candidates if name in known), None))
        }
    return found, warnings


def _settings(config: Any) -> Iterator[object]:
    """What a config.json says of ties, of its parts (text, vision) too."""
    for key, value in config.items():
        if key == "tie_word_embeddings":
            yield value if isinstance(value, bool) else None  # no list can be in a set
        elif isinstance(value, dict):
            yield from _settings(value)


def left_out_by(source: Source, names: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Names of tied tensors that a Hugging Face folder left out -> one of ``names`` that it has; and warnings."""
    if source.kind not in _FOLDERS:
        return {}, ()
    ties, warnings = declared_ties(own_config(source.store), names)
    return _absent(ties, names), warnings


def absent_names(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Names of tied tensors that are not there -> one of ``names`` that has their values."""
    return _absent(declared_ties(config, names)[0], names)


def _absent(ties: Mapping[str, str], there: Collection[str]) -> dict[str, str]:
    groups: dict[str, list[str]] = {}
    for twin, kept in ties.items():
        while kept in ties:  # tied to what is tied itself
            kept = ties[kept]
        groups.setdefault(kept, [kept]).append(twin)
    known = set(there)
    found: dict[str, str] = {}
    for group in groups.values():
        stored = [name for name in group if name in known]
        if stored:
            found |= {name: stored[0] for name in group if name not in known}
    return found


def find_tied_twins(
    views: Mapping[str, TensorView],
    config: Mapping[str, Any] | None,
    is_equal: Compare | None = None,
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Names to leave out -> the name that holds their bytes; warnings; and ties that the bytes deny.

    Args:
        is_equal: compares two tensors; None for `equal_bytes`.
    """
    is_equal = is_equal or equal_bytes
    ties, unsaid = declared_ties(config or {}, views)
    twins: dict[str, str] = {}
    warnings = list(unsaid)
    denied: dict[str, str] = {}
    for twin, kept in ties.items():
        if twin not in views or kept not in views:
            continue
        if is_equal(views[twin], views[kept]):
            twins[twin] = kept
        else:
            denied[twin] = kept
            warnings.append(
                f"config.json ties {twin} to {kept}, but their bytes differ: both are kept, and the result's "
                "config.json says tie_word_embeddings: false"
            )
    return twins, warnings, denied


def equal_bytes(left: TensorView, right: TensorView) -> bool:
    """Whether two tensors have the same shape, type and bytes; reads a few MiB at a time, nothing of one that is two
    names of the same."""
    import numpy as np

    if (left.info.shape, left.info.dtype) != (right.info.shape, right.info.dtype):
        return False
    if left.identity() == right.identity():
        return True
    pieces = zip(pieces_of(left, _COMPARE_BYTES), pieces_of(right, _COMPARE_BYTES), strict=True)
    return all(np.array_equal(a, b) for a, b in pieces)
