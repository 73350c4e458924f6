"""One matcher for every checkpoint: a generated table of paths (who reads the bytes) and kinds of mismatch.

Every row has one answer, whatever the path: what the report says, what the error is, and what is in the tensors after.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.distributed import cpu_mesh, run_ranks, run_threads
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    EverySteps,
    LoadReport,
    RamTier,
    SourceOptions,
    load,
    save,
)
from vescale_fsdp.checkpoint.state.matching import shared_memory
from vescale_fsdp.conversion import convert, open_source
from vescale_fsdp.errors import CheckpointError, PartialLoadError

Tensors = dict[str, torch.Tensor]
_OLD = 9.0  # what the tensors of the state have before


class Way(NamedTuple):
    """How a checkpoint with one model is written, and how it is loaded."""

    write: Callable[[Path, Tensors], object]
    load: Callable[..., LoadReport]
    casts: bool = False


def _load(path: Path, state: Any, **options: Any) -> LoadReport:
    return load(path, state, **options)


def _with(**fixed: Any) -> Callable[..., LoadReport]:
    return lambda path, state, **options: load(path, state, **fixed, **options)


def _save_step(path: Path, tensors: Tensors) -> None:
    with CheckpointManager(path) as manager:
        manager.save(1, {"model": tensors})


def _restore(path: Path, state: Any, **options: Any) -> LoadReport:
    with CheckpointManager(path) as manager:
        restored = manager.restore(state, **options)
    assert restored is not None
    return restored.report


def _write_hf(path: Path, tensors: Tensors) -> None:
    path.mkdir()
    save_file({name: value.clone() for name, value in tensors.items()}, path / "model.safetensors")


def _write_bin(path: Path, tensors: Tensors) -> None:
    path.mkdir()
    torch.save({name: value.clone() for name, value in tensors.items()}, path / "pytorch_model.bin")


def _save(path: Path, tensors: Tensors, **options: Any) -> None:
    save(path, {"model": tensors}, **options)


PATHS = {
    "native": Way(_save, _load),
    "native, verified before": Way(_save, _with(verify="before")),
    "native, unverified": Way(_save, _with(verify="never")),
    "native, through views": Way(_save, _with(source=SourceOptions())),
    "native, cast": Way(_save, _with(dtype="state"), casts=True),
    "step": Way(_save_step, _restore),
    "zarr": Way(lambda path, tensors: _save(path, tensors, format="zarr"), _load),
    "dcp": Way(lambda path, tensors: dcp.save({"model": tensors}, checkpoint_id=path, no_dist=True), _load),
    "torch": Way(lambda path, tensors: torch.save({"model": tensors}, path), _load),
    "hf": Way(_write_hf, _load),
    "bin": Way(_write_bin, _load),
}


class Net(nn.Module):
    """Two matrices; tied or not, and with hooks that put copies into the state dict."""

    def __init__(self, *, tied: bool = False, hooked: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 2), _OLD))
        self.b = self.a if tied else nn.Parameter(torch.full((4, 2), _OLD))
        if hooked:
            self._register_state_dict_hook(_halved)
            self._register_load_state_dict_pre_hook(_doubled)


def _halved(module: nn.Module, state: Tensors, prefix: str, metadata: Any) -> None:
    state[f"{prefix}a"] = state[f"{prefix}a"] / 2


def _doubled(state: Tensors, prefix: str, *_: Any) -> None:
    state[f"{prefix}a"] = state[f"{prefix}a"] * 2


def _overlapping() -> Tensors:
    whole = torch.full((4, 2), _OLD)
    return {"a": whole, "b": whole[1:3]}


def _columns() -> Tensors:
    whole = torch.full((4, 4), _OLD)
    return {"a": whole[:, :2], "b": whole[:, 2:]}


def _numbers(first: float = 0.0, *, rows: int = 4) -> torch.Tensor:
    return torch.arange(first, first + 2 * rows, dtype=torch.float32).view(rows, 2)


class Row(NamedTuple):
    """A checkpoint and a state, and the answer.

    Args:
        missing, unexpected, mismatched: the report's, if strict allows it.
        differs: whether stored values differ that one memory would get: an error however strict the load is.
        kept: names of the state that keep their values.
        is_cast: whether a load that casts finds no mismatch.
        found: the values after the load; None: those that are stored.
        is_foreign: whether no name is common: an error however strict the load is.
    """

    stored: Tensors
    state: Callable[[], Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    differs: bool = False
    kept: tuple[str, ...] = ()
    is_cast: bool = False
    found: Tensors | None = None
    is_foreign: bool = False


_BOTH = {"a": _numbers(), "b": _numbers(8)}
_ALIKE = {"a": _numbers(), "b": _numbers()}
_NAN = torch.full((4, 2), torch.nan)
ROWS = {
    "all fits": Row(_BOTH, Net),
    "less is stored": Row({"a": _numbers()}, Net, missing=("model.b",), kept=("b",)),
    "more is stored": Row({**_BOTH, "c": _numbers()}, Net, unexpected=("model.c",)),
    "another shape": Row({**_BOTH, "b": _numbers(rows=3)}, Net, mismatched=("model.b",), kept=("b",)),
    "another float": Row(
        {**_BOTH, "b": _numbers(8).half()}, Net, mismatched=("model.b",), kept=("b",), is_cast=True
    ),
    "an integer": Row({**_BOTH, "b": _numbers(8).long()}, Net, mismatched=("model.b",), kept=("b",)),
    "tied, once": Row({"b": _numbers()}, lambda: Net(tied=True), found=_ALIKE),
    "tied, alike": Row(_ALIKE, lambda: Net(tied=True)),
    "tied, both NaN": Row({"a": _NAN, "b": _NAN.clone()}, lambda: Net(tied=True)),
    "tied, unlike": Row(_BOTH, lambda: Net(tied=True), differs=True),
    "tied, one of another shape": Row(
        {"a": _numbers(), "b": _numbers(rows=3)},
        lambda: Net(tied=True),
        mismatched=("model.b",),
        found=_ALIKE,
    ),
    "a slice, alike": Row({"a": _numbers(), "b": _numbers()[1:3].clone()}, _overlapping),
    "a slice, unlike": Row({"a": _numbers(), "b": _numbers(8)[1:3].clone()}, _overlapping, differs=True),
    "columns": Row(_BOTH, _columns),
    "copies in the state dict": Row(_BOTH, lambda: Net(hooked=True)),
    "nothing in common": Row(
        {"c": _numbers()}, Net, missing=("model.a", "model.b"), unexpected=("model.c",), is_foreign=True
    ),
}


def _values(model: Any) -> Tensors:
    """The values of the model under their names in a checkpoint."""
    return {
        name: value.detach()
        for name, value in (model if isinstance(model, dict) else model.state_dict()).items()
    }


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return same_bytes(found, expected.to(found.dtype))


def check(row: Row, where: Way, path: Path, strict: Any) -> None:
    """The answer of one load."""
    model = row.state()
    before = {name: value.clone() for name, value in _values(model).items()}
    mismatched = () if where.casts and row.is_cast else row.mismatched
    is_refused = bool(strict) and bool(mismatched or row.missing or (row.unexpected and strict is True))
    if row.differs or row.is_foreign or is_refused:
        with pytest.raises(CheckpointError) as caught:
            where.load(path, {"model": model}, strict=strict)
        assert not isinstance(caught.value, PartialLoadError)
        assert all(_same(value, before[name]) for name, value in _values(model).items())
        return
    report = where.load(path, {"model": model}, strict=strict)
    assert (report.missing, report.unexpected, tuple(report.mismatched)) == (
        row.missing,
        row.unexpected,
        mismatched,
    )
    kept = () if where.casts and row.is_cast else row.kept
    expected = {**(row.found or row.stored), **{name: before[name] for name in kept}}
    for name, value in _values(model).items():
        assert _same(value, expected[name]), name


@pytest.mark.filterwarnings("ignore:.*tensors keep their values")
@pytest.mark.filterwarnings("ignore:.*have another shape or dtype")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS)
def test_a_mismatch_has_one_answer(row: str, path: str, tmp_path: Path) -> None:
    """Whoever reads the bytes, and with every strictness."""
    where = PATHS[path]
    where.write(tmp_path / "c", ROWS[row].stored)
    for strict in (True, "missing", False):
        check(ROWS[row], where, tmp_path / "c", strict)


def test_one_of_two_unlike_tensors_can_be_left_out(tmp_path: Path) -> None:
    """As the error says: with a name pattern, which of the values to load is chosen."""
    save(tmp_path / "c", {"model": _BOTH})
    model = Net(tied=True)
    load(tmp_path / "c", {"model": model}, include="model.a")
    assert torch.equal(model.b, _BOTH["a"])


def test_tied_tensors_are_compared_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last element of the last piece counts; a piece may begin inside a row."""
    monkeypatch.setattr(shared_memory, "_PIECE_BYTES", 12)
    alike = {"a": _numbers(), "b": _numbers()}
    save(tmp_path / "alike", {"model": alike})
    alike["b"][-1, -1] += 1
    save(tmp_path / "unlike", {"model": alike})
    load(tmp_path / "alike", {"model": Net(tied=True)})
    with pytest.raises(CheckpointError, check=lambda error: error.got == "other values"):
        load(tmp_path / "unlike", {"model": Net(tied=True)})


