"""verl's checkpoints and OpenRLHF's folders as sources, by folders with their files' names and content (verl needs an
inference engine to be imported)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from tests.conversion.formats.zero_folders import some_state, write_zero
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion import convert, open_source
from vescale_fsdp.errors import ConversionError


def _train(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _save(folder: str, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random.seed(rank)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    torch.manual_seed(rank)
    rng = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.RandomState(rank).get_state(),
        "random": random.getstate(),
    }
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": rng}
    for name, content in {"model": state, "optim": optimizer.state_dict(), "extra_state": extra}.items():
        torch.save(content, f"{folder}/{name}_world_size_{ranks}_rank_{rank}.pt")


def _fsdp2(folder: str) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in (*model, model):
        fully_shard(layer, mesh=cpu_mesh())
    optimizer = _train(model)
    _save(folder, model.state_dict(), optimizer)
    moments = {n: state["exp_avg"].full_tensor() for n, state in optimizer.state_dict()["state"].items()}
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}, moments


def test_weights_moments_and_settings_of_verl_come_out(tmp_path: Path) -> None:
    """Weights, moments, the scheduler and settings come out; random states, which differ, are left out and listed. Of
    FSDP1's optimizers, of flat parameters that nothing describes, the model is read without, and that is said."""
    actor = tmp_path / "global_step_10/actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface/config.json").write_text(json.dumps({"model_type": "own", "dtype": "float32"}))
    (actor / "huggingface/tokenizer.json").write_text("{}")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    full, moments = run_ranks(2, _fsdp2, str(actor))[0]
    source = open_source(str(actor))
    assert source.kind == "ranks" and {"extra_state.rng.cpu", "extra_state.rng.random.1"} <= set(
        source.unsupported
    )
    convert(source, str(tmp_path / "hf"), "hf")
    assert (tmp_path / "hf/tokenizer.json").exists() and json.loads((tmp_path / "hf/config.json").read_text())
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == full.keys() and all(same_bytes(found[name], full[name]) for name in full)
    convert(source, str(tmp_path / "out.pt"), "torch")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert state["extra_state"]["lr_scheduler"]["base_lrs"] == [1e-2]
    assert len(moments) == 4 and state["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]
    for number, moment in moments.items():
        assert same_bytes(state["optimizer"]["state"][number]["exp_avg"], moment) and bool(moment.any())
    for rank in range(2):
        flat = {"state": {0: {"exp_avg": torch.full((33,), rank + 1.0)}}, "param_groups": [{"params": [0]}]}
        torch.save(flat, actor / f"optim_world_size_2_rank_{rank}.pt")
    source = open_source(str(actor))
    assert "optimizer" in source.unsupported and any("optimizer" in text for text in source.warnings)
    assert {name.removeprefix("model.") for name in source.tensors} == full.keys()
    for file in actor.glob("model_*"):
        file.unlink()
    with pytest.raises(ConversionError, check=lambda error: "_rank_1.pt" in error.got):
        open_source(str(actor))


def test_an_actor_of_openrlhf_is_read_with_its_counters(tmp_path: Path) -> None:
    """DeepSpeed's, in the actor's folder with its counters."""
    state = some_state()
    state.client = {"episode": 1, "global_step": 20, "data_loader_state_dict": {"epoch": 0, "consumed": 320}}
    write_zero(tmp_path / "_actor", state, stage=3, ranks=2, tag="global_step20")
    write_zero(tmp_path / "_critic", some_state(1), stage=2, ranks=2, tag="global_step20")
    source = open_source(str(tmp_path / "_actor"))
    assert source.kind == "deepspeed" and source.values["data_loader_state_dict.consumed"]() == 320
    convert(source, str(tmp_path / "hf"), "hf")
    assert same_bytes(load_file(tmp_path / "hf/model.safetensors")["one"], state.masters["one"])
    with pytest.raises(ConversionError, check=lambda error: "_actor" in error.got):
        open_source(str(tmp_path))
