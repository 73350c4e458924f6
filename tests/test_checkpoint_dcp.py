"""The engine inside torch's DCP: save, async_save and load, with our planners and with DCP's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.checkpoint_states import SHAPES, assert_equal, erase, full, mixed_state, plain
from tests.distributed import run_ranks
from tests.faulty_storage import FaultyStorage
from tests.test_checkpoint_training import make, train
from vescale_fsdp.checkpoint import (
    RaggedLoadPlanner,
    RaggedReader,
    RaggedSavePlanner,
    RaggedWriter,
    load,
    read_state,
    save,
    verify,
)
from vescale_fsdp.checkpoint.local import LocalStorage


def _state() -> dict[str, Any]:
    state = mixed_state()
    del state["stock"]["empty"]  # DCP cannot load a tensor without elements
    return state


def _round(path: Path, ours_saves: bool, ours_loads: bool) -> int:
    state = _state()
    planner = RaggedSavePlanner() if ours_saves else None
    dcp.save(state, storage_writer=RaggedWriter(path), planner=planner)
    expected = plain(state)
    erase(state)
    dcp.load(state, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner() if ours_loads else None)
    return assert_equal(expected, plain(state))


@pytest.mark.parametrize("ours_saves", [True, False])
@pytest.mark.parametrize("ours_loads", [True, False])
def test_save_and_load_through_dcp(ours_saves: bool, ours_loads: bool, tmp_path: Path) -> None:
    """Every pair of planners brings every leaf back, and the folder is a native checkpoint."""
    assert min(run_ranks(2, _round, tmp_path / "c", ours_saves, ours_loads)) > 20_000

    assert verify(tmp_path / "c").ok
    reader = read_state(tmp_path / "c")
    assert all(
        torch.equal(full(name, shape), reader[f"model/{name}"].read()) for name, shape in SHAPES.items()
    )


def _load_elsewhere(path: Path) -> int:
    state = _state()
    expected = plain(state)
    erase(state)
    subset = {"model": state["model"]}
    dcp.load(subset, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner())
    load(path, state)
    return assert_equal(expected, plain(state))


def test_other_world_sizes_and_subsets(tmp_path: Path) -> None:
    """A save through DCP loads on other ranks, natively too, and DCP may load a part of it."""
    run_ranks(2, _round, tmp_path / "c", True, True)

    assert min(run_ranks(3, _load_elsewhere, tmp_path / "c")) > 20_000


def _async(path: Path) -> None:
    state = _state()
    writer = RaggedWriter(path)
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(state, storage_writer=writer, planner=RaggedSavePlanner(), process_group=group)
    expected = plain(state)
    erase(state)
    future.result()
    load(path, state)
    assert assert_equal(expected, plain(state)) > 20_000


@pytest.mark.filterwarnings("ignore")  # DCP's async path warns of its own defaults
def test_async_save_through_dcp(tmp_path: Path) -> None:
    """dcp.async_save keeps the values of its call."""
    run_ranks(2, _async, tmp_path / "c")
    assert verify(tmp_path / "c").ok


def _fails(path: Path) -> str:
    state = _state()
    if dist.get_rank() == 1:
        state["bad"] = object()
    try:
        dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())
    except dcp.CheckpointException as error:
        return str(error)
    return "no error"


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_an_error_on_one_rank(tmp_path: Path) -> None:
    """An error of one rank reaches all ranks as DCP's exception, and nothing is committed."""
    for text in run_ranks(2, _fails, tmp_path / "c"):
        assert "bad" in text
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_a_failed_save_gives_the_folder_back(tmp_path: Path) -> None:
    """The writer of a save that failed does not keep others out, however long it lives."""
    writer = RaggedWriter(FaultyStorage(LocalStorage(tmp_path / "c"), fail_at=1))
    with pytest.raises(dcp.CheckpointException, match="No space"):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=RaggedSavePlanner(), no_dist=True)

    save(tmp_path / "c", {"w": torch.ones(3)})

    assert verify(tmp_path / "c").ok


def _fsdp2(path: Path) -> None:
    model, optimizer = make("fsdp2", 1)
    train(model, optimizer, range(2))
    state = {"model": model.state_dict(), "step": 2}
    dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())
    other, _ = make("element", 2)
    into = {"model": other.state_dict(), "step": 0}
    dcp.load(into, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner())
    assert into["step"] == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), into["model"][name].full_tensor()), name


def test_fsdp2_models_use_it_too(tmp_path: Path) -> None:
    """Stock FSDP2 saves through the engine, and a ragged model reads it."""
    run_ranks(2, _fsdp2, tmp_path / "c")
