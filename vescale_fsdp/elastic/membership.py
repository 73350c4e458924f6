"""Membership: who takes part in a job, agreed on epoch by epoch.

An **epoch** is a time during which the same processes train together, in one process group. It ends when one of them is
lost or another one wants to join; those that live then wait for the next one, and are told the same.

    a process        wait() ............. train ......... has_changed()? ...... wait() ........ leave()
    gets             Quorum(0, 4 members)               True: one is lost       Quorum(1, 3 members)

Who decides is behind `Membership`: a store that all can reach (`StoreMembership`), or torchft's lighthouse
(`TorchftMembership`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist


@dataclass(frozen=True)
class Quorum:
    """Who takes part in an epoch; the same for all of them but ``rank``.

    Args:
        epoch: its number, higher than that of any epoch before.
        members: names, in the order of their ranks.
        rank: of this process.
        store: for this epoch alone, where its process groups meet.

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
    """How a process learns who takes part with it.

    Examples:
        >>> def take_part(membership: Membership) -> int:
        ...     return membership.wait().rank
    """

    def wait(self) -> Quorum:
        """Ask for the next epoch, and return when those who take part in it agree.

        Raises:
            LifecycleError: if too few have come in time.
        """

    def has_changed(self) -> bool:
        """Whether the epoch is to end because others are waiting for the next one. Asked between two steps, by all."""

    def leave(self) -> None:
        """Take part no more: nobody waits for this process from now on."""
