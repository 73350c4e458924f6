"""Quantized weights to floats and back, against the reference operations of transformers and formulas of torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion import ConvertOptions, ConvertReport, convert, open_source
from vescale_fsdp.conversion.engine.coded_tensors import RawBytesView
from vescale_fsdp.conversion.engine.tensor_view import SourceView
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.quantize import Fp8Blocks

FP8 = torch.float8_e4m3fn
QUANTIZER: Any = SimpleNamespace(quantization_config=FineGrainedFP8Config())
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _folder(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    config = {"dtype": "bfloat16"} | ({"quantization_config": quantization} if quantization else {})
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def _convert(
    source: Path, kind: str = "hf", **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the settings of the result; in small pieces, so that blocks are cut."""
    out = source.parent / f"out-{kind}-{len(list(source.parent.iterdir()))}"
    report: ConvertReport = convert(
        open_source(str(source)),
        str(out),
        kind,
        ConvertOptions(memory_budget_bytes=4 << 20, threads=1, **options),
    )
    assert report.outcome.published
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


def _weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """With zeros, a tiny block, exact ties and large values."""
    torch.manual_seed(seed)
    found = torch.randn(shape) * torch.logspace(-6, 4, shape[-1])
    found[..., :128, :128] = 0
    found[..., 128:160, :] = (found[..., 128:160, :] * 16).round() / 16
    return found.to(torch.bfloat16)


def test_fp8_as_transformers_makes_it(tmp_path: Path) -> None:
    """Codes, scales and config.json of --quantize; what is no linear layer, or does not fit, stays and is listed."""
    big = _weights(1280, 4224)  # more than a buffer of codes, and than a tile
    tensors = {
        "model.embed_tokens.weight": _weights(256, 256),
        "model.layers.0.mlp.up_proj.weight": big,
        "model.layers.0.mlp.gate.weight": _weights(128, 256),
        "model.layers.0.self_attn.kv.weight": _weights(576, 256),
        "model.norm.weight": torch.randn(256).bfloat16(),
    }
    found, config = _convert(_folder(tmp_path / "hf", tensors), quantize=["fp8-128x128"])
    name = "model.layers.0.mlp.up_proj.weight"
    expected = Fp8Quantize(QUANTIZER)._quantize_one(name, big)
    assert set(expected) == {name, f"{name}_scale_inv"} and found[name].dtype == FP8
    assert all(same_bytes(found[each], tensor) for each, tensor in expected.items())
    sent = Fp8Blocks().quantize(big)  # what a training job sends to an engine
    assert same_bytes(found[name].view(torch.uint8), sent.codes)
    assert same_bytes(found[f"{name}_scale_inv"], sent.scales)
    assert found.keys() == tensors.keys() | expected.keys()
    assert all(same_bytes(found[n], t) for n, t in tensors.items() if n != name)
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert kept == ["model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.self_attn.kv"]
    assert FineGrainedFP8Config(**config["quantization_config"]).weight_block_size == [128, 128]


@pytest.mark.parametrize("part", [False, True])
def test_a_vocabulary_of_any_name_stays(part: bool, tmp_path: Path) -> None:
    """T5's ``shared``, and heads: told by the rows that config.json gives, also in the settings of a part."""
    tensors = {
        "shared.weight": _weights(384, 128),
        "k.weight": _weights(128, 128),
        "out.weight": _weights(384, 128),
    }
    source = _folder(tmp_path / "hf", tensors)
    sizes = {"vocab_size": 384}
    (source / "config.json").write_text(json.dumps({"text_config": sizes} if part else sizes))
    found, config = _convert(source, quantize=["fp8-128x128"])

    assert {name for name, tensor in found.items() if tensor.dtype == FP8} == {"k.weight"}
    assert config["quantization_config"]["modules_to_not_convert"] == ["out", "shared"]
    chosen, _ = _convert(source, quantize=["shared.weight=fp8-128x128"])
    assert {name for name, tensor in chosen.items() if tensor.dtype == FP8} == {"shared.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_fp8_to_floats_as_transformers_does(tmp_path: Path, dtype: torch.dtype) -> None:
    """Blocks, rows, one scale, stacked experts, exponents for scales; and every code there is."""
    torch.manual_seed(1)
    every = torch.arange(256, dtype=torch.uint8).repeat(256, 3)[:, :640].clone()
    cases = {
        "a.weight": (every.view(FP8), torch.rand(2, 5) * 3),
        "row.weight": (torch.randn(130, 64).to(FP8), torch.rand(130, 1)),
        "one.weight": (torch.randn(70, 30).to(torch.float8_e5m2), torch.tensor(0.3)),
        "experts.up": (torch.randn(3, 256, 128).to(FP8), torch.rand(3, 2, 1)),
        "power.weight": (torch.randn(128, 256).to(FP8), torch.randint(110, 130, (1, 2), dtype=torch.uint8)),
    }
    tensors: dict[str, torch.Tensor] = {"norm.weight": torch.randn(8)}
    for name, (codes, scales) in cases.items():
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    source = _folder(tmp_path / "hf", tensors, FP8_CONFIG)
    short = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "float16"}[dtype]
    found, config = _convert(source, dequantize=short)
    reference = Fp8Dequantize(QUANTIZER)
    assert found.keys() == cases.keys() | {"norm.weight"} and "quantization_config" not in config
    assert config["dtype"] == str(dtype).removeprefix("torch.") and same_bytes(
        found["norm.weight"], tensors["norm.weight"]
    )
    for name, (codes, scales) in cases.items():
        wide = scales if scales.ndim else scales.reshape(1, 1)
        expected = reference._dequantize_one(codes, wide, dtype)
        broken = expected.isnan()
        assert found[name].dtype == dtype and torch.equal(found[name].isnan(), broken)
        assert not broken.all() and same_bytes(found[name][~broken], expected[~broken]), name


