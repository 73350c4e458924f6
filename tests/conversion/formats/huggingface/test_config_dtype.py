"""An exported config.json has the dtype of the exported weights, as `save_pretrained` writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.support.command import vescale_convert
from tests.support.tiny_families import build
from vescale_fsdp.checkpoint import save
from vescale_fsdp.conversion import ConvertOptions, HuggingFace, convert, open_source

Export = Callable[[Any, Path, Path, "str | None"], None]


def _live(state: Any, assets: Path, out: Path, dtype: str | None) -> None:
    save(out, state, format=HuggingFace(assets=assets, dtype=dtype or ()))


def _converted(state: Any, assets: Path, out: Path, dtype: str | None) -> None:
    save(out.with_name("native"), state)
    options = ConvertOptions(assets=str(assets), dtype=[dtype] if dtype else ())
    convert(open_source(str(out.with_name("native"))), out, "hf", options)


def _command(state: Any, assets: Path, out: Path, dtype: str | None) -> None:
    save(out.with_name("native"), state)
    args = ["to-hf", str(out.with_name("native")), str(out), "--assets", str(assets)]
    assert vescale_convert(*args, *(["--dtype", dtype] if dtype else [])).exit_code == 0


EXPORTS = [_live, _converted, _command]


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _assets(folder: Path, model: PreTrainedModel, key: str) -> Path:
    """The folder of the released model in bf16, whose config has the key of its transformers version in all parts."""
    model.save_pretrained(folder)
    type(model).from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(
        folder
    )  # names the dtype in parts, too

    def older(config: dict[str, Any]) -> dict[str, Any]:
        own = {name: older(part) if isinstance(part, dict) else part for name, part in config.items()}
        return {key if name == "dtype" else name: part for name, part in own.items()}

    (folder / "config.json").write_text(json.dumps(older(_config(folder))))
    return folder


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_trained_in_float32_from_a_base_in_bfloat16(
    tmp_path: Path, export: Export, key: str, dtype: str | None
) -> None:
    """The folder loads with the dtype and the values of the weights, as one of `save_pretrained` does."""
    torch.manual_seed(0)
    assets = _assets(tmp_path / "base", build("LlamaForCausalLM"), key)
    model = AutoModelForCausalLM.from_pretrained(assets, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.01)
    export(model, assets, tmp_path / "out", dtype)

    model.to(getattr(torch, dtype or "float32")).save_pretrained(tmp_path / "theirs")
    assert _config(tmp_path / "out")[key] == _config(tmp_path / "theirs")["dtype"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {getattr(torch, dtype or "float32")}
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_parts_of_a_model_too(tmp_path: Path, export: Export, key: str) -> None:
    """A model of images and text, whose config has a dtype for each part: every dtype is the one of the weights."""
    assets = _assets(tmp_path / "base", build("LlavaForConditionalGeneration"), key)
    model = AutoModelForImageTextToText.from_pretrained(assets, dtype=torch.float32)
    export(model, assets, tmp_path / "out", None)

    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = _config(tmp_path / "out"), _config(tmp_path / "theirs")
    for part in ("text_config", "vision_config"):
        assert ours[part][key] == theirs[part]["dtype"] == "float32", part
    assert ours[key] == theirs["dtype"] == "float32"


@pytest.mark.parametrize("export", EXPORTS)
def test_weights_of_two_dtypes(tmp_path: Path, export: Export) -> None:
    """The dtype is that of most items; a part keeps its own if it is stored, and words that are no dtypes are kept."""
    config = {
        "dtype": "float16",
        "text_config": {"dtype": "bfloat16", "inner": {"torch_dtype": "float16"}},
        "vocabulary_map": {"dtype": 7, "torch_dtype": "token"},
    }
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    export(
        {"big": torch.ones(5), "a": torch.ones(2).bfloat16(), "b": torch.ones(2).bfloat16()},
        tmp_path / "base",
        tmp_path / "out",
        None,
    )
    assert _config(tmp_path / "out") == {
        "dtype": "float32",
        "text_config": {"dtype": "bfloat16", "inner": {"torch_dtype": "float32"}},
        "vocabulary_map": config["vocabulary_map"],
    }


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("config", [{"dtype": "float32", "x": 1}, {"x": 1}, {"_class_name": "UNet", "x": 1}])
def test_a_config_that_is_right_keeps_its_bytes(
    tmp_path: Path, export: Export, config: dict[str, Any]
) -> None:
    """Also one without a dtype, as those of diffusers are: loaders take the dtype of the weights."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config, indent=7))
    export({"w": torch.ones(4)}, tmp_path / "base", tmp_path / "out", None)
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "base/config.json").read_bytes()
    assert load_file(next((tmp_path / "out").glob("*.safetensors")))["w"].dtype == torch.float32
