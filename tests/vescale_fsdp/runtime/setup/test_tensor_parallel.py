"""fully_shard on top of tensor and expert parallelism: 2-D and 3-D meshes train as one process does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.models import TensorParallelLayer, assert_is_piece
from vescale_fsdp import RaggedDTensor, Rows, fully_shard
from vescale_fsdp.errors import PlacementError


class Experts(nn.Module):
    """Every expert sees every token; each ep rank adds up those it holds."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 7, 40) / 4)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.mesh is None:
            return torch.tanh(x @ weight).sum(0)
        assert isinstance(weight, DTensor)
        # Each rank's gradient of x knows its own experts only.
        x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        part = torch.tanh(x @ weight.to_local()).sum(0)
        return DTensor.from_local(part, self.mesh, [Partial()]).full_tensor()


class Model(nn.Module):
    """Two layers and the experts."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TensorParallelLayer(), TensorParallelLayer()])
        self.experts = Experts(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.experts(x)


def build(mesh: DeviceMesh | None = None) -> Model:
    torch.manual_seed(5)
    return Model(mesh)


def parallel(mesh: DeviceMesh, dp: tuple[str, ...], **options: Any) -> Model:
    """The model on axes dp and tp of a mesh; the tp axis carries the experts too."""
    model = build(mesh["tp"])
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    weight = model.experts.weight.detach()
    model.experts.weight = nn.Parameter(torch_distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    data = mesh[dp] if len(dp) > 1 else mesh[dp[0]]
    for layer in model.layers:
        fully_shard(layer, mesh=data, **options)
    fully_shard(model, mesh=data, **options)
    return model


def inputs(step: int, replica: int) -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(100 * step + replica))


def train(shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]) -> tuple[int, list[str]]:
    """Four clipped AdamW steps beside one process; returns elements held here and the placements."""
    mesh = cpu_mesh(*shape, names=names)
    dp = names[:-1]
    model, reference = parallel(mesh, dp, **options), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in (model, reference)]
    data = mesh[dp] if len(dp) > 1 else mesh[dp[0]]
    replicas = data.size()
    coordinate = data.get_coordinate()
    assert coordinate is not None
    replica = coordinate[0] if len(dp) == 1 else coordinate[0] * data.size(1) + coordinate[1]
    for step in range(4):
        want = torch.stack([reference(inputs(step, r)).pow(2).mean() for r in range(replicas)]).mean()
        want.backward()
        loss = model(inputs(step, replica)).pow(2).mean()
        loss.backward()
        for (name, param), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_is_piece(param.grad, twin.grad, name)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
        assert isinstance(norms[0], DTensor) and norms[1] > 0.1
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(param, RaggedDTensor)
        torch.testing.assert_close(param.full_tensor(), twin.detach(), msg=name)
    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, RaggedDTensor))
    return held, [str(p.placements) for p in model.parameters() if isinstance(p, RaggedDTensor)]


class Scaled(nn.Module):
    """A weight that every rank of an axis has, and uses on its own rows, as under sequence parallelism."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch_distribute_tensor(torch.ones(3), mesh, [Replicate()]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, DTensor)
        rows = DTensor.from_local(rows, self.weight.device_mesh, [Shard(0)])
        return (rows * self.weight).sum().full_tensor()  # type: ignore[attr-defined, no-any-return]


def sums_in_the_reduce_dtype() -> torch.Tensor:
    """The gradient of a weight that three ranks share: of each element one rank has 256, the other two have 1."""
    mesh = cpu_mesh(1, 3, names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(Scaled(mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    row = torch.ones(1, 3)
    row[0, dist.get_rank()] = 256
    model(row.bfloat16()).backward()
    return model.weight.grad.full_tensor()  # type: ignore[no-any-return, operator, union-attr]


def test_other_axes_sum_in_the_reduce_dtype() -> None:
    """bf16 has no 257: it would lose the ones that are added to 256 one by one."""
    for grad in run_ranks(3, sums_in_the_reduce_dtype):
        assert torch.equal(grad, torch.full((3,), 258.0))


# Options of each mesh. Eight ranks: numerics.
PARITIES: dict[tuple[int, ...], list[dict[str, Any]]] = {
    (2, 2): [{}, {"granularity": Rows(2)}, {"reshard_after_forward": False}],
    (4, 1): [{}],
    (2, 1, 2): [{}],
    (2, 2, 2): [{}],
    (1, 2, 2): [{"granularity": Rows(1)}],
}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=() if shape == (2, 2) else pytest.mark.part("numerics"))
        for shape in PARITIES
    ],
    ids=str,
)
def test_training_on_more_axes_equals_one_process(shape: tuple[int, ...]) -> None:
    """Gradients and parameters after AdamW steps are those of one process, on 2-D and 3-D meshes."""
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "shard", "tp")

    cases = run_cases(math.prod(shape), train, [(shape, names, options) for options in PARITIES[shape]])

    numel = sum(p.numel() for p in build().parameters())
    for results in cases:
        assert all(0 < held < numel for held, _ in results)
        if shape[-1] > 1:
            text = " ".join(results[0][1])
            assert "StridedRaggedShard" in text and "Shard(dim=1)" in text


