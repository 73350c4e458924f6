"""The dynamic 8-bit map of block-wise optimizers (Dettmers et al., arXiv 2110.02861): 256 values in [-1, 1].

Seven decades; decade i has 2^i points per sign (2^(i+1) if there is no sign), the midpoints of equal steps
over [0.1, 1], times 10^(i - 6); then 0 and 1. Small values have fine steps, large ones coarse. First moments take
the signed map, second moments the unsigned one. The tables and the rounding equal torchao's bit for bit (a
test compares them); torchao itself is not needed: it has no short last block and its import loads kernels.

A block is stored as codes (the nearest entry of value / scale) and one fp32 scale, its largest magnitude.
"""

from __future__ import annotations

from functools import lru_cache

import torch

MAP_NAME = "dynamic8"
"""What checkpoints record. The table is computed, never stored."""

_DECADES = 7
_LEAST_SCALE = 1e-12


@lru_cache(maxsize=16)
def dynamic_map(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values in ascending order, fp32."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        points = torch.linspace(
            0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float32, device="cpu"
        )
        middles = (10.0 ** (decade - _DECADES + 1) * ((points[:-1] + points[1:]) / 2)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _thresholds(signed: bool, device: torch.device) -> torch.Tensor:
    """255 values: entry i is the least fp32 number that is rounded to code i + 1.

    A number x between entries a < b goes up if ``x - a >= (b - a) * 0.5`` in fp32. That is monotone in x,
    so it is one comparison with the number where it turns true, found from the midpoint by single steps.
    """
    table = dynamic_map(signed, torch.device("cpu"))
    low, high = table[:-1], table[1:]
    up, down = torch.tensor([torch.inf, -torch.inf], dtype=torch.float32, device="cpu")

    def rounds_up(x: torch.Tensor) -> torch.Tensor:
        return x - low >= (high - low) * 0.5

    x = (low + high) / 2
    while not rounds_up(x).all():
        x = torch.where(rounds_up(x), x, torch.nextafter(x, up))
    while rounds_up(torch.nextafter(x, down)).any():
        below = torch.nextafter(x, down)
        x = torch.where(rounds_up(below), below, x)
    return x.to(device)


def zero_code(signed: bool) -> int:
    """The code of the value 0."""
    return 127 if signed else 0


def encode_dynamic(tiles: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of blocks.

    Args:
        tiles: [bands, rows, blocks, cols] as `BlockGrid.tiled` gives them, fp32, finite.
        signed: which map.

    Returns:
        uint8 codes like ``tiles``, fp32 scales [bands, blocks].
    """
    scales = tiles.abs().amax((1, 3)).clip(_LEAST_SCALE)
    relative = tiles / scales[:, None, :, None]
    codes = torch.bucketize(relative, _thresholds(signed, tiles.device), out_int32=True, right=True)
    return codes.to(torch.uint8), scales


def decode_dynamic(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 values of blocks; shapes as `encode_dynamic` returns them."""
    return dynamic_map(signed, codes.device)[codes.int()] * scales[:, None, :, None]
