"""Every way of storing quantized weights that is read, against formulas that are written independently.

The floats are those that the owner's library computes, bit for bit, in any part of a weight: what rounds to the dtype
of the scales in the library is rounded to it here, and then cast to the requested dtype.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conversion.quantization.coded_weights import Coded, rows
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.checkpoint import SourceOptions
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.live.source_state import open_for_load
from vescale_fsdp.layout.geometry import Box

ROWS = rows()
# One row of each function, in `make test`; the others in a part.
_CORE = {name.split()[0]: name for name in reversed(ROWS)}.values()
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _params() -> list[object]:
    return [pytest.param(name, marks=[] if name in _CORE else [pytest.mark.part("formats")]) for name in ROWS]


def _made(name: str) -> Coded:
    torch.manual_seed(sum(name.encode()))
    return ROWS[name]()


@pytest.mark.parametrize("name", _params())
def test_floats_are_those_of_the_formula(tmp_path: Path, name: str) -> None:
    """In three dtypes, whole and in boxes that begin and end anywhere."""
    made = _made(name)
    folder = made.write(tmp_path / "model")
    draw = random.Random(name)
    for short, dtype in _DTYPES.items():
        expected = made.floats(dtype)
        views = open_for_load(str(folder), SourceOptions(dequantize=short)).state.views
        assert views.keys() == {made.weight, "norm.weight"}
        view, integers = views[made.weight], {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        assert view.info.shape == expected.shape and view.info.dtype.name == str(dtype)[6:]
        bits = expected.contiguous().view(integers).numpy().view(view.info.dtype.raw)
        boxes = [Box((0,) * expected.ndim, tuple(expected.shape))]
        for _ in range(6):
            ends = [sorted(draw.sample(range(size + 1), 2)) for size in expected.shape]
            boxes.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
        for box in boxes:
            found = np.empty(box.sizes, dtype=view.info.dtype.raw)
            view.read_into(box, found)
            wanted = bits[box.slices()]
            assert np.array_equal(found, wanted) or _differ_in_nans_only(found, wanted, dtype), (short, box)
            assert all(part.info.name in made.tensors for part, _ in view.parts(box))


def _differ_in_nans_only(found: np.ndarray, wanted: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether the numbers are equal bit for bit; NaNs may have other bits."""
    numbers = [torch.from_numpy(a.view(f"i{a.itemsize}").copy()).view(dtype) for a in (found, wanted)]
    is_nan = numbers[0].isnan()
    return torch.equal(is_nan, numbers[1].isnan()) and same_bytes(numbers[0][~is_nan], numbers[1][~is_nan])


@pytest.mark.part("formats")
@pytest.mark.parametrize("name", list(_CORE))
def test_files_are_converted_and_copied(tmp_path: Path, name: str) -> None:
    """`convert` writes the floats and a config without quantization; without --dequantize it copies every byte."""
    made = _made(name)
    folder = made.write(tmp_path / "model")
    convert(open_source(str(folder)), str(tmp_path / "floats"), "hf", ConvertOptions(dequantize="bf16"))
    found = load_file(tmp_path / "floats" / "model.safetensors")
    assert found.keys() == {made.weight, "norm.weight"}
    assert same_bytes(found[made.weight], made.floats(torch.bfloat16))
    assert "quantization_config" not in (tmp_path / "floats" / "config.json").read_text()

    convert(open_source(str(folder)), str(tmp_path / "copy"), "hf", ConvertOptions(dtype=("bf16",)))
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    assert copy.keys() == made.tensors.keys() | {"norm.weight"}
    assert all(same_bytes(copy[part], tensor.contiguous()) for part, tensor in made.tensors.items())
    assert copy["norm.weight"].dtype == torch.bfloat16
    again = open_for_load(str(tmp_path / "copy"), SourceOptions(dequantize="fp32")).state.views
    assert again.keys() == {made.weight, "norm.weight"}
