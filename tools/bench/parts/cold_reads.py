"""Loads from disk with an empty page cache, and bytes that replicas read: rows of `tools/bench/checkpoint.py`."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tools.bench.parts.shards import Settings, Shards, fact_rows, spawn, start_rank, timed
from tools.bench.rows import Row
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.checkpoint.load import Read
from vescale_fsdp.checkpoint.storage.open import open_storage


def drop(paths: Iterable[Path]) -> None:
    """Write files to disk and drop them from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def held_part(paths: Iterable[Path]) -> float:
    """The fraction of files that is in the page cache, by mincore."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    held = total = 0
    for path in paths:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            mapped = np.frombuffer(pages, dtype=np.uint8)
            answer = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
            if mincore(mapped.ctypes.data, len(mapped), answer.ctypes.data):
                raise OSError(f"mincore cannot tell of {path}")
            held, total = held + int((answer & 1).sum()), total + len(answer)
            del mapped
    return held / max(total, 1)


def _cold_worker(rank: int, settings: Settings) -> None:
    """Worker: loads of the same layout with an empty page cache."""
    shards = Shards(settings, start_rank(rank, settings.ranks, settings.port))
    root = Path(settings.folder)
    raw, native = root / f"raw{rank}", root / "native"
    shards.write_raw(raw)
    save(native, shards.state)
    threads = open_storage(native, neighbors=settings.ranks).far_read_threads
    seconds: dict[str, list[float]] = {}
    held = 0.0

    def turn(name: str, work: Callable[[], Any]) -> None:
        nonlocal held
        files = [raw, *native.glob(f"data-*/{rank:05d}-*")]
        drop(files)
        held = max(held, held_part(files))
        seconds.setdefault(name, []).append(timed(work))

    for _ in range(settings.repeats + 1):
        turn("readinto", partial(shards.read_raw_by, threads, raw))
        turn("load while", partial(load, native, shards.state, verify="while"))
        turn("load never", partial(load, native, shards.state, verify="never"))
    torch.save({"seconds": seconds, "held": held, "bytes": shards.num_bytes}, f"{settings.out}{rank}")
    dist.destroy_process_group()


def _replica_worker(rank: int, settings: Settings) -> None:
    """Worker: bytes that two replicas read."""
    mesh = start_rank(rank, 2 * settings.ranks, settings.port)
    shards = Shards(settings, init_device_mesh("cpu", (2, settings.ranks)))
    root = Path(settings.folder) / "replicas"
    save(root, shards.state)
    size = sum(file.stat().st_size for file in root.glob("data-*/*"))
    facts = {read: load(root, shards.state, read=read).num_bytes_read for read in get_args(Read)}
    torch.save({"size": size, "ranks": mesh.size(), **facts}, f"{settings.out}{rank}")
    dist.destroy_process_group()


def measure_cold(settings: Settings) -> list[Row]:
    """Rows of loads with an empty page cache."""
    found = spawn(_cold_worker, settings.ranks, settings)
    held = max(figure["held"] for figure in found)
    case = f"{settings.ranks} ranks, {settings.megabytes} MiB, cold" + (
        " (VOID: cached)" if held >= 0.01 else ""
    )
    pairs: list[tuple[str, str, str, str | None]] = [
        ("load, verified while reading", "load while", "readinto", ">= 0.9"),
        ("load, not verified", "load never", "readinto", ">= 0.9"),
    ]
    return fact_rows(case, found, pairs)


def measure_replicas(settings: Settings) -> list[Row]:
    """Rows of bytes that two replicas read, against the size of the checkpoint."""
    found = spawn(_replica_worker, 2 * settings.ranks, replace(settings, megabytes=64))
    case, size = f"2 replicas of {settings.ranks} ranks, 64 MiB", found[0]["size"] / 1e6
    return [
        Row(
            case,
            f"bytes read, read={read!r}",
            "MB",
            sum(one[read] for one in found) / 1e6,
            size,
            "its size",
            target,
        )
        for read, target in (("once", "<= 1.01"), ("each", None))
    ]
