"""Folders as people have them: links into a hub's cache, models in two formats, names with spaces, changing sources."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from vescale_fsdp.conversion import ConvertOptions, convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

WEIGHTS = {f"layers.{i}.w": torch.full((300, 7), float(i)) for i in range(4)}


def _to_hf(source: str, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    convert(open_source(source), str(out), "hf", ConvertOptions(**options))
    return load_file(out / "model.safetensors")


def test_a_snapshot_in_a_hub_cache(tmp_path: Path) -> None:
    """Files are links to blobs: read through them, and the result is files; the cache itself says what is inside."""
    cache = tmp_path / "models--some--name"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(WEIGHTS, blobs / "1f", metadata={"format": "pt"})
    (blobs / "2e").write_text("{}")
    for link, blob in (("model.safetensors", "1f"), ("config.json", "2e")):
        (snapshot / link).symlink_to(Path("../../blobs") / blob)
    assert _to_hf(str(snapshot), tmp_path / "out").keys() == WEIGHTS.keys()
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    with pytest.raises(ConversionError, match=r"snapshots/abc/model\.safetensors"):
        open_source(str(cache))


def test_safetensors_win_over_weights_for_other_loaders(tmp_path: Path) -> None:
    """As in transformers; and none of the other files goes along."""
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(WEIGHTS, hf / "model.safetensors")
    torch.save({"other": torch.ones(1)}, hf / "pytorch_model.bin")
    save_file({"other": torch.ones(1)}, hf / "consolidated.safetensors")
    (hf / "config.json").write_text("{}")
    assert _to_hf(str(hf), tmp_path / "out").keys() == WEIGHTS.keys()
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_an_index_without_metadata_is_enough_to_read(tmp_path: Path) -> None:
    """The map of names decides; the result has what the source lacks."""
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(dict(list(WEIGHTS.items())[:2]), hf / "model-1.safetensors")
    save_file(dict(list(WEIGHTS.items())[2:]), hf / "model-2.safetensors")
    places = {name: f"model-{1 + place // 2}.safetensors" for place, name in enumerate(WEIGHTS)}
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    out = tmp_path / "out"
    convert(open_source(str(hf)), str(out), "hf", ConvertOptions(max_shard_bytes=9000))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 8400 and index["weight_map"].keys() == WEIGHTS.keys()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_names_with_spaces_and_letters_of_all_kinds(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative, absolute and as file URLs."""
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": WEIGHTS}, checkpoint_id="my model/schön 模型", no_dist=True)
    base = f"{scheme}{tmp_path}/" if scheme else "./"
    convert(open_source(f"{base}my model/schön 模型/"), f"{base}out %20 ü", "hf")
    assert load_file(tmp_path / "out %20 ü" / "model.safetensors").keys() == WEIGHTS.keys()


@pytest.mark.parametrize("target", ["link", "link/new", "dangling", "dcp/../dcp/new"])
def test_no_way_into_the_source(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and detours are followed before anything is written, also where what they name does not exist yet."""
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": WEIGHTS}, checkpoint_id="dcp", no_dist=True)
    Path("link").symlink_to("dcp")
    Path("dangling").symlink_to("dcp/new")
    before = sorted(os.listdir("dcp"))
    for kind in ("hf", "torch"):
        with pytest.raises(ConversionError, check=lambda error: error.where == target):
            convert(open_source("link"), target, kind, ConvertOptions(overwrite=True))
    assert sorted(os.listdir("dcp")) == before


def test_a_file_target_needs_a_name(tmp_path: Path) -> None:
    """A slash at its end names a folder: refused before anything is written."""
    dcp.save({"model": WEIGHTS}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ConversionError, check=lambda error: error.where == f"{tmp_path}/new/"):
        convert(open_source(str(tmp_path / "dcp")), f"{tmp_path}/new/", "torch")
    assert os.listdir(tmp_path) == ["dcp"]


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, change: str) -> None:
    """safetensors has no checksums: a file of the same size put in place while it is read makes a mixture of two."""
    file = tmp_path / "hf" / "model.safetensors"
    file.parent.mkdir()
    save_file(WEIGHTS, file)
    source = open_source(str(tmp_path / "hf"))

    def progress(nbytes: int) -> None:
        if nbytes and file.exists():
            os.utime(file, ns=(1, 1)) if change == "replaced" else file.unlink()

    with pytest.raises(ConversionError, check=lambda error: error.where == str(tmp_path / "hf")):
        convert(source, str(tmp_path / "out"), "hf", progress=progress)
    assert not (tmp_path / "out").exists()


def test_a_file_that_vanishes_before_its_turn_is_named(tmp_path: Path) -> None:
    """Opened, planned, gone: the sentence of a missing file."""
    dcp.save({"model": WEIGHTS}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(str(tmp_path / "dcp"))

    def gone(_: int) -> None:
        (tmp_path / "dcp" / "__0_0.distcp").unlink()

    with pytest.raises(CorruptCheckpointError, match=r"missing(.|\n)*__0_0\.distcp"):
        convert(source, str(tmp_path / "out"), "hf", announce=gone)
    assert not (tmp_path / "out").exists()
