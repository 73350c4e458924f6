"""A checkpoint to read from, whatever its format: its tensors, its other values, and reads of any box.

A `Source` is mostly data (see `stored_tensor.py`): the readers of each format only find out what lies where. One
routine then reads boxes of any format (`box_reading.py`), and all reads are compared with the format's checksums
(`verified_reads.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.moves.verified_reads import StripedFile, VerifiedReads
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import hex_checksum_of
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.geometry import Box, run_start

if TYPE_CHECKING:
    import numpy as np

    from vescale_fsdp.layout.group_layout import GroupLayout

BoxReader = Callable[[Box], "np.ndarray"]
StoredValue = Callable[[], Any]
"""Gives a value that is not a tensor: numbers, strings, lists and dicts, read only when somebody wants them."""


class ByteRange(NamedTuple):
    """Bytes of a file that are items of a tensor as they are, one after the other."""

    source: Source
    file: str
    offset: int
    nbytes: int


def constant(value: Any) -> StoredValue:
    """A value that is already read."""
    return lambda: value


class _Interval(NamedTuple):
    """Items [start, stop) of a flattened tensor and where the first of them lies."""

    start: int
    stop: int
    file: str
    offset: int


@dataclass
class Source:
    """One opened checkpoint.

    Args:
        kind: its format, such as ``"dcp"``.
        store: the folder its files are in.
        tensors: by flattened name, in the order of the format.
        values: everything else, by flattened name.
        paths: where a flattened name sits in the nested state it came from; absent names are at the root.
        readers: for tensors whose bytes are not plain in their files, how to read a box (raw items).
        decoded: of tensors whose chunks are decoded whole, how many bytes that holds at a time.
        aliases: names of tensors that are an earlier one, where their bytes are not in files that would show it -> its
            name.
        file: name of the one file that is the whole checkpoint; empty for a folder.
        omitted: entries that this package cannot carry over (values that differ per rank).
        layouts: how groups of tensors were sharded, where the format knows.
        checked: a file's checksums by its name, where the format has them for stripes of whole files; other
            formats have them for ranges of bytes (see `verified_reads`).
        facts: lines worth telling people (``inspect`` prints them).
        file_metadata: ``__metadata__`` of safetensors files, joined; quantised tensors of torchao are described there.
        warnings: what a conversion from here must tell people, since the format leaves it open.
        folder_problems: what loaders of the folder would fail on although every file is good, one text each.
        locate: finds where in its bytes a chunk's items are, where only the file says; None where metadata does.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(2, 3), "step": 7}, "source.pt")
        >>> source = open_source("source.pt")
        >>> source.info("w").shape, source.values["step"]()
        ((2, 3), 7)
    """

    kind: str
    store: Storage
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredValue] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, BoxReader] = field(default_factory=dict)
    decoded: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    omitted: tuple[str, ...] = ()
    layouts: tuple[GroupLayout, ...] = ()
    checked: Callable[[str], StripedFile | None] = lambda _: None
    file_metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    folder_problems: Callable[[], Iterable[str]] = tuple
    locate: Callable[[TensorInfo, StoredChunk], StoredChunk] | None = None
    _located: dict[tuple[str, int], StoredChunk] = field(default_factory=dict)
    _intervals: dict[str, list[_Interval] | None] = field(default_factory=dict)
    reads: VerifiedReads = field(init=False)

    def __post_init__(self) -> None:
        self.reads = VerifiedReads(self.store, self.checked)

    @property
    def url(self) -> str:
        """Where the checkpoint is: the folder, or the file if it is one file."""
        return f"{self.store.where}/{self.file}" if self.file else self.store.where

    @cached_property
    def ties(self) -> dict[str, str]:
        """Names of tensors that are the very bytes of an earlier one -> the name of that."""
        starts: dict[tuple[str, int], str] = {}
        first: dict[object, str] = {}
        found = dict(self.aliases)
        for name, tensor in self.tensors.items():
            if tensor.info.numel and name not in self.readers:
                other = starts.setdefault((tensor.chunks[0].file, tensor.chunks[0].offset), name)
                if other == name:
                    continue  # nearly all
                first.setdefault(self.tensors[other].places, other)
                if (kept := first.setdefault(tensor.places, name)) != name:
                    found[name] = kept
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.info.nbytes for tensor in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """Changes when files of the source are replaced: their names, sizes and times of change."""
        chunks = (chunk for tensor in self.tensors.values() for chunk in tensor.chunks)
        stamps = [
            f"{file} {self.store.required_info(file).stamp}"
            for file in sorted({c.file for c in chunks if c.file})  # a set has another order in each process
        ]
        return hex_checksum_of("\n".join([self.url, *stamps]).encode())

    def require_unchanged(self) -> None:
        """Refuse a source whose files were replaced since its `fingerprint` was taken.

        Raises:
            ConversionError: if they were, or are gone: what was read may be of two checkpoints.
        """
        before = self.__dict__.pop("fingerprint", None)  # the cached value, if it was ever computed
        try:
            is_same = before is None or self.fingerprint == before
        except CorruptCheckpointError:  # a file is gone
            is_same = False
        if not is_same:
            raise ConversionError(
                "The source was changed while it was read.",
                expected="files of the sizes and times of change that they had at the start",
                got="others",
                where=self.url,
                todo="convert again when nobody writes there",
            )

    def info(self, name: str) -> TensorInfo:
        """Name, shape and type of a tensor.

        Raises:
            ConversionError: if there is none of that name.
        """
        if name not in self.tensors:
            raise ConversionError(
                "The source has no such tensor.",
                expected=f"one of {len(self.tensors)} names such as {next(iter(self.tensors), 'none')}",
                got=name,
                where=self.url,
                todo="list the names with: vescale-convert inspect SRC",
            )
        return self.tensors[name].info

    def path(self, name: str) -> tuple[str | int, ...]:
        """Where the entry sits in the nested state."""
        return self.paths.get(name, (name,))

    def read_into(self, name: str, box: Box, out: np.ndarray) -> None:
        """Fill ``out`` (shape ``box.sizes``, raw type of the tensor, any strides) with a box of a tensor.

        Raises:
            CorruptCheckpointError: if files are missing, truncated or not what the metadata says.
        """
        if name in self.readers:
            out[...] = self.readers[name](box).view(out.dtype)
            return
        from vescale_fsdp.checkpoint.moves.box_reading import read_box

        tensor = self.tensors[name]
        read_box(tensor, box, out, lambda chunk: self.located(tensor.info, chunk), self.reads.read)

    def verify(self, name: str) -> None:
        """Read what no thread has read of the ranges with checksums that hold a tensor.

        Raises:
            CorruptCheckpointError: if bytes are not those that were saved.
        """
        info = self.tensors[name].info
        for chunk in self.tensors[name].chunks:
            if chunk.file and (checked := self.located(info, chunk).checked) is not None:
                self.reads.verify_range(checked)

    def byte_ranges(self, name: str, start: int, stop: int) -> list[ByteRange] | None:
        """Where items [start, stop) of the flattened tensor lie, in order; None if they are no runs of bytes.

        Raises:
            CorruptCheckpointError: if a file is not what the metadata says.
        """
        if name not in self._intervals:
            self._intervals[name] = None if name in self.readers else self._find_intervals(self.tensors[name])
        intervals = self._intervals[name]
        if intervals is None:
            return None
        itemsize = self.tensors[name].info.dtype.itemsize
        found = []
        for interval in intervals[max(0, bisect_right(intervals, start, key=lambda i: i.start) - 1) :]:
            if interval.start >= stop:
                break
            low, high = max(start, interval.start), min(stop, interval.stop)
            if low < high:
                offset = interval.offset + (low - interval.start) * itemsize
                found.append(ByteRange(self, interval.file, offset, (high - low) * itemsize))
        return found

    def _find_intervals(self, tensor: StoredTensor) -> list[_Interval] | None:
        found = []
        for chunk in tensor.chunks:
            start = run_start(tensor.info.shape, chunk.box)
            if start is None or not chunk.file:
                return None
            place = self.located(tensor.info, chunk)
            if place.signs or not place.is_row_major:
                return None
            found.append(_Interval(start, start + chunk.box.numel, chunk.file, place.offset))
        return sorted(found)

    def located(self, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
        """The chunk with the place, strides, checksum and flipped bits of its own items.

        Raises:
            CorruptCheckpointError: if what the file has there is not what the metadata says.
        """
        if self.locate is not None and chunk.file:
            key = (chunk.file, chunk.offset)
            if key not in self._located:
                self._located[key] = self.locate(info, chunk)
            chunk = self._located[key]
        if chunk.checked is not None:
            self.reads.add(chunk.checked)
        return chunk
