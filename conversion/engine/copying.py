"""Write the files of a conversion with a few threads, each of which has one buffer of fixed size.

A thread takes a job (see `copy_jobs`), reads or computes the job's bytes into its buffer, and writes them to their
planned offset. The buffers bound the memory use, whatever the size of the model or of its largest tensor.

    512 MiB budget, 4 threads -> 4 buffers of 8 MiB      64 MiB budget, 8 threads -> 8 buffers of 2 MiB

All threads share the files that accept writes in any order; a stream is written by one thread. Every buffer is compared
with the source's checksums, if there are any, and hashed for the journal. Hashing data in the cache takes a tenth of
the time of writing it.

A file is finished when the checksums of all bytes that it was made from have been verified. Reads verify checksums
during the copy (see `verified_reads`). A checksum may also cover bytes that belong to no tensor of the file: the rest
of a storage that is larger than its tensor, or of a record that is split across files. These bytes are read at the end.
A tensor that is complete in a file is verified before that file is finished. A tensor that is split across files is
verified by the process that writes its first item, after this process has written all its files. Therefore no process
waits for another, and together the processes read each byte at most twice.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from vescale_fsdp.checkpoint.ranks.threads import Shared, for_each, in_threads
from vescale_fsdp.checkpoint.storage.base import FileWriter, SourceError, reading_source
from vescale_fsdp.checkpoint.storage.checksums import checksum_of, hex_checksum_of
from vescale_fsdp.conversion.engine.copy_jobs import (
    Assembler,
    Job,
    jobs_in_order,
    jobs_of,
    reads_of,
    steps,
    writes,
)
from vescale_fsdp.conversion.engine.plan import ComputedBytes, DataFile, FilePlan, FixedBytes, TensorItems
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.verified_reads import Begun
from vescale_fsdp.errors import ConversionError, option
from vescale_fsdp.layout.extent import ReadJob

Progress = Callable[[int], None]  # called with the number of tensor bytes done since the last call


def no_progress(nbytes: int) -> None:
    """Do nothing: the default for `Progress` arguments."""


_MAX_THREADS = 1024  # more threads would only wait for each other
_MAX_BUFFER_BYTES = 8 * 2**20  # 8 MiB: reads with larger buffers are not faster
_MIN_BUFFER_BYTES = 2**20  # 1 MiB
_MAX_CACHED_BYTES = 64 * 2**20  # 64 MiB: blocks of 4,096 matrices of 128 x 128


@dataclass(frozen=True)
class CopyLimits:
    """Limits for the memory and the threads of a conversion.

    Args:
        memory_budget_bytes: total size of all working buffers.
        threads: number of threads that read and write at the same time.
        decoded_bytes: additional memory per thread, for sources whose chunks must be decoded as a whole.
        cached_bytes: additional memory that all threads share, for encoded blocks.
        scratch_buffers: memory per thread besides its buffer, for views that compute items, in multiples of the buffer.

    Examples:
        >>> CopyLimits(memory_budget_bytes=64 << 20, threads=8).usable_threads
        8
    """

    memory_budget_bytes: int = 512 * 2**20
    threads: int = 4
    decoded_bytes: int = 0
    cached_bytes: int = 0
    scratch_buffers: int = 3  # for a cast of items that are read into other positions

    def __post_init__(self) -> None:
        least = self._least_bytes
        if self.memory_budget_bytes - self.cached_bytes < least or self.threads < 1:
            raise ConversionError(
                "The memory budget is too small.",
                expected=f"at least {least} bytes and one thread",
                got=f"{self.memory_budget_bytes} bytes, {self.threads} threads",
                todo=f"pass {option('memory_budget_bytes', max(64, -(-least // 2**20)) * 2**20)} or more",
            )

    @property
    def _least_bytes(self) -> int:
        """Memory that one thread needs with the smallest buffer."""
        return _MIN_BUFFER_BYTES * (1 + self.scratch_buffers) + self.decoded_bytes

    @property
    def usable_threads(self) -> int:
        """Number of threads: as requested, or fewer if the budget is too small for their buffers."""
        room = self.memory_budget_bytes - self.cached_bytes
        return min(self.threads, _MAX_THREADS, room // self._least_bytes)

    def caching(self) -> CopyLimits:
        """Return limits with memory for encoded blocks; none if the threads need the whole budget."""
        left = self.memory_budget_bytes - self._least_bytes * self.usable_threads
        return replace(self, cached_bytes=min(_MAX_CACHED_BYTES, self.memory_budget_bytes // 8, left))

    def decoding(self, name: str, nbytes: int) -> CopyLimits:
        """Return limits for a source with compressed chunks.

        Args:
            name: the tensor with the largest chunk.
            nbytes: memory that decoding this chunk takes.

        Raises:
            ConversionError: if the budget is too small for this chunk.
        """
        needed = nbytes + replace(self, decoded_bytes=0)._least_bytes
        if needed > self.memory_budget_bytes:
            raise ConversionError(
                "The memory budget is too small to decode a compressed chunk.",
                expected=f"at least {needed} bytes",
                got=f"{self.memory_budget_bytes} bytes",
                where=f"tensor {name}",
                todo=f"pass {option('memory_budget_bytes', -(-needed // 2**20) * 2**20)}",
            )
        return replace(self, decoded_bytes=nbytes)

    @property
    def buffer_bytes(self) -> int:
        """Size of one thread's buffer, a multiple of every dtype's item size."""
        share = (self.memory_budget_bytes - self.cached_bytes) // self.usable_threads - self.decoded_bytes
        return min(_MAX_BUFFER_BYTES, share // (1 + self.scratch_buffers)) // 16 * 16


class _WorkingFile:
    """A file being written: the number of its unfinished jobs, and the checksums so far."""

    def __init__(self, plan: FilePlan, out: FileWriter, num_jobs: int) -> None:
        self.plan, self.out = plan, out
        self._left = num_jobs
        self._lock = threading.Lock()  # protects `_left`, `_crcs` and `_digests`
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}  # content -> (byte offset, crc, bytes)
        self._digests: list[tuple[int, int]] = []  # (byte offset, xxh3) of each write

    def do(self, job: Job, buffer: memoryview) -> tuple[int, bool]:
        """Do one job; returns its number of tensor bytes, and whether it was the file's last unfinished job."""
        nbytes = 0
        if isinstance(job, ReadJob):
            begun: Begun = {}  # empty again at the end of the job, because jobs cover complete stripes
            for extent, copies in reads_of(job, len(buffer)):
                data = buffer[: extent.nbytes]
                job.source.reads.read(extent.file, extent.offset, data, begun)
                for copy in copies:
                    at = copy.start - extent.offset
                    self._write(copy.target, data[at : at + copy.nbytes])
                    nbytes += copy.nbytes
        else:
            assembler = Assembler(self.plan)
            for step in steps(self.plan, job, len(buffer)):
                data = buffer[: step.nbytes]
                nbytes += assembler.fill(step.offset, data)
                self._write(step.offset, data)
            assembler.finish()
        with self._lock:
            self._left -= 1
            return nbytes, self._left == 0

    def _write(self, offset: int, data: memoryview) -> None:
        """Write bytes and update the checksums. Bytes of a tensor with a CRC belong to this tensor alone."""
        self.out.write_at(offset, [data])
        # Outside of the lock, so that threads hash at the same time.
        digest = checksum_of(data)
        index = self.plan.content_at(offset)
        content = self.plan.contents[index]
        kind = content.crc if isinstance(content, TensorItems) else None
        crc = kind.of(data) if kind else 0
        with self._lock:
            self._digests.append((offset, digest))
            if kind:
                self._crcs.setdefault(index, []).append((offset, crc, len(data)))

    def write_known(self, first: int, stop: int) -> None:
        """Write the fixed and computed bytes of contents [first, stop)."""
        for offset, content in zip(
            self.plan.offsets[first:stop], self.plan.contents[first:stop], strict=True
        ):
            if isinstance(content, FixedBytes):
                self.out.write_at(offset, [content.data])
            elif isinstance(content, ComputedBytes):
                data = content.make(self._crc_of)
                planned = content.nbytes  # offsets of later contents depend on it
                assert len(data) == planned, f"{self.plan.name}: {len(data)} bytes, planned {planned}"
                self.out.write_at(offset, [data])

    def _crc_of(self, index: int) -> int:
        """Return the CRC of a tensor that has been written, by the number of its content."""
        kind = self.plan.tensor(index).crc
        assert kind is not None
        # Sorted by offset, because threads write the pieces in any order.
        return kind.join((crc, nbytes) for _, crc, nbytes in sorted(self._crcs.get(index, ())))

    @property
    def digest(self) -> str:
        """One checksum of all writes, in file order; `written_digest` recomputes it from the written file."""
        return _join_digests(digest for _, digest in sorted(self._digests))


