"""Ranks of two jobs that share no process group, as one: they meet at a store, over TCP or in a file.

    trainer, 4 ranks      joint_ranks("tcp://node0:29600", first_rank=0, num_ranks=6)
    engine, 2 ranks       joint_ranks("tcp://node0:29600", first_rank=4, num_ranks=6)

What it gives goes where a process group would: ``describe_states(..., ranks=...)``, ``Transfer(plan, ranks=...)``.

Between jobs go JSON and raw tensors, never pickles. With a secret, entries of the store and JSON messages are signed,
and each pair of ranks proves to each other, over its connection, that both know the secret. Tensors are neither signed
nor encrypted: SECURITY.md.
"""

from __future__ import annotations

import gc
import hmac
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast
from urllib.parse import SplitResult, urlsplit

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.ranks.coordinator import GroupCoordinator
from vescale_fsdp.checkpoint.ranks.trust import (
    SignedStore,
    address_of,
    bound_store,
    check_exposure,
    interface_of,
    local_address,
    secret_of,
    sign,
    unsign,
)
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.torch_private import gloo_group

__all__ = ["joint_ranks"]

T = TypeVar("T")
_NAME = "joint-ranks"  # key of the group's name
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
            not a loopback one and there is no secret; on ranks that meet one with another secret.

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
    store = opened if known is None else SignedStore(opened, known)
    if rank == 0:
        store.set(_NAME, secrets.token_hex(8))  # one that no process has for another group
    name = store.get(_NAME).decode()
    # torch asks for a rank's number in a group by its number in the default group. The other job's ranks have none
    # there, and get numbers that no own rank has.
    own = dist.get_world_size()
    strangers = [*range(first_rank), *range(first_rank + own, num_ranks)]
    numbers = dict(enumerate([*range(first_rank, first_rank + own), *strangers]))
    with _listening_on(interface or interface_of(address)):
        group = gloo_group(rank, numbers, name, timeout, store)
    ranks = JointRanks(group, {own: first_rank + own for own in range(own)}, store, known)
    try:
        ranks.authenticate()
    except BaseException:
        ranks.close()
        raise
    return ranks


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

        Raises:
            PlacementError: if another rank does not know it; CheckpointError on ranks that met nothing.
        """
        if self._secret is None:
            return
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        asked = {rank: secrets.token_bytes(_NONCE_BYTES) for rank in others}
        nonces = self._swap({rank: _bytes_tensor(asked[rank]) for rank in others})
        signed = {rank: sign(self._secret, f"{self.rank} to {rank}", nonces[rank]) for rank in others}
        answers = self._swap({rank: _bytes_tensor(answer) for rank, answer in signed.items()})
        with self.together("proving the secret", "nothing was sent"):
            for rank in others:
                found = unsign(self._secret, f"{rank} to {self.rank}", answers[rank])
                if not hmac.compare_digest(found, asked[rank]):
                    raise PlacementError(
                        "A rank answers what it was not asked.",
                        expected="its nonce",
                        got="another one",
                        where=f"rank {rank}",
                    )

    def _swap(self, sent: dict[int, torch.Tensor]) -> dict[int, bytes]:
        """Send each other rank a message, and get one of the same size from each."""
        received = {rank: torch.empty_like(data) for rank, data in sent.items()}
        self.exchange([(sent[rank], rank) for rank in sent], [(received[rank], rank) for rank in sent])
        return {rank: data.numpy().tobytes() for rank, data in received.items()}

    def _seal(self, data: bytes) -> bytes:
        return data if self._secret is None else sign(self._secret, f"message of {self.rank}", data)

    def _open(self, data: bytes, rank: int) -> bytes:
        return data if self._secret is None else unsign(self._secret, f"message of {rank}", data)

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
    return dist.TCPStore(where.hostname, where.port, is_master=False, wait_for_workers=False, timeout=timeout)


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
