"""Check that collectives deliver what ranks have sent, by byte sums (`fully_shard(check_collectives=N)`).

    all-gather     the sums of all ranks' slices, as they are before the gather, add up to those of the gathered buffer
    all-reduce     replicas have equal sums of the reduced shard

A check of a gather takes all-reduces of 16 and 8 bytes, and one pass over the slice and the gathered buffer; that of an
all-reduce takes all-reduces of 64 and 8 bytes, and one pass over the shard. With replicas, each takes one more of 8
bytes over the other axis, so that all ranks raise the same error. The host waits for the result. Padding is compared
too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale_fsdp.byte_sums import run_sums
from vescale_fsdp.collectives.operations import all_reduce_at_once, all_reduce_in_place
from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.errors import CollectiveError

_HALF = (1 << 32) - 1  # a number and its negative then fit an int64


class GatherCheck:
    """Checks one gather.

    Args:
        group: the ranks that gather.
        all_groups: groups that together connect all ranks of the mesh, and of which the first contains ``group``.
        rank: this rank's index among them; its slice is number ``rank`` of equal slices.
    """

    def __init__(self, group: dist.ProcessGroup, all_groups: Sequence[dist.ProcessGroup], rank: int) -> None:
        self._group, self._all_groups, self._rank = group, all_groups, rank
        self._full: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._arrival: Work | None = None

    def begin(self, full: torch.Tensor, own: torch.Tensor) -> None:
        """Compute the sums of this rank's slice, and start to add up those of all ranks. Called before the gather."""
        raw = own.view(torch.uint8)
        self._full = full
        self._sums = run_sums(raw, self._rank * raw.numel())
        self._arrival = all_reduce_in_place(self._sums, dist.ReduceOp.SUM, self._group)

    def finish(self, label: str) -> None:
        """Compare the gathered buffer with the sums; a collective. The gather must have ended.

        Raises:
            CollectiveError: on all ranks, if any rank has another buffer.
        """
        assert self._full is not None and self._sums is not None
        wait_for(self._arrival)
        differs = (run_sums(self._full.view(torch.uint8)) != self._sums).any()
        _raise_together(
            differs, self._all_groups, label, "all-gather of parameters", "the slices that ranks have sent"
        )


def check_replicas(shard: torch.Tensor, all_groups: Sequence[dist.ProcessGroup], label: str) -> None:
    """Check that all ranks of a group have equal bits; a collective.

    Args:
        all_groups: groups that together connect all ranks of the mesh; the first one has the replicas.

    Raises:
        CollectiveError: on all ranks, if any rank has other bits than another one.
    """
    sums = run_sums(shard.view(torch.uint8))
    halves = torch.cat([sums & _HALF, (sums >> 32) & _HALF])
    largest = torch.cat([halves, -halves])
    all_reduce_at_once(largest, dist.ReduceOp.MAX, all_groups[0])
    # Which replica is wrong is unknown: the one with the smaller sums is named.
    differs = (largest[:4] != -largest[4:]).any() & (halves != largest[:4]).any()
    _raise_together(
        differs, all_groups, label, "all-reduce of gradients over replicas", "equal bits on all replicas"
    )


def _raise_together(
    differs: torch.Tensor, groups: Sequence[dist.ProcessGroup], label: str, direction: str, expected: str
) -> None:
    """Raise on all ranks if ``differs`` is true on any."""
    rank = dist.get_rank()
    worst = (differs.to(torch.int64) * (rank + 1)).view(1)
    for group in groups:  # one axis after the other
        all_reduce_at_once(worst, dist.ReduceOp.MAX, group)
    found = int(worst)
    if found:
        raise CollectiveError(
            f"A collective has delivered other bits than were sent: {direction}.",
            expected=expected,
            got="other byte sums",
            where=f"unit {label}, rank {found - 1}",
            todo="restart from a checkpoint without this rank's node, and test the memory and links of the node",
        )
