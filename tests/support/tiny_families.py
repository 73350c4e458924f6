"""Any family of transformers, small: the default settings of a class with every size cut down by what it is called.

Most families build so. `_SETTINGS` has what the others need, whose settings depend on each other in ways of their own.
`tiny_model` gives None for a class that cannot be built small; `build` raises what the class raises.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
# Of a family's classes, the first in these mappings is built, then any with a head, then the model without one.
_FIRST = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", _MAPPINGS[4], *_MAPPINGS[:4])
_LAST = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_BACKBONE_MAPPING_NAMES",
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
    r"num_feat_extract_layers": 13,  # counts the items of lists
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
_SIZES = re.compile(
    r".*(hidden_sizes|hidden_dims|embed_dims?|channels|widths|planes|dims|depths)(_.*)?"
)  # of lists
# Names of stages, which the class derives from its number of layers.
_DERIVED = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
# Packages that transformers asks for, and why the tests do without them.
_MISSING = {
    "timm": "timm's models, and timm needs a torchvision built for the same torch",
    "natten": "functions that natten no longer has",
    "detectron2": "detectron2, which is only built from source",
    "torchaudio": "torchaudio, whose wheels need the same build of torch, for the CPU or for CUDA",
}
_UNBUILT = {
    "Gemma4AssistantForCausalLM": "its config lets no layer store keys and values, which its text model requires",
    "VoxtralRealtimeTextModel": "it names this class, but does not export it",
}
_MOST_BYTES = 50 * 10**6
_MOST_NUMEL = 3_000_000  # of `tiny_model`


def family_classes() -> list[str]:
    """Every class that writes or completes text."""
    found: dict[str, None] = {}
    for mapping in _MAPPINGS:
        for classes in getattr(modeling_auto, mapping).values():
            found |= dict.fromkeys([classes] if isinstance(classes, str) else classes)
    return list(found)


@cache
def families() -> dict[str, str | None]:
    """Every model type of transformers and the class that stands for it; None if no model has such a config."""
    others = sorted(name for name in vars(modeling_auto) if name.endswith("MAPPING_NAMES"))
    order = [*_FIRST, *(name for name in others if name not in {*_FIRST, *_LAST}), *_LAST]
    mappings = [getattr(modeling_auto, name) for name in order if name != "CONFIG_MAPPING_NAMES"]
    found: dict[str, str | None] = {}
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        classes = next((mapping[kind] for mapping in mappings if kind in mapping), None)
        found[kind] = classes if isinstance(classes, str) or classes is None else classes[0]
        if found[kind] is None:
            found[kind] = _class_of_config(kind)
    return found


def _class_of_config(kind: str) -> str | None:
    """The largest class of a model type that no auto class builds."""
    module = configuration_auto.model_type_to_module_name(kind)
    folder = importlib.import_module(f"transformers.models.{module}")
    wanted = configuration_auto.CONFIG_MAPPING_NAMES[kind]
    found = []
    for name in dir(folder):
        try:
            each = getattr(folder, name)
        except ImportError:
            continue  # what it needs is not installed
        is_model = isinstance(each, type) and issubclass(each, PreTrainedModel)
        is_whole = is_model and not name.endswith("PreTrainedModel") and hasattr(transformers, name)
        if is_whole and getattr(each.config_class, "__name__", "") == wanted:
            found.append(name)
    return max(found, key=lambda name: ("For" in name, len(name)), default=None)


def build(class_name: str, **settings: Any) -> PreTrainedModel:
    """A model on the CPU with random weights of at most 50 MB; raises what the class raises for its settings."""
    model_class = getattr(transformers, class_name)
    config = small_config(model_class, **settings)
    with torch.device("meta"):
        nbytes = sum(param.nbytes for param in model_class(config).parameters())
    if nbytes > _MOST_BYTES:
        raise ValueError(f"{nbytes / 1e6:.0f} MB")
    torch.manual_seed(1)
    return model_class(small_config(model_class, **settings))


def small_config(model_class: Any, **settings: Any) -> Any:
    """The settings of `build`."""
    config_class = model_class.config_class
    own = _SETTINGS.get(config_class.model_type, {})
    return config_class.from_dict({**_with(_small(config_class().to_dict()), own), **settings})


def why_not_built(class_name: str, error: Exception) -> str:
    """A sentence for a class that `build` raised the error for: whether transformers or `_SETTINGS` lacks something."""
    if isinstance(error, ImportError):
        missing = (reason for package, reason in _MISSING.items() if re.search(rf"\b{package}\b", str(error)))
        return f"needs {next(missing, _one_line(error))}"
    if class_name in _UNBUILT:
        return f"transformers does not build it: {_UNBUILT[class_name]}"
    try:
        model_class = getattr(transformers, class_name)
        with torch.device("meta"):
            model_class(model_class.config_class())
    except Exception as own:  # noqa: BLE001  of whatever kind the model's code raises
        return f"transformers does not build it: {_one_line(own)}"
    return f"cannot be built small: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ..")


def tiny_model(class_name: str, **settings: Any) -> PreTrainedModel | None:
    """A model on the CPU with random weights; None if its default settings cannot be cut down like this."""
    model_class = getattr(transformers, class_name)
    torch.manual_seed(1)
    try:
        config = small_config(model_class, **settings)
        with torch.device("meta"):
            numel = sum(param.numel() for param in model_class(config).parameters())
        return model_class(config) if numel <= _MOST_NUMEL else None
    except Exception:  # noqa: BLE001  of whatever kind the model's code raises
        return None


def _small(settings: dict[str, Any]) -> dict[str, Any]:
    layers = settings.get("num_hidden_layers")
    derived = _DERIVED[:1] if "depths" in settings else _DERIVED  # lists of stages are not made shorter
    small = {key: _cut(key, value, layers) for key, value in settings.items() if key not in derived}
    heads = settings.get("num_heads")
    if isinstance(heads, list) and type(small.get("embed_dim")) is int:  # of the first of several stages
        small["embed_dim"] = 8 * heads[0]
    return _with(small, _SETTINGS.get(settings.get("model_type", ""), {}))


def _with(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Settings with others, whose names may be paths into parts: ``text_config.hidden_size``."""
    result = dict(settings)
    for path, value in own.items():
        key, _, rest = path.partition(".")
        result[key] = _with(result.get(key) or {}, {rest: value}) if rest else value
    return result


