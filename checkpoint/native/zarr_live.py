"""`ZarrForm` and `ZarrReads`: ranks write the chunks of a live state in the zarr form, and read them back.

If several ranks have elements of a chunk, one of them, the owner, receives the others' parts and writes the chunk (see
`checkpoint.manifest.zarr_layout`). Chunks are read whole, and the crc32c of a chunk is compared before the chunk is
copied into tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dense, dtype_named
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    Holder,
    array_json,
    as_arrays,
    chunk_file,
    chunks_of,
    group_files,
    held_chunks,
)
from vescale_fsdp.checkpoint.native.form import Commit, RankShare, root_errors
from vescale_fsdp.checkpoint.native.read import Reads
from vescale_fsdp.checkpoint.native.targets import LoadTarget, sinks_of
from vescale_fsdp.checkpoint.native.write import (
    FileImage,
    NativeForm,
    write_rank_file,
)
from vescale_fsdp.checkpoint.native.zarr_chunks import ChunkTables, read_chunk
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC32C
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.layout.region import Region, overlaps


class ZarrForm(NativeForm):
    """One zarr v3 array for each tensor; ranks' files have the `PerRank` values and the checksums of chunks."""

    name = "zarr"

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan the chunks; write this rank's chunks, then its file."""
        storage, coordinator = share.storage, share.coordinator
        with coordinator.together("planning chunks"):
            with gc_paused():  # planning creates many objects and no cycles
                manifest = as_arrays(plan())
                share.check_room(manifest.num_bytes)
            arrays = ArrayWriter(storage, manifest, share.locals_by_name, coordinator, share.meter)
        with coordinator.together(f"writing to {storage.where}"), root_errors(storage):
            arrays.write()
            file = RankFile(manifest, coordinator.rank)
            table = file.chunk_table(arrays.checksums)
            # A new meter for the file: the save's meter counts the bytes of tensors, which are in the chunks.
            write_rank_file(storage, FileImage(file, {}, share.blob, table), Meter())
        return self.commit_of(manifest, share)

    def finish(self, storage: Storage, manifest: Manifest) -> None:
        """Write the metadata of groups, so that zarr libraries can open the folders as groups."""
        *inner, root = group_files(manifest).items()
        for name, content in inner:
            storage.put(name, [content])
        storage.commit(*root, replace=True)  # an older save may have left the root's file


class _Step(NamedTuple):
    """A chunk of which this rank has elements. The chunk's owner assembles it; other ranks send their parts."""

    chunk: Chunk
    holders: list[Holder]  # the ranks that have elements of the chunk; the first is the owner
    dtype: torch.dtype  # the integer dtype that carries the elements' bits

    def part_bytes(self, holder: Holder) -> int:
        """Return the size in bytes of a rank's part of the chunk."""
        return holder.numel * self.dtype.itemsize


