"""StoreMembership: processes agree over a torch store on who takes part, in rounds.

A **round** is one key of the store, which is only ever changed by compare-and-set:

    round-0   {"entered": [a, b, c, d], "is_closed": true}      4 were to begin
    round-1   {"entered": [c, a, d],    "is_closed": true}      b was killed
    round-2   {"entered": [e], ..}                              e wants to join: whoever looks sees the round open

A process enters the first round that is open. Who entered first closes it, as soon as everybody of the round before has
entered or is no longer there (`presence`), and strangers have had a moment. Ranks are the order of the round before,
then that of entering. Whoever comes too late for a round finds it closed without it, and enters the next: so all that
go on are in one round, however the network fails.

The store must outlive every rank: ``python -m vescale_fsdp.elastic.store_server`` runs one, a
``torch.distributed.FileStore`` on storage that all share needs none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.stores import SECRET, BoundedStore, SignedStore, local_address, secret_of
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.elastic.presence import Presence, is_present
from vescale_fsdp.errors import LifecycleError, PlacementError

_POLL_S = 0.02
_SETTLE_S = (
    0.5  # how long a round with strangers in it stays open after the last has entered: they come in crowds
)
_NEWEST = "newest-round"  # a hint, for those who have been in none
_REFUSED = "refused"  # somebody with another secret has come, or been met


@dataclass(frozen=True)
class _Round:
    entered: tuple[str, ...] = ()
    is_closed: bool = False

    @staticmethod
    def of(text: str) -> _Round:
        found = json.loads(text)
        return _Round(tuple(found["entered"]), found["is_closed"])

    @property
    def text(self) -> str:
        return json.dumps({"entered": self.entered, "is_closed": self.is_closed})


class StoreMembership:
    """Who takes part, by the word of a store.

        membership = StoreMembership(dist.TCPStore("node0", 29500), num_first=4)

    Args:
        store: one that all processes reach and that outlives them.
        num_first: processes that the job begins with.
        min_members: with fewer no epoch begins.
        timeout_s: how long members of a round wait for others that live and do not enter (they then go on without
            them), for there to be enough, and for each answer of the store.
        host: the name or address under which others reach this machine, and the one that is listened on; default: that
            by which it reaches the store.
        secret: signs what processes write to the store and answer to each other; the same in all of them. Default: that
            of the environment, VESCALE_FSDP_SECRET. Without one, all processes are on one machine.

    Raises:
        PlacementError: if there is no secret and ``host`` is not a loopback address; by ``wait``, if processes of a
            first epoch do not all have the same secret, or this one's is another than the job's.
        LifecycleError: by any method, if the store is lost or does not answer.

    Examples:
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        >>> membership = StoreMembership(store, num_first=1)
        >>> len(membership.wait().members)
        1
        >>> membership.leave()
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        num_first: int,
        min_members: int = 1,
        timeout_s: float = 60.0,
        host: str | None = None,
        secret: str | None = None,
    ) -> None:
        self._secret = secret_of(secret)
        # Kept: torch keeps no reference to a store that is written in Python.
        bounded = BoundedStore(store, timeout_s)
        self._signed = bounded if self._secret is None else SignedStore(bounded, self._secret)
        self._store = dist.PrefixStore("elastic", self._signed)
        self._num_first, self._min_members, self._timeout_s = num_first, min_members, timeout_s
        self._presence = Presence(_own_host(store) if host is None else host, self._secret)
        self._number = -1  # of the round this process was in last
        self._last: tuple[str, ...] = ()  # its members

    @property
    def name(self) -> str:
        """This process's, as others see it."""
        return self._presence.name

    def wait(self) -> Quorum:
        """Enter the next round; returns when it is closed with this process in it."""
        number = self._number + 1
        if self._number < 0 and self._store.check([_NEWEST]):
            with self._reading():
                newest = int(self._store.get(_NEWEST))
            number = max(0, newest - 1)  # one that is closed: who was in it is to be known
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            closed = self._closed(number, deadline_s)
            self._number, self._last = number, closed.entered
            if self.name in closed.entered:
                store = dist.PrefixStore(f"epoch-{number}", self._store)
                return Quorum(number, closed.entered, closed.entered.index(self.name), store)
            number += 1

    def has_changed(self) -> bool:
        """Whether somebody has entered the next round."""
        return self._number >= 0 and self._store.check([_key(self._number + 1)])

    def leave(self) -> None:
        """Answer no more: others find this process gone."""
        self._presence.end()

    def _closed(self, number: int, deadline_s: float) -> _Round:
        """A round when it is closed; entered first, where it is open."""
        changed_s, known = time.monotonic(), _Round()
        while True:
            found = self._entered(number)
            if found.is_closed:
                return found
            if number == 0 and self._store.check([_REFUSED]):  # a later round goes on without a stranger
                raise self._unlike_secrets()
            now_s = time.monotonic()
            if found != known:
                changed_s, known = now_s, found
            elif (
                members := self._complete(found, now_s > changed_s + _SETTLE_S, now_s > deadline_s)
            ) is not None:
                self._swap(number, found, _Round(members, is_closed=True))
                continue
            if now_s > deadline_s + self._timeout_s:
                raise self._too_few(number, found)
            time.sleep(_POLL_S)

    def _entered(self, number: int) -> _Round:
        """A round as it stands, with this process in it if it is open."""
        found = self._swap(number, None, _Round((self.name,)))
        if number > self._number and found.entered == (self.name,):
            self._store.set(_NEWEST, str(number))
        while not found.is_closed and self.name not in found.entered:
            found = self._swap(number, found, replace(found, entered=(*found.entered, self.name)))
        return found

    def _swap(self, number: int, known: _Round | None, wanted: _Round) -> _Round:
        """Replace what is known of a round, None if nothing; what is there now."""
        expected = "" if known is None else known.text
        with self._reading():
            return _Round.of(self._store.compare_set(_key(number), expected, wanted.text).decode())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Entries of others: signed with this process's secret, or not at all if it has none."""
        try:
            yield
        except ValueError as error:  # PlacementError of a signature too
            self._store.set(_REFUSED, "")
            raise self._unlike_secrets() from error

    def _unlike_secrets(self) -> PlacementError:
        return PlacementError(
            "Processes of an elastic job have different secrets, or some have none.",
            expected="the same secret in all processes, or none in any",
            got="none here" if self._secret is None else "another one here",
            where=f"process {self.name}",
            todo=f"set the same {SECRET} in the environment of every process, or pass secret=...",
        )

    def _is_present(self, name: str) -> bool:
        return is_present(name, self._secret)

    def _complete(self, found: _Round, is_settled: bool, is_late: bool) -> tuple[str, ...] | None:
        """Members of a round that can be closed, by the process whose turn it is; None while it is to stay open."""
        before = found.entered[: found.entered.index(self.name)]
        if any(map(self._is_present, before)):
            return None  # one of them does it
        here = [
            name
            for name in found.entered
            if name not in before and (name == self.name or self._is_present(name))
        ]
        if not self._last:
            enough = self._num_first
        else:
            away = [name for name in self._last if name not in found.entered]
            if not is_late and any(map(self._is_present, away)):
                return None
            enough = self._min_members
        strangers = any(name not in self._last for name in here)
        if len(here) < enough or (self._last and strangers and not is_settled):
            return None
        return (
            *(name for name in self._last if name in here),
            *(name for name in here if name not in self._last),
        )

    def _too_few(self, number: int, found: _Round) -> LifecycleError:
        return LifecycleError(
            "Too few processes have come for an epoch.",
            expected=f"at least {self._min_members if self._last else self._num_first} within "
            f"{self._timeout_s:g} s",
            got=f"{len(found.entered)} in round {number}: {', '.join(found.entered[:8])}",
            where=f"process {self.name}",
            todo="start more, all with the same store; where starting takes longer, pass timeout_s=",
        )


def _key(number: int) -> str:
    return f"round-{number}"


def _own_host(store: dist.Store) -> str:
    """The address by which this machine reaches the store's; of a store in a file, the loopback address."""
    return local_address(store.host, store.port) if isinstance(store, dist.TCPStore) else "127.0.0.1"
