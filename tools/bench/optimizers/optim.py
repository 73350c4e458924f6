"""Optimizers against alternatives: steps of Muon and AdamW8bit, collectives and bytes, bytes of state, and loss curves.

    python tools/bench/optimizers/optim.py   Muon and AdamW8bit on 2 and 4 gloo ranks, state bytes
    python tools/bench/optimizers/optim.py --json optim.json
    python tools/bench/optimizers/optim.py --curves 200 --picture loss.svg   draw losses of four optimizers too

Alternatives to Muon: torch.optim.Muon on FSDP2's DTensors, and gathering every update on every rank. The alternative to
AdamW8bit: torchao's on FSDP2's DTensors, which compiles a function per shape of parameter. All alternate in the same
processes, step by step. Figures are medians over the steps: CPU seconds of the process, mean of the ranks, and wall
seconds of the slowest rank. Bytes are counted per rank from the collectives' sizes: (N-1)/N of the buffer for
reductions and gathers, the bytes sent for all-to-alls.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[3]))

from examples.corpus import Batches, read_corpus
from examples.llama import Llama, LlamaShape
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp import fully_shard
from vescale_fsdp.layout.granularity import Flat, Tiles, Whole
from vescale_fsdp.optim import AdamW8bit, AdamWOptions, Muon, Shampoo
from vescale_fsdp.torch_private import local_of

SHAPES = {
    "small": LlamaShape(
        hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, head_size=32, mlp_size=704
    ),
    "large": LlamaShape(
        hidden_size=768, num_layers=4, num_heads=12, num_kv_heads=4, head_size=64, mlp_size=2048
    ),
}
RIVALS = ("ours", "ours on FSDP2", "ours, whole matrices", "torch.optim.Muon", "gather to all")


class Wire(TorchDispatchMode):
    """Collectives of this rank, and the bytes that it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.sent_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # decompose it: its collectives are counted when they are called
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.collectives += 1
            self.sent_bytes += _bytes_sent(name, args)
        return func(*args, **(kwargs or {}))


def _bytes_sent(name: str, args: tuple[Any, ...]) -> float:
    """Bytes that one rank sends in a collective of this name."""
    world = dist.get_world_size()
    others = world - 1

    def size(value: Any) -> int:
        tensors = value if isinstance(value, (list, tuple)) else [value]
        return sum(t.numel() * t.element_size() for t in tensors)

    if name == "alltoall_base_":
        own = args[4][dist.get_rank()] * args[1].element_size()
        return size(args[1]) - own
    if "gather" in name:
        return size(args[1] if name.startswith("_") or name.endswith("_") else args[0]) * others
    if "reduce_scatter" in name:
        return size(args[1] if name.endswith("_") else args[0]) * others / world
    if "reduce" in name:
        return 2 * size(args[0]) * others / world
    if "broadcast" in name:
        return size(args[0]) * others / world
    raise ValueError(f"no rule for the bytes of {name}")


class GatherToAll:
    """A simple distributed Muon: every rank gathers every update in bf16 and iterates on all matrices."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.inner = torch.optim.Muon(params, lr=0.02)
        self.params = params
        self.buffers = [torch.zeros_like(p) for p in params]

    def step(self) -> None:
        """One step with torch.optim.Muon's arithmetic on gathered matrices."""
        with torch.no_grad():
            for param, buffer in zip(self.params, self.buffers, strict=True):
                assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
                buffer.lerp_(param.grad, 0.05)
                nesterov = param.grad.lerp(buffer, 0.95).to(torch.bfloat16)
                assert isinstance(nesterov, DTensor)
                update = nesterov.full_tensor()
                whole = nn.Parameter(torch.zeros_like(update, dtype=torch.float32))
                whole.grad = update.float()
                torch.optim.Muon([whole], lr=0.02, momentum=0.0, nesterov=False, weight_decay=0.0).step()
                start = sum(len(c) for c in whole.chunk(param.device_mesh.size())[: dist.get_rank()])
                local = param.to_local()
                local.mul_(1 - 0.002).add_(whole[start : start + len(local)])


