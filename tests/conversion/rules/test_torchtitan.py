"""The shipped rules between transformers' tensors and torchtitan's: every name and shape of both, and what rotary
embeddings make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.conversion.rules.torchtitan_names import NAMES, expand
from tests.support.array_views import ArrayView, without_values
from tests.support.rule_cases import GROUPED_EXPERTS
from vescale_fsdp.conversion.rules.apply_to_tensors import apply_rules
from vescale_fsdp.conversion.rules.rule_file import load_rules, shipped_rules
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.geometry import Box

transformers = pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
}
QWEN = {**LLAMA, "intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128}
DEEPSEEK = {**LLAMA, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8}
DEEPSEEK |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512}
DEEPSEEK |= {
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
}
GPT_OSS = {**LLAMA, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
GPT_OSS |= {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "layer_types": None}
# rules without their release -> transformers' model and config that have the sizes of torchtitan's debug model
SAME_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "qwen": ("Qwen3", QWEN),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "moe_intermediate_size": 768, "num_experts": 64}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "gpt-oss": ("GptOss", GPT_OSS),
}
TORCHTITAN = [name for name in shipped_rules() if name.startswith("torchtitan-")]


def _views(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ArrayView]:
    return {name: without_values(name, shape) for name, shape in shapes.items()}


def _shapes(views: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: view.info.shape for name, view in views.items()}


def _hugging_face(rules: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Names and shapes in the files that transformers writes, and the config."""
    model_name, settings = SAME_SIZES[rules.removeprefix("torchtitan-").removeprefix("0.2-")]
    config = getattr(transformers, f"{model_name}Config")(**settings, tie_word_embeddings=False)
    with torch.device("meta"):
        model = getattr(transformers, f"{model_name}ForCausalLM")(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    plain = config.to_dict()
    if any(name.endswith("experts.gate_up_proj") for name in shapes) and model_name != "GptOss":
        files = apply_rules(load_rules(GROUPED_EXPERTS), _views(shapes), plain, to_hf=True)
        return _shapes(files.views), plain
    return shapes, plain


@pytest.mark.parametrize("rules", TORCHTITAN)
def test_names_and_shapes_are_those_of_both_libraries(rules: str) -> None:
    """All of transformers' tensors make all of torchtitan's, shape by shape, and the other way round."""
    theirs, config = _hugging_face(rules)
    titan = expand(NAMES[rules], [0, 1])
    made = apply_rules(load_rules(rules), _views(theirs), config, to_hf=False)
    assert _shapes(made.views) == titan and len(titan) > 20
    back = apply_rules(load_rules(rules), _views(titan), config, to_hf=True)
    assert _shapes(back.views) == theirs
    only_titan = {name for name in titan if "expert_bias" in name and "deepseek" not in rules}
    assert set(back.dropped) == only_titan


def test_every_shipped_set_for_torchtitan_is_checked() -> None:
    """A new rule file needs the names it was written against."""
    assert sorted(NAMES) == TORCHTITAN and len(TORCHTITAN) == 10


def test_the_other_release_is_refused_by_name() -> None:
    """Rules for release 0.3 do not silently skip tensors of 0.2: the error names them and the other sets."""
    _, config = _hugging_face("torchtitan-llama")
    old = _views(expand(NAMES["torchtitan-0.2-llama"], [0, 1]))
    with pytest.raises(ConversionError, match=r"wq(.|\n)*torchtitan-0\.2-llama"):
        apply_rules(load_rules("torchtitan-llama"), old, config, to_hf=True)


@pytest.mark.parametrize("model_name", ["Mistral", "Qwen2"])
def test_models_that_share_rules(model_name: str) -> None:
    """Mistral has Llama's names, Qwen2 Qwen3's and biases: there and back, nothing left over."""
    rules = load_rules("torchtitan-llama" if model_name == "Mistral" else "torchtitan-qwen")
    config = getattr(transformers, f"{model_name}Config")(**QWEN)
    with torch.device("meta"):
        model = getattr(transformers, f"{model_name}ForCausalLM")(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    made = apply_rules(rules, _views(shapes), config.to_dict(), to_hf=False)
    assert len(made.views) == len(shapes) and not any("self_attn" in name for name in made.views)
    back = apply_rules(rules, made.views, config.to_dict(), to_hf=True)
    assert _shapes(back.views) == shapes


def _read(view: Any) -> torch.Tensor:
    out = np.empty(view.info.shape, dtype=np.uint32)
    view.read_into(Box((0,) * out.ndim, out.shape), out)
    return torch.from_numpy(out.view(np.float32))


def _halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as transformers does it: dim i turns with dim i + d/2."""
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def _pairs(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as torchtitan's llama3 does it: dims 2i and 2i + 1 are one complex number."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def test_attention_agrees_after_the_rows_have_moved() -> None:
    """Scores from q and k rotated in halves equal those from our q and k rotated in pairs; unmoved rows do not."""
    torch.manual_seed(0)
    heads, kv_heads, head, hidden, tokens = 6, 2, 8, 24, 5
    q, k = torch.randn(heads * head, hidden), torch.randn(kv_heads * head, hidden)
    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    names = {"q": "model.layers.0.self_attn.q_proj.weight", "k": "model.layers.0.self_attn.k_proj.weight"}
    views = {names["q"]: ArrayView("q", q.numpy()), names["k"]: ArrayView("k", k.numpy())}
    made = apply_rules(load_rules("torchtitan-llama"), views, config, to_hf=False, partial=True).views
    our_q, our_k = (_read(made[f"layers.0.attention.qkv_linear.w{x}.weight"]) for x in "qk")
    x = torch.randn(tokens, hidden)
    angles = torch.arange(tokens)[:, None] * 10000 ** (-torch.arange(head // 2) / (head // 2))

    def scores(q: torch.Tensor, k: torch.Tensor, rotate: Any) -> torch.Tensor:
        queries = rotate((x @ q.T).unflatten(-1, (heads, head)).transpose(0, 1), angles)
        keys = rotate((x @ k.T).unflatten(-1, (kv_heads, head)).transpose(0, 1), angles)
        return queries @ keys.repeat_interleave(heads // kv_heads, 0).transpose(1, 2)

    expected = scores(q, k, _halves)
    torch.testing.assert_close(scores(our_q, our_k, _pairs), expected)
    assert (scores(q, k, _pairs) - expected).abs().max() > 1  # the negative control
