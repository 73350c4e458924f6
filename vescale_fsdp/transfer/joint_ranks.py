"""Joint ranks: one process group over the ranks of several jobs, connected through a TCP or file store.

    trainer, 4 ranks      joint_ranks("tcp://node0:29600", first_rank=0, num_ranks=6)
    engine, 2 ranks       joint_ranks("tcp://node0:29600", first_rank=4, num_ranks=6)

Pass the result in place of a process group: ``describe_states(..., ranks=...)``, ``Transfer(plan, ranks=...)``.

    store        each rank enters a greeting, waits for the greetings of all other ranks, and checks their signatures;
                 then it enters that it is ready, and waits until all ranks are
    connections  gloo connects all pairs of ranks
    proof        each rank sends each other rank a signature of random numbers, one drawn by each rank; without a
                 secret, ranks only wait until all are connected. Any rank may then close its ranks at once

After a loss, all ranks meet again at the same rendezvous: those that are left close their ranks and call `joint_ranks`
again, and so does the process that replaces a lost one. Meetings at one store are numbered. A rank joins the first
meeting in which its place is free, so a restarted process joins the meeting after the one that it died in. A rank that
waits in a meeting leaves it as soon as any rank has opened the next one: a rank of the earlier meeting has died.

Jobs exchange JSON and raw tensors, never pickles, which could run code in the other job. With a secret, entries of the
store and JSON messages are signed. The signature of a message covers the random numbers and a counter, so that no
message can be replayed. Tensors are neither signed nor encrypted (see SECURITY.md).
"""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.ranks.coordinator import GroupCoordinator
from vescale_fsdp.checkpoint.ranks.stores import (
    SECRET,
    BoundedStore,
    SignedStore,
    address_of,
    bound_store,
    check_exposure,
    interface_of,
    local_address,
    secret_of,
    sign,
    unsign,
    within,
)
from vescale_fsdp.errors import CheckpointError, LifecycleError, PlacementError
from vescale_fsdp.torch_private import named_group

T = TypeVar("T")
_NAME = "joint-ranks"  # prefix of all keys
_POLL_S = 0.02  # pause between two requests to the store
_READERS_S = 5.0  # how long rank 0, which may own the store, waits for other ranks to read an error
_NONCE_BYTES = 32  # size of a rank's random number, as of the SHA-256 digest of all numbers
_INTERFACE = "GLOO_SOCKET_IFNAME"


