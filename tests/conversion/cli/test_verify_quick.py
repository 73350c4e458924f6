"""`verify --quick` of every format: all missing and all truncated files are listed, and no tensor data is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.conversion.formats import test_gguf as gguf
from tests.conversion.formats import test_megatron as megatron
from tests.conversion.formats import test_orbax as orbax
from tests.conversion.formats.zero_folders import some_state, write_universal, write_zero
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.cli.commands import cli
from vescale_fsdp.errors import ConversionError

_ROWS, _COLUMNS = 12, 50
_CUT_BYTES = 40  # more than the padding at the end of a GGUF file


# --- Checkpoints, with weights in several files where the format allows it
def _model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"w{number}": torch.randn(_ROWS, _COLUMNS) for number in range(4)}


def _converted(kind: str, **options: int) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        torch.save({"model": _model()}, path.with_suffix(".pt"))
        convert(open_source(str(path.with_suffix(".pt"))), str(path), kind, ConvertOptions(**options))
        path.with_suffix(".pt").unlink()
        return path

    return write


def _dcp_of_two(path: Path) -> Path:
    """As accelerate saves them: the model and the optimizer in a folder each."""
    dcp.save({"model": _model()}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": {"moment": torch.ones(99)}}, checkpoint_id=path / "optimizer_0", no_dist=True)
    return path


def _shards(path: Path) -> Path:
    path.mkdir()
    for rank in range(4):
        offsets = {"w": {"saved_offsets": [rank * _ROWS, 0]}}
        save_file(
            {"w": _model()[f"w{rank}"]},
            path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(offsets)},
        )
    return path


def _bin(path: Path) -> Path:
    path.mkdir()
    places = {name: f"pytorch_model-{number:05d}-of-00004.bin" for number, name in enumerate(_model(), 1)}
    for name, tensor in _model().items():
        torch.save({name: tensor}, path / places[name])
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def _ranks(path: Path) -> Path:
    path.mkdir()
    for rank in range(3):
        torch.save(_model(), path / f"model_world_size_3_rank_{rank}.pt")
    return path


def _gguf(path: Path) -> Path:
    path.mkdir()
    for number, tensor in enumerate((*gguf.PLAIN, *gguf.PLAIN)[:3], 1):
        gguf._write(path / f"m-{number:05d}-of-00003.gguf", [(f"{tensor[0]}.{number}", *tensor[1:])])
    return path / "m-00001-of-00003.gguf"


def _adapter(path: Path) -> Path:
    path.mkdir()
    name = "base_model.model.up.lora_{}.weight"
    save_file(
        {name.format("A"): torch.ones(2, 6), name.format("B"): torch.ones(8, 2)},
        path / "adapter_model.safetensors",
    )
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return path


def _megatron(path: Path) -> Path:
    return megatron.write(
        path, megatron.megatron_weights(megatron.hf_weights("llama"), "llama"), is_stacked=True
    )


def _orbax(version: int) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.mkdir()
        orbax.write_orbax(path, version)
        return path

    return write


def _arrays(version: int, codec: str | None) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        group = zarr.create_group(path, zarr_format=version)
        for name, tensor in _model().items():
            group.create_array(name, shape=tensor.shape, dtype="float32", chunks=(5, 50), compressors=codec)[
                ...
            ] = tensor.numpy()
        return path

    return write


def _save_torch(path: Path) -> Path:
    torch.save({"model": _model()}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def _save_safetensors(path: Path) -> Path:
    save_file(_model(), path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def _trainer(path: Path) -> Path:
    path.mkdir()
    save_file(_model(), path / "model.safetensors", {"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        torch.save({"a": torch.ones(5)}, path / name)
    (path / "trainer_state.json").write_text("{}")
    return path


class Writer(NamedTuple):
    """A way to write a checkpoint.

    Attributes:
        write: writes a checkpoint, and returns its path.
        files: glob pattern of the files with state, in the checkpoint's folder.
        unseen: damage that no header shows: a chunk of zarr that is missing has the fill value, the size of a
            compressed chunk is stored nowhere, and a trainer's folder may lack the optimizer.
    """

    write: Callable[[Path], Path]
    files: str
    unseen: Collection[str] = ()


WRITERS = {
    "native": Writer(_converted("native", ranks=4), "**/*.safetensors"),
    "zarr": Writer(_converted("zarr"), "**/c/**/[0-9]*"),
    "dcp": Writer(_converted("dcp", max_shard_bytes=3000), "*.distcp"),
    "dcp of two": Writer(_dcp_of_two, "*/*.distcp"),
    "hf": Writer(_converted("hf", max_shard_bytes=3000), "*.safetensors"),
    "trainer": Writer(_trainer, "*[rl]*.[psb]*t*", ("missing",)),
    "shards": Writer(_shards, "*.safetensors"),
    "bin": Writer(_bin, "*.bin"),
    "ranks": Writer(_ranks, "*.pt"),
    "gguf": Writer(_gguf, "*.gguf"),
    "megatron": Writer(_megatron, "*.distcp"),
    "zero 2": Writer(lambda path: write_zero(path, some_state(), stage=2, ranks=4), "*optim*.pt"),
    "zero 3": Writer(lambda path: write_zero(path, some_state(), stage=3, ranks=3), "*.pt"),
    "universal": Writer(lambda path: write_universal(path, some_state(), stage=2), "**/fp32.pt"),
    "orbax 2": Writer(_orbax(2), "*/[0-9]*", ("missing", "cut")),
    "orbax 3": Writer(_orbax(3), "*/c/**/[0-9]*", ("missing", "cut")),
    "arrays 2": Writer(_arrays(2, None), "*/[0-9]*", ("missing",)),
    "arrays 3": Writer(_arrays(3, None), "*/c/**/[0-9]*", ("missing",)),
    "arrays 3 coded": Writer(_arrays(3, "auto"), "*/c/**/[0-9]*", ("missing", "cut")),
}
# Checkpoints of one file: without it nothing is there that could be verified.
SINGLE = {
    "hf": Writer(_converted("hf"), "*.safetensors"),
    "adapter": Writer(_adapter, "*.safetensors"),
    "torch": Writer(_save_torch, "*.pt"),
    "safetensors": Writer(_save_safetensors, "*.safetensors"),
}
_CORE = ("dcp", "hf", "ranks")


def _quick(path: Path) -> tuple[list[str], int]:
    """The problems that the command lists, and its exit code; the function finds the same."""
    result = CliRunner().invoke(cli, ["verify", str(path), "--quick", "--quiet", "--json"])
    listed = json.loads(result.stdout)
    assert listed["nbytes"] == 0
    assert [str(each) for each in verify(path, deep=False).problems] == listed["problems"]
    return listed["problems"], result.exit_code


def _files(writer: Writer, path: Path) -> dict[str, Path]:
    """The files with state, by their names in the checkpoint's folder."""
    folder = path if path.is_dir() else path.parent
    found = sorted(file for file in folder.glob(writer.files) if file.is_file())
    return {file.relative_to(folder).as_posix(): file for file in found}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-_CUT_BYTES])


