"""Hooks that let stock DCP save and load ragged tensors: a piece as n-d boxes, computed without communication.

DCP describes a tensor as chunks, which are n-d boxes of the global tensor. A flat piece is at most ``2 * ndim - 1``
boxes (`boxes_of_range`). Each box is a view of the local piece, so DCP reads and writes the piece's memory without
another copy. An empty piece has no boxes: in DCP's de-duplication, an empty box at a neighbor's offset would win over
the neighbor's box, whose data would be lost.

torch's DCP *safetensors* writer (``HuggingFaceStorageWriter``, or a file writer with that serialization format) stores
tensors by name, and so silently keeps only one of several boxes per rank (torch 2.13, ``filesystem.py``,
``_write_files_from_queue``). With that writer, a save of tensors with several boxes per rank raises during planning, on
all ranks and before a file is written. The ``.distcp`` writer is correct.

DCP after torch 2.13 also reads attributes of plain tensors (``global_shape`` and others). DCP calls the hooks first, so
ragged tensors do not need these attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.spec import inner_box, is_ragged_spec, ragged_axis
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.geometry import Box, boxes_of_range
from vescale_fsdp.torch_private import DTensorSpec, storage_writer_in_use


def chunk_of_box(box: Box) -> ChunkStorageMetadata:
    """Return a box as DCP's chunk."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def write_items(fqn: str, local: torch.Tensor, boxes: Sequence[Box], spec: DTensorSpec) -> list[WriteItem]:
    """Return one DCP write item per box of this rank's piece.

    Args:
        fqn: the tensor's name in the state.
        local: this rank's piece.
        boxes: the piece as boxes of the global tensor, in the order of the piece's elements.
        spec: spec of the global tensor.

    Raises:
        CheckpointError: if the storage writer of the current ``dcp.save`` would lose some of the boxes.
    """
    _check_writer(storage_writer_in_use(), fqn, spec)
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets), index),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk_of_box(box), properties=properties, size=spec.shape),
        )
        for index, box in enumerate(boxes)
    ]


def tensor_shard(local: torch.Tensor, boxes: Sequence[Box], index: MetadataIndex) -> torch.Tensor:
    """Return the box at the index's offset, as a view of the local piece; without an offset, the first box.

    Raises:
        CheckpointError: if this rank has no box at that offset.
    """
    offsets = tuple(index.offset) if index.offset is not None else None
    start = 0
    for box in boxes:
        if offsets is None or box.offsets == offsets:
            return local.view(-1)[start : start + box.numel].view(box.sizes)
        start += box.numel
    raise CheckpointError(
        "The checkpoint planner requested a box that this rank does not hold.",
        expected=f"one of {[box.offsets for box in boxes]}",
        got=f"offset {offsets}",
        where=index.fqn,
        todo="save and load with the placements the state had when the plan was made",
    )


def check_storage_writer(writer: object, state: Mapping[str, Any]) -> None:
    """Raise if a DCP storage writer would lose parts of ragged tensors. No communication, the same result on all ranks.

    Args:
        writer: the ``storage_writer`` to be passed to ``dcp.save``.
        state: the state to be saved; tensors in nested mappings are checked, too.

    Raises:
        CheckpointError: if the writer is torch's safetensors writer, and a rank has several boxes of a tensor, or all
            ranks would write the same file.

    Examples:
        >>> from torch.distributed.checkpoint import FileSystemWriter
        >>> check_storage_writer(FileSystemWriter("out"), {"weight": torch.zeros(3)})  # accepted
    """
    for name, value in state.items():
        if isinstance(value, Mapping):
            check_storage_writer(writer, value)
        elif isinstance(value, DTensor) and is_ragged_spec(value._spec.placements):
            _check_writer(writer, name, value._spec)


def _check_writer(writer: object, name: str, spec: DTensorSpec) -> None:
    """Raise CheckpointError if ``writer`` would lose parts of the tensor ``name``."""
    # `vars(..).get`, because other writers have no such attribute.
    if writer is None or vars(writer).get("serialization_format") is not SerializationFormat.SAFETENSORS:
        return
    _, placement = ragged_axis(spec.placements)
    inner = inner_box(spec).sizes
    # The largest number of boxes on any rank, not on this rank, so that all ranks raise.
    most = max(len(boxes_of_range(inner, *placement.piece(inner, r))) for r in range(placement.num_shards))
    if most > 1:
        raise CheckpointError(
            "torch's safetensors writer keeps one box of a tensor per rank and drops the others.",
            expected="pieces of one box: whole rows, granularity=Rows(1) for matrices",
            got=f"up to {most} boxes per rank",
            where=name,
            todo="save a Hugging Face folder with vescale_fsdp.checkpoint.save(.., format=HuggingFace(assets=..)), or "
            "shard with granularity='rows:1'; for transformers, call save_pretrained without "
            "distributed_checkpoint=True, which gathers the model",
        )
    # `is False`, because only one of the safetensors writers has this attribute.
    if vars(writer).get("save_distributed") is False and placement.num_shards > 1:
        raise CheckpointError(
            "torch's safetensors writer lets all ranks write the same file, and only the last rank's part remains.",
            expected="HuggingFaceStorageWriter(.., save_distributed=True)",
            got="save_distributed=False, its default, and a tensor that is sharded over ranks",
            where=name,
            todo="pass save_distributed=True",
        )
