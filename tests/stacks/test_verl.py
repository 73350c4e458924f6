"""verl's FSDP2 functions in PPO's two phases, its checkpoint manager, merged LoRA; losses of stock, other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from examples.stacks.options import Options
from tests.stacks.jobs.example_ranks import (
    HALF,
    LARGEST,
    History,
    check_losses,
    control_of,
    converted,
    run_example,
    run_on_ranks,
)
from vescale_fsdp import FSDPModule
from vescale_fsdp.errors import PlacementError

CLIP = {"norm_type": LARGEST, "max_norm": 0.05}


def train(*args: Any, **kwargs: Any) -> History:
    """The example's; importing verl takes seconds and warns, so that is left to the ranks."""
    from examples.stacks import train_verl as example

    return example.train(*args, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs of this file."""
    return tmp_path_factory.mktemp("verl")


@pytest.fixture(scope="module")
def stock(folder: Path) -> History:
    """Stock FSDP2's losses and norms, uninterrupted."""
    return run_example(2, train, Options(folder / "stock", "fsdp2", **CLIP))


@pytest.fixture(scope="module")
def saved(folder: Path, stock: History) -> Path:
    """What the manager saved in the middle of a run that has stock's bits, resumed too; three ranks go on from it."""
    check_losses(train, Options(folder / "ours", **CLIP), f"step_{HALF}", stock)
    return folder / "ours" / f"step_{HALF}"


def test_files_of_ranks_hold_what_stock_saves(saved: Path, folder: Path) -> None:
    """vescale-convert makes of the files of our ranks what stock FSDP2 has at that step."""
    ours, expected = (
        converted(path, folder / f"{name}.pt")
        for name, path in (("ours", saved), ("stock", folder / "stock" / f"step_{HALF}"))
    )
    assert len(expected) > 10 and ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_gradients_at_one_nth_are_seen(folder: Path, stock: History) -> None:
    """The comparison can fail: gradients divided once more give other losses."""
    assert control_of(train, Options(folder, **CLIP))[1:] != stock[1:10]


def _load_on_three(saved: Path) -> str:
    from examples.stacks import train_verl as example

    with example.runtime(Options(saved)):
        actor = example.sharded_actor()
        assert isinstance(actor, FSDPModule)
        manager = example.FSDPCheckpointManager(actor, torch.optim.AdamW(actor.parameters()))
        try:
            manager.load_checkpoint(str(saved))
        except PlacementError as error:
            return f"{error.expected} {error.got} {error.todo}"
    return ""


def test_another_number_of_ranks_is_refused_with_the_way_out(saved: Path) -> None:
    """By verl's own function, on all ranks."""
    for text in run_on_ranks(3, _load_on_three, saved):
        assert "of 3 ranks" in text and "of 2 ranks" in text and "vescale_fsdp.checkpoint.load" in text


def _adapted(runtime: str) -> tuple[list[Any], ...]:
    """What verl collects of a LoRA model after a step: its adapter, merged weights, and those before and after."""
    from peft import LoraConfig, get_peft_model

    from examples.stacks import train_verl as example

    options, utils = Options(Path(), runtime), example.fsdp_utils
    with example.runtime(options):
        model: nn.Module = get_peft_model(
            example.tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:  # peft begins with zeros, which merge to nothing
                    param.fill_(0.25)
        full = model.state_dict()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        arguments = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(), "offload_policy": None}
        wrap = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
        utils.apply_fsdp2(model, arguments, wrap)
        utils.fsdp2_load_full_state_dict(model, full, mesh, None)
        trained = [param for param in model.parameters() if param.requires_grad]
        batch = example.micro_batch(0, 0)
        example.update(
            model, torch.optim.AdamW(trained), [batch], [torch.zeros(())], replace(options, **CLIP)
        )
        before = [param.full_tensor().clone() for param in model.parameters()]
        adapter = utils.collect_lora_params(model, layered_summon=True, base_sync_done=True)
        merged = utils.collect_merged_lora_params(model)
        with utils.merged_lora_context(model, backup_adapters=True):
            inside = [param.full_tensor().clone() for param in model.parameters()]
        after = [param.full_tensor().clone() for param in model.parameters()]
        pieces, spec = utils.fsdp2_sharded_save_to_cpu(model)
        pieces = {
            name: (piece.clone(), placed) for name, (piece, placed) in pieces.items()
        }  # views, on a CPU
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
        utils.fsdp2_sharded_load_from_cpu(model, pieces, spec)
        restored = [param.full_tensor() for param in model.parameters()]
    return list(adapter.items()), list(merged.items()), before, inside, after, restored


def test_merged_adapters_are_those_of_stock() -> None:
    """By name; merging leaves no trace, and pieces that were kept on the CPU come back."""
    for ours, stock in zip(
        run_on_ranks(2, _adapted, "vescale"), run_on_ranks(2, _adapted, "fsdp2"), strict=True
    ):
        adapter, merged, before, inside, after, restored = ours
        assert len(adapter) == 8 and len(merged) > 15
        for (name, value), (stock_name, stock_value) in zip(
            adapter + merged, stock[0] + stock[1], strict=True
        ):
            assert name == stock_name
            torch.testing.assert_close(value, stock_value)
        assert all(map(torch.equal, before, after)) and all(map(torch.equal, before, restored))
        changed = [bool((one != other).any()) for one, other in zip(before, inside, strict=True)]
        assert sum(changed) == 4  # two layers, two merged projections each
