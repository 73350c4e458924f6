"""The dtype table: every dtype of torch in it, and what other formats call it is what their own libraries say."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch
import zarr
from zarr.storage import MemoryStore

from tests.support import dtype_zoo
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, is_numpy_dtype, stored_dtype
from vescale_fsdp.errors import ConversionError, LayoutError
from vescale_fsdp.layout.dtypes import DTYPES, dtype_from_code, dtype_from_torch, itemsize_of, known_dtype

TORCH_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=lambda dtype: str(dtype)
)
# Elements of torch's own quantized tensors: without the scales, which lie elsewhere, they mean nothing.
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
# What safetensors writes into rank files, and bytes under an integer of their width.
CARRIED = {
    "complex32": ("F16", 2),
    "complex128": ("F64", 2),
    "bcomplex32": ("U32", 1),
    "float4_e2m1fn_x2": ("U8", 1),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
    "bits16": ("U16", 1),
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype(dtype: torch.dtype) -> None:
    """Name, width, and what each format holds it as agree, whatever table was asked."""
    name = dtype_name(dtype)
    known = known_dtype(str(dtype))
    assert stored_dtype(name).itemsize == dtype.itemsize
    if known is None:
        assert dtype in QUANTIZED
        assert stored_dtype(name).carrier == (f"U{8 * dtype.itemsize}", 1)
        return

    assert (known.name, known.itemsize, itemsize_of(name)) == (name, dtype.itemsize, dtype.itemsize)
    assert known.raw.itemsize == dtype.itemsize
    assert (known.kind == "complex", known.kind in ("float", "quantized")) == (
        dtype.is_complex,
        dtype.is_floating_point,
    )
    code, count = stored_dtype(name).carrier
    assert dtype_from_code(code).itemsize * count == dtype.itemsize
    expected = CARRIED.get(name, (known.code or "U8", 1))
    assert (code, count) == expected
    assert np.dtype(known.zarr_name).itemsize == dtype.itemsize
    assert is_numpy_dtype(name) is known.is_numpy is (known.zarr_name == name)


@pytest.mark.parametrize("dtype", dtype_zoo.DTYPES, ids=str)
def test_codes_are_those_of_the_safetensors_library(dtype: torch.dtype) -> None:
    """Code and shape are what the reference writer puts into its header, for every dtype it takes."""
    tensor = dtype_zoo.make_tensor((3, 4), dtype)
    data = safetensors.torch.save({"x": tensor})
    entry = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]
    known = dtype_from_torch(str(dtype))

    assert entry["dtype"] == known.code
    assert tuple(entry["shape"]) == known.to_header_shape((3, 4))
    assert known.from_header_shape(entry["shape"]) == (3, 4)


def test_numpy_and_zarr_have_what_the_table_says() -> None:
    """What is marked as numpy's is a dtype of numpy and of zarr by that name; nothing else is numpy's."""
    for dtype in DTYPES:
        array = zarr.create_array(MemoryStore(), shape=(2,), dtype=dtype.zarr_name, zarr_format=3)
        assert array.dtype.itemsize == dtype.itemsize
        if dtype.is_numpy:
            assert np.dtype(dtype.name).name == dtype.name
        elif dtype.name not in ("complex32", "bits8", "bits16"):
            with pytest.raises(TypeError):
                np.dtype(dtype.name)


def test_names_are_told_apart() -> None:
    """No two rows share a name or a code; aliases are other names of one row; unknown names are refused."""
    names, codes = [dtype.name for dtype in DTYPES], [dtype.code for dtype in DTYPES if dtype.code]
    assert len(set(names)) == len(names) and len(set(codes)) == len(codes)
    for alias in ("float", "double", "half", "int", "long", "short", "chalf", "cfloat", "cdouble"):
        assert known_dtype(alias) is known_dtype(str(getattr(torch, alias)))
    assert known_dtype("float7") is None
    with pytest.raises(LayoutError) as unknown:
        itemsize_of("float7")
    assert unknown.value.got == "float7"
    for lookup, name in ((dtype_from_torch, "float7"), (dtype_from_code, "F7")):
        with pytest.raises(ConversionError) as refused:
            lookup(name)
        assert refused.value.got == name
