"""Closing gloo's connections wakes ranks that wait for them, and leaves other connections open."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.processes import wait_until
from vescale_fsdp.elastic import connections
from vescale_fsdp.elastic.connections import Interrupter, close_gloo_connections


def _leave() -> tuple[str, int, bytes, float]:
    """Rank 1 leaves; rank 0 waits for it in a group, with an unfinished collective in another one."""
    group = dist.new_group([0, 1])
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    dist.barrier(group=group)
    said, num_closed, began_s = "", 0, time.monotonic()
    if dist.get_rank() == 0:
        pending = dist.all_reduce(torch.ones(3), async_op=True)
        try:
            dist.recv(torch.ones(3), src=1, group=group)
        except RuntimeError as error:
            said = str(error)
        try:
            pending.wait()
        except RuntimeError as error:
            said += str(error)
    else:
        num_closed = close_gloo_connections()
    ours.sendall(b"ours")
    return said, num_closed, theirs.recv(4), time.monotonic() - began_s


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which connections are gloo's")
def test_leaving_wakes_the_others() -> None:
    """Both collectives end in errors, long before the time-out of three minutes; another socket still works."""
    (said, _, got, waited_s), (_, num_closed, others, _) = run_ranks(2, _leave)

    assert said.count("Connection") == 2 and waited_s < 60
    assert num_closed >= 2  # one other rank, two groups, and what the kept rank's tests before have left
    assert got == others == b"ours"


def test_a_thread_that_was_not_waited_for_ends_no_wait_of_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is stuck in a connection when the epoch ends, and goes on in the next one."""
    released, ended = threading.Event(), threading.Event()
    interrupts: list[None] = []

    def wake(*_: object) -> None:
        released.wait(60)
        ended.set()

    monkeypatch.setattr(connections, "_STOP_S", 0.01)
    monkeypatch.setattr(connections, "interrupt", lambda: interrupts.append(None))
    monkeypatch.setattr(Interrupter, "_wake", wake)
    interrupter = Interrupter()
    interrupter.allow()
    interrupter.start(2)
    wait_until(lambda: bool(interrupts), "the first interrupt")
    interrupter.stop()
    interrupter.allow()
    released.set()
    assert ended.wait(60)
    time.sleep(2 * connections._AGAIN_S)
    assert len(interrupts) == 1


def _leave_with_a_store() -> int:
    """Close gloo's connections in a process that hosts a store; returns what a client of the store gets."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    close_gloo_connections()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends one
    return store.add("number", 1) + client.add("number", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which connections are gloo's")
def test_stores_of_the_process_stay_connected() -> None:
    """Each process of an elastic job hosts a store, whose server has a listening socket and a pipe as gloo has."""
    assert run_ranks(1, _leave_with_a_store) == [3]
