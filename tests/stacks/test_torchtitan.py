"""torchtitan under our runtime: losses, resumes, experts, compile, Hugging Face in and out; torchft's hook."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformers import AutoModelForCausalLM

from tests.support.command import vescale_convert
from tests.support.distributed import cpu_mesh, run_ranks
from tools.torchrun_job import Job
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import read_state

# What the debug model is to transformers, with the two layers that the example leaves.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "intermediate_size": 768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}


def run(out: Path, ranks: int, *options: str) -> list[dict[str, Any]]:
    """What each rank of `torchtitan_job` found."""
    Job(
        "tests.stacks.jobs.torchtitan_job", ranks, ["--out", str(out), *options], out / "logs", timeout_s=900
    ).wait()
    name = "resumed" if options else "compared"
    return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of this file."""
    folder = tmp_path_factory.mktemp("torchtitan")
    (folder / "assets").mkdir()
    (folder / "assets" / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def compared(out: Path) -> list[dict[str, Any]]:
    """All runs on two ranks."""
    return run(out, 2)


def test_llama_loses_as_under_stock_fsdp2(compared: list[dict[str, Any]]) -> None:
    """Fifty steps of two micro-batches from weights that DCP wrote, and a resume in the middle: the same bits."""
    for found in compared:
        assert len(found["stock_llama"]) == 50 and found["stock_llama"][-1] < 4 < found["stock_llama"][0]
        assert found["our_llama"] == found["stock_llama"]
        assert found["resumed"] == found["stock_llama"][25:]


def test_clipped_norms(compared: list[dict[str, Any]]) -> None:
    """Norms of gradients add up in the order of the layout: equal but for rounding."""
    for found in compared:
        assert found["our_clipped"] == pytest.approx(found["stock_clipped"], rel=1e-5)
        assert found["stock_clipped"] != found["stock_llama"][:8]


def test_wrongly_divided_gradients_would_be_seen(compared: list[dict[str, Any]]) -> None:
    """The control: gradients left divided by the number of ranks give other losses."""
    for found in compared:
        assert found["control"][0] == found["stock_llama"][0]
        assert found["control"][1:] != found["stock_llama"][1:8]


def test_experts(compared: list[dict[str, Any]]) -> None:
    """A mixture of grouped experts, routed with torchtitan's balance of loads, and a resume: the same bits."""
    for found in compared:
        assert len(found["stock_moe"]) == 50 and found["stock_moe"][-1] < found["stock_moe"][0] - 1
        assert found["our_moe"] == found["stock_moe"]
        assert found["resumed_moe"] == found["stock_moe"][25:]


def test_other_number_of_ranks(out: Path, compared: list[dict[str, Any]]) -> None:
    """What two ranks saved goes on with three: the same global batches, so the same losses."""
    for found in run(out, 3, "--resume"):
        assert found["resumed"] == pytest.approx(compared[0]["stock_llama"][25:], rel=1e-4)
        assert found["resumed_moe"] == pytest.approx(compared[0]["stock_moe"][25:], rel=1e-3)


def test_compiled_blocks(out: Path, compared: list[dict[str, Any]]) -> None:
    """torchtitan's `compile` and its export to Hugging Face: stock FSDP2's losses and files, to the last bit."""
    for found in compared:
        assert found["frames_compiled"] > 0 == found["frames_llama"]
        assert found["our_compiled"] == found["stock_compiled"]
        assert found["our_compiled"] == pytest.approx(found["our_llama"][:8], rel=1e-4)
    stock, ours = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (out / f"compiled_{whose}" / "checkpoint" / "step-8" for whose in ("stock", "ours"))
    )
    assert len(stock) > 10 and ours.keys() == stock.keys()
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def test_hugging_face(out: Path, compared: list[dict[str, Any]]) -> None:
    """The last step in Hugging Face's form opens there, and comes back in as the very weights."""
    for found in compared:
        saved, start, read = found["hugging_face"]
        assert read == saved != start
    model = AutoModelForCausalLM.from_pretrained(out / "saved" / "checkpoint" / "step-2")
    with torch.no_grad():
        loss = model(torch.arange(64)[None] % 50, labels=torch.arange(64)[None] % 50).loss
    assert 1 < loss.item() < 9


