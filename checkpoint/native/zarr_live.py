"""`ZarrForm` and `ZarrReads`: ranks write the chunks of a live state in the zarr form, and read them back.

If several ranks have elements of a chunk, one of these ranks, the owner, receives the elements of the remaining ranks
and writes the chunk (see `checkpoint.manifest.zarr_layout`). Chunks are read whole, and the crc32c of a chunk is
compared before the chunk is copied into tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_FILES, ZARR_NAME, is_own_file
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dense, dtype_named
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    array_json,
    as_arrays,
    chunk_file,
    chunks_of,
    clipped,
    held_chunks,
    node_files,
)
from vescale_fsdp.checkpoint.native.form import Commit, Form, RankShare, root_errors
from vescale_fsdp.checkpoint.native.read import Reads
from vescale_fsdp.checkpoint.native.targets import FileCopy, LoadTarget, file_copies
from vescale_fsdp.checkpoint.native.write import FileImage, write_rank_file
from vescale_fsdp.checkpoint.native.written_folder import WrittenFolder
from vescale_fsdp.checkpoint.native.zarr_chunks import ChunkReader, ChunkTables
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import Turn, TurnExchange
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import Workers
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.layout.region import Region, overlaps

if TYPE_CHECKING:  # imports the zarr library, which takes half a second that other forms need not wait
    from vescale_fsdp.checkpoint.native.zarr_codec import ArrayChunks


@dataclass(frozen=True)
class ZarrForm(Form):
    """One zarr v3 array for each tensor; ranks' files have the `PerRank` values and the checksums of chunks.

    The names of arrays are the same in every save. A new checkpoint is therefore written into a sibling folder, which
    is exchanged with the old folder; an object store, which renames nothing, cannot replace an old checkpoint.

    Args:
        may_lose_old: whether an old checkpoint in an object store is removed before the save, instead of an error.
    """

    name: ClassVar[str] = "zarr"
    has_manifest: ClassVar[bool] = True
    may_lose_old: bool = False

    def arguments(self) -> Json:
        """Return the form's name. `may_lose_old` is no option: only `for_exports` sets it, on all ranks."""
        return self.name

    def for_exports(self) -> Form:
        """Return this form with `may_lose_old`."""
        return replace(self, may_lose_old=True)

    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """Lock the folder. Raises CheckpointError if the path holds a checkpoint or files that must not be replaced."""
        _folder(storage, may_lose_old=self.may_lose_old).claim(held, overwrite=overwrite)

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan the chunks; write this rank's chunks, then its file."""
        coordinator, folder = share.coordinator, _folder(share.storage)
        storage = folder.working
        with coordinator.together("planning chunks"):
            with gc_paused():  # planning creates many objects and no cycles
                manifest = as_arrays(plan())
                share.check_room(manifest.num_bytes)
            arrays = ArrayWriter(storage, manifest, share.locals_by_name, coordinator, share.meter)
            if coordinator.rank == 0:
                with root_errors(share.storage):
                    folder.begin()
        # A separate block, so that no rank writes before rank 0 has removed the files of a killed attempt.
        with coordinator.together(f"writing to {share.storage.where}"), root_errors(share.storage):
            arrays.write()
            file = RankFile(manifest, coordinator.rank)
            table = file.chunk_table(arrays.checksums)
            # A new meter for the file: the save's meter counts the bytes of tensors, which are in the chunks.
            write_rank_file(storage, FileImage(file, {}, share.blob, table), Meter())
        return Commit(manifest.num_bytes, partial(_commit, folder, manifest, share.sealed))

    def clear_away(self, storage: Storage, save_id: str) -> None:
        """Remove all files of a failed save."""
        _folder(storage).clear_away()


def _folder(storage: Storage, *, may_lose_old: bool = False) -> WrittenFolder:
    """Return the folder of a checkpoint in the zarr form; an old checkpoint may be in the native form too."""
    native, own = MANIFEST_FILES
    return WrittenFolder(
        storage,
        "a checkpoint of this library",
        own,
        is_own_file,
        others=(native,),
        in_place=False,
        may_lose_old=may_lose_old,
    )


def _commit(folder: WrittenFolder, manifest: Manifest, sealed: Callable[[Manifest], Manifest]) -> None:
    """Write the metadata of all nodes but tensors' arrays, then the manifest; make the folder valid."""

    def manifest_bytes() -> tuple[bytes]:
        return (sealed(manifest).to_bytes(),)

    nodes = {name: partial(tuple[bytes], [content]) for name, content in node_files(manifest).items()}
    files = [manifest.file_name(rank) for rank in range(manifest.world_size)]
    folder.commit({**nodes, manifest.name: manifest_bytes}, files)


