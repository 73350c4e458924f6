"""A resharder of ragged tensors for torch_checkpointing, PyTorch's library that writes one checkpoint file per rank.

    spec = ItemSpec(resharder=RaggedResharder())
    manager = CheckpointManager.Config(items={"model": spec, "optimizer": spec}).build()
    manager.save(path, {"model": pieces(model_state), "optimizer": pieces(optimizer_state)})

    loaded = manager.load(path, into={"model": pieces(model_state), "optimizer": pieces(optimizer_state)})
    set_optimizer_state_dict(model, optimizer, rejoin(optimizer_state, loaded["optimizer"]))

The files are in the format of ``torch.save``, which does not store where a piece is in its global tensor. `pieces`
returns plain tensors that share the shards' memory and have their position as an attribute. The resharder writes all
positions into the checkpoint's metadata. A load fills the shards' memory, on any number of ranks and under any layout.
The resharder also reads checkpoints of FSDP2 models, and FSDP2 models can use it to read checkpoints of ragged tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch_checkpointing.checkpoint_layout import TorchSerialization
from torch_checkpointing.default_metadata import DefaultShardingMetadata
from torch_checkpointing.default_resharder import compute_local_shard_info
from torch_checkpointing.distributed_metadata import DistributedItemMetadata, ShardingMetadata
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torch_checkpointing.resharding import Resharder
from torch_checkpointing.storage.base_storage import Storage
from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.torch_private import local_of

KeyPath = tuple[str | int, ...]  # keys and indices that lead from an item to a leaf
# Attribute of a piece: (global shape, offsets of its boxes in the global tensor, sizes of its boxes). Boxes are in the
# order of the piece's elements. Files contain the name of the attribute.
_POSITION = "vescale_fsdp_place"


def pieces(state: Any) -> Any:
    """Replace each ragged tensor of a state by this rank's piece: a plain tensor that shares the shard's memory."""

    def piece(_: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, RaggedDTensor):
            return leaf
        local = local_of(leaf).detach()  # a new tensor object, which gets the attribute
        offsets, sizes = (tuple(box.offsets for box in leaf.boxes), tuple(box.sizes for box in leaf.boxes))
        vars(local)[_POSITION] = (tuple(leaf.shape), offsets, sizes)  # torch.save and copies keep attributes
        return local

    return _mapped(state, (), piece)


def rejoin(state: Any, loaded: Any) -> Any:
    """Replace pieces in ``loaded`` by the ragged tensors of ``state`` that share their memory: the inverse of `pieces`.

    Args:
        state: the state that was passed to `pieces`.
        loaded: the result of a load into ``pieces(state)``.
    """
    own = _leaves(state)
    return _mapped(
        loaded, (), lambda path, leaf: own[path] if isinstance(own.get(path), RaggedDTensor) else leaf
    )


class RaggedResharder(Resharder):  # type: ignore[misc]
    """Reads this rank's elements of ragged tensors, DTensors and plain tensors from the files of all ranks.

    Plain tensors are assumed to be equal on all ranks, and are read from the file of rank 0. Values that are not
    tensors are read from this rank's own file, or from the file of rank 0 if the checkpoint has fewer ranks.
    """

    def __init__(self) -> None:
        check_version("torch_checkpointing")

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[KeyPath, ShardingMetadata]:
        """Return the position of every tensor of an item, by path.

        Raises:
            CheckpointError: if the item has a ragged tensor, since the user has not called `pieces`.
        """
        return {
            path: _sharding_of(leaf, item_key, path)
            for path, leaf in _leaves(item_value).items()
            if isinstance(leaf, torch.Tensor)
        }

    def should_reshard(
        self,
        source_metadata: DistributedItemMetadata | None,
        target_metadata: dict[KeyPath, ShardingMetadata] | None,
    ) -> bool:
        """Return whether to load an item by `load`: always, if the item has tensors.

        Even on an equal number of ranks, a rank's file need not contain the elements of the rank's tensors.

        Raises:
            CheckpointError: if the checkpoint does not contain the positions of tensors.
        """
        if not target_metadata:
            return False
        if source_metadata is None:
            raise CheckpointError(
                "This checkpoint does not contain the positions of its pieces.",
                expected="an item that was saved with a resharder",
                got="no metadata",
                todo="set the item's resharder before the first save",
            )
        return True

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[KeyPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[KeyPath]:
        """Fill the tensors of ``target`` in place, and copy values that are not tensors into it.

        Returns:
            The paths of tensors that the checkpoint does not contain.

        Raises:
            CheckpointError: if the shape of a tensor differs from its shape in the checkpoint, or the checkpoint lacks
                some of the tensor's elements.
        """
        stored = source_metadata.nested_path_to_metadata
        own = dist.get_rank() if dist.is_initialized() else 0
        # The file for values that are not tensors: rank 0's if the checkpoint has fewer ranks.
        rank_of_values = own if own in source_metadata.rank_to_layout_info else 0
        # By the rank whose file is read: the tensor's path, a box of the file, a box of this rank, and their
        # intersection.
        copies: dict[int, list[tuple[KeyPath, Box, Box, Box]]] = {rank_of_values: []}
        boxes = {path: _boxes_of(sharding, own) for path, sharding in target_metadata.items()}
        for path, sharding in target_metadata.items():
            for rank, stored_box, box, shared in _overlaps(path, sharding, boxes[path], stored.get(path, ())):
                copies.setdefault(rank, []).append((path, stored_box, box, shared))
        targets = _leaves(target)
        for rank, overlaps in copies.items():  # file by file, so that only one file is in memory at a time
            item = _read(source_path, item_key, rank, source_metadata, storage)
            if rank == rank_of_values:
                _take_values(target, item)
            leaves = _leaves(item)
            for path, stored_box, box, shared in overlaps:
                metadata = source_metadata.get_metadata_for_path_and_rank(path, rank)
                source = _view(path, leaves[path], _boxes_of(metadata, rank), stored_box)
                with torch.no_grad():  # the target may be a parameter, which requires a gradient
                    into = _view(path, targets[path], boxes[path], box)[shared.slices(box.offsets)]
                    into.copy_(source[shared.slices(stored_box.offsets)])
        return [path for path in target_metadata if path not in stored]


def _mapped(tree: Any, path: KeyPath, change: Callable[[KeyPath, Any], Any]) -> Any:
    """Copy a tree of dicts, lists and tuples, and replace each leaf by ``change(path, leaf)``."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, (*path, key), change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, (*path, number), change) for number, value in enumerate(tree))
    return change(path, tree)


