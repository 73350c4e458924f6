"""`ZarrForm` and `ZarrReads`: ranks write the chunks of a live state in the zarr form, and read them back.

If several ranks have elements of a chunk, one of them, the owner, receives the others' parts and writes the chunk (see
`checkpoint.manifest.zarr_layout`). Chunks are read whole, and the crc32c of a chunk is compared before the chunk is
copied into tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
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
from vescale_fsdp.checkpoint.native.targets import LoadTarget, file_copies
from vescale_fsdp.checkpoint.native.write import (
    FileImage,
    NativeForm,
    write_rank_file,
)
from vescale_fsdp.checkpoint.native.zarr_chunks import ChunkTables, read_chunk
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import Exchange, Turn
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import Workers
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


class _Part(NamedTuple):
    """A rank's elements of a chunk, which the rank sends to the chunk's owner.

    Attributes:
        holder: the rank, and its region of the tensor.
        owner: the first holder of the chunk, which writes the chunk.
        dtype: the integer dtype that carries the elements' bits.
    """

    chunk: Chunk
    holder: Holder
    owner: Holder
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return self.holder.numel * self.dtype.itemsize


class ArrayWriter:
    """Writes this rank's chunks and array metadata. A collective: ranks send each other parts of chunks.

    A rank that fails takes part to the end, see `checkpoint.ranks.exchange`; all ranks raise at their meeting after
    `write`.
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
        self._meter = meter
        self.checksums: dict[Chunk, int] = {}  # crc32c of the chunks that this rank has written
        self._kept = FirstError()
        self._bits: tuple[int, torch.Tensor] | None = None  # (index, elements) of the tensor being written
        # The arrays whose metadata this rank writes: the first rank of each tensor does so. A tensor with several
        # descriptions (cuts) has a single array.
        self._heads = [
            indices[0]
            for indices in manifest.indices_by_name.values()
            if coordinator.rank == manifest.rank_sets[manifest.holders[indices[0]]].ranks[0]
        ]
        # The chunk being assembled from its parts, and its elements, 1D.
        self._assembled: tuple[Chunk, torch.Tensor] | None = None
        self._exchange = Exchange(coordinator, [*self._turns(coordinator.rank)], threads=0)

    def _turns(self, rank: int) -> Iterator[Turn[_Part]]:
        """Yield the turns of the chunks of which this rank has elements; the owner's own turn ends a chunk."""
        for chunk, (owner, *others) in held_chunks(self._manifest, rank):
            dtype = carrier_of(dtype_named(self._manifest.entries[chunk.tensor_index].dtype))
            for holder in others:
                if rank in (holder.rank, owner.rank):
                    part = _Part(chunk, holder, owner, dtype)
                    yield Turn(part, holder.rank, (owner.rank,), part.nbytes)
            if rank == owner.rank:
                yield Turn(_Part(chunk, owner, owner, dtype), rank, (rank,), 0)

    def write(self) -> None:
        """Write this rank's chunks and array metadata; durable on return.

        Raises:
            BaseException: the first error of this rank, after all parts have been sent and received.
        """
        storage, manifest, files = self._storage, self._manifest, []
        own = [turn.job for turn in self._exchange.turns if turn.job.holder is turn.job.owner]
        self._meter.begin("saving", sum(part.chunk.box.numel * part.dtype.itemsize for part in own))
        threads = max(1, storage.write_threads)
        with Workers(threads, self._kept, name="checkpoint-zarr") as workers:
            for index in self._heads:
                files.append(f"{manifest.array_paths[index]}/zarr.json")
                workers.submit(partial(storage.put, files[-1], [array_json(manifest, index)]))

            def take(part: _Part, data: memoryview) -> None:
                elements = self._with(part, data)
                if part.holder.rank == part.owner.rank:  # the last turn of the chunk
                    files.append(chunk_file(manifest, *part.chunk))
                    workers.submit(partial(self._put_chunk, part.chunk, elements, files[-1]))

            self._exchange.run(self._pack_part, take, lambda part: self._kept)
            workers.wait()
            # Parents too, because the name of a new folder is durable only after its parent is synced.
            folders = [folder.split("/") for folder in {file.rpartition("/")[0] for file in files}]
            with_parents = {
                "/".join(parts[:depth]) for parts in folders for depth in range(1, len(parts) + 1)
            }
            for folder in sorted(with_parents):
                workers.submit(partial(storage.sync_folder, folder))
        self._kept.raise_kept()

    def _pack_part(self, part: _Part, data: memoryview) -> None:
        """Copy this rank's elements of a chunk into ``data``; nothing for the owner, which sends none."""
        if len(data):
            local = self._local(part.chunk.tensor_index)
            _pack(part.holder.region, local, part.chunk.region, torch.frombuffer(data, dtype=part.dtype))

    def _with(self, part: _Part, data: memoryview) -> torch.Tensor:
        """Copy the elements of another rank into the chunk that this rank assembles; returns the chunk's elements."""
        chunk, whole = part.chunk, part.chunk.region
        if self._assembled is None or self._assembled[0] != chunk:
            # Zeros, because a chunk at the tensor's edge has elements outside of the tensor.
            elements = torch.zeros(chunk.box.numel, dtype=part.dtype, device="cpu")
            for share in overlaps(part.owner.region, whole):
                share.target_view(elements).copy_(share.source_view(self._local(chunk.tensor_index)))
            self._assembled = chunk, elements
        if len(data):
            packed = torch.frombuffer(data, dtype=part.dtype)
            _unpack(part.holder.region, whole, packed, self._assembled[1])
        return self._assembled[1]

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
            for copy in file_copies(share, read.target, max_gap_bytes=0):
                copy.take(copy.start, data[copy.start : copy.stop])
        return len(data)
