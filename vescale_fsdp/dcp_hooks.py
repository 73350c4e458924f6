"""What stock DCP is told of a ragged tensor: its piece as n-d boxes, by arithmetic on this rank alone.

DCP knows a tensor as chunks, n-d boxes of the global tensor. A flat piece is at most ``2 * ndim - 1``
of them (`boxes_of_range`). Each box is a view of the local piece, so DCP reads and writes our storage
with no copy of ours. An empty piece emits nothing: an empty box at a neighbour's offset would win DCP's
de-duplication and drop the neighbour's data.

torch's DCP *safetensors* writer (``HuggingFaceStorageWriter``, or a file writer with that serialization format)
keys tensors by name and silently keeps one box of several per rank (torch 2.13, ``filesystem.py``,
``_write_files_from_queue``). A hook is not told who writes, so it cannot refuse: call `check_storage_writer` before
such a save. The ``.distcp`` writer is right.

torch after 2.13 also reads attributes of plain tensors (``global_shape`` and others); it asks these hooks first, so
ragged tensors need nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from vescale_fsdp.errors import CheckpointError, explain
from vescale_fsdp.geometry import Box, boxes_of_range
from vescale_fsdp.spec import inner_box, is_ragged_spec, ragged_axis

if TYPE_CHECKING:
    from vescale_fsdp.dtensor import RaggedDTensor

__all__ = ["check_storage_writer", "chunk_list", "tensor_shard", "write_items"]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def chunk_list(tensor: RaggedDTensor) -> list[ChunkStorageMetadata]:
    """The boxes this rank wants to read or write, in flat order."""
    return [_chunk(box) for box in tensor.boxes]


def write_items(fqn: str, tensor: RaggedDTensor) -> list[WriteItem]:
    """One write item per box of this rank's piece."""
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets), index),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=tensor.size()),
        )
        for index, box in enumerate(tensor.boxes)
    ]


def tensor_shard(tensor: RaggedDTensor, index: MetadataIndex) -> torch.Tensor:
    """The box that an index names, as a view of the local piece.

    Raises:
        CheckpointError: if this rank holds no box at that offset.
    """
    boxes = tensor.boxes
    offsets = tuple(index.offset) if index.offset is not None else None
    start = 0
    for box in boxes:
        if offsets is None or box.offsets == offsets:
            return tensor._local_tensor.view(-1)[start : start + box.numel].view(box.sizes)
        start += box.numel
    raise CheckpointError(
        explain(
            "The checkpoint planner asked for a box that this rank does not hold.",
            expected=f"one of {[box.offsets for box in boxes]}",
            got=f"offset {offsets}",
            where=index.fqn,
            todo="save and load with the placements the state had when the plan was made",
        )
    )


def check_storage_writer(writer: object, state: Mapping[str, Any]) -> None:
    """Refuse a DCP storage writer that would lose parts of ragged tensors. No communication, same verdict everywhere.

    Args:
        writer: what is going to be ``dcp.save``'s ``storage_writer``.
        state: what is going to be saved; nested mappings are looked into.

    Raises:
        CheckpointError: if the writer is torch's safetensors writer and some rank holds a tensor in several boxes.
    """
    if vars(writer).get("serialization_format") is not SerializationFormat.SAFETENSORS:
        return
    for name, value in state.items():
        if isinstance(value, Mapping):
            check_storage_writer(writer, value)
        elif isinstance(value, torch.Tensor) and _most_boxes(value) > 1:
            raise CheckpointError(
                explain(
                    "torch's safetensors writer keeps one box of a tensor per rank and drops the others.",
                    expected="pieces of one box: whole rows, granularity=Rows(1) for matrices",
                    got=f"up to {_most_boxes(value)} boxes per rank",
                    where=name,
                    todo="save .distcp files or with vescale_fsdp.checkpoint, and convert with vescale-convert",
                )
            )


def _most_boxes(tensor: torch.Tensor) -> int:
    """The most boxes that any rank holds of a tensor; 1 for tensors that are not ragged."""
    if not isinstance(tensor, DTensor) or not is_ragged_spec(tensor.placements):
        return 1
    _, placement = ragged_axis(tensor.placements)
    inner = inner_box(tensor._spec).sizes
    return max(len(boxes_of_range(inner, *placement.piece(inner, r))) for r in range(placement.num_shards))
