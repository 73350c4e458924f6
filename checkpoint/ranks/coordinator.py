"""How the ranks of a save or load agree: a digest, a few numbers, errors. No plans are ever gathered.

    agree           one all-reduce of a few int64: is the structure the same everywhere, did a rank fail? Only
                    where digests differ (pipeline stages, experts) does each structure travel, once.
    together        ``with coordinator.together("writing"):`` ends in a meeting, one all-reduce: whatever was raised
                    inside on any rank, Ctrl-C and a lack of memory included, ends the block on all of them.

Who was hit raises what it met itself. The others raise a `CheckpointError` that names the ranks and what they met.
Work that only some ranks do, and work that may fail on one, stands inside such a block; nothing catches less.

Both compare a digest of the caller's arguments on the way, so that no rank's silently wins.

Everything runs on a gloo group of its own, so it can neither take turns with training's collectives
nor spend GPU memory.
"""

from __future__ import annotations

import json
import secrets
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.checksums import checksum_of, digest_of, hex_checksum_of
from vescale_fsdp.checkpoint.manifest.manifest import NoCheckpointError
from vescale_fsdp.checkpoint.manifest.rank_set import RankSet
from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.ranks.roll_call import RollCall
from vescale_fsdp.checkpoint.ranks.stores import BoundedStore, within
from vescale_fsdp.checkpoint.storage.base import StorageError
from vescale_fsdp.collectives import new_group
from vescale_fsdp.errors import ArgumentError, CheckpointError, CorruptCheckpointError, VescaleError
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.torch_private import default_store, store_of, timeout_of

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
_NOTHING: Alike = {}

_FAILURE, _DAMAGE, _ABSENCE, _STORAGE, _FOREIGN, _INTERRUPT = 1, 2, 3, 4, 5, 6
_KINDS = {_DAMAGE: CorruptCheckpointError, _ABSENCE: NoCheckpointError}
_WORST = "_worst"  # an attribute of errors that have ended a block on all ranks
_DOCUMENT_BYTES = 64 << 20  # 64 MiB
COMMIT, ABORT = "commit", "abort"
_READERS_S = 5.0  # a rank that has not read a decision by then is lost, or finds the store lost
_POLL_S = 0.001
_LONGEST_S = 1800.0  # torch's own time-out of groups
_ENDLESS = 2**62  # more bytes than any storage has
_NOTHING_DONE = "nothing was committed"
_MEETING_WORDS = 32  # numbers that ranks compare at the first meeting of a call, at most


def _severity(error: BaseException | None) -> int:
    """0, or how bad an error is: all ranks raise the worst kind, so that they decide alike what to do next."""
    if error is None:
        return 0
    for severity, kind in _KINDS.items():
        if isinstance(error, kind):
            return severity
    if isinstance(error, OSError | StorageError):
        return _STORAGE
    # Whoever meets what is not ours raises it and is gone: the others must not go on with an older checkpoint.
    if isinstance(error, VescaleError):
        return _FAILURE
    return _FOREIGN if isinstance(error, Exception) else _INTERRUPT


def is_of_storage(error: BaseException) -> bool:
    """Whether an error that has ended a block on all ranks says that a rank could not use its storage, and nothing
    worse of any rank. The same on all ranks."""
    return error.__dict__.get(_WORST) == _STORAGE


def is_interrupt(error: BaseException) -> bool:
    """The same for Ctrl-C, or an exit, on any rank."""
    return error.__dict__.get(_WORST) == _INTERRUPT


def _marked(error: E, worst: int) -> E:
    """An error that tells how bad it is for the worst rank."""
    error.__dict__[_WORST] = worst
    return error


def _told(error: BaseException) -> str:
    """An error as other ranks are told of it."""
    notes: list[str] = error.__dict__.get("__notes__", [])  # PEP 678
    try:
        return "\n".join([f"{type(error).__name__}: {error}", *notes])
    except Exception as mute:  # noqa: BLE001  an error whose text cannot be had is still told of
        return f"{type(error).__name__}, whose text raises {type(mute).__name__}"


