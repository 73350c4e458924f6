"""Names of dtypes in manifests, and how their bytes are called in a safetensors file.

A manifest names a dtype as torch does, without the prefix: ``"bfloat16"``. A safetensors file has fewer
dtypes than torch; what it lacks is stored bit for bit under an unsigned integer of the same width (complex
numbers as pairs of floats), so that any safetensors reader can open the file. The manifest has the last word.
"""

from __future__ import annotations

import torch

from vescale_fsdp.errors import CheckpointError, explain

__all__ = ["carrier_of", "dtype_name", "dtype_named", "itemsize_of", "storage_code"]

_NATIVE_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
_PAIR_CODES = {"complex32": "F16", "complex128": "F64"}
_WIDTH_CODES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NAMES: dict[torch.dtype, str] = {value: name for name, value in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a dtype: ``torch.bfloat16`` is ``"bfloat16"``."""
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The dtype a manifest names.

    Raises:
        CheckpointError: if this version of torch has no such dtype.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    raise CheckpointError(
        explain(
            "The checkpoint holds a dtype that this version of torch does not have.",
            expected="a dtype of torch, such as 'float32'",
            got=repr(name),
            todo="read it with a torch that has the dtype",
        )
    )


def itemsize_of(name: str) -> int:
    """Bytes per element of a dtype by its name."""
    return dtype_named(name).itemsize


def storage_code(name: str) -> tuple[str, int]:
    """The safetensors dtype that holds a dtype's bits, and how many stored elements make one of ours."""
    if name in _NATIVE_CODES:
        return _NATIVE_CODES[name], 1
    if name in _PAIR_CODES:
        return _PAIR_CODES[name], 2
    return _WIDTH_CODES[itemsize_of(name)], 1


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that every copy kernel supports; bits are moved under it unchanged."""
    return _CARRIERS[dtype.itemsize]
