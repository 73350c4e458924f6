"""Rendezvous in a store: members, processes that are not waited for, lost processes, and stores that come and go."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.support.distributed import forkserver
from tests.support.processes import join, receive, wait_until, wait_until_gone
from vescale_fsdp.elastic import store_membership
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.elastic.store_membership import StoreMembership
from vescale_fsdp.errors import LifecycleError, PlacementError

_members: list[StoreMembership] = []


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    """End the keep-alives of a test's members."""
    yield
    if _members:  # together: each waits until its last keep-alive has ended
        with ThreadPoolExecutor(len(_members)) as pool:
            list(pool.map(StoreMembership.leave, _members, timeout=60))
        _members.clear()


def _member(store: dist.Store, num_first: int, **options: Any) -> StoreMembership:
    options.setdefault("max_missed", 30)  # a loaded machine may stop a process for seconds
    _members.append(StoreMembership(store, num_first=num_first, host="127.0.0.1", **options))
    return _members[-1]


def _together(*members: StoreMembership) -> list[Quorum]:
    """The quorum that all processes get when they wait at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        found = list(pool.map(lambda member: member.wait(), members, timeout=60))
    assert len({(quorum.epoch, quorum.members) for quorum in found}) == 1
    assert [quorum.members[quorum.rank] for quorum in found] == [member.name for member in members]
    return found


def test_epochs_of_a_job() -> None:
    """First processes, a loss, a new process, and another loss while a round is open."""
    store = dist.HashStore()
    members = [_member(store, 4, keep_alive_s=0.2) for _ in range(4)]
    first = _together(*members)[0]
    assert first.epoch == 0 and len(first.members) == 4
    assert not any(member.has_changed() or member.has_lost() for member in members)

    by_rank = sorted(members, key=lambda member: first.members.index(member.name))
    by_rank[0].leave()
    wait_until(by_rank[3].has_lost, "the change to be seen")  # asks rank 0
    assert by_rank[3].has_changed()
    second = _together(*by_rank[1:])[0]
    assert second.members == first.members[1:] and second.epoch > first.epoch

    joining = _member(store, 4, keep_alive_s=0.2)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(joining.wait)
        wait_until(lambda: all(member.has_changed() for member in by_rank[1:]), "members to see the change")
        assert not asked.done()  # the others are in the middle of a step
        third = _together(*by_rank[1:])[0]
        assert set(asked.result(60).members) == set(third.members) == {*second.members, joining.name}
        assert third.store.add("new", 1) == 1

        early = pool.submit(by_rank[3].wait)
        wait_until(by_rank[1].has_changed, "the change to be seen")
        by_rank[2].leave()  # the others of the round wait for it
        fourth = _together(by_rank[1], joining)[0]
        assert set(early.result(60).members) == {by_rank[1].name, by_rank[3].name, joining.name}
        assert set(fourth.members) == set(early.result(60).members)


def test_keep_alives_under_way_do_not_number_rounds() -> None:
    """Epochs of a job that loses nobody have consecutive numbers, however often keep-alives meet a wait that begins."""
    store = dist.HashStore()
    members = [_member(store, 3, keep_alive_s=0.02, max_missed=500) for _ in range(3)]
    assert [_together(*members)[0].epoch for _ in range(10)] == list(range(10))


class _Stalling:
    """A store whose clients can be cut off; then it answers no more."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.is_cut = False
        self.num_refused = 0

    def client(self) -> dist.Store:
        return _Client(self)


class _Client(dist.Store):
    def __init__(self, server: _Stalling) -> None:
        super().__init__()
        self._server = server

    def _answering(self) -> dist.Store:
        if self._server.is_cut:
            self._server.num_refused += 1
            raise dist.DistNetworkError("cut off")
        return self._server.store

    def set(self, key: str, value: Any) -> None:
        self._answering().set(key, value)

    def get(self, key: str) -> bytes:
        return self._answering().get(key)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._answering().compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self._answering().check(keys)