def test_blocks_that_are_cut_short(tmp_path: Path) -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128, which transformers refuses; the last scale is of 64 rows."""
    codes, scales = torch.randn(576, 200).to(FP8), torch.rand(5, 2)
    source = _folder(tmp_path / "hf", {"a.weight": codes, "a.weight_scale_inv": scales}, FP8_CONFIG)
    found, _ = _convert(source, dequantize="fp32")
    wide = scales.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :200]
    assert same_bytes(found["a.weight"], codes.float() * wide)


def test_mxfp4_as_transformers_reads_it(tmp_path: Path) -> None:
    """gpt-oss: every byte of codes, scales from the least to the largest; and made of it the same codes again."""
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (2, 96, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 96, 3), dtype=torch.uint8)
    scales[0, :, 0] = torch.arange(30, 126, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.randn(2, 96)}
    source = _folder(tmp_path / "hf", tensors, {"quant_method": "mxfp4"})
    found, config = _convert(source, dequantize="bf16")
    expected = convert_moe_packed_tensors(blocks, scales)
    assert found.keys() == {name, f"{name}_bias"} and "quantization_config" not in config
    assert expected.shape == (2, 96, 96) and same_bytes(found[name], expected)

    folder = _folder(tmp_path / "floats", found)
    again, config = _convert(folder, quantize=["mxfp4"])
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert again.keys() == tensors.keys() and again[f"{name}_blocks"].shape == blocks.shape
    assert same_bytes(convert_moe_packed_tensors(again[f"{name}_blocks"], again[f"{name}_scales"]), expected)


def test_mxfp4_as_the_standard_says(tmp_path: Path) -> None:
    """torchao's reference, with scales rounded up: to nearest, ties to even, zeros, large and tiny values."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    name = "mlp.experts.gate_up_proj"
    weight = _weights(2, 256, 64).float()
    weight[1, :32, :9] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -2.5])
    found, _ = _convert(_folder(tmp_path / "hf", {name: weight}), quantize=["mxfp4"])
    natural = weight.transpose(1, 2).contiguous()
    scales, codes = to_mx(natural, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)[:2]
    expected = scales.view(torch.uint8).reshape(2, 64, 8)
    is_zero = natural.reshape(2, 64, 8, 32).abs().amax(-1) == 0
    assert torch.equal(found[f"{name}_scales"][~is_zero], expected[~is_zero]) and is_zero.any()
    assert torch.equal(found[f"{name}_blocks"].reshape(-1), codes.view(torch.uint8).reshape(-1))


def test_int8_as_bitsandbytes_reads_it(tmp_path: Path) -> None:
    """One scale per row, in the order of its formula (the library itself: tests/stacks)."""
    codes = torch.randint(-128, 128, (70, 33), dtype=torch.int8)
    scb = torch.rand(70) * 4
    tensors = {"up.weight": codes, "up.SCB": scb, "up.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found, _ = _convert(
        _folder(tmp_path / "hf", tensors, {"quant_method": "bitsandbytes"}), dequantize="fp16"
    )
    assert found.keys() == {"up.weight"}
    assert same_bytes(found["up.weight"], (codes * scb.view(-1, 1) * 7.874015718698502e-3).half())


