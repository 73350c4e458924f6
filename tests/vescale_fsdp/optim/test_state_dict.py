"""Optimizer state saved on N ranks continues on M with the same bits, and is refused where it means something else."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import everything, full_tensors, laid_like
from vescale_fsdp import Flat, Granularity, Rows, Tiles, Whole, fully_shard
from vescale_fsdp import checkpoint as native
from vescale_fsdp.checkpoint import state_dict as native_state_dict
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.optim import AdamW8bit, AdamWOptions, Muon, Shampoo

KINDS = ("muon", "adamw8bit", "adamw8bit-tiles", "shampoo")
MORE = pytest.mark.part("numerics")


def rows(*core: str) -> list[Any]:
    """A row for each kind; `make test` runs these."""
    return [pytest.param(kind, marks=() if kind in core else MORE) for kind in KINDS]


class Experts(nn.Module):
    """A stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.empty(3, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    """An embedding, two odd matrices, a stack, biases and a norm: some of it 8-bit, some of it with empty shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.up = nn.Linear(65, 70)
        self.experts = Experts()
        self.norm = nn.LayerNorm(5)
        self.lm_head = nn.Linear(33, 129, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def build(
    kind: str,
    sharded: bool,
    seed: int,
    dtype: torch.dtype,
    granularity: Granularity | None = None,
    hybrid: bool = False,
) -> tuple[Model, torch.optim.Optimizer]:
    """The model with values of a seed, and its optimizer."""
    model = Model()
    shapes = [tuple(p.shape) for p in model.parameters()]
    for param, value in zip(model.parameters(), full_tensors(shapes, seed).values(), strict=True):
        param.data = value.to(dtype)
    tiles = Tiles(32, 32)
    rules = {
        "muon": Muon.granularity(),
        "adamw8bit": AdamW8bit.granularity(),
        "adamw8bit-tiles": AdamW8bit.granularity(block=tiles),
        "shampoo": Shampoo.granularity(block_size=16, adamw=["*embed*", "*norm*"]),
    }
    if sharded:
        rule = granularity if granularity is not None else rules[kind]
        mesh = cpu_mesh(2, 2) if hybrid else cpu_mesh()
        fully_shard(model.up, mesh=mesh, granularity=rule)
        fully_shard(model, mesh=mesh, granularity=rule)
    matrices, rest = Muon.split_params(model)
    adamw = AdamWOptions(lr=0.01)
    if kind == "muon":
        return model, Muon(matrices, lr=0.02, adamw_params=rest, adamw=adamw)
    if kind == "shampoo":
        rest = [p for fqn, p in model.named_parameters() if "embed" in fqn or "norm" in fqn]
        others = [p for p in model.parameters() if all(p is not r for r in rest)]
        return model, Shampoo(others, eps=1e-6, block_size=16, update_every=2, adamw_params=rest, adamw=adamw)
    block: Flat | Tiles = tiles if kind == "adamw8bit-tiles" else Flat(256)
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "state_bits": 32}]
    return model, AdamW8bit(groups, lr=0.01, block=block)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Steps with the gradients of these numbers."""
    params = list(model.parameters())
    for number in numbers:
        grads = full_tensors([tuple(p.shape) for p in params], 100 + number)
        for param, grad in zip(params, grads.values(), strict=True):
            param.grad = laid_like(grad.to(param.dtype), param)
        optimizer.step()


def save_run(kind: str, folder: Path, dtype: torch.dtype, form: str) -> None:
    """Three steps, then a save by stock DCP or in the native format."""
    model, optimizer = build(kind, True, 0, dtype, hybrid=form == "hybrid")
    steps(model, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    state = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if form == "native":
        native.save(folder, state)
    else:
        dcp.save(state, checkpoint_id=folder)


def load_run(
    kind: str, folders: list[Path], dtype: torch.dtype, form: str
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """For each folder: another model loads it and takes one more step; everything before and after the step."""
    results = []
    for folder in folders:
        model, optimizer = build(kind, True, 7, dtype, hybrid=form == "hybrid")
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        state = {
            "model": model.state_dict(),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }
        if form == "native":
            native.load(folder, state)
        else:
            dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
        loaded = everything(model, optimizer)
        steps(model, optimizer, range(3, 4))
        results.append((loaded, everything(model, optimizer)))
    return results


def round_trips(kind: str, tmp_path: Path, dtype: torch.dtype, form: str, worlds: tuple[int, ...]) -> None:
    """Save on every world size, load each on every world size, compare with one process bit for bit."""
    model, optimizer = build(kind, False, 0, dtype)
    steps(model, optimizer, range(3))
    before = everything(model, optimizer)
    steps(model, optimizer, range(3, 4))
    after = everything(model, optimizer)
    assert any((before[name] != after[name]).any() for name in before if "/" in name)
    folders = [tmp_path / f"{world}" for world in worlds]
    for world, folder in zip(worlds, folders, strict=True):
        run_ranks(world, save_run, kind, folder, dtype, form)
    for world in worlds:
        for results in run_ranks(world, load_run, kind, folders, dtype, form):
            assert len(results) == len(worlds)
            for loaded, stepped in results:
                assert_equal(loaded, before)
                assert_equal(stepped, after)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("muon", (1, 3)),
        ("adamw8bit-tiles", (1, 3)),
        *(pytest.param(kind, worlds, marks=MORE) for kind in KINDS for worlds in ((1, 3), (1, 2, 3, 4))),
    ],
    ids=str,
)
def test_every_world_size_loads_every_other(kind: str, worlds: tuple[int, ...], tmp_path: Path) -> None:
    """Saved and loaded on each number of ranks: state and next step equal one process, bit for bit."""
    round_trips(kind, tmp_path, torch.float32, "dcp", worlds)


@pytest.mark.parametrize("kind", rows("adamw8bit"))
def test_flattened_state_dicts_round_trip(kind: str, tmp_path: Path) -> None:
    """The flattened form that torchtitan saves works too."""
    round_trips(kind, tmp_path, torch.float32, "flat", (2, 3))


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("adamw8bit", (2, 3)),
        *(pytest.param(kind, (1, 3, 4), marks=MORE) for kind in KINDS),
    ],
)
def test_the_native_format_round_trips(kind: str, worlds: tuple[int, ...], tmp_path: Path) -> None:
    """vescale_fsdp.checkpoint saves and reshards the same state."""
    round_trips(kind, tmp_path, torch.float32, "native", worlds)