class ArrayWriter:
    """Writes this rank's chunks and array metadata. A collective: ranks send each other parts of chunks.

    After an error, a rank still sends and receives parts of the right sizes, so that no other rank waits for it. All
    ranks then reach the check for errors after `write`, where all of them raise.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        locals_by_name: Mapping[str, torch.Tensor],
        coordinator: Coordinator,
        meter: Meter,
    ) -> None:
        self._manifest = manifest
        self._storage = storage
        self._locals_by_name = locals_by_name
        self._coordinator, self._meter = coordinator, meter
        self.checksums: dict[Chunk, int] = {}  # crc32c of the chunks that this rank has written
        self._errors = FirstError()
        self._bits: tuple[int, torch.Tensor] | None = None  # (index, elements) of the tensor being written
        # The arrays whose metadata this rank writes: the first rank of each tensor does so. A tensor with several
        # descriptions (cuts) has a single array.
        self._heads = [
            indices[0]
            for indices in manifest.indices_by_name.values()
            if coordinator.rank == manifest.rank_sets[manifest.holders[indices[0]]].ranks[0]
        ]
        self._steps = [
            _Step(chunk, holders, carrier_of(dtype_named(manifest.entries[chunk.tensor_index].dtype)))
            for chunk, holders in held_chunks(manifest, coordinator.rank)
        ]
        # Allocated in advance, because a rank that runs out of memory later must still be able to send and receive.
        nbytes = [step.part_bytes(holder) for step in self._steps for holder in step.holders]
        self._part = torch.empty(max(nbytes, default=0), dtype=torch.uint8, device="cpu")

    def write(self) -> None:
        """Write this rank's chunks and array metadata; durable on return.

        Raises:
            BaseException: the first error of this rank, after all parts have been sent and received.
        """
        storage, manifest, files = self._storage, self._manifest, []
        own = [step for step in self._steps if step.holders[0].rank == self._coordinator.rank]
        self._meter.begin("saving", sum(step.chunk.box.numel * step.dtype.itemsize for step in own))
        threads = max(1, storage.write_threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-zarr") as pool:
            work: list[Future[None]] = []
            for index in self._heads:
                files.append(f"{manifest.array_paths[index]}/zarr.json")
                work.append(pool.submit(storage.put, files[-1], [array_json(manifest, index)]))
            for step in self._steps:
                elements = self._exchange(step)
                if elements is not None and self._errors.error is None:  # nothing is written after an error
                    files.append(chunk_file(manifest, *step.chunk))
                    work.append(pool.submit(self._put_chunk, step.chunk, elements, files[-1]))
                while len(work) > 2 * threads:  # bounds the chunks in memory
                    self._errors.attempt(work.pop(0).result)
            for future in work:
                self._errors.attempt(future.result)
            # Parents too, because the name of a new folder is durable only after its parent is synced.
            folders = [folder.split("/") for folder in {file.rpartition("/")[0] for file in files}]
            with_parents = {
                "/".join(parts[:depth]) for parts in folders for depth in range(1, len(parts) + 1)
            }
            self._errors.attempt(lambda: list(pool.map(storage.sync_folder, sorted(with_parents))))
        self._errors.raise_kept()

    def _exchange(self, step: _Step) -> torch.Tensor | None:
        """Assemble a chunk, or send this rank's part of it to the owner.

        Returns the chunk's elements, 1D, on the owner; None on other ranks and after an error.
        """
        rank, index, whole = self._coordinator.rank, step.chunk.tensor_index, step.chunk.region
        owner, *others = step.holders
        if owner.rank != rank:
            mine = next(holder for holder in others if holder.rank == rank)
            part = self._part[: step.part_bytes(mine)]
            self._errors.attempt(lambda: _pack(mine.region, self._local(index), whole, part.view(step.dtype)))
            self._coordinator.send(part, owner.rank)
            return None

        def own_part() -> torch.Tensor:
            """Return the chunk with this rank's own elements; the elements of other ranks are still zero."""
            # Zeros, because a chunk at the tensor's edge has elements outside of the tensor.
            chunk = torch.zeros(step.chunk.box.numel, dtype=step.dtype, device="cpu")
            for share in overlaps(owner.region, whole):
                share.target_view(chunk).copy_(share.source_view(self._local(index)))
            return chunk

        chunk = self._errors.attempt(own_part)
        for holder in others:
            part = self._part[: step.part_bytes(holder)]
            self._coordinator.receive(part, holder.rank)
            if chunk is not None:
                self._errors.attempt(partial(_unpack, holder.region, whole, part.view(step.dtype), chunk))
        return chunk

    def _local(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a tensor as integers, 1D; kept, since its chunks follow each other."""
        if self._bits is None or self._bits[0] != index:
            plain = dense(self._locals_by_name[self._manifest.entries[index].name]).view(-1)
            self._bits = (index, plain.view(carrier_of(plain.dtype)))
        return self._bits[1]

    def _put_chunk(self, chunk: Chunk, elements: torch.Tensor, file: str) -> None:
        """Write a chunk's file: the elements and their crc32c."""
        data = elements.view(torch.uint8).numpy()
        checksum = CRC32C.of(data)
        self._storage.put(file, [data, struct.pack("<I", checksum)])
        self.checksums[chunk] = checksum
        self._meter.advance(len(data))


def _pack(source: Region, elements: torch.Tensor, target: Region, out: torch.Tensor) -> None:
    """Copy the elements that two regions share into ``out``, one share after another."""
    torch.cat([share.source_view(elements).reshape(-1) for share in overlaps(source, target)], out=out)


def _unpack(source: Region, target: Region, packed: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the elements that `_pack` has packed into ``out``, the elements of the target region."""
    shares = overlaps(source, target)
    for share, part in zip(shares, packed.split([share.numel for share in shares]), strict=True):
        view = share.target_view(out)
        view.copy_(part.view(view.shape))


class _ChunkRead(NamedTuple):
    """A chunk to read, and the region to fill with some of its elements."""

    chunk: Chunk
    wanted: Region
    target: LoadTarget


class ZarrReads(Reads):
    """Reads of the zarr form. Each read is a whole chunk."""

    def __init__(self, storage: Storage, tables: ChunkTables) -> None:
        super().__init__(storage)
        self._tables = tables
        self._reads: list[_ChunkRead] = []

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        target, manifest = LoadTarget(tensor), self._tables.manifest
        # A tensor with several descriptions (cuts) has a single array, that of the first one.
        index = manifest.indices_by_name[manifest.entries[index].name][0]
        self._reads += [_ChunkRead(chunk, region, target) for chunk in chunks_of(manifest, index, region)]
        return target

    def open(self) -> None:
        """Do nothing: a chunk's file is opened when it is read."""

    def verify(self) -> None:
        # Each chunk once, although several requested regions may need it.
        chunks = dict.fromkeys(read.chunk for read in self._reads)
        size = sum(map(self._size, chunks))
        self._map("verifying", lambda chunk: len(read_chunk(self._tables, chunk)), list(chunks), size)

    def run(self, *, verify: bool) -> None:
        """Read all chunks. Every chunk is verified, even without ``verify``, because it is read whole anyway."""
        size = sum(self._size(read.chunk) for read in self._reads)
        self._map("loading", self._read, self._reads, size)

    def close(self) -> None:
        """Do nothing: a chunk's file is closed after it is read."""

    def _size(self, chunk: Chunk) -> int:
        """Return the size of a chunk in bytes, without its crc32c."""
        return chunk.box.numel * self._tables.manifest.entries[chunk.tensor_index].itemsize

    def _read(self, read: _ChunkRead) -> int:
        """Read a chunk into its target. Returns the number of bytes read."""
        data, whole = read_chunk(self._tables, read.chunk), read.chunk.region
        for share in overlaps(whole, read.wanted):
            for sink in sinks_of(share, 0, read.target, max_gap_bytes=0):
                sink.take(sink.start, data[sink.start : sink.stop])
        return len(data)
