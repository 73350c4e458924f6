"""The model of a program: an embedding, two blocks, a norm and a head, written as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.vescale_fsdp.runtime.fuzz.habits.program import Program

ROWS, WORDS, WIDTH, HIDDEN = 3, 5, 3, 4


class Broken(Exception):
    """An exception of the user's own."""


class _ReadsInBackward(torch.autograd.Function):
    """Scales the gradient by a weight that it looks up then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.weight = weight
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * (1 + ctx.weight().detach().sum().tanh()), None


class _WithGradsOfForward(torch.autograd.Function):
    """Cross entropy of a linear layer, which computes all gradients in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = x @ weight.T
        grad = (logits.softmax(1) - F.one_hot(targets, len(weight))) / len(x)
        ctx.save_for_backward(grad @ weight, grad.T @ x)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return grad * of_x, grad * of_weight, None


class _GradIsThere(torch.autograd.Function):
    """A loss whose gradient was computed before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None, None


class Block(nn.Module):
    """A residual block, with a code that no gradient trains."""

    def __init__(self, tiles: bool) -> None:
        super().__init__()
        self.tiles = tiles
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.code = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, around: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = around("begins", x)
        if self.tiles:
            parts = [
                checkpoint(self._tile, rows, use_reentrant=True, preserve_rng_state=False)
                for rows in x.split(2)
            ]
            return around("ends", torch.cat(parts))
        return around("ends", self._tile(x))

    def _tile(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.code


class Model(nn.Module):
    """The root, which has what no other unit has.

    Args:
        program: which way it computes.
        tell: called with each place of `PLACES` and the tensor there; returns the tensor to go on with.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.emb = nn.Embedding(WORDS, WIDTH, max_norm=0.5 if program.max_norm else None)
        self.blocks = nn.ModuleList(Block(program.tiles) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if program.tied:
            self.head.weight = self.emb.weight
        self.tell: Callable[[str, torch.Tensor], torch.Tensor] = lambda place, x: x
        self.kept: torch.Tensor | None = None

    def forward(self, words: torch.Tensor, noise: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tell("root begins", self.emb(words) + noise)
        for number, block in enumerate(self.blocks):
            x = block(x, lambda where, x, number=number: self.tell(f"blocks.{number} {where}", x))
            if self.program.reader and number == self.program.reads_at:
                x = self._reads(x)
        self.kept = x
        y = self._output(self.norm(x), targets)
        return self.tell("root ends", y)

    def _weight(self) -> torch.Tensor:
        return getattr(self, self.program.reads).weight

    def _reads(self, x: torch.Tensor) -> torch.Tensor:
        if self.program.reader == "function":
            return _ReadsInBackward.apply(x, self._weight)
        if self.program.reader == "hook":
            if x.requires_grad:
                x.register_hook(lambda grad: grad * (1 + self._weight().detach().sum().tanh()))
            return x
        reentrant = self.program.reader == "reentrant"
        return checkpoint(self._scaled, x, use_reentrant=reentrant, preserve_rng_state=False)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self._weight().sum().tanh())

    def _output(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.program.loss == "fused":
            return F.cross_entropy(F.linear(x, self.head.weight), targets)
        if self.program.loss == "by_hand":
            return _WithGradsOfForward.apply(x, self.head.weight, targets)
        if self.program.loss == "early":
            return self._early(x, targets)
        if self.program.loss == "chunked":
            parts = [
                checkpoint(self._chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(x.split(2), targets.split(2), strict=True)
            ]
            return torch.stack(parts).sum() / len(x)
        y = self.head(x)
        return y[:, 1:] if self.program.loss == "view" else y

    def _early(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        cut = x.detach().requires_grad_(x.requires_grad)
        loss = F.cross_entropy(F.linear(cut, self.head.weight), targets)
        if not x.requires_grad:
            return loss
        loss.backward()
        return _GradIsThere.apply(x, loss.detach(), cut.grad)

    def _chunk(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, self.head.weight), targets, reduction="sum")


def loss_of(
    model: Any, program: Program, words: torch.Tensor, noise: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """What a user writes behind a forward."""
    output = model(words, noise, targets)
    if program.loss in ("fused", "chunked", "by_hand", "early"):
        return output
    if program.loss == "aside":
        return model.kept.square().mean()
    if program.loss == "view":
        output += 1
        output *= 2
        return output.square().mean()
    loss = F.cross_entropy(output, targets)
    return loss + model.kept.square().mean() if program.loss == "both" else loss


def build(program: Program) -> Model:
    """The model with its first weights."""
    model = Model(program).double()
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=dice) * 0.5)
    return model


def batch(
    program: Program, step: int, micro: int, replica: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, noise and targets of a rank. Words are the same on all ranks if the embedding writes the rows it reads."""
    dice = torch.Generator().manual_seed((step * 8 + micro) * 8 + replica)
    same = torch.Generator().manual_seed(step * 8 + micro)
    words = torch.randint(WORDS, (ROWS,), generator=same if program.max_norm else dice)
    noise = torch.randn(ROWS, WIDTH, generator=dice, dtype=torch.float64)
    return words, noise.requires_grad_(program.penalty), torch.randint(WORDS, (ROWS,), generator=dice)
