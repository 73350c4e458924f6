"""Parameter shapes of one decoder layer of well-known models, for planning without weights.

Shapes follow the published configurations (hidden size, intermediate size, heads, experts) and the order
in which the Hugging Face implementations define the parameters. Mixture-of-experts models come twice: with
one matrix per expert and projection, and grouped, with all experts of a projection stacked (E, m, k).

    name                          layers   grouped as
    Llama-3-8B, -70B, -405B       32, 80, 126
    Qwen2.5-32B                   64
    Qwen3-30B-A3B                 48       gate_up (E, 2 * inter, hidden), down (E, hidden, inter)
    gpt-oss-120B                  36       gate_up (E, hidden, 2 * inter), down (E, inter, hidden)
    DeepSeek-V3                   58 MoE   w1, w3 (E, inter, hidden), w2 (E, hidden, inter)
    Llama-4-Maverick grouped      24 MoE   gate_up (E, hidden, 2 * inter), down (E, inter, hidden)
"""

from __future__ import annotations

from collections.abc import Mapping

Shapes = dict[str, tuple[int, ...]]


def _attention(hidden: int, query: int, key_value: int, *, bias: str = "") -> Shapes:
    shapes: Shapes = {}
    sizes = {"q": (query, hidden), "k": (key_value, hidden), "v": (key_value, hidden), "o": (hidden, query)}
    for name, shape in sizes.items():
        shapes[f"self_attn.{name}_proj.weight"] = shape
        if name in bias:
            shapes[f"self_attn.{name}_proj.bias"] = shape[:1]
    return shapes


def _norms(hidden: int) -> Shapes:
    return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _mlp(prefix: str, hidden: int, inter: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inter, hidden),
        f"{prefix}.up_proj.weight": (inter, hidden),
        f"{prefix}.down_proj.weight": (hidden, inter),
    }


def _experts(prefix: str, count: int, hidden: int, inter: int) -> Shapes:
    shapes: Shapes = {}
    for expert in range(count):
        shapes |= _mlp(f"{prefix}.{expert}", hidden, inter)
    return shapes


def _dense(hidden: int, inter: int, key_value: int, *, bias: str = "") -> Shapes:
    attention = _attention(hidden, hidden, key_value, bias=bias)
    return attention | _mlp("mlp", hidden, inter) | _norms(hidden)


def _qwen3_moe(experts: Shapes) -> Shapes:
    head_norms = {"self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,)}
    router = {"mlp.gate.weight": (128, 2048)}
    return _attention(2048, 4096, 512) | head_norms | router | experts | _norms(2048)


def _gpt_oss() -> Shapes:
    attention = {"self_attn.sinks": (64,)} | _attention(2880, 4096, 512, bias="qkvo")
    return {
        "input_layernorm.weight": (2880,),
        **attention,
        "post_attention_layernorm.weight": (2880,),
        "mlp.router.weight": (128, 2880),
        "mlp.router.bias": (128,),
        "mlp.experts.gate_up_proj": (128, 2880, 5760),
        "mlp.experts.gate_up_proj_bias": (128, 5760),
        "mlp.experts.down_proj": (128, 2880, 2880),
        "mlp.experts.down_proj_bias": (128, 2880),
    }


def _deepseek_v3(experts: Shapes) -> Shapes:
    attention: Shapes = {
        "self_attn.q_a_proj.weight": (1536, 7168),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (128 * 192, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (128 * 256, 512),
        "self_attn.o_proj.weight": (7168, 128 * 128),
    }
    router: Shapes = {"mlp.gate.weight": (256, 7168), "mlp.gate.e_score_correction_bias": (256,)}
    shared = _mlp("mlp.shared_experts", 7168, 2048)
    return attention | experts | router | shared | _norms(7168)


def _llama4() -> Shapes:
    return {
        **_attention(5120, 5120, 1024),
        "feed_forward.experts.gate_up_proj": (128, 5120, 16384),
        "feed_forward.experts.down_proj": (128, 8192, 5120),
        "feed_forward.router.weight": (128, 5120),
        **_mlp("feed_forward.shared_expert", 5120, 8192),
        **_norms(5120),
    }


LAYERS: Mapping[str, Shapes] = {
    "Llama-3-8B": _dense(4096, 14336, 1024),
    "Llama-3-70B": _dense(8192, 28672, 1024),
    "Llama-3-405B": _dense(16384, 53248, 1024),
    "Qwen2.5-32B": _dense(5120, 27648, 1024, bias="qkv"),
    "Qwen3-30B-A3B": _qwen3_moe(_experts("mlp.experts", 128, 2048, 768)),
    "Qwen3-30B-A3B grouped": _qwen3_moe(
        {"mlp.experts.gate_up_proj": (128, 1536, 2048), "mlp.experts.down_proj": (128, 2048, 768)}
    ),
    "gpt-oss-120B": _gpt_oss(),
    "DeepSeek-V3": _deepseek_v3(_experts("mlp.experts", 256, 7168, 2048)),
    "DeepSeek-V3 grouped": _deepseek_v3(
        {
            "mlp.experts.w1": (256, 2048, 7168),
            "mlp.experts.w2": (256, 7168, 2048),
            "mlp.experts.w3": (256, 2048, 7168),
        }
    ),
    "Llama-4-Maverick grouped": _llama4(),
}
"""Shapes of one decoder layer by model name."""


def layer_shapes(model: str) -> Shapes:
    """Parameter name to shape of one decoder layer of a model in `LAYERS`."""
    return dict(LAYERS[model])
