"""Stock DCP on ragged tensors: chunks that tile, plans without a word between ranks, loads under other cuts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtensor_conformance import Cut, plain
from tests.support.processes import receive
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor import dcp_hooks
from vescale_fsdp.dtensor.dcp_hooks import check_storage_writer
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor, redistribute
from vescale_fsdp.errors import CheckpointError

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


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.part("numerics"))], ids=str
)
def test_every_placement_loads_every_other(tmp_path: Path, dtype: torch.dtype) -> None:
    """dcp.save and dcp.load between ragged, hybrid, strided and stock placements are exact."""
    assert run_ranks(4, save_and_load, str(tmp_path), dtype) == [36] * 4


class OwnPlanner(DefaultSavePlanner):
    """A planner of a user's own."""


def safetensors_save(folder: str, rows: bool, how: str) -> tuple[str, bool]:
    """What a save through torch's safetensors writer says, and whether the values came back."""
    mesh = cpu_mesh()
    cut = RaggedShard((0,), (2, 4)) if rows else RaggedShard((0, 1), (7, 23))
    tensor = distribute_tensor(plain(SHAPE), mesh, [cut])
    writer = HuggingFaceStorageWriter(
        folder,
        save_distributed=how != "one file",
        enable_consolidation=how == "consolidated",
        thread_count=2 if how == "threads" else 1,
    )
    planner = {"own planner": OwnPlanner(), "cached plans": DefaultSavePlanner(enable_plan_caching=True)}.get(
        how
    )
    blind = mock.patch.object(dcp_hooks, "storage_writer_in_use", return_value=None)
    try:
        with blind if how == "unasked" else nullcontext():
            if how == "behind":
                dcp.async_save({"m": {"w": tensor}}, storage_writer=writer, planner=planner).result(60)
            else:
                dcp.save({"m": {"w": tensor}}, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        return str(error), False
    state = {"m": {"w": distribute_tensor(torch.zeros(SHAPE), mesh, [cut])}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    return "", torch.equal(state["m"]["w"].full_tensor(), plain(SHAPE))


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
@pytest.mark.parametrize("how", ["plain", "own planner", "cached plans", "behind", "threads", "consolidated"])
def test_torchs_safetensors_writer_is_refused_where_it_loses_data(how: str, tmp_path: Path) -> None:
    """Pieces of several boxes are refused before a file is written, however the save is made; whole rows are kept."""
    for text, _ in run_ranks(2, safetensors_save, str(tmp_path / "elements"), False, how):
        assert "2 boxes" in text and "m.w" in text and "HuggingFace" in text
    assert not list(tmp_path.rglob("*.safetensors"))
    assert run_ranks(2, safetensors_save, str(tmp_path / "rows"), True, how) == [("", True)] * 2


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_the_safetensors_writer_in_one_file(tmp_path: Path) -> None:
    """Its default, one file for all ranks, is refused for cut tensors; nothing but the refusal keeps the values."""
    for text, _ in run_ranks(2, safetensors_save, str(tmp_path / "one"), True, "one file"):
        assert "save_distributed=True" in text and "m.w" in text
    lost = [("", False)] * 2
    assert run_ranks(2, safetensors_save, str(tmp_path / "c"), False, "unasked") == lost, (
        "torch keeps all boxes now: the check can go"
    )


def each_staged(folder: str, how: str) -> None:
    """One rank holds all, the other all, or both hold some."""
    for units in ((30, 0), (0, 30), (7, 23)):
        staged(f"{folder}/{units[0]}", units, how)


def staged(folder: str, units: tuple[int, ...], how: str) -> None:
    """Save a piece that lies inside a buffer behind training, which overwrites it, and load it back."""
    mesh, placement = cpu_mesh(), RaggedShard((0, 1), units)
    start, stop = placement.piece(SHAPE, dist.get_rank())
    piece = torch.zeros(64)[5 : 5 + stop - start]
    piece.copy_(plain(SHAPE).view(-1)[start:stop])
    tensor = RaggedDTensor.from_local(piece, mesh, [placement], shape=SHAPE)
    assert tensor.storage_offset() == 5 and tensor.data_ptr() == 0
    shared = DefaultStager(StagingOptions(False, how != "copied", False, False))
    stager = {"blocking": BlockingAsyncStager(), "default": None}.get(how, shared)
    if how == "behind":
        stager = DefaultStager(StagingOptions(False, False, True, False))
    if how == "pipe":  # what a checkpointer of type PROCESS does
        ours, theirs = Pipe()
        ours.send(shared.stage({"w": tensor}))
        piece.fill_(-1)
        dcp.save(receive(theirs, "the staged state"), checkpoint_id=folder)
    else:
        response = dcp.async_save({"w": tensor}, checkpoint_id=folder, async_stager=stager)
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result(60)
            response = response.upload_completion
        piece.fill_(-1)
        response.result(60)
    state = {"w": distribute_tensor(torch.zeros(SHAPE), mesh, [placement])}
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["w"].full_tensor(), plain(SHAPE))


@pytest.mark.filterwarnings("ignore")  # DCP's async path warns of its own defaults
@pytest.mark.parametrize("how", ["default", "copied", "shared", "behind", "blocking", "pipe"])
def test_stock_async_save_of_pieces_inside_a_buffer(how: str, tmp_path: Path) -> None:
    """Every stager of torch copies pieces, also where one rank holds all of a tensor and another nothing."""
    run_ranks(2, each_staged, str(tmp_path), how)


def other_writers() -> None:
    """The usual writer takes everything, the safetensors writer whole rows; what cannot be ends in errors."""
    mesh = cpu_mesh()
    tensor = distribute_tensor(plain(SHAPE), mesh, [RaggedShard((0, 1), (7, 23))])
    check_storage_writer(dcp.FileSystemWriter("unused"), {"w": tensor})
    writer = HuggingFaceStorageWriter("unused", save_distributed=True)
    with pytest.raises(CheckpointError) as caught:
        check_storage_writer(writer, {"model": {"w": tensor}})
    assert (caught.value.got, caught.value.where) == ("up to 2 boxes per rank", "w")
    check_storage_writer(writer, {"w": distribute_tensor(plain(SHAPE), mesh, [RaggedShard((0,), (2, 4))])})
    with pytest.raises(CheckpointError) as caught:
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size((5, 5))))
    assert (caught.value.got, caught.value.where) == ("offset (5, 5)", "w")
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
