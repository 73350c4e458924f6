"""Step time, memory, copies and hook time of training with this package, FSDP2 and DDP.

    python tools/bench/step.py                                 2 gloo ranks, dense and MoE
    python tools/bench/step.py --ranks 4 --models moe --json step.json
    python tools/bench/step.py --shapes                        step time on many other shapes (parts/step_shapes.py)
    python tools/bench/step.py --fake-world 64                 one process as one rank of 64: copies and memory;
                                                               its collectives send nothing
    python tools/bench/step.py --device cuda                   NCCL over all GPUs (with --fake-world 64:
                                                               one GPU as one rank of 64)

Time: all runtimes alternate in the same processes, step by step; medians over the steps. Memory: each runtime has its
own processes. On the CPU, memory is the growth of the resident set's high-water mark since before the model was built.
The plain model is trained once and deleted before that, so that code and tables are in memory, and glibc's mmap
threshold is fixed. On a GPU, memory is the allocator's peak. The floor is computed: what every sharding runtime must
store, without activations. Hooks: CPU time of the process per unit of a chain of tiny layers, less the plain chain's
(with gloo's threads, without waiting); on one rank, which sends nothing, and on the ranks of the run.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.llama import Llama, LlamaShape
from examples.moe import GroupedMoE, MoEShape
from tools.bench.parts.step_shapes import CASES as SHAPES
from tools.bench.parts.step_shapes import time_case
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp import fully_shard
from vescale_fsdp.optim import step_in_backward

RIVALS = ("ours", "fsdp2", "ddp")
STEPPING = "ours, stepping in the backward"
NARROW = "ours, narrow reduction"
COPIES = ("copy_in", "split_with_sizes_copy", "chunk_cat", "aten.cat", "_foreach_copy_", "aten.copy_")
TARGETS = {
    ("cpu", "dense", "step time"): "<= 0.60",
    ("cpu", "moe", "step time"): "<= 0.50",
    ("cpu", "dense", "peak memory"): "<= 0.90",
    ("cpu", "moe", "peak memory"): "<= 0.90",
    ("cuda", "dense", "step time"): "< 0.95",
    ("cuda", "moe", "step time"): "< 0.95",
    ("cuda", "dense", "peak reserved"): "< 0.85",
    ("cuda", "moe", "peak reserved"): "< 0.85",
}


@dataclass(frozen=True)
class Settings:
    """Arguments of a worker; picklable."""

    device: str
    ranks: int
    fake_world: int
    steps: int
    rows: int
    seq: int
    scale: str
    port: int = 0
    out: str = ""
    half: bool = True


@dataclass
class Figures:
    """Rank 0's measurements, by runtime."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    copies: dict[str, dict[str, int]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)


def moe_shape(device: torch.device, scale: str) -> MoEShape:
    """Sizes of the MoE model; seven experts on the CPU, so that no number of ranks divides them."""
    if device.type == "cuda" or scale == "large":
        return MoEShape(2048, 8, 64, 1024, 4)
    return MoEShape(384, 6, 7, 512, 2)


def build(model: str, scale: str, device: torch.device) -> nn.Module:
    """The benchmark's model, on the device."""
    torch.manual_seed(0)
    big = device.type == "cuda" or scale == "large"
    with torch.device(device):
        if model == "dense":
            shape = (
                LlamaShape(32000, 2048, 8, 16, 4, 128, 5632)
                if big
                else LlamaShape(1024, 512, 6, 8, 4, 64, 1408)
            )
            return Llama(shape)
        return GroupedMoE(moe_shape(device, scale))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The units of a model, without the root."""
    layers = model.model.layers if isinstance(model, Llama) else model.layers
    return list(cast(nn.ModuleList, layers))


def shard(rival: str, model: nn.Module, mesh: DeviceMesh, half: bool) -> nn.Module:
    """Shard the model with one of the runtimes."""
    if rival == "ddp":
        replica = DistributedDataParallel(model)
        if dist.get_backend() == "fake":
            replica.register_comm_hook(None, _keep_bucket)
        return replica
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    function: Callable[..., Any] = torch_fully_shard if rival == "fsdp2" else fully_shard
    for module in (*blocks_of(model), model):
        root: Any = function(module, mesh=mesh, mp_policy=policy)
    if rival == NARROW:
        root.set_narrow_reduction(True)
    return model


def _keep_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """An all-reduce that does nothing. A fake group's all-reduce has no result, which DDP does not accept."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares annotations with types, but `from __future__ import annotations` makes them strings.
_keep_bucket.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


