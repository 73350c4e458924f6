"""``vescale-convert plan --gpus``: from a config.json alone, without a network; wrong inputs end in one message."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.support.command import vescale_convert
from vescale_fsdp.errors import VescaleError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "torch_dtype": "bfloat16",
}
LLAMA_3_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def folder_with(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(*args: object) -> Any:
    result = vescale_convert("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout[result.stdout.index("{") :])


def test_a_config_alone_is_planned(tmp_path: Path) -> None:
    """The folder and the file give one plan, of fp32 weights and all candidates, without a process group."""
    folder = folder_with(tmp_path, LLAMA)
    plan = planned(folder, "--gpus", 16, "--tokens", 128)
    assert plan == planned(folder / "config.json", "--gpus", 16, "--tokens", 128)
    (folder / "small.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    assert planned(folder / "small.json", "--gpus", 16, "--tokens", 128)["parameters"] < plan["parameters"]
    assert plan["parameters"] == 143_808 and plan["fits"]
    assert {each["shard_size"] for each in plan["candidates"]} == {16, 8}
    assert {each["dtype"] for each in plan["units"]} == {"float32"}
    assert not dist.is_initialized()


def test_llama_70b_on_two_nodes(tmp_path: Path) -> None:
    """Plain AdamW does not fit 16 GPUs of 80 GB; 8-bit state with recomputed activations does, and is advised."""
    folder = folder_with(tmp_path, LLAMA_3_70B)
    command = (folder, "--gpus", 16, "--memory", "80G", "--tokens", 4096, "--checkpointing")
    plan = planned(*command)
    assert not plan["fits"] and any("adamw8bit" in line for line in plan["advice"])
    plan = planned(*command, "--optimizer", "adamw8bit")
    assert plan["fits"] and plan["candidates"][0]["verdict"] == "fits"


@pytest.mark.parametrize("weight_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("param_dtype", ["bf16", "fp16", "fp32"])
def test_the_printed_lines_refuse_a_model_in_another_dtype(
    param_dtype: str, weight_dtype: str, tmp_path: Path
) -> None:
    """Transformers builds a model in the dtype of its config.json, here bf16; a cast one passes the check."""
    folder = folder_with(tmp_path, LLAMA)
    plan = planned(
        folder, "--gpus", 2, "--tokens", 64, "--param-dtype", param_dtype, "--weight-dtype", weight_dtype
    )
    numel = plan["parameters"]
    itemsize = {"fp32": 4, "bf16": 2}[weight_dtype]
    assert plan["candidates"][0]["peak"]["weights"] == pytest.approx(itemsize * numel / 2, rel=0.01)
    assert plan["candidates"][0]["peak"]["states"] == pytest.approx(2 * itemsize * numel / 2, rel=0.01)
    config = transformers.AutoConfig.from_pretrained(folder)
    as_configured = transformers.AutoModelForCausalLM.from_config(config)
    assert as_configured.dtype == torch.bfloat16
    cast = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wrong, right = (as_configured, cast) if weight_dtype == "fp32" else (cast, as_configured)
    with pytest.raises(TypeError):
        exec(plan["code"], {"model": wrong})  # noqa: S102
    if torch.accelerator.current_accelerator(check_available=True) is None:
        with pytest.raises(RuntimeError):  # after the check: there is no GPU
            exec(plan["code"], {"model": right})  # noqa: S102


@pytest.mark.part("formats")
def test_deepseek_v3_takes_seconds(tmp_path: Path) -> None:
    """671 billion parameters, with transformers' own class; code of the repository is not run."""
    folder = folder_with(tmp_path, DEEPSEEK_V3)
    start_s = time.process_time()
    plan = planned(folder, "--gpus", 2048, "--memory", "141G", "--tokens", 4096, "--checkpointing")
    assert plan["parameters"] == pytest.approx(671e9, rel=0.01)
    print(f"{time.process_time() - start_s:.1f} CPU seconds")
    assert time.process_time() - start_s < 60


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, "--gpus 8"),
        ({"hidden_size": 8}, "--gpus 8"),
        (LLAMA | {"architectures": ["NobodysModel"]}, "--gpus 8"),
        (
            LLAMA | {"architectures": ["NobodysModel"], "auto_map": {"AutoModel": "own.NobodysModel"}},
            "--gpus 8",
        ),
        (LLAMA | {"num_attention_heads": 0}, "--gpus 8"),
        (LLAMA, "--gpus 12"),
        (LLAMA, "--gpus 16 --per-node 7"),
        (LLAMA, "--gpus 8 --unit nobody"),
        (LLAMA, "--gpus 8 --granularity rows:x"),
        (LLAMA, "--gpus 8 --memory 0"),
    ],
)
def test_wrong_inputs_are_one_message(config: Any, options: str, tmp_path: Path) -> None:
    """With what to do; no traceback, and nothing of the repository is imported."""
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    if config is not None:
        folder_with(tmp_path, config)
    result = vescale_convert("plan", tmp_path, *options.split())
    assert isinstance(result.exception, VescaleError) and result.exception.todo
    assert "own" not in sys.modules


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--gpus 8 --shards 8",
        "--gpus 0",
        "--gpus 8 --memory 80apples",
        "--gpus 8 --tokens 0",
        "--gpus 8 --scatter never",
        "--shards 8 --tokens 5",
        "--gpus 8 --optimizer sgd",
    ],
)
def test_wrong_usage_ends_in_exit_code_2(options: str, tmp_path: Path) -> None:
    """Neither or both kinds of plan, impossible numbers, and options of the other kind."""
    assert vescale_convert("plan", folder_with(tmp_path, LLAMA), *options.split()).exit_code == 2


def test_a_missing_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line that installs it."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = vescale_convert("plan", folder_with(tmp_path, LLAMA), "--gpus", 8)
    assert isinstance(result.exception, VescaleError) and "vescale-fsdp[hf]" in str(result.exception.todo)
