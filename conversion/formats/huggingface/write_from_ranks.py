"""Write a Hugging Face repository from all ranks: each rank writes its own bytes in place, and few bytes are sent.

In a conversion by one process, `conversion.engine.copying` writes the files that `plan` lists.

    file         | header |  a  |   b   |    c    |     rank 0 has the first half of each tensor, rank 1 the rest
    in place     |        |0 |1 |0  |1  |0   |1   |     nothing is sent: each part is one range of bytes of its tensor
    transposed   |        |. .  |. . .  |. . . .  |     segments with items of both ranks: one rank receives and writes
    streams      |0       |0 |1 |0  |1  |0   |1   |     one writer per file: other ranks send their segments

A file is cut into segments of a few MiB. All ranks know from the manifest which ranks have items of a segment. Each
rank sends its items to the segment's writer as one turn of a `TurnExchange`. The memory is `_BUFFERS` buffers of one
segment each, allocated in advance.
"""

from __future__ import annotations

import warnings
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from vescale_fsdp.checkpoint.manifest.fingerprints import TensorFingerprint
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.native.form import Commit, RankShare
from vescale_fsdp.checkpoint.native.written_folder import WrittenFolder
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import MOST_TURNS, Turn, TurnExchange
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import Workers
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, Storage
from vescale_fsdp.conversion.engine.plan import FilePlan, FixedBytes, OutputPlan
from vescale_fsdp.conversion.engine.tensor_view import TensorView, read_range
from vescale_fsdp.conversion.formats.huggingface.fingerprints import fingerprints_file, fingerprints_in
from vescale_fsdp.conversion.formats.huggingface.repository import (
    BEING_WRITTEN,
    CONFIG_FILE,
    is_setting,
    is_weight_file,
)
from vescale_fsdp.conversion.formats.huggingface.tied_weights import Compare
from vescale_fsdp.conversion.live.held_shards import HeldShards
from vescale_fsdp.errors import callers_level

