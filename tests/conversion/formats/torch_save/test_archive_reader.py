"""Archives beyond 4 GiB, planned and read without their bytes; in small ones, values of numpy and of collections."""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vescale_fsdp.conversion import ConvertOptions, Source, convert, open_source
from vescale_fsdp.conversion.engine.plan import ComputedBytes, FilePlan, FixedBytes, TensorItems, whole
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import SourceView, TensorView
from vescale_fsdp.conversion.formats.torch_save.archive_reader import TorchArchive
from vescale_fsdp.conversion.formats.torch_save.write import plan_archive
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, option
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import Box


class _Bytes(TensorView):
    """So many bytes that nobody reads."""

    def __init__(self, nbytes: int) -> None:
        self._info = TensorInfo("x", (nbytes,), dtype_from_torch("uint8"))

    @property
    def info(self) -> TensorInfo:
        return self._info

    def read_into(self, box: Box, out: np.ndarray) -> None:
        raise AssertionError("planned without reading")

    def sources(self) -> Iterator[tuple[Source, str]]:
        return iter(())

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return iter(())

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return self

    def identity(self) -> str:
        return "bytes"


@pytest.mark.parametrize("nbytes", [1000, 2**32 - 2, 2**32 - 1, 2**32 + 8])
def test_sizes_and_offsets_beyond_32_bits(nbytes: int) -> None:
    """The reader finds each storage where the plan puts it, at a multiple of 64 bytes, with its checksum."""
    storages = [whole(_Bytes(n)) for n in (nbytes, 50, nbytes, 7)]
    plan = FilePlan("x", tuple(plan_archive(b"pickle", storages, 0)))
    tensors = [i for i, part in enumerate(plan.contents) if isinstance(part, TensorItems)]
    crcs = {index: 0xC0DE0000 + index for index in tensors}
    known: dict[int, bytes] = {}
    for offset, part in zip(plan.offsets, plan.contents, strict=True):
        if not isinstance(part, TensorItems):
            known[offset] = part.data if isinstance(part, FixedBytes) else part.make(crcs.__getitem__)
            assert len(known[offset]) == part.nbytes
    assert sum(isinstance(part, ComputedBytes) for part in plan.contents) == 4

    def read(offset: int, length: int) -> bytes:
        found = bytearray(length)  # of tensors: zeros
        for start, data in known.items():
            low, high = max(start, offset), min(start + len(data), offset + length)
            if low < high:
                found[low - offset : high - offset] = data[low - start : high - start]
        return bytes(found)

    archive = TorchArchive(read, plan.nbytes, where="x")
    assert archive.pickle == b"pickle"
    for key, index in enumerate(tensors):
        assert archive.storage_range(str(key)) == (plan.offsets[index], plan.contents[index].nbytes)
        assert archive.storage_crc(str(key)) == crcs[index] and plan.offsets[index] % 64 == 0


VALUES: dict[str, Any] = {
    "half": np.float16(1.5),
    "single": np.float32(0.1),
    "double": np.float64(0.1),
    "swapped": np.dtype(">f8").type(2.5),
    "complex": np.complex64(1 + 2j),
    "long": np.int64(-(2**40)),
    "byte": np.uint8(200),
    "true": np.bool_(True),
    "set": {1, 2, 3},
    "frozen": frozenset({"x", "y"}),
    "empty": set(),
    "counter": Counter("abca"),
    "lists": defaultdict(list, {"a": [1, 2]}),
    "numbers": defaultdict(int, {"a": 2}),
    "dicts": defaultdict(dict, {"a": {"b": np.float32(3)}}),
    "ordered": OrderedDict(a=1, b=2),
    "inner": {"k": {5, 6}, "l": [np.int32(4), (np.float64(2.0), {7})]},
}


@pytest.mark.parametrize("target", ["dcp", "native", "zarr", "torch"])
def test_values_keep(tmp_path: Path, target: str) -> None:
    """Equal values, of Python's own kinds where they were numpy's; and back in a .pt file that torch opens."""
    # DCP's and torch's files are pickles, which have complex numbers.
    kept = {name: v for name, v in VALUES.items() if name != "complex" or target in ("dcp", "torch")}
    torch.save({"model": {"w": torch.ones(3)}, "more": kept}, tmp_path / "a.pt")
    out = tmp_path / ("b.pt" if target == "torch" else target)
    convert(open_source(str(tmp_path / "a.pt")), str(out), target)
    convert(open_source(str(out)), str(tmp_path / "back.pt"), "torch", None)
    found = torch.load(tmp_path / "back.pt", weights_only=False)["more"]
    assert found.keys() == kept.keys()
    for name, value in kept.items():
        assert found[name] == value, name
        assert type(found[name]).__module__ == "builtins", name
    assert type(found["set"]) is set and type(found["frozen"]) is frozenset and type(found["true"]) is bool


def test_devices_are_read_as_texts(tmp_path: Path) -> None:
    """A device's type and index are two arguments in a pickle."""
    devices = {"gpu": torch.device("cuda", 1), "host": torch.device("cpu")}
    torch.save({"model": {"w": torch.ones(3)}, **devices}, tmp_path / "a.pt")
    values = {name: read() for name, read in open_source(str(tmp_path / "a.pt")).values.items()}
    assert values == {"gpu": "cuda:1", "host": "cpu"}


def test_torch_and_zip_read_what_is_written(tmp_path: Path) -> None:
    """With and without mmap; every record's CRC is right, also of a tensor that is written in several segments."""
    state: dict[str, Any] = {"model": {"big": torch.randn(1100, 1000), "small": torch.arange(3)}, "step": 1}
    torch.save(state, tmp_path / "a.pt")
    options = ConvertOptions(memory_budget_bytes=4 * 2**20, threads=2)
    convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "b.pt"), "torch", options)
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
        assert loaded["step"] == 1 and loaded["model"].keys() == state["model"].keys()
        assert all(torch.equal(loaded["model"][name], value) for name, value in state["model"].items())
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None


def test_a_damaged_file_and_one_of_another_kind_are_told_apart(tmp_path: Path) -> None:
    """A truncated file, a file that is none, and a pickle that names code."""
    torch.save({"w": torch.randn(100)}, tmp_path / "a.pt")
    good = (tmp_path / "a.pt").read_bytes()
    for bad in (good[:-30], good[: len(good) // 2], good[:4]):
        (tmp_path / "a.pt").write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == str(tmp_path / "a.pt")):
            open_source(str(tmp_path / "a.pt"))
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ConversionError, check=lambda error: error.where == str(tmp_path / "a.pt")):
        open_source(str(tmp_path / "a.pt"))
    torch.save({"w": torch.randn(2), "where": Path("x")}, tmp_path / "b.pt")
    with pytest.raises(
        ConversionError,
        check=lambda error: "pathlib" in error.got and option("trust_pickle", True) in error.todo,
    ):
        open_source(str(tmp_path / "b.pt"))