@pytest.mark.parametrize("kind", rows("adamw8bit-tiles"))
def test_hybrid_meshes_round_trip(kind: str, tmp_path: Path) -> None:
    """Saved and loaded on 2 replicas x 2 shards."""
    round_trips(kind, tmp_path, torch.float32, "hybrid", (4,))


@pytest.mark.parametrize("kind", ["adamw8bit", pytest.param("shampoo", marks=MORE)])
def test_fp32_state_survives_bf16_parameters(kind: str, tmp_path: Path) -> None:
    """Scales, factors and counters beside bf16 parameters keep dtype and bits."""
    round_trips(kind, tmp_path, torch.bfloat16, "dcp", (1, 3))


class FullStates(NamedTuple):
    """What one rank sees of full state dicts.

    Attributes:
        keys: names of all state before any step.
        saved: everything of the optimizer that took steps.
        loaded: everything of a fresh one, after its full state dict was loaded by every rank.
        broadcast: the same, after only rank 0 had it.
    """

    keys: list[str]
    saved: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]
    broadcast: dict[str, torch.Tensor]


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def full_run(kind: str) -> FullStates:
    """Full state dicts, loaded into fresh sharded optimizers."""
    model, optimizer = build(kind, True, 0, torch.float32)
    keys = sorted(get_optimizer_state_dict(model, optimizer, options=FLAT))
    steps(model, optimizer, range(3))
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    other_model, other = build(kind, True, 0, torch.float32)
    tensors = [v for parts in full["state"].values() for v in parts.values()]  # type: ignore[union-attr]
    assert all(type(value) is torch.Tensor for value in tensors)
    set_optimizer_state_dict(other_model, other, full)
    loaded = everything(other_model, other)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    other_model, other = build(kind, True, 0, torch.float32)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    native_state_dict.set_optimizer_state_dict(other_model, other, full, options=options)
    return FullStates(keys, everything(model, optimizer), loaded, everything(other_model, other))


@pytest.fixture(scope="module", params=KINDS)
def full_states(request: pytest.FixtureRequest) -> list[FullStates]:
    """One run of 3 ranks for all tests of full state dicts."""
    return run_ranks(3, full_run, request.param)


