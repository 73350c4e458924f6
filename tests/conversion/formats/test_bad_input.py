"""Damaged, hostile and missing sources: each ends in one error that says where and what to do."""

from __future__ import annotations

import json
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from vescale_fsdp.conversion import convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, VescaleError, option

DATA = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small DCP checkpoint."""
    state = {"model": {"w": torch.arange(24.0).view(4, 6), "b": torch.tensor(3.5)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def _convert(folder: Path) -> None:
    convert(open_source(str(folder)), str(folder.parent / "out"), "hf")


def _edit_metadata(folder: Path, edit: object) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)  # type: ignore[operator]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_truncated_data_file(folder: Path) -> None:
    """A data file that ends early is found when opening, by name, with both sizes."""
    raw = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(raw[:-10])
    with pytest.raises(CorruptCheckpointError, match=rf"truncated(.|\n)*{len(raw) - 10} bytes(.|\n)*{DATA}"):
        _convert(folder)
    assert not (folder.parent / "out").exists()


def test_missing_data_file(folder: Path) -> None:
    """A data file that is not there is named."""
    (folder / DATA).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"missing(.|\n)*{DATA}"):
        _convert(folder)


@pytest.mark.parametrize("keep", [0, 1, 50, 700, -3])
def test_metadata_cut_anywhere_is_one_clear_error(folder: Path, keep: int) -> None:
    """Metadata cut anywhere is one clear error, never a traceback from inside pickle."""
    raw = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw[:keep])
    with pytest.raises(CorruptCheckpointError, match="metadata"):
        _convert(folder)


def test_flipped_bytes_never_escape_as_foreign_errors(folder: Path) -> None:
    """Any one byte of the metadata changed: the conversion works or ends in an error of ours."""
    raw = (folder / ".metadata").read_bytes()
    failures = 0
    for at in range(0, len(raw), 3):
        (folder / ".metadata").write_bytes(raw[:at] + bytes([raw[at] ^ 0x15]) + raw[at + 1 :])
        try:
            open_source(str(folder))
        except VescaleError:
            failures += 1
    assert failures > 100


def test_swapped_data_file(folder: Path, tmp_path: Path) -> None:
    """A data file of another save with fitting sizes is caught by what its records say."""
    other = {"model": {"w": torch.arange(24.0).view(6, 4), "b": torch.tensor(3.5)}, "step": 7}
    dcp.save(other, checkpoint_id=tmp_path / "other", no_dist=True)
    (folder / DATA).write_bytes((tmp_path / "other" / DATA).read_bytes())
    with pytest.raises(CorruptCheckpointError) as error:
        _convert(folder)
    assert "(4, 6)" in str(error.value.expected) and "(6, 4)" in str(error.value.got)


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        ([((0, 0), (3, 6))], "18 of 24 elements"),
        ([((0, 0), (4, 6)), ((0, 0), (4, 6))], "48 of 24"),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "overlap"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "overlap"),
        ([((0, 0), (5, 6))], "outside"),
        ([((0,), (24,))], "outside"),
    ],
)
def test_boxes_that_do_not_tile(folder: Path, boxes: list[tuple[tuple[int, ...], ...]], text: str) -> None:
    """Holes, doubles, overlaps and boxes outside of the tensor are refused, naming the tensor."""

    def edit(metadata: object) -> None:
        storage = metadata.storage_data  # type: ignore[attr-defined]
        place = next(info for index, info in storage.items() if index.fqn == "model.w")
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
        metadata.state_dict_metadata["model.w"].chunks = chunks  # type: ignore[attr-defined]
        for o, _ in boxes:
            storage[dcp.metadata.MetadataIndex("model.w", torch.Size(o))] = place

    _edit_metadata(folder, edit)
    with pytest.raises(CorruptCheckpointError, match=rf"tile(.|\n)*{text}(.|\n)*model\.w"):
        _convert(folder)


def test_metadata_cannot_point_outside(folder: Path) -> None:
    """A relative path that leaves the folder is refused before any file is opened."""

    def edit(metadata: object) -> None:
        for info in metadata.storage_data.values():  # type: ignore[attr-defined]
            info.relative_path = "../" + info.relative_path

    _edit_metadata(folder, edit)
    with pytest.raises(CorruptCheckpointError, match="outside"):
        _convert(folder)


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return subprocess.call, (f"touch {self.path}",)


def test_code_in_metadata_is_not_run(folder: Path, tmp_path: Path) -> None:
    """A pickle that calls something is refused by that name, and what it calls is not called."""
    marker = tmp_path / "ran"

    def edit(metadata: object) -> None:
        metadata.planner_data["bomb"] = _Bomb(str(marker))  # type: ignore[attr-defined]

    _edit_metadata(folder, edit)
    with pytest.raises(
        ConversionError,
        check=lambda error: "subprocess.call" in str(error) and option("trust_pickle", True) in error.todo,
    ):
        _convert(folder)
    assert not marker.exists()


def test_code_in_a_value_is_not_run(tmp_path: Path) -> None:
    """Values are read with weights_only: what they name is refused unless trusted."""
    dcp.save({"w": torch.ones(2), "value": Path("x")}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(str(tmp_path / "dcp"))
    with pytest.raises(ConversionError, check=lambda error: option("trust_pickle", True) in error.todo):
        source.values["value"]()
    trusted = open_source(str(tmp_path / "dcp"), trust_pickle=True)
    assert trusted.values["value"]() == Path("x")


class _ReachesInside:
    """Pickles as an attribute of something that is allowed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (torch.Size, "__doc__")


