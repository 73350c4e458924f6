"""Train the small Llama on Python's own sources, sharded; the demo's job, also a full example of a training loop.

    torchrun --nproc-per-node 2 -m examples.train --out demo_output/run --steps 100 --save-at 40
    torchrun --nproc-per-node 3 -m examples.train --out demo_output/run --steps 100 --resume demo_output/run/step_40

What a run leaves in its folder:

    progress.jsonl     one line per step: step, loss (mean over the global batch), ranks, seconds
    pids/RANK          process id of each rank of the running job
    step_K/, final/    checkpoints, written by torch.distributed.checkpoint
    layout.json        the layout of every sharded group
    summary.json       digests of the final weights, sizes, times
    logits.safetensors logits of the sharded model for one prompt, in its compute dtype

Ranks see shares of one global batch, and the start weights do not depend on who draws them, so that the number
of ranks changes nothing but the order in which floats are added up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from examples.corpus import Batches, read_corpus
from examples.llama import Llama, LlamaShape, start_weights
from vescale_fsdp import FSDPModule, Granularity, MixedPrecisionPolicy, Rows, fully_shard, manual_seed

SHAPE = LlamaShape()
PROMPT = b"def read(self, path):\n        return "
BLOCK_ROWS = Rows(32)
PEAK_LR = 1.5e-3
WARMUP_STEPS = 10


class Trainer:
    """A sharded model with its optimizer and data: one training step, and state to save and load.

    Args:
        mesh: 1-D; the ranks that share the model and the batch.
        batches: what each rank sees at each step.
        num_steps: length of the whole training, over which the learning rate falls to nothing.
        shape: sizes of the model.
        granularity: what stays whole when matrices are cut.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        batches: Batches,
        *,
        num_steps: int,
        shape: LlamaShape = SHAPE,
        granularity: Granularity = BLOCK_ROWS,
    ) -> None:
        self.mesh = mesh
        self.batches = batches
        self.num_steps = num_steps
        self.device = torch.device(mesh.device_type)
        self.model = shard(shape, mesh, granularity)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.next_step = 0

    def step(self) -> float:
        """Train on the next global batch; its mean loss, the same number on all ranks."""
        inputs, targets = self.batches.of_rank(self.next_step, self.mesh.get_local_rank(), self.mesh.size())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.next_step, self.num_steps)
        logits = self.model(inputs.to(self.device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.next_step += 1
        total = loss.detach()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total.item() / self.mesh.size()

    def save(self, folder: Path) -> None:
        """Write model, optimizer and step with torch's own DCP."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optimizer, "step": self.next_step}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read what any number of ranks saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optim": optimizer, "step": 0}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.next_step = state["step"]

    def logits(self, text: bytes) -> Tensor:
        """Logits [1, seq, vocab] of the sharded model for a text, in its compute dtype, on the CPU."""
        with torch.no_grad():
            return self.model(torch.tensor([list(text)], device=self.device)).cpu()


def learning_rate(step: int, num_steps: int) -> float:
    """Up in a line, then down in half a cosine to nothing at the last step."""
    rising = (step + 1) / WARMUP_STEPS
    falling = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return PEAK_LR * min(rising, falling)


def shard(shape: LlamaShape, mesh: DeviceMesh, granularity: Granularity) -> Llama:
    """Build the model without memory, shard each block and the root, then fill in the shards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Llama(shape)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, granularity=granularity, mp_policy=policy)
    fully_shard(model, mesh=mesh, granularity=granularity, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    manual_seed(0)
    start_weights(model)
    return model


def digests(model: nn.Module) -> dict[str, str]:
    """sha256 of every full parameter's bytes, gathered one at a time. All ranks must call this."""
    found = {}
    for name, param in model.named_parameters():
        full = param.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        found[name] = hashlib.sha256(full.cpu().contiguous().numpy().tobytes()).hexdigest()
    return found


def start_process_group() -> DeviceMesh:
    """NCCL with a GPU per rank where there are enough, gloo on the CPU elsewhere."""
    ranks = int(os.environ["WORLD_SIZE"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        return init_device_mesh("cuda", (ranks,))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (ranks,))


def write_results(trainer: Trainer, out: Path, seconds: dict[str, float]) -> None:
    """The run's last words: digests, sizes, layout and logits (gathered by all, written by rank 0)."""
    assert isinstance(trainer.model, FSDPModule)
    layout = trainer.model.model_layout()
    weights, logits = digests(trainer.model), trainer.logits(PROMPT)
    if dist.get_rank() != 0:
        return
    summary = {
        "ranks": trainer.mesh.size(),
        "device": trainer.mesh.device_type,
        "numel": sum(group.payload_numel for _, group in layout.groups),
        "shard_numel": sum(group.shard_numel for _, group in layout.groups),
        "padding_ratio": layout.padding_ratio,
        "seconds": seconds,
        "digests": weights,
    }
    (out / "layout.json").write_text(json.dumps(layout.to_json()))
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    save_file({"logits": logits.contiguous()}, out / "logits.safetensors")


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="train the small Llama on Python's sources")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--save-at", type=int, default=0, help="write a checkpoint after this many steps")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--windows", type=int, default=12, help="of a global batch, which the ranks divide")
    options = parser.parse_args()
    batches = Batches(read_corpus(), batch_size=options.windows)
    trainer = Trainer(start_process_group(), batches, num_steps=options.steps)
    rank, seconds = dist.get_rank(), {"load": 0.0, "save": 0.0}
    (options.out / "pids").mkdir(parents=True, exist_ok=True)
    (options.out / "pids" / str(rank)).write_text(str(os.getpid()))
    start_s = time.perf_counter()
    if options.resume:
        trainer.load(options.resume)
        seconds["load"] = time.perf_counter() - start_s
    with open(options.out / "progress.jsonl", "a", buffering=1) as progress:
        while trainer.next_step < options.steps:
            start_s = time.perf_counter()
            loss = trainer.step()
            if rank == 0:
                line = {"step": trainer.next_step, "loss": loss, "ranks": trainer.mesh.size()}
                progress.write(json.dumps({**line, "seconds": time.perf_counter() - start_s}) + "\n")
            if trainer.next_step == options.save_at:
                trainer.save(options.out / f"step_{trainer.next_step}")
    start_s = time.perf_counter()
    trainer.save(options.out / "final")
    seconds["save"] = time.perf_counter() - start_s
    write_results(trainer, options.out, seconds)
    dist.barrier()  # gloo's thread lets go of its last tensor before the interpreter ends
    dist.destroy_process_group()
    os._exit(0)  # not a plain return: interpreter shutdown races with gloo's threads, see load_with_fsdp2.py


if __name__ == "__main__":
    main()
