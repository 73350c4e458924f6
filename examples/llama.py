"""A small Llama whose parameters bear Hugging Face's names, for the demo, the tests and the benchmarks.

RMSNorm, rotary positions (half-rotation, as transformers' LlamaForCausalLM), grouped-query attention, SwiGLU
and an untied head. The arithmetic follows transformers' step by step, so that the same weights give the same
logits there; tests/examples/test_llama.py holds that. No buffers: everything but the weights is computed in forward,
so that a model built on the meta device needs nothing but its weights.

    tokens [batch, seq] -> embed -> n x (norm, attention, norm, mlp) -> norm -> head -> logits [batch, seq, vocab]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of the model; the defaults make 1.7 M parameters over bytes."""

    vocab_size: int = 256
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    mlp_size: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def hugging_face_config(self) -> dict[str, Any]:
        """The config.json with which transformers builds the same model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.mlp_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }


class RMSNorm(nn.Module):
    """Scale to unit root mean square in fp32, then by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))  # 1D [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(seq_len: int, shape: LlamaShape, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [seq, head_size] of the positions, computed in fp32, in the dtype of ``like``."""
    even = torch.arange(0, shape.head_size, 2, dtype=torch.float32, device=like.device)
    frequencies = 1.0 / shape.rope_theta ** (even / shape.head_size)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=like.device), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [batch, heads, seq, head_size] by its positions; the two halves of a head are the coordinates."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        query_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        batch, seq_len, _ = x.shape
        query, key, value = (
            projection(x).view(batch, seq_len, -1, self.shape.head_size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = rotary(seq_len, self.shape, x)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq_len, -1))


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """One layer: attention and mlp, each behind a norm and beside a residual. The unit that gets sharded."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Everything but the head (Hugging Face's names begin with ``model.``)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, hidden]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """The language model: logits of the next byte at every position."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.model = LlamaModel(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] int64 -> logits [batch, seq, vocab]."""
        return self.lm_head(self.model(tokens))


def start_weights(model: nn.Module) -> None:
    """Fill in start values, in place: norms one, matrices normal, narrower where they end in a residual.

    On a sharded model every rank draws for its own elements alone, and the model is the same on any number
    of ranks (`vescale_fsdp.manual_seed`); on a plain one torch's generator draws.
    """
    for name, param in model.named_parameters():
        if param.ndim == 1:
            nn.init.ones_(param)
        else:
            nn.init.normal_(
                param, std=0.007 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            )
