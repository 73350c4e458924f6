"""What is an error if the state and the checkpoint differ: a table of differences and formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from vescale_fsdp.checkpoint import CheckpointManager, load, save
from vescale_fsdp.errors import CheckpointError

WRITERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "native": save,
    "native, cast": save,
    "zarr": lambda path, state: save(path, state, format="zarr"),
    "dcp": lambda path, state: dcp.save(state, checkpoint_id=path, no_dist=True),
    "torch": lambda path, state: torch.save(state, path),
}


def _ones(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(2) for name in names}


def _linear() -> nn.Linear:
    return nn.Linear(2, 2)


_MODEL = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
# name -> (checkpoint, state, missing, unexpected, left out)
DIFFERENCES: dict[str, tuple[dict[str, Any], Callable[[], Any], Any, Any, Any]] = {
    "other objects": (
        {"model": _MODEL, "scheduler": {"last": 3}, "step": 7, "ema": _ones("average")},
        lambda: {"model": _linear()},
        (),
        (),
        ("ema.average", "scheduler.last", "step"),
    ),
    "more in the module": (
        {"model": {**_MODEL, "more": torch.ones(3)}},
        lambda: {"model": _linear()},
        (),
        ("model.more",),
        (),
    ),
    "less in the module": (
        {"model": {"weight": torch.ones(2, 2)}, "step": 7},
        lambda: {"model": _linear(), "step": 0},
        ("model.bias",),
        (),
        (),
    ),
    "more in a dict of tensors": (
        {"model": _ones("a", "b")},
        lambda: {"model": {"a": torch.zeros(2)}},
        (),
        ("model.b",),
        (),
    ),
    "more in a dict beside the module": (
        {"model": _MODEL, "averages": _ones("a", "b")},
        lambda: {"model": _linear(), "averages": {"a": torch.zeros(2)}},
        (),
        ("averages.b",),
        (),
    ),
    "more tensors beside tensors": (
        _ones("a", "b"),
        lambda: {"a": torch.zeros(2)},
        (),
        ("b",),
        (),
    ),
    "a number beside tensors": (
        {**_ones("a"), "step": 7},
        lambda: {"a": torch.zeros(2)},
        (),
        (),
        ("step",),
    ),
}


def test_training_does_not_go_on_without_a_part_of_its_state(tmp_path: Path) -> None:
    """A restore refuses a step with an optimizer that the state lacks, unless it reads only, or a part is asked for."""
    saved = {"model": {"w": torch.ones(2)}, "optimizer": _ones("average")}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, saved)
    state = {"model": {"w": torch.zeros(2)}}
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(CheckpointError, check=lambda error: "optimizer.average" in str(error.got)):
            manager.restore(state)
        assert not state["model"]["w"].any()
        for options in ({"read_only": True}, {"include": "model.*"}, {"strict": False}):
            state["model"]["w"].zero_()
            assert manager.restore(state, **options) is not None
            assert torch.equal(state["model"]["w"], torch.ones(2))


@pytest.mark.parametrize("format_", WRITERS)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_differs_is_the_same_error_in_every_format(
    difference: str, format_: str, tmp_path: Path
) -> None:
    """All of the state must be stored; further objects may be, but no further part of an object of the state."""
    stored, make, missing, unexpected, ignored = DIFFERENCES[difference]
    path, options = tmp_path / "c", {"dtype": "state"} if format_ == "native, cast" else {}
    WRITERS[format_](path, stored)

    report = load(path, make(), strict=False, **options)

    found = (report.missing, report.unexpected, tuple(sorted(report.ignored)))
    assert found == (missing, unexpected, ignored)
    if missing or unexpected:
        with pytest.raises(CheckpointError, check=lambda error: error.expected == "equal names"):
            load(path, make(), **options)
    else:
        assert load(path, make(), **options) == report


def _folder(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")


# Whether tensors that the state lacks are an error by default.
DEFAULTS: dict[str, tuple[Callable[[Path, dict[str, torch.Tensor]], object], bool]] = {
    "native": (save, True),
    "torch": (lambda path, state: torch.save(state, path), True),
    "dcp": (lambda path, state: dcp.save(state, checkpoint_id=path, no_dist=True), True),
    "hf": (_folder, False),
    "safetensors": (lambda path, state: save_file(state, path), False),
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_the_default_depends_on_the_source(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What only Hugging Face's files have is reported; what they lack is an error, and so is all under True."""
    write, is_strict = DEFAULTS[kind]
    path = tmp_path / ("c.safetensors" if kind == "safetensors" else "c")
    write(path, _MODEL | {"head": torch.ones(2)})
    state = _linear()
    for strict in ("auto", "missing"):
        caplog.clear()
        if strict == "auto" and is_strict:
            with pytest.raises(CheckpointError, check=lambda error: "strict='missing'" in str(error.todo)):
                load(path, state)
            continue
        state.weight.data.zero_()
        report = load(path, state, **({} if strict == "auto" else {"strict": strict}))
        assert report.unexpected == ("head",) and "head" in caplog.text and state.weight.eq(1).all()
    with pytest.raises(CheckpointError, check=lambda error: error.expected == "equal names"):
        load(path, state, strict=True)
    for strict in ("auto", "missing", True):
        with pytest.raises(CheckpointError, check=lambda error: "more" in str(error.got)):
            load(path, {"weight": torch.zeros(2, 2), "more": torch.zeros(1)}, strict=strict)
        with pytest.raises(CheckpointError, check=lambda error: error.where == f"weight in {path}"):
            load(path, nn.Linear(3, 2), strict=strict)
    with pytest.raises(ValueError, check=lambda error: error.got == "'all'"):
        load(path, state, strict="all")  # type: ignore[arg-type]
