"""Agreement between the ranks of a save or load. Ranks compare digests, a few numbers and errors; they gather no plans.

    agree           one all-reduce of a few int64: is the structure the same on all ranks, did a rank fail? Where
                    digests differ (pipeline stages, experts), each distinct structure is sent once.
    together        ``with coordinator.together("writing"):`` ends with one all-reduce. If the block fails on any rank,
                    Ctrl-C and out-of-memory included, all ranks raise at the end of the block.

A failed rank raises its own error. The other ranks raise a `CheckpointError` that names the failed ranks and their
errors. Work that only some ranks do, and work that may fail on one rank, is done inside a `together` block.

`agree` and `together` also compare a digest of the caller's arguments, so that different arguments are an error.

Communication uses a dedicated gloo group. Its collectives cannot interleave with those of training, and need no GPU
memory.
"""

from __future__ import annotations

import json
import secrets
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.ranks.roll_call import RollCall
from vescale_fsdp.checkpoint.ranks.stores import BoundedStore, silent_ranks, within
from vescale_fsdp.checkpoint.storage.checksums import checksum_of, digest_of, hex_checksum_of
from vescale_fsdp.collectives.interruptible import interruptibly
from vescale_fsdp.collectives.process_groups import break_group, ended_peers, new_group
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.errors import (
    ArgumentError,
    CheckpointError,
    CorruptCheckpointError,
    LifecycleError,
    NoCheckpointError,
    StorageError,
    VescaleError,
    sides_of,
    some,
)
from vescale_fsdp.layout.distribution import RankSet
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.torch_private import default_store, store_of, timeout_of

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
_NOTHING: Alike = {}

_FAILURE, _DAMAGE, _ABSENCE, _STORAGE, _FOREIGN, _INTERRUPT = 1, 2, 3, 4, 5, 6  # ascending severity, for MAX
_KINDS = {_DAMAGE: CorruptCheckpointError, _ABSENCE: NoCheckpointError}
_WORST = "_worst"  # attribute of errors that all ranks raise: the severity of the worst rank's error
_DOCUMENT_BYTES = 64 << 20  # 64 MiB, the largest message of a rank: other ranks allocate memory for it
COMMIT, ABORT = "commit", "abort"
# Seconds for which a rank whose collective failed waits for the reports of other ranks: in general, if a rank has
# probably ended, and in addition for an answer of the store.
_REPORT_S, _LOST_S, _ANSWER_S = 1.0, 0.3, 1.0
_READERS_S = 5.0  # a rank that has not read a decision after this time has ended, or cannot reach the store
_POLL_S = 0.001  # between two reads of a counter in the store
_LONGEST_S = 1800.0  # torch's default time-out of groups
_ENDLESS = 2**62  # stands for an unknown free space; both the value and its negative fit an int64
_NOTHING_DONE = "nothing was committed"
_MOST_ERRORS, _MOST_RANKS = 4, 16  # different errors in the summary of failed ranks, and ranks that are named
_MEETING_WORDS = 32  # size of the first collective of a call, which must be the same for all calls


def _severity(error: BaseException | None) -> int:
    """Return the severity of an error; 0 for None. Ranks compare severities, so that all react to the worst error."""
    if error is None:
        return 0
    for severity, kind in _KINDS.items():
        if isinstance(error, kind):
            return severity
    if isinstance(error, OSError | StorageError):  # before VescaleError, a base class of StorageError
        return _STORAGE
    if isinstance(error, VescaleError):
        return _FAILURE
    # Most severe: an unknown error ends its rank's process, so no rank may continue with an older checkpoint.
    return _FOREIGN if isinstance(error, Exception) else _INTERRUPT


def is_of_storage(error: BaseException) -> bool:
    """Return whether the worst error of all ranks was a failure of a rank's storage; the same on all ranks."""
    return error.__dict__.get(_WORST) == _STORAGE


def is_interrupt(error: BaseException) -> bool:
    """Return whether Ctrl-C or an exit on any rank caused this error; the same on all ranks."""
    return error.__dict__.get(_WORST) == _INTERRUPT


def _marked(error: E, worst: int) -> E:
    """Set an error's `_WORST` attribute to the severity of the worst rank's error; returns the error."""
    error.__dict__[_WORST] = worst
    return error


