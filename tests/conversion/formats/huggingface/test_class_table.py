"""The shipped table says what the classes of the installed transformers say, and knows its limits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from tools.class_table import CLASSES, COMMON, made, sizes
from vescale_fsdp.conversion.formats.huggingface import model_class
from vescale_fsdp.conversion.formats.huggingface.model_class import known_class

ROWS = json.loads(Path(model_class.__file__).with_name("class_table.json").read_text())
KNOWN = sorted(name for name in ROWS if name in CLASSES)


def _settings(class_name: str, seed: int) -> dict[str, Any]:
    """Sizes and options at random; some sizes are left to the class, as absent or null."""
    rng, row = random.Random(seed), ROWS[class_name]
    found = sizes(getattr(transformers, class_name).config_class().to_dict(), seed)
    found |= {flag: rng.random() < 0.5 for flag in row["flags"]} | row.get("fixed", {})
    for field, rules in row["fields"].items():
        if (
            field in ("num_key_value_heads", "head_dim", "n_inner", "vocab_size")
            and rules
            and rng.random() < 0.5
        ):
            how = rng.choice(sorted(rules))
            found.pop(field)
            if how == "null":
                found[field] = None
    return found


def test_the_table_holds_the_common_classes() -> None:
    """Nobody who converts one of these waits for transformers."""
    common = [
        "Llama",
        "Mistral",
        "Mixtral",
        "Qwen2",
        "Qwen3",
        "Qwen3Moe",
        "Gemma2",
        "Gemma3",
        "Phi3",
        "GptOss",
    ]
    assert {f"{family}ForCausalLM" for family in common} | {"GPT2LMHeadModel"} <= set(KNOWN)
    assert len(KNOWN) == len(ROWS) - 1  # and the version


@pytest.mark.parametrize(
    "class_name",
    [pytest.param(name, marks=[] if name in COMMON else [pytest.mark.part("formats")]) for name in KNOWN],
)
def test_random_settings(class_name: str) -> None:
    """Names, shapes and ties, for random sizes and options, with sizes that config.json leaves out or has as null."""
    tried = 0
    for seed in range(100, 104):
        settings = _settings(class_name, seed)
        try:
            _, forms, ties = made(class_name, settings)
        except Exception:  # noqa: BLE001  e.g. 32 heads of the class for 3 of ours: such a folder loads nowhere
            continue
        tried += 1
        known = known_class(settings, class_name)
        assert known is not None, settings
        assert list(known.forms) == forms and known.ties == ties, settings
        assert known.problems(forms[-1]) == ()
        for form in forms:  # as a folder has it, without the tied names
            assert known.problems({name: shape for name, shape in form.items() if name not in ties}) == ()
    assert tried > 1


def test_a_row_has_no_answer_beyond_its_limits() -> None:
    """Fields that change parameters in ways that a row does not describe, sizes that are none, names without end."""
    config = sizes(transformers.Qwen3MoeConfig().to_dict(), 1)
    assert known_class(config, "Qwen3MoeForCausalLM") is not None
    for odd in (
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"hidden_size": "wide"},
        {"attention_bias": None},
    ):
        assert known_class({**config, **odd}, "Qwen3MoeForCausalLM") is None
    for odd in ({"num_hidden_layers": 10**12}, {"vocab_size": -1}, {"vocab_size": True}, {"vocab_size": 2.0}):
        assert known_class({**config, **odd}, "Qwen3MoeForCausalLM") is None
    assert known_class(config, "Qwen3MoeForTokenClassification") is None
    divided = sizes(
        transformers.PersimmonConfig().to_dict(), 1
    )  # some sizes are divided by the number of heads
    assert known_class(divided, "PersimmonForCausalLM") is not None
    assert known_class({**divided, "num_attention_heads": 0}, "PersimmonForCausalLM") is None
    assert known_class(config, "transformers") is None  # a key of the table that is no class


def test_names_under_which_configs_say_a_size() -> None:
    """Qwen3-MoE's files say `num_experts`, its class `num_local_experts`."""
    config = sizes(transformers.Qwen3MoeConfig().to_dict(), 1)
    other = {**config, "num_experts": config["num_local_experts"]}
    del other["num_local_experts"]
    assert known_class(other, "Qwen3MoeForCausalLM") == known_class(config, "Qwen3MoeForCausalLM")
