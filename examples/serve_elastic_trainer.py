"""An elastic trainer sends averaged weights to two engines after every step; ranks of all of them may be killed.

    python -m examples.serve_elastic_trainer      kills an engine and starts it again, then kills a trainer's rank

The trainer's ranks are an `ElasticJob`: after a loss, the remaining ranks continue. Its number of ranks is part of each
meeting with the engines, so rank 0 announces it in the store in every epoch, and the engines read it before they meet
the trainer. After a loss on any side, all call `joint_ranks` again.

The engines serve an exponential moving average of the weights, in bf16. Only the items that have changed are sent
(`Transfer(delta=True)`), after a new meeting too: an engine that was started again gets everything, and the other one
gets changes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from examples.serve_while_training import write
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier
from vescale_fsdp.elastic import ElasticJob, StoreMembership, TrainingState
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.transfer import Delta, JointRanks, Transfer, describe_states, joint_ranks, plan_transfer

NUM_TRAINERS, NUM_ENGINES, WIDTH = 2, 2, 16
EMA_WEIGHT = 0.01  # of the newest weights in the average
LIMIT_S = 120.0
MEETING_S = 5.0  # a rank that waits longer trains on, or looks for a newer meeting
SECRET = "of this example"  # a job of your own sets VESCALE_FSDP_SECRET instead


class Feed:
    """Weights from all ranks of a trainer to engines of one rank each.

    Args:
        store: a store that all jobs reach.
        engine: number of this engine; None on the trainer's ranks.

    Attributes:
        version: version of this process's weights; None if they must not be served.
        delta: what this process remembers of the last transfer, also after a loss of other processes.
    """

    def __init__(self, store: dist.Store, engine: int | None = None) -> None:
        self._store, self._engine = store, engine
        self.delta: Delta | None = None
        self._ranks: JointRanks | None = None
        self._transfer: Transfer | None = None
        self.version: int | None = None

    def announce(self, job: ElasticJob) -> None:
        """On the trainer's ranks, at the start of an epoch: the next `move` meets the engines with these ranks."""
        # The job has destroyed the groups of its last epoch, and with them the connections to the engines.
        self._ranks = self._transfer = None
        self._place = (job.epochs[-1].number, job.num_ranks)
        if job.rank == 0:
            self._store.set("trainer", json.dumps(self._place))

    def follow(self) -> None:
        """On an engine, before a meeting: read which ranks the trainer has."""
        self._place = tuple(json.loads(self._store.get("trainer")))

    def move(self, state: dict[str, Any] | None, into: dict[str, Any] | None, version: int | None) -> bool:
        """Send or receive the weights once. Returns False after a loss: the next call meets all sides again."""
        try:
            if self._transfer is None:
                if into is not None:
                    self.follow()
                epoch, num_trainers = self._place
                self._ranks = joint_ranks(
                    dist.PrefixStore(f"epoch {epoch}", self._store),
                    first_rank=0 if self._engine is None else num_trainers + self._engine,
                    num_ranks=num_trainers + NUM_ENGINES,
                    timeout_s=MEETING_S,
                    secret=SECRET,
                )
                plan = plan_transfer(*describe_states(state, into, ranks=self._ranks), cast=True)
                delta = self.delta or True
                self._transfer = Transfer(plan, ranks=self._ranks, version=self.version, delta=delta)
                self.delta = self._transfer.delta
            self._transfer.run(state, into, version=version)
        except CheckpointError:
            if self._transfer is not None:
                self.version = self._transfer.version
            if self._ranks is not None:
                self._ranks.close()
            self._ranks = self._transfer = None
            return False
        self.version = self._transfer.version
        return True


def model_of() -> torch.nn.Sequential:
    """The model that is trained and served, with equal initial weights in all processes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, WIDTH))


def digest_of(weights: dict[str, torch.Tensor]) -> str:
    """Digest of the bits of all weights."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(weights[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trainer(folder: Path, port: int, slot: int) -> None:
    """One rank of the trainer. It notes the digest of each version before it sends it."""
    _begin()
    feed = Feed(dist.TCPStore("127.0.0.1", port))
    versions = folder / f"trainer-{slot}.jsonl"

    def build(mesh: DeviceMesh) -> TrainingState:
        model = fully_shard(model_of(), mesh=mesh)
        average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        return TrainingState(model, torch.optim.AdamW(model.parameters()), {"ema": average})

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        ram = RamTier("job", replicas=1, folder=folder / f"memory-{slot}")  # as if each rank were a node
        return CheckpointManager(folder / "steps", save_policy=EverySteps(20), retention=2, ram=ram)

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(4, WIDTH, generator=generator).chunk(job.num_ranks)[job.rank]
        job.training.model(batch).square().mean().backward()
        job.training.optimizer.step()
        job.training.optimizer.zero_grad()
        average: dict[str, DTensor] = job.training.more["ema"]
        for name, weight in job.training.model.named_parameters():
            average[name].lerp_(weight.detach(), EMA_WEIGHT)
        digest = digest_of({name: weight.full_tensor().bfloat16() for name, weight in average.items()})
        if job.rank == 0:
            with versions.open("a") as file:
                file.write(json.dumps([step + 1, digest, os.getpid(), job.num_ranks]) + "\n")
        if feed.move(average, None, step + 1) and feed.delta is not None:
            with (folder / f"sent-{slot}").open("a") as file:
                file.write(f"{feed.delta.sent_bytes}\n")

    membership = StoreMembership(dist.TCPStore("127.0.0.1", port), num_first=NUM_TRAINERS)
    job = ElasticJob(membership, build, checkpoints, on_epoch=feed.announce, timeout_s=30)
    job.run(train_step, num_steps=1_000_000)


