"""Programs of the device tests: each trains, saves, loads or transfers on a device, and returns tensors of the host.

A program runs on the CPU too, which is its reference. `PROGRAMS` has those of this file; `tools.gpu.parity` has more,
each with a plain model as its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import FSDPModule, fully_shard
from vescale_fsdp.checkpoint import async_save, load, save
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo, step_in_backward
from vescale_fsdp.runtime.comm.streams import Streams, streams_of
from vescale_fsdp.transfer import Transfer, describe_states, plan_transfer

WIDTH, HIDDEN, STEPS = 48, 64, 3
HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
Values = list[torch.Tensor]


@dataclass(frozen=True)
class Program:
    """Args:
    run: the program.
    world_size: its number of ranks.
    fresh: see `run_on_device`.
    apart: allowed difference from the CPU's values: of the order of sums, or of 16 or 8 bits.
    """

    run: Callable[[torch.device], Values]
    world_size: int = 2
    fresh: bool = False
    apart: float = 2e-5


PROGRAMS: dict[str, Program] = {}


def _program(name: str, **options: Any) -> Callable[[Callable[[torch.device], Values]], None]:
    def add(run: Callable[[torch.device], Values]) -> None:
        PROGRAMS[name] = Program(run, **options)

    return add


class SideStreams:
    """Streams beside the caller's; on the CPU everything runs at once."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams: Streams | None = streams_of(device)
        self._sides = [] if self._streams is None else [self._streams.new() for _ in range(count)]

    def begin(self, *read: torch.Tensor) -> None:
        """Let the side streams wait for the caller's, and read tensors of the caller's stream."""
        for side in self._sides:
            side.wait_stream(self._streams.current())  # type: ignore[union-attr]
            for (
                tensor
            ) in read:  # as any program must do whose tensor another stream reads, also in the backward
                tensor.record_stream(side)  # type: ignore[arg-type]

    def on(self, number: int) -> AbstractContextManager[Any]:
        """A context on side stream ``number``."""
        return nullcontext() if self._streams is None else self._streams.on(self._sides[number])

    def join(self, *made: torch.Tensor) -> None:
        """Let the caller's stream wait for the side streams, and read what they have made."""
        for side in self._sides:
            self._streams.current().wait_stream(side)  # type: ignore[union-attr]
            for tensor in made:
                tensor.record_stream(self._streams.current())  # type: ignore[union-attr, arg-type]


