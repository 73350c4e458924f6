"""Warn within seconds about ranks that are missing from a collective, while the collective keeps waiting.

A rank may be late for a good reason, such as an evaluation on rank 0 before a save. Other ranks cannot distinguish a
late rank from one that never makes the call (``if rank == 0: save(..)``). Waiting therefore ends only with the process
group's time-out; for an earlier error, pass a group with a shorter one. Each rank that has waited for some seconds
registers in the process group's store; one rank then reads the entries and warns about the missing ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from vescale_fsdp.errors import CheckpointError

_PATIENCE_S = 5.0  # wait before a rank registers as waiting
_NOTES_S = 2.0  # wait before the warning, so that ranks that came slightly later have registered too
_POLL_S = 0.02
_CAUSE = (
    "save, load, async_save and a manager's calls are collectives: every rank of the group must make them. Take this "
    "call out of a condition such as `if rank == 0:`"
)
_log = logging.getLogger(__name__)


class RollCall:
    """Watches the collectives of one group.

    Args:
        store: a store that all ranks of the group reach.
        name: the group's name, the same on all ranks.
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
            while self._store.add(f"{key} count", 0) < self._world_size:  # reads the counter
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
            RuntimeError: the collective's error.
            CheckpointError: instead, if ranks are known to be missing; names them.
        """

        def arrived(patience_s: float) -> bool:
            try:
                work.wait(timedelta(seconds=patience_s))
            except RuntimeError:
                if work.is_completed():
                    raise  # the collective itself failed, not only this wait
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
        """Count a collective that is not watched, so that numbers stay equal on all ranks."""
        self._next()

    def _next(self) -> str:
        self._num_meetings += 1
        return f"{self._name} {self._num_meetings}"

    def _watch(self, key: str, arrived: Callable[[float], bool], doing: str) -> bool:
        """Wait for some seconds; returns whether all ranks came. If not, this rank registers as waiting, and the first
        registered rank warns.
        """
        if arrived(_PATIENCE_S):
            return True
        try:
            self._store.set(f"{key} {self._rank}", "")
            is_first = self._store.add(f"{key} waiting", 1) == 1
        except RuntimeError as error:
            _log.warning("%s: ranks are missing, and the store that lists them is lost: %s", doing, error)
            return False
        if arrived(_NOTES_S):
            return True
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
        return [rank for rank in range(self._world_size) if not self._store.check([f"{key} {rank}"])]

    def absence(self, key: str, doing: str) -> CheckpointError | None:
        """The error that names the missing ranks; None if they are unknown."""
        try:
            missing = self._missing(key)
        except RuntimeError:  # the store is gone as well
            return None
        if not 0 < len(missing) < self._world_size:
            return None
        return CheckpointError(
            f"{len(missing)} of {self._world_size} ranks have not made this call.",
            expected=f"all {self._world_size} ranks to make this call",
            got=f"no call of ranks {missing[:16]} within the process group's time-out, {self._timeout_s:g} s",
            where=f"rank {self._rank}, {doing}",
            todo=_CAUSE,
        )