class ArrayWriter:
    """Writes this rank's chunks and array metadata. A collective: ranks send each other elements of chunks.

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
        # The arrays whose metadata this rank writes, as the first rank of their tensor. A tensor with several
        # descriptions (cuts) has a single array.
        self._heads = [
            indices[0]
            for indices in manifest.indices_by_name.values()
            if coordinator.rank == manifest.rank_sets[manifest.holders[indices[0]]].ranks[0]
        ]
        # The chunk being assembled, and its elements, 1D.
        self._assembled: tuple[Chunk, torch.Tensor] | None = None
        # For each chunk of which this rank has elements, regions of the tensor by rank: of all ranks that provide
        # elements if this rank owns the chunk, else of this rank alone.
        self._regions: dict[Chunk, dict[int, Region]] = {}
        self._exchange = TurnExchange(coordinator, [*self._turns(coordinator.rank)], threads=0)

    def _turns(self, rank: int) -> Iterator[Turn[Chunk]]:
        """Yield the turns of the chunks of which this rank has elements; the owner's own turn ends a chunk."""
        for chunk, ((owner, own_region), *others) in held_chunks(self._manifest, rank):
            self._regions[chunk] = {owner: own_region} if rank == owner else {}
            for holder, region in others:
                if rank in (holder, owner):
                    self._regions[chunk][holder] = region
                    numel = sum(shared.numel for shared in overlaps(region, chunk.region))
                    yield Turn(chunk, holder, (owner,), numel * self._dtype(chunk).itemsize)
            if rank == owner:
                yield Turn(chunk, owner, (owner,), 0)

    def _dtype(self, chunk: Chunk) -> torch.dtype:
        """Return the integer dtype that carries the bits of a chunk's elements."""
        return carrier_of(dtype_named(self._manifest.entries[chunk.tensor_index].dtype))

    def write(self) -> None:
        """Write this rank's chunks and array metadata; durable on return.

        Raises:
            BaseException: the first error of this rank, after all messages have been sent and received.
        """
        from vescale_fsdp.checkpoint.native.zarr_codec import ArrayChunks

        storage, manifest, files = self._storage, self._manifest, []
        own = [turn.job for turn in self._exchange.turns if turn.receivers == (turn.sender,)]
        self._meter.begin("saving", sum(chunk.box.numel * self._dtype(chunk).itemsize for chunk in own))
        threads = max(1, storage.write_threads)
        with (
            closing(ArrayChunks(storage, manifest)) as arrays,
            Workers(threads, self._kept, name="checkpoint-zarr") as workers,
        ):
            for index in self._heads:
                files.append(f"{manifest.array_paths[index]}/{ZARR_NAME}")
                workers.submit(partial(storage.put, files[-1], [array_json(manifest, index)]))

            def take(turn: Turn[Chunk], data: memoryview) -> None:
                elements, chunk = self._with(turn, data), turn.job
                if turn.receivers == (turn.sender,):  # the last turn of the chunk
                    files.append(chunk_file(manifest, *chunk))
                    workers.submit(partial(self._put_chunk, arrays, chunk, elements))

            self._exchange.run(self._pack_elements, take, lambda turn: self._kept)
            workers.wait()
            # Parents too, because the name of a new folder is durable only after its parent is synced.
            folders = [folder.split("/") for folder in {file.rpartition("/")[0] for file in files}]
            with_parents = {
                "/".join(parts[:depth]) for parts in folders for depth in range(1, len(parts) + 1)
            }
            for folder in sorted(with_parents):
                workers.submit(partial(storage.sync_folder, folder))
        self._kept.raise_kept()

    def _pack_elements(self, turn: Turn[Chunk], data: memoryview) -> None:
        """Copy this rank's elements of a chunk into ``data``; nothing for the owner, which sends no elements."""
        if len(data):
            chunk, region = turn.job, self._regions[turn.job][turn.sender]
            packed = torch.frombuffer(data, dtype=self._dtype(chunk))
            _pack(region, self._local(chunk.tensor_index), chunk.region, packed)

    def _with(self, turn: Turn[Chunk], data: memoryview) -> torch.Tensor:
        """Copy the elements of the sender into the chunk that this rank assembles; returns the chunk's elements."""
        chunk, (owner,) = turn.job, turn.receivers
        dtype, regions = self._dtype(chunk), self._regions[chunk]
        if self._assembled is None or self._assembled[0] != chunk:
            # Zeros, because a chunk at the tensor's edge has elements outside of the tensor.
            elements = torch.zeros(chunk.box.numel, dtype=dtype, device="cpu")
            for copy in overlaps(regions[owner], chunk.region):
                copy.target_view(elements).copy_(copy.source_view(self._local(chunk.tensor_index)))
            self._assembled = chunk, elements
        if len(data):
            packed = torch.frombuffer(data, dtype=dtype)
            _unpack(regions[turn.sender], chunk.region, packed, self._assembled[1])
        return self._assembled[1]

    def _local(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a tensor as integers, 1D; kept, since its chunks follow each other."""
        if self._bits is None or self._bits[0] != index:
            plain = dense(self._locals_by_name[self._manifest.entries[index].name]).view(-1)
            self._bits = (index, plain.view(carrier_of(plain.dtype)))
        return self._bits[1]

    def _put_chunk(self, arrays: ArrayChunks, chunk: Chunk, elements: torch.Tensor) -> None:
        """Write a chunk's file: the elements and their crc32c."""
        data = elements.view(torch.uint8).numpy()
        self.checksums[chunk] = arrays.write(chunk, data)
        self._meter.advance(len(data))


def _pack(source: Region, elements: torch.Tensor, target: Region, out: torch.Tensor) -> None:
    """Copy the elements that two regions share into ``out``, one copy after another."""
    torch.cat([copy.source_view(elements).reshape(-1) for copy in overlaps(source, target)], out=out)


def _unpack(source: Region, target: Region, packed: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the elements that `_pack` has packed into ``out``, the elements of the target region."""
    copies = overlaps(source, target)
    for copy, part in zip(copies, packed.split([copy.numel for copy in copies]), strict=True):
        view = copy.target_view(out)
        view.copy_(part.view(view.shape))


class ZarrReads(Reads):
    """Reads of the zarr form. Each read is a whole chunk."""

    def __init__(self, storage: Storage, tables: ChunkTables) -> None:
        super().__init__(storage)
        self._manifest = tables.manifest
        self._reader = ChunkReader(tables)
        # From each chunk, as if a file had only the chunk's elements that are inside the tensor.
        self._copies: dict[Chunk, list[FileCopy]] = {}

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        target, manifest = LoadTarget(tensor), self._manifest
        # A tensor with several descriptions (cuts) has a single array, the array of the first description.
        index = manifest.indices_by_name[manifest.entries[index].name][0]
        for chunk in chunks_of(manifest, index, region):
            for shared in overlaps(Region.of_box(self._inside(chunk)), region):
                self._copies.setdefault(chunk, []).extend(file_copies(shared, target, max_gap_bytes=0))
        return target

    def open(self) -> None:
        """Do nothing: a chunk's file is opened when it is read."""

    def verify(self) -> None:
        size = sum(map(self._size, self._copies))
        self._map("verifying", lambda chunk: len(self._reader.read(chunk)), list(self._copies), size)

    def run(self, *, verify: bool) -> None:
        """Read all chunks. Every chunk is verified, even without ``verify``, because it is read whole anyway."""
        self._map("loading", self._read, list(self._copies), sum(map(self._size, self._copies)))

    def close(self) -> None:
        """Close the reader; a chunk's file is closed after it is read."""
        self._reader.close()

    def _inside(self, chunk: Chunk) -> Box:
        """Return the part of a chunk's box that is inside the tensor."""
        return clipped(chunk.box, self._manifest.entries[chunk.tensor_index].shape)

    def _size(self, chunk: Chunk) -> int:
        """Return the size in bytes of a chunk's elements that are inside the tensor."""
        return self._inside(chunk).numel * self._manifest.entries[chunk.tensor_index].itemsize

    def _read(self, chunk: Chunk) -> int:
        """Read a chunk into its targets. Returns the number of bytes read."""
        copies, size = self._copies[chunk], self._size(chunk)
        if len(copies) == 1 and copies[0].is_direct and (copies[0].start, copies[0].stop) == (0, size):
            self._reader.read(chunk, copies[0].memory(0, size))
            copies[0].target.begin()  # not before the read, which leaves the memory unchanged if it fails
            return size
        data = self._reader.read(chunk)
        for copy in copies:
            copy.take(copy.start, data[copy.start : copy.stop])
        return size
