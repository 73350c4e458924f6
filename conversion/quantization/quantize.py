"""Quantize floats: ``--quantize``.

--quantize fp8-128x128              matrices of linear layers, as in DeepSeek-V3 (not embeddings, heads and routers,
                                    and no matrix with a side that is not a multiple of 128)
--quantize mxfp4                    stacked experts, as in gpt-oss
--quantize '*.mlp.*=fp8-128x128'    only these; --quantize '*.visual.*=keep' excludes weights from the default
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.casting import require_one_rule_each
from vescale_fsdp.conversion.engine.coded_tensors import BlockCache, EncodedView
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import MappedView, TensorView
from vescale_fsdp.conversion.quantization.model import as_float
from vescale_fsdp.conversion.quantization.names import find_quantized
from vescale_fsdp.errors import ConversionError, option, some
from vescale_fsdp.layout.index_maps import Permute, Reshape

SCHEMES = ("fp8-128x128", "mxfp4")
_KEEP = "keep"
# Weights of embeddings, routers, norms and heads, which published models of these schemes keep as floats. Files do not
# say which modules own their weights, so names and the vocabulary's size decide.
_NOT_LINEAR = re.compile(
    r"(^|\.)(\w*embed\w*|wte|wpe|\w*head|output|score|classifier|\w*norm\w*|ln_\w+|\w*router|\w*gate)\.weight"
)
_EXPERTS = re.compile(r"(.*\.)?experts\.(gate_up_proj|down_proj)")  # the weights that gpt-oss stores as mxfp4
_WANTED = {
    "fp8-128x128": "matrices of floats whose last two sides are multiples of 128",
    "mxfp4": "stacked matrices of floats [experts, k, n] with k a multiple of 32",
}


@dataclass(frozen=True)
class QuantizeRules:
    """Rules that select the weights to quantize.

    Args:
        scheme: the scheme of all quantized weights; config.json can name only one.
        has_default: whether to quantize the weights that published models of this scheme quantize.
        patterns: name pattern -> whether matching weights are quantized. The first matching pattern overrides the
            default.
    """

    scheme: str
    has_default: bool
    patterns: Mapping[str, bool]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> QuantizeRules:
        """Parse texts such as ``fp8-128x128`` or ``*.visual.*=keep``.

        Raises:
            ConversionError: for an unknown scheme, or two schemes for one model.
        """
        default: str | None = None
        patterns: dict[str, str] = {}
        for text in texts:
            pattern, _, scheme = text.rpartition("=")
            if scheme not in SCHEMES and not (pattern and scheme == _KEEP):
                raise _bad(f"{' or '.join(SCHEMES)}, or PATTERN={_KEEP}", text, "name one of these schemes")
            if pattern:
                patterns[pattern] = scheme
            else:
                default = scheme
        require_one_rule_each("quantize", texts)
        schemes = {default, *patterns.values()} - {None, _KEEP}
        if len(schemes) != 1:
            got = " and ".join(sorted(map(str, schemes))) or "none"
            raise _bad("one scheme, which config.json can name", got, "quantize with one scheme at a time")
        quantized = {pattern: scheme != _KEEP for pattern, scheme in patterns.items()}
        return cls(str(schemes.pop()), default is not None, quantized)

    def includes(self, info: TensorInfo, vocab_sizes: Collection[int] = ()) -> bool:
        """Return whether a tensor is to be quantized.

        Args:
            info: the tensor.
            vocab_sizes: by default, matrices with this number of rows are embeddings or heads, whatever their names.

        Raises:
            ConversionError: if a pattern selects a matrix that cannot be quantized.
        """
        shape, is_mxfp4 = info.shape, self.scheme == "mxfp4"
        fits = info.dtype.kind == "float" and info.numel > 0
        if is_mxfp4:
            fits = fits and len(shape) == 3 and shape[1] % 32 == 0
        else:
            fits = fits and len(shape) >= 2 and shape[-1] % 128 == 0 and shape[-2] % 128 == 0
        pattern = next((pattern for pattern in self.patterns if fnmatchcase(info.name, pattern)), None)
        if pattern is not None:
            # A pattern for a layer also matches its biases. Such vectors stay floats without an error.
            if self.patterns[pattern] and not fits and len(shape) > 1:
                got = f"{info.name} of shape {list(shape)} and type {info.dtype.name}"
                raise _bad(_WANTED[self.scheme], got, "leave it out of the pattern, or give it =keep before")
            return self.patterns[pattern] and fits
        if is_mxfp4:
            is_usual = _EXPERTS.fullmatch(info.name) is not None
        else:
            is_linear = info.name.endswith(".weight") and _NOT_LINEAR.search(info.name) is None
            is_usual = len(shape) == 2 and is_linear and shape[0] not in vocab_sizes
        return self.has_default and fits and is_usual


def newly_quantized(
    state: CarriedState, texts: Sequence[str], config: Mapping[str, Any], cache_bytes: int
) -> tuple[CarriedState, dict[str, Any]]:
    """Quantize the model's weights; returns the new state, and the ``quantization_config`` for config.json.

    Args:
        texts: the rules, see `QuantizeRules`.
        config: the model's config.json.
        cache_bytes: memory for codes of blocks that several pieces of the result share, see `BlockCache`.

    Raises:
        ConversionError: if the model is already quantized, a pattern matches no tensor, or no weight can be quantized.
    """
    rules = QuantizeRules.parse(texts)
    infos = {name: view.info for name, view in state.views.items() if name in state.is_model}
    if already := find_quantized(infos.values(), config):
        raise _bad(
            "weights that are ordinary floats",
            f"quantized tensors: {some(sorted(already))}",
            f"to requantize them, pass {option('dequantize', 'bf16')} together with {option('quantize')}",
        )
    for pattern in rules.patterns:
        if not any(fnmatchcase(name, pattern) for name in infos):
            raise _bad(
                "patterns that match a tensor", pattern, "list the names with: vescale-convert inspect SRC"
            )
    vocab_sizes = set(_vocab_sizes(config))
    chosen = {name: None for name, info in infos.items() if rules.includes(info, vocab_sizes)}
    if not chosen:
        raise _bad(
            _WANTED[rules.scheme],
            f"none among {some(infos)}",
            f"name them: {option('quantize', f'PATTERN={rules.scheme}')}",
        )
    replacements: dict[str, tuple[TensorView, str]] = {}
    cache = BlockCache(cache_bytes)
    for name in chosen:
        for view in _codes_and_scales(name, state.views[name], rules.scheme, cache):
            replacements[view.info.name] = (view, name)
    # For `modules_to_not_convert`: loaders would otherwise expect codes for these weights.
    kept = sorted(
        name.removesuffix(".weight")
        for name, info in infos.items()
        if name not in chosen and name.endswith(".weight") and len(info.shape) > 1
    )
    settings: dict[str, Any] = {"quant_method": "mxfp4"}
    if rules.scheme != "mxfp4":
        # The fields of transformers' FineGrainedFP8Config.
        settings = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    return state.with_replaced(replacements, chosen.keys()), {**settings, "modules_to_not_convert": kept}


def _vocab_sizes(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the sizes of the vocabularies that a config.json and its parts name."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _vocab_sizes(value)
        elif key == "vocab_size" and isinstance(value, int):
            yield value


def _codes_and_scales(
    name: str, view: TensorView, scheme: str, cache: BlockCache
) -> tuple[TensorView, TensorView]:
    """Return the codes and the scales of a weight, under the names that loaders expect."""
    from vescale_fsdp.conversion.quantization.float_codes import Fp8Encoding, Mxfp4Encoding

    values = as_float(view)
    if scheme != "mxfp4":
        fp8 = Fp8Encoding()
        scales = EncodedView(values, fp8, f"{name}_scale_inv", wants_scales=True)
        return EncodedView(values, fp8, name, cache=cache), scales
    experts, k, n = view.info.shape
    # gpt-oss stores the blocks of the transposed weight: a block of 32 values lies along k.
    values, mxfp4 = MappedView(Permute((0, 2, 1)), (values,)), Mxfp4Encoding()
    codes = EncodedView(values, mxfp4, f"{name}_blocks")
    scales = EncodedView(values, mxfp4, f"{name}_scales", wants_scales=True)
    return MappedView(Reshape((experts, n, k // 32, 16)), (codes,)), scales  # 32 values are 16 bytes


def _bad(expected: str, got: object, todo: str) -> ConversionError:
    """Return the error for weights that cannot be quantized as requested."""
    return ConversionError("The weights cannot be quantized this way.", expected=expected, got=got, todo=todo)
