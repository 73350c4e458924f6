"""zarr v3: the zarr library reads what we write, we read what it writes, and nothing is lost in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import load_file

from vescale_fsdp.checkpoint import load, verify
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion.convert import ConvertOptions, convert
from vescale_fsdp.conversion.diff import diff
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.formats.native import zarr_plan as to_zarr
from vescale_fsdp.errors import CorruptCheckpointError


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 40 bytes, so that small tensors have several, the last one short."""
    monkeypatch.setattr(to_zarr, "_CHUNK_BYTES", 40)


def _arrays(folder: Path) -> zarr.Group:
    """The group that holds the arrays, found as anybody finds it who knows zarr only."""
    root = zarr.open_group(str(folder), mode="r")
    found = root[str(root.attrs["arrays"])]
    assert isinstance(found, zarr.Group)
    return found


def _folder(folder: Path, name: str) -> Path:
    """The folder of one array."""
    (found,) = folder.glob(f"arrays/{name}")
    return found


def _save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def test_small_chunks_are_whole_rows(tmp_path: Path, small_chunks: None) -> None:
    """The last one short; the values of every leaf that the zarr library reads are rows of ``test_conformance.py``."""
    _save({"model": {"tall": torch.arange(35.0).view(7, 5)}}, tmp_path / "dcp")
    convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "zarr"), "zarr")
    array = _arrays(tmp_path / "zarr")["model/tall"]
    assert isinstance(array, zarr.Array)
    assert array.nchunks == 4 and array.chunks == (2, 5) and array.attrs["name"] == "model/tall"
    assert np.array_equal(np.asarray(array[...]), np.arange(35.0).reshape(7, 5))


def test_a_flipped_bit_is_seen_by_zarr(tmp_path: Path) -> None:
    """The checksums we compute in pieces are the ones zarr verifies."""
    _save({"w": torch.randn(300, 1000)}, tmp_path / "dcp")
    options = ConvertOptions(memory_budget_bytes=4 * 2**20, threads=1)
    convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "zarr"), "zarr", options)
    array = _folder(tmp_path / "zarr", "w")
    assert np.asarray(zarr.open_array(str(array), mode="r")[...]).shape == (300, 1000)
    chunk = array / "c" / "0" / "0"
    raw = bytearray(chunk.read_bytes())
    raw[500_000] ^= 1
    chunk.write_bytes(raw)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(str(array), mode="r")[...]


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("sharded", [False, True])
def test_arrays_made_by_the_zarr_library(tmp_path: Path, compressors: str | None, sharded: bool) -> None:
    """Nested groups, chunks in both dims, chunks left out because they are zero; compressed and sharded
    ones."""
    values = np.arange(70, dtype=np.float32).reshape(7, 10)
    values[4:, 4:] = 0
    group = zarr.create_group(str(tmp_path / "zarr"))
    array = group.create_array(
        "layers/0/w",
        shape=(7, 10),
        dtype="float32",
        chunks=(2, 4),
        shards=(4, 8) if sharded else None,
        compressors=compressors,
    )
    array[...] = values
    group.create_array("scalar", shape=(), dtype="int64")[...] = 7
    source = open_source(str(tmp_path / "zarr"))
    assert ("layers.0.w" in source.readers) == (compressors is not None or sharded)
    convert(source, str(tmp_path / "out"), "hf")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(loaded["layers.0.w"].numpy(), values) and loaded["scalar"].item() == 7


def test_arrays_without_their_manifest_keep_their_nesting(tmp_path: Path) -> None:
    """The names of arrays contain the keys, also those with dots and slashes; the order is that of the files."""
    model = {"layers.0.w": torch.arange(6.0).view(2, 3), "a/b": torch.tensor([7], dtype=torch.bfloat16)}
    _save({"model": model, "step": {"0": torch.tensor(3)}}, tmp_path / "dcp")
    convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "zarr"), "zarr")
    (tmp_path / "zarr/vescale-checkpoint/manifest.json").unlink()
    source = open_source(str(tmp_path / "zarr"))
    convert(source, str(tmp_path / "a.pt"), "torch")
    found = torch.load(tmp_path / "a.pt", weights_only=True)

    assert source.kind == "zarr" and list(found["model"]) == ["a/b", "layers.0.w"]
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in model.items())
    assert found["step"] == {"0": torch.tensor(3)}


