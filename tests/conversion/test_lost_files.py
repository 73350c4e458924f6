"""Of a native checkpoint that lacks a file, the tensors in other files are converted, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.support.command import vescale_convert
from tests.support.distributed import run_ranks
from tests.support.striped_saves import save_striped
from vescale_fsdp.checkpoint import save
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

MODEL = {f"w{i}": torch.arange(128.0).reshape(8, 16) + 1000 * i for i in range(6)}


def _native(path: Path) -> Path:
    """Save w0 and w1 in the file of rank 0, w2 and w3 in that of rank 1, w4 and w5 in that of rank 2."""
    torch.save({"model": MODEL, "step": 3}, path.with_suffix(".pt"))
    convert(open_source(path.with_suffix(".pt")), path, "native", ConvertOptions(ranks=3))
    return path


def _zarr(path: Path) -> Path:
    """Save each tensor in a file of its own; all checksums are in one file of a rank."""
    save(path, {"model": MODEL, "step": 3}, format="zarr")
    return path


def _remove(file: Path) -> None:
    file.unlink()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


FORMS = {  # a checkpoint, the pattern of the file to damage, and its tensors
    "native": (_native, "data-*/00001-of-*", {"w2", "w3"}),
    "zarr": (_zarr, "arrays/**/w2/c/*/*", {"w2"}),
}


def _equal(found: dict[str, Any], names: set[str]) -> bool:
    return found.keys() == names and all(torch.equal(found[name], MODEL[name]) for name in names)


def _read(path: Path) -> dict[str, Any]:
    """Return the state of a converted checkpoint."""
    convert(open_source(path), path.with_suffix(".read"), "torch")
    state: dict[str, Any] = torch.load(path.with_suffix(".read"))
    return state


def _is_named(file: Path) -> Callable[[CorruptCheckpointError], bool]:
    """Return a check that an error names the file."""
    return lambda error: file.name in str(error) and file.parent.name in str(error)


@pytest.mark.parametrize("damage", [_remove, _cut])
@pytest.mark.parametrize("form", FORMS)
def test_undamaged_tensors_are_converted(tmp_path: Path, form: str, damage: Callable[[Path], None]) -> None:
    """By the command and by Python; without a choice, or with a lost tensor in it, nothing is written."""
    make, pattern, lost = FORMS[form]
    path, out = make(tmp_path / "c"), tmp_path / "out.pt"
    (file,) = path.glob(pattern)
    damage(file)

    exclude = [f"model.{name}" for name in sorted(lost)]
    flags = [word for name in exclude for word in ("--exclude", name)]
    assert vescale_convert("to-torch", path, out, *flags, "-q").exit_code == 0
    found = torch.load(out)
    assert _equal(found["model"], MODEL.keys() - lost) and found["step"] == 3
    for command, name in (("to-fsdp2", "dcp"), ("to-native", "native"), ("to-zarr", "zarr"), ("to-hf", "hf")):
        prefix = "" if command == "to-hf" else "model."
        refused = vescale_convert(command, path, tmp_path / name, "--include", f"{prefix}w*")
        assert isinstance(refused.exception, CorruptCheckpointError) and _is_named(file)(refused.exception)
        assert all(f"model.{each}" in str(refused.exception) for each in lost)
        assert not (tmp_path / name).exists()
        include = ("--include", f"{prefix}w0", "--include", f"{prefix}w5")
        assert vescale_convert(command, path, tmp_path / name, *include, "-q").exit_code == 0
        written = _read(tmp_path / name)
        assert _equal(written if command == "to-hf" else written["model"], {"w0", "w5"})

    for words in (
        (),
        ("--exclude", "model.w0"),
        ("--include", "model.w2"),
        ("--dry-run", "--exclude", "step"),
    ):
        refused = vescale_convert("to-torch", path, tmp_path / "none.pt", *words)
        assert isinstance(refused.exception, CorruptCheckpointError) and _is_named(file)(refused.exception)
    with pytest.raises(CorruptCheckpointError, check=_is_named(file)):
        open_source(path)
    source = open_source(path, checks_files=False)
    with pytest.raises(CorruptCheckpointError, check=_is_named(file)):
        convert(source, tmp_path / "none.pt", "torch")
    assert not list(tmp_path.glob("*none*"))
    convert(source, tmp_path / "again.pt", "torch", ConvertOptions(exclude=exclude))
    assert _equal(torch.load(tmp_path / "again.pt")["model"], MODEL.keys() - lost)


def test_checksums_of_chunks_are_needed_too(tmp_path: Path) -> None:
    """In the zarr form they are in the file of the rank that wrote the chunk."""
    path = _zarr(tmp_path / "c")
    (file,) = path.glob("*/*.safetensors")
    file.unlink()
    source = open_source(path, checks_files=False)
    with pytest.raises(CorruptCheckpointError, check=_is_named(file)):
        convert(source, tmp_path / "none.pt", "torch", ConvertOptions(include=["model.w0"]))


def test_an_interrupted_choice_is_resumed(tmp_path: Path) -> None:
    """The files of the source that are missing are no change of the source."""
    path = _native(tmp_path / "c")
    next(path.glob("data-*/00001-of-*")).unlink()
    source, options = (
        open_source(path, checks_files=False),
        ConvertOptions(include=["model.w[05]"], resume=True),
    )

    def stop(_: int) -> None:
        raise OSError("the disk is full")

    small = replace(options, max_shard_bytes=512)
    with pytest.raises(OSError, match="full"):
        convert(source, tmp_path / "dcp", "dcp", small, progress=stop)
    convert(source, tmp_path / "dcp", "dcp", small)
    assert _equal(_read(tmp_path / "dcp")["model"], {"w0", "w5"})


def _save_copies(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in MODEL.items()}
    save_striped(path, {"model": model, "step": 3}, split_bytes=None)


@pytest.mark.parametrize("damage", [_remove, _cut])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_replica_is_enough(tmp_path: Path, rank: int, damage: Callable[[Path], None]) -> None:
    """In storage that ranks do not share, whichever file is lost; without any, nothing is written."""
    path, options = tmp_path / "c", ConvertOptions(exclude=["step"])
    run_ranks(2, _save_copies, path)
    files = sorted(path.glob("data-*/*.safetensors"))
    damage(files[rank])
    convert(open_source(path, checks_files=False), tmp_path / "out.pt", "torch", options)
    assert _equal(torch.load(tmp_path / "out.pt")["model"], set(MODEL))
    if damage is _remove:
        assert open_source(path).tensors.keys() == {f"model.{name}" for name in MODEL}
    else:
        with pytest.raises(CorruptCheckpointError, check=_is_named(files[rank])):
            open_source(path)
    damage(files[1 - rank])
    with pytest.raises(CorruptCheckpointError):
        convert(open_source(path, checks_files=False), tmp_path / "none.pt", "torch", options)
    assert not (tmp_path / "none.pt").exists()


def test_a_name_of_the_source_gets_the_name_in_the_result(tmp_path: Path) -> None:
    """A Hugging Face folder drops the prefix of the model: the error for its full name has the one to pass."""
    path = _native(tmp_path / "c")
    with pytest.raises(ConversionError) as caught:
        convert(
            open_source(path), tmp_path / "hf", "hf", ConvertOptions(no_assets=True, exclude=("model.w[23]",))
        )
    assert str(caught.value.todo).endswith(" w2, w3")
    convert(open_source(path), tmp_path / "hf", "hf", ConvertOptions(no_assets=True, exclude=("w2", "w3")))
    assert _equal(load_file(tmp_path / "hf/model.safetensors"), MODEL.keys() - {"w2", "w3"})