def _cut(key: str | int, value: Any, layers: Any) -> Any:
    if isinstance(key, int):  # of a table, not the name of a setting
        return value
    if key == "per_layer_config" and isinstance(value, dict):
        return {layer: each for layer, each in value.items() if int(layer) < 2}
    if isinstance(value, dict):
        return _small(value)
    if isinstance(value, list):
        if key in _PER_LAYER or (len(value) > 2 and len(value) == layers):
            return value[:2]
        is_large = all(type(each) is int for each in value) and max(value, default=0) >= 256
        return [max(each // 8, 8) for each in value] if is_large and _SIZES.fullmatch(key) else value
    if type(value) is not int or value <= 0:
        return value
    if _TOKEN.fullmatch(key):
        return min(value, 3)
    return min([value, *(most for name, most in _LARGEST.items() if re.fullmatch(name, key))][:2])


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_indices": [1, 2, 3, 4],
}
_DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET}
_SWIN = {
    "model_type": "swin",
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 1, 2, 2],
    "window_size": 4,
    "image_size": 32,
    "out_indices": [1, 2, 3, 4],
}
_TIMM = {"architecture": "vit_tiny_patch16_224", "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 4}}
_TIMES = {"prediction_length": 4, "context_length": 8}
_CODEC = {
    "num_filters": 4,
    "codebook_size": 32,
    "codebook_dim": 16,
    "upsample_groups": 16,
    "vector_quantization_hidden_dimension": 16,
}

_CHANNELS = ("reduce_channel", "return_channel")
_CONVOLUTIONS = ("vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long")
_TEXT_DETECTION = {
    "neck_out_channels": 32,
    "intraclass_block_config": {  # kernel, stride, padding
        **{name: [1, 1, 0] for name in _CHANNELS},
        **{f"{name}_{ratio}ratio": [3, 1, 1] for name in _CONVOLUTIONS for ratio in ("long", "mid", "short")},
    },
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}

# What a family needs besides, by its model type, alone and as a part of another.
_SETTINGS: dict[str, dict[str, Any]] = {
    "autoformer": _TIMES,
    "informer": _TIMES,
    "time_series_transformer": _TIMES,
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "bit": {"num_groups": 2},
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "deformable_detr": _DETR,
    "detr": _DETR,
    "table-transformer": _DETR,
    "cosmos3_edge_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "dots1": {"num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8},
    "esm": {"vocab_size": 33},
    "hunyuan_v1_dense": {"rope_parameters": _ROPE, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": _ROPE, "head_dim": 8},
    "hunyuan_vl_text": {"rope_parameters": _ROPE, "head_dim": 8},
    "ministral": {"head_dim": 8, "rope_parameters": _ROPE},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "neomme": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 8]},
    "mimi": _CODEC,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "encodec": {"hidden_size": 32, "num_filters": 8},
    "univnet": {"model_hidden_channels": 8},
    "perceiver": {"d_latents": 32, "num_latents": 8, "d_model": 32},
    "vits": {"upsample_initial_channel": 32},
    "speecht5_hifigan": {"upsample_initial_channel": 32},
    "fastspeech2_conformer_hifigan": {"upsample_initial_channel": 32},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 64},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1]},
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1]},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1]},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "glm5_next_text": {"index_topk": 16},
    "granite_speech5_encoder": {"context_size": 16},
    "lw_detr_vit": {"num_windows": 4, "image_size": 64, "patch_size": 16},
    "edgetam_vision_model": {"backbone_config": _RESNET},
    "fast_vlm": {"vision_config": _RESNET | {"hidden_size": 16}},
    "omdet-turbo": {"backbone_config": _SWIN | {"out_indices": [2, 3, 4]}},
    # Where timm is installed:
    "gemma3n_vision": _TIMM,
    "timm_wrapper": _TIMM,
    "timm_backbone": {"backbone": "resnet10t"},
    "tvp": {
        "backbone_config": _RESNET,
        "backbone": None,
        "visual_prompt_size": 8,
        "max_img_size": 32,
    },
    "moonshine_streaming": {"num_key_value_heads": 2},
    "bridgetower": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "chameleon": {"vocabulary_map": {"<image>": 3, "IMGIMGAZ": 4}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 3, "<image>": 4, "<|visual token 000001|>": 5}},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "ernie4_5_vl_moe_text": {
        "moe_num_experts": 4,
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "esmfold2": {
        "atom_encoder.head_dim": 32,
        "structure_head.diffusion_module.atom_encoder.head_dim": 32,
        "structure_head.diffusion_module.atom_encoder.output_dim": 32,
    },
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gradium_phonon_tts": {"flow_head_config.condition_dim": 32},
    "pocket_tts": {"flow_head_config.condition_dim": 32},
    "granite4_vision": {
        "deepstack_layer_map": [[1, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [1],
        "vision_config.hidden_size": 64,  # of a head of the projector
    },
    "mimi_decoder": _CODEC,
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "pp_ocrv5_server_det": _TEXT_DETECTION,
    "pp_ocrv6_medium_det": _TEXT_DETECTION,
    "qwen3_omni_moe": {"talker_config.spatial_merge_size": 2, "code2wav_config.decoder_dim": 64},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 32},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 32},
    "gemma4_unified_assistant": {
        "text_config.num_kv_shared_layers": 1,
        "text_config.layer_types": ["full_attention", "full_attention"],
    },
    "sapiens2": {
        "num_key_value_heads_per_layer": [4, 4],
        "head_config": {
            "upsample_out_channels": [16, 8],
            "upsample_kernel_sizes": [4, 4],
            "conv_out_channels": [8],
            "conv_kernel_sizes": [1],
        },
    },
    "t5gemma2_text": {"dropout_rate": 0.0},
    "vibevoice": {"audio_config.num_filters": 2, "semantic_model_config.num_filters": 2},
    "xcodec2": {"encoder_hidden_size": 8},
    "gemma3n_text": {
        "layer_types": ["full_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "efficientloftr": {"hidden_size": 256},
    "upernet": {"backbone_config": _SWIN, "hidden_size": 32, "auxiliary_in_channels": 32},
    "neucodec": {"hidden_size": 32, "encoder_hidden_size": 8},
    "llama4_vision_model": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
}
