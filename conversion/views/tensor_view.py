"""Tensors as a target wants them: read by box from a source, perhaps changed on the way.

A `TensorView` has a name, a shape and a type of its own, and fills boxes of itself on demand. Views wrap
views, so that a renamed, cast, stacked tensor streams in small parts like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vescale_fsdp.conversion.source.source import ByteRange, Source
from vescale_fsdp.conversion.source.stored_tensor import TensorInfo
from vescale_fsdp.layout.geometry import Box, boxes_of_range

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SourceView", "TensorView", "read_range"]


class TensorView(ABC):
    """A tensor that can be read box by box."""

    @property
    @abstractmethod
    def info(self) -> TensorInfo:
        """Its name, shape and type."""

    @abstractmethod
    def read_into(self, box: Box, out: np.ndarray) -> None:
        """Fill ``out`` (shape ``box.sizes``, raw type, any strides) with a box. Safe from several threads."""

    def byte_ranges(self, start: int, stop: int) -> list[ByteRange] | None:
        """Where items [start, stop) of the flattened tensor lie byte for byte; None if they are computed."""
        return None

    @abstractmethod
    def sources(self) -> Iterator[tuple[Source, str]]:
        """The stored tensors it is made from."""

    @abstractmethod
    def identity(self) -> str:
        """Where its values come from; two runs with equal identities read the same things."""


@dataclass(frozen=True)
class SourceView(TensorView):
    """A tensor of a source under another name."""

    source: Source
    source_name: str
    name: str

    @cached_property
    def info(self) -> TensorInfo:
        found = self.source.info(self.source_name)
        return TensorInfo(self.name, found.shape, found.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        self.source.read_into(self.source_name, box, out)

    def byte_ranges(self, start: int, stop: int) -> list[ByteRange] | None:
        return self.source.byte_ranges(self.source_name, start, stop)

    def sources(self) -> Iterator[tuple[Source, str]]:
        yield self.source, self.source_name

    def identity(self) -> str:
        return f"{self.source.fingerprint} {self.source_name}"


def read_range(view: TensorView, start: int, stop: int, buffer: np.ndarray) -> np.ndarray:
    """Put items [start, stop) of the flattened tensor in ``buffer`` (bytes); returns the part filled."""
    info = view.info
    filled = buffer[: (stop - start) * info.dtype.itemsize]
    items = filled.view(info.dtype.raw)
    position = 0
    for box in boxes_of_range(info.shape, start, stop):
        view.read_into(box, items[position : position + box.numel].reshape(box.sizes))
        position += box.numel
    return filled
