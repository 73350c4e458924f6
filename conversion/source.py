"""A checkpoint to read from, whatever its format: its tensors, its other values, and reads of any box.

A `Source` is mostly data (see `tensors.py`): the readers of each format only find out what lies where. One
routine then reads boxes of any format (`box_reading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from vescale_fsdp.conversion.store import Store
from vescale_fsdp.conversion.tensors import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.torch_archive import TorchArchive
from vescale_fsdp.conversion.unpickle import TensorRef
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, explain
from vescale_fsdp.geometry import Box, contiguous_strides

if TYPE_CHECKING:
    import numpy as np

    from vescale_fsdp.layout import GroupLayout

__all__ = ["BoxReader", "Source", "StoredValue"]

BoxReader = Callable[[Box], "np.ndarray"]


class StoredValue(Protocol):
    """A value that is not a tensor, read only when somebody wants it."""

    def __call__(self) -> Any:
        """The value: numbers, strings, lists and dicts."""


@dataclass
class Source:
    """One opened checkpoint.

    Args:
        kind: its format, such as ``"dcp"``.
        store: the folder its files are in.
        tensors: by flattened name, in the order of the format.
        values: everything else, by flattened name.
        paths: where a flattened name sits in the nested state it came from; absent names are at the root.
        trust_pickle: whether pickles may import what they name.
        readers: for tensors whose bytes are not plain in their files, how to read a box (raw items).
        file: name of the one file that is the whole checkpoint; empty for a folder.
        omitted: entries that this package cannot carry over (values that differ per rank).
        layouts: how groups of tensors were sharded, where the format knows.
        facts: lines worth telling people (``inspect`` prints them).
    """

    kind: str
    store: Store
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredValue] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    trust_pickle: bool = False
    readers: Mapping[str, BoxReader] = field(default_factory=dict)
    file: str = ""
    omitted: tuple[str, ...] = ()
    layouts: tuple[GroupLayout, ...] = ()
    _located: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the checkpoint is: the folder, or the file if it is one file."""
        return f"{self.store.url}/{self.file}" if self.file else self.store.url

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.info.nbytes for tensor in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """Changes when files of the source are replaced: their names, sizes and times of change."""
        files = sorted(
            {chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks if chunk.file}
        )
        stamps = [f"{file} {self.store.stamp(file)}" for file in files]
        return xxhash.xxh3_64_hexdigest("\n".join([self.url, *stamps]).encode())

    def info(self, name: str) -> TensorInfo:
        """Name, shape and type of a tensor.

        Raises:
            ConversionError: if there is none of that name.
        """
        if name not in self.tensors:
            raise ConversionError(
                explain(
                    "the source has no such tensor",
                    expected=f"one of {len(self.tensors)} names such as {next(iter(self.tensors), 'none')}",
                    got=name,
                    where=self.url,
                    todo="list the names with: vescale-convert inspect SRC",
                )
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
        from vescale_fsdp.conversion.box_reading import read_box

        read_box(self, self.tensors[name], box, out)

    def locate(self, info: TensorInfo, chunk: StoredChunk) -> tuple[int, tuple[int, ...]]:
        """Byte offset of a chunk's first item in its file, and its strides there."""
        if not chunk.is_archive:
            return chunk.offset, chunk.strides or contiguous_strides(chunk.box.sizes)
        key = (chunk.file, chunk.offset)
        if key not in self._located:
            self._located[key] = self._locate_in_archive(info, chunk)
        return self._located[key]

    def _locate_in_archive(self, info: TensorInfo, chunk: StoredChunk) -> tuple[int, tuple[int, ...]]:
        where = f"tensor {info.name} in {self.store.url}/{chunk.file} at byte {chunk.offset}"
        archive = TorchArchive(
            lambda offset, nbytes: self.store.read(chunk.file, chunk.offset + offset, nbytes),
            chunk.nbytes,
            where=where,
            trust=self.trust_pickle,
        )
        ref = archive.content
        if not isinstance(ref, TensorRef) or ref.shape != chunk.box.sizes or ref.dtype != info.dtype:
            raise CorruptCheckpointError(
                explain(
                    "a data file does not hold what the metadata says",
                    expected=f"a {info.dtype.name} tensor of shape {chunk.box.sizes}",
                    got=f"{ref.dtype.name} {ref.shape}" if isinstance(ref, TensorRef) else type(ref).__name__,
                    where=where,
                    todo="the files are from different saves: copy the checkpoint again as one",
                )
            )
        return chunk.offset + archive.tensor_offset(ref), ref.strides
