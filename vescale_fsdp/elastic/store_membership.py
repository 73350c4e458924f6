"""StoreMembership: processes agree on the members of each epoch through a torch store, in rounds.

A **round** is one key of the store, which changes only by compare-and-set:

    round-0   {"entered": [a, b, c, d], "is_closed": true}      the 4 processes of the start
    round-1   {"entered": [c, a, d],    "is_closed": true}      b was killed
    round-2   {"entered": [e], ..}                              e wants to join; members see the open round

A process enters the first open round. The process that entered first closes the round, as soon as each member of the
previous round has entered or has ended. A round with new processes stays open a little longer, since several often
start together. Members of the previous round keep the order of their ranks; new processes follow in the order in which
they entered. A process that comes too late for a round enters the next round. So all processes that continue are in
the same round, however the network fails.

A process shows that it lives by answering on a port (`Presence`). The kernel closes the port when the process ends in
any way, so a lost process is noticed at once, without heartbeats. A machine that does not answer within `ANSWER_S`
counts as lost.

The store must outlive every rank. ``python -m vescale_fsdp.elastic.store_server`` runs a store in its own process. A
``torch.distributed.FileStore`` on shared storage needs no process.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Thread

import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.stores import (
    SECRET,
    BoundedStore,
    SignedStore,
    check_exposure,
    local_address,
    secret_of,
    sign,
)
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.errors import LifecycleError, PlacementError

ANSWER_S = 3.0  # long, since a training process may hold the interpreter lock for a while before it answers
_NONCE_BYTES = 16  # 128 random bits, so that a recorded answer never fits a later question
_POLL_S = 0.02  # pause between two requests to the store
_SETTLE_S = 0.5  # how long a round with new processes stays open after the last process has entered
_NEWEST = "newest-round"  # store key of the newest round's number: new processes need not read all rounds
_REFUSED = "refused"  # store key that is set when two processes have different secrets


@dataclass(frozen=True)
class _Round:
    """The value of a round in the store: names of the processes in the order of entering, or if closed, of ranks."""

    entered: tuple[str, ...] = ()
    is_closed: bool = False

    @staticmethod
    def of(text: str) -> _Round:
        """Restore a round from its `text`."""
        data = json.loads(text)
        return _Round(tuple(data["entered"]), data["is_closed"])

    @property
    def text(self) -> str:
        """The value as it is in the store: JSON."""
        return json.dumps({"entered": self.entered, "is_closed": self.is_closed})


class StoreMembership:
    """A `Membership` in which processes agree through a torch store.

        membership = StoreMembership(dist.TCPStore("node0", 29500), num_first=4)

    Args:
        store: a store that all processes reach and that outlives them.
        num_first: number of processes at the start of the job. The first epoch begins when all have entered.
        min_members: minimum number of processes in later epochs.
        timeout_s: how long a round waits for members of the previous round that live but do not enter; then it closes
            without them. A round waits as long again for enough processes. Also the time-out of each request to the
            store.
        host: name or address under which other processes reach this process, which listens on no other address.
            Default: the address from which this machine reaches the store; for a store in a file, 127.0.0.1.
        secret: a secret that all processes share. It signs entries of the store, and answers between processes.
            Default: VESCALE_FSDP_SECRET of the environment. Without a secret, all processes must be on one machine.

    Raises:
        PlacementError: if there is no secret and ``host`` is not a loopback address. Raised by ``wait`` if the
            processes of the first epoch have different secrets, or this process has another secret than the job.
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
        if host is None:  # of all stores, only a TCPStore has an address
            host = local_address(store.host, store.port) if isinstance(store, dist.TCPStore) else "127.0.0.1"
        self._secret = secret_of(secret)
        bounded = BoundedStore(store, timeout_s)
        # Kept in an attribute, since torch keeps no reference to a store that is written in Python.
        self._signed = bounded if self._secret is None else SignedStore(bounded, self._secret)
        self._store = dist.PrefixStore("elastic", self._signed)
        self._num_first, self._min_members, self._timeout_s = num_first, min_members, timeout_s
        self._presence = Presence(host, self._secret)  # raises without a secret, unless `host` is loopback
        self._number = -1  # number of the last closed round that this process knows; -1: none
        self._last: tuple[str, ...] = ()  # the members of that round

    @property
    def name(self) -> str:
        """The name of this process in `Quorum.members`."""
        return self._presence.name

    def wait(self) -> Quorum:
        """Enter the next round. Returns when a round with this process is closed; its members are the next epoch's."""
        number = self._number + 1
        if self._number < 0 and self._store.check([_NEWEST]):
            with self._reading():
                newest = int(self._store.get(_NEWEST))
            # Start at the round before, which is closed: the newest round must wait for the members of that round.
            number = max(0, newest - 1)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            closed = self._closed(number, deadline_s)
            self._number, self._last = number, closed.entered
            if self.name in closed.entered:  # else this process came too late, and tries the next round
                store = dist.PrefixStore(f"epoch-{number}", self._store)
                return Quorum(number, closed.entered, closed.entered.index(self.name), store)
            number += 1

    def has_changed(self) -> bool:
        """Return whether a process has entered the next round; False before the first epoch."""
        return self._number >= 0 and self._store.check([f"round-{self._number + 1}"])

    def leave(self) -> None:
        """Stop answering, so that other processes count this one as lost."""
        self._presence.end()

    def _closed(self, number: int, deadline_s: float) -> _Round:
        """Enter a round if it is open, wait until it is closed, and return it.

        Args:
            deadline_s: when to stop waiting for members of the previous round, as given by `time.monotonic`.
        """
        changed_s, known = time.monotonic(), _Round()  # when the round last changed, and its value then
        while True:
            current = self._entered(number)
            if current.is_closed:
                return current
            # Only in round 0, in which a wrong secret is a mistake in starting the job. Later, one process with a wrong
            # secret must not stop the job.
            if number == 0 and self._store.check([_REFUSED]):
                raise self._unlike_secrets()
            now_s = time.monotonic()
            if current != known:
                changed_s, known = now_s, current
            else:
                members = self._complete(current, now_s > changed_s + _SETTLE_S, now_s > deadline_s)
                if members is not None:
                    self._swap(number, current, _Round(members, is_closed=True))
                    continue  # read the round again: the swap fails if a process has entered meanwhile
            # Twice the time-out: after the first, a round with enough processes closes without absent members.
            if now_s > deadline_s + self._timeout_s:
                raise LifecycleError(
                    "Too few processes joined an epoch.",
                    expected=f"at least {self._min_members if self._last else self._num_first} within "
                    f"{self._timeout_s:g} s",
                    got=f"{len(current.entered)} in round {number}: {', '.join(current.entered[:8])}",
                    where=f"process {self.name}",
                    todo="start more processes, all with the same store; if they start slowly, pass a longer timeout_s",
                )
            time.sleep(_POLL_S)

    def _entered(self, number: int) -> _Round:
        """Enter a round if it is open, and return its current value."""
        current = self._swap(number, None, _Round((self.name,)))  # sets it only if no process has entered
        if number > self._number and current.entered == (self.name,):  # this process entered first
            self._store.set(_NEWEST, str(number))
        # Repeat until this process has entered, since a swap fails if another process enters at the same time.
        while not current.is_closed and self.name not in current.entered:
            current = self._swap(number, current, replace(current, entered=(*current.entered, self.name)))
        return current

    def _swap(self, number: int, expected: _Round | None, wanted: _Round) -> _Round:
        """Set a round to ``wanted`` if its value is ``expected`` (None: no value). Returns the value afterwards."""
        before = "" if expected is None else expected.text  # torch's stores take "" for a missing key
        with self._reading():
            return _Round.of(self._store.compare_set(f"round-{number}", before, wanted.text).decode())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert an error of reading an entry with a wrong or missing signature; also mark it for all processes."""
        try:
            yield
        except ValueError as error:  # a wrong signature (PlacementError), or text that is not JSON
            self._store.set(_REFUSED, "")
            raise self._unlike_secrets() from error

    def _unlike_secrets(self) -> PlacementError:
        """Make the error for processes with different secrets."""
        return PlacementError(
            "Processes of an elastic job have different secrets, or some have no secret.",
            expected="the same secret in all processes, or no secret in any process",
            got="no secret in this process" if self._secret is None else "another secret in this process",
            where=f"process {self.name}",
            todo=f"set the same {SECRET} in the environment of every process, or pass secret=...",
        )

    def _complete(self, current: _Round, is_settled: bool, is_late: bool) -> tuple[str, ...] | None:
        """Return the members with which this process can close a round, in the order of their ranks.

        Args:
            is_settled: whether no process has entered the round for a while.
            is_late: whether the time-out for members that live but do not enter has ended.

        Returns:
            None if the round must stay open, or if another process should close it.
        """

        def is_here(name: str) -> bool:
            return is_present(name, self._secret)

        earlier = current.entered[: current.entered.index(self.name)]
        if any(map(is_here, earlier)):
            return None  # of the live processes, the one that entered first closes the round
        later = current.entered[len(earlier) + 1 :]
        here = [self.name, *filter(is_here, later)]
        if self._last:
            absent = [name for name in self._last if name not in current.entered]
            if not is_late and any(map(is_here, absent)):
                return None
            if not is_settled and any(name not in self._last for name in here):
                return None
        if len(here) < (self._min_members if self._last else self._num_first):
            return None
        # In the order of ranks: members of the previous round keep their order, and new processes follow.
        return (
            *(name for name in self._last if name in here),
            *(name for name in here if name not in self._last),
        )


class Presence:
    """A port on which this process answers as long as it lives.

    Another process sends a nonce. The answer is an HMAC of the nonce, so that no other process can give this answer.

    Args:
        host: name or address under which other processes reach this process; the port listens on no other address.
        secret: the secret that all processes share; it signs the answers.

    Attributes:
        name: a unique name of this process: ``host:port/token``.

    Raises:
        PlacementError: if there is no secret and the address is not a loopback address.
    """

    def __init__(self, host: str, secret: bytes | None = None) -> None:
        check_exposure(host, secret)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A long backlog, since all members may connect at once.
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        # The token distinguishes this process from a later one with the same port.
        self._token, self._secret = secrets.token_hex(8), secret
        self.name = f"{host}:{self._listener.getsockname()[1]}/{self._token}"
        # A daemon thread, which does not keep a process alive that never calls `end`.
        self._accepting = Thread(target=self._accept, name="elastic-presence", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        """Answer every connection, each in a thread of its own, until the port is closed."""
        while True:
            try:
                asker, _ = self._listener.accept()
            except OSError:  # `end` has closed the port
                return
            # One thread per connection: a connection that sends nothing must not delay other processes.
            Thread(target=self._answer, args=(asker,), name="elastic-answer", daemon=True).start()

    def _answer(self, asker: socket.socket) -> None:
        """Read a nonce from a connection, send the answer, and close the connection."""
        with asker, suppress(OSError):  # the process that asked may have ended
            nonce = _received(asker, _NONCE_BYTES)
            if len(nonce) == _NONCE_BYTES:
                asker.sendall(_answer_to(nonce, self._token, self._secret))

    def end(self) -> None:
        """Close the port."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a close alone would not wake the thread that accepts
        self._listener.close()
        self._accepting.join(ANSWER_S)  # with a limit, like every wait in this package


