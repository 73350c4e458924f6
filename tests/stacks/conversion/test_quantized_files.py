"""Weights that bitsandbytes and compressed-tensors quantized, as floats: to the bits of the libraries themselves."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import load_file, save_file

from vescale_fsdp.conversion import ConvertOptions, convert, open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def _floats(tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    convert(open_source(str(tmp_path)), f"{tmp_path}-out", "hf", ConvertOptions(dequantize=dtype))
    return load_file(f"{tmp_path}-out/model.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_four_bits(tmp_path: Path, kind: str, dtype: torch.dtype, is_nested: bool) -> None:
    """With the names and the packed state of bitsandbytes' own state dicts."""
    torch.manual_seed(0)
    weight = torch.randn(96, 320).to(dtype)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested)
    parts = {f"up.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    found = _floats(tmp_path, {"up.weight": packed, **parts}, str(dtype).removeprefix("torch."))
    assert found.keys() == {"up.weight"}
    assert torch.equal(found["up.weight"], bnb.functional.dequantize_4bit(packed, state))


def test_eight_bits(tmp_path: Path) -> None:
    """Rows with their largest magnitudes."""
    torch.manual_seed(1)
    codes, scb, _ = bnb.functional.int8_vectorwise_quant(torch.randn(70, 64).half())
    found = _floats(tmp_path, {"up.weight": codes, "up.SCB": scb}, "float32")
    assert torch.equal(found["up.weight"], bnb.functional.int8_vectorwise_dequant(codes, scb))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors(tmp_path: Path, strategy: str, dtype: torch.dtype) -> None:
    """fp8 with one scale, one per row, one per block."""
    torch.manual_seed(2)
    weight = torch.randn(256, 384).to(dtype)
    shape = {"tensor": (1,), "channel": (256, 1), "block": (2, 3)}[strategy]
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, **blocks)
    scale = (torch.rand(shape) * 0.02 + 0.001).to(dtype)
    zero = torch.zeros(shape)
    codes = quantize(weight, scale, zero, args, dtype=torch.float8_e4m3fn)
    found = _floats(
        tmp_path, {"up.weight": codes, "up.weight_scale": scale}, str(dtype).removeprefix("torch.")
    )
    assert torch.equal(found["up.weight"], dequantize(codes, scale, None, args).to(dtype))
