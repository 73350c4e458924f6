"""Reinforcement learning in two jobs: one trains a policy, sharded; another samples from it with the newest weights.

    python -m examples.rl_weight_sync                 two trainers and one sampler, on a CPU
    python -m examples.rl_weight_sync --steps 100 --samplers 2

The policy writes letters and is rewarded for each that follows the one before it in the alphabet. In every step

    weights    trainers -> samplers    a `Transfer`, planned once: rows of the trainers' shards to whole tensors
    samples    samplers -> trainers    likewise: every trainer gets its part of the batch
    policy     trainers                one step of REINFORCE: reward less the batch's mean

The jobs share no process group: each calls ``init_process_group`` for itself, and they meet by `joint_ranks`. Under
launchers of your own a job is `train` or `sample` on each of its ranks.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.transfer import Transfer, describe_states, joint_ranks, plan_transfer

LETTERS, LENGTH = 8, 6


@dataclass(frozen=True)
class Options:
    """What to run.

    Args:
        meet: where the jobs meet (see `joint_ranks`); `run` has a file of its own for it.
    """

    meet: str = ""
    trainers: int = 2
    samplers: int = 1
    steps: int = 40
    batch: int = 96


class Policy(nn.Module):
    """Logarithms of the next letter's chances, from the last letter and its place."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(LETTERS, 32)
        self.place = nn.Embedding(LENGTH, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(letters.shape[-1]).expand_as(letters)
        found: torch.Tensor = self.head(self.body(self.letter(letters) + self.place(places))).log_softmax(-1)
        return found


def rewards_of(letters: torch.Tensor) -> torch.Tensor:
    """For each letter but the first: 1 where it follows the one before it in the alphabet."""
    return (letters[:, 1:] == (letters[:, :-1] + 1) % LETTERS).float()


class Exchange:
    """Weights to the samplers and samples back, planned once. Made by all ranks of both jobs.

    Args:
        weights: of the policy, this rank's own; the samplers' are filled.
        samples: this rank's part of the batch; the trainers' is filled.
    """

    def __init__(self, options: Options, weights: Any, samples: Any, *, is_trainer: bool) -> None:
        first = 0 if is_trainer else options.trainers
        ranks = joint_ranks(options.meet, first_rank=first, num_ranks=options.trainers + options.samplers)
        self._weights = (weights, None) if is_trainer else (None, weights)
        self._samples = (None, samples) if is_trainer else (samples, None)
        plan = plan_transfer(*describe_states(*self._weights, ranks=ranks))
        if ranks.rank == 0:
            print(plan, flush=True)
        # A sampler goes on with the weights it has where a trainer fails.
        self._move_weights = Transfer(plan, ranks=ranks, keep_old=True)
        self._move_samples = Transfer(
            plan_transfer(*describe_states(*self._samples, ranks=ranks)), ranks=ranks
        )

    def move(self, write: Any = None) -> None:
        """Weights one way, ``write()`` where samples are made, and samples the other way."""
        self._move_weights.run(*self._weights)
        if write is not None:
            write()
        self._move_samples.run(*self._samples)


def train(options: Options) -> list[float]:
    """One rank of the trainers; the mean reward of each step's samples."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (options.trainers,))
    policy = Policy()
    for part in (policy.body, policy.head, policy):
        fully_shard(part, mesh=mesh, granularity=Rows(4), reshard_after_forward=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    letters = torch.zeros(options.batch // options.trainers, LENGTH, dtype=torch.int64)
    samples = {"letters": DTensor.from_local(letters, mesh, [Shard(0)])}
    exchange = Exchange(options, dict(policy.named_parameters()), samples, is_trainer=True)
    seen = []
    for step in range(options.steps):
        exchange.move()
        reward = rewards_of(letters)
        mean = reward.mean()
        dist.all_reduce(mean)
        mean /= options.trainers
        chosen = policy(letters[:, :-1]).gather(2, letters[:, 1:, None]).squeeze(2)
        (-(reward - mean) * chosen).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(mean))
        if dist.get_rank() == 0 and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:3}: mean reward {seen[-1]:.2f}", flush=True)
    return seen


@torch.no_grad()
def sample(options: Options) -> list[float]:
    """One rank of the samplers; the mean reward of each step's own samples."""
    torch.manual_seed(1 + dist.get_rank())
    mesh = init_device_mesh("cpu", (options.samplers,))
    policy = Policy()
    letters = torch.zeros(options.batch // options.samplers, LENGTH, dtype=torch.int64)
    samples = {"letters": DTensor.from_local(letters, mesh, [Shard(0)])}
    exchange = Exchange(options, dict(policy.named_parameters()), samples, is_trainer=False)
    seen = []

    def write() -> None:
        letters[:, 0] = torch.randint(LETTERS, (len(letters),))
        for place in range(1, LENGTH):
            chances = policy(letters[:, :place])[:, -1].exp()
            letters[:, place] = torch.multinomial(chances, 1)[:, 0]
        seen.append(float(rewards_of(letters).mean()))

    for _ in range(options.steps):
        exchange.move(write)
    return seen


def start(rank: int, options: Options, folder: str) -> list[float]:
    """One process of either job, numbered among all of them; the mean reward of each step."""
    is_trainer = rank < options.trainers
    size = options.trainers if is_trainer else options.samplers
    own = rank if is_trainer else rank - options.trainers
    store = dist.FileStore(f"{folder}/{'trainers' if is_trainer else 'samplers'}", size)
    dist.init_process_group("gloo", store=store, rank=own, world_size=size)
    return (train if is_trainer else sample)(options)


def _process(rank: int, options: Options, folder: str) -> None:
    torch.set_num_threads(1)
    torch.save(start(rank, options, folder), f"{folder}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run(options: Options) -> list[list[float]]:
    """Both jobs on this machine; the mean rewards that each rank saw, trainers first."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_ranks = options.trainers + options.samplers
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (replace(options, meet=f"file://{folder}/meet"), folder), nprocs=num_ranks)
        return [torch.load(f"{folder}/rank{rank}") for rank in range(num_ranks)]


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--samplers", type=int, default=1)
    given = parser.parse_args()
    seen = run(Options("", given.trainers, given.samplers, given.steps))
    print(f"mean reward {seen[0][0]:.2f} at first, {seen[0][-1]:.2f} at last")


if __name__ == "__main__":
    main()
