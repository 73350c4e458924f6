"""Two nodes, each a network namespace: what listens beyond a machine, with a secret.

    node0 10.77.0.1  ---- veth ----  10.77.0.2 node1        the store's server, and rank 0, run on node0

``FAULTS=all`` runs it, as root on Linux.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.elastic.job import ElasticJob, TrainingState
from vescale_fsdp.elastic.store_membership import StoreMembership
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.transfer import plan_transfer
from vescale_fsdp.transfer.description import describe_states
from vescale_fsdp.transfer.joint_ranks import joint_ranks
from vescale_fsdp.transfer.transfer import Transfer

ROOT = Path(__file__).parents[3]
HOSTS = ("10.77.0.1", "10.77.0.2")
_IS_ABLE = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None
pytestmark = pytest.mark.skipif(
    os.environ.get("FAULTS") != "all" or not _IS_ABLE, reason="FAULTS=all, as root, with iproute2"
)


def _node(rank: int, port: int, folder: Path) -> dict[str, Any]:
    """The work of a node: an elastic job, weights to another job, and a connection with a wrong secret."""

    def build(mesh: Any) -> TrainingState:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    membership = StoreMembership(dist.TCPStore(HOSTS[0], port, is_master=False), num_first=2)
    job = ElasticJob(membership, build, lambda *_: CheckpointManager(folder / "steps"))
    job.run(lambda job, step: None, 2)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state, into = ({"w": torch.ones(4)}, None) if rank == 0 else (None, {"w": torch.zeros(4)})
    with joint_ranks(f"tcp://{HOSTS[0]}:{port + 1}", first_rank=rank, num_ranks=2) as ranks:
        Transfer(plan_transfer(*describe_states(state, into, ranks=ranks)), ranks=ranks).run(state, into)
    refused = False
    try:
        joint_ranks(f"tcp://{HOSTS[0]}:{port + 2}", first_rank=rank, num_ranks=2, secret=f"of {rank}")
    except PlacementError:
        refused = True
    got = None if into is None else into["w"].tolist()
    return {"host": membership.name.partition(":")[0], "got": got, "refused": refused}


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with a cable between them."""
    mark = secrets.token_hex(3)
    names = (f"{mark}a", f"{mark}b")
    commands = [f"ip netns add {name}" for name in names]
    commands.append(
        f"ip link add v{names[0]} netns {names[0]} type veth peer name v{names[1]} netns {names[1]}"
    )
    for name, host in zip(names, HOSTS, strict=True):
        commands += [
            f"ip -n {name} addr add {host}/24 dev v{name}",
            f"ip -n {name} link set v{name} up",
            f"ip -n {name} link set lo up",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, timeout=20)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


def _on(node: str, *arguments: str, secret: str = "s") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": f"v{node}"}
    environment["VESCALE_FSDP_SECRET"] = secret
    command = ["ip", "netns", "exec", node, sys.executable, "-m", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_nodes_that_share_a_secret(nodes: tuple[str, str], tmp_path: Path) -> None:
    """Two nodes train and send weights over their network; without a secret no process listens there."""
    with _on(nodes[0], "vescale_fsdp.elastic.store_server", "--host", HOSTS[0], secret="") as refused:
        assert refused.wait(60) != 0

    server = _on(nodes[0], "vescale_fsdp.elastic.store_server", "--host", HOSTS[0], "--port", "29500")
    started = [server]
    try:
        assert server.stdout is not None and server.stdout.readline() == "port 29500\n"
        started += [
            _on(node, "tests.vescale_fsdp.elastic.test_two_nodes", str(rank), "29500", str(tmp_path))
            for rank, node in enumerate(nodes)
        ]
        found = [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in started[1:]]
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=20)

    # Which process has which rank of the elastic job is theirs to say.
    assert [each["host"] for each in found] == list(HOSTS)
    assert found[1]["got"] == [1.0] * 4 and all(each["refused"] for each in found)


if __name__ == "__main__":
    print(json.dumps(_node(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
