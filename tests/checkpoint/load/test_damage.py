"""Damaged, hostile or unfitting checkpoints: clear errors, before a tensor is touched; verify finds all."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.checkpoint_states import erase, sealed_manifest
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp.checkpoint import load, read_state, save, verify
from vescale_fsdp.checkpoint.load import Verify
from vescale_fsdp.checkpoint.manifest.manifest import FORMAT_VERSION
from vescale_fsdp.checkpoint.save import Format
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DamagedLoadError,
    PartialLoadError,
    StorageError,
)


def _state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randn(300, 100, generator=generator) for i in range(4)}
    return {"model": tensors, "step": 5}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A good checkpoint of one rank."""
    save(tmp_path / "c", _state(), fingerprint=True)
    assert verify(tmp_path / "c").ok and verify(tmp_path / "c").num_bytes > 480_000
    return tmp_path / "c"


def _data_file(path: Path) -> Path:
    (found,) = path.glob("data-*/*.safetensors")
    return found


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def _assert_refused(path: Path, *texts: str, error: type[Exception] = CheckpointError) -> None:
    """Loading raises, names what it should and what it has overwritten, if anything; verify says the same."""
    for mode in get_args(Verify):
        if mode == "never":
            continue
        state = _state(seed=1)
        with pytest.raises(error) as caught:
            load(path, state, verify=mode)
        for text in texts:
            assert text in str(caught.value)
        is_partial = isinstance(caught.value, PartialLoadError)
        overwritten = caught.value.overwritten if isinstance(caught.value, PartialLoadError) else ()
        assert bool(overwritten) == is_partial and not (is_partial and mode == "before")
        for name, value in _state(seed=1)["model"].items():
            assert f"model.{name}" in overwritten or torch.equal(value, state["model"][name])
    report = verify(path)
    assert not report.ok
    assert all(text in "\n".join(problem.text for problem in report.problems) for text in texts)


def _payload_start(file: Path) -> int:
    return 8 + int(struct.unpack("<Q", file.read_bytes()[:8])[0])


@pytest.mark.parametrize("place", ["header", "first piece", "last piece", "table", "last byte"])
def test_one_flipped_bit(saved: Path, place: str) -> None:
    """A flipped bit anywhere is named with its file and tensor before a tensor is touched."""
    file = _data_file(saved)
    start, size = _payload_start(file), file.stat().st_size
    at = {
        "header": 40,
        "first piece": start,
        "last piece": size - 17,
        "table": size - 16,
        "last byte": size - 1,
    }
    _flip(file, at[place])

    _assert_refused(saved, file.name, error=CorruptCheckpointError)


def test_a_flipped_bit_names_the_tensor(tmp_path: Path) -> None:
    """With one stripe per tensor the error names exactly the tensor that is damaged."""
    from tests.support.striped_saves import save_striped

    save_striped(tmp_path / "c", _state(), stripe_bytes=4096, fingerprint=True)
    file = _data_file(tmp_path / "c")
    _flip(file, _payload_start(file) + 2 * 120_000 + 60_000)

    _assert_refused(tmp_path / "c", "model.t2", error=CorruptCheckpointError)
    assert torch.equal(_state()["model"]["t0"], read_state(tmp_path / "c")["model.t0"].read())
    with pytest.raises(CorruptCheckpointError, match=r"model\.t2"):
        read_state(tmp_path / "c")["model.t2"].read()


