"""The script of `before`, for this library: bf16, activation checkpointing, accumulation, EMA, checkpoints with resume.

    torchrun --nproc-per-node 2 -m examples.from_fsdp2.after RUN_FOLDER NUM_STEPS

The page "Coming from FSDP2" shows what differs.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps

VOCAB, DIM, SEQ, BATCH, MICRO_BATCHES, SAVE_EVERY = 257, 66, 32, 4, 2, 5


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention with two heads, then the MLP, on activations of shape [batch, sequence, DIM]."""
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape [batch, sequence, VOCAB]."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(folder: Path, num_steps: int) -> None:
    """Train, from the newest step in the folder if there is one; losses go to ``losses.txt`` there."""
    folder.mkdir(parents=True, exist_ok=True)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    with device:
        model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = fully_shard(checkpoint_wrapper(block), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    ema = {name: param.detach().clone() for name, param in model.named_parameters()}

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}
    manager = CheckpointManager(folder, save_policy=EverySteps(SAVE_EVERY))
    restored = manager.restore(state)
    first = restored.step if restored else 0

    for step in range(first + 1, num_steps + 1):
        generator = torch.Generator().manual_seed(step)
        first_token = torch.randint(VOCAB, (MICRO_BATCHES, num_ranks * BATCH, 1), generator=generator)
        tokens = (first_token + torch.arange(SEQ + 1)) % VOCAB  # text that can be learned
        tokens = tokens.chunk(num_ranks, dim=1)[rank].to(device)
        mean = torch.zeros((), device=device)
        for number, micro_batch in enumerate(tokens):
            model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
            logits = model(micro_batch[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
            mean += loss.detach() / MICRO_BATCHES / num_ranks
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                ema[name].lerp_(param.detach(), 0.1)
        dist.all_reduce(mean)
        if rank == 0:
            with (folder / "losses.txt").open("a") as losses:
                print(step, mean.item(), file=losses)
        manager.save(step, state)

    manager.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
