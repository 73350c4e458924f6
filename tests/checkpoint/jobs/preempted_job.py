"""A job for torchrun that saves now and then, slowly, and once more when it is told to end.

    torchrun --standalone --nproc-per-node 2 -m tests.checkpoint.jobs.preempted_job ROOT sync|async

What a run leaves in ROOT: ``steps/`` the checkpoints, ``pids/RANK``, ``writing`` once a file is being written,
``signalled`` once a rank was told to end, and ``ended/RANK``, the step after which a rank ended of its own accord.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from tests.support.processes import wait_until
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, OnSignal
from vescale_fsdp.checkpoint.storage.base import FileWriter
from vescale_fsdp.checkpoint.storage.local import LocalStorage

FIRST_SAVE = 3


class _Slow(LocalStorage):
    """Writing takes until a rank has been told to end; the first file is announced."""

    def create(self, name: str, size_bytes: int) -> FileWriter:
        writer = super().create(name, size_bytes)
        root = self.root.parents[1]
        (root / "writing").touch()
        wait_until((root / "signalled").exists, "the signal")
        return writer

    def child(self, name: str) -> LocalStorage:
        return _Slow(self.root / name)


def train(root: Path, behind: bool) -> None:
    """Train until all ranks have agreed to stop. For all ranks."""
    rank = dist.get_rank()
    for folder in ("pids", "ended"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    rules = EverySteps(FIRST_SAVE) | OnSignal()
    manager = CheckpointManager(_Slow(root / "steps"), retention=2, asynchronous=behind, save_policy=rules)
    (root / "pids" / str(rank)).write_text(str(os.getpid()))
    ends = signal.getsignal(signal.SIGTERM)
    assert callable(ends)

    def announce(number: int, frame: FrameType | None) -> None:
        (root / "signalled").touch()
        ends(number, frame)

    signal.signal(signal.SIGTERM, announce)
    step = 0
    while not manager.should_stop:
        step += 1
        manager.save(step, {"w": torch.full((1000,), step), "step": step})
    signal.signal(signal.SIGTERM, ends)
    manager.close()
    (root / "ended" / str(rank)).write_text(str(step))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), behind=sys.argv[2] == "async")
    dist.destroy_process_group()
