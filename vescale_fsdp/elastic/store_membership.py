"""StoreMembership: torch's dynamic rendezvous, run in the training processes, decides on the members of each epoch.

torch's `DynamicRendezvousHandler`, which torchrun's agents use, keeps one value in a store: participants, processes
that wait, and the time of each process's last keep-alive. Processes change it by compare-and-set.

    round 3, complete     participants a b c d                      the four train
    d is killed           a, b and c get errors, and leave the round one by one; they wait
    round 3, complete     participants d, waiting a b c             d's port refuses connections: d is dropped
    round 4               participants a b c                        complete: nobody is left to wait for

So the round ends only when each of its members has left it or is lost, and all members get the same list.

A network may split a job. A group forms only where at least half of the last epoch's members are, without those that
have ended, as their closed ports show; in a store that was replaced, more than half, because the other half may go on
in the old store. Processes that are new alone form none: members whom they do not reach may train.

`_Backend` adds to torch's handler what it lacks. It waits for changes, where the handler polls every second. It ends a
round as soon as nobody is left to wait for, where the handler waits a fixed time. It reports a lost process at once: a
process hosts a store on a port of its own, which the kernel closes when the process ends. Entries are JSON, since
torch's are pickles, which may run any code.

A running job needs nothing from the store: each epoch has a store of its own, in the process of rank 0. A lost store is
looked for again, at the same address, at each keep-alive and at the end of the epoch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, RendezvousTimeout

from vescale_fsdp.checkpoint.ranks.stores import (
    SECRET,
    BoundedStore,
    SignedStore,
    bound_store,
    check_exposure,
    local_address,
    secret_of,
    within,
)
from vescale_fsdp.elastic.connections import Interrupter
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.errors import LifecycleError, PlacementError
from vescale_fsdp.torch_private import decode_rendezvous, encode_rendezvous, rendezvous_handler

_logger = logging.getLogger("vescale_fsdp")
_KEY = "rendezvous"  # store key of the rendezvous state
_REFUSED = "refused"  # store key that is set when two processes have different secrets
_POLL_S = 0.02  # pause between two requests to the store
_ASK_S = 0.2  # pause between two connections to the port of a process that may be lost
_SETTLE_S = 0.3  # how long a round with new processes stays open after the last process has entered
# The same for new processes, which do not know the members of the last epoch: members complete the round before.
_SETTLE_NEW_S = 1.0
_STORE_S = 10.0  # time limit of one request to the store
REPORT_S = 5.0  # pause between two lines that say who is waited for
_MOST_NAMES = 8  # processes that a line names
T = TypeVar("T")


class StoreMembership:
    """A `Membership` in which processes agree through a torch store.

        membership = StoreMembership(dist.TCPStore("node0", 29500), num_first=4)

    Clocks of all machines must agree within a second, since keep-alives carry the time of their sender.

    Args:
        store: a store that all processes reach. It is needed at the start, and to change the members; a running epoch
            continues without it. A `TCPStore` may be restarted, empty, at its address.
        num_first: number of processes at the start of the job. The first epoch begins when all have entered.
        min_members: minimum number of processes in later epochs. A later epoch also needs at least half of the last
            epoch's members, more than half in a store that was replaced; members whose ports are closed do not count.
        timeout_s: how long a round waits for members of the last epoch that live but do not leave it; then it continues
            without them. It waits as long again for enough processes, and for a store that was lost.
        keep_alive_s: seconds between two keep-alives of a process, which also notices then that others wait. The same
            in all processes; raise it for thousands of them.
        max_missed: a process that misses more keep-alives is lost, although its connections are open: it is stopped,
            its machine is down, or a call holds its interpreter lock. The same in all processes.
        host: name or address under which other processes reach this process, which listens on no other address.
            Default: the address from which this machine reaches the store; for a store in a file, 127.0.0.1.
        secret: a secret that all processes share. It signs entries of the stores.
            Default: VESCALE_FSDP_SECRET of the environment. Without a secret, all processes must be on one machine.
        reconnect: connects to the store again after it was lost. Default: at the address of ``store``.

    Raises:
        PlacementError: if there is no secret and ``host`` is not a loopback address. Raised by ``wait`` if the
            processes of the first epoch have different secrets, or this process has another secret than the job.

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
        keep_alive_s: float = 1.0,
        max_missed: int = 3,
        host: str | None = None,
        secret: str | None = None,
        reconnect: Callable[[], dist.Store] | None = None,
    ) -> None:
        if host is None:  # of all stores, only a TCPStore has an address
            host = local_address(store.host, store.port) if isinstance(store, dist.TCPStore) else "127.0.0.1"
        self._secret = secret_of(secret)
        check_exposure(host, self._secret)
        self._timeout_s, self._host = timeout_s, host
        # The store of the epochs in which this process has rank 0. Its port also shows that this process lives.
        self._own_store: dist.TCPStore | None = bound_store(host, 0, timedelta(seconds=300))
        #: The name of this process in `Quorum.members`. The token distinguishes it from a later one with the same port.
        self.name = f"{host}:{self._own_store.port}/{secrets.token_hex(8)}"
        link = _Link(store, min(timeout_s, _STORE_S), reconnect or _reconnecting(store))
        self._backend = _Backend(
            link, self.name, self._secret, num_first, min_members, timeout_s, keep_alive_s, max_missed
        )
        self._rendezvous: Any = rendezvous_handler(
            self._backend,
            self.name,
            RendezvousTimeout(
                join=timedelta(seconds=2 * timeout_s),
                last_call=timedelta(days=1),  # `_Backend` ends rounds
                heartbeat=timedelta(seconds=max(timeout_s, _STORE_S)),
            ),
            keep_alive_s,
            max_missed,
        )
        # Kept in an attribute, since torch keeps no reference to a store that is written in Python.
        self._epoch_store: dist.Store | None = None

    def wait(self) -> Quorum:
        """Leave the current epoch, if any, and enter the next. Returns when its members have agreed.

        Raises:
            LifecycleError: if too few processes join in time, or the store is lost and does not come back in time.
            PlacementError: if processes have different secrets.
        """
        assert self._rendezvous is not None, "this process has left the job"
        while True:
            agreed = self._backend.agreed_after(self._rendezvous, self._timeout_s)
            if agreed is None:
                continue  # the state was an older one: the store was lost meanwhile
            epoch, members = agreed
            store = self._store_of(epoch, members[0])
            if store is not None:
                return Quorum(epoch, members, members.index(self.name), store)

    def has_changed(self) -> bool:
        """Return whether members have left or processes wait, as of the last keep-alive. Does not ask the store."""
        return self._backend.has_changed

    def end_epoch(self) -> None:
        """Stop ending the waits of gloo. Called before this process destroys the groups of its epoch."""
        self._backend.interrupter.stop()

    def has_lost(self) -> bool:
        """Return whether a member is known to have left or ended; asks the store and the next rank's port."""
        return self._backend.has_lost()

    @property
    def knows_lost(self) -> bool:
        """Whether a member is known to have left or ended. Asks nobody."""
        return self._backend.knows_lost

    def leave(self) -> None:
        """Close the port and end keep-alives, so that other processes count this one as lost."""
        if self._rendezvous is not None:
            self._backend.has_left = True
            self._backend.interrupter.stop()
            self._rendezvous.shutdown()
        self._rendezvous = self._epoch_store = self._own_store = None

    def _store_of(self, epoch: int, first: str) -> dist.Store | None:
        """Connect to the store of an epoch, which the process called ``first`` hosts; None if a member is lost."""
        if first == self.name:
            assert self._own_store is not None
            store: dist.Store | None = self._own_store
        else:
            store = self._connected(epoch, first)
        if store is None:
            return None
        store = _EpochStore(store, self._timeout_s, self)
        self._epoch_store = store if self._secret is None else SignedStore(store, self._secret)
        return dist.PrefixStore(f"epoch-{epoch}", self._epoch_store)

    def _connected(self, epoch: int, first: str) -> dist.Store | None:
        """Connect to the store in the process called ``first``; None if a member is lost meanwhile."""
        host, port = _address(first)
        # At least until its keep-alives tell that the first process is stopped: its port accepts connections then too.
        patience_s = max(self._timeout_s, self._backend.silence_s + self._backend.keep_alive_s)
        deadline_s, attempt_s = time.monotonic() + patience_s, 1.0
        what = f"{first}, the store of the first process of epoch {epoch}"
        connect = partial(dist.TCPStore, host, port, is_master=False, wait_for_workers=False)
        while not _refuses(first) and not self._backend.has_lost():
            # torch retries a refused connection for the whole time-out: a process that ends during an attempt is
            # found before the next, and a store with thousands of clients gets longer attempts.
            attempt_s = min(attempt_s, max(deadline_s - time.monotonic(), _POLL_S))
            try:
                attempt = partial(connect, timeout=timedelta(seconds=attempt_s))
                store = within(attempt_s + 1, attempt, what)
            except RuntimeError:  # torch's errors of a store, and LifecycleError
                if time.monotonic() > deadline_s and not self._backend.has_lost():
                    raise
                attempt_s *= 2
            else:
                store.set_timeout(timedelta(seconds=self._timeout_s))
                return store
        return None