def _format_error(error: BaseException) -> str:
    """Return an error as text, with its notes, for messages on other ranks."""
    notes: list[str] = error.__dict__.get("__notes__", [])  # the notes that `add_note` has added (PEP 678)
    try:
        return "\n".join([f"{type(error).__name__}: {error}", *notes])
    except Exception as mute:  # noqa: BLE001  an error without a text is still reported
        return f"{type(error).__name__}, whose text raises {type(mute).__name__}"


def _on_one_line(text: str) -> str:
    """Return an error's text on one line, with its further lines in parentheses."""
    first, *others = filter(None, map(str.strip, text.splitlines()))
    return f"{first} ({'; '.join(others)})" if others else first


def _summary_of(failed: Mapping[int, str]) -> str:
    """Return the errors of ranks, one per line: each different one once, with its ranks.

    Errors are equal if their problem and their place are. An error with the problem of an earlier line has its place
    alone, since its advice is the same.

    Args:
        failed: the text of each failed rank's error, ascending by rank.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, text in failed.items():
        problem, *parts = filter(None, map(str.strip, text.splitlines()))
        place = next((part for part in parts if part.startswith("where: ")), "")
        ranks_of.setdefault((problem, place), []).append(rank)
    lines, shown = [], set[str]()
    for (problem, place), ranks in list(ranks_of.items())[:_MOST_ERRORS]:
        text = _on_one_line(failed[ranks[0]])
        if problem in shown:
            text = f"{problem} ({place})"
        shown.add(problem)
        name = "rank" if len(ranks) == 1 else "ranks"
        lines.append(f"{name} {some(map(str, ranks), _MOST_RANKS)}: {text}")
    if (more := len(ranks_of) - _MOST_ERRORS) > 0:
        lines.append(f"and {more} more errors, which their ranks raise")
    return "\n".join(lines)


class UnreachableError(CheckpointError):
    """A rank that was killed, has left, or does not answer in time.

    Args:
        rank: the rank that this rank waited for; None if it waited for several ranks.
    """

    def __init__(self, problem: str, *, rank: int | None = None, **parts: Any) -> None:
        super().__init__(problem, **parts)
        self.rank = rank


class Agreement(NamedTuple):
    """The result of `Coordinator.agree`, the same on all ranks.

    Attributes:
        classes: each distinct structure, with the ranks that have it.
        blob_bytes: the largest number of bytes of per-rank values on any rank.
        has_resharded: whether the state of any rank has `Resharded` values.
        save_id: a new random id.
        free_bytes: the smallest free space of all ranks; None if no rank knows its free space.
    """

    classes: list[tuple[RankSet, Structure]]
    blob_bytes: int
    has_resharded: bool
    save_id: str
    free_bytes: int | None


class Coordinator:
    """Communication between the ranks that save or load together. The base class serves a single process."""

    rank = 0
    world_size = 1
    rank_of: dict[int, int] | None = None  # global rank -> rank in this group; None if they are equal

    def agree(
        self,
        structure: Structure | None,
        blob_bytes: int,
        error: BaseException | None,
        alike: Alike = _NOTHING,
        free_bytes: int | None = None,
        *,
        has_resharded: bool = False,
    ) -> Agreement:
        """Compare the structures of all ranks' states, and agree on the parameters of a save. A collective.

        Args:
            structure: this rank's structure; None only together with an error.
            blob_bytes: number of bytes of this rank's per-rank values.
            error: the error of this rank's capture, if it failed.
            alike: arguments that must be the same on all ranks, by name.
            free_bytes: free space where this rank will write; None if unknown.
            has_resharded: whether the state has `Resharded` values.

        Raises:
            CheckpointError: on all ranks, if any rank passes an error or a different argument. A rank that passes an
                error raises that error.
        """
        words = words_of(structure.digest if structure is not None else bytes(16))
        # MAX returns rank 0's number; 62 bits fit an int64.
        save_id = secrets.randbits(62) if self.rank == 0 else 0
        free = _ENDLESS if free_bytes is None else free_bytes
        largest_bytes, resharded, save_id, least_free, *digests = self.raise_together(
            error,
            "describing the state",
            alike=alike,
            # -free, because the negative of the largest -free is the smallest free space.
            numbers=[blob_bytes, has_resharded, save_id, -free, *both_ways(words)],
            is_first=True,
        )
        assert structure is not None
        world = RankSet.world(self.world_size)
        classes = [(world, structure)] if is_same(digests) else self._exchange(structure)
        # None: no rank knows its free space.
        least_free_bytes = None if -least_free == _ENDLESS else -least_free
        return Agreement(classes, largest_bytes, bool(resharded), f"{save_id:016x}", least_free_bytes)

    def _exchange(self, structure: Structure) -> list[tuple[RankSet, Structure]]:
        """Return every distinct structure with its ranks; the first of these ranks sends the structure."""
        classes = self.distinct(structure.document, "comparing structures")
        with self.together("reading other ranks' structures"):
            return [
                (ranks, structure if self.rank in ranks else Structure.from_json(json.loads(document)))
                for ranks, document in classes
            ]

    def distinct(self, document: bytes, doing: str) -> list[tuple[RankSet, bytes]]:
        """Return every distinct document with its ranks, in the order of their first ranks. A collective.

        The first of these ranks sends the document: large ones, of which most ranks have the same, cost little.

        Args:
            document: this rank's, which is not empty.
            doing: what this rank does, for messages.
        """
        return [(RankSet.world(1), document)]

    def raise_together(
        self,
        error: BaseException | None,
        doing: str,
        outcome: str = _NOTHING_DONE,
        alike: Alike = _NOTHING,
        numbers: Sequence[int] = (),
        *,
        is_first: bool = False,
    ) -> list[int]:
        """Reduce ``numbers`` by MAX over all ranks and return the result, or raise on all ranks if a rank failed.

        Args:
            error: this rank's error, of any class.
            doing: the action of this rank, for the message.
            outcome: the state of the checkpoint if a rank failed, for the message.
            alike: as for `agree`.
            is_first: whether this is the first collective of a call; a warning then names ranks that do not take part.

        Raises:
            CheckpointError: on ranks without an error: names the failed ranks and their errors, or the argument that
                differs. A failed rank raises its own error. One exception: if its error is a `VescaleError` and
                another rank's error is more severe, the rank raises a CheckpointError of the more severe kind.
        """
        if error is not None:
            raise _marked(error, _severity(error))
        return list(numbers)

    @contextmanager
    def together(
        self, doing: str, outcome: str = _NOTHING_DONE, alike: Alike = _NOTHING, *, is_first: bool = False
    ) -> Iterator[None]:
        """Context manager: at the end of the block, all ranks continue or all ranks raise; see `raise_together`.

        ``alike`` is read at the end of the block, so the block may add arguments to it.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:  # noqa: BLE001  Ctrl-C too: other ranks would wait for this rank
            error = caught
        try:
            # A failed block may not have added all arguments to `alike`, so a failed rank passes none.
            self.raise_together(
                error, doing, outcome, alike if error is None else _NOTHING, is_first=is_first
            )
        finally:
            del error  # the error's traceback would keep the block's frames, and their tensors, alive

    def raise_to_largest(self, numbers: torch.Tensor) -> None:
        """All-reduce an integer CPU tensor in place by MAX. A collective."""

    def wait_for_all(self, doing: str) -> None:
        """Wait until all ranks have called this. A collective.

        Raises:
            UnreachableError: if a rank was lost.
        """

    def begin_largest(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Start an all-reduce by MAX. A collective. The returned function waits for the result, and returns it."""
        return lambda: list(numbers)

    def begin_sum(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Start an all-reduce by SUM. A collective. The returned function waits for the result, and returns it."""
        return lambda: list(numbers)

    def begin_exchange(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        """Start to send and receive contiguous CPU tensors, each to or from the rank in its pair.

        Returns a function that waits for all transfers. Between two ranks, sends and receives match in the order in
        which they were started.
        """
        assert not outgoing and not incoming, "one process alone has no partners"
        return lambda: None

    def exchange(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Send and receive tensors as `begin_exchange` does, and wait until all transfers are done."""
        self.begin_exchange(outgoing, incoming)()

    def decide(self, name: str, word: str) -> str:
        """Enter ``word`` in the ranks' store under a name, and return the word that any rank entered first.

        Does not wait for other ranks, with one exception: rank 0, whose process may host the store, waits up to 5 s
        until all ranks have read `COMMIT`, because a rank that cannot read the store assumes `ABORT`.

        Raises:
            CheckpointError: if the ranks' store cannot be reached.
        """
        return word

    def new_name(self) -> str:
        """Return a new name for `decide`, the same on all ranks. A collective."""
        return ""

    def leave(self, name: str, rank: int | None) -> tuple[int, ...]:
        """Close this group's connections after a collective or message failed, so that no rank waits for this one.

        Args:
            name: name of an entry in the ranks' store, the same on all ranks that leave for the same reason.
            rank: the rank that this rank waited for, if it waited for one.

        Returns:
            The ranks that were lost, as seen by the first rank that left: closed connections of ranks that have left
            look lost to later ranks. Without the store, as seen by this rank. Empty if this is unknown.
        """
        return ()

    def everyone(self, item: T) -> list[T]:
        """Return the items of all ranks by rank. A collective: one all-reduce if ``repr(item)`` is equal on all ranks,
        else also an all-gather.
        """
        return [item]


class SoloCoordinator(Coordinator):
    """The coordinator of one process that saves or loads alone.

    Args:
        global_rank: this process's rank in its world, whose other ranks do not take part; 0 without a world.
    """

    def __init__(self, global_rank: int = 0) -> None:
        self.rank_of = {global_rank: 0} if global_rank else None


class GroupCoordinator(Coordinator):
    """Coordinator of the ranks of a process group, over a dedicated gloo group.

    Args:
        group: the gloo group.
        rank_of: group rank of each global rank; None if they are equal.
        roll_call: reports the ranks that are missing from the first collective of a call.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank_of: dict[int, int] | None, roll_call: RollCall | None = None
    ) -> None:
        self.group, self._roll_call = group, roll_call
        timeout = timeout_of(group)
        self._timeout_s = _LONGEST_S if timeout is None else timeout.total_seconds()
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.rank_of = rank_of

    def decide(self, name: str, word: str) -> str:
        store = store_of(self.group)
        doing = f"rank {self.rank}, {name}"
        try:
            # An expected value of "" matches a missing entry, so only the first rank's word is entered.
            entered = within(self._timeout_s, lambda: store.compare_set(name, "", word), doing)
        except RuntimeError as lost:  # torch's errors of a store, and the LifecycleError of `within`
            raise CheckpointError(
                "The ranks' store was lost during a decision.",
                expected=f"{word!r} to be entered, or an earlier word to be read, under {name!r}",
                got=f"{type(lost).__name__}: {lost}",
                where=f"rank {self.rank}",
                todo="check that all ranks have made the same decision before training continues",
            ) from lost
        decision = entered.decode()
        with suppress(RuntimeError):  # the decision is final, even if the store is lost now
            # Twice the time that rank 0 waits for readers, so that the limit ends only a call that hangs.
            within(2 * _READERS_S, lambda: self._wait_for_readers(store, name, decision), doing)
        return decision

    def _wait_for_readers(self, store: dist.Store, name: str, decision: str) -> None:
        """Count this rank as a reader of a decision. Rank 0 waits until all ranks have read `COMMIT`."""
        num_read = store.add(f"{name} read", 1)
        if self.rank == 0:
            deadline_s = time.monotonic() + _READERS_S
            while decision == COMMIT and num_read < self.world_size and time.monotonic() < deadline_s:
                # This process may host the store, and may exit after the decision.
                time.sleep(_POLL_S)
                num_read = store.add(f"{name} read", 0)  # adding 0 reads the counter

    def leave(self, name: str, rank: int | None) -> tuple[int, ...]:
        lost = ended_peers(self.group)
        if not lost and rank is not None:
            lost = [rank]
        store = store_of(self.group)
        with suppress(
            RuntimeError, ValueError
        ):  # the store was lost too, or has an entry that is no list of ranks
            first = within(_READERS_S, lambda: store.compare_set(name, "", json.dumps(lost)), name)
            lost = [int(each) for each in parse_json(first)]
        break_group(self.group)  # after the entry, so that ranks that fail because of it find the entry
        return tuple(lost)

    def new_name(self) -> str:
        # The largest number that any rank has drawn; 62 bits fit an int64.
        return f"{self._max([secrets.randbits(62)])[0]:016x}"

    def _max(self, values: list[int], first_doing: str | None = None) -> list[int]:
        """Return the largest of each value over all ranks.

        Args:
            first_doing: what this rank does, if this is the first collective of a call; None in later collectives.
        """
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self._reaching("meeting"):
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)
            self._wait_for(work, first_doing)
        return tensor.tolist()

    def _meet(self, values: list[int], doing: str) -> list[int]:
        """Run `_max` as the first collective of a call, which may meet a different call on another rank.

        Values are padded to one size, because gloo aborts the process if sizes differ.

        Raises:
            CheckpointError: on all ranks, if ranks make different calls.
        """
        assert len(values) <= _MEETING_WORDS
        # The first word of `doing` identifies the call. 62 bits, so that the value and its negative fit an int64.
        call = checksum_of(doing.partition(" ")[0].encode()) >> 2
        padding = [0] * (_MEETING_WORDS - len(values))
        high, low, *largest = self._max([call, -call, *values, *padding], doing)
        if high != -low:
            raise CheckpointError(
                "Ranks make different calls at the same time.",
                expected="the same call on all ranks",
                got="; ".join(f"rank {rank} is {each}" for rank, each in self._first_of_each(doing)),
                where=f"rank {self.rank}, {doing}",
                todo="make saves and loads on all ranks of the group in the same order; nothing was written",
            )
        return largest[: len(values)]

    def _first_of_each(self, doing: str) -> list[tuple[int, str]]:
        """Return at most 8 distinct actions of the ranks, each with the first rank that does it, for a message."""
        ranks: dict[str, int] = {}
        for rank, each in enumerate(self._gathered(doing, "comparing calls")):
            ranks.setdefault(each, rank)
        return [(rank, each) for each, rank in ranks.items()][:8]

    def _wait_for(self, work: dist.Work | None, first_doing: str | None) -> None:
        assert work is not None  # this rank is in the group
        if self._roll_call is None:
            wait_for(work)
        elif first_doing is None:
            # All ranks must count the same collectives: the number is part of later keys.
            self._roll_call.skip()
            wait_for(work)
        else:
            interruptibly(partial(self._roll_call.meet, work, first_doing))

    def distinct(self, document: bytes, doing: str) -> list[tuple[RankSet, bytes]]:
        # The length with the digest: receivers allocate memory before the document arrives.
        mine = torch.tensor([len(document), *words_of(digest_of(document))], dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._reaching(doing):
            wait_for(dist.all_gather(rows, mine, group=self.group, async_op=True))
        owners: dict[tuple[int, ...], list[int]] = {}
        for rank, row in enumerate(rows):
            owners.setdefault(tuple(row.tolist()), []).append(rank)
        # In a `together` block, because a rank that runs out of memory here would not take part in the broadcasts.
        with self.together(f"allocating memory while {doing}"):
            documents = [
                # A bytearray, because torch warns about read-only bytes.
                torch.frombuffer(bytearray(document), dtype=torch.uint8)
                if self.rank == ranks[0]
                else torch.empty(length, dtype=torch.uint8, device="cpu")
                for (length, *_), ranks in owners.items()
            ]
        with self._reaching(doing):
            for each, ranks in zip(documents, owners.values(), strict=True):
                wait_for(dist.broadcast(each, group=self.group, group_src=ranks[0], async_op=True))
        return [
            (RankSet.of(ranks), each.numpy().tobytes())
            for each, ranks in zip(documents, owners.values(), strict=True)
        ]

    def raise_together(
        self,
        error: BaseException | None,
        doing: str,
        outcome: str = _NOTHING_DONE,
        alike: Alike = _NOTHING,
        numbers: Sequence[int] = (),
        *,
        is_first: bool = False,
    ) -> list[int]:
        arguments = both_ways(words_of(alike))
        values = [_severity(error), *arguments, *numbers]
        worst, *largest = self._meet(values, doing) if is_first else self._max(values)
        if worst:  # checked before the arguments, which a failed rank may not have sent
            self._raise_gathered(error, worst, doing, outcome)
        if not is_same(largest[: len(arguments)]):
            raise unlike(self._gathered(dict(alike), "comparing arguments"))
        return largest[len(arguments) :]

    def _raise_gathered(self, error: BaseException | None, worst: int, doing: str, outcome: str) -> NoReturn:
        """Raise on all ranks, after a rank has failed: gather the texts of all errors, and name the failed ranks."""
        texts = self._documents(None if error is None else _format_error(error), doing)
        failed = {rank: text for rank, text in enumerate(texts) if text is not None}
        # This rank's own error is raised unless it is a `VescaleError` of a less severe kind than the worst one. Then,
        # and on ranks without an error, an error of the worst kind is raised.
        if error is not None and _severity(error) in (worst, _STORAGE, _FOREIGN, _INTERRUPT):
            error.add_note(f"on rank {self.rank}, while {doing}; {outcome}")
            raise _marked(error, worst)
        summary = _KINDS.get(worst, CheckpointError)(
            f"{len(failed)} of {self.world_size} ranks failed while {doing}.",
            expected="all ranks to succeed",
            # One line per error, so that its parts are not mistaken for the summary's.
            got=_summary_of(failed),
            where=f"ranks {sorted(failed)[:_MOST_RANKS]}",
            todo=f"see the errors above; {outcome}",
        )
        raise _marked(summary, worst) from error

    @contextmanager
    def _reaching(self, doing: str, began_s: float | None = None) -> Iterator[None]:
        """Context manager around a collective: translates an error of gloo into a CheckpointError.

        Args:
            began_s: when the collective was started, by `time.monotonic`; None: now.
        """
        began_s = time.monotonic() if began_s is None else began_s
        try:
            yield
        except CheckpointError:
            # Also a RuntimeError; comes from the roll call, and already names the missing ranks.
            raise
        except RuntimeError as lost:
            was_late = time.monotonic() - began_s >= self._timeout_s  # else a connection was closed
            # A LifecycleError: the store is lost, or an elastic job knows that a rank is, and waits no longer.
            silent = "no answer" if isinstance(lost, LifecycleError) else self._silent()
            raise UnreachableError(
                f"Ranks could not be reached while {doing}.",
                expected=f"all {self.world_size} ranks to answer"
                + (f" within the process group's time-out, {self._timeout_s:g} s" if was_late else ""),
                got=f"{silent}; {type(lost).__name__}: {_on_one_line(str(lost) or 'no text')}",
                where=f"rank {self.rank}",
                todo="see the errors of the other ranks; if a rank writes for longer than the time-out, pass a longer "
                "time-out to init_process_group"
                if was_late
                else "see the errors of the other ranks: a rank has ended, or has left after an error",
            ) from lost

    def _silent(self) -> str:
        """Name the ranks that do not report a failure soon after this rank, for an error."""
        wait_s = _LOST_S if ended_peers(self.group) else _REPORT_S
        ask = partial(silent_ranks, store_of(self.group), self.rank, self.world_size, wait_s)
        try:
            silent = within(wait_s + _ANSWER_S, ask, f"rank {self.rank}")
        except RuntimeError:  # torch's errors of a store, and the LifecycleError of `within`
            return "no answer from the process group's store, which rank 0 or its launcher hosts"
        return f"no report from ranks {silent}" if silent else "a report from every rank"

    def raise_to_largest(self, numbers: torch.Tensor) -> None:
        with self._reaching("comparing numbers"):
            wait_for(dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True))

    def wait_for_all(self, doing: str) -> None:
        with self._reaching(doing):
            # Not an all-reduce: gloo passes its parts around a ring, which takes a message per rank, twice.
            wait_for(dist.barrier(group=self.group, async_op=True))

    def begin_largest(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        # Only `SaveSchedule` calls this, one call per step: what a rank that is late has not finished is the last call.
        return self._begin_reduction(numbers, dist.ReduceOp.MAX, "the call for the previous step")

    def begin_sum(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        return self._begin_reduction(numbers, dist.ReduceOp.SUM)

    def _begin_reduction(
        self, numbers: Sequence[int], op: dist.ReduceOp.RedOpType, first_doing: str | None = None
    ) -> Callable[[], list[int]]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        began_s = time.monotonic()
        with self._reaching("comparing numbers"):
            work = dist.all_reduce(tensor, op, group=self.group, async_op=True)
        assert work is not None  # this rank is in the group

        def arrive() -> list[int]:
            with self._reaching("comparing numbers", began_s):
                self._wait_for(work, first_doing)
            return tensor.tolist()

        return arrive

    def begin_exchange(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        doing, began_s = "exchanging bytes with other ranks", time.monotonic()
        with self._reaching(doing):
            works = [dist.irecv(tensor, group=self.group, group_src=rank) for tensor, rank in incoming]
            works += [dist.isend(tensor, group=self.group, group_dst=rank) for tensor, rank in outgoing]

        def finish() -> None:
            with self._reaching(doing, began_s):
                wait_for(*works)

        return finish

    def everyone(self, item: T) -> list[T]:
        digest = checksum_of(repr(item).encode()) >> 2  # 62 bits: the digest and its negative fit an int64
        high, low = self._max([digest, -digest])
        if high == -low:
            return [item] * self.world_size
        return self._gathered(item, "gathering a value of each rank")

    def _documents(self, item: Json, doing: str) -> list[Json]:
        """Return the JSON values of all ranks by rank.

        Sizes are gathered first, because the buffers of an all-gather must have the same size on all ranks.
        """
        # A bytearray, because torch warns about read-only bytes.
        data = torch.frombuffer(bytearray(self._seal(json.dumps(item).encode())), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
        with self._reaching(doing):
            length = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
            wait_for(dist.all_gather(sizes, length, group=self.group, async_op=True))
        lengths = [int(size) for size in sizes]
        if not 0 < min(lengths) <= max(lengths) <= _DOCUMENT_BYTES:
            raise CheckpointError(
                f"A rank sent a message that is empty or too large, while {doing}.",
                expected=f"1 to {_DOCUMENT_BYTES} bytes from each rank",
                got=lengths[:16],
            )
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in lengths]
        with self._reaching(doing):
            wait_for(dist.all_gather(rows, padded, group=self.group, async_op=True))
        return [
            self._document(self._open(row[:length].numpy().tobytes(), rank), rank, doing)
            for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]

    def _document(self, data: bytes, rank: int, doing: str) -> Json:
        """Parse a message of another rank; raises a CheckpointError that names the rank if it is not JSON."""
        try:
            return parse_json(data)  # type: ignore[no-any-return]
        except ValueError as error:
            raise CheckpointError(
                f"A rank sent an invalid message while {doing}.",
                expected="JSON",
                got=repr(data[:40]),
                where=f"rank {rank}, as rank {self.rank} reads it",
                todo="use the same version on all ranks, and ports that no other user can reach",
            ) from error

    def _seal(self, data: bytes) -> bytes:
        """Encode a message for sending; subclasses may authenticate it."""
        return data

    def _open(self, data: bytes, rank: int) -> bytes:
        """Return the message that another rank has encoded with `_seal`."""
        return data

    def _gathered(self, item: T, doing: str) -> list[T]:
        """Return the items of all ranks by rank."""
        items = [item] * self.world_size
        with self._reaching(doing):
            interruptibly(lambda: dist.all_gather_object(items, item, group=self.group))
        return items


# Base group -> use -> gloo group. The keys are weak, because a gloo group that outlives `destroy_process_group` keeps
# its threads and sockets. These would accumulate in a process that restarts its job.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)

# Gloo group -> roll call. The keys are weak, so that an entry does not keep its group alive.
_roll_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall] = weakref.WeakKeyDictionary()


def solo_coordinator() -> SoloCoordinator:
    """Return the coordinator of this process alone, whether or not it has a process group."""
    return SoloCoordinator(dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)


def coordinator_for(process_group: dist.ProcessGroup | None = None, *, use: str = "sync") -> Coordinator:
    """Return the coordinator of a process group; without torch.distributed, the coordinator of a single process.

    The first call for a group creates a gloo group of the same ranks, so all ranks of the group must make this call
    together. The gloo group has the time-out of the group: if a rank is missing, a save or load fails after that time.

    Args:
        process_group: the ranks that save or load together; default: all ranks.
        use: name of the gloo group; work that runs concurrently needs groups with different names.

    Raises:
        ValueError: if this rank is not in the group.
        CheckpointError: if ranks do not make this call in time; names the missing ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SoloCoordinator()
    base = process_group if process_group is not None else dist.group.WORLD
    # On ranks outside of a group, `dist.new_group` returns a placeholder that is no ProcessGroup.
    if not isinstance(base, dist.ProcessGroup):
        raise ArgumentError(
            "This rank is not in the process group.",
            expected="a group that includes this rank",
            got=repr(base),
            where=f"process_group=.., rank {dist.get_rank()}",
            todo="call this on the group's ranks only",
        )
    ranks = dist.get_process_group_ranks(base)
    rank_of = {rank: group_rank for group_rank, rank in enumerate(ranks)}
    if all(rank == group_rank for rank, group_rank in rank_of.items()):
        rank_of = None  # type: ignore[assignment]  # callers then skip the conversion of ranks
    known = _groups.setdefault(base, {})
    if use not in known:
        store, members = default_store(), hex_checksum_of(",".join(map(str, ranks)).encode())
        name = f"{base.group_name} {members} {use}"
        rank, timeout = dist.get_rank(base), timeout_of(base)
        if timeout is not None:
            # A limit for each call: torch's own clients may wait forever for a store that has stopped.
            store = BoundedStore(store, timeout.total_seconds())
        roll_call = RollCall(store, name, rank, len(ranks), timeout)
        # Wait for all ranks here, because a wait inside `new_group` does not report which ranks are missing.
        roll_call.gather("creating a gloo group for the ranks of the process group")
        known[use] = new_group(base, backend="gloo")
        _roll_calls[known[use]] = roll_call
    return GroupCoordinator(known[use], rank_of, _roll_calls[known[use]])


Alike = Mapping[str, Json]
_ABSENT = "nothing"  # shown in place of the value, for a rank that lacks the key


def words_of(alike: Alike | bytes) -> list[int]:
    """Return the digest of named arguments as four unsigned 32-bit words. The order of the names does not matter.

    Bytes are taken as the digest itself.
    """
    if not isinstance(alike, bytes):
        # default=repr: arguments may be of types that JSON lacks.
        alike = digest_of(json.dumps(alike, sort_keys=True, default=repr).encode())
    # 32 bits each, so that their negatives fit an int64, see `both_ways`.
    return list(struct.unpack("<4I", alike))


def both_ways(words: list[int]) -> list[int]:
    """Return the words and their negatives. The MAX of both over ranks shows whether ranks differ, see `is_same`."""
    return [*words, *(-word for word in words)]


def is_same(largest: Sequence[int]) -> bool:
    """Return whether all ranks passed the same words, given the MAX of `both_ways` over ranks."""
    half = len(largest) // 2
    # The MAX of the negatives is the negative of the smallest: equal if largest and smallest are equal.
    return all(high == -low for high, low in zip(largest[:half], largest[half:], strict=True))


def unlike(everyone: Sequence[Json]) -> CheckpointError:
    """Return the error for arguments that differ between ranks; ``everyone`` has the arguments of each rank."""
    name, values = _first_difference(everyone, "")
    sides = sides_of(dict(enumerate(map(repr, values))))
    return CheckpointError(
        "Ranks disagree about an argument.",
        expected="the same arguments on all ranks",
        got="; ".join(f"{text[:200]} on ranks {ranks}" for text, ranks in sides),
        where=f"the argument `{name}`",
        todo="pass the same value on every rank; nothing was written or overwritten. Put values that differ by "
        "rank into the state, as PerRank(value)",
    )


def _first_difference(values: Sequence[Json], name: str) -> tuple[str, Sequence[Json]]:
    """Return the name of the first argument that differs between ranks, and its value on each rank.

    Dicts, and lists of equal lengths, are searched for the innermost difference.
    """
    keys: Sequence[object] = []
    if all(isinstance(value, dict) for value in values):
        keys = sorted({key for value in values for key in value})  # all ranks then name the same difference
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        keys = range(len(values[0]))
    for key in keys:
        items = [value.get(key, _ABSENT) if isinstance(value, dict) else value[key] for value in values]
        # Compared by digest, as in the collective that has found the difference.
        if len({tuple(words_of({"": item})) for item in items}) > 1:
            return _first_difference(items, child_name(name, key))
    return name, values


def num_neighbors() -> int:
    """Return how many ranks may share this machine's cores: the world size. LOCAL_WORLD_SIZE, if set, replaces it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
