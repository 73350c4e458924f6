"""What a conversion is going to write, whatever the target format: planned from metadata, before a byte moves.

A plan is data files (tensors and the bytes around them) and closing files (settings, index, manifest), in the order
they are published: the file that makes the folder a checkpoint comes last. A data file is a row of contents whose
sizes are known beforehand: fixed bytes, tensors, and bytes that are computed from checksums of tensors before them
(zip directories need those). Where every byte goes follows from the sizes, so contents are written in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.checkpoint.storage.base import FileWriter
from vescale_fsdp.checkpoint.storage.checksums import RunningDigest

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.storage.checksums import Crc

Written = Callable[[str, int, int], bytes]
"""Bytes of a data file of the plan by its name, offset and number, once it is written."""


CrcOf = Callable[[int], int]
"""The CRC of a tensor by its index among the contents of its file."""


class FixedBytes(NamedTuple):  # these three are made a hundred thousand times
    """Bytes known beforehand."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return len(self.data)


class TensorItems(NamedTuple):
    """Items [start, stop) of a flattened tensor."""

    view: TensorView
    start: int
    stop: int
    crc: Crc | None = None  # to be known to computed bytes

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return (self.stop - self.start) * self.view.info.dtype.itemsize


class ComputedBytes(NamedTuple):
    """Bytes made from the CRCs of tensors before them."""

    nbytes: int
    make: Callable[[CrcOf], bytes]


Content = FixedBytes | TensorItems | ComputedBytes


def whole(view: TensorView) -> TensorItems:
    """All of a tensor."""
    return TensorItems(view, 0, view.info.numel)


@dataclass(frozen=True)
class FilePlan:
    """One data file: its name and its contents, front to back.

    Args:
        stretch_bytes: if not 0, the file is written in runs of so many bytes, each from front to back (see
            `stretches`); its last content alone is computed.
    """

    name: str
    contents: tuple[Content, ...]
    stretch_bytes: int = 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of every content."""
        # The last sum is the size of the file.
        return tuple(accumulate((content.nbytes for content in self.contents), initial=0))[:-1]

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return sum(content.nbytes for content in self.contents)

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of tensors in the file."""
        return sum(items.nbytes for _, items in self.tensors)

    @property
    def tensors(self) -> Iterator[tuple[int, TensorItems]]:
        """(index, content) of the contents that are tensors."""
        return ((i, items) for i, items in enumerate(self.contents) if isinstance(items, TensorItems))

    @cached_property
    def is_moved(self) -> bool:
        """Whether all its tensors are bytes of the source as they are."""
        return all(items.view.byte_ranges(items.start, items.stop) is not None for _, items in self.tensors)

    def tensor(self, index: int) -> TensorItems:
        """Content number ``index``, which is a tensor."""
        items = self.contents[index]
        assert isinstance(items, TensorItems), f"content {index} of {self.name} is no tensor"
        return items


@dataclass(frozen=True, slots=True)
class ClosingFile:
    """A small file written after all tensors."""

    name: str
    pieces: Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class OutputPlan:
    """Everything a conversion writes.

    Args:
        kind: the target format.
        files: data files.
        closing: small files, the decisive one last.
        is_stale: whether an old file in the target must go when this plan is published.
        wrap: put around each output file.
        single_file: the target is this one file rather than a folder.
        when_written: called when all data files are written, in whatever run or process, before the closing files are
            made.
    """

    kind: str
    files: tuple[FilePlan, ...]
    closing: tuple[ClosingFile, ...]
    is_stale: Callable[[str], bool]
    single_file: bool = False
    wrap: Callable[[str, FileWriter], FileWriter] | None = None
    when_written: Callable[[Written], None] = lambda _: None

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(file.tensor_nbytes for file in self.files)

    def fingerprint(self) -> str:
        """Equal for equal plans: names, sizes and contents of all files, as far as metadata tells."""
        digest = RunningDigest(self.kind.encode())
        for file in self.files:
            digest.update(f"\n{file.name} {file.nbytes}".encode())
            for _, items in file.tensors:
                info = items.view.info
                place = f"{info.name} {info.shape} {info.dtype.name} {items.start} {items.stop}"
                digest.update(f"\n {place} {items.view.identity()}".encode())
        for closing in self.closing:
            digest.update(f"\n{closing.name}".encode())
        return digest.hexdigest()
