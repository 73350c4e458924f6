"""Tensors of terabytes of which a source stores some bytes: every command ends at once, by the bytes that there are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import ConvertOptions, convert, diff, open_source
from vescale_fsdp.conversion.engine import stored_tensor
from vescale_fsdp.conversion.formats.table import TARGETS
from vescale_fsdp.conversion.report.checkpoint_report import checkpoint_report
from vescale_fsdp.conversion.report.describe import describe
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, option

_HUGE = 2**40


def _expanded(path: Path) -> str:
    torch.save({"w": torch.ones(3), "mask": torch.tensor(2.5).expand(_HUGE)}, path / "m.pt")
    return str(path / "m.pt")


def _overlapping(path: Path) -> str:
    mask = torch.ones(2**21).as_strided((2**20, 2**20), (1, 1))
    torch.save({"w": torch.ones(3), "mask": mask}, path / "m.pt")
    return str(path / "m.pt")


def _array(path: Path, version: Any, chunk: int, fill: float, stored: int = 0, size: int = _HUGE) -> str:
    """An array whose chunks are absent but for some of the first."""
    array = zarr.create_array(
        str(path / "z" / "mask"),
        shape=(size,),
        chunks=(chunk,),
        dtype="float32",
        fill_value=fill,
        compressors=None,
        zarr_format=version,
    )
    if stored:
        array[:stored] = np.ones(stored, np.float32)
    zarr.open_group(str(path / "z"), mode="a", zarr_format=version).create_array(
        "w", data=np.ones(3, np.float32)
    )
    return str(path / "z")


SOURCES: dict[str, Callable[[Path], str]] = {
    "expanded": _expanded,
    "overlapping": _overlapping,
    "zarr 2": lambda path: _array(path, 2, 2**12, 0),
    "zarr 3": lambda path: _array(path, 3, 2**12, 0),
    "zarr 3, ones": lambda path: _array(path, 3, 2**20, 1, size=2**35),
    "zarr 3, one chunk": lambda path: _array(path, 3, 2**22, 0, stored=5, size=2**35),
}


@pytest.mark.parametrize(
    ("source", "kind"),
    [("expanded", kind) for kind, target in TARGETS.items() if target.command]
    + [(source, "torch") for source in SOURCES if source != "expanded"],
)
def test_targets_that_write_every_element_refuse(tmp_path: Path, source: str, kind: str) -> None:
    """By the name of the tensor, before anything is written; without it, the rest is converted."""
    url = SOURCES[source](tmp_path)
    if (source, kind) != ("expanded", "torch"):
        with pytest.raises(ConversionError) as caught:
            convert(open_source(url), tmp_path / "out", kind)
        assert "mask" in str(caught.value.got) and option("exclude", "mask") in str(caught.value.todo)
        assert not (tmp_path / "out").exists()
    convert(open_source(url), tmp_path / "out", kind, ConvertOptions(exclude=["mask"]))
    assert list(open_source(str(tmp_path / "out")).tensors) == ["w"]


def test_torch_keeps_repeats(tmp_path: Path) -> None:
    """An expanded tensor stays one, of few bytes; cast too."""
    saved = {"a": torch.arange(6.0).view(2, 1, 3).expand(2, 2**36, 3), "b": torch.arange(6.0).view(2, 3).T}
    torch.save(saved, tmp_path / "in.pt")
    for dtype in (torch.float32, torch.bfloat16):
        options = ConvertOptions(dtype=[str(dtype).removeprefix("torch.")])
        report = convert(open_source(str(tmp_path / "in.pt")), tmp_path / f"{dtype}.pt", "torch", options)
        assert report.plan.tensor_nbytes == 12 * dtype.itemsize
        found = torch.load(tmp_path / f"{dtype}.pt", weights_only=True)
        assert found["a"].shape == saved["a"].shape and found["a"].stride() == (3, 0, 1)
        assert torch.equal(found["a"][:, -1], saved["a"][:, 0].to(dtype))
        assert torch.equal(found["b"], saved["b"].to(dtype))


@pytest.mark.parametrize("source", SOURCES)
def test_what_reads_values_reads_a_sample(tmp_path: Path, source: str) -> None:
    """`report` says of how many values its summary is; `inspect`, `verify` and `diff` end too."""
    url = SOURCES[source](tmp_path)
    opened = open_source(url)
    rows = {row["name"]: row for row in checkpoint_report(opened, open_source(url))["tensors"]}
    stats = rows["mask"]["stats"]
    assert (
        stats["sampled"] == rows["mask"]["diff"]["sampled"] == 2**22 and "sampled" not in rows["w"]["stats"]
    )
    assert rows["mask"]["diff"]["differing"] == 0 and stats["max"] <= 2.5
    found = describe(opened)
    assert found["stored_bytes"] <= 2**24 + 12 < 2**37 < found["tensor_bytes"]
    assert verify(opened).problems == ()
    if source == "expanded":
        assert diff(opened, open_source(url)) == ((), 2)
    else:
        with pytest.raises(ConversionError) as caught:
            diff(opened, open_source(url))
        assert caught.value.where == "tensor mask"


def test_repeats_are_compared_once(tmp_path: Path) -> None:
    """And counted as often as they stand for a value."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        torch.save({"w": torch.tensor([[1.0], [value]]).expand(2, 2**36)}, tmp_path / f"{name}.pt")
    (found,), _ = diff(open_source(str(tmp_path / "a.pt")), open_source(str(tmp_path / "b.pt")))
    assert found.text.split()[:3] == [str(2**36), "of", str(2**37)]


@pytest.mark.parametrize("version", [2, 3])
def test_more_chunks_than_can_be_listed(tmp_path: Path, version: int) -> None:
    """Of an array with a few chunks among billions, the error says so."""
    url = _array(tmp_path, version, 64, 0, stored=5)
    with pytest.raises(CorruptCheckpointError) as caught:
        open_source(url)
    assert re.findall(r"\d+", str(caught.value.got)) == [str(_HUGE // 64), "1"]


@pytest.mark.parametrize("size", [2**18, 2**20])
def test_zeros_are_read_next_to_weights_that_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """All bytes of the source count, those of tensors that are left out too; 32 times as many are read, no more."""
    monkeypatch.setattr(stored_tensor, "UNCHECKED_BYTES", 2**16)
    url = _array(tmp_path, 3, 2**12, 0, size=size)
    zarr.create_array(url + "/v", data=np.ones(2**14, np.float32), compressors=None)
    options = ConvertOptions(include=["mask"])
    if size == 2**20:
        with pytest.raises(ConversionError):
            convert(open_source(url), tmp_path / "out.pt", "torch", options)
        with pytest.raises(ConversionError):
            diff(open_source(url), open_source(url))
        return
    convert(open_source(url), tmp_path / "out.pt", "torch", options)
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["mask"], torch.zeros(size))
    assert diff(open_source(url), open_source(url)) == ((), 3)


def test_an_ordinary_source_is_not_refused(tmp_path: Path) -> None:
    """Moments that are all zeros lie in no chunk of zarr."""
    _array(tmp_path, 3, 2**20, 0, size=2**30 - 3)
    source = open_source(str(tmp_path / "z"))
    report = convert(source, tmp_path / "out.pt", "torch", ConvertOptions(dry_run=True))
    assert report.plan.tensor_nbytes == 2**32
