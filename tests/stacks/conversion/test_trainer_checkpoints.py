"""What accelerate, Trainer, Lightning and Fabric save of stock FSDP1 and FSDP2 on ranks: weights, moments and
the rest, held against the whole state that torch gathers at the same moment."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, api
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from examples.stacks.accelerate_on_cpu import allow_fsdp_on_cpu
from examples.stacks.options import Options
from examples.stacks.tiny_llm import Sequences, tiny_llama
from examples.stacks.train_trainer import arguments
from tests.stacks.jobs.example_ranks import run_on_ranks
from tests.support.dtype_zoo import same_bytes
from tools.torchrun_job import Job
from vescale_fsdp.conversion import convert, open_source
from vescale_fsdp.errors import ConversionError

KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
IDS = torch.arange(16).view(2, 8)


def _keep(out: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments}, out)


def _check(
    saved: Path, whole: Path, *, container: str | None, optimizer: str = "optimizer"
) -> dict[str, Any]:
    """The state that ``to-torch`` makes of a save, whose weights and moments are those of the whole."""
    expected: dict[str, Any] = torch.load(whole, weights_only=True)
    convert(open_source(str(saved)), str(saved.with_suffix(".pt")), "torch")
    state: dict[str, Any] = torch.load(saved.with_suffix(".pt"), weights_only=True)
    weights = state if container is None else state[container]
    assert len(expected["model"]) > 3
    assert all(same_bytes(weights[name], tensor) for name, tensor in expected["model"].items())
    moments = state[optimizer]["state"]
    assert len(moments) > 3 and moments.keys() == expected["optimizer"]["state"].keys()
    for name, kept in expected["optimizer"]["state"].items():
        assert kept.keys() == moments[name].keys()
        assert all(torch.equal(moments[name][key], kept[key]) for key in kept), name
    return state


def _save_with_accelerate(out: Path) -> None:
    """FSDP2 in all three forms, of one training."""
    allow_fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(2):
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    _keep(out / "whole.pt", model, optimizer.optimizer)
    plugin.set_state_dict_type(KINDS[0])
    save_fsdp_model(plugin, accelerator, model, str(out / "ranks"), use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out / "ranks"), use_dcp=False)
    for kind in KINDS:  # the full one last: accelerate's settings for it stay
        plugin.set_state_dict_type(kind)
        accelerator.save_state(str(out / kind))


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate(tmp_path: Path, ranks: int) -> None:
    """DCP's folders, whole files, a file per rank."""
    run_on_ranks(ranks, _save_with_accelerate, tmp_path)
    whole = tmp_path / "whole.pt"
    for kind, container in zip(KINDS, ("model", None), strict=True):
        state = _check(tmp_path / kind, whole, container=container)
        assert state["scheduler"]["step_size"] == 2 and len(state["random_states"]) == ranks
        assert state["random_states"]["0"]["torch_manual_seed"].dtype == torch.uint8
    _check(tmp_path / "ranks", whole, container="pytorch_model_fsdp_0")