def test_getattr_in_a_pickle_reaches_nothing(tmp_path: Path) -> None:
    """ShardedTensors need one nested class by getattr; no other attribute of anything is given out."""
    torch.save({"w": torch.ones(2), "x": _ReachesInside()}, tmp_path / "a.pt")
    with pytest.raises(CorruptCheckpointError, match="__doc__"):
        open_source(str(tmp_path / "a.pt"))


def test_missing_and_unknown_sources(tmp_path: Path) -> None:
    """Nothing there, an empty folder, a folder of something else."""
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConversionError) as missing:
            open_source(str(path))
        assert missing.value.where == str(path) and option("kind") not in str(missing.value.todo)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        ConversionError, check=lambda error: "a.txt" in error.got and option("kind") in error.todo
    ):
        open_source(str(tmp_path))


def test_big_endian_data_is_refused(tmp_path: Path) -> None:
    """What a big-endian machine saved would be read as other numbers."""
    torch.save({"w": torch.arange(5)}, tmp_path / "little.pt")
    with zipfile.ZipFile(tmp_path / "little.pt") as old, zipfile.ZipFile(tmp_path / "big.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("/byteorder") else old.read(name))
    assert len(open_source(str(tmp_path / "little.pt")).tensors) == 1
    with pytest.raises(CorruptCheckpointError, match="big-endian"):
        open_source(str(tmp_path / "big.pt"))


def test_another_name_or_number_in_a_torch_file(tmp_path: Path) -> None:
    """A changed byte in what a file says of its tensors is damage, though the text still reads; a file that was written
    without checksums cannot tell."""
    torch.save({"weight": torch.arange(5.0), "step": 7}, tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    assert good.count(b"weight") == 1
    (tmp_path / "bad.pt").write_bytes(good.replace(b"weight", b"height"))
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.expected.endswith("data.pkl")):
        open_source(tmp_path / "bad.pt")

    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(5.0)}, tmp_path / "unchecked.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert set(open_source(tmp_path / "unchecked.pt").tensors) == {"weight"}


