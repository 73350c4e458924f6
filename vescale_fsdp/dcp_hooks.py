"""What stock DCP is told of a ragged tensor: its piece as n-d boxes, by arithmetic on this rank alone.

DCP knows a tensor as chunks, n-d boxes of the global tensor. A flat piece is at most ``2 * ndim - 1``
of them (`boxes_of_range`). Each box is a view of the local piece, so DCP reads and writes our storage
with no copy of ours. An empty piece emits nothing: an empty box at a neighbour's offset would win DCP's
de-duplication and drop the neighbour's data.

torch's DCP *safetensors* writer keys tensors by name and silently keeps one box of several per rank
(torch 2.13, ``filesystem.py``, ``_write_files_from_queue``); it cannot be told apart here, so the refusal
sits where the writer is known. The ``.distcp`` writer is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from vescale_fsdp.errors import CheckpointError, explain
from vescale_fsdp.geometry import Box

if TYPE_CHECKING:
    from vescale_fsdp.dtensor import RaggedDTensor

__all__ = ["chunk_list", "tensor_shard", "write_items"]


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
