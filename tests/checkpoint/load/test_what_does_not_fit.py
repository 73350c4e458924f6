"""What a source and a state do not have in common is named before anything is overwritten; damage is found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.faults.disks import counted_reads
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import SourceOptions, load, save
from vescale_fsdp.checkpoint.state_dict import get_optimizer_state_dict
from vescale_fsdp.errors import CheckpointError, ConversionError, VescaleError


class Small(nn.Module):
    """Two layers, of which the second may be the first, and a buffer of which no checkpoint knows."""

    def __init__(self, tied: bool = False, table: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        if tied:
            self.b.weight = self.a.weight
        if table:
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(3.0))


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    numbers = torch.arange(16.0, dtype=dtype).view(4, 4)
    return {"a.weight": numbers, "b.weight": -numbers}


def _folder(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def _refused(model: nn.Module, source: Path, **options: Any) -> str:
    """The error's text; proves that nothing was overwritten."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(VescaleError) as refused:
        load(source, model, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(refused.value)


def test_names_and_shapes(tmp_path: Path) -> None:
    """Missing, unknown, of another shape or type: named, and reported with strict=False, which loads the rest."""
    good = _weights()
    odd = _folder(tmp_path / "odd", {"a.weight": good["a.weight"], "c.weight": torch.ones(2)})
    text = _refused(Small(), odd)
    assert re.search(r"missing .*: b\.weight\b.*only .*: c\.weight\b", text, re.S)
    model = Small()
    report = load(odd, model, strict=False)
    assert (report.missing, report.unexpected) == (("b.weight",), ("c.weight",))
    assert torch.equal(model.a.weight, good["a.weight"])

    wide = _folder(tmp_path / "wide", {**good, "b.weight": torch.ones(4, 5)})
    assert "b.weight" in (text := _refused(Small(), wide)) and "[4, 5]" in text and "[4, 4]" in text
    with pytest.warns(UserWarning, match="b.weight"):
        report = load(wide, Small(), strict=False)
    assert report.mismatched == {"b.weight": ("float32 [4, 5]", "float32 [4, 4]")}

    assert load(odd, Small(), include="a.*") == load(odd, Small(), include=["a.weight"])
    assert "'x.*'" in _refused(Small(), odd, include=["a.*", "x.*"])


def test_weights_are_cast_when_that_is_asked_for(tmp_path: Path) -> None:
    """bfloat16 weights fill float32 parameters when that is asked for, and the other way."""
    half = _folder(tmp_path / "half", _weights(torch.bfloat16))
    assert "dtype='state'" in _refused(Small(), half)
    for dtype in ("state", "float32", ["bfloat16", "state"]):
        model = Small()
        load(half, model, dtype=dtype)
        assert torch.equal(model.b.weight, _weights()["b.weight"])
    model = Small().bfloat16()
    load(_folder(tmp_path / "full", _weights()), model, dtype=["*.weight=bf16"])
    assert torch.equal(model.a.weight, _weights(torch.bfloat16)["a.weight"])
    assert "state" not in _refused(Small(), half, dtype="int8").split("\n")[0]


def test_tied_names_that_differ_are_refused(tmp_path: Path) -> None:
    """One tensor for two names, two equal ones, and two that differ: the last is refused."""
    weights = _weights()
    once = _folder(tmp_path / "once", {"b.weight": weights["b.weight"]})
    twice = _folder(tmp_path / "twice", {name: weights["b.weight"].clone() for name in weights})
    for source in (once, twice):
        model = Small(tied=True)
        assert load(source, model).missing == ()
        assert model.b.weight is model.a.weight and torch.equal(model.a.weight, weights["b.weight"])
    text = _refused(Small(tied=True), _folder(tmp_path / "apart", weights))
    assert "a.weight" in text and "b.weight" in text and "differ" in text
    assert "a.weight" in _refused(Small(), once)  # which is no tie for a model that ties nothing


def _cut(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8])