@pytest.mark.parametrize("is_nested", [False, True])
def test_nf4_as_bitsandbytes_reads_it(tmp_path: Path, is_nested: bool) -> None:
    """Two codes in a byte, the upper first; a table, and scales that may be codes themselves."""
    torch.manual_seed(4)
    codes, table = torch.randint(0, 16, (96 * 40,), dtype=torch.uint8), torch.linspace(-1, 1, 16)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [96, 40]}
    absmax: torch.Tensor = torch.rand(60)
    parts = {"quant_map": table, "absmax": absmax}
    if is_nested:
        inner = {"nested_absmax": torch.rand(1), "nested_quant_map": torch.linspace(-1, 1, 256)}
        stored = torch.randint(0, 256, (60,), dtype=torch.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.7}
        absmax = inner["nested_quant_map"][stored.long()] * inner["nested_absmax"] + 0.7
        parts |= {**inner, "absmax": stored}
    packed = codes[0::2] << 4 | codes[1::2]
    tensors = {f"up.weight.{key}": value for key, value in parts.items()} | {"up.weight": packed.view(-1, 1)}
    raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["up.weight.quant_state.bitsandbytes__nf4"] = raw
    found, _ = _convert(_folder(tmp_path / "hf", tensors), dequantize="bf16")
    expected = (table[codes.long()].view(-1, 64) * absmax.view(-1, 1)).view(96, 40)
    assert found.keys() == {"up.weight"} and same_bytes(found["up.weight"], expected.bfloat16())


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_nf4_stored_under_another_dtype(tmp_path: Path, storage: torch.dtype) -> None:
    """bnb_4bit_quant_storage=bfloat16 (FSDP-QLoRA): the same values; and a cast leaves every part as it is."""
    torch.manual_seed(7)
    packed, table = torch.randint(0, 256, (96 * 20,), dtype=torch.uint8), torch.linspace(-1, 1, 16)
    absmax = torch.rand(60)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [96, 40]}
    tensors = {
        "up.weight": packed.view(storage).view(-1, 1),
        "up.weight.absmax": absmax,
        "up.weight.quant_map": table,
        "up.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
        "norm.weight": torch.rand(8),
    }
    source = _folder(tmp_path / "hf", tensors, {"quant_method": "bitsandbytes"})
    found, _ = _convert(source, dequantize="fp32")
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
    expected = (table[codes].view(-1, 64) * absmax.view(-1, 1)).view(96, 40).bfloat16().float()
    assert found.keys() == {"up.weight", "norm.weight"} and same_bytes(found["up.weight"], expected)

    cast, _ = _convert(source, dtype=["float16"])
    assert cast["norm.weight"].dtype == torch.float16
    assert all(same_bytes(cast[name], tensors[name]) for name in tensors if name != "norm.weight")

    del tensors["up.weight.absmax"]
    with pytest.raises(CorruptCheckpointError):
        _convert(_folder(tmp_path / "torn", tensors, {"quant_method": "bitsandbytes"}), dequantize="fp32")


def test_bytes_lie_in_the_items_around_them(tmp_path: Path) -> None:
    """Bytes 3 to 8 of a tensor with two bytes per item are read from its items 1 to 4."""
    save_file({"a": torch.arange(6, dtype=torch.int16)}, tmp_path / "model.safetensors")
    source = open_source(str(tmp_path))
    view = SourceView(source, "a", "a")
    assert list(RawBytesView(view).parts(Box((3,), (6,)))) == [(view, Box((1,), (4,)))]


@pytest.mark.parametrize("config", [None, {"quant_method": "fp8", "weight_block_size": [100, 100]}])
def test_a_block_size_is_never_guessed(tmp_path: Path, config: dict[str, Any] | None) -> None:
    """300 x 200 items with 3 x 2 scales: blocks of 100 to 149 rows fit, so config.json must say which."""
    codes, scales = torch.randn(300, 200).to(FP8), torch.rand(3, 2)
    source = _folder(tmp_path / "hf", {"a.weight": codes, "a.weight_scale_inv": scales}, config)
    if config is None:
        with pytest.raises(ConversionError) as refused:
            _convert(source, dequantize="fp32")
        assert not isinstance(refused.value, CorruptCheckpointError)
        return
    found, _ = _convert(source, dequantize="fp32")
    wide = scales.repeat_interleave(100, 0).repeat_interleave(100, 1)
    assert same_bytes(found["a.weight"], codes.float() * wide)


