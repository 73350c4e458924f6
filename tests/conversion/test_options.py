"""Options of a conversion: which names go along, where the model goes, which form the optimizer gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.conversion.formats.every_leaf import leaves_of, violations
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.convert import ConvertOptions, ConvertReport, convert
from vescale_fsdp.errors import ConversionError


def _convert(source: Path, target: Path, kind: str, **options: Any) -> ConvertReport:
    return convert(open_source(str(source)), str(target), kind, ConvertOptions(**options))


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_a_dropped_optimizer_may_be_excluded_too(tmp_path: Path, kind: str) -> None:
    """Names that another option or the target has dropped are no misspelling; including them selects nothing."""
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {"w": {"m": torch.ones(2)}}}, "step": 1}
    torch.save(state, tmp_path / "a.pt")
    options = {"optimizer": "drop"} if kind == "torch" else {}
    report = _convert(tmp_path / "a.pt", tmp_path / "out", kind, exclude=["optimizer.*"], **options)
    assert report.state.views.keys() == {"model.w" if kind == "torch" else "w"}
    for wrong in ({"exclude": ["optimiser.*"]}, {"include": ["optimizer.*"]}):
        with pytest.raises(ConversionError, check=lambda error: error.got.startswith("optimi")):
            _convert(tmp_path / "a.pt", tmp_path / "none", kind, **wrong, **options)


def test_prefix_moves_the_model(tmp_path: Path) -> None:
    """--prefix '' puts a model at the root (torchtitan), any other prefix where accelerate wants it."""
    state = {"model": {"layers.0.w": torch.ones(2)}, "step": 1}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(tmp_path / "dcp", tmp_path / "root", "dcp", prefix="")
    root: dict[str, Any] = {"layers.0.w": torch.zeros(2), "step": None}
    dcp.load(root, checkpoint_id=tmp_path / "root", no_dist=True)
    assert torch.equal(root["layers.0.w"], torch.ones(2)) and root["step"] == 1
    _convert(tmp_path / "dcp", tmp_path / "deep.pt", "torch", prefix="app.model")
    deep = torch.load(tmp_path / "deep.pt", weights_only=True)
    assert torch.equal(deep["app"]["model"]["layers.0.w"], torch.ones(2))


def test_either_form_of_an_optimizer_becomes_the_other(tmp_path: Path) -> None:
    """Nested and flattened as torch writes them, options per parameter and all; or it is dropped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    first, second = (list(layer.parameters()) for layer in model)
    optimizer = torch.optim.AdamW([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = {}
    for name, flat in (("nested", False), ("flattened", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        states[name] = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(states[name], checkpoint_id=tmp_path / name, no_dist=True)
    for name, other in (("nested", "flattened"), ("flattened", "nested")):
        _convert(tmp_path / name, tmp_path / f"{name}.pt", "torch", optimizer=other)
        loaded = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert violations(leaves_of(states[other]), leaves_of(loaded)) == [], name
        _convert(tmp_path / name, tmp_path / f"{name}_dcp", "dcp", optimizer=other)
        theirs, ours = (open_source(str(tmp_path / place)) for place in (other, f"{name}_dcp"))
        assert dict(theirs.paths) == dict(ours.paths)
    report = _convert(tmp_path / "nested", tmp_path / "none.pt", "torch", optimizer="drop")
    assert list(torch.load(tmp_path / "none.pt", weights_only=True)) == ["model"]
    assert report.dropped_optimizer > 12


def test_patterns_choose_the_names_that_go_along(tmp_path: Path) -> None:
    """One that matches nothing is an error."""
    state = {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "step": 1}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = _convert(tmp_path / "dcp", tmp_path / "x.pt", "torch", include=["model.*"], exclude=["*.b"])
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)["model"]) == ["a"]
    assert report.dropped_others == ("model.b", "step")
    with pytest.raises(ConversionError, check=lambda error: "nope.*" in str(error.got)):
        _convert(tmp_path / "dcp", tmp_path / "y.pt", "torch", exclude=["nope.*"])