def _lose(path: Path) -> None:
    files = {name: f"{name[0]}.safetensors" for name in _weights()}
    for name, file in files.items():
        save_file({name: _weights()[name]}, path / file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (path / "b.safetensors").unlink()


@pytest.mark.parametrize(("harm", "words"), [(_cut, "model.safetensors"), (_lose, "b.safetensors")])
def test_damaged_files_are_found_by_headers_alone(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    """A truncated file and a missing one are found by headers alone."""
    source = _folder(tmp_path / "hf", _weights())
    harm(source)
    assert words in _refused(Small(), source)
    assert "nowhere" in _refused(Small(), tmp_path / "nowhere")


def test_the_meta_device(tmp_path: Path) -> None:
    """Memory is made for what is filled; buffers of no checkpoint are asked for; failures leave no garbage."""
    source = _folder(tmp_path / "hf", _weights())
    with torch.device("meta"):
        model = Small(table=True)
    with pytest.raises(CheckpointError, match="init="):
        load(source, model)
    assert all(tensor.is_meta for tensor in (model.table, *model.parameters()))
    load(source, model, init=lambda module: module.reset_parameters())
    assert torch.equal(model.table, torch.arange(3.0)) and torch.equal(model.b.weight, _weights()["b.weight"])

    with torch.device("meta"):
        model = Small(tied=True)
    with pytest.raises(
        CheckpointError, check=lambda error: "a.weight" in error.expected and "b.weight" in error.expected
    ):
        load(source, model)
    assert model.a.weight.is_meta and model.b.weight is model.a.weight

    with torch.device("meta"):
        model = Small()
    report = load(_folder(tmp_path / "less", {"a.weight": torch.ones(4, 4)}), model, strict=False)
    assert report.missing == ("b.weight",) and model.b.weight.is_meta and not model.a.weight.is_meta
    state = {"model": Small(), "optimizer": torch.optim.AdamW(Small().parameters())}
    with pytest.raises(CheckpointError):
        load(source, state)


def _flip(folder: Path, value: float) -> None:
    """Change one bit of the number wherever it is stored."""
    wanted = torch.tensor([value]).numpy().tobytes()
    for file in folder.rglob("*"):
        if file.is_file() and wanted in (data := file.read_bytes()):
            at = data.index(wanted)
            file.write_bytes(data[: at + 1] + bytes([data[at + 1] ^ 1]) + data[at + 2 :])


def _load_damaged(folder: Path) -> dict[str, Any]:
    """What each rank meets in sources that one rank has parts of; and what it reads of a good one."""
    found: dict[str, Any] = {}
    numbers = torch.arange(200_000.0).view(40, 5000)
    if dist.get_rank() == 0:
        dcp.save({"model": {"weight": numbers}}, checkpoint_id=folder / "dcp", no_dist=True)
        torch.save({"weight": numbers}, folder / "whole.pt")
        _folder(folder / "hf", {"weight": numbers})
    save(folder / "native", {"model": {"weight": numbers}})
    save(folder / "zarr", {"model": {"weight": numbers}}, format="zarr")
    dist.barrier()
    for harmed in (False, True):
        if harmed and dist.get_rank() == 0:
            for kind in ("dcp", "native", "zarr"):
                _flip(folder / kind, 3990.0)
        dist.barrier()
        for kind in ("dcp", "native", "zarr", "whole.pt"):
            model = nn.Linear(5000, 40, bias=False)
            fully_shard(model, mesh=cpu_mesh())
            with counted_reads() as read:
                try:
                    load(folder / kind, model, source=SourceOptions())  # the model inside a state
                except VescaleError as error:
                    found[kind] = f"{type(error).__mro__} {error}"
            if not harmed and kind != "native":
                found[f"{kind} read"] = sum(read) / (4 * model.weight.to_local().numel())
            if not harmed:
                found[f"{kind} same"] = torch.equal(model.weight.full_tensor(), numbers)
    try:
        load(folder / "hf", model, strict=dist.get_rank() == 0)
    except CheckpointError as error:
        found["unlike"] = str(error)
    return found


def test_damage_in_what_ranks_share(tmp_path: Path) -> None:
    """A record with one checksum, of which no rank reads all, is proven by all together, reading nothing twice."""
    for found in run_ranks(2, _load_damaged, tmp_path):
        for kind in ("dcp", "native", "zarr", "whole.pt"):
            assert found[f"{kind} same"]
        for kind in ("dcp", "native", "zarr"):
            assert "PartialLoadError" in found[kind] and "CorruptCheckpointError" in found[kind], found[kind]
            assert "overwritten: weight" in found[kind]
        assert all(1 <= found[f"{kind} read"] < 1.1 for kind in ("dcp", "zarr", "whole.pt"))
        assert "whole.pt" not in found
        assert "argument `strict`" in found["unlike"]


def test_no_source_at_all(tmp_path: Path) -> None:
    """What is no checkpoint is said to be none."""
    (tmp_path / "x").write_text("x")
    with pytest.raises(ConversionError, check=lambda error: error.where == str(tmp_path / "x")):
        load(tmp_path / "x", Small())


def test_doubts_about_a_source_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What files of ranks cannot say for sure stands in the report and in the log; whole weights leave no doubt."""
    (tmp_path / "ranks").mkdir()
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "ranks/shard-00000-model-00001-of-00001.safetensors")
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "whole.safetensors")
    model = nn.Linear(3, 2, bias=False)

    assert load(tmp_path / "whole.safetensors", model).warnings == () and not caplog.text
    (doubt,) = load(tmp_path / "ranks", model).warnings
    assert "rank" in doubt and doubt in caplog.text and model.weight.sum() == 6


def _trained(*rates: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers that have been stepped, in one group of parameters or one each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    several = [
        {"params": list(layer.parameters()), "lr": lr} for layer, lr in zip(model, rates, strict=False)
    ]
    optimizer = torch.optim.AdamW(several if len(rates) > 1 else model.parameters(), lr=rates[0])
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("saved", "had", "expected"), [((0.1,), (0.5, 0.6), [0.1, 0.1]), ((0.1, 0.1), (0.5,), [0.1])]
)
def test_options_follow_parameters_into_other_groups(
    tmp_path: Path, saved: tuple[float, ...], had: tuple[float, ...], expected: list[float]
) -> None:
    """A group that is two in the state gives both its options, and two that say the same become one."""
    model, optimizer = _trained(*saved)
    save(tmp_path / "c", {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer)})
    live, filled = _trained(*had)

    load(tmp_path / "c", {"model": live, "optimizer": filled}, source=SourceOptions())

    assert [group["lr"] for group in filled.param_groups] == expected
    assert all(group.keys() == optimizer.param_groups[0].keys() for group in filled.param_groups)
    moments = [
        [each.state[p]["exp_avg_sq"] for p in m.parameters()]
        for m, each in ((live, filled), (model, optimizer))
    ]
    assert all(map(torch.equal, *moments)) and moments[0][0].any()


def test_options_that_differ_are_not_chosen_from(tmp_path: Path) -> None:
    """Of two learning rates neither becomes that of a group with the parameters of both; the state alone loads."""
    model, optimizer = _trained(0.1, 0.2)
    save(tmp_path / "c", {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer)})
    live, filled = _trained(0.5)

    with pytest.raises(CheckpointError):
        load(tmp_path / "c", {"model": live, "optimizer": filled})
    load(
        tmp_path / "c",
        {"model": live, "optimizer": filled},
        include=["model.*", "*.state.*"],
        source=SourceOptions(),
    )
    assert filled.param_groups[0]["lr"] == 0.5
