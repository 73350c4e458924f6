"""The state that the checkpoint benchmarks save and load, and functions to run and time ranks."""

from __future__ import annotations

import gc
import os
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

from tools.bench.rows import Row
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.layout.planner import TensorSpec, plan_group

_CHUNK_BYTES = 16 << 20  # 16 MiB per raw write or read
_ROLES = ("model", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Settings:
    """Arguments of a worker; picklable."""

    ranks: int
    load_ranks: int
    megabytes: int
    repeats: int
    folder: str
    port: int = 0
    out: str = ""


def layer_layouts(total_numel: int, num_shards: int) -> list[GroupLayout]:
    """Layouts of groups of nine tensors, like the layers of a transformer, of about ``numel`` elements in total."""
    shapes: list[tuple[int, ...]]
    shapes = [(1024, 1024), (256, 1024), (256, 1024), (1024, 1024), (2816, 1024), (2816, 1024), (1024, 2816)]
    shapes += [(1024,), (1024,)]
    specs = [TensorSpec(f"w{i}", shape, "float32", 1) for i, shape in enumerate(shapes)]
    layer_numel = sum(torch.Size(shape).numel() for shape in shapes)
    return [plan_group(specs, num_shards) for _ in range(max(1, total_numel // layer_numel))]


class Shards:
    """This rank's part of a model and two moments: ragged views of one flat buffer per group and role.

    Args:
        mesh: replicas first, if it has two dims.
    """

    def __init__(self, settings: Settings, mesh: DeviceMesh) -> None:
        rank, world = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        total_numel = (settings.megabytes << 20) // 4 // len(_ROLES)
        self.buffers: list[torch.Tensor] = []  # 1D [shard_numel] each
        self.state: dict[str, Any] = {role: {} for role in _ROLES}
        for number, layout in enumerate(layer_layouts(total_numel, world)):
            for role in _ROLES:
                buffer = torch.empty(layout.shard_numel).uniform_()
                self.buffers.append(buffer)
                for slot in layout.slots:
                    piece = layout.piece(slot, rank)
                    local = buffer[piece.local_offset : piece.local_offset + piece.numel]
                    placement = RaggedShard.from_piece_numels(slot.shape, layout.piece_numels(slot))
                    placements = [*[Replicate()] * (mesh.ndim - 1), placement]
                    tensor = RaggedDTensor.from_local(local, mesh, placements, shape=slot.shape)
                    tensor.layout_ref = (layout, slot.fqn)
                    self.state[role][f"layers.{number}.{slot.fqn}"] = tensor
        self.num_bytes = sum(buffer.numel() * 4 for buffer in self.buffers)

    def write_raw(self, path: Path) -> None:
        """Write this rank's buffers with plain writes and one fsync."""
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for buffer in self.buffers:
            view = buffer.numpy().data.cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                os.write(file, view[start : start + _CHUNK_BYTES])
        os.fsync(file)
        os.close(file)

    def read_raw_by(self, threads: int, path: Path) -> None:
        """Read this rank's buffers with several threads, each of which reads a part of the file."""
        views = [buffer.numpy().data.cast("B") for buffer in self.buffers]
        starts = [0, *accumulate(map(len, views))]

        def read(number: int) -> None:
            part = range(len(views) * number // threads, len(views) * (number + 1) // threads)
            with open(path, "rb", buffering=0) as file:
                file.seek(starts[part.start])
                for place in part:
                    for at in range(0, len(views[place]), _CHUNK_BYTES):
                        file.readinto(views[place][at : at + _CHUNK_BYTES])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))

    def read_raw(self, path: Path) -> None:
        """Read this rank's buffers with plain reads; a shorter file is read again from its start."""
        with open(path, "rb", buffering=0) as file:
            for buffer in self.buffers:
                view = buffer.numpy().data.cast("B")
                at = 0
                while at < len(view):
                    read = file.readinto(view[at : at + _CHUNK_BYTES])
                    at += read or 0
                    if not read:
                        file.seek(0)


def timed(work: Callable[[], Any]) -> float:
    """Seconds from the start of all ranks to the end of all ranks."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def start_rank(rank: int, world: int, port: int) -> DeviceMesh:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, world_size=world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return init_device_mesh("cpu", (world,))


def spawn(worker: Callable[..., None], world: int, settings: Settings) -> list[dict[str, Any]]:
    """Run a worker on all ranks; returns each rank's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = f"{settings.folder}/figures"
    chosen = Settings(**{**settings.__dict__, "port": port, "out": out})
    mp.spawn(worker, (chosen,), nprocs=world)
    return [torch.load(f"{out}{rank}", weights_only=False) for rank in range(world)]


def median(figures: list[dict[str, Any]], name: str) -> float:
    """Median over the rounds after the first, on rank 0 (rounds begin and end at barriers)."""
    return statistics.median(figures[0]["seconds"][name][1:])


def fact_rows(
    case: str, figures: list[dict[str, Any]], pairs: list[tuple[str, str, str, str | None]]
) -> list[Row]:
    """Rows of speed ratios: (metric, ours, rival, target); rates in GB/s over all ranks."""
    total = sum(figure["bytes"] for figure in figures) / 1e9
    return [
        Row(
            case,
            metric,
            "GB/s",
            total / median(figures, ours),
            total / median(figures, rival),
            rival,
            target,
        )
        for metric, ours, rival, target in pairs
    ]
