"""What one output file consists of: a row of parts whose sizes are known before anything is written.

Fixed bytes, tensors, and bytes that are computed from checksums of tensors before them (zip directories need
those). Where every byte goes follows from the sizes, so parts can be written in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vescale_fsdp.conversion.views.tensor_view import TensorView

if TYPE_CHECKING:
    from vescale_fsdp.conversion.source.crc import Crc

__all__ = ["ComputedPart", "FilePlan", "FixedPart", "Part", "TensorPart", "whole"]


@dataclass(frozen=True)
class FixedPart:
    """Bytes known beforehand."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return len(self.data)


@dataclass(frozen=True)
class TensorPart:
    """Items [start, stop) of a flattened tensor."""

    view: TensorView
    start: int
    stop: int
    crc: Crc | None = None  # to be known to computed parts

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return (self.stop - self.start) * self.view.info.dtype.itemsize


@dataclass(frozen=True)
class ComputedPart:
    """Bytes made from the CRCs of tensor parts before it, keyed by their index in the file."""

    nbytes: int
    make: Callable[[dict[int, int]], bytes]


Part = FixedPart | TensorPart | ComputedPart


def whole(view: TensorView) -> TensorPart:
    """The part that is all of a tensor."""
    return TensorPart(view, 0, view.info.numel)


@dataclass(frozen=True)
class FilePlan:
    """One output file: its name and its parts, front to back."""

    name: str
    parts: tuple[Part, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of every part."""
        found, position = [], 0
        for part in self.parts:
            found.append(position)
            position += part.nbytes
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes of tensors in the file."""
        return sum(part.nbytes for part in self.parts if isinstance(part, TensorPart))

    def tensor(self, index: int) -> TensorPart:
        """Part number ``index``, which is a tensor."""
        part = self.parts[index]
        assert isinstance(part, TensorPart), f"part {index} of {self.name} is no tensor"
        return part
