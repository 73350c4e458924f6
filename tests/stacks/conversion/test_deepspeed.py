"""Checkpoints that DeepSpeed itself wrote on two ranks: equal, to the bit, to what its own tools make of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.formats.zero_folders import ZeroState, write_universal, write_zero
from tests.support.dtype_zoo import same_bytes
from tools.torchrun_job import Job
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion import convert, open_source
from vescale_fsdp.conversion.formats.torch_save.read import TorchFile

CASES = ["zero1_bf16", "zero1_fp32", "zero2_bf16", "zero2_fp32", "zero3_bf16", "zero3_fp32"]
ROUND_ROBIN = ["zero1_round_robin", "zero2_round_robin"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases."""
    out = tmp_path_factory.mktemp("deepspeed")
    os.environ["DS_ACCELERATOR"] = "cpu"
    Job("tests.stacks.jobs.deepspeed_job", 2, ["--out", str(out)], out / "logs", timeout_s=900).wait()
    return out


def restored(source: Path, out: Path) -> dict[str, Any]:
    """All of a source as a state of torch's."""
    opened = open_source(str(source))
    assert opened.kind == "deepspeed" and not verify(opened).problems
    convert(opened, str(out), "torch")
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def universal(folder: Path, name: str, kind: str) -> torch.Tensor:
    """One tensor of DeepSpeed's universal checkpoint, flat."""
    content = torch.load(folder / "zero" / name / f"{kind}.pt", weights_only=True)
    tensor: torch.Tensor = content["param"] if isinstance(content, dict) else content
    return tensor.flatten()


@pytest.mark.parametrize("form", ["global_step3", "global_step3_universal"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_deepspeeds_own_tools(saved: Path, tmp_path: Path, case: str, form: str) -> None:
    """The model to zero_to_fp32, masters and moments to the files of ds_to_universal."""
    rival = torch.load(saved / f"{case}.expected.pt", weights_only=True)
    found = restored(saved / case / form, tmp_path / "out.pt")
    model, states = found["model"], found["optimizer"]["state"]
    # zero_to_fp32 leaves out frozen parameters of ZeRO-1.
    assert model.keys() - rival.keys() == ({"frozen.weight"} if case.startswith("zero1") else set())
    assert rival.keys() <= model.keys()
    for name, tensor in rival.items():
        assert same_bytes(model[name].to(tensor.dtype), tensor), name
    assert model["seen"] == 3 and model["frozen.weight"].shape == (5, 7)
    trained = {"embed.weight", "up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight", "scale"}
    assert states.keys() == trained
    for name, state in states.items():
        assert same_bytes(
            model[name].flatten(), universal(saved / case / "global_step3_universal", name, "fp32")
        )
        for kind in ("exp_avg", "exp_avg_sq"):
            expected = universal(saved / case / "global_step3_universal", name, kind)
            assert same_bytes(state[kind].flatten(), expected) and state[kind].shape == model[name].shape
        assert state["step"] == 3 and bool(state["exp_avg"].any())
    groups = found["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert "scale" in groups[1]["params"] and "up.weight" in groups[0]["params"]
    assert found["epoch"] == 7 and found["global_steps"] == 3 and found["lr_scheduler"]["last_epoch"] == 3


@pytest.mark.parametrize("form", ["global_step3", "global_step3_universal"])
@pytest.mark.parametrize("case", [*CASES, *ROUND_ROBIN])
def test_equal_to_what_the_engine_has_in_memory(saved: Path, tmp_path: Path, case: str, form: str) -> None:
    """Masters and moments. With `round_robin_gradients`, zero_to_fp32 mixes parameters up, which this shows."""
    live = torch.load(saved / f"{case}.live.pt", weights_only=True)
    found = restored(saved / case / form, tmp_path / "out.pt")
    states = found["optimizer"]["state"]
    assert live.keys() == states.keys() and len(live) == 7
    for name, tensor in live.items():
        assert same_bytes(found["model"][name], tensor), name
        for kind in ("exp_avg", "exp_avg_sq"):
            expected = universal(saved / case / "global_step3_universal", name, kind)
            assert same_bytes(states[name][kind].flatten(), expected), name
    rival = torch.load(saved / f"{case}.expected.pt", weights_only=True)
    wrong = [name for name, tensor in live.items() if not torch.equal(rival[name].to(tensor.dtype), tensor)]
    assert bool(wrong) == (case in ROUND_ROBIN)


def test_without_zero(saved: Path, tmp_path: Path) -> None:
    """The engine's own state, without ZeRO."""
    found = restored(saved / "no_zero", tmp_path / "out.pt")["model"]
    expected = torch.load(saved / "no_zero.expected.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in expected.items())


def layout(folder: Path) -> dict[str, Any]:
    """File -> the keys of what it holds, some levels deep."""
    store = open_store(str(folder))

    def keys(value: Any, depth: int) -> Any:
        if isinstance(value, dict) and depth:
            return {str(key): keys(inner, depth - 1) for key, inner in value.items()}
        return type(value).__name__

    files = [file for file in store.list_files() if file.endswith(".pt")]
    return {file: keys(TorchFile.open(store, file, stand_ins=True).content, 3) for file in files}


@pytest.mark.parametrize("stage", [1, 3])
def test_hand_made_folders_are_alike(saved: Path, tmp_path: Path, stage: int) -> None:
    """What the tests of `make test` read has the files and the keys of the real ones."""
    real = layout(saved / f"zero{stage}_bf16/global_step3")
    names = {f"p{n}": torch.ones(n + 1) for n in range(4)}
    state = ZeroState(
        [dict(list(names.items())[:2]), dict(list(names.items())[2:])],
        {name: {"exp_avg": t, "exp_avg_sq": t} for name, t in names.items()},
        [{}, {}],
    )
    made = layout(write_zero(tmp_path, state, stage=stage, ranks=2))
    assert made.keys() == real.keys()
    for file, keys in made.items():
        assert keys.keys() <= real[file].keys(), file
        if "optimizer_state_dict" in keys:
            assert keys["optimizer_state_dict"].keys() <= real[file]["optimizer_state_dict"].keys()
    universal = {f.name for f in write_universal(tmp_path / "u", state, stage=stage).rglob("*.pt")}
    there = {f.name for f in (saved / f"zero{stage}_bf16/global_step3_universal").rglob("*.pt")}
    assert universal == there
