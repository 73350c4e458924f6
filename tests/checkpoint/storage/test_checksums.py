"""Checksums of torch's archives and of zarr's chunks are compared while a conversion reads them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.serialization import get_crc32_options, set_crc32_options

from vescale_fsdp.checkpoint import verify
from vescale_fsdp.checkpoint.storage.checksums import CRC32, CRC32C
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

MARK = 1.25  # of the items whose bytes are found in the files
RULES = """format = 1
keep_others = true
[[rule]]
hf = ["a", "b"]
ours = "w"
ops = [{ concat = { dim = 0, sizes = [20, 30] } }]
"""


def _save(kind: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint with ``w`` of 50 x 60, and the file that holds its bytes."""
    state = {"v": torch.ones(7), "w": torch.full((50, 60), MARK), "z": torch.zeros(())}
    if kind == "torch":
        torch.save({"model": state}, folder / "state.pt")
        return folder / "state.pt", folder / "state.pt"
    dcp.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)
    if kind == "dcp":
        return folder / "dcp", folder / "dcp" / "__0_0.distcp"
    convert(open_source(str(folder / "dcp")), str(folder / "zarr"), "zarr")
    (chunk,) = (folder / "zarr").glob("arrays/model/w/c/0/0")
    return folder / "zarr", chunk


def _flip(file: Path) -> None:
    """One bit in the middle of the items of ``w``."""
    raw = bytearray(file.read_bytes())
    raw[raw.index(torch.full((3000,), MARK).numpy().tobytes()) + 6001] ^= 0x20
    file.write_bytes(raw)


def _run(source: Path, out: Path, kind: str, **options: Any) -> None:
    convert(open_source(str(source)), str(out), kind, ConvertOptions(**options))


# How bytes reach the result: moved, cast, joined from strided boxes, cut into files of ranks.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "moved": ("hf", {}),
    "cast": ("hf", {"dtype": ["bfloat16"]}),
    "by rules": ("hf", {"rules": "rules.toml"}),
    "cut": ("native", {"ranks": 3}),
    "to DCP": ("dcp", {}),
    "to zarr": ("zarr", {}),
    "to a file": ("torch", {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["dcp", "torch", "zarr"])
def test_a_flipped_bit_stops_every_conversion(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names tensor and file, and nothing is left but the folder that was there; the same with sound bytes
    goes through."""
    monkeypatch.chdir(tmp_path)
    Path("rules.toml").write_text(RULES)
    target, options = WAYS[way]
    source, file = _save(kind, tmp_path)
    _run(source, tmp_path / "sound", target, **options)
    _flip(file)
    (tmp_path / "before").mkdir()
    with pytest.raises(
        CorruptCheckpointError,
        check=lambda error: "model.w" in error.where.split() and file.name in error.where,
    ):
        _run(source, tmp_path / "before" / "deep" / "out", target, **options)
    assert (tmp_path / "sound").exists()
    assert (tmp_path / "before").is_dir() and not any((tmp_path / "before").iterdir())


def test_one_of_several_parts_finds_the_damage(tmp_path: Path) -> None:
    """Each process reads a part of the tensor only; one of them reads the rest, and nothing is published."""
    source, file = _save("dcp", tmp_path)
    _flip(file)
    found = []
    for index in range(3):
        try:
            _run(source, tmp_path / "out", "native", ranks=3, part=(index, 3))
        except CorruptCheckpointError as error:
            found.append(str(error))
    assert len(found) == 1 and "model.w" in found[0]
    assert not list((tmp_path / "out").rglob("manifest.json"))


@pytest.mark.parametrize("name", ["w", "q", "k", "v", "up", "down"])  # which file answers depends on it
def test_a_resumed_run_proves_what_the_first_did_not(tmp_path: Path, name: str) -> None:
    """Files that are kept hold parts of a tensor whose checksum was not compared before the interruption."""
    dcp.save({"model": {name: torch.full((50, 60), MARK)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = tmp_path / "dcp"
    _flip(source / "__0_0.distcp")
    out = tmp_path / "out"

    def stop(_: int) -> None:
        if '"file"' in (out / ".vescale-convert.jsonl").read_text():
            raise KeyboardInterrupt

    options = ConvertOptions(ranks=3, threads=1)
    with pytest.raises(KeyboardInterrupt):
        convert(open_source(str(source)), str(out), "native", options, progress=stop)
    assert len(list(out.rglob("*.partial"))) == 1
    with pytest.raises(CorruptCheckpointError, check=lambda error: f"model.{name} " in str(error.where)):
        _run(source, out, "native", ranks=3, resume=True, threads=1)
    assert not out.exists()  # what the first run made is gone too


def test_the_rest_of_a_storage_counts(tmp_path: Path) -> None:
    """A tensor that is a part of what was saved: the checksum is that of all of it, which is read to compare."""
    whole = torch.full((3000,), MARK)
    torch.save({"part": whole[:100]}, tmp_path / "state.pt")
    _run(tmp_path / "state.pt", tmp_path / "sound", "hf")
    _flip(tmp_path / "state.pt")
    with pytest.raises(CorruptCheckpointError, check=lambda error: "part" in error.where.split()):
        _run(tmp_path / "state.pt", tmp_path / "out", "hf")


@pytest.fixture
def without_crcs() -> Iterator[None]:
    """torch.save writes no checksums."""
    before = get_crc32_options()
    set_crc32_options(False)
    yield
    set_crc32_options(before)


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_archives_without_checksums_are_not_called_damaged(
    kind: str, tmp_path: Path, without_crcs: None
) -> None:
    """torch can be told to write none: nothing is compared, and nothing is found."""
    source, file = _save(kind, tmp_path)
    assert verify(open_source(str(source))).num_checksums == 0
    _flip(file)
    assert verify(open_source(str(source))).problems == ()
    _run(source, tmp_path / "out", "hf")


def test_ranks_without_checksums_are_compared_by_bytes(tmp_path: Path, without_crcs: None) -> None:
    """Plain tensors of two ranks that differ do not pass for copies."""
    for rank, value in enumerate((1.0, 2.0)):
        torch.save({"w": torch.full((9,), value)}, tmp_path / f"model_rank_{rank}.pt")
    with pytest.raises(ConversionError, check=lambda error: "model.w" in str(error.got)):
        open_source(str(tmp_path))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc_of_a_whole_follows_from_those_of_its_pieces(a: bytes, b: bytes) -> None:
    """Both kinds, as threads that read pieces in any order combine them."""
    assert CRC32.combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
    assert CRC32C.combine(CRC32C.of(a), CRC32C.of(b), len(b)) == CRC32C.of(a + b)
