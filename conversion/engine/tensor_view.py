"""`TensorView`: a tensor in the form that a target needs; reads from a source box by box, and changes what it reads.

A `TensorView` has its own name, shape and dtype, and reads any of its boxes on demand. Views wrap other views. A
renamed, cast or stacked tensor can therefore be streamed in small parts like a stored tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box, boxes_of_range, contiguous_strides
from vescale_fsdp.layout.index_maps import IndexMap, Reshape, Slice

if TYPE_CHECKING:
    import numpy as np

_SCRATCH_BUFFERS = (
    3  # for items that are computed: what is read, intermediate values, and the values of the result
)


class TensorView(ABC):
    """A tensor that can be read box by box."""

    __slots__ = ()  # without this, subclasses with slots would have a dict too: there may be 100,000 views

    @property
    @abstractmethod
    def info(self) -> TensorInfo:
        """The view's name, shape and dtype."""

    @abstractmethod
    def read_into(self, box: Box, out: np.ndarray) -> None:
        """Read a box into ``out``: shape ``box.sizes``, the view's raw dtype, any strides. Thread-safe."""

    def extents(self, start: int, stop: int) -> tuple[Source, list[Extent]] | None:
        """Return the extents that store items [start, stop) of the flattened tensor, and their source.

        None: items must be computed, or are not contiguous in files.
        """
        return None

    def read(self, box: Box) -> np.ndarray:
        """Return a box as a new array of the view's raw dtype."""
        import numpy as np

        out = np.empty(box.sizes, dtype=self.info.dtype.raw)
        self.read_into(box, out)
        return out

    @property
    def operands(self) -> tuple[TensorView, ...]:
        """The views that this view reads; none unless a subclass says so."""
        return ()

    def sources(self) -> Iterator[tuple[Source, str]]:
        """Return (source, name) of each stored tensor that the view reads."""
        return chain.from_iterable(view.sources() for view in self.operands)

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        """Return the boxes of stored tensors that a box of the view is read from; a box may occur twice.

        By default, the view reads the same box of each operand.
        """
        return chain.from_iterable(view.parts(box) for view in self.operands)

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        """Return this view without casts, with each stored tensor replaced by the result of ``leaf``."""
        assert not self.operands, f"{type(self).__name__} must define `over`"
        return self

    @property
    def stored(self) -> SourceView | None:
        """The stored tensor whose items this view only renames or casts; None if there is no such tensor."""
        return None

    @property
    def recorded_sums(self) -> str | None:
        """The byte sums that the save has recorded of these items in this order, as hex; None if unknown."""
        return None

    @property
    def overflows(self) -> int:
        """Number of finite values, among those read so far, that a cast has turned into infinities."""
        return sum(view.overflows for view in self.operands)

    @property
    def scratch_buffers(self) -> int:
        """Upper limit for the memory that a read takes besides its result, in multiples of the result's bytes."""
        return max([_SCRATCH_BUFFERS, *(view.scratch_buffers for view in self.operands)])

    def as_dtype(self, dtype: DType) -> TensorView | None:
        """Return this view with values that are rounded to ``dtype`` where they are computed; None if it cannot.

        A cast of the view's own values would round them twice.
        """
        return None

    @abstractmethod
    def identity(self) -> str:
        """Return text that identifies the values: views with equal texts have equal values, also in different runs."""

    @property
    def sameness(self) -> Hashable:
        """A key that is equal for views of the same tensor under any names; valid only within one process."""
        return self.info.shape, self.info.dtype, self.identity()