def _join_digests(digests: Iterable[int]) -> str:
    """Return the hash of several hashes: xxh3 cannot be combined from pieces like a CRC."""
    return hex_checksum_of(b"".join(digest.to_bytes(8, "little") for digest in digests))


def written_digest(
    plan: FilePlan, read: Callable[[int, int], bytes], buffer_bytes: int, *, in_order: bool
) -> str:
    """Recompute `_WorkingFile.digest` from a finished file, to compare it with the recorded one.

    Args:
        read: returns bytes of the file, by offset and size.
        buffer_bytes: buffer size of the run that wrote the file, which determines the bounds of its writes.
        in_order: whether the file was written front to back.
    """
    written = writes(plan, buffer_bytes, in_order=in_order)
    return _join_digests(checksum_of(read(extent.offset, extent.nbytes)) for extent in written)


@dataclass
class Copier:
    """Writes the files of one conversion with several threads.

    Args:
        limits: limits for memory and threads.
        create: opens an output file; called just before its first byte is written.
        retrying: calls a function that writes one file from its start, and repeats the call after transient errors.
        progress: called with the number of tensor bytes done since the last call, from several threads.
        on_finished: called with each finished file, before its publication, and the file's digest; by one thread at a
            time.
    """

    limits: CopyLimits
    create: Callable[[FilePlan], FileWriter]
    retrying: Callable[[Callable[[], None]], None]
    progress: Progress
    on_finished: Callable[[FilePlan, str], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def copy(self, plans: Sequence[DataFile], *, in_order: bool) -> None:
        """Write all files, each front to back if ``in_order``.

        Raises:
            Exception: the first error of any thread; all other threads stop. The caller must abort the output files.
        """
        if in_order:
            in_threads(self.limits.usable_threads, self._stream, plans, name="convert")
        else:
            try:  # files on disk are written without `retrying`, so a SourceError must be unwrapped here
                in_threads(self.limits.usable_threads, self._work, self._jobs(plans), name="convert")
            except SourceError as carried:
                raise carried.error from carried.error.__cause__  # keeps the error's own cause

    def _finish(self, file: _WorkingFile, known: int = 0) -> None:
        """Write the fixed and computed bytes from content ``known`` on, verify the file's tensors, and close it."""
        file.write_known(known, len(file.plan.contents))
        with reading_source():  # damage of the source is no reason to write the file again
            for source, name in tensors_to_verify(file.plan, whole=True):
                source.verify(name)
        file.out.close()
        with self._lock:
            self.on_finished(file.plan, file.digest)

    def _jobs(self, plans: Sequence[DataFile]) -> Iterator[tuple[_WorkingFile, Job]]:
        """Return the jobs of files that are written in any order; a file is created when its first job is taken."""
        for plan in (each.planned() for each in plans):
            jobs = [*jobs_of(plan, self.limits.buffer_bytes, in_order=False)]
            file = _WorkingFile(plan, self.create(plan), len(jobs))
            if not jobs:  # usually the last job finishes the file
                self._finish(file)
            for job in jobs:
                yield file, job

    def _work(self, jobs: Shared[tuple[_WorkingFile, Job]]) -> None:
        """Do jobs until no job is left."""
        # An anonymous mapping instead of a bytearray: pages that are never touched take no memory.
        buffer = memoryview(mmap.mmap(-1, self.limits.buffer_bytes))
        for file, job in jobs:
            nbytes, is_last = file.do(job, buffer)
            self.progress(nbytes)
            if is_last:
                # Stretches have written all contents except for the last one.
                self._finish(file, len(file.plan.contents) - 1 if file.plan.stretch_bytes else 0)

    def _stream(self, plans: Shared[DataFile]) -> None:
        """Write files front to back, one after another."""
        buffer = memoryview(mmap.mmap(-1, self.limits.buffer_bytes))  # untouched pages take no memory
        for plan in plans:
            self.retrying(partial(self._write_in_order, plan.planned(), plans, buffer))

    def _write_in_order(self, plan: FilePlan, plans: Shared[DataFile], buffer: memoryview) -> None:
        """Write one file front to back; leave it unfinished if another thread has failed."""
        file, known, done = _WorkingFile(plan, self.create(plan), 0), 0, 0
        try:
            for extent in jobs_in_order(plan, self.limits.buffer_bytes):
                if plans.is_stopped:
                    return
                index = plan.content_at(extent.offset)
                file.write_known(known, index)
                known = index
                nbytes = file.do(extent, buffer)[0]
                self.progress(nbytes)
                done += nbytes
            self._finish(file, known)
        except Exception:  # any class: `retrying` may write the file again from its start
            self.progress(-done)
            raise


def tensors_to_verify(plan: DataFile, *, whole: bool) -> Iterator[tuple[Source, str]]:
    """Return the stored tensors to verify with a file: those whose first item is in the file.

    Args:
        whole: whether to select the tensors that are complete in this file, or those that are split across files.
    """
    num_items = Counter[str]()
    for items in plan.items():
        num_items[items.view.info.name] += items.stop - items.start
    for items in plan.items():
        info = items.view.info
        if items.start == 0 < items.stop and (num_items[info.name] == info.numel) == whole:
            yield from items.view.sources()


def verify_rest(plans: Sequence[DataFile], threads: int) -> None:
    """After all files are complete, verify tensors that are split across files, and check that no source has changed.

    Most formats have no checksums, which would detect that a source changed during the conversion.

    Raises:
        CorruptCheckpointError: if a checksum of the source does not match.
        ConversionError: if files of a source were replaced.
    """

    def verify(stored: tuple[Source, str]) -> int:
        source, name = stored
        source.verify(name)
        return 0

    cut: list[tuple[Source, str]] = []
    sources: dict[int, Source] = {}  # each once, by id, because a `Source` is not hashable
    for plan in plans:
        cut += tensors_to_verify(plan, whole=False)
        for items in plan.items():
            sources |= {id(source): source for source, _ in items.view.sources()}
    for_each(min(threads, len(cut)), verify, cut, name="convert")
    for source in sources.values():
        source.require_unchanged()
