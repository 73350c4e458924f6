"""State dicts and stock DCP: other worlds, other cuts, FSDP2 both ways; what cannot be loaded says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support import models
from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.models import assert_is_piece, refused
from vescale_fsdp import Element, RaggedDTensor, Rows, Whole, fully_shard
from vescale_fsdp.errors import LifecycleError

KINDS = {"element": Element(), "rows3": Rows(3), "whole": Whole(), "fsdp2": None}


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer; ``fsdp2`` is torch's own."""
    model = models.build(seed, num_blocks=2)
    mesh = cpu_mesh()
    for module in (*model.blocks, model):
        if kind == "fsdp2":
            torch_fully_shard(module, mesh=mesh)
        else:
            fully_shard(module, mesh=mesh, granularity=KINDS[kind])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, world: int) -> list[float]:
    """Losses over a global batch that does not depend on the world size."""
    losses = []
    rank = torch.distributed.get_rank()
    for step in steps:
        rows = torch.cat([models.batch(step, part, rows=2) for part in range(6)])
        loss = models.loss_of(model, rows.chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(models.mean_over_ranks(loss))
    return losses


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer, whole."""
    state = {name: param.full_tensor() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            state[f"{name}.{key}"] = value.full_tensor() if key != "step" else value
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def save(kind: str, path: Path, world: int) -> dict[str, torch.Tensor]:
    model, optimizer = make(kind, seed=1)
    train(model, optimizer, range(3), world)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return full_state(model, optimizer)


def load(kind: str, path: Path, world: int) -> tuple[dict[str, torch.Tensor], list[float], int]:
    model, optimizer = make(kind, seed=2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = full_state(model, optimizer)
    held = sum(param.to_local().numel() for param in model.parameters())
    return loaded, train(model, optimizer, range(3, 5), world), held


def uninterrupted() -> list[float]:
    model, optimizer = make("element", seed=1)
    return train(model, optimizer, range(5), world=1)[3:]


# Who saves on how many ranks, and who loads it on how many.
MOVES = [
    (("element", 2), ("element", 3)),
    (("rows3", 3), ("whole", 2)),
    (("whole", 4), ("element", 1)),
    (("element", 1), ("rows3", 4)),
    (("rows3", 2), ("fsdp2", 3)),
    (("fsdp2", 3), ("rows3", 2)),
    (("fsdp2", 2), ("element", 4)),
    (("element", 3), ("fsdp2", 2)),
]


@pytest.mark.part("formats")
def test_dcp_between_worlds_and_layouts(tmp_path: Path) -> None:
    """Model and AdamW state load bit-equal under another world size and layout, and training goes on."""
    paths = {move: tmp_path / str(number) for number, move in enumerate(MOVES)}
    saved: dict[Any, dict[str, torch.Tensor]] = {}
    loaded: dict[Any, list[Any]] = {}
    for world in range(1, 5):
        moves = [move for move in MOVES if move[0][1] == world]
        results = run_cases(world, save, [(move[0][0], paths[move], world) for move in moves])
        saved |= {move: by_rank[0] for move, by_rank in zip(moves, results, strict=True)}
    for world in range(1, 5):
        moves = [move for move in MOVES if move[1][1] == world]
        results = run_cases(world, load, [(move[1][0], paths[move], world) for move in moves])
        loaded |= dict(zip(moves, results, strict=True))

    expected = run_ranks(1, uninterrupted)[0]
    model = dict(models.build(num_blocks=2).named_parameters())
    for move in MOVES:
        assert sum(held for _, _, held in loaded[move]) == sum(param.numel() for param in model.values())
        for state, losses, _ in loaded[move]:
            assert state.keys() == saved[move].keys() > model.keys()
            for name, tensor in saved[move].items():
                assert torch.equal(state[name], tensor), (move, name)
            assert losses == pytest.approx(expected, rel=1e-5), move


def gather_full(world: int) -> dict[str, torch.Tensor]:
    model, optimizer = make("rows3", seed=1)
    train(model, optimizer, range(1), world)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if torch.distributed.get_rank() == 0:
        for name, param in full.items():
            assert type(param) is torch.Tensor, name
    reference = {name: param.full_tensor() for name, param in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        assert full.keys() == reference.keys()
        assert all(torch.equal(full[name], reference[name]) for name in full)
    return dict(full)


def test_full_state_dict_is_gathered_on_rank_zero() -> None:
    """get_model_state_dict(full_state_dict=True) gives plain whole tensors."""
    full = run_ranks(2, gather_full, 2)[0]
    assert len(full) == len(dict(models.build(num_blocks=2).named_parameters()))


def plain_load_state_dict() -> None:
    source, _ = make("rows3", seed=1)
    target, _ = make("rows3", seed=2)
    before = target.embed.weight.full_tensor().clone()
    state = source.state_dict()
    assert all(isinstance(value, RaggedDTensor) for value in state.values())
    target.load_state_dict(state)
    for name, param in target.named_parameters():
        assert torch.equal(param.full_tensor(), source.get_parameter(name).full_tensor())
    assert (before - target.embed.weight.full_tensor()).norm() > 0
    third, _ = make("rows3", seed=3)
    third.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    x = models.batch(0, 0)
    assert torch.equal(third(x), source(x))
    models.loss_of(third, x).backward()
    assert third.embed.weight.grad is not None


def test_load_state_dict_copies_and_assigns() -> None:
    """Module.load_state_dict works between equally sharded models, with assign=True too."""
    run_ranks(2, plain_load_state_dict)


def meta_init(world: int) -> None:
    mesh = cpu_mesh()
    with torch.device("meta"):
        model = models.Stack()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, granularity=Rows(2))
    assert all(p.is_meta and p.to_local().is_meta for p in model.parameters())
    with refused(LifecycleError, todo="to_empty"):
        model(models.batch(0, 0))
    model.reset_iter_state()
    model.to_empty(device="cpu")
    reference = models.build()
    with torch.no_grad():
        for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
            start, stop = param.piece
            param.to_local().copy_(plain.reshape(-1)[start:stop])
            assert not param.is_meta, name
    _, grads = models.reference_grads(reference, 0, world)
    models.loss_of(model, models.batch(0, mesh.get_rank())).backward()
    for name, param in model.named_parameters():
        assert_is_piece(param.grad, grads[name], name)


def test_a_model_made_on_meta_trains_like_the_plain_one() -> None:
    """Build on meta, shard, to_empty, fill the pieces: trains like the plain model."""
    run_ranks(3, meta_init, 3)


def to_double() -> None:
    model, _ = make("rows3", seed=1)
    model.double()
    assert all(p.dtype == torch.float64 and p.to_local().dtype == torch.float64 for p in model.parameters())
    out = model(models.batch(0, 0).double())
    torch.testing.assert_close(out, models.build(1, num_blocks=2).double()(models.batch(0, 0).double()))


def test_a_change_of_dtype_converts_the_shards() -> None:
    """model.double() after sharding converts the shards, and the forward follows."""
    run_ranks(2, to_double)


def load_what_is_not_there(path: Path, name: str) -> str:
    model, _ = make("rows3", seed=1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    other = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
    state: dict[str, Any] = {"model": {name: other.weight}}
    try:
        dcp.load(state, checkpoint_id=path)
    except BaseException as error:  # noqa: BLE001 (DCP raises a BaseException)
        return str(error)
    return ""


def test_dcp_load_of_another_shape_raises(tmp_path: Path) -> None:
    """A parameter that has another shape in the checkpoint ends in an error that names it and both shapes."""
    for text in run_ranks(2, load_what_is_not_there, tmp_path, "embed.weight"):
        assert "model.embed.weight" in text
        assert "[7, 5]" in text and "[4, 4]" in text


def test_dcp_load_of_a_missing_key_raises(tmp_path: Path) -> None:
    """A parameter that the checkpoint does not have ends in an error that names it."""
    for text in run_ranks(2, load_what_is_not_there, tmp_path, "missing"):
        assert "model.missing" in text