class Agreement(NamedTuple):
    """What ranks know together after `Coordinator.agree`."""

    classes: list[tuple[RankSet, Structure]]
    blob_bytes: int  # of the largest rank
    has_resharded: bool  # on any rank
    save_id: str
    free_bytes: int | None  # the least that any rank has; None if nobody knows


class Coordinator:
    """This rank's place among those that save or load together; by itself, that of one process alone."""

    rank = 0
    world_size = 1
    rank_of: dict[int, int] | None = None  # number here of each global rank, where they differ

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
        """Compare structures; ``structure`` is None only beside an error.

        Args:
            alike: arguments that must be the same on all ranks, by name.
            free_bytes: what is free where this rank is going to write, if that is known.
            has_resharded: whether the state has `Resharded` values.

        Raises:
            CheckpointError: on all ranks, if any rank came with an error or with another argument; a rank that came
                with an error raises that.
        """
        words = words_of(structure.digest if structure is not None else bytes(16))
        save_id = secrets.randbits(62) if self.rank == 0 else 0
        free = _ENDLESS if free_bytes is None else free_bytes
        largest_bytes, resharded, save_id, least_free, *digests = self.raise_together(
            error,
            "describing the state",
            alike=alike,
            numbers=[blob_bytes, has_resharded, save_id, -free, *both_ways(words)],
            is_first=True,
        )
        assert structure is not None
        world = RankSet.world(self.world_size)
        classes = [(world, structure)] if is_same(digests) else self._exchange(structure, words)
        found = None if -least_free == _ENDLESS else -least_free
        return Agreement(classes, largest_bytes, bool(resharded), f"{save_id:016x}", found)

    def _exchange(self, structure: Structure, words: list[int]) -> list[tuple[RankSet, Structure]]:
        """Every distinct structure, sent once by its first rank, with the ranks that have it."""
        raise AssertionError("one process alone has one structure")

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
        """The largest of each of ``numbers`` over all ranks if no rank failed; else raise on all of them.

        Args:
            error: what this rank met, whatever it is.
            doing: at what, for the message.
            outcome: what has become of the checkpoint, if a rank failed.
            alike: as for `agree`.
            is_first: the first meeting of a call: ranks that do not make the call are named within seconds.

        Raises:
            CheckpointError: on ranks that met nothing: names those that did, and what, or the argument that differs.
                The others raise what they met, or, where both are errors of a checkpoint, the worse of their own and
                the others' kind.
        """
        if error is not None:
            raise _marked(error, _severity(error))
        return list(numbers)

    @contextmanager
    def together(
        self, doing: str, outcome: str = _NOTHING_DONE, alike: Alike = _NOTHING, *, is_first: bool = False
    ) -> Iterator[None]:
        """A block that all ranks leave in the same way, as `raise_together` says.

        ``alike`` is looked at when the block ends: what is only known then may be put in meanwhile.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:  # noqa: BLE001  Ctrl-C too: the others would wait for this rank
            error = caught
        try:
            self.raise_together(
                error, doing, outcome, alike if error is None else _NOTHING, is_first=is_first
            )
        finally:
            del error  # it holds this frame, and what the block's frames hold

    def send(self, tensor: torch.Tensor, to_rank: int) -> None:
        """Send a contiguous CPU tensor to a rank that calls `receive`."""
        raise AssertionError("one process alone sends nothing")

    def receive(self, tensor: torch.Tensor, from_rank: int) -> None:
        """Fill a contiguous CPU tensor with what a rank sends."""
        raise AssertionError("one process alone receives nothing")

    def raise_to_largest(self, numbers: torch.Tensor) -> None:
        """Raise each number of an integer CPU tensor to the largest that any rank has there. A collective."""

    def begin_largest(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Start to compare, and wait for nobody: what is returned gives the largest of each number over all ranks, once
        all of them have begun. A collective."""
        return lambda: list(numbers)

    def begin_sum(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """The same for the sum of each number over all ranks. A collective."""
        return lambda: list(numbers)

    def begin_exchange(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        """Start to send and receive contiguous CPU tensors, each to or from the rank beside it; what is returned waits
        until they have gone and come. Those of the same two ranks meet in the order in which they were begun."""
        assert not outgoing and not incoming, "one process alone has no partners"
        return lambda: None

    def exchange(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """The same, and wait."""
        self.begin_exchange(outgoing, incoming)()

    def decide(self, name: str, word: str, done: str) -> str:
        """The first word that any rank has entered under a name, this one's if none has.

        Waits for no rank; but rank 0, which may hold the store, waits a while until all have read `COMMIT`: whoever
        cannot read takes it for `ABORT`.

        Args:
            done: an earlier name, which all ranks have read; it is dropped.

        Raises:
            CheckpointError: if the ranks' store cannot be reached.
        """
        return word

    def new_name(self) -> str:
        """A name for `decide` that is the same on all ranks, and new. A collective."""
        return ""

    def everyone(self, item: T) -> list[T]:
        """What each rank has: one all-reduce where it is the same, and reads the same, on all of them."""
        return [item]


class SoloCoordinator(Coordinator):
    """One process alone.

    Args:
        global_rank: its number in a world whose other ranks do not take part.
    """

    def __init__(self, global_rank: int = 0) -> None:
        self.rank_of = {global_rank: 0} if global_rank else None


class GroupCoordinator(Coordinator):
    """The ranks of a process group, over a gloo group of their own.

    Args:
        group: the gloo group.
        rank_of: number in it of each global rank, where they differ.
        roll_call: finds out who has not come to the first meeting of a call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank_of: dict[int, int] | None,
        roll_call: RollCall | None = None,
    ) -> None:
        self.group, self._roll_call = group, roll_call
        timeout = timeout_of(group)
        self._timeout_s = _LONGEST_S if timeout is None else timeout.total_seconds()
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.rank_of = rank_of

    def decide(self, name: str, word: str, done: str) -> str:
        store = store_of(self.group)

        doing = f"rank {self.rank}, {name}"
        try:
            entered = within(self._timeout_s, lambda: store.compare_set(name, "", word), doing)
        except RuntimeError as lost:
            raise CheckpointError(
                "The store of the ranks was lost as they decided.",
                expected=f"{word!r} to be entered, or an earlier word to be read, under {name!r}",
                got=f"{type(lost).__name__}: {lost}",
                where=f"rank {self.rank}",
                todo="compare what the ranks have before they go on",
            ) from lost
        found = entered.decode()
        with suppress(RuntimeError):  # decided is decided, with the store lost or without
            within(2 * _READERS_S, lambda: self._let_read(store, name, found, done), doing)
        return found

    def _let_read(self, store: dist.Store, name: str, found: str, done: str) -> None:
        num_read = store.add(f"{name} read", 1)
        if self.rank == 0:
            deadline_s = time.monotonic() + _READERS_S
            while found == COMMIT and num_read < self.world_size and time.monotonic() < deadline_s:
                # The store may be in this process, which may end as soon as it has decided.
                time.sleep(_POLL_S)
                num_read = store.add(f"{name} read", 0)
            store.delete_key(done)
            store.delete_key(f"{done} read")

    def new_name(self) -> str:
        return f"{self._max([secrets.randbits(62)])[0]:016x}"

    def _max(self, values: list[int], first_doing: str | None = None) -> list[int]:
        """The largest of each value over all ranks.

        Args:
            first_doing: at what ranks meet, where that is the first meeting of a call.
        """
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self._reaching("meeting"):
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)
            self._wait_for(work, first_doing)
        return tensor.tolist()

    def _meet(self, values: list[int], doing: str) -> list[int]:
        """`_max` at the first meeting of a call, of one size for all calls: gloo ends processes whose sizes differ.

        Raises:
            CheckpointError: on all ranks, if they make different calls.
        """
        assert len(values) <= _MEETING_WORDS
        call = checksum_of(doing.partition(" ")[0].encode()) >> 2
        room = [0] * (_MEETING_WORDS - len(values))
        high, low, *found = self._max([call, -call, *values, *room], doing)
        if high != -low:
            raise CheckpointError(
                "Ranks make different calls at the same time.",
                expected="the same call on all ranks",
                got="; ".join(f"rank {rank} is {each}" for rank, each in self._first_of_each(doing)),
                where=f"rank {self.rank}, {doing}",
                todo="make saves and loads on all ranks of the group in the same order; nothing was written",
            )
        return found[: len(values)]

    def _first_of_each(self, doing: str) -> list[tuple[int, str]]:
        """What ranks do, each with the first rank that does it; a few of them."""
        found: dict[str, int] = {}
        for rank, each in enumerate(self._gathered(doing, "comparing calls")):
            found.setdefault(each, rank)
        return [(rank, each) for each, rank in found.items()][:8]

    def _wait_for(self, work: dist.Work | None, first_doing: str | None) -> None:
        assert work is not None  # this rank is in the group
        if self._roll_call is None:
            work.wait()
        elif first_doing is None:
            self._roll_call.skip()
            work.wait()
        else:
            self._roll_call.meet(work, first_doing)

    def _exchange(self, structure: Structure, words: list[int]) -> list[tuple[RankSet, Structure]]:
        mine = torch.tensor([len(structure.document), *words], dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._reaching("comparing structures"):
            dist.all_gather(rows, mine, group=self.group)
        owners: dict[tuple[int, ...], list[int]] = {}
        for rank, row in enumerate(rows):
            owners.setdefault(tuple(row.tolist()), []).append(rank)
        with self.together("making room for other ranks' structures"):
            documents = [
                torch.frombuffer(bytearray(structure.document), dtype=torch.uint8)
                if self.rank == ranks[0]
                else torch.empty(length, dtype=torch.uint8, device="cpu")
                for (length, *_), ranks in owners.items()
            ]
        with self._reaching("exchanging structures"):
            for document, ranks in zip(documents, owners.values(), strict=True):
                dist.broadcast(document, group=self.group, group_src=ranks[0])
        classes = []
        with self.together("reading other ranks' structures"):
            for document, ranks in zip(documents, owners.values(), strict=True):
                same = self.rank in ranks
                found = structure if same else Structure.from_json(json.loads(document.numpy().tobytes()))
                classes.append((RankSet.of(ranks), found))
        return classes

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
        worst, *found = self._meet(values, doing) if is_first else self._max(values)
        if worst:
            self._raise_gathered(error, worst, doing, outcome)
        if not is_same(found[: len(arguments)]):
            raise unlike(self._gathered(dict(alike), "comparing arguments"))
        return found[len(arguments) :]

    def _raise_gathered(self, error: BaseException | None, worst: int, doing: str, outcome: str) -> NoReturn:
        texts = self._documents(None if error is None else _told(error), doing)
        failed = {rank: text for rank, text in enumerate(texts) if text is not None}
        if error is not None and _severity(error) in (worst, _STORAGE, _FOREIGN, _INTERRUPT):
            error.add_note(f"rank {self.rank} met this while {doing}; {outcome}")
            raise _marked(error, worst)
        shown = "\n".join(f"rank {rank}: {text}" for rank, text in list(failed.items())[:4])
        told = _KINDS.get(worst, CheckpointError)(
            f"{len(failed)} of {self.world_size} ranks failed while {doing}.",
            expected="all ranks to succeed",
            got=shown,
            where=f"ranks {sorted(failed)[:16]}",
            todo=f"see the errors above; {outcome}",
        )
        raise _marked(told, worst) from error

    @contextmanager
    def _reaching(self, doing: str) -> Iterator[None]:
        """A collective call: what gloo raises says that ranks are gone, not what that means."""
        try:
            yield
        except CheckpointError:
            raise  # says who has not come
        except RuntimeError as lost:
            raise CheckpointError(
                f"Ranks could not be reached while {doing}.",
                expected=f"all {self.world_size} ranks to come within the process group's time-out",
                got=f"{type(lost).__name__}: {lost}",
                where=f"rank {self.rank}",
                todo="see what the other ranks say; where ranks write for longer, pass init_process_group "
                "a longer timeout",
            ) from lost

    def send(self, tensor: torch.Tensor, to_rank: int) -> None:
        with self._reaching(f"sending to rank {to_rank}"):
            dist.send(tensor, group=self.group, group_dst=to_rank)

    def receive(self, tensor: torch.Tensor, from_rank: int) -> None:
        with self._reaching(f"receiving from rank {from_rank}"):
            dist.recv(tensor, group=self.group, group_src=from_rank)

    def raise_to_largest(self, numbers: torch.Tensor) -> None:
        with self._reaching("comparing numbers"):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)

    def begin_largest(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        return self._begin_reduction(numbers, dist.ReduceOp.MAX, "the call for the step before")

    def begin_sum(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        return self._begin_reduction(numbers, dist.ReduceOp.SUM)

    def _begin_reduction(
        self, numbers: Sequence[int], op: dist.ReduceOp.RedOpType, first_doing: str | None = None
    ) -> Callable[[], list[int]]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        with self._reaching("comparing numbers"):
            work = dist.all_reduce(tensor, op, group=self.group, async_op=True)
        assert work is not None  # this rank is in the group

        def arrive() -> list[int]:
            with self._reaching("comparing numbers"):
                self._wait_for(work, first_doing)
            return tensor.tolist()

        return arrive

    def begin_exchange(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        doing = "exchanging files with other ranks"
        with self._reaching(doing):
            works = [dist.irecv(tensor, group=self.group, group_src=rank) for tensor, rank in incoming]
            works += [dist.isend(tensor, group=self.group, group_dst=rank) for tensor, rank in outgoing]

        def finish() -> None:
            with self._reaching(doing):
                for work in works:
                    assert work is not None  # this rank is in the group
                    work.wait()

        return finish

    def everyone(self, item: T) -> list[T]:
        digest = checksum_of(repr(item).encode()) >> 2
        high, low = self._max([digest, -digest])
        if high == -low:
            return [item] * self.world_size
        return self._gathered(item, "comparing what ranks have")

    def _documents(self, item: Json, doing: str) -> list[Json]:
        """A JSON value of each rank."""
        data = torch.frombuffer(bytearray(self._seal(json.dumps(item).encode())), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
        with self._reaching(doing):
            dist.all_gather(
                sizes, torch.tensor([data.numel()], dtype=torch.int64, device="cpu"), group=self.group
            )
        lengths = [int(size) for size in sizes]
        if not 0 < min(lengths) <= max(lengths) <= _DOCUMENT_BYTES:
            raise CheckpointError(
                f"A rank sends no message, or more than one holds, while {doing}.",
                expected=f"1 to {_DOCUMENT_BYTES} bytes from each rank",
                got=lengths[:16],
            )
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in lengths]
        with self._reaching(doing):
            dist.all_gather(rows, padded, group=self.group)
        return [
            self._document(self._open(row[:length].numpy().tobytes(), rank), rank, doing)
            for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]

    def _document(self, data: bytes, rank: int, doing: str) -> Json:
        try:
            return parse_json(data)  # type: ignore[no-any-return]
        except ValueError as error:
            raise CheckpointError(
                f"A rank sends what is no message while {doing}.",
                expected="JSON",
                got=repr(data[:40]),
                where=f"rank {rank}, as rank {self.rank} reads it",
                todo="use the same version on all ranks, and ports that nobody else can reach",
            ) from error

    def _seal(self, data: bytes) -> bytes:
        """A message as it is sent."""
        return data

    def _open(self, data: bytes, rank: int) -> bytes:
        """Inverse of `_seal` for a message of another rank."""
        return data

    def _gathered(self, item: T, doing: str) -> list[T]:
        found = [item] * self.world_size
        with self._reaching(doing):
            dist.all_gather_object(found, item, group=self.group)
        return found


# By group asked for, then by use. Weak, since a group that is kept after `destroy_process_group` keeps its threads and
# sockets: one more set of them for each restart inside a process.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)

_roll_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall] = weakref.WeakKeyDictionary()


def solo_coordinator() -> SoloCoordinator:
    """The coordinator of this process alone, whatever world it is in."""
    return SoloCoordinator(dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)


def coordinator_for(process_group: dist.ProcessGroup | None = None, *, use: str = "sync") -> Coordinator:
    """The coordinator of a process group; without torch.distributed, one process alone.

    The first call for a group makes a gloo group of the same ranks, so all of them must make it together. It waits
    as long as the group does: a rank that never comes ends a save or load within that group's time-out.

    Args:
        process_group: the ranks that save or load together; default: all.
        use: work that goes on at the same time needs groups of its own: one per name.

    Raises:
        ValueError: if this rank is not in the group.
        CheckpointError: if ranks do not come; names them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SoloCoordinator()
    base = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(base, dist.ProcessGroup):  # what new_group gives to ranks that are not in the group
        raise ArgumentError(
            "This rank is not in the process group.",
            expected="a group of which it is a member",
            got=repr(base),
            where=f"rank {dist.get_rank()}",
            todo="call this on the group's ranks only",
        )
    ranks = dist.get_process_group_ranks(base)
    rank_of = {rank: place for place, rank in enumerate(ranks)}
    if all(rank == place for rank, place in rank_of.items()):
        rank_of = None  # type: ignore[assignment]
    known = _groups.setdefault(base, {})
    if use not in known:
        store, members = default_store(), hex_checksum_of(",".join(map(str, ranks)).encode())
        name = f"{base.group_name} {members} {use}"
        rank, timeout = dist.get_rank(base), timeout_of(base)
        if timeout is not None:
            store = BoundedStore(store, timeout.total_seconds())
        roll_call = RollCall(store, name, rank, len(ranks), timeout)
        roll_call.gather("the first call of its kind")  # a group cannot say for whom it waits as it is made
        known[use] = new_group(base, backend="gloo")
        _roll_calls[known[use]] = roll_call
    return GroupCoordinator(known[use], rank_of, _roll_calls[known[use]])


Alike = Mapping[str, Json]
_ABSENT = "nothing"  # stands for a key that a rank does not have


def words_of(alike: Alike | bytes) -> list[int]:
    """Four numbers that are the same for equal arguments, or of a digest; the order of keys counts for nothing."""
    if not isinstance(alike, bytes):
        alike = digest_of(json.dumps(alike, sort_keys=True, default=repr).encode())
    return list(struct.unpack("<4I", alike))


def both_ways(words: list[int]) -> list[int]:
    """Numbers whose maximum over ranks tells whether all ranks have the same words; `is_same` looks at it."""
    return [*words, *(-word for word in words)]


def is_same(found: Sequence[int]) -> bool:
    """Whether all ranks had the same words, by the maximum of `both_ways`."""
    half = len(found) // 2
    return all(high == -low for high, low in zip(found[:half], found[half:], strict=True))


def unlike(everyone: Sequence[Json]) -> CheckpointError:
    """The error for arguments, by rank, that are not the same."""
    name, values = _first_difference(everyone, "")
    ranks_by_text: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_text.setdefault(repr(value), []).append(rank)
    shown = [f"{text[:200]} on ranks {ranks[:16]}" for text, ranks in ranks_by_text.items()]
    return CheckpointError(
        "Ranks disagree about an argument.",
        expected="the same arguments on all ranks",
        got="; ".join(shown[:4]),
        where=f"the argument `{name}`",
        todo="pass the same on every rank; nothing was written or overwritten. What is each rank's own goes "
        "into the state, as PerRank(value)",
    )


def _first_difference(values: Sequence[Json], name: str) -> tuple[str, Sequence[Json]]:
    """Name and values, by rank, of the first place where the ranks' values differ."""
    keys: Sequence[object] = []
    if all(isinstance(value, dict) for value in values):
        keys = sorted({key for value in values for key in value})
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        keys = range(len(values[0]))
    for key in keys:
        items = [value.get(key, _ABSENT) if isinstance(value, dict) else value[key] for value in values]
        if len({tuple(words_of({"": item})) for item in items}) > 1:
            return _first_difference(items, child_name(name, key))
    return name, values
