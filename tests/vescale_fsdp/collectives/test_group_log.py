"""Logs of process groups: what counts as a difference, and how far back."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.distributed import run_threads
from vescale_fsdp.collectives import group_log


def own_log() -> group_log.GroupLog:
    assert dist.group.WORLD is not None
    log = group_log.log_of(dist.group.WORLD)
    assert log is not None
    return log


def compared(entries: list[list[str]]) -> tuple[list[list[int]], bool]:
    """Each rank adds its entries: the ranks on each side of the first difference, and whether all logs were there."""
    log = own_log()
    for entry in entries[dist.get_rank()]:
        log.add(entry)
    log.publish()
    dist.barrier()
    difference, is_complete = log.difference(log.partners())
    return [ranks for _, ranks in difference.sides] if difference else [], is_complete


LONG = [str(number) for number in range(500)]
CASES: dict[str, tuple[list[list[str]], list[list[int]]]] = {
    "equal": ([["a", "b"]] * 3, []),
    "one is late": ([["a"], ["a", "b"], ["a", "b"]], []),
    "none yet": ([[], ["a"], ["a"]], []),
    "other": ([["a", "b"], ["a", "c"], ["a", "b"]], [[0, 2], [1]]),
    "order": ([["a", "b"], ["a", "b"], ["b", "a"]], [[0, 1], [2]]),
    "late, and other": ([["a"], ["b", "c"], ["a", "b"]], [[0, 2], [1]]),
    "long": ([LONG, LONG[:480], LONG], []),
    "long, and other": ([[*LONG, "a"], [*LONG, "b"], LONG], [[0], [1], [2]]),
    "too far behind": ([LONG, LONG[:100], LONG], []),
}


@pytest.mark.parametrize("case", CASES)
def test_only_other_entries_are_a_difference(case: str) -> None:
    """A log that is the beginning of another one may be of a late rank; numbers of entries tell where a log is."""
    entries, sides = CASES[case]
    found = run_threads(3, compared, entries)
    for own, is_complete in found:
        assert is_complete
        # Each rank compares its own log with the others'.
        assert own in (sides, [])
    assert any(own == sides for own, _ in found)


def logs_read(entries: list[list[str] | None]) -> list[int]:
    """How many logs rank 0 reads in each turn, twice: after these entries, or None for an amended one."""
    log = own_log()
    found = []
    for turn in entries:
        if turn is None:
            log.amend("refused")
        for entry in (turn or []) if dist.get_rank() == 0 else (turn or [])[:1]:
            log.add(entry)
        log.publish()
        dist.barrier()
        if dist.get_rank() == 0:
            for _ in range(2):
                with mock.patch.object(log, "_store", mock.Mock(wraps=log._store)) as store:
                    assert log.difference(log.partners()) == (None, True)
                found.append(store.get.call_count)
        dist.barrier()
    return found


def test_a_log_that_can_show_nothing_new_is_not_read_again() -> None:
    """A rank that is idle for an hour reads each log once, but those of ranks behind it, and all after a new entry."""
    read = run_threads(3, logs_read, [["a"], ["b"], [], None, ["c", "d"]])[0]
    assert read == [2, 0, 2, 0, 0, 0, 2, 0, 2, 2]


def all_named() -> list[list[int]]:
    """Rank 2 starts something else, late: the sides that rank 0 sees, which has compared with rank 1 before."""
    log = own_log()
    if dist.get_rank() < 2:
        log.add("a")
    log.publish()
    dist.barrier()
    assert log.difference(log.partners()) == (None, True)
    dist.barrier()
    if dist.get_rank() == 2:
        log.add("b")
        log.publish()
    dist.barrier()
    difference, _ = log.difference(log.partners())
    return [ranks for _, ranks in difference.sides] if difference else []


def test_a_difference_names_ranks_that_were_not_read_again() -> None:
    """The ranks on each side."""
    assert run_threads(3, all_named) == [[[0, 1], [2]]] * 3


def refused() -> tuple[bool, bool]:
    """Rank 0 has published a call that all ranks then refuse: whether its log equals this one, before and after."""
    log = own_log()
    log.add(f"call of {dist.get_rank()}")
    if dist.get_rank() == 0:
        log.publish()
    dist.barrier()
    before, _ = log.difference([0])
    log.amend("refused")
    dist.barrier()
    after, _ = log.difference([0])
    return before is None, after is None


def test_a_refused_call_is_no_difference() -> None:
    """Ranks that have raised together go on together, also where one has published its call before."""
    assert run_threads(2, refused) == [(True, True), (False, True)]


def asked() -> list[bool]:
    """Whether rank 0 can read the log of rank 1: before and after it has asked for it."""
    log = own_log()
    log.add("a")
    found = []
    for turn in range(2):
        if dist.get_rank() == 1:
            log.answer()
        dist.barrier()
        found.append(log.difference([1])[1])
        if dist.get_rank() == 0 and turn == 0:
            log.ask()
        dist.barrier()
    return found


def test_logs_are_published_on_request() -> None:
    """Nothing is sent otherwise."""
    assert run_threads(2, asked)[0] == [False, True]


def test_groups_without_other_ranks_have_no_log() -> None:
    """A group of one rank."""
    assert run_threads(1, lambda: group_log.log_of(dist.group.WORLD) is None) == [True]  # type: ignore[arg-type]
