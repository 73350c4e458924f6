"""How bytes come back: mapped or read, whole or scattered; and how little planning many tensors take."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.striped_saves import save_striped
from vescale_fsdp.checkpoint import load, read_state, save
from vescale_fsdp.checkpoint import verify as verify_files
from vescale_fsdp.checkpoint.load import Verify
from vescale_fsdp.checkpoint.native import read as native_read
from vescale_fsdp.checkpoint.storage import local as local_module
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage
from vescale_fsdp.errors import CorruptCheckpointError, PartialLoadError
from vescale_fsdp.layout.distribution import Distribution
from vescale_fsdp.layout.geometry import Box, Range
from vescale_fsdp.layout.region import Region, whole_region

MODES: list[Verify] = ["before", "while", "never"]


@pytest.fixture(params=["mapped", "read", "cold"])
def mapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without a system that maps files and says what went wrong; and with files that the page cache does not
    hold."""
    if request.param == "read":
        monkeypatch.setattr(local_module, "_mapped", lambda path, start, stop: None)
    if request.param == "cold":
        monkeypatch.setattr(local_module, "is_cached", lambda path, start, stop: False)
    return bool(request.param != "read")


@pytest.mark.parametrize("start, stop", [(0, 10_000), (1, 2), (4095, 4097), (9_999, 10_000), (77, 77)])
def test_a_view_is_the_files_bytes(tmp_path: Path, mapped: bool, start: int, stop: int) -> None:
    """Any range, at any alignment, whether mapped or read."""
    content = os.urandom(10_000)
    (tmp_path / "f").write_bytes(content)

    reader = LocalStorage(tmp_path).open_file("f")

    assert bytes(reader.view(start, stop)) == content[start:stop]
    with pytest.raises(EOFError):
        reader.view(9_000, 10_001)


@pytest.mark.parametrize(
    "count, parts, order", [(7, 3, [0, 3, 6, 1, 4, 2, 5]), (2, 1, [0, 1]), (2, 2, [0, 1])]
)
def test_threads_that_take_turns_are_far_apart(count: int, parts: int, order: list[int]) -> None:
    """Each part in its order, all parts at once."""
    assert native_read._interleaved(range(count), parts) == order


def test_what_is_not_cached_is_read_by_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this rank's share of the cores for what is at hand, which wait for nothing; more for a disk."""
    values = torch.arange(1 << 20)
    save(tmp_path / "c", {"w": values})
    storage = LocalStorage(tmp_path / "c")
    storage.read_threads, storage.far_read_threads = 1, 3
    found: list[tuple[int, int]] = []
    real = native_read._interleaved

    def recorded(items: Sequence[Any], num_parts: int) -> list[Any]:
        found.append((len(items), num_parts))
        return real(items, num_parts)

    monkeypatch.setattr(native_read, "_JOB_BYTES", 1 << 20)
    monkeypatch.setattr(native_read, "_interleaved", recorded)
    for is_cached in (True, False):
        monkeypatch.setattr(local_module, "is_cached", lambda *_, told=is_cached: told)
        state = {"w": torch.zeros(1 << 20, dtype=torch.int64)}
        load(storage, state, verify="never")
        assert torch.equal(state["w"], values)
    assert found == [(8, 3)]