def test_state_exists_before_the_first_step(full_states: list[FullStates]) -> None:
    """Every rank has the same keys for every parameter from construction on."""
    first, *others = (states.keys for states in full_states)
    assert all(other == first for other in others)
    names = [fqn for fqn, _ in Model().named_parameters()]
    assert all(any(key.startswith(f"state.{name}.") for key in first) for name in names)


def test_full_state_dicts_load_into_shards(full_states: list[FullStates]) -> None:
    """Full, plain tensors are cut to each rank's piece when they are loaded."""
    for states in full_states:
        state = {name: value for name, value in states.saved.items() if "/" in name}
        assert_equal({name: states.loaded[name] for name in state}, state)


def test_full_state_dicts_come_from_the_first_rank(full_states: list[FullStates]) -> None:
    """Ours of torch's functions broadcasts what rank 0 holds; every rank keeps its piece."""
    for states in full_states:
        state = {name: value for name, value in states.saved.items() if "/" in name}
        assert_equal({name: states.broadcast[name] for name in state}, state)


def copy_run(kind: str, other_granularity: Granularity | None) -> tuple[dict[str, torch.Tensor], ...]:
    """One sharded optimizer's state dict loaded into another, laid out as the first or otherwise."""
    model, optimizer = build(kind, True, 0, torch.float32)
    steps(model, optimizer, range(3))
    other_model, other = build(kind, True, 0, torch.float32, other_granularity)
    other.load_state_dict(optimizer.state_dict())
    steps(model, optimizer, range(3, 4))
    steps(other_model, other, range(2))  # the first's tensors must not be shared
    return everything(model, optimizer), everything(other_model, other)


def one_more_step(kind: str) -> dict[str, torch.Tensor]:
    """One process: the state after three steps and, on the first values, two more."""
    model, optimizer = build(kind, False, 0, torch.float32)
    steps(model, optimizer, range(3))
    with torch.no_grad():
        for param, value in zip(
            model.parameters(), build(kind, False, 0, torch.float32)[0].parameters(), strict=True
        ):
            param.copy_(value)
    steps(model, optimizer, range(2))
    return everything(model, optimizer)


@pytest.mark.parametrize("other_granularity", [None, Rows(5)], ids=["same cuts", "other cuts"])
@pytest.mark.parametrize("kind", ["muon", "adamw8bit", "shampoo"])
def test_state_is_copied_between_shards(kind: str, other_granularity: Granularity | None) -> None:
    """Loading DTensors copies them, redistributed where the cuts differ; nothing is shared afterwards."""
    if other_granularity is not None and kind != "muon":
        other_granularity = Whole()  # the only other cuts that keep their blocks
    expected = one_more_step(kind)
    for _, loaded in run_ranks(2, copy_run, kind, other_granularity):
        assert_equal(loaded, expected)


def test_counters_are_not_cast() -> None:
    """A step count of 257 beside a bf16 parameter is 257 after loading; cast to bf16 it would be 256."""
    param = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    optimizer = AdamW8bit([param])
    optimizer.state[param]["step"].fill_(257)
    optimizer.state[param]["exp_avg_scales"].fill_(1.001)
    other = AdamW8bit([param])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert other.state[param]["step"].item() == 257
    assert other.state[param]["exp_avg_scales"].dtype == torch.float32
    assert torch.equal(other.state[param]["exp_avg_scales"], optimizer.state[param]["exp_avg_scales"])


