"""Names that mean something to file systems, to formats, or to each other, against every format that is written.

Each is either written and read back, bit for bit, or refused before a byte is written; and whatever happens,
nothing appears outside the target.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp.checkpoint import load, read_state, save, verify
from vescale_fsdp.checkpoint.manifest.file_names import array_paths
from vescale_fsdp.checkpoint.manifest.state_tree import join_name
from vescale_fsdp.checkpoint.state.nesting import flatten, name_of
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.convert import convert
from vescale_fsdp.conversion.diff import diff
from vescale_fsdp.errors import VescaleError

HALF_A_PAIR = "\ud800"
NAMES = [
    "",
    " ",
    ".",
    "..",
    "...",
    "../../up",
    "/",
    "/etc/passwd",
    "//host/share",
    "a",
    "A",
    "a/b",
    "a/../b",
    "a.c",
    "a.",
    "a ",
    " a",
    ".a",
    "a//b",
    "a/",
    "c",
    "c/0",
    "c.0",
    "0",
    "zarr.json",
    "ZARR.JSON",
    ".zarr.json.partial",
    "zarr%2Ejson",
    "manifest.json",
    "data-0000000000000000",
    "00000-of-00001.safetensors",
    ".partial",
    ".0.partial",
    ".lock",
    "__metadata__",
    "__checksums__",
    "__chunks__",
    "__per_rank__",
    "$",
    "$x",
    "~",
    "~0",
    "~1",
    "%",
    "%2F",
    "%00",
    "%empty",
    "\0",
    "a\0b",
    "new\nline",
    "back\\slash",
    "C:\\x",
    "con",
    "a:b*?<>|\"'",
    "\u00e9",  # one code point, and two: the same letter
    "e\u0301",
    "\U0001f600",
    HALF_A_PAIR,
    "x" * 254,
    "x" * 255,
    "x" * 256,
    "x" * 5000,
    "X" * 256,
    "\u00fc" * 100,
    "y/" * 400 + "z",
    "-rf",
    "{}",
    "[0]",
    "None",
    "1",
]
TARGETS = ("hf", "dcp", "torch", "zarr", "native")
ALONE = [
    *("__metadata__", "__checksums__", "__per_rank__", "__chunks__"),
    *("", "..", "../up", "/etc/up", "c", "zarr.json", "00000-of-00001.safetensors", "a/b", "\0", "x" * 256),
    HALF_A_PAIR,
]
REFUSED = {"hf": ["__metadata__"]}  # besides half a pair, which is no text
FORMS = ("native", "zarr")


def _tensor(number: int) -> torch.Tensor:
    return torch.arange(4, dtype=torch.int32) + 10 * number + 1


def _tree(folder: Path) -> set[str]:
    """Everything below a folder, and the folder above it."""
    return {str(path) for path in folder.parent.rglob("*") if path.name != "target"}


def _outside(before: set[str], folder: Path) -> set[str]:
    return {path for path in _tree(folder) - before if not Path(path).is_relative_to(folder / "target")}


def _convert_named(
    tensors: dict[str, torch.Tensor], folder: Path, target: str, container: str = "model"
) -> str:
    """ "written" if the tensors came back from a target, else "refused"."""
    torch.save({container: tensors} if container else tensors, folder / "source.pt")
    before = _tree(folder)
    out = folder / "target" / ("out.pt" if target == "torch" else "out")
    try:
        source = open_source(str(folder / "source.pt"))
        assert set(source.tensors) == {f"{container}.{name}" if container else name for name in tensors}
        convert(source, str(out), target)
    except VescaleError:
        assert not (folder / "target").exists(), "refused, but something was written"
        assert _outside(before, folder) == set()
        return "refused"
    assert _outside(before, folder) == set()
    again = open_source(str(out))
    assert verify(again).problems == ()
    (folder / "back").mkdir()
    convert(again, str(folder / "back" / "back.pt"), "torch")
    found = torch.load(folder / "back" / "back.pt", weights_only=True)
    _assert_found(tensors, found if target == "hf" or not container else found[container])
    if target in ("zarr", "native"):
        assert verify(out).ok
        zeros = _zeroed(tensors)
        load(out, {container: zeros} if container else zeros)
        _assert_found(tensors, zeros)
    return "written"


def _assert_found(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert list(expected) == list(found) or sorted(expected) == sorted(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("target", TARGETS)
def test_paths_that_are_not_utf8(target: str, tmp_path: Path) -> None:
    """Linux allows any bytes in a path; Python keeps those that are no UTF-8 as lone surrogates."""
    folder = tmp_path / os.fsdecode(b"run\xff\xfe")
    out = folder / os.fsdecode(b"out\xff" + (b".pt" if target == "torch" else b""))
    save(folder / "in", {"model": {"w": _tensor(1)}})
    convert(open_source(str(folder / "in")), str(out), target)
    again = open_source(str(out))
    assert verify(again).problems == () and diff(open_source(str(folder / "in")), again) == ((), 1)


@pytest.mark.parametrize("container", ["model", ""])
@pytest.mark.parametrize("target", TARGETS)
def test_the_converter_with_one_name(target: str, container: str, tmp_path: Path) -> None:
    """One at a time, in a model or at the root, where names meet the files' own: which are refused, and how."""
    refused = []
    for number, name in enumerate(ALONE):
        folder = tmp_path / str(number) / "in"
        folder.mkdir(parents=True)
        tensors = {name: _tensor(number), "plain": _tensor(99)}
        if _convert_named(tensors, folder, target, container) == "refused":
            refused.append(name)
    own = {"hf": ["__metadata__"]} if container else {"hf": ["__metadata__"], "native": [*ALONE[:3]]}
    assert refused == [*own.get(target, []), HALF_A_PAIR]


