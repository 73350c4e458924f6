"""The zarr form: right values through plain zarr, one writer per chunk, damage found, loads at any world size."""

from __future__ import annotations

import asyncio
import errno
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zarr
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.checkpoint_states import SHAPES, assert_equal, erase, full, mixed_state, plain
from tests.support.distributed import run_ranks
from tests.support.faults.faulty_storage import FaultyStorage
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, load, read_state, save, verify
from vescale_fsdp.checkpoint.manifest import zarr_layout
from vescale_fsdp.checkpoint.manifest.manifest import build_manifest
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, chunk_shape, clipped
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, CorruptCheckpointError
from vescale_fsdp.layout.distribution import Axis, LayoutCut, RankSet
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.layout.planner import TensorSpec, plan_group
from vescale_fsdp.layout.region import Region, overlaps


class _Recording(LocalStorage):
    """Remembers which files it made."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.made: list[str] = []

    def beside(self, name: str) -> LocalStorage:
        sibling = _Recording(self.root.with_name(name))
        sibling.made = self.made
        return sibling

    def create(self, name: str, size_bytes: int) -> Any:
        self.made.append(name)
        return super().create(name, size_bytes)


def _save(path: Path, block_rows: int) -> list[str]:
    storage = _Recording(path)
    save(storage, {**mixed_state(block_rows), "rng": PerRank(dist.get_rank())}, format="zarr")
    return storage.made


def _load(path: Path, block_rows: int) -> int:
    state = {**mixed_state(block_rows), "rng": PerRank(-1, merge=lambda values, rank, world: sum(values))}
    expected = plain({key: value for key, value in state.items() if key != "rng"})
    erase(state)
    load(path, state)
    assert state["rng"].value in (dist.get_rank(), 3)
    return assert_equal(expected, plain({key: value for key, value in state.items() if key != "rng"}))


@pytest.mark.parametrize("block_rows", [pytest.param(1, marks=pytest.mark.part("formats")), 2])
def test_round_trip_at_every_world_size(block_rows: int, tmp_path: Path) -> None:
    """Saved by three ranks, loaded by one to four; no file is written by two ranks."""
    made = run_ranks(3, _save, tmp_path / "c", block_rows)

    names = [name for of_rank in made for name in of_rank]
    assert len(names) == len(set(names)) > 60
    assert all(any("/c/" in name for name in of_rank) for of_rank in made)
    for world in (1, 2, 3, 4):
        assert min(run_ranks(world, _load, tmp_path / "c", 1)) > 20_000
    report = verify(tmp_path / "c")
    assert report.ok and report.num_bytes > 80_000


def test_plain_zarr_opens_it(tmp_path: Path) -> None:
    """zarr alone finds every array with its values; the layout is in the attributes."""
    run_ranks(2, _save, tmp_path / "c", 2)

    group = zarr.open_group(tmp_path / "c", mode="r")["arrays"]

    for name, shape in SHAPES.items():
        array = group[f"model/{name}"]
        assert array.shape == shape
        assert torch.equal(full(name, shape), torch.from_numpy(array[...]))
        assert array.attrs["logical_dtype"] == "float32"
    assert group["model/w"].attrs["block_numel"] == 20
    assert group["model/w"].attrs["layout"]["num_shards"] == 2
    bits = torch.from_numpy(group["stock/plain"][...]).view(torch.bfloat16)
    assert group["stock/plain"].attrs["logical_dtype"] == "bfloat16"
    assert torch.equal(full("plain", (5, 2), torch.bfloat16), bits)
    assert torch.equal(full("shard1", (6, 9)), torch.from_numpy(group["stock/shard1"][...]))
    assert float(group["stock/scalar"][...]) == 4.5
    assert group["stock/empty"].shape == (0, 4)


def test_chunks_follow_blocks_of_rows() -> None:
    """Where ranks' boundaries fall between rows, every chunk lies on one rank; inside rows, they stay small."""
    specs = [TensorSpec("a", (4096, 640), "float32", 8 * 640), TensorSpec("b", (9990, 101), "float32", 1)]
    layout = plan_group(specs, 6, align_numel=1)
    entries = tuple(
        Entry(spec.fqn, "float32", spec.shape, 0, (LayoutCut(0, i),)) for i, spec in enumerate(specs)
    )
    structure = Structure({}, entries, ((Axis(6, 1),),), (layout,))
    manifest = build_manifest([(RankSet.world(6), structure)], save_id="0" * 16, world_size=6)
    on_one_rank = []
    for place, entry in enumerate(entries):
        chunks = chunk_shape(manifest, place)
        assert chunks[0] > 1 and chunks[0] * chunks[1] * 4 <= 4 << 20
        for box in chunk_boxes(entry.shape, chunks):
            inside = clipped(box, entry.shape)
            wanted = Region(inside, Range(0, inside.numel))
            touched = manifest.distributions[place].touching(entry.shape, wanted, (layout,))
            on_one_rank.append((place, sum(1 for _, region in touched if overlaps(region, wanted)) == 1))

    assert all(alone for place, alone in on_one_rank if place == 0)
    assert len([place for place, _ in on_one_rank if place == 0]) >= 5
    assert not all(alone for place, alone in on_one_rank if place == 1)


