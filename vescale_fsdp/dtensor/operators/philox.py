"""Random numbers addressed by position: Philox-4x32-10, vectorised in torch, and values made of its bits.

Word i of a stream is a pure function of (key, stream, i), so any rank can draw any range of it, and the
values of a tensor do not depend on who holds which element. Generator: Salmon, Moraes, Dror, Shaw,
"Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.3; its test vectors are in
tests/dtensor/test_random_values.py.

Values are made with additions, multiplications, divisions and square roots in float64 only. IEEE 754 rounds
these correctly, so they come out bit for bit the same wherever an element stands in a vector register or a
thread's share, and on every device. torch.log, sin and cos give no such promise, hence the series below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from vescale_fsdp.layout.geometry import FlatRange

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_COUNTERS_AT_ONCE = 1 << 16  # bounds the working memory: 2 MiB for four words of 8 bytes


def philox(counters: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Four random 32-bit words per counter.

    Args:
        counters: four int64 tensors of one shape, each with values in [0, 2**32).
        key: two ints in [0, 2**32).

    Returns:
        Four int64 tensors of that shape, with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, but their 64 bits are right, and that is all that is read of them.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _words(counters: torch.Tensor, seed: int, stream: int) -> torch.Tensor:
    """Words of a stream: int64 [len(counters), 4], values in [0, 2**32)."""
    zero = torch.zeros_like(counters)
    address = (counters & _MASK, counters >> 32, zero + (stream & _MASK), zero + (stream >> 32 & _MASK))
    return torch.stack(philox(address, (seed & _MASK, seed >> 32 & _MASK)), dim=1)


def _pick(
    spans: Sequence[FlatRange], per_counter: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (counters, index of the wanted values among those the counters give), span after span."""
    group: list[FlatRange] = []
    room = _COUNTERS_AT_ONCE
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, (start // per_counter + room) * per_counter)
            group.append(FlatRange(start, stop))
            room -= -(-stop // per_counter) - start // per_counter
            start = stop
            if room <= 1:  # a run that starts inside a counter may need one more than its length says
                yield _address(group, per_counter, device)
                group, room = [], _COUNTERS_AT_ONCE
    if group:
        yield _address(group, per_counter, device)


def _address(
    group: list[FlatRange], per_counter: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.tensor([span.start for span in group], dtype=torch.int64, device=device)
    stops = torch.tensor([span.stop for span in group], dtype=torch.int64, device=device)
    first, last = starts // per_counter, (stops + per_counter - 1) // per_counter
    counts, lengths = last - first, stops - starts
    before = counts.cumsum(0) - counts  # counters of the spans before this one
    counters = _ramp(first, counts)
    return counters, _ramp(before * per_counter + starts - first * per_counter, lengths)


def _ramp(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """starts[0], starts[0] + 1, .. (lengths[0] values), starts[1], .. in one tensor."""
    offsets = starts - (lengths.cumsum(0) - lengths)
    spread = offsets.repeat_interleave(lengths)
    return spread + torch.arange(spread.numel(), dtype=torch.int64, device=spread.device)


def uniforms(
    spans: Sequence[FlatRange], seed: int, stream: int, bits: int, device: torch.device
) -> torch.Tensor:
    """Values of a uniform stream on [0, 1), multiples of 2**-bits.

    Args:
        spans: which values.
        seed: 64-bit key.
        stream: 64-bit number of the stream; streams are independent.
        bits: up to 32 (one word per value) or up to 53 (two words).
        device: where to draw.

    Returns:
        1-D float64 [numel of all spans], in their order.
    """
    wide = bits > 32
    parts = []
    for counters, index in _pick(spans, 2 if wide else 4, device):
        drawn = _words(counters, seed, stream)
        if wide:
            drawn = (drawn[:, 0::2] << 21) | (drawn[:, 1::2] >> 11)
        values = (drawn >> ((53 if wide else 32) - bits)).to(torch.float64) * 2.0**-bits
        parts.append(values.reshape(-1)[index])
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=device)


def normals(spans: Sequence[FlatRange], seed: int, stream: int, device: torch.device) -> torch.Tensor:
    """Values of a standard normal stream (Box and Muller's method on pairs of words).

    The largest magnitude is sqrt(66 ln 2) = 6.76: the uniform under the logarithm has 32 bits and a half.

    Returns:
        1-D float64 [numel of all spans], in their order.
    """
    parts = []
    for counters, index in _pick(spans, 4, device):
        pairs = _words(counters, seed, stream).view(-1, 2)
        radius = (-2.0 * _log((pairs[:, 0].to(torch.float64) + 0.5) * 2.0**-32)).sqrt()
        sine, cosine = _sin_cos_turns(pairs[:, 1])
        parts.append(torch.stack([radius * cosine, radius * sine], dim=1).view(-1)[index])
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=device)


def _series(x: torch.Tensor, coefficients: list[float]) -> torch.Tensor:
    """Horner's rule; multiplication and addition in separate kernels, so that nothing is fused."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float64 numbers, to about 1e-15 relative to 1.

    x = m * 2**e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716;
    the first term left out is s**23 / 23 < 1e-18.
    """
    mantissa, exponent = torch.frexp(x)  # exact; mantissa in [1/2, 1)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    power = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return power * math.log(2.0) + 2.0 * s * _series(s * s, [1.0 / n for n in range(1, 23, 2)])


def _sin_cos_turns(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine and cosine of ``word / 2**32`` full turns.

    The two top bits are the quadrant. The rest is an angle t in [-pi/4, pi/4) off the quadrant's middle
    diagonal, where ten terms of the Taylor series leave less than 1e-20.
    """
    quadrant = word >> 30
    t = ((word & ((1 << 30) - 1)).to(torch.float64) - 2.0**29) * (math.pi * 2.0**-31)
    square = t * t
    sine = t * _series(square, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(10)])
    cosine = _series(square, [(-1.0) ** k / math.factorial(2 * k) for k in range(10)])
    # Turn by 45 degrees, to the quadrant's middle, then by the quadrant.
    s, c = (sine + cosine) * math.sqrt(0.5), (cosine - sine) * math.sqrt(0.5)
    odd, negative_s, negative_c = quadrant % 2 == 1, quadrant >= 2, (quadrant == 1) | (quadrant == 2)
    s, c = torch.where(odd, c, s), torch.where(odd, s, c)
    return torch.where(negative_s, -s, s), torch.where(negative_c, -c, c)
