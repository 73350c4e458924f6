"""Quantized folders into live shards, with the bits that the converter makes of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard as fully_shard_2

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from tests.support.faults.disks import counted_reads
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import SourceOptions, load
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import ConversionError, VescaleError, option

FP8 = torch.float8_e4m3fn
RULES = """
format = 1
keep_others = true
[[rule]]
hf = ["m.gate.weight", "m.up.weight"]
ours = "m.gate_up.weight"
ops = [{ concat = { dim = 0, sizes = ["300", "300"] } }]
"""


def _fp8(rows: int, cols: int, *scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, cols).to(FP8), torch.rand(scales) + 0.1


def _folders(root: Path) -> None:
    """FP8 in tiles whose last ones are short, mxfp4, and compressed-tensors' scales per row and for all."""
    torch.manual_seed(0)
    made: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}
    tiles: dict[str, torch.Tensor] = {"norm.weight": torch.randn(200).bfloat16()}
    for name in ("m.gate", "m.up"):
        tiles[f"{name}.weight"], tiles[f"{name}.weight_scale_inv"] = _fp8(300, 200, 3, 2)
    made["fp8"] = ({"quant_method": "fp8", "weight_block_size": [128, 128]}, tiles)
    blocks = torch.randint(0, 256, (3, 96, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 96, 2), dtype=torch.uint8)
    experts = {
        "e.down_proj_blocks": blocks,
        "e.down_proj_scales": scales,
        "e.down_proj_bias": torch.randn(3, 96),
    }
    made["mxfp4"] = ({"quant_method": "mxfp4"}, experts)
    rows = dict(zip(("a.weight", "a.weight_scale"), _fp8(70, 50, 70, 1), strict=True))
    whole = dict(zip(("b.weight", "b.weight_scale"), _fp8(64, 30, 1), strict=True))
    extra = {"a.input_scale": torch.tensor([0.5])}
    made["compressed"] = ({"quant_method": "compressed-tensors"}, {**rows, **whole, **extra})
    for name, (settings, tensors) in made.items():
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors", {"format": "pt"})
        (root / name / "config.json").write_text(json.dumps({"quantization_config": settings}))
    (root / "rules.toml").write_text(RULES)


def _tree(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with parameters of these names, on the meta device."""
    root = nn.Module()
    for name, value in tensors.items():
        *homes, leaf = name.split(".")
        module = root
        for home in homes:
            if not isinstance(getattr(module, home, None), nn.Module):
                module.add_module(home, nn.Module())
            module = module.get_submodule(home)
        module.register_parameter(leaf, nn.Parameter(torch.empty_like(value, device="meta")))
    return root


def _load_all(root: Path) -> list[tuple[str, int, int, int]]:
    """Of each folder and both ways of sharding: bytes read, bytes of the folder, and tensors that are as converted."""
    found = []
    for shard in (fully_shard, fully_shard_2):
        for name in ("fp8", "fused", "mxfp4", "compressed"):
            expected = load_file(root / f"{name}_converted" / "model.safetensors")
            model = _tree(expected)
            shard(model, mesh=cpu_mesh())
            rules = str(root / "rules.toml") if name == "fused" else None
            source = root / ("fp8" if name == "fused" else name)
            with counted_reads() as read, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of input_scale, which belongs to no weight
                load(source, model, source=SourceOptions(dequantize="bf16", rules=rules))
            params: dict[str, Any] = dict(model.named_parameters())
            same = sum(same_bytes(params[n].full_tensor().detach(), expected[n]) for n in expected)
            assert same == len(expected), (
                name,
                [n for n in expected if not same_bytes(params[n].full_tensor(), expected[n])],
            )
            found.append((name, sum(read), (source / "model.safetensors").stat().st_size, same))
    return found


def test_live_shards_get_the_converters_bits(tmp_path: Path) -> None:
    """Tiles cut by rank boundaries, fused by rules, of stock FSDP2 and ours; half of the codes are read, and a tile's
    row of scales more."""
    _folders(tmp_path)
    for name in ("fp8", "fused", "mxfp4", "compressed"):
        source = open_source(str(tmp_path / ("fp8" if name == "fused" else name)))
        rules = {"rules": str(tmp_path / "rules.toml"), "rules_to": "ours"} if name == "fused" else {}
        convert(source, str(tmp_path / f"{name}_converted"), "hf", ConvertOptions(dequantize="bf16", **rules))
    for ranks in run_ranks(2, _load_all, tmp_path):
        assert len(ranks) == 8
        for name, read, whole, same in ranks:
            assert same > 0 and 0.3 * whole < read < 0.7 * whole, (name, read, whole)


def test_what_cannot_be_dequantized_is_refused(tmp_path: Path) -> None:
    """No codes, a type that is none, and codes that were not asked for."""
    _folders(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "plain.safetensors")
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConversionError, check=lambda error: option("dequantize") in error.todo):
        load(tmp_path / "plain.safetensors", model, source=SourceOptions(dequantize="bf16"))
    for text, got in (("int8", "int8"), ("*.w=bf16", "*.w=bf16")):
        with pytest.raises(ConversionError, check=lambda error: error.got == got):  # noqa: B023
            load(tmp_path / "fp8", model, source=SourceOptions(dequantize=text))
        with pytest.raises(ConversionError, check=lambda error: error.got == got):  # noqa: B023
            convert(
                open_source(str(tmp_path / "fp8")),
                str(tmp_path / "out"),
                "hf",
                ConvertOptions(dequantize=text),
            )
    with pytest.raises(VescaleError):
        load(tmp_path / "fp8", model)
    model.a = nn.Linear(50, 70, bias=False, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"a\.input_scale"):
        load(tmp_path / "compressed", model, source=SourceOptions(dequantize="bf16"), strict=False)
