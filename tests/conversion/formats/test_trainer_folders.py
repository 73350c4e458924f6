"""Folders of accelerate, Trainer and Lightning: what lies beside the weights comes along, or is said not to.

Written here by the calls that those make (torch.save, dcp.save, JSON); `tests/stacks/conversion` has theirs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import ConvertOptions, convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

FORMS = ("sharded", "full", "whole")


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `FSDP.optim_state_dict` and torch's `get_optimizer_state_dict` have it."""
    names, state = [name for name, _ in model.named_parameters()], optimizer.state_dict()
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[n]: kept for n, kept in state["state"].items()}, "param_groups": groups}


def _random_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}


def _folder(path: Path, form: str) -> dict[str, Any]:
    """A checkpoint of a run in one of the forms; the optimizer's state as it was saved."""
    path.mkdir()
    model, optimizer = _trained()
    state = _by_name(model, optimizer)
    if form == "sharded":
        dcp.save({"model": model.state_dict()}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": state}, checkpoint_id=path / "optimizer_0", no_dist=True)
    elif form == "full":
        torch.save(model.state_dict(), path / "pytorch_model_fsdp.bin")
        torch.save(state, path / "optimizer.bin")
    else:
        state = optimizer.state_dict()
        save_file(model.state_dict(), path / "model.safetensors", {"format": "pt"})
        torch.save(state, path / "optimizer.pt")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.save(scheduler.state_dict(), path / ("scheduler.pt" if form == "whole" else "scheduler.bin"))
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        torch.save(_random_states(), path / f"rng_state_{rank}.pth")
    torch.save({"model": {"0.weight": torch.full((3, 4), 9.0)}}, path / "custom_checkpoint_0.pkl")
    torch.save(SimpleNamespace(lr=1), path / "training_args.bin")
    counters = {"global_step": 7, "log_history": [{"loss": 1.5, "step": 1}], "best_metric": None}
    (path / "trainer_state.json").write_text(json.dumps(counters))
    return state


def _whole(folder: Path, kind: str) -> dict[str, Any]:
    """The state in a result of any form."""
    if kind != "torch":
        convert(open_source(str(folder)), str(out := folder.with_suffix(".again.pt")), "torch")
        folder = out
    return dict(torch.load(folder, weights_only=True))


@pytest.mark.parametrize("form", FORMS)
def test_all_of_it_comes_along(tmp_path: Path, form: str) -> None:
    """Optimizer, scheduler, random states of each rank and counters, in every target that can hold them; a model that a
    user registered is not taken for the model, and Hugging Face gets the model alone."""
    saved = _folder(tmp_path / "run", form)
    source = open_source(str(tmp_path / "run"))
    assert source.unsupported == ("training_args.bin",) and not source.warnings
    for kind in ("torch", "native", "dcp", "zarr"):
        out = tmp_path / f"{kind}.pt"
        report = convert(source, str(out), kind)
        assert (report.dropped_optimizer, report.dropped_others) == (0, ("training_args.bin",))
        state = _whole(out, kind)
        for number, (name, moments) in enumerate(saved["state"].items()):
            held = state["optimizer"]["state"]
            found = held.get(name, held.get(str(name)))
            assert found is not None and all(torch.equal(found[key], moments[key]) for key in moments), number
        assert state["optimizer"]["param_groups"][0]["lr"] == 0.5
        assert state["scheduler"]["step_size"] == 2 and state["trainer_state"]["global_step"] == 7
        assert state["trainer_state"]["log_history"] == [{"loss": 1.5, "step": 1}]
        for rank in range(2):
            _check_random(state["rng_state"][str(rank)], rank)
    report = convert(source, str(tmp_path / "hf"), "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    model, _ = _trained()
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weights[name], param) for name, param in model.named_parameters())
    left = {name.split(".")[0] for name in report.dropped_others}
    assert (
        report.dropped_optimizer > 8 and {"rng_state", "scheduler", "trainer_state", "training_args"} <= left
    )