def test_zeros_are_written_too(tmp_path: Path) -> None:
    """A chunk of zeros is a file as well, so that a lost one is noticed."""
    save(tmp_path / "c", {"zeros": torch.zeros(3000, 1000)}, format="zarr")

    chunks = [path for path in (tmp_path / "c").glob("arrays/zeros/c/*/*") if path.is_file()]

    assert len(chunks) == 3
    chunks[1].unlink()
    with pytest.raises(CorruptCheckpointError, check=lambda error: str(chunks[1]) in str(error)):
        load(tmp_path / "c", {"zeros": torch.ones(3000, 1000)})
    assert not verify(tmp_path / "c").ok


@pytest.mark.parametrize("kind", ["flip", "cut", "metadata"])
def test_damage_is_found(kind: str, tmp_path: Path) -> None:
    """A flipped bit, a short chunk, changed metadata: named before anything of it is taken."""
    save(tmp_path / "c", {"a": torch.arange(100.0), "b": torch.arange(50.0)}, format="zarr")
    (chunk,) = (tmp_path / "c").glob("arrays/b/c/0")
    data = bytearray(chunk.read_bytes())
    if kind == "flip":
        data[77] ^= 4
        chunk.write_bytes(data)
    elif kind == "cut":
        chunk.write_bytes(data[:-1])
    else:
        (chunk.parent.parent / "zarr.json").write_text("{}")
    problems = "\n".join(problem.text for problem in verify(tmp_path / "c").problems)

    assert "tensor b" in problems and "tensor a" not in problems
    if kind != "metadata":  # our loader does not need zarr's own
        state = {"a": torch.zeros(100), "b": torch.zeros(50)}
        with pytest.raises(CorruptCheckpointError, match="tensor b"):
            load(tmp_path / "c", state, verify="before")
        assert not state["a"].any()
        with pytest.raises(CorruptCheckpointError, match="tensor b"):
            load(tmp_path / "c", state)
        assert not state["b"].any()  # whole chunks are read, and proven before they are copied


def test_verify_checks_the_chunks_of_an_array_whose_metadata_is_damaged(tmp_path: Path) -> None:
    """All files that are damaged are reported in one run, as the manifest knows the chunks."""
    save(tmp_path / "c", {"a": torch.arange(100.0)}, format="zarr")
    (chunk,) = (tmp_path / "c").glob("arrays/a/c/0")
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    settings = chunk.parent.parent / "zarr.json"
    settings.write_text("{}")

    found = {problem.where for problem in verify(tmp_path / "c").problems}

    assert found == {str(file.relative_to(tmp_path / "c")) for file in (chunk, settings)}


def test_names_that_are_no_file_names(tmp_path: Path) -> None:
    """Keys such as '..' or '/' stay inside the folder and come back."""
    state = {"..": {".": torch.ones(2)}, "a/b": torch.ones(3), "": torch.ones(4), "ü%2E": torch.ones(5)}
    save(tmp_path / "in" / "c", state, format="zarr")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["c"]
    assert {stored.shape.numel() for stored in read_state(tmp_path / "in" / "c").values()} == {2, 3, 4, 5}
    assert all(stored.read().eq(1).all() for stored in read_state(tmp_path / "in" / "c").values())


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    """Files of an equal size and different bytes: neighbors in the list of all."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size, []).append(file)
    return [
        (a, b) for alike in by_size.values() for a, b in pairwise(alike) if a.read_bytes() != b.read_bytes()
    ]


def _exchange(a: Path, b: Path) -> None:
    left, right = a.read_bytes(), b.read_bytes()
    a.write_bytes(right)
    b.write_bytes(left)


def _assert_found(path: Path, saved: Path) -> None:
    """verify names the file; a load raises and leaves the state alone, or did not need the file."""
    names = {problem.where for problem in verify(path).problems}
    assert str(saved.relative_to(path)) in names
    state = {
        stored.name: torch.full(stored.shape, 7, dtype=stored.dtype) for stored in read_state(path).values()
    }
    if saved.name == "zarr.json":
        return
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.where.startswith(str(path))):
        load(path, state, strict=False, verify="before")
    assert all(bool((tensor == 7).all()) for tensor in state.values())


def _equal_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Flat names; tensors of one shape, one of several chunks."""
    values = torch.Generator().manual_seed(seed)
    shapes = {"a": (9, 10), "b": (9, 10), "c": (9, 10), "long": (64, 10)}
    return {name: torch.randn(shape, generator=values) for name, shape in shapes.items()}