def engine(folder: Path, port: int, number: int) -> None:
    """An engine. It notes the digest of each version that it could serve.

    Args:
        number: of this process; every second one is the same engine, started again.
    """
    _begin()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    feed = Feed(dist.TCPStore("127.0.0.1", port), number % NUM_ENGINES)
    into = {
        name: torch.zeros_like(each, dtype=torch.bfloat16) for name, each in model_of().named_parameters()
    }
    served: list[Any] = []
    while True:
        if feed.move(None, into, None):
            served.append([feed.version, digest_of(into)])
            write(folder / f"engine-{number}", json.dumps(served))


def _begin() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)


def started(work: Any, folder: Path, port: int, number: int) -> BaseProcess:
    """Start a process of either side."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=work, args=(folder, port, number), daemon=True)
    process.start()
    return process


def served_by(folder: Path, number: int) -> list[tuple[int, str]]:
    """Versions and digests of an engine's weights so far."""
    file = folder / f"engine-{number}"
    return [tuple(each) for each in json.loads(file.read_text())] if file.exists() else []


def sent_by(folder: Path) -> list[tuple[int, str, int, int]]:
    """Version, digest, process of rank 0 and number of ranks of all steps of the trainer so far."""
    texts = [text for file in folder.glob("trainer-*.jsonl") for text in file.read_text().splitlines(True)]
    return [tuple(json.loads(text)) for text in texts if text.endswith("\n")]


def bytes_sent_by(folder: Path) -> list[int]:
    """Bytes that trainers have sent, by rank and transfer."""
    return [int(line) for file in folder.glob("sent-*") for line in file.read_text().split()]


def wait_for(folder: Path, number: int, num_trainers: int) -> None:
    """Wait until an engine has three versions, the newest of a trainer with so many ranks.

    Raises:
        TimeoutError: if it has not after `LIMIT_S` seconds.
    """
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        served = served_by(folder, number)
        if len(served) >= 3:
            sizes = {size for version, digest, _, size in sent_by(folder) if (version, digest) == served[-1]}
            if num_trainers in sizes:
                return
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"waited for engine {number} to have weights of {num_trainers} ranks: {served[-3:]}"
            )
        time.sleep(0.02)


def run(folder: Path) -> None:
    """Start all sides; kill an engine and start it again; kill a rank of the trainer."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    trainers = [started(trainer, folder, store.port, slot) for slot in range(NUM_TRAINERS)]
    engines: list[BaseProcess] = []
    try:
        engines += [started(engine, folder, store.port, number) for number in range(NUM_ENGINES)]
        for number in range(NUM_ENGINES):
            wait_for(folder, number, NUM_TRAINERS)
        engines[0].kill()
        engines[0].join()
        engines.append(started(engine, folder, store.port, NUM_ENGINES))
        wait_for(folder, NUM_ENGINES, NUM_TRAINERS)
        trainers[1].kill()
        trainers[1].join()
        for number in range(1, NUM_ENGINES + 1):
            wait_for(folder, number, NUM_TRAINERS - 1)
    finally:
        for process in (*trainers, *engines):
            process.kill()
            process.join()


def main() -> None:
    """Run and report."""
    with tempfile.TemporaryDirectory() as name:
        run(Path(name))
        sent = {(version, digest) for version, digest, _, _ in sent_by(Path(name))}
        nbytes = sorted(bytes_sent_by(Path(name)))
        print(
            f"bytes sent per rank and step: at most {nbytes[-1]}, in most steps {nbytes[len(nbytes) // 2]} or less"
        )
        for number in range(NUM_ENGINES + 1):
            served = served_by(Path(name), number)
            print(f"engine {number}: {len(served)} versions, all as sent: {sent.issuperset(served)}")


if __name__ == "__main__":
    main()