def _rows(names: Collection[str], *damages: str) -> list[Any]:
    part = pytest.mark.part("formats")
    rows = [(n, d) for n in names for d in damages if (n, d) != ("megatron", "both")]  # of one file
    return [pytest.param(n, d, marks=() if n in _CORE else part) for n, d in rows]


@pytest.mark.parametrize(("name", "damage"), _rows(WRITERS, "missing", "cut", "both"))
def test_every_missing_and_every_truncated_file_is_listed(tmp_path: Path, name: str, damage: str) -> None:
    """One problem per file, by its name in the folder; none of a good checkpoint."""
    writer = WRITERS[name]
    path = writer.write(tmp_path / "checkpoint")
    assert _quick(path) == ([], 0)
    files = _files(writer, path)
    # Of the middle: a GGUF series is opened by its first name, and shards do not record how many there are.
    missing = list(files)[1:3] if len(files) > 3 else list(files)[-2:][:1]
    damaged = {"missing": missing, "cut": list(files)[-2:], "both": [missing[0], list(files)[-1]]}[damage]
    for number, file in enumerate(damaged):
        if damage == "missing" or (damage == "both" and not number):
            files[file].unlink()
        elif files[file].exists():
            _cut(files[file])
    kinds = [damage] if damage != "both" else ["missing", "cut"]
    seen = [file for file, kind in zip(damaged, kinds * 2, strict=False) if kind not in writer.unseen]
    problems, exit_code = _quick(path)
    assert exit_code == bool(seen) and len(problems) == len(seen)
    assert all(sum(file in problem for problem in problems) == 1 for file in seen), problems
    if not seen and damage == "cut":
        assert not verify(path).ok


@pytest.mark.part("formats")
@pytest.mark.parametrize("name", SINGLE)
def test_the_only_file_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Truncated, it is listed; without it, the error says that there is nothing to read, and what is there."""
    writer = SINGLE[name]
    path = writer.write(tmp_path / "checkpoint")
    assert _quick(path) == ([], 0)
    ((file_name, file),) = _files(writer, path).items()
    _cut(file)
    problems, exit_code = _quick(path)
    assert len(problems) == exit_code == 1 and file_name in problems[0]
    file.unlink()
    result = CliRunner().invoke(cli, ["verify", str(path), "--quick"])
    assert result.exit_code == 1 and isinstance(result.exception, ConversionError)
    assert result.exception.where == str(path)


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    """Refused with exit code 1, by its path."""
    result = CliRunner().invoke(cli, ["verify", str(tmp_path), "--quick", "--json"])
    assert result.exit_code == 1 and isinstance(result.exception, ConversionError)
    assert result.exception.got == "an empty folder" and result.exception.where == str(tmp_path)


def test_a_damaged_index_is_a_problem(tmp_path: Path) -> None:
    """Also of a native checkpoint, whose manifest lists the files."""
    for name in ("manifest.json", "model.safetensors.index.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("<html>")
        problems, exit_code = _quick(tmp_path / name)
        assert len(problems) == exit_code == 1 and name in problems[0]


def _read_bytes() -> int:
    """Bytes that this process has read, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.part("formats")
@pytest.mark.parametrize(
    "name",
    [
        *("native", "zarr", "dcp", "hf", "trainer", "shards", "bin", "ranks"),
        *filter(re.compile("arrays").match, WRITERS),
    ],
)
def test_no_tensor_data_is_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 19 MB less than one; every header is at most some kB."""
    monkeypatch.setitem(globals(), "_COLUMNS", 100_000)
    path = WRITERS[name].write(tmp_path / "checkpoint")
    verify(path, deep=False)  # imports modules
    before = _read_bytes()
    assert verify(path, deep=False).ok
    assert _read_bytes() - before < 1_000_000


@pytest.mark.part("formats")
def test_shards_may_be_several_per_rank_and_none_of_some_ranks(tmp_path: Path) -> None:
    """Ranks without a piece write no file; those with much write several. All pieces are read."""
    model = _model()
    pieces = {
        "00000-model-00001-of-00002": "w0",
        "00000-model-00002-of-00002": "w1",
        "00003-model-00002-of-00002": "w2",
    }
    for number, name in pieces.items():
        save_file({name: model[name]}, tmp_path / f"shard-{number}.safetensors")
    assert _quick(tmp_path) == ([], 0)
    assert open_source(str(tmp_path)).tensors.keys() == set(pieces.values())
