"""Write a Hugging Face repository from all ranks: each rank writes its own bytes in place, and few bytes are sent.

A conversion in one process writes by `conversion.engine.copying`, what `plan` says.

    file         | header |  a  |   b   |    c    |     rank 0 has the first half of each tensor, rank 1 the rest
    in place     |        |0 |1 |0  |1  |0   |1   |     nothing is sent: each part is one range of bytes of its tensor
    transposed   |        |. .  |. . .  |. . . .  |     segments with items of both ranks: one rank receives and writes
    streams      |0       |0 |1 |0  |1  |0   |1   |     one writer per file: other ranks send their segments

A file is cut into segments of a few MiB. All ranks know from the manifest which ranks have items of a segment, and
process the segments in the same order, so that no two ranks wait for each other. Bytes from other ranks are received
into `_BUFFERS` buffers of one segment each, allocated in advance. After an error, a rank continues to send and receive,
since other ranks wait for it, and raises the error at the end.
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

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.native.form import Commit, RankShare
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, Storage
from vescale_fsdp.conversion.engine.plan import FilePlan, FixedBytes, OutputPlan
from vescale_fsdp.conversion.engine.tensor_view import TensorView, read_range
from vescale_fsdp.conversion.formats.huggingface.repository import (
    BEING_WRITTEN,
    CONFIG_FILE,
    is_setting,
    is_weight_file,
)
from vescale_fsdp.conversion.formats.huggingface.tied_weights import Compare
from vescale_fsdp.conversion.live.held_shards import HeldShards
from vescale_fsdp.conversion.live.written_folder import WrittenFolder
from vescale_fsdp.errors import CheckpointError, callers_level

_BUFFERS = 6  # segments in memory: one is received, one is assembled, four are written
_MAX_SEGMENT_BYTES = 4 << 20  # 4 MiB
MIN_BUDGET_BYTES = _BUFFERS << 10  # 1 KiB per segment
_FAILED = -1  # a rank that has failed sends this instead of the number of its bytes


# (shards, comparison of tied tensors) -> (plan, warnings)
Planner = Callable[[HeldShards, Compare], tuple[OutputPlan, Sequence[str]]]


def repository_folder(storage: Storage) -> WrittenFolder:
    """Return the folder of a repository; `config.json` is the file that makes it valid."""
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
    """Plan a repository, and write this rank's bytes of all its files; a collective.

    Args:
        manifest: computes the manifest of the save.
        planner: computes the repository's files, and warnings, from the shards and a function that compares tied
            tensors. In the first call, the function returns False for pairs whose comparison needs other ranks. The
            ranks then compare these pairs, and the planner is called again.
        class_warnings: returns reasons why the model's class would not load the planned files; called on rank 0.
        budget_bytes: the most bytes of other ranks' tensors that a rank buffers.

    Returns:
        The last step, which makes the repository valid; to be run after all ranks have returned.
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
            # Before the old folder is changed, since the check of the class may raise an error.
            all_warnings = (*plan_warnings, *class_warnings(plan))
            folder.begin()
            for warning in all_warnings:
                warnings.warn(warning, stacklevel=callers_level())
    with coordinator.together(f"making files for {storage.where}"):
        files = JointFiles(folder.working, plan, shards, coordinator, budget_bytes)
        files.lay_out()
    with coordinator.together(f"writing to {storage.where}"):
        files.write()
    names = [file.name for file in plan.files]
    return Commit(plan.tensor_nbytes, partial(folder.commit, plan.closing, names))


class _TieComparison:
    """Compares the bytes of tensors that config.json ties, if several ranks store parts of each tensor.

    Attributes:
        pending: the pairs that `is_equal` could not compare without other ranks.
    """

    def __init__(self, shards: HeldShards) -> None:
        self._shards = shards
        self.pending: list[tuple[TensorView, TensorView]] = []
        self._is_equal: dict[tuple[str, str], bool] = {}

    def is_equal(self, one: TensorView, other: TensorView) -> bool:
        """Whether two tensors have the same bytes; a pair that is not compared yet becomes pending, and is False."""
        if (one.info.shape, one.info.dtype) != (other.info.shape, other.info.dtype):
            return False
        if one.identity() == other.identity():
            return True  # both are names of one tensor
        names = (one.info.name, other.info.name)
        if names not in self._is_equal:
            self.pending.append((one, other))
        return self._is_equal.get(names, False)

    def compare(self, coordinator: Coordinator, budget_bytes: int) -> None:
        """Compare all pending pairs by checksums, which are summed over all ranks; a collective."""
        with coordinator.together("comparing tied weights"):
            own_sums = [
                self._shards.content_sum(view, budget_bytes) for pair in self.pending for view in pair
            ]
        sums = np.array(coordinator.everyone(own_sums), dtype=np.uint64).sum(axis=0, dtype=np.uint64)
        for number, (one, other) in enumerate(self.pending):
            self._is_equal[one.info.name, other.info.name] = bool(sums[2 * number] == sums[2 * number + 1])


