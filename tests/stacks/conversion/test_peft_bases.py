"""A Hugging Face folder of the base, loaded into a peft model: the base's weights, and peft's own start of LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.distributed import run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import load, read_state, save
from vescale_fsdp.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from vescale_fsdp.conversion import HuggingFace, convert, open_source
from vescale_fsdp.conversion.convert import ConvertOptions
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.integrations.peft import merge_and_unload

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's and transformers' own
_ADDED = ("base_model.model.", ".base_layer", ".original_module", ".modules_to_save.default")


def _base() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, **sizes))


def _with_lora(device: str, **options: Any) -> Any:
    chosen: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"], **options}
    with torch.device(device):
        return get_peft_model(_base(), LoraConfig(task_type="CAUSAL_LM", **chosen))


def _check_base(model: Any, base: Any) -> None:
    for name, param in model.named_parameters():
        plain = name
        for added in _ADDED:
            plain = plain.replace(added, "")
        if "lora_" not in name:
            assert torch.equal(param, base.get_parameter(plain)), name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with random values, and its folder."""
    torch.manual_seed(0)
    model, folder = _base(), tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("strict", ["auto", True, False])
@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}]
)
def test_an_untrained_adapter_changes_nothing(
    base: tuple[Any, Path], options: dict[str, Any], strict: Any
) -> None:
    """On the meta device, the peft model computes what the base does, and its other matrices are random."""
    model = _with_lora("meta", **options)
    report = load(base[1], model, strict=strict)

    _check_base(model, base[0])
    tokens = torch.arange(8)[None]
    assert torch.equal(model(input_ids=tokens).logits, base[0](input_ids=tokens).logits)
    drawn = "lora_embedding_B" if "embed_tokens" in options.get("target_modules", ()) else "lora_A"
    assert all(param.std() > 0 for name, param in model.named_parameters() if drawn in name)
    assert not report.missing and not report.unfilled


def test_a_trained_adapter_is_kept(base: tuple[Any, Path]) -> None:
    model = _with_lora("cpu")
    for name, param in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.ones_(param)
    load(base[1], {"model": model})

    _check_base(model, base[0])
    assert all((param == 1).all() for name, param in model.named_parameters() if "lora_" in name)


def test_the_scheme_of_the_config_is_used(base: tuple[Any, Path]) -> None:
    """A spread of 1 / rank for "gaussian"; False leaves both matrices random."""
    torch.manual_seed(0)
    wide = _with_lora("meta", r=8, init_lora_weights="gaussian")
    both = _with_lora("meta", init_lora_weights=False)
    load(base[1], wide)
    load(base[1], both)

    drawn = torch.cat(
        [param.detach().flatten() for name, param in wide.named_parameters() if "lora_A" in name]
    )
    assert drawn.std() == pytest.approx(1 / 8, rel=0.2)
    assert all(param.std() > 0 for name, param in both.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_live_values_that_depend_on_the_base_are_refused(
    base: tuple[Any, Path], options: dict[str, Any]
) -> None:
    """They were computed from other base weights."""
    with pytest.raises(CheckpointError, match="lora_"):
        load(base[1], _with_lora("cpu", **options))


def test_matrices_of_an_embedding_start_as_in_peft(base: tuple[Any, Path]) -> None:
    """With ``init_lora_weights=False``, random ones, on the meta device too."""
    model = _with_lora("meta", target_modules=["embed_tokens"], init_lora_weights=False)
    load(base[1], model)
    drawn = [param for name, param in model.named_parameters() if "lora_embedding" in name]
    assert len(drawn) == 2 and all(param.std() > 0 for param in drawn)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copy_of_a_tied_head(tmp_path: Path, device: str) -> None:
    """The folder has the embedding alone, whose values the copy starts with."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=31, tie_word_embeddings=True, **sizes)
    tied = LlamaForCausalLM(config)
    tied.save_pretrained(tmp_path)
    with torch.device(device):
        model = get_peft_model(
            LlamaForCausalLM(config), LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"])
        )
    load(tmp_path, model)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(input_ids=tokens).logits, tied(input_ids=tokens).logits)


def test_another_adapter_is_not_a_base(tmp_path: Path) -> None:
    """A checkpoint with an adapter on fewer modules lacks the others' matrices."""
    torch.save(_with_lora("cpu", target_modules=["q_proj"]).state_dict(), tmp_path / "few.pt")
    with pytest.raises(CheckpointError):
        load(tmp_path / "few.pt", _with_lora("cpu"), strict=True)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"r": 4, "init_lora_weights": "orthogonal"}])
