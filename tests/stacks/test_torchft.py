"""torchft's all-reduce between replica groups, set by torchtitan's own manager."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard


def gradients(with_ours: bool) -> list[torch.Tensor]:
    """Gradients of two replicas, each of one rank, whose hook averages them."""
    from torchtitan.experiments.torchft.manager import TorchFTManager

    mesh = cpu_mesh(2, 1, names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    for module in (*model, model):
        (fully_shard if with_ours else torch_fully_shard)(module, mesh=mesh["shard"])
    manager = object.__new__(
        TorchFTManager
    )  # torchft's quorum needs a server; what it does to the model does not
    manager._manager, manager.use_async_quorum = object(), True
    manager.replicate_pg = mesh["replica"].get_group()
    manager.maybe_set_all_reduce_hook([model])
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def both() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Stock FSDP2's and ours."""
    return gradients(False), gradients(True)


def test_the_hook_averages_between_replicas() -> None:
    """Both replicas have the same gradients, which are stock FSDP2's."""
    found = run_ranks(2, both)
    for stock, ours in found:
        assert len(ours) == 4
        for ours_grad, stock_grad, elsewhere in zip(ours, stock, found[0][1], strict=True):
            assert torch.equal(ours_grad, stock_grad) and torch.equal(ours_grad, elsewhere)
            assert ours_grad.abs().sum() > 0
