"""Ranks of two jobs that share no process group, as one: they meet at a store, over TCP or in a file.

    trainer, 4 ranks      joint_ranks("tcp://node0:29600", first_rank=0, num_ranks=6)
    engine, 2 ranks       joint_ranks("tcp://node0:29600", first_rank=4, num_ranks=6)

What it gives goes where a process group would: ``describe_states(..., ranks=...)``, ``Transfer(plan, ranks=...)``.

    store        each rank enters a greeting; all wait for those of all others, and refuse those of another secret
    connections  gloo's, between each two ranks
    proof        each rank signs what all have drawn for this meeting, for each other rank

Between jobs go JSON and raw tensors, never pickles. With a secret, entries of the store and JSON messages are signed,
the latter with what was drawn for this meeting and a number, so that none can be repeated. Tensors are neither signed
nor encrypted: SECURITY.md.
"""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast
from urllib.parse import SplitResult, urlsplit

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
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.torch_private import gloo_group

T = TypeVar("T")
_NAME = "joint-ranks"  # key of the group's name, and what keys of greetings begin with
_REFUSED = f"{_NAME} refused"
_GREETING = b"here"
_POLL_S = 0.02
_READERS_S = 5.0
_NONCE_BYTES = 32
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
    """The ranks of several jobs together. All of them call this, each job with its own ``first_rank``.

    Args:
        rendezvous: ``tcp://host:port``, of the host of the first rank of all; ``file:///path``, of a file that does
            not exist yet, on storage that all share; or a store of torch's. New for each meeting.
        first_rank: number of the job's rank 0 among all; its other ranks follow.
        num_ranks: of all jobs.
        timeout_s: how long ranks wait for each other, here and later.
        interface: the network interface to listen on; default: the one by which this machine reaches ``rendezvous``,
            for a file or a store that of ``GLOO_SOCKET_IFNAME``, else the loopback one.
        secret: the same in all jobs; default: that of the environment, VESCALE_FSDP_SECRET. Without one, only processes
            of this machine can meet.

    Raises:
        PlacementError: if this job's ranks are not among so many, it has no default process group, or the interface is
            not a loopback one and there is no secret; on all ranks, if they do not have the same secret.
        CheckpointError: if ranks do not come in time, or are lost meanwhile; names those that have not come.

    Examples:
        >>> ranks = joint_ranks(dist.HashStore(), first_rank=0, num_ranks=1)
        >>> ranks.rank, ranks.world_size
        (0, 1)
        >>> ranks.close()
    """
    if not dist.is_initialized():
        raise PlacementError(
            "This job has no process group.",
            expected="torch.distributed.init_process_group(...) before, in a job of one process too",
            got="none",
        )
    if not 0 <= first_rank <= first_rank + dist.get_world_size() <= num_ranks:
        raise PlacementError(
            "The ranks of this job are not among those of all jobs.",
            expected=f"{dist.get_world_size()} ranks below {num_ranks}",
            got=f"ranks from {first_rank} on",
            todo="pass the same num_ranks in all jobs, and as first_rank the ranks of the jobs before",
        )
    rank, timeout = first_rank + dist.get_rank(), timedelta(seconds=timeout_s)
    known = secret_of(secret)
    where = _address(rendezvous)
    address = address_of(interface) if interface else _own_address(where)
    check_exposure(address, known)
    opened = _store(where, rank, num_ranks, timeout) if isinstance(where, SplitResult) else where
    bounded = BoundedStore(opened, timeout_s)
    store = bounded if known is None else SignedStore(bounded, known)
    if rank == 0:
        store.set(_NAME, secrets.token_hex(8))  # one that no process has for another group
    try:
        _greet(bounded, rank, num_ranks, timeout_s, known)
    except PlacementError:
        _wait_for_readers(bounded, rank, num_ranks)
        raise
    name = store.get(_NAME).decode()
    # torch asks for a rank's number in a group by its number in the default group. The other job's ranks have none
    # there, and get numbers that no own rank has.
    own = dist.get_world_size()
    strangers = [*range(first_rank), *range(first_rank + own, num_ranks)]
    numbers = dict(enumerate([*range(first_rank, first_rank + own), *strangers]))
    try:
        with _listening_on(interface or interface_of(address)):
            group = gloo_group(rank, numbers, name, timeout, store)
    except RuntimeError as lost:
        raise CheckpointError(
            "A rank was lost while all were connecting.",
            expected=f"connections between {num_ranks} ranks, all of which had come",
            got=f"{type(lost).__name__}: {lost}",
            where=f"rank {rank}",
            todo="see which process has ended; meet again at a new place",
        ) from lost
    ranks = JointRanks(group, {own: first_rank + own for own in range(own)}, store, known)
    try:
        ranks.authenticate()
    except BaseException:
        ranks.close()
        raise
    return ranks


