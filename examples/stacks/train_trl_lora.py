"""TRL's SFT with LoRA; the one line for this package is ``with as_fsdp2(...)``, and merging takes our function.

    torchrun --nproc-per-node 2 -m examples.stacks.train_trl_lora --out /tmp/run           on CPUs, a few seconds
    torchrun --nproc-per-node 3 -m examples.stacks.train_trl_lora --out /tmp/run --resume /tmp/run/checkpoint-25

Leaves each step's loss and norm of gradients in OUT/losses.json, the merged weights in OUT/merged.safetensors, and the
adapter in OUT/checkpoint-.., which ``vescale-convert inspect OUT/checkpoint-25/pytorch_model_fsdp_0`` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from examples.stacks.options import GLOBAL_BATCH, Options, parse_options, write_losses
from examples.stacks.tiny_llm import CONFIG, Sequences, tiny_llama
from examples.stacks.train_trainer import Watched, arguments, runtime
from vescale_fsdp.integrations.peft import merge_and_unload

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


class _Trainer(Watched, SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    """Words are numbers."""
    words = {str(index): index for index in range(CONFIG.vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")),
        bos_token="0",
        eos_token="1",
        pad_token="1",
    )


def adapted() -> nn.Module:
    """The tiny Llama with adapters that do something from the start, so that merging shows."""
    model = get_peft_model(tiny_llama(), LORA)
    torch.manual_seed(2)
    for name, param in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(param, std=0.05)
    return model


def train(
    options: Options, *, prepared: Callable[[Any], None] = lambda model: None
) -> list[tuple[float, float]]:
    """Train, save once in the middle and at the end, merge; return loss and norm of the gradients per step.

    Args:
        options: what to run.
        prepared: called with the sharded model before the first step.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    args = SFTConfig(**arguments(options, max_length=32, dataset_num_proc=None))
    sequences = Sequences(GLOBAL_BATCH * options.steps)
    rows = Dataset.from_list(
        [{"input_ids": sequences[i]["input_ids"].tolist()} for i in range(len(sequences))]
    )
    with runtime(options):
        trainer = _Trainer(adapted(), args, train_dataset=rows, processing_class=tokenizer())
        trainer.shown, trainer.norm_type = prepared, options.norm_type
        trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
        trainer.save_model(str(options.out / "final"))
    if options.runtime == "vescale":
        merged = merge_and_unload(trainer.model)
        options_of_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = get_model_state_dict(merged, options=options_of_state)
        if dist.get_rank() == 0:
            save_file(
                {name: value.clone() for name, value in whole.items()}, options.out / "merged.safetensors"
            )
        dist.barrier()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"]) for entry in logs]


def main() -> None:
    """Train and write the losses."""
    options = parse_options("TRL's SFT with LoRA and vescale_fsdp, on CPUs")
    write_losses(options.out, train(options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
