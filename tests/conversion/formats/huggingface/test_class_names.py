"""Names in files and names in memory: what is refused, kept and left alone; `tests/conversion/formats/families` has the
families."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_families import tiny_model
from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.formats.huggingface.class_child import answer
from vescale_fsdp.errors import ConversionError

pytest.importorskip("transformers")


def _saved(class_name: str, folder: Path) -> Any:
    model = tiny_model(class_name)
    assert model is not None
    model.save_pretrained(folder)
    return model


def _changed(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_class_that_cannot_be_asked_leaves_the_names_of_the_files(tmp_path: Path) -> None:
    """With a warning that names it."""
    model = _saved("ViTForImageClassification", tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(config.read_text().replace("ViTForImageClassification", "NoSuchModel"))
    source = open_source(str(tmp_path / "hf"))
    report = convert(source, str(tmp_path / "out"), "dcp")
    assert (
        open_source(str(tmp_path / "out")).tensors.keys()
        == source.tensors.keys()
        != model.state_dict().keys()
    )
    assert any("NoSuchModel" in warning for warning in report.warnings)


def test_a_missing_expert_is_refused_by_the_name_of_what_lacks_it(tmp_path: Path) -> None:
    """The class would make a tensor of fewer experts."""
    _saved("MixtralForCausalLM", tmp_path / "hf")
    lost = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    _changed(tmp_path / "hf", lambda tensors: tensors.pop(lost))
    with pytest.raises(ConversionError, check=lambda error: "layers.1.mlp.experts.down_proj" in error.got):
        convert(open_source(str(tmp_path / "hf")), str(tmp_path / "out"), "dcp")


@pytest.mark.part("formats")
@pytest.mark.parametrize("class_name", ["CanaryForConditionalGeneration", "BarkModel"])
def test_counters_and_masks_are_made_from_those_of_the_files(tmp_path: Path, class_name: str) -> None:
    """Integers of batch norms, and masks with the name of weights (``bias``), are loaded as they are."""
    model = _saved(class_name, tmp_path / "hf")
    convert(open_source(str(tmp_path / "hf")), str(tmp_path / "out"), "dcp")
    wanted = {name: t for name, t in model.state_dict().items() if not t.is_floating_point()}
    state = {name: torch.ones_like(value) for name, value in wanted.items()}
    load(tmp_path / "out", state, strict=False)
    assert wanted and all(torch.equal(value, wanted[name]) for name, value in state.items())
    assert not any(torch.equal(value, torch.ones_like(value)) for value in wanted.values())


def test_rules_that_say_nothing_keep_the_names_of_the_files(tmp_path: Path) -> None:
    """The way out for code that has the names of the files."""
    _saved("ViTForImageClassification", tmp_path / "hf")
    (tmp_path / "keep.toml").write_text("format = 1\nkeep_others = true\n")
    source = open_source(str(tmp_path / "hf"))
    convert(source, str(tmp_path / "out"), "dcp", ConvertOptions(rules=str(tmp_path / "keep.toml")))
    assert open_source(str(tmp_path / "out")).tensors.keys() == source.tensors.keys()


def test_a_base_model_is_filled_from_a_folder_of_a_model_with_a_head(tmp_path: Path) -> None:
    """The live class decides, not the one in config.json; the head is unexpected."""
    whole = _saved("ViTForImageClassification", tmp_path / "hf")
    base = type(whole.vit)(whole.config, add_pooling_layer=False)
    report = load(tmp_path / "hf", base)
    assert set(report.unexpected) == {"classifier.weight", "classifier.bias"} and not report.missing
    values = whole.vit.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in base.state_dict().items())


def test_a_state_with_the_names_of_the_files_keeps_them(tmp_path: Path) -> None:
    """Also if it lacks or has more than the folder: the names in memory would fit worse."""
    _saved("ViTForImageClassification", tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in stored.items()} | {"more": torch.zeros(2)}
    report = load(tmp_path / "hf", state, strict=False)
    assert report.missing == ("more",) and not report.unexpected
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())


def test_a_config_may_have_numbers_that_json_lacks() -> None:
    """transformers writes infinity as an object."""
    config = {"time_step_limit": [0.0, {"__float__": "Infinity"}], "num_hidden_layers": 1, "hidden_size": 32}
    assert "unknown" not in answer({"class": "FalconH1ForCausalLM", "config": config})


def _zeroed(value: torch.Tensor) -> torch.Tensor:
    value[...] = 0
    return value


def _through_a_view(value: torch.Tensor) -> torch.Tensor:
    value.reshape(-1).mul_(2)
    return value


COMPUTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "new tensor": lambda value: value + 1,
    "in place": lambda value: value.add_(1),
    "in place, by an operator": lambda value: operator.iadd(value, 1),
    "in place, through a view": _through_a_view,
    "items": _zeroed,
    "another argument": lambda value: torch.add(value, 1, out=value),
    "other type": lambda value: value.view(torch.int32),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_weight_that_is_computed_is_no_move_of_items(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that computes on the way to files: the result is not taken for its input."""
    import transformers.core_model_loading as loading

    revert = loading.revert_weight_conversion
    monkeypatch.setattr(
        loading,
        "revert_weight_conversion",
        lambda model, state: {key: COMPUTATIONS[name](value) for key, value in revert(model, state).items()},
    )
    model = tiny_model("GPTNeoXForCausalLM")
    assert model is not None
    said = answer({"class": "GPTNeoXForCausalLM", "config": model.config.to_dict()})
    assert "unknown" in said or set(said["in_files"].values()) == {None}
