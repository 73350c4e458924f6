"""Index maps: concatenation, slices, stacks, permutations, reshapes, interleaving and padding of tensors.

An index map only moves items. For a box of its output it computes the boxes of its inputs to read, and the copies from
their items to the items of the output box. It reads no data. Each map has an inverse:

    Concat - Slice     Stack - Index     Permute - Permute     Reshape - Reshape
    Interleave - Interleave with ``back=True``                 Pad - Slice
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vescale_fsdp.layout.geometry import Box, boxes_of_range, contiguous_strides, numel_of, run_start
from vescale_fsdp.layout.region import Copy

Shape = tuple[int, ...]


# A job: the index of an input, the box of the input to read, and the copies from the items of this box to the items of
# the output box, both row-major.
Read = tuple[int, Box, list[Copy]]


class IndexMap(ABC):
    """A tensor whose items are items of other tensors."""

    problem: ClassVar[str]  # first sentence of the error for inputs of unsuitable shape
    has_gaps: ClassVar[bool] = False  # whether some output items are zeros instead of items of an input

    @abstractmethod
    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        """Return (index of an input of unsuitable shape, the expected shape in words); None if all are suitable."""

    @abstractmethod
    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of the result for inputs of these shapes."""

    @abstractmethod
    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        """Yield the reads of inputs that fill an output box."""


def _read(number: int, box: Box, target: int, target_strides: Shape) -> Read:
    """Return the read of a box whose items, in the box's shape, go to one strided box of the output box."""
    return number, box, [Copy(box.sizes, 0, contiguous_strides(box.sizes), target, target_strides)]


def _shifted(read: Read, by_numel: int) -> Read:
    """Return a read whose items go ``by_numel`` items further in the output box."""
    number, box, copies = read
    return number, box, [copy.shift(0, by_numel) for copy in copies]


def _replace(values: Shape, dim: int, *new: int) -> Shape:
    """Return the values with ``new`` (none, one or several) in place of the value of ``dim``."""
    return (*values[:dim], *new, *values[dim + 1 :])


def _misfit_in_dim(
    shape: Shape, dim: int, fits: Callable[[int], bool], expected: str
) -> tuple[int, str] | None:
    """Return `IndexMap.misfit` of a single input, of which only the size of ``dim`` matters."""
    return None if dim < len(shape) and fits(shape[dim]) else (0, f"{expected} in dim {dim}")


@dataclass(frozen=True)
class Concat(IndexMap):
    """Tensors concatenated along a dim."""

    dim: int
    problem = "Tensors cannot be concatenated."

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        if self.dim >= len(shapes[0]):
            return 0, f"a dim {self.dim}"
        first = _replace(shapes[0], self.dim, 0)  # sizes of `dim` may differ, so they are not compared
        odd = (number for number, shape in enumerate(shapes) if _replace(shape, self.dim, 0) != first)
        return next(((number, f"{shapes[0]} but for dim {self.dim}") for number in odd), None)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return _replace(shapes[0], self.dim, sum(shape[self.dim] for shape in shapes))

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        start, strides = box.offsets[self.dim], contiguous_strides(box.sizes)
        stop, base = start + box.sizes[self.dim], 0
        for number, shape in enumerate(shapes):
            low, high = max(start, base), min(stop, base + shape[self.dim])
            if low < high:  # the output box has items of this input
                part = box.with_range(self.dim, low - base, high - low)
                yield _read(number, part, (low - start) * strides[self.dim], strides)
            base += shape[self.dim]


@dataclass(frozen=True)
class Slice(IndexMap):
    """Indices [start, start + size) of a dim."""

    dim: int
    start: int
    size: int
    problem = "A tensor is too small for this slice."

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        stop = self.start + self.size
        return _misfit_in_dim(shapes[0], self.dim, lambda n: n >= stop, f"at least {stop}")

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return _replace(shapes[0], self.dim, self.size)

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        part = box.with_range(self.dim, box.offsets[self.dim] + self.start, box.sizes[self.dim])
        yield _read(0, part, 0, contiguous_strides(box.sizes))