def test_the_page_cache_is_asked(tmp_path: Path) -> None:
    """What was just written is at hand; what was dropped is not, and asking does not bring it."""
    content = os.urandom(4 << 20)
    (tmp_path / "f").write_bytes(content)
    reader = LocalStorage(tmp_path).open_file("f")
    assert reader.is_at_hand(5, len(content))
    file = os.open(tmp_path / "f", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    is_held = reader.is_at_hand(5, len(content))  # a file system in memory drops nothing

    assert reader.is_at_hand(5, len(content)) == is_held
    assert reader.is_at_hand(0, 100)  # so little is not worth the question


def _tensors(seed: int) -> dict[str, Any]:
    """Some of every way to take bytes: direct, strided, empty, small, and larger than a stripe."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {f"t{i}": torch.randn(70, 31, generator=generator) for i in range(6)}
    tensors["strided"] = torch.randn(40, 50, generator=generator).t()
    tensors["large"] = torch.randn(1500, 1000, generator=generator)
    tensors["half"] = torch.randn(33, generator=generator).bfloat16()
    tensors["empty"] = torch.empty(0, 3)
    return {"model": tensors}


@pytest.mark.parametrize("verify", MODES)
def test_every_mode_brings_the_same_values(tmp_path: Path, mapped: bool, verify: Verify) -> None:
    """Whole tensors, and boxes that are strided in the file."""
    save(tmp_path / "c", _tensors(0))
    state = _tensors(1)

    load(tmp_path / "c", state, verify=verify)

    expected = _tensors(0)["model"]
    for name, value in state["model"].items():
        assert torch.equal(expected[name], value), name
    assert state["model"]["strided"].stride() == (1, 50)
    box = read_state(tmp_path / "c")["model.large"].read(Box((3, 500), (1000, 7)), verify=verify != "never")
    assert torch.equal(expected["large"][3:1003, 500:507], box)


def _flip(folder: Path, at: int) -> None:
    (file,) = folder.glob("data-*/*")
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "stripe_mib, names", [(1, "model.large"), (4, "model.large, model.half")]
)  # today's stripes, and those of older checkpoints
@pytest.mark.parametrize("verify", ["before", "while"])
def test_damage_names_its_tensor(
    tmp_path: Path, mapped: bool, verify: Verify, stripe_mib: int, names: str
) -> None:
    """Mode "before" leaves all tensors alone; "while" names what it has filled by then."""
    save_striped(tmp_path / "c", _tensors(0), stripe_bytes=stripe_mib << 20)
    state = _tensors(1)
    load(tmp_path / "c", state, verify=verify)
    assert all(torch.equal(value, state["model"][name]) for name, value in _tensors(0)["model"].items())
    _flip(tmp_path / "c", (4 << 20) + 5)  # in "large", with others behind it in the last 1.8 MiB of the file
    state = _tensors(1)

    with pytest.raises(CorruptCheckpointError, match=f": {names}\n") as caught:
        load(tmp_path / "c", state, verify=verify)

    (problem,) = verify_files(tmp_path / "c").problems
    assert f": {names}\n" in problem.text

    overwritten = caught.value.overwritten if isinstance(caught.value, PartialLoadError) else ()
    assert verify == "while" or not overwritten
    for name, value in _tensors(1)["model"].items():
        assert f"model.{name}" in overwritten or torch.equal(value, state["model"][name])
    t0 = (
        "model.t0" in overwritten
    )  # of a file that is not at hand nothing is taken before all of a job is proven
    assert torch.equal(_tensors(0 if t0 else 1)["model"]["t0"], state["model"]["t0"])


@pytest.mark.parametrize("verify", ["before", "while"])
@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
def test_damage_beside_what_is_wanted(tmp_path: Path, mapped: bool, verify: Verify, damaged: int) -> None:
    """A stripe is proven whole: what is wanted of it and what lies before, between and after."""
    names = ["a", "b", "c", "d"]
    one = torch.arange(10_000.0)
    save(tmp_path / "c", {name: one + i for i, name in enumerate(names)})
    wanted = {"b": torch.zeros(10_000), "d": torch.zeros(10_000)}
    load(tmp_path / "c", wanted, include=("b", "d"), verify=verify)
    assert torch.equal(one + 1, wanted["b"]) and torch.equal(one + 3, wanted["d"])

    (file,) = (tmp_path / "c").glob("data-*/*")
    place = file.read_bytes().index((one + damaged).numpy().tobytes())
    _flip(tmp_path / "c", place + 20_000)

    with pytest.raises(CorruptCheckpointError):
        load(tmp_path / "c", wanted, include=("b", "d"), verify=verify)
    load(tmp_path / "c", wanted, include=("b", "d"), verify="never")
    assert torch.equal(one + 1, wanted["b"]) == (damaged != 1)


@pytest.mark.parametrize("verify", MODES)
def test_a_file_that_shrinks_while_it_is_read(
    tmp_path: Path, mapped: bool, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are gone are an error with the file's name, not the end of the process."""
    save(tmp_path / "c", _tensors(0))
    (file,) = (tmp_path / "c").glob("data-*/*")
    from vescale_fsdp.checkpoint.native.read import ReadPlan

    jobs = ReadPlan._jobs

    def shrinking(self: ReadPlan, whole_stripes: bool) -> Any:
        os.truncate(file, 1 << 20)
        return jobs(self, whole_stripes)

    monkeypatch.setattr(ReadPlan, "_jobs", shrinking)
    with pytest.raises(CorruptCheckpointError, match=file.name):
        load(tmp_path / "c", _tensors(1), verify=verify)


@pytest.mark.parametrize("verify", MODES)
def test_one_stored_tensor_fills_several(tmp_path: Path, mapped: bool, verify: Verify) -> None:
    """Names that shared memory when they were saved, and share none now, each get the values."""
    one = torch.randn(70, 31)
    save(tmp_path / "c", {"a": one, "b": one, "next": one + 1})
    state = {name: torch.zeros(70, 31) for name in ("a", "b", "next")}

    load(tmp_path / "c", state, verify=verify)

    assert (
        torch.equal(one, state["a"]) and torch.equal(one, state["b"]) and torch.equal(one + 1, state["next"])
    )


def _counted(
    monkeypatch: pytest.MonkeyPatch,
    found: Counter[str],
    owner: type,
    name: str,
    weight: Callable[..., int] = lambda *args, **kwargs: 1,
) -> None:
    real = getattr(owner, name)

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[name] += weight(*args, **kwargs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, counting)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.part("formats"))])
def test_many_small_tensors_are_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Arithmetic is done once per kind of tensor, and reads do not grow with their number."""
    buffer = torch.arange(count * 100, dtype=torch.float32)
    state = {f"layer{i}": buffer[i * 100 : (i + 1) * 100] for i in range(count)}
    save(tmp_path / "c", state)
    state_bytes = buffer.nbytes
    buffer.zero_()
    found: Counter[str] = Counter()
    _counted(monkeypatch, found, Distribution, "region")
    _counted(monkeypatch, found, Distribution, "touching")
    _counted(monkeypatch, found, local_module._LocalReader, "read_at")
    _counted(monkeypatch, found, local_module._LocalReader, "view")

    load(tmp_path / "c", state)

    assert torch.equal(torch.arange(count * 100, dtype=torch.float32), buffer)
    assert found["region"] <= 2 and found["touching"] <= 1
    assert found["read_at"] <= 4 + state_bytes // native_read._SLICE_BYTES and found["view"] <= 4


@pytest.mark.parametrize("verify", MODES)
def test_gaps_cost_no_requests(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network, tensors with small gaps between them come with one request for all, not one for each."""
    url = f"memory://gaps/{verify}"
    save(url, {f"{i:03}.{kind}": torch.full((500,), float(i)) for i in range(200) for kind in "ab"})
    state = {f"{i:03}.{kind}": torch.zeros(500) for i in range(200) for kind in "ab"}
    found: Counter[str] = Counter()
    _counted(monkeypatch, found, MemoryFileSystem, "cat_file")

    load(url, state, include="*.a", verify=verify)

    for i in range(200):
        assert state[f"{i:03}.a"].eq(i).all() and not state[f"{i:03}.b"].any()
    assert found["cat_file"] <= 5  # manifest, header, table; what is proven first comes twice


