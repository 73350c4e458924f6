"""Stores with a time limit for each call, with signed values, and on the addresses that may connect."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from tests.support.distributed import forkserver
from tests.support.processes import join, receive, wait_until_gone
from vescale_fsdp.checkpoint.ranks.stores import BoundedStore, SignedStore, bound_store, within
from vescale_fsdp.errors import LifecycleError, PlacementError


def _serve(port: Connection) -> None:
    store = bound_store("127.0.0.1", 0, timedelta(seconds=60))
    port.send(store.port)
    signal.pause()


@pytest.mark.part("faults")
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_answers_no_more(how: signal.Signals) -> None:
    """Every call ends in an error, also if the store's process is stalled and not dead."""
    context = forkserver()
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = receive(ours, "the port of the store")

    def client() -> BoundedStore:
        return BoundedStore(dist.TCPStore("127.0.0.1", port, is_master=False), 0.5)

    calls = [
        (lambda store: store.add("x", 1)),
        (lambda store: store.get("k")),
        (lambda store: store.check(["k"])),
        (lambda store: store.compare_set("k", "", "w")),
        (lambda store: store.wait(["k"])),
        (lambda store: store.num_keys()),
        (lambda store: store.delete_key("k")),
    ]
    try:
        clients = [client() for _ in calls]
        clients[0].set("k", "v")
        os.kill(server.pid or 0, how)
        wait_until_gone(server.pid or 0)
        for call, store in zip(calls, clients, strict=True):
            with pytest.raises(LifecycleError):
                call(store)
    finally:
        server.kill()
        join(server)


def test_a_key_that_does_not_come() -> None:
    """Calls wait as long as the time-out, and errors of the store itself are raised."""
    store = BoundedStore(dist.HashStore(), 0.1)
    with pytest.raises(dist.DistStoreError):
        store.get("k")
    with pytest.raises(dist.DistStoreError):
        store.wait(["k"], timedelta(seconds=0.05))
    store.set("k", b"v")
    assert store.get("k") == b"v" and store.compare_set("k", "v", "w") == b"w" and store.delete_key("k")

    def fails() -> None:
        raise TimeoutError("planted")

    with pytest.raises(TimeoutError, match="planted"):
        within(5, fails, "")


def test_stores_that_are_signed() -> None:
    """Values are read back; a value that was changed, moved to another key or signed with another secret is refused."""
    inner = dist.HashStore()
    store = SignedStore(inner, b"x")
    store.set("a", b"\xff\x00")
    assert store.get("a") == b"\xff\x00"
    assert store.compare_set("b", "", "1") == b"1" and store.compare_set("b", "2", "3") == b"1"
    assert store.compare_set("b", "1", "3") == b"3" == store.get("b")
    assert dist.PrefixStore("p", store).compare_set("c", "", "4") == b"4"
    forged = [inner.get("a") + b"y", inner.get("b"), b"", SignedStore(inner, b"y")._signed("a", "1")]
    for value in forged:
        inner.set("a", value)
        with pytest.raises(PlacementError):
            store.get("a")
    opened = bound_store("127.0.0.1", 0, timedelta(seconds=10))
    opened.set("k", "v")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", opened.port), timeout=5)
    with socket.create_connection(("127.0.0.1", opened.port), timeout=5):
        pass
