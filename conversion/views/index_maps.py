"""Views that only move items: joined, cut, stacked, permuted, reshaped, interleaved, padded tensors.

Each knows which boxes of its inputs an output box needs, so that it streams like a stored tensor, and each
is the inverse of another:

    ConcatView - SliceView     StackView - IndexView     PermuteView, ReshapeView: themselves, the other way
    InterleaveView - the same with ``back=True``          PadView - SliceView        ZerosView - nothing
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from vescale_fsdp.conversion.source.source import Source
from vescale_fsdp.conversion.source.stored_tensor import TensorInfo
from vescale_fsdp.conversion.views.tensor_view import TensorView
from vescale_fsdp.errors import ConversionError, explain
from vescale_fsdp.layout.geometry import Box, boxes_of_range, run_start

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
    "ZerosView",
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

    def sources(self) -> Iterator[tuple[Source, str]]:
        return self.inner.sources()

    def identity(self) -> str:
        return self.inner.identity()


class _OneInput(TensorView):
    """A view of one tensor that keeps its name and type and changes its shape."""

    inner: TensorView

    @abstractmethod
    def _shape(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result."""

    @cached_property
    def info(self) -> TensorInfo:
        found = self.inner.info
        return TensorInfo(found.name, self._shape(found.shape), found.dtype)

    def sources(self) -> Iterator[tuple[Source, str]]:
        return self.inner.sources()

    def _require(self, dim: int, fits: Callable[[int], bool], problem: str, expected: str) -> None:
        """Refuse an inner tensor without this dim, or with a size there that does not fit."""
        info = self.inner.info
        if dim >= len(info.shape) or not fits(info.shape[dim]):
            raise _refuse(problem, f"{expected} in dim {dim}", info.shape, info)


