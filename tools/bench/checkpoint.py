"""Speed of saving and loading, compared with raw file IO and torch's DCP.

    python tools/bench/checkpoint.py                                2 ranks save 1 GiB, 2 and 3 ranks load it
    python tools/bench/checkpoint.py --ranks 4 --load-ranks 2 --megabytes 4096 --json checkpoint.json
    python tools/bench/checkpoint.py --only cold --megabytes 4096   reads from disk, not from the page cache
    python tools/bench/checkpoint.py --only plan --dcp-ranks 256    planning and metadata, simulated ranks

Three ways alternate in the same processes, on the same bytes; figures are medians: this package; ``write`` + ``fsync``
(or ``readinto``) of this rank's buffers; ``dcp.save`` / ``dcp.load`` of the same tensors. Reads come from the page
cache, except in the cold rows: there files are dropped from the cache before each read, a row is void if mincore still
finds 1 % of them in it, and the raw way reads with as many threads as this package.
The stall of an asynchronous save is compared with one memcpy of the shard. Peak memory is the growth of the
resident set's high-water mark during one call.
`lost_node.py` measures reading the part of a lost node from its partner's memory.
Planning for 256 and 16,384 ranks is simulated in one process.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.parts.cold_reads import measure_cold, measure_replicas
from tools.bench.parts.shards import Settings, Shards, fact_rows, median, spawn, start_rank, timed
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.checkpoint import CheckpointManager, load, save
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, build_manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.conversion import HuggingFace
from vescale_fsdp.layout.distribution import Axis, LayoutCut, RankSet, ShardCut
from vescale_fsdp.layout.planner import TensorSpec, plan_group


@contextmanager
def peak_growth(found: dict[str, float], name: str) -> Iterator[None]:
    """Growth of the resident set's peak during a call, in MiB; 0 on other systems than Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        found[name] = 0.0
        return
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status_mib(status, "VmRSS")
    yield
    found[name] = _status_mib(status, "VmHWM") - before


def _status_mib(status: Path, key: str) -> float:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


@contextmanager
def counted_collectives(found: Counter[str]) -> Iterator[None]:
    """Counts calls of collectives that could gather plans, and of operations that could send tensors to other ranks."""
    names = (
        "all_gather",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "send",
        "isend",
    )
    real = {name: getattr(dist, name) for name in (*names, "all_reduce")}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, counting(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def _save_worker(rank: int, settings: Settings) -> None:
    """Worker: alternate saves and loads of the same layout; the last files are kept for the other world size."""
    shards = Shards(settings, start_rank(rank, settings.ranks, settings.port))
    root = Path(settings.folder)
    raw, native, stock = root / f"raw{rank}", root / "native", root / "dcp"
    repository, by_rank = root / "hf", root / "dcp-form"
    form = HuggingFace(
        assets=root / "assets", model_prefix=""
    )  # with moments: as many bytes as the native save
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    gathers: Counter[str] = Counter()
    copy = [torch.empty_like(buffer) for buffer in shards.buffers]
    manager = CheckpointManager(root / "async", asynchronous=True, retention=1)

    def turn(name: str, work: Callable[[], Any]) -> None:
        seconds.setdefault(name, []).append(timed(work))

    def clear() -> None:
        dist.barrier()
        if rank == 0:
            for folder in (native, stock, repository, by_rank):
                shutil.rmtree(folder, ignore_errors=True)
        raw.unlink(missing_ok=True)
        dist.barrier()

    for repeat in range(settings.repeats + 1):  # the first turn warms up
        clear()
        turn("write", lambda: shards.write_raw(raw))
        with counted_collectives(gathers), peak_growth(memory, "save"):
            turn("save", lambda: save(native, shards.state))
        turn("dcp.save", lambda: dcp.save(shards.state, checkpoint_id=stock))
        with counted_collectives(gathers), peak_growth(memory, "hf"):
            turn("hf", lambda: save(repository, shards.state, format=form))
        turn("dcp form", lambda: save(by_rank, shards.state, format="dcp"))
        turn("readinto", lambda: shards.read_raw(raw))
        turn("load while", lambda: load(native, shards.state, verify="while"))
        turn("load before", lambda: load(native, shards.state, verify="before"))
        turn("load never", lambda: load(native, shards.state, verify="never"))
        turn("dcp.load", lambda: dcp.load(shards.state, checkpoint_id=stock))
        turn("memcpy", lambda: [a.copy_(b) for a, b in zip(copy, shards.buffers, strict=True)])
        turn("stall", partial(manager.save, repeat, shards.state))
        manager.wait()
    start = time.perf_counter()
    take_state(shards.state)
    seconds["describe"] = [0.0, time.perf_counter() - start]
    facts = {"bytes": shards.num_bytes, "memory": memory, "gathers": dict(gathers)}
    torch.save({"seconds": seconds, **facts}, f"{settings.out}{rank}")
    dist.destroy_process_group()


def _load_worker(rank: int, settings: Settings) -> None:
    """Worker: loads by another number of ranks."""
    shards = Shards(settings, start_rank(rank, settings.load_ranks, settings.port))
    root = Path(settings.folder)
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}

    def turn(name: str, work: Callable[[], Any]) -> None:
        seconds.setdefault(name, []).append(timed(work))

    for _ in range(settings.repeats + 1):
        turn("readinto", lambda: shards.read_raw(root / f"raw{rank % settings.ranks}"))
        with peak_growth(memory, "load"):
            turn("load while", lambda: load(root / "native", shards.state, verify="while"))
        turn("load before", lambda: load(root / "native", shards.state, verify="before"))
        turn("load never", lambda: load(root / "native", shards.state, verify="never"))
        turn("dcp.load", lambda: dcp.load(shards.state, checkpoint_id=root / "dcp"))
    torch.save({"seconds": seconds, "memory": memory, "bytes": shards.num_bytes}, f"{settings.out}{rank}")
    dist.destroy_process_group()


