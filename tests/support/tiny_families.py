"""Any class of transformers, small: its default settings with every size cut down by what it is called.

Most families build so; of those whose settings depend on each other in ways of their own, `tiny_model` gives None.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
_TOKEN = re.compile(r".*(_id|token_index|token_ids)")
_LARGEST = {  # sizes by their names; the first that fits
    r"(.*_)?vocab_size|num_embeddings": 64,
    r"(original_)?max_.*positions?(_embeddings)?|n_positions|n_ctx|max_.*length|.*window(_size)?|local_attention": 32,
    r"n_heads?|num_.*heads|(.*_)?attention_heads|attn_heads": 4,
    r"n_kv_heads?|num_.*kv.*heads|multi_query_group_num|n_head_kv": 2,
    r"(.*_)?head_(dim|size)|d_kv|kv_channels|d_head|mamba_d_head": 8,
    r"(.*_)?hidden_(size|dim)|d_model|n_embd|dim|embedding_size|.*embed_dim|emb_dim|model_dim|projection_dim|width": 32,
    r"(.*_)?intermediate_size|.*ffn_(dim|hidden_size)|d_ff|n_inner|d_inner|mlp_dim": 64,
    r"num_(hidden_)?layers|n_layers?|.*_layers|depth|num_.*blocks": 2,
    r"(moe_)?(num|n)_.*experts": 4,
    r".*(experts_per_tok|topk|top_k).*|num_selected_experts": 2,
    r".*lora_rank": 16,
    r"image_size|img_size": 32,
    r"patch_size": 16,
    r"num_mel_bins": 8,
    r"(ssm_)?state_size|(mamba_)?d_state|(mamba_)?dt_rank|time_step_rank": 4,
    r"(mamba_)?chunk_size.*": 8,
}
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_type_list")
_MOST_NUMEL = 3_000_000


def family_classes() -> list[str]:
    """Every class that writes or completes text."""
    found: dict[str, None] = {}
    for mapping in _MAPPINGS:
        for classes in getattr(modeling_auto, mapping).values():
            found |= dict.fromkeys([classes] if isinstance(classes, str) else classes)
    return list(found)


def tiny_model(class_name: str, **settings: Any) -> PreTrainedModel | None:
    """A model on the CPU with random weights; None if its default settings cannot be cut down like this."""
    model_class = getattr(transformers, class_name)
    torch.manual_seed(1)
    try:
        config = model_class.config_class.from_dict(
            {**_small(model_class.config_class().to_dict()), **settings}
        )
        with torch.device("meta"):
            numel = sum(param.numel() for param in model_class(config).parameters())
        return model_class(config) if numel <= _MOST_NUMEL else None
    except Exception:  # noqa: BLE001  of whatever kind the model's code raises
        return None


def _small(settings: dict[str, Any]) -> dict[str, Any]:
    layers = settings.get("num_hidden_layers")
    return {key: _cut(key, value, layers) for key, value in settings.items()}


def _cut(key: str, value: Any, layers: Any) -> Any:
    if isinstance(value, dict):
        return _small(value)
    if isinstance(value, list):
        return value[:2] if key in _PER_LAYER or (len(value) > 2 and len(value) == layers) else value
    if type(value) is not int or value <= 0:
        return value
    if _TOKEN.fullmatch(key):
        return min(value, 3)
    return min([value, *(most for name, most in _LARGEST.items() if re.fullmatch(name, key))][:2])
