"""Folders that training frameworks leave: put together where their own metadata says how, refused elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion import ConvertOptions, convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError


def _to_hf(source: Path, tmp_path: Path, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    report = convert(open_source(str(source)), str(tmp_path / "hf"), "hf", ConvertOptions(**options))
    return load_file(tmp_path / "hf" / "model.safetensors"), report


def test_accelerate_keeps_model_and_optimizer_in_two_folders(tmp_path: Path) -> None:
    """Both become one state; a folder of several models is refused, one of them is read."""
    model, moments = {"a.w": torch.randn(4, 3)}, {"state": {"a.w": {"exp_avg": torch.randn(4, 3)}}}
    dcp.save({"model": model}, checkpoint_id=tmp_path / "c" / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": moments}, checkpoint_id=tmp_path / "c" / "optimizer_0", no_dist=True)
    (tmp_path / "c" / "scheduler.bin").write_bytes(b"x")
    source = open_source(str(tmp_path / "c"))
    convert(source, str(tmp_path / "state.pt"), "torch")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same_bytes(loaded["model"]["a.w"], model["a.w"])
    assert same_bytes(loaded["optimizer"]["state"]["a.w"]["exp_avg"], moments["state"]["a.w"]["exp_avg"])
    dcp.save({"model": model}, checkpoint_id=tmp_path / "c" / "pytorch_model_fsdp_1", no_dist=True)
    with pytest.raises(ConversionError, check=lambda error: "pytorch_model_fsdp_1" in error.got):
        open_source(str(tmp_path / "c"))
    found, _ = _to_hf(tmp_path / "c" / "pytorch_model_fsdp_1", tmp_path)
    assert same_bytes(found["a.w"], model["a.w"])


def _save_shards(folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    full = {"rows": torch.randn(7, 3), "columns": torch.randn(2, 5), "step": torch.tensor(3.5)}
    full["flags"] = torch.tensor([True, False])
    mesh = cpu_mesh()
    state: dict[str, Any] = dict(full)
    state["rows"] = distribute_tensor(full["rows"], mesh, [Shard(0)])
    state["columns"] = distribute_tensor(full["columns"], mesh, [Shard(1)])
    writer = HuggingFaceStorageWriter(path=folder, save_distributed=True, enable_consolidation=False)
    dcp.save(state, storage_writer=writer)
    return full


def test_safetensors_of_every_rank(tmp_path: Path) -> None:
    """What transformers 5 writes from several ranks: boxes joined where the headers say they begin; a rank in the
    middle that is missing leaves a hole, which is refused."""
    full = run_ranks(3, _save_shards, str(tmp_path / "c"))[0]
    (tmp_path / "c" / "config.json").write_text('{"model_type": "llama"}')
    found, report = _to_hf(tmp_path / "c", tmp_path)
    assert report.source.kind == "shards" and any("rank" in text for text in report.warnings)
    assert sorted(found) == sorted(full) and all(same_bytes(found[name], full[name]) for name in full)
    assert (tmp_path / "hf" / "config.json").is_file()
    save_file({"rows": full["rows"]}, tmp_path / "c" / "model.safetensors")
    with pytest.raises(ConversionError, check=lambda error: "model.safetensors" in error.got):
        open_source(str(tmp_path / "c"))
    (tmp_path / "c" / "model.safetensors").unlink()
    (tmp_path / "c" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(
        CorruptCheckpointError, check=lambda error: "shard-00002-model-00001-of-00001" in error.expected
    ):
        open_source(str(tmp_path / "c"))


def test_shards_of_different_types_and_odd_offsets(tmp_path: Path) -> None:
    """Files from two saves, and a header that is no header, are refused."""
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2]}})}
    save_file({"w": torch.ones(2)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    other = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2).bfloat16()}, other, metadata=info)
    with pytest.raises(CorruptCheckpointError, match="bfloat16"):
        open_source(str(tmp_path))
    save_file({"w": torch.ones(2)}, other, metadata={"DCP_SHARDING_INFO": "[1]"})
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == str(other)):
        open_source(str(tmp_path))
    save_file({"w": torch.ones(2)}, other, metadata=info)
    assert open_source(str(tmp_path)).tensors["w"].info.shape == (4,)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_from_before_safetensors(tmp_path: Path, sharded: bool) -> None:
    """pytorch_model.bin, or its shards and index: read without trusting pickles, index held against the files."""
    folder = tmp_path / "c"
    folder.mkdir()
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4)}
    if sharded:
        names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
        for name, file in names.items():
            torch.save({name: tensors[name]}, folder / file)
        index = {"metadata": {}, "weight_map": names}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    found, report = _to_hf(folder, tmp_path)
    assert report.source.kind == "bin" and sorted(found) == ["a", "b"]
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    if sharded:
        index["weight_map"] = dict.fromkeys(names, "pytorch_model-00001-of-00002.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with pytest.raises(
            CorruptCheckpointError, check=lambda error: "pytorch_model-00001" in error.expected
        ):
            open_source(str(folder))


def _save_sharded_tensors(folder: str) -> torch.Tensor:
    """As FSDP1 saves: ShardedTensors in chunks of dim 0; the last rank may have none."""
    torch.manual_seed(0)
    full, rank, ranks = torch.randn(4, 3), dist.get_rank(), dist.get_world_size()
    chunk = math.ceil(4 / ranks)
    start, stop = (min(4, n * chunk) for n in (rank, rank + 1))
    own = [TensorShard.from_tensor_and_offsets(full[start:stop].clone(), [start, 0], rank)]
    sharded = init_from_local_shards(own if stop > start else [], 4, 3)
    torch.save({"w": sharded, "step": 3}, f"{folder}/pytorch_model_fsdp_rank{rank}.bin")
    return full


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sharded_tensors_of_fsdp1(tmp_path: Path) -> None:
    """ShardedTensors say where they belong; no process group is needed, unlike for torch.load."""
    (tmp_path / "c").mkdir()
    full = run_ranks(3, _save_sharded_tensors, str(tmp_path / "c"))[0]
    found, _ = _to_hf(tmp_path / "c", tmp_path)
    assert same_bytes(found["w"], full) and len(found) == 1
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == "tensor w"):
        open_source(str(tmp_path / "c" / "pytorch_model_fsdp_rank1.bin"))


def _save_two_dims(folder: str) -> dict[str, torch.Tensor]:
    """FSDP2 over tensor parallelism: rows cut by both, which makes strided shards."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 6))
    full = {name: value.detach().clone() for name, value in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    kinds = {
        type(p).__name__ for value in state.values() if isinstance(value, DTensor) for p in value.placements
    }
    assert "_StridedShard" in kinds, kinds
    torch.save(state, f"{folder}/model_world_size_4_rank_{dist.get_rank()}.pt")
    dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    return full


def test_strided_shards_of_two_axes(tmp_path: Path) -> None:
    """A strided shard cuts what the later axis left: every row comes back to its place, from files per rank and from
    what DCP makes of the same state."""
    (tmp_path / "c").mkdir()
    full = run_ranks(4, _save_two_dims, str(tmp_path / "c"))[0]
    for place in (tmp_path / "c" / "dcp", tmp_path / "c"):
        found, _ = _to_hf(place, tmp_path, overwrite=True)
        assert sorted(found) == sorted(full) and all(same_bytes(found[name], full[name]) for name in full)


def test_plain_tensors_of_ranks(tmp_path: Path) -> None:
    """Equal on all ranks: taken once. Different, with nothing that says how they belong together: refused, for
    rank 0's part of a model is no model."""
    folder = tmp_path / "c"
    folder.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(3), "n": rank}, folder / f"model_world_size_2_rank_{rank}.pt")
        # Schedulers and random states name more than tensors: they must not keep the model from being read.
        torch.save({"rng": Path("x")}, folder / f"extra_state_world_size_2_rank_{rank}.pt")
    found, report = _to_hf(folder, tmp_path)
    assert same_bytes(found["w"], torch.ones(3)) and len(found) == 1
    assert "extra_state.rng" in report.dropped_others
    torch.save({"w": torch.zeros(3), "n": 1}, folder / "model_world_size_2_rank_1.pt")
    with pytest.raises(ConversionError, check=lambda error: "model_world_size_2_rank_0.pt" in error.todo):
        open_source(str(folder))
    (folder / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(
        CorruptCheckpointError, check=lambda error: error.expected.endswith("world_size_2_rank_1.pt")
    ):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("mp_rank_00/model_optim_rng.pt", "torch_dist"),
        ("model.gguf", "llama.cpp"),
        ("tf_model.h5", "from torch"),
        ("step-10/model.safetensors", "folder of one checkpoint"),
        ("step-10/manifest.json", "folder of one checkpoint"),
    ],
)
def test_checkpoints_of_others_say_what_to_do(tmp_path: Path, file: str, text: str) -> None:
    """Known, but not to be read: the error names whose it is and the way."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"0123456789")
    with pytest.raises(ConversionError, match=text):
        open_source(str(tmp_path))
