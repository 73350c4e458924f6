"""Meetings: all ranks of a process group call the same function that communicates, or all of them raise.

``p.full_tensor()`` on a sharded parameter is a collective, and so are ``p[:, 0]`` and the sum of two copies of a model
that are cut differently. If only rank 0 calls one of them, for logging, its messages would meet those of another
collective: values would be wrong, the process would abort, or the job would hang. So before such a call sends anything,
the ranks of every group that it uses compare the call, their collectives so far and a counter, through the store:

    rank                                        store
    attend("full_tensor ..", number n)          n, text of the call: ranks that have come      <- add
      all ranks have come .................     verdict n: "go"                                <- compare_set
    wait for verdict n                          the first verdict holds, on all ranks
      later: this rank's text differs .....     verdict n: the texts of two ranks              <- compare_set

A rank that waits asks for the logs of ranks that have not come (`GroupLog`). A rank whose log has another collective
will not come: all ranks raise, and the watch of a sharded model aborts what they wait for. A rank that is only late is
named in a warning. A rank that has waited for the time-out of its group enters a verdict, so ranks that come later
raise instead of communicating with no rank.

    call                                                        meets
    full_tensor, redistribute, distribute_tensor, unshard,
    operators that gather or move a tensor                      once per call and group
    functions that call many of these (`one_meeting`), and
    steps of optimizers                                         once for all of them
    reductions (``p.norm()``)                                   the first of several in a row
    norms of gradients to clip, checks of a gradient scaler     never: the log alone shows whether ranks differ

This costs each rank three requests to the store, and none in a group of one rank.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.collectives.group_log import GroupLog, log_of
from vescale_fsdp.collectives.process_groups import backends_of, closed_peers
from vescale_fsdp.errors import LifecycleError, explain, some
from vescale_fsdp.torch_private import default_store, timeout_of

# Seconds: a rank gives up after this time, or after its group's time-out if that is shorter. torch's default time-out.
BOUND_S = 1800.0
# Seconds after which a waiting rank names the ranks that have not come, in a warning.
REPORT_S = 30.0
# Seconds after which a waiting rank compares its call with ranks that wait too, and asks for the logs of others.
ASK_S = 1.0
_SHOWN_S = 0.5  # seconds for which a rank that gives up waits for other ranks to publish that they wait too
_GO = "go"
_REFUSED = "a call that was refused"  # replaces the call in the log
_log = logging.getLogger(__name__)


class Meets(Enum):
    """Which of several equal calls meet."""

    EACH = auto()
    FIRST = auto()  # not those that follow a call of this kind without another collective between them
    NEVER = auto()


class Meeting:
    """The meetings of the ranks of one process group.

    Args:
        group: a group of more than one rank.
        log: the group's log.

    Attributes:
        count: number of calls so far.
        log: the group's log.
    """

    def __init__(self, group: dist.ProcessGroup, log: GroupLog) -> None:
        self._group, self.log = weakref.ref(group), log
        self._ranks, self._rank, self._store = log.ranks, dist.get_rank(), default_store()
        timeout = timeout_of(group)
        self._bound_s = min(BOUND_S, float("inf") if timeout is None else timeout.total_seconds())
        self.count = 0
        self._before: tuple[str, ...] = ()  # keys of the last meeting

    def attend(self, call: str) -> None:
        """Return once all ranks of the group have made this call.

        Args:
            call: the function with shapes and placements, the same text on all ranks.

        Raises:
            LifecycleError: if ranks made different calls, if a rank has started another collective, or if a rank made
                no call within the bound.
        """
        self.log.check()
        text = f"{call}, after {self.log.count} collectives"
        self.log.add(call)
        name = self._next()
        came = f"{name} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        try:
            if self._store.add(came, 1) == len(self._ranks):
                # compare_set sets only a key that does not exist, and returns the value of the first rank that set it.
                verdict = self._store.compare_set(_verdict(name), "", _GO).decode()
                for key in self._before:  # all ranks have come to this call, so they have left the one before
                    self._store.delete_key(key)
            else:
                verdict = self._wait(name, call, text)
            self._before = came, f"{name} text", _verdict(name)
            if verdict != _GO:
                raise LifecycleError(
                    "Not all ranks call the same functions on sharded tensors. This call communicates, so all ranks "
                    "must make it, in the same order.",
                    expected=f"{call} on ranks {some(map(str, self._ranks), 8)}",
                    got=verdict,
                    where=f"rank {self._rank}",
                    todo="make the call on every rank (print and log what it returns on one of them), or use "
                    ".to_local(), which does not communicate",
                )
        except LifecycleError:
            self.log.amend(_REFUSED)
            raise
        self.log.follow(call)

    def refuse(self, error: LifecycleError) -> None:
        """Let the other ranks raise at their next call instead of waiting for this rank, which raises ``error``."""
        self.log.add(_REFUSED)
        self._store.compare_set(_verdict(self._next()), "", str(error.got))

    def _next(self) -> str:
        """Return the beginning of the next call's keys in the store."""
        self.count += 1
        return f"{self.log.key} call {self.count}"

    def _wait(self, name: str, call: str, text: str) -> str:
        """Wait for the verdict and return it. A rank that waits longer than the bound enters a verdict itself."""
        begin = time.monotonic()
        try:
            # Other threads of the process, which use the same connection, wait meanwhile.
            self._store.wait([_verdict(name)], timedelta(seconds=ASK_S))
        except RuntimeError:  # it timed out; any other error of the store is raised by the next request
            # From now on, other ranks can see who waits, and for what.
            self._store.set(f"{name} of {self._rank}", "")
            first = self._store.compare_set(f"{name} text", "", f"{self._rank} {text}").decode()
            first_rank, _, first_text = first.partition(" ")
            if first_text != text:
                self._decide(name, f"rank {first_rank} called {first_text}; rank {self._rank} called {text}")
            self._wait_long(name, call, begin, is_first=first_rank == str(self._rank))
            self._store.delete_key(f"{name} of {self._rank}")
        return self._store.get(_verdict(name)).decode()

    def _wait_long(self, name: str, call: str, begin: float, *, is_first: bool) -> None:
        """Wait for ranks that are late, as `_wait`, and look whether they will come.

        Args:
            is_first: whether this rank names all ranks that have not come, which costs a request per rank.
        """
        next_look_s = next_closed_s = 0.0
        is_reported = False
        named = self._ranks if is_first else self.log.partners()
        while not self._store.check([_verdict(name)]):
            self.log.check()
            waited_s = time.monotonic() - begin
            if waited_s > next_closed_s:
                next_closed_s = 2 * waited_s  # rarely, since each look leaves a receive per rank behind
                self._find_ended(name)
            if waited_s > next_look_s:
                next_look_s = waited_s + ASK_S * min(1 + waited_s / 10, 4)
                self._find_passed(name)
            if waited_s > REPORT_S and not is_reported:
                is_reported = True
                _log.warning("%s", self._absence(name, call, named, waited_s))
            if waited_s > self._bound_s:
                time.sleep(min(_SHOWN_S, self._bound_s))
                self._decide(name, self._absence(name, call, named, waited_s))
            time.sleep(ASK_S / 4)

    def _decide(self, name: str, reason: str) -> None:
        """Enter a verdict; an earlier verdict holds."""
        self._store.compare_set(_verdict(name), "", reason)

    def _find_ended(self, name: str) -> None:
        """Enter a verdict if ranks have ended. Only gloo shows this."""
        group = self._group()
        if group is not None and "gloo" in backends_of(group).values():
            ended = [str(dist.get_global_rank(group, rank)) for rank in closed_peers(group)]
            if ended:
                self._decide(name, f"ranks {some(ended, 8)} have ended, or closed their connections")

    def _find_passed(self, name: str) -> None:
        """Enter a verdict, and let all ranks raise, if a rank that has not come has started another collective."""
        self.log.publish()
        self.log.ask()
        difference, _ = self.log.difference(self._absent(name, self.log.partners()))
        # The verdict is read after the logs: ranks may have come, and gone on, meanwhile.
        if difference is not None and not self._store.check([_verdict(name)]):
            self._decide(name, "; ".join(difference.texts()))
            for watch in self.log.watches:
                watch.sound(difference)

    def _absent(self, name: str, ranks: Iterable[int]) -> list[int]:
        """Return those of these ranks that have not published that they wait in a call."""
        others = [rank for rank in ranks if rank != self._rank]
        if self._store.check([f"{name} of {rank}" for rank in others]):
            return []
        return [rank for rank in others if not self._store.check([f"{name} of {rank}"])]

    def _absence(self, name: str, call: str, ranks: Iterable[int], waited_s: float) -> str:
        """Return which of these ranks have not come to a call, as text."""
        return explain(
            f"Rank {self._rank} called {call}, which communicates, and waited {waited_s:.0f} s for other ranks.",
            expected=f"the same call on ranks {some(map(str, self._ranks), 8)}",
            got=f"no call on ranks {some(map(str, self._absent(name, ranks)), 8)}",
        )


