"""Byte sums of a live state's tensors: each rank adds up the regions that it would store, and ranks are added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from vescale_fsdp.byte_sums import pack_sums, region_sums
from vescale_fsdp.checkpoint.manifest.manifest import SPLIT_BYTES, Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.layout.geometry import Range, boxes_of_range
from vescale_fsdp.layout.region import Region

_CHUNK_BYTES = 16 << 20  # 16 MiB: tensors that are not contiguous are copied in pieces of this size
_THREADED_BYTES = 64 << 20  # 64 MiB, some 20 ms of one core: smaller states are summed on the calling thread


def local_sums(
    manifest: Manifest, locals_by_name: Mapping[str, torch.Tensor], rank: int, threads: int = 1
) -> list[int]:
    """Return what this rank adds to the sums of each of the manifest's tensors: two int64 numbers per tensor.

    Replicas share the regions as in a save, so that each element counts once.

    Args:
        locals_by_name: name -> this rank's part of the tensor.
        threads: number of threads that read tensors of the host.
    """
    if manifest.split_bytes is None:  # each replica stores the whole region
        manifest = replace(manifest, split_bytes=SPLIT_BYTES)
    file = RankFile(manifest, rank)
    found: dict[int, torch.Tensor] = {}

    def add(index: int) -> int:
        entry, region = manifest.entries[index], file.pieces[index]
        local = locals_by_name[entry.name].detach().resolve_conj().resolve_neg()
        start = file.local_start(index)
        total = torch.zeros(2, dtype=torch.int64, device=local.device)
        for raw, items in flat_parts(local, Range(start, start + region.numel)):
            part = Region(region.box, items.shift(region.span.start - start))
            total += region_sums(raw, part, entry.shape, entry.itemsize)
        found[index] = total
        return 0

    on_host = [index for index in file.pieces if locals_by_name[manifest.entries[index].name].is_cpu]
    nbytes = sum(file.pieces[index].numel * manifest.entries[index].itemsize for index in on_host)
    if threads > 1 and nbytes > _THREADED_BYTES:
        _ = [file.local_start(index) for index in on_host]  # fills the file's caches, on one thread
        for_each(threads, add, on_host, name="checkpoint-sums")
    # On this thread, since others have other current streams of a device.
    for index in file.pieces:
        if index not in found:
            add(index)
    return _as_numbers(found, len(manifest.entries))


def _as_numbers(found: Mapping[int, torch.Tensor], count: int) -> list[int]:
    """Return two numbers for each of ``count`` tensors; 0 for tensors without sums. Waits once for each device."""
    numbers = [0] * (2 * count)
    for device in dict.fromkeys(sums.device for sums in found.values()):
        indices = [index for index, sums in found.items() if sums.device == device]
        rows = torch.stack([found[index] for index in indices]).tolist()
        for index, row in zip(indices, rows, strict=True):
            numbers[2 * index : 2 * index + 2] = row
    return numbers


def flat_parts(tensor: torch.Tensor, items: Range) -> Iterator[tuple[torch.Tensor, Range]]:
    """Yield the bytes of a range of a tensor's row-major items on its device, and the range that each part has.

    The whole range at once if the tensor is contiguous, without a copy; else copies of 16 MiB.

    Args:
        tensor: not lazily conjugated or negated.
    """
    itemsize = tensor.dtype.itemsize
    if tensor.is_contiguous():
        yield bytes_of(tensor)[items.start * itemsize : items.stop * itemsize], items
        return
    plain = tensor.view(carrier_of(tensor.dtype))  # torch lacks copy kernels for some dtypes
    step = _CHUNK_BYTES // itemsize
    for start in range(items.start, items.stop, step):
        part = Range(start, min(start + step, items.stop))
        boxes = list(boxes_of_range(tuple(tensor.shape), *part))
        yield bytes_of(torch.cat([plain[box.slices()].reshape(-1) for box in boxes])), part


def hex_sums(numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the sums of each tensor as hex, from two int64 numbers per tensor."""
    pairs = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1, 2)
    return tuple(pack_sums(pair).hex() for pair in pairs)
