"""A DCP folder written by all ranks without DCP's planning: stock torch loads it onto any ranks, however cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.conversion.formats.live_models import bytes_of_folder, ragged
from tests.support.checkpoint_states import SHAPES, assert_equal, erase, full, mixed_state, plain
from tests.support.distributed import run_ranks
from tests.support.faults.stream_storage import StreamStorage
from vescale_fsdp.checkpoint import PerRank, async_save, save
from vescale_fsdp.errors import CheckpointError, ConversionError

FIRST = next(iter(SHAPES))


def _state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    state = mixed_state()
    del state["stock"]["empty"]  # DCP cannot load a tensor without elements
    state["inside rows"] = ragged(mesh, torch.randn(4, 5, 6))
    state["model"]["tied"] = state["model"][FIRST]
    return state


def _save_and_load(folder: Path) -> int:
    state = _state()
    expected = plain(state)
    compared = 0
    for number, path in enumerate((folder / "live", folder / "behind", StreamStorage(folder / "streams"))):
        if number == 1:
            async_save(path, state, format="dcp").wait()
        else:
            save(path, state, format="dcp")
        erase(state)
        dcp.load(state, checkpoint_id=path.root if isinstance(path, StreamStorage) else path)
        compared += assert_equal(expected, plain(state))
    return compared


def _load_elsewhere(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {
        name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
        for name, shape in SHAPES.items()
        if len(shape) > 1
    }
    state = {"model": model, "step": 0}
    dcp.load(state, checkpoint_id=path)
    assert state["step"] == 7
    assert model and all(torch.equal(t.full_tensor(), full(name, SHAPES[name])) for name, t in model.items())


def _places(metadata: Metadata, name: str) -> list[tuple[str, int]]:
    """Where the bytes of a tensor lie."""
    found = [place for index, place in metadata.storage_data.items() if index.fqn == name]
    return sorted((place.relative_path, place.offset) for place in found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_loads_it(tmp_path: Path) -> None:
    """Every kind of cut, values, and tensors of an optimizer; onto the same ranks, fewer, and one process alone."""
    assert min(run_ranks(3, _save_and_load, tmp_path)) > 60_000
    run_ranks(2, _load_elsewhere, tmp_path / "live")
    alone: dict[str, Any] = {
        "stock": {"shard1": torch.zeros(6, 9)},
        "inside rows": torch.zeros(4, 5, 6),
        "model": {"tied": torch.zeros(SHAPES[FIRST])},
    }
    dcp.load(alone, checkpoint_id=tmp_path / "live")

    assert torch.equal(alone["stock"]["shard1"], full("shard1", (6, 9)))
    metadata = dcp.FileSystemReader(tmp_path / "live").read_metadata()
    rows = metadata.state_dict_metadata["inside rows"]
    assert isinstance(rows, TensorStorageMetadata) and len(rows.chunks) > 3  # pieces that are no boxes
    assert torch.equal(alone["model"]["tied"], full(FIRST, SHAPES[FIRST]))
    places = _places(metadata, f"model.{FIRST}")
    assert _places(metadata, "model.tied") == places != _places(metadata, "inside rows")
    names = {path.name for path in (tmp_path / "live").iterdir()}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(3))}
    assert bytes_of_folder(tmp_path / "live") == bytes_of_folder(tmp_path / "streams")


def _misuse(folder: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(3)}
    with pytest.raises(ConversionError, match=r"seeds\.a: PerRank"):
        save(folder / "out", {**state, "seeds": {"a": PerRank(1)}}, format="dcp")
    save(folder / "out", state, format="dcp")
    before = bytes_of_folder(folder)
    dist.barrier()
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save(folder / "out", state, format="dcp")
    with pytest.raises(CheckpointError, check=lambda error: str(folder) in str(error)):
        save(folder, state, format="dcp", overwrite=True)
    dist.barrier()
    assert bytes_of_folder(folder) == before
    dist.barrier()
    save(folder / "out", {"b": torch.ones(2)}, format="dcp", overwrite=True)
    assert list(dcp.FileSystemReader(folder / "out").read_metadata().state_dict_metadata) == ["b"]


def test_misuse_is_refused_and_a_folder_replaced_on_demand(tmp_path: Path) -> None:
    """Values of single ranks are refused by name; a folder is replaced on demand, no other."""
    run_ranks(2, _misuse, tmp_path)
