"""Programs of the device tests, drawn from a seed: each trains on a device, and returns tensors of the host.

A program is a value: a model, a mesh, options of sharding, an optimizer, and events at moments of the training loop.
It runs on the CPU too, which is its reference. `tools.gpu.parity` has a case for each switch of `fully_shard`, with a
plain model as its reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import FSDPModule, Rows, fully_shard
from vescale_fsdp.checkpoint import async_save, load, save
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo, step_in_backward
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm.streams import Streams, streams_of
from vescale_fsdp.transfer import Transfer, describe_states, plan_transfer

WIDTH, HIDDEN = 48, 64
Values = list[torch.Tensor]


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


def rows(step: int, device: torch.device, number: int) -> torch.Tensor:
    """A batch of a step, with the number of the rank that it is for."""
    generator = torch.Generator().manual_seed(100 * step + number)
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
    return model(rows(step, device, dist.get_rank())).float().square().mean()


def train(model: nn.Module, optimizer: Any, device: torch.device, steps: Sequence[int] = range(3)) -> None:
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


class Recomputed(nn.Module):
    """A unit that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


class Branches(nn.Module):
    """A unit whose data decides which of two layers runs: the host waits for the device in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.low if torch.signbit(x.sum()).item() else self.high)(x).tanh()


def _chain(kind: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    return nn.Sequential(*(kind(*arguments) for _ in range(3)))


def units_of(model: nn.Module) -> list[Any]:
    """The modules of a model that become units, or are, without the root."""
    match model:
        case Towers():
            return [layer for tower in model.towers for layer in tower]  # type: ignore[union-attr]
        case Language():
            return list(model.layers)
        case _:
            return list(model.children())


# -- programs -------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[torch.device], nn.Module]] = {
    "blocks": lambda device: blocks(),
    "mixed dtypes, frozen matrices": lambda device: nn.Sequential(*(Mixed() for _ in range(3))),
    "two towers on two streams": lambda device: Towers(device, 2),
    "three towers on three streams": lambda device: Towers(device, 3),
    "side streams in units": lambda device: _chain(SideExpert, SideStreams(device, 1)),
    "experts by turns": lambda device: _chain(Routed),
    "branches by data": lambda device: _chain(Branches),
    "recomputed units": lambda device: _chain(Recomputed),
    "embedding and head": lambda device: Language(),
    "embedding and head, two streams": lambda device: Language(SideStreams(device, 1)),
    "embedding and head, recomputed": lambda device: Language(recomputes=True),
}
MESHES = ("ranks", "replicas", "tensor")  # and "nodes": replicas over which the optimizer is sharded too
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bf16 sums": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "codes": {"mp_policy": QuantizedGather(codecs=Fp8Blocks(1, 4)), "granularity": Rows(1)},
}
OPTIMIZERS = ("SGD", "AdamW", "fused AdamW", "in backward", "Muon", "Shampoo", "AdamW8bit")
GRANULARITIES = {
    "Muon": Muon.granularity(),
    "Shampoo": Shampoo.granularity(block_size=32),
    "AdamW8bit": AdamW8bit.granularity(min_8bit_numel=1024),
}
# Allowed difference from the CPU's values: of the order of sums, or of 16 or 8 bits.
APART = {"fp32": 2e-5, "bf16": 0.05, "bf16 sums": 0.05, "codes": 0.1}
APART |= {"SGD": 0.0, "AdamW": 1e-3, "fused AdamW": 1e-3, "in backward": 1e-3}
APART |= {"Muon": 5e-3, "Shampoo": 5e-3, "AdamW8bit": 3e-2}

MOMENTS = ("before the forward", "before the backward", "before the step", "after the step")
EVENTS: dict[str, tuple[str, ...]] = {  # and the moments at which each may happen
    "full tensors": MOMENTS,
    "evaluation": MOMENTS,
    "work on a side stream": MOMENTS,
    "another model on a side stream": MOMENTS,
    "another model, freed": MOMENTS,
    "units gathered ahead": ("before the forward",),
    "an exception in a forward": ("before the forward",),
    "an exception in a backward": ("before the forward",),
    "a save in the background": ("before the step", "after the step"),
    "a restore": ("after the step",),
    "a save, loaded into another layout": ("after the step",),
    "an average, swapped in": ("after the step",),
    "a transfer": ("after the step",),
}


EXCEPTIONS = ("an exception in a forward", "an exception in a backward")
ELSEWHERE = ("a save, loaded into another layout", "a transfer")
OTHER_MODELS = ("another model on a side stream", "another model, freed")


@dataclass(frozen=True)
class Program:
    """A training on a device.

    Args:
        model, policy, optimizer: keys of the tables above.
        mesh: one axis; two replicas; two nodes over which the optimizer is sharded; or two ranks per tensor.
        keeps: whether units stay gathered after the forward; a number: parts of them, over so many ranks.
        micro_batches: backwards per step.
        syncs: which backwards reduce: each; the last; or each, but over replicas the last.
        events: (step, moment, event).
    """

    model: str = "blocks"
    mesh: str = "ranks"
    world_size: int = 2
    policy: str = "fp32"
    optimizer: str = "SGD"
    keeps: bool | int = False
    offload: bool = False
    is_narrow: bool = False
    micro_batches: int = 1
    syncs: str = "each"
    steps: int = 3
    events: tuple[tuple[int, str, str], ...] = ()

    @property
    def is_fresh(self) -> bool:
        """Whether the program needs new processes: see `run_on_device`."""
        return self.mesh == "tensor"

    @property
    def apart(self) -> float:
        """Allowed difference from the CPU's values."""
        return APART[self.policy] + APART[self.optimizer]

    def run(self, device: torch.device) -> Values:
        """Train; returns what events have found, and the parameters at the end."""
        with ExitStack() as ends:
            return _Run(self, device, ends).train()


