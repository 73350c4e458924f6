"""Membership: the processes of a job agree on the members of each epoch.

An **epoch** is a time during which the same processes train together, in one process group. It ends when a member is
lost or another process wants to join. The processes that live then wait for the next epoch, and all get the same
members.

    a process        wait() ............. train ......... has_changed()? ...... wait() ........ leave()
    gets             Quorum(0, 4 members)               True: one is lost       Quorum(1, 3 members)

Implementations of `Membership`: a store that all processes reach (`StoreMembership`), and torchft's lighthouse
(`TorchftMembership`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist


@dataclass(frozen=True)
class Quorum:
    """The members of an epoch; the same in all of them except ``rank``.

    Args:
        epoch: number of the epoch, higher than those of all earlier epochs.
        members: names of the processes, in the order of their ranks.
        rank: of this process.
        store: a store for this epoch only, through which its process groups connect.

    Examples:
        >>> quorum = Quorum(epoch=2, members=("node0/7", "node1/4"), rank=1, store=dist.HashStore())
        >>> len(quorum.members)
        2
    """

    epoch: int
    members: tuple[str, ...]
    rank: int
    store: dist.Store


class Membership(Protocol):
    """How a process agrees with other processes on the members of an epoch.

    Examples:
        >>> def rank_in_next_epoch(membership: Membership) -> int:
        ...     return membership.wait().rank
    """

    def wait(self) -> Quorum:
        """Ask for the next epoch; returns when its members agree.

        Raises:
            LifecycleError: if too few processes come in time.
        """

    def has_changed(self) -> bool:
        """Whether other processes wait for the next epoch, so that this one must end. Called by all after each step."""

    def leave(self) -> None:
        """Leave the job: no process waits for this one any more."""
