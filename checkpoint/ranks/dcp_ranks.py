"""Check that DCP works with the ranks that its storage was made for.

DCP does not pass its process group to a storage. It passes its rank to each rank and one plan per rank to the
coordinator. These show all the ways in which a rank could wait for ranks that never come:

    RaggedWriter(path), dcp.save(no_dist=True) on one rank      one plan: that rank alone
    RaggedWriter(path, no_dist=True), dcp.save on all ranks     refused
    two process groups                                          refused
    use_collectives=False                                       refused: looks like no_dist=True, and is not
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.coordinator import (
    Coordinator,
    SoloCoordinator,
    coordinator_for,
    solo_coordinator,
)
from vescale_fsdp.errors import CheckpointError

_GROUP_USE = "dcp"  # DCP saves in its own thread, concurrently with our saves and loads


class DcpRanks:
    """The ranks of one storage.

    Args:
        process_group: as passed to DCP; default: all ranks.
        no_dist: this rank alone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
        self._process_group = process_group
        self._alone = self._no_dist = no_dist
        self.coordinator()  # makes the gloo group now, while all ranks are here

    def coordinator(self) -> Coordinator:
        """The coordinator of the storage's ranks."""
        return solo_coordinator() if self._alone else coordinator_for(self._process_group, use=_GROUP_USE)

    def meet(self, is_coordinator: bool, options: Mapping[str, Any]) -> None:
        """Check DCP's rank; ``options`` are the keyword arguments of its set-up call.

        Raises:
            CheckpointError: if DCP works with other ranks, or without any collectives.
        """
        self._alone = self._no_dist
        ours = self.coordinator()
        if not options.get("use_collectives", True) and not isinstance(ours, SoloCoordinator):
            raise CheckpointError(
                "Ranks that save one checkpoint need collectives.",
                expected="use_collectives=True: with RaggedSavePlanner no plan is gathered anyway",
                got="use_collectives=False",
                todo="leave it out; to save this rank alone, make the writer with no_dist=True too",
            )
        # The coordinator has rank 0 also where it is alone: only the number of plans shows that, see `count`.
        if not is_coordinator and options.get("rank") != ours.rank:
            raise _other_ranks(f"rank {ours.rank} of {ours.world_size}", f"rank {options.get('rank')}")

    def count(self, num_plans: int) -> None:
        """On DCP's coordinator: check the number of ranks.

        Raises:
            CheckpointError: if it differs from the storage's.
        """
        ours = self.coordinator()
        self._alone = num_plans == 1
        if not self._alone and (ours.rank, ours.world_size) != (0, num_plans):
            raise _other_ranks(f"rank {ours.rank} of {ours.world_size}", f"rank 0 of {num_plans}")


def _other_ranks(ours: str, theirs: str) -> CheckpointError:
    return CheckpointError(
        "DCP and its storage were given different ranks.",
        expected=f"{ours}, as RaggedWriter or RaggedReader was made",
        got=f"{theirs}, as dcp.save or dcp.load was called",
        todo="pass the same process_group and the same no_dist to both",
    )


def wrong_partner(planner: str, partner: str) -> CheckpointError:
    """The error of a planner that is used with another storage than ours."""
    return CheckpointError(
        f"{planner} works only with {partner}.",
        expected=partner,
        got="another storage",
        todo=f"pass a {partner}(path)",
    )
