"""Replicas that differ are refused before anything is committed, in every form and way of saving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.checkpoint_states import assert_equal, mixed_state, plain, ragged_group
from tests.support.distributed import run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    PerRank,
    RamTier,
    SaveHandle,
    async_save,
    load,
    read_state,
    save,
)
from vescale_fsdp.checkpoint.dcp import RaggedSavePlanner, RaggedWriter
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.ranks.replicas import CheckReplicas, begin_comparison
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import local_of

Way = Callable[[Path, Any], object]


def _by_manager(path: Path, state: Any, **options: Any) -> None:
    manager = CheckpointManager(path, **options)
    try:
        manager.save(1, state)
    finally:
        manager.close()


def _by_dcp(path: Path, state: Any) -> None:
    dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())


_WAYS: dict[str, Way] = {
    "native": save,
    "zarr": lambda path, state: save(path, state, format="zarr"),
    "DCP": lambda path, state: save(path, state, format="dcp"),
    "behind": lambda path, state: async_save(path, state).wait(),
    "writer": _by_dcp,
    "manager": _by_manager,
    "manager behind": lambda path, state: _by_manager(path, state, asynchronous=True),
    "memory": lambda path, state: _by_manager(
        path, state, ram=RamTier("r", folder=path.parent / f"{path.name} ram")
    ),
}


def _hsdp() -> torch.nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(torch.nn.Sequential(torch.nn.Linear(300, 301), torch.nn.Linear(301, 3)), mesh=mesh)


def _drifted(name: str) -> tuple[Any, str]:
    """A state of four ranks of which some tensor differs between replicas, and that tensor's name."""
    rank = dist.get_rank()
    if name in ("hsdp", "hsdp small"):
        model = _hsdp()
        leaf = "0.weight" if name == "hsdp" else "1.bias"
        if rank >= 2:
            local_of(dict(model.named_parameters())[leaf].data).add_(1e-3)
        return {"model": model}, f"model.{leaf}"
    if name in ("seeds", "small"):
        size = (300, 301) if name == "seeds" else (3,)
        torch.manual_seed(rank)
        return {"same": torch.ones(500, 500), "own": torch.randn(size)}, "own"
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(1)] if name == "replicated axis" else [Shard(0), Replicate()]
    local = torch.zeros(40, 50)
    if rank == 3:
        local[7:, 5:] = 1
    return {"own": DTensor.from_local(local, mesh, placements, run_check=False)}, "own"


_DRIFTS = ("hsdp", "hsdp small", "seeds", "small", "replicated axis", "replicated inner axis")
_GROUPS = {
    "hsdp": "ranks [0] differs from ranks [2]",
    "seeds": "ranks [0] differs from ranks [1]",
    "replicated axis": "ranks [1] differs from ranks [3]",
    "replicated inner axis": "ranks [2] differs from ranks [3]",
}


def _refused(folder: Path, drifts: list[str], ways: list[str]) -> None:
    """Save drifted states in several ways; each must be refused on this rank, by name."""
    for drift in drifts:
        state, name = _drifted(drift)
        for way in ways:
            path = folder / drift / way
            with pytest.raises((CheckpointError, dcp.api.CheckpointException)) as caught:
                _WAYS[way](path, state)
            text = str(caught.value)
            assert f"{name}: ranks [" in text and "PerRank" in text, text
            assert _GROUPS.get(drift, name) in text, text
            assert "same" not in text.partition("where:")[2].splitlines()[0]
            dist.barrier()  # rank 0 clears away
            assert not list(path.rglob("manifest.json")) and not list(path.rglob(".metadata"))


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    """Drifted HSDP replicas, other seeds, Replicate axes, large and small: the error names the tensor and its ranks."""
    run_ranks(4, _refused, tmp_path, list(_DRIFTS), ["native"])


def test_every_way_of_saving_refuses_them(tmp_path: Path) -> None:
    """Native, zarr, DCP, in the background, by DCP's planner, by a manager, to memory."""
    run_ranks(4, _refused, tmp_path, ["seeds", "hsdp"], list(_WAYS))


def _compared_exactly(folder: Path) -> None:
    """One element of 90,000: "all" finds it; False stores it, and says nothing."""
    state = {"w": torch.zeros(300, 300)}
    save(folder / "old", state)
    if dist.get_rank() == 1:
        state["w"][200, 17] = 1e-30
    with pytest.raises(CheckpointError):
        save(folder / "old", state, check_replicas="all", overwrite=True)
    assert not bool(read_state(folder / "old")["w"].read().any())
    save(folder / "unchecked", state, check_replicas=False)
    with pytest.raises(CheckpointError):
        async_save(folder / "behind", state, check_replicas="all").wait()
    with pytest.raises(CheckpointError):
        _by_manager(folder / "run", state, check_replicas="all", asynchronous=True)


def test_all_compares_every_bit(tmp_path: Path) -> None:
    """A sample may miss one element; "all" may not."""
    run_ranks(2, _compared_exactly, tmp_path)
    assert (tmp_path / "unchecked" / "manifest.json").exists()


