"""One fingerprint for a state, whatever its ranks, sharding, form and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.checkpoint_states import erase, mixed_state, plain
from tests.support.distributed import run_ranks
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.checkpoint import Fingerprint, async_save, fingerprint, load, save
from vescale_fsdp.checkpoint.native.targets import LoadTarget
from vescale_fsdp.conversion import ConvertOptions, HuggingFace, convert, diff, fingerprint_of, open_source
from vescale_fsdp.conversion.cli.main import cli
from vescale_fsdp.errors import CheckpointError, PartialLoadError


def _of_ranks(path: Path) -> tuple[Fingerprint, Fingerprint, list[Fingerprint]]:
    """Fingerprints of a state, of its gathered copy on one rank, and of each form that it is saved in."""
    state = mixed_state()
    own = fingerprint(state)
    save(path / "native", state, fingerprint=True)
    save(path / "zarr", state, format="zarr", fingerprint=True)
    async_save(path / "behind", state, fingerprint=True).wait()
    save(path / "dcp", state, format="dcp")
    gathered = plain(state)
    del gathered["stock"]["shared"]
    gathered["stock"]["shared"] = gathered["stock"]["plain"]
    if dist.get_rank() == 0:
        torch.save(gathered, path / "torch.pt")
    dist.barrier()
    forms = [
        fingerprint_of(open_source(str(path / name)))
        for name in ("native", "zarr", "behind", "dcp", "torch.pt")
    ]
    forms += [
        fingerprint_of(open_source(str(path / name)), recorded=True) for name in ("native", "zarr", "behind")
    ]
    return own, fingerprint(gathered), forms


@pytest.mark.parametrize("world", [1, 3])
def test_the_same_on_all_ranks_and_in_all_forms(world: int, tmp_path: Path) -> None:
    found = run_ranks(world, _of_ranks, tmp_path)
    expected = found[0][0]
    assert len(expected.tensors) > 20 and len({each.sums for each in expected.tensors.values()}) > 10
    for own, gathered, forms in found:
        assert own == gathered == expected
        for form in forms:
            assert form.differences(expected) == ()
            assert form.digest == expected.digest


def _of_models() -> list[tuple[Fingerprint, Fingerprint]]:
    """Of a plain model and of the same one with replicas, with tensor parallelism, and under FSDP2."""

    def replicas(model: torch.nn.Module) -> None:
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")), granularity=Rows(3)
        )

    def tensor_parallel(model: torch.nn.Module) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])

    found = []
    for shard in (replicas, tensor_parallel, fsdp2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 8))
        alone = fingerprint(model)
        shard(model)
        found.append((alone, fingerprint(model)))
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        assert len(fingerprint(model).differences(alone)) == 1
    return found


def test_models_on_meshes_of_two_axes_and_under_fsdp2() -> None:
    for of_rank in run_ranks(4, _of_models):
        assert len(of_rank) == 3 and all(alone == sharded for alone, sharded in of_rank)


def _loaded_end_to_end(path: Path, saves: bool) -> list[str]:
    """Load on other ranks; then once more, with a rank whose memory changes behind the read of a tensor."""
    state = mixed_state(block_rows=1 if saves else 2)
    if saves:
        save(path, state, fingerprint=True)
        return []
    erase(state)
    load(path, state, verify="end-to-end")
    found = [str(fingerprint(state) == fingerprint_of(open_source(str(path))))]

    finish = LoadTarget.finish

    def spoiled(target: LoadTarget) -> None:
        finish(target)
        if dist.get_rank() == 1 and target.itemsize == 4 and target.flat.numel() > 20:
            target.flat[3] += 1

    with mock.patch.object(LoadTarget, "finish", spoiled), pytest.raises(PartialLoadError) as caught:
        load(path, state, verify="end-to-end")
    return [*found, type(caught.value).__name__]


def test_end_to_end_compares_what_is_in_memory(tmp_path: Path) -> None:
    run_ranks(2, _loaded_end_to_end, tmp_path / "c", True)
    assert run_ranks(3, _loaded_end_to_end, tmp_path / "c", False) == [["True", "DamagedLoadError"]] * 3


def test_end_to_end_needs_recorded_fingerprints(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.ones(3)}, fingerprint=False)
    state = {"w": torch.zeros(3)}
    with pytest.raises(CheckpointError):
        load(tmp_path / "c", state, verify="end-to-end")
    load(tmp_path / "c", state)
    assert state["w"].sum() == 3


def _moments(path: Path, saves: bool) -> bool:
    """Optimizer state that the first load creates is compared too."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    if saves:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        save(path, state, fingerprint=True)
    else:
        load(path, state, verify="end-to-end")
    return fingerprint(state) == fingerprint_of(open_source(str(path)))


def test_moments_are_compared(tmp_path: Path) -> None:
    assert run_ranks(1, _moments, tmp_path / "c", True) == [True]
    assert run_ranks(2, _moments, tmp_path / "c", False) == [True, True]


