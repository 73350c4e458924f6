"""Writing the zarr form: each rank writes its chunks. Neighbours send their parts of chunks cut inside a row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.formats.form import Commit, RankShare, root_errors
from vescale_fsdp.checkpoint.formats.native.write import (
    FileImage,
    NativeForm,
    write_rank_file,
)
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.region import Region, overlaps
from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dense, dtype_named
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    Holder,
    array_json,
    as_arrays,
    chunk_file,
    group_files,
    held_chunks,
)
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Buffer, Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC32C
from vescale_fsdp.checkpoint.storage.progress import Meter


class ZarrForm(NativeForm):
    """One zarr v3 array for each tensor; ranks' files have the per-rank values and the checksums of chunks."""

    name = "zarr"

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan, write this rank's chunks, then its file."""
        storage, coordinator = share.storage, share.coordinator
        with coordinator.together("planning chunks"):
            with gc_paused():
                manifest = as_arrays(plan())
                share.check_room(manifest.num_bytes)
            arrays = ArrayWriter(storage, manifest, share.locals_by_name, coordinator, share.meter)
        with coordinator.together(f"writing to {storage.where}"), root_errors(storage):
            arrays.write()
            file = RankFile(manifest, coordinator.rank)
            table = file.chunk_table(arrays.checksums)
            write_rank_file(storage, FileImage(file, {}, share.blob, table), Meter())
        return self.commit_of(manifest, share)

    def finish(self, storage: Storage, manifest: Manifest) -> None:
        """Write the metadata of groups, so that the tree opens as zarr groups."""
        *inner, root = group_files(manifest).items()
        for name, content in inner:
            _put(storage, name, content)
        storage.commit(*root, replace=True)  # an older save may have one


class _Step(NamedTuple):
    """A chunk of which this rank has a part: it assembles the chunk, or sends its part to the rank that does."""

    chunk: Chunk
    holders: list[Holder]  # the first assembles the chunk
    dtype: torch.dtype  # the integers that carry the bits

    def part_bytes(self, holder: Holder) -> int:
        """Size of one rank's part."""
        return holder.numel * self.dtype.itemsize


class ArrayWriter:
    """Writes this rank's chunks and array metadata; a collective, since chunks cut between ranks are sent to one.

    After an error, a rank still sends and receives parts of the right sizes, so that no neighbour waits for it. All
    ranks then reach the meeting after `write`, which raises on all of them.
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
        self._bits: tuple[int, torch.Tensor] | None = None  # of the last tensor asked for
        # Further descriptions of the same tensor have the same values.
        self._heads = [
            indices[0]
            for indices in manifest.indices_by_name.values()
            if coordinator.rank == manifest.rank_sets[manifest.holders[indices[0]]].ranks[0]
        ]
        self._steps = [
            _Step(chunk, holders, carrier_of(dtype_named(manifest.entries[chunk.tensor_index].dtype)))
            for chunk, holders in held_chunks(manifest, coordinator.rank)
        ]
        # Allocated now: a rank that runs out of memory later must still be able to send and receive.
        nbytes = [step.part_bytes(holder) for step in self._steps for holder in step.holders]
        self._part = torch.empty(max(nbytes, default=0), dtype=torch.uint8, device="cpu")

    def write(self) -> None:
        """Write everything; durable on return.

        Raises:
            BaseException: the first error of this rank, after its neighbours have received their parts.
        """
        names = []
        own = [step for step in self._steps if step.holders[0].rank == self._coordinator.rank]
        self._meter.begin("saving", sum(step.chunk.box.numel * step.dtype.itemsize for step in own))
        threads = max(1, self._storage.write_threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-zarr") as pool:
            work: list[Future[None]] = []
            for index in self._heads:
                names.append(f"{self._manifest.array_paths[index]}/zarr.json")
                work.append(pool.submit(_put, self._storage, names[-1], array_json(self._manifest, index)))
            for step in self._steps:
                elements = self._exchange(step)
                if elements is not None and self._errors.error is None:
                    names.append(chunk_file(self._manifest, *step.chunk))
                    work.append(pool.submit(self._put_chunk, step.chunk, elements, names[-1]))
                while len(work) > 2 * threads:  # bounds the chunks in memory
                    self._errors.attempt(work.pop(0).result)
            for future in work:
                self._errors.attempt(future.result)
            self._errors.attempt(lambda: list(pool.map(self._storage.sync_folder, _folders(names))))
        self._errors.raise_kept()

    def _exchange(self, step: _Step) -> torch.Tensor | None:
        """Assemble the chunk, 1D, if this rank writes it (None after an error); else send this rank's part."""
        rank, index, whole = self._coordinator.rank, step.chunk.tensor_index, step.chunk.region
        owner, *others = step.holders
        if owner.rank != rank:
            mine = next(holder for holder in others if holder.rank == rank)
            part = self._part[: step.part_bytes(mine)]
            self._errors.attempt(lambda: _pack(mine.region, self._local(index), whole, part.view(step.dtype)))
            self._coordinator.send(part, owner.rank)
            return None

        def own_part() -> torch.Tensor:
            # Zeros, also beyond the tensor's edges.
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
        """This rank's elements of a tensor, 1D."""
        if self._bits is None or self._bits[0] != index:
            plain = dense(self._locals_by_name[self._manifest.entries[index].name]).view(-1)
            self._bits = (index, plain.view(carrier_of(plain.dtype)))
        return self._bits[1]

    def _put_chunk(self, chunk: Chunk, elements: torch.Tensor, name: str) -> None:
        data = elements.view(torch.uint8).numpy()
        checksum = CRC32C.of(data.tobytes())
        _put(self._storage, name, data, struct.pack("<I", checksum))
        self.checksums[chunk] = checksum
        self._meter.advance(len(data))


def _folders(names: Iterable[str]) -> list[str]:
    """Folders of files of these names, and the folders around them."""
    paths = {name.rpartition("/")[0] for name in names}
    return sorted(
        {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 2)}
    )


def _pack(source: Region, have: torch.Tensor, target: Region, into: torch.Tensor) -> None:
    """The shared elements, one share after the other."""
    torch.cat([share.source_view(have).reshape(-1) for share in overlaps(source, target)], out=into)


def _unpack(source: Region, target: Region, packed: torch.Tensor, into: torch.Tensor) -> None:
    """Inverse of `_pack`, on the owner's side."""
    shares = overlaps(source, target)
    for share, part in zip(shares, packed.split([share.numel for share in shares]), strict=True):
        view = share.target_view(into)
        view.copy_(part.view(view.shape))


def _put(storage: Storage, name: str, *buffers: Buffer) -> None:
    def write() -> None:
        with storage.create(name, sum(memoryview(buffer).nbytes for buffer in buffers)) as writer:
            writer.write_at(0, buffers)

    storage.retrying(write)