def test_an_agreement_waits_for_processes_only() -> None:
    """torch's handler sleeps before it asks again and in its first round, and takes 50 ms to name what it does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [_member(store, 3) for _ in range(3)]
    _together(*members)
    with (
        mock.patch.object(dynamic_rendezvous, "_delay") as slept,
        mock.patch.object(inspect, "stack", wraps=inspect.stack) as walked,
    ):
        epochs = [_together(*members)[0].epoch for _ in range(8)]
        members.pop().leave()
        epochs.append(_together(*members)[0].epoch)
    assert epochs == sorted(set(epochs))
    assert not slept.called and not walked.called


def test_a_silent_process_is_lost_after_three_keep_alives() -> None:
    """Its port still accepts connections, as that of a stopped process does; the others go on without it.

    When it reaches the store again, it learns that its epoch is over, whatever its collectives wait for.
    """
    server, silent = _Stalling(), _Stalling()
    silent.store = server.store
    members = [_member(server.client(), 3, keep_alive_s=1.0, max_missed=3) for _ in range(2)]
    members.append(_member(silent.client(), 3, keep_alive_s=1.0, max_missed=3))
    _together(*members)
    silent.is_cut = True
    wait_until(lambda: all(member.has_lost() for member in members[:2]), "the silent process to be lost")
    assert all(member.has_changed() for member in members[:2])
    assert {*_together(*members[:2])[0].members} == {member.name for member in members[:2]}
    assert not members[2].knows_lost
    silent.is_cut = False
    wait_until(lambda: members[2].knows_lost, "the silent process to learn it")


def test_a_store_that_is_replaced() -> None:
    """Without a store, an epoch goes on and a change is an error; a new, empty one takes the members over."""
    server = _Stalling()
    members = [_member(server.client(), 3, keep_alive_s=0.3, timeout_s=30) for _ in range(3)]
    first = _together(*members)[0]
    server.is_cut = True
    wait_until(lambda: server.num_refused >= 6, "keep-alives that fail")
    assert not any(member.has_changed() or member.has_lost() for member in members)
    first.store.set("k", "v")  # the epoch's own store

    server.store, server.is_cut = dist.HashStore(), False
    joining = _member(server.client(), 3, keep_alive_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(joining.wait)
        wait_until(lambda: all(member.has_changed() for member in members), "members to see the change")
        second = _together(*members)[0]
        assert set(asked.result(60).members) == {*first.members, joining.name} and second.epoch > first.epoch


@pytest.mark.part("faults")
@pytest.mark.parametrize("num_new", [1, 3])
def test_new_processes_alone_do_not_take_over_a_job_that_goes_on(num_new: int) -> None:
    """Members without the store train on; processes that start on the store's side do not train beside them."""
    cut = _Stalling()
    members = [_member(cut.client(), 2, keep_alive_s=0.2, max_missed=5) for _ in range(2)]
    first = _together(*members)[0]
    cut.is_cut = True
    added = [_member(cut.store, 2, keep_alive_s=0.2, max_missed=5, timeout_s=1.5) for _ in range(num_new)]
    with ThreadPoolExecutor(num_new) as pool:
        for waiting in [pool.submit(member.wait) for member in added]:
            with pytest.raises(LifecycleError):
                waiting.result(60)
    assert not any(member.has_changed() for member in members)

    cut.is_cut = False
    joining = _member(cut.store, 2, keep_alive_s=0.2, max_missed=5)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(joining.wait)
        wait_until(lambda: all(member.has_changed() for member in members), "members to see the change")
        second = _together(*members)[0]
        assert set(asked.result(60).members) == {*first.members, joining.name}
    assert second.epoch > first.epoch


@pytest.mark.part("faults")
def test_a_new_process_takes_over_from_members_that_have_ended() -> None:
    """All ports of the last epoch are closed."""
    store = dist.HashStore()
    members = [_member(store, 2, keep_alive_s=0.2) for _ in range(2)]
    epoch = _together(*members)[0].epoch
    for member in members:
        member.leave()
    gc.collect()  # the quorums, which hold the ports
    assert _member(store, 2, keep_alive_s=0.2).wait().epoch > epoch