def example(name: str, settings: Settings) -> torch.Tensor:
    """This rank's batch: tokens, or hidden states for the MoE blocks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    big = settings.device == "cuda" or settings.scale == "large"
    if name == "dense":
        batch = torch.randint(0, 32000 if big else 1024, (settings.rows, settings.seq), generator=generator)
    else:
        width = moe_shape(torch.device(settings.device), settings.scale).hidden_size
        batch = torch.randn(settings.rows, settings.seq, width, generator=generator)
    return batch.to(settings.device)


class Trainer:
    """Model, optimizer and data of one runtime."""

    def __init__(self, rival: str, name: str, settings: Settings, mesh: DeviceMesh) -> None:
        device = torch.device(mesh.device_type)
        self.model = shard(rival, build(name, settings.scale, device), mesh, settings.half)
        self.optimizer: torch.optim.Optimizer
        if rival == STEPPING:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
            step_in_backward(self.model, self.optimizer)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = example(name, settings)

    def step(self) -> float:
        """Run one training step; returns seconds."""
        _synchronize(self.batch.device)
        start = time.perf_counter()
        loss = self.model(self.batch).float().pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        _synchronize(self.batch.device)
        return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class CountCopies(TorchDispatchMode):
    """Counts operators that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if any(copy in name for copy in COPIES):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def start(rank: int, settings: Settings) -> DeviceMesh:
    """Join the process group, and use one thread on the CPU."""
    if settings.device == "cpu":
        torch.set_num_threads(1)
        # A fake gather writes nothing. Old memory, read as weights, may contain denormals, which are slow.
        torch.set_flush_denormal(True)
    else:
        torch.cuda.set_device(rank)
    if settings.fake_world:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings.fake_world)
        return init_device_mesh(settings.device, (settings.fake_world,))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(settings.port))
    backend = "gloo" if settings.device == "cpu" else "nccl"
    dist.init_process_group(backend, rank=rank, world_size=settings.ranks)
    return init_device_mesh(settings.device, (settings.ranks,))


def forward_copies(trainer: Trainer) -> dict[str, int]:
    """Number of copy operators of a gather: those of a forward, without the model's own."""
    counter = CountCopies()
    with counter, torch.no_grad():
        trainer.model(trainer.batch)
    return dict(counter.calls)


def time_rank(rank: int, settings: Settings, name: str, rivals: tuple[str, ...]) -> Figures:
    """Worker: time the steps of all runtimes, alternating."""
    mesh = start(rank, settings)
    trainers = {rival: Trainer(rival, name, settings, mesh) for rival in rivals}
    figures = Figures({rival: [] for rival in rivals})
    for trainer in trainers.values():
        for _ in range(3):
            trainer.step()
    for step in range(settings.steps):
        # The order rotates, so that no runtime always runs after the same other one.
        turn = [rivals[(step + i) % len(rivals)] for i in range(len(rivals))]
        for rival in turn:
            dist.barrier()
            figures.seconds[rival].append(trainers[rival].step())
    for rival, trainer in trainers.items():
        figures.copies[rival] = forward_copies(trainer)
    return figures


