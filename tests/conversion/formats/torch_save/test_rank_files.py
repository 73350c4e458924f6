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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp import fully_shard as our_fully_shard
from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import convert, open_source
from vescale_fsdp.dtensor import _rebuild_piece
from vescale_fsdp.dtensor.ragged_dtensor import pieces_in_torch_save
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.placement import StridedRaggedShard


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
        "rows_of_replicas": torch_distribute_tensor(torch.randn(5, 3), mesh, [Replicate(), Shard(0)]),
        "rows_and_columns": torch_distribute_tensor(torch.randn(5, 7), mesh, [Shard(0), Shard(1)]),
    }
    if bad:
        state["sum"] = torch_distribute_tensor(torch.randn(4), mesh, [Replicate(), Partial()])
    torch.save(state, f"{folder}/model_world_size_4_rank_{dist.get_rank()}.pt")


def test_meshes_of_two_axes(tmp_path: Path) -> None:
    """Replicas are taken once, and two axes cut two dims."""
    run_ranks(4, _save_two_axes, str(tmp_path), False)
    convert(open_source(str(tmp_path)), str(tmp_path.parent / f"{tmp_path.name}_hf"), "hf")
    loaded = load_file(tmp_path.parent / f"{tmp_path.name}_hf" / "model.safetensors")
    torch.manual_seed(1)
    assert same_bytes(loaded["rows_of_replicas"], torch.randn(5, 3))
    assert same_bytes(loaded["rows_and_columns"], torch.randn(5, 7))


def _ragged_state() -> dict[str, Any]:
    """Tensors in every kind of ragged cut, whose items tell their positions; a trained parameter and its moments."""
    mesh = cpu_mesh()
    grid = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "inner"))
    last = dist.get_world_size() - 1
    state: dict[str, Any] = {
        "inside a row": distribute_tensor(
            _numbers(5, 3), mesh, [RaggedShard((0, 1), (4, *[0] * (last - 1), 11))]
        ),
        "all on the last": distribute_tensor(_numbers(3, 2), mesh, [RaggedShard((0,), (*[0] * last, 1))]),
        "beside a Shard": distribute_tensor(
            _numbers(6, 4), grid, [StridedRaggedShard((0,), (1,), dist.get_world_size()), Shard(0)]
        ),
        "whole": _numbers(4),
    }
    model = torch.nn.Linear(3, 7)
    with torch.no_grad():
        model.weight.copy_(_numbers(7, 3))
    our_fully_shard(model, mesh=mesh, granularity="element")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    moments = {f"moment {i}": each["exp_avg"] for i, each in optimizer.state_dict()["state"].items()}
    return {**state, **model.state_dict(), **moments}


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def _full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()
    }


def _save_pieces(folder: str) -> dict[str, torch.Tensor]:
    """Save this rank's file; return the whole tensors after torch.load has given back equal pieces."""
    torch.manual_seed(0)
    state = _ragged_state()
    file = f"{folder}/model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    with pieces_in_torch_save():
        torch.save(state, file)
    loaded = torch.load(file, weights_only=False)
    for name, value in state.items():
        if isinstance(value, DTensor):
            assert type(loaded[name]) is type(value) and loaded[name].placements == value.placements
            assert same_bytes(loaded[name].to_local(), value.to_local())
    full, again = _full(state), _full(loaded)
    assert all(same_bytes(again[name], value) for name, value in full.items())
    return full


def _load_pieces(folder: str) -> list[str]:
    """Names of the tensors that differ after `load` into the same state on other ranks."""
    torch.manual_seed(7)
    target = _ragged_state()
    for value in target.values():
        value.detach().fill_(-1)
    load(folder, {"model": target})
    torch.manual_seed(0)
    return [
        name for name, value in _full(_ragged_state()).items() if not same_bytes(_full(target)[name], value)
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.part("formats"))])
def test_pieces_of_ragged_tensors(tmp_path: Path, ranks: int) -> None:
    """The same ranks get equal pieces of torch.load; other ranks, and converters, read the files of all ranks."""
    full, *others = run_ranks(ranks, _save_pieces, str(tmp_path))
    assert all(same_bytes(other[name], value) for other in others for name, value in full.items())
    assert run_ranks(3, _load_pieces, str(tmp_path)) == [[]] * 3
    convert(open_source(str(tmp_path)), str(tmp_path.parent / f"{tmp_path.name}_hf"), "hf")
    loaded = load_file(tmp_path.parent / f"{tmp_path.name}_hf" / "model.safetensors")
    assert len(full) == 8 and loaded.keys() == full.keys()
    assert all(same_bytes(loaded[name], value) for name, value in full.items())

    (tmp_path / f"model_world_size_{ranks}_rank_1.pt").unlink()
    with pytest.raises(CorruptCheckpointError):
        open_source(str(tmp_path))


class _Piece:
    """Is pickled as a ragged tensor of shape (2, 3) with these items and boxes."""

    def __init__(self, local: object, boxes: object) -> None:
        self._parts = (local, (2, 3), boxes, None, False, False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_piece, self._parts


_WHOLE = (((0, 0), (2, 3)),)


@pytest.mark.parametrize(
    ("local", "boxes"),
    [
        (torch.arange(12.0)[::2], _WHOLE),
        (torch.arange(5.0), _WHOLE),
        ("no tensor", _WHOLE),
        (torch.arange(6.0), None),
        (torch.arange(6.0), (((0, 0), (-2, -3)),)),
        (torch.arange(6.0), (((0, 0), (10**30, 3)),)),
        (torch.arange(6.0), (((-1, 0), (2, 3)),)),
        (torch.arange(6.0), (((0,), (6,)),)),
        (torch.arange(6.0), (((0, 0), (1, 3)), ((0, 0), (1, 3)))),
    ],
)
def test_boxes_that_are_not_those_of_a_piece(tmp_path: Path, local: object, boxes: object) -> None:
    """Strided, short, negative, outside, of another number of dims, twice; the same with true boxes is read."""
    torch.save({"w": _Piece(local, boxes)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(CorruptCheckpointError):
        open_source(str(tmp_path))

    torch.save({"w": _Piece(torch.arange(6.0), _WHOLE)}, tmp_path / "model_world_size_1_rank_0.pt")
    convert(open_source(str(tmp_path)), str(tmp_path.parent / f"{tmp_path.name}.pt"), "torch")
    made = torch.load(tmp_path.parent / f"{tmp_path.name}.pt")["model"]["w"]
    assert same_bytes(made, torch.arange(6.0).view(2, 3))


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
