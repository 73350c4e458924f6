"""Conformance: checks that the test suite of another package runs on a format or a store of its own.

    check_format("saved_by_us", {"weight": torch.ones(2, 3)})       a source format
    check_store("ours://bucket/tests")                              a store: an fsspec protocol

A package adds a source format by an entry point of the group ``vescale_fsdp.formats``, whose value is a `Format`:

    [project.entry-points."vescale_fsdp.formats"]                   in pyproject.toml
    numbers = "our_package.numbers:FORMAT"

    FORMAT = Format(r".*\\.number", "our_package.numbers:open_numbers")   # a folder with such a file has this format

    def open_numbers(store, file, trust_pickle):
        values = np.full((2, 3), float(store.read("weight.number")), np.float32)
        return Source.from_readers("numbers", store, {"weight": ("float32", (2, 3), lambda box: values[box.slices()])})

A store needs no more than an fsspec protocol. `tests/conversion/test_own_format_and_store.py` of this project checks a
format and a store as another package would.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from vescale_fsdp.checkpoint.load import load
from vescale_fsdp.checkpoint.manager import CheckpointManager
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, dense
from vescale_fsdp.checkpoint.native.read_state import read_state
from vescale_fsdp.checkpoint.save import save
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.checkpoint.verify import verify
from vescale_fsdp.conversion.convert import convert
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import CheckpointError, VescaleError
from vescale_fsdp.layout.geometry import Box, whole_box

__all__ = ["check_format", "check_store"]

_LIMIT_BYTES = 1 << 20  # 1 MiB


def check_format(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that a checkpoint of a source format is read right: names, every part of every tensor, loads, conversions.

    Args:
        path: a checkpoint that the format's own library has written. For a path on disk, copies whose files are cut
            short are read too: they must raise, or give the right values.
        tensors: the tensors in the checkpoint, by flattened name.

    Raises:
        AssertionError: if the format differs; names the tensor.

    Examples:
        >>> import torch
        >>> torch.save({"weight": torch.arange(6.0).view(2, 3)}, "of_torch.pt")
        >>> check_format("of_torch.pt", {"weight": torch.arange(6.0).view(2, 3)})
    """
    source = open_source(path)
    _check_values(source, tensors)
    for name, tensor in tensors.items():
        for box in _halves(tuple(tensor.shape)):
            assert _read(source, name, box) == _bytes(tensor[box.slices()]), f"{name}: {box} differs"
    assert open_source(path).metadata_digest == source.metadata_digest, "the digest differs when opened again"
    problems = verify(source).problems
    assert not problems, f"verify reports {problems}"

    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load(path, loaded)
    for name, tensor in tensors.items():
        assert _bytes(loaded[name]) == _bytes(tensor), f"{name}: a load differs"
    with tempfile.TemporaryDirectory() as folder:
        for kind, target in (("native", "native"), ("torch", "file.pt")):
            convert(open_source(path), f"{folder}/{target}", kind)
            _check_values(open_source(f"{folder}/{target}"), tensors)
        if os.path.exists(path):
            for number, cut in enumerate(_cut_copies(Path(path), Path(folder))):
                try:
                    _check_values(open_source(cut), tensors)
                except VescaleError:
                    continue
                except AssertionError as error:
                    raise AssertionError(f"file {number} was cut short, which no error reports") from error


def check_store(folder: str | os.PathLike[str]) -> None:
    """Check that a store keeps what checkpoints rely on: whole files, commits that are atomic, removals, listings.

    Args:
        folder: path or fsspec URL of a folder that is empty or does not exist. It is empty at the end.

    Raises:
        AssertionError: if the store differs; says in which operation.

    Examples:
        >>> check_store("memory://conformance")
    """
    storage = open_storage(folder)
    assert storage.list_files() == [], "the folder is not empty"
    _check_files(storage.child("files"))
    _check_checkpoints(os.fspath(folder).rstrip("/"))
    for name in ("files", "one", "steps"):
        storage.remove(name)
    assert storage.list_files() == [], "removed folders have files"