def _verdict(name: str) -> str:  # the store's key of a call's verdict
    return f"{name} verdict"


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Meeting] = weakref.WeakKeyDictionary()


def meeting_of(group: dist.ProcessGroup) -> Meeting | None:
    """Return the meetings of a group; None where there is no other rank to meet (see `log_of`)."""
    log = log_of(group)
    if log is None:
        return None
    if group not in _meetings:
        _meetings[group] = Meeting(group, log)
    return _meetings[group]


# -- calls of users -------------------------------------------------------------------------------------


class _Scope:
    """A call of the user, in which each group meets once.

    Attributes:
        call: the function, the same text on all ranks.
        met: the meetings that ranks have attended in this call.
    """

    def __init__(self, call: str) -> None:
        self.call = call
        self.met: set[Meeting] = set()


class _StepOptions(dict[str, Any]):
    """The keyword arguments of an optimizer's step. Only the running step refers to them."""

    scope: _Scope


class _Scopes(threading.local):
    """The calls that are running in this thread."""

    function: _Scope | None = None  # of `one_meeting`
    step: weakref.ref[_StepOptions] | None = (
        None  # of an optimizer; it ends with the step, also by an exception
    )

    def running(self) -> _Scope | None:
        """Return the call that has begun first; None if no call is running."""
        step = self.step() if self.step is not None else None
        return self.function or (step.scope if step is not None else None)


