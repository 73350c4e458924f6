"""A small mixture-of-experts model whose experts are stacked in 3-D parameters, for benchmarks and tests.

Grouped experts are where row sharding pads worst: a "row" of an (experts, m, k) tensor is a whole expert.
Every token goes through every expert, weighted by its router: the arithmetic of training is then the same
for any sharding, and no token is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class MoEShape:
    """Sizes of the model."""

    hidden_size: int
    num_layers: int
    num_experts: int
    expert_size: int
    top_k: int


class MoEBlock(nn.Module):
    """Router and stacked experts with a residual: hidden [batch, seq, hidden] in and out."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.router = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size, shape.expert_size))
        self.down = nn.Parameter(torch.empty(shape.num_experts, shape.expert_size, shape.hidden_size))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)  # [tokens, hidden]
        scores = F.softmax(self.router(tokens).float(), dim=-1)
        kept, _ = scores.topk(self.top_k, dim=-1)
        weights = torch.where(scores >= kept[:, -1:], scores, 0.0).to(tokens.dtype)  # [tokens, experts]
        hidden = F.silu(torch.matmul(tokens, self.up))  # [experts, tokens, expert_size]
        out = torch.matmul(hidden, self.down)  # [experts, tokens, hidden]
        return x + torch.einsum("etd,te->td", out, weights).view_as(x)


class GroupedMoE(nn.Module):
    """A chain of `MoEBlock`: hidden [batch, seq, hidden] in and out."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(MoEBlock(shape) for _ in range(shape.num_layers))
        self.head = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