def _leaves(tree: Any) -> dict[KeyPath, Any]:
    """Return the leaves of a tree of dicts, lists and tuples by their paths."""
    leaves: dict[KeyPath, Any] = {}
    _mapped(tree, (), leaves.__setitem__)
    return leaves


def _sharding_of(tensor: torch.Tensor, item_key: str, path: KeyPath) -> ShardingMetadata:
    """Return the position of a tensor's elements in its global tensor.

    Raises:
        CheckpointError: for a ragged tensor.
    """
    # torch.save would store the whole DTensor object, so a ragged tensor must be a piece here.
    if isinstance(tensor, RaggedDTensor):
        raise CheckpointError(
            "A ragged tensor cannot be stored without its position.",
            expected="vescale_fsdp.integrations.torch_checkpointing.pieces(state)",
            got=f"a ragged tensor of shape {tuple(tensor.shape)}",
            where=".".join(map(str, (item_key, *path))),
            todo="pass pieces(state) to save and to load(into=...)",
        )
    if isinstance(tensor, DTensor):
        return DTensorShardingMetadata.from_dtensor(tensor)  # type: ignore[no-any-return]
    # A plain tensor without the attribute is whole: one box with all indices.
    whole = tuple(tensor.shape), ((0,) * tensor.ndim,), (tuple(tensor.shape),)
    shape, offsets, sizes = vars(tensor).get(_POSITION, whole)
    # torch_checkpointing wants the offsets of each box in the local tensor. A piece is flat, one box after another, and
    # has no such offsets: they are zeros.
    corners = ((0,) * len(shape),) * len(offsets)
    return DefaultShardingMetadata(shape, offsets, corners, sizes, str(tensor.dtype))


