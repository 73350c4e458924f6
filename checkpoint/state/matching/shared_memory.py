"""Tensors of a state that share memory, such as tied weights: of each element, a load can keep one value.

    state                     checkpoint
    a, b: one tensor          a and b have one identity            one of them is read
    a, b: one tensor          a and b are stored separately        their values are compared first; they must be equal
    t and its slice t[:2]     stored separately                    the same

The comparison is done before anything is overwritten, in pieces of at most 16 MiB for tied tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of
from vescale_fsdp.checkpoint.state.matching.result import TensorRead
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.layout.region import Region

_PIECE_BYTES = 16 << 20  # 16 MiB
ReadNow = Callable[[TensorRead, Region], torch.Tensor]
"""Reads a region of a stored tensor: its elements, 1D, on the CPU."""


class Fill(NamedTuple):
    """A region of a stored tensor, and the local tensor of the state to fill with it.

    Attributes:
        region: the region of the stored tensor that ``local`` has.
        local: this rank's piece or box of the tensor.
    """

    read: TensorRead
    region: Region
    local: torch.Tensor

    @property
    def memory(self) -> Hashable:
        """A key that is equal for tensors with the same elements in the same order."""
        local = self.local
        return local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype

    @property
    def bytes_range(self) -> tuple[str, int, int]:
        """The device, and the addresses of the first byte and of the end of the tensor."""
        local = self.local
        last = sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
        start = local.data_ptr()
        return str(local.device), start, start + (last + 1) * local.dtype.itemsize

    def within(self, memory: np.ndarray, start: int) -> np.ndarray:  # type: ignore[type-arg]
        """Return the tensor's bytes in a copy of the memory from address ``start`` on, one row for each element."""
        local, size = self.local, self.local.dtype.itemsize
        strides = (*(step * size for step in local.stride()), 1)
        first = local.data_ptr() - start
        return np.lib.stride_tricks.as_strided(memory[first:], (*local.shape, size), strides)


def sharing(fills: Sequence[Fill]) -> list[list[Fill]]:
    """Return the groups of tensors that share elements, each of at least two."""
    groups: list[list[Fill]] = []
    for near in _overlapping([fill for fill in fills if fill.local.numel()]):
        by_memory: dict[Hashable, list[Fill]] = {}
        for fill in near:
            by_memory.setdefault(fill.memory, []).append(fill)
        if len(by_memory) > 1 and _share_elements([alike[0] for alike in by_memory.values()]):
            groups.append(near)
        else:  # the columns of a matrix lie between each other, but share no element
            groups += [alike for alike in by_memory.values() if len(alike) > 1]
    return groups


def _overlapping(fills: Sequence[Fill]) -> Iterator[list[Fill]]:
    """Yield groups of at least two tensors whose ranges of addresses overlap, each in the given order."""
    groups: list[list[int]] = []
    end = ("", 0)  # device and end of the last group's range
    for (device, start, stop), index in sorted((fill.bytes_range, index) for index, fill in enumerate(fills)):
        if device != end[0] or start >= end[1]:
            groups.append([])
            end = device, stop
        groups[-1].append(index)
        end = device, max(end[1], stop)
    for group in groups:
        if len(group) > 1:
            yield [fills[index] for index in sorted(group)]


def _share_elements(fills: Sequence[Fill]) -> bool:
    """Return whether any byte belongs to two of the tensors."""
    memory, start = _zeros_for(fills)
    for fill in fills:
        own = fill.within(memory, start)
        if own.any():
            return True
        own[...] = 1
    return False


def _zeros_for(fills: Sequence[Fill]) -> tuple[np.ndarray, int]:  # type: ignore[type-arg]
    """Return (a copy of the tensors' memory, all zeros; its first address)."""
    ranges = [fill.bytes_range for fill in fills]
    start = min(first for _, first, _ in ranges)
    return np.zeros(max(stop for _, _, stop in ranges) - start, dtype=np.uint8), start


def require_equal(group: Sequence[Fill], read_now: ReadNow, where: str) -> None:
    """Check that the stored tensors for tensors that share memory agree.

    Args:
        group: a group of `sharing`.

    Raises:
        CheckpointError: if an element would get different values.
    """
    first, *others = group
    if all(other.memory == first.memory for other in others):
        for other in others:
            if not _is_equal(first, other, read_now):
                raise _differ([first, other], where)
        return
    memory, start = _zeros_for(group)
    values = [bytes_of(read_now(fill.read, fill.region)).numpy() for fill in group]
    for fill, value in zip(group, values, strict=True):
        own = fill.within(memory, start)
        own[...] = value.reshape(own.shape)
    for fill, value in zip(group, values, strict=True):
        own = fill.within(memory, start)
        if not np.array_equal(own, value.reshape(own.shape)):
            raise _differ(group, where)


def _is_equal(one: Fill, other: Fill, read_now: ReadNow) -> bool:
    """Return whether two stored tensors have the same bytes in this rank's region; NaNs may be equal, too."""
    box, (start, stop) = one.region.box, one.region.span
    step = max(1, _PIECE_BYTES // one.local.dtype.itemsize)
    for first in range(start, stop, step):
        part = Region(box, Range(first, min(first + step, stop)))
        left, right = (bytes_of(read_now(fill.read, part)) for fill in (one, other))
        if not torch.equal(left, right):
            return False
    return True


def _differ(group: Sequence[Fill], where: str) -> CheckpointError:
    names = some([fill.read.name for fill in group])
    return CheckpointError(
        "Tensors that share memory in the state differ in the checkpoint.",
        expected=f"equal values of {names}, which the state ties",
        got="other values",
        where=where,
        todo="untie them in the state (config.tie_word_embeddings=False for a model of transformers), or leave one out "
        "with include=",
    )
