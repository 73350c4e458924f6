"""Find the codes and scales of quantized weights, dequantize them to floats, and quantize floats.

    q.weight (fp8)  + q.weight_scale_inv | q.weight_scale     blocks, rows, or one scale: DeepSeek, compressed-tensors
    w (fp8)         + w_scale_inv | w_scale                   stacked experts
    w_blocks        + w_scales                                mxfp4: gpt-oss; the weight is the transpose
    q.weight (int8) + q.SCB (+ q.weight_format)               bitsandbytes, 8 bits
    q.weight (u8)   + q.weight.absmax, .quant_map, ...        bitsandbytes, nf4 and fp4, nested scales too; the bytes
                                                              may be stored as bfloat16 (FSDP-QLoRA) or another dtype
    norm.scale (float32)                                      a parameter, not a scale: there are no codes next to it

By dtype, scales are ordinary floats. But a weight is code times scale, so a cast that rounds a scale would change every
weight of its block. Scales are recognized by the codes next to them. If config.json has a quantization config, scales
are also recognized by the names that loaders look for. Unknown kinds of codes are an error, because a partly
dequantized model would be wrong.

    --quantize fp8-128x128              matrices of linear layers, as in DeepSeek-V3 (not embeddings, heads and routers,
                                        and no matrix with a side that is not a multiple of 128)
    --quantize mxfp4                    stacked experts, as in gpt-oss
    --quantize '*.mlp.*=fp8-128x128'    only these; --quantize '*.visual.*=keep' excludes weights from the default
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.casting import CastView, require_one_rule_each
from vescale_fsdp.checkpoint.moves.coded_tensors import DecodedView, EncodedView, RawBytesView, ScaledView
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import MappedView, RenamedView, TensorView, read_range
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, some
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.views.index_maps import Permute, Reshape

if TYPE_CHECKING:
    import numpy as np

# Part of the name WEIGHT.quant_state.bitsandbytes__nf4, which marks WEIGHT as packed even if its dtype is a float.
BITSANDBYTES_STATE = ".quant_state.bitsandbytes__"

# Integer tensors with these names are codes; all other integer tensors (position ids, counters) are ordinary data.
_CODES = re.compile(
    r"(q?weights?|[^.]*_(packed|blocks|codes)|[^.]*weight_(packed|quantized)|qweight|qzeros|W_q|codes|"
    r"_?(weight_)?(q?data|int_data|qdata)|[^.]*:_?(q|int_)?data)",
    re.IGNORECASE,
)
# Words in the names of scales, zero points and tables; only next to codes, since "shift" may also name a parameter.
_SCALE_WORDS = re.compile(
    r"scale|absmax|amax|quant|zero|(^|[._:])scb$|codebook|table|shift|offset|g_idx", re.IGNORECASE
)
# Scales of attention and the KV cache. The codes are not next to them, but in layers of the same module.
_KV_SCALE = re.compile(r"(q|k|v|kv|prob|attn)_(scale|zero_point)(_float)?")
# Names that loaders look for if config.json declares a quantization, even if no codes are next to them.
_LOADERS_NAMES = re.compile(
    r"(q|k|v|kv|prob|attn|weight|input|output|activation|[^.]*_proj)_(global_)?(scale|zero_point)s?(_inv|_2)?"
)


def find_quantized(infos: Iterable[TensorInfo], config: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of codes and scales among a model's tensors; ``config`` is the model's config.json."""
    dtypes = {info.name: info.dtype for info in infos}
    codes = {
        name
        for name, dtype in dtypes.items()
        if dtype.kind == "quantized" or (dtype.kind == "int" and _CODES.fullmatch(name.rpartition(".")[2]))
    }
    packed = {name.partition(BITSANDBYTES_STATE)[0] for name in dtypes if BITSANDBYTES_STATE in name}
    codes |= packed & dtypes.keys()
    # Names below which scales may be: the modules of codes, and the weights themselves (weight.absmax). The codes of a
    # tensor subclass are an attribute (weight._data), so the weight's module counts too.
    containers = set(codes)
    for name in codes:
        module, _, leaf = name.rpartition(".")
        containers |= {module, module.rpartition(".")[0]} if leaf.startswith("_") else {module}
    # Names of all modules that enclose a container, in which scales of attention may be.
    parents = {name[:at] for name in containers for at, letter in enumerate(name) if letter == "."}
    # compression_config is the older key of compressed-tensors.
    is_declared = bool(config and (config.get("quantization_config") or config.get("compression_config")))

    def is_scale(name: str) -> bool:
        """Return whether a tensor that is not codes is a scale, by its name and the codes near it."""
        module, _, leaf = name.rpartition(".")
        outer, _, last = module.rpartition(".")
        if _SCALE_WORDS.search(leaf) and (
            # Some libraries nest scales one level deeper: ``q.quant_state.absmax``, ``q.meta.scale``.
            module in containers or (last in ("quant_state", "meta") and outer in containers)
        ):
            return True
        if _KV_SCALE.fullmatch(leaf) and module in parents:
            return True
        return is_declared and _LOADERS_NAMES.fullmatch(leaf) is not None

    return frozenset(codes | {name for name in dtypes if name not in codes and is_scale(name)})


