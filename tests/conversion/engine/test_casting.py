"""--dtype: values as torch casts them, only ordinary floats, and config.json told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.support.dtype_zoo import same_bytes, zoo
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.engine.casting import CastRules
from vescale_fsdp.conversion.quantization.float_codes import cast_array
from vescale_fsdp.errors import ConversionError, option
from vescale_fsdp.layout.dtypes import dtype_from_torch

FLOATS = ("float16", "bfloat16", "float32", "float64")


def _samples(name: str) -> torch.Tensor:
    """All bit patterns of a 16-bit type; random ones, halves and limits of a wider one."""
    dtype = getattr(torch, name)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator, dtype=torch.int64)
    found = wide.to(torch.int32).view(torch.float32).to(dtype)
    # Exactly half way between two bfloat16 (and float16) neighbors: where rounding goes wrong.
    halves = (torch.arange(65536, dtype=torch.int32) * 65536 + 32768).view(torch.float32).to(dtype)
    return torch.cat([found, halves, torch.tensor([0.0, -0.0, float("inf"), -float("inf")], dtype=dtype)])


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_equal_torch_bit_for_bit(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of float types: the bits torch's .to() gives; NaNs stay NaNs, the same with torch and without."""
    values = _samples(source)
    expected = values.to(getattr(torch, target))
    a, b = dtype_from_torch(source), dtype_from_torch(target)
    raw = values.view(getattr(torch, f"int{values.element_size() * 8}")).numpy().view(a.raw)
    by_torch = cast_array(raw, a, b)
    odd = cast_array(raw.reshape(2, -1).T, a, b)  # not one run of memory
    monkeypatch.delitem(sys.modules, "torch")
    cast = cast_array(raw, a, b)
    monkeypatch.undo()
    assert np.array_equal(cast, by_torch) and np.array_equal(cast.reshape(2, -1).T, odd)
    got = torch.from_numpy(cast.astype(b.raw).view(f"i{b.itemsize}")).view(expected.dtype)
    finite = ~torch.isnan(expected)
    assert torch.equal(torch.isnan(got), ~finite)
    as_int = getattr(torch, f"int{b.itemsize * 8}")
    assert np.array_equal(got[finite].view(as_int).numpy(), expected[finite].view(as_int).numpy())


def test_dtype_casts_floats_of_the_model_only(tmp_path: Path) -> None:
    """Global bfloat16, float32 for one pattern; ints, bools and fp8 unchanged; config.json in step."""
    weights = {
        "w": torch.randn(40, 30),
        "gate.bias": torch.randn(7),
        "half": torch.randn(5).half(),
        "ids": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
    }
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text('{"torch_dtype": "float32", "hidden_size": 3}')
    options = ConvertOptions(assets=str(tmp_path / "assets"), dtype=("bf16", "*.bias=float64"))
    report = convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "out"), "hf", options)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(loaded["w"], weights["w"].to(torch.bfloat16))
    assert torch.equal(loaded["half"], weights["half"].to(torch.bfloat16))
    assert torch.equal(loaded["gate.bias"], weights["gate.bias"].double())
    for name in ("ids", "mask"):
        assert torch.equal(loaded[name], weights[name])
    assert torch.equal(loaded["fp8"].view(torch.uint8), weights["fp8"].view(torch.uint8))
    assert sorted(report.casts) == ["gate.bias", "half", "w"]
    assert report.casts["half"] == ("float16", "bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"torch_dtype": "bfloat16", "hidden_size": 3}


def test_no_other_type_is_ever_cast(tmp_path: Path) -> None:
    """Of all types there are, --dtype touches four: integers, booleans, complex numbers and floats of 8 bits or fewer
    keep every bit."""
    weights = zoo()
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = ConvertOptions(dtype=("float16",))
    convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "out.pt"), "torch", options)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    assert sorted(loaded) == sorted(weights) and {value.dtype for value in weights.values()} > floats
    for name, value in weights.items():
        assert same_bytes(loaded[name], value.half() if value.dtype in floats else value), name


@pytest.mark.parametrize(
    ("text", "name"),
    [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32"), ("F64", "float64"), ("F8_E4M3", None)],
)
def test_names_of_types(text: str, name: str | None) -> None:
    """Also those of safetensors' headers, which inspect shows; no others."""
    if name is None:
        with pytest.raises(ConversionError, check=lambda error: error.got == text):
            CastRules.parse([text])
        return
    default = CastRules.parse([text]).default
    assert default is not None and default.name == name


@pytest.mark.parametrize("text", ["int8", "float8_e4m3fn", "nonsense"])
def test_types_that_lose_values_are_refused(text: str) -> None:
    """Only ordinary floats can be asked for."""
    with pytest.raises(ConversionError, check=lambda error: error.got == text) as caught:
        CastRules.parse([text])
    assert option("quantize") in (caught.value.todo or "")  # which `load` and `HuggingFace` do not have


def test_patterns_must_match_floats(tmp_path: Path) -> None:
    """A pattern that matches nothing or an integer is an error that names it."""
    dcp.save({"w": torch.ones(2), "ids": torch.arange(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for text, match in (("nothing.*=float32", r"nothing\.\*"), ("ids=float32", "ids of int64")):
        options = ConvertOptions(dtype=(text,))
        with pytest.raises(ConversionError, match=match):
            convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "out"), "hf", options)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_a_cast_of_float64_to_16_bits_rounds_twice_as_torch_does(target: str) -> None:
    """Just beside the middle of two 16-bit floats, the first rounding, to float32, makes a tie of the value."""
    bits = torch.arange(0, 2**15, dtype=torch.int16)
    low, high = (each.view(getattr(torch, target)).double() for each in (bits, bits + 1))
    middle = ((low + high) / 2)[low.isfinite() & high.isfinite()]
    values = torch.cat(
        [middle * sign * (1 + tiny) for sign in (1, -1) for tiny in (-(2.0**-40), 0, 2.0**-40)]
    )
    wide, narrow = dtype_from_torch("float64"), dtype_from_torch(target)

    got = cast_array(values.view(torch.int64).numpy().view(wide.raw), wide, narrow)

    expected = values.to(getattr(torch, target)).view(torch.int16).numpy().view(narrow.raw)
    assert np.array_equal(got, expected)


def test_float16_is_numpys_at_every_edge() -> None:
    """All bfloat16s, and float32s around the least, the last subnormal and the largest float16, infinity and NaN; both
    signs. Ours is not by numpy, which takes thirty times as long for what is tiny."""
    edges = [0x32FFF000, 0x33000000, 0x387FE000, 0x38800000, 0x477FE000, 0x47800000, 0x7F7FF000, 0x7F801000]
    parts = [np.arange(0, 2**32, 2**16, dtype=np.uint32)]
    parts += [
        np.arange(edge, edge + 0x2000, dtype=np.uint32) | sign for edge in edges for sign in (0, 0x80000000)
    ]
    values = np.concatenate([part.astype(np.uint32) for part in parts]).view(np.float32)

    wide, half = dtype_from_torch("float32"), dtype_from_torch("float16")
    got = cast_array(values.view(wide.raw), wide, half)

    with np.errstate(all="ignore"):
        assert np.array_equal(got, values.astype(np.float16).view(np.uint16))
    assert len(np.unique(got)) > 5000