def _boxes_of(sharding: ShardingMetadata, rank: int) -> tuple[Box, ...]:
    """Return the boxes of the global tensor that ``rank`` stores."""
    if isinstance(sharding, DefaultShardingMetadata):
        boxes = zip(
            sharding.local_offsets, map(Box, sharding.global_offsets, sharding.local_sizes), strict=True
        )
        # In the order of memory, for tensors that another resharder has saved. `sorted` keeps the order of a piece.
        return tuple(box for _, box in sorted(boxes, key=lambda pair: pair[0]))
    sizes, offsets = compute_local_shard_info(sharding, rank)
    return (Box(tuple(offsets), tuple(sizes)),)


def _overlaps(
    path: KeyPath, target: ShardingMetadata, own: Sequence[Box], groups: Sequence[Any]
) -> Iterator[tuple[int, Box, Box, Box]]:
    """Find the boxes of a checkpoint that overlap this rank's boxes of one tensor, each with one rank that stores it.

    Args:
        own: this rank's boxes.
        groups: the positions of the tensor in the checkpoint, each with the ranks of the position.

    Yields:
        The rank whose file contains a box, this box, this rank's box, and their intersection.

    Raises:
        CheckpointError: if shapes differ, or the checkpoint does not contain every element exactly once.
    """
    homes: dict[Box, int] = {}
    for group in groups:
        shapes = [tuple(sharding.global_shape) for sharding in (target, group.sharding_metadata)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                "A tensor has another shape in the checkpoint.",
                expected=f"shape {shapes[0]}",
                got=f"shape {shapes[1]}",
                where=".".join(map(str, path)),
                todo="build the model that the checkpoint was saved from",
            )
        for rank in group.ranks:
            for box in _boxes_of(group.sharding_metadata, rank):
                homes.setdefault(box, rank)
    for box in own if groups else ():
        shared = {stored: part for stored in homes if (part := box.intersect(stored)) is not None}
        numel = sum(part.numel for part in shared.values())
        if numel != box.numel:
            raise CheckpointError(
                "The checkpoint does not contain every element of a tensor exactly once.",
                expected=f"{box.numel} elements of {box}",
                got=f"{numel}",
                where=".".join(map(str, path)),
                todo="load a checkpoint that all ranks have written",
            )
        yield from ((homes[stored], stored, box, part) for stored, part in shared.items())


def _read(folder: Path, item_key: str, rank: int, source: DistributedItemMetadata, storage: Storage) -> Any:
    """Read an item from the file of one rank, to the CPU."""
    layout = source.get_layout_info(rank, item_key)
    if not isinstance(layout.serialization_format, TorchSerialization):
        raise CheckpointError(
            "Only files in the format of torch.save can be resharded.",
            expected="an item with the default layout",
            got=f"{type(layout.serialization_format).__name__}",
            where=layout.file_path,
            todo="save the item with the default layout",
        )
    return load_torch_serialized_from_storage(folder / layout.file_path, storage, map_location="cpu")


def _view(path: KeyPath, tensor: torch.Tensor, boxes: Sequence[Box], box: Box) -> torch.Tensor:
    """Return the elements of one box of a tensor whose boxes are stored one after another, in the box's shape.

    Raises:
        CheckpointError: if the boxes are not stored one after another, as another resharder may store them.
    """
    memory = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    # A tensor in the shape of its only box needs no reshaping, which fails for tensors that are not contiguous.
    if len(boxes) == 1 and memory.shape == torch.Size(box.sizes):
        return memory
    if memory.ndim != 1 or memory.numel() != sum(each.numel for each in boxes):
        raise CheckpointError(
            "A tensor does not have its boxes one after another.",
            expected=f"a 1D tensor of the elements of {len(boxes)} boxes",
            got=f"shape {tuple(memory.shape)}",
            where=".".join(map(str, path)),
            todo="load with the resharder that saved the checkpoint",
        )
    start = sum(before.numel for before in boxes[: boxes.index(box)])
    return memory.view(-1)[start : start + box.numel].view(box.sizes)


def _take_values(target: Any, source: Any) -> None:
    """Copy all values that are not tensors into the dicts and lists of ``target``."""
    # Only dicts and lists can be changed in place.
    if isinstance(target, dict) and isinstance(source, Mapping):
        pairs = [(key, source[key]) for key in target if key in source]
    elif isinstance(target, list) and isinstance(source, Sequence):
        pairs = list(enumerate(source[: len(target)]))
    else:
        return
    for key, value in pairs:
        if isinstance(target[key], dict | list):
            _take_values(target[key], value)
        elif not isinstance(target[key], torch.Tensor):
            target[key] = value
