"""Totals and norms of sharded tensors next to plain tensors, as optimizers use them."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.optim_cases import counted
from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.dtensor import redistribute
from vescale_fsdp.errors import UnsupportedOpError

FULL = torch.arange(12.0).view(4, 3) - 4


def tensor() -> RaggedDTensor:
    return distribute_tensor(FULL, cpu_mesh(), [RaggedShard.from_piece_numels((4, 3), [5, 7])])


def _plain_total(p: Any) -> Any:
    return torch.tensor(1.0).add_(p.abs().sum(), alpha=2)


def _plain_rows(p: Any) -> Any:
    return torch.ones(4).lerp_(p.sum(1), 0.5)


def _plain_list(p: Any) -> Any:
    totals = [torch.zeros(()), torch.ones(())]
    torch._foreach_add_(totals, [p.sum(), p.max()])
    return torch.stack(totals)


def _norm(p: Any) -> Any:
    norm = p.norm()
    return norm.pow_(2).sub_(1).clamp_(max=100)


def _norms(p: Any) -> Any:
    return torch.stack(torch._foreach_norm([p, p * 2])).pow_(2).sum().sqrt_()


def _list_of_norms(p: Any) -> Any:
    norms = torch._foreach_norm([p, p * 2])
    torch._foreach_div_(norms, 2.0)
    return norms[0] + norms[1]


def _rows_in_place(p: Any) -> Any:
    rows = p.square().mean(1)
    rows[1:].mul_(3)  # a view writes what it was made of
    return p * rows.rsqrt_().unsqueeze(1)


CASES = [_plain_total, _plain_rows, _plain_list, _norm, _norms, _list_of_norms, _rows_in_place]


def results() -> list[tuple[bool, torch.Tensor]]:
    got = [case(tensor()) for case in CASES]
    return [(isinstance(g, DTensor), g.full_tensor() if isinstance(g, DTensor) else g) for g in got]


def test_results_have_the_values_of_plain_tensors() -> None:
    """What is written to a plain tensor stays plain."""
    for got in run_ranks(2, results):
        for case, (is_dtensor, value) in zip(CASES, got, strict=True):
            torch.testing.assert_close(value, case(FULL.clone()), msg=lambda m, c=case: f"{c.__name__}: {m}")
            assert is_dtensor == (not case.__name__.startswith("_plain"))


def one_message_and_refusals() -> tuple[list[str], bool, str]:
    p = torch.nn.Parameter(tensor())
    p.grad = tensor()
    with counted() as wire:
        torch.nn.utils.clip_grad_norm_([p, p], 1.0)
    with pytest.raises(UnsupportedOpError, check=lambda error: "add.Tensor" in str(error.got)):
        p.sum(0) + torch.zeros(3)
    rows = p.detach().sum(1)
    same = torch.equal(copy.deepcopy(rows).to_local(), rows.to_local())
    return (
        [name for name in wire.names if "wrap" not in name],
        same,
        type(pickle.loads(pickle.dumps(rows))).__name__,
    )


def test_clipping_reduces_once_and_plain_tensors_are_refused() -> None:
    """All norms of a clip share a message; a pickle names torch's class."""
    assert run_ranks(2, one_message_and_refusals) == [(["all_reduce"], True, "DTensor")] * 2


def _on_meshes(order: float, foreach: bool | None) -> None:
    """Clip gradients with and without tensor parallelism, of torch's own DTensors and of plain parameters.

    Every plain gradient is the same on all ranks. Sums of norms over the meshes have gradients as well.
    """
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    model, whole = (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
    )
    whole.load_state_dict(model.state_dict())
    for index in (1, 2):
        parallelize_module(model[index], mesh["tp"], ColwiseParallel())
    ignored = {*model[2].parameters(), *model[3].parameters()}
    fully_shard(model, mesh=mesh["dp"], ignored_params=ignored)
    for param, twin in zip(model.parameters(), whole.parameters(), strict=True):
        twin.grad = torch.randn(twin.shape)
        param.grad = twin.grad.clone()
        if isinstance(param, DTensor):
            spec = param.device_mesh, [Replicate()] * param.device_mesh.ndim
            stock = DTensor.from_local(twin.grad.clone(), *spec, run_check=False)
            param.grad = redistribute(stock, param.placements)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, order, foreach=foreach) for m in (model, whole)]
    assert norms[1] > 0.1
    torch.testing.assert_close(_plain(norms[0]), norms[1])
    for param, twin in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(_plain(param.grad), twin.grad)
    for each in (model, whole):
        total: Any = sum(param.norm() ** 2 for index in (1, 0, 2) for param in each[index].parameters())
        _plain(total * 2 + total.sqrt()).backward()
    for param, twin in zip(model[:3].parameters(), whole[:3].parameters(), strict=True):
        torch.testing.assert_close(_plain(param.grad), twin.grad)


def _plain(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_norms_of_several_meshes() -> None:
    """Parameters on one mesh, on two, and on none are clipped together, by lists and one by one."""
    run_cases(4, _on_meshes, [(2.0, True), (2.0, False), (math.inf, False), (1.0, None)])
