"""Writing the zarr form: every rank the chunks it owns, with what neighbours send for those cut inside a row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import google_crc32c
import torch

from vescale_fsdp.checkpoint.manifest.chunk_owners import Chunk, chunk_holders, hull, turn_of, wanted_of
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.region import Region, Run, overlaps
from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dense, dtype_named
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    array_json,
    array_path,
    chunk_boxes,
    chunk_file,
    group_files,
)
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.storage.base import Buffer, Storage
from vescale_fsdp.layout.geometry import numel_of

__all__ = ["ArrayWriter", "write_groups"]

T = TypeVar("T")


class _Step(NamedTuple):
    """A chunk that this rank has a share in: it puts the parts together, or sends its own to who does."""

    chunk: Chunk
    own: Region  # what this rank holds of the tensor
    wanted: Region  # the chunk, as far as it lies in the tensor
    owner: int
    regions: list[Region]  # of whoever holds a part
    senders: list[int]  # who brings each part
    numels: list[int]  # of each part

    @property
    def part_numel(self) -> int:
        """Elements of the largest part that travels."""
        return max(self.numels)


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
    ) -> None:
        self.manifest = manifest
        self._storage = storage
        self._locals_by_name = locals_by_name
        self._coordinator = coordinator
        self.checksums: dict[Chunk, int] = {}  # crc32c of the chunks that this rank has written
        self._error: BaseException | None = None
        self._bits: tuple[int, torch.Tensor] | None = None  # of the tensor whose turn it is
        # Further descriptions of the same tensor have the same values.
        places = [places[0] for places in manifest.places_by_name.values()]
        self._heads = [
            place
            for place in places
            if coordinator.rank == manifest.rank_sets[manifest.holders[place]].ranks[0]
        ]
        self._steps = [step for place in places for step in _steps(manifest, place, coordinator.rank)]
        # Taken now: a rank that lacks memory later must still be able to answer.
        nbytes = [step.part_numel * manifest.entries[step.chunk.place].itemsize for step in self._steps]
        self._travelling = torch.empty(max(nbytes, default=0), dtype=torch.uint8)

    def write(self) -> None:
        """Write everything; durable on return.

        Raises:
            BaseException: the first thing that went wrong on this rank, when its neighbours have had their parts.
        """
        names = []
        threads = max(1, self._storage.write_threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-zarr") as pool:
            work: list[Future[None]] = []
            for place in self._heads:
                names.append(f"{array_path(self.manifest, place)}/zarr.json")
                data = array_json(self.manifest, place)
                work.append(pool.submit(_put, self._storage, names[-1], data))
            for step in self._steps:
                chunk = self._exchanged(step)
                if chunk is not None and self._error is None:
                    names.append(chunk_file(self.manifest, *step.chunk))
                    work.append(
                        pool.submit(_put_chunk, self._storage, step.chunk, chunk, names[-1], self.checksums)
                    )
                while len(work) > 2 * threads:  # bounds the chunks in memory
                    self._attempt(work.pop(0).result)
            for future in work:
                self._attempt(future.result)
            self._attempt(lambda: list(pool.map(self._storage.sync_folder, _folders(names))))
        if self._error is not None:
            raise self._error

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """What the work returns; None if it raises, which is kept, or if something has gone wrong before."""
        if self._error is None:
            try:
                return work()
            except BaseException as caught:  # noqa: BLE001  neighbours still wait for this rank's parts
                self._error = caught
        return None

    def _exchanged(self, step: _Step) -> torch.Tensor | None:
        """The chunk, if it is this rank's to write; if not, this rank's part of it is sent."""
        if self._coordinator.rank != step.owner:
            mine = step.regions.index(step.own)
            travelling = self._room(step, mine)
            self._attempt(lambda: travelling.copy_(_pack(step.own, self._local(step), step.wanted)))
            self._coordinator.send(travelling.view(torch.uint8), step.owner)
            return None
        made = self._attempt(lambda: _empty_chunk(self.manifest, step))
        for index, (region, sender) in enumerate(zip(step.regions, step.senders, strict=True)):
            travelling = self._room(step, index)
            if region != step.own:
                self._coordinator.receive(travelling.view(torch.uint8), sender)
            if made is not None:
                self._attempt(partial(self._fill, step, region, travelling, made[1]))
        if made is None:
            return None
        whole, flat = made
        self._attempt(
            lambda: whole[tuple(slice(0, size) for size in step.wanted.box.sizes)].copy_(
                flat.view(step.wanted.box.sizes)
            )
        )
        return whole

    def _fill(self, step: _Step, region: Region, travelling: torch.Tensor, flat: torch.Tensor) -> None:
        if region == step.own:
            _copy(region, self._local(step), step.wanted, flat)
        else:
            _unpack(region, step.wanted, travelling, flat)

    def _room(self, step: _Step, index: int) -> torch.Tensor:
        """Where a part lies while it travels."""
        entry = self.manifest.entries[step.chunk.place]
        nbytes = step.numels[index] * entry.itemsize
        return self._travelling[:nbytes].view(carrier_of(dtype_named(entry.dtype)))

    def _local(self, step: _Step) -> torch.Tensor:
        """The elements of the tensor that this rank holds, 1D."""
        if self._bits is None or self._bits[0] != step.chunk.place:
            plain = dense(self._locals_by_name[self.manifest.entries[step.chunk.place].name]).view(-1)
            self._bits = (step.chunk.place, plain.view(carrier_of(plain.dtype)))
        return self._bits[1]


def _empty_chunk(manifest: Manifest, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for a chunk, and room for its elements that lie in the tensor, 1D."""
    whole = torch.zeros(
        step.chunk.box.sizes, dtype=carrier_of(dtype_named(manifest.entries[step.chunk.place].dtype))
    )
    return whole, torch.empty(step.wanted.numel, dtype=whole.dtype)


