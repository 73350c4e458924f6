"""What torchtitan calls its tensors, and their shapes: facts read off its debug models, built on the meta device from
the releases 0.3.0 and 0.2.2 of the package on PyPI (which needs a nightly torch to train, and so is no dependency).

``{l}`` stands for every layer that has the tensor. Buffers that are not saved are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_DENSE = """
tok_embeddings.weight 2048 256
norm.weight 256
layers.{l}.attention_norm.weight 256
layers.{l}.ffn_norm.weight 256
"""
_QWEN_NORMS = """
layers.{l}.attention.q_norm.weight 128
layers.{l}.attention.k_norm.weight 128
"""
NAMES: Mapping[str, str] = {
    "torchtitan-llama": _DENSE
    + """
lm_head.weight 2048 256
layers.{l}.attention.qkv_linear.wq.weight 256 256
layers.{l}.attention.qkv_linear.wk.weight 256 256
layers.{l}.attention.qkv_linear.wv.weight 256 256
layers.{l}.attention.wo.weight 256 256
layers.{l}.feed_forward.w1.weight 768 256
layers.{l}.feed_forward.w2.weight 256 768
layers.{l}.feed_forward.w3.weight 768 256
""",
    "torchtitan-0.2-llama": _DENSE
    + """
output.weight 2048 256
layers.{l}.attention.wq.weight 256 256
layers.{l}.attention.wk.weight 256 256
layers.{l}.attention.wv.weight 256 256
layers.{l}.attention.wo.weight 256 256
layers.{l}.feed_forward.w1.weight 768 256
layers.{l}.feed_forward.w2.weight 256 768
layers.{l}.feed_forward.w3.weight 768 256
""",
    "torchtitan-qwen": _DENSE
    + _QWEN_NORMS
    + """
lm_head.weight 2048 256
layers.{l}.attention.qkv_linear.wq.weight 2048 256
layers.{l}.attention.qkv_linear.wk.weight 1024 256
layers.{l}.attention.qkv_linear.wv.weight 1024 256
layers.{l}.attention.wo.weight 256 2048
layers.{l}.feed_forward.w1.weight 3072 256
layers.{l}.feed_forward.w2.weight 256 3072
layers.{l}.feed_forward.w3.weight 3072 256
""",
    "torchtitan-0.2-qwen": _DENSE
    + _QWEN_NORMS
    + """
output.weight 2048 256
layers.{l}.attention.wq.weight 2048 256
layers.{l}.attention.wk.weight 1024 256
layers.{l}.attention.wv.weight 1024 256
layers.{l}.attention.wo.weight 256 2048
layers.{l}.feed_forward.w1.weight 3072 256
layers.{l}.feed_forward.w2.weight 256 3072
layers.{l}.feed_forward.w3.weight 3072 256
""",
    "torchtitan-qwen3-moe": _DENSE
    + _QWEN_NORMS
    + """
lm_head.weight 2048 256
layers.{l}.attention.qkv_linear.wq.weight 2048 256
layers.{l}.attention.qkv_linear.wk.weight 1024 256
layers.{l}.attention.qkv_linear.wv.weight 1024 256
layers.{l}.attention.wo.weight 256 2048
layers.{l}.moe.expert_bias_E 64
layers.{l}.moe.routed_experts.inner_experts.w1_EFD 64 768 256
layers.{l}.moe.routed_experts.inner_experts.w2_EDF 64 256 768
layers.{l}.moe.routed_experts.inner_experts.w3_EFD 64 768 256
layers.{l}.moe.router.gate.weight 64 256
""",
    "torchtitan-0.2-qwen3-moe": _DENSE
    + _QWEN_NORMS
    + """
output.weight 2048 256
layers.{l}.attention.wq.weight 2048 256
layers.{l}.attention.wk.weight 1024 256
layers.{l}.attention.wv.weight 1024 256
layers.{l}.attention.wo.weight 256 2048
layers.{l}.moe.expert_bias 64
layers.{l}.moe.experts.w1 64 768 256
layers.{l}.moe.experts.w2 64 256 768
layers.{l}.moe.experts.w3 64 768 256
layers.{l}.moe.router.gate.weight 64 256
""",
    "torchtitan-deepseek-v3": _DENSE
    + """