@dataclass(frozen=True, slots=True)
class SourceView(TensorView):
    """A stored tensor of a source, under a name that may be new."""

    source: Source
    source_name: str
    name: str

    info: TensorInfo = field(init=False, compare=False)

    def __post_init__(self) -> None:
        found = self.source.info(self.source_name)
        if found.name != self.name:
            found = TensorInfo(self.name, found.shape, found.dtype)
        object.__setattr__(self, "info", found)  # the class is frozen

    def read_into(self, box: Box, out: np.ndarray) -> None:
        self.source.read_into(self.source_name, box, out)

    def extents(self, start: int, stop: int) -> tuple[Source, list[Extent]] | None:
        found = self.source.extents(self.source_name, start, stop)
        return None if found is None else (self.source, found)

    def sources(self) -> Iterator[tuple[Source, str]]:
        yield self.source, self.source_name

    @property
    def scratch_buffers(self) -> int:
        return 1  # if the items are not contiguous in the file

    @property
    def recorded_sums(self) -> str | None:
        return self.source.sums.get(self.source_name)

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        yield self, box

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return leaf(self)

    @property
    def stored(self) -> SourceView | None:
        return self

    @property
    def sameness(self) -> Hashable:
        # By id: `metadata_digest`, which `identity` uses, reads the metadata of every file.
        return id(self.source), self.source.ties.get(self.source_name, self.source_name)

    def identity(self) -> str:
        name = self.source.ties.get(self.source_name, self.source_name)  # equal for tied tensors
        return f"{self.source.metadata_digest} {name}"


