"""accelerate with `VescalePlugin`: stock FSDP2's losses, resumes, other ranks, its launcher, the converter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import nn

from examples.stacks.options import Options
from examples.stacks.tiny_llm import CONFIG
from examples.stacks.train_accelerate import train
from tests.stacks.jobs.example_ranks import (
    HALF,
    KINDS,
    LARGEST,
    History,
    check_losses,
    control_of,
    converted,
    run_example,
    run_on_ranks,
)
from tests.support.command import vescale_convert
from tests.support.processes import run_command
from tools.torchrun_job import ROOT, Job
from vescale_fsdp import Whole, fully_shard
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.integrations import as_fsdp2
from vescale_fsdp.integrations.accelerate import VescalePlugin
from vescale_fsdp.quantize import QuantizedGather

CLIP = {"norm_type": LARGEST, "max_norm": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs of this file."""
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def stock(folder: Path) -> History:
    """Stock FSDP2's losses and norms, uninterrupted."""
    return run_example(2, train, Options(folder / "stock", "fsdp2", **CLIP))


@pytest.mark.parametrize(("kind", "efficient"), KINDS)
def test_losses_are_fsdp2s(kind: str, efficient: bool, folder: Path, stock: History) -> None:
    """To the last bit, over 50 steps with two micro-batches and clipping, resumed in the middle; weights too."""
    options = Options(folder / kind, state_dict_type=kind, cpu_ram_efficient_loading=efficient, **CLIP)
    check_losses(train, options, f"step_{HALF}", stock)

    final, expected = (
        load_file(out / "final" / "model.safetensors") for out in (options.out, folder / "stock")
    )
    assert final.keys() == expected.keys() and all(torch.equal(final[name], expected[name]) for name in final)


def test_gradients_at_one_nth_are_seen(folder: Path, stock: History) -> None:
    """The comparison can fail: gradients divided once more give other losses."""
    assert control_of(train, Options(folder, **CLIP))[1:] != stock[1:10]


@pytest.mark.parametrize("bf16", [False, True])
def test_copies_of_a_sharded_model(bf16: bool, folder: Path) -> None:
    """HSDP as accelerate lays it out, in both precisions: stock FSDP2's losses to the last bit in fp32."""
    stock, ours = (
        run_example(
            4, train, Options(folder / f"{runtime}_{bf16}", runtime, 8, 100, bf16=bf16, replicas=2, **CLIP)
        )
        for runtime in ("fsdp2", "vescale")
    )

    assert len(stock) == 12  # the example's data go further in batches of 4 x 2
    if bf16:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-2, atol=1e-2)
    else:
        assert ours == stock


def test_activation_checkpointing(folder: Path, stock: History) -> None:
    """accelerate wraps each layer, and shards the layer and its wrapper: the losses of without it."""
    options = Options(folder / "checkpointing", steps=8, save_at=4, activation_checkpointing=True, **CLIP)

    assert run_example(2, train, options) == stock[:8]


def test_tied_embeddings(folder: Path) -> None:
    """One weight at two places, prepared from meta: FSDP2's losses."""
    stock, ours = (
        run_example(
            2, train, Options(folder / runtime, runtime, 8, 100, tied=True, cpu_ram_efficient_loading=True)
        )
        for runtime in ("fsdp2", "vescale")
    )

    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-4, atol=1e-5)


# What `accelerate config` writes for FSDP2.
_LAUNCHER = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    "main_process_port": 0,
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
}


def test_accelerates_launcher_starts_the_example(folder: Path) -> None:
    """`accelerate launch` with a configuration file: stock FSDP2's losses, but for the order of the norms' sums."""
    few = Options(folder / "in_the_harness", "fsdp2", steps=8, save_at=4)
    out, configuration = folder / "launched", folder / "launcher.yaml"
    configuration.write_text(json.dumps(_LAUNCHER))  # JSON is YAML
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]
    program = ["-m", "examples.stacks.train_accelerate", "--out", str(out)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run_command([*launch, *program, "--steps", "8", "--save-at", "4"], env=variables, check=True, cwd=ROOT)

    saved = {file.name for file in (out / "step_4" / "pytorch_model_fsdp_0").iterdir()}
    assert saved >= {"__0_0.distcp", "__1_0.distcp"}  # by two ranks
    launched = torch.tensor(json.loads((out / "losses.json").read_text()))
    torch.testing.assert_close(launched, torch.tensor(run_example(2, train, few)), rtol=1e-5, atol=0)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = ([param for param in model.parameters() if param.ndim == ndim] for ndim in (2, 1))
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.5}], lr=0.1, momentum=0.9)