class _EpochStore(BoundedStore):
    """The store of an epoch. All calls fail when a member is known to be lost."""

    def __init__(self, store: dist.Store, timeout_s: float, membership: StoreMembership) -> None:
        super().__init__(store, timeout_s)
        self._membership = membership

    def _call(self, call: Callable[[], T], what: str) -> T:
        if self._membership.knows_lost:  # the store may be in the lost process, and would not answer
            raise dist.DistStoreError(f"a member of the epoch was lost: {what}")
        return super()._call(call, what)

    def check(self, keys: list[str]) -> bool:
        is_there = super().check(keys)
        if not is_there and self._membership.has_lost():
            raise dist.DistStoreError(f"a member of the epoch was lost before {keys[:4]} were set")
        return is_there

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Logs every 5 s what it waits for: in a group that forms, a rank of the group."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > REPORT_S:
            try:
                return super().wait(keys, timedelta(seconds=REPORT_S))
            except dist.DistStoreError:
                if self._membership.knows_lost:
                    raise
                name, _, rank = keys[0].rpartition("/")
                what = f"rank {rank} of process group {name}" if rank.isdecimal() else f"{keys[:4]}"
                _logger.warning("%s waits for %s, until %s", self._membership.name, what, _clock(deadline_s))
        super().wait(keys, timedelta(seconds=max(left_s, 0.0)))


