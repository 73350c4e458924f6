"""Tensors of every element type torch has, in shapes that trip converters: 0-d, empty, 1 to 4 dims."""

from __future__ import annotations

import math

import torch

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "vector": (7,),
    "matrix": (5, 6),
    "empty": (0, 4),
    "cube": (3, 4, 2),
    "conv": (2, 3, 3, 4),
}
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float4_e2m1fn_x2,
)


def make_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor (0 and 1 only for bool, finite values for plain floats)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return torch.randn(shape, generator=generator).to(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def zoo() -> dict[str, torch.Tensor]:
    """One tensor per (type, shape) that the type can have; packed types have no 0-d form."""
    found = {}
    for seed, dtype in enumerate(DTYPES):
        for kind, shape in SHAPES.items():
            if dtype == torch.float4_e2m1fn_x2 and kind == "scalar":
                continue
            name = f"{str(dtype).removeprefix('torch.')}.{kind}"
            found[name] = make_tensor(shape, dtype, seed)
    return found


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bytes (NaNs compare by their bits)."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b))
    return torch.equal(left, right) if a.numel() else True
