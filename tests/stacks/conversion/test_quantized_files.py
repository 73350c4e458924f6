"""Quantized weights as floats: to the bits of the libraries that own the formats.

The files are those that libraries write, or those of `tests/conversion/quantization/coded_weights.py`, which a library
reads with its own code: compressed-tensors, AutoGPTQ, AutoAWQ, bitsandbytes, ModelOpt and gguf on the CPU. torchao and
transformers' FP8 are among the tests of the core (`tests/conversion/quantization`).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import bitsandbytes as bnb
import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.conversion.quantization.coded_weights import Coded, rows
from tests.support.dtype_zoo import same_bytes
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


ROWS = rows()
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _named(*functions: str) -> list[str]:
    return [name for name in ROWS if name.split()[0] in functions]


def _made(name: str) -> Coded:
    torch.manual_seed(sum(name.encode()))
    return ROWS[name]()


def _require_equal(tmp_path: Path, made: Coded, library: torch.Tensor) -> None:
    """Compare with the library's weight, in its dtype and cast to the others."""
    folder = made.write(tmp_path / "model")
    for dtype, short in _NAMES.items():
        convert(open_source(str(folder)), str(tmp_path / short), "hf", ConvertOptions(dequantize=short))
        found = load_file(tmp_path / short / "model.safetensors")[made.weight]
        expected = library.to(dtype)
        same = ~expected.isnan()
        assert found.shape == expected.shape and torch.equal(found.isnan(), ~same)
        assert same_bytes(found[same], expected[same]), (short, library.dtype)


def _file_of(package: str, path: str) -> ModuleType:
    """A file of an installed package, without the package's own imports."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / path
    name = f"{package}_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None and found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _scheme(name: str, made: Coded) -> tuple[str, QuantizationScheme]:
    """The format and the arguments with which compressed-tensors reads a weight."""
    kind, *words = name.split()
    scales = made.tensors["q.weight_scale"]
    args: dict[str, Any] = {"symmetric": "has_zeros=True" not in words}
    if kind == "compressed_integers":
        groups = scales.shape[1]
        args |= {"num_bits": int(words[0]), "type": "int", "strategy": "group", "group_size": 96 // groups}
        return "pack-quantized", QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    if kind == "compressed_fp4":
        bits, size = (6 if words[0] == "mxfp6" else 4), (16 if words[0] == "nvfp4" else 32)
        strategy = "tensor_group" if words[0] == "nvfp4" else "group"
        args |= {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": size}
        form = f"{words[0]}-pack-quantized"
        return form, QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    args |= {"num_bits": 8, "type": "int" if kind == "compressed_int8" else "float"}
    codes = made.tensors["q.weight"]
    if scales.numel() == 1:
        args["strategy"] = "tensor"
    elif scales.shape == (len(codes), 1):
        args["strategy"] = "channel"
    elif scales.shape[0] == len(codes):
        args |= {"strategy": "group", "group_size": codes.shape[1] // scales.shape[1]}
    else:
        block = made.settings["config_groups"]["a"]["weights"]["block_structure"]
        args |= {"strategy": "block", "block_structure": block}
    form = "int-quantized" if kind == "compressed_int8" else "float-quantized"
    return form, QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))


# The library reads no weight_g_idx any more: these rows have the formula alone.
_COMPRESSED = [
    name
    for name in _named("compressed_integers", "compressed_int8", "compressed_fp8", "compressed_fp4")
    if "has_index=True" not in name
]


@pytest.mark.parametrize("name", _COMPRESSED)
def test_every_format_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    """Integers of 1 to 8 bits, FP8, NVFP4, MXFP4 and MXFP6, decompressed by the library's compressors."""
    made = _made(name)
    form, scheme = _scheme(name, made)
    state = {key.removeprefix("q."): tensor.clone() for key, tensor in made.tensors.items()}
    found = BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"]
    _require_equal(tmp_path, made, found)


@pytest.mark.parametrize("name", [name for name in _named("gptq") if "gptq_v2" not in name])
def test_gptq_as_autogptq_computes_it(tmp_path: Path, name: str) -> None:
    """Every number of bits, with and without desc_act; the product with a unit matrix is the weight."""
    made = _made(name)
    module = _file_of("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py")
    group = made.settings["group_size"]
    layer = module.QuantLinear(made.settings["bits"], group, 96, 64, bias=False)
    layer.autogptq_cuda_available = False
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        if f"q.{part}" in made.tensors:
            setattr(layer, part, made.tensors[f"q.{part}"])
    unit = torch.eye(96, dtype=made.tensors["q.scales"].dtype)
    _require_equal(tmp_path, made, layer(unit).T.contiguous())


@pytest.mark.parametrize("name", _named("awq"))
def test_awq_as_autoawq_computes_it(tmp_path: Path, name: str) -> None:
    """Its GEMM format."""
    made = _made(name)
    unpack = _file_of("awq", "utils/packing_utils.py").dequantize_gemm
    parts = (made.tensors[f"q.{part}"] for part in ("qweight", "qzeros", "scales"))
    found = unpack(*parts, 4, made.settings["group_size"])
    _require_equal(tmp_path, made, found.T.contiguous())