_F32 = dtype_from_torch("float32")
_BLOCK = (128, 128)  # the default of transformers' FineGrainedFP8Config, if config.json names no size
_MX_BLOCK = 32  # values per scale in all MX formats, by OCP's specification
_FLOAT8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_MOST_STATE_BYTES = 2**16  # maximum size of the JSON in a bitsandbytes tensor


def dequantized(state: CarriedState, config: Mapping[str, Any], dtype: DType) -> CarriedState:
    """Return the state with all quantized weights of its model as floats of ``dtype``, and without scales.

    Raises:
        ConversionError: if no weight is quantized, or some weights are quantized in an unknown way.
        CorruptCheckpointError: if the shapes of codes and scales do not match.
    """
    model = {name: view for name, view in state.views.items() if name in state.is_model}
    quantized = find_quantized([view.info for view in model.values()], config)
    if not quantized:
        raise ConversionError(
            "There is nothing to dequantize.",
            expected="weights of fp8, mxfp4, int8 or nf4, with their scales",
            got=f"{len(model)} tensors without codes",
            todo="leave out --dequantize; --dtype casts ordinary floats",
        )
    floats = _Dequantization(model, _block_of(config), dtype)
    for name in quantized:
        floats.add(name)
    left = sorted(quantized - floats.used)
    codes = [name for name in left if model[name].info.dtype.kind != "float"]
    if codes:
        raise ConversionError(
            "These weights are quantized in a way that cannot be dequantized here.",
            expected="fp8 or int8 with scales, mxfp4 blocks, or bitsandbytes' nf4 and fp4",
            got=some(codes),
            todo="dequantize with the library that made them, or leave them out with --exclude",
        )
    # Such as scales of activations, and scales next to weights that are stored as floats.
    warning = (f"scales without a weight of their own are left out: {some(left)}",) if left else ()
    return state.with_replaced(floats.weights, floats.used.union(left), warning)


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block size that config.json names, or transformers' default for fp8; None if neither applies."""
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    sizes = [quantization.get("weight_block_size")]
    # Compressed-tensors has a block size per group of layers.
    groups = quantization.get("config_groups") or {}
    sizes += [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    if quantization.get("quant_method") == "fp8" and "weight_block_size" not in quantization:
        sizes.append(_BLOCK)
    size = next(filter(None, sizes), None)
    return None if size is None else (int(size[0]), int(size[1]))


@dataclass
class _Dequantization:
    """The weights of a model that were dequantized so far.

    Args:
        views: the model's tensors.
        block: number of rows and columns that share a scale; None if config.json does not name it.
        dtype: dtype of the dequantized weights.

    Attributes:
        weights: name -> (the weight, the name of its codes).
        used: names of the codes and scales of these weights.
    """

    views: Mapping[str, TensorView]
    block: tuple[int, int] | None
    dtype: DType
    weights: dict[str, tuple[TensorView, str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """Weight's name -> names of the tensors that bitsandbytes stores for it (``q.weight.absmax``)."""
        parts: dict[str, list[str]] = {}
        for name in self.views:
            weight, dot, _ = name.partition(".weight.")
            if dot:
                parts.setdefault(f"{weight}.weight", []).append(name)
        return parts

    def add(self, name: str) -> None:
        """Dequantize the tensor of this name if it is the codes of a weight; otherwise do nothing."""
        view, module = self.views[name], name.rpartition(".")[0]
        kind = _FLOAT8.get(view.info.dtype.name) or view.info.dtype.name
        # DeepSeek's name, and that of compressed-tensors.
        scale = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in self.views), None)
        if kind in ("e4m3", "e5m2", "int8") and scale is not None:
            if f"{name}_zero_point" not in self.views:  # asymmetric codes are refused as unknown
                self._add(name, self._in_blocks(view, kind, self.views[scale]), (name, scale))
        elif kind == "int8" and f"{module}.SCB" in self.views:
            self._add_int8(name, view, f"{module}.SCB", f"{module}.weight_format")
        elif (
            kind == "uint8"
            and name.endswith("_blocks")
            and f"{name.removesuffix('blocks')}scales" in self.views
        ):
            self._add_mxfp4(name, view, f"{name.removesuffix('blocks')}scales")
        elif any(part.startswith(f"{name}{BITSANDBYTES_STATE}") for part in self._parts.get(name, ())) or (
            kind == "uint8" and f"{name}.absmax" in self._parts.get(name, ())
        ):
            self._add_bitsandbytes(name, view)

    def _add(self, weight: str, view: TensorView, used: tuple[str, ...]) -> None:
        """Add a dequantized weight; ``used`` names its codes first, then its scales."""
        self.weights[weight] = (RenamedView(view, weight), used[0])
        self.used.update(used)

    def _in_blocks(self, codes: TensorView, kind: str, scales: TensorView) -> TensorView:
        """Dequantize codes with one scale per block of the last two dims, per row, or per tensor."""
        shape, of_scales = codes.info.shape, scales.info.shape
        if scales.info.numel == 1:
            of_scales = (1,) * len(shape)
        elif len(of_scales) == 1:  # one scale per row, or per expert
            of_scales = (*of_scales, *(1,) * (len(shape) - 1))
        block = _blocks_of(shape, of_scales, self.block)
        if block is None and self.block is None and _some_block_fits(shape, of_scales):
            raise ConversionError(
                "The block size of a quantized weight is not known: several fit its scales.",
                expected="a config.json whose quantization_config names weight_block_size",
                got=f"scales of shape {of_scales} for a weight of shape {shape}, and no block size",
                where=f"tensor {codes.info.name}",
                todo="pass the folder with this model's config.json: --assets DIR",
            )
        if block is None:
            raise _mismatch(codes, scales, f"a scale for each block of {self.block}, each row, or all")
        values = DecodedView(codes, _table(kind), kind)
        return ScaledView(values, MappedView(Reshape(of_scales), (_as_float(scales),)), block, self.dtype)

    def _add_int8(self, name: str, view: TensorView, scale: str, layout: str) -> None:
        """Add bitsandbytes' int8: one scale per row, and a tensor that names the layout of the codes."""
        rows, stored = view.info.shape[0], self.views[scale]
        if stored.info.shape != (rows,):
            raise _mismatch(view, stored, f"{rows} scales")
        scales = MappedView(Reshape((rows, *(1,) * (len(view.info.shape) - 1))), (_as_float(stored),))
        values = DecodedView(view, _table("int8"), "int8")
        # 1 / 127, with as many digits as in bitsandbytes, for the same rounding.
        scaled = ScaledView(
            values, scales, (1, *view.info.shape[1:]), self.dtype, factor=7.874015718698502e-3
        )
        used = (name, scale, layout) if layout in self.views else (name, scale)
        self._add(name, scaled, used)

    def _add_mxfp4(self, name: str, view: TensorView, scale: str) -> None:
        """Add gpt-oss's mxfp4: blocks [experts, n, k / 32, 16] of two values per byte, and a scale per block."""
        shape, stored = view.info.shape, self.views[scale]
        if len(shape) != 4 or shape[-1] * 2 != _MX_BLOCK or stored.info.shape != shape[:-1]:
            raise _mismatch(
                view, stored, f"blocks [experts, n, k / 32, 16] and a scale for each, not {shape}"
            )
        in_rows = MappedView(Reshape((*shape[:2], shape[2] * shape[3])), (view,))
        values = DecodedView(in_rows, _table("e2m1"), "e2m1")
        scaled = ScaledView(
            values, DecodedView(stored, _table("e8m0"), "e8m0"), (1, 1, _MX_BLOCK), self.dtype
        )
        weight = name.removesuffix("_blocks")
        # gpt-oss stores the blocks of the transposed weight.
        self._add(weight, MappedView(Permute((0, 2, 1)), (scaled,)), (name, scale))

    def _add_bitsandbytes(self, name: str, view: TensorView) -> None:
        """Add bitsandbytes' nf4 or fp4: flat bytes of two values each, in runs that share a scale."""
        parts = self._parts.get(name, [])
        state = next((n for n in parts if n.startswith(f"{name}{BITSANDBYTES_STATE}")), None)
        if state is None:
            raise _mismatch(
                view, self.views[f"{name}.absmax"], f"a tensor {name}{BITSANDBYTES_STATE}nf4 next to them"
            )
        try:
            facts = json.loads(_small(self.views[state], _MOST_STATE_BYTES).tobytes())
            shape, run = tuple(map(int, facts["shape"])), int(facts["blocksize"])
            scales = self._bitsandbytes_scales(name, facts)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(
                "The quantization state that bitsandbytes stored for a weight cannot be read.",
                expected="JSON with its shape, block size and type",
                got=f"{type(error).__name__}: {error}",
                where=f"tensor {state}",
                todo="copy the checkpoint again from where it was made",
            ) from error
        # As bytes: FSDP-QLoRA stores the codes with a float dtype.
        flat = RawBytesView(MappedView(Reshape((view.info.numel,)), (view,)))
        numel = flat.info.numel
        from vescale_fsdp.views.float_codes import nibble_table

        table = nibble_table(_small(self.views[f"{name}.quant_map"], 64).view("float32"))  # 16 numbers
        # These 128 bytes are the first 16 rows of pairs, which contain all 16 numbers.
        values = DecodedView(flat, table, f"nibbles {table.tobytes().hex()[:256]}")
        if scales.info.shape != (-(-2 * numel // run),):  # 2: values per byte
            raise _mismatch(view, scales, f"a scale for each {run} of {2 * numel} values")
        scaled = ScaledView(values, scales, (run,), self.dtype)
        self._add(name, MappedView(Reshape(shape), (scaled,)), (name, *parts))

    def _bitsandbytes_scales(self, name: str, facts: Mapping[str, Any]) -> TensorView:
        """Return a weight's scales as float32; nested scales are codes with scales of their own."""
        scales = self.views[f"{name}.absmax"]
        if scales.info.dtype.kind == "float":
            return _as_float(scales)
        table = _small(self.views[f"{name}.nested_quant_map"], 1024).view("float32")  # 256 numbers
        values = DecodedView(scales, table[:, None], f"table {table.tobytes().hex()}")
        nested, run = _as_float(self.views[f"{name}.nested_absmax"]), int(facts["nested_blocksize"])
        return ScaledView(values, nested, (run,), offset=float(facts["nested_offset"]))


def _table(kind: str) -> np.ndarray:
    from vescale_fsdp.views.float_codes import code_table  # imports numpy, which most conversions do not need

    return code_table(kind)


def _as_float(scales: TensorView) -> TensorView:
    """Return scales as float32. Scales of one byte are exponents of powers of two (e8m0)."""
    dtype = scales.info.dtype
    if dtype.name in ("float8_e8m0fnu", "uint8"):
        return DecodedView(scales, _table("e8m0"), "e8m0")
    return scales if dtype == _F32 else CastView(scales, _F32)


def _blocks_of(
    shape: tuple[int, ...], of_scales: tuple[int, ...], named: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """Return the size of a block in each dim, or None if no size or several sizes match the number of scales.

    Args:
        shape: shape of the codes.
        of_scales: shape of the scales, with as many dims.
        named: block size of the last two dims in config.json, which is preferred if it matches; None if not named.
    """
    if len(shape) != len(of_scales):
        return None
    # The named size applies to the last two dims; before them, each expert has its own scales.
    sizes = (*(1,) * (len(shape) - 2), *named)[-len(shape) :] if named and shape else (None,) * len(shape)
    block = []
    for size, count, usual in zip(shape, of_scales, sizes, strict=True):
        least, most = _fitting_sizes(size, count)
        if usual is not None and count == -(-size // usual):  # rounded up: the last block may be smaller
            block.append(usual)
        elif least == most:
            block.append(least)
        else:
            return None
    return tuple(block)


def _some_block_fits(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> bool:
    """Return whether any block size gives this number of scales in each dim."""
    return len(shape) == len(of_scales) and all(
        least <= most
        for least, most in (_fitting_sizes(*pair) for pair in zip(shape, of_scales, strict=True))
    )


def _fitting_sizes(size: int, count: int) -> tuple[int, int]:
    """Return the least and the greatest block size that split ``size`` items into ``count`` blocks; least > greatest
    if no size does.
    """
    if count < 1:
        return 1, 0  # no size
    if count == 1:
        return max(size, 1), max(size, 1)  # a larger block gives the same values
    return -(-size // count), -(-size // (count - 1)) - 1


def _small(view: TensorView, most: int) -> np.ndarray:
    """Read all bytes of a small tensor.

    Raises:
        ValueError: if the tensor has more than ``most`` bytes, which a damaged or hostile file may claim.
    """
    import numpy as np

    info = view.info
    if info.nbytes > most:
        raise ValueError(f"{info.name} has {info.nbytes} bytes")
    return read_range(view, 0, info.numel, np.empty(info.nbytes, dtype=np.uint8))


def _mismatch(codes: TensorView, scales: TensorView, expected: str) -> CorruptCheckpointError:
    """Return the error for codes and scales whose shapes do not match."""
    return CorruptCheckpointError(
        "Codes and scales of a weight do not fit each other.",
        expected=expected,
        got=f"scales of shape {scales.info.shape}",
        where=f"tensor {codes.info.name} of shape {codes.info.shape}",
        todo="pass the config.json of this model with --assets, or copy the checkpoint again",
    )


SCHEMES = ("fp8-128x128", "mxfp4")
_KEEP = "keep"
# Weights of embeddings, routers, norms and heads, which published models of these schemes keep as floats.
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
        require_one_rule_each("--quantize", texts)
        schemes = {default, *patterns.values()} - {None, _KEEP}
        if len(schemes) != 1:
            got = " and ".join(sorted(map(str, schemes))) or "none"
            raise _bad("one scheme, which config.json can name", got, "quantize with one scheme at a time")
        quantized = {pattern: scheme != _KEEP for pattern, scheme in patterns.items()}
        return cls(str(schemes.pop()), default is not None, quantized)

    def includes(self, info: TensorInfo) -> bool:
        """Return whether a tensor is to be quantized.

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
            is_usual = len(shape) == 2 and is_linear
        return self.has_default and fits and is_usual


def newly_quantized(
    state: CarriedState, texts: Sequence[str], config: Mapping[str, Any]
) -> tuple[CarriedState, dict[str, Any]]:
    """Quantize the model's weights; returns the new state, and the ``quantization_config`` for config.json.

    Raises:
        ConversionError: if the model is already quantized, a pattern matches no tensor, or no weight can be quantized.
    """
    rules = QuantizeRules.parse(texts)
    infos = {name: view.info for name, view in state.views.items() if name in state.is_model}
    if already := find_quantized(infos.values(), config):
        raise _bad(
            "weights that are ordinary floats",
            f"quantized tensors: {some(sorted(already))}",
            "to requantize them, pass --dequantize bf16 together with --quantize",
        )
    for pattern in rules.patterns:
        if not any(fnmatchcase(name, pattern) for name in infos):
            raise _bad(
                "patterns that match a tensor", pattern, "list the names with: vescale-convert inspect SRC"
            )
    chosen = {name: None for name, info in infos.items() if rules.includes(info)}
    if not chosen:
        raise _bad(_WANTED[rules.scheme], f"none among {some(infos)}", "name them: --quantize PATTERN=SCHEME")
    replacements: dict[str, tuple[TensorView, str]] = {}
    for name in chosen:
        for view in _codes_and_scales(name, state.views[name], rules.scheme):
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


def _codes_and_scales(name: str, view: TensorView, scheme: str) -> tuple[TensorView, TensorView]:
    """Return the codes and the scales of a weight, under the names that loaders expect."""
    from vescale_fsdp.views.float_codes import Fp8Encoding, Mxfp4Encoding

    values = _as_float(view)
    if scheme != "mxfp4":
        fp8 = Fp8Encoding()
        scales = EncodedView(values, fp8, f"{name}_scale_inv", wants_scales=True)
        return EncodedView(values, fp8, name), scales
    experts, k, n = view.info.shape
    # gpt-oss stores the blocks of the transposed weight: a block of 32 values lies along k.
    values, mxfp4 = MappedView(Permute((0, 2, 1)), (values,)), Mxfp4Encoding()
    codes = EncodedView(values, mxfp4, f"{name}_blocks")
    scales = EncodedView(values, mxfp4, f"{name}_scales", wants_scales=True)
    return MappedView(Reshape((experts, n, k // 32, 16)), (codes,)), scales  # 32 values are 16 bytes


def _bad(expected: str, got: object, todo: str) -> ConversionError:
    """Return the error for weights that cannot be quantized as requested."""
    return ConversionError("The weights cannot be quantized this way.", expected=expected, got=got, todo=todo)