def mixed_precision() -> None:
    """bf16 compute keeps DTensor parameters DTensors, in bf16, and trains fp32 shards."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = parallel(mesh, ("dp",), mp_policy=policy)
    seen = []
    model.layers[0].up.register_forward_hook(
        lambda m, args, out: seen.append((type(m.weight.data), m.weight.dtype))
    )
    model(inputs(0, 0)).float().sum().backward()
    assert seen == [(DTensor, torch.bfloat16)]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


def test_mixed_precision_goes_with_tensor_parallelism() -> None:
    """Mixed precision and tensor parallelism go together."""
    run_ranks(4, mixed_precision)


class Scale(nn.Module):
    """A replicated DTensor parameter whose gradient is Partial: each tp rank works on its own rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.scale = nn.Parameter(torch_distribute_tensor(torch.ones(5), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch_distribute_tensor(x, self.mesh, [Shard(0)])
        return (rows * self.scale).full_tensor()


def partial_gradients() -> torch.Tensor:
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    model = fully_shard(Scale(mesh["tp"]), mesh=mesh["dp"])
    model(torch.arange(20.0).view(4, 5)).sum().backward()
    grad = model.scale.grad
    assert isinstance(grad, RaggedDTensor)
    return grad.full_tensor()


def test_partial_gradients_are_summed() -> None:
    """A gradient that is Partial over tp counts every rank's part."""
    for grad in run_ranks(4, partial_gradients):
        assert torch.equal(grad, torch.arange(20.0).view(4, 5).sum(0))


def save_and_load(folder: str) -> None:
    """Stock DCP between dp x tp shapes: saved on (2, 2), loaded on (4, 1) and (1, 4)-like meshes."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    model = parallel(mesh, ("dp",))
    model(inputs(0, 0)).sum().backward()
    dcp.save(model.state_dict(), checkpoint_id=folder)
    want = {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, RaggedDTensor)}
    other = parallel(cpu_mesh(4, 1, names=("dp", "tp")), ("dp",), granularity=Rows(1))
    for param in other.parameters():
        with torch.no_grad():
            param.zero_()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    for name, param in other.named_parameters():
        assert isinstance(param, RaggedDTensor)
        assert torch.equal(param.full_tensor(), want[name]), name
    dist.barrier()


def test_checkpoints_load_on_another_split_of_the_ranks(tmp_path: Any) -> None:
    """What is saved under dp x tp loads under another split of the ranks."""
    run_ranks(4, save_and_load, str(tmp_path))


def misuse() -> dict[str, tuple[str, str]]:
    """What was got and where, by the kind of misuse."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    found = {}
    for kind in ("same axis", "unnamed", "twice"):
        layer = TensorParallelLayer()
        own = mesh["tp"] if kind != "unnamed" else cpu_mesh(2, 2)
        placements = [Shard(0)] * own.ndim
        layer.up.weight = nn.Parameter(torch_distribute_tensor(layer.up.weight.detach(), own, placements))
        try:
            fully_shard(layer, mesh=mesh["tp"] if kind == "same axis" else mesh["dp"])
            fully_shard(nn.Sequential(layer.up), mesh=mesh["dp"])
        except PlacementError as error:
            found[kind] = str(error.got), str(error.where)
    return found


def test_meshes_that_do_not_go_together_are_refused() -> None:
    """A DTensor on the sharded axis, on an unnamed mesh or sharded already is refused with the way out."""
    for found in run_ranks(4, misuse):
        assert list(found) == ["same axis", "unnamed", "twice"]
        assert all("weight" in where for _, where in found.values())
        assert all("tp=2" in part for part in found["same axis"])
        assert "(2, 2)" in found["unnamed"][0] and "dp=2" in found["unnamed"][1]
        assert "Ragged" in found["twice"][0]
