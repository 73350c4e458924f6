"""Random values of ragged tensors. They depend on the seed alone, not on ranks, placements or granularity.

Every random call on a ragged tensor uses the next stream of the seed. The tensor is divided into blocks of
`_BLOCK_NUMEL` elements, wherever ranks cut it, and torch draws each block with a generator of its own, which is seeded
by seed, stream and block. A rank draws the blocks that its piece touches. So a model initialized by the same calls is
bit for bit the same on 1, 2 or 7 ranks with devices of one kind. All ranks must make their random calls on ragged
tensors in the same order.

    vescale_fsdp.manual_seed(0)           # the same on all ranks
    model = fully_shard(...)              # on the meta device
    model.to_empty(device="cuda"); model.apply(reset)     # torch.nn.init, tensor.normal_(), ...

Without `manual_seed`, the seed is `torch.initial_seed()` of the mesh's first rank, which it broadcasts once per
mesh. Random operators on other tensors (dropout, activations, data) use torch's generators, which draw values in the
local order of a rank's elements.
"""

from __future__ import annotations

import weakref
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
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, RaggedDTensor
from vescale_fsdp.dtensor.spec import boxes_of
from vescale_fsdp.layout.geometry import Box, Range, run_start
from vescale_fsdp.torch_private import piece_in

aten = torch.ops.aten


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


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BLOCK_NUMEL = 1 << 16  # a piece draws up to two blocks of which it keeps only a part


def _generator(device: torch.device, *numbers: int) -> torch.Generator:
    """Return a generator that is seeded by these numbers."""
    seed = Random(" ".join(map(str, numbers))).getrandbits(63)
    return torch.Generator(device).manual_seed(seed)


def _draw(func: Op, tensor: RaggedDTensor, options: dict[str, Any]) -> RaggedDTensor:
    """Fill this rank's piece of a tensor with random values of the next stream, and return the tensor.

    Args:
        func: fills a tensor, such as ``aten.normal_.default``.
        options: its arguments, without tensor and generator.
    """
    stream = _streams.take(tensor.device_mesh)
    local = piece_in(tensor).view(-1)
    func(local[:0], **options)  # torch's own errors, on ranks without elements too
    if local.is_meta:
        return tensor
    block = local.new_empty(min(_BLOCK_NUMEL, tensor.numel()))
    at, drawn = 0, -1
    for span in _spans(tensor):
        for number in range(span.start // _BLOCK_NUMEL, -(-span.stop // _BLOCK_NUMEL)):
            first = number * _BLOCK_NUMEL
            if number != drawn:
                func(block, **options, generator=_generator(local.device, *stream, number))
                drawn = number
            part = block[max(span.start - first, 0) : span.stop - first]
            local[at : at + len(part)] = part
            at += len(part)
    return tensor


def _check(func: Op, tensor: RaggedDTensor, named: dict[str, Any]) -> None:
    """Raise for a generator or a dtype that is not supported."""
    if named.get("generator") is not None:
        raise refuse(
            func,
            tensor,
            "a torch.Generator draws for the elements of one rank",
            todo="leave generator=None and seed with vescale_fsdp.manual_seed",
        )
    dtype = named.get("dtype") or tensor.dtype
    if dtype not in _DTYPES:
        raise refuse(func, tensor, f"random values of {dtype} are not supported")


def random_fill(func: Op, args: Args, kwargs: Kwargs) -> RaggedDTensor:
    """Run normal_, uniform_ or bernoulli_, and return the tensor.

    Raises:
        UnsupportedOpError: for a generator, and for integers.
        RuntimeError: torch's, for a negative ``std`` or an empty range.
    """
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named["self"]
    _check(func, tensor, named)
    check_written(func, named, tensor)
    return _draw(func, tensor, {k: v for k, v in named.items() if k not in ("self", "generator")})


# Operators that fill their first argument, and do not read it.
_FILLS = ("cauchy_", "exponential_", "geometric_", "log_normal_", "random_")


def drawn_whole(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run any other random operator, such as dropout or exponential_, on whole tensors.

    Every rank draws all values with torch's generator, from one seed, and keeps its piece: so they are the same for any
    number of ranks, at the cost of a whole tensor in memory. What the operator reads is gathered.
    """
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None  # torch calls a rule only if an argument is ragged
    named = bind(func, args, kwargs)
    if named.get("generator") is not None:
        _check(func, like, named)
    device = piece_in(like).device
    own = _generator(device, *_streams.take(like.device_mesh))
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        # Some operators take it by position.
        args = tuple(own if name == "generator" else arg for name, arg in zip(names, args, strict=False))
        if names.index("generator") >= len(args):
            kwargs = {**kwargs, "generator": own}
        return _drawn(func, args, kwargs, like)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(own.initial_seed())
        return _drawn(func, args, kwargs, like)


def _drawn(func: Op, args: Args, kwargs: Kwargs, like: RaggedDTensor) -> Any:
    """Run a random operator on whole tensors; ``like`` is its first ragged argument."""
    if name_of(func) not in _FILLS or has_out(func):
        return (written_back if func._schema.is_mutable else gathered)(func, args, kwargs)
    check_written(func, bind(func, args, kwargs), like)
    full = torch.zeros(like.shape, dtype=like.dtype, device=piece_in(like).device)
    func(full, *args[1:], **kwargs)
    piece_in(like).copy_(cut_like(func, full, like))
    return like


def random_like(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run rand_like or randn_like: return random values with the shape and placements of the input."""
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named["self"]
    _check(func, tensor, named)
    if is_partial(tensor):
        raise refuse(func, tensor, "the tensor has pending sums")
    empty = torch.empty_like(piece_in(tensor), dtype=named.get("dtype"), device=named.get("device"))
    like = wrap_result(func, empty, tensor)
    return _draw(aten.normal_.default if "randn" in name_of(func) else aten.uniform_.default, like, {})
