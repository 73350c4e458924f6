"""Quantized weights as published models store them, made by hand, with the floats that the formats' formulas give.

Nothing here uses the product: codes are packed bit by bit, and formulas are torch's operations in the dtype in which
the owner's library computes. `tests/stacks/conversion/test_quantized_files.py` compares the same files with the
libraries themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Coded:
    """A quantized weight.

    Args:
        tensors: what the file contains.
        settings: the quantization config.
        weight: name of the weight.
        expected: its values, in the dtype to which the library rounds; or a function of the requested dtype.
        metadata: the file's ``__metadata__``.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    weight: str
    expected: Tensor | Callable[[torch.dtype], Tensor]
    metadata: dict[str, str] = field(default_factory=dict)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """The weight in the requested dtype."""
        return self.expected.to(dtype) if isinstance(self.expected, Tensor) else self.expected(dtype)

    def write(self, folder: Path) -> Path:
        """Write a model of this weight and a norm."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"quantization_config": self.settings}))
        tensors = {"norm.weight": torch.ones(4), **self.tensors}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
            {"format": "pt", **self.metadata},
        )
        return folder


def packed(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes as a stream of bits in int32 words along a dim, the lowest bits first."""
    rows = np.moveaxis(codes.numpy().astype(np.int64), dim, -1)
    stream = ((rows[..., None] >> np.arange(bits)) & 1).reshape(*rows.shape[:-1], -1).astype(np.uint8)
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    words = np.ascontiguousarray(np.packbits(stream, axis=-1, bitorder="little")).view("<i4")
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, dim)))


def pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits in bytes, the first in the lower half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def compressed_integers(
    bits: int, groups: int, dtype: torch.dtype, *, has_zeros: bool = False, has_index: bool = False
) -> Coded:
    """compressed-tensors: pack-quantized."""
    rows, cols, offset = 24, 96, 1 << (bits - 1)
    codes = torch.randint(-offset, offset, (rows, cols))
    scales = (torch.rand(rows, groups) + 0.1).to(dtype)
    zeros = torch.randint(-offset, offset, (rows, groups)) if has_zeros else torch.zeros(rows, groups).long()
    group_of = torch.arange(cols) // (cols // groups)
    if has_index:
        group_of = group_of[torch.randperm(cols)]
    tensors = {
        "q.weight_packed": packed(codes + offset, bits, 1),
        "q.weight_scale": scales,
        "q.weight_shape": torch.tensor([rows, cols]),
    }
    if has_zeros:
        tensors["q.weight_zero_point"] = packed(zeros + offset, bits, 0)
    if has_index:
        tensors["q.weight_g_idx"] = group_of.int()
    expected = (codes - zeros[:, group_of]).to(dtype) * scales[:, group_of]
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return Coded(tensors, settings, "q.weight", expected)


