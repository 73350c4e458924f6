"""TorchftMembership: torchft's lighthouse decides on the members of each epoch.

Every process is a torchft replica of one rank, whose manager server sends heartbeats. The members are those of
torchft's quorum, which every process requests after each step. torchft can also copy the state of one replica to
another one. This feature and torchft's process groups are not used, since layouts are planned again for the new ranks.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000 &     in its own process
    membership = TorchftMembership("http://node0:29510", num_first=4)

The lighthouse notices a lost process when its heartbeats stop, after ``heartbeat_timeout_ms``.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.stores import (
    BoundedStore,
    bound_store,
    check_exposure,
    local_address,
    secret_of,
    within,
)
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.errors import LifecycleError


class TorchftMembership:
    """A `Membership` that asks torchft's lighthouse (torchft 0.2; ``pip install torchft``).

    Args:
        lighthouse: address of the lighthouse, such as ``http://node0:29510``.
        num_first: number of processes at the start of the job.
        timeout_s: how long to wait for a quorum, and for the first processes.
        host: name or address under which other processes reach this process, which listens on no other address.
            Default: the address from which this machine reaches the lighthouse.
        heartbeat_s: time between two heartbeats; must be well below the lighthouse's ``heartbeat_timeout_ms``.

    Examples:
        >>> def membership() -> TorchftMembership:
        ...     return TorchftMembership("http://lighthouse:29510", num_first=4)
    """

    def __init__(
        self,
        lighthouse: str,
        *,
        num_first: int,
        timeout_s: float = 60.0,
        host: str | None = None,
        heartbeat_s: float = 0.1,
    ) -> None:
        # Imported here, since torchft is an optional dependency.
        from torchft.coordination import ManagerClient, ManagerServer

        if host is None:
            where = urlsplit(lighthouse)
            host = local_address(where.hostname or "127.0.0.1", where.port or 1)  # any port: nothing is sent
        # Beyond this machine a secret is required, although torchft signs nothing: the network must be private.
        check_exposure(host, secret_of(None))
        timeout = timedelta(seconds=timeout_s)
        self._num_first, self._timeout_s = num_first, timeout_s
        self._own_store = bound_store(host, 0, timeout)
        self.name = f"{host}:{self._own_store.port}/{secrets.token_hex(8)}"
        self._server: Any = ManagerServer(
            replica_id=self.name,
            lighthouse_addr=lighthouse,
            hostname=host,
            bind=f"{host}:0",
            store_addr=f"{host}:{self._own_store.port}",
            world_size=1,  # each process is a replica of its own
            heartbeat_interval=timedelta(seconds=heartbeat_s),
            connect_timeout=timeout,
            quorum_retries=0,  # `wait` asks again
        )
        self._client: Any = ManagerClient(self._server.address(), connect_timeout=timeout)
        self._epoch = -1  # no epoch yet
        # Kept in an attribute, since torch keeps no reference to a store that is written in Python.
        self._epoch_store: BoundedStore | None = None
        self._next: Any = None  # a new quorum that `has_changed` has received, for `wait`

    def wait(self) -> Quorum:
        """Ask the lighthouse for the next quorum. Returns when all live processes have asked and are enough."""
        deadline_s = time.monotonic() + self._timeout_s
        quorum, self._next = self._next, None
        # The first epoch needs `num_first` processes: then no replica reports a step. Later, any number may continue.
        while (
            quorum is None
            or quorum.quorum_id == self._epoch
            or (len(quorum.replica_ids) < self._num_first and quorum.max_step == 0)
        ):
            if time.monotonic() > deadline_s:
                raise LifecycleError(
                    "Too few processes joined an epoch.",
                    expected=f"{self._num_first} within {self._timeout_s:g} s",
                    got="none" if quorum is None else f"{len(quorum.replica_ids)}: {quorum.replica_ids[:8]}",
                    where=f"process {self.name}",
                    todo="start more processes, all with the same lighthouse; if they start slowly, pass a longer "
                    "timeout_s",
                )
            # After an epoch, report a failure: otherwise a quorum of the same members would keep its number.
            quorum = self._ask(has_failed=self._epoch >= 0)
        self._epoch = quorum.quorum_id
        host, _, port = quorum.store_address.rpartition(":")  # the last colon: IPv6 addresses contain colons
        store = within(
            self._timeout_s,
            lambda: dist.TCPStore(host, int(port), is_master=False),
            f"{quorum.store_address}, the store of the first process of epoch {self._epoch}",
        )
        self._epoch_store = BoundedStore(store, self._timeout_s)
        prefixed = dist.PrefixStore(f"epoch-{self._epoch}", self._epoch_store)
        return Quorum(self._epoch, tuple(quorum.replica_ids), quorum.replica_rank, prefixed)

    def has_changed(self) -> bool:
        """Return whether the lighthouse has a new quorum, with other members. A collective of all members."""
        quorum = self._ask(has_failed=False)
        self._next = quorum if quorum.quorum_id != self._epoch else None
        return self._next is not None

    def has_lost(self) -> bool:
        """Return False: torchft tells only those who wait for the next quorum."""
        return False

    def leave(self) -> None:
        """Stop the heartbeats, so that the lighthouse counts this process as lost."""
        self._server.shutdown()

    def _ask(self, *, has_failed: bool) -> Any:
        """Return the lighthouse's quorum, when all live processes have asked; with a new number if ``has_failed``."""
        return self._client._quorum(  # private: torchft has no public method for this call
            group_rank=0,  # the only rank of this replica
            step=int(self._epoch >= 0),  # 0 until this process has been in an epoch
            checkpoint_metadata="",  # for torchft's own copies between replicas, which are not used
            shrink_only=False,  # processes may join
            timeout=timedelta(seconds=self._timeout_s),
            init_sync=False,  # weights come from the checkpoint manager
            commit_failures=int(has_failed),  # a failure makes the lighthouse give a new number
        )
