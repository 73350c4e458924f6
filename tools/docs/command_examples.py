"""Run the first example of each command on a small model, for the command's page."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import tempfile
from contextlib import chdir
from pathlib import Path

import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.conversion.cli.commands import SUMMARIES, cli

_MOST_LINES = 24


def outputs() -> dict[str, tuple[str, str]]:
    """Command -> (first example, what it prints), each run in a fresh copy of the same folder.

    Raises:
        RuntimeError: if an example fails. Only `diff` may report a difference, which is its exit code 1.
    """
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        original = Path(folder, "original")
        original.mkdir()
        _prepare(original)
        found = {}
        for name, (_, examples) in SUMMARIES.items():
            work = Path(folder, name)
            shutil.copytree(original, work)
            made = shlex.split(examples[0])[2] if name.startswith("to-") else None
            if made is not None and (work / made).exists():
                shutil.rmtree(work / made)
            with chdir(work):
                done = CliRunner().invoke(cli, shlex.split(examples[0]))
            if done.exit_code not in ((0, 1) if name == "diff" else (0,)):
                raise RuntimeError(f"vescale-convert {examples[0]}: {done.output}") from done.exception
            found[name] = (examples[0], _short(done.output.replace(f"{work.resolve()}/", "")))
        return found


def _prepare(folder: Path) -> None:
    """Write a run of five steps, two repositories, an adapter and a second model: what the examples read."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "original_repository")
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(folder / "run") as manager:
        for step in (5, 10, 15, 18, 20):
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
            manager.save(step, {"model": model, "optimizer": optimizer})
    model.save_pretrained(folder / "repository")
    (folder / "adapter_folder").mkdir()
    target = "model.layers.0.self_attn.q_proj"
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [target]}
    (folder / "adapter_folder" / "adapter_config.json").write_text(json.dumps(adapter))
    factors = {"lora_A": torch.randn(4, 64), "lora_B": torch.randn(64, 4)}
    save_file(
        {f"base_model.model.{target}.{name}.weight": value for name, value in factors.items()},
        folder / "adapter_folder" / "adapter_model.safetensors",
    )


def _short(text: str) -> str:
    lines = text.rstrip().splitlines()
    more = [f"... {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return "\n".join([*lines[:_MOST_LINES], *more])