def test_damages_of_a_safetensors_file_are_told_apart(tmp_path: Path) -> None:
    """Truncation, a wrong header length and a header that lies about offsets are told apart from good
    files."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2, 3)}, path)
    good = path.read_bytes()
    assert len(open_source(str(path)).tensors) == 2
    for bad in (good[:5], good[:-1], good + b"x", b"\xff" * 8 + good[8:], good.replace(b"[0,16]", b"[0,12]")):
        assert bad != good
        path.write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, match="safetensors"):
            open_source(str(path))


@pytest.mark.parametrize(
    ("places", "nbytes"),
    [([(0, 8), (12, 20)], 20), ([(0, 8), (0, 8)], 8), ([(4, 12), (12, 20)], 20), ([(0, 8), (4, 12)], 12)],
)
def test_safetensors_with_holes_or_overlaps(
    tmp_path: Path, places: list[tuple[int, int]], nbytes: int
) -> None:
    """Offsets inside the file and of the right sizes are not enough: tensors follow each other."""
    table = {f"w{i}": {"dtype": "F32", "shape": [2], "data_offsets": place} for i, place in enumerate(places)}
    head = json.dumps(table).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(nbytes))
    with pytest.raises(CorruptCheckpointError, check=lambda error: str(file) in error.where):
        open_source(str(file))


def _indexed(folder: Path, mapping: dict[str, str], **files: dict[str, torch.Tensor]) -> Path:
    """A folder of ``one`` and ``two`` with an index."""
    for stem, tensors in files.items():
        save_file(tensors, folder / f"{stem}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{stem}.safetensors" for name, stem in mapping.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("mapping", "name"),
    [
        ({"a": "two", "b": "one"}, "a"),
        ({"a": "one", "b": "two", "c": "two"}, "c"),
        ({"a": "../evil", "b": "two"}, "a"),
    ],
)
def test_index_that_disagrees_with_the_files(tmp_path: Path, mapping: dict[str, str], name: str) -> None:
    """A name mapped to the wrong file, to no file, or outside."""
    _indexed(tmp_path, mapping, one={"a": torch.ones(4)}, two={"b": torch.ones(4)})
    with pytest.raises(CorruptCheckpointError) as caught:
        open_source(str(tmp_path))
    assert str(caught.value.expected).startswith(f"{name} ")


def test_what_an_index_leaves_out_is_loaded_as_transformers_does(tmp_path: Path) -> None:
    """Tensors that it does not name, and equal ones in two files, with a line for each; unequal ones are refused."""
    a, b, c = torch.arange(4.0), torch.ones(2), torch.tensor(float("nan"))
    mapping = {"a": "one", "b": "two"}
    _indexed(tmp_path, mapping, one={"a": a, "c": c, "d": c.clone()}, two={"b": b, "a": a, "d": c})
    source = open_source(str(tmp_path))
    assert sorted(source.tensors) == ["a", "b", "c", "d"] and len(source.warnings) == 2
    assert source.tensors["a"].chunks[0].extent.file == "one.safetensors"
    report = convert(source, tmp_path.parent / f"{tmp_path.name}-out", "hf")
    assert set(source.warnings) <= set(report.warnings)
    for other in (a + 1, a.double(), a.view(2, 2), torch.tensor([0.0, 1.0, 2.0, -3.0])):
        save_file({"b": b, "a": other}, tmp_path / "two.safetensors")
        with pytest.raises(CorruptCheckpointError) as caught:
            open_source(str(tmp_path))
        assert str(caught.value.expected).startswith("a ")


def test_equal_duplicates_of_bin_files(tmp_path: Path) -> None:
    """The same of folders of the time before safetensors."""
    for number, tensors in ((1, {"a": torch.ones(4)}), (2, {"a": torch.ones(4), "b": torch.zeros(3).t()})):
        torch.save(tensors, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    index = {"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert sorted(open_source(str(tmp_path)).tensors) == ["a", "b"]
    torch.save({"a": torch.zeros(4), "b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CorruptCheckpointError):
        open_source(str(tmp_path))
