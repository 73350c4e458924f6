"""`load` opens what is there: native first, another format by the table, which other packages can extend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vescale_fsdp.checkpoint import ProgressReport, SourceOptions, load, save
from vescale_fsdp.errors import ArgumentError, CheckpointError, NoCheckpointError


def _linear(device: str = "cpu") -> nn.Linear:
    return nn.Linear(3, 2, bias=False, device=device)


def test_what_a_report_says_of_either(tmp_path: Path) -> None:
    """Both kinds of load fill the same report; metadata is that of a native save, also if it is read through casts."""
    save(tmp_path / "native", {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, metadata={"loss": 1})
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "one.safetensors")

    for path, metadata in ((tmp_path / "native", {"loss": 1}), (tmp_path / "one.safetensors", None)):
        report = load(path, _linear(), strict=False)
        assert (report.missing, report.unexpected, report.metadata) == ((), ("bias",), metadata)
        with pytest.warns(UserWarning, match="weight"):
            wide = load(path, nn.Linear(4, 2, bias=False), strict=False)
        assert wide.mismatched == {"weight": ("float32 [2, 3]", "float32 [2, 4]")}
    half = _linear().bfloat16()
    assert load(tmp_path / "native", half, dtype="state", strict=False).metadata == {"loss": 1}
    assert half.weight.sum() == 6


def test_a_native_checkpoint_into_the_meta_device(tmp_path: Path) -> None:
    """Modules on the meta device get memory, whatever the format."""
    save(tmp_path / "c", {"model": {"weight": torch.ones(2, 3)}})
    model = _linear("meta")
    load(tmp_path / "c", {"model": model})
    assert model.weight.sum() == 6


def test_one_of_two_models(tmp_path: Path) -> None:
    """Names are compared as they are, unless the model is named."""
    save(tmp_path / "c", {"teacher": {"weight": torch.ones(2, 3)}, "student": {"weight": torch.zeros(2, 3)}})
    model = _linear()
    with pytest.raises(CheckpointError):
        load(tmp_path / "c", model)
    load(tmp_path / "c", model, source=SourceOptions(model_prefix="teacher"))
    assert model.weight.sum() == 6


def test_ways_to_verify_are_those_of_the_format(tmp_path: Path) -> None:
    """Another format is verified while it is read; what it cannot do is refused, and progress is reported."""
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    for wrong in ({"verify": "before"}, {"read": "once"}):
        with pytest.raises(ArgumentError):
            load(tmp_path / "one.safetensors", _linear(), **wrong)  # type: ignore[arg-type]
    reports: list[ProgressReport] = []
    load(tmp_path / "one.safetensors", _linear(), progress=reports.append)
    assert (reports[0].done_bytes, reports[-1].done_bytes, reports[-1].total_bytes) == (0, 24, 24)


def test_a_save_that_did_not_end_is_no_other_format(tmp_path: Path) -> None:
    """Without its manifest a native checkpoint is none, though its zarr form has files of zarr."""
    for form in ("native", "zarr"):
        save(tmp_path / form, {"weight": torch.ones(2, 3)}, format=form)
        next((tmp_path / form).rglob("manifest.json")).unlink()
        with pytest.raises(NoCheckpointError):
            load(tmp_path / form, _linear())
