"""Writing the zarr form: every rank the chunks it owns, with what neighbours send for those cut inside a row."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import google_crc32c
import torch

from vescale_fsdp.checkpoint.agreement import Coordinator
from vescale_fsdp.checkpoint.dtypes import carrier_of, dense, dtype_named
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.region import Region, Run, overlaps
from vescale_fsdp.checkpoint.storage import Storage
from vescale_fsdp.checkpoint.zarr_layout import (
    array_json,
    array_path,
    chunk_boxes,
    chunk_name,
    clipped,
    group_files,
)
from vescale_fsdp.geometry import Box, FlatRange, numel_of

__all__ = ["write_arrays", "write_groups"]


class _Holder(NamedTuple):
    """Ranks that hold one region of a tensor."""

    region: Region
    ranks: list[int]


def write_arrays(
    storage: Storage, manifest: Manifest, locals_by_name: Mapping[str, torch.Tensor], coordinator: Coordinator
) -> None:
    """Write the chunks and array metadata that are this rank's. A collective where chunks are shared.

    Raises:
        OSError: whatever the storage says.
    """
    error: OSError | None = None
    for places in manifest.places_by_name.values():
        try:  # further descriptions of the same tensor have the same values
            _write_array(storage, manifest, places[0], locals_by_name, coordinator)
        except OSError as caught:
            error = error or caught  # neighbours still wait for this rank's parts of later chunks
    if error is not None:
        raise error


def _write_array(
    storage: Storage,
    manifest: Manifest,
    place: int,
    locals_by_name: Mapping[str, torch.Tensor],
    coordinator: Coordinator,
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
    local = dense(locals_by_name[entry.name]).view(-1)
    with ThreadPoolExecutor(max(1, storage.write_threads), thread_name_prefix="checkpoint-zarr") as pool:
        work: list[Future[None]] = []
        for name, chunk in _assemble(manifest, place, own, local, coordinator):
            # After an error nothing more is written, but neighbours still get what they wait for.
            if error is None:
                work.append(pool.submit(_put_chunk, storage, f"{path}/{name}", chunk))
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
) -> Iterator[tuple[str, torch.Tensor]]:
    """Chunks this rank owns, complete, one after the other; parts of others' chunks are sent on the way."""
    entry = manifest.entries[place]
    assert manifest.chunks is not None
    chunks = manifest.chunks[place]
    bits = local.view(carrier_of(local.dtype))
    for box in chunk_boxes(entry.shape, chunks, _hull(own)):
        number = sum(offset // size for offset, size in zip(box.offsets, chunks, strict=True))
        inside = clipped(box, entry.shape)
        wanted = Region(inside, FlatRange(0, inside.numel))
        if not overlaps(own, wanted):
            continue
        parts = _parts(manifest, place, wanted)
        # Replicas take turns; parts of one chunk travel between ranks of the same turn.
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
            yield chunk_name(box, chunks), whole
        elif coordinator.rank in senders and own != parts[0].region:
            coordinator.send(_pack(own, bits, wanted).view(torch.uint8), owner)


def _hull(region: Region) -> Box | None:
    """The smallest box around a region."""
    boxes = [box for box, _ in region.pieces()]
    if not boxes:
        return Box(region.box.offsets, (0,) * len(region.box.sizes)) if region.box.sizes else None
    starts = tuple(min(offsets) for offsets in zip(*(box.offsets for box in boxes), strict=True))
    stops = [[o + n for o, n in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    return Box(starts, tuple(max(s) - a for s, a in zip(zip(*stops, strict=True), starts, strict=True)))


def _parts(manifest: Manifest, place: int, wanted: Region) -> list[_Holder]:
    """Who holds a chunk's elements, in order of place; the first holds its first element."""
    entry = manifest.entries[place]
    holders = manifest.holders_of(place)
    found = []
    for coordinates, region in manifest.distribution(place).touching(
        entry.shape, wanted, manifest.structure.layouts
    ):
        if overlaps(region, wanted):
            found.append(_Holder(region, holders.ranks_at(coordinates)))
    return found


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


def _put_chunk(storage: Storage, name: str, chunk: torch.Tensor) -> None:
    data = chunk.reshape(-1).view(torch.uint8).numpy()
    checksum = struct.pack("<I", google_crc32c.value(data.tobytes()))
    with storage.create(name, data.nbytes + len(checksum)) as writer:
        writer.write_at(0, [data, checksum])


def _put(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name, len(data)) as writer:
        writer.write_at(0, [data])


def write_groups(storage: Storage, manifest: Manifest) -> None:
    """Group metadata, so that the tree opens as zarr groups. For one rank, before the commit."""
    *inner, root = group_files(manifest).items()
    for name, content in inner:
        _put(storage, name, content)
    storage.commit(*root, replace=True)  # an older save may have one
