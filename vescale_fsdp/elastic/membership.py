"""Membership: the processes of a job agree on the members of each epoch.

An **epoch** is a time during which the same processes, its **members**, train together in one process group. It ends
when a member is lost or another process wants to join. The live processes then wait for the next epoch, and all get the
same list of members.

    a process        wait() ............. train ......... has_changed()? ...... wait() ........ leave()
    gets             Quorum(0, 4 members)               True: one is lost       Quorum(1, 3 members)

`StoreMembership` implements `Membership` with torch's rendezvous, in a store that all processes can reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist


@dataclass(frozen=True)
class Quorum:
    """The members of an epoch. All members get the same values, except for ``rank``.

    Args:
        epoch: number of the epoch, higher than those of all earlier epochs.
        members: names of the processes, in the order of their ranks. A name begins with an address: ``host:port``.
        rank: the rank of this process.
        store: a store for this epoch only, through which the ranks of its process groups connect.

    Examples:
        >>> quorum = Quorum(epoch=2, members=("node0:7/a", "node0:4/b"), rank=1, store=dist.HashStore())
        >>> len(quorum.members), quorum.num_nodes
        (2, 1)
    """

    epoch: int
    members: tuple[str, ...]
    rank: int
    store: dist.Store

    @property
    def hosts(self) -> tuple[str, ...]:
        """The address of each member's machine, in the order of their ranks."""
        return tuple(name.partition("/")[0].rpartition(":")[0] for name in self.members)

    @property
    def num_nodes(self) -> int:
        """The number of machines: of addresses under which processes reach each other."""
        return len(set(self.hosts))


class Membership(Protocol):
    """How a process agrees with other processes on the members of an epoch.

    When a member is lost in an epoch, it ends the waits of gloo in this process, and of the epoch's store.

    Examples:
        >>> def rank_in_next_epoch(membership: Membership) -> int:
        ...     return membership.wait().rank
    """

    def wait(self) -> Quorum:
        """Wait for the next epoch. Returns its members, when all of them agree.

        Raises:
            LifecycleError: if too few processes join in time.
        """

    def has_changed(self) -> bool:
        """Return whether this epoch must end, since a process waits for the next one. Called after each step."""

    def end_epoch(self) -> None:
        """Stop ending the waits of gloo. Called before this process destroys the groups of its epoch."""

    def leave(self) -> None:
        """Leave the job, so that no other process waits for this process."""
