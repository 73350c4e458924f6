"""`Arrays`: the arrays of a zarr hierarchy of version 2 or 3, as tensors of a `Source`.

Chunks of plain bytes, with or without crc32c, are read by byte range, like other files. Other arrays are decoded chunk
by chunk: version 3 by the zarr library; version 2 by the codecs of numcodecs, because the zarr library cannot read the
dtypes that JAX adds to version 2 (bfloat16, float8).

In a chunk without a file, all items have the fill value. An array with another fill value than zero is read by the zarr
library in version 3, and refused in version 2.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np

from vescale_fsdp.checkpoint.manifest.file_names import ZARR_NAME
from vescale_fsdp.checkpoint.manifest.state_tree import split_name
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, clipped, stored_crc
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC32C, CRC_BYTES
from vescale_fsdp.conversion.engine.source import BoxReader
from vescale_fsdp.conversion.engine.stored_tensor import (
    UNCHECKED_BYTES,
    StoredChunk,
    StoredTensor,
    TensorInfo,
)
from vescale_fsdp.conversion.engine.verified_reads import CheckedRange
from vescale_fsdp.errors import CorruptCheckpointError, DamagedFiles
from vescale_fsdp.layout.dtypes import DType, dtype_from_numpy, dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.foreign_json import parse_json, whole_numbers
from vescale_fsdp.layout.geometry import Box, contiguous_strides, whole_box

ARRAY_FILE = ".zarray"  # the metadata file of an array in version 2
DAMAGE = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # raised for missing or bad fields

_MANY_CHUNKS = 2**16  # an array with more chunks than this may lack only a limited number of them
_MOST_ABSENT = 64  # absent chunks that such an array may have for each stored chunk
_CONCURRENT_DECODES = 10  # chunks that the zarr library decodes at a time: its default of `async.concurrency`
_DECODE_ERRORS = (*DAMAGE, EOFError, RuntimeError, zlib.error)  # raised by the zarr library's codecs
# The codecs that may be used. Not all of numcodecs: its pickle codec would run code from the file.
_CODECS = {"blosc", "bz2", "gzip", "lz4", "lzma", "shuffle", "zlib", "zstd"}


def read_metadata(store: Storage, file: str, version: int = 3) -> dict[str, Any]:
    """Read a metadata file, and return its content.

    Raises:
        CorruptCheckpointError: if the file is not JSON, or of another version of zarr.
    """
    try:
        metadata = parse_json(store.read(file))
        if not isinstance(metadata, dict) or metadata.get("zarr_format") != version:
            raise ValueError(f"zarr_format is not {version} but {metadata!r:.60}")
    except ValueError as error:
        raise damaged(store, file, error) from error
    return metadata


def damaged(store: Storage, file: str, error: Exception) -> CorruptCheckpointError:
    """Return the error for a hierarchy that cannot be read because of ``file``."""
    return CorruptCheckpointError(
        "A zarr hierarchy cannot be used.",
        expected="zarr metadata of regular arrays, and chunks that their codecs decode",
        got=f"{type(error).__name__}: {error}",
        where=f"{store.where}/{file}",
    )


class Arrays:
    """Collects the arrays of a hierarchy, by tensor name, as the arguments of a `Source`.

    Args:
        files: names of all files of the hierarchy.

    Attributes:
        tensors: shape, dtype and chunks of each array.
        paths: paths in the nested state, for arrays that record their path.
        readers: functions that read a box, for arrays that must be decoded.
        decoded: bytes of memory that reading a box needs besides the box, for arrays that must be decoded.
    """

    def __init__(self, store: Storage, files: Collection[str]) -> None:
        self._store, self._files = store, files
        self._last = LastChunk()
        self.tensors: dict[str, StoredTensor] = {}
        self.paths: dict[str, Path] = {}
        self.readers: dict[str, BoxReader] = {}
        self.decoded: dict[str, int] = {}
        self.damaged = DamagedFiles()

    def add(self, node: str, name: str = "", metadata: dict[str, Any] | None = None) -> None:
        """Add the array whose folder is ``node``.

        Args:
            name: the tensor's name; default: the name in the array's attributes, else the folder's name.
            metadata: the array's metadata of version 3; None to read it.

        Raises:
            CorruptCheckpointError: if the metadata is damaged, or a chunk's file has the wrong size.
        """
        prefix = f"{node}/" if node else ""
        is_old = metadata is None and prefix + ARRAY_FILE in self._files
        file = prefix + (ARRAY_FILE if is_old else ZARR_NAME)
        if metadata is None:
            metadata = read_metadata(self._store, file, 2 if is_old else 3)
        try:
            array: _Array = (
                _Array2(self._store, node, metadata, name or node.replace("/", "."), self._last)
                if is_old
                else _Array3(self._store, node, metadata, name)
            )
            name = array.info.name
            self.tensors[name] = array.stored(self._files)
            if array.path is not None:
                self.paths[name] = array.path
            if not array.is_plain:
                array.open()
                self.readers[name], self.decoded[name] = array.read, array.decoded_bytes
        except DAMAGE as error:
            raise damaged(self._store, file, error) from error


class _Array(ABC):
    """An array of version 2 or 3.

    Attributes:
        info: name, shape and dtype of the tensor.
        chunk: shape of a chunk; for an irregular grid, the array's shape.
        separator, prefix: separator and leading parts of chunk keys; a chunk's key is its file in the array's folder.
        is_plain: whether the chunks' files have the items' bytes, row-major, and absent chunks are zeros. Other arrays
            must be decoded.
        has_crc: whether each chunk of a plain array is followed by its crc32c.
        path: the tensor's path in the nested state, if the array's attributes contain the path.
    """

    info: TensorInfo
    chunk: tuple[int, ...]
    separator: str
    prefix: tuple[str, ...] = ()
    is_plain: bool
    has_crc = False
    path: Path | None = None

    def __init__(self, store: Storage, node: str) -> None:
        self.store, self.node = store, node

    def file_of(self, chunk: Box) -> str:
        """Return the name of a chunk's file."""
        index = (str(o // c) for o, c in zip(chunk.offsets, chunk.sizes, strict=True))
        # "0" is the key of a 0-d array in version 2's encoding.
        key = self.separator.join((*self.prefix, *index)) or "0"
        return f"{self.node}/{key}" if self.node else key

    def stored(self, files: Collection[str]) -> StoredTensor:
        """Return the tensor with the array's chunks; with a single chunk without a file if it must be decoded.

        Raises:
            ValueError: for chunks without elements, or if nearly all of very many chunks are absent.
            CorruptCheckpointError: if a chunk's file has the wrong size.
        """
        info, shape, chunk = self.info, self.info.shape, self.chunk
        if not info.numel:
            return StoredTensor(info, ())
        chunk_nbytes = math.prod(chunk) * info.dtype.itemsize
        if not self.is_plain:
            nbytes = info.nbytes
            # The real number of stored bytes limits huge tensors (`is_inflated`), since metadata can claim any size.
            if nbytes > UNCHECKED_BYTES:
                nbytes = min(nbytes, self._num_stored(files) * chunk_nbytes)
            return StoredTensor(info, (StoredChunk(whole_box(shape), Extent("", 0, nbytes)),))
        if 0 in chunk:
            raise ValueError(f"chunks of shape {chunk}")
        count = math.prod(-(-size // each) for size, each in zip(shape, chunk, strict=True))
        if count > _MANY_CHUNKS:
            num_stored = self._num_stored(files)
            if not num_stored:  # a tensor of zeros needs no list of chunks
                return StoredTensor(info, (StoredChunk(whole_box(shape), Extent("", 0, 0)),))
            # Damaged metadata could make the list of chunks below far longer than the list of files.
            if count > _MANY_CHUNKS + _MOST_ABSENT * num_stored:
                raise ValueError(f"{count} chunks of which {num_stored} are stored")
        chunks, strides, damaged = [], contiguous_strides(chunk), DamagedFiles()
        for box in chunk_boxes(shape, chunk):
            file, inside, checked = self.file_of(box), clipped(box, shape), None
            if file not in files:
                chunks.append(StoredChunk(inside, Extent("", 0, 0), strides))
                continue
            with damaged.noted():
                self.store.check_size(file, chunk_nbytes + (CRC_BYTES if self.has_crc else 0))
            if self.has_crc:
                saved = partial(stored_crc, self.store, file, chunk_nbytes)
                where = f"tensor {info.name} in {self.store.where}/{file}"
                checked = CheckedRange(file, 0, chunk_nbytes, CRC32C, saved, where)
            chunks.append(StoredChunk(inside, Extent(file, 0, chunk_nbytes), strides, checked=checked))
        damaged.raise_any()
        return StoredTensor(info, tuple(chunks))

    def _num_stored(self, files: Collection[str]) -> int:
        """Return the number of stored chunks: of all files in the array's folder, except metadata."""
        folder = f"{self.node}/" if self.node else ""
        inside = (name for name in files if name.startswith(folder))
        return sum(not name.rpartition("/")[2].startswith(("zarr.json", ".z")) for name in inside)

    def open(self) -> None:  # noqa: B027  not abstract: version 2 needs no preparation
        """Prepare to decode chunks."""

    @property
    @abstractmethod
    def decoded_bytes(self) -> int:
        """Bytes of memory that reading a box needs besides the box: the copies of a chunk while it is decoded."""

    @abstractmethod
    def decode_into(self, chunk: Box, part: Box, out: np.ndarray) -> None:
        """Write the items of a part of a chunk into ``out``, zeros of the raw dtype in the shape of the part.

        Raises:
            CorruptCheckpointError: if the chunk cannot be decoded.
        """

    def read(self, box: Box) -> np.ndarray:
        """Decode a box of the array. Returns the items as raw bits; raises the errors of `decode_into`."""
        out = np.zeros(box.sizes, dtype=self.info.dtype.raw)
        for chunk in chunk_boxes(self.info.shape, self.chunk, box) if box.numel else ():
            if (part := clipped(chunk, self.info.shape).intersect(box)) is not None:
                # With the ellipsis, indexing a 0-d array returns an array instead of a scalar.
                inside: tuple[Any, ...] = (*part.slices(box.offsets), ...)
                self.decode_into(chunk, part, out[inside])
        return out


class LastChunk(threading.local):
    """The chunk that a thread decoded last; kept, because boxes of one chunk are read one after another.

    Not for arrays that the zarr library decodes. ``file`` is the chunk's file, or another name that no other chunk has.
    """

    file: str = ""
    values: np.ndarray | None = None


class _Array2(_Array):
    """An array of version 2, as Orbax and older tools write it.

    Raises:
        KeyError, TypeError, ValueError: if fields of the metadata are missing or bad, or a codec or dtype is unknown.
    """

    def __init__(
        self, store: Storage, node: str, metadata: dict[str, Any], name: str, last: LastChunk
    ) -> None:
        super().__init__(store, node)
        self._last = last
        self._order = str(metadata["order"])
        self._is_swapped, dtype = _numpy_dtype(metadata["dtype"])
        self.info = TensorInfo(name, whole_numbers(metadata["shape"]), dtype)
        self.chunk = whole_numbers(metadata["chunks"], len(self.info.shape))
        self.separator = str(metadata.get("dimension_separator") or ".")  # the default of version 2
        self._codecs = [c for c in (*(metadata.get("filters") or ()), metadata.get("compressor")) if c]
        self.is_plain = not self._codecs and self._order == "C" and not self._is_swapped
        if unknown := {str(codec["id"]) for codec in self._codecs} - _CODECS:
            raise ValueError(f"codec {min(unknown)}")  # `min`: the same codec in every run
        # None: the writer defined no fill value, so zeros are as good as other values.
        if metadata.get("fill_value") not in (None, 0, False):
            raise ValueError(f"fill value {metadata['fill_value']!r:.60}")
        if 0 in self.chunk:
            raise ValueError(f"chunks of shape {self.chunk}")

    @property
    def _chunk_bytes(self) -> int:
        """Size of a decoded chunk in bytes."""
        return math.prod(self.chunk) * self.info.dtype.itemsize

    @property
    def decoded_bytes(self) -> int:
        # One copy of the chunk as stored, one after each codec, and one with swapped bytes.
        return (1 + max(1, len(self._codecs)) + self._is_swapped) * self._chunk_bytes

    def decode_into(self, chunk: Box, part: Box, out: np.ndarray) -> None:
        file = self.file_of(chunk)
        if self._last.file != file:
            self._last.file, self._last.values = "", None  # frees the memory before the next chunk is decoded
            if self.store.size(file) is None:
                return
            self._last.values = self._decoded(file)
            self._last.file = file  # set last, so that an error leaves nothing to reuse
        if self._last.values is not None:
            out[...] = self._last.values[part.slices(chunk.offsets)]

    def _decoded(self, file: str) -> np.ndarray:
        """Read and decode a chunk's file."""
        # Imported here, because few sources need numcodecs.
        from numcodecs import get_codec
        from numcodecs.compat import ensure_contiguous_ndarray

        try:
            data: Any = self.store.read(file)
            for codec in reversed(self._codecs):  # the writer applied the codecs in the listed order
                data = get_codec(dict(codec)).decode(data)
            raw = ensure_contiguous_ndarray(data).view(np.uint8).view(self.info.dtype.raw)
            values: np.ndarray = raw.reshape(self.chunk, order=self._order)  # type: ignore[call-overload]
        # The classes that the codecs raise for damaged data.
        except (EOFError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                "A chunk of a zarr array cannot be decoded.",
                expected=f"{self._chunk_bytes} bytes encoded by {', '.join(str(c['id']) for c in self._codecs)}",
                got=f"{type(error).__name__}: {error}",
                where=f"tensor {self.info.name} in {self.store.where}/{file}",
            ) from error
        return values.byteswap() if self._is_swapped else values


def _numpy_dtype(text: object) -> tuple[bool, DType]:
    """Return (whether bytes are swapped, dtype) for a dtype's name in version 2: numpy's name, or one that JAX adds."""
    # The first letter of numpy's names is the byte order: little (<), big (>) or none (|).
    if isinstance(text, str) and (dtype := dtype_from_numpy(text[1:])) is not None and text[0] in "<>|":
        # Refused, because swapping the bytes of a whole item would exchange its real and imaginary part.
        if text[0] == ">" and dtype.kind == "complex":
            raise ValueError(f"dtype {text}")
        return text[0] == ">", dtype
    return False, dtype_from_torch(str(text))


class _Array3(_Array):
    """An array of version 3."""

    def __init__(self, store: Storage, node: str, metadata: dict[str, Any], name: str = "") -> None:
        super().__init__(store, node)
        attributes = metadata.get("attributes") or {}
        self._stored_as = dtype_from_torch(str(metadata["data_type"]))
        dtype = dtype_from_torch(str(attributes.get("logical_dtype", self._stored_as.name)))
        if dtype.itemsize != self._stored_as.itemsize:
            raise ValueError(f"dtype {dtype.name} in {self._stored_as.name}")
        # Folders have percent-escaped names.
        name = name or str(attributes.get("name") or unquote(node).replace("/", "."))
        # An array of a native checkpoint whose manifest is missing: its name contains the path in the nested state.
        if "logical_dtype" in attributes and "name" in attributes:
            self.path = split_name(name)
            name = name_of(self.path)
        self.info = TensorInfo(name, whole_numbers(metadata["shape"]), dtype)
        grid, codecs = metadata["chunk_grid"], metadata["codecs"]
        is_regular = grid["name"] == "regular"
        self.chunk = (
            whole_numbers(grid["configuration"]["chunk_shape"], len(self.info.shape))
            if is_regular
            else self.info.shape
        )
        names = [codec["name"] for codec in codecs]
        self.has_crc = "crc32c" in names
        self.is_plain = (
            is_regular
            and names in (["bytes"], ["bytes", "crc32c"])
            and codecs[0].get("configuration", {}).get("endian", "little") == "little"
            # Zero: as a number, a bool, the pair of a complex number, or the hex digits of a one-byte float.
            and metadata["fill_value"] in (0, False, [0, 0], "0x00")
        )
        self._inner_chunks = [
            c["configuration"]["chunk_shape"] for c in codecs if c["name"] == "sharding_indexed"
        ]
        self.separator, self.prefix = self._key_encoding(metadata["chunk_key_encoding"])

    @staticmethod
    def _key_encoding(encoding: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Return (separator, leading parts) of chunk keys."""
        configuration = encoding.get("configuration") or {}
        if encoding["name"] == "default":
            return str(configuration.get("separator", "/")), ("c",)
        if encoding["name"] == "v2":
            return str(configuration.get("separator", ".")), ()
        raise ValueError(f"unknown chunk key encoding {encoding['name']}")

    @property
    def decoded_bytes(self) -> int:
        chunk, concurrent = self.chunk, 1
        # If a chunk is a zarr shard, the library decodes several of its inner chunks at a time.
        if self._inner_chunks:
            inner = whole_numbers(self._inner_chunks[0], len(chunk))
            count = math.prod(-(-a // b) for a, b in zip(chunk, inner, strict=True))
            chunk, concurrent = inner, min(_CONCURRENT_DECODES, count)
        # 2: one copy of a chunk as stored, and one as decoded.
        return 2 * concurrent * math.prod(chunk) * self.info.dtype.itemsize

    def open(self) -> None:
        import zarr  # late: its import takes long, and only arrays that must be decoded need it

        path = f"{self.store.where}/{self.node}" if self.node else self.store.where
        self._opened: Any = zarr.open_array(_checked_store(path, self._stored_as), mode="r")

    def decode_into(self, chunk: Box, part: Box, out: np.ndarray) -> None:
        from zarr.core.buffer.cpu import NDBuffer

        try:
            # Without `out`, the library returns a copy of the part, which the memory budget does not include.
            items = NDBuffer.from_numpy_array(out.view(self._opened.dtype))
            self._opened.get_basic_selection(part.slices(), out=items)
        except _DECODE_ERRORS as error:
            raise damaged(self.store, f"{self.node}/{ZARR_NAME}", error) from error


def _checked_store(path: str, dtype: DType) -> Any:
    """Return a store of the array at a path or URL, in which a file without bytes is an error.

    If the zarr library lacks ``dtype`` (such as bfloat16), the array's metadata names unsigned integers instead, so
    that the library can open the array; only the items' bits are needed.
    """
    from zarr.storage import FsspecStore, LocalStore, WrapperStore

    class Checked(WrapperStore[Any]):
        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            data = await self._store.get(key, prototype, byte_range)
            if data is None:
                return None
            if not len(data):  # the library would read an empty shard as fill values
                raise ValueError(f"{key} is empty")
            if key != ZARR_NAME or dtype.is_numpy:
                return data
            metadata = json.loads(data.to_bytes()) | {"data_type": dtype.zarr_name, "fill_value": 0}
            return prototype.buffer.from_bytes(json.dumps(metadata).encode())

    remote = "://" in path
    return Checked(FsspecStore.from_url(path, read_only=True) if remote else LocalStore(path, read_only=True))
