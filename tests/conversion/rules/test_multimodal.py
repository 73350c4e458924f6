"""Models of text and images: names in files and names in memory, both trees of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.conversion.rules.multimodal_models import FAMILIES, build_multimodal
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import ConversionError


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(tmp_path: Path, family: str) -> None:
    """transformers' file to what its state_dict has, and that with an optimizer's moments to the file again."""
    torch.manual_seed(0)
    model, hf = build_multimodal(family), tmp_path / "hf"
    model.save_pretrained(hf)
    memory = model.state_dict()
    convert(open_source(str(hf)), str(tmp_path / "ours"), "dcp")
    assert open_source(str(tmp_path / "ours")).tensors.keys() == memory.keys()
    state = {
        "model": memory,
        "optimizer": {"state": {name: {"exp_avg": t + 1} for name, t in memory.items()}},
    }
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    convert(open_source(str(tmp_path / "run")), str(tmp_path / "back"), "hf", ConvertOptions(assets=str(hf)))
    ours, theirs = (tmp_path / place / "model.safetensors" for place in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_rules_of_another_model(tmp_path: Path) -> None:
    """Names of the wrong side, and names that no prefix of theirs begins."""
    model = build_multimodal("qwen2-vl")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    own = {"visual.": "model.visual.", "model.": "model.language_model."}
    others = {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."}
    for number, prefixes in enumerate((own, others)):
        rules = tmp_path / f"{number}.toml"
        tables = [f'[[prefix]]\nhf = "{hf}"\nours = "{ours}"\n' for hf, ours in prefixes.items()]
        rules.write_text("format = 1\nkeep_others = true\n" + "".join(tables))
        options = ConvertOptions(rules=str(rules), rules_to="ours")
        with pytest.raises(ConversionError, check=lambda error: str(rules) in error.where):  # noqa: B023
            convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "out"), "dcp", options)
    (tmp_path / "own.toml").write_text('format = 1\n[[prefix]]\nhf = "a."\nours = "b."\n')
    options = ConvertOptions(rules=str(tmp_path / "own.toml"))
    with pytest.raises(ConversionError, match="keep_others"):
        convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "out"), "dcp", options)
