"""dp_mesh_dims: parameters are DTensors on the full mesh, whose data-parallel axes fully_shard is told by name."""

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
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.models import TensorParallelLayer, assert_is_piece
from vescale_fsdp import DataParallelMeshDims, RaggedDTensor, Rows, fully_shard
from vescale_fsdp.errors import ArgumentError, PlacementError, UnsupportedOpError, VescaleError
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.torch_private import newer_class

WITH_DIMS = pytest.mark.skipif(
    DataParallelMeshDims.__module__ == newer_class.__module__, reason="this torch has no DataParallelMeshDims"
)
OURS, THEIRS = fully_shard, torch_fully_shard


class Model(nn.Module):
    """Layers, between local inputs and local outputs if it knows a mesh."""

    def __init__(self, mesh: DeviceMesh | None = None, dp: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TensorParallelLayer(), TensorParallelLayer()])
        self.mesh, self.dp = mesh, dp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self._layers(x)
        names = self.mesh.mesh_dim_names or ()
        rows = [Shard(0) if name in self.dp else Replicate() for name in names]
        out = self._layers(DTensor.from_local(x, self.mesh, rows))
        assert isinstance(out, DTensor)
        return out.redistribute(placements=rows).to_local()

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


TP = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


def build(mesh: DeviceMesh | None = None, dp: tuple[str, ...] = ()) -> Model:
    torch.manual_seed(7)
    model = Model(mesh, dp)
    for layer in model.layers if mesh is not None else ():
        for name, param in list(layer.named_parameters()):
            owner, attribute = layer.get_submodule(name.split(".")[0]), name.split(".")[1]
            tp = TP.get(name, Replicate())
            placements = [tp if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names or ()]
            setattr(owner, attribute, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


def shard(shard_fn: Any, mesh: DeviceMesh, dims: Any, **options: Any) -> Model:
    model = build(mesh, (*dims.replicate_names, *dims.shard_names))
    for layer in model.layers:
        shard_fn(layer, mesh=mesh, dp_mesh_dims=dims, **options)
    shard_fn(model, mesh=mesh, dp_mesh_dims=dims, **options)
    return model


def inputs(step: int, replica: int) -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(100 * step + replica))


def replica_of(mesh: DeviceMesh) -> tuple[int, int]:
    """(index among the data-parallel ranks, their number): tp is the last axis, if there is one."""
    names = mesh.mesh_dim_names or ()
    width = mesh.size(names.index("tp")) if "tp" in names else 1
    return dist.get_rank() // width, dist.get_world_size() // width


def train(
    shape: tuple[int, ...], names: tuple[str, ...], dims: Any, options: dict[str, Any]
) -> list[tuple[tuple[str, ...], str]]:
    """Three SGD steps beside FSDP2 and one process; returns the axes and placements of the parameters."""
    mesh = cpu_mesh(*shape, names=names)
    ours, theirs, reference = shard(OURS, mesh, dims, **options), shard(THEIRS, mesh, dims), build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs, reference)]
    replica, replicas = replica_of(mesh)
    # A sum of two has one order: then nothing may differ from FSDP2, in the last bit either.
    two_by_two = len(dims.shard_names) < 2 and len(dims.replicate_names) < 2
    exact = {"rtol": 0.0, "atol": 0.0} if two_by_two else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(3):
        losses = [m(inputs(step, replica)).pow(2).mean() for m in (ours, theirs)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, **exact)
        torch.stack([reference(inputs(step, r)).pow(2).mean() for r in range(replicas)]).mean().backward()
        for (name, param), twin, plain in zip(
            ours.named_parameters(), theirs.parameters(), reference.parameters(), strict=True
        ):
            assert isinstance(twin.grad, DTensor)
            assert_is_piece(param.grad, plain.grad, name)
            assert_is_piece(param.grad, twin.grad.full_tensor(), name, **exact)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, plain in zip(ours.parameters(), reference.parameters(), strict=True):
        assert isinstance(param, RaggedDTensor)
        torch.testing.assert_close(param.full_tensor(), plain.detach())
    return [
        (p.device_mesh.mesh_dim_names or (), " ".join(map(str, p.placements)))
        for p in ours.parameters()
        if isinstance(p, RaggedDTensor)
    ]


# Of each mesh: the axes that shard and that replicate, options, and the axes on which parameters live.
Row = tuple[Any, Any, dict[str, Any], tuple[str, ...]]
PARITIES: dict[str, tuple[tuple[int, ...], tuple[str, ...], list[Row]]] = {
    "tp": (
        (2, 2),
        ("dp", "tp"),
        [
            ("dp", None, {}, ("dp", "tp")),
            ("dp", None, {"granularity": Rows(2)}, ("dp", "tp")),
            (None, "dp", {}, ("dp", "dp_shard", "tp")),
        ],
    ),
    "replicas": (
        (2, 2),
        ("a", "b"),
        [
            ("b", "a", {"reshard_after_forward": False}, ("a", "b")),
            (("a", "b"), None, {}, ("a_b",)),
            (None, ("a", "b"), {}, ("a_b", "a_b_shard")),
        ],
    ),
    "one axis of two, tp": (
        (1, 2, 2),
        ("a", "b", "tp"),
        [(("a", "b"), None, {"granularity": Rows(1)}, ("a_b", "tp"))],
    ),
    "replicas, tp": ((1, 2, 2), ("a", "b", "tp"), [("b", "a", {}, ("a", "b", "tp"))]),
}


