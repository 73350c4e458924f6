"""Parameters for optimizer tests: the same full tensors, plain or laid over ranks in every supported way."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as stock_distribute
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor
from vescale_fsdp.layout import GroupLayout, TensorSpec, plan_group
from vescale_fsdp.layout.granularity import GranularityRule, resolve_granularity

SMALL_SHAPES: tuple[tuple[int, ...], ...] = ((1, 2), (3, 2), (5, 4), (2, 4), (15, 4))
SHAPES: tuple[tuple[int, ...], ...] = (*SMALL_SHAPES, (48, 32), (32, 80), (33, 17), (48, 32), (3, 8, 6))
REST_SHAPES: tuple[tuple[int, ...], ...] = ((7,), (50, 8))


def full_tensors(
    shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random tensors named by their place and shape, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"p{index}_{'x'.join(map(str, shape))}": torch.randn(shape, generator=generator).to(dtype)
        for index, shape in enumerate(shapes)
    }


def layout_of(tensors: dict[str, torch.Tensor], num_shards: int, rule: GranularityRule) -> GroupLayout:
    """The planner's layout of these tensors."""
    specs = [
        TensorSpec(
            fqn,
            tuple(t.shape),
            str(t.dtype).removeprefix("torch."),
            resolve_granularity(rule, fqn, t).block_numel(tuple(t.shape)),
        )
        for fqn, t in tensors.items()
    ]
    return plan_group(specs, num_shards)


def as_plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ordinary parameters."""
    return {fqn: nn.Parameter(tensor.clone()) for fqn, tensor in tensors.items()}


def as_ragged(
    tensors: dict[str, torch.Tensor], mesh: DeviceMesh, rule: GranularityRule = None
) -> dict[str, torch.Tensor]:
    """Ragged parameters as the planner lays them; on a 2-D mesh replicated over the first axis."""
    layout = layout_of(tensors, mesh.size(-1), rule)
    return {
        slot.fqn: nn.Parameter(
            distribute_tensor(
                tensors[slot.fqn],
                mesh,
                [
                    *[Replicate()] * (mesh.ndim - 1),
                    RaggedShard.from_piece_numels(slot.shape, layout.piece_numels(slot)),
                ],
            )
        )
        for slot in layout.slots
    }


def as_fsdp2(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Parameters as FSDP2 shards them: rows in torch's chunks."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return {
        fqn: nn.Parameter(stock_distribute(tensor.clone(), mesh, placements))
        for fqn, tensor in tensors.items()
    }


def set_grads(params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> None:
    """Give every parameter its part of a full gradient."""
    for fqn, param in params.items():
        param.grad = laid_like(grads[fqn], param)


def laid_like(full: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A full tensor, cut as the parameter is."""
    if not isinstance(param, DTensor):
        return full.clone()
    if isinstance(param, RaggedDTensor):
        return distribute_tensor(full, param.device_mesh, param.placements)
    return stock_distribute(full.clone(), param.device_mesh, param.placements)


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached (a collective for DTensors)."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All parameters and all of their state, in full (a collective for DTensors)."""
    found = {}
    for fqn, param in model.named_parameters():
        found[fqn] = full_value(param)
        for name, value in optimizer.state[param].items():
            found[f"{fqn}/{name}"] = full_value(torch.as_tensor(value))
    return found


def train(
    optimizer: torch.optim.Optimizer,
    params: dict[str, torch.Tensor],
    steps: range,
    change: Callable[[int, dict[str, torch.Tensor]], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Step with the same random gradients everywhere; return the full parameters."""
    dtype = next(iter(params.values())).dtype
    shapes = [tuple(p.shape) for p in params.values()]
    for step in steps:
        values = full_tensors(shapes, 100 + step, dtype).values()
        grads = dict(zip(params, values, strict=True))
        if change is not None:
            change(step, grads)
        set_grads(params, grads)
        optimizer.step()
    return {fqn: full_value(p) for fqn, p in params.items()}


def assert_same(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], spoiled: Container[str] = ()
) -> None:
    """Bitwise equality, names included; NaN only in what a test has ``spoiled``, and there at the same places."""
    assert got.keys() == expected.keys()
    assert got
    for fqn, value in expected.items():
        torch.testing.assert_close(
            got[fqn], value, rtol=0, atol=0, equal_nan=fqn in spoiled, msg=lambda m, f=fqn: f"{f}: {m}"
        )


class Wire(TorchDispatchMode):
    """Counts collectives and the bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let the DTensor unfold, so that the collectives inside come by here
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            name = func._schema.name.split("::")[1]
            if "wait" not in name:
                self.names.append(name)
                self.sent_bytes += _sent_bytes(name, args)
        return func(*args, **(kwargs or {}))


def _sent_bytes(name: str, args: tuple[Any, ...]) -> int:
    if name != "alltoall_base_":
        return 0
    send, send_numels = args[1], args[4]
    return sum(n for rank, n in enumerate(send_numels) if rank != dist.get_rank()) * send.element_size()


@contextmanager
def counted() -> Iterator[Wire]:
    """Count what happens inside."""
    with Wire() as wire:
        yield wire