def test_verify_while_reading(saved: Path) -> None:
    """Damage is found, and what was overwritten by then is named; a state that is trusted takes it."""
    _flip(_data_file(saved), _data_file(saved).stat().st_size // 2)

    with pytest.raises(DamagedLoadError) as caught:
        load(saved, _state(1))
    again = pickle.loads(pickle.dumps(caught.value))  # as it travels between ranks
    assert again.overwritten == caught.value.overwritten == tuple(f"model.t{i}" for i in range(4))
    load(saved, _state(1), verify="never")


@pytest.mark.parametrize("cut", [1, 8, 100_000, 480_000, 1_000_000])
def test_a_truncated_file_is_refused_by_its_size(saved: Path, cut: int) -> None:
    """A file that lost its end is refused by its size, naming what was lost."""
    file = _data_file(saved)
    file.write_bytes(file.read_bytes()[:-cut])

    _assert_refused(saved, file.name, "model.t3" if 16 < cut < 480_000 else "", error=CorruptCheckpointError)


def test_a_missing_file_is_named_with_its_tensors(saved: Path) -> None:
    """A missing file is named with the tensors it held."""
    file = _data_file(saved)
    file.unlink()

    _assert_refused(saved, file.name, "model.t0", error=CorruptCheckpointError)


def test_a_file_of_another_save_is_recognized(saved: Path, tmp_path: Path) -> None:
    """A file of the same size from another save of the same state is recognized."""
    save(tmp_path / "other", _state(seed=2), fingerprint=True)
    file = _data_file(saved)
    file.write_bytes(_data_file(tmp_path / "other").read_bytes())

    _assert_refused(saved, file.name, "another checkpoint's file", error=CorruptCheckpointError)


def _edit(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool = True) -> None:
    """Change a manifest; with ``seal`` its checksum is made to fit."""
    file = path / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_bytes(sealed_manifest(data) if seal else json.dumps(data).encode())


def test_unsealed_edit_of_the_manifest(saved: Path) -> None:
    """Any change of the manifest breaks its checksum."""
    _edit(saved, lambda data: data["tensors"][0].update(shape=[100, 300]), seal=False)

    _assert_refused(saved, "manifest.json", "checksum", error=CorruptCheckpointError)


def test_a_key_that_occurs_twice(saved: Path) -> None:
    """Of two equal keys readers may take either: such a manifest is refused although its content adds up."""
    file = saved / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"world_size":1', '"world_size":9,"world_size":1', 1))
    assert json.loads(file.read_text()) == json.loads(text)

    _assert_refused(saved, "manifest.json", "twice", error=CorruptCheckpointError)


def test_manifest_of_a_newer_version(saved: Path) -> None:
    """A newer version is named as such, whatever else the manifest holds."""
    _edit(saved, lambda data: data.update(version=FORMAT_VERSION + 1, extra=1))

    _assert_refused(saved, "newer version", "manifest.json", "update vescale_fsdp")
    with pytest.raises(CheckpointError) as caught:
        read_state(saved)
    assert not isinstance(caught.value, CorruptCheckpointError)


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_the_version(saved: Path, bit: int) -> None:
    """Whatever digit or sign a flipped bit makes of it, it is damage, and nobody is told to update."""
    file = saved / "manifest.json"
    raw = bytearray(file.read_bytes())
    at = raw.index(b'"version":1') + len(b'"version":')
    raw[at] ^= 1 << bit
    file.write_bytes(raw)

    _assert_refused(saved, "manifest.json", error=CorruptCheckpointError)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_state(saved)
    assert caught.value.todo is None or "update" not in caught.value.todo


def _put(path: Path, kind: str) -> None:
    """Something that is no file, in the place of a file."""
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(os.path.relpath(path))  # a socket's path may not be long


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "link to a device"])
@pytest.mark.parametrize(
    ("form", "place"),
    [("native", "manifest.json"), ("native", "data-*/*.safetensors"), ("zarr", "arrays/model/t1/c/0/0")],
)
def test_what_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, form: Format, place: str
) -> None:
    """A pipe, which would be waited for, and its like are damage, wherever a file is expected."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "c", _state(), format=form, fingerprint=True)
    (file,) = (tmp_path / "c").glob(place)
    _put(file, kind)

    _assert_refused(tmp_path / "c", str(file), error=CorruptCheckpointError)


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("save_id", value="../../etc/passwd"),
        _set("save_id", value="/abs"),
        _set("save_id", value=7),
        _set("world_size", value=1 << 40),
        _set("world_size", value=0),
        _set("world_size", value=True),
        _set("stripe_bytes", value=0),
        _set("stripe_bytes", value=1 << 60),
        _set("blob_bytes", value=-1),
        _set("split_bytes", value="x"),
        _set("rank_sets", 0, value=[[0, 1 << 40, 1, 1, 0]]),
        _set("rank_sets", 0, value=[[5, 1, 1, 1, 0]]),
        _set("tensors", 0, "shape", value=[-1]),
        _set("tensors", 0, "shape", value=[1 << 40, 1 << 40]),
        _set("tensors", 0, "dtype", value="float31"),
        _set("tensors", 0, "axes", value=9),
        _set("tensors", 0, "ranks", value=-1),
        _set("tensors", 0, "cuts", value=[["layout", 0, 0]]),
        _set("tensors", 0, "cuts", value=[["spiral", 0]]),
        _set("tensors", 0, "cuts", value=[["shard", -1]]),
        _set("tensors", value=None),
        _set("axes", value=[[{"size": 0, "stride": 0}]]),
    ],
)
def test_impossible_manifests_are_refused_before_they_are_used(
    saved: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Sealed manifests with impossible sizes, paths or references are refused before they are acted on."""
    _edit(saved, change)

    _assert_refused(saved, "")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"format":"x"}', b"\xff\xfe", b"[" * 100_000])
def test_manifests_that_are_none(saved: Path, raw: bytes) -> None:
    """What is not a manifest is called damaged."""
    (saved / "manifest.json").write_bytes(raw)

    _assert_refused(saved, "manifest.json", error=CorruptCheckpointError)


@pytest.mark.parametrize("length", [0, 1 << 62, (1 << 64) - 1])
def test_absurd_header_sizes(saved: Path, length: int) -> None:
    """A header that claims another size is refused; nothing of that size is ever allocated."""
    file = _data_file(saved)
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])

    _assert_refused(saved, file.name, error=CorruptCheckpointError)


def test_no_manifest_no_checkpoint(saved: Path) -> None:
    """A folder without a manifest is not complete, and says so."""
    (saved / "manifest.json").unlink()

    _assert_refused(saved, "There is no checkpoint")