def prepare_by_hand(chosen: str) -> dict[str, Any]:
    """A model that the user has sharded, whose optimizer stands: as accelerate takes them from stock FSDP2's users."""
    if chosen == "accelerate's":
        with as_fsdp2():
            return prepare_with(FullyShardedDataParallelPlugin)
    return prepare_with(VescalePlugin)


def prepare_with(plugin: type[FullyShardedDataParallelPlugin]) -> dict[str, Any]:
    """The same in a process with an installation."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(fsdp_version=2))
    alone, model = (
        _layers(),
        fully_shard(_layers(), granularity=Whole()),
    )  # most pieces are empty on some rank
    optimizer, optimizer_alone = _two_groups(model), _two_groups(alone)
    given = [list(group["params"]) for group in optimizer.param_groups]
    prepared, wrapped = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(prepared(torch.ones(2, 8)).square().sum())
        wrapped.step()
        wrapped.zero_grad()
        alone(torch.ones(2, 8)).square().sum().backward()
        optimizer_alone.step()
        optimizer_alone.zero_grad()
    kept = [
        [*map(id, group["params"])] == [*map(id, before)]
        for group, before in zip(optimizer.param_groups, given, strict=True)
    ]
    trained = zip(model.parameters(), alone.parameters(), strict=True)
    return {
        "empty": sum(param.to_local().numel() == 0 for param in model.parameters()),
        "kept": kept,
        "trained": all(torch.allclose(param.full_tensor(), wanted) for param, wanted in trained),
        "unwrapped": accelerator.unwrap_model(prepared) is model,
    }


def _check_by_hand(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["kept"] == [True, True] and found["trained"] and found["unwrapped"]
    assert max(found["empty"] for found in ranks) > 1


@pytest.mark.parametrize("chosen", ["ours", "accelerate's"])
def test_a_model_sharded_by_hand(chosen: str) -> None:
    """`prepare` leaves it and its optimizer as they are, also where ranks hold nothing of several parameters."""
    _check_by_hand(run_on_ranks(2, prepare_by_hand, chosen))


def test_installed_before_accelerate_is_imported(tmp_path: Path) -> None:
    """The order of imports is the user's."""
    Job("tests.stacks.jobs.installed_first_job", 2, ["--out", str(tmp_path)], tmp_path / "logs").wait()
    _check_by_hand([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)])


def _fsdp1_inside() -> tuple[str, set[type]]:
    """A stack that is set to FSDP1 while `as_fsdp2` stands."""
    model = nn.Linear(4, 4)
    with as_fsdp2():
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
        try:
            accelerator.prepare(model)
        except UnsupportedOpError as error:
            return str(error), {type(param) for param in model.parameters()}
    return "", set()


def test_fsdp1_is_refused_in_the_stack() -> None:
    """By name, with the model as it was."""
    for text, kinds in run_on_ranks(2, _fsdp1_inside):
        assert "fsdp_version: 1" in text and kinds == {nn.Parameter}


def _refusals() -> list[str]:
    texts = []
    for flags in ({"fsdp_version": 1}, {"cpu_offload": True, "mixed_precision_policy": QuantizedGather()}):
        try:
            VescalePlugin(**flags)
        except UnsupportedOpError as error:
            texts.append(str(error))
    return texts


def test_flags_are_refused_by_name() -> None:
    """What cannot be honored is refused before anything is replaced."""
    own = [torch.distributed.fsdp.fully_shard]
    fsdp1, offload = _refusals()

    assert "fsdp_version=1" in fsdp1 and "cpu_offload" in offload
    assert torch.distributed.fsdp.fully_shard is own[0]


def test_the_converter_opens_a_save(folder: Path) -> None:
    """vescale-convert makes of the sharded save in the middle what the full one holds, for Hugging Face too."""
    saved = folder / "SHARDED_STATE_DICT" / f"step_{HALF}" / "pytorch_model_fsdp_0"
    full = torch.load(folder / "FULL_STATE_DICT" / f"step_{HALF}" / "pytorch_model_fsdp.bin")
    CONFIG.save_pretrained(folder / "assets")
    command = ["to-hf", str(saved), str(folder / "hf"), "--assets", str(folder / "assets")]
    done = vescale_convert(*command)

    assert done.exit_code == 0 and len(full) > 10, done.output
    for model in (converted(saved, folder / "model.pt"), load_file(folder / "hf" / "model.safetensors")):
        assert model.keys() == full.keys() and all(torch.equal(model[name], full[name]) for name in full)
