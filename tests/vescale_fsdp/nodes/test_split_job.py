"""A network splits an elastic job: at most one part trains on, with the bits of a job restarted at the same steps.

Every node has one process. The store's server is on node 0, which has no process of the job in some cases. Cables are
pulled in step 3, in which a collective waits for the nodes behind them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import wait_until
from tests.vescale_fsdp.elastic.killed_ranks import digest, epochs_of, prove_equal, train_one, training_on
from tools.lab import Lab, Run, host_of
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier
from vescale_fsdp.elastic import ElasticJob, StoreMembership

pytestmark = [pytest.mark.lab, pytest.mark.part("faults")]

PORT = 29500
CUT_STEP, HELD_STEP, NUM_STEPS = 3, 6, 12
GROUP_S = 30.0  # time-out of process groups; keep-alives, at their default, notice a loss before
STORE_S = 10.0  # of the membership
MOST_S = 2 * (
    GROUP_S + 2 * STORE_S
)  # a collective, the store and the processes are waited for, one after the other


class Split(NamedTuple):
    """Which nodes have a process, whose cables are pulled, who trains on, and what happens meanwhile."""

    nodes: tuple[int, ...]
    cut: tuple[int, ...]
    go_on: tuple[int, ...]
    heals: bool = False  # the cables are plugged in when the others have gone on; else at the end
    added: tuple[int, ...] = ()  # nodes on which a process is started after the cut


BACK = "a minority is cut off and comes back"
WITHOUT_STORE = "the members go on without the store, which a new process has"
SPLITS = {
    "a minority is cut off": Split((0, 1, 2), (2,), (0, 1)),
    BACK: Split((0, 1, 2), (2,), (0, 1, 2), heals=True),
    "halves": Split((0, 1), (1,), (0,)),
    "a minority has the store": Split((0, 1, 2), (0,), ()),
    "no part has the store": Split((1, 2), (0, 2), ()),
    WITHOUT_STORE: Split((1, 2), (0,), (1, 2), added=(0,)),
}

SAMPLE = [BACK, WITHOUT_STORE]  # of the part "faults"; `make test-lab` runs all


def _process(node: int, num_first: int, folder: Path) -> None:
    """A process of the job; logs what `killed_ranks.epochs_of` reads, with times and members."""
    torch.set_num_threads(1)
    log = open(folder / f"log-{node}-{os.getpid()}", "a", buffering=1)  # noqa: SIM115  for life

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        ram = RamTier("job", replicas=1)
        return CheckpointManager(
            folder / "steps", save_policy=EverySteps(4), retention=2, asynchronous=True, ram=ram
        )

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        epoch = job.epochs[-1]
        seen = {"epoch": epoch.number, "members": epoch.members, "world": job.num_ranks}
        seen |= {"from": epoch.step, "tier": epoch.tier, "agreed_at": epoch.agreed_at_s}
        log.write(json.dumps({**seen, "begun": step, "at": time.time(), "ready_at": epoch.ready_at_s}) + "\n")
        if step == CUT_STEP:
            (folder / f"here-{node}").touch()
            wait_until((folder / "cut").exists, "the cut", limit_s=120)
        loss = train_one(job.training, job.rank, job.num_ranks)
        done = {"epoch": epoch.number, "rank": job.rank, "step": step, "loss": loss, "at": time.time()}
        log.write(json.dumps(done) + "\n")
        if step >= HELD_STEP:  # else the job would be over before the others come back, or end
            (folder / f"held-{node}").touch()
            wait_until(
                lambda: (folder / "go").exists() or membership.has_changed(), "the others", limit_s=2 * MOST_S
            )
        if step == NUM_STEPS - 1:
            log.write(json.dumps({"digest": digest(job.training), "of": epoch.number}) + "\n")

    store = dist.TCPStore(host_of(0), PORT, is_master=False)
    membership = StoreMembership(store, num_first=num_first, timeout_s=STORE_S)
    ElasticJob(membership, training_on, checkpoints, timeout_s=GROUP_S).run(train_step, NUM_STEPS)


def _play(split: Split, folder: Path) -> dict[int, dict[str, Any]]:
    """Run the job through a split. Returns how the process of each node ended."""
    module = [sys.executable, "-m", "tests.vescale_fsdp.nodes.test_split_job"]
    serve = [sys.executable, "-m", "vescale_fsdp.elastic.store_server", "--host", host_of(0), "--port"]
    environment = {"VESCALE_FSDP_SECRET": "s", "OMP_NUM_THREADS": "1"}
    with Lab(nodes=3, minutes=8, shared=[folder]) as lab:
        server = Run({0: lab.popen(0, [*serve, str(PORT)], env=environment)})
        wait_until(lambda: "port" in server.output(0), "the store", state=lambda: server.output(0))

        def start(node: int) -> Run:
            command = [*module, str(node), str(len(split.nodes)), str(folder)]
            return Run({node: lab.popen(node, command, env=environment)})

        runs = {node: start(node) for node in split.nodes}

        def wait_for(names: set[str], what: str) -> None:
            wait_until(
                lambda: all((folder / name).exists() for name in names),
                what,
                limit_s=2 * MOST_S,
                state=lambda: "\n".join(run.tails() for run in runs.values()),
            )

        wait_for({f"here-{node}" for node in split.nodes}, "the step of the cut")
        for node in split.cut:
            lab.cut(node)
        (folder / "cut").touch()
        runs |= {node: start(node) for node in split.added}
        lost = set(runs) - set(split.go_on)
        if split.heals:
            wait_for({f"held-{node}" for node in split.go_on if node not in split.cut}, "those that go on")
            for node in split.cut:
                lab.heal(node)
            wait_for({f"held-{node}" for node in split.go_on}, "the node that has come back")
        wait_for({f"end-{node}" for node in lost} | {f"held-{node}" for node in split.go_on}, "the ends")
        (folder / "go").touch()
        for run in runs.values():
            assert set(run.wait(2 * MOST_S).values()) == {0}, run.tails(60)
        return {node: json.loads(run.output(node).splitlines()[-1]) for node, run in runs.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SPLITS if os.environ.get("LAB") == "all" else SAMPLE)
def test_one_part_of_a_split_job_goes_on_at_most(name: str, tmp_path: Path) -> None:
    """And the processes of the other parts end with an error, in bounded time."""
    split = SPLITS[name]
    ends = _play(split, tmp_path)

    for node, end in ends.items():
        if node in split.go_on:
            assert end["error"] is None, (node, end)
        else:
            assert end["error"] == "LifecycleError" and end["took_s"] <= MOST_S, (node, end)
    lines = [json.loads(text) for file in tmp_path.glob("log-*") for text in file.read_text().splitlines()]
    begun = [line for line in lines if "begun" in line]
    done = [line for line in lines if "loss" in line]
    groups = {(line["epoch"], *line["members"]) for line in begun}
    numbers = sorted(epoch for epoch, *_ in groups)
    assert len(set(numbers)) == len(numbers), groups  # no two groups have one number
    for before, after in pairwise(numbers):
        last_s = max((line["at"] for line in done if line["epoch"] == before), default=0.0)
        assert last_s <= min(line["at"] for line in begun if line["epoch"] == after), (before, after)
    cut_s = (tmp_path / "cut").stat().st_mtime
    if not split.go_on:
        assert all(line["at"] < cut_s for line in done)
        return
    assert {line["step"] for line in done} == set(range(NUM_STEPS))
    prove_equal(tmp_path, NUM_STEPS)
    later = [line for line in begun if line["agreed_at"] > cut_s]
    if split.added:  # the epoch went on
        assert not later and {line["world"] for line in begun} == {len(split.nodes)}
    else:
        print(
            f"{name}: members agreed {min(line['agreed_at'] for line in later) - cut_s:.1f} s after the cut,"
        )
        print(f"    trained {min(line['ready_at'] for line in later) - cut_s:.1f} s after it")
        # Three times what keep-alives and the next epoch may take, on a machine that others use.
        assert min(line["ready_at"] for line in later) - cut_s <= 3 * 15
    assert epochs_of(tmp_path)[-1].world == len(split.go_on)


def _main(node: int, num_first: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(4 * MOST_S, exit=True)
    end: dict[str, Any] = {"error": None}
    try:
        _process(node, num_first, folder)
    except RuntimeError as error:
        end = {"error": type(error).__name__, "text": str(error)}
        end["took_s"] = time.time() - (folder / "cut").stat().st_mtime
    print(json.dumps(end), flush=True)
    (folder / f"end-{node}").touch()
    os._exit(0)  # after an error, gloo's threads wait for ranks behind the cut


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