class Towers(nn.Module):
    """Towers of units, each tower after the first on a stream of its own."""

    def __init__(self, device: torch.device, count: int, depth: int = 3) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth)) for _ in range(count)
        )
        self.streams = SideStreams(device, count - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.streams.begin(x)
        ends = [x] * len(self.towers)
        for layers in zip(*self.towers, strict=True):
            for number, layer in enumerate(layers):
                with self.streams.on(number - 1) if number else nullcontext():
                    ends[number] = layer(ends[number]).tanh()
        self.streams.join(*ends[1:])
        return torch.stack(ends).sum(0)


class Language(nn.Module):
    """An embedding, layers that are units, and a head: the root is freed, and its gradients are written, early.

    Args:
        streams: where the embedding and every other layer run; None for the caller's stream.
        recomputes: whether layers are computed again in the backward.
    """

    def __init__(self, streams: SideStreams | None = None, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.streams, self.recomputes = streams, recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (8 * x).long() % 32
        y = self._aside(self.embed, tokens)
        for number, layer in enumerate(self.layers):
            if self.recomputes:
                y = y + checkpoint(layer, y, use_reentrant=False).tanh()
            else:
                y = y + (self._aside(layer, y) if number % 2 == 0 else layer(y)).tanh()
        return self.head(y)

    def _aside(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.streams is None:
            return module(x)
        self.streams.begin(x)
        with self.streams.on(0):
            y = module(x)
        self.streams.join(y)
        return y


class SideExpert(nn.Module):
    """A unit whose second layer runs on a side stream."""

    def __init__(self, streams: SideStreams) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.streams.begin(x)
        with self.streams.on(0):
            y = self.other(x).tanh()
        z = self.one(x).tanh()
        self.streams.join(y)
        return x + y + z


class Mixed(nn.Module):
    """A unit of two dtypes, with a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH).double()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).tanh().to(self.down.weight.dtype)).to(x.dtype)
        return x + self.frozen(y)


def blocks(count: int = 3) -> nn.Sequential:
    """Two-layer networks."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)) for _ in range(count))
    )


def rows(step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    # Without a wait of the host, which would order the next forward behind the optimizer's step.
    return torch.randn(4, WIDTH, generator=generator).to(device, non_blocking=True)


def shard(
    model: nn.Module, units: Sequence[nn.Module], device: torch.device, mesh: Any = None, **options: Any
) -> Any:
    """Move a model to the device, and shard it."""
    model.to(device)
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def loss_of(model: nn.Module, step: int, device: torch.device) -> torch.Tensor:
    return model(rows(step, device)).float().square().mean()


def train(
    model: nn.Module, optimizer: Any, device: torch.device, steps: Sequence[int] = range(STEPS)
) -> None:
    for step in steps:
        loss_of(model, step, device).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=rate)


def values(model: nn.Module) -> Values:
    """All parameters, whole, on the host."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    return [param.full_tensor().cpu() for param in model.parameters()]


def _trained(model: nn.Module, device: torch.device) -> Values:
    train(model, sgd(model), device)
    return values(model)


@_program("two compute streams")
def _two_towers(device: torch.device) -> Values:
    model = Towers(device, 2)
    return _trained(shard(model, [layer for tower in model.towers for layer in tower], device), device)


@_program("three compute streams, bf16", apart=0.05)
def _three_towers(device: torch.device) -> Values:
    model = Towers(device, 3)
    units = [layer for tower in model.towers for layer in tower]
    return _trained(shard(model, units, device, **HALF), device)


@_program("embedding and head in the root")
def _language(device: torch.device) -> Values:
    model = Language()
    return _trained(shard(model, list(model.layers), device), device)


@_program("embedding and head in the root, two compute streams, bf16", apart=0.05)
def _language_on_two_streams(device: torch.device) -> Values:
    model = Language(SideStreams(device, 1))
    return _trained(shard(model, list(model.layers), device, **HALF), device)


@_program("embedding and head in the root, recomputed layers")
def _recomputed_language(device: torch.device) -> Values:
    model = Language(recomputes=True)
    return _trained(shard(model, list(model.layers), device), device)


@_program("a side stream in each unit")
def _side_experts(device: torch.device) -> Values:
    streams = SideStreams(device, 1)
    model = nn.Sequential(*(SideExpert(streams) for _ in range(3)))
    return _trained(shard(model, list(model), device), device)


@_program("a side stream in each unit, and other work on it")
def _busy_side_experts(device: torch.device) -> Values:
    streams = SideStreams(device, 1)
    model = nn.Sequential(*(SideExpert(streams) for _ in range(3)))
    optimizer = sgd(shard(model, list(model), device))
    for step in range(STEPS):
        loss_of(model, step, device).backward()
        with streams.on(0):  # waits for no other stream, and is given memory that gradients had
            for _ in range(4):
                torch.ones(WIDTH, WIDTH, device=device)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@_program("replicas, two by two", world_size=4)
def _replicas(device: torch.device) -> Values:
    model = blocks()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    return _trained(shard(model, list(model), device, mesh), device)


@_program("replicas, two backwards per step", world_size=4)
def _accumulated_replicas(device: torch.device) -> Values:
    model = blocks()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    optimizer = sgd(shard(model, list(model), device, mesh))
    for step in range(STEPS):
        for part in range(2):
            loss_of(model, 2 * step + part, device).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@_program("replicas, two compute streams, bf16", world_size=4, apart=0.05)
def _replicated_towers(device: torch.device) -> Values:
    model = Towers(device, 2)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    units = [layer for tower in model.towers for layer in tower]
    return _trained(shard(model, units, device, mesh, **HALF), device)


@_program("tensor parallel", world_size=4, fresh=True)
def _tensor_parallel(device: torch.device) -> Values:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    model = blocks().to(device)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard(model, list(model), device, mesh["data"])

    def same_rows(step: int) -> torch.Tensor:  # on the ranks of a tensor
        generator = torch.Generator().manual_seed(100 * step + mesh["data"].get_local_rank())
        return torch.randn(4, WIDTH, generator=generator).to(device)

    optimizer = sgd(model)
    for step in range(STEPS):
        model(same_rows(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@_program("two dtypes and a frozen matrix in each unit")
def _mixed(device: torch.device) -> Values:
    model = nn.Sequential(*(Mixed() for _ in range(3)))
    return _trained(shard(model, list(model), device), device)


@_program("offload, two dtypes")
def _offload(device: torch.device) -> Values:
    model = nn.Sequential(*(Mixed() for _ in range(3)))
    for unit in (*model, model):
        fully_shard(
            unit,
            mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
            offload_policy=CPUOffloadPolicy(),
        )
    return _trained(model, device)


@_program("offload, an optimizer on a stream of the device")
def _offload_optimizer(device: torch.device) -> Values:
    model = blocks()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, offload_policy=CPUOffloadPolicy())
    streams = streams_of(device)
    side = None if streams is None else streams.new()
    stepped = None
    for step in range(STEPS):
        for part in range(2):  # no write between these two, so the event holds for both forwards
            if stepped is not None:
                model.set_post_optim_event(stepped)  # type: ignore[operator]
            model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            loss_of(model, 2 * step + part, device).backward()
        shards: Values = [param.to_local() for param in model.parameters()]  # type: ignore[operator]
        grads: Values = [param.grad.to_local() for param in model.parameters()]  # type: ignore[union-attr]
        with nullcontext() if streams is None or side is None else streams.on(side):
            moved = [(shard.to(device), grad.to(device)) for shard, grad in zip(shards, grads, strict=True)]
            for shard, (weight, grad) in zip(shards, moved, strict=True):
                # The host does not wait for the copy: shards are pinned.
                shard.detach().copy_(weight.detach() - grad, non_blocking=True)
            stepped = None if side is None else side.record_event()
        for param in model.parameters():
            param.grad = None
    if side is not None:
        side.record_event().synchronize()
    return values(model)


class Routed(nn.Module):
    """A unit whose experts are used by turns, on each rank another."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls = dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = x + self.experts[self.calls % 3](x).tanh()
        return y


@_program("parameters that some ranks do not use")
def _unused(device: torch.device) -> Values:
    model = nn.Sequential(*(Routed() for _ in range(3)))
    return _trained(shard(model, list(model), device), device)


@_program("unshard ahead of use")
def _unshard(device: torch.device) -> Values:
    model = shard(model := blocks(4), list(model), device)
    optimizer = sgd(model)
    for step in range(STEPS):
        handles = [block.unshard(async_op=True) for block in model]
        for handle in handles[::2]:
            handle.wait()
        loss_of(model, step, device).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


class _Stop(Exception):
    pass


@_program("exceptions in the forward and in the backward")
def _exceptions(device: torch.device) -> Values:
    model = shard(model := blocks(4), list(model), device)
    optimizer = sgd(model)

    def stop(*unused: Any) -> None:
        raise _Stop

    for step in range(STEPS):
        for arm in (model[2][1].register_forward_hook, model[1][1].register_full_backward_hook):
            hook = arm(stop)
            with suppress(_Stop):
                loss_of(model, 10 + step, device).backward()
            hook.remove()
            model.reset_iter_state()
            optimizer.zero_grad()
        train(model, optimizer, device, [step])
    return values(model)


# -- optimizers -----------------------------------------------------------------------------------------


def _optimized(
    device: torch.device,
    make: Callable[[nn.Module], Any],
    granularity: Any = None,
) -> Values:
    model = shard(model := blocks(), list(model), device, granularity=granularity)
    optimizer = make(model)
    train(model, optimizer, device)
    return values(model)


def _muon(model: nn.Module) -> Any:
    matrices, others = Muon.split_params(model)
    return Muon(matrices, lr=0.02, adamw_params=others)


@_program("AdamW", apart=1e-4)
def _adamw(device: torch.device) -> Values:
    return _optimized(device, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))


@_program("fused AdamW", apart=1e-4)
def _fused(device: torch.device) -> Values:
    return _optimized(device, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


@_program("steps in the backward, two dtypes", apart=1e-4)
def _in_backward(device: torch.device) -> Values:
    model = shard(model := nn.Sequential(*(Mixed() for _ in range(3))), list(model), device)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, foreach=True)
    step_in_backward(model, optimizer)
    train(model, optimizer, device)
    return values(model)


@_program("Muon", apart=2e-3)
def _muons(device: torch.device) -> Values:
    return _optimized(device, _muon, Muon.granularity())


@_program("Shampoo", apart=2e-3)
def _shampoo(device: torch.device) -> Values:
    def make(model: nn.Module) -> Any:
        return Shampoo(model.parameters(), lr=1e-3, block_size=32, update_every=2, eps=1e-4)

    return _optimized(device, make, Shampoo.granularity(block_size=32))


@_program("AdamW8bit", apart=2e-2)
def _adamw8bit(device: torch.device) -> Values:
    def make(model: nn.Module) -> Any:
        return AdamW8bit(model.parameters(), lr=0.01, min_8bit_numel=1024)

    return _optimized(device, make, AdamW8bit.granularity(min_8bit_numel=1024))


# -- checkpoints and transfers --------------------------------------------------------------------------


def _folder() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        names: list[Any] = [folder if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(names, device=torch.device("cpu"))
        yield Path(names[0])
        dist.barrier()


@_program("a save in the background, and its load", apart=1e-4)
def _async_save(device: torch.device) -> Values:
    model = shard(model := blocks(), list(model), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: Values = []
    for folder in _folder():
        train(model, optimizer, device, [0])
        handles = []
        for step in (1, 2):
            state = {"model": model, "optimizer": optimizer}
            loss_of(model, step, device).backward()
            handles.append(async_save(folder / str(step), state, optimizer=optimizer))
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.wait()
        found += values(model)
        for step in (1, 2):
            load(folder / str(step), {"model": model, "optimizer": optimizer})
            train(model, optimizer, device, [step])
            found += values(model)
    return found


@_program("a save and a load into another layout")
def _save(device: torch.device) -> Values:
    model = shard(model := blocks(), list(model), device)
    train(model, sgd(model), device)
    other = shard(blocks(), [], device)
    for folder in _folder():
        save(folder / "weights", model.state_dict())
        load(folder / "weights", other.state_dict())
    return values(other)


@_program("transfers")
def _transfers(device: torch.device) -> Values:
    model = shard(model := blocks(), list(model), device)
    served = shard(blocks(), [], device)
    optimizer = sgd(model)
    source, target = dict(model.named_parameters()), dict(served.named_parameters())
    plan = plan_transfer(*describe_states(source, target))
    group = None if device.type == "cpu" else dist.new_group()  # training uses the other one meanwhile
    found: Values = []
    for keep_old in (False, True):
        transfer = Transfer(plan, keep_old=keep_old, verify=keep_old, group=group)
        for step in range(2):
            train(model, optimizer, device, [step])
            transfer.run(source, target)
            found += values(served)
        train(model, optimizer, device, [2])
        handle = transfer.start(source, target, snapshot=True)
        train(model, optimizer, device, [3])
        handle.wait()
        found += values(served)
    return found
