"""`PerRank`: a value that differs between ranks (random state, data loader), and its binary encoding.

All other leaves of a state are equal on all ranks, or tensors sharded over them. A per-rank value is stored in its
rank's own file. It is restored by the same rank or, at another world size, by a merge function. `Resharded` is for
values that define how the ranks' parts are merged and split again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, dense, dtype_name, dtype_named
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.lazy import set_module

Merge = Callable[[list[Any], int, int], Any]


@set_module("vescale_fsdp.checkpoint")
class PerRank:
    """A leaf of a state that has its own value on each rank.

    Args:
        value: plain values, tensors, nested containers, or an object with ``state_dict`` and
            ``load_state_dict``.
        merge: called as ``merge(values_of_all_saved_ranks, rank, world_size)`` if the checkpoint was saved by another
            number of ranks; returns this rank's value. Without ``merge``, each rank gets the value that the rank of the
            same number saved. A rank whose number did not save keeps its own value, with a warning.

    Attributes:
        value: this rank's value; `load` replaces it.

    Examples:
        >>> from vescale_fsdp.checkpoint import load, save
        >>> save("per_rank", {"rng": PerRank(torch.get_rng_state())})
        >>> state = {"rng": PerRank(None)}
        >>> _ = load("per_rank", state)
        >>> bool((state["rng"].value == torch.get_rng_state()).all())
        True
    """

    def __init__(self, value: Any, *, merge: Merge | None = None) -> None:
        self.value = value
        self.merge = merge

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class Reshardable(Protocol):
    """Protocol of the objects that `Resharded` wraps: each rank has a part, such as its position in the data.

    Examples:
        >>> from vescale_fsdp.checkpoint.data import ReshardableSampler
        >>> two = [ReshardableSampler(10, rank=rank, world_size=2) for rank in (0, 1)]
        >>> whole = two[0].merge([sampler.state_dict() for sampler in two])
        >>> part = two[0].split(whole, 2, 3)  # the part of the last of three ranks
    """

    def state_dict(self) -> Any:
        """Return this rank's part."""

    def load_state_dict(self, state: Any) -> None:
        """Replace this rank's part."""

    def merge(self, states: list[Any]) -> Any:
        """Return the whole value, merged from the parts of all saved ranks."""

    def split(self, whole: Any, rank: int, world_size: int) -> Any:
        """Return one rank's part of the whole. Must not change ``self`` or ``whole``: all ranks share ``whole``."""


@set_module("vescale_fsdp.checkpoint.data")
class Resharded(PerRank):
    """A `PerRank` value for any number of ranks: a load merges the saved parts, and splits the result for its ranks.

    A save also merges the parts once, as a check, and raises on all ranks if the merge fails.

    Args:
        value: a `Reshardable` object, such as a `ReshardableSampler` or a `ReshardableLoader`.

    Examples:
        >>> from vescale_fsdp.checkpoint import save
        >>> from vescale_fsdp.checkpoint.data import ReshardableSampler
        >>> save("resharded", {"data": Resharded(ReshardableSampler(1000))})
    """

    def __init__(self, value: Reshardable) -> None:
        super().__init__(
            value, merge=lambda states, rank, world_size: value.split(value.merge(states), rank, world_size)
        )

    def __repr__(self) -> str:
        return f"Resharded({self.value!r})"


def pack_blob(values: Mapping[str, tuple[Any, list[torch.Tensor]]]) -> bytes:
    """Encode a rank's per-rank values: u64 length of a JSON header, the header, then the tensors' bytes.

    Args:
        values: name -> (encoded tree, tensors); leaves of the tree contain indices of the tensors.
    """
    if not values:
        return b""
    trees: dict[str, Any] = {}
    tensors: list[dict[str, Any]] = []
    parts: list[bytes] = []
    start = 0
    for name, (tree, leaves) in values.items():
        trees[name] = {"first": len(tensors), "tree": tree}
        for tensor in leaves:
            data = bytes_of(dense(tensor)).numpy().tobytes()
            described = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            tensors.append({**described, "start": start, "nbytes": len(data)})
            parts.append(data)
            start += len(data)
    head = json.dumps({"values": trees, "tensors": tensors}).encode()
    return b"".join([struct.pack("<Q", len(head)), head, *parts])


def _tensor_of(data: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Return a CPU tensor with a copy of the bytes; raises ValueError if their number does not fit the shape."""
    # Two negative sizes would have a positive product.
    if min(shape, default=0) < 0 or numel_of(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for a tensor of {dtype}, {shape}")
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    # Copied, not viewed: an array of 0 bytes has stride 0, and cannot be viewed as a wider dtype.
    bytes_of(tensor).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor


def leaf_of(tensors: list[torch.Tensor], node: Mapping[str, Any]) -> Any:
    """Return the tensor, or the array, to which a leaf of a per-rank value's tree refers by index."""
    tensor = tensors[int(node["i"])]
    return tensor.numpy() if node.get("numpy") else tensor


def unpack_blob(blob: memoryview, *, where: str) -> dict[str, tuple[Any, list[torch.Tensor]]]:
    """Decode the bytes of `pack_blob`. Bytes after the last tensor are ignored: all ranks reserve the same length.

    Raises:
        CorruptCheckpointError: if the blob's header is invalid or its sizes do not match the blob.
    """
    if not len(blob):
        return {}
    try:
        (head_bytes,) = struct.unpack_from("<Q", blob)
        if head_bytes > len(blob) - 8:  # 8: the length itself
            raise ValueError(f"a head of {head_bytes} bytes in a blob of {len(blob)} bytes")
        head = json.loads(bytes(blob[8 : 8 + head_bytes]))
        data = blob[8 + head_bytes :]
        tensors = []
        for item in head["tensors"]:
            start, nbytes = int(item["start"]), int(item["nbytes"])
            if not 0 <= start <= start + nbytes <= len(data):
                raise ValueError(f"tensor at [{start}, {start + nbytes}) in {len(data)} bytes")
            tensors.append(
                _tensor_of(data[start : start + nbytes], dtype_named(item["dtype"]), item["shape"])
            )
        values = {}
        names = list(head["values"])
        firsts = [head["values"][name]["first"] for name in names] + [len(tensors)]
        # Not strict: `firsts` is one longer than `names`, because it ends with the number of tensors.
        for name, first, stop in zip(names, firsts, firsts[1:], strict=False):
            values[name] = (head["values"][name]["tree"], tensors[first:stop])
        return values
    except (LookupError, TypeError, ValueError, ArithmeticError, struct.error, RuntimeError) as error:
        # The errors that parsing damaged bytes can raise.
        raise CorruptCheckpointError(
            "The per-rank values cannot be unpacked.",
            expected="a length, a JSON header and the tensors that it lists",
            got=str(error),
            where=where,
        ) from error
