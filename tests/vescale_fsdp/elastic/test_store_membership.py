"""Rounds in a store: members, their order, and processes that are not waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
import pytest
import torch.distributed as dist

from tests.support.distributed import forkserver
from tests.support.processes import join, receive, wait_until
from vescale_fsdp.checkpoint.ranks.stores import BoundedStore, bound_store, within
from vescale_fsdp.elastic import store_membership
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.elastic.store_membership import Presence, StoreMembership, is_present
from vescale_fsdp.errors import LifecycleError, PlacementError


def _member(store: dist.Store, num_first: int, **options: float) -> StoreMembership:
    return StoreMembership(store, num_first=num_first, host="127.0.0.1", **options)  # type: ignore[arg-type]


def _together(*members: StoreMembership) -> list[Quorum]:
    """The quorum that all processes get when they wait at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        found = list(pool.map(lambda member: member.wait(), members, timeout=60))
    assert len({(quorum.epoch, quorum.members) for quorum in found}) == 1
    assert [quorum.members[quorum.rank] for quorum in found] == [member.name for member in members]
    return found


def test_epochs_of_a_job() -> None:
    """First processes, a loss, a new process, and another loss during a round; ranks keep their order."""
    store = dist.HashStore()
    members = [_member(store, 4) for _ in range(4)]
    first = _together(*members)[0]
    assert first.epoch == 0 and len(first.members) == 4
    assert not any(member.has_changed() for member in members)

    by_rank = sorted(members, key=lambda member: first.members.index(member.name))
    by_rank[0].leave()
    second = _together(*by_rank[1:])[0]
    assert second.members == first.members[1:] and second.epoch > first.epoch

    joining = _member(store, 4)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(joining.wait)
        wait_until(by_rank[1].has_changed, "the joining process to be seen")
        assert not asked.done()  # the others are in the middle of a step
        third = _together(*by_rank[1:])[0]
        assert asked.result(60).members == third.members == (*second.members, joining.name)
    assert third.store.add("new", 1) == 1 and second.store.add("new", 1) == 1  # a store for each epoch

    by_rank[3]._entered(third.epoch + 1)
    by_rank[3].leave()
    fourth = _together(by_rank[1], by_rank[2], joining)[0]
    assert fourth.members == (by_rank[1].name, by_rank[2].name, joining.name)


def test_rounds_that_are_signed() -> None:
    """Processes with one secret agree; a process with another secret, or none, is refused without disturbing them."""
    store = dist.HashStore()
    members = [StoreMembership(store, num_first=2, host="127.0.0.1", secret="x") for _ in range(2)]
    _together(*members)
    for secret in ("y", ""):
        with pytest.raises(PlacementError):
            StoreMembership(store, num_first=2, host="127.0.0.1", secret=secret).wait()
    members[0].leave()
    _together(members[1])


@pytest.mark.parametrize("secrets", [("x", "y"), ("x", ""), ("", "x")])
def test_a_first_round_of_different_secrets_is_refused_on_all_sides(secrets: tuple[str, str]) -> None:
    """Long before the time-out, which is a quarter of an hour."""
    store = dist.HashStore()
    members = [
        StoreMembership(store, num_first=2, host="127.0.0.1", secret=secret, timeout_s=900)
        for secret in secrets
    ]
    with ThreadPoolExecutor(2) as pool:
        for asked in [pool.submit(member.wait) for member in members]:
            with pytest.raises(PlacementError):
                asked.result(60)


def _serve(port: Connection) -> None:
    store = bound_store("127.0.0.1", 0, timedelta(seconds=60))
    port.send(store.port)
    signal.pause()


def _wait_until_gone(pid: int) -> None:
    """Wait until a signal has stopped or ended a process, which takes a moment."""
    gone = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(lambda: psutil.Process(pid).status() in gone, f"the end of process {pid}")


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
        membership = _member(dist.TCPStore("127.0.0.1", port, is_master=False), 1, timeout_s=0.5)
        membership.wait()
        os.kill(server.pid or 0, how)
        _wait_until_gone(server.pid or 0)
        for call, store in zip(calls, clients, strict=True):
            with pytest.raises(LifecycleError):
                call(store)
        with pytest.raises(LifecycleError):
            membership.has_changed()
        with pytest.raises(LifecycleError):
            membership.wait()
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


def test_an_answer_that_comes_in_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that answers a byte at a time does not delay others."""
    monkeypatch.setattr(store_membership, "ANSWER_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(is_present, f"127.0.0.1:{listener.getsockname()[1]}/x")
        with listener.accept()[0] as connection, contextlib.suppress(OSError):
            wait_until(lambda: connection.send(b"0") and asked.done(), "an end of the question")
        assert not asked.result(60)


def test_one_that_lives_and_does_not_come_is_waited_for_a_while() -> None:
    """Other members continue; a late process is in the next round."""
    store = dist.HashStore()
    members = [_member(store, 3, timeout_s=1.0) for _ in range(3)]
    _together(*members)
    began_s = time.monotonic()
    second = _together(*members[:2])[0]
    assert time.monotonic() - began_s >= 1.0
    assert members[2].name not in second.members

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(members[2].wait)
        wait_until(members[0].has_changed, "the late process to be seen")
        third = _together(*members[:2])[0]
        assert late.result(60).members == third.members == (*second.members, members[2].name)


def test_too_few_are_told() -> None:
    """In the first round and in a later one."""
    store = dist.HashStore()
    with pytest.raises(
        LifecycleError,
        check=lambda error: " 2 " in error.expected and error.got.split()[:4] == ["1", "in", "round", "0:"],
    ):
        _member(store, 2, timeout_s=0.2).wait()

    pair = [
        StoreMembership(
            dist.PrefixStore("b", store), num_first=2, min_members=2, timeout_s=0.3, host="127.0.0.1"
        )
    ]
    pair.append(
        StoreMembership(
            dist.PrefixStore("b", store), num_first=2, min_members=2, timeout_s=0.3, host="127.0.0.1"
        )
    )
    _together(*pair)
    pair[1].leave()
    with pytest.raises(LifecycleError, check=lambda error: " 2 " in error.expected):
        pair[0].wait()


def test_an_ended_process_is_not_present() -> None:
    """A process that has ended is not present, nor is another process at its port; the host is that of the store."""
    here = Presence("127.0.0.1")
    assert is_present(here.name)
    assert not is_present(here.name[:-1] + "x")
    here.end()
    assert not is_present(here.name)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not is_present(f"127.0.0.1:{silent.getsockname()[1]}/0123")

    signing = Presence("127.0.0.1", b"x")
    assert is_present(signing.name, b"x") and not is_present(signing.name, b"y")
    port = int(signing.name.partition("/")[0].rpartition(":")[2])
    silent_ones = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    assert is_present(signing.name, b"x")
    for one in silent_ones:
        one.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    signing.end()
    with pytest.raises(PlacementError):
        Presence("192.0.2.1")

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    assert StoreMembership(store, num_first=1).name.startswith("127.0.0.1:")
