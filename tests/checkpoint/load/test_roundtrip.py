"""Saved by n ranks, loaded by m: every kind of tensor comes back, from any world size, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.checkpoint_states import (
    SHAPES,
    assert_equal,
    erase,
    full,
    mixed_state,
    place,
    plain,
    planned,
    ragged_group,
)
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.checkpoint import PerRank, load, read_state, save
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.distribution import LayoutCut, UnitsCut
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.torch_private import StridedShard


def _save_mixed(path: Path, block_rows: int) -> list[int]:
    state = mixed_state(block_rows)
    save(path, state, metadata={"step": 7})
    return [tensor.to_local().numel() for tensor in state["model"].values()]


def _load_mixed(path: Path, block_rows: int) -> int:
    state = mixed_state(block_rows)
    expected = plain(state)
    erase(state)
    assert load(path, state).metadata == {"step": 7}
    return assert_equal(expected, plain(state))


@pytest.mark.parametrize(
    "saved", [1, 3, *(pytest.param(n, marks=pytest.mark.part("formats")) for n in (2, 5))]
)
def test_every_world_size_reads_every_other(saved: int, tmp_path: Path) -> None:
    """Layouts and world sizes differ between save and load; values are the same."""
    numels = run_ranks(saved, _save_mixed, tmp_path / "c", 2)
    assert sum(map(sum, numels)) == sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert saved == 1 or any(n > 0 for n in numels[1])
    for loading in (1, 2, 4):
        compared = run_ranks(loading, _load_mixed, tmp_path / "c", 1)
        assert min(compared) > 20_000


def test_read_state_needs_no_ranks(tmp_path: Path) -> None:
    """All tensors come out whole in a process without a process group, also by box and by flat range."""
    run_ranks(3, _save_mixed, tmp_path / "c", 1)

    reader = read_state(tmp_path / "c")

    for name, shape in SHAPES.items():
        stored = reader[f"model/{name}"]
        assert torch.equal(full(name, shape), stored.read())
        stop = full(name, shape).numel()
        assert torch.equal(full(name, shape).reshape(-1)[stop // 3 :], stored.read_flat(stop // 3, stop))
    assert torch.equal(full("w", (13, 10))[3:9, 2:5], reader["model/w"].read(Box((3, 2), (6, 3))))
    assert torch.equal(full("shard1", (6, 9)), reader["stock/shard1"].read())
    assert reader.tree()["step"] == 7
    assert reader.tree()["optim"]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """The safetensors library opens every rank's file, and pieces lie in buffer order."""
    run_ranks(2, _save_mixed, tmp_path / "c", 1)
    files = sorted((tmp_path / "c").glob("data-*/*.safetensors"))
    layout = planned(2)

    assert len(files) == 2
    for rank, path in enumerate(files):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            held = [slot.fqn for slot, _ in layout.pieces_of(rank)]
            offsets = {name: file.get_tensor(f"model/{name}").numel() for name in held}
            for slot, piece in layout.pieces_of(rank):
                expected = full(slot.fqn, slot.shape).reshape(-1)[slice(*piece.range)]
                assert torch.equal(expected, file.get_tensor(f"model/{slot.fqn}"))
            assert offsets and "__checksums__" in names
            assert file.metadata()["rank"] == str(rank)
        header = path.read_bytes()[:20_000].decode("latin1")
        assert [header.index(f'"model/{name}"') for name in held] == sorted(
            header.index(f'"model/{name}"') for name in held
        )


def test_shared_tensors_are_stored_once(tmp_path: Path) -> None:
    """Two names of one memory are one entry of the manifest."""
    run_ranks(2, _save_mixed, tmp_path / "c", 1)

    reader = read_state(tmp_path / "c")

    assert "stock.plain" in reader.names() and "stock.shared" not in reader.names()
    assert torch.equal(reader["stock/shared"].read(), reader["stock/plain"].read())
    assert "stock.neither" not in reader
    assert reader.tree()["stock"]["shared"] == reader.tree()["stock"]["plain"]


