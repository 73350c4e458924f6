"""TRL's SFT with LoRA under `as_fsdp2`: stock FSDP2's losses, and peft's merge as on one rank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file

from examples.tiny_llm import tiny_llama
from examples.trainer.train import Options
from examples.trl_lora.train import train
from tests.stacks.example_ranks import divide_once_more, run_example

HALF = 25
# The largest gradient, whose value does not depend on how gradients are cut: a sum of squares does, in its last bits.
CLIP = {"max_norm": 0.1, "norm_type": math.inf}


def test_losses_and_merged_weights(tmp_path: Path) -> None:
    """Losses to the last bit with a resume in the middle; the merged weights are what peft makes of the adapter."""
    stock = run_example(2, train, Options(tmp_path / "stock", runtime="fsdp2", **CLIP))
    options = Options(tmp_path / "ours", **CLIP)
    whole = run_example(2, train, options)
    again = replace(options, out=tmp_path / "again", resume=options.out / f"checkpoint-{HALF}")
    resumed = run_example(2, train, again)
    others = run_example(3, train, replace(again, out=tmp_path / "others"))
    control = run_example(
        2, train, replace(options, out=tmp_path / "control", steps=10, save_at=100), prepared=divide_once_more
    )

    assert len(stock) == 50 and stock[-1][0] < stock[0][0]
    assert whole == stock and resumed[-HALF:] == stock[HALF:]
    assert control[1:] != stock[1:10]
    torch.testing.assert_close(torch.tensor(others[-HALF:]), torch.tensor(stock[HALF:]), rtol=2e-3, atol=1e-4)
    merged = load_file(options.out / "merged.safetensors")
    alone = (
        PeftModel.from_pretrained(tiny_llama(), str(options.out / "final")).merge_and_unload().state_dict()
    )
    assert merged.keys() == alone.keys() and len(merged) > 10
    for name, value in alone.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)
    start = tiny_llama().state_dict()
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"], start["model.layers.0.self_attn.q_proj.weight"]
    )