def matrices_on(rival: str, mesh: DeviceMesh, scale: str) -> Any:
    """One of the compared optimizers, over the hidden matrices of the model; gradients stay the same in all steps."""
    torch.manual_seed(0)
    model = Llama(SHAPES[scale])
    if rival in ("torch.optim.Muon", "gather to all", "ours on FSDP2"):
        for layer in model.model.layers:
            torch_fully_shard(layer, mesh=mesh)
    else:
        rule = Whole("matrix") if "whole" in rival else Muon.granularity()
        if "whole" in rival:  # one unit, so that its whole matrices are spread over the ranks
            fully_shard(list(model.model.layers), mesh=mesh, granularity=rule)
        else:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, granularity=rule)
    params = [p for layer in model.model.layers for p in layer.parameters() if p.ndim == 2]
    draw_grads(params)
    if rival == "torch.optim.Muon":
        return torch.optim.Muon(params, lr=0.02)
    return GatherToAll(params) if rival == "gather to all" else Muon(params, lr=0.02)


def draw_grads(params: Sequence[nn.Parameter]) -> None:
    """Random gradients, the same in all steps."""
    generator = torch.Generator().manual_seed(1)
    for param in params:
        assert isinstance(param, DTensor)
        grad = torch.zeros_like(param)
        local_of(grad).normal_(generator=generator)
        param.grad = grad


