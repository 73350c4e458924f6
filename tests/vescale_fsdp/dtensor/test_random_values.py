"""Random values: full tensors do not depend on ranks or cuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import vescale_fsdp
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor
from vescale_fsdp.layout.geometry import numel_of

MORE = pytest.mark.part("numerics")


def drawn_in_blocks(mesh_shape: tuple[int, ...], style: str) -> list[torch.Tensor]:
    """Full tensors of several blocks, of four streams and two seeds."""
    mesh, shape = cpu_mesh(*mesh_shape), (210, 1000)
    results = []
    for seed in (1, 2**40):
        vescale_fsdp.manual_seed(seed)
        for draw in (lambda t: t.normal_(0.5, 2.0), lambda t: t.normal_(), lambda t: t.uniform_(-1, 3)):
            tensor = distribute_tensor(torch.zeros(shape), mesh, placements(shape, mesh_shape, style))
            draw(tensor)
            results.append(tensor.full_tensor())
    return results


def test_blocks_are_the_same_wherever_ranks_cut() -> None:
    """Tensors of several blocks have the asked for moments, differ by stream and seed, and do not depend on ranks."""
    whole = run_ranks(1, drawn_in_blocks, (1,), "elements")[0]
    for mesh_shape, style in (SEVENTHS[0], "elements"), SHARDS:
        for result in run_ranks(math.prod(mesh_shape), drawn_in_blocks, mesh_shape, style):
            assert all(map(torch.equal, result, whole))
    numel = whole[0].numel()
    assert (torch.corrcoef(torch.stack(whole).view(6, -1)) - torch.eye(6)).abs().max() < 6 * numel**-0.5
    normals = whole[1].view(-1).double()
    assert abs(normals.mean()) < 5 * numel**-0.5 and abs(normals.var() - 1) < 7 * numel**-0.5
    assert abs(whole[0].mean() - 0.5) < 10 * numel**-0.5 and abs(whole[0].std() - 2) < 0.02
    assert -1 <= whole[2].min() < -0.99 and 2.99 < whole[2].max() < 3
    blocks = normals[: 3 << 16].view(3, -1)  # of three generators
    assert (torch.corrcoef(blocks) - torch.eye(3, dtype=torch.float64)).abs().max() < 6 * (1 << 16) ** -0.5


SHAPES = ((7, 5), (11,), (4, 3, 3, 3), (6, 4))
INITS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(-2, 3),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "rand_like": lambda t: t.copy_(torch.rand_like(t)),
    "randn_like": lambda t: t.copy_(torch.randn_like(t)),
    "init.normal_": lambda t: nn.init.normal_(t, 1.0, 0.02),
    "init.uniform_": lambda t: nn.init.uniform_(t, -0.1, 0.1),
    "init.trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.02, a=-0.04, b=0.04),
    "init.trunc_normal_ tail": lambda t: nn.init.trunc_normal_(t, std=1.0, a=1.5, b=2.0),
    "init.kaiming_uniform_": lambda t: (
        nn.init.kaiming_uniform_(t, a=math.sqrt(5)) if t.ndim > 1 else t.zero_()
    ),
    "init.kaiming_normal_": lambda t: nn.init.kaiming_normal_(t) if t.ndim > 1 else t.zero_(),
    "init.xavier_uniform_": lambda t: nn.init.xavier_uniform_(t) if t.ndim > 1 else t.zero_(),
    "init.xavier_normal_": lambda t: nn.init.xavier_normal_(t) if t.ndim > 1 else t.zero_(),
    "init.zeros_": lambda t: nn.init.zeros_(t),
    "init.ones_": lambda t: nn.init.ones_(t),
    "init.constant_": lambda t: nn.init.constant_(t, 0.5),
}


def initialized(mesh_shape: tuple[int, ...], style: str, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Full tensors of all shapes after every kind of init, for one way of cutting them."""
    mesh = cpu_mesh(*mesh_shape)
    vescale_fsdp.manual_seed(1234)
    torch.manual_seed(torch.distributed.get_rank())  # torch's own generators must not matter
    results = {}
    for name, init in INITS.items():
        tensors = [
            distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements(shape, mesh_shape, style))
            for shape in SHAPES
        ]
        for tensor in tensors:
            init(tensor)
        results[name] = [tensor.full_tensor() for tensor in tensors]
        assert all(isinstance(tensor, RaggedDTensor) for tensor in tensors)
    return results