@dataclass(frozen=True)
class Stack(IndexMap):
    """Tensors of one shape along a new dim."""

    dim: int
    problem = "Tensors cannot be stacked."

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        if self.dim > len(shapes[0]):
            return 0, f"{self.dim} dims or more"
        odd = (number for number, shape in enumerate(shapes) if shape != shapes[0])
        return next(((number, str(shapes[0])) for number in odd), None)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][: self.dim], len(shapes), *shapes[0][self.dim :])

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        strides = contiguous_strides(box.sizes)
        part = Box(_replace(box.offsets, self.dim), _replace(box.sizes, self.dim))
        for index in range(box.sizes[self.dim]):
            offset = index * strides[self.dim]
            yield _read(box.offsets[self.dim] + index, part, offset, _replace(strides, self.dim))


@dataclass(frozen=True)
class Index(IndexMap):
    """The items at one index of a dim; the dim is removed."""

    dim: int
    index: int
    problem = "A tensor is too small for this index."

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        return _misfit_in_dim(shapes[0], self.dim, lambda n: n > self.index, f"at least {self.index + 1}")

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return _replace(shapes[0], self.dim)

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        def with_dim(values: Shape, value: int) -> Shape:
            return (*values[: self.dim], value, *values[self.dim :])

        part = Box(with_dim(box.offsets, self.index), with_dim(box.sizes, 1))
        # The stride 0 is never used, because the dim has one item.
        yield _read(0, part, 0, with_dim(contiguous_strides(box.sizes), 0))


@dataclass(frozen=True)
class Permute(IndexMap):
    """Dims in another order: dim i of the result is dim ``dims[i]`` of the input."""

    dims: Shape
    problem = "Dims cannot be permuted in this way."

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        fits = sorted(self.dims) == list(range(len(shapes[0])))
        return None if fits else (0, f"{len(self.dims)} dims, to be permuted as {self.dims}")

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return tuple(shapes[0][dim] for dim in self.dims)

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        def back(values: Shape) -> Shape:
            return tuple(values[self.dims.index(dim)] for dim in range(len(self.dims)))

        yield _read(0, Box(back(box.offsets), back(box.sizes)), 0, back(contiguous_strides(box.sizes)))


@dataclass(frozen=True)
class Reshape(IndexMap):
    """All items, row-major, in another shape."""

    new: Shape
    problem = "A tensor cannot have this shape."

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        return None if numel_of(self.new) == numel_of(shapes[0]) else (0, str(self.new))

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return self.new

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        start = run_start(self.new, box)
        if start is None:  # not one run of items: split along the first dim of size > 1
            dim = next(d for d, size in enumerate(box.sizes) if size > 1)
            step = contiguous_strides(box.sizes)[dim]
            for index in range(box.sizes[dim]):
                for read in self.reads(shapes, box.with_range(dim, box.offsets[dim] + index, 1)):
                    yield _shifted(read, index * step)
            return
        position = 0
        for part in boxes_of_range(tuple(shapes[0]), start, start + box.numel):
            yield _read(0, part, position, contiguous_strides(part.sizes))
            position += part.numel