lm_head.weight 2048 256
layers.{l}.attention.wq.weight 3072 256
layers.{l}.attention.wkv_a.weight 576 256
layers.{l}.attention.kv_norm.weight 512
layers.{l}.attention.wkv_b.weight 4096 512
layers.{l}.attention.wo.weight 256 2048
layers.0.feed_forward.w1.weight 1024 256
layers.0.feed_forward.w2.weight 256 1024
layers.0.feed_forward.w3.weight 1024 256
layers.1.moe.expert_bias_E 8
layers.1.moe.routed_experts.inner_experts.w1_EFD 8 256 256
layers.1.moe.routed_experts.inner_experts.w2_EDF 8 256 256
layers.1.moe.routed_experts.inner_experts.w3_EFD 8 256 256
layers.1.moe.router.gate.weight 8 256
layers.1.moe.shared_experts.w1.weight 512 256
layers.1.moe.shared_experts.w2.weight 256 512
layers.1.moe.shared_experts.w3.weight 512 256
""",
    "torchtitan-0.2-deepseek-v3": _DENSE
    + """
output.weight 2048 256
layers.{l}.attention.wq.weight 3072 256
layers.{l}.attention.wkv_a.weight 576 256
layers.{l}.attention.kv_norm.weight 512
layers.{l}.attention.wkv_b.weight 4096 512
layers.{l}.attention.wo.weight 256 2048
layers.0.feed_forward.w1.weight 1024 256
layers.0.feed_forward.w2.weight 256 1024
layers.0.feed_forward.w3.weight 1024 256
layers.1.moe.expert_bias 8
layers.1.moe.experts.w1 8 256 256
layers.1.moe.experts.w2 8 256 256
layers.1.moe.experts.w3 8 256 256
layers.1.moe.router.gate.weight 8 256
layers.1.moe.shared_experts.w1.weight 512 256
layers.1.moe.shared_experts.w2.weight 256 512
layers.1.moe.shared_experts.w3.weight 512 256
""",
    "torchtitan-gpt-oss": _DENSE
    + """
lm_head.weight 2048 256
layers.{l}.attention.sinks 64
layers.{l}.attention.qkv_linear.wq.weight 4096 256
layers.{l}.attention.qkv_linear.wk.weight 512 256
layers.{l}.attention.qkv_linear.wv.weight 512 256
layers.{l}.attention.qkv_linear.wq.bias 4096
layers.{l}.attention.qkv_linear.wk.bias 512
layers.{l}.attention.qkv_linear.wv.bias 512
layers.{l}.attention.wo.weight 256 4096
layers.{l}.attention.wo.bias 256
layers.{l}.moe.expert_bias_E 8
layers.{l}.moe.routed_experts.inner_experts.mlp1_weight_EGD 8 5760 256
layers.{l}.moe.routed_experts.inner_experts.mlp1_bias_EG 8 5760
layers.{l}.moe.routed_experts.inner_experts.mlp2_weight_EDF 8 256 2880
layers.{l}.moe.routed_experts.inner_experts.mlp2_bias_ED 8 256
layers.{l}.moe.router.gate.weight 8 256
layers.{l}.moe.router.gate.bias 8
""",
    "torchtitan-0.2-gpt-oss": _DENSE
    + """
output.weight 2048 256
layers.{l}.attention.sinks 64
layers.{l}.attention.wq.weight 4096 256
layers.{l}.attention.wk.weight 512 256
layers.{l}.attention.wv.weight 512 256
layers.{l}.attention.wq.bias 4096
layers.{l}.attention.wk.bias 512
layers.{l}.attention.wv.bias 512
layers.{l}.attention.wo.weight 256 4096
layers.{l}.attention.wo.bias 256
layers.{l}.moe.expert_bias 8
layers.{l}.moe.experts.mlp1_weight 8 5760 256
layers.{l}.moe.experts.mlp1_bias 8 5760
layers.{l}.moe.experts.mlp2_weight 8 256 2880
layers.{l}.moe.experts.mlp2_bias 8 256
layers.{l}.moe.router.gate.weight 8 256
layers.{l}.moe.router.gate.bias 8
""",
}


def expand(text: str, layers: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, with every layer spelled out."""
    found: dict[str, tuple[int, ...]] = {}
    for line in filter(None, text.splitlines()):
        name, *sizes = line.split()
        for layer in layers if "{l}" in name else [0]:
            found[name.replace("{l}", str(layer))] = tuple(map(int, sizes))
    return found
