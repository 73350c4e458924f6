"""Putting a tensor together from what every rank pickled of it: where each part belongs.

    DTensor         placements and the rank's place in the mesh give the box
    ShardedTensor   says the boxes itself
    plain tensor    whole on every rank: the first one's is taken; numpy's arrays too, which lie in the pickle itself

A `StoredTensor` proves that the boxes tile it, so a missing rank is found. Placements whose boxes do not
follow (partial sums, strides that do not fit the mesh) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.checkpoint.manifest.distribution import shard_order
from vescale_fsdp.checkpoint.moves.source import BoxReader
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.formats.torch_save.archive_reader import TorchArchive
from vescale_fsdp.conversion.formats.torch_save.numpy_values import ArrayRef
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import PiecesRef, ShardRef, TensorRef
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.geometry import Box, whole_box


@dataclass(frozen=True)
class HeldTensor:
    """What one rank's file holds of a tensor."""

    file: str
    archive: TorchArchive
    ref: Any  # a TensorRef, ShardRef, PiecesRef or ArrayRef


def is_tensor_ref(value: Any) -> bool:
    """Whether a leaf of an unpickled state is a tensor, whole or in part."""
    return isinstance(value, (TensorRef, ShardRef, PiecesRef, ArrayRef))


def stored_tensor(name: str, held: Sequence[HeldTensor]) -> StoredTensor:
    """The whole tensor of which ranks hold these parts.

    Raises:
        ConversionError: for placements that do not say where a part belongs.
        CorruptCheckpointError: if the parts do not tile it, or one has another shape than its place gives.
    """
    first = held[0].ref
    if isinstance(first, ArrayRef):
        info, box = TensorInfo(name, first.shape, first.dtype), whole_box(first.shape)
        return StoredTensor(info, (StoredChunk(box, "", 0, info.nbytes),) * bool(box.numel))
    if isinstance(first, TensorRef):
        box = whole_box(first.shape)
        chunks = _chunks(name, held[0], first, box)
        return StoredTensor(TensorInfo(name, first.shape, first.dtype), tuple(chunks))
    parts: dict[Box, StoredChunk] = {}
    for part in held:
        for box, ref in _boxes(name, part, held):
            for chunk in _chunks(name, part, ref, box):
                parts.setdefault(box, chunk)  # replicas hold the same
    dtype = first.local.dtype if isinstance(first, ShardRef) else first.dtype
    return StoredTensor(TensorInfo(name, first.shape, dtype), tuple(parts.values()))


def box_reader(ref: object) -> BoxReader | None:
    """What reads a tensor whose bytes lie in no file as they are; None for all others."""
    return ref.read if isinstance(ref, ArrayRef) else None


def differing_files(held: Sequence[HeldTensor]) -> tuple[str, ...]:
    """Files whose copy of a whole tensor is not the first file's: other shape, type, flags or checksum."""
    if not isinstance(held[0].ref, (TensorRef, ArrayRef)):
        return ()

    def content(part: HeldTensor) -> tuple[Any, ...]:
        ref = part.ref
        if not isinstance(ref, TensorRef):
            return (ref.shape, ref.dtype, ref.data) if isinstance(ref, ArrayRef) else ()
        crc = 0 if 0 in ref.shape else part.archive.storage_crc(ref.storage_key)
        if crc is None:
            crc = part.archive.find_crc(ref.storage_key)
        return (ref.shape, ref.dtype, ref.strides, ref.storage_offset, ref.signs, crc)

    expected = content(held[0])
    return tuple(part.file for part in held[1:] if content(part) != expected)


def _chunks(name: str, part: HeldTensor, ref: TensorRef, box: Box) -> Iterator[StoredChunk]:
    if box.numel:
        yield part.archive.chunk(box, part.file, 0, ref, f"tensor {name} in {part.file}")


def _boxes(name: str, part: HeldTensor, held: Sequence[HeldTensor]) -> Iterator[tuple[Box, TensorRef]]:
    if isinstance(part.ref, PiecesRef):
        for offsets, ref in part.ref.pieces:
            yield Box(offsets, ref.shape), ref
        return
    axes = [1 + max(p.ref.coordinates[i] for p in held) for i in range(len(part.ref.coordinates))]
    yield _dtensor_box(name, part.file, part.ref, axes), part.ref.local


def _dtensor_box(name: str, file: str, part: ShardRef, axes: list[int]) -> Box:
    """The rank's box: each mesh axis cuts what the ones before left, in chunks of the ceiling."""
    box = whole_box(part.shape)
    for axis in _cutting_order(name, file, part, axes):
        box = box.chunk(part.placements[axis].dim, axes[axis], part.coordinates[axis])
    if box.sizes != part.local.shape:
        raise CorruptCheckpointError(
            "A rank's part does not have the shape that its place in the mesh gives.",
            expected=f"shape {box.sizes} at {part.coordinates} of a mesh of {axes}",
            got=f"shape {part.local.shape}",
            where=f"{name} in {file}",
            todo="check that the files of all ranks are there, and from one save",
        )
    return box


def _cutting_order(name: str, file: str, part: ShardRef, axes: list[int]) -> list[int]:
    """Mesh axes that cut the tensor, in the order in which they do."""
    kinds = [type(placement).__name__ for placement in part.placements]
    if odd := set(kinds) - {"Shard", "_StridedShard", "Replicate"}:
        raise _unplaced(name, file, "Shard and Replicate", min(odd))
    shards = {
        axis: (placement.dim, placement.split_factor if kind == "_StridedShard" else 1)
        for axis, (kind, placement) in enumerate(zip(kinds, part.placements, strict=True))
        if kind != "Replicate"
    }
    order = shard_order(shards, axes)
    if order is None:
        factors = [factor for _, factor in shards.values() if factor != 1]
        expected = f"split factors that are sizes of later axes over the same dim in a mesh of {axes}"
        raise _unplaced(name, file, expected, factors)
    return order


def _unplaced(name: str, file: str, expected: str, got: object) -> ConversionError:
    return ConversionError(
        "A tensor's placement does not say where its parts belong.",
        expected=expected,
        got=got,
        where=f"{name} in {file}",
        todo="save full tensors, or with torch.distributed.checkpoint",
    )
