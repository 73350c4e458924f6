"""The exchange of a bucket: cut matrices travel to their owners, orthogonal ones back, in one collective each.

With 2 ranks and matrices a (owner 0), b (owner 1)::

    gather     rank 0 sends  [a's part | b's part] ->  a's parts of both ranks meet on 0, b's on 1
    scatter    rank 0 sends  [a on 0   | a on 1  ] ->  every rank has its part of a and b again

In an HSDP mesh all replicas hold the same, so a matrix is gathered only inside its owner's replica, and its
result goes to every rank of every replica: the iterations are split over replicas as well.

What travels is bf16: Newton-Schulz begins with a cast to bf16 and ends in bf16, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.collectives import Work, all_to_all_into
from vescale_fsdp.dtensor.piece_map import PieceMap
from vescale_fsdp.layout.geometry import FlatRange
from vescale_fsdp.optim.muon.matrices import Matrix
from vescale_fsdp.torch_private import foreach_copy_

WIRE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Ranks:
    """Who takes part: ``numbers[replica][shard]`` is a rank of ``group``; this rank is (replica, shard)."""

    group: dist.ProcessGroup
    numbers: tuple[tuple[int, ...], ...]
    replica: int
    shard: int

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together."""
        return len(self.numbers) * len(self.numbers[0])


class Travel(NamedTuple):
    """A cut matrix: its parameter's index, how that parameter lies, the owner's (replica, shard)."""

    param: int
    matrix: Matrix
    pieces: PieceMap
    owner: tuple[int, int]

    def part(self, shard: int) -> FlatRange:
        """The range of the parameter that a shard rank holds of this matrix."""
        return self.matrix.range.intersect(self.pieces.piece(shard))


class BucketTransfer(NamedTuple):
    """One direction of an exchange for this rank: numels per rank of the group."""

    send_numels: list[int]
    receive_numels: list[int]


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together."""

    ranks: Ranks
    travels: tuple[Travel, ...]

    @cached_property
    def everyone(self) -> tuple[tuple[int, int], ...]:
        """(replica, shard) of all ranks in the order in which the collective lists them."""
        numbers = self.ranks.numbers
        places = ((replica, shard) for replica, row in enumerate(numbers) for shard in range(len(row)))
        return tuple(sorted(places, key=lambda place: numbers[place[0]][place[1]]))

    @cached_property
    def _by_owner(self) -> dict[tuple[int, int], list[Travel]]:
        by_owner: dict[tuple[int, int], list[Travel]] = {place: [] for place in self.everyone}
        for travel in self.travels:
            by_owner[travel.owner].append(travel)
        return by_owner

    @property
    def owned(self) -> list[Travel]:
        """The matrices that this rank orthogonalises."""
        return self._by_owner[self.ranks.replica, self.ranks.shard]

    @cached_property
    def outbound(self) -> list[list[Travel]]:
        """Per rank of the group: the matrices whose parts go there on the way in."""
        return [self._by_owner[r, s] if r == self.ranks.replica else [] for r, s in self.everyone]

    @cached_property
    def inbound(self) -> list[Travel]:
        """The matrices whose parts come here on the way back, in the order of their owners."""
        return [travel for place in self.everyone for travel in self._by_owner[place]]

    @cached_property
    def gather_transfer(self) -> BucketTransfer:
        """Numels on the way to the owners."""
        mine = self.ranks.shard
        sends = [sum(t.part(mine).numel for t in travels) for travels in self.outbound]
        receives = [
            sum(t.part(s).numel for t in self.owned) if r == self.ranks.replica else 0
            for r, s in self.everyone
        ]
        return BucketTransfer(sends, receives)

    @cached_property
    def scatter_transfer(self) -> BucketTransfer:
        """Numels on the way back."""
        mine = self.ranks.shard
        sends = [sum(t.part(s).numel for t in self.owned) for _, s in self.everyone]
        receives = [sum(t.part(mine).numel for t in self._by_owner[place]) for place in self.everyone]
        return BucketTransfer(sends, receives)


class Pending(NamedTuple):
    """A collective on its way. ``sent`` is kept because the collective reads it until it is done."""

    received: torch.Tensor  # 1D [sum(receive_numels)], bf16
    sent: torch.Tensor
    work: Work | None

    def wait(self) -> torch.Tensor:
        """What arrived, in order of the sending ranks."""
        if self.work is not None:
            self.work.wait()
        return self.received


def start_exchange(
    parts: Sequence[torch.Tensor], transfer: BucketTransfer, group: dist.ProcessGroup, device: torch.device
) -> Pending:
    """Pack 1-D parts, in order of their destinations, into one bf16 buffer and start the collective."""
    sent = torch.empty(sum(transfer.send_numels), dtype=WIRE_DTYPE, device=device)
    if parts:
        foreach_copy_(list(sent.split([part.numel() for part in parts])), list(parts))
    received = torch.empty(sum(transfer.receive_numels), dtype=WIRE_DTYPE, device=device)
    work = all_to_all_into(received, sent, transfer.receive_numels, transfer.send_numels, group)
    return Pending(received, sent, work)