class _Link(BoundedStore):
    """The connection to the store of the rendezvous, which can be made again."""

    def __init__(self, store: dist.Store, timeout_s: float, reconnect: Callable[[], dist.Store]) -> None:
        super().__init__(store, timeout_s)
        self._reconnect, self.is_lost = reconnect, False
        self.patience_s = 0.0  # for how long a call that fails is repeated

    def _call(self, call: Callable[[], T], what: str) -> T:
        began_s = time.monotonic()
        while True:
            try:
                if self.is_lost:
                    self._store = within(self._timeout_s, self._reconnect, "the store of the rendezvous")
                result = super()._call(call, what)
            except (
                OSError,
                RuntimeError,
            ) as error:  # torch's errors of a store are RuntimeErrors, as LifecycleError
                self.is_lost = True
                if time.monotonic() > began_s + self.patience_s:
                    raise RendezvousConnectionError(f"{what}: {error}") from error
                time.sleep(_POLL_S)
            else:
                self.is_lost = False
                return result


def _reconnecting(store: dist.Store) -> Callable[[], dist.Store]:
    """Return a function that connects to a store again; stores without an address are used as they are."""
    if not isinstance(store, dist.TCPStore):
        return lambda: store
    host, port = store.host, store.port

    def reconnect() -> dist.Store:
        socket.create_connection((host, port), timeout=1).close()  # fails without torch's pages of log
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1)
        )

    return reconnect


