"""Checkpoints of both forms that an earlier commit wrote, read by this one; and the bytes of a small file.

``python -m tests.checkpoint.manifest.test_golden`` writes the folders that are missing.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.checkpoint_states import SHAPES, full, planned, ragged_group, stock_tensors
from tests.support.distributed import run_ranks
from tests.support.striped_saves import save_striped
from vescale_fsdp.checkpoint import PerRank, load, read_state, save, verify
from vescale_fsdp.checkpoint.manifest.manifest import FORMAT_VERSION, Manifest, build_manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.native.write import FileImage
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.distribution import RankSet
from vescale_fsdp.layout.geometry import boxes_of_range

GOLDEN = Path(__file__).parent.parent / "golden"
FOLDERS: dict[str, Path] = {
    "native": GOLDEN / f"v{FORMAT_VERSION}-native",
    "zarr": GOLDEN / f"v{FORMAT_VERSION}-zarr",
}


def _plain_leaves() -> dict[str, Any]:
    return {
        "numbers": [1, 2.5, float("inf"), True, None, 1 + 2j],
        "others": ("text", b"\x00\xff", {3, 1}, torch.int8, {1: "one", "$": "dollar"}),
    }


def _state() -> dict[str, Any]:
    """What golden checkpoints hold; needs three ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stock = stock_tensors(mesh)
    del stock["replicate"]  # large
    rng = PerRank({"seed": torch.tensor([dist.get_rank(), 7])})
    return {"model": ragged_group(mesh, block_rows=2), "stock": stock, "plain": _plain_leaves(), "rng": rng}


def _write(path: Path, form: str) -> None:
    metadata = {"written by": f"format version {FORMAT_VERSION}"}
    save_striped(path, _state(), metadata=metadata, format=form, stripe_bytes=256, split_bytes=16)


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=list(FOLDERS))
def test_golden_checkpoints_are_read(folder: Path) -> None:
    """Every tensor and value comes back."""
    reader = read_state(folder)

    assert verify(folder).ok
    for name, shape in SHAPES.items():
        assert torch.equal(full(name, shape), reader[f"model/{name}"].read())
    for name, shape in (("shard0", (11, 4)), ("shard1", (6, 9)), ("shard2", (2, 3, 10)), ("small", (3,))):
        assert torch.equal(full(name, shape), reader[f"stock/{name}"].read())
    assert torch.equal(full("plain", (5, 2), torch.bfloat16), reader["stock/plain"].read())
    assert reader.tree()["plain"] == _plain_leaves()
    values = [values["rng"]["seed"].tolist() for values in reader.per_rank_values()]
    assert values == [[0, 7], [1, 7], [2, 7]]
    assert reader.metadata["written by"] == f"format version {FORMAT_VERSION}"


def _load(folder: Path) -> int:
    state = _state()
    for tensor in state["model"].values():
        tensor.to_local().zero_()
    load(folder, state)
    total = 0
    for name, tensor in state["model"].items():
        start, stop = tensor.piece
        assert torch.equal(full(name, SHAPES[name]).reshape(-1)[start:stop], tensor.to_local())
        total += stop - start
    return total


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=list(FOLDERS))
def test_golden_checkpoints_are_loaded(folder: Path) -> None:
    """Two ranks load what three ranks have saved."""
    held = run_ranks(2, _load, folder)

    assert sum(held) == sum(torch.Size(shape).numel() for shape in SHAPES.values()) and min(held) > 0


def _manifest() -> tuple[Manifest, dict[str, torch.Tensor]]:
    taken = take_state({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3], dtype=torch.int8)})
    classes = [(RankSet.world(1), taken.structure)]
    return build_manifest(classes, save_id="00112233aabbccdd", world_size=1), taken.locals_by_name


