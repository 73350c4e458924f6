"""The zarr form: every rank writes the chunks it owns, with what neighbours send for those cut inside a row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.checksums import CRC32C
from vescale_fsdp.checkpoint.manifest.chunk_owners import Chunk, Holder, held_chunks
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.region import Region, overlaps
from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dense, dtype_named
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    array_json,
    as_arrays,
    chunk_file,
    group_files,
)
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.saving.form import Commit, RankShare, told_if_unusable
from vescale_fsdp.checkpoint.saving.manifest_form import ManifestForm, commit_manifest
from vescale_fsdp.checkpoint.saving.rank_file_bytes import FileImage
from vescale_fsdp.checkpoint.saving.rank_file_writer import write_rank_file
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Buffer, Storage
from vescale_fsdp.checkpoint.storage.progress import Meter


class ZarrForm(ManifestForm):
    """One zarr v3 array for each tensor; ranks' files hold per-rank values and the checksums of chunks."""

    name = "zarr"

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan, write this rank's chunks, then its file."""
        storage, coordinator = share.storage, share.coordinator
        with coordinator.together("planning chunks"):
            with gc_paused():
                manifest = as_arrays(plan())
                share.prove_room(manifest.num_bytes)
            arrays = ArrayWriter(storage, manifest, share.locals_by_name, coordinator, share.meter)
        with coordinator.together(f"writing to {storage.where}"), told_if_unusable(storage):
            arrays.write()
            file = RankFile(manifest, coordinator.rank)
            table = file.chunk_table(arrays.checksums)
            write_rank_file(storage, FileImage(file, {}, share.blob, table), Meter())
        commit = partial(
            commit_manifest,
            storage,
            manifest,
            form=self,
            replace=share.replace,
            check_files=not share.every_node,
        )
        return Commit(manifest.num_bytes, commit, manifest.save_id)

    def finish(self, storage: Storage, manifest: Manifest) -> None:
        """Group metadata, so that the tree opens as zarr groups."""
        *inner, root = group_files(manifest).items()
        for name, content in inner:
            _put(storage, name, content)
        storage.commit(*root, replace=True)  # an older save may have one


class _Step(NamedTuple):
    """A chunk that this rank has a share in: it puts the parts together, or sends its own to who does."""

    chunk: Chunk
    holders: list[Holder]  # the first puts them together
    dtype: torch.dtype  # under which bits travel