def alternate(steps: int, optimizers: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Median CPU seconds of a step (mean of the ranks), and median wall seconds until all ranks have stepped."""
    cpu: dict[str, list[float]] = {name: [] for name in optimizers}
    wall: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(steps + 2):
        for name, optimizer in optimizers.items():
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            optimizer.step()
            spent = torch.tensor(time.process_time() - start_cpu_s, dtype=torch.float64)
            dist.all_reduce(spent)
            if number > 1:  # the first steps plan, compile and warm up
                wall[name].append(time.perf_counter() - start_s)
                cpu[name].append(spent.item() / dist.get_world_size())
    medians = [{name: statistics.median(each) for name, each in times.items()} for times in (cpu, wall)]
    return medians[0], medians[1]


def muon_worker(rank: int, world: int, folder: str, steps: int, out: str, scale: str) -> None:
    """Worker: time and count the steps of all optimizers, alternating."""
    _join(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,))
    optimizers = {rival: matrices_on(rival, mesh, scale) for rival in RIVALS}
    wires: dict[str, tuple[int, float]] = {}
    cpu, wall = alternate(steps, optimizers)
    for rival, optimizer in optimizers.items():
        with Wire() as wire:
            optimizer.step()
        sent = torch.tensor([float(wire.collectives), wire.sent_bytes])
        dist.all_reduce(sent)
        wires[rival] = (round(sent[0].item() / world), sent[1].item() / world)
    if rank == 0:
        Path(out).write_text(json.dumps({"cpu": cpu, "wall": wall, "wires": wires}))
    dist.destroy_process_group()


def muon_rows(world: int, steps: int, scale: str) -> list[Row]:
    """Rows of Muon on ``world`` ranks."""
    found = _spawn(muon_worker, world, steps, scale)
    wires = found["wires"]
    rows = []
    for ours in RIVALS[:3]:
        for rival in RIVALS[3:]:
            case = f"Muon step, {scale}, {world} ranks, {ours}"
            target = "<= 0.10" if world == 2 and ours == "ours" and rival == "torch.optim.Muon" else None
            rows.append(Row(case, "CPU time", "s", found["cpu"][ours], found["cpu"][rival], rival, target))
            rows.append(Row(case, "time", "s", found["wall"][ours], found["wall"][rival], rival))
            rows.append(Row(case, "sent per rank", "MB", wires[ours][1] / 1e6, wires[rival][1] / 1e6, rival))
            rows.append(Row(case, "collectives", "1", wires[ours][0], wires[rival][0], rival))
    whole = wires["ours, whole matrices"][0]
    rows.append(
        Row(
            f"Muon, whole matrices, {scale}, {world} ranks",
            "collectives in step()",
            "1",
            whole,
            target="<= 0",
        )
    )
    return rows


ADAMS = ("ours, compiled", "ours, eager", "torchao")


def adam_on(name: str, mesh: DeviceMesh, scale: str) -> Any:
    """One of the compared 8-bit optimizers, over all parameters of the model."""
    torch.manual_seed(0)
    model = Llama(SHAPES[scale])
    units = [*model.model.layers, model]
    if name == "torchao":
        for unit in units:
            torch_fully_shard(unit, mesh=mesh)
    else:
        for unit in units:
            fully_shard(unit, mesh=mesh, granularity=AdamW8bit.granularity())
    params = list(model.parameters())
    draw_grads(params)
    if name == "torchao":
        return importlib.import_module("torchao.optim").AdamW8bit(params, lr=1e-3)
    return AdamW8bit(params, lr=1e-3, compiled=name == "ours, compiled")


def adam_worker(rank: int, world: int, folder: str, steps: int, out: str, scale: str) -> None:
    """Worker: time the steps of the 8-bit optimizers, alternating."""
    _join(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,))
    names = ADAMS if importlib.util.find_spec("torchao") else ADAMS[:2]
    cpu, wall = alternate(steps, {name: adam_on(name, mesh, scale) for name in names})
    if rank == 0:
        Path(out).write_text(json.dumps({"cpu": cpu, "wall": wall}))
    dist.destroy_process_group()


def adam_rows(world: int, steps: int, scale: str) -> list[Row]:
    """Rows of AdamW8bit on ``world`` ranks; without a rival if torchao is not installed."""
    found = _spawn(adam_worker, world, steps, scale)
    rows = []
    for ours in ADAMS[:2]:
        case = f"AdamW8bit step, {scale}, {world} ranks, {ours}"
        for metric, times in (("CPU time", found["cpu"]), ("time", found["wall"])):
            rival = times.get("torchao")
            named = rival is not None and world == 2 and metric == "CPU time" and ours == ADAMS[0]
            rows.append(
                Row(
                    case,
                    metric,
                    "s",
                    times[ours],
                    rival,
                    "torchao" if rival else None,
                    "<= 0.20" if named else None,
                )
            )
    return rows


def state_rows() -> list[Row]:
    """Rows of AdamW's state in bytes per parameter with 8-bit state, measured on the tensors."""
    rows = []
    for block, most in ((Flat(256), "<= 2.035"), (Flat(2048), "<= 2.008"), (Tiles(32, 32), "<= 2.01")):
        params = [p for p in Llama(SHAPES["small"]).parameters() if p.ndim == 2]
        state = AdamW8bit(params, block=block).state
        held = sum(t.numel() * t.element_size() for parts in state.values() for t in parts.values())
        rows.append(
            Row(
                f"AdamW8bit, {block}",
                "state per parameter",
                "B",
                held / sum(p.numel() for p in params),
                target=most,
            )
        )
    return rows


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the loss curves; parts that AdamW updates have AdamW's settings."""
    adamw = AdamWOptions(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    matrices, rest = Muon.split_params(model)
    if name == "Muon":
        return Muon(matrices, lr=0.02, weight_decay=0.1, adamw_params=rest, adamw=adamw)
    if name == "Shampoo":
        options: dict[str, Any] = {"block_size": 192, "update_every": 10, "graft_beta2": 0.95, "eps": 1e-8}
        return Shampoo(
            matrices, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, **options, adamw_params=rest, adamw=adamw
        )
    params = list(model.parameters())
    cls: Any = AdamW8bit if name == "AdamW8bit" else torch.optim.AdamW
    return cls(params, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


GRANULARITIES: dict[str, Any] = {
    "AdamW": None,
    "AdamW8bit": AdamW8bit.granularity(),
    "Muon": Muon.granularity(),
    "Shampoo": Shampoo.granularity(block_size=192),
}


def curve_worker(rank: int, world: int, folder: str, steps: int, out: str) -> None:
    """Worker: train the sharded demo model with each optimizer; losses by step, collectives of the last step."""
    _join(rank, world, folder)
    batches = Batches(read_corpus(), batch_size=8)
    losses: dict[str, list[float]] = {}
    collectives: dict[str, int] = {}
    for name, rule in GRANULARITIES.items():
        torch.manual_seed(0)
        model = Llama(LlamaShape())
        for layer in model.model.layers:
            fully_shard(layer, granularity=rule)
        fully_shard(model, granularity=rule)
        optimizer = make_optimizer(name, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        losses[name] = []
        for step in range(steps):
            tokens, targets = batches.of_rank(step, rank, world)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            with Wire() as wire:
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / world)
            losses[name].append(mean.item())
        collectives[name] = wire.collectives
    if rank == 0:
        Path(out).write_text(json.dumps({"losses": losses, "collectives": collectives}))
    dist.destroy_process_group()


def curve_rows(world: int, steps: int, picture: Path | None) -> list[Row]:
    """Rows of final losses against AdamW's and of collectives per step; draws the curves."""
    found = _spawn(curve_worker, world, steps)
    losses = found["losses"]
    last = max(1, steps // 10)
    final = {name: statistics.mean(values[-last:]) for name, values in losses.items()}
    rows = [
        Row(
            f"{name}, {world} ranks",
            f"loss, last {last} of {steps} steps",
            "nat",
            value,
            final["AdamW"],
            "AdamW",
        )
        for name, value in final.items()
        if name != "AdamW"
    ]
    for name in ("AdamW8bit", "Shampoo"):
        rows.append(
            Row(
                f"{name}, {world} ranks",
                "collectives in step()",
                "1",
                found["collectives"][name],
                target="<= 0",
            )
        )
    if picture is not None:
        draw(losses, picture)
    return rows


def draw(losses: dict[str, list[float]], picture: Path) -> None:
    """Draw the loss curves, smoothed over 9 steps, into one file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--", "-.", ":"), strict=True):
        smooth = [statistics.mean(values[max(0, i - 8) : i + 1]) for i in range(len(values))]
        axes.plot(range(1, len(values) + 1), smooth, style, label=f"{name}  {smooth[-1]:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nat per byte, mean of 9 steps)")
    axes.set_title("1.7 M parameters on Python's standard library, sharded")
    axes.set_ylim(top=min(5.7, max(max(values) for values in losses.values()) + 0.1))
    axes.grid(alpha=0.3)
    axes.legend(title="optimizer, last value")
    figure.savefig(picture)
    pyplot.close(figure)


def _join(rank: int, world: int, folder: str) -> None:
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    torch.set_num_threads(1)
    # Rendezvous in a file: a free port may be in use by the time the ranks start.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)


def _spawn(worker: Callable[..., None], world: int, steps: int, *more: str) -> Any:
    """Run a worker on ``world`` ranks; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        mp.spawn(worker, (world, folder, steps, str(out), *more), nprocs=world)
        return json.loads(out.read_text())


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="world sizes of the timed steps")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each rival")
    parser.add_argument("--scale", choices=SHAPES, default="small", help="which model is stepped")
    parser.add_argument(
        "--curves", type=int, default=0, metavar="STEPS", help="train that many steps (0: not)"
    )
    parser.add_argument("--picture", type=Path, help="draw the loss curves into this file")
    parser.add_argument("--json", type=Path, help="write the rows into this file")
    options = parser.parse_args()
    rows = []
    for world in options.ranks:
        rows += muon_rows(world, options.steps, options.scale)
        rows += adam_rows(world, options.steps, options.scale)
    rows += state_rows()
    if options.curves:
        rows += curve_rows(2, options.curves, options.picture)
    print_table(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
