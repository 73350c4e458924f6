"""Complex parameters: views as real numbers, training beside one process, and checkpoints of optimizers' states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate, Shard

from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.dtensor.operators import gathered_views
from vescale_fsdp.errors import UnsupportedOpError

VIEWS: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "as real": (torch.complex64, torch.view_as_real),
    "there and back": (torch.complex64, lambda x: torch.view_as_complex(torch.view_as_real(x))),
    "as numbers of half the size": (torch.float32, lambda x: x.view(torch.bfloat16)),
    "as numbers of the same size": (torch.float32, lambda x: x.view(torch.int32)),
}


def _is_view(name: str, mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    """The view's values, and a write through the view, without a message."""
    dtype, view = VIEWS[name]
    full = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    tensor = distribute_tensor(full, cpu_mesh(*mesh_shape), placements)
    earlier = gathered_views.set_implicit_gathers(False)
    found, want = view(tensor), view(full)
    assert isinstance(found, RaggedDTensor) and found.dtype == want.dtype and found.shape == want.shape
    assert torch.equal(found.full_tensor(), want)
    found.zero_()
    gathered_views.set_implicit_gathers(earlier)
    assert not tensor.full_tensor().any()


CUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [RaggedShard((0, 1), (5, 19))]),
    ((2,), [RaggedShard((), (0, 1))]),
    ((2, 1), [Replicate(), RaggedShard((0,), (1,))]),
    ((1, 2), [RaggedShard((0,), (1,)), Shard(0)]),
]


def test_views_share_memory() -> None:
    """Whatever the cut: no element is divided."""
    run_cases(2, _is_view, [(name, *cut) for name in VIEWS for cut in CUTS])


def _pairs_are_whole() -> None:
    """A cut between real and imaginary part has no such view: it is gathered, or refused."""
    pairs = torch.arange(12.0).view(6, 2)
    tensor = distribute_tensor(pairs, cpu_mesh(), [RaggedShard((0, 1), (5, 7))])
    with pytest.warns(match="gathers"):
        found: Any = torch.view_as_complex(tensor)
    assert torch.equal(found.full_tensor(), torch.view_as_complex(pairs))
    with pytest.raises(UnsupportedOpError):
        found.zero_()


def test_pairs_across_ranks() -> None:
    """They are read only, as other views of a gathered copy."""
    run_ranks(2, _pairs_are_whole)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x.to(self.mix.dtype) @ self.mix
        return self.out((mixed.real * mixed.imag).to(self.out.weight.dtype)).square().mean()


def _models(mesh_shape: tuple[int, ...], **options: Any) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(_Model())
    return fully_shard(models[0], mesh=cpu_mesh(*mesh_shape), **options), models[1]


def _step(ours: nn.Module, plain: nn.Module, steps: list[torch.optim.Optimizer], number: int) -> None:
    """A clipped step of both models, the plain one on the data of all ranks."""
    data = [
        torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * number + rank)) for rank in range(2)
    ]
    ours(data[dist.get_rank()]).backward()
    torch.stack([plain(each) for each in data]).mean().backward()
    for model, optimizer in zip((ours, plain), steps, strict=True):
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
        optimizer.step()
        optimizer.zero_grad()


def _are_equal(ours: nn.Module, plain: nn.Module) -> None:
    for own, want in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), want.detach())  # type: ignore[operator]


def _trains(mesh_shape: tuple[int, ...], policy: MixedPrecisionPolicy | None) -> None:
    ours, plain = _models(mesh_shape, **({} if policy is None else {"mp_policy": policy}))
    steps: list[torch.optim.Optimizer] = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for number in range(3):
        _step(ours, plain, steps, number)
    _are_equal(ours, plain)


def test_training_equals_one_process() -> None:
    """Also over replicas, and under a reduction dtype, which must not drop imaginary parts."""
    policies = [None, MixedPrecisionPolicy(reduce_dtype=torch.float32)]
    run_cases(2, _trains, [(shape, policy) for shape in ((2,), (2, 1)) for policy in policies])


def _resumes(form: str, folder: Path) -> None:
    """Two steps, a save, a load into new objects, one step more."""
    ours, plain = _models((2,))
    options = {"lr": 0.1, "amsgrad": True, "foreach": form == "native"}
    steps: list[torch.optim.Optimizer] = [torch.optim.Adam(m.parameters(), **options) for m in (ours, plain)]
    for number in range(2):
        _step(ours, plain, steps, number)
    again, _ = _models((2,))
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    fresh = torch.optim.Adam(again.parameters(), **options)
    if form == "native":
        save(folder, {"model": ours, "optimizer": steps[0]})
        load(folder, {"model": again, "optimizer": fresh})
    else:
        dcp.save(
            {"model": ours.state_dict(), "optim": get_optimizer_state_dict(ours, steps[0])},
            checkpoint_id=folder,
        )
        state = {"model": again.state_dict(), "optim": get_optimizer_state_dict(again, fresh)}
        dcp.load(state, checkpoint_id=folder)
        again.load_state_dict(state["model"])
        set_optimizer_state_dict(again, fresh, state["optim"])
    _step(again, plain, [fresh, steps[1]], 2)
    _are_equal(again, plain)


@pytest.mark.parametrize("form", ["native", "dcp"])
def test_states_are_saved_and_loaded(form: str, tmp_path: Path) -> None:
    """Moments are complex, the largest second moments too."""
    run_ranks(2, _resumes, form, tmp_path / form)
