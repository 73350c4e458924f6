"""What users and torch's own utilities do with parameters, beside one process: it works, or an error says the cause.

The list is what stock DTensor can do under ``Shard(0)`` with the operators of torch's optimizers, `torch.nn.utils`,
`torch.optim.swa_utils` and `torch.nn.init`, and what only makes room (``new_empty``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import swa_utils

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtensor_conformance import plain
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor.ragged_dtensor import distribute_tensor
from vescale_fsdp.errors import UnsupportedOpError

SHAPE = (8, 6)
CUTS = {
    "elements": RaggedShard((0, 1), (21, 27)),
    "rows": RaggedShard((0,), (5, 3)),
    "one": RaggedShard((), (0, 1)),
}
Use = Callable[[nn.Parameter, nn.Parameter], Any]


def from_a_vector(p: nn.Parameter, q: nn.Parameter) -> nn.Parameter:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p, q]) * 2, [q, p])
    return p


def fused(p: nn.Parameter, q: nn.Parameter) -> torch.Tensor:
    """How fused weights are initialized: parts of other shapes, made and filled, joined, copied."""
    parts = [p.new_empty((4, 6)).fill_(value) for value in (1.0, 2.0)]
    return p.copy_(torch.cat(parts))


def averaged(update: Callable[[list[Any], list[Any], int], None], p: nn.Parameter, q: nn.Parameter) -> Any:
    update([p.detach()], [q.detach()], 3)
    return p


def lbfgs(p: nn.Parameter, q: nn.Parameter) -> torch.Tensor:
    optimizer = torch.optim.LBFGS([p, q], lr=0.1, max_iter=4)

    def closure() -> Any:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = p.square().sum() + (q - 1).square().sum() + (p - q).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return torch.stack([p, q])


USES: dict[str, Use] = {
    "new_empty own": lambda p, q: p.new_empty(SHAPE).copy_(q),
    "new_empty other": lambda p, q: p.new_empty((3, 2)).fill_(2.0),
    "new_empty 0-d": lambda p, q: p.new_empty(()),  # nothing is read before it is written, but if: zeros
    "new_empty int": lambda p, q: p.new_empty(3, dtype=torch.int64).fill_(1),
    "new_empty_strided": lambda p, q: p.new_empty_strided((3, 2), (1, 3)).fill_(2.0),
    "new_empty_strided own": lambda p, q: p.new_empty_strided(SHAPE, (6, 1)).copy_(q),
    "empty_like": lambda p, q: torch.empty_like(p, dtype=torch.float64).copy_(q),
    "fused": fused,
    "cat": lambda p, q: torch.cat([p, q, p], dim=1),
    "stack": lambda p, q: torch.stack([p, q], dim=1),
    "parameters_to_vector": lambda p, q: nn.utils.parameters_to_vector([p, q]),
    "vector_to_parameters": from_a_vector,
    "ema": partial(averaged, swa_utils.get_ema_multi_avg_fn(0.9)),
    "swa": partial(averaged, swa_utils.get_swa_multi_avg_fn()),
    "lbfgs": lbfgs,
    "deepcopy": lambda p, q: copy.deepcopy(p),
    "allclose": lambda p, q: torch.tensor([torch.allclose(p, q), torch.equal(p, p)]),
    "dot": lambda p, q: torch.dot(p.view(-1), q.view(-1)),
    "vdot": lambda p, q: torch.vdot(p.view(-1), q.view(-1)),
    "dist": lambda p, q: torch.dist(p, q, 1),
    "mse": lambda p, q: torch.stack(
        [nn.functional.mse_loss(p, q), nn.functional.mse_loss(p, q, reduction="sum")]
    ),
    "mse each": lambda p, q: nn.functional.mse_loss(p, q, reduction="none"),
    "foreach_max": lambda p, q: torch.stack(torch._foreach_max([p, q])),
    "histogram": lambda p, q: torch.histc(p, 4),  # what wandb.watch asks of weights
    "median": lambda p, q: torch.stack([p.median(), p.nanmedian(), p.flatten().kthvalue(3).values]),
    "eye_": lambda p, q: nn.init.eye_(p),
    "clip": lambda p, q: nn.utils.clip_grad_norm_([p, q], 0.1),
}
RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "orthogonal_": nn.init.orthogonal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
}


def whole(value: Any) -> torch.Tensor:
    found = value.full_tensor() if isinstance(value, DTensor) else value
    assert isinstance(found, torch.Tensor)
    return found.detach()


def pair(cut: RaggedShard | None) -> tuple[nn.Parameter, nn.Parameter]:
    """Two parameters with gradients, ragged or whole."""
    found = []
    for seed in (0, 1):
        tensors = [plain(SHAPE, seed + 10 * part) for part in (0, 1)]
        if cut is not None:
            tensors = [distribute_tensor(tensor, cpu_mesh(), [cut]) for tensor in tensors]
        found.append(nn.Parameter(tensors[0]))
        found[-1].grad = tensors[1]
    return found[0], found[1]


def uses() -> int:
    """Every use with every cut; returns how many."""
    count = 0
    for name, use in USES.items():
        with torch.no_grad():
            want = use(*pair(None))
            want = torch.zeros(()) if name == "new_empty 0-d" else want
            for cut in CUTS.values():
                torch.testing.assert_close(
                    whole(use(*pair(cut))), want.detach(), msg=f"{name}, {cut}: {{}}".format
                )
                count += 1
    for name, fill in RANDOM.items():
        for cut in CUTS.values():
            param, _ = pair(cut)
            fill(param)
            values = whole(param)
            assert (values - plain(SHAPE)).norm() > 0 and values.std() > 0.1, name
            if name == "orthogonal_":
                torch.testing.assert_close(values.t() @ values, torch.eye(6))
            count += 1
    return count


def test_utilities_of_torch() -> None:
    """Values, shapes and dtypes are those of one process, with pieces cut inside rows and an empty one."""
    assert run_ranks(2, uses) == [(len(USES) + len(RANDOM)) * len(CUTS)] * 2


X = torch.ones(3, 6)
MISUSES: dict[str, Use] = {
    "linear": lambda p, q: nn.functional.linear(X, p),
    "matmul": lambda p, q: X @ p.t(),
    "index": lambda p, q: p[torch.tensor([1, 2])],
    "embedding": lambda p, q: nn.functional.embedding(torch.tensor([1, 2]), p),
    "norm": lambda p, q: nn.functional.layer_norm(torch.ones(2, 8, 6), SHAPE, p, q),
    "conv": lambda p, q: nn.functional.conv1d(torch.ones(1, 6, 4), p.unsqueeze(-1)),
    "bilinear": lambda p, q: torch.einsum("bi,oi->bo", X, p),
    "scale": lambda p, q: torch.ones(SHAPE) * p,
    "bias": lambda p, q: torch.ones(2, *SHAPE) + p,
    "written": lambda p, q: torch.ones(SHAPE).add_(p),
    "joined": lambda p, q: torch.cat([X, p]),
    "copied": lambda p, q: p.detach().copy_(torch.ones(SHAPE)),
    "where": lambda p, q: torch.where(torch.ones(SHAPE) > 0, p, q),
    "loss": lambda p, q: nn.functional.mse_loss(p, torch.ones(SHAPE)),
    "list": lambda p, q: torch._foreach_add([p], [torch.ones(SHAPE)]),
    "masked": lambda p, q: torch.ones(SHAPE).__setitem__(p > 0, 0.0),
}


def misuses() -> dict[str, str]:
    texts = {}
    for name, use in MISUSES.items():
        for cut in CUTS.values():
            try:
                use(*pair(cut))
                texts[name] = "no error"
            except UnsupportedOpError as error:
                texts[name] = str(error)
    return texts


def test_the_usual_cause_is_named() -> None:
    """A sharded parameter beside plain tensors is mostly one outside its forward: the error says what gathers it."""
    for texts in run_ranks(2, misuses):
        assert texts.keys() == MISUSES.keys()
        for name, text in texts.items():
            assert "register_fsdp_forward_method(" in text and "unshard()" in text, (name, text)