@dataclass(frozen=True)
class Interleave(IndexMap):
    """Interleaved items. A dim is cut into ``groups`` equal groups, and each group into ``parts`` equal runs.

    Within each group, the items of the runs are interleaved; ``back=True`` is the inverse::

        groups 1, parts 2:  a0 a1 a2 b0 b1 b2  ->  a0 b0 a1 b1 a2 b2

    With one group per head, this changes rotary halves into rotary pairs.
    """

    dim: int
    groups: int
    parts: int = 2
    back: bool = False
    problem = "A tensor cannot be interleaved."

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        runs, expected = self.groups * self.parts, f"a multiple of {self.groups} x {self.parts}"
        return _misfit_in_dim(shapes[0], self.dim, lambda n: runs > 0 and n % runs == 0, expected)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return tuple(shapes[0])

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        group, strides = shapes[0][self.dim] // self.groups, contiguous_strides(box.sizes)
        start = position = box.offsets[self.dim]
        stop = start + box.sizes[self.dim]
        in_group = self._back_in_group if self.back else self._in_group
        while position < stop:
            inside = position % group
            # All whole groups are read at once. A group of which the box has only some items is read alone.
            size = group - inside if inside or stop - position < group else (stop - position) // group * group
            part = box.with_range(self.dim, position, min(size, stop - position))
            if part.sizes[self.dim] % group == 0:
                reads = iter([self._groups(part, group, strides)])
            else:
                reads = in_group(part, inside, group, strides)
            for read in reads:
                yield _shifted(read, (position - start) * strides[self.dim])
            position += part.sizes[self.dim]

    def _groups(self, box: Box, group: int, strides: Shape) -> Read:
        """Return the read of whole groups: the box of the input at the output's place, with its items reordered."""
        dim, run = self.dim, group // self.parts
        # The input's group is viewed in the shape ``runs``; ``apart`` are the distances of these items in the output.
        runs, apart = ((run, self.parts), (1, run)) if self.back else ((self.parts, run), (1, self.parts))
        sizes = _replace(box.sizes, dim, box.sizes[dim] // group, *runs)
        into = _replace(strides, dim, *(n * strides[dim] for n in (group, *apart)))
        return 0, box, [Copy(sizes, 0, contiguous_strides(sizes), 0, into)]

    def _in_group(self, box: Box, low: int, group: int, strides: Shape) -> Iterator[Read]:
        """Yield the reads of some items of one group, which begin at item ``low`` of the group.

        Only these items are read, because a group may be the whole tensor.
        """
        dim, parts, run = self.dim, self.parts, group // self.parts
        base, high = box.offsets[dim] - low, low + box.sizes[dim]
        for p in range(parts):
            # The items of run p whose output positions are in [low, high).
            first, last = -(-(low - p) // parts), -(-(high - p) // parts)
            if first < last:
                inner = box.with_range(dim, base + p * run + first, last - first)
                offset = (first * parts + p - low) * strides[dim]
                yield _read(0, inner, offset, _replace(strides, dim, parts * strides[dim]))

    def _back_in_group(self, box: Box, low: int, group: int, strides: Shape) -> Iterator[Read]:
        """Yield the read for the inverse of `_in_group`, of at most ``parts`` times the needed items."""
        dim, parts, run = self.dim, self.parts, group // self.parts
        base, high = box.offsets[dim] - low, low + box.sizes[dim]
        # The input is viewed as rows of ``parts`` items. Column p is output run p. If all output items are in one run,
        # only the rows of these items are read, else all rows.
        within_one = low // run == (high - 1) // run
        first, last = (low % run, (high - 1) % run + 1) if within_one else (0, run)
        inner = box.with_range(dim, base + first * parts, (last - first) * parts)
        source_strides = contiguous_strides(inner.sizes)
        copies = []
        for p in range(low // run, (high - 1) // run + 1):
            begin, end = max(low, p * run), min(high, (p + 1) * run)
            source = ((begin - p * run - first) * parts + p) * source_strides[dim]
            along_rows = _replace(source_strides, dim, parts * source_strides[dim])
            sizes = _replace(box.sizes, dim, end - begin)
            copies.append(Copy(sizes, source, along_rows, (begin - low) * strides[dim], strides))
        yield 0, inner, copies


@dataclass(frozen=True)
class Pad(IndexMap):
    """Zeros after the end of a dim, up to ``size``."""

    dim: int
    size: int
    problem = "A tensor is too large to be padded."
    has_gaps = True

    def misfit(self, shapes: Sequence[Shape]) -> tuple[int, str] | None:
        return _misfit_in_dim(shapes[0], self.dim, lambda n: n <= self.size, f"at most {self.size}")

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return _replace(shapes[0], self.dim, self.size)

    def reads(self, shapes: Sequence[Shape], box: Box) -> Iterator[Read]:
        # Number of items that are not padding; 0 or less if the whole box is padding.
        filled = min(box.sizes[self.dim], shapes[0][self.dim] - box.offsets[self.dim])
        if filled > 0:
            part = box.with_range(self.dim, box.offsets[self.dim], filled)
            yield _read(0, part, 0, contiguous_strides(box.sizes))