def measure_io(settings: Settings) -> list[Row]:
    """Rows of saves, loads of the same layout, the asynchronous stall, and loads by another number of ranks."""
    assets = Path(settings.folder, "assets")
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    saved = spawn(_save_worker, settings.ranks, settings)
    case = f"{settings.ranks} ranks, {settings.megabytes} MiB"
    rows = fact_rows(
        case,
        saved,
        [
            ("save", "save", "write", ">= 0.92"),
            ("save", "save", "dcp.save", ">= 1.6"),
            ("Hugging Face folder from live shards", "hf", "save", ">= 0.85"),
            ("DCP folder from live shards", "dcp form", "dcp.save", None),
            ("load, verified while reading", "load while", "readinto", ">= 0.82"),
            ("load, verified before", "load before", "readinto", None),
            ("load, not verified", "load never", "readinto", ">= 0.93"),
            ("load, verified while reading", "load while", "dcp.load", ">= 2"),
            ("load, verified before", "load before", "dcp.load", ">= 2"),
        ],
    )
    stall, memcpy = median(saved, "stall") * 1e3, median(saved, "memcpy") * 1e3
    rows.append(Row(case, "stall of an async save", "ms", stall, memcpy, "memcpy", "<= 1.05"))
    rows.append(
        Row(case, "describing a live state", "ms", median(saved, "describe") * 1e3, None, None, "< 100")
    )
    peak = max(figure["memory"]["save"] for figure in saved)
    rows.append(Row(case, "peak extra memory of a save", "MiB", peak, None, None, "< 64"))
    gathers = sum(count for name, count in saved[0]["gathers"].items() if name != "all_reduce")
    peak = max(figure["memory"]["hf"] for figure in saved)
    rows.append(Row(case, "peak extra memory of a Hugging Face folder", "MiB", peak, None, None, "< 64"))
    rows.append(Row(case, "planning gathers of all saves", "calls", gathers, None, None, "<= 0"))
    loaded = spawn(_load_worker, settings.load_ranks, settings)
    case = f"{settings.ranks} -> {settings.load_ranks} ranks, {settings.megabytes} MiB"
    rows += fact_rows(
        case,
        loaded,
        [
            ("load, verified while reading", "load while", "readinto", ">= 0.7"),
            ("load, verified before", "load before", "readinto", None),
            ("load, not verified", "load never", "readinto", ">= 0.8"),
            ("load, verified while reading", "load while", "dcp.load", ">= 2"),
        ],
    )
    peak = max(figure["memory"]["load"] for figure in loaded)
    rows.append(Row(case, "peak extra memory of a load", "MiB", peak, None, None, "< 256"))
    return rows


def simulated(world: int, num_tensors: int) -> Structure:
    """The state's structure on a large world: groups of nine tensors, ragged by element."""
    layouts, entries = [], []
    for first in range(0, num_tensors, 9):
        count = min(9, num_tensors - first)
        specs = [TensorSpec(f"w{i}", (4096, 1024 + i % 3 * 512), "float32", 1) for i in range(count)]
        layouts.append(plan_group(specs, world))
        for place, spec in enumerate(specs):
            cut = LayoutCut(len(layouts) - 1, place)
            entries.append(Entry(f"model/layers.{first // 9}.{spec.fqn}", "float32", spec.shape, 0, (cut,)))
    tree = {"model": {entry.name[6:]: {"$": "tensor", "i": i} for i, entry in enumerate(entries)}}
    return Structure(tree, tuple(entries), ((Axis(world, 1),),), tuple(layouts))


