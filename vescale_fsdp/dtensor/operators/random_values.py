"""Random values of ragged tensors that depend on the seed alone, not on ranks, cuts or granularity.

Element i of a tensor gets number i of a stream (`philox`); every random call on a ragged tensor takes the next
stream. So a model that is initialised by the same calls is bit for bit the same on 1, 2 or 7 ranks. Calls on
ragged tensors are collective in this one sense: all ranks make them in the same order.

    vescale_fsdp.manual_seed(0)           # the same on all ranks
    model = fully_shard(...)              # on the meta device
    model.to_empty(device="cuda"); model.apply(reset)     # torch.nn.init, tensor.normal_(), ...

Without `manual_seed`, the seed is `torch.initial_seed()` of the mesh's first rank, agreed by one broadcast.
Random operators on other tensors (dropout, activations, data) stay torch's, with torch's generators, which
cannot do this: they draw for the elements a rank holds, in the order in which it holds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives import broadcast_in_place, wait_for
from vescale_fsdp.dtensor.operators.arguments import bind, check_written, refuse, wrap_result
from vescale_fsdp.dtensor.operators.philox import normals, uniforms
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import boxes_of
from vescale_fsdp.layout.geometry import Box, FlatRange, run_start


class _StreamCounter:
    """The seed, and the number of the next stream. One per process, as torch's default generator is."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.next_stream = 0

    def take(self, mesh: DeviceMesh) -> tuple[int, int]:
        """(seed, stream) for one random call."""
        if self.seed is None:
            self.seed = _agreed_seed(mesh)
        self.next_stream += 1
        return self.seed, self.next_stream - 1


_streams = _StreamCounter()


def manual_seed(seed: int) -> None:
    """Seed the random values of ragged tensors. Call it with the same seed on every rank.

    Args:
        seed: any int; its lowest 64 bits count.

    Examples:
        >>> manual_seed(0)
        >>> get_rng_state()
        (0, 0)
    """
    _streams.seed, _streams.next_stream = seed & 0xFFFFFFFFFFFFFFFF, 0


def get_rng_state() -> tuple[int | None, int]:
    """(seed, streams used so far), to be stored with a checkpoint.

    Examples:
        >>> manual_seed(7)
        >>> get_rng_state()
        (7, 0)
    """
    return _streams.seed, _streams.next_stream


def set_rng_state(state: tuple[int | None, int]) -> None:
    """Inverse of `get_rng_state`.

    Examples:
        >>> state = get_rng_state()
        >>> set_rng_state(state)
    """
    _streams.seed, _streams.next_stream = state


def _agreed_seed(mesh: DeviceMesh) -> int:
    seed = torch.tensor(torch.initial_seed() & 0x7FFFFFFFFFFFFFFF, dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        wait_for(broadcast_in_place(seed, mesh.get_group(axis), 0))
    return int(seed.item())


def _spans(tensor: RaggedDTensor) -> list[FlatRange]:
    """Flat ranges of the global tensor that this rank holds, in the order of its local elements."""
    shape = tuple(tensor.shape)
    spans: list[FlatRange] = []
    for box in boxes_of(tensor._spec):
        for run in _runs(shape, box):
            if spans and spans[-1].stop == run.start:
                spans[-1] = FlatRange(spans[-1].start, run.stop)
            else:
                spans.append(run)
    return spans


def _runs(shape: tuple[int, ...], box: Box) -> list[FlatRange]:
    """The contiguous runs of a box. One, unless another mesh axis cuts a dim that is not the first."""
    start = run_start(shape, box)
    if start is not None:
        return [FlatRange(start, start + box.numel)]
    dim = next(d for d in range(len(shape)) if box.sizes[d] > 1)
    return [
        run for index in range(box.sizes[dim]) for run in _runs(shape, box.chunk(dim, box.sizes[dim], index))
    ]


# Bits of a uniform value on [0, 1) that a dtype keeps without rounding.
_SIGNIFICAND_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _draw(kind: str, tensor: RaggedDTensor, a: float, b: float) -> torch.Tensor:
    """This rank's values: uniform on [a, b), normal of mean a and deviation b, or 1 with probability a."""
    seed, stream = _streams.take(tensor.device_mesh)
    local = tensor._local_tensor
    spans, device = _spans(tensor), local.device
    if kind == "normal":
        values = normals(spans, seed, stream, device) * b + a
    elif kind == "bernoulli":
        values = (uniforms(spans, seed, stream, 32, device) < a).to(torch.float64)
    else:
        values = uniforms(spans, seed, stream, _SIGNIFICAND_BITS[local.dtype], device) * (b - a) + a
        # Rounding to the dtype may reach b, which is not in [a, b).
        rounded = values.to(local.dtype).to(torch.float64)
        values = torch.where((rounded >= b) & (b > a), torch.full_like(values, a), values)
    return values.to(local.dtype).view(local.shape)


def _check(func: torch._ops.OpOverload, tensor: RaggedDTensor, named: dict[str, Any]) -> None:
    if named.get("generator") is not None:
        raise refuse(
            func,
            tensor._spec,
            "a torch.Generator draws for the elements of one rank",
            todo="leave generator=None and seed with vescale_fsdp.manual_seed",
        )
    dtype = named.get("dtype") or tensor.dtype
    if dtype not in _SIGNIFICAND_BITS:
        raise refuse(func, tensor._spec, f"random values of {dtype} are not drawn by position")


def random_fill(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedDTensor:
    """normal_, uniform_ and bernoulli_."""
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named["self"]
    _check(func, tensor, named)
    check_written(func, named, tensor)
    kind = func._schema.name.removeprefix("aten::").rstrip("_")
    if kind == "normal":
        a, b = named.get("mean", 0.0), named.get("std", 1.0)
        if b < 0:
            raise RuntimeError(f"normal_ expects std >= 0.0, but found std {b}")
    elif kind == "uniform":
        a, b = named.get("from", 0.0), named.get("to", 1.0)
        if a > b:
            raise RuntimeError(f"uniform_ expects from <= to, but found {a} > {b}")
    else:
        a, b = named.get("p", 0.5), 0.0
    tensor._local_tensor.copy_(_draw(kind, tensor, a, b))
    return tensor


def random_like(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """rand_like and randn_like."""
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named["self"]
    _check(func, tensor, named)
    if any(p.is_partial() for p in tensor.placements):
        raise refuse(func, tensor._spec, "its sums are not done")
    empty = torch.empty_like(tensor._local_tensor, dtype=named.get("dtype"), device=named.get("device"))
    like = wrap_result(func, empty, tensor)
    kind = "normal" if "randn" in func._schema.name else "uniform"
    like._local_tensor.copy_(_draw(kind, like, 0.0, 1.0))
    return like
