"""`Source`: an open checkpoint of any format, with its tensors and other values; reads any box of a tensor.

A `Source` is mostly data (see `stored_tensor.py`): each format's reader only determines where the bytes of every tensor
are stored. One routine reads boxes of these formats (`box_reading.py`), and its reads are verified with the format's
checksums (`verified_reads.py`). Tensors in `Source.readers` (arrays that must be decoded, live shards) bypass both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.foreign import OpenSource
from vescale_fsdp.checkpoint.manifest.fingerprints import Fingerprint, TensorFingerprint
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import hex_checksum_of
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.engine.verified_reads import StripedFile, VerifiedReads
from vescale_fsdp.errors import (
    ArgumentError,
    ConversionError,
    CorruptCheckpointError,
    DamagedFiles,
    counted,
    format_bytes,
    some,
)
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box, run_start, whole_box
from vescale_fsdp.layout.pictures import layouts_html

if TYPE_CHECKING:
    import numpy as np

    from vescale_fsdp.layout.group_layout import GroupLayout

BoxReader = Callable[[Box], "np.ndarray"]
StoredValue = Callable[[], Any]
"""Returns a value that is not a tensor (number, string, list, dict). The value is read only when this is called."""


def constant(value: Any) -> StoredValue:
    """Return a `StoredValue` for a value that is already in memory."""
    return lambda: value


def check_source(given: object, call: str) -> None:
    """Raise ArgumentError if a value is not a `Source`, such as a path; ``call`` is the right call."""
    if not isinstance(given, Source):
        raise ArgumentError(
            "This is not an opened checkpoint.",
            expected="a Source, as open_source returns it",
            got=repr(given) if isinstance(given, str) else f"a value of type {type(given).__name__}",
            todo=call,
            where="source=..",
        )


_SHOWN = 20  # tensors in a notebook


@dataclass
class Source(OpenSource):
    """One opened checkpoint.

    Args:
        kind: the format, such as ``"dcp"``.
        store: the folder that contains the files.
        tensors: flattened name -> tensor, in the order of the format.
        values: flattened name -> value, for all other entries.
        paths: flattened name -> path in the nested state; names without a path are at the root.
        facts: label -> text, for ``inspect`` to print.
        readers: name -> function that reads a box (raw items), for tensors with encoded bytes, such as compressed
            chunks.
        decoded: name -> bytes of memory that decoding one chunk takes, for tensors whose chunks are decoded whole.
        aliases: name -> earlier name of the same tensor, if equal file locations do not show that.
        file: name of the file, if the checkpoint is a single file; empty for a folder.
        unsupported: names of entries that this package cannot convert (values that differ per rank).
        layouts: the sharding of groups of tensors, if the format stores it.
        checked: returns the stripes and checksums of a file; None if the format has no checksums, or has checksums of
            byte ranges instead (see `verified_reads`).
        file_metadata: ``__metadata__`` of all safetensors files, merged; torchao describes quantized tensors there.
        metadata: the ``metadata`` argument of `save`, of native checkpoints.
        warnings: messages for the user of a conversion, about properties that the format does not store.
        folder_problems: returns the reasons why loaders of this folder would fail although every file is good.
        locate: reads the location of a chunk's items from its file, for formats whose metadata lacks it (the records
            of torch archives); None if the metadata contains all locations.
        sums: name -> byte sums (`vescale_fsdp.byte_sums`) that the save has recorded, as hex.
        unchecked: file of a chunk -> names and sizes of the files that its items are read from; only those that were
            not checked when the checkpoint was opened. See `check_files`.

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
    unsupported: tuple[str, ...] = ()
    layouts: tuple[GroupLayout, ...] = ()
    checked: Callable[[str], StripedFile | None] = lambda _: None
    file_metadata: Mapping[str, str] = field(default_factory=dict)
    metadata: Json = None
    warnings: tuple[str, ...] = ()
    folder_problems: Callable[[], Iterable[str]] = tuple  # `tuple()` returns no problems
    locate: Callable[[TensorInfo, StoredChunk], StoredChunk] | None = None
    sums: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    _located: dict[Extent, StoredChunk] = field(default_factory=dict)
    _runs: dict[str, list[tuple[int, Extent]] | None] = field(default_factory=dict)
    reads: VerifiedReads = field(init=False)

    def __post_init__(self) -> None:
        self.reads = VerifiedReads(self.store, self.checked)

    @classmethod
    def from_readers(
        cls, kind: str, store: Storage, tensors: Mapping[str, tuple[str, tuple[int, ...], BoxReader]]
    ) -> Source:
        """Return a source whose tensors are read by functions, as formats of other packages may.

        Args:
            kind: the format's name.
            store: the folder that contains the files.
            tensors: flattened name -> dtype such as ``"float32"``, shape, and a function that returns the items of a
                box (`box.slices()` indexes an array of the shape) in numpy's dtype, or as unsigned integers of the
                same width.
        """
        infos = {
            name: TensorInfo(name, shape, dtype_from_torch(dtype))
            for name, (dtype, shape, _) in tensors.items()
        }
        stored = {
            name: StoredTensor(info, (StoredChunk(whole_box(info.shape), Extent("", 0, info.nbytes)),))
            for name, info in infos.items()
        }
        return cls(kind, store, stored, readers={name: read for name, (_, _, read) in tensors.items()})

    @property
    def url(self) -> str:
        """The URL of the checkpoint's folder, or of its file if it is a single file."""
        return f"{self.store.where}/{self.file}" if self.file else self.store.where

    @cached_property
    def ties(self) -> dict[str, str]:
        """Name -> earlier name, for tensors that are stored as the same bytes as an earlier tensor."""
        starts: dict[Extent, str] = {}
        first: dict[object, str] = {}
        ties = dict(self.aliases)
        for name, tensor in self.tensors.items():
            # Empty tensors would all be equal. Tensors with a reader have no file location to compare.
            if tensor.info.numel and name not in self.readers:
                other = starts.setdefault(tensor.chunks[0].extent, name)
                if other == name:
                    continue  # a shortcut for almost all tensors: `places` is slower to compare
                first.setdefault(self.tensors[other].places, other)
                if (kept := first.setdefault(tensor.places, name)) != name:
                    ties[name] = kept
        return ties

    @property
    def recorded(self) -> Fingerprint | None:
        """The fingerprint that the save has recorded; None if there is none."""
        if not self.sums:
            return None
        infos = {name: self.tensors[name].info for name in self.sums}
        return Fingerprint(
            {
                name: TensorFingerprint(each.dtype.name, each.shape, self.sums[name])
                for name, each in infos.items()
            }
        )

    def __repr__(self) -> str:
        return f"Source({self.kind} at {self.url}: {counted(len(self.tensors), 'tensor')}, {format_bytes(self.nbytes)})"

    def _repr_html_(self) -> str:
        """Return a table of the tensors and the largest layouts, as a notebook shows them."""
        infos = [tensor.info for tensor in self.tensors.values()]
        shown = [(i.name, i.dtype.name, "x".join(map(str, i.shape)) or "scalar") for i in infos[:_SHOWN]]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        rows = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in shown
        ]
        rows += [f"... {len(infos) - _SHOWN} more tensors"] if len(infos) > _SHOWN else []
        head = f"{self.kind} at {self.url}: {counted(len(infos), 'tensor')}, {format_bytes(self.nbytes)}"
        return f"<pre>{escape(chr(10).join([head, '', *rows]))}</pre>\n{layouts_html(self.layouts)}"

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.info.nbytes for tensor in self.tensors.values())

    @cached_property
    def stored_nbytes(self) -> int:
        """Number of stored bytes of all tensors; see `StoredTensor.stored_nbytes`."""
        return sum(tensor.stored_nbytes for tensor in self.tensors.values())

    @cached_property
    def metadata_digest(self) -> str:
        """A digest of the files' names, sizes and modification times, which changes when a file is replaced."""
        files = {chunk.extent.file for tensor in self.tensors.values() for chunk in tensor.chunks} - {""}
        stamps = []
        for file in sorted(files):  # sorted, because sets differ in order between processes
            # Files that were not checked may be missing.
            info = self.store.info(file) if file in self.unchecked else self.store.required_info(file)
            stamps.append(f"{file} {info.stamp if info else 'missing'}")
        # A path may have bytes that are not UTF-8, which Python keeps as lone surrogates.
        return hex_checksum_of("\n".join([self.url, *stamps]).encode(errors="surrogatepass"))

    def require_unchanged(self) -> None:
        """Check that no file was replaced since `metadata_digest` was computed.

        Raises:
            ConversionError: if a file was replaced or removed. The data that was read may be a mixture of two
                checkpoints then.
        """
        # Clears the cached property, so that it is computed again; None if it was never computed.
        before = self.__dict__.pop("metadata_digest", None)
        try:
            is_same = before is None or self.metadata_digest == before
        except CorruptCheckpointError:  # a file is gone
            is_same = False
        if not is_same:
            raise ConversionError(
                "The source was changed while it was read.",
                expected="the same file sizes and modification times as at the start",
                got="different ones",
                where=self.url,
                todo="convert again when no job writes to the source",
            )

    def check_files(self, names: Iterable[str]) -> None:
        """Check that the files that these tensors are read from exist and have the right sizes.

        Reads nothing if all files were checked when the checkpoint was opened, as they are by default.

        Raises:
            CorruptCheckpointError: if a file is missing or has another size; names the file and its tensors.
        """
        sizes: dict[str, int] = {}
        # File -> the tensors that need it, as keys, so that each is named once.
        tensors: dict[str, dict[str, None]] = {}
        for name in names if self.unchecked else ():
            # A chunk of an empty tensor is read from no file.
            for extent in (chunk.extent for chunk in self.tensors[name].chunks if chunk.extent.nbytes):
                needed = self.unchecked.get(extent.file, {})
                sizes |= needed
                for file in needed:
                    tensors.setdefault(file, {})[name] = None
        damaged = DamagedFiles()
        for file, its_tensors in tensors.items():
            with damaged.noted():
                try:
                    self.store.check_size(file, sizes[file])
                except CorruptCheckpointError as error:
                    raise CorruptCheckpointError(
                        error.problem,
                        expected=error.expected,
                        got=f"{error.got}; the file is needed for {some(its_tensors)}",
                        where=error.where,
                    ) from error
        damaged.raise_any()

    def info(self, name: str) -> TensorInfo:
        """Return name, shape and dtype of a tensor.

        Raises:
            ConversionError: if the source has no tensor of this name.
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
        """Return the path of an entry in the nested state."""
        return self.paths.get(name, (name,))

    def read_into(self, name: str, box: Box, out: np.ndarray) -> None:
        """Read a box of a tensor into ``out`` (shape ``box.sizes``, raw dtype of the tensor, any strides).

        Raises:
            CorruptCheckpointError: if files are missing, truncated or do not match the metadata.
        """
        if name in self.readers:
            out[...] = self.readers[name](box).view(out.dtype)
            return
        from vescale_fsdp.conversion.engine.box_reading import read_box  # imported late: it imports numpy

        tensor = self.tensors[name]
        read_box(tensor, box, out, lambda chunk: self.located(tensor.info, chunk), self.reads.read)

    def verify(self, name: str) -> None:
        """Verify every byte range that has a checksum and overlaps a tensor's chunks. Bytes not read yet are read.

        Raises:
            CorruptCheckpointError: if a checksum does not match.
        """
        info = self.tensors[name].info
        for chunk in self.tensors[name].chunks:
            if chunk.extent.file and (checked := self.located(info, chunk).checked) is not None:
                self.reads.verify_range(checked)

    def extents(self, name: str, start: int, stop: int) -> list[Extent] | None:
        """Return the extents that store items [start, stop) of the flattened tensor, in order.

        None: some chunk is not a contiguous run of the flattened tensor, or its bytes must be decoded.

        Raises:
            CorruptCheckpointError: if a file does not match the metadata.
        """
        if name not in self._runs:
            self._runs[name] = None if name in self.readers else self._find_runs(self.tensors[name])
        runs = self._runs[name]
        if runs is None:
            return None
        itemsize = self.tensors[name].info.dtype.itemsize
        extents = []
        # From the last run that begins at or before `start`.
        for first, extent in runs[max(0, bisect_right(runs, start, key=itemgetter(0)) - 1) :]:
            if first >= stop:
                break
            part = extent.part((start - first) * itemsize, (stop - first) * itemsize)
            if part.nbytes:
                extents.append(part)
        return extents

    def _find_runs(self, tensor: StoredTensor) -> list[tuple[int, Extent]] | None:
        """Return the first item and the extent of each chunk, in order of the flattened tensor.

        None: a chunk is not a contiguous run of the flattened tensor.
        """
        runs, itemsize = [], tensor.info.dtype.itemsize
        for chunk in tensor.chunks:
            start = run_start(tensor.info.shape, chunk.box)
            if start is None or not chunk.extent.file:  # zeros without a file have no bytes to copy
                return None
            located = self.located(tensor.info, chunk)
            if located.signs or not located.is_row_major:
                return None
            # A chunk at the edge of a zarr array is stored with padding.
            runs.append((start, located.extent.part(0, chunk.box.numel * itemsize)))
        return sorted(runs)

    def located(self, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
        """Return the chunk with the offset, strides, checksum and inverted bits of its items; see `locate`.

        Raises:
            CorruptCheckpointError: if the file does not match the metadata.
        """
        if self.locate is not None and chunk.extent.file:
            if chunk.extent not in self._located:  # a location costs a read of the file, so it is kept
                self._located[chunk.extent] = self.locate(info, chunk)
            chunk = self._located[chunk.extent]
        if chunk.checked is not None:
            self.reads.add(chunk.checked)
        return chunk
