"""What has been found so far of a training state, as a `Source` wants it: entries by name, and where each sits.

model.NAME    optimizer.state.NAME.exp_avg, .step    optimizer.param_groups.0.lr    global_steps, lr_scheduler ...
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.formats.torch_save.archive_reader import TorchArchive
from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import TensorRef, is_plain
from vescale_fsdp.checkpoint.formats.torch_save.read import (
    HeldTensor,
    is_tensor_ref,
    open_archive,
    stored_tensor,
)
from vescale_fsdp.checkpoint.moves.source import BoxReader, StoredValue, constant
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.geometry import Box, whole_box

if TYPE_CHECKING:
    import numpy as np

_STEP = dtype_from_torch("float32")  # as torch's optimizers count


@dataclass(frozen=True)
class FlatTensor:
    """Items that lie one after the other in a file."""

    dtype: DType
    numel: int
    whole: StoredChunk

    def chunk(self, box: Box, start: int) -> StoredChunk:
        """Items from ``start`` on as a box of a tensor, row-major."""
        size = self.dtype.itemsize
        return replace(
            self.whole,
            box=box,
            offset=self.whole.offset + start * size,
            nbytes=box.numel * size,
            strides=None,
        )


@dataclass(frozen=True)
class OpenedFile:
    """One of a trainer's files, with stand-ins for what is neither tensor nor plain value."""

    store: Storage
    file: str
    archive: TorchArchive

    @classmethod
    def open(cls, store: Storage, file: str) -> OpenedFile:
        """Its directory; the pickle is read when somebody asks."""
        return cls(store, file, open_archive(store, file, stand_ins=True))

    @property
    def where(self) -> str:
        """The file, for messages."""
        return f"{self.store.where}/{self.file}"

    @property
    def content(self) -> Mapping[str, Any]:
        """The dict in it.

        Raises:
            CorruptCheckpointError: if it holds something else.
        """
        found = self.archive.content
        if not isinstance(found, Mapping):
            raise self.damaged("a dict", type(found).__name__)
        return found

    def tensor(self, path: Path, ref: Any) -> StoredTensor:
        """A tensor that is whole in this file."""
        return stored_tensor(name_of(path), [HeldTensor(self.file, self.archive, ref)])

    def flat(self, ref: Any) -> FlatTensor:
        """A flat tensor of this file.

        Raises:
            CorruptCheckpointError: if it is not flat, or its items do not lie one after the other.
        """
        is_flat = isinstance(ref, TensorRef) and len(ref.shape) == 1
        if not is_flat or (ref.shape[0] > 1 and ref.strides != (1,)):
            got = (
                f"shape {ref.shape}, strides {ref.strides}"
                if isinstance(ref, TensorRef)
                else type(ref).__name__
            )
            raise self.damaged("flat tensors of parameters that lie one after the other", got)
        chunk = self.archive.chunk(whole_box(ref.shape), self.file, 0, ref, self.where)
        return FlatTensor(ref.dtype, ref.shape[0], chunk)

    def damaged(self, expected: str, got: object, todo: str | None = None) -> CorruptCheckpointError:
        """This file is not what it should be."""
        return CorruptCheckpointError(
            "A file of this checkpoint does not hold what it should.",
            expected=expected,
            got=got,
            where=self.where,
            todo=todo or "copy the files of all ranks again, of one save",
        )

    def number(self, value: Any) -> object:
        """A scalar as something that can be compared: bytes of a tensor, or the number."""
        if not isinstance(value, TensorRef):
            return value
        chunk = self.archive.chunk(whole_box(()), self.file, 0, value, self.where)
        return self.store.read(self.file, chunk.offset, chunk.nbytes)


@dataclass
class FoundEntries:
    """Entries of a training state."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, StoredValue] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    readers: dict[str, BoxReader] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_tensor(self, path: Path, tensor: StoredTensor) -> None:
        """A tensor, which knows its name."""
        self.tensors[tensor.info.name] = tensor
        self.paths[tensor.info.name] = path

    def add_named(self, path: Path, tensor: StoredTensor) -> None:
        """A tensor under the name of its place."""
        info = TensorInfo(name_of(path), tensor.info.shape, tensor.info.dtype)
        self.add_tensor(path, StoredTensor(info, tensor.chunks))

    def add_step(self, path: Path, value: Any, opened: OpenedFile) -> None:
        """A count that parameters share, as a tensor of its own: tied ones would all be counted up by each parameter's
        update."""
        name = name_of(path)
        if isinstance(value, TensorRef):
            tensor = opened.tensor(path, value)
            data = opened.number(value)
        else:
            info = TensorInfo(name, (), _STEP)
            tensor = StoredTensor(info, (StoredChunk(whole_box(()), "", 0, 0),))
            data = struct.pack("<f", float(value))
        assert isinstance(data, bytes)
        self.add_tensor(path, tensor)
        self.readers[name] = _reader(data, tensor.info)

    def add_all(self, path: Path, value: Any, opened: OpenedFile) -> None:
        """Everything inside a value; what cannot be carried is left out, and said."""
        leaves = flatten({path[-1]: value}, is_tensor_ref)
        for inner, leaf in leaves.items():
            full = (*path[:-1], *inner)
            if is_tensor_ref(leaf):
                self.add_tensor(full, opened.tensor(full, leaf))
            elif is_plain(leaf):
                self.values[name_of(full)] = constant(leaf)
                self.paths[name_of(full)] = full
            else:
                self.omitted.append(name_of(full))


def _reader(data: bytes, info: TensorInfo) -> BoxReader:
    def read(box: Box) -> np.ndarray:
        import numpy as np

        return np.frombuffer(data, info.dtype.raw).reshape(box.sizes)

    return read