def _check_random(state: dict[str, Any], rank: int) -> None:
    """Set from what was kept, generators go on as those that were saved."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(x.numpy() if isinstance(x, torch.Tensor) else x for x in state["numpy"]))
    torch.set_rng_state(state["cpu"])
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("form", FORMS)
def test_into_a_live_state(tmp_path: Path, form: str) -> None:
    """Model and moments, by name or by number; what the state has no place for is reported."""
    _folder(tmp_path / "run", form)
    model, optimizer = _trained()
    fresh = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    other = torch.optim.AdamW(fresh.parameters())
    state: dict[str, Any] = {"model": fresh, "optimizer": other, "scheduler": {"step_size": 0}}
    report = load(tmp_path / "run", state, strict=False)
    assert not report.missing and any(name.startswith("rng_state.1") for name in report.ignored)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    moments, expected = (o.state_dict()["state"] for o in (other, optimizer))
    assert all(torch.equal(moments[n][key], expected[n][key]) for n in expected for key in expected[n])
    assert other.param_groups[0]["lr"] == 0.5 and state["scheduler"]["step_size"] == 2


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A class in a scheduler's pickle and bad JSON: left out with a warning, and the model is read. Damage ends it."""
    _folder(tmp_path / "run", "whole")
    torch.save({"f": SimpleNamespace()}, tmp_path / "run" / "scheduler.pt")
    (tmp_path / "run" / "trainer_state.json").write_text("{")
    report = convert(open_source(str(tmp_path / "run")), str(tmp_path / "hf"), "hf")
    first, second = report.warnings[:2]
    assert "scheduler.pt" in first and "SimpleNamespace" in first
    assert "trainer_state.json" in second
    assert {"scheduler.pt", "trainer_state.json", "training_args.bin"} <= set(report.dropped_others)
    data = (tmp_path / "run" / "optimizer.pt").read_bytes()
    (tmp_path / "run" / "optimizer.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.pt"):
        open_source(str(tmp_path / "run"))


def test_lightnings_shards_and_the_rest(tmp_path: Path) -> None:
    """meta.pt beside DCP's files: hyperparameters, schedulers, and counters that are called after an optimizer, which
    stay when the optimizer goes."""
    model, optimizer = _trained()
    state = {"state_dict": model.state_dict(), "optimizer_0": _by_name(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "run.ckpt", no_dist=True)
    progress = {"fit_loop": {"optim_progress": {"optimizer": {"step": {"total": {"ready": 3}}}}}}
    meta = {"epoch": 1, "loops": progress, "lr_schedulers": [{"last_epoch": 3}], "rng": torch.get_rng_state()}
    torch.save(meta, tmp_path / "run.ckpt" / "meta.pt")
    source = open_source(str(tmp_path / "run.ckpt"))
    convert(source, str(tmp_path / "all.pt"), "torch")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded.keys() == state.keys() | meta.keys() and loaded["loops"] == progress
    assert torch.equal(loaded["rng"], meta["rng"]) and loaded["lr_schedulers"] == [{"last_epoch": 3}]
    convert(source, str(tmp_path / "model"), "native", ConvertOptions(optimizer="drop"))
    kept = _whole(tmp_path / "model", "native")
    assert "optimizer_0" not in kept and kept["loops"] == progress
    torch.save({"state_dict": 1}, tmp_path / "run.ckpt" / "meta.pt")  # of another save
    torch.save({**meta, "state_dict": {"0.weight": torch.ones(1)}}, tmp_path / "run.ckpt" / "meta.pt")
    with pytest.raises(CorruptCheckpointError, match=r"\bstate_dict\.0\.weight\b"):
        open_source(str(tmp_path / "run.ckpt"))


@pytest.mark.parametrize("file", ["model.pt", "pytorch_model_fsdp_rank0.bin"])
def test_flattened_parameters_are_refused(tmp_path: Path, file: str) -> None:
    """FSDP1's LOCAL_STATE_DICT would pass for a model with one parameter per layer."""
    torch.save({"layers.0._flat_param": torch.ones(9), "_flat_param": torch.ones(3)}, tmp_path / file)
    with pytest.raises(ConversionError, match=r"flattened(.|\n)*SHARDED_STATE_DICT"):
        open_source(str(tmp_path / file if file == "model.pt" else tmp_path))


ARRAYS = {
    "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "swapped": np.arange(4).astype(">f8"),
    "pairs": np.arange(3).astype(">c8") * 1j,
    "none": np.zeros((0, 3), dtype=np.uint32),
    "one": np.array(True),
}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", ["torch", "native", "dcp", "hf"])
def test_arrays_of_numpy_are_tensors(tmp_path: Path, kind: str, protocol: int) -> None:
    """With their values, in whatever order their bytes were; what is no number is refused by name."""
    torch.save({"model": {**ARRAYS, "w": torch.ones(2)}}, tmp_path / "a.pt", pickle_protocol=protocol)
    convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "out"), kind)
    if kind == "hf":
        found = load_file(tmp_path / "out" / "model.safetensors")
    else:
        convert(open_source(str(tmp_path / "out")), str(tmp_path / "last.pt"), "torch")
        found = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    for name, array in ARRAYS.items():
        assert torch.equal(
            found[name],
            torch.from_numpy(
                np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape)
            ),
        )
    torch.save(
        {"w": torch.ones(2), "bad": np.array([None, "x"])}, tmp_path / "b.pt", pickle_protocol=protocol
    )
    with pytest.raises(ConversionError, match="'O8'"):
        open_source(str(tmp_path / "b.pt"))