def _groups_that_cut_otherwise(path: Path) -> str:
    """Two groups of two ranks have one tensor, cut by rows and by columns; of which one has another value."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "rank"))
    group = mesh.get_local_rank("group")
    value = torch.arange(24.0).view(4, 6) + group
    tensor = distribute_tensor(value, mesh["rank"], [Shard(group)], src_data_rank=None)
    try:
        save(path, {"w": tensor}, fingerprint=True)
    except CheckpointError as error:
        return type(error).__name__
    return "saved"


def test_groups_that_cut_a_tensor_otherwise_are_compared(tmp_path: Path) -> None:
    assert run_ranks(4, _groups_that_cut_otherwise, tmp_path / "c") == ["CheckpointError"] * 4


def test_the_command_compares_names_types_and_files(tmp_path: Path) -> None:
    """A checkpoint with a repository of its weights in bf16, as diff would match them; a changed weight is named."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 4))
    save(tmp_path / "c", {"model": model, "step": 3}, fingerprint=True)
    convert(open_source(str(tmp_path / "c")), str(tmp_path / "hf"), "hf", ConvertOptions(dtype=("bf16",)))
    path, other = str(tmp_path / "c"), str(tmp_path / "hf")

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(cli, ["fingerprint", *arguments, "--json", "-q"])
        return done.exit_code, json.loads(done.stdout)

    code, alone = run(path)
    assert code == 0 and alone["sides"][0]["digest"] == fingerprint({"model": model}).digest
    assert run(path, "--recorded")[1] == alone
    code, both = run(path, other)
    assert code == 1 and len(both["differing"]) == 4
    code, cast = run(path, other, "--as", "bf16", "--names", "hf")
    assert code == 0 and cast["differing"] == [] and len(cast["sides"][1]["tensors"]) == 4
    with torch.no_grad():
        model[1].bias[2] += 1
    save(tmp_path / "d", {"model": model, "step": 4}, fingerprint=True)
    assert run(path, str(tmp_path / "d"))[1]["differing"] == ["1.bias"]
    assert run(path, str(tmp_path / "d"), "--recorded")[1]["differing"] == ["1.bias"]


def test_a_repository_has_its_fingerprints_beside_its_weights(tmp_path: Path) -> None:
    """Of what was written, cast, in several files; none if other weights have taken their place."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 4))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    options = ConvertOptions(dtype=("bf16",), max_shard_bytes=2000, fingerprint=True)
    convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "hf"), "hf", options)
    written = open_source(str(tmp_path / "hf"))
    assert len(written.facts) and len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert written.recorded == fingerprint_of(written) == fingerprint(model.bfloat16())
    again = ConvertOptions(max_shard_bytes=2000, overwrite=True)
    convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "hf"), "hf", again)
    assert open_source(str(tmp_path / "hf")).recorded is None


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_conversion_to_a_native_checkpoint_records_what_it_writes(tmp_path: Path, ranks: int) -> None:
    """Cut tensors, replicas, and a load that compares what is in memory."""
    state = {f"layers.{layer}.w": torch.randn(70, 50) for layer in range(3)}
    state |= {"bias": torch.randn(13).bfloat16(), "count": torch.tensor(7), "large": torch.randn(40_000)}
    torch.save({"model": state, "ema": {"w": torch.randn(9, 5)}}, tmp_path / "a.pt")
    options = ConvertOptions(ranks=ranks, fingerprint=True)
    convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "c"), "native", options)
    written = open_source(str(tmp_path / "c"))
    assert written.recorded == fingerprint_of(written)
    assert len(written.sums) == len(written.tensors) == 7
    assert written.recorded == fingerprint_of(open_source(str(tmp_path / "a.pt")))


def _repository_of_ranks(path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 4))
    fully_shard(model)
    (path / "assets").mkdir(exist_ok=True)
    (path / "assets" / "config.json").write_text("{}")
    form = HuggingFace(assets=path / "assets", dtype="bfloat16", max_shard_bytes=2000, fingerprint=True)
    save(path / "hf", {"model": model}, format=form)


def test_a_repository_that_ranks_write_has_its_fingerprints(tmp_path: Path) -> None:
    run_ranks(2, _repository_of_ranks, tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 4))
    written = open_source(str(tmp_path / "hf"))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert written.recorded == fingerprint_of(written) == fingerprint(model.bfloat16())


def test_a_difference_of_recorded_sums_is_read(tmp_path: Path) -> None:
    """Tensors with equal recorded sums are not read by `diff`, all others are."""
    weights = {"a": torch.arange(50.0), "b": torch.arange(60.0)}
    save(tmp_path / "a", weights, fingerprint=True)
    weights["b"][7] += 1
    save(tmp_path / "b", weights, fingerprint=True)
    read: list[int] = []
    for recorded in (True, False):
        read.clear()
        a, b = open_source(str(tmp_path / "a")), open_source(str(tmp_path / "b"))
        found, compared = diff(a, b, recorded=recorded, progress=read.append)
        assert [each.name for each in found] == ["b"] and compared == 2
        assert sum(read) == (480 if recorded else 880)
