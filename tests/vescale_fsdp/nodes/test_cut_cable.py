"""A cable is pulled, in each phase of a job on two nodes: every rank ends in time and says whom it misses.

No packet says that a peer is gone, so only time-outs end a wait. What was acknowledged before is restored after the
cable is back. `make test-lab` cuts it in every phase, the part "faults" in three.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.processes import wait_until
from tools.lab import Lab, Run, host_of
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.transfer import Transfer, describe_states, plan_transfer

pytestmark = [pytest.mark.lab, pytest.mark.part("faults")]

WORLD = 4
TIMEOUT_S = 10.0  # longer than a roll call waits before it takes ranks for absent
PHASES = ("rendezvous", "gather", "reduction", "replicas", "norm", "save", "commit", "transfer")
# Several waits of a save follow each other: for the ranks, for the store, for the ranks that leave.
MOST_S = {"save": 4 * TIMEOUT_S, "commit": 4 * TIMEOUT_S}


class _Job:
    """One rank's training of three steps, which stops at a phase of step 2 until the cable is cut."""

    def __init__(self, phase: str, folder: Path) -> None:
        self._phase, self._folder = phase, folder
        self.start_s = time.monotonic()

    def reach(self, phase: str) -> None:
        """Wait for the cut, if this is the phase."""
        if phase == self._phase:
            (self._folder / f"here-{os.environ['RANK']}").touch()
            wait_until((self._folder / "cut").exists, "the cut")
            self.start_s = time.monotonic()
            faulthandler.dump_traceback_later(6 * TIMEOUT_S, exit=True)

    def run(self) -> int:
        """Train; returns the step that was restored."""
        self.reach("rendezvous")
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        # Replicas: while all-reduces of later layers are in flight, the backward reaches the first.
        is_hybrid = self._phase == "replicas"
        shape, names = ((2, 2), ("replicas", "shards")) if is_hybrid else ((WORLD,), ("shards",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        manager = CheckpointManager(self._folder / "steps", save_policy=EverySteps(1))
        restored = manager.restore(state)
        first = restored.step if restored else 0
        for step in range(first + 1, first + 4):
            is_second = step == 2
            if is_second:
                self.reach("gather")
            hidden = model[0].register_forward_hook(partial(self._stop_in_backward, is_second))
            loss = model(torch.ones(2, 64)).sum()
            hidden.remove()
            if is_second:
                self.reach("reduction")
            loss.backward()
            if is_second:
                self.reach("norm")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if is_second:
                self.reach("save")
            with mock.patch.object(LocalStorage, "commit", self._commit(is_second)):
                manager.save(step, state)
            if dist.get_rank() == 0:
                (self._folder / f"saved-{step}").touch()
        self.reach("transfer")
        into = {"w": torch.zeros(1000)} if dist.get_rank() >= 2 else None
        source = {"w": torch.ones(1000)} if into is None else None
        Transfer(plan_transfer(*describe_states(source, into))).run(source, into)
        return first

    def _stop_in_backward(self, is_second: bool, _module: nn.Module, _args: Any, out: torch.Tensor) -> None:
        if is_second:
            out.register_hook(lambda _grad: self.reach("replicas"))

    def _commit(self, is_second: bool) -> Any:
        commit = LocalStorage.commit

        def committed(storage: LocalStorage, *arguments: Any, **options: Any) -> Any:
            if is_second:
                self.reach("commit")
            return commit(storage, *arguments, **options)

        return committed


def _launch(lab: Lab, phase: str, folder: Path) -> dict[int, Run]:
    environment = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": host_of(0)}
    environment |= {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.vescale_fsdp.nodes.test_cut_cable", phase, str(folder)]
    return {
        rank: Run({0: lab.popen(rank // 2, command, env={**environment, "RANK": str(rank)})})
        for rank in range(WORLD)
    }


def _ends(runs: dict[int, Run]) -> list[dict[str, Any]]:
    """What each rank reported, in the last line that it printed."""
    found = []
    for run in runs.values():
        assert run.wait(240) == {0: 0}, run.tails(60)
        found.append(json.loads(run.output(0).splitlines()[-1]))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "phase", PHASES if os.environ.get("LAB") == "all" else ("gather", "replicas", "commit")
)
def test_all_ranks_end_and_name_those_behind_the_cut(phase: str, tmp_path: Path) -> None:
    with Lab(nodes=2, minutes=6, shared=[tmp_path]) as lab:
        runs = _launch(lab, phase, tmp_path)
        wait_until(
            # Rank 0 commits; the others wait for it.
            lambda: len(list(tmp_path.glob("here-*"))) == (1 if phase == "commit" else WORLD),
            f"all ranks to reach the phase {phase}",
            limit_s=180,
            state=lambda: "\n".join(run.tails() for run in runs.values()),
        )
        lab.cut(1)
        (tmp_path / "cut").touch()
        ends = _ends(runs)
        acknowledged = len(list(tmp_path.glob("saved-*")))
        lab.heal(1)
        again = _ends(_launch(lab, "none", tmp_path))

    for rank, end in enumerate(ends):
        assert end["error"] is not None, (rank, end)
        assert end["took_s"] <= MOST_S.get(phase, 2 * TIMEOUT_S), (rank, end)
        # Behind the cut: all ranks, or of replicas the one with this rank's shard; the store is in rank 0's process.
        missed = ("[2, 3]", f"[{rank + 2}]") if rank < 2 else ("rank 0", "store")
        # torch's own errors, of its rendezvous and of the sum in a DTensor's norm, name no ranks.
        is_torchs = phase in ("rendezvous", "norm")
        assert any(name in end["text"] for name in missed) or is_torchs, (rank, end["text"])
    assert {end["error"] for end in again} == {None}
    assert len({end["restored"] for end in again}) == 1 and again[0]["restored"] >= acknowledged


def _main(phase: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(200, exit=True)  # until the cut
    job = _Job(phase, folder)
    end: dict[str, Any] = {"error": None}
    try:
        end["restored"] = job.run()
    except RuntimeError as error:
        end |= {"error": type(error).__name__, "text": str(error), "took_s": time.monotonic() - job.start_s}
    print(json.dumps(end), flush=True)
    (folder / f"end-{os.environ['RANK']}").touch()
    if os.environ["RANK"] == "0":  # whose process hosts the store, from which rank 1 learns who is missing
        wait_until((folder / "end-1").exists, "the other rank of this node")
    if end["error"] is None:
        dist.barrier()
    os._exit(0)  # after an error, gloo's threads wait for ranks behind the cut


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