def _greet(store: BoundedStore, rank: int, num_ranks: int, timeout_s: float, secret: bytes | None) -> None:
    """Wait until all ranks have come, with the same secret or all without one.

    Raises:
        PlacementError: on all ranks, as soon as one has met a rank of another secret.
        CheckpointError: if ranks do not come in time; names them.
    """
    store.set(_greeting_key(rank), sign(secret or b"", _greeting_key(rank), _GREETING))
    missing = set(range(num_ranks)) - {rank}
    deadline_s = time.monotonic() + timeout_s
    while missing:
        if store.check([_REFUSED]):
            raise _unlike_secrets(rank, store.get(_REFUSED).decode(errors="replace"))
        for other in [other for other in missing if store.check([_greeting_key(other)])]:
            try:
                unsign(secret or b"", _greeting_key(other), store.get(_greeting_key(other)))
            except PlacementError as error:
                refused = f"ranks {min(rank, other)} and {max(rank, other)}"
                store.set(_REFUSED, refused)
                raise _unlike_secrets(rank, refused) from error
            missing.discard(other)
        if missing and time.monotonic() > deadline_s:
            raise CheckpointError(
                "Ranks have not come to a meeting.",
                expected=f"all {num_ranks} within {timeout_s:g} s",
                got=f"nothing of ranks {sorted(missing)[:16]}",
                where=f"rank {rank}",
                todo="look at those; pass the same rendezvous and num_ranks in all jobs, or a longer timeout_s",
            )
        time.sleep(_POLL_S if missing else 0)


def _wait_for_readers(store: dist.Store, rank: int, num_ranks: int) -> None:
    """Let other ranks read why a meeting has ended: the store may go with rank 0."""
    deadline_s = time.monotonic() + _READERS_S
    num_readers = store.add(f"{_REFUSED} read", 1)
    while rank == 0 and num_readers < num_ranks and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        num_readers = store.add(f"{_REFUSED} read", 0)


def _greeting_key(rank: int) -> str:
    return f"{_NAME} {rank}"


def _unlike_secrets(rank: int, refused: str) -> PlacementError:
    return PlacementError(
        "Ranks of jobs that meet have different secrets, or some have none.",
        expected="the same secret on all ranks, or none on any",
        got=f"{refused} do not have the same",
        where=f"rank {rank}",
        todo=f"set the same {SECRET} in the environment of every process, or pass secret=...",
    )


