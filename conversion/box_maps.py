"""Views that only move items: joined, cut, stacked, permuted, reshaped, interleaved, padded tensors.

Each knows which boxes of its inputs an output box needs, so that it streams like a stored tensor, and each
is the inverse of another:

    ConcatView - SliceView     StackView - IndexView     PermuteView, ReshapeView: themselves, the other way
    InterleaveView - the same with ``back=True``          PadView - SliceView
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vescale_fsdp.conversion.tensors import TensorInfo
from vescale_fsdp.conversion.view import TensorView
from vescale_fsdp.errors import ConversionError, explain
from vescale_fsdp.geometry import Box, boxes_of_range, range_of_box

__all__ = [
    "ConcatView",
    "IndexView",
    "InterleaveView",
    "PadView",
    "PermuteView",
    "RenameView",
    "ReshapeView",
    "SliceView",
    "StackView",
]


def _refuse(problem: str, expected: object, got: object, info: TensorInfo) -> ConversionError:
    return ConversionError(
        explain(
            problem,
            expected=expected,
            got=got,
            where=f"tensor {info.name} of shape {info.shape}",
            todo="correct the sizes in the key rules, or pass the config.json of this model",
        )
    )


def _replace(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _on_dim(dim: int, part: slice) -> tuple[Any, ...]:
    return (slice(None),) * dim + (part, ...)


@dataclass(frozen=True)
class RenameView(TensorView):
    """The same tensor under another name."""

    inner: TensorView
    name: str

    @cached_property
    def info(self) -> TensorInfo:
        return TensorInfo(self.name, self.inner.info.shape, self.inner.info.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        self.inner.read_into(box, out)

    def identity(self) -> str:
        return self.inner.identity()


@dataclass(frozen=True)
class ConcatView(TensorView):
    """Tensors one after the other along a dim."""

    parts: tuple[TensorView, ...]
    dim: int

    def __post_init__(self) -> None:
        first = self.parts[0].info
        for part in self.parts:
            info = part.info
            if self.dim >= len(info.shape) or info.dtype != first.dtype:
                raise _refuse(
                    "tensors cannot be joined", f"{first.dtype.name} with dim {self.dim}", info, info
                )
            if _replace(info.shape, self.dim, 0) != _replace(first.shape, self.dim, 0):
                raise _refuse("tensors cannot be joined", f"shapes like {first.shape}", info.shape, info)

    @cached_property
    def info(self) -> TensorInfo:
        first = self.parts[0].info
        total = sum(part.info.shape[self.dim] for part in self.parts)
        return TensorInfo(first.name, _replace(first.shape, self.dim, total), first.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        start, stop = box.offsets[self.dim], box.offsets[self.dim] + box.sizes[self.dim]
        base = 0
        for part in self.parts:
            size = part.info.shape[self.dim]
            low, high = max(start, base), min(stop, base + size)
            if low < high:
                offsets = _replace(box.offsets, self.dim, low - base)
                sizes = _replace(box.sizes, self.dim, high - low)
                part.read_into(Box(offsets, sizes), out[_on_dim(self.dim, slice(low - start, high - start))])
            base += size

    def identity(self) -> str:
        return f"concat({self.dim}, {', '.join(part.identity() for part in self.parts)})"


@dataclass(frozen=True)
class SliceView(TensorView):
    """Indices [start, start + size) of a dim."""

    inner: TensorView
    dim: int
    start: int
    size: int

    def __post_init__(self) -> None:
        info = self.inner.info
        if self.dim >= len(info.shape) or self.start + self.size > info.shape[self.dim]:
            expected = f"at least {self.start + self.size} in dim {self.dim}"
            raise _refuse("a tensor is too small to be cut", expected, info.shape, info)

    @cached_property
    def info(self) -> TensorInfo:
        found = self.inner.info
        return TensorInfo(found.name, _replace(found.shape, self.dim, self.size), found.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        offsets = _replace(box.offsets, self.dim, box.offsets[self.dim] + self.start)
        self.inner.read_into(Box(offsets, box.sizes), out)

    def identity(self) -> str:
        return f"slice({self.dim}, {self.start}, {self.size}, {self.inner.identity()})"


@dataclass(frozen=True)
class StackView(TensorView):
    """Tensors of one shape along a new dim."""

    parts: tuple[TensorView, ...]
    dim: int

    def __post_init__(self) -> None:
        first = self.parts[0].info
        for part in self.parts:
            info = part.info
            if (info.shape, info.dtype) != (first.shape, first.dtype) or self.dim > len(info.shape):
                raise _refuse("tensors cannot be stacked", f"{first.dtype.name} {first.shape}", info, info)

    @cached_property
    def info(self) -> TensorInfo:
        first = self.parts[0].info
        shape = (*first.shape[: self.dim], len(self.parts), *first.shape[self.dim :])
        return TensorInfo(first.name, shape, first.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        dim = self.dim
        inner = Box((*box.offsets[:dim], *box.offsets[dim + 1 :]), (*box.sizes[:dim], *box.sizes[dim + 1 :]))
        for place in range(box.sizes[dim]):
            one: tuple[Any, ...] = (slice(None),) * dim + (place, ...)
            self.parts[box.offsets[dim] + place].read_into(inner, out[one])

    def identity(self) -> str:
        return f"stack({self.dim}, {', '.join(part.identity() for part in self.parts)})"


@dataclass(frozen=True)
class IndexView(TensorView):
    """One index of a dim, which is gone."""

    inner: TensorView
    dim: int
    index: int

    def __post_init__(self) -> None:
        info = self.inner.info
        if self.dim >= len(info.shape) or self.index >= info.shape[self.dim]:
            expected = f"at least {self.index + 1} in dim {self.dim}"
            raise _refuse("a tensor is too small to be taken apart", expected, info.shape, info)

    @cached_property
    def info(self) -> TensorInfo:
        found = self.inner.info
        shape = (*found.shape[: self.dim], *found.shape[self.dim + 1 :])
        return TensorInfo(found.name, shape, found.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        dim = self.dim
        offsets = (*box.offsets[:dim], self.index, *box.offsets[dim:])
        sizes = (*box.sizes[:dim], 1, *box.sizes[dim:])
        self.inner.read_into(Box(offsets, sizes), np.expand_dims(out, dim))

    def identity(self) -> str:
        return f"index({self.dim}, {self.index}, {self.inner.identity()})"


@dataclass(frozen=True)
class PermuteView(TensorView):
    """Dims in another order: dim i of the result is dim ``dims[i]`` of the inner tensor."""

    inner: TensorView
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        info = self.inner.info
        if sorted(self.dims) != list(range(len(info.shape))):
            raise _refuse("dims cannot be put in this order", f"{len(info.shape)} dims", self.dims, info)

    @cached_property
    def _back(self) -> tuple[int, ...]:
        return tuple(self.dims.index(dim) for dim in range(len(self.dims)))

    @cached_property
    def info(self) -> TensorInfo:
        found = self.inner.info
        return TensorInfo(found.name, tuple(found.shape[dim] for dim in self.dims), found.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        offsets = tuple(box.offsets[dim] for dim in self._back)
        sizes = tuple(box.sizes[dim] for dim in self._back)
        self.inner.read_into(Box(offsets, sizes), out.transpose(self._back))

    def identity(self) -> str:
        return f"permute({self.dims}, {self.inner.identity()})"


@dataclass(frozen=True)
class ReshapeView(TensorView):
    """The same items, row-major, in another shape."""

    inner: TensorView
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        info = self.inner.info
        if math.prod(self.shape) != info.numel or info.dtype.is_packed:
            raise _refuse("a tensor cannot have this shape", self.shape, info.shape, info)

    @cached_property
    def info(self) -> TensorInfo:
        found = self.inner.info
        return TensorInfo(found.name, self.shape, found.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        try:
            start, stop = range_of_box(self.shape, box)
        except ValueError:  # not one run of items: index by index of the first dim that has several
            dim = next(d for d, size in enumerate(box.sizes) if size > 1)
            for place in range(box.sizes[dim]):
                one = Box(_replace(box.offsets, dim, box.offsets[dim] + place), _replace(box.sizes, dim, 1))
                self.read_into(one, out[_on_dim(dim, slice(place, place + 1))])
            return
        scratch = np.empty(stop - start, dtype=out.dtype)
        position = 0
        for part in boxes_of_range(self.inner.info.shape, start, stop):
            self.inner.read_into(part, scratch[position : position + part.numel].reshape(part.sizes))
            position += part.numel
        out[...] = scratch.reshape(box.sizes)

    def identity(self) -> str:
        return f"reshape({self.shape}, {self.inner.identity()})"


@dataclass(frozen=True)
class InterleaveView(TensorView):
    """Within each of ``groups`` equal groups of a dim, ``parts`` runs become interleaved items.

        groups 1, parts 2:  a0 a1 a2 b0 b1 b2  ->  a0 b0 a1 b1 a2 b2      (``back``: the other way)

    With one group per head this turns rotary halves into rotary pairs.
    """

    inner: TensorView
    dim: int
    groups: int
    parts: int = 2
    back: bool = False

    def __post_init__(self) -> None:
        info = self.inner.info
        if self.dim >= len(info.shape) or info.shape[self.dim] % (self.groups * self.parts):
            expected = f"a multiple of {self.groups} x {self.parts} in dim {self.dim}"
            raise _refuse("a tensor cannot be interleaved", expected, info.shape, info)

    @cached_property
    def info(self) -> TensorInfo:
        return self.inner.info

    def read_into(self, box: Box, out: np.ndarray) -> None:
        dim, group = self.dim, self.info.shape[self.dim] // self.groups
        start, stop = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        first, last = start // group, -(-stop // group)  # whole groups around what is asked
        sizes = _replace(box.sizes, dim, (last - first) * group)
        scratch = np.empty(sizes, dtype=out.dtype)
        self.inner.read_into(Box(_replace(box.offsets, dim, first * group), sizes), scratch)
        runs = (self.parts, group // self.parts)
        split = scratch.reshape(
            *sizes[:dim], last - first, *(runs[::-1] if self.back else runs), *sizes[dim + 1 :]
        )
        mixed = split.swapaxes(dim + 1, dim + 2).reshape(sizes)
        out[...] = mixed[_on_dim(dim, slice(start - first * group, stop - first * group))]

    def identity(self) -> str:
        return f"interleave({self.dim}, {self.groups}, {self.parts}, {self.back}, {self.inner.identity()})"


@dataclass(frozen=True)
class PadView(TensorView):
    """Zeros after the end of a dim, up to ``size``."""

    inner: TensorView
    dim: int
    size: int

    def __post_init__(self) -> None:
        info = self.inner.info
        if self.dim >= len(info.shape) or info.shape[self.dim] > self.size:
            raise _refuse("a tensor is too large to be padded", f"at most {self.size}", info.shape, info)

    @cached_property
    def info(self) -> TensorInfo:
        found = self.inner.info
        return TensorInfo(found.name, _replace(found.shape, self.dim, self.size), found.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        filled = max(0, min(box.sizes[self.dim], self.inner.info.shape[self.dim] - box.offsets[self.dim]))
        out[_on_dim(self.dim, slice(filled, None))] = np.zeros((), dtype=out.dtype)
        if filled:
            sizes = _replace(box.sizes, self.dim, filled)
            self.inner.read_into(Box(box.offsets, sizes), out[_on_dim(self.dim, slice(0, filled))])

    def identity(self) -> str:
        return f"pad({self.dim}, {self.size}, {self.inner.identity()})"
