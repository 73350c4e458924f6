"""Links that are slow, and bytes that each link carries: training, copies in memory, weights between jobs."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tools.bench.faults import elastic_nodes
from tools.bench.network import HEADER_BYTES, traffic_during
from tools.bench.rows import print_table
from tools.bench.transfer import measured_over_nodes, measured_to_replicas
from tools.lab import Lab, Traffic
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier

pytestmark = [pytest.mark.lab, pytest.mark.part("faults")]

HIDDEN, NUM_LAYERS, NUM_STEPS = 512, 4, 3
_MODULE = ["-m", "tests.vescale_fsdp.nodes.test_links"]


def payload(traffic: Traffic) -> tuple[int, int]:
    """Bytes sent and received, without headers."""
    return (
        traffic.sent_bytes - HEADER_BYTES * traffic.sent_packets,
        traffic.received_bytes - HEADER_BYTES * traffic.received_packets,
    )


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_LAYERS)))
    for module in (*model, model):
        fully_shard(module)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def _step(state: dict[str, Any], number: int) -> str:
    """One step of training; the loss's bits."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    loss = state["model"](torch.randn(4, HIDDEN, generator=generator)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return loss.item().hex()


def _values(state: dict[str, Any]) -> list[str]:
    """Sums of the bits of this rank's parameters and their optimizer state."""
    values = [*state["model"].parameters()]
    values += [each[name] for each in state["optimizer"].state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [str(each.to_local().view(torch.int32).long().sum().item()) for each in values]


def _train(folder: Path) -> dict[str, Any]:
    """Train, save, and train on; again from the saved step."""
    state = _state()
    manager = CheckpointManager(folder / "steps", save_policy=EverySteps(NUM_STEPS))
    start_s = time.monotonic()
    losses = [_step(state, number) for number in range(NUM_STEPS)]
    took_s = time.monotonic() - start_s
    manager.save(NUM_STEPS, state)
    saved = _values(state)
    later = _step(state, NUM_STEPS)
    restored = manager.restore(state)
    assert restored is not None and restored.step == NUM_STEPS and _values(state) == saved
    assert _step(state, NUM_STEPS) == later
    return {"losses": [*losses, later], "values": _values(state), "took_s": took_s}


def _manager(folder: Path) -> CheckpointManager:
    ram = RamTier("job", replicas=1, keep_last=1)
    return CheckpointManager(folder / "steps", save_policy=EverySteps(1000), ram=ram)


def _save_in_memory(folder: Path) -> dict[str, Any]:
    state = _state()
    for number in range(2):
        _step(state, number)
    with _manager(folder) as manager:
        manager.save(2, state)
        manager.wait()
    return {"values": _values(state), "loss": _step(state, 2)}


def _restore_from_memory(folder: Path) -> dict[str, Any]:
    """Restore, wait until missing copies have been made, and count this node's bytes."""
    state = _state()
    with _manager(folder) as manager:
        idle = _counted(lambda: None)  # the barriers themselves
        restored: list[Any] = []

        def restore() -> None:
            restored.append(manager.restore(state))
            manager.wait()

        used = _counted(restore)
    found = {"step": restored[0].step, "tier": restored[0].tier, "values": _values(state)}
    return {
        **found,
        "bytes": [now - less for now, less in zip(used, idle, strict=True)],
        "loss": _step(state, 2),
    }


def _counted(work: Any) -> tuple[int, int]:
    """Bytes that this node sends and receives during a work of all ranks."""
    return payload(traffic_during(work))


def _run(lab: Lab, work: str, folder: Path, per_node: int) -> list[dict[str, Any]]:
    """What the ranks report."""
    out = folder / work
    out.mkdir(exist_ok=True)
    lab.run([*_MODULE, work, str(folder)], nproc_per_node=per_node, timeout_s=240)
    return [json.loads((out / str(rank)).read_text()) for rank in range(lab.num_nodes * per_node)]


@pytest.mark.timeout(600)
def test_a_slow_node_makes_a_job_slow_and_changes_no_value(tmp_path: Path) -> None:
    """Losses, weights and optimizer state have the same bits; a step is saved and restored at 50 Mb/s too."""
    rate = 50e6 / 8
    found = {}
    with Lab(nodes=2, minutes=9, shared=[tmp_path]) as lab:
        for name in ("fast", "slow"):
            (tmp_path / name).mkdir()
            if name == "slow":
                lab.slow(1, mbit=50)
            found[name] = _run(lab, "train", tmp_path / name, 1)
    fast, slow = found["fast"], found["slow"]
    print(f"steps took {fast[0]['took_s']:.2f} s, with a slow node {slow[0]['took_s']:.2f} s")
    for rank in range(2):
        assert {**slow[rank], "took_s": 0} == {**fast[rank], "took_s": 0}
    # Each step gathers twice what a node lacks and receives the gradients of its half: three halves of the model.
    least_s = NUM_STEPS * 1.5 * 4 * NUM_LAYERS * HIDDEN**2 / rate
    assert (
        slow[0]["took_s"] >= 0.5 * least_s
    )  # links keep some bytes back; and the root's units are gathered once


@pytest.mark.timeout(600)
def test_a_lost_node_gets_what_it_has_lost_from_its_partner_over_each_link_once(tmp_path: Path) -> None:
    """Four nodes of two ranks: no link carries more than 1.05 of the lost node's files, copies of its partner's too."""
    count = "import os; print(sum(os.path.getsize(os.path.join(f, n)) for f, _, s in os.walk('/dev/shm') for n in s))"
    with Lab(nodes=4, minutes=9, shared=[tmp_path]) as lab:
        saved = _run(lab, "save", tmp_path, 2)
        lost = int(lab.call(3, [sys.executable, "-c", count]))
        lab.kill(3)
        lab.heal(3)
        assert int(lab.call(3, [sys.executable, "-c", count])) == 0
        restored = _run(lab, "restore", tmp_path, 2)
        again = int(lab.call(3, [sys.executable, "-c", count]))
    print(
        f"lost {lost:,} bytes, again {again:,}; by node sent and received {[each['bytes'] for each in restored[::2]]}"
    )

    assert all(each["step"] == 2 and each["tier"] == "ram" for each in restored)
    assert [each["values"] for each in restored] == [each["values"] for each in saved]
    assert [each["loss"] for each in restored] == [each["loss"] for each in saved]
    assert abs(again - lost) < 0.01 * lost  # its own files and the copies of its partner's
    assert restored[6]["bytes"][1] >= 0.95 * lost
    for each in restored:
        assert max(each["bytes"]) <= 1.05 * lost, each


@pytest.mark.timeout(600)
def test_a_transfer_between_nodes_loads_all_links_alike() -> None:
    """From two nodes to two others: senders send as much, receivers receive as much, and nothing twice."""
    measured = measured_over_nodes(layers=1, rounds=1, gbit=1.0)
    sent = [payload(measured.traffic[node])[0] for node in (0, 1)]
    received = [payload(measured.traffic[node])[1] for node in (2, 3)]
    print(f"sent {sent}, received {received}, planned {measured.num_bytes:,}")
    for each in (*sent, *received):
        assert abs(each - measured.num_bytes / 2) <= 0.05 * measured.num_bytes / 2


@pytest.mark.timeout(600)
def test_replicas_relay() -> None:
    """Each trainer sends its shard once, and each replica sends and receives the state at most once."""
    measured = measured_to_replicas(layers=0, rounds=1, gbit=1.0, replicas=3)
    links = {node: payload(traffic) for node, traffic in measured.traffic["relayed"].items()}
    print(f"relayed {links}, state {measured.num_bytes:,}")
    for node, (sent, received) in links.items():
        planned = measured.num_bytes / 2 if node < 2 else 0 if node == 4 else measured.num_bytes
        assert abs(sent - planned) <= 0.02 * measured.num_bytes
        assert abs(received - (measured.num_bytes if node >= 2 else 0)) <= 0.02 * measured.num_bytes


@pytest.mark.timeout(600)
def test_an_elastic_job_sends_what_nodes_need_before_and_after_a_loss() -> None:
    """The ranks of a node share what it receives, although no variable says how many they are: 3 nodes, then 2."""
    rows = elastic_nodes.measure((2, 2, 2), loses=True)
    print_table(rows)
    assert [row.met for row in rows if row.target] == [True, True]


def _main(work: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    works = {"train": _train, "save": _save_in_memory, "restore": _restore_from_memory}
    found = works[work](folder)
    (folder / work / os.environ["RANK"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