def test_files_that_changed_places_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound chunks of one size, of two tensors or of one, and two arrays' metadata, each pair exchanged."""
    monkeypatch.setattr(zarr_layout, "_TARGET_BYTES", 400)
    save(tmp_path / "c", _equal_tensors(0), format="zarr")
    pairs = _pairs(tmp_path / "c")
    tensors = [[file.relative_to(tmp_path / "c").parts[:2] for file in pair] for pair in pairs]
    kinds = {
        (one == other, a.name == "zarr.json") for (one, other), (a, _) in zip(tensors, pairs, strict=True)
    }

    assert {(True, False), (False, False), (False, True)} <= kinds and len(pairs) > 8
    for a, b in pairs:
        _exchange(a, b)
        _assert_found(tmp_path / "c", a)
        _exchange(a, b)
    assert verify(tmp_path / "c").ok


def _save_equal(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(value, mesh, [Shard(1)]) for name, value in _equal_tensors(0).items()}
    save(path, state, format="zarr")


def test_changed_places_between_ranks_are_found(tmp_path: Path) -> None:
    """As above for chunks that several ranks wrote, from each of which a table comes."""
    run_ranks(3, _save_equal, tmp_path / "c")
    pairs = [pair for pair in _pairs(tmp_path / "c") if pair[0].name != "zarr.json"]

    assert len(pairs) > 8
    for a, b in pairs[::3]:
        _exchange(a, b)
        _assert_found(tmp_path / "c", a)
        _exchange(a, b)
    assert verify(tmp_path / "c").ok


def test_chunks_of_an_older_save_are_found(tmp_path: Path) -> None:
    """Sound chunks, and the file with their checksums, that went from one step to the next."""
    for step in range(2):
        save(tmp_path / f"{step}", _equal_tensors(step), format="zarr")
    files = sorted(path for path in (tmp_path / "1").rglob("*") if path.is_file())
    files = [file for file in files if file.name != "manifest.json"]

    for file in files:
        older = tmp_path / "0" / file.relative_to(tmp_path / "1")
        good = file.read_bytes()
        if older.read_bytes() == good:
            assert file.name == "zarr.json"  # says nothing of the step
            continue
        file.write_bytes(older.read_bytes())
        _assert_found(tmp_path / "1", file)
        file.write_bytes(good)
    assert verify(tmp_path / "1").ok and len(files) > 8


def _fails(path: Path) -> str:
    storage: Any = LocalStorage(path)
    if dist.get_rank() == 1:
        storage = FaultyStorage(storage, fail_at=3)
    try:
        Saver(storage, coordinator_for(), format="zarr").save(mixed_state(1))
    except Exception as error:  # noqa: BLE001  whatever it is, the test looks at it
        return str(error)
    return "no error"


def test_a_full_disk_on_one_rank(tmp_path: Path) -> None:
    """Ranks that exchange parts of chunks do not hang when one of them cannot write."""
    for text in run_ranks(3, _fails, tmp_path / "c"):
        assert f"[Errno {errno.ENOSPC}]" in text
    assert not (tmp_path / "c").exists() and not (tmp_path / ".c.saving").exists()


def test_inside_an_event_loop(tmp_path: Path) -> None:
    """A notebook's cell runs in an event loop, and the zarr library needs one of its own."""
    state = {"a": torch.zeros(3)}

    async def cell() -> bool:
        save(tmp_path / "c", {"a": torch.arange(3.0)}, format="zarr")
        load(tmp_path / "c", state)
        return verify(tmp_path / "c").ok

    assert asyncio.run(cell()) and state["a"].tolist() == [0, 1, 2]


def _threads_left(path: Path) -> set[str]:
    before = set(threading.enumerate())
    state = {
        "model": {"w": torch.ones(13, 7)}
    }  # a shape that no other test has: what is cached starts nothing
    save(path, state, format="zarr")
    load(path, state)
    return {thread.name for thread in set(threading.enumerate()) - before if "zarr" in thread.name}


def test_no_thread_of_the_library_is_left(tmp_path: Path) -> None:
    """The library's event loop never starts: a busy process may fail to end it at its exit."""
    assert run_ranks(2, _threads_left, tmp_path / "c") == [set(), set()]


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    """The error names the formats there are."""
    with pytest.raises(
        ArgumentError, check=lambda error: error.got == "'hdf5'" and "'zarr'" in error.expected
    ):
        save(tmp_path, {}, format="hdf5")  # type: ignore[arg-type]


def test_a_manager_beside(tmp_path: Path) -> None:
    """A zarr folder is a step like any other."""
    save(tmp_path / "step-00000005", {"a": torch.arange(4)}, format="zarr")
    state = {"a": torch.zeros(4, dtype=torch.int64)}
    restored = CheckpointManager(tmp_path).restore(state)

    assert restored is not None and restored.step == 5 and state["a"].tolist() == [0, 1, 2, 3]