def plain(kind: str, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of one matrix."""
    param = nn.Parameter(torch.ones(64, 64))
    if kind == "muon":
        return Muon([param], **options)
    return AdamW8bit([param], **options) if kind == "adamw8bit" else Shampoo([param], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_go_on(kind: str) -> None:
    """A deep copy and a pickle of model and optimizer take the same next step as the original."""
    model, optimizer = build(kind, False, 0, torch.float32)
    steps(model, optimizer, range(2))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    steps(model, optimizer, range(2, 3))
    for other_model, other in copies:
        steps(other_model, other, range(2, 3))
        assert_equal(everything(other_model, other), everything(model, optimizer))


@pytest.mark.parametrize(
    ("kind", "saved", "own", "expected", "got"),
    [
        ("adamw8bit", {"block": Flat(2048)}, {}, "'flat:256'", "'flat:2048'"),
        ("adamw8bit", {"block": Tiles(32, 32)}, {}, "'flat:256'", "'tiles:32x32'"),
        ("adamw8bit", {"min_8bit_numel": 10_000}, {}, "'min_8bit_numel': 4096", "'min_8bit_numel': 10000"),
        ("shampoo", {"block_size": 32}, {"block_size": 16}, "'block_size': 16", "'block_size': 32"),
        ("shampoo", {"grafting": "none"}, {}, "'grafting': 'adam'", "'grafting': 'none'"),
    ],
)
def test_other_blocks_are_refused(
    kind: str, saved: dict[str, Any], own: dict[str, Any], expected: str, got: str
) -> None:
    """State recorded with another block, map or grafting is refused, naming both; nothing is changed."""
    optimizer = plain(kind, **own)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(plain(kind, **saved).state_dict())
    assert expected in str(caught.value.expected) and got in str(caught.value.got)
    assert caught.value.where == f"param group 0 of {type(optimizer).__name__}" and caught.value.todo
    assert repr(optimizer.state_dict()) == repr(before)


def test_another_momentum_form_is_refused() -> None:
    """SGD-form momentum is 20 times larger; state that says so, or says nothing, is refused."""
    optimizer = plain("muon")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["momentum_form"] = "sgd"
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(saved)
    assert caught.value.got == "{'algorithm': 'muon', 'momentum_form': 'sgd'}"
    param = nn.Parameter(torch.ones(64, 64))
    param.grad = torch.ones(64, 64)
    theirs = torch.optim.Muon([param])
    theirs.step()
    unrecorded = theirs.state_dict()
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(unrecorded)
    assert caught.value.expected == "{'algorithm': 'muon', 'momentum_form': 'ema'}"
    assert "'muon'" not in str(caught.value.got)
    unrecorded["param_groups"][0].update(momentum_form="ema", algorithm="muon", row_splits=None)
    optimizer.load_state_dict(unrecorded)
    (state,) = optimizer.state.values()
    assert torch.equal(state["momentum_buffer"], theirs.state[param]["momentum_buffer"])


def refusal(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> tuple[object, object]:
    """What was expected of the state of the one parameter, and what was got."""
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(saved)
    assert caught.value.where == "parameter 0 of param group 0, shape (64, 64)"
    return caught.value.expected, caught.value.got


def test_other_parts_and_shapes_are_refused() -> None:
    """fp32 moments are not quantized in silence, and another model's state does not fit."""
    optimizer = plain("adamw8bit")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = {k: torch.zeros(64, 64) for k in ("exp_avg", "exp_avg_sq")} | {
        "step": torch.tensor(1.0)
    }
    names = str(sorted(optimizer.state_dict()["state"][0]))
    assert refusal(optimizer, saved) == (names, "['exp_avg', 'exp_avg_sq', 'step']")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_codes"] = torch.zeros(64, 32, dtype=torch.uint8)
    expected = "exp_avg_codes of shape (64, 64), torch.uint8"
    assert refusal(optimizer, saved) == (expected, "shape (64, 32), torch.uint8")
    assert refusal(optimizer, {**saved, "state": {}}) == (names, "[]")
    signed = copy.deepcopy(optimizer.state_dict())
    signed["state"][0]["exp_avg_codes"] = torch.zeros(64, 64, dtype=torch.int8)
    assert refusal(optimizer, signed) == (expected, "shape (64, 64), torch.int8")


def test_a_refused_state_leaves_the_options_as_they_are() -> None:
    """What was found out while loading takes back the groups that torch has put in place already."""
    optimizer = plain("adamw8bit")
    before = [dict(group) for group in optimizer.param_groups]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    del saved["state"][0]["step"]
    _, got = refusal(optimizer, saved)
    assert got == str(sorted(saved["state"][0]))
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in before] != [0.5]


def test_load_state_dict_itself_refuses_other_options() -> None:
    """Also where nothing has called check_state_dict before."""
    param = nn.Parameter(torch.zeros(64, 64))
    saved = AdamW8bit([param], block=Flat(256)).state_dict()
    optimizer = AdamW8bit([param], block=Flat(128))
    with pytest.raises(CheckpointError, check=lambda error: error.where == "param group 0 of AdamW8bit"):
        optimizer.load_state_dict(saved)
