"""Shampoo in blocks: exact and without communication where ranks hold whole rows of blocks.

Blocks of at most b x b are Shampoo's unit: factors, roots and grafting norms belong to a block. A rank that holds
whole bands of b rows therefore steps them alone, and the result has the same bits on 1 and on N ranks. The
planner gives such shards for ``granularity=Shampoo.granularity(block_size=b)``; other cuts are refused, because
other blocks are another optimizer. Factors are ragged tensors indexed by block, so they reshard with their rows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import mul
from typing import Any, ClassVar, Literal

import torch

from vescale_fsdp.dtensor.piece_map import contiguous_pieces_of, local_grad, local_tensor, zeros_beside
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.granularity import Element, Granularity
from vescale_fsdp.optim.shampoo.block_math import accumulate, graft, inverse_root
from vescale_fsdp.optim.shampoo.factor_grid import Block, factor_grid_of, granularity_of
from vescale_fsdp.optim.structured_optimizer import AdamWOptions, StructuredOptimizer, check_rates

__all__ = ["Shampoo"]


class Shampoo(StructuredOptimizer):
    """Blocked Shampoo for vectors, matrices and stacks of matrices; AdamW for the rest, if asked.

    Args:
        params: parameters or param groups.
        lr: learning rate; with grafting, AdamW's.
        betas: of the averaged gradient and of the factors (1.0: plain sums).
        eps: least eigenvalue of a factor.
        weight_decay: decoupled.
        block_size: b, rows and columns of a block.
        update_every: steps between two computations of the inverse roots, which are the costly part.
        start_step: the first step that uses them; before it the grafted optimizer steps. Default: update_every.
        grafting: ``"adam"`` gives each block's direction the norm of Adam's; ``"none"`` leaves its own.
        graft_beta2, graft_eps: of that Adam.
        adamw_params: parameters for AdamW, such as embeddings.
        adamw: how those are stepped.

    Raises:
        LayoutError: if a rank boundary cuts a block, or the arguments are not valid.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(64, 64), granularity=Shampoo.granularity(block_size=32))
        >>> optimizer = Shampoo(model.parameters(), lr=1e-3, block_size=32, update_every=1)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> optimizer.step()
    """

    algorithm: ClassVar[str] = "shampoo"
    recorded: ClassVar[tuple[str, ...]] = ("block_size", "grafting", "momentum_form")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        block_size: int = 1024,
        update_every: int = 50,
        start_step: int | None = None,
        grafting: Literal["adam", "none"] = "adam",
        graft_beta2: float = 0.999,
        graft_eps: float = 1e-8,
        adamw_params: Iterable[Any] | None = None,
        adamw: AdamWOptions = AdamWOptions(),  # noqa: B008  (frozen)
    ) -> None:
        check_rates(float(lr), betas, eps, weight_decay)
        if block_size < 1 or update_every < 1 or grafting not in ("adam", "none"):
            raise LayoutError(
                "Shampoo cannot work with these arguments.",
                expected="block_size >= 1, update_every >= 1, grafting 'adam' or 'none'",
                got=f"block_size={block_size}, update_every={update_every}, grafting={grafting!r}",
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block_size": block_size,
            "update_every": update_every,
            "start_step": start_step if start_step is not None else update_every,
            "grafting": grafting,
            "graft_beta2": graft_beta2,
            "graft_eps": graft_eps,
            "momentum_form": "ema",
        }
        super().__init__(params, defaults, adamw_params=adamw_params, adamw=adamw)

    @staticmethod
    def granularity(
        *, block_size: int = 1024, adamw: Sequence[str] = ()
    ) -> Callable[[str, Any], Granularity]:
        """The granularity rule for ``fully_shard(model, granularity=Shampoo.granularity(block_size=...))``.

        Args:
            block_size: as the optimizer will be given it.
            adamw: name patterns (fnmatch) of parameters that AdamW will step; they may be cut anywhere.
        """

        def rule(fqn: str, param: Any) -> Granularity:
            shape = tuple(param.shape)
            if len(shape) not in (1, 2, 3) or any(fnmatch.fnmatchcase(fqn, pattern) for pattern in adamw):
                return Element()
            return granularity_of(shape, block_size)

        return rule

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        grid = factor_grid_of(tuple(param.shape), group["block_size"])
        pieces = contiguous_pieces_of(param, "adamw_params=[...]")
        bands = pieces.count_in_blocks(grid.period, lambda piece: len(grid.bands_in(piece)))
        state = {"step": torch.zeros((), dtype=torch.float32)}
        state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
        if group["grafting"] == "adam":
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        for side, shape in grid.factor_shapes.items():
            numels = bands.map(partial(mul, numel_of(shape[1:])))
            state[f"{side}_factor"] = zeros_beside(param, pieces, shape, numels)
            state[f"{side}_root"] = zeros_beside(param, pieces, shape, numels)
        return state

    def _step_param(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["step"] += 1
        step = int(state["step"].item())
        grid = factor_grid_of(tuple(param.shape), group["block_size"])
        local, grad = local_tensor(param), local_grad(param).float()
        average = local_tensor(state["exp_avg"], "state").lerp_(grad, 1 - group["betas"][0])
        average = average / (1 - group["betas"][0] ** step)
        plain = average  # what the grafted optimizer would step
        if group["grafting"] != "none":
            beta2 = group["graft_beta2"]
            squares = local_tensor(state["exp_avg_sq"], "state").lerp_(grad.square(), 1 - beta2)
            plain = average / ((squares / (1 - beta2**step)).sqrt() + group["graft_eps"])
        piece = contiguous_pieces_of(param, "adamw_params=[...]").own_piece
        update = torch.empty_like(grad)
        lines = [t.view(-1, grid.cols) for t in (grad, average, plain, update)]
        factors = {side: _local_factors(state, side, shape) for side, shape in grid.factor_shapes.items()}
        for block in grid.blocks_in(piece):
            parts = [_cut(t, block) for t in lines]
            parts[3].copy_(_block_direction(block, parts, factors, step, group))
        update.add_(local.float(), alpha=group["weight_decay"])
        local.copy_(local.float().add_(update, alpha=-float(group["lr"])))


# By side: factors and roots, [bands, columns, side, side].
_Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _local_factors(
    state: dict[str, torch.Tensor], side: str, shape: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    factor, root = (local_tensor(state[f"{side}_{kind}"], "state") for kind in ("factor", "root"))
    return factor.view(-1, *shape[1:]), root.view(-1, *shape[1:])


def _cut(lines: torch.Tensor, block: Block) -> torch.Tensor:
    return lines[block.top : block.top + block.height, block.left : block.left + block.width]


def _block_direction(
    block: Block, parts: Sequence[torch.Tensor], factors: _Factors, step: int, group: dict[str, Any]
) -> torch.Tensor:
    """Update a block's factors and, when due, their roots; return its direction [height, width].

    Args:
        parts: the block of the gradient, of the averaged gradient and of the grafted direction, in this order.
    """
    # Copies: matrix products may round otherwise for other strides, and strides must not depend on the cut.
    grad, average, plain = (part.clone(memory_format=torch.contiguous_format) for part in parts[:3])
    beta2, start, every = group["betas"][1], group["start_step"], group["update_every"]
    due = step == start or (step > start and step % every == 0)
    direction = average
    for side, (all_factors, all_roots) in factors.items():
        size = block.height if side == "left" else block.width
        factor = all_factors[block.band, block.column, :size, :size]
        root = all_roots[block.band, block.column, :size, :size]
        accumulate(factor, grad if side == "left" else grad.mT, beta2)
        if due:
            unbiased = factor / (1 - beta2**step) if beta2 < 1 else factor.clone()
            found = inverse_root(unbiased, 2 * len(factors), group["eps"])
            if found is not None:
                root.copy_(found)
        if step >= start:
            whole = root.clone(memory_format=torch.contiguous_format)
            direction = whole @ direction if side == "left" else direction @ whole
    if step < start:
        return plain
    return graft(direction, plain) if group["grafting"] == "adam" else direction