def _folders(names: Iterable[str]) -> list[str]:
    """Folders that files of these names lie in, those around them included."""
    found = {name.rpartition("/")[0] for name in names}
    return sorted(
        {"/".join(path.split("/")[:depth]) for path in found for depth in range(1, path.count("/") + 2)}
    )


def _steps(manifest: Manifest, place: int, rank: int) -> Iterator[_Step]:
    """The chunks of a tensor in which a rank has a share, in an order that is the same on all ranks."""
    entry = manifest.entries[place]
    held = manifest.holders_of(place).position(rank)
    if held is None or not entry.numel:
        return
    own = manifest.distribution(place).region(entry.shape, held[0], manifest.structure.layouts)
    assert manifest.chunks is not None
    for box in chunk_boxes(entry.shape, manifest.chunks[place], hull(own)):
        chunk = Chunk(place, box)
        wanted = wanted_of(manifest, chunk)
        if not overlaps(own, wanted):
            continue
        parts, number = chunk_holders(manifest, chunk), turn_of(manifest, chunk)
        regions = [part.region for part in parts]
        # Replicas take turns; parts of one chunk travel between ranks of the same turn.
        owner = parts[0].ranks[number % len(parts[0].ranks)]
        senders = [part.ranks[number % len(part.ranks)] for part in parts]
        if rank == owner or (rank in senders and own != regions[0]):
            numels = [_shared_numel(region, wanted) for region in regions]
            yield _Step(chunk, own, wanted, owner, regions, senders, numels)


def _copy(source: Region, have: torch.Tensor, target: Region, into: torch.Tensor) -> None:
    for share in overlaps(source, target):
        if isinstance(share, Run):
            into[share.target : share.target + share.numel] = have[share.source : share.source + share.numel]
            continue
        outer = have[share.source : share.source + numel_of(share.source_sizes)].view(share.source_sizes)
        inner = into[share.target : share.target + numel_of(share.target_sizes)].view(share.target_sizes)
        inner[share.target_box.slices()] = outer[share.source_box.slices()]


def _shared_numel(source: Region, target: Region) -> int:
    return sum(
        share.numel if isinstance(share, Run) else share.source_box.numel
        for share in overlaps(source, target)
    )


def _pack(source: Region, have: torch.Tensor, target: Region) -> torch.Tensor:
    """The shared elements, one share after the other."""
    parts = []
    for share in overlaps(source, target):
        if isinstance(share, Run):
            parts.append(have[share.source : share.source + share.numel])
        else:
            outer = have[share.source : share.source + numel_of(share.source_sizes)].view(share.source_sizes)
            parts.append(outer[share.source_box.slices()].reshape(-1))
    return torch.cat(parts)


def _unpack(source: Region, target: Region, packed: torch.Tensor, into: torch.Tensor) -> None:
    """Inverse of `_pack`, on the owner's side."""
    at = 0
    for share in overlaps(source, target):
        if isinstance(share, Run):
            into[share.target : share.target + share.numel] = packed[at : at + share.numel]
            at += share.numel
        else:
            inner = into[share.target : share.target + numel_of(share.target_sizes)].view(share.target_sizes)
            numel = share.target_box.numel
            inner[share.target_box.slices()] = packed[at : at + numel].view(share.target_box.sizes)
            at += numel


def _put_chunk(
    storage: Storage, chunk: Chunk, elements: torch.Tensor, name: str, checksums: dict[Chunk, int]
) -> None:
    data = elements.reshape(-1).view(torch.uint8).numpy()
    checksum = google_crc32c.value(data.tobytes())
    _put(storage, name, data, struct.pack("<I", checksum))
    checksums[chunk] = checksum


def _put(storage: Storage, name: str, *buffers: Buffer) -> None:
    def write() -> None:
        with storage.create(name, sum(memoryview(buffer).nbytes for buffer in buffers)) as writer:
            writer.write_at(0, buffers)

    storage.retrying(write)


def write_groups(storage: Storage, manifest: Manifest) -> None:
    """Group metadata, so that the tree opens as zarr groups. For one rank, before the commit."""
    *inner, root = group_files(manifest).items()
    for name, content in inner:
        _put(storage, name, content)
    storage.commit(*root, replace=True)  # an older save may have one