def test_damage_is_named(tmp_path: Path) -> None:
    """A truncated chunk and broken metadata are errors that name the file, in arrays of whatever origin."""
    group = zarr.create_group(str(tmp_path / "zarr"))
    array = group.create_array("w", shape=(30, 10), dtype="float32", chunks=(30, 10), compressors=None)
    array[...] = np.arange(300, dtype=np.float32).reshape(30, 10)
    chunk = tmp_path / "zarr" / "w" / "c" / "0" / "0"
    good = chunk.read_bytes()
    chunk.write_bytes(good[:-1])
    with pytest.raises(
        CorruptCheckpointError,
        check=lambda error: error.got == f"{len(good) - 1} bytes" and error.where.endswith("w/c/0/0"),
    ):
        open_source(str(tmp_path / "zarr"))
    chunk.write_bytes(good)
    (tmp_path / "zarr" / "w" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    with pytest.raises(CorruptCheckpointError, match=r"w/zarr\.json"):
        open_source(str(tmp_path / "zarr"))
    (tmp_path / "zarr" / "zarr.json").write_text('{"zarr_format": 2, "node_type": "group"}')
    (tmp_path / "zarr" / "w" / "zarr.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"zarr/zarr\.json"):
        open_source(str(tmp_path / "zarr"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"shape": [30, 10]', '"shape": [30.0, 10]'),
        ('"shape": [30, 10]', '"shape": [30, "10"]'),
        ('"shape": [30, 10]', '"shape": [true, 10]'),
        ('"shape": [30, 10]', '"shape": [30, 10], "shape": [3, 10]'),
        ('"chunk_shape": [30, 10]', '"chunk_shape": [30, 10.0]'),
        ('"chunk_shape": [30, 10]', '"chunk_shape": [30, 0]'),
        ('"chunk_shape": [30, 10]', '"chunk_shape": [30]'),
    ],
)
def test_sizes_are_whole_numbers(tmp_path: Path, old: str, new: str) -> None:
    """Nothing in metadata is rounded, and no key counts that is there twice."""
    group = zarr.create_group(str(tmp_path / "zarr"))
    array = group.create_array("w", shape=(30, 10), dtype="float32", chunks=(30, 10), compressors=None)
    array[...] = np.arange(300, dtype=np.float32).reshape(30, 10)
    file = tmp_path / "zarr" / "w" / "zarr.json"
    compact = json.dumps(json.loads(file.read_text()))
    assert compact.count(old) == 1 and open_source(str(tmp_path / "zarr")).tensors["w"].info.shape == (30, 10)
    file.write_text(compact.replace(old, new))
    with pytest.raises(CorruptCheckpointError, match=r"w/zarr\.json"):
        open_source(str(tmp_path / "zarr"))


def test_damage_in_what_zarr_decodes_is_named(tmp_path: Path) -> None:
    """Compressed chunks with flipped bytes, and codecs nobody knows, end in our errors, not in the library's."""
    group = zarr.create_group(str(tmp_path / "zarr"))
    array = group.create_array("w", shape=(50, 40), dtype="float32", chunks=(50, 40), compressors="auto")
    array[...] = np.arange(2000, dtype=np.float32).reshape(50, 40) % 7
    chunk = tmp_path / "zarr" / "w" / "c" / "0" / "0"
    good = chunk.read_bytes()
    for bad in (good[:20], b"\0" * len(good)):
        chunk.write_bytes(bad)
        source = open_source(str(tmp_path / "zarr"))
        with pytest.raises(CorruptCheckpointError, check=lambda error: error.where.endswith("w/zarr.json")):
            convert(source, str(tmp_path / "out"), "hf")
        assert not (tmp_path / "out" / "model.safetensors").exists()
    chunk.write_bytes(good)
    settings = tmp_path / "zarr" / "w" / "zarr.json"
    settings.write_text(settings.read_text().replace("zstd", "zsdt"))
    with pytest.raises(CorruptCheckpointError, match="zsdt"):
        open_source(str(tmp_path / "zarr"))


def test_an_interrupted_run_and_parts_know_all_checksums(tmp_path: Path, small_chunks: None) -> None:
    """Chunks written by an earlier run, or by other processes, are in the table that the last one writes."""
    _save({"w": torch.randn(35, 5), "v": torch.randn(9)}, tmp_path / "dcp")
    source, out = str(tmp_path / "dcp"), tmp_path / "out"

    def stop(_: int) -> None:
        if len(list(out.rglob("*.partial"))) > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(open_source(source), str(out), "zarr", ConvertOptions(threads=1), progress=stop)
    report = convert(open_source(source), str(out), "zarr", ConvertOptions(resume=True, threads=1))
    assert report.outcome.kept and report.outcome.written
    for index in (2, 0, 1):
        options = ConvertOptions(part=(index, 3))
        convert(open_source(source), str(tmp_path / "parts"), "zarr", options)
    for path in (out, tmp_path / "parts"):
        assert verify(path).ok and verify(open_source(str(path))).problems == ()
        found, compared = diff(open_source(source), open_source(str(path)))
        assert found == () and compared == 2


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def _swap(path: Path) -> None:
    size = path.stat().st_size
    alike = [
        other
        for other in sorted(path.parents[3].rglob("*"))
        if other.is_file() and other.stat().st_size == size and other.read_bytes() != path.read_bytes()
    ]
    assert alike
    path.write_bytes(alike[0].read_bytes())


@pytest.mark.parametrize("damage", [_flip, _swap])
@pytest.mark.parametrize("form", ["engine", "converter"])
def test_damaged_and_exchanged_chunks_are_found(
    form: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """A flipped bit, and a sound chunk in another's place: verify names the file, and nothing is converted."""
    state = {"model": {name: torch.randn(9, 10) for name in ("a", "b", "d")}}
    Saver(open_storage(tmp_path / "engine"), coordinator_for(None), format="zarr").save(state)
    convert(open_source(str(tmp_path / "engine")), str(tmp_path / "converter"), "zarr")
    (chunk,) = (tmp_path / form).glob("arrays/model/b/c/0/0")
    damage(chunk)
    problems = verify(open_source(str(tmp_path / form))).problems
    assert len(problems) == 1 and "model/b/c/0/0" in problems[0].where
    for target in ("hf", "zarr", "native"):
        with pytest.raises(CorruptCheckpointError) as caught:
            convert(open_source(str(tmp_path / form)), str(tmp_path / "out"), target)
        assert "model.b" in str(caught.value)
        assert not (tmp_path / "out").exists()
    with pytest.raises(CorruptCheckpointError) as caught:
        load(tmp_path / form, state)
    assert "model.b" in str(caught.value)