def test_wrong_shape_and_dtype(saved: Path) -> None:
    """The first tensor that does not fit is named with both shapes or dtypes; nothing is loaded."""
    for wrong in (torch.zeros(300, 101), torch.zeros(300, 100, dtype=torch.bfloat16)):
        state = _state(1)
        state["model"]["t3"] = wrong
        with pytest.raises(CheckpointError, match=r"model.t3"):
            load(saved, state)
        assert torch.equal(_state(1)["model"]["t0"], state["model"]["t0"])


def test_missing_and_unexpected_keys(saved: Path) -> None:
    """Strict loading names both; otherwise they are reported and the rest is loaded."""
    state = _state(1)
    state["model"]["new"] = torch.zeros(3)
    del state["model"]["t2"], state["step"]
    with pytest.raises(CheckpointError, match=r"(?s)model.new.*model.t2"):
        load(saved, state)
    assert torch.equal(_state(1)["model"]["t0"], state["model"]["t0"])

    report = load(saved, state, strict=False)

    assert report.missing == ("model.new",) and report.unexpected == ("model.t2",)
    assert report.ignored == ("step",)
    assert torch.equal(_state()["model"]["t0"], state["model"]["t0"])


def test_partial_load_by_pattern(saved: Path) -> None:
    """Only leaves that fit a pattern are loaded, and only they must match."""
    state = {"model": {"t1": torch.zeros(300, 100), "mine": torch.zeros(2)}}

    load(saved, state, include="model.t1")

    assert torch.equal(_state()["model"]["t1"], state["model"]["t1"])


def test_kinds_that_do_not_fit(saved: Path) -> None:
    """A number where a tensor was saved, and the reverse, are named."""
    for key, value in (("t0", 3), ("t0", {"a": 1})):
        state = _state(1)
        state["model"][key] = value
        with pytest.raises(CheckpointError, match=r"model.t0"):
            load(saved, state)
    state = _state(1)
    state["step"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="step"):
        load(saved, state)


def _load_damaged(path: Path) -> list[tuple[str, tuple[str, ...], int]]:
    """Save, damage the second rank's file, load; the error, what it names, and how many elements were written."""
    tensors = {"w": distribute_tensor(torch.arange(1.0, 2001.0), cpu_mesh(), [Shard(0)])}
    save(path, tensors)
    if dist.get_rank() == 1:
        (file,) = path.glob("data-*/00001-of-00002*")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    found = []
    modes: tuple[Verify, ...] = ("before", "while")
    for mode in modes:
        erase(tensors)
        with pytest.raises(CorruptCheckpointError) as caught:
            load(path, tensors, verify=mode)
        overwritten = caught.value.overwritten if isinstance(caught.value, DamagedLoadError) else ()
        found.append((str(caught.value), overwritten, int(tensors["w"].to_local().count_nonzero())))
    return found


def test_damage_that_one_rank_meets(tmp_path: Path) -> None:
    """The other rank, whose bytes are good, raises too; "before" neither has overwritten anything."""
    for rank, (before, meanwhile) in enumerate(run_ranks(2, _load_damaged, tmp_path / "c")):
        assert "00001-of-00002" in before[0] and before[1:] == ((), 0)
        assert rank == 1 or "ranks [1]" in before[0]
        assert "00001-of-00002" in meanwhile[0] and meanwhile[1] == ("w",) and meanwhile[2]
        assert rank == 1 or "ranks [1]" in meanwhile[0]


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, torch.zeros(2, 2).to_sparse(), torch.empty(2, device="meta"), {"a": {object(): 1}}],
)
def test_values_that_cannot_be_saved(tmp_path: Path, value: Any) -> None:
    """What has no safe encoding is refused with its place; nothing is written."""
    with pytest.raises(CheckpointError, match=r"deep\.here"):
        save(tmp_path / "c", {"deep": {"here": value}})
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_an_existing_checkpoint_is_kept(saved: Path) -> None:
    """Saving over a checkpoint needs overwrite=True, which leaves one good checkpoint and no rest."""
    with pytest.raises(CheckpointError, check=lambda error: error.got == "manifest.json"):
        save(saved, _state(3))
    assert torch.equal(_state()["model"]["t0"], read_state(saved)["model.t0"].read())

    save(saved, _state(3), overwrite=True)

    assert torch.equal(_state(3)["model"]["t0"], read_state(saved)["model.t0"].read())
    assert len(list(saved.glob("data-*"))) == 1


def test_two_jobs_one_path(tmp_path: Path) -> None:
    """While one save holds the folder, another is refused; afterwards the path is free again."""
    from vescale_fsdp.checkpoint.storage.open import open_storage

    storage: Storage = open_storage(tmp_path / "c")
    with (
        storage.lock(),
        pytest.raises(StorageError, check=lambda error: error.where == str(tmp_path / "c")),
    ):
        save(tmp_path / "c", _state())
    save(tmp_path / "c", _state())
    assert verify(tmp_path / "c").ok