def joint_ranks(
    rendezvous: str | dist.Store,
    *,
    first_rank: int,
    num_ranks: int,
    timeout_s: float = 600.0,
    interface: str | None = None,
    secret: str | None = None,
) -> JointRanks:
    """Connect the ranks of several jobs. All ranks of all jobs call this, each job with its own ``first_rank``.

    Args:
        rendezvous: ``tcp://host:port``, with the host that runs rank 0 of the joint ranks; ``file:///path``, with a
            file on shared storage that does not exist yet; or a torch store. After a loss, pass the same one again.
        first_rank: number of the job's rank 0 among the ranks of all jobs. The job's rank i is ``first_rank + i``.
        num_ranks: number of ranks in all jobs.
        timeout_s: how long ranks wait for each other, while they connect and in each later collective.
        interface: the network interface to listen on, by its name or IPv4 address. Default: the interface that reaches
            ``rendezvous``; for a file or a store ``GLOO_SOCKET_IFNAME``, else the loopback interface.
        secret: a secret that all jobs share. Default: VESCALE_FSDP_SECRET of the environment. Without a secret, only
            processes on one machine can connect.

    Returns:
        The joint ranks; their numbers are those in all descriptions and plans.

    Raises:
        PlacementError: if this job's ranks exceed ``num_ranks``, the job has no default process group, or the interface
            is not a loopback interface and there is no secret; on all ranks, if their secrets differ.
        CheckpointError: if ranks do not arrive in time, with a list of the missing ranks, or if a rank is lost.

    Examples:
        >>> ranks = joint_ranks(dist.HashStore(), first_rank=0, num_ranks=1)
        >>> ranks.rank, ranks.world_size
        (0, 1)
        >>> ranks.close()
    """
    if not dist.is_initialized():
        raise PlacementError(
            "This job has no process group.",
            expected="torch.distributed.init_process_group(...) first, also in a job of one process",
            got="none",
        )
    if not 0 <= first_rank <= first_rank + dist.get_world_size() <= num_ranks:
        raise PlacementError(
            "This job's ranks exceed the ranks of all jobs.",
            expected=f"numbers of this job's {dist.get_world_size()} ranks from 0 to num_ranks - 1 = {num_ranks - 1}",
            got=f"first_rank={first_rank}",
            todo="pass the same num_ranks in all jobs, and as first_rank the number of ranks in all previous jobs",
        )
    rank, own, timeout = first_rank + dist.get_rank(), dist.get_world_size(), timedelta(seconds=timeout_s)
    known, tcp = secret_of(secret), _tcp_address(rendezvous)
    address, interface = _listening_address(interface, tcp)
    check_exposure(address, known)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            bounded = BoundedStore(_open_store(rendezvous, tcp, rank, num_ranks, deadline_s), timeout_s)
            # Through the store without signatures, since ranks with other secrets must be able to read a refusal.
            name = _Meeting(bounded, rank, num_ranks, timeout_s, known).meet(deadline_s)
            break
        except (LifecycleError, dist.DistError) as lost:
            # The store of rank 0 has ended: that of an earlier meeting, which this rank has found before rank 0 left
            # it, or rank 0 was restarted. Its next store has the same address.
            if tcp is None or rank == 0 or time.monotonic() > deadline_s:
                raise CheckpointError(
                    "The store of the joint ranks does not answer.",
                    expected=f"rank 0, which hosts it, within {timeout_s:g} s",
                    got=f"no greeting of ranks [0]: {type(lost).__name__}: {lost}",
                    where=f"rank {rank}, at {rendezvous}",
                    todo="start the process of rank 0 again, and call joint_ranks again on all ranks",
                ) from lost
            time.sleep(_POLL_S)
    store = bounded if known is None else SignedStore(bounded, known)
    # torch maps rank numbers in the default group to rank numbers in the new group. Ranks of other jobs are not in the
    # default group, so this map lists them under numbers that no rank of this job has.
    foreign = [*range(first_rank), *range(first_rank + own, num_ranks)]
    numbers = dict(enumerate([*range(first_rank, first_rank + own), *foreign]))
    try:
        with _listening_on(interface):
            group = named_group(rank, numbers, name, timeout, store, "gloo")
    except RuntimeError as lost:  # raised by gloo if a connection fails
        raise CheckpointError(
            "A rank was lost while all ranks were connecting.",
            expected=f"connections between {num_ranks} ranks, all of which had arrived",
            got=f"{type(lost).__name__}: {lost}",
            where=f"rank {rank}",
            todo="find the process that has ended, and start it again; call joint_ranks again on all ranks",
        ) from lost
    # Joint rank by rank in the default group, since tensors name the ranks of their mesh by the latter.
    ranks = JointRanks(group, {own: first_rank + own for own in range(own)}, store, known)
    try:
        ranks.authenticate()
    except BaseException:  # also after Ctrl-C: otherwise the group's threads and connections would stay
        ranks.close()
        raise
    return ranks


def _tcp_address(rendezvous: str | dist.Store) -> tuple[str, int] | None:
    """Return the host and port of a TCP rendezvous; None for a file or a store."""
    if not isinstance(rendezvous, str):
        return None
    where = urlsplit(rendezvous)
    if where.scheme == "tcp" and where.hostname and where.port:
        return where.hostname, where.port
    if where.scheme == "file":
        return None
    raise PlacementError(
        "This is not a rendezvous.", expected="tcp://host:port or file:///path", got=rendezvous
    )


def _listening_address(interface: str | None, tcp: tuple[str, int] | None) -> tuple[str, str]:
    """Return the address and the name of the network interface that this rank listens on."""
    named = interface or (None if tcp else os.environ.get(_INTERFACE))
    if named is None:
        address = local_address(*tcp) if tcp else "127.0.0.1"
        return address, interface_of(address)
    if named in (name for _, name in socket.if_nameindex()):
        return address_of(named), named
    return named, interface_of(named)


def _open_store(
    rendezvous: str | dist.Store, tcp: tuple[str, int] | None, rank: int, num_ranks: int, deadline_s: float
) -> dist.Store:
    """Open the store of a rendezvous. Rank 0 hosts a TCP store, and the other ranks connect to it."""
    if not isinstance(rendezvous, str):
        return rendezvous
    if tcp is None:
        return dist.FileStore(urlsplit(rendezvous).path, num_ranks)
    timeout_s = max(deadline_s - time.monotonic(), 1.0)  # torch refuses 0
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:  # not torch's own server, which would listen on all addresses
        return bound_store(*tcp, timeout)
    return within(
        timeout_s,
        lambda: dist.TCPStore(*tcp, is_master=False, wait_for_workers=False, timeout=timeout),
        f"rank {rank}, at {rendezvous}",
    )