def test_large_gaps_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors far apart come without the megabytes between them."""
    storage = RemoteStorage("memory://gaps/large")
    middle = torch.zeros(1 << 20)  # 4 MiB
    save_striped(storage, {"a": torch.ones(10), "middle": middle, "z": torch.ones(10)}, stripe_bytes=64 << 10)
    state = {"a": torch.zeros(10), "middle": middle, "z": torch.zeros(10)}
    found: Counter[str] = Counter()
    _counted(monkeypatch, found, MemoryFileSystem, "cat_file", lambda path, start=0, end=0: end - start)

    load(storage, state, include=("a", "z"))

    assert state["a"].all() and state["z"].all()
    assert 64 << 10 < found["cat_file"] < 3 * (64 << 10)  # the first stripe and the short last one


def test_a_part_and_the_whole_at_once(tmp_path: Path) -> None:
    """A smaller range that starts where a larger one does must not cut it short."""
    whole = torch.arange(3000.0).reshape(30, 100)
    save(tmp_path / "c", {"a": whole})
    reader = read_state(tmp_path / "c")
    regions = [whole_region((30, 100)), Region(Box((0, 0), (2, 100)), Range(0, 200))]
    found = [torch.zeros(30, 100), torch.zeros(2, 100)]

    for verify in (True, False):
        reader.fill(
            [(0, region, into.zero_()) for region, into in zip(regions, found, strict=True)], verify=verify
        )

        assert torch.equal(whole, found[0]) and torch.equal(whole[:2], found[1])
