"""A trainer and an engine that are killed, start again and meet at the same rendezvous without help."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from examples import serve_elastic_trainer
from examples.serve_while_training import LIMIT_S, SECRET, run, started, wait_for_both
from tests.support.distributed import _PRELOAD
from tests.support.processes import wait_until
from tests.vescale_fsdp.transfer.test_joint_ranks import free_port
from vescale_fsdp.transfer.joint_ranks import _Meeting, joint_ranks


@pytest.fixture(autouse=True)
def _preloaded() -> None:
    """Processes are forked from one that has imported torch."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("tcp", (0,)),
        pytest.param("tcp", (1, 0), marks=pytest.mark.part("faults")),
        pytest.param("file", (1, 0, 0, 1), marks=pytest.mark.part("faults")),
    ],
)
def test_killed_sides_meet_again(tmp_path: Path, kind: str, kills: tuple[int, ...]) -> None:
    """The engine is killed, or the trainer, which hosts the TCP store; versions and whole weights go on."""
    where = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"
    versions = run(tmp_path, where, kills)
    assert len(versions) == len(kills) + 1 and versions == sorted(set(versions))


@pytest.mark.part("jobs")
def test_an_elastic_trainer_feeds_two_engines(tmp_path: Path) -> None:
    """An engine is killed, then a rank of the trainer: the engines have only weights that were sent, bit for bit.

    The trainer serves an average, and sends only what has changed: also to the engine that was not killed.
    """
    serve_elastic_trainer.run(tmp_path)

    steps = serve_elastic_trainer.sent_by(tmp_path)
    sent = {(version, digest) for version, digest, _, _ in steps}
    served = [serve_elastic_trainer.served_by(tmp_path, number) for number in range(3)]
    for each in served:
        assert len(each) >= 3 and sent.issuperset(each)
    for each in served[1:]:
        assert len({digest for _, digest in each}) >= 3, "weights must change"
    # Both engines commit the same versions while both run; the last one may be noted by one of them alone.
    for number, other in ((0, 1), (2, 1)):
        first, last = served[number][0][0], min(served[number][-1][0], served[other][-1][0])
        shared = [[each for each in served[which] if first <= each[0] <= last] for which in (number, other)]
        assert shared[0] == shared[1] and len(shared[0]) >= 3
    assert {size for *_, size in steps} == {1, 2}
    nbytes = sorted(serve_elastic_trainer.bytes_sent_by(tmp_path))
    assert nbytes[len(nbytes) // 2] < nbytes[-1] // 2


def test_a_place_that_is_taken_opens_the_next_meeting() -> None:
    """A rank died after its greeting; its successor and a rank that waits in the first meeting find each other."""
    store = dist.HashStore()
    _Meeting(store, 1, 2, 60.0, b"s")._take_place()  # and no more
    with ThreadPoolExecutor(2) as pool:
        deadline_s = time.monotonic() + 60
        found = [
            pool.submit(_Meeting(store, rank, 2, 60.0, b"s").meet, deadline_s).result for rank in range(2)
        ]
        names = [result(60) for result in found]
    assert len(set(names)) == 1 and names[0]


def waits_alone(where: str) -> None:
    """An engine that is killed while it waits for the trainer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    joint_ranks(where, first_rank=1, num_ranks=2, timeout_s=LIMIT_S, secret=SECRET)


@pytest.mark.part("faults")
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
