"""A trainer and an engine that are killed, start again and meet at the same rendezvous without help."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.serve_while_training import LIMIT_S, SECRET, run, started, wait_for_both
from tests.support.distributed import _PRELOAD
from tests.support.processes import wait_until
from tests.vescale_fsdp.transfer.test_joint_ranks import free_port
from vescale_fsdp.transfer.joint_ranks import joint_ranks


@pytest.fixture(autouse=True)
def _preloaded() -> None:
    """Processes are forked from one that has imported torch."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))


@pytest.mark.parametrize("kind", ["tcp", pytest.param("file", marks=pytest.mark.part("faults"))])
def test_killed_sides_meet_again(tmp_path: Path, kind: str) -> None:
    """The engine is killed, then the trainer, which hosts the TCP store; versions and whole weights go on."""
    where = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"
    versions = run(tmp_path, where, (1, 0) if kind == "tcp" else (1, 0, 0, 1))
    assert len(versions) > 2 and versions == sorted(set(versions))


def waits_alone(where: str) -> None:
    """An engine that is killed while it waits for the trainer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    joint_ranks(where, first_rank=1, num_ranks=2, timeout_s=LIMIT_S, secret=SECRET)


def test_the_place_of_a_dead_process_does_not_hold_up_others(tmp_path: Path) -> None:
    """An engine dies after its greeting, before the trainer comes; its successor and the trainer meet."""
    file = tmp_path / "meet"
    context = multiprocessing.get_context("forkserver")
    dead = context.Process(target=waits_alone, args=(f"file://{file}",), daemon=True)
    dead.start()
    wait_until(
        lambda: file.exists() and b"open" in file.read_bytes(), "the engine's greeting", limit_s=LIMIT_S
    )
    dead.kill()
    dead.join(LIMIT_S)
    jobs = {rank: started(tmp_path, f"file://{file}", rank) for rank in range(2)}
    try:
        assert wait_for_both(tmp_path, jobs, -1) >= 0
    finally:
        for process in jobs.values():
            process.kill()
            process.join(LIMIT_S)