def _odd_tensors() -> dict[str, torch.Tensor]:
    """Replicated tensors whose memory is unlike their values' order, and dtypes that few kernels know."""
    torch.manual_seed(0)
    found = {
        "transposed": torch.randn(300, 200).t(),
        "strided": torch.randn(300, 200)[::2, 1::3],
        "expanded": torch.randn(1, 40).expand(30, 40),
        "conj": torch.randn(30, 40, dtype=torch.complex64).conj(),
        "imag": torch.randn(300, dtype=torch.complex64).conj().imag,
        "bool": torch.randn(5000) > 0,
        "half": torch.randn(5000).bfloat16(),
        "fp8": torch.randn(5000).to(torch.float8_e4m3fn),
        "double complex": torch.randn(50, dtype=torch.complex128),
        "nan": torch.full((7,), float("nan")),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
    }
    if dist.get_rank() == 1:  # the same values in other memory
        found = {
            name: tensor.resolve_conj().resolve_neg().contiguous().clone() for name, tensor in found.items()
        }
    return found


def _alike(folder: Path) -> None:
    for check in ("sample", "all", False):
        state = {
            "odd": _odd_tensors(),
            "mixed": mixed_state(),
            "own": PerRank(torch.full((9,), float(dist.get_rank()))),
        }
        for way in (save, lambda *args, **options: async_save(*args, **options).wait()):
            way(folder / f"{check}", state, check_replicas=check, overwrite=True)
    state = {"odd": _odd_tensors()}
    for name in list(state["odd"]):
        if state["odd"][name].numel() and name != "nan":
            other = dict(state["odd"])
            if dist.get_rank() == 0:
                plain_copy = other[name].resolve_conj().resolve_neg().contiguous().clone()
                bits = plain_copy.view(torch.uint8) if plain_copy.itemsize == 1 else plain_copy
                bits = bits.flip(tuple(range(bits.ndim))) if bits.ndim else bits + 1
                other[name] = bits.view(plain_copy.dtype)
            for check in ("sample", "all"):
                with pytest.raises(CheckpointError, match=f"{name}: ranks"):
                    save(folder / f"{check}", {"odd": other}, check_replicas=check, overwrite=True)


def test_equal_replicas_are_saved(tmp_path: Path) -> None:
    """Equal values pass whatever their strides, flags and dtypes are, NaN too; each of them reversed is noticed."""
    run_ranks(2, _alike, tmp_path)


def _staged(folder: Path) -> None:
    state = {"w": torch.zeros(300, 300)}
    handle = async_save(folder, state, check_replicas="all")
    state["w"].fill_(dist.get_rank())  # after the copy: none of the save's business
    handle.wait()
    assert not bool(read_state(folder)["w"].read().any())


def test_what_was_staged_is_compared(tmp_path: Path) -> None:
    """Behind training the copy is compared, not what the trainer has written since."""
    run_ranks(2, _staged, tmp_path / "c")


def _pipeline(folder: Path) -> None:
    """Two stages of two ranks, which compare what a stage holds, and what both hold."""
    rank = dist.get_rank()
    stage = f"stage{rank // 2}"
    state = {stage: torch.full((100, 200), float(rank // 2)), "shared": torch.ones(100, 200)}
    save(folder / "good", state)
    restored = {stage: torch.zeros(100, 200), "shared": torch.zeros(100, 200)}
    load(folder / "good", restored, strict=False)
    assert_equal(plain(state), plain(restored))
    for name, bad_rank in ((stage, 3), ("shared", 2)):
        other = dict(state)
        if rank == bad_rank:
            other[name] = other[name] + 1
        with pytest.raises(
            CheckpointError, match=r"\bshared\b" if name == "shared" else r"\bstage1\b.*\[2\]"
        ):
            save(folder / "bad", other)


def test_stages_with_other_tensors(tmp_path: Path) -> None:
    """Ranks whose structures differ compare what they have in common."""
    run_ranks(4, _pipeline, tmp_path)


def _unreadable(folder: Path, check: CheckReplicas) -> str:
    """A rank that cannot digest its tensors is heard of on all; the others do not wait."""
    coordinator = coordinator_for()

    def plan() -> Any:
        raise MemoryError("none left")

    compared = begin_comparison(plan, {}, coordinator, check, lambda _: ())
    with pytest.raises((MemoryError, CheckpointError)) as caught:
        compared()
    return type(caught.value).__name__


def test_a_rank_that_cannot_compare(tmp_path: Path) -> None:
    """Its own error, at the meeting behind the writing."""
    assert run_ranks(2, _unreadable, tmp_path, "sample") == ["MemoryError"] * 2


def _wait(outcome: object) -> None:
    """Ask for the error of a save behind training."""
    if isinstance(outcome, SaveHandle):
        outcome.wait()


def test_other_choices_are_refused(tmp_path: Path) -> None:
    """Before anything is written; True is none of them."""
    for choice in ("some", True, None):
        for way in (save, async_save, CheckpointManager, RaggedWriter):
            arguments = () if way in (CheckpointManager, RaggedWriter) else ({"w": torch.ones(3)},)
            with pytest.raises(ValueError, match="check_replicas"):
                _wait(way(tmp_path / "c", *arguments, check_replicas=choice))  # type: ignore[operator]
    assert not (tmp_path / "c" / "manifest.json").exists()


def _one_rank_checks(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="check_replicas"):
        save(
            folder,
            ragged_group(init_device_mesh("cpu", (2,))),
            check_replicas="all" if dist.get_rank() else "sample",
        )


def test_ranks_compare_in_one_way(tmp_path: Path) -> None:
    """An argument that differs between ranks is named, not obeyed on some of them."""
    run_ranks(2, _one_rank_checks, tmp_path)
