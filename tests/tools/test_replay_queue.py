"""The event queue of replays: closed forms, the longest path, brute force in small ticks; and a device with a clock."""

from __future__ import annotations

from collections import defaultdict, deque
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.replay.queue import DeadlockError, Seconds, replay
from tools.replay.recording import Item, Recording

STREAMS = ("compute", "gathers", "sums")
TICKS = 60  # per second of the brute force; 2, 3, 4, 5 and 6 divide it


def work(stream: str, seconds: int, kind: str = "operator") -> Item:
    ranks = 2 if kind == "collective" else 0
    return Item(kind, stream, "work", nbytes=seconds, group="all" if ranks else "", ranks=ranks)


def seconds_of(item: Item) -> Fraction:
    return Fraction(item.nbytes)


@st.composite
def programs(draw: st.DrawFn) -> Recording:
    """Any program of three streams: operators, collectives, events, waits for those, waits of the host."""
    items: list[Item] = []
    events = 0
    for _ in range(draw(st.integers(1, 14))):
        stream = draw(st.sampled_from(STREAMS))
        kind = draw(st.sampled_from(("operator", "operator", "collective", "record", "wait", "host wait")))
        if kind in ("operator", "collective"):
            items.append(work(stream, draw(st.integers(0, 4)), kind))
        elif kind == "record":
            events += 1
            items.append(Item("record", stream, event=events))
        elif events:
            items.append(Item(kind, stream, event=draw(st.integers(1, events))))
    return Recording(tuple(items))


def longest_path(recording: Recording) -> Fraction:
    """The end of the last item where nothing slows anything: in the host's order, after all that an item follows."""
    ends: dict[str, Fraction] = defaultdict(Fraction)  # by stream, and by communicator
    reached: dict[int, Fraction] = defaultdict(Fraction)
    host, last = Fraction(0), Fraction(0)
    for item in recording.items:
        if item.kind == "host wait":
            host = max(host, reached[item.event])
            continue
        start = max(ends[item.stream], host)
        if item.kind == "wait":
            start = max(start, reached[item.event])
        elif item.kind == "record":
            reached[item.event] = start
        else:
            start = max(start, ends[item.group]) if item.group else start
            start += seconds_of(item)
            ends[item.group or "nobody's"] = start
            last = max(last, start)
        ends[item.stream] = start
    return last


def in_ticks(recording: Recording, slowdown: int) -> Fraction:
    """Brute force: every tick, each stream does what it can of its first item."""
    queues: dict[str, deque[Item]] = defaultdict(deque)
    turn: deque[int] = deque()
    for item in recording.items:
        queues[item.stream].append(item)
        if item.kind == "collective":
            turn.append(id(item))
    order: dict[int, int] = {id(item): place for place, item in enumerate(recording.items)}
    host_waits = [item for item in recording.items if item.kind == "host wait"]
    left = {id(item): seconds_of(item) for item in recording.items}
    reached: set[int] = set()

    def held(item: Item) -> bool:
        earlier = [each for each in host_waits if order[id(each)] < order[id(item)]]
        if any(each.event not in reached for each in earlier):
            return True
        if item.kind == "wait":
            return item.event not in reached
        return item.kind == "collective" and turn[0] != id(item)

    def settle() -> None:
        moved = True
        while moved:
            moved = False
            for queue in queues.values():
                while queue and queue[0].kind == "host wait":
                    queue.popleft()
                if not queue or held(queue[0]) or left[id(queue[0])] > 0:
                    continue
                item = queue.popleft()
                moved = True
                if item.kind == "record":
                    reached.add(item.event)
                elif item.kind == "collective":
                    turn.popleft()

    now = Fraction(0)
    settle()
    while any(queues.values()):
        active = [q[0] for q in queues.values() if q and not held(q[0])]
        assert active
        for item in active:
            others = sum(other.kind != item.kind for other in active if other is not item)
            left[id(item)] -= Fraction(1, TICKS) / (1 + slowdown * others)
        now += Fraction(1, TICKS)
        settle()
    return now


CONTENTION: dict[tuple[str, str], Seconds] = {("operator", "collective"): 1, ("collective", "operator"): 1}


@settings(max_examples=100, deadline=None)
@given(programs())
def test_without_contention_it_is_the_longest_path(recording: Recording) -> None:
    assert replay(recording, seconds_of).total == longest_path(recording)


@settings(max_examples=40, deadline=None)
@given(programs())
def test_with_contention_it_is_the_brute_force(recording: Recording) -> None:
    found = replay(recording, seconds_of, slowdowns=CONTENTION).total
    # A tick is done to its end even if an item ends within it.
    assert abs(in_ticks(recording, 1) - found) <= Fraction(len(recording.items), TICKS)