def placements(shape: tuple[int, ...], mesh_shape: tuple[int, ...], style: str) -> tuple[Placement, ...]:
    """Rows, single elements, or one owner on a 1-D mesh; beside replicas or Shard on a 2-D one."""
    ranks = mesh_shape[0]
    if style == "shard" and (len(shape) < 2 or shape[-1] % mesh_shape[1]):
        style = "replicas"
    inner = (*shape[:-1], shape[-1] // mesh_shape[1]) if style == "shard" else shape
    numel, row = numel_of(inner), numel_of(inner[1:])
    if style == "owner":
        cuts = [0] * (ranks - 1) + [numel]
    elif style == "rows":
        rows = [inner[0] * (r + 1) // ranks - inner[0] * r // ranks for r in range(ranks)]
        cuts = [n * row for n in rows]
    else:
        edges = sorted({numel * r * r // (ranks * ranks) for r in range(ranks + 1)})
        edges = [0] * (ranks + 1 - len(edges)) + edges
        cuts = [b - a for a, b in pairwise(edges)]
    ragged = RaggedShard.from_piece_numels(inner, cuts)
    if len(mesh_shape) == 1:
        return (ragged,)
    return (ragged, Shard(len(shape) - 1) if style == "shard" else Replicate())


HALVES, ROWS, SEVENTHS = ((2,), "elements"), ((3,), "rows"), ((7,), "elements")
OWNER, REPLICAS, SHARDS = ((3,), "owner"), ((2, 2), "replicas"), ((2, 2), "shard")


@pytest.mark.parametrize(
    ("dtype", "cases"),
    [
        pytest.param(torch.float32, [ROWS, SHARDS], marks=MORE),
        (torch.bfloat16, [HALVES]),
        pytest.param(torch.float32, [HALVES, SEVENTHS, OWNER, REPLICAS], marks=MORE),
        pytest.param(torch.bfloat16, [ROWS], marks=MORE),
        pytest.param(torch.float64, [HALVES, ROWS], marks=MORE),
    ],
    ids=str,
)
def test_init_knows_nothing_of_ranks_and_cuts(
    dtype: torch.dtype, cases: list[tuple[tuple[int, ...], str]]
) -> None:
    """Every init gives the full tensors of one rank, bit for bit, whatever the number of ranks, the cut or the mesh."""
    reference = run_ranks(1, initialized, (1,), "elements", dtype)[0]
    for mesh_shape, style in cases:
        for result in run_ranks(math.prod(mesh_shape), initialized, mesh_shape, style, dtype):
            for name, tensors in reference.items():
                for tensor, want in zip(result[name], tensors, strict=True):
                    assert torch.equal(tensor, want), (name, mesh_shape, style, tuple(want.shape))
    for name in ("normal_", "uniform_", "init.trunc_normal_", "init.kaiming_uniform_"):
        assert len(reference[name][0].unique()) > 20, name
    assert reference["uniform_"][0].min() >= -2 and reference["uniform_"][0].max() < 3
    assert reference["init.trunc_normal_"][0].abs().max() <= 0.04
    assert (reference["normal_"][0] - reference["randn_like"][0]).norm() > 0


def model_digest(world: int, granularity: object) -> list[torch.Tensor]:
    """Parameters of a model initialized on the meta device and sharded."""
    mesh = cpu_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 5, bias=False))
    vescale_fsdp.fully_shard(model, mesh=mesh, granularity=granularity)
    model.to_empty(device="cpu")
    vescale_fsdp.manual_seed(3)
    for module in model:
        module.reset_parameters()
    params = list(model.parameters())
    assert all(isinstance(p, RaggedDTensor) for p in params)
    return [p.full_tensor() for p in params if isinstance(p, RaggedDTensor)]


def test_sharded_models_start_the_same() -> None:
    """fully_shard, to_empty and reset_parameters give one model on 1, 2, 3 and 4 ranks, for any granularity."""
    reference = run_ranks(1, model_digest, 1, None)[0]

    assert len(reference[0].unique()) > 20
    for world, granularity in ((2, None), (3, vescale_fsdp.Rows(2)), (4, vescale_fsdp.Whole())):
        for params in run_ranks(world, model_digest, world, granularity):
            assert all(map(torch.equal, params, reference))


def unseeded() -> tuple[list[float], list[float], object]:
    """Without manual_seed the ranks agree on rank 0's torch seed; state can be taken and given back."""
    vescale_fsdp.set_rng_state((None, 0))
    mesh = cpu_mesh(2, 2)
    torch.manual_seed(100 + torch.distributed.get_rank())
    tensor = distribute_tensor(torch.zeros(6), mesh, [Replicate(), RaggedShard((0,), (1, 2))])
    first = tensor.normal_().full_tensor().tolist()
    state = vescale_fsdp.get_rng_state()
    second = tensor.normal_().full_tensor().tolist()
    vescale_fsdp.set_rng_state(state)
    assert tensor.normal_().full_tensor().tolist() == second != first
    return first, second, state


def test_unseeded_ranks_agree() -> None:
    """Replicas and pieces share one seed even if torch's seeds differ between ranks."""
    results = run_ranks(4, unseeded)

    assert results == [results[0]] * 4 and results[0][2] == (100, 1)


def draw_alone_and_together() -> list[float]:
    """Random values on a mesh of all ranks, of which one has drawn before, on a mesh of its own."""
    mesh = cpu_mesh(2, 1, names=("all", "own"))
    if torch.distributed.get_rank() == 0:
        distribute_tensor(torch.zeros(6), mesh["own"], [RaggedShard((0,), (1,))]).normal_()
    tensor = distribute_tensor(torch.zeros(6), mesh["all"], [RaggedShard((0,), (1, 1))])
    return tensor.normal_().full_tensor().tolist()


def test_a_rank_that_has_drawn_agrees_with_the_others() -> None:
    """In an elastic job's next epoch, too, some processes have a seed and others have none."""
    first, second = run_ranks(2, draw_alone_and_together)

    assert first == second and len(set(first)) == 6