class JointRanks(GroupCoordinator):
    """The ranks of several jobs, as `joint_ranks` gives them. A context manager that closes them.

    Examples:
        >>> with joint_ranks(dist.HashStore(), first_rank=0, num_ranks=1) as ranks:
        ...     ranks.world_size
        1
    """

    def __init__(
        self, group: dist.ProcessGroup, rank_of: dict[int, int], store: dist.Store, secret: bytes | None
    ) -> None:
        super().__init__(group, rank_of)
        self._store: dist.Store | None = store  # torch keeps no reference to what is written in Python
        self._secret = secret
        self._session, self._num_documents = "", 0

    def close(self) -> None:
        """Leave the other ranks: connections, threads and files go. A second call does nothing."""
        if self._store is not None:
            self._store = None
            dist.destroy_process_group(self.group)
            del self.group
            gc.collect()  # a group's threads and files go with the last reference

    def __enter__(self) -> JointRanks:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def authenticate(self) -> None:
        """Prove to every other rank, over its own connection, that this one knows the secret, and have it proven.

        All draw a number; what they sign is the digest of all numbers, so that it is new for each of them.

        Raises:
            PlacementError: if another rank does not know it; CheckpointError on ranks that met nothing.
        """
        if self._secret is None:
            return
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        drawn = secrets.token_bytes(_NONCE_BYTES)
        numbers = {**self._swap(dict.fromkeys(others, drawn)), self.rank: drawn}
        self._session = hashlib.sha256(b"".join(numbers[rank] for rank in sorted(numbers))).hexdigest()
        proofs = {rank: sign(self._secret, self._proof_name(self.rank, rank), b"") for rank in others}
        answers = self._swap(proofs)
        with self.together("proving the secret", "nothing was sent"):
            for rank in others:
                unsign(self._secret, self._proof_name(rank, self.rank), answers[rank])

    def _proof_name(self, rank: int, to_rank: int) -> str:
        return f"{rank} to {to_rank} in {self._session}"

    def _swap(self, sent: dict[int, bytes]) -> dict[int, bytes]:
        """Send each other rank a message, and get one of the same size from each."""
        outgoing = {rank: _bytes_tensor(data) for rank, data in sent.items()}
        received = {rank: torch.empty_like(data) for rank, data in outgoing.items()}
        self.exchange([(outgoing[rank], rank) for rank in sent], [(received[rank], rank) for rank in sent])
        return {rank: data.numpy().tobytes() for rank, data in received.items()}

    def _documents(self, item: Json, doing: str) -> list[Json]:
        self._num_documents += 1  # on all ranks alike
        return super()._documents(item, doing)

    def _seal(self, data: bytes) -> bytes:
        return data if self._secret is None else sign(self._secret, self._message_name(self.rank), data)

    def _open(self, data: bytes, rank: int) -> bytes:
        return data if self._secret is None else unsign(self._secret, self._message_name(rank), data)

    def _message_name(self, rank: int) -> str:
        return f"message {self._num_documents} of {rank} in {self._session}"

    def _gathered(self, item: T, doing: str) -> list[T]:
        return cast("list[T]", self._documents(cast("Json", item), doing))


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _address(rendezvous: str | dist.Store) -> SplitResult | dist.Store:
    if not isinstance(rendezvous, str):
        return rendezvous
    where = urlsplit(rendezvous)
    if where.scheme == "file" or (where.scheme == "tcp" and where.hostname and where.port):
        return where
    raise PlacementError(
        "This is no place to meet.", expected="tcp://host:port or file:///path", got=rendezvous
    )


def _own_address(where: SplitResult | dist.Store) -> str:
    """The address under which other ranks reach this one."""
    if isinstance(where, SplitResult) and where.hostname and where.port:
        return local_address(where.hostname, where.port)
    wanted = os.environ.get(_INTERFACE)
    return address_of(wanted) if wanted else "127.0.0.1"


def _store(where: SplitResult, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    if where.scheme == "file":
        return dist.FileStore(where.path, num_ranks)
    assert where.hostname is not None and where.port is not None
    if rank == 0:
        return bound_store(where.hostname, where.port, timeout)
    host, port = where.hostname, where.port
    return within(
        timeout.total_seconds(),
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
        f"rank {rank}, at {where.geturl()}",
    )


@contextmanager
def _listening_on(interface: str) -> Iterator[None]:
    """Have gloo's groups listen on an interface; torch takes it from the environment alone."""
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before