class _Backend(RendezvousBackend):
    """Keeps the state of torch's rendezvous in a store, and decides when a round ends.

    Called by the thread that waits for an epoch, and in an epoch by the handler's thread of keep-alives.
    """

    def __init__(
        self,
        link: _Link,
        name: str,
        secret: bytes | None,
        num_first: int,
        min_members: int,
        timeout_s: float,
        keep_alive_s: float,
        max_missed: int,
    ) -> None:
        self._signed = (
            link if secret is None else SignedStore(link, secret)
        )  # kept for torch, see `_epoch_store`
        self._store = dist.PrefixStore("elastic", self._signed)
        self._link, self._own, self._secret = link, name, secret
        self._num_first, self._min_members = num_first, min_members
        self._timeout_s, self.keep_alive_s = timeout_s, keep_alive_s
        self.silence_s = max_missed * keep_alive_s  # a process that is silent for longer is lost
        self.has_changed = False
        self.has_left = (
            False  # this process only ends its keep-alives; without this, torch would end the whole job
        )
        self._epoch = -1  # number of the last epoch of this process; -1: none yet
        self._members: tuple[str, ...] = ()  # its members
        self._lost: set[str] = set()  # those of them that are known to have left or ended
        # The thread that waits for an epoch; None in an epoch. Keep-alives that are under way when a wait begins still
        # belong to the epoch: as part of the wait, they would give the round that ends the number of the next.
        self._waiting_thread: int | None = None
        self._began_s = 0.0  # when it began to wait, as all times below by `time.monotonic`
        self._deadline_s = 0.0  # when the wait is an error, unless members of a complete round are awaited
        self._report_s = 0.0  # when the next line says who is waited for
        self._agreed: tuple[int, tuple[str, ...]] | None = None
        # Distinguishes stores: in one that is not of the last epoch, members are awaited that have not come yet.
        self._origin = self._last_origin = ""
        self._node: str | None = None  # torch's description of this process
        self._gone: set[str] = set()  # members of the last epoch for which this wait does not wait
        self._ended: set[str] = set()  # processes whose ports are closed
        self._unreached: set[str] = set()  # members of the last epoch without whom no group may form
        self._asked_s = 0.0
        self.interrupter = Interrupter()
        self._is_next_closed = False  # whether the last look in this epoch found the next rank's port closed
        self._entered: set[str] = set()  # participants of the open round, as last seen
        self._entered_s = 0.0  # when they last changed

    @property
    def name(self) -> str:
        """The name of this kind of backend."""
        return "vescale_fsdp"

    @property
    def _is_waiting(self) -> bool:
        """Whether this thread waits for an epoch."""
        return self._waiting_thread == threading.get_ident()

    # -- called by torch's handler ----------------------------------------------------------------------

    def get_state(self) -> tuple[bytes, str] | None:
        """Return the state for the handler, and the text in the store; None if there is none."""
        with self._outages():
            text = None if self.has_left else self._read()
            if not self._is_waiting:
                self._look(is_waiting=False)
            return None if text is None else (self._for_handler(text), text)
        self._look(is_waiting=False)
        return None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, str, bool] | None:
        """Store a state, unless the store's has changed since ``token`` was read. A waiting process then waits."""
        if self.has_left:
            return state, "", True
        fields = decode_rendezvous(state)
        if self._is_waiting:
            self._stay(fields)
            if self._own in _names(fields["participants"]):
                # Numbers of epochs go on in a store that was replaced.
                fields["round"] = max(fields["round"], self._epoch + 1)
        before = json.loads(token) if token else {}
        fields["origin"] = before.get("origin") or secrets.token_hex(8)
        fields["formed"] = self._formed(fields, before)
        wanted = json.dumps(fields, sort_keys=True)
        with self._outages():
            stored = self._reading(lambda: self._store.compare_set(_KEY, token or "", wanted))
            if stored != wanted and not self._store.check([_KEY]):
                return None  # the store was replaced by an empty one
            # Awaited also if another process was faster: the handler would sleep for a second.
            text = self._awaited(stored) if self._is_waiting else stored
            has_set = stored == wanted
            # Here too, since the handler does not always read the state for a keep-alive. Not earlier: the delay would
            # let other ranks win every compare-and-set.
            if has_set and not self._is_waiting:
                self._look(is_waiting=False)
            return None if text is None else (self._for_handler(text), text, has_set)
        return None

    def _formed(self, fields: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        """Return the newest epoch that is known: its number, its members, and the store in which they agreed."""
        if fields["complete"] and not before.get("complete"):
            members = sorted(_names(fields["participants"]))
            return {"epoch": fields["round"], "members": members, "origin": fields["origin"]}
        known: dict[str, Any] = before.get("formed") or {"epoch": -1, "members": [], "origin": ""}
        if self._epoch > known["epoch"]:  # a store that was replaced
            return {"epoch": self._epoch, "members": list(self._members), "origin": self._last_origin}
        return known

    def _stay(self, fields: dict[str, Any]) -> None:
        """Wait for the next round from the same write on with which the handler leaves the last one.

        The handler leaves first. Others could then complete the next round without this process.
        """
        is_in = self._own in _names([*fields["participants"], *fields["waiting"]])
        if is_in or self._node is None or time.monotonic() > self._began_s + 2 * self._timeout_s:
            return
        fields["heartbeats"][self._node] = time.time()
        fields["waiting"] = sorted([*fields["waiting"], self._node])

    @contextlib.contextmanager
    def _outages(self) -> Any:
        """Raise a lost store to a process that waits; in an epoch, report it once, and go on without the store."""
        was_lost = self._link.is_lost
        try:
            yield
        except (RendezvousConnectionError, PlacementError) as error:
            if self._is_waiting:
                raise
            if not was_lost:
                _logger.warning("members cannot change until the store is back: %s", error)

    def _read(self) -> str | None:
        """Return the text of the state; None if the store has none."""
        return self._reading(lambda: self._store.get(_KEY)) if self._store.check([_KEY]) else None

    def _reading(self, read: Callable[[], bytes]) -> str:
        """Read a signed entry. A wrong signature is also reported to processes that wait for the first epoch."""
        try:
            text = read().decode()
            json.loads(text)  # fails if the entry is signed, and this process has no secret
            return text
        except ValueError as error:  # PlacementError is one too
            if self._is_waiting:
                self._signed.set("elastic/" + _REFUSED, "")
            raise self._unlike_secrets() from error

    def _unlike_secrets(self) -> PlacementError:
        """Make the error for processes with different secrets."""
        return PlacementError(
            "Processes of an elastic job have different secrets, or some have no secret.",
            expected="the same secret in all processes, or no secret in any process",
            got="no secret in this process" if self._secret is None else "another secret in this process",
            where=f"process {self._own}",
            todo=f"set the same {SECRET} in the environment of every process, or pass secret=...",
        )

    def _for_handler(self, text: str) -> bytes:
        """Note what a state says, and return it with this process's knowledge: who is gone, whether the round ends."""
        fields = json.loads(text)
        self._origin = fields["origin"]
        if self._is_waiting:
            for node in fields["heartbeats"]:
                if _name(node) in self._gone:
                    fields["heartbeats"][node] = 0.0  # the handler drops nodes without a recent keep-alive
            if self._is_ready(fields):
                fields["deadline"] = 0.0  # the handler completes a round whose deadline has passed
            names = _names(fields["participants"])
            if fields["complete"] and self._own in names and fields["round"] > self._epoch:
                ranked = sorted(fields["participants"], key=fields["participants"].__getitem__)
                self._agreed = fields["round"], tuple(map(_name, ranked))
        else:
            self._note(fields)
        self._node = next((node for node in fields["heartbeats"] if _name(node) == self._own), self._node)
        return encode_rendezvous(fields)

    # -- in an epoch ------------------------------------------------------------------------------------

    def _note(self, fields: dict[str, Any]) -> None:
        """Compare a state with the epoch's members. Interrupts collectives if a member is lost."""
        here = self._live(fields, fields["participants"])
        if not here and not fields["waiting"]:
            return  # a store that was replaced, in which nobody waits
        lost = set(self._members) - here
        if lost or here - set(self._members) or fields["waiting"] or fields["round"] != self._epoch:
            self.has_changed = True
        # A later epoch: the others went on without this process, which a cut cable kept from noticing.
        if lost and (fields["round"] == self._epoch or fields["formed"]["epoch"] > self._epoch):
            self._lost = lost
            # Nothing else ends waits for members that are stopped or without power.
            self.interrupter.start(len(self._members))

    def _look(self, *, is_waiting: bool) -> None:
        """Ask the port of the next rank, at most every `_ASK_S`. Interrupts gloo if that rank has ended.

        Args:
            is_waiting: whether this rank waits for others in the store. If not, a second look must find the port closed
                too: at the end of a job, the next rank may leave while this one is still in the last barrier.
        """
        if self._lost or self.has_left or len(self._members) < 2 or time.monotonic() < self._asked_s + _ASK_S:
            return
        following = self._members[(self._members.index(self._own) + 1) % len(self._members)]
        was_closed, self._is_next_closed = self._is_next_closed, _refuses(following)
        self._asked_s = time.monotonic()
        if self._is_next_closed and (is_waiting or was_closed):
            self._lost, self.has_changed = {following}, True
            self.interrupter.start(len(self._members))

    def has_lost(self) -> bool:
        """Return whether a member has left, or the next rank's port is closed; looks at most every `_ASK_S`."""
        if not self._lost and time.monotonic() >= self._asked_s + _ASK_S:
            self._look(is_waiting=True)
            self.get_state()
        return bool(self._lost)

    @property
    def knows_lost(self) -> bool:
        """Whether `has_lost` has returned True in this epoch, or a keep-alive has found a member to be lost."""
        return bool(self._lost)

    # -- between epochs ---------------------------------------------------------------------------------

    def agreed_after(self, rendezvous: Any, timeout_s: float) -> tuple[int, tuple[str, ...]] | None:
        """Take part in a rendezvous. Returns number and members of the next epoch; None if it must be repeated.

        Raises:
            LifecycleError: if too few processes join, members of the last epoch are unreachable, or the store is lost.
        """
        self.interrupter.stop()
        self._waiting_thread, self._agreed = threading.get_ident(), None
        self._began_s = time.monotonic()
        self._deadline_s, self._report_s = self._began_s + 2 * timeout_s, self._began_s + REPORT_S
        self._link.patience_s = timeout_s
        self._gone.clear()
        self._unreached.clear()
        self._asked_s = 0.0  # ports are asked at once: a member is probably lost
        try:
            self._enter(rendezvous)
        except RendezvousTimeoutError:
            if self._unreached:
                raise LifecycleError(
                    "No new epoch: members of the last one cannot be reached and may be training.",
                    expected="half of the last epoch's members, more than half in a store that was replaced; members "
                    "whose ports are closed do not count",
                    got=f"{len(self._entered)} processes without {', '.join(sorted(self._unreached)[:8])}",
                    where=f"process {self._own}",
                    todo="connect these processes again; if their machines are gone, start all processes of this job "
                    "again, with an empty store",
                ) from None
            num_needed = self._num_first if self._epoch < 0 else self._min_members
            raise LifecycleError(
                "Too few processes joined an epoch.",
                expected=f"at least {num_needed} within {timeout_s:g} s",
                got=f"{len(self._entered)}: {', '.join(sorted(self._entered)[:8])}",
                where=f"process {self._own}",
                todo="start more processes, all with the same store; if they start slowly, pass a longer timeout_s",
            ) from None
        except RendezvousConnectionError as lost:
            raise LifecycleError(
                "The store of the rendezvous is lost, so processes cannot agree on the next epoch.",
                expected=f"the store to answer within {timeout_s:g} s",
                got=str(lost),
                where=f"process {self._own}",
                todo="start the store again at its address, then the processes of this job; training continues from "
                "the last saved step",
            ) from lost
        if self._agreed is not None:
            self._epoch, self._members = self._agreed
            self._last_origin, self._link.patience_s = self._origin, 0.0
            self.has_changed, self._lost, self._waiting_thread = False, set(), None
            self.interrupter.allow()
            self._is_next_closed = False
        return self._agreed

    def _enter(self, rendezvous: Any) -> None:
        """Wait until a rendezvous is complete; repeat it while members of a complete round live."""
        while True:
            try:
                return rendezvous.next_rendezvous()
            except RendezvousTimeoutError:
                if time.monotonic() > self._deadline_s:
                    raise

    def _awaited(self, text: str) -> str | None:
        """Wait until the handler has something to do: leave or enter a round, complete it, or send a keep-alive."""
        while True:
            fields = json.loads(text)
            own = next((node for node in fields["heartbeats"] if _name(node) == self._own), None)
            if own is None or time.time() > fields["heartbeats"][own] + self.keep_alive_s:
                return text
            if self._epoch < 0 and self._store.check([_REFUSED]):
                raise self._unlike_secrets()
            members = self._live(fields, fields["participants"])
            if fields["complete"] and self._own in members:
                return text
            if not fields["complete"] and (self._own not in members or self._is_ready(fields)):
                return text
            if fields["complete"] and not members:
                return text  # all members have left the round, or are gone: the handler opens the next round
            self._ask(fields, members)
            time.sleep(_POLL_S)
            read = self._read()
            if read is None:
                return None  # the store was replaced
            text = read

    def _ask(self, fields: dict[str, Any], members: set[str]) -> None:
        """Find out which of the processes that the round waits for are gone. One process asks for all."""
        now_s = time.monotonic()
        awaited = members if fields["complete"] else self._expected(fields) - members
        # A process that joins waits for the members' step, however long; a member that has left waits for the others.
        is_over = not fields["complete"] or fields["round"] == self._epoch
        if is_over and now_s > self._began_s + self._timeout_s:
            self._gone |= awaited
        self._unreached.clear()
        if not fields["complete"] and not self._may_go_on(fields, members):
            self._unreached = set(fields["formed"]["members"]) - members - self._ended
        waiting = sorted(self._live(fields, fields["waiting"]) | (set() if fields["complete"] else members))
        place = waiting.index(self._own) if self._own in waiting else 0
        if now_s > self._asked_s + _ASK_S:
            self._asked_s = now_s
            # The first asks for all; each other one asks the one before it, which may be lost too.
            asked = {waiting[place - 1]} if place else (awaited - self._gone) | self._unreached
            # In another order each time, and not for longer than until the next keep-alive.
            for name in random.sample(sorted(asked), len(asked)):
                if time.monotonic() < now_s + self.keep_alive_s and _refuses(name):
                    self._ended.add(name)
            self._gone |= asked & self._ended
        if fields["complete"] and not is_over:
            self._deadline_s = now_s + 2 * self._timeout_s  # the members live, and will leave the epoch
        if now_s > self._report_s:
            self._report_s += REPORT_S
            level = logging.DEBUG if place else logging.WARNING
            _logger.log(
                level, "%s waits for %s", self._own, self._reason(fields, members, awaited - self._gone)
            )

    def _reason(self, fields: dict[str, Any], entered: set[str], awaited: set[str]) -> str:
        """Describe for whom this process waits, and until when."""
        until = f"until {_clock(self._deadline_s)}"
        if fields["complete"] and fields["round"] != self._epoch:
            return f"{_names_in_line(awaited)} to leave epoch {fields['round']}, until they do or end"
        if awaited:
            until = f"until {_clock(self._began_s + self._timeout_s)}"
            return f"{_names_in_line(awaited)} to leave the epoch, {until}, and goes on without them then"
        if self._unreached:
            return f"{_names_in_line(self._unreached)}, which may be training, {until}"
        num_needed = self._num_first if self._epoch < 0 and fields["round"] == 0 else self._min_members
        return f"{num_needed} processes, of which {len(entered)} are here, {until}"

    def _is_ready(self, fields: dict[str, Any]) -> bool:
        """Return whether this process can complete the open round: no process that may come is missing."""
        entered = self._live(fields, fields["participants"])
        if entered != self._entered:
            self._entered, self._entered_s = entered, time.monotonic()
        if fields["complete"] or self._own not in entered or self._live(fields, fields["waiting"]):
            return False
        if not self._may_go_on(fields, entered):
            return False
        if self._epoch < 0 and fields["round"] == 0:
            return len(entered) >= self._num_first
        if len(entered) < self._min_members or self._expected(fields) - entered:
            return False
        if not entered - set(self._members):
            return True
        settle_s = _SETTLE_S if self._members else _SETTLE_NEW_S
        return time.monotonic() > self._entered_s + settle_s

    def _may_go_on(self, fields: dict[str, Any], entered: set[str]) -> bool:
        """Return whether no other processes can form a group, or still train in the last one."""
        last = set(fields["formed"]["members"]) - self._ended
        num_twice = 2 * len(last & entered)
        # Of two halves, the one with the last epoch's store goes on.
        is_store_of_last = fields["formed"]["origin"] == fields["origin"]
        return not last or num_twice > len(last) or (num_twice == len(last) and is_store_of_last)

    def _expected(self, fields: dict[str, Any]) -> set[str]:
        """Return the members of the last epoch that may still enter the open round.

        In the store of the last epoch, none: the round opened when each of them had left the last one, or was lost.
        """
        return set() if fields["origin"] == self._last_origin else set(self._members) - self._gone

    def _live(self, fields: dict[str, Any], nodes: Iterable[str]) -> set[str]:
        """Return the names of the nodes whose keep-alives are recent and that are not known to be gone."""
        oldest_s = time.time() - self.silence_s
        return {_name(node) for node in nodes if fields["heartbeats"].get(node, 0.0) >= oldest_s} - self._gone


def _name(node: str) -> str:
    """Return the process's name in torch's description of a node: name, process id and number in the process."""
    return node.split()[0]


def _names(nodes: Iterable[str]) -> set[str]:
    return set(map(_name, nodes))


def _address(name: str) -> tuple[str, int]:
    host, _, port = name.partition("/")[0].rpartition(":")  # the last colon: IPv6 addresses contain colons
    return host, int(port)


def _names_in_line(members: Iterable[str]) -> str:
    """Return the names of processes for a line, not more than eight."""
    ordered = sorted(members)
    more = f" and {len(ordered) - _MOST_NAMES} more" if len(ordered) > _MOST_NAMES else ""
    return ", ".join(ordered[:_MOST_NAMES]) + more


def _clock(deadline_s: float) -> str:
    """Return a time of `time.monotonic` as hours, minutes and seconds."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + deadline_s - time.monotonic()))


def _refuses(name: str) -> bool:
    """Return whether the port of a process is closed. A machine that does not answer is left to keep-alives."""
    try:
        socket.create_connection(_address(name), timeout=_ASK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
