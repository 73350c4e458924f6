"""Quantised weights: which tensors are codes and scales, what belongs together, and their values as ordinary floats.

    q.weight (fp8)  + q.weight_scale_inv | q.weight_scale     blocks, rows, or one scale: DeepSeek, compressed-tensors
    w (fp8)         + w_scale_inv | w_scale                   stacked experts
    w_blocks        + w_scales                                mxfp4: gpt-oss, whose weight is the transpose
    q.weight (int8) + q.SCB (+ q.weight_format)               bitsandbytes, 8 bits
    q.weight (u8)   + q.weight.absmax, .quant_map, ...        bitsandbytes, nf4 and fp4, nested scales too; the bytes
                                                              may be stored as bfloat16 (FSDP-QLoRA) or another dtype
    norm.scale (float32)                                      no scale: a parameter, without codes next to it

Scales are ordinary floats by type, but a weight is code times scale: rounding a scale changes every weight of its
block. They are recognized by the tensors next to them and, where a config.json says that the model is quantised, by the
names that loaders look for. Codes of other kinds are refused by name, since a half dequantised weight would be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.casting import CastView
from vescale_fsdp.checkpoint.moves.coded_tensors import DecodedView, RawBytesView, ScaledView
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import MappedView, RenamedView, TensorView, read_range
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, some
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.views.index_maps import Permute, Reshape

if TYPE_CHECKING:
    import numpy as np

BITSANDBYTES_STATE = ".quant_state.bitsandbytes__"  # follows the name of a packed weight, whatever its dtype

# Integers under these names are codes; others (position ids, counters) are what they seem.
_CODES = re.compile(
    r"(q?weights?|[^.]*_(packed|blocks|codes)|[^.]*weight_(packed|quantized)|qweight|qzeros|W_q|codes|"
    r"_?(weight_)?(q?data|int_data|qdata)|[^.]*:_?(q|int_)?data)",
    re.IGNORECASE,
)
_SCALE_WORDS = re.compile(
    r"scale|absmax|amax|quant|zero|(^|[._:])scb$|codebook|table|shift|offset|g_idx", re.IGNORECASE
)
# Of attention: no code lies beside them, but inside the layers of their module.
_KV_SCALE = re.compile(r"(q|k|v|kv|prob|attn)_(scale|zero_point)(_float)?")
_LOADERS_NAMES = re.compile(
    r"(q|k|v|kv|prob|attn|weight|input|output|activation|[^.]*_proj)_(global_)?(scale|zero_point)s?(_inv|_2)?"
)


def find_quantized(infos: Iterable[TensorInfo], config: Mapping[str, Any] | None) -> frozenset[str]:
    """Names of codes and scales among a model's tensors; ``config`` is its config.json."""
    found = list(infos)
    codes = {info.name for info in found if _is_code(info)}
    codes |= {info.name.partition(BITSANDBYTES_STATE)[0] for info in found if BITSANDBYTES_STATE in info.name}
    codes &= {info.name for info in found}
    homes = {home for name in codes for home in _homes(name)}
    around = {home[:at] for home in homes for at, letter in enumerate(home) if letter == "."}
    says_so = bool(config and (config.get("quantization_config") or config.get("compression_config")))
    scales = {
        info.name
        for info in found
        if info.name not in codes and _is_scale(*_split(info.name), homes, around, says_so=says_so)
    }
    return frozenset(codes | scales)


def _split(name: str) -> tuple[str, str]:
    module, _, leaf = name.rpartition(".")
    return module, leaf


def _is_code(info: TensorInfo) -> bool:
    if info.dtype.kind == "quantized":
        return True
    return info.dtype.kind == "int" and _CODES.fullmatch(_split(info.name)[1]) is not None


def _homes(name: str) -> tuple[str, ...]:
    """Modules whose scales are a code's: its own, its name (``weight.absmax``), and for the parts of a tensor
    subclass (``weight._data``) the module around."""
    module, leaf = _split(name)
    return (module, name, _split(module)[0]) if leaf.startswith("_") else (module, name)


def _is_scale(module: str, leaf: str, homes: set[str], around: set[str], *, says_so: bool) -> bool:
    if _SCALE_WORDS.search(leaf) and any(home in homes for home in _ends(module, leaf)):
        return True
    if _KV_SCALE.fullmatch(leaf) and module in around:
        return True
    return says_so and _LOADERS_NAMES.fullmatch(leaf) is not None


def _ends(module: str, leaf: str) -> tuple[str, ...]:
    """The module, and the tensor inside it that ``quant_state.NAME`` and its like are part of."""
    outer, last = _split(module)
    return (module, outer) if last in ("quant_state", "meta") else (module,)


_F32 = dtype_from_torch("float32")
_BLOCK = (128, 128)  # of transformers' FineGrainedFP8Config, where config.json does not name one
_MX_BLOCK = 32
_FLOAT8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_MOST_STATE_BYTES = 2**16  # of the JSON in a bitsandbytes tensor


