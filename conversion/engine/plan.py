"""The output plan of a conversion, for any target format. It is made from metadata, before any tensor is read.

A plan consists of data files (tensors and the bytes around them) and closing files (settings, index, manifest). Files
are published in this order, and the file that makes the folder a checkpoint comes last. A data file is a sequence of
contents of known sizes: fixed bytes, tensors, and bytes that are computed from the checksums of preceding tensors (for
zip directories). The sizes determine all offsets, so contents can be written in any order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.checkpoint.storage.base import FileWriter
from vescale_fsdp.checkpoint.storage.checksums import RunningDigest
from vescale_fsdp.conversion.engine.tensor_view import TensorView

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.storage.checksums import Crc

Written = Callable[[str, int, int], bytes]
"""Returns bytes of a written data file, by file name, offset and number of bytes."""


CrcOf = Callable[[int], int]
"""Returns the CRC of a tensor, by its index in the contents of its file."""


class FixedBytes(NamedTuple):  # NamedTuples, because a plan may have a hundred thousand contents
    """Bytes that are known when the plan is made."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return len(self.data)


class TensorItems(NamedTuple):
    """A range of a view: items [start, stop) of the flattened tensor, as a file contains them."""

    view: TensorView
    start: int
    stop: int
    crc: Crc | None = None  # the kind of CRC that `ComputedBytes` of this file need; None if they need no CRC

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return (self.stop - self.start) * self.view.info.dtype.itemsize


class ComputedBytes(NamedTuple):
    """Bytes that are computed from the CRCs of preceding tensors in the file."""

    nbytes: int
    make: Callable[[CrcOf], bytes]  # returns `nbytes` bytes


Content = FixedBytes | TensorItems | ComputedBytes


def whole(view: TensorView) -> TensorItems:
    """Return the content that consists of all items of a tensor."""
    return TensorItems(view, 0, view.info.numel)


@dataclass(frozen=True)
class FilePlan:
    """One data file.

    Args:
        name: the file's name.
        contents: the file's contents, front to back.
        stretch_bytes: if not 0, the file is written in ranges of this many bytes, each front to back (see
            `copy_jobs`). Only the last content of such a file may be `ComputedBytes`.
    """

    name: str
    contents: tuple[Content, ...]
    stretch_bytes: int = 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each content in the file."""
        # The last sum is the size of the file, not an offset.
        return tuple(accumulate((content.nbytes for content in self.contents), initial=0))[:-1]

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return sum(content.nbytes for content in self.contents)

    @property
    def tensor_nbytes(self) -> int:
        """Number of tensor bytes in the file."""
        return sum(items.nbytes for _, items in self.tensors)

    @property
    def tensors(self) -> Iterator[tuple[int, TensorItems]]:
        """Index and content of each tensor in the file."""
        return ((i, items) for i, items in enumerate(self.contents) if isinstance(items, TensorItems))

    @cached_property
    def is_moved(self) -> bool:
        """Whether all tensors in the file are unchanged bytes of the source."""
        return all(items.view.extents(items.start, items.stop) is not None for _, items in self.tensors)

    def items(self) -> Iterator[TensorItems]:
        """Return the contents that are tensors, in order."""
        return (items for _, items in self.tensors)

    def planned(self) -> FilePlan:
        """Return this plan; see `DeferredFile`."""
        return self

    def content_at(self, offset: int) -> int:
        """Return the index of the content that has the byte at ``offset``."""
        return (
            bisect_right(self.offsets, offset) - 1
        )  # of contents that begin there, the last: others are empty

    def tensor(self, index: int) -> TensorItems:
        """Return content number ``index``, which must be a tensor."""
        items = self.contents[index]
        assert isinstance(items, TensorItems), f"content {index} of {self.name} is not a tensor"
        return items


@dataclass(frozen=True, slots=True)
class DeferredFile:
    """A data file whose contents are planned anew for each use.

    The files of many ranks together have very many contents: of every tensor, a piece in nearly every file. In memory
    at the same time, they would take more than the copy's buffers.

    Args:
        name: the file's name.
        nbytes: size of the file in bytes.
        tensor_nbytes: number of tensor bytes in the file.
        items: returns the contents that are tensors, in order; takes less time than ``planned``.
        planned: plans the contents. Callers keep the result while they use it, because planning takes time.
    """

    name: str
    nbytes: int
    tensor_nbytes: int
    items: Callable[[], Iterable[TensorItems]]
    planned: Callable[[], FilePlan]


DataFile = FilePlan | DeferredFile


@dataclass(frozen=True, slots=True)
class ClosingFile:
    """A small file written after all tensors."""

    name: str
    pieces: Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class OutputPlan:
    """All output of a conversion.

    Args:
        kind: the target format.
        files: data files.
        closing: small files; the one that makes the folder a checkpoint comes last.
        is_stale: returns whether to remove an old file of this name from the target when the result is published.
        single_file: whether the target is a single file rather than a folder.
        wrap: takes the name and the plain writer of an output file, and returns the writer to use. None: the plain one.
        when_written: called when all data files are complete, whichever processes wrote them, and before closing files
            are created.
    """

    kind: str
    files: tuple[DataFile, ...]
    closing: tuple[ClosingFile, ...]
    is_stale: Callable[[str], bool]
    single_file: bool = False
    wrap: Callable[[str, FileWriter], FileWriter] | None = None
    when_written: Callable[[Written], None] = lambda _: None

    @cached_property
    def tensor_nbytes(self) -> int:
        """Number of tensor bytes in all files."""
        return sum(file.tensor_nbytes for file in self.files)

    def digest(self) -> str:
        """Return a digest of the names, sizes and contents of all files, from metadata. Equal plans have equal digests.

        A resumed run compares it with the digest in the journal.
        """
        digest = RunningDigest(self.kind.encode())
        for file in self.files:
            # The file of a single-file target has the target's name, whose bytes need not be UTF-8.
            digest.update(f"\n{file.name} {file.nbytes}".encode(errors="surrogatepass"))
            for items in file.items():
                info = items.view.info
                part = f"{info.name} {info.shape} {info.dtype.name} {items.start} {items.stop}"
                digest.update(f"\n {part} {items.view.identity()}".encode())
        for closing in self.closing:
            digest.update(f"\n{closing.name}".encode())
        return digest.hexdigest()