@WITH_DIMS
@pytest.mark.part("numerics")
@pytest.mark.parametrize("name", PARITIES)
def test_named_axes_train_as_fsdp2_and_one_process(name: str) -> None:
    """Losses and gradients equal FSDP2's (to the bit where each sum is of two) and one process's.

    The parameters live on the axes one expects.
    """
    shape, names, rows = PARITIES[name]
    dims = [DataParallelMeshDims(shard=shards, replicate=replicas) for shards, replicas, _, _ in rows]
    cases = [(shape, names, each, options) for each, (_, _, options, _) in zip(dims, rows, strict=True)]

    results = run_cases(math.prod(shape), train, cases)

    for (*_, axes), (found, *_) in zip(rows, results, strict=True):
        assert {mesh_names for mesh_names, _ in found} == {axes}
        assert all(placements.count("Ragged") == 1 for _, placements in found)
        if "tp" in names:
            assert any("S(1)" in placements or "Shard(dim=1)" in placements for _, placements in found)


def what_modules_see() -> None:
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard(OURS, mesh, DataParallelMeshDims(shard="dp"), mp_policy=policy)
    seen: list[torch.Tensor] = []
    model.layers[0].up.register_forward_hook(lambda m, args, out: seen.append(m.weight))
    model(inputs(0, 0)).float().sum().backward()
    (weight,) = seen
    assert isinstance(weight, DTensor) and weight.dtype is torch.bfloat16
    assert weight.device_mesh is mesh and weight.placements == (Replicate(), Shard(0))
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


@WITH_DIMS
def test_modules_see_parameters_on_the_full_mesh() -> None:
    """Inside a forward a parameter is the DTensor it was, on the same mesh object, in the compute dtype."""
    run_ranks(4, what_modules_see)


def replicated_units() -> list[bool | None]:
    mesh = cpu_mesh(2, names=("rep",))
    model = shard(OURS, mesh, DataParallelMeshDims(replicate="rep"))
    model(inputs(0, 0)).sum().backward()
    for param in model.parameters():
        assert isinstance(param, RaggedDTensor) and param.to_local().numel() == param.numel()
    return [state_of(layer).reshard_after_forward for layer in model.layers]  # type: ignore[union-attr]


@WITH_DIMS
def test_replication_only_keeps_everything_everywhere() -> None:
    """Without an axis that shards every rank holds all of every parameter, and nothing is freed between."""
    assert run_ranks(2, replicated_units) == [[False, False]] * 2


def save_and_load(folder: str) -> None:
    """Stock DCP: saved on dp x tp with names, loaded flat over all ranks by FSDP2."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    model = shard(OURS, mesh, DataParallelMeshDims(shard="dp"))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = build()
    torch.nn.init.zeros_(other.layers[0].up.weight)
    torch_fully_shard(other, mesh=cpu_mesh())
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for name, param in build().named_parameters():
        assert torch.equal(state[name].full_tensor(), param), name


@WITH_DIMS
def test_a_checkpoint_from_a_full_mesh_loads_anywhere(tmp_path: Any) -> None:
    """What is saved from named axes of a full mesh loads anywhere."""
    run_ranks(4, save_and_load, str(tmp_path))


def refusals() -> None:
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")

    def refused(*got: object, error: type[VescaleError] = PlacementError, **changes: Any) -> None:
        """The call is refused, with each of ``got`` in the error's ``got`` or ``where``."""
        layer = build(changes.pop("on", mesh)).layers[0]
        if "plain" in changes:
            layer.up = nn.Linear(7, changes.pop("plain"))
        if "placements" in changes:
            weight = distribute_tensor(torch.ones(10, 7), mesh, changes.pop("placements"))
            layer.up.weight = nn.Parameter(weight)
        with pytest.raises(error) as caught:
            fully_shard(layer, **{"mesh": mesh, "dp_mesh_dims": dims, **changes})
        for part in got:
            assert str(part) in f"{caught.value.got} {caught.value.where}", (part, caught.value)

    refused("up.weight", plain=10)
    transposed, unnamed = cpu_mesh(2, 2, names=("tp", "dp")), cpu_mesh(2, 2)
    refused("norm.weight", transposed, on=transposed)
    cut, partial = (Shard(0), Replicate()), (Replicate(), Partial())
    refused("up.weight", cut, placements=cut)
    both = DataParallelMeshDims(shard="dp", replicate="tp")
    refused("up.weight", (Replicate(), Shard(0)), dp_mesh_dims=both)
    refused("up.weight", partial, placements=partial)
    refused("'cp'", mesh, dp_mesh_dims=DataParallelMeshDims(shard="cp"))
    refused("'dp'", mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp", replicate="dp"))
    refused("'dp'", unnamed, mesh=unnamed)
    refused(2, error=UnsupportedOpError, reshard_after_forward=2)
    refused("yes", error=ArgumentError, reshard_after_forward="yes")
    only = DataParallelMeshDims(replicate="dp")
    refused("dp_shard=1", dp_mesh_dims=only, shard_placement_fn=lambda p: None)
    twice = fully_shard(build(mesh).layers[0], mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(PlacementError) as again:
        fully_shard(nn.Sequential(twice.up), mesh=mesh, dp_mesh_dims=dims)
    assert "Ragged" in str(again.value.got)


@WITH_DIMS
def test_parameters_and_names_that_do_not_go_with_the_mesh_are_refused() -> None:
    """Parameters and names that do not go with the mesh, numbers to reshard to, placement functions."""
    run_ranks(4, refusals)


def test_a_torch_without_the_class() -> None:
    """Where torch has no DataParallelMeshDims, making one says so."""
    absent = newer_class(math, "DataParallelMeshDims", "take another way")
    with pytest.raises(NotImplementedError, match="DataParallelMeshDims"):
        absent(shard="dp")
    assert newer_class(torch.distributed.tensor, "DTensor", "") is DTensor