def test_blocks_that_only_one_size_fits(tmp_path: Path) -> None:
    """Rows, columns and whole tensors need no config.json; a size that fits no scale is damage."""
    codes = torch.randn(96, 64).to(FP8)
    for number, shape in enumerate([(96, 1), (1, 64), (1, 1), (96, 64)]):
        scales = torch.rand(shape)
        source = _folder(tmp_path / f"hf{number}", {"a.weight": codes, "a.weight_scale_inv": scales})
        assert same_bytes(_convert(source, dequantize="fp32")[0]["a.weight"], codes.float() * scales)
    torn = _folder(tmp_path / "torn", {"a.weight": codes, "a.weight_scale_inv": torch.rand(97, 1)})
    with pytest.raises(CorruptCheckpointError):
        _convert(torn, dequantize="fp32")


def test_there_and_back_through_another_format(tmp_path: Path) -> None:
    """fp8 -> DCP in bf16 -> fp8: the codes that there were, since values on the grid of codes stay on it."""
    torch.manual_seed(5)
    made = Fp8Quantize(QUANTIZER)._quantize_one("up.weight", torch.randn(256, 256))
    made["up.weight_scale_inv"] = torch.tensor([[0.5, 1.0], [2.0, 0.25]])
    made["up.weight"].view(torch.uint8)[::128, ::128] = 0x7E  # 448 in each block, so that scales come back
    source = _folder(tmp_path / "hf", made, FP8_CONFIG)
    options = ConvertOptions(dequantize="bf16")
    convert(open_source(str(source)), str(tmp_path / "dcp"), "dcp", options)
    again = ConvertOptions(quantize=["fp8-128x128"], assets=str(source))
    convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "back"), "hf", again)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == made.keys() and all(same_bytes(found[name], made[name]) for name in made)