def draw(seed: int) -> Program:
    """Draw a program; equal seeds give equal programs."""
    pick = random.Random(seed)
    mesh = pick.choices(MESHES, (6, 3, 1))[0]
    world_size = {"ranks": pick.choice((2, 2, 3)), "replicas": 4, "tensor": 4}[mesh]
    if mesh == "replicas" and pick.random() < 0.1:
        world_size = 8  # two nodes of four ranks
    model = "blocks" if mesh == "tensor" else pick.choice(list(MODELS))
    policy = (
        pick.choice(list(POLICIES))
        if model == "blocks" and mesh == "ranks"
        else pick.choice(("fp32", "bf16"))
    )
    offload = policy == "fp32" and mesh != "tensor" and pick.random() < 0.2
    if mesh != "ranks" or offload or policy != "fp32" or model.startswith("mixed"):
        optimizer = pick.choice(OPTIMIZERS[:2] if mesh == "tensor" or offload else OPTIMIZERS[:4])
    else:
        optimizer = pick.choice(OPTIMIZERS)
    # torch 2.11's eigh ends processes on this device in some runs; the cause is not known.
    if optimizer == "Shampoo" and torch.__version__ < "2.12":
        optimizer = "SGD"
    in_backward = optimizer == "in backward"
    micro_batches = 1 if in_backward else pick.choice((1, 1, 2))
    syncs = pick.choice(("each", "last") + (("last over replicas",) if mesh == "replicas" else ()))
    steps = pick.choice((2, 3))
    left_out = EXCEPTIONS if in_backward else ()
    if offload or mesh == "tensor":
        left_out += ELSEWHERE
    if mesh == "tensor":
        left_out += OTHER_MODELS
    possible = [event for event in EVENTS if event not in left_out]
    events = []
    for _ in range(pick.choice((1, 2, 3))):
        event = pick.choice(possible)
        events.append((pick.randrange(steps), pick.choice(EVENTS[event]), event))
    # Drawn apart, so that the rest of the programs stays as it was.
    is_hybrid = mesh == "replicas" and random.Random(f"nodes {seed}").random() < 0.5
    return Program(
        model=model,
        mesh="nodes" if is_hybrid else mesh,
        world_size=world_size,
        policy=policy,
        optimizer=optimizer,
        keeps=pick.choice(
            (False, False, True, world_size // 2 if world_size == 4 and mesh == "ranks" else False)
        ),
        offload=offload,
        is_narrow=pick.random() < 0.3,
        micro_batches=micro_batches,
        syncs="each" if micro_batches == 1 else syncs,
        steps=steps,
        events=tuple(sorted(events, key=lambda each: (each[0], MOMENTS.index(each[1])))),
    )


class _Stop(Exception):
    pass


class _Run:
    """One run of a program on one device."""

    def __init__(self, program: Program, device: torch.device, ends: ExitStack) -> None:
        self.program, self.device, self.ends = program, device, ends
        self.found: Values = []
        self.mesh = self._mesh()
        self.model = self._sharded(MODELS[program.model](device))
        self.params = list(self.model.parameters())  # the sharded ones, also while units are gathered
        self.optimizer = self._optimizer()
        self.side = SideStreams(device, 1)
        self.saves: list[tuple[Path, Any]] = []
        self.average: Values = []

    def _mesh(self) -> DeviceMesh:
        size, kind = self.program.world_size, self.device.type
        pair = ("data", "tensor") if self.program.mesh == "tensor" else ("replicate", "shard")
        names = None if self.program.mesh == "ranks" else pair
        return init_device_mesh(kind, (2, size // 2) if names else (size,), mesh_dim_names=names)

    def _sharded(self, model: nn.Module) -> Any:
        program, mesh = self.program, self.mesh
        if program.mesh == "tensor":
            model.to(self.device)
            for block in model.children():
                parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = mesh["data"]
        options: dict[str, Any] = {"reshard_after_forward": program.keeps or True, **POLICIES[program.policy]}
        if program.mesh == "nodes":
            options["shard_optimizer_over"] = "replicate"
        if program.keeps is True:
            options["reshard_after_forward"] = False
        if program.optimizer in GRANULARITIES:
            options["granularity"] = GRANULARITIES[program.optimizer]
        if program.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        else:
            model.to(self.device)
        for unit in (*units_of(model), model):
            fully_shard(unit, mesh=mesh, **options)
        sharded: Any = model
        if program.is_narrow:
            sharded.set_narrow_reduction(True)
        return sharded

    def _optimizer(self) -> Any:
        params = [param for param in self.params if param.requires_grad]
        match self.program.optimizer:
            case "SGD":
                return torch.optim.SGD(params, lr=0.5)
            case "AdamW":
                return torch.optim.AdamW(params, lr=0.01)
            case "fused AdamW":
                return torch.optim.AdamW(params, lr=0.01, fused=True)
            case "in backward":
                optimizer = torch.optim.AdamW(params, lr=0.01, foreach=True)
                step_in_backward(self.model, optimizer)
                return optimizer
            case "Muon":
                matrices, others = Muon.split_params(self.model)
                return Muon(matrices, lr=0.02, adamw_params=others)
            case "Shampoo":
                return Shampoo(params, lr=1e-3, block_size=32, update_every=2, eps=1e-4)
            case _:
                return AdamW8bit(params, lr=0.01, min_8bit_numel=1024)

    # -- the loop -----------------------------------------------------------------------------------------

    def train(self) -> Values:
        """Run all steps; returns what was found."""
        for step in range(self.program.steps):
            for micro in range(self.program.micro_batches):
                is_last = micro == self.program.micro_batches - 1
                if self.program.syncs == "last":
                    self.model.set_requires_gradient_sync(is_last)
                elif self.program.syncs == "last over replicas":
                    self.model.set_requires_all_reduce(is_last)
                if micro == 0:
                    self._happen(step, "before the forward")
                loss = self._loss(10 * step + micro)
                if is_last:
                    self._happen(step, "before the backward")
                loss.backward()
            self._happen(step, "before the step")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._happen(step, "after the step")
        for folder, handle in self.saves:
            handle.wait()
            self._load(folder)
            self.found += values(self.model)
        return self.found + values(self.model)

    def _loss(self, step: int) -> torch.Tensor:
        return self.model(self._rows(step)).float().square().mean()

    def _rows(self, step: int) -> torch.Tensor:
        number = self.mesh["data"].get_local_rank() if self.program.mesh == "tensor" else dist.get_rank()
        return rows(step, self.device, number)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def _load(self, folder: Path) -> None:
        load(folder, self._state())

    # -- events -------------------------------------------------------------------------------------------

    def _happen(self, step: int, moment: str) -> None:
        for number, (at, when, event) in enumerate(self.program.events):
            if (at, when) == (step, moment):
                self._act(event, 1000 + 10 * number)

    def _act(self, event: str, number: int) -> None:
        match event:
            case "full tensors":
                self.found += [param.full_tensor().detach().cpu() for param in self.params[:3]]  # type: ignore[operator]
            case "evaluation":
                with torch.no_grad():
                    self.found.append(self.model(self._rows(number)).float().cpu())
            case "work on a side stream":
                with self.side.on(0):  # waits for no other stream, and is given memory that gradients had
                    for _ in range(4):
                        torch.ones(WIDTH, WIDTH, device=self.device)
            case "another model on a side stream":
                self._use_another(number, self.side)
            case "another model, freed":
                self._use_another(number, None)
            case "units gathered ahead":
                handles = [unit.unshard(async_op=True) for unit in units_of(self.model)]
                for handle in handles[::2]:
                    handle.wait()
            case "an exception in a forward" | "an exception in a backward":
                self._stop_in(event, number)
            case "a save in the background":
                folder = self.ends.enter_context(shared_folder())
                handle = async_save(folder / "step", self._state(), optimizer=self.optimizer)
                self.saves.append((folder / "step", handle))
            case "a restore":
                for folder, handle in self.saves[-1:]:
                    handle.wait()
                    self._load(folder)
            case "a save, loaded into another layout":
                self._save_elsewhere()
            case "an average, swapped in":
                self._swap_average(number)
            case "a transfer":
                self._transfer()

    def _use_another(self, number: int, side: SideStreams | None) -> None:
        """Train a step of a second model, on the caller's stream or aside; it is freed when this returns."""
        other = shard(model := blocks(2), list(model), self.device)
        x = rows(number, self.device, dist.get_rank())
        if side is not None:
            side.begin(x)
        with nullcontext() if side is None else side.on(0):
            other(x).square().mean().backward()
            grads = [param.grad.to_local() for param in other.parameters()]
        if side is not None:
            side.join(*grads)
        self.found += [grad.cpu() for grad in grads if grad.numel()]

    def _stop_in(self, event: str, number: int) -> None:
        def stop(*unused: Any) -> None:
            raise _Stop

        unit = units_of(self.model)[-2]
        arm = unit.register_full_backward_hook if event.endswith("backward") else unit.register_forward_hook
        hook = arm(stop)
        with suppress(_Stop):
            self._loss(number).backward()
        hook.remove()
        self.model.reset_iter_state()
        self.optimizer.zero_grad()

    def _save_elsewhere(self) -> None:
        torch.manual_seed(1)
        other = shard(MODELS[self.program.model](self.device), [], self.device)
        with shared_folder() as folder:
            save(folder / "weights", self.model.state_dict())
            load(folder / "weights", other.state_dict())
        self.found += values(other)

    @torch.no_grad()
    def _swap_average(self, number: int) -> None:
        """Average the parameters, evaluate with the average in their place, and put them back."""
        self.average = self.average or [torch.zeros_like(param) for param in self.params]
        torch._foreach_lerp_(self.average, self.params, 0.5)
        kept = [param.detach().clone() for param in self.params]
        torch._foreach_copy_(self.params, self.average)
        self.found.append(self.model(self._rows(number)).float().cpu())
        torch._foreach_copy_(self.params, kept)

    def _transfer(self) -> None:
        served = shard(MODELS[self.program.model](self.device), [], self.device)
        source, target = dict(self.model.named_parameters()), dict(served.named_parameters())
        plan = plan_transfer(*describe_states(source, target))
        group = (
            None if self.device.type == "cpu" else dist.new_group()
        )  # training uses the other one meanwhile
        handle = Transfer(plan, keep_old=True, verify=True, group=group).start(source, target, snapshot=True)
        with torch.no_grad():
            torch._foreach_mul_(self.params, 0.5)
        handle.wait()
        self.found += values(served)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see, removed when all have left."""
    with TemporaryDirectory() as folder:
        names: list[Any] = [folder if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(names, device=torch.device("cpu"))
        yield Path(names[0])
        dist.barrier()
