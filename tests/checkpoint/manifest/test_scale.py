"""What must not grow: the manifest with ranks, collectives with tensors, memory with the state, open files."""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

from tests.support.checkpoint_states import mixed_state
from tests.support.distributed import run_ranks
from tools.bench.checkpoint import counted_collectives, peak_growth, simulated
from tools.bench.parts.shards import Settings, Shards
from vescale_fsdp.checkpoint import load, read_state, save
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, build_manifest
from vescale_fsdp.checkpoint.manifest.rank_file import CopyFinder, RankFile, pack_table
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.layout.distribution import Axis, Cut, RankSet, ShardCut
from vescale_fsdp.layout.region import whole_region


def _manifest(world: int) -> Manifest:
    return build_manifest([(RankSet.world(world), simulated(world, 300))], save_id="0" * 16, world_size=world)


def test_the_manifest_does_not_grow_with_ranks() -> None:
    """16,384 ranks need as many bytes as 2, within 1 %, and every rank's file follows from them."""
    small, large = _manifest(2), _manifest(16_384)

    sizes = [len(small.to_bytes()), len(large.to_bytes())]
    assert abs(sizes[1] / sizes[0] - 1) < 0.01
    again = Manifest.from_bytes(large.to_bytes(), where="here")
    assert again == large
    for rank in (0, 7777, 16_383):
        assert RankFile(again, rank).header == RankFile(large, rank).header
    pieces = [piece for rank in range(0, 16_384, 512) for piece in RankFile(large, rank).pieces.values()]
    assert len(pieces) >= 32 and all(piece.numel for piece in pieces)


def test_files_of_a_large_world_add_up() -> None:
    """All ranks' pieces of a simulated world hold every element once."""
    manifest = _manifest(256)

    stored = Counter[str]()
    for rank in range(256):
        for index, piece in RankFile(manifest, rank).pieces.items():
            stored[manifest.entries[index].name] += piece.numel
    assert stored == {entry.name: entry.numel for entry in manifest.entries}


def test_one_shape_in_many_ways() -> None:
    """Tensors of one shape over axes of other sizes and strides, by other dims and item sizes: each is found whole."""
    shape = (8, 3000)
    tables = ((Axis(4, 1),), (Axis(2, 1),), (Axis(2, 2),), ())
    ways: list[tuple[str, int, tuple[Cut, ...]]]
    ways = [("float32", i, (ShardCut(0),)) for i in range(3)] + [("float32", 0, (ShardCut(1),))]
    ways += [("float32", 3, ()), ("bfloat16", 3, ())]
    entries = tuple(Entry(f"t{i}", dtype, shape, axes, cuts) for i, (dtype, axes, cuts) in enumerate(ways))
    structure = Structure(None, entries, tables, ())
    manifest = build_manifest([(RankSet.world(4), structure)], save_id="0" * 16, world_size=4)
    finder = CopyFinder(manifest)

    stored: dict[str, list[int]] = {entry.name: [0] * 4 for entry in entries}
    for rank in range(4):
        for index, piece in RankFile(manifest, rank).pieces.items():
            stored[manifest.entries[index].name][rank] = piece.numel
    copies = [finder.copies(i, whole_region(shape)) for i in range(len(ways))]
    found = [{file.rank for file, _ in of_tensor} for of_tensor in copies]
    sizes = [RankFile(manifest, 1).pieces[i].box.sizes for i in (0, 1, 3)]

    quarters, all_of_it = [6000] * 4, [24_000, 0, 0, 0]
    halves = [12_000, 12_000, 0, 0], [12_000, 0, 12_000, 0]  # of 48,000 bytes, too few for replicas to share
    assert sizes == [(2, 3000), (4, 3000), (8, 750)]
    assert [of_tensor[0][1].is_run for of_tensor in copies] == [True, True, True, False, True, True]
    assert list(stored.values()) == [quarters, *halves, quarters, quarters, all_of_it]
    assert found == [{0, 1, 2, 3}, {0, 1}, {0, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0}]


@pytest.mark.parametrize(
    "numel, parts", [(4096 * 4 - 1, (4096 * 4 - 1, 0, 0)), (4096 * 4, (5461, 5461, 5462))]
)
def test_where_replicas_begin_to_share(numel: int, parts: tuple[int, ...]) -> None:
    """From 64 KiB on, exactly; a reader of another version computes the same from the manifest."""
    structure = Structure(None, (Entry("t", "float32", (numel,), 0, ()),), ((),), ())
    manifest = build_manifest([(RankSet.world(3), structure)], save_id="0" * 16, world_size=3)

    assert tuple(manifest.split(0, whole_region((numel,)), i, 3).numel for i in range(3)) == parts


def _count(path: Path) -> dict[str, int]:
    state = mixed_state()
    save(path / "warm", state)
    found: Counter[str] = Counter()
    with counted_collectives(found):
        save(path / "c", state)
    return dict(found)