def test_bytes_of_a_small_file() -> None:
    """The file's bytes up to the checksums, spelled out."""
    manifest, tensors = _manifest()
    file = RankFile(manifest, 0)
    (found,) = [b"".join(bytes(part) for part in FileImage(file, tensors, b"").buffers(0, file.table_start))]
    metadata = '{"format":"vescale-checkpoint","version":"1","save_id":"00112233aabbccdd","rank":"0","world_size":"1"}'
    header = (
        f'{{"__metadata__":{metadata},"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},'
        '"b":{"dtype":"I8","shape":[1],"data_offsets":[8,9]},'
        '"__checksums__":{"dtype":"U8","shape":[16],"data_offsets":[9,25]}}'
    ).encode()
    padded = header.ljust(-(-(len(header) + 8) // 64) * 64 - 8)

    assert struct.pack("<Q", len(padded)) + padded + bytes.fromhex("0000803f00000040 03") == found
    assert file.total_bytes == len(found) + 16


def test_text_of_a_small_manifest() -> None:
    """The manifest's JSON, spelled out."""
    manifest, _ = _manifest()
    data = json.loads(manifest.to_bytes())

    assert data.pop("checksum") and data == {
        "format": "vescale-checkpoint",
        "version": 1,
        "save_id": "00112233aabbccdd",
        "world_size": 1,
        "stripe_bytes": 1048576,
        "split_bytes": 65536,
        "blob_bytes": 0,
        "rank_sets": [[[0, 1, 1, 1, 0]]],
        "axes": [[]],
        "layouts": [],
        "tensors": [
            {"name": "a", "dtype": "float32", "shape": [2], "axes": 0, "cuts": [], "ranks": 0},
            {"name": "b", "dtype": "int8", "shape": [1], "axes": 0, "cuts": [], "ranks": 0},
        ],
        "state": {"a": {"$": "tensor", "i": 0}, "b": {"$": "tensor", "i": 1}},
        "user": None,
    }
    assert Manifest.from_bytes(manifest.to_bytes(), where="here") == manifest


def test_tensors_in_an_order_that_aligns_no_pieces() -> None:
    """A tensor of four bytes per item after one of a single byte: its piece would begin inside of an item."""
    wide, narrow = Entry("wide", "float32", (2,), 0, ()), Entry("narrow", "int8", (3,), 0, ())

    def read(*entries: Entry) -> Manifest:
        tree = {entry.name: {"$": "tensor", "i": number} for number, entry in enumerate(entries)}
        classes = [(RankSet.world(1), Structure(tree, entries, ((),), ()))]
        return Manifest.from_bytes(
            build_manifest(classes, save_id="0" * 16, world_size=1).to_bytes(), where="here"
        )

    assert read(wide, narrow).entries == (wide, narrow)
    with pytest.raises(CorruptCheckpointError):
        read(narrow, wide)


def test_offsets_follow_from_the_manifest_alone(tmp_path: Path) -> None:
    """A reader that knows only FORMAT.md finds a ragged tensor's bytes by arithmetic."""
    save(tmp_path / "c", {"x": torch.arange(5)})
    raw = next((tmp_path / "c").glob("data-*/*")).read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    assert raw[start : start + 40] == b"".join(struct.pack("<q", i) for i in range(5))
    layout = planned(3, 2)
    for slot in layout.slots:
        pieces = [layout.piece(slot, rank).range for rank in range(3)]
        boxes = [box for piece in pieces for box in boxes_of_range(slot.shape, *piece)]
        assert sum(box.numel for box in boxes) == slot.numel


def main() -> None:
    """Write the folders that are missing."""
    for form, folder in FOLDERS.items():
        if not folder.exists():
            with tempfile.TemporaryDirectory() as temporary:
                run_ranks(3, _write, Path(temporary) / "c", form)
                (Path(temporary) / "c" / ".lock").unlink(missing_ok=True)
                shutil.copytree(Path(temporary) / "c", folder)


if __name__ == "__main__":
    import tests.checkpoint.manifest.test_golden as importable  # workers find functions by this name

    importable.main()