def test_checkpoints_open_anywhere(out: Path, compared: list[dict[str, Any]]) -> None:
    """`vescale-convert` finds the weights of stock's step under torchtitan's names, beside what torchtitan counts."""
    for model in ("llama", "moe"):
        ours, stock = (out / f"{model}_{whose}" / "checkpoint" / "step-25" for whose in ("ours", "stock"))
        states = []
        for step in (ours, stock):
            done = vescale_convert("to-torch", str(step), f"{step}.pt", "--optimizer", "drop", "--prefix", "")
            assert done.exit_code == 0, done.output
            states.append(torch.load(f"{step}.pt", weights_only=False))
        names = [name for name, value in states[1].items() if isinstance(value, torch.Tensor)]
        assert len(names) > 10 and "layers.1.attention.wo.weight" in names
        assert all(torch.equal(states[0][name], states[1][name]) for name in names)
        assert read_state(ours).tree()["train_state"]["step"] == 25


def test_the_command_runs(tmp_path: Path) -> None:
    """torchtitan's own command line with the example's configuration trains and saves."""
    options = [
        "--module",
        "examples.stacks.torchtitan.configs",
        "--config",
        "vescale",
        "--training.steps",
        "3",
    ]
    arguments = [*options, "--dump_folder", str(tmp_path)]
    job = Job("examples.stacks.torchtitan.train", 2, arguments, tmp_path / "logs")
    job.wait()

    assert read_state(tmp_path / "checkpoint" / "step-3").tree()["train_state"]["step"] == 3
    assert "UntriedVersionWarning" not in job.output()


def refusals() -> list[str]:
    """What is said of each flag and of another checkpoint manager; the model was touched if there is more."""
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.config import ParallelismConfig

    from vescale_fsdp.integrations.torchtitan import parallelize_with, with_vescale

    said: list[str] = []
    parallelize = parallelize_with(lambda model, **given: said.append("touched"))
    symmetric = ParallelismConfig(spmd_backend="partial_dtensor")
    symmetric.enable_fsdp_symm_mem = True  # its constructor refuses it without a GPU
    for flags in (symmetric, ParallelismConfig()):
        try:
            parallelize(torch.nn.Linear(2, 2), parallelism=flags)
        except NotImplementedError as error:
            said.append(str(error))
    try:
        with_vescale(SimpleNamespace(checkpoint=BaseCheckpointManager.Config()))
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_honored() -> None:
    """It is refused by name before the model is touched."""
    ((symmetric, backend, manager),) = run_ranks(1, refusals)  # off this process: torchtitan's imports warn

    assert "enable_fsdp_symm_mem" in symmetric
    assert "spmd_backend" in backend
    assert "BaseCheckpointManager" in manager


def gradients_of_replicas(with_ours: bool) -> list[torch.Tensor]:
    """Gradients of two replicas, each of one rank, whose hook averages them."""
    from torchtitan.experiments.torchft.manager import TorchFTManager

    mesh = cpu_mesh(2, 1, names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    for module in (*model, model):
        (fully_shard if with_ours else torch_fully_shard)(module, mesh=mesh["shard"])
    manager = object.__new__(TorchFTManager)  # its quorum needs a server; what it does to the model does not
    manager._manager, manager.use_async_quorum = object(), True
    manager.replicate_pg = mesh["replica"].get_group()
    manager.maybe_set_all_reduce_hook([model])
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def gradients_of_both() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Stock FSDP2's and ours."""
    return gradients_of_replicas(False), gradients_of_replicas(True)


def test_torchfts_hook_averages_between_replicas() -> None:
    """Both replicas have the same gradients, which are stock FSDP2's."""
    found = run_ranks(2, gradients_of_both)
    for stock, ours in found:
        assert len(ours) == 4
        for ours_grad, stock_grad, elsewhere in zip(ours, stock, found[0][1], strict=True):
            assert torch.equal(ours_grad, stock_grad) and torch.equal(ours_grad, elsewhere)
            assert ours_grad.abs().sum() > 0