def test_saving_gathers_nothing(tmp_path: Path) -> None:
    """Four small all-reduces are all that ranks say to each other; one of them compares replicas."""
    for found in run_ranks(2, _count, tmp_path):
        assert found == {"all_reduce": 4}


def _settings(tmp_path: Path, ranks: int) -> Settings:
    return Settings(ranks, ranks, 512, 1, str(tmp_path))


def _memory(tmp_path: Path, saving: bool) -> tuple[float, float]:
    world = dist.get_world_size()
    shards = Shards(_settings(tmp_path, world), init_device_mesh("cpu", (world,)))
    found: dict[str, float] = {}
    with peak_growth(found, "peak"):
        if saving:
            save(tmp_path / "c", shards.state)
        else:
            load(tmp_path / "c", shards.state)
    return found["peak"], shards.num_bytes / (1 << 20)


@pytest.mark.part("formats")
def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    """Blocking saves and resharding loads of more than 100 MiB per rank need little besides."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the high-water mark of memory is read from Linux's /proc")
    for peak, state_mib in run_ranks(2, _memory, tmp_path, True):
        assert state_mib > 150 and peak < 64
    for peak, state_mib in run_ranks(3, _memory, tmp_path, False):
        assert state_mib > 80 and peak < 64


@pytest.mark.part("faults")
def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """A reader of many ranks' files does not hold them all open."""
    entry = Entry("x", "int64", (600, 3), 0, ())
    structure = Structure({"x": {"$": "tensor", "i": 0}}, (entry,), ((),), ())
    _write_as(tmp_path / "c", structure, 600)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is one of numbers, and tests before this one may have left files open, with any numbers.
    taken = {int(name) for name in os.listdir("/dev/fd")}
    most = next(limit for limit in range(200, limits[0]) if limit - sum(fd < limit for fd in taken) == 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        found = read_state(tmp_path / "c")["x"].read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.equal(torch.arange(1800).reshape(600, 3), found)


def _write_as(path: Path, structure: Structure, world: int) -> None:
    """Write the files of a world one by one, from one process."""
    from vescale_fsdp.checkpoint.native.write import (
        FileImage,
        NativeForm,
        write_rank_file,
    )
    from vescale_fsdp.checkpoint.storage.local import LocalStorage
    from vescale_fsdp.checkpoint.storage.progress import Meter

    storage: Any = LocalStorage(path, durable=False)
    manifest = build_manifest(
        [(RankSet.world(world), structure)], save_id="1" * 16, world_size=world, split_bytes=16
    )
    whole = torch.arange(1800).reshape(600, 3)
    for rank in range(world):
        write_rank_file(storage, FileImage(RankFile(manifest, rank), {"x": whole}, b""), Meter())
    NativeForm().commit(storage, manifest, replace=False)


def test_tensors_and_files_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Sizes and offsets of more than 32 bits: the end of the last of three tensors in a (sparse) file of 7.5 GiB."""
    numel = (5 << 29) + 3  # 2.5 GiB of bytes each
    entries = tuple(Entry(name, "uint8", (numel,), 0, ()) for name in "abc")
    tree = {name: {"$": "tensor", "i": place} for place, name in enumerate("abc")}
    manifest = build_manifest(
        [(RankSet.world(1), Structure(tree, entries, ((),), ()))], save_id="2" * 16, world_size=1
    )
    file = RankFile(manifest, 0)
    start = file.starts[2]
    assert start > 5 << 30 and file.total_bytes > 15 << 29
    path = tmp_path / "c" / file.name
    path.parent.mkdir(parents=True)
    tail = bytes(range(1, 101))
    with open(path, "wb") as raw:
        raw.write(file.header)
        raw.seek(start + numel - len(tail))
        raw.write(tail)
        raw.seek(file.table_start)
        raw.write(pack_table(_checksums_of_a_sparse_file(path, file)))
    (tmp_path / "c" / "manifest.json").write_bytes(manifest.to_bytes())

    stored = read_state(tmp_path / "c")["c"]

    assert stored.read_flat(numel - 150, numel).tolist() == [0] * 50 + list(tail)
    assert stored.read_flat(0, 5).tolist() == [0] * 5
    with safe_open(path, framework="pt") as opened:
        assert opened.get_slice("c")[numel - 3 :].tolist() == list(tail[-3:])


def _checksums_of_a_sparse_file(path: Path, file: RankFile) -> list[int]:
    """All stripes but the first and the last two are zeros."""
    os.truncate(path, file.table_start)
    zeros = xxhash.xxh3_64_intdigest(bytes(file.manifest.stripe_bytes))
    found = [zeros] * file.num_stripes
    with open(path, "rb") as raw:
        for index in (0, file.num_stripes - 2, file.num_stripes - 1):
            _, start, nbytes = file.stripe(index)
            stop = start + nbytes
            raw.seek(start)
            found[index] = xxhash.xxh3_64_intdigest(raw.read(stop - start))
    return found
