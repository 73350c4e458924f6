"""Random values of ragged tensors. They depend on the seed alone, not on ranks, placements or granularity.

Element i of a tensor gets value i of a stream of random values (`philox`), and every random call on a ragged tensor
uses the next stream. So a model initialized by the same calls is bit for bit the same on 1, 2 or 7 ranks. All ranks
must make their random calls on ragged tensors in the same order.

    vescale_fsdp.manual_seed(0)           # the same on all ranks
    model = fully_shard(...)              # on the meta device
    model.to_empty(device="cuda"); model.apply(reset)     # torch.nn.init, tensor.normal_(), ...

Without `manual_seed`, the seed is `torch.initial_seed()` of the mesh's first rank, which it broadcasts once per
mesh. Random operators on other tensors (dropout, activations, data) use torch's generators, which draw values in the
local order of a rank's elements.

Generator: Philox-4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011),
section 3.3; the paper's test vectors are in tests/vescale_fsdp/dtensor/test_random_values.py. Word i of a stream is a
pure function of (key, stream, i), so any rank can draw any range. Values are computed only with additions,
multiplications, divisions and square roots in float64. IEEE 754 requires correct rounding of these operations, so the
values are bit for bit the same in every lane of a vector register, in every thread and on every device. torch.log, sin
and cos do not guarantee this, so the functions `_log` and `_sin_cos_turns` replace them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives.operations import broadcast_in_place
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.dtensor.meeting import explained, meet
from vescale_fsdp.dtensor.operators.arguments import (
    bind,
    check_written,
    cut_like,
    first_ragged,
    has_out,
    is_partial,
    name_of,
    refuse,
    wrap_result,
)
from vescale_fsdp.dtensor.operators.whole_tensors import gathered, written_back
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import boxes_of
from vescale_fsdp.layout.geometry import Box, Range, run_start
from vescale_fsdp.torch_private import piece_in


class _StreamCounter:
    """The seed and the number of the next stream. Each process has one instance, like torch's default generator."""

    def __init__(self) -> None:
        self.set(None, 0)

    def set(self, seed: int | None, next_stream: int) -> None:
        """Set the state, on every rank alike; without a seed, the ranks of a mesh agree on one."""
        self.seed, self.next_stream = seed, next_stream
        self._is_agreed = seed is not None
        # By group, not by mesh: in the next epoch of an elastic job, an equal mesh may have ranks that are new.
        self._agreeing: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    def take(self, mesh: DeviceMesh) -> tuple[int, int]:
        """Return (seed, stream) for one random call. If no seed was set, the first call on a mesh is a collective."""
        groups = [] if self._is_agreed else mesh.get_all_groups()
        if any(group not in self._agreeing for group in groups):
            # The seed is broadcast as an int64 tensor, so it must fit into 63 bits.
            seed = torch.initial_seed() & 0x7FFFFFFFFFFFFFFF if self.seed is None else self.seed
            state = torch.tensor([seed, self.next_stream], dtype=torch.int64, device=mesh.device_type)
            meet(groups, "first random values without manual_seed")
            with explained(groups):
                for group in groups:
                    wait_for(broadcast_in_place(state, group, 0))
            self.seed, self.next_stream = state.tolist()
            self._agreeing.update(groups)
        assert self.seed is not None
        self.next_stream += 1
        return self.seed, self.next_stream - 1


_streams = _StreamCounter()


def manual_seed(seed: int) -> None:
    """Seed the random values of ragged tensors. Call it with the same seed on every rank.

    Args:
        seed: any int; only its lowest 64 bits are used.

    Examples:
        >>> manual_seed(0)
        >>> get_rng_state()
        (0, 0)
    """
    _streams.set(seed & 0xFFFFFFFFFFFFFFFF, 0)


def get_rng_state() -> tuple[int | None, int]:
    """Return (seed, number of streams used), which a checkpoint can store for `set_rng_state`.

    Examples:
        >>> manual_seed(7)
        >>> get_rng_state()
        (7, 0)
    """
    return _streams.seed, _streams.next_stream


