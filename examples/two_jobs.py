"""A trainer and an engine as two jobs of torchrun: after every step, the engine has the trainer's weights.

    torchrun --standalone --nproc-per-node 2 -m examples.two_jobs train
    torchrun --standalone --nproc-per-node 1 -m examples.two_jobs serve        in another terminal

Each job has a process group of its own. All ranks of both meet at ``--meet``, an address of the machine that runs rank
0 of the trainer. On several machines, pass it to both jobs, and set the same VESCALE_FSDP_SECRET. Either job may be
started first. Both print the model's output for one input, which is equal for equal weights.

If jobs must survive the loss of a rank, see `examples.serve_while_training` and `examples.serve_elastic_trainer`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from vescale_fsdp import fully_shard
from vescale_fsdp.transfer import Transfer, describe_states, joint_ranks, plan_transfer

WIDTH = 16


def main() -> None:
    """Run one of the two jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", choices=["train", "serve"])
    parser.add_argument("--meet", default="tcp://127.0.0.1:29600", help="where both jobs meet")
    parser.add_argument("--trainers", type=int, default=2, help="number of ranks of the trainer")
    parser.add_argument("--engines", type=int, default=1, help="number of ranks of the engine")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--outputs", type=Path, help="a file for the versions and outputs of the job's rank 0"
    )
    options = parser.parse_args()

    dist.init_process_group("gloo")  # the job's own ranks
    is_trainer = options.job == "train"
    torch.manual_seed(0 if is_trainer else 1)  # the engine begins with other weights
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, WIDTH))
    if is_trainer:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # the engine's stays idle
    batches = torch.Generator().manual_seed(dist.get_rank())  # of this rank's own
    weights = dict(model.named_parameters())
    state, into = (weights, None) if is_trainer else (None, weights)
    question, outputs = torch.linspace(-1, 1, WIDTH), []
    with joint_ranks(
        options.meet,
        first_rank=0 if is_trainer else options.trainers,
        num_ranks=options.trainers + options.engines,
    ) as ranks:
        transfer = Transfer(plan_transfer(*describe_states(state, into, ranks=ranks)), ranks=ranks)
        for step in range(1, options.steps + 1):
            if is_trainer:
                batch = torch.randn(8, WIDTH, generator=batches)
                (model(batch) - batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            transfer.run(state, into, version=step if is_trainer else None)
            with torch.no_grad():
                outputs.append((transfer.version if into else step, model(question).sum().item()))
            if dist.get_rank() == 0:
                print(f"{options.job}: version {outputs[-1][0]}, output {outputs[-1][1]:.9f}", flush=True)
    if options.outputs is not None and dist.get_rank() == 0:
        options.outputs.write_text(json.dumps(outputs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