@dataclass(frozen=True)
class MappedView(TensorView):
    """A tensor with the items of its inputs at other positions (concatenated, sliced, reshaped, ..).

    Its name is the name of the first input.

    Raises:
        ConversionError: if the shapes or dtypes of the inputs do not match the map.
    """

    map: IndexMap
    inputs: tuple[TensorView, ...]

    def __post_init__(self) -> None:
        first = self.inputs[0].info
        odd = next((view.info for view in self.inputs if view.info.dtype != first.dtype), None)
        if odd is not None:
            raise self._refused(odd, f"{first.dtype.name}, the dtype of {first.name}", odd.dtype.name)
        if (misfit := self.map.misfit(self._shapes)) is not None:
            number, expected = misfit
            raise self._refused(self.inputs[number].info, expected, self._shapes[number])
        if first.dtype.is_packed and isinstance(self.map, Reshape):  # the last dim counts bytes, not elements
            raise self._refused(first, "a dtype with whole bytes per element", first.dtype.name)

    def _refused(self, info: TensorInfo, expected: object, got: object) -> ConversionError:
        """Return the error for an input that does not match the map."""
        return ConversionError(
            self.map.problem,
            expected=expected,
            got=got,
            where=f"tensor {info.name} of shape {info.shape}",
            todo="correct the sizes in the key rules, or pass the config.json of this model",
        )

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(view.info.shape for view in self.inputs)

    @cached_property
    def info(self) -> TensorInfo:
        first = self.inputs[0].info
        return TensorInfo(first.name, self.map.shape(self._shapes), first.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        if not box.numel:
            return
        # Copies are into a row-major array, so any other `out` is filled through a copy.
        flat = (out if out.flags.c_contiguous else np.empty(box.sizes, dtype=out.dtype)).reshape(-1)
        if self.map.has_gaps:  # items that no input provides are zeros
            flat[...] = np.zeros((), dtype=out.dtype)
        for number, part, copies in self.map.reads(self._shapes, box):
            first = copies[0]
            # Items that all go to the output box in their order are read to their final position, without a copy.
            if first.sizes == part.sizes and first.source_strides == contiguous_strides(part.sizes):
                into = _strided(flat, part.sizes, first.target, first.target_strides)
                self.inputs[number].read_into(part, into)
                continue
            scratch = self.inputs[number].read(part).reshape(-1)
            for copy in copies:
                values = _strided(scratch, copy.sizes, copy.source, copy.source_strides)
                _strided(flat, copy.sizes, copy.target, copy.target_strides)[...] = values
        if not out.flags.c_contiguous:
            out[...] = flat.reshape(box.sizes)

    @property
    def operands(self) -> tuple[TensorView, ...]:
        return self.inputs

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        reads = self.map.reads(self._shapes, box) if box.numel else ()
        for number, part in dict.fromkeys((number, part) for number, part, _ in reads):  # each box once
            yield from self.inputs[number].parts(part)

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return MappedView(self.map, tuple(view.over(leaf) for view in self.inputs))

    def identity(self) -> str:
        return f"{self.map!r}({', '.join(view.identity() for view in self.inputs)})"


def _strided(flat: np.ndarray, sizes: Sequence[int], start: int, strides: Sequence[int]) -> np.ndarray:
    """Return a strided view of a 1D array; ``start`` and ``strides`` count items."""
    from numpy.lib.stride_tricks import as_strided

    return as_strided(flat[start:], sizes, [n * flat.itemsize for n in strides])


@dataclass(frozen=True)
class WrapperView(TensorView):
    """Base of views with the items of one other view at the same positions."""

    inner: TensorView

    @property
    def operands(self) -> tuple[TensorView, ...]:
        return (self.inner,)

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return self.inner.over(leaf)

    @property
    def stored(self) -> SourceView | None:
        return self.inner.stored


@dataclass(frozen=True)
class RenamedView(WrapperView):
    """A view under a new name."""

    name: str

    @cached_property
    def info(self) -> TensorInfo:
        return TensorInfo(self.name, self.inner.info.shape, self.inner.info.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        self.inner.read_into(box, out)

    def as_dtype(self, dtype: DType) -> TensorView | None:
        made = self.inner.as_dtype(dtype)
        return None if made is None else RenamedView(made, self.name)

    @property
    def recorded_sums(self) -> str | None:
        return self.inner.recorded_sums

    @property
    def sameness(self) -> Hashable:
        return self.inner.sameness

    def identity(self) -> str:
        return self.inner.identity()


@dataclass(frozen=True)
class ZerosView(TensorView):
    """A tensor of zeros, which reads no stored tensor."""

    made: TensorInfo

    @property
    def info(self) -> TensorInfo:
        return self.made

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        out[...] = np.zeros((), dtype=out.dtype)

    def identity(self) -> str:
        return f"zeros({self.made.shape})"


def read_range(view: TensorView, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
    """Read items [start, stop) of the flattened tensor into ``buffer``, an array of bytes; returns the filled part.

    Without a buffer, a new array is filled.
    """
    import numpy as np

    info = view.info
    nbytes = (stop - start) * info.dtype.itemsize
    filled = np.empty(nbytes, dtype=np.uint8) if buffer is None else buffer[:nbytes]
    items = filled.view(info.dtype.raw)
    position = 0
    for box in boxes_of_range(info.shape, start, stop):
        view.read_into(box, items[position : position + box.numel].reshape(box.sizes))
        position += box.numel
    return filled


def pieces_of(view: TensorView, nbytes: int, step: int | None = None) -> Iterator[np.ndarray]:
    """Read all items of a tensor in order; yields pieces of one reused buffer, each valid until the next piece.

    Args:
        nbytes: size of the buffer.
        step: number of items per piece; None for as many as the buffer can contain.
    """
    import numpy as np

    info = view.info
    buffer, step = np.empty(min(nbytes, info.nbytes), dtype=np.uint8), step or nbytes // info.dtype.itemsize
    for start in range(0, info.numel, step):
        yield read_range(view, start, min(start + step, info.numel), buffer)


def repeated_dims(view: TensorView) -> tuple[int, ...]:
    """Return the dims along which a stride of zero repeats stored items, as after ``tensor.expand``."""
    stored = view.stored
    # Computed or decoded items have no strides.
    if stored is None or stored.source_name in stored.source.readers:
        return ()
    chunks = stored.source.tensors[stored.source_name].chunks
    # Several chunks may have different strides; zeros without a file have none.
    if len(chunks) != 1 or not chunks[0].extent.file or chunks[0].box.sizes != view.info.shape:
        return ()
    steps = zip(view.info.shape, chunks[0].steps, strict=True)
    return tuple(dim for dim, (size, stride) in enumerate(steps) if size > 1 and not stride)


def without_repeats(view: TensorView, dims: Iterable[int]) -> TensorView:
    """Return the tensor reduced to index 0 in each of these dims, which get a size of 1."""
    for dim in dims:
        view = MappedView(Slice(dim, 0, 1), (view,))
    return view