def test_values_that_depend_on_the_base_are_refused(base: tuple[Any, Path], options: dict[str, Any]) -> None:
    model = _with_lora("meta", **options)
    with pytest.raises(CheckpointError, match="lora_"):
        load(base[1], model)
    assert model.get_base_model().lm_head.weight.is_meta


def _sharded(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """A peft model of a folder's base, and an optimizer of its adapter."""
    torch.manual_seed(0)
    model = _with_lora("meta", target_modules=["q_proj", "v_proj"])
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    load(folder, model)
    return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def _losses(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train three steps."""
    tokens, losses = torch.arange(8)[None], []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def _save_what_trains(folder: Path, run: Path) -> list[float]:
    """Train, save the adapter and its optimizer, and train on; the later losses."""
    model, optimizer = _sharded(folder)
    _losses(model, optimizer)
    weights, moments = get_state_dict(model, optimizer, options=TRAINED)
    save(run, {"model": weights, "optimizer": moments})
    if dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(str(run.with_name("settings")))
    return _losses(model, optimizer)


def _go_on(folder: Path, run: Path) -> list[float]:
    model, optimizer = _sharded(folder)
    weights, moments = get_state_dict(model, optimizer, options=TRAINED)
    load(run, {"model": weights, "optimizer": moments})
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=TRAINED)
    return _losses(model, optimizer)


def test_only_what_trains_is_saved(base: tuple[Any, Path], tmp_path: Path) -> None:
    """As docs/stacks/trl.md shows: on other ranks it goes on with the same losses, and becomes a folder of peft."""
    run, settings = tmp_path / "run", str(tmp_path / "settings")
    losses = run_ranks(2, _save_what_trains, base[1], run)[0]
    assert losses[-1] < losses[0]
    assert run_ranks(2, _go_on, base[1], run)[0] == losses
    torch.testing.assert_close(run_ranks(3, _go_on, base[1], run)[0], losses)

    saved = read_state(run)
    weights = {name for name in saved if name.startswith("model.")}
    assert len(weights) == 8 and all("lora_" in name for name in saved)
    convert(open_source(str(run)), str(tmp_path / "adapter"), "adapter", ConvertOptions(assets=settings))
    adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base[1]), str(tmp_path / "adapter"))
    params = dict(adapted.named_parameters())
    assert all(torch.equal(params[name.removeprefix("model.")], saved[name].read()) for name in weights)


def _fine_tune(folder: Path, out: Path) -> torch.Tensor:
    """The program of docs/stacks/trl.md; returns the logits after training."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    load(folder, model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    tokens = torch.arange(8)[None]
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    save(out / "run", {"model": model, "optimizer": optimizer})
    if dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(str(out / "settings"))
    save(out / "merged", {"model": merge_and_unload(model)}, format=HuggingFace(assets=folder))
    return logits


def test_a_model_of_the_hub_is_fine_tuned(base: tuple[Any, Path], tmp_path: Path) -> None:
    """Sharded on two ranks; transformers and peft open both exports, and compute the trained logits."""
    logits = run_ranks(2, _fine_tune, base[1], tmp_path)[0]
    options = ConvertOptions(assets=str(tmp_path / "settings"))
    convert(open_source(str(tmp_path / "run")), str(tmp_path / "adapter"), "adapter", options)

    tokens = torch.arange(8)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base[1]), str(tmp_path / "adapter"))
    for model in (merged, adapted):
        torch.testing.assert_close(model(input_ids=tokens).logits, logits, rtol=1e-4, atol=1e-5)
    assert (base[0](input_ids=tokens).logits - logits).norm() > 1e-3