class _Meeting:
    """One rank's part in finding all other ranks in a store.

    Args:
        store: without signatures.
        secret: this rank's secret, if it has one.
    """

    def __init__(
        self, store: BoundedStore, rank: int, num_ranks: int, timeout_s: float, secret: bytes | None
    ) -> None:
        self._store, self._rank, self._num_ranks, self._timeout_s = store, rank, num_ranks, timeout_s
        # A rank without a secret signs with an empty one, so that it and a rank with a secret detect each other.
        self._secret = secret or b""
        self._number = -1

    def meet(self, deadline_s: float) -> str:
        """Wait until all ranks are ready to connect; returns a name for their group, which no other group has.

        Raises:
            PlacementError: on all ranks, as soon as any rank has read the greeting of a rank with another secret.
            CheckpointError: if ranks do not arrive in time; lists the missing ranks.
            LifecycleError: if the store was lost.
        """
        while True:
            self._take_place()
            # Ready: a rank that died while it waited for others has a greeting, and is not ready.
            if self._wait_for_all("here", deadline_s) and self._wait_for_all("ready", deadline_s):
                return self._read(self._key("name", 0))

    def _key(self, what: str, rank: int) -> str:
        """Return a key of this meeting: in its name are the meeting, what is entered, and the rank that enters it."""
        return f"{_NAME} {self._number} {what} {rank}"

    def _take_place(self) -> None:
        """Join the next meeting in which no process has this rank."""
        own = b""
        entered = None
        while entered != own:
            self._number += 1
            # Random, since the process that this one replaces has the same secret.
            own = self._signed(self._key("here", self._rank), secrets.token_hex(8).encode())
            entered = self._store.compare_set(self._key("here", self._rank), "", own)
        self._store.set(f"{_NAME} {self._number} open", b"1")

    def _signed(self, key: str, value: bytes) -> bytes:
        return sign(self._secret, key, value)

    def _read(self, key: str) -> str:
        return unsign(self._secret, key, self._store.get(key)).decode()

    def _wait_for_all(self, what: str, deadline_s: float) -> bool:
        """Enter ``what`` for this rank, and wait until all ranks have. Returns False if the next meeting is open."""
        if what == "ready":
            if self._rank == 0:  # before it is ready, so that ranks that have read this find the name
                name = self._key("name", 0)  # random: names of groups must be unique in each process
                self._store.set(name, self._signed(name, secrets.token_hex(8).encode()))
            key = self._key(what, self._rank)
            self._store.set(key, self._signed(key, b""))
        refusal = self._key("refused", 0)
        missing = set(range(self._num_ranks)) - {self._rank}
        while missing:
            # errors="replace", since the entry is not signed and may have any bytes.
            refused = (
                self._store.get(refusal).decode(errors="replace") if self._store.check([refusal]) else ""
            )
            for other in [other for other in missing if self._store.check([self._key(what, other)])]:
                try:
                    self._read(self._key(what, other))
                except PlacementError:  # a signature with another secret
                    # In order, so that both ranks write the same text.
                    refused = f"ranks {min(self._rank, other)} and {max(self._rank, other)}"
                    self._store.set(refusal, refused)
                missing.discard(other)  # it has arrived, even with another secret
            if refused:
                self._wait_for_readers(refusal)
                raise PlacementError(
                    "Ranks have different secrets, or some ranks have no secret.",
                    expected="the same secret on all ranks, or no secret on any rank",
                    got=f"different secrets of {refused}",
                    where=f"rank {self._rank}",
                    todo=f"set the same {SECRET} in the environment of every process, or pass secret=...",
                )
            if missing and self._store.check([f"{_NAME} {self._number + 1} open"]):
                return False
            if missing and time.monotonic() > deadline_s:
                raise CheckpointError(
                    "Some ranks did not arrive.",
                    expected=f"all {self._num_ranks} ranks within {self._timeout_s:g} s",
                    got=f"no greeting of ranks {sorted(missing)[:16]}",
                    where=f"rank {self._rank}",
                    todo="check these ranks; pass the same rendezvous and num_ranks in all jobs, or a longer timeout_s",
                )
            time.sleep(_POLL_S if missing else 0)  # no pause after the last greeting
        return True

    def _wait_for_readers(self, refusal: str) -> None:
        """Count this rank as a reader of the error. Rank 0, whose process may own the store, waits for all readers."""
        deadline_s = time.monotonic() + _READERS_S
        num_readers = self._store.add(f"{refusal} read", 1)
        while self._rank == 0 and num_readers < self._num_ranks and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            num_readers = self._store.add(f"{refusal} read", 0)  # adding 0 reads the counter


