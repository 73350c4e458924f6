"""transformers' Trainer; the one line for this package is ``with as_fsdp2(...)``.

    torchrun --nproc-per-node 2 -m examples.stacks.train_trainer --out /tmp/run            on CPUs, a few seconds
    torchrun --nproc-per-node 3 -m examples.stacks.train_trainer --out /tmp/run --resume /tmp/run/checkpoint-25
    vescale-convert inspect /tmp/run/checkpoint-25/pytorch_model_fsdp_0

Two micro-batches per step, clipping, a save in the middle; OUT/losses.json has each step's loss and norm of gradients.
``--runtime fsdp2`` is the same with stock FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from examples.stacks.accelerate_on_cpu import allow_fsdp_on_cpu
from examples.stacks.options import GLOBAL_BATCH, MICRO_BATCHES, Options, parse_options, write_losses
from examples.stacks.tiny_llm import Sequences, tiny_llama
from vescale_fsdp import Rows
from vescale_fsdp.integrations import as_fsdp2


def runtime(options: Options) -> AbstractContextManager[Any]:
    """The user's one line, or what stock FSDP2 needs on CPUs."""
    if options.runtime == "fsdp2":
        allow_fsdp_on_cpu()
        return nullcontext()
    return as_fsdp2(granularity={"*mlp*": Rows(8)})


def arguments(options: Options, **more: Any) -> dict[str, Any]:
    """Arguments that Trainer and TRL's trainers share."""
    return {
        "output_dir": str(options.out),
        "per_device_train_batch_size": GLOBAL_BATCH // MICRO_BATCHES // dist.get_world_size(),
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": options.steps,
        "save_steps": options.save_at,
        "logging_steps": 1,
        "optim": "adamw_torch",  # fused, on CPUs, rounds the last elements of a piece otherwise than the others
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": options.max_norm,
        "bf16": options.bf16,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": "none",
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": options.state_dict_type,
            "cpu_ram_efficient_loading": options.cpu_ram_efficient_loading,
        },
        **more,
    }


class Watched:
    """Beside a Trainer's class: shows its sharded model before it trains, and clips by any norm."""

    shown: Callable[[Any], None] = staticmethod(lambda model: None)
    norm_type = 2.0
    accelerator: Any
    args: Any

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        self.shown(prepared[0])
        return prepared

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm, self.norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class _Trainer(Watched, Trainer):
    pass


def train(
    options: Options, *, prepared: Callable[[Any], None] = lambda model: None
) -> list[tuple[float, float]]:
    """Train, save once in the middle and once at the end; return loss and norm of the gradients per step.

    Args:
        options: what to run.
        prepared: called with the sharded model before the first step.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    args = TrainingArguments(**arguments(options))
    with runtime(options):
        trainer = _Trainer(
            tiny_llama(tied=options.tied), args, train_dataset=Sequences(GLOBAL_BATCH * options.steps)
        )
        trainer.shown, trainer.norm_type = prepared, options.norm_type
        trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
        trainer.save_model(str(options.out / "final"))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"]) for entry in logs]


def main() -> None:
    """Train and write the losses."""
    options = parse_options("transformers' Trainer with vescale_fsdp, on CPUs")
    write_losses(options.out, train(options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