@pytest.mark.parametrize("target", TARGETS)
def test_the_converter_with_all_names(target: str, tmp_path: Path) -> None:
    """All in one state, where they may get in each other's way."""
    hopeless = [*REFUSED.get(target, []), HALF_A_PAIR]
    tensors = {name: _tensor(i) for i, name in enumerate(NAMES) if name not in hopeless}
    (tmp_path / "in").mkdir()
    assert _convert_named(tensors, tmp_path / "in", target) == "written"


def _saved(state: dict[str, Any], folder: Path, form: str) -> str:
    """As `_convert_named`, for `save`."""
    leaves = flatten(state, lambda value: isinstance(value, torch.Tensor))
    before = _tree(folder)
    out = folder / "target" / "out"
    try:
        save(LocalStorage(out, durable=False), state, format=form)  # type: ignore[arg-type]
    except VescaleError:
        files = [p for p in out.rglob("*") if p.is_file() and p.name != ".lock"]
        assert files == [] and _outside(before, folder) == set()
        return "refused"
    assert _outside(before, folder) == set()
    assert verify(out).ok and verify(open_source(str(out))).problems == ()
    assert len(read_state(out).names()) == len(leaves)
    empty = _zeroed(state)
    load(out, empty)
    found = flatten(empty, lambda value: isinstance(value, torch.Tensor))
    assert all(torch.equal(leaves[path], found[path]) for path in leaves)
    assert open_source(str(out)).tensors.keys() == {name_of(path) for path in leaves}
    return "written"


def _zeroed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _zeroed(value) for key, value in state.items()}
    return torch.zeros_like(state)


@pytest.mark.parametrize("form", FORMS)
def test_save_with_one_name(form: str, tmp_path: Path) -> None:
    """As a key of a tensor at the root, and as that of a folder of tensors."""
    refused = []
    for number, name in enumerate(ALONE):
        for depth, state in enumerate(
            ({name: _tensor(number), "plain": _tensor(99)}, {name: {name: _tensor(number), "c": _tensor(98)}})
        ):
            folder = tmp_path / f"{number}-{depth}" / "in"
            folder.mkdir(parents=True)
            if _saved(state, folder, form) == "refused":
                refused.append((name, depth))
    # The files' own entries have these names; half a surrogate pair has no UTF-8, which manifests are.
    own = [("__metadata__", 0), ("__checksums__", 0), ("__per_rank__", 0)]
    assert sorted(refused) == sorted([*own, (HALF_A_PAIR, 0), (HALF_A_PAIR, 1)])


@pytest.mark.parametrize("form", FORMS)
def test_save_with_all_names(form: str, tmp_path: Path) -> None:
    """Tensors and folders of them side by side."""
    names = [name for name in NAMES if name != HALF_A_PAIR]
    tensors = {name: _tensor(i) for i, name in enumerate(names)}
    folders = {f"f{name}": {inner: _tensor(i) for inner in ("", "a", "c")} for i, name in enumerate(names)}
    (tmp_path / "in").mkdir()
    assert _saved({"model": tensors, "more": folders}, tmp_path / "in", form) == "written"


def test_names_that_are_one_when_joined_are_refused(tmp_path: Path) -> None:
    """An empty key above another leaves its name: both engines refuse, instead of storing one for both."""
    state = {"": {"a": _tensor(1)}, "a": _tensor(2)}
    for form in FORMS:
        assert _saved(state, tmp_path, form) == "refused"
    torch.save(state, tmp_path / "source.pt")
    for target in ("zarr", "native"):
        with pytest.raises(VescaleError, check=lambda error: "'a'" in str(error.got)):
            convert(open_source(str(tmp_path / "source.pt")), str(tmp_path / "out"), target)
        assert not (tmp_path / "out").exists()


def test_paths_of_arrays() -> None:
    """Short, apart, none inside another, also without regard to case; plain names as they are."""
    names = [join_name(join_name("model", "x") if i % 2 else "", name) for i, name in enumerate(NAMES)]
    names = list(
        dict.fromkeys([*names, "M/layers.0.w", "m/layers.0.w", "m/LAYERS.0.w", "q/r", "Q", "s", "S/t"])
    )
    paths = array_paths(names)
    lowered = {path.lower() for path in paths.values()}

    assert paths["M/layers.0.w"] == "M/layers.0.w" and paths["q/r"] == "q/r" and paths["s"] == "s"
    assert len(lowered) == len(names) and "zarr.json" not in lowered
    for path in lowered:
        assert path.isascii() and len(path) <= 600 and max(map(len, path.split("/"))) <= 200
        assert not any(
            part[0] in ". " or part[-1] in ". " or part.startswith("__") for part in path.split("/")
        )
        parents = {path[:at] for at, letter in enumerate(path) if letter == "/"}
        assert parents.isdisjoint(lowered)