class FileSegment(NamedTuple):
    """Items [start, stop) of one tensor in one file.

    Attributes:
        file: index of the file in the plan.
        offset: offset of the first byte in the file.
        turn: index of the segment in its tensor; ranks that store the same items take turns as sender.
        writer: the rank that writes the segment.
        holders: the ranks that provide items, ascending.
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
        """Number of bytes of the segment."""
        return (self.stop - self.start) * self.view.info.dtype.itemsize

    @property
    def is_solo(self) -> bool:
        """Whether the segment contains no items of ranks other than the writer."""
        return self.holders in ((self.writer,), ())  # (): zeros, which no rank stores


def segments_of(
    plan: OutputPlan, shards: HeldShards, world_size: int, segment_bytes: int, *, one_writer: bool
) -> list[FileSegment]:
    """List the segments that this rank writes or provides items for; sends nothing.

    Segments are in the same order on all ranks, so that ranks that exchange items never wait for each other in a cycle.

    Args:
        one_writer: whether files are streams, each written by one rank from front to back.
    """
    segments: list[tuple[int, FileSegment]] = []  # (index of the segment in its file, segment)
    for number, file in enumerate(plan.files):
        in_file = _segments_of_file(
            number, file.planned(), shards, world_size, segment_bytes, one_writer=one_writer
        )
        segments += enumerate(in_file)
    if one_writer:
        # Each rank writes one file at a time. Segments of these files alternate, so that all ranks write concurrently.
        segments.sort(key=lambda pair: (pair[1].file // world_size, pair[0], pair[1].file))
    rank = shards.rank
    return [segment for _, segment in segments if rank == segment.writer or rank in segment.holders]


def _segments_of_file(
    number: int, file: FilePlan, shards: HeldShards, world_size: int, segment_bytes: int, *, one_writer: bool
) -> Iterator[FileSegment]:
    """Yield the segments of one file; if ranks write their own ranges of a tensor, only this rank's segments of it."""
    for index, items in file.tensors:
        view = items.view
        itemsize = view.info.dtype.itemsize
        step = max(1, segment_bytes // itemsize)
        # Whether each rank writes its part of the tensor itself: every part is one range of bytes in the file.
        is_own = not one_writer and shards.lies_in_runs(view)
        leaf = view.stored
        first, last = shards.own_run(leaf) if is_own and leaf else (items.start, items.stop)
        for turn, start in enumerate(range(first, last, step)):
            stop = min(start + step, last)
            writer = shards.rank
            holders: tuple[int, ...] = (writer,)
            if not is_own:
                holders = shards.holders(view, start, stop, turn)
                # The writers alternate over the segments, so that all ranks write.
                in_place = holders[turn % len(holders)] if holders else turn % world_size
                writer = number % world_size if one_writer else in_place
            offset = file.offsets[index] + (start - items.start) * itemsize
            yield FileSegment(number, offset, view, start, stop, turn, writer, holders)


@dataclass
class JointFiles:
    """Writes this rank's part of the data files of a plan.

    Args:
        storage: the folder that gets the files.
        budget_bytes: the most bytes of other ranks' tensors that this rank buffers.
    """

    storage: Storage
    plan: OutputPlan
    shards: HeldShards
    coordinator: Coordinator
    budget_bytes: int
    _errors: FirstError = field(default_factory=FirstError)
    _open: dict[int, FileWriter] = field(default_factory=dict)
    _jobs: list[Future[None]] = field(default_factory=list)
    _buffers: SimpleQueue[torch.Tensor] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        # A multiple of 16 bytes, the largest itemsize, so that segments contain whole items.
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, self.budget_bytes // _BUFFERS) // 16 * 16
        self._segments = segments_of(
            self.plan,
            self.shards,
            self.coordinator.world_size,
            self._segment_bytes,
            one_writer=self.storage.in_order,
        )
        # Allocated now, since a rank that runs out of memory later must still be able to receive from other ranks.
        exchanges = any(not segment.is_solo for segment in self._segments)
        size = self._segment_bytes if exchanges else 0
        self._incoming = torch.empty(size, dtype=torch.uint8, device="cpu")
        for _ in range(_BUFFERS - 1):  # - 1: `_incoming` is one of them
            self._buffers.put(torch.empty(size, dtype=torch.uint8, device="cpu"))

    def _is_mine(self, number: int) -> bool:
        """Whether this rank creates a file and writes its header."""
        return number % self.coordinator.world_size == self.coordinator.rank

    def lay_out(self) -> None:
        """Create this rank's files and their headers, if ranks write in place.

        Must return on all ranks before any rank writes data, since ranks write to files that another rank creates.
        """
        for number, file in enumerate(self.plan.files):
            if self._is_mine(number) and not self.storage.in_order:
                with self.storage.lay_out(file.name, file.nbytes) as out:
                    _write_fixed(file.planned(), out)

    def write(self) -> None:
        """Write this rank's bytes; on return they are durable.

        Raises:
            BaseException: the first error of this rank, but only after all messages to and from other ranks.
        """
        # One thread for streams, whose bytes must be written in order.
        threads = 1 if self.storage.in_order else max(1, self.storage.write_threads)
        rank = self.coordinator.rank
        # File -> index of the last segment that this rank writes to it.
        last = {each.file: index for index, each in enumerate(self._segments) if each.writer == rank}
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-joint") as pool:
                for index, segment in enumerate(self._segments):
                    self._do(pool, segment)
                    while len(self._jobs) > 2 * threads:  # bounds the number of pending writes
                        self._errors.attempt(self._jobs.pop(0).result)
                    if last.get(segment.file) == index:
                        self._finish_file(pool, segment.file)
                for number in range(len(self.plan.files)):
                    # A file without tensors has no segments, so the loop above has not created it.
                    if self.storage.in_order and self._is_mine(number) and number not in last:
                        self._errors.attempt(partial(self._writer, number))
                        self._finish_file(pool, number)
                while self._jobs:
                    self._errors.attempt(self._jobs.pop(0).result)
        finally:
            for out in self._open.values():  # files are still open only after an error
                out.abort()
        self._errors.raise_kept()

    def _finish_file(self, pool: ThreadPoolExecutor, number: int) -> None:
        """Close a file in the background, after its pending writes; this makes the file durable."""
        out = self._open.get(number)
        # After an error, the file is left open: `write` aborts it at the end.
        if out is None or self._errors.error is not None:
            return
        before = list(self._jobs)  # these include the pending writes of this file

        def close() -> None:
            for job in before:
                job.result()
            out.close()
            del self._open[number]  # a closed file must not be aborted

        self._jobs.append(pool.submit(close))

    def _writer(self, number: int) -> FileWriter:
        """Return the file's writer, which is opened at its first use."""
        if number not in self._open:
            file = self.plan.files[number]
            if self.storage.in_order:
                self._open[number] = out = self.storage.create(file.name, file.nbytes)
                _write_fixed(file.planned(), out)
            else:
                self._open[number] = self.storage.join(file.name)
        return self._open[number]

    def _do(self, pool: ThreadPoolExecutor, segment: FileSegment) -> None:
        """Exchange a segment's items with other ranks; if this rank is its writer, write it in the background."""
        buffer = None if segment.is_solo else self._exchanged(segment)
        is_writer = segment.writer == self.coordinator.rank
        out = self._errors.attempt(lambda: self._writer(segment.file)) if is_writer else None
        if out is None:  # another rank writes the segment, or the file could not be opened
            if buffer is not None:
                self._buffers.put(buffer)
            return

        def work() -> None:
            try:
                data = self._own_bytes(segment) if buffer is None else buffer[: segment.nbytes].numpy()
                out.write_at(segment.offset, [data])
            finally:
                if buffer is not None:
                    self._buffers.put(buffer)

        self._jobs.append(pool.submit(work))

    def _own_bytes(self, segment: FileSegment) -> Buffer:
        """Return the bytes of a segment that only this rank provides.

        They are the tensor's own memory, without a copy, if no cast is needed and the items are contiguous.
        """
        view, leaf = segment.view, segment.view.stored
        # Not for streams: their segments do not begin and end with this rank's items.
        is_plain = leaf is not None and leaf.info.dtype == view.info.dtype and self.shards.lies_in_runs(view)
        if leaf is not None and is_plain and not self.storage.in_order:
            return self.shards.own_bytes(leaf, segment.start, segment.stop)
        return read_range(view, segment.start, segment.stop, np.empty(segment.nbytes, dtype=np.uint8))

    def _exchanged(self, segment: FileSegment) -> torch.Tensor | None:
        """Exchange the items of a segment.

        Returns:
            On the writer, a buffer with the items of all holders. On other ranks None, after their items were sent to
            the writer.
        """
        rank, attempt = self.coordinator.rank, self._errors.attempt
        buffer = self._buffers.get()  # blocks until a write has returned a buffer, which bounds the memory
        data = buffer[: segment.nbytes].numpy()
        numbers = None  # with one holder, all items are from that rank
        if len(segment.holders) > 1:
            view, start, stop, turn = segment[2:6]
            numbers = attempt(lambda: self.shards.numbers(view, start, stop, turn))
        if rank in segment.holders:
            attempt(lambda: read_range(segment.view, segment.start, segment.stop, data))
        else:
            data[...] = 0  # clears old bytes, since items that no rank stores are zeros
        if rank != segment.writer:
            packed = attempt(lambda: _of_rank(data, segment, numbers, rank).view(np.uint8))
            self._send(packed, segment.writer)
            self._buffers.put(buffer)
            return None
        for holder in segment.holders:
            if holder != rank:
                self._receive(data, segment, numbers, holder)
        return buffer

    def _send(self, packed: np.ndarray | None, to_rank: int) -> None:
        """Send the number of bytes, then the bytes; None, after an error, sends `_FAILED` alone."""
        nbytes = _FAILED if packed is None else packed.nbytes
        self.coordinator.send(torch.tensor([nbytes], dtype=torch.int64, device="cpu"), to_rank)
        if packed is not None and nbytes:
            self.coordinator.send(torch.from_numpy(packed), to_rank)

    def _receive(
        self, data: np.ndarray, segment: FileSegment, numbers: np.ndarray | None, from_rank: int
    ) -> None:
        """Receive a rank's items and copy them into ``data``; nothing is copied if that rank has failed."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.coordinator.receive(size, from_rank)
        nbytes = int(size)
        if nbytes > 0:
            self.coordinator.receive(self._incoming[:nbytes], from_rank)
        if nbytes != _FAILED:
            self._errors.attempt(lambda: self._insert(data, segment, numbers, from_rank, nbytes))

    def _insert(
        self, data: np.ndarray, segment: FileSegment, numbers: np.ndarray | None, from_rank: int, nbytes: int
    ) -> None:
        """Copy the received items of a rank to their positions in ``data``."""
        items = data.view(segment.view.info.dtype.raw)
        received = self._incoming[:nbytes].numpy().view(items.dtype)
        # ``numbers`` has rank + 1 for each item; 0 means that no rank stores the item.
        selected = slice(None) if numbers is None else numbers == from_rank + 1
        if received.size != items[selected].size:
            raise CheckpointError(
                "A rank sent a wrong number of items.",
                expected=f"{items[selected].size} items",
                got=f"{received.size}",
                where=f"{segment.view.info.name}, from rank {from_rank}",
                todo="report this as a bug: the ranks have different plans",
            )
        items[selected] = received


def _of_rank(data: np.ndarray, segment: FileSegment, numbers: np.ndarray | None, rank: int) -> np.ndarray:
    """Return the items of a segment that a rank provides: all items if no other rank provides any."""
    items = data.view(segment.view.info.dtype.raw)
    return items if numbers is None else items[numbers == rank + 1]  # ``numbers`` has rank + 1; 0 is no rank


def _write_fixed(file: FilePlan, out: FileWriter) -> None:
    """Write the bytes of a file that are known without its tensors: the header."""
    for offset, content in zip(file.offsets, file.contents, strict=True):
        if isinstance(content, FixedBytes):
            out.write_at(offset, [content.data])