def _hsdp_state(shards: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("rep", "shard"))
    big = distribute_tensor(full("big", (64, 1000)), mesh, [Replicate(), Shard(0)])
    return {"ragged": ragged_group(mesh, axis=1), "big": big}


def _save_hsdp(path: Path) -> None:
    save(path, _hsdp_state(2))


def _load_hsdp(path: Path, shards: int) -> int:
    state = _hsdp_state(shards)
    expected = plain(state)
    erase(state)
    load(path, state)
    return assert_equal(expected, plain(state))


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    """Under HSDP each replica writes half of every large piece, and nothing is written twice."""
    run_ranks(4, _save_hsdp, tmp_path / "c")
    sizes = []
    for path in sorted((tmp_path / "c").glob("data-*/*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sizes.append(file.get_tensor("big").numel())

    assert sizes == [16_000] * 4
    assert min(run_ranks(4, _load_hsdp, tmp_path / "c", 4)) > 64_000
    assert min(run_ranks(3, _load_hsdp, tmp_path / "c", 3)) > 64_000


def _tp_state(dp: int, tp: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 4), torch.nn.LayerNorm(4))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(full(name, tuple(param.shape)))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return {"model": model.state_dict(), "kind": "tp"}


def _tp_round(path: Path, dp: int, tp: int, saving: bool) -> list[str]:
    state = _tp_state(dp, tp)
    kinds = [str(value.placements) for value in state["model"].values()]
    if saving:
        save(path, state)
        return kinds
    for value in state["model"].values():
        value.to_local().zero_()
    load(path, state)
    for name, value in state["model"].items():
        gathered = value
        assert isinstance(gathered, DTensor)
        assert torch.equal(full(name, tuple(value.shape)), gathered.full_tensor()), name
    return kinds


def test_fsdp2_with_tensor_parallelism(tmp_path: Path) -> None:
    """Stock FSDP2 parameters, strided shards included, reload under other splits of dp and tp."""
    kinds = run_ranks(4, _tp_round, tmp_path / "c", 2, 2, True)[0]
    assert any("Strided" in kind or "_S" in kind for kind in kinds)

    reader = read_state(tmp_path / "c")
    assert torch.equal(full("0.weight", (10, 6)), reader["model/0.weight"].read())
    assert torch.equal(full("1.weight", (4, 10)), reader["model/1.weight"].read())
    run_ranks(4, _tp_round, tmp_path / "c", 4, 1, False)
    run_ranks(2, _tp_round, tmp_path / "c", 1, 2, False)
    run_ranks(3, _tp_round, tmp_path / "c", 3, 1, False)


def _flattened(path: Path) -> list[float]:
    columns = distribute_tensor(full("c", (4, 6)), cpu_mesh(), [Shard(1)])
    # What columns.flatten() gives from torch 2.13 on: every rank holds three elements of each row.
    mesh, local = columns.device_mesh, columns.to_local().flatten()
    flat = DTensor.from_local(local, mesh, [StridedShard(0, split_factor=4)], run_check=False)
    for act in (save, load):
        with pytest.raises(CheckpointError) as caught:
            act(path / "c", {"flat": flat})
        assert caught.value.where == "flat" and "sf=4" in str(caught.value.got)
        save(path / "c", {"flat": columns.full_tensor().flatten()}, overwrite=True)
    return flat.to_local().tolist()


def test_a_strided_shard_of_no_order(tmp_path: Path) -> None:
    """A flattened tensor whose parts are spread over all of it is refused, not stored in the wrong places."""
    for rank, values in enumerate(run_ranks(2, _flattened, tmp_path)):
        assert values == full("c", (4, 6))[:, 3 * rank : 3 * rank + 3].flatten().tolist()


def _stages(path: Path, saving: bool) -> dict[str, torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = [0, 1] if rank < 2 else [2, 3]
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    layers = {
        f"layer{place}": distribute_tensor(full(f"layer{place}", (9, 5)), mesh, [Shard(0)]) for place in stage
    }
    state = {"layers": layers, "step": torch.tensor(1), "lr": 0.5}
    if saving:
        save(path, state)
        return {}
    for value in layers.values():
        value.to_local().zero_()
    load(path, state, strict=False)
    return {name: value.full_tensor() for name, value in layers.items()}


def test_pipeline_stages_hold_different_state(tmp_path: Path) -> None:
    """Ranks with different keys are joined in one manifest; a flat world reads all of it."""
    run_ranks(4, _stages, tmp_path / "c", True)

    reader = read_state(tmp_path / "c")

    assert sorted(reader) == ["layers.layer0", "layers.layer1", "layers.layer2", "layers.layer3", "step"]
    for stage in range(4):
        assert torch.equal(full(f"layer{stage}", (9, 5)), reader[f"layers/layer{stage}"].read())
    for found in run_ranks(4, _stages, tmp_path / "c", False):
        assert len(found) == 2
        for name, value in found.items():
            assert torch.equal(full(name, (9, 5)), value)


def _per_rank(path: Path, saving: bool, merge: bool) -> Any:
    rank = dist.get_rank()
    first = {"seed": rank * 10, "cursor": torch.tensor([rank, rank])} if saving else None
    leaf = PerRank(first, merge=_merge if merge else None)
    if saving:
        save(path, {"loader": leaf})
    else:
        load(path, {"loader": leaf})
    return leaf.value


def _merge(values: list[Any], rank: int, world: int) -> Any:
    return {"seed": sum(value["seed"] for value in values), "who": f"{rank}/{world}"}


def test_per_rank_values(tmp_path: Path) -> None:
    """Each rank gets its own value back; another world size merges all of them, or goes by rank."""
    run_ranks(3, _per_rank, tmp_path / "c", True, False)

    same = run_ranks(3, _per_rank, tmp_path / "c", False, True)
    fewer = run_ranks(2, _per_rank, tmp_path / "c", False, True)
    by_rank = run_ranks(2, _per_rank, tmp_path / "c", False, False)

    assert [value["seed"] for value in same] == [0, 10, 20]
    assert [value["cursor"].tolist() for value in same] == [[0, 0], [1, 1], [2, 2]]
    assert fewer == [{"seed": 30, "who": "0/2"}, {"seed": 30, "who": "1/2"}]
    assert [value["seed"] for value in by_rank] == [0, 10]


def _some_have(path: Path) -> None:
    rank = dist.get_rank()
    save(path, {"all": PerRank(rank), **({"odd": PerRank(rank)} if rank % 2 else {})})


def test_values_that_some_ranks_have(tmp_path: Path) -> None:
    """A merge function gets the values of those that had one."""
    run_ranks(4, _some_have, tmp_path / "c")
    state = {name: PerRank(None, merge=lambda values, rank, world: values) for name in ("all", "odd")}

    load(tmp_path / "c", state)

    assert (state["all"].value, state["odd"].value) == ([0, 1, 2, 3], [1, 3])


def _one_layout(path: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = planned(mesh.size())
    tensor = place(layout, "w", mesh)
    tensor.layout_ref = None
    save(path, {"w": tensor})
    return [str(read_state(path).manifest.entries[0].cuts)]


def test_ragged_without_a_layout(tmp_path: Path) -> None:
    """A ragged tensor that no planner made is described by its units and reads back the same."""
    (text, _) = run_ranks(2, _one_layout, tmp_path / "c")

    assert "UnitsCut" in text[0]
    assert torch.equal(full("w", SHAPES["w"]), read_state(tmp_path / "c")["w"].read())


def _claims(path: Path) -> list[int]:
    """Save a tensor of a layout, and two that name the same place in it but are not cut as it says."""
    mesh = cpu_mesh()
    layout = planned(mesh.size())
    state = {"w": place(layout, "w", mesh)}
    numels = layout.piece_numels(layout.slot("w"))
    for name, shape, pieces in (("shaped", (26, 5), numels), ("moved", SHAPES["w"], numels[::-1])):
        start = sum(pieces[: dist.get_rank()])
        local = full(name, shape).reshape(-1)[start : start + pieces[dist.get_rank()]]
        placement = RaggedShard.from_piece_numels(shape, pieces)
        assert isinstance(state["w"].placements[0], RaggedShard)
        assert placement.dims == state["w"].placements[0].dims
        state[name] = RaggedDTensor.from_local(local, mesh, [placement], shape=shape)
        state[name].layout_ref = state["w"].layout_ref
    save(path, state)
    return list(numels)


def test_a_layout_is_not_taken_at_its_word(tmp_path: Path) -> None:
    """Tensors of another shape or other pieces than the slot they name are stored as they are cut."""
    numels = run_ranks(2, _claims, tmp_path / "c")[0]
    assert numels[0] != numels[1]

    reader = read_state(tmp_path / "c")

    kinds = {entry.name: type(entry.cuts[0]) for entry in reader.manifest.entries}
    assert kinds == {"w": LayoutCut, "shaped": UnitsCut, "moved": UnitsCut}
    for name, shape in (("w", (13, 10)), ("shaped", (26, 5)), ("moved", (13, 10))):
        assert torch.equal(full(name, shape), reader[name].read()), name


def _ragged(
    name: str, mesh: DeviceMesh, pieces: tuple[int, ...], base: torch.Tensor | None = None
) -> RaggedDTensor:
    """A (13, 10) tensor in pieces of these sizes, in memory of its own or in that of another."""
    start = sum(pieces[: dist.get_rank()])
    values = full(name, SHAPES["w"]).reshape(-1)[start : start + pieces[dist.get_rank()]]
    local = values.clone() if base is None else base[: len(values)].copy_(values)
    placement = RaggedShard.from_piece_numels(SHAPES["w"], pieces)
    return RaggedDTensor.from_local(local, mesh, [placement], shape=SHAPES["w"])


def _alike_here(path: Path) -> None:
    """Save tensors that the first rank alone cannot tell apart: by the sizes of its pieces, or by memory."""
    layout, mesh = planned(3), cpu_mesh()
    state = {"moved": _ragged("moved", mesh, (50, 50, 30)), "again": _ragged("again", mesh, (50, 30, 50))}
    for tensor in state.values():
        tensor.layout_ref = (layout, "w")
    memory = torch.zeros(130)
    for name, reference in (("n0", None), ("n1", None), ("s0", (layout, "b")), ("s1", (layout, "stack"))):
        state[name] = _ragged(name, mesh, (0, 60, 70), memory if dist.get_rank() == 0 else None)
        state[name].layout_ref = reference
    save(path, state)


def test_what_one_rank_cannot_tell_apart(tmp_path: Path) -> None:
    """Equal pieces here and other ones elsewhere, or empty pieces at one address: all are tensors of their own."""
    run_ranks(3, _alike_here, tmp_path / "c")

    reader = read_state(tmp_path / "c")

    assert sorted(reader.names()) == ["again", "moved", "n0", "n1", "s0", "s1"]
    for name in reader.names():
        assert torch.equal(full(name, SHAPES["w"]), reader[name].read()), name


@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental")
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Every dtype torch can fill memory with comes back bit for bit, 0-d and empty included."""
    state = {}
    for value in vars(torch).values():
        if isinstance(value, torch.dtype) and not str(value).startswith("torch.q"):
            name = str(value).removeprefix("torch.")
            raw = torch.arange(48, dtype=torch.uint8) % 2
            state[name] = raw.view(value)
            state[name + ".0d"] = raw[: value.itemsize].view(value).reshape(())
            state[name + ".empty"] = raw[:0].view(value)
    assert len(state) > 100

    save(tmp_path / "c", state)
    reader = read_state(tmp_path / "c")

    for name, value in state.items():
        found = reader[name].read()
        assert found.dtype == value.dtype and found.shape == value.shape, name
        assert torch.equal(value.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8)), name
