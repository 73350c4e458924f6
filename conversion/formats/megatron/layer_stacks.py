"""Tensors of all layers in one, as Megatron stores layers that are alike, one by one.

    decoder.layers.mlp.linear_fc2.weight [4, 8, 16]  ->  decoder.layers.0.mlp.linear_fc2.weight [8, 16] ... 3

A layer's items lie where they lay: its chunks are slices of the stack's, found through what finds those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.layout.geometry import Box

_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")


@dataclass
class LayerStacks:
    """Takes stacks apart, and remembers where their layers came from.

    Args:
        locate: finds a stack's chunk in its file.
    """

    locate: Callable[[TensorInfo, StoredChunk], StoredChunk]
    _origins: dict[tuple[str, int], tuple[TensorInfo, StoredChunk, int]] = field(default_factory=dict)

    def layers(self, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
        """The tensor by name, or each layer of it."""
        match = _STACKED.fullmatch(name)
        if match is None or not tensor.info.shape:
            yield name, tensor
            return
        for layer in range(tensor.info.shape[0]):
            info = TensorInfo(name, tensor.info.shape[1:], tensor.info.dtype)
            chunks = (self._slice(tensor.info, chunk, layer) for chunk in tensor.chunks)
            stored = StoredTensor(info, tuple(chunk for chunk in chunks if chunk is not None))
            yield f"{match[1]}.{layer}.{match[2]}", stored

    def _slice(self, stack: TensorInfo, chunk: StoredChunk, layer: int) -> StoredChunk | None:
        """What a chunk of a stack holds of a layer."""
        place = layer - chunk.box.offsets[0]
        if not 0 <= place < chunk.box.sizes[0]:
            return None
        # A chunk is told by its file and offset, until it is located: layers in one chunk must differ there.
        key = (chunk.file, chunk.offset + place)
        self._origins[key] = (stack, chunk, place)
        return replace(chunk, box=Box(chunk.box.offsets[1:], chunk.box.sizes[1:]), offset=key[1])

    def located(self, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
        """Where a chunk of a layer, or of what is no stack, lies in its file: for `Source.locate`."""
        origin = self._origins.get((chunk.file, chunk.offset))
        if origin is None:
            return self.locate(info, chunk)
        stack, whole, place = origin
        found = self.locate(stack, whole)
        first, *steps = found.steps
        size = info.dtype.itemsize
        return replace(
            found,
            box=chunk.box,
            offset=found.offset + place * first * size,
            nbytes=chunk.box.numel * size,
            strides=tuple(steps),
        )