def set_rng_state(state: tuple[int | None, int]) -> None:
    """Restore a state that `get_rng_state` returned.

    Examples:
        >>> state = get_rng_state()
        >>> set_rng_state(state)
    """
    _streams.set(*state)


def _spans(tensor: RaggedDTensor) -> list[Range]:
    """Return this rank's flat ranges of the global tensor, in the order of its local elements."""
    shape = tuple(tensor.shape)
    spans: list[Range] = []
    for box in boxes_of(tensor._spec):
        for run in _runs(shape, box):
            if spans and spans[-1].stop == run.start:  # joined, so that there are few spans to draw
                spans[-1] = Range(spans[-1].start, run.stop)
            else:
                spans.append(run)
    return spans


def _runs(shape: tuple[int, ...], box: Box) -> list[Range]:
    """Return the contiguous runs of a box: one run, unless another mesh axis cuts a dim after the first."""
    start = run_start(shape, box)
    if start is not None:
        return [Range(start, start + box.numel)]
    dim = next(d for d in range(len(shape)) if box.sizes[d] > 1)  # split along the first dim of size > 1
    return [
        run for index in range(box.sizes[dim]) for run in _runs(shape, box.chunk(dim, box.sizes[dim], index))
    ]


# Number of bits of a uniform value on [0, 1) that each dtype represents without rounding.
_SIGNIFICAND_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _draw(kind: str, tensor: RaggedDTensor, a: float, b: float) -> torch.Tensor:
    """Return this rank's random values for a tensor, and use up a stream.

    Args:
        kind: "uniform" on [a, b); "normal" of mean a and standard deviation b; or "bernoulli", 1 with probability a.
        tensor: the ragged tensor; its values are neither read nor written.
        a, b: see ``kind``.
    """
    seed, stream = _streams.take(tensor.device_mesh)
    local = piece_in(tensor)
    spans, device = _spans(tensor), local.device
    if kind == "normal":
        values = normals(spans, seed, stream, device) * b + a
    elif kind == "bernoulli":
        values = (uniforms(spans, seed, stream, 32, device) < a).to(torch.float64)
    else:
        values = uniforms(spans, seed, stream, _SIGNIFICAND_BITS[local.dtype], device) * (b - a) + a
        # Rounding to the dtype may give b, which is outside [a, b).
        rounded = values.to(local.dtype).to(torch.float64)
        values = torch.where((rounded >= b) & (b > a), torch.full_like(values, a), values)
    return values.to(local.dtype).view(local.shape)


def _check(func: torch._ops.OpOverload, tensor: RaggedDTensor, named: dict[str, Any]) -> None:
    """Raise for a generator or a dtype that is not supported."""
    if named.get("generator") is not None:
        raise refuse(
            func,
            tensor,
            "a torch.Generator draws for the elements of one rank",
            todo="leave generator=None and seed with vescale_fsdp.manual_seed",
        )
    dtype = named.get("dtype") or tensor.dtype
    if dtype not in _SIGNIFICAND_BITS:
        raise refuse(func, tensor, f"random values of {dtype} are not supported")