def dequantized(state: CarriedState, config: Mapping[str, Any], dtype: DType) -> CarriedState:
    """The state with all quantised weights of its model as floats of a type; scales are left out.

    Raises:
        ConversionError: if there are none, or some are of a kind that is not known.
        CorruptCheckpointError: if codes and scales do not fit each other.
    """
    model = {name: view for name, view in state.views.items() if name in state.is_model}
    found = find_quantized([view.info for view in model.values()], config)
    if not found:
        raise ConversionError(
            "There is nothing to dequantise.",
            expected="weights of fp8, mxfp4, int8 or nf4, with their scales",
            got=f"{len(model)} tensors, none of them codes",
            todo="leave out --dequantize; --dtype casts ordinary floats",
        )
    made = _Dequantization(model, _block_of(config), dtype)
    for name in found:
        made.take(name)
    left = sorted(name for name in found if name not in made.gone)
    codes = [name for name in left if model[name].info.dtype.kind != "float"]
    if codes:
        raise ConversionError(
            "These weights are quantised in a way that cannot be dequantised here.",
            expected="fp8 or int8 with scales, mxfp4 blocks, or bitsandbytes' nf4 and fp4",
            got=some(codes),
            todo="dequantise with the library that made them, or leave them out with --exclude",
        )
    warning = (f"scales without a weight of their own are left out: {some(left)}",) if left else ()
    return state.with_replaced(made.made, made.gone.union(left), warning)


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size of a block that config.json names, or implies as transformers does; None if it says nothing."""
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    sizes = [quantization.get("weight_block_size")]
    groups = quantization.get("config_groups") or {}
    sizes += [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    if quantization.get("quant_method") == "fp8" and "weight_block_size" not in quantization:
        sizes.append(_BLOCK)
    size = next(filter(None, sizes), None)
    return None if size is None else (int(size[0]), int(size[1]))


@dataclass
class _Dequantization:
    """What has been made so far: weight -> (view, a name that it replaces), and the names that are used up."""

    views: Mapping[str, TensorView]
    block: tuple[int, int] | None
    dtype: DType
    made: dict[str, tuple[TensorView, str]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """Of what bitsandbytes has in several tensors, their names by the weight's."""
        found: dict[str, list[str]] = {}
        for name in self.views:
            weight, dot, _ = name.partition(".weight.")
            if dot:
                found.setdefault(f"{weight}.weight", []).append(name)
        return found

    def take(self, name: str) -> None:
        """Make the weight whose codes these are, if they are codes."""
        view, module = self.views[name], name.rpartition(".")[0]
        kind = _FLOAT8.get(view.info.dtype.name) or view.info.dtype.name
        scale = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in self.views), None)
        if kind in ("e4m3", "e5m2", "int8") and scale is not None:
            if f"{name}_zero_point" not in self.views:
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
        self.made[weight] = (RenamedView(view, weight), used[0])
        self.gone.update(used)

    def _in_blocks(self, codes: TensorView, kind: str, scales: TensorView) -> TensorView:
        """Values of codes whose last two dims have a scale per block, row, or tensor."""
        shape, of_scales = codes.info.shape, scales.info.shape
        if scales.info.numel == 1:
            of_scales = (1,) * len(shape)
        elif len(of_scales) == 1:  # one for each row, or for each expert
            of_scales = (*of_scales, *(1,) * (len(shape) - 1))
        block = _blocks_of(shape, of_scales, self.block)
        if block is None and self.block is None and _some_block_fits(shape, of_scales):
            raise ConversionError(
                "The block size of a quantised weight is not known: several fit its scales.",
                expected="a config.json whose quantization_config names weight_block_size",
                got=f"scales of shape {of_scales} for a weight of shape {shape}, and no block size",
                where=f"tensor {codes.info.name}",
                todo="pass the folder with this model's config.json: --assets DIR",
            )
        if block is None:
            raise _misfit(codes, scales, f"a scale for each block of {self.block}, each row, or all")
        values = DecodedView(codes, _table(kind), kind)
        return ScaledView(values, MappedView(Reshape(of_scales), (_as_float(scales),)), block, self.dtype)

    def _add_int8(self, name: str, view: TensorView, scale: str, layout: str) -> None:
        rows, stored = view.info.shape[0], self.views[scale]
        if stored.info.shape != (rows,):
            raise _misfit(view, stored, f"{rows} scales")
        scales = MappedView(Reshape((rows, *(1,) * (len(view.info.shape) - 1))), (_as_float(stored),))
        values = DecodedView(view, _table("int8"), "int8")
        # The reciprocal of 127 in the digits that bitsandbytes multiplies by.
        scaled = ScaledView(
            values, scales, (1, *view.info.shape[1:]), self.dtype, factor=7.874015718698502e-3
        )
        used = (name, scale, layout) if layout in self.views else (name, scale)
        self._add(name, scaled, used)

    def _add_mxfp4(self, name: str, view: TensorView, scale: str) -> None:
        shape, stored = view.info.shape, self.views[scale]
        if len(shape) != 4 or shape[-1] * 2 != _MX_BLOCK or stored.info.shape != shape[:-1]:
            raise _misfit(view, stored, f"blocks [experts, n, k / 32, 16] and a scale for each, not {shape}")
        in_rows = MappedView(Reshape((*shape[:2], shape[2] * shape[3])), (view,))
        values = DecodedView(in_rows, _table("e2m1"), "e2m1")
        scaled = ScaledView(
            values, DecodedView(stored, _table("e8m0"), "e8m0"), (1, 1, _MX_BLOCK), self.dtype
        )
        weight = name.removesuffix("_blocks")
        self._add(weight, MappedView(Permute((0, 2, 1)), (scaled,)), (name, scale))

    def _add_bitsandbytes(self, name: str, view: TensorView) -> None:
        parts = self._parts.get(name, [])
        state = next((n for n in parts if n.startswith(f"{name}{BITSANDBYTES_STATE}")), None)
        if state is None:
            raise _misfit(
                view, self.views[f"{name}.absmax"], f"a tensor {name}{BITSANDBYTES_STATE}nf4 beside them"
            )
        try:
            facts = json.loads(_small(self.views[state], _MOST_STATE_BYTES).tobytes())
            shape, run = tuple(map(int, facts["shape"])), int(facts["blocksize"])
            scales = self._bitsandbytes_scales(name, facts)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(
                "What bitsandbytes says of a weight cannot be read.",
                expected="JSON with its shape, block size and type",
                got=f"{type(error).__name__}: {error}",
                where=f"tensor {state}",
                todo="copy the checkpoint again from where it was made",
            ) from error
        flat = RawBytesView(MappedView(Reshape((view.info.numel,)), (view,)))
        numel = flat.info.numel
        from vescale_fsdp.views.float_codes import nibble_table

        table = nibble_table(_small(self.views[f"{name}.quant_map"], 64).view("float32"))
        values = DecodedView(flat, table, f"nibbles {table.tobytes().hex()[:256]}")
        if scales.info.shape != (-(-2 * numel // run),):
            raise _misfit(view, scales, f"a scale for each {run} of {2 * numel} values")
        scaled = ScaledView(values, scales, (run,), self.dtype)
        self._add(name, MappedView(Reshape(shape), (scaled,)), (name, *parts))

    def _bitsandbytes_scales(self, name: str, facts: Mapping[str, Any]) -> TensorView:
        scales = self.views[f"{name}.absmax"]
        if scales.info.dtype.kind == "float":
            return _as_float(scales)
        table = _small(self.views[f"{name}.nested_quant_map"], 1024).view("float32")
        values = DecodedView(scales, table[:, None], f"table {table.tobytes().hex()}")
        nested, run = _as_float(self.views[f"{name}.nested_absmax"]), int(facts["nested_blocksize"])
        return ScaledView(values, nested, (run,), offset=float(facts["nested_offset"]))


def _table(kind: str) -> np.ndarray:
    from vescale_fsdp.views.float_codes import code_table

    return code_table(kind)


def _as_float(scales: TensorView) -> TensorView:
    """Scales as float32: their own values, or the powers of two that bytes stand for."""
    dtype = scales.info.dtype
    if dtype.name in ("float8_e8m0fnu", "uint8"):
        return DecodedView(scales, _table("e8m0"), "e8m0")
    return scales if dtype == _F32 else CastView(scales, _F32)


def _blocks_of(
    shape: tuple[int, ...], of_scales: tuple[int, ...], named: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """The size of a block in each dim: the named one where it fits, else the only one that does; None if none does,
    or several do."""
    if len(shape) != len(of_scales):
        return None
    sizes = (*(1,) * (len(shape) - 2), *named)[-len(shape) :] if named and shape else (None,) * len(shape)
    found = []
    for size, count, usual in zip(shape, of_scales, sizes, strict=True):
        least, most = _fitting_sizes(size, count)
        if usual is not None and count == -(-size // usual):
            found.append(usual)
        elif least == most:
            found.append(least)
        else:
            return None
    return tuple(found)


def _some_block_fits(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> bool:
    return len(shape) == len(of_scales) and all(
        least <= most
        for least, most in (_fitting_sizes(*pair) for pair in zip(shape, of_scales, strict=True))
    )


def _fitting_sizes(size: int, count: int) -> tuple[int, int]:
    """The smallest and the largest block that cut ``size`` items into ``count``; the first is larger if none does."""
    if count < 1:
        return 1, 0
    if count == 1:
        return max(size, 1), max(size, 1)  # a larger one gives the same values
    return -(-size // count), -(-size // (count - 1)) - 1


def _small(view: TensorView, most: int) -> np.ndarray:
    """All bytes of a small tensor.

    Raises:
        ValueError: if it is not.
    """
    import numpy as np

    info = view.info
    if info.nbytes > most:
        raise ValueError(f"{info.name} has {info.nbytes} bytes")
    return read_range(view, 0, info.numel, np.empty(info.nbytes, dtype=np.uint8))


def _misfit(codes: TensorView, scales: TensorView, expected: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "Codes and scales of a weight do not fit each other.",
        expected=expected,
        got=f"scales of shape {scales.info.shape}",
        where=f"tensor {codes.info.name} of shape {codes.info.shape}",
        todo="pass the config.json of this model with --assets, or copy the checkpoint again",
    )