def _check_files(storage: Storage) -> None:
    """Files, whole or in parts, and commits."""
    data = bytes(range(256)) * 5
    assert storage.info("a") is None and not storage.exists("a"), "a file exists that was not written"
    assert _raises(FileNotFoundError, lambda: storage.read_small("a", limit_bytes=_LIMIT_BYTES))
    assert _raises(FileNotFoundError, lambda: storage.open_file("a"))
    with storage.create("in/a", len(data)) as writer:
        writer.write_at(0, [data[:100], data[100:300]])
        writer.write_at(300, [data[300:]])
    storage.sync_folder("in")
    assert storage.size("in/a") == len(data) and storage.read("in/a") == data, (
        "a file differs from what was written"
    )
    assert storage.read("in/a", 17, 400) == data[17:417], "a range of a file differs"
    assert _raises(ValueError, lambda: storage.read_small("in/a", limit_bytes=10)), "a limit is not kept"
    dropped = storage.create("in/b", len(data))
    dropped.write_at(0, [data])
    dropped.abort()
    assert storage.list_folder("in") == ["a"] and storage.list_files() == ["in/a"], "a listing differs"
    storage.commit("m", b"first", replace=False)
    assert _raises(FileExistsError, lambda: storage.commit("m", b"second", replace=False)), (
        "a commit replaced"
    )
    assert storage.read_small("m", limit_bytes=_LIMIT_BYTES) == b"first", "a refused commit changed its file"
    storage.commit("m", b"third", replace=True)
    assert storage.read_small("m", limit_bytes=_LIMIT_BYTES) == b"third", "a commit did not replace"
    storage.remove("in")
    storage.remove("absent")
    assert storage.list_files() == ["m"], "a removed folder has files"


def _check_checkpoints(folder: str) -> None:
    """A checkpoint that is saved, refused, replaced, read in part and interrupted; and the steps of a run."""

    def state(value: float) -> dict[str, torch.Tensor]:
        return {
            "w": torch.full((300, 7), value, dtype=torch.float32, device="cpu"),
            "v": torch.full((5,), int(value), dtype=torch.int64, device="cpu"),
        }

    one = f"{folder}/one"
    save(one, state(1))
    assert _raises(CheckpointError, lambda: save(one, state(2))), (
        "a checkpoint was replaced without overwrite=True"
    )
    for value in (1, 2):
        loaded = state(0)
        load(one, loaded)
        assert all(map(torch.equal, loaded.values(), state(value).values())), "a load differs"
        save(one, state(2), overwrite=True)
    assert verify(one).ok, "verify reports damage"
    assert torch.equal(read_state(one)["w"].read(Box((100, 2), (50, 3))), state(2)["w"][100:150, 2:5])
    open_storage(one).remove("manifest.json")
    assert _raises(CheckpointError, lambda: load(one, state(0))), "a save without its manifest is loaded"

    manager = CheckpointManager(f"{folder}/steps", retention=2)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    assert manager.steps() == [2, 3], "steps that retention removes are listed"
    loaded = state(0)
    restored = manager.restore(loaded)
    assert restored is not None and restored.step == 3 and torch.equal(loaded["w"], state(3)["w"])


def _check_values(source: Source, tensors: Mapping[str, torch.Tensor]) -> None:
    assert set(source.tensors) == set(tensors), f"names differ: {sorted(set(source.tensors) ^ set(tensors))}"
    for name, tensor in tensors.items():
        info = source.info(name)
        assert info.shape == tuple(tensor.shape), (
            f"{name}: shape {info.shape}, expected {tuple(tensor.shape)}"
        )
        assert f"torch.{info.dtype.name}" == str(tensor.dtype), (
            f"{name}: {info.dtype.name}, not {tensor.dtype}"
        )
        assert _read(source, name, whole_box(info.shape)) == _bytes(tensor), f"{name}: values differ"


def _halves(shape: tuple[int, ...]) -> Iterator[Box]:
    """The first and the last half of a tensor, along each dim."""
    for dim, size in enumerate(shape):
        for start, stop in ((0, size // 2), (size // 2, size)):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, stop - start
            if all(sizes):
                yield Box(tuple(offsets), tuple(sizes))


def _read(source: Source, name: str, box: Box) -> bytes:
    out = np.empty(box.sizes, source.info(name).dtype.raw)
    source.read_into(name, box, out)
    return out.tobytes()


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes_of(dense(tensor)).numpy().tobytes()


def _cut_copies(path: Path, folder: Path) -> Iterator[Path]:
    """Copies of a checkpoint on disk; in each, one file has lost its second half."""
    files = (
        sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else [Path()]
    )
    for number, file in enumerate(files):
        copied = folder / f"cut {number}" / path.name
        copied.parent.mkdir()
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copied)
        os.truncate(copied / file, (copied / file).stat().st_size // 2)
        yield copied


def _raises(kind: type[BaseException], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False
