"""Stock DCP on ragged tensors: chunks that tile, plans without a word between ranks, loads under other cuts."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.distributed import cpu_mesh, run_ranks
from tests.dtensor_conformance import Cut, plain
from vescale_fsdp.dcp_hooks import check_storage_writer
from vescale_fsdp.dtensor import RaggedDTensor, distribute_tensor, redistribute
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.placement import RaggedShard

SHAPE = (6, 5)
CUTS = [
    Cut((7, 5), (3,), (RaggedShard((0, 1), (13, 0, 22)),)),
    Cut((3, 4, 5), (4,), (RaggedShard((0, 1, 2), (7, 23, 0, 30)),)),
    Cut((2, 3, 2, 3), (2,), (RaggedShard((0, 1, 2, 3), (7, 29)),)),
    Cut((11,), (3,), (RaggedShard((0,), (0, 4, 7)),)),
    Cut((4, 3), (3,), (RaggedShard((), (0, 1, 0)),)),
    Cut((6, 5), (2, 2), (Replicate(), RaggedShard((0, 1), (13, 17)))),
    Cut((6, 4), (2, 2), (RaggedShard((0, 1), (5, 7)), Shard(0))),
    Cut((4, 6), (2, 2), (RaggedShard((0, 1), (5, 7)), Shard(1))),
    Cut((5, 4), (2, 2), (Shard(0), RaggedShard((0, 1), (3, 1)))),
    Cut((4, 6), (1, 2, 2), (Replicate(), RaggedShard((0, 1), (5, 1)), Shard(0))),
]
SILENCED = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


def planned(cut: Cut) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of this rank's local plans to save and to load, with every collective turned into an error."""
    mesh = cut.mesh()
    tensor = distribute_tensor(plain(cut.shape), mesh, cut.placements)
    broken = mock.Mock(side_effect=AssertionError("a plan must not communicate"))
    with mock.patch.multiple(dist, **dict.fromkeys(SILENCED, broken)):
        planner = DefaultSavePlanner()
        planner.set_up_planner({"w": tensor}, is_coordinator=dist.get_rank() == 0)
        items = planner.create_local_plan().items
        chunks = tensor.__create_chunk_list__()
    assert broken.call_count == 0
    boxes = []
    for item, chunk in zip(items, chunks, strict=True):
        assert item.tensor_data is not None and item.tensor_data.chunk == chunk
        assert item.tensor_data.size == torch.Size(cut.shape)
        view = planner.resolve_data(item)
        assert isinstance(view, torch.Tensor) and view.shape == chunk.sizes
        assert view.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
        region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        assert torch.equal(view, plain(cut.shape)[region])
        boxes.append((tuple(chunk.offsets), tuple(chunk.sizes)))
    return boxes


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_chunks_tile_exactly_once(cut: Cut) -> None:
    """All ranks' boxes, each replica once, cover every element once; planning is local; boxes are views."""
    boxes = {box for rank in run_ranks(math.prod(cut.mesh_shape), planned, cut) for box in rank}
    count = torch.zeros(cut.shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        assert math.prod(sizes) > 0, "an empty box would win DCP's de-duplication"
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1

    assert torch.equal(count, torch.ones(cut.shape, dtype=torch.int64))


PLACEMENTS: list[tuple[Placement, Placement]] = [
    (Replicate(), RaggedShard((0, 1), (13, 17))),
    (RaggedShard((0,), (0, 3)), Replicate()),
    (RaggedShard((0, 1), (7, 8)), Shard(0)),
    (RaggedShard((0,), (1, 1)), Shard(1)),
    (Shard(0), Shard(1)),
    (Replicate(), Replicate()),
]


def save_and_load(folder: str, dtype: torch.dtype) -> int:
    """Every placement saved, and each loaded under every other."""
    mesh = cpu_mesh(2, 2)
    full = plain(SHAPE).to(dtype)
    stock = DTensor.from_local(full, mesh, [Replicate()] * 2, run_check=False)
    pairs = 0
    for number, source in enumerate(PLACEMENTS):
        path = f"{folder}/{number}"
        dcp.save({"w": redistribute(stock, source), "step": torch.tensor(number)}, checkpoint_id=path)
        for target in PLACEMENTS:
            empty = redistribute(
                DTensor.from_local(torch.full_like(full, -1), mesh, [Replicate()] * 2), target
            )
            state = {"w": empty, "step": torch.tensor(-1)}
            dcp.load(state, checkpoint_id=path)
            loaded = state["w"]
            assert isinstance(loaded, DTensor) and loaded.placements == empty.placements
            assert torch.equal(loaded.full_tensor(), full), (source, target)
            assert state["step"].item() == number
            pairs += 1
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_placement_loads_every_other(tmp_path: Path, dtype: torch.dtype) -> None:
    """dcp.save and dcp.load between ragged, hybrid, strided and stock placements are exact."""
    assert run_ranks(4, save_and_load, str(tmp_path), dtype) == [36] * 4


def safetensors_writer(folder: str, rows: bool) -> tuple[bool, str]:
    """Whether torch's safetensors writer kept the values, and what `check_storage_writer` says."""
    mesh = cpu_mesh()
    cut = RaggedShard((0,), (2, 4)) if rows else RaggedShard((0, 1), (7, 23))
    tensor = distribute_tensor(plain(SHAPE), mesh, [cut])
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    try:
        check_storage_writer(writer, {"model": {"w": tensor}})
        verdict = ""
    except CheckpointError as error:
        verdict = str(error)
    dcp.save({"w": tensor}, storage_writer=writer)
    state = {"w": distribute_tensor(torch.zeros(SHAPE), mesh, [cut])}
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    except Exception:  # noqa: BLE001  losing data loudly is what one would hope for
        return False, verdict
    return torch.equal(state["w"].full_tensor(), plain(SHAPE)), verdict


def test_torchs_safetensors_writer_is_refused_where_it_loses_data(tmp_path: Path) -> None:
    """Pieces of several boxes are lost by torch's writer and refused by ours; whole rows are kept and accepted."""
    for kept, verdict in run_ranks(2, safetensors_writer, str(tmp_path / "elements"), False):
        assert not kept, "torch keeps all boxes now: the check can go"
        assert "drops the others" in verdict and "where: w" in verdict
    for kept, verdict in run_ranks(2, safetensors_writer, str(tmp_path / "rows"), True):
        assert kept and verdict == ""


def other_writers() -> None:
    """The usual writer takes everything; unknown boxes and meta tensors end in errors."""
    mesh = cpu_mesh()
    tensor = distribute_tensor(plain(SHAPE), mesh, [RaggedShard((0, 1), (7, 23))])
    check_storage_writer(dcp.FileSystemWriter("unused"), {"w": tensor})
    with pytest.raises(CheckpointError, match="a box that this rank does not hold"):
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size((5, 5))))
    empty = DefaultLoadPlanner()
    empty.set_up_planner({"w": tensor})


def test_other_writers_and_boxes() -> None:
    """Torch's own file format is not refused; a box of another rank is."""
    run_ranks(2, other_writers)


def meta_load(folder: str) -> str:
    """torch rebuilds meta DTensors with its own class, which knows no pieces: the error's name."""
    mesh = cpu_mesh()
    tensor = distribute_tensor(plain(SHAPE), mesh, [RaggedShard((0, 1), (7, 23))])
    dcp.save({"w": tensor}, checkpoint_id=folder)
    meta = RaggedDTensor.wrap(torch.empty_like(tensor.to_local(), device="meta"), tensor._spec)
    try:
        dcp.load({"w": meta}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        return type(error).__name__
    return ""


def test_meta_tensors_are_not_loaded_wrongly(tmp_path: Path) -> None:
    """Loading into ragged tensors on the meta device fails; to_empty comes first."""
    assert run_ranks(2, meta_load, str(tmp_path)) == ["CheckpointException"] * 2
