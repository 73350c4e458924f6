"""A plain accelerate loop; the one line for this package is the plugin.

    torchrun --nproc-per-node 2 -m examples.stacks.train_accelerate --out /tmp/run            on CPUs, a few seconds
    torchrun --nproc-per-node 3 -m examples.stacks.train_accelerate --out /tmp/run2 --resume /tmp/run/step_25
    vescale-convert inspect /tmp/run/step_25/pytorch_model_fsdp_0

Two micro-batches per step, clipping, a save in the middle; OUT/losses.json has each step's loss and norm of gradients.
``--runtime fsdp2`` is the same with stock FSDP2.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from examples.stacks.accelerate_on_cpu import allow_fsdp_on_cpu
from examples.stacks.options import GLOBAL_BATCH, MICRO_BATCHES, Options, parse_options, write_losses
from examples.stacks.tiny_llm import Sequences, tiny_llama
from vescale_fsdp import Rows
from vescale_fsdp.integrations.accelerate import VescalePlugin


def plugin_of(options: Options) -> FullyShardedDataParallelPlugin:
    """The user's one line, beside the one it takes the place of."""
    flags: dict[str, Any] = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": options.state_dict_type,
        "cpu_ram_efficient_loading": options.cpu_ram_efficient_loading,
        "activation_checkpointing": options.activation_checkpointing,
    }
    if options.runtime == "fsdp2":
        allow_fsdp_on_cpu()
        return FullyShardedDataParallelPlugin(**flags)
    return VescalePlugin(**flags, granularity={"*mlp*": Rows(8)})


def mesh_of(options: Options) -> ParallelismConfig | None:
    """Copies of the sharded model, as accelerate lays them out; none without copies."""
    if options.replicas == 1:
        return None
    shards = int(os.environ["WORLD_SIZE"]) // options.replicas
    return ParallelismConfig(dp_replicate_size=options.replicas, dp_shard_size=shards)


def train(
    options: Options, *, prepared: Callable[[nn.Module], None] = lambda model: None
) -> list[tuple[float, float]]:
    """Train, save once in the middle; return loss and norm of the gradients per step.

    Args:
        options: what to run.
        prepared: called with the sharded model before the first step.
    """
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin_of(options),
        gradient_accumulation_steps=MICRO_BATCHES,
        mixed_precision="bf16" if options.bf16 else "no",
        parallelism_config=mesh_of(options),
    )
    model = tiny_llama(
        0 if accelerator.is_main_process or not options.cpu_ram_efficient_loading else 1, tied=options.tied
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    batch = GLOBAL_BATCH // MICRO_BATCHES // accelerator.num_processes
    loader = DataLoader(Sequences(GLOBAL_BATCH * options.steps), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    prepared(model)
    first = 0
    if options.resume is not None:
        accelerator.load_state(options.resume)
        first = int(options.resume.name.rpartition("_")[2])
        loader = accelerator.skip_first_batches(loader, first * MICRO_BATCHES)
    history: list[tuple[float, float]] = []
    losses: list[torch.Tensor] = []
    for micro_batch in loader:
        with accelerator.accumulate(model):
            loss = model(**micro_batch).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            if not accelerator.sync_gradients:
                continue
            norm = accelerator.clip_grad_norm_(
                model.parameters(), options.max_norm, norm_type=options.norm_type
            )
            optimizer.step()
            optimizer.zero_grad()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        history.append((torch.stack(losses).mean().item(), norm.item()))
        losses.clear()
        if first + len(history) == options.save_at:
            accelerator.save_state(options.out / f"step_{options.save_at}")
    accelerator.save_model(model, options.out / "final")
    return history


def main() -> None:
    """Train and write the losses."""
    options = parse_options("accelerate with vescale_fsdp, on CPUs")
    write_losses(options.out, train(options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