@pytest.mark.parametrize(
    ("tensors", "options", "told"),
    [
        ({"w": torch.ones(4)}, {"dequantize": "bf16"}, "nothing to dequantize"),
        ({"w": torch.ones(4)}, {"dequantize": "int8"}, "float16, bfloat16"),
        (
            {"o.qweight": torch.ones(4, 4, dtype=torch.int32)},
            {"dequantize": "bf16"},
            r"cannot be(.|\n)*o\.qweight",
        ),
        ({"o.weight": torch.ones(4, 4).to(FP8)}, {"dequantize": "bf16"}, r"cannot be(.|\n)*o\.weight"),
        ({"o.weight": torch.ones(4, 4)}, {"quantize": ["fp8"]}, "fp8-128x128 or mxfp4"),
        ({"o.weight": torch.ones(4, 4)}, {"quantize": ["fp8-128x128", "o*=mxfp4"]}, "one scheme"),
        ({"o.weight": torch.ones(4, 4)}, {"quantize": ["fp8-128x128"]}, "none among o.weight"),
        ({"o.weight": torch.ones(4, 4)}, {"quantize": ["o*=fp8-128x128"]}, r"o\.weight of shape \[4, 4\]"),
        (
            {"o.weight": torch.ones(128, 128)},
            {"quantize": ["p*=fp8-128x128"]},
            "patterns that match(.|\n)*p*",
        ),
        (
            {"o.weight": torch.ones(128, 128).to(FP8), "o.weight_scale": torch.ones(1)},
            {"quantize": ["mxfp4"]},
            "quantized tensors(.|\n)*dequantize='bf16' together",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, tensors: Any, options: Any, told: str) -> None:
    """By name, with what to do; nothing is requantized unless that is said."""
    source = open_source(str(_folder(tmp_path / "hf", tensors)))
    with pytest.raises(ConversionError, match=told):
        convert(source, str(tmp_path / "out"), "hf", ConvertOptions(**options))
    assert not (tmp_path / "out").exists()


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    """A scale too few would shift all that follow."""
    tensors = {"o.weight": torch.ones(256, 128).to(FP8), "o.weight_scale_inv": torch.ones(3, 1)}
    with pytest.raises(
        CorruptCheckpointError, check=lambda error: "(3, 1)" in error.got and "o.weight" in error.where
    ):
        _convert(_folder(tmp_path / "hf", tensors, FP8_CONFIG), dequantize="bf16")


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_no_scales_are_damage(tmp_path: Path, shape: tuple[int, int]) -> None:
    """No size splits rows or columns into no blocks: the file is wrong, not the settings."""
    tensors = {"o.weight": torch.ones(256, 128).to(FP8), "o.weight_scale_inv": torch.ones(shape)}
    with pytest.raises(CorruptCheckpointError, check=lambda error: "o.weight" in error.where):
        _convert(_folder(tmp_path / "hf", tensors), dequantize="bf16")


def test_requantized_if_both_are_said(tmp_path: Path) -> None:
    """And a pattern keeps what the default would take."""
    torch.manual_seed(6)
    made: dict[str, torch.Tensor] = {}
    for name in ("a.weight", "b.weight"):
        made |= {name: torch.randn(128, 128).to(FP8), f"{name}_scale": torch.tensor([0.5])}
    source = _folder(tmp_path / "hf", made)
    found, config = _convert(source, dequantize="bf16", quantize=["fp8-128x128", "b*=keep"])
    expected = Fp8Quantize(QUANTIZER)._quantize_one("a.weight", (made["a.weight"].float() * 0.5).bfloat16())
    assert found.keys() == expected.keys() | {"b.weight"} and found["b.weight"].dtype == torch.bfloat16
    assert all(same_bytes(found[name], expected[name]) for name in expected)
    assert config["quantization_config"]["modules_to_not_convert"] == ["b"]


def test_config_and_weights_that_disagree(tmp_path: Path) -> None:
    """On the type of quantized models, and on whether they are quantized; a config that is right is not spoken of."""

    def warned(config: dict[str, Any], tensors: dict[str, torch.Tensor], **options: Any) -> str:
        folder = _folder(tmp_path / str(len(list(tmp_path.iterdir()))), tensors)
        (folder / "config.json").write_text(json.dumps(config))
        return " ".join(
            convert(open_source(str(folder)), f"{folder}-out", "hf", ConvertOptions(**options)).warnings
        )

    plain, coded = {"w": torch.ones(4)}, {"w": torch.ones(4, 4).to(FP8), "w_scale": torch.ones(1)}
    said = warned(
        {"torch_dtype": "bfloat16", "quantization_config": FP8_CONFIG}, coded | {"norm": torch.ones(4)}
    )
    assert "config.json" in said and "bfloat16" in said and "float32" in said
    assert warned({"dtype": "bfloat16"}, plain) == "" == warned({}, plain)
    assert warned({"dtype": "bfloat16"}, plain, dtype=["bf16"]) == ""
    assert "quantization_config" in warned({"quantization_config": {"quant_method": "fp8"}}, plain)
    assert "quantization_config" in warned({}, coded)
    assert warned({"quantization_config": FP8_CONFIG}, coded) == ""
    assert warned({"quantization_config": FP8_CONFIG}, coded, dequantize="bf16") == ""


_LINEAR = "model.layers.0.mlp.up_proj.weight"
_ODD = "model.layers.0.self_attn.kv.weight"  # no multiple of a block
_EXPERT = "model.layers.0.mlp.experts.down_proj"


def _sources() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any] | None]]:
    """Models of every kind of codes, beside ordinary weights of bfloat16."""
    plain = {
        "model.norm.weight": torch.randn(128).bfloat16(),
        _ODD: torch.randn(64, 128).bfloat16(),
        _EXPERT: torch.randn(2, 64, 128).bfloat16(),
    }
    linear = torch.randn(128, 128).bfloat16()
    fp8 = {**Fp8Quantize(QUANTIZER)._quantize_one(_LINEAR, linear)}
    fp8 |= {_ODD: torch.randn(64, 128).to(FP8), f"{_ODD}_scale_inv": torch.ones(1, 1)}
    blocks = {f"{_EXPERT}_blocks": torch.randint(0, 255, (2, 128, 2, 16), dtype=torch.uint8)}
    blocks |= {f"{_EXPERT}_scales": torch.full((2, 128, 2), 127, dtype=torch.uint8), _LINEAR: linear}
    without_expert = {name: tensor for name, tensor in plain.items() if name != _EXPERT}
    return {
        "plain": (plain | {_LINEAR: linear}, None),
        "fp8": (plain | fp8, FP8_CONFIG),
        "mxfp4": (without_expert | blocks, {"quant_method": "mxfp4"}),
    }


