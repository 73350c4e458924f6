"""Native checkpoints as source and target: ours to Hugging Face and back, at other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from tests.support.command import vescale_convert
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import make_tensor, same_bytes
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.checkpoint import PerRank, load, read_state, save, verify
from vescale_fsdp.conversion import ConvertOptions, ConvertReport, convert, open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, LayoutError


def _convert(source: Path, target: Path, kind: str, **options: Any) -> ConvertReport:
    chosen = ConvertOptions(**options, memory_budget_bytes=4 * 2**20, threads=3)
    return convert(open_source(str(source)), str(target), kind, chosen)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _sharded(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = _Net()
    for layer in model.layers:
        fully_shard(layer, mesh=cpu_mesh(), granularity=Rows(2))
    fully_shard(model, mesh=cpu_mesh(), granularity=Rows(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    return model, optimizer


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 7}


def _full(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _full(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def _train_and_save(folder: str) -> Any:
    state = _state(*_sharded(0))
    save(folder, {**state, "rng": PerRank(torch.ones(2))})
    return _full(state)


def _load(folder: str) -> Any:
    state = _state(*_sharded(1))
    load(folder, state, strict=False)
    return _full(state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return sorted(a) == sorted(b) and all(_same(a[key], b[key]) for key in a)
    return same_bytes(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_ragged_training_to_hugging_face(tmp_path: Path) -> None:
    """Blocks of rows on 3 ranks, saved by us: the repository holds the full weights, bit for bit."""
    full = run_ranks(3, _train_and_save, str(tmp_path / "native"))[0]
    report = _convert(tmp_path / "native", tmp_path / "out", "hf")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert _same(loaded, full["model"]) and len(loaded) == 5
    assert "rng" in report.dropped_others and report.dropped_optimizer > 10
    assert verify(open_source(str(tmp_path / "native"))).problems == ()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_through_dcp_to_native_and_into_training(tmp_path: Path, ranks: int) -> None:
    """native -> DCP -> native for other ranks -> load on those ranks: model, moments, steps, groups."""
    full = run_ranks(2, _train_and_save, str(tmp_path / "a"))[0]
    _convert(tmp_path / "a", tmp_path / "dcp", "dcp")
    _convert(tmp_path / "dcp", tmp_path / "b", "native", ranks=ranks, granularity=["rows:2"])
    assert verify(tmp_path / "b").ok
    for found in run_ranks(ranks, _load, str(tmp_path / "b")):
        assert _same(found, full)


@pytest.mark.parametrize("through", ["dcp", "torch", "zarr"])
def test_layouts_are_those_of_training(tmp_path: Path, through: str) -> None:
    """What to-native plans for 3 ranks is what fully_shard planned on 3 ranks: the same layouts, from every format
    that keeps the order of the parameters, with patterns as training's."""
    run_ranks(3, _train_and_save, str(tmp_path / "a"))
    _convert(tmp_path / "a", tmp_path / "between", through)
    rules = ["weight=rows:2", "bias=rows:2", "rows:2"]
    report = _convert(tmp_path / "between", tmp_path / "b", "native", ranks=3, granularity=rules)
    assert report.warnings == ()
    theirs, ours = (read_state(tmp_path / name).manifest.structure for name in ("a", "b"))
    slots = [
        sorted((s.fqn, s.shape, s.block_numel, s.offset) for layout in x.layouts for s in layout.slots)
        for x in (theirs, ours)
    ]
    assert slots[0] == slots[1] and len(slots[0]) == 3  # both linear layers have one layout
    sizes = [sorted(layout.shard_numel for layout in x.layouts) for x in (theirs, ours)]
    assert sizes[0] == sizes[1]
    moments = [e for e in ours.entries if e.name.endswith("exp_avg")]
    assert len(moments) == 5 and all(entry.cuts for entry in moments)


def test_granularity_by_patterns(tmp_path: Path) -> None:
    """Each tensor gets its pattern's blocks; a pattern that matches nothing is refused; safetensors, which do not keep
    the order of parameters, come with a word on it."""
    tensors = {
        "embed.weight": torch.ones(8, 4),
        "layers.0.w1": torch.ones(6, 4),
        "layers.0.w2": torch.ones(6, 4),
    }
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(tmp_path / "dcp", tmp_path / "hf", "hf")
    rules = ["rows:2", "w1=whole"]
    report = _convert(tmp_path / "hf", tmp_path / "b", "native", ranks=2, granularity=rules)
    assert any("order" in warning for warning in report.warnings)
    blocks = {
        slot.fqn: slot.block_numel
        for layout in read_state(tmp_path / "b").manifest.structure.layouts
        for slot in layout.slots
    }
    assert blocks == {"embed.weight": 8, "w1": 24, "w2": 8}
    with pytest.raises(LayoutError, check=lambda error: error.got == "'w3'"):
        _convert(tmp_path / "hf", tmp_path / "c", "native", ranks=2, granularity=["w3=rows:2"])


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_tensor_above_the_stripe_size_is_carried_whole(tmp_path: Path, ranks: int) -> None:
    """In one file, and cut into those of ranks; other leaves are rows of ``test_conformance.py``."""
    big = make_tensor((1700, 1000), torch.float32)
    torch.save({"model": {"big": big}}, tmp_path / "a.pt")
    _convert(tmp_path / "a.pt", tmp_path / "native", "native", ranks=ranks)
    assert verify(tmp_path / "native").ok
    _convert(tmp_path / "native", tmp_path / "b.pt", "torch")
    assert same_bytes(torch.load(tmp_path / "b.pt", weights_only=True)["model"]["big"], big)


def test_inspect_draws_a_layout(tmp_path: Path) -> None:
    """--svg writes a picture of a native checkpoint's group, and refuses formats without layouts."""
    dcp.save({"model": {"layers.0.w": torch.randn(64, 8)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(tmp_path / "dcp", tmp_path / "native", "native", ranks=2)
    picture = tmp_path / "x.svg"
    assert vescale_convert("inspect", str(tmp_path / "native"), "--svg", str(picture)).exit_code == 0
    assert picture.read_text().startswith("<svg") and ">w<" in picture.read_text()
    refused = vescale_convert("inspect", str(tmp_path / "dcp"), "--svg", str(picture))
    assert isinstance(refused.exception, ConversionError) and "to-native" in str(refused.exception)


def test_damage_is_found(tmp_path: Path) -> None:
    """A missing and a short rank file when opening; a flipped bit by verify."""
    dcp.save({"model": {"w": torch.randn(64, 8)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(tmp_path / "dcp", tmp_path / "b", "native", ranks=2)
    file = next((tmp_path / "b").glob("data-*/00001*"))
    good = file.read_bytes()
    bad = bytearray(good)
    bad[len(good) // 2] ^= 4
    file.write_bytes(bad)
    assert any("00001" in problem.where for problem in verify(open_source(str(tmp_path / "b"))).problems)
    file.write_bytes(good[:-3])
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.got == f"{len(good) - 3} bytes"):
        open_source(str(tmp_path / "b"))
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        open_source(str(tmp_path / "b"))