class JointRanks(GroupCoordinator):
    """The ranks of several jobs, connected by `joint_ranks`. A context manager that closes the connections.

    Examples:
        >>> with joint_ranks(dist.HashStore(), first_rank=0, num_ranks=1) as ranks:
        ...     ranks.world_size
        1
    """

    def __init__(
        self, group: dist.ProcessGroup, rank_of: dict[int, int], store: dist.Store, secret: bytes | None
    ) -> None:
        super().__init__(group, rank_of)
        # Kept alive here: torch keeps no reference to a store that is written in Python.
        self._store: dist.Store | None = store
        self._secret = secret
        self._session = ""  # digest of all ranks' random numbers; part of every signature
        self._num_documents = 0  # rounds of JSON messages so far; part of every message's signature

    def close(self) -> None:
        """Close the group's connections, threads and files. A second call does nothing."""
        if self._store is not None:
            self._store = None
            dist.destroy_process_group(self.group)
            del self.group
            # A group in a reference cycle keeps its threads and files until it is collected.
            gc.collect()

    def __enter__(self) -> JointRanks:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def authenticate(self) -> None:
        """Prove to every other rank that this rank knows the secret, and verify the proofs of the other ranks.

        The greetings in the store do not show who is at the other end of a connection, so proofs are sent over each
        connection. Every rank draws a random number. A proof is a signature of the digest of all numbers, so that no
        proof can be replayed. Without a secret, only waits until all ranks are connected: a rank that has its ranks may
        close them, or end with the store that it hosts, which must not fail ranks that still connect.

        Raises:
            PlacementError: if the proof of another rank is wrong.
            CheckpointError: on a rank that received correct proofs, if another rank received a wrong one; if a rank is
                lost.
        """
        if self._secret is None:
            self.wait_for_all("connecting")
            return
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        drawn = secrets.token_bytes(_NONCE_BYTES)
        numbers = {**self._swap(dict.fromkeys(others, drawn)), self.rank: drawn}
        # Sorted: all ranks must hash the numbers in the same order.
        self._session = hashlib.sha256(b"".join(numbers[rank] for rank in sorted(numbers))).hexdigest()
        proofs = {rank: sign(self._secret, self._proof_name(self.rank, rank), b"") for rank in others}
        answers = self._swap(proofs)
        with self.together("checking secrets", "nothing was sent"):
            for rank in others:
                unsign(self._secret, self._proof_name(rank, self.rank), answers[rank])

    def _proof_name(self, rank: int, to_rank: int) -> str:
        """Return the text that a proof signs: with both ranks, so that a proof cannot be sent back or passed on."""
        return f"{rank} to {to_rank} in {self._session}"

    def _swap(self, sent: dict[int, bytes]) -> dict[int, bytes]:
        """Send a message to each rank in ``sent``, and return a message of the same size from each of these ranks."""
        # Copied into bytearrays, since torch warns about read-only memory such as bytes.
        outgoing = {rank: torch.frombuffer(bytearray(data), dtype=torch.uint8) for rank, data in sent.items()}
        received = {rank: torch.empty_like(data) for rank, data in outgoing.items()}
        self.exchange([(outgoing[rank], rank) for rank in sent], [(received[rank], rank) for rank in sent])
        return {rank: data.numpy().tobytes() for rank, data in received.items()}

    def _documents(self, item: Json, doing: str) -> list[Json]:
        """All-gather one JSON value per rank. Counts the rounds, since the number is part of each signature."""
        self._num_documents += 1  # equal on all ranks, which make the same calls
        return super()._documents(item, doing)

    def _seal(self, data: bytes) -> bytes:
        """Sign a message of this rank, if there is a secret."""
        return data if self._secret is None else sign(self._secret, self._message_name(self.rank), data)

    def _open(self, data: bytes, rank: int) -> bytes:
        """Check and remove the signature of a message from ``rank``, if there is a secret."""
        return data if self._secret is None else unsign(self._secret, self._message_name(rank), data)

    def _message_name(self, rank: int) -> str:
        """Return the text that is signed with a message: its round and its sender, in this session."""
        return f"message {self._num_documents} of {rank} in {self._session}"

    def _gathered(self, item: T, doing: str) -> list[T]:
        """All-gather one item per rank."""
        # As JSON: unpickling would let another job run code in this process.
        return cast("list[T]", self._documents(cast("Json", item), doing))


@contextmanager
def _listening_on(interface: str) -> Iterator[None]:
    """Make gloo groups created in the block listen on an interface. torch reads its name only from the environment."""
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if before is None:  # the variable was not set
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before