def compressed_int8(grid: tuple[int, ...], dtype: torch.dtype, *, has_zeros: bool) -> Coded:
    """compressed-tensors: int-quantized and naive-quantized."""
    codes = torch.randint(-128, 128, (24, 96), dtype=torch.int8)
    scales, zeros = (torch.rand(grid) + 0.1).to(dtype), torch.randint(-9, 9, grid, dtype=torch.int8)
    tensors = {"q.weight": codes, "q.weight_scale": scales, "q.input_scale": torch.ones(1)}
    if has_zeros:
        tensors["q.weight_zero_point"] = zeros
    by_item = [t.reshape(grid if len(grid) > 1 else (1, 1)) for t in (scales, zeros)]
    wide, points = (t.repeat_interleave(96 // t.shape[1], 1) for t in by_item)
    values = codes.to(dtype) - points.to(dtype) if has_zeros else codes.to(dtype)
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return Coded(tensors, settings, "q.weight", values * wide)


def compressed_fp8(grid: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> Coded:
    """compressed-tensors: float-quantized; the last blocks are cut off."""
    codes, scales = torch.randn(40, 96).to(FP8), (torch.rand(grid) + 0.1).to(dtype)
    wide = scales.reshape(grid if len(grid) > 1 else (1, 1)).repeat_interleave(block[0], 0)[:40]
    wide = wide.repeat_interleave(block[1], 1)[:, :96]
    group = {"weights": {"block_structure": list(block)}}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"a": group}}
    tensors = {"q.weight": codes, "q.weight_scale": scales}
    return Coded(tensors, settings, "q.weight", codes.to(dtype) * wide)


def compressed_fp4(kind: str) -> Coded:
    """compressed-tensors: nvfp4, mxfp4 and mxfp6, all in bfloat16."""
    settings = {"quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized"}
    if kind == "mxfp6":
        table = torch.tensor(
            [(m / 8 if e == 0 else (1 + m / 8) * 2 ** (e - 1)) for e in range(4) for m in range(8)]
        )
        values, codes = torch.cat([table, -table]), torch.randint(0, 64, (24, 96))
        stream = packed(codes, 6, 1).numpy().view(np.uint8)[:, : 96 * 3 // 4]
        stored = torch.from_numpy(np.ascontiguousarray(stream))
    else:
        values, codes = E2M1, torch.randint(0, 16, (24, 96))
        stored = pairs(codes)
    floats = values[codes].bfloat16()
    if kind == "nvfp4":
        scales, whole = (torch.rand(24, 6) * 300 + 1).to(FP8), torch.tensor([713.5])
        wide = (scales.bfloat16() / whole).repeat_interleave(16, 1)
        tensors = {"q.weight_packed": stored, "q.weight_scale": scales, "q.weight_global_scale": whole}
        tensors["q.input_global_scale"] = torch.ones(1)
        return Coded(tensors, settings, "q.weight", (floats.float() * wide).bfloat16())
    exponents = torch.randint(110, 140, (24, 3), dtype=torch.uint8)
    wide = (2.0 ** (exponents.int() - 127).bfloat16()).repeat_interleave(32, 1)
    return Coded(
        {"q.weight_packed": stored, "q.weight_scale": exponents}, settings, "q.weight", floats * wide
    )


def gptq(bits: int, version: str | None, order: str, dtype: torch.dtype, *, group: int = 32) -> Coded:
    """GPTQ: ``order`` says how rows belong to groups: "desc_act", "in order", or "no g_idx"."""
    rows, cols, top = 96, 64, 2**bits
    groups = rows // group
    codes, zeros = torch.randint(0, top, (rows, cols)), torch.randint(0, top, (groups, cols))
    scales = (torch.rand(groups, cols) + 0.1).to(dtype)
    group_of = torch.arange(rows) // group
    if order == "desc_act":
        group_of = group_of[torch.randperm(rows)]
    tensors = {"q.qweight": packed(codes, bits, 0), "q.qzeros": packed(zeros, bits, 1), "q.scales": scales}
    if order != "no g_idx":
        tensors["q.g_idx"] = group_of.int()
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group}
    if version is not None:
        settings["checkpoint_format"] = version
    shift = 0 if version == "gptq_v2" else 1
    floats = scales[group_of] * (codes - (zeros + shift)[group_of])
    return Coded(tensors, settings, "q.weight", floats.T.contiguous())


def awq(group: int, dtype: torch.dtype) -> Coded:
    """AWQ: the columns 0, 2, 4, 6, 1, 3, 5, 7 of every 8 follow each other in a word."""
    rows, cols = 96, 64
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(codes: Tensor) -> Tensor:
        return packed(codes.reshape(len(codes), -1, 8)[:, :, order].reshape(len(codes), -1), 4, 1)

    codes, zeros = torch.randint(0, 16, (rows, cols)), torch.randint(0, 16, (rows // group, cols))
    scales = (torch.rand(rows // group, cols) + 0.1).to(dtype)
    tensors = {"q.qweight": words(codes), "q.qzeros": words(zeros), "q.scales": scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    wide, points = (t.repeat_interleave(group, 0) for t in (scales, zeros))
    return Coded(tensors, settings, "q.weight", ((codes - points) * wide).T.contiguous())


def modelopt(kind: str) -> Coded:
    """ModelOpt: FP8 per tensor, row and block; NVFP4 with a second scale; MXFP8."""
    settings = {"quant_method": "modelopt", "quant_algo": kind.upper()}
    if kind == "nvfp4":
        codes, scales = torch.randint(0, 16, (24, 96)), (torch.rand(24, 6) * 300 + 1).to(FP8)
        second = torch.tensor(0.00137)
        wide = (scales.float() * second).repeat_interleave(16, 1)
        tensors = {"q.weight": pairs(codes), "q.weight_scale": scales, "q.weight_scale_2": second}
        return Coded(
            tensors | {"q.input_scale": torch.tensor(0.1)}, settings, "q.weight", (E2M1 + 0.0)[codes] * wide
        )
    codes = torch.randn(24, 96).to(FP8)
    if kind == "mxfp8":
        exponents = torch.randint(110, 140, (24, 3), dtype=torch.uint8)
        wide = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        return Coded(
            {"q.weight": codes, "q.weight_scale": exponents}, settings, "q.weight", codes.float() * wide
        )
    grid = {"fp8": (), "fp8_per_channel_per_token": (24,), "fp8_pb_wo": (3, 1, 2, 1)}[kind]
    scales = torch.rand(grid) + 0.1
    if kind == "fp8_pb_wo":
        wide = scales.reshape(3, 2).repeat_interleave(8, 0).repeat_interleave(48, 1)
    else:
        wide = scales.reshape(-1, 1)

    def expected(dtype: torch.dtype) -> Tensor:
        return codes.to(dtype) * wide.to(dtype)

    return Coded({"q.weight": codes, "q.weight_scale": scales}, settings, "q.weight", expected)


def torchao(kind: str, dtype: torch.dtype) -> Coded:
    """torchao's subclasses, flattened into a file, whose metadata has their facts."""
    named = {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}
    facts: dict[str, Any] = {"block_size": [1, 32], "dtype": named}
    codes, scales = torch.randint(-128, 128, (24, 96), dtype=torch.int8), torch.rand(24, 3) + 0.1
    wide = scales.repeat_interleave(32, 1)
    parts: dict[str, Tensor] = {"qdata": codes, "scale": scales}
    if kind == "Float8Tensor":
        parts["qdata"] = torch.randn(24, 96).to(FP8)
        expected = (parts["qdata"].float() * wide).to(dtype)
    elif kind == "IntxUnpackedToInt8Tensor":
        parts["zero_point"] = torch.randint(-8, 8, (24, 3), dtype=torch.int8)
        points = parts["zero_point"].repeat_interleave(32, 1)
        expected = ((codes.to(dtype) - points.to(dtype)) * wide).to(dtype)
    elif kind == "Int8Tensor":
        expected = (codes.to(dtype) * wide).to(dtype)
    elif kind == "Int4Tensor":
        numbers = torch.randint(-8, 8, (24, 96))
        zeros = torch.randn(24, 3).to(dtype)
        parts = {
            "qdata": pairs(numbers & 15).view(torch.int8),
            "scale": scales.to(dtype).T,
            "zero_point": zeros.T,
        }
        low = (scales.to(dtype), zeros)
        expected = (
            numbers * low[0].float().repeat_interleave(32, 1) + low[1].float().repeat_interleave(32, 1)
        ).to(dtype)
    elif kind == "MXTensor":
        exponents = torch.randint(110, 140, (24, 3), dtype=torch.uint8)
        parts = {"qdata": torch.randn(24, 96).to(FP8), "scale": exponents.view(torch.float8_e8m0fnu)}
        facts |= {
            "block_size": 32,
            "orig_dtype": named,
            "is_swizzled_scales": False,
            "elem_dtype": "float8_e4m3fn",
        }
        expected = (parts["qdata"].float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)).to(
            dtype
        )
    else:
        assert kind == "NVFP4Tensor", kind
        numbers, by_group = torch.randint(0, 16, (24, 96)), (torch.rand(24, 6) * 300 + 1).to(FP8)
        parts = {"qdata": pairs(numbers), "scale": by_group, "per_tensor_scale": torch.tensor(0.0071)}
        facts |= {"block_size": 16, "orig_dtype": named, "is_swizzled_scales": False}
        wide = (parts["per_tensor_scale"] * by_group.float()).repeat_interleave(16, 1)
        expected = (E2M1[numbers] * wide).to(dtype)
    entry = {"_type": kind, "_data": facts, "_tensor_data_names": list(parts)}
    metadata = {"q.weight": json.dumps(entry), "tensor_names": json.dumps(["q.weight"])}
    tensors = {f"q._weight_{part}": tensor for part, tensor in parts.items()}
    return Coded(tensors, {"quant_method": "torchao"}, "q.weight", expected, metadata)


def bitsandbytes(kind: str, storage: torch.dtype, dtype: torch.dtype, *, is_nested: bool) -> Coded:
    """bitsandbytes: NF4 and FP4, the upper half of a byte first, stored under another dtype."""
    rows, cols, run = 24, 80, 64
    codes, table = torch.randint(0, 16, (rows * cols,), dtype=torch.uint8), torch.rand(16) * 2 - 1
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": run,
        "dtype": str(dtype)[6:],
        "shape": [rows, cols],
    }
    parts = {"quant_map": table, "absmax": torch.rand(rows * cols // run)}
    absmax = parts["absmax"]
    if is_nested:
        inner = {"nested_absmax": torch.rand(1), "nested_quant_map": torch.rand(256) * 2 - 1}
        parts |= {**inner, "absmax": torch.randint(0, 256, absmax.shape, dtype=torch.uint8)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.7}
        absmax = inner["nested_quant_map"][parts["absmax"].long()] * inner["nested_absmax"] + 0.7
    tensors = {f"q.weight.{part}": tensor for part, tensor in parts.items()}
    tensors["q.weight"] = (codes[0::2] << 4 | codes[1::2]).view(storage).view(-1, 1)
    raw = list(json.dumps(state).encode())
    tensors[f"q.weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(raw, dtype=torch.uint8)
    wide = absmax.repeat_interleave(run)
    expected = (table[codes.long()] * wide).view(rows, cols).to(dtype)
    return Coded(tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "q.weight", expected)


def transformers_fp8(codes_dtype: torch.dtype, block: tuple[int, int]) -> Coded:
    """transformers' fine-grained FP8: one config for layers whose scales have other grids; FP4 as pairs in int8."""
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    grid = (24 // block[0], 96 // block[1])
    scales = torch.rand(grid) + 0.1
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    if codes_dtype == torch.int8:
        numbers = torch.randint(0, 16, (24, 96))
        codes, values = pairs(numbers).view(torch.int8), E2M1[numbers]
    else:
        codes = (torch.randn(24, 96) * 20).to(codes_dtype)
        values = codes.float()
    return Coded({"q.weight": codes, "q.weight_scale_inv": scales}, settings, "q.weight", values * wide)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
_FLOATS = (BF16, F16, F32)


def rows() -> dict[str, Callable[[], Coded]]:
    """Name -> function that makes a weight, of every scheme and every choice that it has."""
    made: dict[str, Callable[[], Coded]] = {}

    def add(function: Callable[..., Coded], *args: Any, **options: Any) -> None:
        words = [str(arg).removeprefix("torch.") for arg in args]
        words += [f"{key}={value}" for key, value in options.items()]
        made[" ".join([function.__name__, *words])] = lambda: function(*args, **options)

    for bits, groups, dtype in product((1, 2, 3, 4, 5, 6, 7, 8), (1, 3), _FLOATS):
        for has_zeros, has_index in ((False, False), (True, False), (True, groups == 3)):
            add(compressed_integers, bits, groups, dtype, has_zeros=has_zeros, has_index=has_index)
    for grid, dtype, has_zeros in product(((1,), (24, 1), (24, 3)), _FLOATS, (False, True)):
        add(compressed_int8, grid, dtype, has_zeros=has_zeros)
    for dtype in _FLOATS:
        for grid, block in (((1,), (40, 96)), ((40, 1), (1, 96)), ((3, 2), (16, 64)), ((40, 3), (1, 32))):
            add(compressed_fp8, grid, block, dtype)
    for kind in ("nvfp4", "mxfp4", "mxfp6"):
        add(compressed_fp4, kind)
    for bits, version, order in product(
        (2, 3, 4, 8), (None, "gptq", "gptq_v2"), ("desc_act", "in order", "no g_idx")
    ):
        add(gptq, bits, version, order, _FLOATS[bits % 3])
    add(gptq, 4, "gptq", "no g_idx", F16, group=96)
    for group, dtype in product((32, 96), _FLOATS):
        add(awq, group, dtype)
    for kind in ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "nvfp4", "mxfp8"):
        add(modelopt, kind)
    kinds = (
        "Int8Tensor",
        "IntxUnpackedToInt8Tensor",
        "Float8Tensor",
        "Int4Tensor",
        "MXTensor",
        "NVFP4Tensor",
    )
    for kind, dtype in product(kinds, _FLOATS):
        add(torchao, kind, dtype)
    storages = (torch.uint8, torch.int8, torch.int32, F16, BF16, F32, torch.float64, FP8)
    for kind, storage, is_nested in product(("nf4", "fp4"), storages, (False, True)):
        add(bitsandbytes, kind, storage, _FLOATS[len(made) % 3], is_nested=is_nested)
    for codes in (FP8, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8):
        for block in ((24, 96), (1, 96), (8, 32), (1, 32), (24, 1)):
            add(transformers_fp8, codes, block)
    return made


assert math.lcm(96, 32) == 96  # the sizes above: no word is cut, except where a row of the table says so
