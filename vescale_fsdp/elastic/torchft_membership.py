"""TorchftMembership: torchft's lighthouse says who takes part.

Every process is a replica of one rank: torchft's manager server beats for it, and its quorum, asked for between all
steps, tells who is there. What torchft does besides (its process groups, healing one replica from another) is not used:
here the layouts are planned anew.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000 &     no rank runs it
    membership = TorchftMembership("http://node0:29510", num_first=4)

The lighthouse finds a lost process by its heartbeats, so detection takes ``heartbeat_timeout_ms``.
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

_POLL_S = 0.1


class TorchftMembership:
    """Who takes part, by the word of torchft's lighthouse (torchft 0.2; ``pip install torchft``).

    Args:
        lighthouse: its address.
        num_first: processes that the job begins with.
        timeout_s: how long to wait for a quorum, and for the first processes to come.
        host: the name or address under which others reach this machine, and the one that is listened on; default: that
            by which it reaches the lighthouse.
        heartbeat_s: time between two heartbeats; well below the lighthouse's ``heartbeat_timeout_ms``.

    Examples:
        >>> def take_part() -> TorchftMembership:
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
        from torchft.coordination import ManagerClient, ManagerServer

        found = urlsplit(lighthouse)
        if host is None:
            host = local_address(found.hostname or "127.0.0.1", found.port or 1)
        check_exposure(host, secret_of(None))  # torchft itself signs nothing: its network must be private
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
            world_size=1,
            heartbeat_interval=timedelta(seconds=heartbeat_s),
            connect_timeout=timeout,
            quorum_retries=0,
        )
        self._client: Any = ManagerClient(self._server.address(), connect_timeout=timeout)
        self._epoch = -1
        self._epoch_store: BoundedStore | None = None  # torch keeps no reference to what is written in Python
        self._next: Any = None  # a quorum that `has_changed` was told of, for `wait`

    def wait(self) -> Quorum:
        """Ask the lighthouse; returns when all that live have asked, and are as many as the job begins with."""
        deadline_s = time.monotonic() + self._timeout_s
        found, self._next = self._next, None
        while found is None or found.quorum_id == self._epoch or not self._is_enough(found):
            if time.monotonic() > deadline_s:
                raise LifecycleError(
                    "Too few processes have come for an epoch.",
                    expected=f"{self._num_first} within {self._timeout_s:g} s",
                    got="none" if found is None else f"{len(found.replica_ids)}: {found.replica_ids[:8]}",
                    where=f"process {self.name}",
                    todo="start more, all with the same lighthouse; where starting takes longer, pass timeout_s=",
                )
            found = self._asked(has_failed=self._epoch >= 0)
        self._epoch = found.quorum_id
        host, _, port = found.store_address.rpartition(":")
        met_at = within(
            self._timeout_s,
            lambda: dist.TCPStore(host, int(port), is_master=False),
            f"{found.store_address}, of the first process of epoch {self._epoch}",
        )
        self._epoch_store = BoundedStore(met_at, self._timeout_s)
        store = dist.PrefixStore(f"epoch-{self._epoch}", self._epoch_store)
        return Quorum(self._epoch, tuple(found.replica_ids), found.replica_rank, store)

    def has_changed(self) -> bool:
        """Whether the lighthouse counts others than before; asked together with all of them."""
        found = self._asked(has_failed=False)
        self._next = found if found.quorum_id != self._epoch else None
        return self._next is not None

    def leave(self) -> None:
        """End the heartbeats."""
        self._server.shutdown()

    def _asked(self, *, has_failed: bool) -> Any:
        """The lighthouse's quorum, once all that live have asked for it; after a failure it has a new number."""
        return self._client._quorum(  # as torchft's own manager asks: it has no other name
            group_rank=0,
            step=int(self._epoch >= 0),
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=self._timeout_s),
            init_sync=False,
            commit_failures=int(has_failed),
        )

    def _is_enough(self, found: Any) -> bool:
        """Whether there are as many as are to begin, or some that have begun."""
        return len(found.replica_ids) >= self._num_first or found.max_step > 0