def _train(out: Path, kind: str) -> None:
    """Two steps of a Trainer, which saves behind the second."""
    args = TrainingArguments(**arguments(Options(out, "fsdp2", 2, 2, state_dict_type=kind)))
    allow_fsdp_on_cpu()
    trainer = Trainer(tiny_llama(), args, train_dataset=Sequences(32))
    trainer.train()
    _keep(out / "whole.pt", trainer.model_wrapped, trainer.optimizer.optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_trainer(tmp_path: Path, kind: str) -> None:
    """`checkpoint-2` with all that lies in it."""
    run_on_ranks(2, _train, tmp_path, kind)
    container = "model" if kind == KINDS[0] else None
    state = _check(tmp_path / "checkpoint-2", tmp_path / "whole.pt", container=container)
    assert state["trainer_state"]["global_step"] == 2 and state["trainer_state"]["log_history"]
    assert len(state["rng_state"]) == 2 and len(state["rng_state"]["1"]["numpy"][1]) == 624
    assert state["scheduler"]["last_epoch"] == 2


CONFIGS = {
    "SHARDED_STATE_DICT": (api.ShardedStateDictConfig, api.ShardedOptimStateDictConfig),
    "FULL_STATE_DICT": (api.FullStateDictConfig, api.FullOptimStateDictConfig),
    "LOCAL_STATE_DICT": (api.LocalStateDictConfig, api.LocalOptimStateDictConfig),
}


def _trained(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _trained_with_fsdp1(out: Path) -> tuple[Any, torch.optim.Optimizer]:
    """All ranks have the same batches, so that the whole state, which is kept, is that of an unsharded model."""
    PartialState(cpu=True)
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(
        tiny_llama(), device_id=cpu, use_orig_params=True, auto_wrap_policy=policy
    )
    if dist.get_rank() == 0:
        alone = _trained(tiny_llama())
        weights, moments = get_state_dict(*alone, options=StateDictOptions(full_state_dict=True))
        out.mkdir(parents=True, exist_ok=True)
        torch.save({"model": weights, "optimizer": moments}, out / "whole.pt")
    return _trained(wrapped)


def _save_fsdp1(out: Path, kinds: tuple[str, ...]) -> None:
    """What accelerate's functions write of an FSDP1 model; its Accelerator makes none on CPUs."""
    model, optimizer = _trained_with_fsdp1(out)
    ranks = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    for kind in kinds:
        of_model, of_optimizer = CONFIGS[kind]
        plugin = SimpleNamespace(
            fsdp_version=1,
            state_dict_type=StateDictType[kind],
            state_dict_config=of_model(),
            optim_state_dict_config=of_optimizer(),
        )
        for use_dcp in (True, False)[: 2 if kind == KINDS[0] else 1]:
            folder = str(out / (kind if use_dcp else "ranks"))
            save_fsdp_model(plugin, ranks, model, folder, use_dcp=use_dcp)
            if kind != "LOCAL_STATE_DICT":  # FSDP1 has no such state of an optimizer
                save_fsdp_optimizer(plugin, ranks, optimizer, model, folder, use_dcp=use_dcp)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp1(tmp_path: Path) -> None:
    """Sharded and a file per rank, of two ranks; whole files of one, since FSDP1 cannot gather over gloo. Flattened
    parameters of LOCAL_STATE_DICT are refused."""
    run_on_ranks(2, _save_fsdp1, tmp_path / "two", (KINDS[0], "LOCAL_STATE_DICT"))
    run_on_ranks(1, _save_fsdp1, tmp_path / "one", (KINDS[1],))
    for folder, container in (("two/SHARDED_STATE_DICT", "model"), ("two/ranks", "pytorch_model_fsdp_0")):
        _check(tmp_path / folder, tmp_path / "two" / "whole.pt", container=container)
    _check(tmp_path / "one" / KINDS[1], tmp_path / "one" / "whole.pt", container=None)
    with pytest.raises(ConversionError, match=r"_flat_param(.|\n)*SHARDED_STATE_DICT"):
        open_source(str(tmp_path / "two" / "LOCAL_STATE_DICT"))


def _save_fsdp1_with_lightning(out: Path, kind: str) -> None:
    """By the methods that its Trainer and Fabric call, which ask for a GPU first."""
    model, optimizer = _trained_with_fsdp1(out)
    lightning = FSDPStrategy(state_dict_type=kind)
    lightning.model = model
    state = {
        "state_dict": lightning.lightning_module_state_dict(),
        "optimizer_states": [lightning.optimizer_state(optimizer)],
    }
    rest = {"global_step": 2, "lr_schedulers": [{"last_epoch": 2}], "loops": {"fit_loop": {"done": 2}}}
    lightning.save_checkpoint({**state, **rest}, out / "lightning.ckpt")
    fabric = FabricFSDPStrategy(state_dict_type=kind)
    fabric.save_checkpoint(out / "fabric.ckpt", {"model": model, "optimizer": optimizer, "step": 7})


@pytest.mark.filterwarnings("ignore")  # torch's own, of FSDP1
def test_lightning_and_fabric_with_fsdp1(tmp_path: Path) -> None:
    """Folders of shards of two ranks, whole files of one."""
    run_on_ranks(2, _save_fsdp1_with_lightning, tmp_path / "two", "sharded")
    run_on_ranks(1, _save_fsdp1_with_lightning, tmp_path / "one", "full")
    two, one = (tmp_path / name for name in ("two", "one"))
    state = _check(two / "lightning.ckpt", two / "whole.pt", container="model", optimizer="optimizer_0")
    assert state["global_step"] == 2 and state["loops"]["fit_loop"] == {"done": 2}
    assert state["lr_schedulers"] == [{"last_epoch": 2}]
    assert _check(two / "fabric.ckpt", two / "whole.pt", container="model")["step"] == 7
    assert _check(one / "fabric.ckpt", one / "whole.pt", container="model")["step"] == 7


def test_lightning_and_fabric(tmp_path: Path) -> None:
    """Folders of shards with meta.pt beside, and one file."""
    Job(
        "tests.stacks.jobs.lightning_files_job", 2, ["--out", str(tmp_path)], tmp_path / "logs", timeout_s=300
    ).wait()
    state = _check(
        tmp_path / "sharded.ckpt",
        tmp_path / "sharded.ckpt.full.pt",
        container="state_dict",
        optimizer="optimizer_0",
    )
    assert state["global_step"] == 3 and state["hyper_parameters"]["width"] == 6
    assert state["lr_schedulers"][0]["last_epoch"] == 0 and state["loops"]["fit_loop"]
    assert any(name.startswith("ModelCheckpoint") for name in state["callbacks"])
    convert(open_source(str(tmp_path / "single.ckpt")), str(tmp_path / "single.pt"), "torch")
    single, whole = (
        torch.load(tmp_path / name, weights_only=True) for name in ("single.pt", "single.ckpt.full.pt")
    )
    assert all(same_bytes(single["state_dict"][name], tensor) for name, tensor in whole["model"].items())
    assert len(single["optimizer_states"][0]["state"]) == 4 and single["loops"]["fit_loop"]
    fabric = _check(tmp_path / "fabric", tmp_path / "fabric.full.pt", container="model")
    assert fabric["step"] == 7 and fabric["rng"].tolist() == [0, 1, 2, 3, 4]
