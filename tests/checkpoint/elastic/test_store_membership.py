"""Rounds over a store: who is in, in which order, and who is not waited for."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.elastic.presence import Presence, is_present
from vescale_fsdp.elastic.store_membership import StoreMembership
from vescale_fsdp.errors import LifecycleError, PlacementError


def _member(store: dist.Store, num_first: int, **options: float) -> StoreMembership:
    return StoreMembership(store, num_first=num_first, host="127.0.0.1", **options)  # type: ignore[arg-type]


def _together(*members: StoreMembership) -> list[Quorum]:
    """What each is told when all wait at once; proven to be the same."""
    with ThreadPoolExecutor(len(members)) as pool:
        found = list(pool.map(lambda member: member.wait(), members))
    assert len({(quorum.epoch, quorum.members) for quorum in found}) == 1
    assert [quorum.members[quorum.rank] for quorum in found] == [member.name for member in members]
    return found


def test_epochs_of_a_job() -> None:
    """The first ones, a loss, one that joins, and another loss while they meet; ranks keep their order."""
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
        while not by_rank[1].has_changed():
            time.sleep(0.01)
        assert not asked.done()  # the others are in the middle of a step
        third = _together(*by_rank[1:])[0]
        assert asked.result().members == third.members == (*second.members, joining.name)
    assert third.store.add("new", 1) == 1 and second.store.add("new", 1) == 1  # a store for each epoch

    by_rank[3]._entered(third.epoch + 1)
    by_rank[3].leave()
    fourth = _together(by_rank[1], by_rank[2], joining)[0]
    assert fourth.members == (by_rank[1].name, by_rank[2].name, joining.name)


def test_rounds_that_are_signed() -> None:
    """Processes with one secret meet; one with another is refused."""
    store = dist.HashStore()
    _together(*(StoreMembership(store, num_first=2, host="127.0.0.1", secret="x") for _ in range(2)))
    with pytest.raises(PlacementError):
        StoreMembership(store, num_first=2, host="127.0.0.1", secret="y").wait()


def test_one_that_lives_and_does_not_come_is_waited_for_a_while() -> None:
    """Then the others go on; when it comes it is in the round after."""
    store = dist.HashStore()
    members = [_member(store, 3, timeout_s=1.0) for _ in range(3)]
    _together(*members)
    began_s = time.monotonic()
    second = _together(*members[:2])[0]
    assert time.monotonic() - began_s >= 1.0
    assert members[2].name not in second.members

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(members[2].wait)
        while not members[0].has_changed():
            time.sleep(0.01)
        third = _together(*members[:2])[0]
        assert late.result().members == third.members == (*second.members, members[2].name)


def test_too_few_are_told() -> None:
    """In the first round and in a later one."""
    store = dist.HashStore()
    with pytest.raises(LifecycleError, match=r"Too few processes(.|\n)*at least 2(.|\n)*1 in round 0"):
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
    with pytest.raises(LifecycleError, match="at least 2"):
        pair[0].wait()


def test_presence() -> None:
    """Who has ended is not there, nor is a stranger who got the port; the host is found by the store."""
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
