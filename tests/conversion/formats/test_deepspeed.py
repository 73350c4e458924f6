"""DeepSpeed's checkpoints as sources: ZeRO-1, 2 and 3, universal ones, and what is wrong with them, by hand-made
folders (`zero_folders`); those that DeepSpeed wrote are in tests/stacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conversion.formats.zero_folders import ZeroState, some_state, write_universal, write_zero
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.checkpoint import load, verify
from vescale_fsdp.conversion import ConvertOptions, convert, diff, open_source
from vescale_fsdp.conversion.formats.deepspeed_zero import runs_of_groups, runs_of_parameters
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, VescaleError

FORMS = [(1, 1), (1, 3), (2, 2), (3, 1), (3, 2), (3, 4)]  # stage, ranks


def restored(source: str, out: Path) -> dict[str, Any]:
    """All of a source as a state of torch's."""
    convert(open_source(source), str(out), "torch")
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def check(found: dict[str, Any], state: ZeroState) -> None:
    """Everything is there, to the bit."""
    assert found["model"].keys() == state.model.keys()
    assert all(same_bytes(found["model"][name], tensor) for name, tensor in state.model.items())
    optimizer = found["optimizer"]
    assert optimizer["state"].keys() == state.masters.keys()
    for name, moments in state.moments.items():
        assert optimizer["state"][name].keys() == {"step", *moments}
        assert all(same_bytes(optimizer["state"][name][kind], tensor) for kind, tensor in moments.items())
    steps = [optimizer["state"][name]["step"] for name in state.masters]
    assert all(same_bytes(step, torch.tensor(float(state.step))) for step in steps)
    assert len({step.data_ptr() for step in steps}) == len(steps)  # tied ones would be counted up together
    options = zip(state.options, state.groups, strict=True)
    assert optimizer["param_groups"] == [{**option, "params": list(group)} for option, group in options]
    assert found["global_steps"] == state.step and found["epoch"] == 7
    assert found["lr_scheduler"] == {"last_epoch": state.step, "_last_lr": [0.1]}


@pytest.mark.parametrize(("stage", "ranks"), FORMS)
def test_every_stage_to_the_bit(tmp_path: Path, stage: int, ranks: int) -> None:
    """Masters, moments, steps, options, frozen weights, buffers, ties, counters; the folder and the one around it."""
    state = some_state(stage)
    folder = write_zero(tmp_path / "run", state, stage=stage, ranks=ranks)
    source = open_source(str(folder))
    assert source.kind == "deepspeed" and source.ties["model.head.weight"] == "model.embed.weight"
    assert not verify(source).problems
    check(restored(str(folder), tmp_path / "out.pt"), state)
    found, compared = diff(open_source(str(tmp_path / "run")), source)
    assert not found and compared == len(source.tensors)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3)])
def test_parameters_dealt_out_to_ranks_are_read_by_their_addresses(
    tmp_path: Path, stage: int, ranks: int
) -> None:
    """As `round_robin_gradients` does, of parameters of one size too, whose places sizes do not tell apart."""
    state = some_state(stage)
    state.groups[1] |= {f"up.{name}": torch.randn(7) for name in "abcd"}
    state.moments |= {
        name: {"exp_avg": torch.randn(7), "exp_avg_sq": torch.rand(7)} for name in state.groups[1]
    }
    state.round_robin = True
    folder = write_zero(tmp_path / "run", state, stage=stage, ranks=ranks)
    check(restored(str(folder), tmp_path / "out.pt"), state)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_folder_is_read_at_every_stage(tmp_path: Path, stage: int) -> None:
    """One folder per parameter, which after ZeRO-3 are flat and have their steps elsewhere."""
    state = some_state()
    folder = write_universal(tmp_path / "run", state, stage=stage)
    for place in (folder, tmp_path / "run"):
        check(restored(str(place), tmp_path / f"{place.name}.pt"), state)


