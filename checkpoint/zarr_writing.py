"""Writing the zarr form: every rank the chunks it owns, with what neighbours send for those cut inside a row."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import google_crc32c
import torch

from vescale_fsdp.checkpoint.agreement import Coordinator
from vescale_fsdp.checkpoint.chunk_owners import Chunk, chunk_holders, hull, turn_of, wanted_of
from vescale_fsdp.checkpoint.dtypes import carrier_of, dtype_named
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.region import Region, Run, overlaps
from vescale_fsdp.checkpoint.storage import Storage
from vescale_fsdp.checkpoint.zarr_chunks import CRC_BYTES
from vescale_fsdp.checkpoint.zarr_layout import (
    array_json,
    array_path,
    chunk_boxes,
    chunk_file,
    group_files,
)
from vescale_fsdp.geometry import numel_of

__all__ = ["write_arrays", "write_groups"]


def write_arrays(
    storage: Storage, manifest: Manifest, locals_by_name: Mapping[str, torch.Tensor], coordinator: Coordinator
) -> dict[Chunk, int]:
    """Write the chunks and array metadata that are this rank's; returns the chunks' crc32c. A collective where chunks
    are shared.

    Raises:
        OSError: whatever the storage says.
    """
    error: OSError | None = None
    checksums: dict[Chunk, int] = {}
    for places in manifest.places_by_name.values():
        try:  # further descriptions of the same tensor have the same values
            _write_array(storage, manifest, places[0], locals_by_name, coordinator, checksums)
        except OSError as caught:
            error = error or caught  # neighbours still wait for this rank's parts of later chunks
    if error is not None:
        raise error
    return checksums


def _write_array(
    storage: Storage,
    manifest: Manifest,
    place: int,
    locals_by_name: Mapping[str, torch.Tensor],
    coordinator: Coordinator,
    checksums: dict[Chunk, int],
) -> None:
    entry = manifest.entries[place]
    ranks = manifest.rank_sets[manifest.holders[place]].ranks
    path = array_path(manifest, place)
    error: OSError | None = None
    if coordinator.rank == ranks[0]:
        try:
            _put(storage, f"{path}/zarr.json", array_json(manifest, place))
        except OSError as caught:
            error = caught
    held = manifest.holders_of(place).position(coordinator.rank)
    if held is None or not entry.numel:
        if error is not None:
            raise error
        return
    own = manifest.distribution(place).region(entry.shape, held[0], manifest.structure.layouts)
    local = locals_by_name[entry.name].detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    with ThreadPoolExecutor(max(1, storage.write_threads), thread_name_prefix="checkpoint-zarr") as pool:
        work: list[Future[None]] = []
        for chunk, data in _assemble(manifest, place, own, local, coordinator):
            # After an error nothing more is written, but neighbours still get what they wait for.
            if error is None:
                name = chunk_file(manifest, *chunk)
                work.append(pool.submit(_put_chunk, storage, name, chunk, data, checksums))
            while len(work) > 2 * storage.write_threads:  # bounds the chunks in memory
                error = error or _error_of(work.pop(0))
        for future in work:
            error = error or _error_of(future)
    if error is not None:
        raise error


def _error_of(future: Future[None]) -> OSError | None:
    try:
        future.result()
    except OSError as error:
        return error
    return None


def _assemble(
    manifest: Manifest, place: int, own: Region, local: torch.Tensor, coordinator: Coordinator
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Chunks this rank owns, complete, one after the other; parts of others' chunks are sent on the way."""
    entry = manifest.entries[place]
    assert manifest.chunks is not None
    chunks = manifest.chunks[place]
    bits = local.view(carrier_of(local.dtype))
    for box in chunk_boxes(entry.shape, chunks, hull(own)):
        chunk = Chunk(place, box)
        wanted = wanted_of(manifest, chunk)
        if not overlaps(own, wanted):
            continue
        inside, number = wanted.box, turn_of(manifest, chunk)
        parts = chunk_holders(manifest, chunk)
        # Parts of one chunk travel between replicas of the same turn.
        owner = parts[0].ranks[number % len(parts[0].ranks)]
        senders = [part.ranks[number % len(part.ranks)] for part in parts]
        if coordinator.rank == owner:
            whole = torch.zeros(box.sizes, dtype=carrier_of(dtype_named(entry.dtype)))
            flat = torch.empty(inside.numel, dtype=whole.dtype)
            for part, sender in zip(parts, senders, strict=True):
                if part.region == own:
                    _copy(own, bits, wanted, flat)
                else:
                    mine = torch.empty(_shared_numel(part.region, wanted), dtype=whole.dtype)
                    coordinator.receive(mine.view(torch.uint8), sender)
                    _unpack(part.region, wanted, mine, flat)
            whole[tuple(slice(0, size) for size in inside.sizes)] = flat.view(inside.sizes)
            yield chunk, whole
        elif coordinator.rank in senders and own != parts[0].region:
            coordinator.send(_pack(own, bits, wanted).view(torch.uint8), owner)


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
    storage: Storage, name: str, chunk: Chunk, elements: torch.Tensor, checksums: dict[Chunk, int]
) -> None:
    data = elements.reshape(-1).view(torch.uint8).numpy()
    checksums[chunk] = google_crc32c.value(data.tobytes())
    with storage.create(name, data.nbytes + CRC_BYTES) as writer:
        writer.write_at(0, [data, struct.pack("<I", checksums[chunk])])


def _put(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name, len(data)) as writer:
        writer.write_at(0, [data])


def write_groups(storage: Storage, manifest: Manifest) -> None:
    """Group metadata, so that the tree opens as zarr groups. For one rank, before the commit."""
    *inner, root = group_files(manifest).items()
    for name, content in inner:
        _put(storage, name, content)
    storage.commit(*root, replace=True)  # an older save may have one
