"""The folder of a zarr checkpoint: what the zarr library alone sees in it, and how a new one replaces it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.distributed import run_ranks
from tests.support.faults.stream_storage import StreamStorage
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, load, read_state, save, verify
from vescale_fsdp.conversion import convert, open_source
from vescale_fsdp.errors import CheckpointError

# Walks the whole folder and stores what it finds; knows nothing of this library.
_ZARR_ALONE = """
import sys
import numpy, zarr

folder, found = sys.argv[1:]
root = zarr.open(folder, mode="r")
root.tree()
nodes = {name: node for name, node in root["arrays"].members(max_depth=None) if isinstance(node, zarr.Array)}
assert {"arrays", *(f"arrays/{name}" for name in nodes)} <= {name for name, _ in root.members(max_depth=None)}
numpy.savez(found, **{node.attrs["name"]: node[...] for node in nodes.values()})
types = {node.attrs["name"]: node.attrs["logical_dtype"] for node in nodes.values()}
assert types["model/half"] == "bfloat16" and types["model/byte"] == "float8_e4m3fn", types
assert zarr.open_array(folder, path="arrays/model/w", mode="r").shape == (40, 30)
assert not any(name.partition(".")[0] in ("vescale_fsdp", "torch") for name in sys.modules)
"""


def _tensors() -> dict[str, torch.Tensor]:
    values = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(40, 30, generator=values),
        "half": torch.randn(5, 6, generator=values).bfloat16(),
        "byte": torch.randn(9, generator=values).to(torch.float8_e4m3fn),
        "zeros": torch.zeros(4, 4),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }


def _save_cut(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: dict[str, Any] = _tensors()
    model["w"] = distribute_tensor(model["w"], mesh, [Shard(1)])
    model["half"] = distribute_tensor(model["half"], mesh, [Shard(0)])
    save(path, {"model": model, "step": 3, "seed": PerRank(dist.get_rank())}, format="zarr")


@pytest.mark.parametrize("writer", ["save", "convert"])
def test_the_zarr_library_alone_opens_the_folder(writer: str, tmp_path: Path) -> None:
    """A process without this library finds every array, with its values, and is warned of nothing."""
    run_ranks(2, _save_cut, tmp_path / "save")
    if writer == "convert":
        convert(open_source(str(tmp_path / "save")), str(tmp_path / "convert"), "zarr")
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        _ZARR_ALONE,
        str(tmp_path / writer),
        str(tmp_path / "a.npz"),
    ]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)

    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "a.npz")
    for name, tensor in _tensors().items():
        values = torch.from_numpy(found[f"model/{name}"])
        assert values.shape == tensor.shape
        assert torch.equal(values.view(tensor.dtype) if values.dtype != tensor.dtype else values, tensor), (
            name
        )


def test_chunks_are_what_the_zarr_library_writes(tmp_path: Path) -> None:
    """The library that writes the same values into the same arrays makes the same bytes, chunk by chunk."""
    save(tmp_path / "save", {"model": _tensors()}, format="zarr")
    convert(open_source(str(tmp_path / "save")), str(tmp_path / "convert"), "zarr")
    for writer in ("save", "convert"):
        ours = zarr.open_group(tmp_path / writer, mode="r")["arrays"]
        copies = zarr.create_group(tmp_path / f"{writer} copied")
        for name, array in ours.members(max_depth=None):
            if isinstance(array, zarr.Array):
                settings = {
                    "shape": array.shape,
                    "chunks": array.chunks,
                    "dtype": array.dtype,
                    "fill_value": 0,
                }
                codecs = {"filters": None, "compressors": [zarr.codecs.Crc32cCodec()]}
                copy = copies.create_array(name, **settings, **codecs, config={"write_empty_chunks": True})
                copy[...] = array[...]
        folders = tmp_path / writer / "arrays", tmp_path / f"{writer} copied"
        chunks, copied = (
            {
                str(file.relative_to(folder)): file.read_bytes()
                for file in folder.rglob("c/**/*")
                if file.is_file()
            }
            for folder in folders
        )
        scalar = {
            str(file.relative_to(folders[0])): file.read_bytes()
            for file in folders[0].rglob("c")
            if file.is_file()
        }
        assert len(chunks) >= 4 and chunks == copied
        assert {name: (folders[1] / name).read_bytes() for name in scalar} == scalar and scalar


def test_every_form_replaces_every_form(tmp_path: Path) -> None:
    """Only when asked to; afterward the folder has the files of the new checkpoint alone."""
    old: str | None = None
    for value, form in enumerate(("zarr", "native", "zarr", "zarr", "native", "native")):
        state: dict[str, Any] = {"w": torch.full((6, 5), float(value)), f"only{value}": torch.ones(3)}
        if old is not None:
            with pytest.raises(CheckpointError):
                save(tmp_path / "c", state, format=form)  # type: ignore[arg-type]
        save(tmp_path / "c", state, format=form, overwrite=True)  # type: ignore[arg-type]
        assert sorted(read_state(tmp_path / "c")) == [f"only{value}", "w"]
        assert torch.equal(read_state(tmp_path / "c")["w"].read(), state["w"])
        assert verify(tmp_path / "c").ok and os.listdir(tmp_path) == ["c"]
        names = {name for name in os.listdir(tmp_path / "c") if name != ".lock"}
        is_zarr = names == {"arrays", "vescale-checkpoint", "zarr.json"}
        assert is_zarr if form == "zarr" else len(names) == 2 and "manifest.json" in names
        old = form


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    """The whole folder is exchanged, so that a file in it that is none of a checkpoint's would be lost."""
    save(tmp_path / "c", {"w": torch.ones(3)}, format="zarr")
    (tmp_path / "c" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, check=lambda error: "notes" in str(error.got)):
        save(tmp_path / "c", {"w": torch.zeros(3)}, format="zarr", overwrite=True)
    assert (tmp_path / "c" / "notes").exists() and read_state(tmp_path / "c")["w"].read().all()


