"""A format and a store of another package pass the conformance checks; those with a mistake do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import Format, Source
from vescale_fsdp.conversion.testing import check_format, check_store
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError

# A format: a file `index.plain` with dtypes and shapes, and the bytes of each tensor in a file.
FORMAT = Format(r"index\.plain", f"{__name__}:open_plain")
SLOPPY = Format(r"index\.sloppy", f"{__name__}:open_sloppy")  # does not notice that a file is too short
TENSORS = {
    "weight": torch.arange(35.0).view(5, 7),
    "half": torch.arange(6).bfloat16().view(3, 2, 1),
    "step": torch.tensor(7),
    "none": torch.ones(0, 3),
}


def open_plain(store: Any, file: str, trust_pickle: bool) -> Source:
    return _opened(store, "index.plain", _checked)


def open_sloppy(store: Any, file: str, trust_pickle: bool) -> Source:
    return _opened(store, "index.sloppy", lambda data, nbytes: data.ljust(nbytes, b"\0"))


def _checked(data: bytes, nbytes: int) -> bytes:
    if len(data) != nbytes:
        raise CorruptCheckpointError(
            "A file is too short.", expected=nbytes, got=len(data), todo="copy it again"
        )
    return data


def _opened(store: Any, index: str, checked: Callable[[bytes, int], bytes]) -> Source:
    def reader(name: str, kind: str, shape: list[int]) -> Any:
        def read(box: Any) -> Any:
            dtype = np.dtype({"bfloat16": "u2"}.get(kind, kind))
            data = checked(store.read(name), dtype.itemsize * int(np.prod(shape)))
            return np.frombuffer(data, dtype).reshape(shape)[box.slices()]

        return kind, tuple(shape), read

    try:
        entries = json.loads(store.read(index))
    except ValueError as error:
        raise CorruptCheckpointError(
            "The index is damaged.", expected="JSON", got="none", todo="copy it"
        ) from error
    return Source.from_readers(
        "plain", store, {name: reader(name, *entry) for name, entry in entries.items()}
    )


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package, with its entry points."""
    folder = tmp_path / "site" / "plain-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1\n")
    points = f"plain = {__name__}:FORMAT\nsloppy = {__name__}:SLOPPY\n"
    (folder / "entry_points.txt").write_text(f"[vescale_fsdp.formats]\n{points}")
    monkeypatch.syspath_prepend(folder.parent)


def _saved(folder: Path, index: str) -> Path:
    folder.mkdir()
    entries = {
        name: (str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in TENSORS.items()
    }
    (folder / index).write_text(json.dumps(entries))
    for name, each in TENSORS.items():
        (folder / name).write_bytes(
            each.view(torch.uint16 if each.dtype == torch.bfloat16 else each.dtype).numpy()
        )
    return folder


def test_a_format_of_another_package(tmp_path: Path) -> None:
    """It is found by its entry point, and read, loaded and converted as any format."""
    check_format(_saved(tmp_path / "saved", "index.plain"), TENSORS)


WRONG = {
    "weight": TENSORS["weight"] + 1,
    "half": TENSORS["half"].half(),
    "step": torch.ones(1),
    "more": torch.ones(1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_format_that_reads_something_else(tmp_path: Path, name: str) -> None:
    """The tensor is named."""
    with pytest.raises(AssertionError, match=name):
        check_format(_saved(tmp_path / "saved", "index.plain"), TENSORS | {name: WRONG[name]})


def test_a_format_that_accepts_files_that_are_cut_short(tmp_path: Path) -> None:
    """Reading zeros where a file ends is no error that a user would see."""
    folder = _saved(tmp_path / "saved", "index.sloppy")
    load(folder, {name: torch.empty_like(each) for name, each in TENSORS.items()})
    with pytest.raises(AssertionError, match="short"):
        check_format(folder, TENSORS)


class OwnStore(MemoryFileSystem):
    """A store of another package, under a protocol of its own."""

    protocol = "own"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("own://").strip("/")


class Keeps(OwnStore):
    """A store that removes nothing."""

    store: ClassVar[dict[str, Any]] = {}

    def rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        pass


class FromTheStart(OwnStore):
    """A store that ignores where a range starts."""

    store: ClassVar[dict[str, Any]] = {}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return bytes(super().cat_file(path, 0, None if end is None else end - (start or 0), **kwargs))


@pytest.mark.parametrize("store", ["own://bucket/run", "memory://conformance/run", "folder"])
def test_stores_of_other_packages(store: str, tmp_path: Path) -> None:
    """By an fsspec protocol, and as a path."""
    fsspec.register_implementation("own", OwnStore, clobber=True)
    check_store(store if "://" in store else tmp_path / store)


@pytest.mark.parametrize(("kind", "problem"), [(Keeps, "listing"), (FromTheStart, "range")])
def test_stores_with_a_mistake(kind: type[OwnStore], problem: str) -> None:
    """The operation is named."""
    fsspec.register_implementation("own", kind, clobber=True)
    with pytest.raises(AssertionError, match=problem):
        check_store("own://bucket/run")


def test_what_no_format_matches(tmp_path: Path) -> None:
    """A folder without any index is no checkpoint."""
    (tmp_path / "saved").mkdir()
    with pytest.raises(CheckpointError):
        load(tmp_path / "saved", {"weight": torch.ones(1)})
