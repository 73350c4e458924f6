"""Blocked Shampoo without communication, for shards of whole rows of blocks.

Matrices are divided into blocks of at most b x b, each with its own factors, inverse roots and grafting norm. So a rank
that stores whole bands of b rows steps them without communication, and the result has the same bits on 1 and on N
ranks. ``fully_shard(model, granularity=Shampoo.granularity(block_size=b))`` makes such shards. If a rank boundary cuts
a band, the constructor raises, because other blocks would give other updates. Factors are ragged tensors indexed by
block, so they are resharded like the parameter's rows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import mul
from typing import Any, ClassVar, Literal

import torch

from vescale_fsdp.dtensor.piece_map import contiguous_pieces_of, local_grad, local_tensor, zeros_sharded_with
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.granularity import Element, Granularity
from vescale_fsdp.lazy import set_module
from vescale_fsdp.optim.shampoo_blocks import BlockJob, factor_grid_of, granularity_of, write_directions
from vescale_fsdp.optim.structured_optimizer import AdamWOptions, BatchedOptimizer, check_rates
from vescale_fsdp.torch_private import foreach_copy_, foreach_lerp_

_RELATIVE_EPS = 1e-6  # ten times the rounding error of fp32 factors


@set_module("vescale_fsdp.optim")
class Shampoo(BatchedOptimizer):
    """Blocked Shampoo for vectors, matrices and stacks of matrices, and AdamW for ``adamw_params``.

    Shampoo is described in arXiv 1802.09568, its blocks, grafting and choice of roots in arXiv 2309.06497.

    Args:
        params: parameters or param groups.
        lr: learning rate; with grafting, choose it as for AdamW.
        betas: decay rates of the averaged gradient and of the factors (a second rate of 1.0: factors are plain sums).
        eps: lower bound of a factor's eigenvalues, which matters if all gradients of a block are zero.
        relative_eps: lower bound of a factor's eigenvalues, as a fraction of its largest eigenvalue. The default is ten
            times the rounding error of fp32 factors, so that a step does not depend on the BLAS library.
        weight_decay: decoupled weight decay, as in AdamW.
        block_size: b, the largest number of rows and columns of a block.
        update_every: number of steps between two computations of the inverse roots, the most expensive part of a step.
        start_step: the first step that uses inverse roots; before it, parameters are stepped as by Adam. Default:
            update_every.
        grafting: ``"adam"`` scales each block's direction to the norm of Adam's direction; ``"none"`` does not.
        graft_beta2, graft_eps: beta2 and eps of the Adam whose norms grafting uses.
        adamw_params: parameters for AdamW, such as embeddings.
        adamw: options of AdamW.

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
        relative_eps: float = _RELATIVE_EPS,
        block_size: int = 1024,
        update_every: int = 50,
        start_step: int | None = None,
        grafting: Literal["adam", "none"] = "adam",
        graft_beta2: float = 0.999,
        graft_eps: float = 1e-8,
        adamw_params: Iterable[Any] | None = None,
        adamw: AdamWOptions = AdamWOptions(),  # noqa: B008  (frozen)
    ) -> None:
        check_rates(float(lr), betas, eps, weight_decay)  # float, since a learning rate may be a tensor
        if (
            block_size < 1
            or update_every < 1
            or not 0 <= relative_eps <= 1
            or grafting not in ("adam", "none")
        ):
            raise LayoutError(
                "Shampoo does not accept these arguments.",
                expected="block_size >= 1, update_every >= 1, 0 <= relative_eps <= 1, grafting 'adam' or 'none'",
                got=f"block_size={block_size}, update_every={update_every}, relative_eps={relative_eps}, "
                f"grafting={grafting!r}",
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "relative_eps": relative_eps,
            "weight_decay": weight_decay,
            "block_size": block_size,
            "update_every": update_every,
            "start_step": start_step if start_step is not None else update_every,
            "grafting": grafting,
            "graft_beta2": graft_beta2,
            "graft_eps": graft_eps,
            # Recorded in checkpoints, because a sum of gradients would be 1 / (1 - beta) times larger.
            "momentum_form": "ema",
        }
        super().__init__(params, defaults, adamw_params=adamw_params, adamw=adamw)

    @staticmethod
    def granularity(
        *, block_size: int = 1024, adamw: Sequence[str] = ()
    ) -> Callable[[str, Any], Granularity]:
        """Make a rule that keeps rows of blocks whole: ``fully_shard(model, granularity=Shampoo.granularity(...))``.

        Args:
            block_size: the same value as for the optimizer.
            adamw: name patterns (fnmatch) of parameters for AdamW, which may be cut anywhere.
        """

        def rule(fqn: str, param: Any) -> Granularity:
            shape = tuple(param.shape)
            if len(shape) not in (1, 2, 3) or any(fnmatch.fnmatchcase(fqn, pattern) for pattern in adamw):
                return Element()
            return granularity_of(shape, block_size)

        return rule

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Make the initial state of a parameter: the step count, averages, and for each side factors and roots."""
        grid = factor_grid_of(tuple(param.shape), group["block_size"])
        pieces = contiguous_pieces_of(param, "adamw_params=[...]")
        bands = pieces.count_in_blocks(grid.period, lambda piece: len(grid.bands_in(piece)))
        # The step count is on the host, so that reading it does not wait for a device.
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
        if group["grafting"] == "adam":
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        for side, shape in grid.factor_shapes.items():
            numels = bands.map(partial(mul, numel_of(shape[1:])))
            state[f"{side}_factor"] = zeros_sharded_with(param, pieces, shape, numels)
            state[f"{side}_root"] = zeros_sharded_with(param, pieces, shape, numels)
        return state

    def _step_batch(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Step a batch of parameters: flat tensors of all parameters, and stacks of all blocks of one size."""
        states = [self.state[param] for param in params]
        # Equal for all parameters of a batch. On the host, so that reading it does not wait for a device.
        step, beta1 = int(states[0]["step"].item()), group["betas"][0]
        locals_ = [local_tensor(param) for param in params]
        numels = [local.numel() for local in locals_]
        grad = _joined([local_grad(param) for param in params])
        averages = [local_tensor(state["exp_avg"], "state") for state in states]
        foreach_lerp_(averages, list(grad.split(numels)), 1 - beta1)
        average = _joined(averages) / (1 - beta1**step)  # Adam's bias correction
        plain = average  # the direction before `start_step`, and with grafting the one whose norm is used
        if group["grafting"] != "none":
            beta2 = group["graft_beta2"]
            squares = [local_tensor(state["exp_avg_sq"], "state") for state in states]
            foreach_lerp_(squares, list(grad.square().split(numels)), 1 - beta2)
            plain = average / ((_joined(squares) / (1 - beta2**step)).sqrt() + group["graft_eps"])
        update = torch.empty_like(grad)
        parts = zip(*(each.split(numels) for each in (grad, average, plain, update)), strict=True)
        jobs = [_job(*each, group["block_size"]) for each in zip(params, states, parts, strict=True)]
        write_directions(jobs, step, group)
        values = _joined(locals_)
        update.add_(values, alpha=group["weight_decay"])  # decoupled, as in AdamW
        # In fp32; the copy rounds to the dtype of the parameters.
        stepped = torch.add(values, update, alpha=-float(group["lr"]))
        foreach_copy_(locals_, list(stepped.split(numels)))


def _job(
    param: torch.Tensor, state: dict[str, torch.Tensor], parts: Sequence[torch.Tensor], block_size: int
) -> BlockJob:
    """Return a parameter's blocks on this rank.

    Args:
        parts: this rank's gradient, averaged gradient, Adam direction and update, each 1-D.
    """
    grid = factor_grid_of(tuple(param.shape), block_size)
    piece = contiguous_pieces_of(param, "adamw_params=[...]").own_piece
    *lines, update = (part.view(-1, grid.cols) for part in parts)
    factors = {}
    for side, shape in grid.factor_shapes.items():
        factor, root = (local_tensor(state[f"{side}_{kind}"], "state") for kind in ("factor", "root"))
        factors[side] = factor.view(-1, *shape[1:]), root.view(-1, *shape[1:])
    return BlockJob(list(grid.areas_in(piece)), tuple(lines), update, factors)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate 1-D tensors in fp32; a single fp32 tensor is returned itself, without a copy."""
    if len(parts) == 1:
        return parts[0].float()
    numels = [part.numel() for part in parts]
    joined = torch.empty(sum(numels), dtype=torch.float32, device=parts[0].device)
    foreach_copy_(list(joined.split(numels)), list(parts))
    return joined
