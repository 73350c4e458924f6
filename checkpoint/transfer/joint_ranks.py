"""Ranks of two jobs that share no process group, as one: they meet at a store, over TCP or in a file.

    trainer, 4 ranks      joint_ranks("tcp://node0:29600", first_rank=0, num_ranks=6)
    engine, 2 ranks       joint_ranks("tcp://node0:29600", first_rank=4, num_ranks=6)

What it gives goes where a process group would: ``describe_states(..., ranks=...)``, ``Transfer(plan, ranks=...)``.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, GroupCoordinator
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.torch_private import gloo_group

__all__ = ["joint_ranks"]

_NAME = "joint-ranks"  # key of the group's name


def joint_ranks(
    rendezvous: str | dist.Store, *, first_rank: int, num_ranks: int, timeout_s: float = 600.0
) -> Coordinator:
    """The ranks of several jobs together. All of them call this, each job with its own ``first_rank``.

    Args:
        rendezvous: ``tcp://host:port``, of the host of the first rank of all; ``file:///path``, of a file that does
            not exist yet, on storage that all share; or a store of torch's. New for each meeting.
        first_rank: number of the job's rank 0 among all; its other ranks follow.
        num_ranks: of all jobs.
        timeout_s: how long ranks wait for each other, here and later.

    Raises:
        PlacementError: if this job's ranks are not among so many, or it has no default process group.

    Examples:
        >>> ranks = joint_ranks(dist.HashStore(), first_rank=0, num_ranks=1)
        >>> ranks.rank, ranks.world_size
        (0, 1)
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
    store = _store(rendezvous, rank, num_ranks, timeout) if isinstance(rendezvous, str) else rendezvous
    if rank == 0:
        store.set(_NAME, secrets.token_hex(8))  # one that no process has for another group
    name = store.get(_NAME).decode()
    # torch asks for a rank's number in a group by its number in the default group. The other job's ranks have none
    # there, and get numbers that no own rank has.
    own = dist.get_world_size()
    strangers = [*range(first_rank), *range(first_rank + own, num_ranks)]
    numbers = dict(enumerate([*range(first_rank, first_rank + own), *strangers]))
    group = gloo_group(rank, numbers, name, timeout, store)
    rank_of = {own: first_rank + own for own in range(dist.get_world_size())}
    return GroupCoordinator(group, rank_of)


def _store(rendezvous: str, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    where = urlsplit(rendezvous)
    if where.scheme == "file":
        return dist.FileStore(where.path, num_ranks)
    if where.scheme == "tcp" and where.hostname and where.port:
        return dist.TCPStore(
            where.hostname, where.port, is_master=rank == 0, wait_for_workers=False, timeout=timeout
        )
    raise PlacementError("Nobody can meet there.", expected="tcp://host:port or file:///path", got=rendezvous)
