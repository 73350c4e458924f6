"""The engine inside torch's DCP: save, async_save and load, with our planners and with DCP's own."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.load.test_training import make, train
from tests.support.checkpoint_states import SHAPES, assert_equal, erase, full, mixed_state, plain
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.faults.faulty_storage import FaultyStorage
from vescale_fsdp.checkpoint import load, read_state, save, verify
from vescale_fsdp.checkpoint.dcp import RaggedLoadPlanner, RaggedReader, RaggedSavePlanner, RaggedWriter
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, CheckpointError


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
    future.result(60)
    load(path, state)
    assert assert_equal(expected, plain(state)) > 20_000


@pytest.mark.filterwarnings("ignore")  # DCP's async path warns of its own defaults
def test_async_save_through_dcp(tmp_path: Path) -> None:
    """dcp.async_save keeps the values of its call."""
    run_ranks(2, _async, tmp_path / "c")
    assert verify(tmp_path / "c").ok


def _met(error: CheckpointException) -> list[BaseException]:
    """The errors that DCP has collected from its ranks, in their order."""
    return [met for _, (met, _) in sorted(error.failures.items())]


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
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=RaggedSavePlanner(), no_dist=True)
    assert [getattr(met, "errno", met) for met in _met(caught.value)] == [errno.ENOSPC]

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


def _alone(path: Path, made_by_all: bool) -> None:
    """One rank after the other saves and loads alone; nobody else takes part."""
    rank = dist.get_rank()
    for ours in (True, False):
        for who in (0, 1):
            step = path / f"{ours}{who}"
            if made_by_all:
                writer, reader = RaggedWriter(step), RaggedReader(step)
            if rank != who:
                continue
            if not made_by_all:
                writer, reader = RaggedWriter(step, no_dist=True), RaggedReader(step, no_dist=True)
            state = {"w": torch.arange(5.0) + rank, "step": rank}
            save_planner = RaggedSavePlanner() if ours else None
            dcp.save(state, storage_writer=writer, planner=save_planner, no_dist=True)
            into = {"w": torch.zeros(5), "step": -1}
            load_planner = RaggedLoadPlanner() if ours else None
            dcp.load(into, storage_reader=reader, planner=load_planner, no_dist=True)
            assert assert_equal(state, into) == 5


@pytest.mark.parametrize("made_by_all", [True, False])
def test_one_rank_of_a_world_alone(made_by_all: bool, tmp_path: Path) -> None:
    """no_dist=True waits for nobody, whether all ranks made the writer and the reader or one did."""
    run_ranks(2, _alone, tmp_path, made_by_all, timeout_s=60)
    assert [read_state(tmp_path / f"True{rank}").tree()["step"] for rank in (0, 1)] == [0, 1]


def _part_alone(path: Path) -> list[float]:
    tensor = distribute_tensor(torch.arange(10.0), cpu_mesh(), [Shard(0)])
    save(path / "all", {"w": tensor})
    if dist.get_rank() == 1:
        into = {"w": torch.zeros_like(tensor)}
        reader = RaggedReader(path / "all", no_dist=True)
        dcp.load(into, storage_reader=reader, planner=RaggedLoadPlanner(), no_dist=True)
        writer = RaggedWriter(path / "part", no_dist=True)
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(into, storage_writer=writer, planner=RaggedSavePlanner(), no_dist=True)
        (met,) = _met(caught.value)
        assert isinstance(met, CheckpointError) and "w" in str(met.where).split()
        return into["w"].to_local().tolist()
    return []


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_one_ranks_part_alone(tmp_path: Path) -> None:
    """A rank that loads alone gets its own part, not the first rank's; alone it cannot save a sharded tensor."""
    assert run_ranks(2, _part_alone, tmp_path)[1] == [5.0, 6.0, 7.0, 8.0, 9.0]


def _other_ranks(path: Path, kind: str) -> str:
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])][kind == "last pair"]
    planner = RaggedSavePlanner()
    options: dict[str, Any] = {}
    if kind == "writer alone":
        writer = RaggedWriter(path, no_dist=True)
    else:
        writer = RaggedWriter(path)
        options = {"use_collectives": False} if kind == "no collectives" else {"process_group": pair}
    if dist.get_rank(pair) < 0 and "process_group" in options:
        with pytest.raises(ArgumentError, check=lambda error: error.got == repr(pair)):
            save(path, {"w": torch.ones(3)}, process_group=pair)
        return "outside"
    try:
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner, **options)
    except (dcp.CheckpointException, CheckpointError) as error:
        return str(error)
    return "saved"


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("writer alone", "rank 0 of 1"),
        ("first pair", "rank 0 of 2"),
        ("last pair", "rank 2 of 3"),
        ("no collectives", "use_collectives=True"),
    ],
)
def test_other_ranks_than_the_writers(kind: str, message: str, tmp_path: Path) -> None:
    """Where DCP and the writer were given different ranks, all that save are told instead of waiting."""
    found = [text for text in run_ranks(3, _other_ranks, tmp_path / "c", kind) if text != "outside"]
    assert len(found) in (2, 3) and all(message in text for text in found)
    assert not (tmp_path / "c").exists()


def _train_once(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    if seed == 1:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    """Its state dict has no room for the moments, which is refused; asked as torch advises, it is filled."""
    model, optimizer = _train_once(1)
    saved = get_optimizer_state_dict(model, optimizer)
    for name, value in {"plain": optimizer, "named": saved, "list": [saved]}.items():
        dcp.save({"o": value}, storage_writer=RaggedWriter(tmp_path / name), planner=RaggedSavePlanner())

    def fill(name: str, state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=RaggedReader(tmp_path / name), planner=RaggedLoadPlanner())

    model, optimizer = _train_once(2)
    for name, value in {"plain": optimizer, "list": [optimizer.state_dict()]}.items():
        with pytest.raises(CheckpointException) as raised:
            fill(name, {"o": value})
        assert [type(met) for met in _met(raised.value)] == [CheckpointError]
    with pytest.warns(UserWarning, match=r" o\."):
        fill("named", {})
    state = {"o": get_optimizer_state_dict(model, optimizer)}
    fill("named", state)
    assert assert_equal(saved, state["o"]) == 2 * (6 + 2) + 2
    fill("named", {"other": {}} | state)  # an empty dict for which nothing was saved
    fill("named", {"o": {"state": {"weight": state["o"]["state"]["weight"]}}})  # a part, by its keys


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_planners_refuse_the_storages_of_dcp(tmp_path: Path) -> None:
    """Their plans are empty: with DCP's own storages nothing would be saved, or loaded."""
    state = {"w": torch.ones(3)}
    writer = dcp.FileSystemWriter(tmp_path / "theirs")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, planner=RaggedSavePlanner(), no_dist=True)
    assert [getattr(met, "expected", met) for met in _met(caught.value)] == ["RaggedWriter"]
    dcp.save(state, storage_writer=writer, no_dist=True)
    reader = dcp.FileSystemReader(tmp_path / "theirs")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, planner=RaggedLoadPlanner(), no_dist=True)
    assert [getattr(met, "expected", met) for met in _met(caught.value)] == ["RaggedReader"]