@pytest.mark.parametrize(("num_old", "num_new"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.part("faults")
def test_of_two_sides_with_a_store_each_one_goes_on(num_old: int, num_new: int) -> None:
    """Some members keep the old store, the others find a new one: more than half go on, of halves those of the old."""
    old, new = _Stalling(), _Stalling()
    new.store = old.store
    options = {"keep_alive_s": 0.2, "max_missed": 10, "timeout_s": 6.0}
    sides = [
        [_member(server.client(), num_old + num_new, **options) for _ in range(num)]
        for server, num in ((old, num_old), (new, num_new))
    ]
    first = _together(*sides[0], *sides[1])[0]
    new.store = dist.HashStore()
    ends: list[set[str]] = []
    with ThreadPoolExecutor(num_old + num_new) as pool:
        asked = [[pool.submit(member.wait) for member in side] for side in sides]
        for side in asked:
            errors = [each.exception(60) for each in side]
            assert {type(error) for error in errors} <= {type(None), LifecycleError}
            went_on = [each.result(60) for each, error in zip(side, errors, strict=True) if error is None]
            assert len(went_on) in (0, len(side)) and all(each.epoch > first.epoch for each in went_on)
            ends.append({name for each in went_on for name in each.members})
    goes_on = 0 if num_old >= num_new else 1
    assert ends[goes_on] == {member.name for member in sides[goes_on]} and not ends[1 - goes_on]


def test_a_change_without_a_store_is_an_error() -> None:
    """On all members, within a bound."""
    server = _Stalling()
    members = [_member(server.client(), 2, timeout_s=1) for _ in range(2)]
    _together(*members)
    server.is_cut = True
    with ThreadPoolExecutor(2) as pool:
        for waiting in [pool.submit(member.wait) for member in members]:
            with pytest.raises(LifecycleError):
                waiting.result(60)


def test_rounds_that_are_signed() -> None:
    """Processes with one secret agree; a process with another secret, or none, is refused without disturbing them."""
    store = dist.HashStore()
    members = [_member(store, 2, secret="x") for _ in range(2)]
    _together(*members)
    for secret in ("y", ""):
        with pytest.raises(PlacementError):
            _member(store, 2, secret=secret).wait()
    members[0].leave()
    _together(members[1])


@pytest.mark.parametrize("secrets", [("x", "y"), ("x", ""), ("", "x")])
def test_a_first_round_of_different_secrets_is_refused_on_all_sides(secrets: tuple[str, str]) -> None:
    """Long before the time-out, which is a quarter of an hour."""
    store = dist.HashStore()
    members = [_member(store, 2, secret=secret, timeout_s=900) for secret in secrets]
    with ThreadPoolExecutor(2) as pool:
        for asked in [pool.submit(member.wait) for member in members]:
            with pytest.raises(PlacementError):
                asked.result(60)


def _serve(port: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


@pytest.mark.part("faults")
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_answers_no_more(how: signal.Signals) -> None:
    """A member raises instead of waiting, also if the store's process is stalled and not dead."""
    context = forkserver()
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = receive(ours, "the port of the store")
    try:
        membership = _member(dist.TCPStore("127.0.0.1", port, is_master=False), 1, timeout_s=2)
        membership.wait()
        os.kill(server.pid or 0, how)
        wait_until_gone(server.pid or 0)
        assert not membership.has_changed()
        with pytest.raises(LifecycleError):
            membership.wait()
    finally:
        server.kill()
        join(server)


class _Connecting(StoreMembership):
    """A membership that connects to another process's store of the first epoch when told."""

    may_connect = threading.Event()

    def _store_of(self, epoch: int, first: str) -> dist.Store | None:
        if epoch == 0 and first != self.name:
            assert self.may_connect.wait(30)
        return super()._store_of(epoch, first)


def test_the_first_process_is_lost_before_the_others_connect_to_its_store() -> None:
    """They agree again at once, instead of connecting until their time is up."""
    store = dist.HashStore()
    for _ in range(3):
        _members.append(_Connecting(store, num_first=3, host="127.0.0.1", max_missed=30, timeout_s=60))
    with ThreadPoolExecutor(3) as pool:
        # Without its quorum: the store in it would keep the port open.
        asked = {member: pool.submit(lambda each: each.wait().members, member) for member in _members}
        wait_until(
            lambda: any(each.done() for each in asked.values()), "the first process to be in its epoch"
        )
        (first,) = (member for member, each in asked.items() if each.done())
        first.leave()
        _Connecting.may_connect.set()
        others = [member for member in _members if member is not first]
        for member in others:
            # A connection may take 60 s.
            assert set(asked[member].result(40)) == {each.name for each in others}


@pytest.mark.part("faults")
def test_the_first_process_is_stopped_before_the_others_connect_to_its_store() -> None:
    """Its port accepts connections and never answers: they wait for its keep-alives, longer than for others."""
    store = dist.HashStore()
    for _ in range(3):
        _members.append(
            _Connecting(store, num_first=3, host="127.0.0.1", timeout_s=2.0, keep_alive_s=0.5, max_missed=12)
        )
    _Connecting.may_connect.clear()
    with ThreadPoolExecutor(3) as pool:
        asked = {member: pool.submit(lambda each: each.wait().members, member) for member in _members}
        wait_until(
            lambda: any(each.done() for each in asked.values()), "the first process to be in its epoch"
        )
        (first,) = (member for member, each in asked.items() if each.done())
        port = int(first.name.partition("/")[0].rpartition(":")[2])
        first.leave()
        with socket.create_server(("127.0.0.1", port)):
            _Connecting.may_connect.set()
            others = [member for member in _members if member is not first]
            for member in others:
                assert set(asked[member].result(60)) == {each.name for each in others}


def test_one_that_lives_and_does_not_come_is_waited_for_a_while() -> None:
    """Other members continue; a late process is in the next round."""
    store = dist.HashStore()
    members = [_member(store, 3, timeout_s=1.0, keep_alive_s=0.2) for _ in range(3)]
    _together(*members)
    began_s = time.monotonic()
    second = _together(*members[:2])[0]
    assert time.monotonic() - began_s >= 1.0
    assert members[2].name not in second.members

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(members[2].wait)
        wait_until(members[0].has_changed, "the late process to be seen")
        third = _together(*members[:2])[0]
        assert late.result(60).members == third.members
        assert set(third.members) == {*second.members, members[2].name}


def test_a_process_that_joins_waits_for_members_that_are_busy(caplog: pytest.LogCaptureFixture) -> None:
    """However long these take, with lines that name them; it is lost patience only if they are gone."""
    store = dist.HashStore()
    member = _member(store, 1, keep_alive_s=0.2)
    member.wait()
    joining = _member(store, 1, keep_alive_s=0.2, timeout_s=0.3)
    with ThreadPoolExecutor(1) as pool, mock.patch.object(store_membership, "REPORT_S", 0.2):
        asked = pool.submit(joining.wait)
        lines: list[str] = []

        def has_outlasted() -> bool:
            lines[:] = [line for line in caplog.messages if member.name in line and joining.name in line]
            return len(lines) >= 8 or asked.done()  # 1.6 s; its own time-out is 0.6 s

        wait_until(has_outlasted, "lines that say who is waited for")
        assert not asked.done() and len(lines) >= 8
        with ThreadPoolExecutor(1) as second:
            members = second.submit(member.wait).result(60).members
        assert set(members) == set(asked.result(60).members) == {member.name, joining.name}


def test_waits_in_an_epoch_say_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    """A line per pause, with the rank of the group that forms, before the error at the time-out."""
    member = _member(dist.HashStore(), 1)
    store = member.wait().store
    with mock.patch.object(store_membership, "REPORT_S", 0.1), pytest.raises(dist.DistStoreError):
        store.wait(["0//3//cpu//0/7"], timedelta(seconds=0.55))
    lines = [line for line in caplog.messages if member.name in line and "rank 7" in line and "//3//" in line]
    assert 2 <= len(lines) <= 5


def test_too_few_are_told() -> None:
    """In the first round."""
    with pytest.raises(LifecycleError, check=lambda error: " 2 " in error.expected):
        _member(dist.HashStore(), 2, timeout_s=0.2).wait()


@pytest.mark.part("faults")
def test_too_few_are_left() -> None:
    """Fewer than ``min_members``."""
    store = dist.HashStore()
    pair = [_member(store, 2, min_members=2, timeout_s=1.0) for _ in range(2)]
    _together(*pair)
    pair[1].leave()
    with pytest.raises(LifecycleError, check=lambda error: " 2 " in error.expected):
        pair[0].wait()


def test_addresses() -> None:
    """A process listens on the address from which it reaches the store, and beyond loopback only with a secret."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    member = StoreMembership(store, num_first=1)
    assert member.name.startswith("127.0.0.1:")
    port = int(member.name.partition("/")[0].rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    with pytest.raises(PlacementError):
        StoreMembership(store, num_first=1, host="192.0.2.1", secret="")
