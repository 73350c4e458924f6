"""A trainer sends its weights to an engine after every step; either one may be killed and started again.

    python -m examples.serve_while_training       kills the engine, then the trainer, and starts them again

Each process calls `Feed.move` in a loop. After a loss, the process that is left closes its connections and meets the
new one at the same address. The engine serves only while `Feed.version` is a number: it is None before the first
transfer, and after a failure that has left the weights unusable.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.transfer import JointRanks, Transfer, describe_states, joint_ranks, plan_transfer

LIMIT_S = 60.0
SECRET = "of this example"  # a job of your own sets VESCALE_FSDP_SECRET instead


class Feed:
    """Weights from a trainer, joint rank 0, to an engine, joint rank 1.

    Args:
        meet: the rendezvous, the same in all processes and at all times.
        rank: 0 in the trainer's process, 1 in the engine's.
        weights: the state that is sent, or filled.

    Attributes:
        version: version of this process's weights; None if they must not be served.
    """

    def __init__(self, meet: str, rank: int, weights: dict[str, torch.Tensor]) -> None:
        self._meet, self._rank = meet, rank
        self._states = (weights, None) if rank == 0 else (None, weights)
        self._ranks: JointRanks | None = None
        self._transfer: Transfer | None = None
        self.version: int | None = None

    def move(self, version: int | None = None) -> bool:
        """Send or receive the weights once. Returns False after a loss: the next call meets the other side again."""
        try:
            if self._transfer is None:
                self._ranks = joint_ranks(
                    self._meet,
                    first_rank=self._rank,
                    num_ranks=2,
                    timeout_s=LIMIT_S,
                    secret="of this example",
                )
                plan = plan_transfer(*describe_states(*self._states, ranks=self._ranks))
                self._transfer = Transfer(plan, ranks=self._ranks, version=self.version)
            self._transfer.run(*self._states, version=version)
        except CheckpointError:
            if self._transfer is not None:
                self.version = self._transfer.version
            if self._ranks is not None:
                self._ranks.close()
            self._ranks = self._transfer = None
            return False
        self.version = self._transfer.version
        return True


def write(file: Path, text: str) -> None:
    """Replace a file, so that no reader finds a part of it."""
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(file)


def job(folder: Path, meet: str, rank: int) -> None:
    """One process of either side, until it is killed. It notes its newest version, and whether all weights have it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saved = folder / "saved"  # stands for the trainer's checkpoint
    step = int(saved.read_text()) if rank == 0 and saved.exists() else 0
    weights = torch.full((1000,), float(step))
    feed = Feed(meet, rank, {"w": weights})
    while True:
        if rank == 0:  # stands for a training step
            step += 1
            weights.fill_(step)
            write(saved, str(step))
        if feed.move(step if rank == 0 else None):
            is_whole = rank == 0 or weights.unique().tolist() == [feed.version]
            write(folder / f"view-{rank}", json.dumps([os.getpid(), feed.version, is_whole]))


def started(folder: Path, meet: str, rank: int) -> BaseProcess:
    """Start one side."""
    process = multiprocessing.get_context("forkserver").Process(
        target=job, args=(folder, meet, rank), daemon=True
    )
    process.start()
    return process


def wait_for_both(folder: Path, jobs: dict[int, BaseProcess], above: int) -> int:
    """Wait until both processes have a version above a number, with whole weights; returns the engine's.

    Raises:
        TimeoutError: if they do not meet in time.
    """
    deadline = time.monotonic() + LIMIT_S
    files = {rank: folder / f"view-{rank}" for rank in jobs}
    while True:
        views = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
        if len(views) == len(jobs) and all(
            view[0] == jobs[rank].pid and view[1] > above and view[2] for rank, view in views.items()
        ):
            return int(views[1][1])
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for versions above {above} on both sides: {views}")
        time.sleep(0.01)


def run(folder: Path, meet: str, kills: tuple[int, ...] = (1, 0)) -> list[int]:
    """Start both sides, kill them in this order, and start each again; the engine's versions after each start."""
    jobs = {rank: started(folder, meet, rank) for rank in range(2)}
    try:
        versions = [wait_for_both(folder, jobs, -1)]
        for rank in kills:
            jobs[rank].kill()
            jobs[rank].join()
            jobs[rank] = started(folder, meet, rank)
            versions.append(wait_for_both(folder, jobs, versions[-1]))
        return versions
    finally:
        for process in jobs.values():
            process.kill()
            process.join()


def main() -> None:
    """Run and report."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        print(
            "the engine's versions, at first and after each kill:",
            run(Path(folder), f"tcp://127.0.0.1:{port}"),
        )


if __name__ == "__main__":
    main()
