"""TorchftMembership beside a stand-in for torchft's lighthouse, with the signatures of torchft 0.2.

The real one was tried by hand (torchft 0.2.0, CPU): 3 ranks, one killed, 2 go on from memory.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import wait_until
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.elastic.torchft_membership import TorchftMembership
from vescale_fsdp.errors import LifecycleError


class _Lighthouse:
    """Answers when all live processes have asked; with a new number if members change or one has failed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stores: dict[str, str] = {}  # of those that live
        self.asking: dict[str, tuple[int, int]] = {}  # step and failures, by name
        self.members: list[str] = []
        self.number = self.num_answered = 0

    def ask(self, name: str, step: int, failures: int, timeout: timedelta) -> Any:
        with self.changed:
            seen = self.num_answered
            self.asking[name] = step, failures
            self.changed.notify_all()
            while self.num_answered == seen:
                if self.asking.keys() >= self.stores.keys():
                    self._answer()
                elif not self.changed.wait(timeout.total_seconds()):
                    raise TimeoutError
            return SimpleNamespace(**vars(self.answer), replica_rank=self.members.index(name))

    def _answer(self) -> None:
        members = sorted(self.stores)
        if members != self.members or any(failures for _, failures in self.asking.values()):
            self.number += 1
        newest = max(step for step, _ in self.asking.values())
        store = next(self.stores[name] for name in members if self.asking[name][0] == newest)
        self.members = members
        self.answer = SimpleNamespace(
            quorum_id=self.number, replica_ids=members, store_address=store, max_step=newest
        )
        self.asking.clear()
        self.num_answered += 1
        self.changed.notify_all()


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> _Lighthouse:
    """A lighthouse behind `torchft.coordination`."""
    light = _Lighthouse()

    class ManagerServer:
        def __init__(
            self,
            replica_id: str,
            lighthouse_addr: str,
            hostname: str,
            bind: str,
            store_addr: str,
            world_size: int,
            heartbeat_interval: timedelta,
            connect_timeout: timedelta,
            quorum_retries: int,
        ) -> None:
            assert (lighthouse_addr, world_size) == ("http://light", 1)
            self._name = replica_id
            light.stores[replica_id] = store_addr

        def address(self) -> str:
            return self._name

        def shutdown(self) -> None:
            with light.changed:
                del light.stores[self._name]
                light.changed.notify_all()

    class ManagerClient:
        def __init__(self, addr: str, connect_timeout: timedelta) -> None:
            self._name = addr

        def _quorum(
            self,
            group_rank: int,
            step: int,
            checkpoint_metadata: str,
            shrink_only: bool,
            timeout: timedelta,
            commit_failures: int,
            init_sync: bool = True,
        ) -> Any:
            assert (group_rank, shrink_only) == (0, False)
            return light.ask(self._name, step, commit_failures, timeout)

    module = ModuleType("torchft.coordination")
    vars(module).update(ManagerServer=ManagerServer, ManagerClient=ManagerClient)
    monkeypatch.setitem(sys.modules, "torchft", ModuleType("torchft"))
    monkeypatch.setitem(sys.modules, "torchft.coordination", module)
    return light


def _member(num_first: int = 3, timeout_s: float = 20) -> TorchftMembership:
    return TorchftMembership("http://light", num_first=num_first, timeout_s=timeout_s, host="127.0.0.1")


def _together(*members: TorchftMembership) -> list[Quorum]:
    with ThreadPoolExecutor(len(members)) as pool:
        found = list(pool.map(lambda member: member.wait(), members, timeout=60))
    assert len({(quorum.epoch, quorum.members) for quorum in found}) == 1
    assert [quorum.members[quorum.rank] for quorum in found] == [member.name for member in members]
    found[0].store.set("word", "heard")
    assert all(quorum.store.get("word") == b"heard" for quorum in found)
    return found


def _changed(*members: TorchftMembership) -> set[bool]:
    with ThreadPoolExecutor(len(members)) as pool:
        return set(pool.map(lambda member: member.has_changed(), members))


def test_epochs_of_a_job(lighthouse: _Lighthouse) -> None:
    """First three processes, a loss seen between steps and by an error, a new process, an error without a loss."""
    one, two, three = _member(), _member(), _member()
    first = _together(one, two, three)[0]
    assert _changed(one, two, three) == {False}

    two.leave()
    with ThreadPoolExecutor(2) as pool:
        seen, told = pool.submit(one.has_changed), pool.submit(three.wait)  # a collective has failed there
        assert seen.result(60) and one.wait().members == told.result(60).members == tuple(
            sorted((one.name, three.name))
        )
    joining = _member()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(joining.wait)
        wait_until(lambda: joining.name in lighthouse.asking, "the question of the third process")
        assert _changed(one, three) == {True}
        second = _together(one, three)[0]
        assert asked.result(60).members == second.members and joining.name in second.members

    third = _together(one, three, joining)[0]
    assert third.members == second.members and third.epoch > second.epoch > first.epoch


def test_too_few_are_told(lighthouse: _Lighthouse) -> None:
    """A wait for too few processes ends."""
    with pytest.raises(LifecycleError, check=lambda error: error.expected.startswith("2 ")):
        _member(num_first=2, timeout_s=0.2).wait()
    assert lighthouse.num_answered > 0
