"""Warn within seconds about ranks that are missing from a collective, while the collective keeps waiting.

A rank may be late for a good reason, such as an evaluation on rank 0 before a save. Other ranks cannot distinguish a
late rank from a rank that never makes the call (``if rank == 0: save(..)``). The wait therefore ends only with the
process group's time-out; for an earlier error, pass a group with a shorter time-out. Each rank that has waited for some
seconds registers in the process group's store; one rank then reads the entries and warns about the missing ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from vescale_fsdp.errors import CheckpointError

_PATIENCE_S = 5.0  # wait before a rank registers as waiting
_NOTES_S = 2.0  # wait between registration and warning, so that slightly later ranks have registered too
_POLL_S = 0.02  # between two reads of the counter in the store
_CAUSE = (
    "save, load, async_save and a manager's calls are collectives: every rank of the group must make them. Take this "
    "call out of a condition such as `if rank == 0:`. If they made it, they have ended or cannot be reached: look at "
    "their logs, machines and network"
)
_log = logging.getLogger(__name__)


class RollCall:
    """Watches the collectives of one group, and names the ranks that are missing from them.

    Args:
        store: a store that all ranks of the group can reach.
        name: a name of the group, the same on all ranks.
        rank, world_size: this rank in the group, and the group's size.
        timeout: the group's time-out; None for no limit.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, world_size: int, timeout: timedelta | None
    ) -> None:
        self._store, self._name = store, f"vescale_fsdp roll call {name}"
        self._rank, self._world_size = rank, world_size
        self._timeout_s = float("inf") if timeout is None else timeout.total_seconds()
        self._num_meetings = 0

    def gather(self, doing: str) -> None:
        """Wait until all ranks have made this call.

        Raises:
            CheckpointError: after the group's time-out; names the missing ranks.
        """
        key = self._next()
        self._store.add(f"{key} count", 1)

        def arrived(patience_s: float) -> bool:
            end_s = time.monotonic() + patience_s
            while self._store.add(f"{key} count", 0) < self._world_size:  # adding 0 reads the counter
                if time.monotonic() > end_s:
                    return False
                time.sleep(_POLL_S)
            return True

        start_s = time.monotonic()
        if self._watch(key, arrived, doing):
            return
        if not arrived(max(0.0, start_s + self._timeout_s - time.monotonic())):
            raise self.absence(key, doing) or CheckpointError(
                "Ranks have not made this call.",
                expected=f"all {self._world_size} ranks",
                got=f"fewer, while {doing}",
            )

    def meet(self, work: dist.Work, doing: str) -> None:
        """Wait for a collective of all ranks.

        Raises:
            CheckpointError: if the collective fails and ranks are known to be missing; names the missing ranks.
            RuntimeError: the collective's error, if the missing ranks are unknown.
        """

        def arrived(patience_s: float) -> bool:
            try:
                work.wait(timedelta(seconds=patience_s))
            except RuntimeError:
                if work.is_completed():  # the collective has failed; otherwise only this wait has timed out
                    raise
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
        """Count a collective that is not watched: its number is part of the later collectives' keys in the store."""
        self._next()

    def _next(self) -> str:
        """Return the key of the next collective, the same on all ranks."""
        self._num_meetings += 1
        return f"{self._name} {self._num_meetings}"

    def _watch(self, key: str, arrived: Callable[[float], bool], doing: str) -> bool:
        """Wait for some seconds, and return whether all ranks have arrived.

        If ranks are missing, this rank registers as waiting, and the rank that has registered first logs a warning.

        Args:
            arrived: waits up to a number of seconds; returns whether all ranks have arrived.
        """
        if arrived(_PATIENCE_S):
            return True
        try:
            self._store.set(f"{key} {self._rank}", "")
            is_first = self._store.add(f"{key} waiting", 1) == 1
        except RuntimeError as error:  # torch's errors of a store, and the LifecycleError of `BoundedStore`
            _log.warning("%s: ranks are missing, and the store that lists them is lost: %s", doing, error)
            return False
        if arrived(_NOTES_S):
            return True
        # Only the first registered rank warns, or thousands of ranks would log the same warning.
        missing = self._missing(key)
        if is_first and missing:
            _log.warning(
                "rank %d has waited %.0f s for ranks %s, which have not made this call (%s). %s. Rank %d waits up to "
                "%.0f s, the process group's time-out",
                self._rank,
                _PATIENCE_S + _NOTES_S,
                missing[:16],
                doing,
                _CAUSE,
                self._rank,
                self._timeout_s,
            )
        return False

    def _missing(self, key: str) -> list[int]:
        """Return the ranks that have not registered as waiting."""
        return [rank for rank in range(self._world_size) if not self._store.check([f"{key} {rank}"])]

    def absence(self, key: str, doing: str) -> CheckpointError | None:
        """Return the error that names the missing ranks; None if the missing ranks are unknown."""
        try:
            missing = self._missing(key)
        except RuntimeError:  # the store cannot be reached either
            return None
        # None missing: the collective failed for another reason. All missing: no rank could register.
        if not 0 < len(missing) < self._world_size:
            return None
        return CheckpointError(
            f"{len(missing)} of {self._world_size} ranks have not made this call.",
            expected=f"all {self._world_size} ranks to make this call",
            got=f"no call of ranks {missing[:16]} within the process group's time-out, {self._timeout_s:g} s",
            where=f"rank {self._rank}, {doing}",
            todo=_CAUSE,
        )