def is_present(name: str, secret: bytes | None = None) -> bool:
    """Return whether the process called ``name`` lives and can be reached: whether it answers within `ANSWER_S`."""
    address, _, token = name.partition("/")
    host, _, port = address.rpartition(":")  # the last colon: IPv6 addresses contain colons
    nonce = secrets.token_bytes(_NONCE_BYTES)
    expected = _answer_to(nonce, token, secret)
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as asked:
            asked.sendall(nonce)
            return _received(asked, len(expected)) == expected  # another process may use the port by now
    except OSError:
        return False


def _answer_to(nonce: bytes, token: str, secret: bytes | None) -> bytes:
    """Return the answer of the process with this token to a nonce: only a process with the secret can compute it."""
    # Without a secret, which is possible on one machine only, the token alone identifies the process.
    return sign(secret or b"", f"presence {token}", nonce)


def _received(connection: socket.socket, nbytes: int) -> bytes:
    """Receive ``nbytes`` bytes, or fewer if the other side closes the connection.

    Raises:
        TimeoutError: if the bytes do not arrive within `ANSWER_S`.
    """
    # One deadline for all bytes, since a sender could send one byte at a time.
    data, deadline_s = b"", time.monotonic() + ANSWER_S
    while len(data) < nbytes:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))  # 0 would mean non-blocking
        more = connection.recv(nbytes - len(data))
        if not more:
            break
        data += more
    return data