class _ManyInputs(TensorView):
    """Several tensors as one, named after the first."""

    parts: tuple[TensorView, ...]
    dim: int

    @abstractmethod
    def _shape(self, first: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result."""

    @cached_property
    def info(self) -> TensorInfo:
        first = self.parts[0].info
        return TensorInfo(first.name, self._shape(first.shape), first.dtype)

    def sources(self) -> Iterator[tuple[Source, str]]:
        return chain.from_iterable(part.sources() for part in self.parts)

    def _require_alike(self, problem: str, alike: Callable[[tuple[int, ...]], object]) -> None:
        """Refuse parts whose types or relevant sizes differ from the first one's."""
        first = self.parts[0].info
        for part in self.parts:
            info = part.info
            if info.dtype != first.dtype or alike(info.shape) != alike(first.shape):
                expected = f"{first.dtype.name} {first.shape}, as {first.name} has"
                raise _refuse(problem, expected, f"{info.dtype.name} {info.shape}", info)


@dataclass(frozen=True)
class ConcatView(_ManyInputs):
    """Tensors one after the other along a dim."""

    parts: tuple[TensorView, ...]
    dim: int

    def __post_init__(self) -> None:
        first = self.parts[0].info
        if self.dim >= len(first.shape):
            raise _refuse("Tensors cannot be joined.", f"a dim {self.dim}", first.shape, first)
        self._require_alike("Tensors cannot be joined.", lambda shape: _replace(shape, self.dim, 0))

    def _shape(self, first: tuple[int, ...]) -> tuple[int, ...]:
        return _replace(first, self.dim, sum(part.info.shape[self.dim] for part in self.parts))

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
class SliceView(_OneInput):
    """Indices [start, start + size) of a dim."""

    inner: TensorView
    dim: int
    start: int
    size: int

    def __post_init__(self) -> None:
        stop = self.start + self.size
        self._require(self.dim, lambda n: n >= stop, "A tensor is too small to be cut.", f"at least {stop}")

    def _shape(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        return _replace(inner, self.dim, self.size)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        offsets = _replace(box.offsets, self.dim, box.offsets[self.dim] + self.start)
        self.inner.read_into(Box(offsets, box.sizes), out)

    def identity(self) -> str:
        return f"slice({self.dim}, {self.start}, {self.size}, {self.inner.identity()})"


@dataclass(frozen=True)
class StackView(_ManyInputs):
    """Tensors of one shape along a new dim."""

    parts: tuple[TensorView, ...]
    dim: int

    def __post_init__(self) -> None:
        first = self.parts[0].info
        if self.dim > len(first.shape):
            raise _refuse("Tensors cannot be stacked.", f"{self.dim} dims or more", first.shape, first)
        self._require_alike("Tensors cannot be stacked.", lambda shape: shape)

    def _shape(self, first: tuple[int, ...]) -> tuple[int, ...]:
        return (*first[: self.dim], len(self.parts), *first[self.dim :])

    def read_into(self, box: Box, out: np.ndarray) -> None:
        dim = self.dim
        inner = Box((*box.offsets[:dim], *box.offsets[dim + 1 :]), (*box.sizes[:dim], *box.sizes[dim + 1 :]))
        for place in range(box.sizes[dim]):
            one: tuple[Any, ...] = (slice(None),) * dim + (place, ...)
            self.parts[box.offsets[dim] + place].read_into(inner, out[one])

    def identity(self) -> str:
        return f"stack({self.dim}, {', '.join(part.identity() for part in self.parts)})"


@dataclass(frozen=True)
class IndexView(_OneInput):
    """One index of a dim, which is gone."""

    inner: TensorView
    dim: int
    index: int

    def __post_init__(self) -> None:
        problem = "A tensor is too small to be taken apart."
        self._require(self.dim, lambda n: n > self.index, problem, f"at least {self.index + 1}")

    def _shape(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        return (*inner[: self.dim], *inner[self.dim + 1 :])

    def read_into(self, box: Box, out: np.ndarray) -> None:
        dim = self.dim
        offsets = (*box.offsets[:dim], self.index, *box.offsets[dim:])
        sizes = (*box.sizes[:dim], 1, *box.sizes[dim:])
        self.inner.read_into(Box(offsets, sizes), np.expand_dims(out, dim))

    def identity(self) -> str:
        return f"index({self.dim}, {self.index}, {self.inner.identity()})"


@dataclass(frozen=True)
class PermuteView(_OneInput):
    """Dims in another order: dim i of the result is dim ``dims[i]`` of the inner tensor."""

    inner: TensorView
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        info = self.inner.info
        if sorted(self.dims) != list(range(len(info.shape))):
            raise _refuse("Dims cannot be put in this order.", f"{len(info.shape)} dims", self.dims, info)

    @cached_property
    def _back(self) -> tuple[int, ...]:
        return tuple(self.dims.index(dim) for dim in range(len(self.dims)))

    def _shape(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(inner[dim] for dim in self.dims)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        offsets = tuple(box.offsets[dim] for dim in self._back)
        sizes = tuple(box.sizes[dim] for dim in self._back)
        self.inner.read_into(Box(offsets, sizes), out.transpose(self._back))

    def identity(self) -> str:
        return f"permute({self.dims}, {self.inner.identity()})"


@dataclass(frozen=True)
class ReshapeView(_OneInput):
    """The same items, row-major, in another shape."""

    inner: TensorView
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        info = self.inner.info
        if math.prod(self.shape) != info.numel or info.dtype.is_packed:
            raise _refuse("A tensor cannot have this shape.", self.shape, info.shape, info)

    def _shape(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        return self.shape

    def read_into(self, box: Box, out: np.ndarray) -> None:
        start = run_start(self.shape, box)
        if start is None:  # not one run of items: index by index of the first dim that has several
            dim = next(d for d, size in enumerate(box.sizes) if size > 1)
            for place in range(box.sizes[dim]):
                one = Box(_replace(box.offsets, dim, box.offsets[dim] + place), _replace(box.sizes, dim, 1))
                self.read_into(one, out[_on_dim(dim, slice(place, place + 1))])
            return
        scratch = np.empty(box.numel, dtype=out.dtype)
        position = 0
        for part in boxes_of_range(self.inner.info.shape, start, start + box.numel):
            self.inner.read_into(part, scratch[position : position + part.numel].reshape(part.sizes))
            position += part.numel
        out[...] = scratch.reshape(box.sizes)

    def identity(self) -> str:
        return f"reshape({self.shape}, {self.inner.identity()})"


@dataclass(frozen=True)
class InterleaveView(_OneInput):
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
        runs, expected = self.groups * self.parts, f"a multiple of {self.groups} x {self.parts}"
        problem = "A tensor cannot be interleaved."
        self._require(self.dim, lambda n: runs > 0 and n % runs == 0, problem, expected)

    def _shape(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        return inner

    def read_into(self, box: Box, out: np.ndarray) -> None:
        dim, group = self.dim, self.info.shape[self.dim] // self.groups
        start, stop = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        position = start
        while position < stop:
            inside = position % group
            size = group - inside if inside or stop - position < group else (stop - position) // group * group
            size = min(size, stop - position)
            where = _on_dim(dim, slice(position - start, position - start + size))
            part = Box(_replace(box.offsets, dim, position), _replace(box.sizes, dim, size))
            if size % group:
                self._read_in_group(part, out[where], position - inside, group)
            else:
                self._read_groups(part, out[where], group)
            position += size

    def _read_groups(self, box: Box, out: np.ndarray, group: int) -> None:
        """Whole groups: as many items of the inner tensor, in another order."""
        dim, scratch = self.dim, np.empty(box.sizes, dtype=out.dtype)
        self.inner.read_into(box, scratch)
        runs = (self.parts, group // self.parts)
        inner_runs = runs[::-1] if self.back else runs
        split = scratch.reshape(*box.sizes[:dim], -1, *inner_runs, *box.sizes[dim + 1 :])
        out[...] = split.swapaxes(dim + 1, dim + 2).reshape(box.sizes)

    def _read_in_group(self, box: Box, out: np.ndarray, base: int, group: int) -> None:
        """A part of one group. Never the whole group, which may be the whole tensor: forward nothing but
        the items asked for is read, back at most ``parts`` times as many."""
        dim, parts, run = self.dim, self.parts, group // self.parts
        low = box.offsets[dim] - base
        high = low + box.sizes[dim]
        if not self.back:
            for p in range(parts):
                first, last = -(-(low - p) // parts), -(-(high - p) // parts)
                if first < last:
                    offsets = _replace(box.offsets, dim, base + p * run + first)
                    sizes = _replace(box.sizes, dim, last - first)
                    where = _on_dim(dim, slice(first * parts + p - low, None, parts))
                    self.inner.read_into(Box(offsets, sizes), out[where])
            return
        within_one = low // run == (high - 1) // run
        first, last = (low % run, (high - 1) % run + 1) if within_one else (0, run)
        sizes = _replace(box.sizes, dim, (last - first) * parts)
        scratch = np.empty(sizes, dtype=out.dtype)
        self.inner.read_into(Box(_replace(box.offsets, dim, base + first * parts), sizes), scratch)
        for p in range(low // run, (high - 1) // run + 1):
            begin, end = max(low, p * run), min(high, (p + 1) * run)
            picked = slice((begin - p * run - first) * parts + p, None, parts)
            count = _on_dim(dim, slice(0, end - begin))
            out[_on_dim(dim, slice(begin - low, end - low))] = scratch[_on_dim(dim, picked)][count]

    def identity(self) -> str:
        return f"interleave({self.dim}, {self.groups}, {self.parts}, {self.back}, {self.inner.identity()})"


@dataclass(frozen=True)
class PadView(_OneInput):
    """Zeros after the end of a dim, up to ``size``."""

    inner: TensorView
    dim: int
    size: int

    def __post_init__(self) -> None:
        problem, expected = "A tensor is too large to be padded.", f"at most {self.size}"
        self._require(self.dim, lambda n: n <= self.size, problem, expected)

    def _shape(self, inner: tuple[int, ...]) -> tuple[int, ...]:
        return _replace(inner, self.dim, self.size)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        filled = max(0, min(box.sizes[self.dim], self.inner.info.shape[self.dim] - box.offsets[self.dim]))
        out[_on_dim(self.dim, slice(filled, None))] = np.zeros((), dtype=out.dtype)
        if filled:
            sizes = _replace(box.sizes, self.dim, filled)
            self.inner.read_into(Box(box.offsets, sizes), out[_on_dim(self.dim, slice(0, filled))])

    def identity(self) -> str:
        return f"pad({self.dim}, {self.size}, {self.inner.identity()})"


@dataclass(frozen=True)
class ZerosView(TensorView):
    """A tensor that is stored nowhere: all zeros."""

    made: TensorInfo

    @property
    def info(self) -> TensorInfo:
        return self.made

    def read_into(self, box: Box, out: np.ndarray) -> None:
        out[...] = np.zeros((), dtype=out.dtype)

    def sources(self) -> Iterator[tuple[Source, str]]:
        return iter(())

    def identity(self) -> str:
        return f"zeros({self.made.shape})"