@pytest.mark.parametrize("name", _named("modelopt"))
@pytest.mark.parametrize("dtype", list(_NAMES))
def test_modelopt_as_its_tensors_compute_it(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """FP8 per tensor, row and block; NVFP4; MXFP8."""
    # Not at the top: the package warns when it is imported, and warnings of a whole file are errors.
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    made = _made(name)
    codes, scales = made.tensors["q.weight"], made.tensors["q.weight_scale"]
    shape = torch.Size((24, 96))
    if name.endswith("nvfp4"):
        second = made.tensors["q.weight_scale_2"]
        tensor = NVFP4QTensor(shape, dtype, codes)
        expected = tensor.dequantize(dtype, scale=scales, double_scale=second, block_sizes={-1: 16})
    elif name.endswith("mxfp8"):
        expected = MXFP8QTensor(shape, dtype, codes).dequantize(dtype, scale=scales)
    elif name.endswith("pb_wo"):
        by_block = {"scale": scales.reshape(3, 2), "block_sizes": {-1: 48, -2: 8}}
        expected = FP8QTensor(shape, dtype, codes).dequantize(dtype, **by_block)
    else:
        expected = FP8QTensor(shape, dtype, codes).dequantize(dtype, scale=scales.reshape(-1, 1))
    folder = made.write(tmp_path / "model")
    convert(open_source(str(folder)), str(tmp_path / "out"), "hf", ConvertOptions(dequantize=_NAMES[dtype]))
    assert same_bytes(load_file(tmp_path / "out" / "model.safetensors")["q.weight"], expected)


@pytest.mark.parametrize(
    "storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("wanted", list(_NAMES))
def test_four_bits_in_every_storage(
    tmp_path: Path, kind: str, storage: torch.dtype, wanted: torch.dtype
) -> None:
    """``bnb_4bit_quant_storage``; a weight of bfloat16 is rounded to it, whatever dtype is requested."""
    torch.manual_seed(0)
    weight = torch.randn(96, 320).bfloat16()
    options = {"quant_type": kind, "compress_statistics": True, "quant_storage": storage}
    packed, state = bnb.functional.quantize_4bit(weight, **options)
    parts = {f"up.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    found = _floats(tmp_path, {"up.weight": packed, **parts}, str(wanted).removeprefix("torch."))
    expected = bnb.functional.dequantize_4bit(packed.view(torch.uint8), state).to(wanted)
    assert same_bytes(found["up.weight"], expected)


def _types() -> list[str]:
    """The types of blocks that the package dequantizes."""
    types = gguf.GGMLQuantizationType
    plain = (types.F32, types.F16, types.BF16)
    found = []
    for each in types:
        _, nbytes = gguf.GGML_QUANT_SIZES[each]
        try:
            gguf.quants.dequantize(np.zeros((1, nbytes), np.uint8), each)
        except NotImplementedError:
            continue
        if each not in plain:
            found.append(each.name)
    return found


@pytest.mark.parametrize("type_name", _types())
def test_blocks_of_gguf(tmp_path: Path, type_name: str) -> None:
    """Every type, from a file of the package's writer; copied into safetensors, the blocks are still readable."""
    qtype = gguf.GGMLQuantizationType[type_name]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    blocks = np.random.default_rng(0).integers(0, 256, (40, 5 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=qtype)
    writer.add_tensor("output_norm.weight", np.arange(7, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, qtype).astype(np.float32))
    assert expected.shape == (40, 5 * block_values)
    source = open_source(str(tmp_path / "model.gguf"))
    convert(source, str(tmp_path / "copy"), "hf", ConvertOptions())
    assert same_bytes(
        load_file(tmp_path / "copy/model.safetensors")["blk.0.attn_q.weight"], torch.from_numpy(blocks)
    )
    for path in ("model.gguf", "copy"):
        out = f"{tmp_path}/floats-{path}"
        convert(open_source(str(tmp_path / path)), out, "hf", ConvertOptions(dequantize="fp32"))
        found = load_file(f"{out}/model.safetensors")
        kept = ~expected.isnan()
        assert same_bytes(found["blk.0.attn_q.weight"][kept], expected[kept])
        assert torch.equal(found["output_norm.weight"], torch.arange(7.0))


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_a_model_of_gguf_has_the_names_of_hugging_face(tmp_path: Path, family: str) -> None:
    """``--rules gguf-..``: names, and the rows of q and k, as the package maps names and llama.cpp permutes rows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config_class, model_class = (
        (LlamaConfig, LlamaForCausalLM) if family == "llama" else (Qwen2Config, Qwen2ForCausalLM)
    )
    model = model_class(config_class(vocab_size=128, num_hidden_layers=2, **sizes))
    model.save_pretrained(tmp_path / "hf")
    architecture = gguf.MODEL_ARCH.LLAMA if family == "llama" else gguf.MODEL_ARCH.QWEN2
    names = gguf.get_tensor_name_map(architecture, 2)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", family)
    for name, value in model.state_dict().items():
        heads = {"q_proj.weight": 4, "k_proj.weight": 2}.get(".".join(name.split(".")[-2:]))
        if heads and family == "llama":  # halves become pairs
            value = value.reshape(heads, 2, len(value) // heads // 2, 64).swapaxes(1, 2).reshape(value.shape)
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if value.ndim == 2:
            blocks = gguf.quants.quantize(value.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(short, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(short, value.numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    rules = {"rules": f"gguf-{family}", "rules_to": "hf", "assets": str(tmp_path / "hf")}
    options = ConvertOptions(dequantize="fp32", **rules)
    convert(open_source(str(tmp_path / "model.gguf")), str(tmp_path / "out"), "hf", options)
    found = model_class.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert (found[name] - value).abs().max() <= value.abs().max() / 127, name
