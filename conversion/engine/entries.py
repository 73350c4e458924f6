"""`Entries`: collects the tensors and values of a checkpoint that is being opened, and creates its `Source`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.source import BoxReader, Source, StoredValue, constant
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo


@dataclass
class Entries:
    """Tensors and other values by flattened name; the fields are those of `Source`."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, StoredValue] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    readers: dict[str, BoxReader] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_tensor(self, path: Path, tensor: StoredTensor, reader: BoxReader | None = None) -> None:
        """Add a tensor.

        Args:
            path: keys in the nested state; the tensor's name is the flattened path.
            reader: reads the tensor if its bytes are not stored plainly in a file, for example compressed.
        """
        name = tensor.info.name
        self.tensors[name], self.paths[name] = tensor, path
        if reader is not None:
            self.readers[name] = reader

    def add_value(self, path: Path, value: Any) -> None:
        """Add a value that is not a tensor."""
        name = name_of(path)
        self.values[name], self.paths[name] = constant(value), path

    def update(self, other: Entries) -> None:
        """Add the entries of another `Entries`; they replace entries of the same names."""
        self.tensors |= other.tensors
        self.values |= other.values
        self.paths |= other.paths
        self.readers |= other.readers
        self.decoded |= other.decoded
        self.unsupported += other.unsupported
        self.warnings += other.warnings

    def source(
        self,
        kind: str,
        store: Storage,
        facts: Mapping[str, str] | None = None,
        *,
        file: str = "",
        locate: Callable[[TensorInfo, StoredChunk], StoredChunk] | None = None,
    ) -> Source:
        """Return a `Source` with these entries; the arguments are those of `Source`."""
        return Source(
            kind,
            store,
            self.tensors,
            self.values,
            self.paths,
            facts or {},
            self.readers,
            self.decoded,
            file=file,
            unsupported=tuple(self.unsupported),
            warnings=tuple(self.warnings),
            locate=locate,
        )
