"""GroupState: where the parameters of a group are; `vescale_fsdp.runtime.param_group` has the life cycle."""

from __future__ import annotations

from enum import Enum, auto


class GroupState(Enum):
    """Where a group's parameters are."""

    SHARDED = auto()  # entered at construction and by reshard()
    PARTLY_SHARDED = auto()  # entered by reshard(keep_part=True), after a forward only
    GATHERING = auto()  # entered by unshard(): the all-gather is under way
    GATHERED = auto()  # entered by finish_gather(): the full buffer is filled, for the stream that gathers
    UNSHARDED = auto()  # entered by hand_over(): modules read the full buffer

    @property
    def is_sharded(self) -> bool:
        """Whether a gather would have to bring parameters."""
        return self in (GroupState.SHARDED, GroupState.PARTLY_SHARDED)