_scopes = _Scopes()


@contextmanager
def one_meeting(call: str) -> Iterator[None]:
    """Context manager: all calls in the block that communicate are parts of one call, whose groups meet once.

    Args:
        call: the function, the same text on all ranks.
    """
    if _scopes.function is not None:  # a part of another call
        yield
        return
    _scopes.function = _Scope(call)
    try:
        yield
    finally:
        _scopes.function = None


def _begin_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a step of an optimizer; a hook, which returns the arguments of the step."""
    if torch.compiler.is_compiling() or _scopes.running() is not None:
        return None
    options = _StepOptions(kwargs)
    options.scope = _Scope(f"step of {type(optimizer).__name__}")
    _scopes.step = weakref.ref(options)
    return args, options


register_optimizer_step_pre_hook(_begin_step)


def meet(groups: Iterable[dist.ProcessGroup], call: str, meets: Meets = Meets.EACH) -> None:
    """Note a call that communicates in the logs of its groups; return once all ranks have made it, if it meets.

    Args:
        groups: the groups over which the call communicates, in the same order on all ranks.
        call: the function with shapes and placements, the same text on all ranks.
        meets: which of several such calls meet.

    Raises:
        LifecycleError: as `Meeting.attend`.
    """
    scope = _scopes.running()
    call = call if scope is None else f"{scope.call}: {call}"
    failure: LifecycleError | None = None
    for meeting in dict.fromkeys(filter(None, map(meeting_of, groups))):
        log = meeting.log
        has_met = scope is not None and meeting in scope.met
        is_in_row = meets is Meets.FIRST and log.is_in_row
        if has_met or is_in_row or meets is Meets.NEVER:
            if failure is None:
                # Another text than that of a call that meets: if ranks decide differently, their logs differ.
                log.start(f"{call}, without a meeting", is_in_row=is_in_row)
        elif failure is not None:
            meeting.refuse(failure)
        else:
            try:
                meeting.attend(call)
            except LifecycleError as error:
                failure = error
                continue
            log.is_in_row = meets is Meets.FIRST
            if scope is not None:
                scope.met.add(meeting)
    if failure is not None:
        raise failure


@contextmanager
def reducing(groups: Iterable[dist.ProcessGroup], call: str, meets: Meets) -> Iterator[None]:
    """Context manager: reduce over these groups in the block, after `meet`; see `explained`."""
    groups = list(groups)
    meet(groups, call, meets)
    with explained(groups):
        yield


@contextmanager
def explained(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """Context manager: a collective of these groups that fails in the block raises a clearer error, if there is one."""
    try:
        yield
    except RuntimeError as failure:  # torch raises it if a collective fails
        for log in filter(None, map(log_of, groups)):
            log.explain(failure)
        raise
