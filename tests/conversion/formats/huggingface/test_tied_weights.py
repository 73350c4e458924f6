"""Tied models of transformers as transformers saves them: every name is there in every format that can hold a tie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel

from tests.support.rule_cases import convert_in_parts
from tests.support.tiny_families import tiny_model
from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import diff, open_source
from vescale_fsdp.conversion.formats.huggingface.tied_weights import (
    _aliases_of,
    declared_ties,
    tied_aliases_of,
)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
SEQ2SEQ |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {"head_dim": 8},
    "Gemma3ForCausalLM": {"head_dim": 8},
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "FalconForCausalLM": {},
    "MambaForCausalLM": {"state_size": 4},
    "ModernBertForMaskedLM": {"cls_token_id": 1, "sep_token_id": 2},
    "WhisperForConditionalGeneration": {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8},
    "BartForConditionalGeneration": SEQ2SEQ,
    "BloomForCausalLM": {"n_layer": 1, "n_head": 2},
    "BertForMaskedLM": {},
}


def _model(family: str) -> PreTrainedModel:
    model_class = getattr(transformers, family)
    torch.manual_seed(1)
    config = model_class.config_class(**{**SIZES, **FAMILIES[family]})
    return model_class(config)


def _stored(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_name_is_missing(family: str, tmp_path: Path) -> None:
    """The folder lacks names that the model has. `load`, stock `dcp.load` and torch.load find them;
    what goes back to Hugging Face is what came."""
    model = _model(family)
    model.save_pretrained(tmp_path / "hf")
    wanted = {name: value.detach() for name, value in model.state_dict().items()}
    lacking = wanted.keys() - _stored(tmp_path / "hf")
    assert lacking

    for kind in ("native", "dcp", "torch", "zarr"):
        out = tmp_path / (f"{kind}.pt" if kind == "torch" else kind)
        convert_in_parts(tmp_path / "hf", out, kind)
        state = {name: torch.zeros_like(value) for name, value in wanted.items()}
        if kind == "dcp":
            dcp.load(state, checkpoint_id=out, no_dist=True)
        elif kind == "torch":
            state = torch.load(out, weights_only=True)
            assert all(
                any(state[n].data_ptr() == state[m].data_ptr() for m in state.keys() - {n}) for n in lacking
            )
        else:
            load(out, state)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in state.items())
        assert diff(open_source(str(out)), open_source(str(tmp_path / "hf")))[0] == ()
        sizes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) or out.stat().st_size
        assert sizes < sum(value.nbytes for value in wanted.values()) + 200_000  # the bytes lie there once

    apart = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load(tmp_path / "hf", apart)
    assert all(torch.equal(value, wanted[name]) for name, value in apart.items())
    again = _model(family)
    for param in again.parameters():
        param.data.zero_()
    load(tmp_path / "native", again)
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())

    convert_in_parts(tmp_path / "native", tmp_path / "back", "hf", assets=str(tmp_path / "hf"))
    assert _stored(tmp_path / "back") == _stored(tmp_path / "hf")


@pytest.mark.parametrize(
    ("family", "head", "embedding"),
    [
        (
            "Gemma3ForConditionalGeneration",
            "language_model.lm_head.weight",
            "language_model.model.embed_tokens.weight",
        ),
        ("Qwen2VLForConditionalGeneration", "lm_head.weight", "model.embed_tokens.weight"),
        ("T5Gemma2ForConditionalGeneration", None, None),
    ],
)
def test_files_with_other_names_than_the_model(
    family: str, head: str | None, embedding: str | None, tmp_path: Path
) -> None:
    """Models of text and images have the names of before version 5 in files: what is tied is found under these."""
    model = tiny_model(family, tie_word_embeddings=True)
    assert model is not None
    model.save_pretrained(tmp_path / "hf")
    source = open_source(str(tmp_path / "hf"))
    twins, _ = tied_aliases_of(source, source.tensors)
    assert twins and not twins.keys() & source.tensors.keys()
    assert head is None or twins == {head: embedding}
    convert_in_parts(tmp_path / "hf", tmp_path / "native", "native")
    native = open_source(str(tmp_path / "native"))
    assert native.tensors.keys() == model.state_dict().keys()
    assert len(native.tensors) == len(source.tensors) + len(native.ties) and native.ties
    assert diff(native, source) == ((), len(native.tensors))
    convert_in_parts(tmp_path / "native", tmp_path / "back", "hf", assets=str(tmp_path / "hf"))
    assert _stored(tmp_path / "back") == _stored(tmp_path / "hf")


def test_parts_that_tie_nothing_do_not_speak_for_the_whole() -> None:
    """Of a model whose text part says no, and which says nothing itself, the class is asked."""
    model = tiny_model("Gemma3ForConditionalGeneration")
    assert model is not None
    config = model.config.to_diff_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    config.pop("tie_word_embeddings", None)
    assert "lm_head.weight" in declared_ties(config)[0]


def test_a_config_that_ties_nothing_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is slow to import: not for settings that say no, nor for those that name no class."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)  # an import would fail
    assert declared_ties({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}) == ({}, ())
    assert declared_ties({}) == ({}, ())
    known = ["model.embed_tokens.weight"]
    tied = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    assert declared_ties(tied, known) == ({"lm_head.weight": known[0]}, ())


def test_settings_that_make_no_model(tmp_path: Path) -> None:
    """What transformers cannot answer is a warning, not an end."""
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "hidden_size": "wide"}
    model = _model("LlamaForCausalLM")
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    report = convert_in_parts(tmp_path / "hf", tmp_path / "native", "native")
    assert "LlamaForCausalLM" in report.warnings[0]


@pytest.mark.parametrize(
    ("ties", "absent"),
    [
        ({"a": "a"}, {}),
        ({"a": "b", "b": "a"}, {"b": "a"}),
        ({"b": "c", "c": "a", "a": "c"}, {"b": "a", "c": "a"}),
        ({"b": "c", "c": "a"}, {"b": "a", "c": "a"}),
    ],
)
def test_names_tied_to_each_other_are_one_tensor(ties: dict[str, str], absent: dict[str, str]) -> None:
    """A cycle of ties has no last name, and ends the search all the same."""
    assert _aliases_of(ties, ["a"]) == absent
