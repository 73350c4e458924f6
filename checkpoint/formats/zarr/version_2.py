"""Arrays of zarr version 2, as Orbax and older tools write them: ``.zarray`` beside the chunks.

Chunks of plain bytes are read by range like any other file. Compressed ones are decoded whole, one per thread at a
time, by the codecs that the zarr library stands on: it cannot read the types that JAX adds (bfloat16, float8), whose
bytes are all that is wanted here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from typing import Any

import numpy as np

from vescale_fsdp.checkpoint.formats.zarr.arrays import chunk_file_name, stored_array
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, clipped
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType, dtype_from_numpy, dtype_from_torch
from vescale_fsdp.layout.foreign_json import whole_numbers
from vescale_fsdp.layout.geometry import Box

ARRAY_FILE = ".zarray"
GROUP_FILE = ".zgroup"
# numcodecs knows more, one of which runs pickles.
_CODECS = {"blosc", "bz2", "gzip", "lz4", "lzma", "shuffle", "zlib", "zstd"}


class LastChunk(threading.local):
    """What a thread decoded last, of whichever array: neighbours in a chunk are wanted one after the other."""

    file: str = ""
    values: np.ndarray | None = None


class Array2:
    """One array.

    Args:
        store: where it is.
        node: its folder.
        metadata: what ``.zarray`` says.
        name: of the tensor.
        last: shared by the arrays of a source.

    Raises:
        ValueError: if its metadata is not of this version, or names codecs or types that are not known.
    """

    def __init__(
        self, store: Storage, node: str, metadata: dict[str, Any], name: str, last: LastChunk
    ) -> None:
        if metadata["zarr_format"] != 2:
            raise ValueError(f"zarr_format is not 2 but {metadata['zarr_format']!r:.60}")
        self._store, self._node = store, node
        self._order = str(metadata["order"])
        self._is_swapped, dtype = _dtype(metadata["dtype"])
        self.info = TensorInfo(name, whole_numbers(metadata["shape"]), dtype)
        self._chunk = whole_numbers(metadata["chunks"], len(self.info.shape))
        self._codecs = [c for c in (*(metadata.get("filters") or ()), metadata.get("compressor")) if c]
        self._separator = str(metadata.get("dimension_separator") or ".")
        if unknown := {str(codec["id"]) for codec in self._codecs} - _CODECS:
            raise ValueError(f"codec {min(unknown)}")
        if metadata.get("fill_value") not in (None, 0, False):
            raise ValueError(f"fill value {metadata['fill_value']!r:.60}")
        if 0 in self._chunk:
            raise ValueError(f"chunks of shape {self._chunk}")
        self._last = last

    @property
    def is_plain(self) -> bool:
        """Whether chunk files are the items' bytes, row-major."""
        return not self._codecs and self._order == "C" and not self._is_swapped

    def stored(self, files: Collection[str]) -> StoredTensor:
        """Chunks of a plain array; one nominal chunk of an array that is decoded."""
        return stored_array(
            self._store, self.info, self._chunk, self._node, files, self._file, is_plain=self.is_plain
        )

    @property
    def _chunk_bytes(self) -> int:
        return math.prod(self._chunk) * self.info.dtype.itemsize

    @property
    def decoded_bytes(self) -> int:
        """What decoding holds: a chunk as it is stored, and as it is after each of its codecs."""
        return (1 + max(1, len(self._codecs)) + self._is_swapped) * self._chunk_bytes

    def _file(self, chunk: Box) -> str:
        return chunk_file_name(self._node, self._separator, (), chunk)

    def read(self, box: Box) -> np.ndarray:
        """A box of a decoded array, as raw bits.

        Raises:
            CorruptCheckpointError: if a chunk is not what its codecs wrote.
        """
        out = np.zeros(box.sizes, dtype=self.info.dtype.raw)
        for chunk in chunk_boxes(self.info.shape, self._chunk, box):
            part = clipped(chunk, self.info.shape).intersect(box)
            if part is not None and (values := self._decoded(chunk)) is not None:
                out[part.slices(box.offsets)] = values[part.slices(chunk.offsets)]
        return out

    def _decoded(self, chunk: Box) -> np.ndarray | None:
        """The items of a chunk; None if it lies nowhere, and is zeros."""
        file = self._file(chunk)
        if self._last.file == file:
            return self._last.values
        self._last.file, self._last.values = "", None  # before there is another
        if self._store.size(file) is None:
            return None
        from numcodecs import get_codec
        from numcodecs.compat import ensure_contiguous_ndarray

        try:
            data: Any = self._store.read(file)
            for codec in reversed(self._codecs):
                data = get_codec(dict(codec)).decode(data)
            raw = ensure_contiguous_ndarray(data).view(np.uint8).view(self.info.dtype.raw)
            values = raw.reshape(self._chunk, order=self._order)  # type: ignore[call-overload]
        except (EOFError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                "A chunk of a zarr array cannot be decoded.",
                expected=f"{self._chunk_bytes} bytes behind {', '.join(str(c['id']) for c in self._codecs)}",
                got=f"{type(error).__name__}: {error}",
                where=f"tensor {self.info.name} in {self._store.where}/{file}",
                todo="copy the hierarchy again from where it was made",
            ) from error
        found: np.ndarray = values.byteswap() if self._is_swapped else values
        self._last.file, self._last.values = file, found
        return found


def _dtype(text: object) -> tuple[bool, DType]:
    """Whether bytes are in the other order, and the type: numpy's, or one that JAX adds under its own name."""
    if isinstance(text, str) and (found := dtype_from_numpy(text[1:])) is not None and text[0] in "<>|":
        if text[0] == ">" and found.kind == "complex":
            raise ValueError(f"dtype {text}")
        return text[0] == ">", found
    return False, dtype_from_torch(str(text))
