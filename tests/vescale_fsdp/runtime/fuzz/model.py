"""The model of a program, its inputs, and what runs of it: one code for the plain model and the sharded one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.vescale_fsdp.runtime.fuzz.program import Block, Program

WIDTH, HIDDEN, ROWS = 7, 10, 3  # nothing but HIDDEN is divided by the ranks of tensor parallelism


class Ways(NamedTuple):
    """Which blocks run in one forward of one rank, and which of them with their spare layer."""

    runs: tuple[bool, ...]
    spares: tuple[bool, ...]
    breaks: bool = False


class Broken(Exception):
    """What a forward ends in that breaks."""


class BlockModule(nn.Module):
    """A residual block."""

    def __init__(self, block: Block, *, tp: bool) -> None:
        super().__init__()
        self.block, self.tp = block, tp
        hidden = WIDTH if block.kind == "tied" else HIDDEN
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        if block.kind == "tied":
            self.down.weight = self.up.weight
        self.norm = nn.LayerNorm(WIDTH) if block.kind == "norm" else None
        self.low = nn.Parameter(torch.zeros(2, WIDTH)) if block.kind == "adapter" else None
        self.gain = nn.Parameter(torch.zeros(3, dtype=torch.float64)) if block.kind == "gain" else None
        self.spare = nn.Linear(WIDTH, WIDTH) if block.spare else None

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor | dict[str, object]:
        if self.block.recompute == "inside":
            y = checkpoint(self.compute, x, spare, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self.compute(x, spare)
        return {"y": y, "rows": len(y)} if self.block.kind == "dict" else y

    def compute(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        y = x if self.norm is None else self.norm(x)
        y = self.down(torch.tanh(self.up(y)))
        if self.low is not None:
            y = y + (x @ self.low.T) @ self.low
        if self.gain is not None:
            y = y * (1 + self.gain.sum()).to(y.dtype)
        if spare and self.spare is not None:
            y = y + torch.sigmoid(self.spare(x))
        return x + y


class Model(nn.Module):
    """An embedding, blocks, a head; the root has the outer two and what is left to it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Embedding(ROWS, WIDTH) if program.positions else None
        self.blocks = nn.ModuleList(BlockModule(block, tp=program.tp) for block in program.blocks)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, ways: Ways) -> torch.Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        if self.positions is not None:
            x = x + self.positions(torch.arange(len(x)))
        for block, module, runs, spare in zip(
            self.program.blocks, self.blocks, ways.runs, ways.spares, strict=True
        ):
            for _ in range(block.times if runs else 0):
                if block.recompute in ("plain", "reentrant"):
                    reentrant = block.recompute == "reentrant"
                    y = checkpoint(module, x, spare, use_reentrant=reentrant, preserve_rng_state=False)
                else:
                    y = module(x, spare)
                y = y["y"] if isinstance(y, dict) else y
                x = x if block.drops else y
            if self.program.reads:
                x = checkpoint(self.read, x, use_reentrant=False, preserve_rng_state=False)
        if ways.breaks:
            raise Broken
        return self.head(x)  # type: ignore[no-any-return]

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Read a weight of the root without a call of its module."""
        weight = getattr(self, self.program.reads).weight
        return x * weight.sum(0).sigmoid()  # type: ignore[no-any-return]


def build(program: Program) -> Model:
    """The model with its first weights, which depend on nothing but their place."""
    model = Model(program).to(getattr(torch, program.stored))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("gain"):
                param.data = param.data.double()
            param.copy_(torch.randn(param.shape, generator=draw) * 0.4)
            param.requires_grad_(_trains(name, program))
    return model


def _trains(name: str, program: Program) -> bool:
    if not name.startswith("blocks."):
        return not program.frozen_ends
    frozen = program.blocks[int(name.split(".")[1])].frozen
    is_base = not any(part in name for part in (".low", ".spare"))
    return frozen == "no" or (frozen == "base" and not is_base)


def thaw(params: Mapping[str, nn.Parameter]) -> None:
    """Train what is frozen of the first block, and freeze what is trained; a second time: back."""
    for name, param in params.items():
        if name.startswith("blocks.0."):
            param.requires_grad_(not param.requires_grad)


def batch(step: int, micro: int, forward: int, replica: int) -> torch.Tensor:
    """The inputs of a forward on a rank: [ROWS, WIDTH] in fp32."""
    draw = torch.Generator().manual_seed(((step * 8 + micro) * 8 + forward) * 8 + replica)
    return torch.randn(ROWS, WIDTH, generator=draw)


def ways(program: Program, step: int, replica: int) -> Ways:
    """What runs on a rank in a step."""
    return Ways(program.runs(step, replica), program.spares(step, replica))