def random_fill(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedDTensor:
    """Run normal_, uniform_ or bernoulli_, and return the tensor.

    Raises:
        RuntimeError: for a negative standard deviation or an empty range, as torch does.
    """
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named["self"]
    _check(func, tensor, named)
    check_written(func, named, tensor)
    kind = name_of(func).rstrip("_")
    if kind == "normal":
        a, b = named.get("mean", 0.0), named.get("std", 1.0)  # torch's defaults
        if b < 0:
            # Like torch, with the same class and words.
            raise RuntimeError(f"normal_ expects std >= 0.0, but found std {b}")
    elif kind == "uniform":
        a, b = named.get("from", 0.0), named.get("to", 1.0)
        if a > b:
            raise RuntimeError(f"uniform_ expects from <= to, but found {a} > {b}")
    else:
        a, b = named.get("p", 0.5), 0.0
    piece_in(tensor).copy_(_draw(kind, tensor, a, b))
    return tensor


# Operators that fill their first argument, and do not read it.
_FILLS = ("cauchy_", "exponential_", "geometric_", "log_normal_", "random_")


def drawn_whole(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any other random operator, such as dropout or exponential_, on whole tensors.

    Every rank draws all values with torch's generator, from one seed, and keeps its piece: so they are the same for any
    number of ranks, at the cost of a whole tensor in memory. What the operator reads is gathered.
    """
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None  # torch calls a rule only if an argument is ragged
    named = bind(func, args, kwargs)
    if named.get("generator") is not None:
        _check(func, like, named)
    seed = Random("{} {}".format(*_streams.take(like.device_mesh))).getrandbits(63)
    device = piece_in(like).device
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        own = torch.Generator(device).manual_seed(seed)
        # Some operators take it by position.
        args = tuple(own if name == "generator" else arg for name, arg in zip(names, args, strict=False))
        if names.index("generator") >= len(args):
            kwargs = {**kwargs, "generator": own}
        return _drawn(func, args, kwargs, like)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(seed)
        return _drawn(func, args, kwargs, like)


def _drawn(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], like: RaggedDTensor
) -> Any:
    """Run a random operator on whole tensors; ``like`` is its first ragged argument."""
    if name_of(func) not in _FILLS or has_out(func):
        return (written_back if func._schema.is_mutable else gathered)(func, args, kwargs)
    check_written(func, bind(func, args, kwargs), like)
    full = torch.zeros(like.shape, dtype=like.dtype, device=piece_in(like).device)
    func(full, *args[1:], **kwargs)
    piece_in(like).copy_(cut_like(func, full, like))
    return like


def random_like(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run rand_like or randn_like: return random values with the shape and placements of the input."""
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named["self"]
    _check(func, tensor, named)
    if is_partial(tensor):
        raise refuse(func, tensor, "the tensor has pending sums")
    empty = torch.empty_like(piece_in(tensor), dtype=named.get("dtype"), device=named.get("device"))
    like = wrap_result(func, empty, tensor)
    kind = "normal" if "randn" in name_of(func) else "uniform"
    piece_in(like).copy_(_draw(kind, like, 0.0, 1.0))
    return like


# -- Philox ---------------------------------------------------------------------------------------------

_MASK = 0xFFFFFFFF  # the lowest 32 bits
# The paper's constants for Philox-4x32-10.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# This limits the working memory to 2 MiB, since each counter gives four words of 8 bytes.
_COUNTERS_AT_ONCE = 1 << 16


def philox(counters: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Return four random 32-bit words per counter.

    Args:
        counters: four int64 tensors of one shape, each with values in [0, 2**32).
        key: two ints in [0, 2**32).

    Returns:
        Four int64 tensors of that shape, with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products may overflow, but the lowest 64 bits, which are all that is used, are correct.
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
    """Return the random words of some counters of a stream: int64 [len(counters), 4], values in [0, 2**32)."""
    zero = torch.zeros_like(counters)
    address = (counters & _MASK, counters >> 32, zero + (stream & _MASK), zero + (stream >> 32 & _MASK))
    return torch.stack(philox(address, (seed & _MASK, seed >> 32 & _MASK)), dim=1)


def _pick(
    spans: Sequence[Range], per_counter: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of (counters, indices), in the order of the spans.

    Each counter produces ``per_counter`` values. The indices select the values at the positions in ``spans``.
    """
    group: list[Range] = []
    room = _COUNTERS_AT_ONCE
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, (start // per_counter + room) * per_counter)
            group.append(Range(start, stop))
            room -= -(-stop // per_counter) - start // per_counter
            start = stop
            # The batch is full. <= 1, because a range that starts inside a counter's values may need one more counter.
            if room <= 1:
                yield _address(group, per_counter, device)
                group, room = [], _COUNTERS_AT_ONCE
    if group:
        yield _address(group, per_counter, device)


def _address(group: list[Range], per_counter: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counters that produce the values of all spans, and the indices of these values."""
    starts = torch.tensor([span.start for span in group], dtype=torch.int64, device=device)
    stops = torch.tensor([span.stop for span in group], dtype=torch.int64, device=device)
    first, last = starts // per_counter, (stops + per_counter - 1) // per_counter
    counts, lengths = last - first, stops - starts
    before = counts.cumsum(0) - counts  # number of counters of all earlier spans
    counters = _ramp(first, counts)
    return counters, _ramp(before * per_counter + starts - first * per_counter, lengths)


def _ramp(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return concatenated ranges in one tensor: range i has ``lengths[i]`` numbers, from ``starts[i]`` up."""
    # All ranges are computed together, because there may be many.
    offsets = starts - (lengths.cumsum(0) - lengths)
    spread = offsets.repeat_interleave(lengths)
    return spread + torch.arange(spread.numel(), dtype=torch.int64, device=spread.device)


def uniforms(spans: Sequence[Range], seed: int, stream: int, bits: int, device: torch.device) -> torch.Tensor:
    """Return uniform random values on [0, 1), multiples of 2**-bits.

    Args:
        spans: positions of the values in the stream.
        seed: 64-bit key.
        stream: 64-bit number of the stream; streams are independent.
        bits: up to 53; a value takes one word for up to 32 bits, and two words for more.
        device: device of the result.

    Returns:
        1-D float64 with one value per position, in the order of the spans.
    """
    wide = bits > 32
    parts = []
    for counters, index in _pick(spans, 2 if wide else 4, device):
        drawn = _words(counters, seed, stream)
        if wide:
            # 53 bits: all 32 of one word, and the upper 21 of the next.
            drawn = (drawn[:, 0::2] << 21) | (drawn[:, 1::2] >> 11)
        values = (drawn >> ((53 if wide else 32) - bits)).to(torch.float64) * 2.0**-bits
        parts.append(values.reshape(-1)[index])
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=device)


def normals(spans: Sequence[Range], seed: int, stream: int, device: torch.device) -> torch.Tensor:
    """Return standard normal random values, by Box and Muller's method on pairs of words.

    The smallest argument of the logarithm is 2**-33, so the largest magnitude is sqrt(66 ln 2) = 6.76. The arguments
    are those of `uniforms`.

    Returns:
        1-D float64 with one value per position, in the order of the spans.
    """
    parts = []
    for counters, index in _pick(spans, 4, device):
        pairs = _words(counters, seed, stream).view(-1, 2)
        # + 0.5, because zero has no logarithm.
        radius = (-2.0 * _log((pairs[:, 0].to(torch.float64) + 0.5) * 2.0**-32)).sqrt()
        sine, cosine = _sin_cos_turns(pairs[:, 1])
        parts.append(torch.stack([radius * cosine, radius * sine], dim=1).view(-1)[index])
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=device)


def _series(x: torch.Tensor, coefficients: list[float]) -> torch.Tensor:
    """Return the value of a power series, by Horner's rule.

    Multiplication and addition are separate kernels, so that no device fuses them into an FMA, which rounds once only.
    """
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive normal float64 numbers, with an absolute error of about 1e-15.

    x = m * 2**e with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| <= 0.1716. The
    first omitted term of the series is s**23 / 23 < 1e-18.
    """
    mantissa, exponent = torch.frexp(x)  # exact; mantissa in [1/2, 1)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    power = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return power * math.log(2.0) + 2.0 * s * _series(s * s, [1.0 / n for n in range(1, 23, 2)])


def _sin_cos_turns(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sine and the cosine of ``word / 2**32`` full turns.

    The two top bits are the quadrant. The other bits are an angle t in [-pi/4, pi/4) from the quadrant's diagonal, for
    which ten terms of the Taylor series have an error below 1e-20.
    """
    quadrant = word >> 30
    t = ((word & ((1 << 30) - 1)).to(torch.float64) - 2.0**29) * (math.pi * 2.0**-31)
    square = t * t
    sine = t * _series(square, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(10)])
    cosine = _series(square, [(-1.0) ** k / math.factorial(2 * k) for k in range(10)])
    # Rotate by 45 degrees, because t is relative to the diagonal, then by the quadrant.
    s, c = (sine + cosine) * math.sqrt(0.5), (cosine - sine) * math.sqrt(0.5)
    odd, negative_s, negative_c = quadrant % 2 == 1, quadrant >= 2, (quadrant == 1) | (quadrant == 2)
    s, c = torch.where(odd, c, s), torch.where(odd, s, c)
    return torch.where(negative_s, -s, s), torch.where(negative_c, -c, c)