def test_a_folder_with_a_head_of_its_own_is_not_loaded_into_a_tied_model(tmp_path: Path) -> None:
    """Neither from the folder nor from what `to-native` makes of it: the embedding would get the head's values."""
    _write_hf(tmp_path / "hf", _BOTH)
    convert(open_source(str(tmp_path / "hf")), str(tmp_path / "native"), "native")
    for path in ("hf", "native"):
        with pytest.raises(CheckpointError, check=lambda error: error.got == "other values"):
            load(tmp_path / path, Net(tied=True))


def _load_stage(path: Path) -> tuple[Tensors, LoadReport]:
    """A stage of two, each with a tensor of its own."""
    name = "ab"[dist.get_rank()]
    save(path, {"model": {name: torch.full((2,), dist.get_rank() + 1.0)}})
    state = {name: torch.zeros(2)}
    return state, load(path, {"model": state})


def test_stages_load_what_stages_saved(tmp_path: Path) -> None:
    """An entry that another rank loads is not unexpected."""
    (first, report), (second, _) = run_threads(2, _load_stage, tmp_path / "c")
    assert (first["a"][0], second["b"][0]) == (1, 2) and report.unexpected == ()


def _state(row: Row) -> tuple[Any, Tensors]:
    """A state of sharded tensors with the row's ties, and the local values before."""
    model = row.state()
    tensors = _values(model)
    made: dict[int, torch.Tensor] = {}
    for value in tensors.values():
        made.setdefault(value.data_ptr(), distribute_tensor(value.clone(), cpu_mesh(), [Shard(0)]))
    state = {name: made[value.data_ptr()] for name, value in tensors.items()}
    return state, {name: value.to_local().clone() for name, value in state.items()}