def page_in(name: str, settings: Settings) -> None:
    """Train the plain model once and delete it, so that code and tables of a step are in memory."""
    model = build(name, settings.scale, torch.device(settings.device)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = example(name, settings)
    model(batch.bfloat16() if batch.is_floating_point() else batch).float().pow(2).mean().backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()


def memory_rank(rank: int, settings: Settings, name: str, rival: str) -> Figures:
    """Worker: one runtime's peak memory over a few steps."""
    mesh = start(rank, settings)
    cuda = settings.device == "cuda"
    page_in(name, settings)
    before = 0 if cuda else _resident_bytes()
    trainer = Trainer(rival, name, settings, mesh)
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        _reset_high_water()
    for _ in range(4):
        trainer.step()
    figures = Figures()
    if cuda:
        figures.memory = {
            "peak allocated": torch.cuda.max_memory_allocated(),
            "peak reserved": torch.cuda.max_memory_reserved(),
        }
    else:
        figures.memory = {"peak memory": _high_water_bytes() - before}
    return figures


def hook_rank(rank: int, settings: Settings, rivals: tuple[str, ...]) -> Figures:
    """Worker: CPU seconds per unit of forward and backward, for chains of tiny units and for the plain chain."""
    mesh = start(rank, settings)
    device = torch.device(settings.device)

    def chain() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(32))).to(device)

    models: dict[str, nn.Module] = {"plain": chain()}
    for rival in rivals:
        model: nn.Sequential = chain()
        function: Callable[..., Any] = fully_shard if rival == "ours" else torch_fully_shard
        units: list[nn.Module] = [*model, model]
        for module in units:
            function(module, mesh=mesh)
        models[rival] = model
    x = torch.randn(4, 8, device=device, requires_grad=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(settings.steps + 3):
        for name, chained in models.items():
            _synchronize(device)
            start_s = time.process_time()
            chained(x).sum().backward()
            if step >= 3:
                seconds[name].append((time.process_time() - start_s) / 32)
            for param in chained.parameters():
                param.grad = None
    return Figures(seconds)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _reset_high_water() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _high_water_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _run_rank(rank: int, worker: Callable[..., Figures], settings: Settings, *args: Any) -> None:
    # The worker has ended, and with it its DDP models: they must not outlive the group (`tools.bench.network.worker`).
    figures = worker(rank, settings, *args)
    if rank == 0:
        torch.save(asdict(figures), settings.out)
    dist.destroy_process_group()


def launch(settings: Settings, worker: Callable[..., Figures], *args: Any) -> Figures:
    """Run a worker on all ranks and return rank 0's result."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        given = Settings(**{**asdict(settings), "port": port, "out": f"{folder}/figures"})
        mp.spawn(_run_rank, (worker, given, *args), nprocs=settings.ranks)
        return Figures(**torch.load(given.out))


def floor_bytes(name: str, settings: Settings) -> int:
    """Bytes that every sharding runtime stores at the peak of a backward, without activations.

    Master weights, two AdamW states, the sharded gradients of finished units, the gathered weights and full gradients
    of the current unit, and the root's gathered weights.
    """
    model = build(name, settings.scale, torch.device("meta"))
    units = [sum(p.numel() for p in block.parameters()) for block in reversed(blocks_of(model))]
    total, world = sum(p.numel() for p in model.parameters()), settings.fake_world or settings.ranks
    gathered = 2 if settings.half else 4
    peak, done = 0, 0
    for unit in units:
        peak = max(peak, 4 * done // world + 2 * gathered * unit)
        done += unit
    return 3 * 4 * total // world + gathered * (total - done) + peak


def target_of(settings: Settings, name: str, metric: str, rival: str) -> str | None:
    """The target of a ratio."""
    if rival != "fsdp2":
        return None
    if settings.fake_world:
        return {"step time": "< 0.95", "peak memory": "< 0.85", "peak reserved": "< 0.85"}.get(metric)
    if settings.device == "cpu" and metric == "step time" and not settings.half:
        return "<= 0.80"
    return TARGETS.get((settings.device, name, metric))


def bench_model(settings: Settings, name: str, rounds: int) -> list[Row]:
    """Rows of one model."""
    world = settings.fake_world or settings.ranks
    case = f"{name}, {settings.device}, {'rank of ' if settings.fake_world else ''}{world} ranks"
    case += "" if settings.half else ", fp32"
    figures = launch(settings, time_rank, name, RIVALS)
    rows = []
    median_ms = {rival: 1000 * statistics.median(times) for rival, times in figures.seconds.items()}
    for rival in RIVALS[1:]:
        target = target_of(settings, name, "step time", rival)
        rows.append(Row(case, "step time", "ms", median_ms["ours"], median_ms[rival], rival, target))
    # glibc raises this threshold when large blocks are freed and then keeps such blocks in its heap. With a fixed
    # threshold the resident set is the live memory, for all runtimes.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)  # 64 KiB
    peaks: dict[str, dict[str, list[int]]] = {}
    for _ in range(rounds):
        for rival in (*RIVALS, STEPPING):
            for metric, value in launch(settings, memory_rank, name, rival).memory.items():
                peaks.setdefault(metric, {}).setdefault(rival, []).append(value)
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    for metric, by_rival in peaks.items():
        mib = {rival: statistics.median(values) / 2**20 for rival, values in by_rival.items()}
        mib["floor"] = floor_bytes(name, settings) / 2**20
        for rival in (*RIVALS[1:], "floor"):
            target = target_of(settings, name, metric, rival)
            rows.append(Row(case, metric, "MiB", mib["ours"], mib[rival], rival, target))
        target = "<= 0.75" if settings.device == "cpu" and not settings.fake_world else None
        stepping = f"{metric}, stepping in the backward"
        rows.append(Row(case, stepping, "MiB", mib[STEPPING], mib["fsdp2"], "fsdp2", target))
    gathers = {r: sum(n for op, n in c.items() if "fsdp" in op) for r, c in figures.copies.items()}
    rows.append(Row(case, "gather copy kernels", "per forward", gathers["ours"], gathers["fsdp2"], "fsdp2"))
    return rows


def shapes_rank(rank: int, settings: Settings) -> Figures:
    """Worker: all shapes that are possible with this number of ranks."""
    start(rank, settings)
    seconds: dict[str, list[float]] = {}
    for case in SHAPES:
        if settings.ranks in case.ranks:
            for rival, times in time_case(case, settings.steps).items():
                seconds[f"{case.name}/{rival}"] = times
    return Figures(seconds)


def bench_shapes(settings: Settings) -> list[Row]:
    """Step times of the shapes of `tools.bench.parts.step_shapes`."""
    seconds = launch(settings, shapes_rank).seconds
    rows = []
    for case in SHAPES:
        if settings.ranks in case.ranks:
            ours, theirs = (1000 * statistics.median(seconds[f"{case.name}/{r}"]) for r in RIVALS[:2])
            name = f"{case.name}, {settings.ranks} ranks"
            rows.append(Row(name, "step time", "ms", ours, theirs, "fsdp2", "<= 1.0"))
    return rows


def bench_hooks(settings: Settings) -> list[Row]:
    """CPU time per unit of hooks, and of the collectives they start."""
    rows = []
    for ranks in sorted({1, settings.ranks}):
        given = Settings(**{**asdict(settings), "ranks": ranks, "steps": 40})
        seconds = launch(given, hook_rank, ("ours", "fsdp2")).seconds
        plain, ours, theirs = (statistics.median(seconds[name]) for name in ("plain", "ours", "fsdp2"))
        case = f"rank of {given.fake_world}" if given.fake_world else f"{ranks} ranks"
        ours_us, theirs_us = (1e6 * (sharded - plain) for sharded in (ours, theirs))
        rows.append(Row(f"32 tiny units, {case}", "hooks' CPU per unit", "us", ours_us, theirs_us, "fsdp2"))
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="training step: ours, FSDP2, DDP")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=None, help="default: 2 on the CPU, all GPUs on cuda")
    parser.add_argument("--fake-world", type=int, default=0, help="pretend to be one rank of this many")
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3, help="memory runs per rival")
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--scale", choices=("small", "large"), default="small")
    parser.add_argument("--fp32", action="store_true", help="no mixed precision")
    parser.add_argument("--shapes", action="store_true", help="step time of many shapes, nothing else")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    ranks = 1 if given.fake_world else given.ranks or (gpus if given.device == "cuda" else 2)
    settings = Settings(
        given.device,
        ranks,
        given.fake_world,
        given.steps,
        given.rows,
        given.seq,
        given.scale,
        half=not given.fp32,
    )
    if given.shapes:
        rows = bench_shapes(settings)
    else:
        rows = [row for name in given.models.split(",") for row in bench_model(settings, name, given.rounds)]
        rows += bench_hooks(settings)
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
