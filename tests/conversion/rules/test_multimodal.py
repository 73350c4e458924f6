"""Models of text and images: rules between names in files and names in memory, both trees of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.conversion.rules.multimodal_models import FAMILIES, build_multimodal
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion.convert import ConvertOptions, convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError

RULES = dict.fromkeys(("gemma3", "mistral3"), "transformers-gemma3") | dict.fromkeys(
    ("qwen2-vl", "qwen2.5-vl"), "transformers-qwen2-vl"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(tmp_path: Path, family: str) -> None:
    """transformers' file to what its state_dict holds, and that with an optimizer's moments to the file again."""
    torch.manual_seed(0)
    model, rules = build_multimodal(family), RULES.get(family)
    hf, memory = tmp_path / "hf", model.state_dict()
    model.save_pretrained(hf)
    stored = load_file(hf / "model.safetensors")
    assert (stored.keys() == memory.keys()) == (rules is None)
    convert(open_source(str(hf)), str(tmp_path / "ours"), "dcp", ConvertOptions(rules=rules))
    found = open_source(str(tmp_path / "ours"))
    assert found.tensors.keys() == memory.keys()
    state = {
        "model": memory,
        "optimizer": {"state": {name: {"exp_avg": t + 1} for name, t in memory.items()}},
    }
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    options = ConvertOptions(rules=rules, assets=str(hf))
    convert(open_source(str(tmp_path / "run")), str(tmp_path / "back"), "hf", options)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() >= stored.keys() and back.keys() - stored.keys() <= {"language_model.lm_head.weight"}
    assert all(same_bytes(back[name], tensor) for name, tensor in stored.items())
    convert(
        open_source(str(tmp_path / "run")),
        str(tmp_path / "all"),
        "dcp",
        ConvertOptions(rules=rules, rules_to="hf"),
    )
    assert {f"optimizer.state.{name}.exp_avg" for name in stored} <= open_source(
        str(tmp_path / "all")
    ).tensors.keys()


def test_rules_of_another_model(tmp_path: Path) -> None:
    """Names of the wrong side, and names that no prefix of theirs begins."""
    model = build_multimodal("qwen2-vl")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    for rules, to in (("transformers-qwen2-vl", "ours"), ("transformers-gemma3", "ours")):
        options = ConvertOptions(rules=rules, rules_to=to)
        with pytest.raises(ConversionError, check=lambda error: rules in error.where):  # noqa: B023
            convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "out"), "dcp", options)
    (tmp_path / "own.toml").write_text('format = 1\n[[prefix]]\nhf = "a."\nours = "b."\n')
    options = ConvertOptions(rules=str(tmp_path / "own.toml"))
    with pytest.raises(ConversionError, match="keep_others"):
        convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "out"), "dcp", options)