def _on_ranks(folder: Path, way: str) -> list[str]:
    """The tied rows on two ranks that share reads, or read from memory; returns what is wrong."""
    wrong = []
    for number, name in enumerate(["tied, alike", "tied, unlike", "tied, once", "all fits"]):
        row, path = ROWS[name], folder / f"{way}_{number}"
        stored, (state, before) = {"model": row.stored}, _state(row)
        if way == "once":
            save(path, stored)
            error = _error_of(lambda: load(path, {"model": state}, read="once"))  # noqa: B023
        else:
            tier = RamTier("run", folder=folder / f"node{dist.get_rank()}_{number}", interval=1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LOCAL_RANK", "0")  # each rank is a node of its own
                manager = CheckpointManager(path, save_policy=EverySteps(2), ram=tier)
            with manager:
                manager.save(1, stored)
                error = _error_of(lambda: manager.restore({"model": state}))  # noqa: B023
                assert manager.steps() == []  # on disk
        if (error is not None) != row.differs or isinstance(error, PartialLoadError):
            wrong.append(f"{name}: {error!r}")
        expected = row.found or row.stored
        for key, value in state.items():
            is_kept = _same(value.to_local(), before[key])
            if not (is_kept if row.differs else _same(value.full_tensor(), expected[key])):
                wrong.append(f"{name}: {key} is {value.to_local()}")
    return wrong


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("way", ["once", "memory"])
def test_ties_have_the_same_answer_on_ranks(way: str, tmp_path: Path) -> None:
    """Where one rank reads for several, and where nodes read each other's memory."""
    assert run_ranks(2, _on_ranks, tmp_path, way) == [[], []]