@given(st.integers(1, 9), st.integers(1, 9), st.fractions(0, 3, max_denominator=8))
def test_two_items_slow_each_other_while_both_run(short: int, more: int, slowdown: Fraction) -> None:
    """The longer one loses what the shorter one took of it: b + a c."""
    items = (work("compute", short), work("gathers", short + more, "collective"))
    slow = dict.fromkeys(CONTENTION, slowdown)
    found = replay(Recording(items), seconds_of, slowdowns=slow)
    assert found.total == short + more + short * slowdown
    assert found.ends["compute"] == found.busy["operator"] == short * (1 + slowdown)
    assert found.alone == {"collective": more}


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 5))
def test_a_pipeline_takes_the_slower_stage(layers: int, gather: int, compute: int) -> None:
    """g + (n - 1) max(g, f) + f: gathers run ahead, each layer waits for its own."""
    items: list[Item] = []
    for layer in range(1, layers + 1):
        items += [work("gathers", gather, "collective"), Item("record", "gathers", event=layer)]
        items += [Item("wait", "compute", event=layer), work("compute", compute)]
    total = replay(Recording(tuple(items)), seconds_of).total
    assert total == gather + (layers - 1) * max(gather, compute) + compute


def test_collectives_of_two_communicators_run_at_once() -> None:
    one, other = work("gathers", 3, "collective"), work("sums", 3, "collective")
    items = (one, Item("collective", "sums", "work", nbytes=3, group="another", ranks=2))
    assert replay(Recording((one, other)), seconds_of).total == 6
    assert replay(Recording(items), seconds_of).total == 3


def test_a_hosts_wait_holds_what_it_does_later() -> None:
    items = (work("compute", 2), Item("record", "compute", event=1), Item("host wait", "host", event=1))
    assert replay(Recording((*items, work("sums", 3))), seconds_of).total == 5
    assert replay(Recording((work("sums", 3), *items)), seconds_of).total == 3


@pytest.mark.parametrize("kind", ["wait", "host wait"])
def test_events_from_before_the_step_hold_nothing(kind: str) -> None:
    assert replay(Recording((Item(kind, "compute", event=7), work("compute", 2))), seconds_of).total == 2


def test_items_of_one_class_slow_each_other_and_not_themselves() -> None:
    slow: dict[tuple[str, str], Seconds] = {("operator", "operator"): 1}
    assert replay(Recording((work("compute", 3),)), seconds_of, slowdowns=slow).total == 3
    both = (work("compute", 3), work("sums", 3))
    assert replay(Recording(both), seconds_of, slowdowns=slow).total == 6


def test_busy_and_alone_are_sums_over_the_step() -> None:
    """Operators for 2 + 3 seconds, of which the first 2 run beside a collective of 4."""
    items = (
        work("gathers", 4, "collective"),
        Item("record", "gathers", event=1),
        work("compute", 2),
        Item("wait", "compute", event=1),
        work("compute", 3),
    )
    found = replay(Recording(items), seconds_of)
    assert found.total == 7 and found.busy == {"operator": 5, "collective": 4}
    assert found.alone == {"operator": 3, "collective": 2}
    assert found.ends == {"compute": 7, "gathers": 4}


def test_circles_are_told() -> None:
    items = (Item("wait", "compute", event=1), Item("record", "compute", event=1), work("compute", 1))
    with pytest.raises(DeadlockError):
        replay(Recording(items), seconds_of)


def test_peaks_are_of_pools_and_of_all() -> None:
    """Two pools, whose peaks are not at the same time."""
    steps = [("a", 5), ("a", -5), ("b", 7), ("a", 1)]
    items = tuple(Item("allocate" if n > 0 else "free", pool, nbytes=abs(n)) for pool, n in steps)
    peaks = Recording(items, {"a": 2}).peaks
    assert (peaks.live, peaks.pools) == (10, 14)


def test_recordings_are_linear_in_tokens_and_survive_json() -> None:
    one, two = (Recording((work("compute", n), work("sums", 2 * n)), {"compute": n}) for n in (3, 5))
    three = one.extrapolated(two, 2)
    assert [item.nbytes for item in three.items] == [7, 14] and three.before == {"compute": 7}
    assert Recording.from_json(three.to_json()) == three
    with pytest.raises(ValueError, match="got"):
        one.extrapolated(Recording((work("sums", 1), work("compute", 1))), 2)


@pytest.mark.parametrize("wrong", [{"kind": "kernel"}, {"nbytes": -1}, {"ranks": 2}])
def test_items_verify_themselves(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got"):
        Item(**{"kind": "operator", "stream": "compute", **wrong})  # type: ignore[arg-type]
