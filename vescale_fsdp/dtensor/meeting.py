"""Meetings: all ranks of a mesh call the same communicating operator, or all of them raise.

``p[:, 0]`` on a sharded parameter, or the sum of two copies of a model that are cut differently, is a collective,
although it does not look like one. If only rank 0 calls it, for logging, its messages would meet those of another
collective: values would be wrong, or the job would hang. So before such an operator sends anything, the ranks compare
operator, placements and a counter, through the process group's store:

    rank                                        store
    attend("add: A -> B"), its call number n    call n: text of the first rank             <- compare_set
      this rank's text differs ............     verdict n: which ranks differ              <- compare_set
      all ranks have come .................     verdict n: "go"                            <- compare_set
    wait for verdict n                          the first verdict holds, on all ranks

A rank that waits in vain enters a verdict too, so ranks that come later raise instead of communicating with nobody.
Deadlocks with other collectives are found earlier, if an `Observer` (the runtime's OrderWatch) logs both.

This costs each rank three or four requests to the store, and none on a mesh of one rank.
"""

from __future__ import annotations

import logging
import time
import weakref
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.dtensor.spec import ranks_in
from vescale_fsdp.errors import LifecycleError, explain, some
from vescale_fsdp.torch_private import default_store, timeout_of

# Seconds: a rank gives up after this time, or after its group's time-out if that is shorter. torch's default time-out.
BOUND_S = 1800.0
# Seconds after which a waiting rank names the ranks that have not come, in a warning.
REPORT_S = 30.0
# Seconds: one wait for the store. Short, because other threads of the process use the same connection meanwhile.
_WAIT_S = 0.1
_SHOWN_S = 0.5  # seconds for which a rank that gives up waits for other ranks to publish that they wait too
_GO = "go"
_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Logs the order of a mesh's collectives, and knows whether ranks differ."""

    error: LifecycleError | None

    def note(self, entry: str) -> None:
        """Add a collective that is about to start. Raises if ranks differ."""


class Meeting:
    """The meetings of the ranks of one mesh.

    Args:
        ranks: the global ranks of the mesh, in ascending order.

    Attributes:
        count: number of calls so far, each with at least one message.
        observers: logs of the order of collectives over the same ranks. Weak references.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks, self._rank, self._store = ranks, dist.get_rank(), default_store()
        self._key = f"vescale_fsdp operators {xxhash.xxh3_64_hexdigest(','.join(map(str, ranks)).encode())}"
        timeout = timeout_of(dist.group.WORLD) if dist.group.WORLD is not None else None
        self._timeout_s = float("inf") if timeout is None else timeout.total_seconds()
        self.count = 0
        self.observers: weakref.WeakSet[Observer] = weakref.WeakSet()

    def attend(self, call: str) -> None:
        """Return once all ranks of the mesh have made this call.

        Args:
            call: the operator with shapes and placements, the same text on all ranks.

        Raises:
            LifecycleError: if ranks made different calls, or if a rank made no call within the bound.
        """
        for observer in self.observers:
            observer.note(f"operator {call}")
        entry, before = f"{self._key} {self.count}", f"{self._key} {self.count - 1}"
        self.count += 1
        # compare_set sets only a key that does not exist, and returns the value of the first rank that set it.
        first = self._store.compare_set(entry, "", f"{self._rank} {call}").decode()
        first_rank, _, first_call = first.partition(" ")
        if first_call != call:
            difference = f"rank {first_rank} called {first_call}; rank {self._rank} called {call}"
            self._store.compare_set(_verdict(entry), "", difference)
        elif self._store.add(f"{entry} arrived", 1) == len(self._ranks):
            self._store.compare_set(_verdict(entry), "", _GO)
            # All ranks have come to this call, so they have left the one before.
            for key in (before, f"{before} arrived", _verdict(before)):
                self._store.delete_key(key)
        verdict = self._wait(entry, call)
        if verdict != _GO:
            raise LifecycleError(
                "Ranks do not call the same operators on sharded tensors. This operator communicates, so all ranks "
                "must call it, in the same order.",
                expected=f"{call} on ranks {some(map(str, self._ranks), 8)}",
                got=verdict,
                where=f"rank {self._rank}",
                todo="call it on every rank (print and log what it returns on one of them), or use .to_local(), which "
                "does not communicate",
            )

    def _wait(self, entry: str, call: str) -> str:
        """Wait for the verdict and return it. A rank that waits longer than the bound enters a verdict itself."""
        begin, is_shown, is_reported = time.monotonic(), False, False
        while True:
            try:
                self._store.wait([_verdict(entry)], timedelta(seconds=_WAIT_S))
                return self._store.get(_verdict(entry)).decode()
            except (
                RuntimeError
            ):  # the wait timed out; any other error of the store is raised by the next request
                waited_s = time.monotonic() - begin
            for observer in self.observers:
                if observer.error is not None:
                    raise observer.error
            if not is_shown:  # a slow meeting: from now on, other ranks can see who waits
                self._store.set(f"{entry} of {self._rank}", "")
                is_shown = True
            bound_s = min(BOUND_S, self._timeout_s)
            if waited_s > REPORT_S and not is_reported:
                is_reported = True
                _log.warning("%s", self._absence(entry, call, waited_s))
            if waited_s > bound_s:
                time.sleep(min(_SHOWN_S, bound_s))
                self._store.compare_set(_verdict(entry), "", self._absence(entry, call, waited_s))

    def _absence(self, entry: str, call: str, waited_s: float) -> str:
        """Return which ranks have not come to a call, as text."""
        absent = [str(rank) for rank in self._ranks if not self._store.check([f"{entry} of {rank}"])]
        return explain(
            f"Rank {self._rank} called {call}, which communicates, and waited {waited_s:.0f} s for other ranks.",
            expected=f"the same call on ranks {some(map(str, self._ranks), 8)}",
            got=f"no call on ranks {some(absent, 8)}",
        )


def _verdict(entry: str) -> str:  # the store's key of a call's verdict
    return f"{entry} verdict"


# Per default process group, because a new default group has a new store: weak, because meetings end with it.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Meeting]] = (
    weakref.WeakKeyDictionary()
)
_ranks_of: weakref.WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = weakref.WeakKeyDictionary()


def meeting_of(mesh: DeviceMesh) -> Meeting | None:
    """Return the meetings of a mesh; None for a mesh of one rank, and for torch's "fake" groups without other ranks."""
    world = dist.group.WORLD
    if mesh.size() == 1 or world is None or dist.get_backend(world) == "fake":
        return None
    ranks = _ranks_of.get(mesh)
    if ranks is None:
        ranks = _ranks_of[mesh] = tuple(sorted(_flat(ranks_in(mesh))))
    known = _meetings.setdefault(world, {})
    if ranks not in known:
        known[ranks] = Meeting(ranks)
    return known[ranks]


def _flat(nested: int | list[int]) -> list[int]:
    """Return the numbers of a nested list."""
    return [nested] if isinstance(nested, int) else [number for part in nested for number in _flat(part)]  # type: ignore[arg-type]


def meet(mesh: DeviceMesh, call: str) -> None:
    """Return once all ranks of a mesh have made this call; see `Meeting.attend`."""
    meeting = meeting_of(mesh)
    if meeting is not None:
        meeting.attend(call)


def observe(mesh: DeviceMesh, observer: Observer) -> None:
    """Let ``observer`` log the operators over a mesh that communicate, from now on."""
    meeting = meeting_of(mesh)
    if meeting is not None:
        meeting.observers.add(observer)