@pytest.mark.parametrize("source", sorted(_sources()))
@pytest.mark.parametrize("dequantize", [None, "bf16", "fp32", "fp16"])
@pytest.mark.parametrize(
    "quantize",
    [(), ("fp8-128x128",), ("mxfp4",), ("fp8-128x128", "*.mlp.up*=keep"), ("*.mlp.up*=fp8-128x128",)],
)
@pytest.mark.parametrize("dtype", [(), ("fp16",)])
def test_the_config_says_what_lies_there(
    tmp_path: Path, source: str, dequantize: str | None, quantize: tuple[str, ...], dtype: tuple[str, ...]
) -> None:
    """For every pair of the two options: the type of the floats, and how the codes are made."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dequantize": dequantize, "quantize": quantize, "dtype": dtype}
    try:
        found, config = _convert(_folder(tmp_path / "hf", *_sources()[source]), **options)
    except ConversionError:
        assert (dequantize is None) != (source == "plain") or "*.mlp.up*=keep" in quantize
        return
    codes = {name for name, tensor in found.items() if tensor.dtype == FP8}
    mxfp4 = {name for name, tensor in found.items() if name.endswith("_blocks")}
    method = (config.get("quantization_config") or {}).get("quant_method")
    assert method == ("fp8" if codes else "mxfp4" if mxfp4 else None)
    scales = {name for name in found if name.endswith(("_scale_inv", "_scales"))}
    held = {str(t.dtype)[6:] for n, t in found.items() if n not in codes | mxfp4 | scales}
    assert config["dtype"] in held
    if dequantize is not None and not quantize and not dtype:
        assert config["dtype"] == {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[dequantize]
    if method and quantize:
        kept = config["quantization_config"]["modules_to_not_convert"]
        assert not any(name.removesuffix(".weight") in kept for name in codes)


@pytest.mark.parametrize("scheme", ["fp8-128x128", "mxfp4"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_infinities_take_no_block_along(tmp_path: Path, scheme: str, bad: float) -> None:
    """One would make its block's scale infinite: the weight is refused with the count, or kept by a pattern."""
    name = _EXPERT if scheme == "mxfp4" else _LINEAR
    shape = (2, 64, 128) if scheme == "mxfp4" else (256, 128)
    weight, other = torch.randn(shape), torch.randn(shape)
    weight.view(-1)[[3, 40, 8000]] = bad
    tensors = {name: weight, name.replace("layers.0", "layers.1"): other}
    folder = _folder(tmp_path / "hf", tensors)
    with pytest.raises(ConversionError) as caught:
        _convert(folder, quantize=[scheme])
    assert caught.value.where == f"tensor {name}" and str(caught.value.got).startswith("3 of ")
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
    found, _ = _convert(folder, quantize=[f"{name}=keep", scheme])
    assert same_bytes(found[name], weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_say_what_they_cannot_hold(tmp_path: Path, dtype: str) -> None:
    """Finite values that become infinite are counted by tensor; infinities that were there are not."""
    large = torch.full((3, 1000), torch.finfo(torch.float32).max)
    large[0] = float("inf")
    tensors = {"mask": large, "w": torch.ones(4)}
    folder = _folder(tmp_path / "hf", tensors)
    report = convert(open_source(str(folder)), f"{folder}-out", "hf", ConvertOptions(dtype=[dtype]))
    (warning,) = (each for each in report.warnings if "infinite" in each)
    assert "mask (2000 of 3000" in warning and "w (" not in warning


def test_dequantizing_says_what_it_cannot_hold(tmp_path: Path) -> None:
    """The same of weights that are dequantized to float16: blocks cut by tiles and buffers are counted once."""
    codes = torch.full((1280, 256), 448.0).to(FP8)
    codes[0] = float("nan")
    scales = torch.ones(10, 2)
    scales[3, 1] = 2**20  # of 128 x 128 finite values
    folder = _folder(tmp_path / "hf", {_LINEAR: codes, f"{_LINEAR}_scale_inv": scales}, FP8_CONFIG)
    for dtype, lost in (("fp16", 128 * 128), ("bf16", 0)):
        options = ConvertOptions(dequantize=dtype, memory_budget_bytes=4 << 20, threads=1)
        report = convert(open_source(str(folder)), tmp_path / dtype, "hf", options)
        said = [each for each in report.warnings if "infinite" in each]
        assert len(said) == bool(lost) and all(f"{lost} of {codes.numel()}" in each for each in said)
        found = load_file(tmp_path / dtype / "model.safetensors")[_LINEAR]
        assert found.isinf().sum() == lost