_ASSEMBLED = 5  # segments that are assembled or written
_BUFFERS = (
    MOST_TURNS + _ASSEMBLED + 1
)  # segments in memory; + 1: the items from which a rank packs the items that it sends
_MAX_SEGMENT_BYTES = 4 << 20  # 4 MiB
MIN_BUDGET_BYTES = 6 << 10  # 6 KiB: segments of some hundred bytes


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
    *,
    fingerprint: bool = False,
) -> Commit:
    """Plan a repository, and write this rank's bytes of all its files; a collective.

    Args:
        manifest: computes the manifest of the save.
        planner: computes the repository's files, and warnings, from the shards and a function that compares tied
            tensors. In the first call, the function returns False for pairs whose comparison needs other ranks. The
            ranks then compare these pairs, and the planner is called again.
        class_warnings: returns reasons why the model's class would not load the planned files; called on rank 0.
        budget_bytes: the most bytes of other ranks' tensors that a rank buffers.
        fingerprint: also write ``fingerprints.json``; the ranks share the written files, and read them once more.

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
    closing = list(plan.closing)
    if fingerprint:
        own: dict[str, TensorFingerprint] = {}
        with coordinator.together(f"computing fingerprints of {storage.where}"):
            own = fingerprints_in(plan.files[coordinator.rank :: coordinator.world_size], folder.working.read)
        closing.append(fingerprints_file(plan, dict(ChainMap(*coordinator.everyone(own)))))
    names = [file.name for file in plan.files]
    return Commit(
        plan.tensor_nbytes, partial(folder.commit, {file.name: file.pieces for file in closing}, names)
    )


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
    """A range of a view's items, [start, stop), with its bytes in a file, their writer, and who provides the items.

    Attributes:
        file: index of the file in the plan.
        offset: offset of the first byte in the file.
        nth: number of the segment in its tensor; ranks that store the same items send one segment each in turn.
        writer: the rank that writes the segment.
        holders: the ranks that provide items, ascending -> upper bound of the number of these items.
    """

    file: int
    offset: int
    view: TensorView
    start: int
    stop: int
    nth: int
    writer: int
    holders: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the segment."""
        return (self.stop - self.start) * self.view.info.dtype.itemsize

    @property
    def is_solo(self) -> bool:
        """Whether the segment contains no items of ranks other than the writer."""
        return self.holders.keys() <= {self.writer}  # no holder: zeros, which no rank stores

    def turns(self, rank: int) -> Iterator[Turn[FileSegment]]:
        """Yield the turns of a rank: each holder sends its items to the writer, whose own turn is the last one."""
        for holder, numel in self.holders.items():
            if holder != self.writer and rank in (holder, self.writer):
                nbytes = numel * self.view.info.dtype.itemsize
                yield Turn(self, holder, (self.writer,), nbytes)
        if rank == self.writer:
            yield Turn(self, rank, (rank,), 0)


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
    """Yield the segments of one file; of a tensor whose ranks write their own ranges, only this rank's segments."""
    for index, items in file.tensors:
        view = items.view
        itemsize = view.info.dtype.itemsize
        step = max(1, segment_bytes // itemsize)
        # Whether each rank writes its part of the tensor itself: every part is one range of bytes in the file.
        is_own = not one_writer and shards.lies_in_runs(view)
        leaf = view.stored
        first, last = shards.own_run(leaf) if is_own and leaf else (items.start, items.stop)
        for nth, start in enumerate(range(first, last, step)):
            stop = min(start + step, last)
            writer = shards.rank
            holders = {writer: stop - start}
            if not is_own:
                holders = shards.holders(view, start, stop, nth)
                # The writers alternate over the segments, so that all ranks write.
                in_place = [*holders][nth % len(holders)] if holders else nth % world_size
                writer = number % world_size if one_writer else in_place
            offset = file.offsets[index] + (start - items.start) * itemsize
            yield FileSegment(number, offset, view, start, stop, nth, writer, holders)


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
    _kept: FirstError = field(default_factory=FirstError)
    _open: dict[int, FileWriter] = field(default_factory=dict)
    _writes: dict[int, list[Future[object]]] = field(default_factory=dict)  # file -> writes to it

    def __post_init__(self) -> None:
        # A multiple of 16 bytes, the largest itemsize, so that segments contain whole items.
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, self.budget_bytes // _BUFFERS) // 16 * 16
        rank, world_size = self.coordinator.rank, self.coordinator.world_size
        segments = segments_of(
            self.plan, self.shards, world_size, self._segment_bytes, one_writer=self.storage.in_order
        )
        # File -> the last segment that this rank writes to it.
        self._last = {segment.file: segment for segment in segments if segment.writer == rank}
        turns = [turn for segment in segments for turn in segment.turns(rank)]
        self._exchange = TurnExchange(self.coordinator, turns, threads=0)
        # Allocated now, since a rank that runs out of memory later must still be able to receive from other ranks.
        size = 0 if all(segment.is_solo for segment in segments) else self._segment_bytes
        self._items = np.empty(size, dtype=np.uint8)
        # Each with the write of its bytes, which must end before the buffer is used again.
        self._buffers = deque[tuple[Future[object] | None, np.ndarray]](
            (None, np.empty(size, dtype=np.uint8)) for _ in range(_ASSEMBLED)
        )
        # The segment being assembled from its parts, its buffer, and the numbers of the ranks that provide its items.
        self._assembled: tuple[FileSegment, np.ndarray, np.ndarray | None] | None = None

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
        try:
            with Workers(threads, self._kept, name="checkpoint-joint") as workers:
                self._exchange.run(self._pack, partial(self._take, workers), lambda turn: self._kept)
                for number in range(len(self.plan.files)):
                    # A file without tensors has no segments, so no turn has created it.
                    if self.storage.in_order and self._is_mine(number) and number not in self._last:
                        self._kept.attempt(partial(self._writer, number))
                        self._finish_file(workers, number)
        finally:
            for out in self._open.values():  # files are still open only after an error
                out.abort()
        self._kept.raise_kept()

    def _finish_file(self, workers: Workers, number: int) -> None:
        """Close a file in the background, after its writes; this makes the file durable."""

        def close() -> None:
            for write in self._writes.pop(number, ()):
                write.result()
            if self._kept.error is None:  # after an error, `write` aborts the file
                self._open[number].close()
                del self._open[number]  # a closed file must not be aborted

        workers.submit(close)

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

    def _pack(self, turn: Turn[FileSegment], data: memoryview) -> None:
        """Copy this rank's items of a segment into ``data``; nothing for the segment's writer, which sends none."""
        if not len(data):
            return
        segment, packed = turn.job, np.frombuffer(data, dtype=np.uint8)
        numbers = self._numbers(segment)
        if numbers is None:
            read_range(segment.view, segment.start, segment.stop, packed)
        else:
            items = self._items[: segment.nbytes]
            read_range(segment.view, segment.start, segment.stop, items)
            own = items.view(segment.view.info.dtype.raw)[numbers == self.coordinator.rank + 1]
            packed[: own.nbytes] = own.view(np.uint8)

    def _numbers(self, segment: FileSegment) -> np.ndarray | None:
        """Return the number (rank + 1) of the rank that provides each item; None if one rank provides all items."""
        if len(segment.holders) < 2:
            return None
        return self.shards.numbers(segment.view, segment.start, segment.stop, segment.nth)

    def _take(self, workers: Workers, turn: Turn[FileSegment], data: memoryview) -> None:
        """Copy the items of another rank into a segment. The last turn of a segment writes it in the background."""
        segment = turn.job
        buffer = None if segment.is_solo else self._with(segment, turn.sender, data)
        if turn.sender != segment.writer:
            return
        out = self._writer(segment.file)

        def write() -> None:
            own = self._own_bytes(segment) if buffer is None else buffer[: segment.nbytes]
            out.write_at(segment.offset, [own])

        written = workers.submit(write)
        self._writes.setdefault(segment.file, []).append(written)
        if buffer is not None:
            self._buffers.append((written, buffer))
        if self._last[segment.file] is segment:
            self._finish_file(workers, segment.file)

    def _with(self, segment: FileSegment, holder: int, data: memoryview) -> np.ndarray:
        """Copy the items that a rank has sent to their positions in the segment; returns the segment's buffer."""
        if self._assembled is None or self._assembled[0] is not segment:
            written, buffer = self._buffers.popleft()
            if written is not None:
                written.result()
            whole = buffer[: segment.nbytes]
            if segment.writer in segment.holders:
                read_range(segment.view, segment.start, segment.stop, whole)
            else:
                whole[...] = 0  # clears old bytes, since items that no rank stores are zeros
            self._assembled = segment, buffer, self._numbers(segment)
        _, buffer, numbers = self._assembled
        if len(data):
            items = buffer[: segment.nbytes].view(segment.view.info.dtype.raw)
            received = np.frombuffer(data, dtype=items.dtype)
            if numbers is None:
                items[...] = received
            else:
                selected = numbers == holder + 1
                items[selected] = received[: np.count_nonzero(selected)]
        return buffer

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


def _write_fixed(file: FilePlan, out: FileWriter) -> None:
    """Write the bytes of a file that are known without its tensors: the header."""
    for offset, content in zip(file.offsets, file.contents, strict=True):
        if isinstance(content, FixedBytes):
            out.write_at(offset, [content.data])
