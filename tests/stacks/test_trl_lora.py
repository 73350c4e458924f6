"""TRL's SFT with LoRA under `as_fsdp2`: stock FSDP2's losses, saves that open anywhere, peft's merge and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file

from examples.stacks.options import Options
from examples.stacks.tiny_llm import tiny_llama
from examples.stacks.train_trl_lora import LORA, train
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
from tests.support.distributed import cpu_mesh
from vescale_fsdp import FSDPModule
from vescale_fsdp.integrations import as_fsdp2

CLIP = {"norm_type": LARGEST, "max_norm": 0.005}
# peft 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs of this file."""
    return tmp_path_factory.mktemp("trl_lora")


@pytest.fixture(scope="module")
def stock(folder: Path) -> History:
    """Stock FSDP2's losses and norms, uninterrupted."""
    return run_example(
        2, train, Options(folder / "stock", "fsdp2", state_dict_type="FULL_STATE_DICT", **CLIP)
    )


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS])
def test_losses_are_fsdp2s(kind: str, folder: Path, stock: History) -> None:
    """To the last bit, over 50 steps with two micro-batches and clipping, resumed in the middle."""
    options = Options(folder / kind, state_dict_type=kind, **CLIP)
    check_losses(train, options, f"checkpoint-{HALF}", stock)


def test_gradients_at_one_nth_are_seen(folder: Path, stock: History) -> None:
    """The comparison can fail: gradients divided once more give other losses."""
    assert control_of(train, Options(folder, **CLIP))[1:] != stock[1:10]


def test_the_converter_opens_a_save(folder: Path) -> None:
    """vescale-convert reads the adapter that stock FSDP2 has at that step."""
    adapter = load_file(folder / "stock" / f"checkpoint-{HALF}" / "adapter_model.safetensors")
    saved = folder / "SHARDED_STATE_DICT" / f"checkpoint-{HALF}" / "pytorch_model_fsdp_0"
    model = converted(saved, folder / "model.pt")

    assert len(adapter) > 10 and model.keys() == adapter.keys()
    assert all(torch.equal(model[name], adapter[name]) for name in adapter)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS])
def test_merged_weights(kind: str, folder: Path) -> None:
    """They are what peft alone makes of stock FSDP2's adapter, and not the start's."""
    merged = load_file(folder / kind / "merged.safetensors")
    alone = (
        PeftModel.from_pretrained(tiny_llama(), str(folder / "stock" / "final"))
        .merge_and_unload()
        .state_dict()
    )

    assert merged.keys() == alone.keys() and len(merged) > 10
    for name, value in alone.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)
    trained = "model.layers.0.self_attn.q_proj.weight"
    assert (merged[trained] - tiny_llama().state_dict()[trained]).norm() > 0


def _loads_an_adapter() -> tuple[int, list[str]]:
    """How many tensors an adapter has, and which of them are wrong once a sharded model has loaded it."""
    model = get_peft_model(tiny_llama(), LORA)
    adapter = {name: torch.randn_like(value) for name, value in get_peft_model_state_dict(model).items()}
    with as_fsdp2():
        from torch.distributed.fsdp import fully_shard

        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        set_peft_model_state_dict(model, {name: value.clone() for name, value in adapter.items()})
    loaded = {name.replace(".default", ""): value.full_tensor() for name, value in model.state_dict().items()}
    assert isinstance(model, FSDPModule)
    return len(adapter), [name for name, value in adapter.items() if not torch.equal(loaded[name], value)]


def test_adapters_load_into_shards() -> None:
    """peft cuts whole tensors as the sharded parameters lie, as it does under FSDP2."""
    assert run_on_ranks(2, _loads_an_adapter) == 2 * [(12, [])]
