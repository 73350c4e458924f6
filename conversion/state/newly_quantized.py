"""Choosing weights to quantise: their codes and scales in place of them, and what config.json must say then.

--quantize fp8-128x128                matrices of linear layers, as DeepSeek-V3 has them (not embeddings, heads,
                                      routers, and none with a side that 128 does not divide)
--quantize mxfp4                      stacked experts, as gpt-oss has them
--quantize '*.mlp.*=fp8-128x128'      those alone; --quantize '*.visual.*=keep' what a default shall leave
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.casting import CastView, require_one_rule_each
from vescale_fsdp.checkpoint.moves.coded_tensors import EncodedView
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import MappedView, TensorView
from vescale_fsdp.conversion.state.quantized_weights import find_quantized
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.views.index_maps import Permute, Reshape

if TYPE_CHECKING:
    from vescale_fsdp.views.float_codes import Fp8Encoding, Mxfp4Encoding

SCHEMES = ("fp8-128x128", "mxfp4")
_KEEP = "keep"
_F32 = dtype_from_torch("float32")
# Modules whose matrices are looked up, or decide, or come last: quantised nowhere.
_NOT_LINEAR = re.compile(
    r"(^|\.)(\w*embed\w*|wte|wpe|\w*head|output|score|classifier|\w*norm\w*|ln_\w+|\w*router|\w*gate)\.weight"
)
_EXPERTS = re.compile(r"(.*\.)?experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class QuantizeRules:
    """Which weight gets which scheme.

    Args:
        default: for what is quantised by default in it; None for patterns alone.
        patterns: name pattern -> scheme; the first that matches wins over the default.
    """

    default: str | None
    patterns: Mapping[str, str]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> QuantizeRules:
        """From texts such as ``fp8-128x128`` or ``*.visual.*=keep``.

        Raises:
            ConversionError: for a scheme that is not known, or two of them in one model.
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
        require_one_rule_each("--quantize", texts)
        schemes = {default, *patterns.values()} - {None, _KEEP}
        if len(schemes) != 1:
            got = " and ".join(sorted(map(str, schemes))) or "none"
            raise _bad("one scheme, which config.json can name", got, "quantise with one scheme at a time")
        return cls(default, patterns)

    @property
    def scheme(self) -> str:
        """The one that they name."""
        return next(s for s in (self.default, *self.patterns.values()) if s not in (None, _KEEP))  # type: ignore[return-value]

    def takes(self, info: TensorInfo) -> bool:
        """Whether a tensor is to be quantised.

        Raises:
            ConversionError: for one that a pattern names and that cannot be.
        """
        pattern = next((p for p in self.patterns if fnmatchcase(info.name, p)), None)
        fits = _fits(info, self.scheme)
        if pattern is None:
            return self.default is not None and fits and _is_usual(info, self.scheme)
        if self.patterns[pattern] != _KEEP and not fits and len(info.shape) > 1:
            got = f"{info.name} of shape {list(info.shape)} and type {info.dtype.name}"
            raise _bad(_WANTED[self.scheme], got, "leave it out of the pattern, or give it =keep before")
        return self.patterns[pattern] != _KEEP and fits


_WANTED = {
    "fp8-128x128": "matrices of floats whose last two sides are multiples of 128",
    "mxfp4": "stacked matrices of floats [experts, k, n] with k a multiple of 32",
}


def _fits(info: TensorInfo, scheme: str) -> bool:
    shape = info.shape
    if info.dtype.kind != "float" or not info.numel:
        return False
    if scheme == "mxfp4":
        return len(shape) == 3 and shape[1] % 32 == 0
    return len(shape) >= 2 and shape[-1] % 128 == 0 and shape[-2] % 128 == 0


def _is_usual(info: TensorInfo, scheme: str) -> bool:
    """Whether files of the scheme's own models have such a weight quantised."""
    if scheme == "mxfp4":
        return _EXPERTS.fullmatch(info.name) is not None
    return len(info.shape) == 2 and info.name.endswith(".weight") and _NOT_LINEAR.search(info.name) is None


def newly_quantized(
    state: CarriedState, texts: Sequence[str], config: Mapping[str, Any]
) -> tuple[CarriedState, dict[str, Any]]:
    """The state with weights of its model quantised, and config.json's ``quantization_config`` for it.

    Raises:
        ConversionError: if the model is quantised already, or nothing in it fits.
    """
    rules = QuantizeRules.parse(texts)
    infos = {name: view.info for name, view in state.views.items() if name in state.is_model}
    if already := find_quantized(infos.values(), config):
        raise _bad(
            "weights that are ordinary floats",
            f"quantised ones: {some(sorted(already))}",
            "make them floats first, if that is meant: --dequantize bf16 beside --quantize",
        )
    for pattern in rules.patterns:
        if not any(fnmatchcase(name, pattern) for name in infos):
            raise _bad(
                "patterns that match a tensor", pattern, "list the names with: vescale-convert inspect SRC"
            )
    taken = {name: None for name, info in infos.items() if rules.takes(info)}
    if not taken:
        raise _bad(_WANTED[rules.scheme], f"none among {some(infos)}", "name them: --quantize PATTERN=SCHEME")
    made: dict[str, tuple[TensorView, str]] = {}
    for name in taken:
        quantize = _mxfp4 if rules.scheme == "mxfp4" else _fp8
        made |= {view.info.name: (view, name) for view in quantize(name, state.views[name])}
    kept = sorted(
        name.removesuffix(".weight")
        for name, info in infos.items()
        if name not in taken and name.endswith(".weight") and len(info.shape) > 1
    )
    return state.with_replaced(made, taken.keys()), _config_of(rules.scheme, kept)


def _fp8(name: str, view: TensorView) -> tuple[TensorView, TensorView]:
    from vescale_fsdp.views.float_codes import Fp8Encoding

    values, encoding = _as_float(view), Fp8Encoding()
    return _pair(values, encoding, name, f"{name}_scale_inv")


def _mxfp4(name: str, view: TensorView) -> tuple[TensorView, TensorView]:
    from vescale_fsdp.views.float_codes import Mxfp4Encoding

    experts, k, n = view.info.shape
    values = MappedView(Permute((0, 2, 1)), (_as_float(view),))
    codes, scales = _pair(values, Mxfp4Encoding(), f"{name}_blocks", f"{name}_scales")
    return MappedView(Reshape((experts, n, k // 32, 16)), (codes,)), scales


def _pair(
    values: TensorView, encoding: Fp8Encoding | Mxfp4Encoding, codes: str, scales: str
) -> tuple[TensorView, TensorView]:
    return EncodedView(values, encoding, codes), EncodedView(values, encoding, scales, wants_scales=True)


def _as_float(view: TensorView) -> TensorView:
    return view if view.info.dtype == _F32 else CastView(view, _F32)


def _config_of(scheme: str, kept: list[str]) -> dict[str, Any]:
    if scheme == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    blocks = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    return {**blocks, "modules_to_not_convert": kept}


def _bad(expected: str, got: object, todo: str) -> ConversionError:
    return ConversionError("The weights cannot be quantised so.", expected=expected, got=got, todo=todo)
