"""Files that all ranks write together: each puts its own bytes where they belong, and few bytes travel.

    file         | header |  a  |   b   |    c    |     rank 0 holds the first half of each tensor, rank 1 the rest
    in place     |        |0 |1 |0  |1  |0   |1   |     no message: a part that is a run of its tensor is one of bytes
    transposed   |        |. .  |. . .  |. . . .  |     segments with items of both: one rank gets the other's
    streams      |0       |0 |1 |0  |1  |0   |1   |     one writer for each file: the others send it their segments

A file is cut into segments of a few MiB. All ranks know from the manifest who holds what of a segment, and walk those
that concern them in one order, so that nobody waits in a circle. Bytes of others lie in rooms that were taken
beforehand, `_ROOMS` segments in all, which is all that a rank holds of them. Whoever fails goes on sending and
receiving, and raises when all are served.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from vescale_fsdp.checkpoint.formats.form import Commit, RankShare
from vescale_fsdp.checkpoint.formats.held_shards import HeldShards
from vescale_fsdp.checkpoint.formats.huggingface.repository import (
    BEING_WRITTEN,
    CONFIG_FILE,
    is_setting,
    is_weight_file,
)
from vescale_fsdp.checkpoint.formats.huggingface.tied_weights import Compare
from vescale_fsdp.checkpoint.formats.written_folder import WrittenFolder
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.moves.plan import FilePlan, FixedBytes, OutputPlan
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView, read_range
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, Storage
from vescale_fsdp.errors import CheckpointError

_ROOMS = 6  # for the bytes of others: one that comes in, one that is put together, four that are written
_MAX_SEGMENT_BYTES = 4 << 20  # 4 MiB
MIN_BUDGET_BYTES = _ROOMS << 10  # 1 KiB per segment
_FAILED = -1  # in the place of a number of bytes


Planner = Callable[[HeldShards, Compare], tuple[OutputPlan, Sequence[str]]]


def repository_folder(storage: Storage) -> WrittenFolder:
    """The folder of a repository, which `config.json` makes valid."""
    return WrittenFolder(
        storage,
        "a Hugging Face repository",
        CONFIG_FILE,
        lambda name: is_weight_file(name) or is_setting(name),
        BEING_WRITTEN,
    )


def write_repository(
    manifest: Callable[[], Manifest],
    share: RankShare,
    planner: Planner,
    class_warnings: Callable[[OutputPlan], Sequence[str]],
    budget_bytes: int,
) -> Commit:
    """Plan a repository and write this rank's bytes of all its files; a collective.

    Args:
        manifest: computes the manifest of the save.
        planner: lists the repository's files, with warnings, from the shards and a comparison of tied tensors. The
            comparison says no for pairs whose bytes the ranks have not compared yet; the planner is called again then.
        class_warnings: why the model's class does not load what is planned; called on rank 0.
        budget_bytes: the most bytes of other ranks' tensors that a rank holds at a time.
    """
    storage, coordinator = share.storage, share.coordinator
    folder = repository_folder(storage)
    with coordinator.together("planning a Hugging Face repository"), gc_paused():
        shards = HeldShards(manifest(), coordinator.rank, share.locals_by_name, storage)
        ties = _TieComparison(shards)
        plan, plan_warnings = planner(shards, ties.is_equal)
    if ties.pending:
        ties.compare(coordinator, budget_bytes)
        with coordinator.together("planning a Hugging Face repository"), gc_paused():
            plan, plan_warnings = planner(shards, ties.is_equal)
    with coordinator.together(f"making {storage.where}"):
        share.check_room(plan.tensor_nbytes)
        if coordinator.rank == 0:
            all_warnings = (
                *plan_warnings,
                *class_warnings(plan),
            )  # may raise: before the old folder is touched
            folder.begin()
            for warning in all_warnings:
                warnings.warn(warning, stacklevel=3)
    with coordinator.together(f"making files for {storage.where}"):
        files = JointFiles(folder.working, plan, shards, coordinator, budget_bytes)
        files.lay_out()
    with coordinator.together(f"writing to {storage.where}"):
        files.write()
    names = [file.name for file in plan.files]
    return Commit(plan.tensor_nbytes, partial(folder.commit, plan.closing, names))


class _TieComparison:
    """Compares the bytes of tensors that config.json ties, whose parts several ranks hold.

    Attributes:
        pending: pairs that `is_equal` was called for and that the ranks have not compared yet.
    """

    def __init__(self, shards: HeldShards) -> None:
        self._shards = shards
        self.pending: list[tuple[TensorView, TensorView]] = []
        self._is_equal: dict[tuple[str, str], bool] = {}

    def is_equal(self, one: TensorView, other: TensorView) -> bool:
        """Whether two tensors have the same bytes; False for a pair that is not compared yet, which becomes pending."""
        if (one.info.shape, one.info.dtype) != (other.info.shape, other.info.dtype):
            return False
        if one.identity() == other.identity():
            return True  # one tensor under two names
        names = (one.info.name, other.info.name)
        if names not in self._is_equal:
            self.pending.append((one, other))
        return self._is_equal.get(names, False)

    def compare(self, coordinator: Coordinator, budget_bytes: int) -> None:
        """Compare all pending pairs, by sums over the parts of all ranks; a collective."""
        with coordinator.together("comparing tied weights"):
            own_sums = [
                self._shards.content_sum(view, budget_bytes) for pair in self.pending for view in pair
            ]
        sums = np.array(coordinator.everyone(own_sums), dtype=np.uint64).sum(axis=0, dtype=np.uint64)
        for number, (one, other) in enumerate(self.pending):
            self._is_equal[one.info.name, other.info.name] = bool(sums[2 * number] == sums[2 * number + 1])


class FileSegment(NamedTuple):
    """Items [start, stop) of a tensor of a file.

    Attributes:
        file: number of the file.
        offset: of the first byte in it.
        turn: which of several replicas brings its items.
        writer: the rank that writes it.
        holders: the ranks that bring items, ascending.
    """

    file: int
    offset: int
    view: TensorView
    start: int
    stop: int
    turn: int
    writer: int
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return (self.stop - self.start) * self.view.info.dtype.itemsize

    @property
    def is_solo(self) -> bool:
        """Whether whoever writes it needs nobody else."""
        return self.holders in ((self.writer,), ())


def segments_of(
    plan: OutputPlan, shards: HeldShards, world_size: int, segment_bytes: int, *, one_writer: bool
) -> list[FileSegment]:
    """The segments that this rank has to do with, in the order in which all ranks walk them. Pure.

    Args:
        one_writer: whether files are streams, which one rank writes from front to back.
    """
    found: list[tuple[int, FileSegment]] = []  # (its number in the file, ..)
    for number, file in enumerate(plan.files):
        walk = _segments_of_file(number, file, shards, world_size, segment_bytes, one_writer=one_writer)
        found += enumerate(walk)
    if one_writer:  # so many files at a time as there are writers
        found.sort(key=lambda pair: (pair[1].file // world_size, pair[0], pair[1].file))
    rank = shards.rank
    return [segment for _, segment in found if rank == segment.writer or rank in segment.holders]


def _segments_of_file(
    number: int, file: FilePlan, shards: HeldShards, world_size: int, segment_bytes: int, *, one_writer: bool
) -> Iterator[FileSegment]:
    for index, items in file.tensors:
        view = items.view
        itemsize = view.info.dtype.itemsize
        step = max(1, segment_bytes // itemsize)
        is_own = not one_writer and shards.lies_in_runs(view)
        leaf = view.stored
        first, last = shards.own_run(leaf) if is_own and leaf else (items.start, items.stop)
        for turn, start in enumerate(range(first, last, step)):
            stop = min(start + step, last)
            writer = shards.rank
            holders: tuple[int, ...] = (writer,)
            if not is_own:
                holders = shards.holders(view, start, stop, turn)
                in_place = holders[turn % len(holders)] if holders else turn % world_size
                writer = number % world_size if one_writer else in_place
            offset = file.offsets[index] + (start - items.start) * itemsize
            yield FileSegment(number, offset, view, start, stop, turn, writer, holders)


@dataclass
class JointFiles:
    """Writes the data files of a plan, one rank's part.

    Args:
        storage: the folder.
        budget_bytes: the most that a rank holds of others' bytes.
    """

    storage: Storage
    plan: OutputPlan
    shards: HeldShards
    coordinator: Coordinator
    budget_bytes: int
    _kept: FirstError = field(default_factory=FirstError)
    _open: dict[int, FileWriter] = field(default_factory=dict)
    _jobs: list[Future[None]] = field(default_factory=list)
    _rooms: SimpleQueue[torch.Tensor] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, self.budget_bytes // _ROOMS) // 16 * 16
        self._segments = segments_of(
            self.plan,
            self.shards,
            self.coordinator.world_size,
            self._segment_bytes,
            one_writer=self.storage.in_order,
        )
        # Taken now: a rank that lacks memory later must still be able to answer.
        meets = any(not segment.is_solo for segment in self._segments)
        size = self._segment_bytes if meets else 0
        self._incoming = torch.empty(size, dtype=torch.uint8, device="cpu")
        for _ in range(_ROOMS - 1):
            self._rooms.put(torch.empty(size, dtype=torch.uint8, device="cpu"))

    def _is_mine(self, number: int) -> bool:
        """Whether this rank makes a file, and writes what is no tensor."""
        return number % self.coordinator.world_size == self.coordinator.rank

    def lay_out(self) -> None:
        """Make the files that are this rank's to make, where ranks write in place; before any of them does."""
        for number, file in enumerate(self.plan.files):
            if self._is_mine(number) and not self.storage.in_order:
                with self.storage.lay_out(file.name, file.nbytes) as out:
                    _write_fixed(file, out)

    def write(self) -> None:
        """Write what is this rank's; durable on return.

        Raises:
            BaseException: the first thing that went wrong on this rank, when the others have had their parts.
        """
        threads = 1 if self.storage.in_order else max(1, self.storage.write_threads)
        rank = self.coordinator.rank
        last = {each.file: index for index, each in enumerate(self._segments) if each.writer == rank}
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-joint") as pool:
                for index, segment in enumerate(self._segments):
                    self._do(pool, segment)
                    while len(self._jobs) > 2 * threads:
                        self._kept.attempt(self._jobs.pop(0).result)
                    if last.get(segment.file) == index:
                        self._finish_file(pool, segment.file)
                for number in range(len(self.plan.files)):
                    if self.storage.in_order and self._is_mine(number) and number not in last:  # no tensor
                        self._kept.attempt(partial(self._writer, number))
                        self._finish_file(pool, number)
                while self._jobs:
                    self._kept.attempt(self._jobs.pop(0).result)
        finally:
            for out in self._open.values():
                out.abort()
        self._kept.raise_kept()

    def _finish_file(self, pool: ThreadPoolExecutor, number: int) -> None:
        """Make a file durable, behind what is being written of it."""
        out = self._open.get(number)
        if out is None or self._kept.error is not None:
            return
        before = list(self._jobs)

        def close() -> None:
            for job in before:
                job.result()
            out.close()
            del self._open[number]

        self._jobs.append(pool.submit(close))

    def _writer(self, number: int) -> FileWriter:
        """The file, opened when its first byte comes."""
        if number not in self._open:
            file = self.plan.files[number]
            if self.storage.in_order:
                self._open[number] = out = self.storage.create(file.name, file.nbytes)
                _write_fixed(file, out)
            else:
                self._open[number] = self.storage.join(file.name)
        return self._open[number]

    def _do(self, pool: ThreadPoolExecutor, segment: FileSegment) -> None:
        """Write a segment, or have it written: at once as far as others are concerned, the rest behind."""
        room = None if segment.is_solo else self._exchanged(segment)
        is_writer = segment.writer == self.coordinator.rank
        out = self._kept.attempt(lambda: self._writer(segment.file)) if is_writer else None
        if out is None:
            if room is not None:
                self._rooms.put(room)
            return

        def work() -> None:
            try:
                data = self._own_bytes(segment) if room is None else room[: segment.nbytes].numpy()
                out.write_at(segment.offset, [data])
            finally:
                if room is not None:
                    self._rooms.put(room)

        self._jobs.append(pool.submit(work))

    def _own_bytes(self, segment: FileSegment) -> Buffer:
        """A segment that only this rank brings: memory of the tensor itself, where nothing is to be done to it."""
        view, leaf = segment.view, segment.view.stored
        is_plain = leaf is not None and leaf.info.dtype == view.info.dtype and self.shards.lies_in_runs(view)
        if leaf is not None and is_plain and not self.storage.in_order:
            return self.shards.own_bytes(leaf, segment.start, segment.stop)
        return read_range(view, segment.start, segment.stop, np.empty(segment.nbytes, dtype=np.uint8))

    def _exchanged(self, segment: FileSegment) -> torch.Tensor | None:
        """A room with a segment's bytes, of which others bring some; if it is another's, this rank's go there."""
        rank, attempt = self.coordinator.rank, self._kept.attempt
        room = self._rooms.get()
        data = room[: segment.nbytes].numpy()
        numbers = None
        if len(segment.holders) > 1:
            view, start, stop, turn = segment[2:6]
            numbers = attempt(lambda: self.shards.numbers(view, start, stop, turn))
        if rank in segment.holders:
            attempt(lambda: read_range(segment.view, segment.start, segment.stop, data))
        else:
            data[...] = 0
        if rank != segment.writer:
            packed = attempt(lambda: _of_rank(data, segment, numbers, rank).view(np.uint8))
            self._send(packed, segment.writer)
            self._rooms.put(room)
            return None
        for holder in segment.holders:
            if holder != rank:
                self._receive(data, segment, numbers, holder)
        return room

    def _send(self, packed: np.ndarray | None, to_rank: int) -> None:
        nbytes = _FAILED if packed is None else packed.nbytes
        self.coordinator.send(torch.tensor([nbytes], dtype=torch.int64, device="cpu"), to_rank)
        if packed is not None and nbytes:
            self.coordinator.send(torch.from_numpy(packed), to_rank)

    def _receive(
        self, data: np.ndarray, segment: FileSegment, numbers: np.ndarray | None, from_rank: int
    ) -> None:
        """Take what a rank brings, to where it belongs; nothing of one that has failed, which will say so."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.coordinator.receive(size, from_rank)
        nbytes = int(size)
        if nbytes > 0:
            self.coordinator.receive(self._incoming[:nbytes], from_rank)
        if nbytes != _FAILED:
            self._kept.attempt(lambda: self._place(data, segment, numbers, from_rank, nbytes))

    def _place(
        self, data: np.ndarray, segment: FileSegment, numbers: np.ndarray | None, from_rank: int, nbytes: int
    ) -> None:
        items = data.view(segment.view.info.dtype.raw)
        came = self._incoming[:nbytes].numpy().view(items.dtype)
        wanted = slice(None) if numbers is None else numbers == from_rank + 1
        if came.size != items[wanted].size:
            raise CheckpointError(
                "A rank sent another number of items than it holds.",
                expected=f"{items[wanted].size} items",
                got=f"{came.size}",
                where=f"{segment.view.info.name}, from rank {from_rank}",
                todo="report this: ranks have planned differently",
            )
        items[wanted] = came


def _of_rank(data: np.ndarray, segment: FileSegment, numbers: np.ndarray | None, rank: int) -> np.ndarray:
    """The items of a segment that a rank brings; all of them where it alone does."""
    items = data.view(segment.view.info.dtype.raw)
    return items if numbers is None else items[numbers == rank + 1]


def _write_fixed(file: FilePlan, out: FileWriter) -> None:
    """Write what is known of a file from the start: its header."""
    for offset, content in zip(file.offsets, file.contents, strict=True):
        if isinstance(content, FixedBytes):
            out.write_at(offset, [content.data])
