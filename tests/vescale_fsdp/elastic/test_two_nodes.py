"""Two nodes of a lab: what listens beyond a machine, with a secret. The store's server, and rank 0, run on node 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import wait_until
from tools.lab import Lab, Run, host_of
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.elastic.job import ElasticJob, TrainingState
from vescale_fsdp.elastic.store_membership import StoreMembership
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.transfer import Transfer, describe_states, joint_ranks, plan_transfer

HOSTS = (host_of(0), host_of(1))
PORT = 29500  # and the next two
pytestmark = [pytest.mark.lab, pytest.mark.part("faults")]


def _node(rank: int, folder: Path) -> dict[str, Any]:
    """The work of a node: an elastic job, weights to another job, and a connection with a wrong secret."""

    def build(mesh: Any) -> TrainingState:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    membership = StoreMembership(dist.TCPStore(HOSTS[0], PORT, is_master=False), num_first=2)
    job = ElasticJob(membership, build, lambda *_: CheckpointManager(folder / "steps"))
    job.run(lambda job, step: None, 2)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state, into = ({"w": torch.ones(4)}, None) if rank == 0 else (None, {"w": torch.zeros(4)})
    with joint_ranks(f"tcp://{HOSTS[0]}:{PORT + 1}", first_rank=rank, num_ranks=2) as ranks:
        Transfer(plan_transfer(*describe_states(state, into, ranks=ranks)), ranks=ranks).run(state, into)
    refused = False
    try:
        joint_ranks(f"tcp://{HOSTS[0]}:{PORT + 2}", first_rank=rank, num_ranks=2, secret=f"of {rank}")
    except PlacementError:
        refused = True
    got = None if into is None else into["w"].tolist()
    return {"host": membership.name.partition(":")[0], "got": got, "refused": refused}


@pytest.mark.timeout(300)
def test_nodes_that_share_a_secret(tmp_path: Path) -> None:
    """Two nodes train and send weights over their network; without a secret no process listens there."""
    serve = [
        sys.executable,
        "-m",
        "vescale_fsdp.elastic.store_server",
        "--host",
        HOSTS[0],
        "--port",
        str(PORT),
    ]
    work = [sys.executable, "-m", "tests.vescale_fsdp.elastic.test_two_nodes"]
    with Lab(nodes=2, minutes=5, shared=[tmp_path]) as lab:
        refused = Run({0: lab.popen(0, serve, env={"VESCALE_FSDP_SECRET": ""})})
        assert refused.wait(60)[0] != 0

        environment = {"VESCALE_FSDP_SECRET": "s"}
        server = Run({0: lab.popen(0, serve, env=environment)})
        wait_until(
            lambda: f"port {PORT}" in server.output(0).splitlines(),
            "the store's server to listen",
            state=lambda: server.output(0),
        )
        ranks = Run(
            {rank: lab.popen(rank, [*work, str(rank), str(tmp_path)], env=environment) for rank in (0, 1)}
        )
        assert ranks.wait(200) == {0: 0, 1: 0}, ranks.tails()
    found = [json.loads(ranks.output(rank).splitlines()[-1]) for rank in (0, 1)]

    # Which process has which rank of the elastic job is theirs to say.
    assert [each["host"] for each in found] == list(HOSTS)
    assert found[1]["got"] == [1.0] * 4 and all(each["refused"] for each in found)


if __name__ == "__main__":
    print(json.dumps(_node(int(sys.argv[1]), Path(sys.argv[2]))))