class ArrayWriter:
    """Writes the chunks and array metadata that are this rank's.

    Made and used by all ranks together: chunks cut between ranks are sent to one of them. Whatever one rank meets
    meanwhile, its neighbours still get parts of the right sizes from it, and it takes theirs; so all come to the
    meeting behind `write`, where they hear that nothing of this is to be committed.
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
        self.storage = storage
        self._locals_by_name = locals_by_name
        self._coordinator, self.meter = coordinator, meter
        self.checksums: dict[Chunk, int] = {}  # crc32c of the chunks that this rank has written
        self._kept = FirstError()
        self._bits: tuple[int, torch.Tensor] | None = None  # of the tensor whose turn it is
        # Further descriptions of the same tensor have the same values.
        self._heads = [
            places[0]
            for places in manifest.places_by_name.values()
            if coordinator.rank == manifest.rank_sets[manifest.holders[places[0]]].ranks[0]
        ]
        self._steps = [
            _Step(chunk, holders, carrier_of(dtype_named(manifest.entries[chunk.place].dtype)))
            for chunk, holders in held_chunks(manifest, coordinator.rank)
        ]
        # Taken now: a rank that lacks memory later must still be able to answer.
        nbytes = [holder.numel * step.dtype.itemsize for step in self._steps for holder in step.holders]
        self._travelling = torch.empty(max(nbytes, default=0), dtype=torch.uint8, device="cpu")

    def write(self) -> None:
        """Write everything; durable on return.

        Raises:
            BaseException: the first thing that went wrong on this rank, when its neighbours have had their parts.
        """
        names = []
        own = [step for step in self._steps if step.holders[0].rank == self._coordinator.rank]
        self.meter.begin("saving", sum(step.chunk.box.numel * step.dtype.itemsize for step in own))
        threads = max(1, self.storage.write_threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-zarr") as pool:
            work: list[Future[None]] = []
            for place in self._heads:
                names.append(f"{self._manifest.array_paths[place]}/zarr.json")
                data = array_json(self._manifest, place)
                work.append(pool.submit(_put, self.storage, names[-1], data))
            for step in self._steps:
                elements = self._exchanged(step)
                if elements is not None and self._kept.error is None:
                    names.append(chunk_file(self._manifest, *step.chunk))
                    work.append(pool.submit(_put_chunk, self, step.chunk, elements, names[-1]))
                while len(work) > 2 * threads:  # bounds the chunks in memory
                    self._kept.attempt(work.pop(0).result)
            for future in work:
                self._kept.attempt(future.result)
            self._kept.attempt(lambda: list(pool.map(self.storage.sync_folder, _folders(names))))
        self._kept.raise_kept()

    def _exchanged(self, step: _Step) -> torch.Tensor | None:
        """The chunk's elements, if it is this rank's to write; if not, this rank's part of them is sent."""
        rank, place, whole = self._coordinator.rank, step.chunk.place, step.chunk.region
        owner, *others = step.holders
        if owner.rank != rank:
            mine = next(holder for holder in others if holder.rank == rank)
            part = self._room(step, mine)
            self._kept.attempt(lambda: part.copy_(_pack(mine.region, self._local(place), whole)))
            self._coordinator.send(part.view(torch.uint8), owner.rank)
            return None
        chunk = self._kept.attempt(lambda: _copy(owner.region, self._local(place), whole, _empty_chunk(step)))
        for holder in others:
            part = self._room(step, holder)
            self._coordinator.receive(part.view(torch.uint8), holder.rank)
            if chunk is not None:
                self._kept.attempt(partial(_unpack, holder.region, whole, part, chunk))
        return chunk

    def _room(self, step: _Step, holder: Holder) -> torch.Tensor:
        """Where a part lies while it travels."""
        return self._travelling[: holder.numel * step.dtype.itemsize].view(step.dtype)

    def _local(self, place: int) -> torch.Tensor:
        """The elements of the tensor that this rank holds, 1D."""
        if self._bits is None or self._bits[0] != place:
            plain = dense(self._locals_by_name[self._manifest.entries[place].name]).view(-1)
            self._bits = (place, plain.view(carrier_of(plain.dtype)))
        return self._bits[1]


def _empty_chunk(step: _Step) -> torch.Tensor:
    """Zeros, also for what lies beyond the tensor's edges; 1D."""
    return torch.zeros(step.chunk.box.numel, dtype=step.dtype, device="cpu")


def _folders(names: Iterable[str]) -> list[str]:
    """Folders that files of these names lie in, those around them included."""
    found = {name.rpartition("/")[0] for name in names}
    return sorted(
        {"/".join(path.split("/")[:depth]) for path in found for depth in range(1, path.count("/") + 2)}
    )


def _copy(source: Region, have: torch.Tensor, target: Region, into: torch.Tensor) -> torch.Tensor:
    for share in overlaps(source, target):
        share.target_view(into).copy_(share.source_view(have))
    return into


def _pack(source: Region, have: torch.Tensor, target: Region) -> torch.Tensor:
    """The shared elements, one share after the other."""
    return torch.cat([share.source_view(have).reshape(-1) for share in overlaps(source, target)])


def _unpack(source: Region, target: Region, packed: torch.Tensor, into: torch.Tensor) -> None:
    """Inverse of `_pack`, on the owner's side."""
    shares = overlaps(source, target)
    for share, part in zip(shares, packed.split([share.numel for share in shares]), strict=True):
        view = share.target_view(into)
        view.copy_(part.view(view.shape))


def _put_chunk(writer: ArrayWriter, chunk: Chunk, elements: torch.Tensor, name: str) -> None:
    data = elements.view(torch.uint8).numpy()
    checksum = CRC32C.of(data.tobytes())
    _put(writer.storage, name, data, struct.pack("<I", checksum))
    writer.checksums[chunk] = checksum
    writer.meter.advance(len(data))


def _put(storage: Storage, name: str, *buffers: Buffer) -> None:
    def write() -> None:
        with storage.create(name, sum(memoryview(buffer).nbytes for buffer in buffers)) as writer:
            writer.write_at(0, buffers)

    storage.retrying(write)
