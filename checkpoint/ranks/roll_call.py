"""Which ranks have not come to a meeting: named within seconds, although the meeting itself goes on waiting.

A rank may be late for a good reason, such as an evaluation on rank 0 before a save. No other rank can tell that from a
call that only some ranks make (``if rank == 0: save(..)``). So waiting ends with the process group's time-out and not
before, and a user who wants an earlier error passes a group with a shorter one. Each rank that has waited for a while
notes in the process group's store that it is there; one rank then reads the notes and warns of those that are missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from vescale_fsdp.errors import CheckpointError

_PATIENCE_S = 5.0  # without a word
_NOTES_S = 2.0  # until ranks that came at about the same time have noted it too
_POLL_S = 0.02
_CAUSE = (
    "save, load, async_save and a manager's calls are collectives: every rank of the group must make them. Take this "
    "call out of a condition such as `if rank == 0:`"
)
_log = logging.getLogger(__name__)


class RollCall:
    """The meetings of one group.

    Args:
        store: that all of its ranks reach.
        name: of the group, the same on all of them.
        rank, world_size: of this rank in the group.
        timeout: of the group.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, world_size: int, timeout: timedelta | None
    ) -> None:
        self._store, self._name = store, f"vescale_fsdp roll call {name}"
        self._rank, self._world_size = rank, world_size
        self._timeout_s = float("inf") if timeout is None else timeout.total_seconds()
        self._num_meetings = 0

    def gather(self, doing: str) -> None:
        """Return when all ranks have come here.

        Raises:
            CheckpointError: when the group's time-out is over; names those that have not.
        """
        key = self._next()
        self._store.add(f"{key} count", 1)

        def arrived(patience_s: float) -> bool:
            end_s = time.monotonic() + patience_s
            while self._store.add(f"{key} count", 0) < self._world_size:
                if time.monotonic() > end_s:
                    return False
                time.sleep(_POLL_S)
            return True

        start_s = time.monotonic()
        if self._watch(key, arrived, doing):
            return
        if not arrived(max(0.0, start_s + self._timeout_s - time.monotonic())):
            raise self.absence(key, doing) or CheckpointError(
                "Ranks have not come.", expected=f"all {self._world_size}", got=f"not all, while {doing}"
            )

    def meet(self, work: dist.Work, doing: str) -> None:
        """Wait for a collective that every rank comes to.

        Raises:
            RuntimeError: what the collective raises.
            CheckpointError: in its place where ranks are known not to have come; names them.
        """

        def arrived(patience_s: float) -> bool:
            try:
                work.wait(timedelta(seconds=patience_s))
            except RuntimeError:
                if work.is_completed():
                    raise  # more than this wait has ended
                return False
            return True

        key = self._next()
        if self._watch(key, arrived, doing):
            return
        try:
            work.wait()
        except RuntimeError as error:
            absence = self.absence(key, doing)
            if absence is None:
                raise
            raise absence from error

    def skip(self) -> None:
        """A meeting of the group that is not watched."""
        self._next()

    def _next(self) -> str:
        self._num_meetings += 1
        return f"{self._name} {self._num_meetings}"

    def _watch(self, key: str, arrived: Callable[[float], bool], doing: str) -> bool:
        """Whether all came within a few seconds; if not, this rank is noted, and the first noted rank warns."""
        if arrived(_PATIENCE_S):
            return True
        try:
            self._store.set(f"{key} {self._rank}", "")
            is_first = self._store.add(f"{key} waiting", 1) == 1
        except RuntimeError as error:
            _log.warning("%s: ranks are missing; the store that would tell which is gone: %s", doing, error)
            return False
        if arrived(_NOTES_S):
            return True
        missing = self._missing(key)
        if is_first and missing:
            _log.warning(
                "rank %d has waited %.0f s for ranks %s, which have not come (%s). %s. It goes on waiting for "
                "%.0f s, the process group's time-out",
                self._rank,
                _PATIENCE_S + _NOTES_S,
                missing[:16],
                doing,
                _CAUSE,
                self._timeout_s,
            )
        return False

    def _missing(self, key: str) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([f"{key} {rank}"])]

    def absence(self, key: str, doing: str) -> CheckpointError | None:
        """The error that names ranks that have not come; None if that is not known."""
        try:
            missing = self._missing(key)
        except RuntimeError:  # the store is gone as well
            return None
        if not 0 < len(missing) < self._world_size:
            return None
        return CheckpointError(
            f"{len(missing)} of {self._world_size} ranks have not come.",
            expected=f"all {self._world_size} ranks to make this call",
            got=f"nothing of ranks {missing[:16]} within the process group's time-out, {self._timeout_s:g} s",
            where=f"rank {self._rank}, {doing}",
            todo=_CAUSE,
        )
