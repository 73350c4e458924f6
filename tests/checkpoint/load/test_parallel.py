"""Native checkpoints of tensor- and expert-parallel training: every split of the ranks reads every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.checkpoint_states import SHAPES, assert_equal, erase, full, plain, ragged_group
from tests.support.distributed import cpu_mesh, run_ranks
from tests.vescale_fsdp.runtime.setup.test_tensor_parallel import Model, inputs, parallel
from vescale_fsdp import RaggedDTensor, Rows
from vescale_fsdp.checkpoint import load, read_state, save, verify


def _training(dp: int, tp: int, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model on dp x tp ranks, its experts over the tp axis; weights of a seed."""
    mesh = cpu_mesh(dp, tp, names=("dp", "tp"))
    model = parallel(mesh, ("dp",), granularity=Rows(1) if tp == 1 else None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            assert isinstance(param, RaggedDTensor)
            param.mul_(float(torch.rand((), generator=generator)) + 0.5)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model(inputs(0, 0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _gathered(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.full_tensor()  # type: ignore[attr-defined]
        for key, value in optimizer.state[param].items():
            found[f"{name}/{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: value.detach().clone() for name, value in found.items()}


def _save_training(path: Path) -> tuple[dict[str, torch.Tensor], list[int]]:
    model, optimizer = _training(2, 2, seed=1)
    _step(model, optimizer)
    save(path, {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)})
    held = [param.to_local().numel() for param in model.parameters()]  # type: ignore[attr-defined]
    return _gathered(model, optimizer), held


def _resume(path: Path, dp: int, tp: int) -> dict[str, torch.Tensor]:
    model, optimizer = _training(dp, tp, seed=2)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    load(path, state)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    return _gathered(model, optimizer)


def test_tensor_and_expert_parallel_training(tmp_path: Path) -> None:
    """Saved on 2 x 2 ranks: weights and moments come back on every other split, bit for bit."""
    saved = run_ranks(4, _save_training, tmp_path / "c")
    expected, held = saved[0]
    assert sum(number > 0 for number in held) > len(held) // 2 and len(expected) == 4 * len(held)
    assert expected["experts.weight/exp_avg"].abs().max() > 0
    assert verify(tmp_path / "c").ok
    for dp, tp in ((4, 1), (3, 1), (1, 2), (1, 1)):
        for found in run_ranks(dp * tp, _resume, tmp_path / "c", dp, tp):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(value, found[name]), (dp, tp, name)


def _experts(numbers: list[list[int]]) -> dict[str, Any]:
    """Dense weights over all ranks; experts over a mesh of their own, numbered in another order."""
    dense = init_device_mesh("cpu", (dist.get_world_size(),))
    mesh = DeviceMesh("cpu", numbers, mesh_dim_names=("ep", "shard"))
    experts = {
        "cut": distribute_tensor(full("cut", (6, 5, 7)), mesh, [Shard(0), Shard(1)]),
        "copied": distribute_tensor(full("copied", (6, 3)), mesh, [Shard(0), Replicate()]),
        "ragged": ragged_group(mesh, axis=1, prefix="expert."),
    }
    return {"dense": ragged_group(dense), "experts": experts}


def _save_experts(path: Path, numbers: list[list[int]]) -> list[int]:
    state = _experts(numbers)
    save(path, state)
    return [state["experts"]["cut"].to_local().numel(), *_numels(state["dense"])]


def _numels(tensors: dict[str, RaggedDTensor]) -> list[int]:
    return [sum(tensor.to_local().numel() for tensor in tensors.values())]


def _load_experts(path: Path, numbers: list[list[int]]) -> int:
    state = _experts(numbers)
    expected = plain(state)
    erase(state)
    load(path, state)
    return assert_equal(expected, plain(state))


@pytest.mark.parametrize(
    "numbers", [[[0, 2], [1, 3]], pytest.param([[0, 1], [2, 3]], marks=pytest.mark.part("formats"))]
)
def test_experts_on_a_mesh_of_their_own(numbers: list[list[int]], tmp_path: Path) -> None:
    """Experts on a 2-D mesh beside dense weights on a 1-D one: saved by 4 ranks, loaded by 4, 3, 2 and 1."""
    assert all(min(held) > 40 for held in run_ranks(4, _save_experts, tmp_path / "c", numbers))

    reader = read_state(tmp_path / "c")

    assert torch.equal(full("cut", (6, 5, 7)), reader["experts/cut"].read())
    assert torch.equal(full("copied", (6, 3)), reader["experts/copied"].read())
    for name, shape in SHAPES.items():
        assert torch.equal(full(f"expert.{name}", shape), reader[f"experts/ragged/expert.{name}"].read())
    for other in ([[0, 1, 2, 3]], [[0], [1], [2]], [[0], [1]], [[0]]):
        world = sum(map(len, other))
        assert min(run_ranks(world, _load_experts, tmp_path / "c", other)) > 300