def test_universal_of_more_than_data_parallel_ranks(tmp_path: Path) -> None:
    """Trained tensors are whole there; frozen ones of which ranks have parts, and other stages' names, are refused."""
    state = some_state()
    state.frozen = {}
    folder = write_universal(tmp_path, state, stage=1)
    other = folder / "mp_rank_01_model_states.pt"
    other.write_bytes((folder / "mp_rank_00_model_states.pt").read_bytes())
    check(restored(str(folder), tmp_path / "out.pt"), state)
    (folder / "zero/layers.9.weight").mkdir()
    torch.save(torch.ones(2), folder / "zero/layers.9.weight/fp32.pt")
    with pytest.raises(ConversionError, match=r"layers\.9\.weight"):
        open_source(str(folder))
    frozen = write_universal(tmp_path / "frozen", some_state(), stage=1)
    (frozen / "mp_rank_01_model_states.pt").write_bytes(other.read_bytes())
    with pytest.raises(ConversionError, match=r"fixed\.weight"):
        open_source(str(frozen))


def test_to_hugging_face_and_into_a_model(tmp_path: Path) -> None:
    """A folder of Trainer's: its settings go along; ties are left out there; a live model takes masters and moments."""
    state = some_state()
    write_zero(tmp_path / "checkpoint-3", state, stage=2, ranks=2)
    (tmp_path / "checkpoint-3/config.json").write_text('{"model_type": "own", "tie_word_embeddings": true}')
    source = open_source(str(tmp_path / "checkpoint-3"))
    report = convert(source, str(tmp_path / "hf"), "hf", ConvertOptions(dtype=("bfloat16",)))
    assert (tmp_path / "hf/config.json").exists() and report.dropped_optimizer > 10
    saved = load_file(tmp_path / "hf/model.safetensors")
    for name in saved.keys() - {"norm.count"}:
        assert same_bytes(saved[name], state.model[name].bfloat16())
    save_file({"up.weight": torch.ones(1)}, tmp_path / "checkpoint-3/model.safetensors")  # gathered beside it
    assert open_source(str(tmp_path / "checkpoint-3")).kind == "hf"
    assert (
        open_source(str(tmp_path / "checkpoint-3"), kind="deepspeed").tensors.keys() == source.tensors.keys()
    )
    (tmp_path / "checkpoint-3/model.safetensors").unlink()
    model = torch.nn.Module()
    model.up = torch.nn.Linear(3, 7)
    load(str(tmp_path / "checkpoint-3"), model, strict=False)
    assert torch.equal(model.up.weight, state.model["up.weight"])
    optimizer = torch.optim.AdamW([{"params": [model.up.weight]}, {"params": [model.up.bias]}])
    load(str(tmp_path / "checkpoint-3"), {"model": model, "optimizer": optimizer}, strict=False)
    assert len({group["lr"] for group in optimizer.param_groups}) == 2  # as they were saved
    for name, held in zip(("up.weight", "up.bias"), optimizer.state_dict()["state"].values(), strict=True):
        assert held["step"] == 3 and torch.equal(held["exp_avg"], state.moments[name]["exp_avg"])


