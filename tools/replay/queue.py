"""An event queue: replays what a step launched, on given durations.

    a stream          runs its items one after the other, in the host's order
    a communicator    runs its collectives one after the other, in the host's order
    a wait            holds its stream until the event's recording has been reached
    a host wait       holds everything that the host does later
    contention        while items of several streams run, each runs at 1 / (1 + the sum of its slowdowns by the others)

Without contention a stream's time is the longest path through the items. All numbers may be fractions, so tests can
compare without rounding.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from tools.replay.recording import Item, Recording

Seconds = float | Fraction


@dataclass(frozen=True)
class Replay:
    """What a replay found; all figures are seconds."""

    total: Seconds
    busy: Mapping[str, Seconds]  # by class of item: how long at least one ran
    alone: Mapping[str, Seconds]  # by class of item: how long nothing of another class ran
    ends: Mapping[str, Seconds]  # by stream: the end of its last item


class DeadlockError(RuntimeError):
    """Items wait for each other, or for an event that is never recorded."""


@dataclass
class _Running:
    item: Item
    kind: str  # its class
    left: Seconds  # if it ran alone


class _Queue:
    """The state of a replay."""

    def __init__(self, recording: Recording) -> None:
        # An event that was recorded before this step has been reached.
        recorded = {item.event for item in recording.items if item.kind == "record"}
        self.streams: dict[str, deque[tuple[Item, int]]] = defaultdict(
            deque
        )  # with the host's waits before it
        self.turns: dict[str, deque[int]] = defaultdict(
            deque
        )  # by communicator: collectives that have not ended
        self.host_waits: list[int] = []  # events, of which the host has passed the first ``passed``
        self.passed = 0
        for item in recording.items:
            if item.kind == "host wait":
                if item.event in recorded:
                    self.host_waits.append(item.event)
            elif item.kind not in ("allocate", "free") and (item.kind != "wait" or item.event in recorded):
                self.streams[item.stream].append((item, len(self.host_waits)))
                if item.kind == "collective":
                    self.turns[item.group].append(id(item))
        self.reached: set[int] = set()
        self.running: dict[str, _Running] = {}  # by stream

    def start(self, seconds_of: Callable[[Item], Seconds], class_of: Callable[[Item], str]) -> None:
        """Start every item that can start now."""
        moved = True
        while moved:
            moved = False
            while self.passed < len(self.host_waits) and self.host_waits[self.passed] in self.reached:
                self.passed, moved = self.passed + 1, True
            for stream, queue in self.streams.items():
                while queue and stream not in self.running and self._may_start(*queue[0]):
                    item, _ = queue.popleft()
                    moved = True
                    if item.kind == "record":
                        self.reached.add(item.event)
                    elif item.kind != "wait":
                        self.running[stream] = _Running(item, class_of(item), left := seconds_of(item))
                        if left <= 0:
                            self.end(stream)

    def _may_start(self, item: Item, num_host_waits: int) -> bool:
        if num_host_waits > self.passed:
            return False
        if item.kind == "wait":
            return item.event in self.reached
        return item.kind != "collective" or self.turns[item.group][0] == id(item)

    def end(self, stream: str) -> None:
        """The item that runs on a stream has ended."""
        item = self.running.pop(stream).item
        if item.kind == "collective":
            self.turns[item.group].popleft()


def replay(
    recording: Recording,
    seconds_of: Callable[[Item], Seconds],
    class_of: Callable[[Item], str] = lambda item: item.kind,
    slowdowns: Mapping[tuple[str, str], Seconds] | None = None,
) -> Replay:
    """Replay a recording.

    Args:
        seconds_of: duration of an operator or a collective that runs alone.
        class_of: class of an operator or a collective, for ``slowdowns`` and for the figures.
        slowdowns: (class, other class) -> slowdown of an item of the first class by one that runs on another stream;
            1 doubles its duration. Missing pairs do not slow each other.

    Raises:
        DeadlockError: the recording cannot end.
    """
    slowdowns = slowdowns or {}
    queue = _Queue(recording)
    now: Seconds = 0
    busy: dict[str, Seconds] = defaultdict(int)
    alone: dict[str, Seconds] = defaultdict(int)
    ends: dict[str, Seconds] = dict.fromkeys(queue.streams, 0)
    queue.start(seconds_of, class_of)
    while running := queue.running:
        slower = {
            stream: 1
            + sum(
                slowdowns.get((mine.kind, other.kind), 0) for other in running.values() if other is not mine
            )
            for stream, mine in running.items()
        }
        passing = min(mine.left * slower[stream] for stream, mine in running.items())
        now += passing
        kinds = {mine.kind for mine in running.values()}
        for kind in kinds:
            busy[kind] += passing
        if len(kinds) == 1:
            alone[kinds.pop()] += passing
        for stream, mine in list(running.items()):
            ends[stream] = now
            mine.left -= passing / slower[stream]
            if mine.left <= passing * 1e-12:  # rounding leaves so much of an item that ends now
                queue.end(stream)
        queue.start(seconds_of, class_of)
    if stuck := [items[0][0] for items in queue.streams.values() if items]:
        raise DeadlockError(f"expected every item to run; these never start: {stuck}")
    return Replay(now, dict(busy), dict(alone), ends)