def test_an_object_store_keeps_the_old_one(tmp_path: Path) -> None:
    """Nothing is renamed there, so that an old checkpoint would be damaged first; leftovers are removed."""
    storage = StreamStorage(tmp_path / "c")
    (tmp_path / "c/arrays/old/c").mkdir(parents=True)
    (tmp_path / "c/arrays/old/c/0").write_bytes(b"left by a killed save")
    save(storage, {"w": torch.ones(3)}, format="zarr", overwrite=True)
    assert not (tmp_path / "c/arrays/old/c/0").exists() and verify(tmp_path / "c").ok
    for overwrite in (False, True):
        with pytest.raises(CheckpointError):
            save(storage, {"w": torch.zeros(3)}, format="zarr", overwrite=overwrite)
        assert read_state(storage)["w"].read().all() and verify(tmp_path / "c").ok
    save(storage, {"w": torch.zeros(3)}, overwrite=True)
    assert not read_state(storage)["w"].read().any() and verify(tmp_path / "c").ok


_CHANGES = ("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "ftruncate", "pwritev")
_OPEN = os.open


@pytest.mark.parametrize("asynchronous", [False, True])
def test_exports_of_a_run_that_goes_on_from_an_older_step_are_replaced(asynchronous: bool) -> None:
    """In an object store too: the step itself is saved, so a failed export loses nothing that is not there twice."""
    root = f"memory://zarr-exports-{asynchronous}"

    def saved(value: float, steps: range, from_step: int | None) -> None:
        manager = CheckpointManager(root, export="zarr", asynchronous=asynchronous)
        assert manager.restore(_state(0), step=from_step) is not None or from_step is None
        for step in steps:
            manager.save(step, _state(value + step))
        manager.wait()

    saved(0, range(1, 4), None)
    saved(10, range(2, 4), 1)
    for step, value in ((1, 1.0), (2, 12.0), (3, 13.0)):
        found = _state(0)
        load(f"{root}/exports/step-{step:08d}", found)
        assert (found["model"]["w"] == value).all() and (found["model"]["b"] == value).all(), (step, found)


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((40, 30), value), "b": torch.full((5,), value)}, "step": int(value)}


def _die_at(index: int, path: Path) -> None:
    """In a forked child: overwrite a checkpoint, and be killed before the index-th change of the file system."""
    lock, count = threading.Lock(), [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            with lock:
                count[0] += call is not _OPEN or bool(args[1] & os.O_CREAT)
                if count[0] == index:
                    os._exit(9)
            return call(*args, **options)

        return wrapped

    for name in _CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    save(path, _state(2.0), format="zarr", overwrite=True)
    os._exit(0)


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.part("faults"))])
def test_no_kill_of_an_overwrite_loses_the_old_one(stride: int, tmp_path: Path) -> None:
    """Killed before every change of the file system, or before every eighth: the old one or the new one is whole."""
    template, parent = tmp_path / "template", tmp_path / "at"
    save(template / "c", _state(1.0), format="zarr")
    index, status, found = 1 - stride, 9, []
    while status == 9:
        index += stride
        shutil.rmtree(parent, ignore_errors=True)
        shutil.copytree(template, parent)
        child = os.fork()
        if not child:
            try:
                _die_at(index, parent / "c")
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        state = _state(0.0)
        load(parent / "c", state)
        assert verify(parent / "c").ok, index
        for tensor in state["model"].values():
            assert (tensor == state["step"]).all() and state["step"] in (1, 2), index
        found.append(state["step"])
    assert status == 0 and len(found) * stride > 50
    assert found == sorted(found) and set(found) == {1, 2}
    save(parent / "c", _state(3.0), format="zarr", overwrite=True)
    assert os.listdir(parent) == ["c"]
