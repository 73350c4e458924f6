"""Folders with one torch.save file per rank: put together where the parts can be placed, refused
elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion.convert import convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError


def _save_fsdp2(folder: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
    for layer in model:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    rank = dist.get_rank()
    torch.save(
        {**model.state_dict(), "count": torch.tensor(3)}, f"{folder}/pytorch_model_fsdp_rank{rank}.bin"
    )
    torch.save(optimizer.state_dict(), f"{folder}/optimizer_0_rank{rank}.bin")
    moments = optimizer.state_dict()["state"]
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return full, {number: state["exp_avg"].full_tensor() for number, state in moments.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fsdp2_files_of_accelerate(tmp_path: Path, ranks: int) -> None:
    """Model and optimizer files of every rank become the full model, and a full state with its moments."""
    full, moments = run_ranks(ranks, _save_fsdp2, str(tmp_path))[0]
    source = open_source(str(tmp_path))
    assert source.kind == "ranks"
    report = convert(source, str(tmp_path.parent / f"{tmp_path.name}_hf"), "hf")
    loaded = load_file(tmp_path.parent / f"{tmp_path.name}_hf" / "model.safetensors")
    assert sorted(loaded) == sorted([*full, "count"]) and report.dropped_optimizer > 8
    assert all(same_bytes(loaded[name], value) for name, value in full.items())
    convert(source, str(tmp_path.parent / f"{tmp_path.name}.pt"), "torch")
    state = torch.load(tmp_path.parent / f"{tmp_path.name}.pt", weights_only=True)["optimizer"]["state"]
    assert sorted(state) == sorted(moments)
    assert all(same_bytes(state[number]["exp_avg"], value) for number, value in moments.items())


def _save_two_axes(folder: str, bad: bool) -> None:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    state: dict[str, Any] = {
        "rows_of_replicas": distribute_tensor(torch.randn(5, 3), mesh, [Replicate(), Shard(0)]),
        "rows_and_columns": distribute_tensor(torch.randn(5, 7), mesh, [Shard(0), Shard(1)]),
    }
    if bad:
        state["sum"] = distribute_tensor(torch.randn(4), mesh, [Replicate(), Partial()])
    torch.save(state, f"{folder}/model_world_size_4_rank_{dist.get_rank()}.pt")


def test_meshes_of_two_axes(tmp_path: Path) -> None:
    """Replicas are taken once, and two axes cut two dims."""
    run_ranks(4, _save_two_axes, str(tmp_path), False)
    convert(open_source(str(tmp_path)), str(tmp_path.parent / f"{tmp_path.name}_hf"), "hf")
    loaded = load_file(tmp_path.parent / f"{tmp_path.name}_hf" / "model.safetensors")
    torch.manual_seed(1)
    assert same_bytes(loaded["rows_of_replicas"], torch.randn(5, 3))
    assert same_bytes(loaded["rows_and_columns"], torch.randn(5, 7))


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    """A partial sum, and a rank's file that is missing."""
    (tmp_path / "a").mkdir()
    run_ranks(4, _save_two_axes, str(tmp_path / "a"), True)
    with pytest.raises(ConversionError, match=r"Partial(.|\n)*model\.sum"):
        open_source(str(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    full, _ = run_ranks(3, _save_fsdp2, str(tmp_path / "b"))[0]
    (tmp_path / "b" / "pytorch_model_fsdp_rank2.bin").unlink()
    with pytest.raises(CorruptCheckpointError) as caught:
        open_source(str(tmp_path / "b"))
    assert any(name in str(caught.value.where) for name in full)
