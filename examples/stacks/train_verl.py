"""verl's FSDP2 functions and checkpoint manager in two phases, as in PPO; the one line here is ``with as_fsdp2(...)``.

    torchrun --nproc-per-node 2 -m examples.stacks.train_verl --out /tmp/run                  on CPUs, a few seconds
    torchrun --nproc-per-node 2 -m examples.stacks.train_verl --out /tmp/run2 --resume /tmp/run/step_25
    torchrun --nproc-per-node 3 -m examples.stacks.train_verl --out /tmp/run3 --resume /tmp/run/step_25
    vescale-convert inspect /tmp/run/step_25

Each step first computes log-probabilities without resharding, then updates the actor in two micro-batches with
PPO's clipped objective. Around them parameters and optimizer state are loaded and offloaded, as verl does.
verl's own ``load_checkpoint`` resumes on as many ranks as saved, `vescale_fsdp.checkpoint.load` on any number.
``--runtime fsdp2`` uses stock FSDP2. verl's trainer needs Ray and an inference engine; these functions do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

from examples.stacks.options import GLOBAL_BATCH, MICRO_BATCHES, Options, parse_options, write_losses
from examples.stacks.tiny_llm import Sequences, tiny_llama
from vescale_fsdp import Rows
from vescale_fsdp.checkpoint import load
from vescale_fsdp.integrations import as_fsdp2


class OnCpu(PlatformCUDA):
    """What verl asks of a machine without an accelerator."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        empty_cache=lambda: None, get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state
    )

    def current_device(self) -> str:
        """Return torch's name of the device."""
        return "cpu"


set_platform(OnCpu())  # before verl's modules ask for it

from verl.utils import fsdp_utils  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402


def runtime(options: Options) -> AbstractContextManager[Any]:
    """The user's one line, or nothing."""
    return nullcontext() if options.runtime == "fsdp2" else as_fsdp2(granularity=Rows(4))


def sharded_actor() -> nn.Module:
    """A tiny Llama that verl has sharded, and filled from rank 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    actor = tiny_llama()
    full = actor.state_dict()
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(), "reshard_after_forward": True}
    fsdp_utils.apply_fsdp2(actor, {**options, "offload_policy": None}, {"forward_prefetch": True})
    fsdp_utils.fsdp2_load_full_state_dict(actor, full, mesh, None)
    return actor


def train(
    options: Options, *, prepared: Callable[[nn.Module], None] = lambda model: None
) -> list[tuple[float, float]]:
    """Train, save once in the middle; return loss and norm of the gradients per step.

    Args:
        options: what to run.
        prepared: called with the sharded model before the first step.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with runtime(options):
        actor = sharded_actor()
        prepared(actor)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2, eps=1e-4)
        manager = FSDPCheckpointManager(actor, optimizer)
        first = 0
        if options.resume is not None:
            resume(manager, options.resume)
            first = int(options.resume.name.rpartition("_")[2])
        history = []
        for step in range(first, options.steps):
            batches = [micro_batch(step, micro) for micro in range(MICRO_BATCHES)]
            before = rollout(actor, batches)
            fsdp_utils.load_fsdp_optimizer(optimizer, "cpu")
            history.append(update(actor, optimizer, batches, before, options))
            fsdp_utils.offload_fsdp_optimizer(optimizer)
            fsdp_utils.offload_fsdp_model_to_cpu(actor)
            if step + 1 == options.save_at:
                manager.save_checkpoint(str(options.out / f"step_{step + 1}"), global_step=step + 1)
        return history


def resume(manager: FSDPCheckpointManager, folder: Path) -> None:
    """Fill model and optimizer with what was saved: by verl if as many ranks saved it, else by this package."""
    if (folder / f"model_world_size_{dist.get_world_size()}_rank_0.pt").exists():
        manager.load_checkpoint(str(folder))
    else:
        load(str(folder), {"model": manager.model, "optimizer": manager.optimizer})


def rollout(actor: Any, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first phase: log-probabilities of tokens, for which parameters are gathered once."""
    fsdp_utils.load_fsdp2_model_to_gpu(actor)
    fsdp_utils.set_reshard_after_forward(actor, False)
    actor.eval()
    with torch.no_grad():
        found = [log_probs(actor, tokens) for tokens in batches]
    fsdp_utils.set_reshard_after_forward(actor, True)
    actor.reshard()
    actor.train()
    return found


def update(
    actor: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    options: Options,
) -> tuple[float, float]:
    """The second phase: one step of PPO's clipped objective; every token has the advantage 1."""
    total = torch.zeros(())
    for tokens, old in zip(batches, before, strict=True):
        ratio = (log_probs(actor, tokens) - old).exp()
        loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean() / MICRO_BATCHES
        loss.backward()
        total -= old.mean() / MICRO_BATCHES  # the objective itself is 1 before the step
    dist.all_reduce(total)
    norm = fsdp_utils.fsdp2_clip_grad_norm_(actor.parameters(), options.max_norm, options.norm_type)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    optimizer.step()
    optimizer.zero_grad()
    return total.item() / dist.get_world_size(), norm.item()


def log_probs(actor: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first, given those before it."""
    logits = actor(input_ids=tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def micro_batch(step: int, micro: int) -> torch.Tensor:
    """This rank's rows of one of a step's micro-batches."""
    data, rows = Sequences(GLOBAL_BATCH * (step + 1)), GLOBAL_BATCH // MICRO_BATCHES
    share = rows // dist.get_world_size()
    start = step * GLOBAL_BATCH + micro * rows + dist.get_rank() * share
    return torch.stack([data[index]["input_ids"] for index in range(start, start + share)])


def main() -> None:
    """Train and write the losses."""
    options = parse_options("verl's FSDP2 functions with vescale_fsdp, on CPUs")
    write_losses(options.out, train(options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
