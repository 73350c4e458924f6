"""Small models of text and images, as transformers builds them."""

from __future__ import annotations

from typing import Any

import transformers

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MOE = {"num_experts": 3, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_QWEN_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_LLAMA4 = {"num_local_experts": 3, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}
_LLAMA4_VISION = {
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "image_size": 28,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {}, {**_SIGLIP, "image_size": 28, "patch_size": 14}, {"mm_tokens_per_image": 4}),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral"},
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 16},
        {},
    ),
    "qwen2-vl": ("Qwen2VL", {"rope_parameters": _MROPE}, _QWEN_VISION, _IDS),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _MROPE},
        {**_QWEN_VISION, "intermediate_size": 48},
        _IDS,
    ),
    "qwen3-vl": ("Qwen3VL", {}, {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, _IDS),
    "qwen3-vl-moe": ("Qwen3VLMoe", _MOE, {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, _IDS),
    "llama4": ("Llama4", _LLAMA4, {**_SIGLIP, **_LLAMA4_VISION}, {}),
}


def build_multimodal(family: str) -> Any:
    """A model with both trees, random weights."""
    stem, text, vision, more = FAMILIES[family]
    config_class = getattr(transformers, f"{stem}Config")
    config = config_class(text_config={**_TEXT, **text}, vision_config=vision, **more)
    return getattr(transformers, f"{stem}ForConditionalGeneration")(config)