def test_runs_of_partitions() -> None:
    """Every element of every parameter lies in one place, for odd sizes and more ranks than elements."""
    for ranks in (1, 2, 5):
        for numels in ([1], [5, 1, 3], [0, 4], [7, 7, 7, 2]):
            for runs in (
                runs_of_groups(numels, [0] * len(numels), 0, _cut(sum(numels), ranks)),
                runs_of_parameters(numels, ranks, _cut(sum(-(-n // ranks) for n in numels), 2)),
            ):
                places = [
                    (r.rank, r.part, r.start + i) for found in runs for r in found for i in range(r.numel)
                ]
                assert len(set(places)) == len(places) == sum(numels)
                for found, numel in zip(runs, numels, strict=True):
                    assert [r.first + i for r in found for i in range(r.numel)] == list(range(numel))


def _cut(total: int, ranks: int) -> list[int]:
    return [len(range(rank, total, ranks)) for rank in range(ranks)]


def edit(file: Path, change: Any) -> None:
    """Change what a file holds, with DeepSpeed's classes left out."""
    from tests.conversion.formats.zero_folders import _pickled_classes

    with _pickled_classes():
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)


def optim(folder: Path, rank: int) -> Path:
    """A rank's file of masters."""
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _step(content: dict[str, Any]) -> None:
    held = content["optimizer_state_dict"]
    base = held.get("base_optimizer_state") or held["optimizer_state_dict"]
    base["state"][0]["step"] += 1


def _cut_short(content: dict[str, Any]) -> None:
    held = content["optimizer_state_dict"]
    key = "fp32_flat_groups" if "fp32_flat_groups" in held else "single_partition_of_fp32_groups"
    held[key][0] = held[key][0][:-3].clone()


def _shifted(content: dict[str, Any]) -> None:
    next(iter(content["optimizer_state_dict"]["param_slice_mappings"][0].values())).__dict__["start"] += 1


def _unknown(content: dict[str, Any]) -> None:
    content["module"]["more.weight"] = torch.empty(0)


BAD = {  # stage, what is done to the folder, what is said, what is to be done
    "rank missing": (2, lambda f: optim(f, 0).unlink(), "no such file", "copy or download"),
    "last rank missing": (2, lambda f: optim(f, 1).unlink(), "no such file", "copy or download"),
    "model of a rank missing": (
        3,
        lambda f: (f / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
        "no such file",
        "copy or download",
    ),
    "no model": (1, lambda f: (f / "mp_rank_00_model_states.pt").unlink(), "no file of the model", "copy"),
    "other step": (1, lambda f: edit(optim(f, 1), _step), "another step than in", "files of one step"),
    "other step of ZeRO-3": (
        3,
        lambda f: edit(f / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda c: c.update(global_steps=9)),
        "got: 9",
        "files of one step",
    ),
    "no optimizer": (
        1,
        lambda f: (optim(f, 0).unlink(), optim(f, 1).unlink()),  # type: ignore[func-returns-value]
        "no *_optim_states.pt",
        "copy the *_optim_states.pt too; ",
    ),
    "no latest": (
        1,
        lambda f: (f.parent / "latest").write_text("global_step9"),
        "global_step9",
        "latest names",
    ),
    "tensor parallel": (
        2,
        lambda f: optim(f, 1).rename(f / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        "spread over ranks",
        "ds_to_universal.py",
    ),
    "pipeline": (
        1,
        lambda f: (f / "layer_00-model_00-model_states.pt").write_bytes(b"a layer"),
        "pipeline",
        "ds_to_universal.py",
    ),
    "experts": (
        1,
        lambda f: (f / "layer_0_expert_1_mp_rank_00_model_states.pt").write_bytes(b"an expert"),
        "experts",
        "ds_to_universal.py",
    ),
    "short masters": (2, lambda f: edit(optim(f, 1), _cut_short), "masters of 37 elements", "one save"),
    "short masters of ZeRO-3": (3, lambda f: edit(optim(f, 1), _cut_short), "parts of", "one save"),
    "moved masters": (2, lambda f: edit(optim(f, 1), _shifted), "elements of group 0", "one save"),
    "missing shapes": (
        3,
        lambda f: edit(f / "zero_pp_rank_0_mp_rank_00_model_states.pt", _unknown),
        "shape of more.weight",
        "save again",
    ),
    "truncated": (2, lambda f: optim(f, 1).write_bytes(optim(f, 1).read_bytes()[:-900]), "archive", "copy"),
    "another thing": (
        1,
        lambda f: edit(optim(f, 0), lambda c: c.clear()),
        "KeyError",
        "copy the checkpoint again",
    ),
    "a list": (1, lambda f: torch.save([1], f / "mp_rank_00_model_states.pt"), "got: list", "copy the files"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said(tmp_path: Path, case: str) -> None:
    """Each fault ends in one error that says what is there and what to do."""
    stage, spoil, got, todo = BAD[case]
    folder = write_zero(tmp_path, some_state(), stage=stage, ranks=2)
    open_source(str(folder))
    spoil(folder)
    with pytest.raises((ConversionError, CorruptCheckpointError), match=re.escape(got)) as raised:
        open_source(str(folder if case != "no latest" else tmp_path))
    assert todo in str(raised.value)


def test_steps_of_a_run(tmp_path: Path) -> None:
    """``latest`` decides, ``--step`` overrides it, and several without it are asked about."""
    for seed, step in enumerate((3, 8)):
        state = some_state(seed)
        state.step = step
        write_zero(tmp_path, state, stage=1, ranks=2, tag=f"global_step{step}")
    assert open_source(str(tmp_path)).values["global_steps"]() == 8
    assert open_source(str(tmp_path), step=3).values["global_steps"]() == 3
    (tmp_path / "latest").unlink()
    with pytest.raises(ConversionError, check=lambda error: "3, 8" in error.expected):
        open_source(str(tmp_path))


def test_nothing_is_imported(tmp_path: Path) -> None:
    """What a pickle names beside tensors is neither imported nor run; it is left out and listed."""
    marker = tmp_path / "marker"
    state = some_state()
    state.client = {"epoch": 7, "args": _Evil(marker), "seen": torch.arange(3)}
    source = open_source(str(write_zero(tmp_path / "run", state, stage=1, ranks=1)))
    assert "args" in source.unsupported and not marker.exists()
    assert source.values["epoch"]() == 7 and source.tensors["seen"].info.shape == (3,)


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_values_that_differ_between_ranks(tmp_path: Path) -> None:
    """Of ZeRO-3 each rank has a file of the model: what they disagree about is left out."""
    folder = write_zero(tmp_path, some_state(), stage=3, ranks=2)
    edit(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda content: content.update(epoch=8))
    source = open_source(str(folder))
    assert source.unsupported == ("epoch",) and source.values["global_steps"]() == 3


def test_numpy_arrays_of_the_user(tmp_path: Path) -> None:
    """A numpy array among the user's state is stored in the pickle itself, and read from there."""
    folder = write_zero(tmp_path / "run", some_state(), stage=1, ranks=2)
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    edit(folder / "mp_rank_00_model_states.pt", lambda content: content.update(seen=array))
    found = restored(str(folder), tmp_path / "out.pt")
    assert torch.equal(found["seen"], torch.from_numpy(array))


def test_a_flipped_bit_stops_a_conversion(tmp_path: Path) -> None:
    """Masters are proven by their record's checksum while they are read."""
    folder = write_zero(tmp_path / "run", some_state(), stage=1, ranks=2)
    extent = open_source(str(folder)).tensors["model.up.weight"].chunks[0].extent
    data = bytearray((folder / extent.file).read_bytes())
    data[extent.offset] ^= 1
    (folder / extent.file).write_bytes(data)
    with pytest.raises(VescaleError, match=re.escape(extent.file)):
        convert(open_source(str(folder)), str(tmp_path / "out"), "dcp")


def test_an_engine_without_zero_is_read_as_torchs_state(tmp_path: Path) -> None:
    """The engine without ZeRO saves torch's own states."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "param_shapes": None}
    torch.save(
        {**content, "global_steps": 1, "ds_version": "0.19.8"}, tmp_path / "mp_rank_00_model_states.pt"
    )
    found = restored(str(tmp_path), tmp_path.parent / f"{tmp_path.name}.pt")
    assert same_bytes(found["model"]["weight"], model.weight.detach())
    moment: Tensor = found["optimizer"]["state"][1]["exp_avg"]
    assert same_bytes(moment, optimizer.state_dict()["state"][1]["exp_avg"])