def plan_seconds(structure: Structure, world: int) -> tuple[float, Manifest]:
    """CPU time of planning a save on one rank: digest, manifest, header and offsets of the rank's file."""
    start = time.process_time()
    with gc_paused():  # as `save` does
        assert len(structure.digest) == 16
        manifest = build_manifest(
            [(RankSet.world(world), structure)], save_id="0123456789abcdef", world_size=world
        )
        assert RankFile(manifest, world // 2).pieces
        manifest.to_bytes()
    return time.process_time() - start, manifest


def by_rows(structure: Structure, world: int) -> Structure:
    """The same tensors sharded as by FSDP2: every tensor by rows over all ranks."""
    entries = tuple(replace(entry, cuts=(ShardCut(0),)) for entry in structure.entries)
    return Structure(structure.tree, entries, ((Axis(world, 1),),), ())


def dcp_plan(structure: Structure, world: int) -> tuple[float, int]:
    """CPU time of DCP's planning of the same state on its coordinator, and the bytes of its metadata."""
    plans = [pickle.dumps(_dcp_local_plan(structure, rank)) for rank in range(world)]
    start = time.process_time()
    _, metadata = create_default_global_save_plan([pickle.loads(plan) for plan in plans])
    return time.process_time() - start, len(pickle.dumps(metadata))


def _dcp_local_plan(structure: Structure, rank: int) -> SavePlan:
    items = []
    for entry in structure.entries:
        region = structure.distribution(entry).region(entry.shape, [rank], structure.layouts)
        for box, _ in region.pieces():
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            properties = TensorProperties(dtype=torch.float32)
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(entry.shape))
            index = MetadataIndex(entry.name, torch.Size(box.offsets))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def measure_plans(dcp_ranks: int, num_tensors: int = 1000) -> list[Row]:
    """Planning time and manifest size of simulated worlds."""
    rows = []
    manifests = {}
    for world, target in ((2, None), (256, "< 0.1"), (16_384, "< 1")):
        ours_s, manifest = plan_seconds(simulated(world, num_tensors), world)
        manifests[world] = len(manifest.to_bytes())
        case = f"{world} ranks x {num_tensors} tensors"
        rows.append(Row(case, "planning on a rank", "CPU s", ours_s, None, None, target))
        rows.append(Row(case, "metadata", "kB", manifests[world] / 1e3))
    growth = abs(manifests[16_384] / manifests[2] - 1) * 100
    rows.append(Row("2 -> 16384 ranks", "growth of the manifest", "%", growth, None, None, "< 1"))
    ragged = simulated(dcp_ranks, num_tensors)
    for name, structure in (("ragged", ragged), ("FSDP2's Shard(0)", by_rows(ragged, dcp_ranks))):
        ours_s, manifest = plan_seconds(structure, dcp_ranks)
        rival_s, rival_bytes = dcp_plan(structure, dcp_ranks)
        case = f"{dcp_ranks} ranks x {num_tensors} tensors, {name}"
        rows.append(Row(case, "planning on a rank", "CPU s", ours_s, rival_s, "DCP's coordinator"))
        rows.append(Row(case, "metadata", "kB", len(manifest.to_bytes()) / 1e3, rival_bytes / 1e3, "DCP"))
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--load-ranks", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1024, help="state of all ranks together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--dcp-ranks", type=int, default=64, help="ranks of DCP's simulated plan (256 takes minutes)"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: a temporary folder"
    )
    parser.add_argument("--only", choices=("io", "cold", "replicas", "plan"), default=None)
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    rows: list[Row] = []
    for name, measure in (("io", measure_io), ("cold", measure_cold), ("replicas", measure_replicas)):
        if chosen.only in (None, name):
            with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="bench-checkpoint-") as folder:
                settings = Settings(chosen.ranks, chosen.load_ranks, chosen.megabytes, chosen.repeats, folder)
                rows += measure(settings)
    if chosen.only in (None, "plan"):
        rows += measure_plans(chosen.dcp_ranks)
    print_table(rows)
    if chosen.json is not None:
        write_json(chosen.json, rows)


if __name__ == "__main__":
    main()
