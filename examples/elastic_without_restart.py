"""Kill -9 a rank and watch the others go on, in the same processes. One command, on CPUs:

    python -m examples.elastic_without_restart

    4 ranks train the small Llama of `examples.train` and keep each other's shards in memory
    one of them is killed              3 go on from the last step that was saved, and lose no other
    another process starts             4 go on

torchrun's agent stops all workers when one of them fails, so each rank has a launcher of its own: here they are plain
subprocesses of this command, which also holds the store that they meet at. On a cluster it would be Slurm:

    srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node 1 python -m examples.elastic_without_restart --rank ...

Each process counts as a node here: it has a folder in shared memory of its own, which nobody reads when it is dead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from examples.corpus import Batches, read_corpus
from examples.train import Trainer
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier
from vescale_fsdp.elastic import ElasticJob, StoreMembership, TrainingState

NUM_RANKS = 4


def end_with(launcher_pid: int) -> None:
    """End this process when its launcher has ended, whichever way."""
    while os.getppid() == launcher_pid:
        time.sleep(0.5)
    os._exit(1)


def rank(options: argparse.Namespace) -> None:
    """One rank's process, from start to end."""
    threading.Thread(target=end_with, args=(options.launcher,), daemon=True).start()
    torch.set_num_threads(1)
    batches = Batches(read_corpus(), batch_size=12, seq_len=options.seq_len)
    trainers: list[Trainer] = []

    def build(mesh: DeviceMesh) -> TrainingState:
        trainers[:] = [Trainer(mesh, batches, num_steps=options.steps)]
        return TrainingState(trainers[0].model, trainers[0].optimizer)

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        ram = RamTier("job", replicas=1, folder=options.memory)
        return CheckpointManager(
            options.out / "steps", save_policy=EverySteps(50), retention=2, asynchronous=True, ram=ram
        )

    def train_step(job: ElasticJob, step: int) -> None:
        trainer = trainers[0]
        assert job.mesh is not None
        trainer.mesh, trainer.next_step = job.mesh, step
        loss = trainer.step()
        if job.rank == 0:
            epoch = job.epochs[-1]
            line = {"step": step + 1, "loss": loss, "ranks": job.num_ranks, "epoch": epoch.number}
            line |= {"pid": os.getpid(), "at_s": time.time(), "agreed_at_s": epoch.agreed_at_s}
            with open(options.out / "progress.jsonl", "a") as progress:
                progress.write(json.dumps(line) + "\n")

    membership = StoreMembership(dist.TCPStore("127.0.0.1", options.store), num_first=NUM_RANKS)
    ElasticJob(membership, build, checkpoints).run(train_step, options.steps)
    os._exit(0)  # not a plain return: interpreter shutdown races with gloo's threads, see load_with_fsdp2.py


class Launcher:
    """The store, the ranks, and what they report.

    Args:
        out: the run's folder.
        memory: a folder of a memory file system; each rank has one in it.
        arguments: for all ranks.
    """

    def __init__(self, out: Path, memory: Path, arguments: list[str]) -> None:
        self._out, self._memory, self._arguments = out, memory, arguments
        # In this process, which is no rank. Elsewhere: python -m vescale_fsdp.elastic.store_server
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._killed: set[int] = set()

    def start(self) -> None:
        """Start one more rank."""
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback[0], **os.environ}
        memory = ["--memory", str(self._memory / f"node{len(self.ranks)}")]
        command = [
            sys.executable,
            "-m",
            "examples.elastic_without_restart",
            "--rank",
            "--launcher",
            str(os.getpid()),
            "--store",
            str(self._store.port),
        ]
        with open(self._out / f"log{len(self.ranks)}", "w") as log:
            self.ranks.append(
                subprocess.Popen(
                    [*command, *memory, *self._arguments], env=environment, stdout=log, stderr=log
                )
            )

    def lines(self) -> list[dict[str, Any]]:
        """Progress so far; a line that is half written is left out."""
        file = self._out / "progress.jsonl"
        texts = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(text) for text in texts if text.endswith("\n")]

    def wait_for(self, num_ranks: int, num_steps: int, after_epoch: int = -1) -> list[dict[str, Any]]:
        """The first steps of an epoch of so many ranks; ends this command if a rank fails."""
        while True:
            found = [
                line for line in self.lines() if line["epoch"] > after_epoch and line["ranks"] == num_ranks
            ]
            if len(found) >= num_steps:
                return found
            ended = [
                n
                for n, each in enumerate(self.ranks)
                if each.poll() is not None and each.pid not in self._killed
            ]
            if ended:
                sys.exit(f"a rank has ended; see {[str(self._out / f'log{number}') for number in ended]}")
            time.sleep(0.02)

    def kill(self, pid: int) -> float:
        """SIGKILL, which leaves no chance to say goodbye; when that was."""
        now_s = time.time()
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        return now_s

    def end(self) -> None:
        """Leave nothing running."""
        for process in self.ranks:
            process.kill()
            process.wait()


def show(line: dict[str, Any]) -> None:
    """One step."""
    print(f"  step {line['step']:>3}   loss {line['loss']:.4f}   {line['ranks']} ranks", flush=True)


def demonstrate(launcher: Launcher) -> None:
    """Start, kill rank 0, watch, start another, watch."""
    for _ in range(NUM_RANKS):
        launcher.start()
    for line in launcher.wait_for(NUM_RANKS, 6):
        show(line)
    before = launcher.lines()[-1]
    print(f"kill -9 {before['pid']}, which is rank 0", flush=True)
    killed_s = launcher.kill(before["pid"])
    found = launcher.wait_for(NUM_RANKS - 1, 1, before["epoch"])
    print(f"the next step was done {found[0]['at_s'] - killed_s:.2f} s later", flush=True)
    lost = (
        max(line["step"] for line in launcher.lines() if line["epoch"] == before["epoch"])
        + 1
        - found[0]["step"]
    )
    for line in launcher.wait_for(NUM_RANKS - 1, 6, before["epoch"]):
        show(line)
    print(f"steps done twice: {lost}. Start another process", flush=True)
    launcher.start()
    for line in launcher.wait_for(NUM_RANKS, 4, found[0]["epoch"]):
        show(line)
    print("enough seen: no process was restarted, and the job has gone on")


def main() -> None:
    """The launcher, or with ``--rank`` one rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="at most; all ends once everything was seen")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(options)
    out = options.out or Path(tempfile.mkdtemp(prefix="elastic-"))
    out.mkdir(parents=True, exist_ok=True)
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    memory = Path(tempfile.mkdtemp(prefix="vescale-elastic-", dir=in_memory))
    arguments = ["--out", str(out), "--steps", str(options.steps), "--seq-len", str(options.seq_len)]
    launcher = Launcher(out, memory, arguments)
    try:
        demonstrate(launcher)
    finally:
        launcher.end()
        shutil.rmtree(memory)


if __name__ == "__main__":
    main()
