"""Reading zarr hierarchies: each array is a tensor. Of version 3 here, of version 2 in `version_2`.

Arrays whose chunks are plain bytes (with or without crc32c) are read by range like any other file.
Compressed, sharded and other arrays are decoded by the zarr library, chunk by chunk. zarr leaves out chunks
that are all fill value; those of zeros are known here without a file.
"""

from __future__ import annotations

import base64
import math
import zlib
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np

from vescale_fsdp.checkpoint.formats.zarr.arrays import (
    DAMAGE,
    chunk_file_name,
    damaged,
    read_metadata,
    stored_array,
)
from vescale_fsdp.checkpoint.formats.zarr.version_2 import ARRAY_FILE, Array2, LastChunk
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, ZARR_NAME
from vescale_fsdp.checkpoint.manifest.state_tree import split_name
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, clipped
from vescale_fsdp.checkpoint.moves.source import BoxReader, Source, StoredValue, constant
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.state.nesting import ListIndex, Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.foreign_json import whole_numbers
from vescale_fsdp.layout.geometry import Box

_ATTRIBUTE = "vescale_conversion"  # of a root that to-zarr wrote before it wrote native checkpoints
_AT_ONCE = 10  # as the zarr library sets out, by `async.concurrency`
_UNDECODED = (*DAMAGE, EOFError, RuntimeError, zlib.error)  # of the codecs that zarr brings


def has_manifest(store: Storage) -> bool:
    """Whether the folder is a native checkpoint in its zarr form, with the manifest beside."""
    if store.size(ZARR_NAME) is None:
        return False
    attributes = read_metadata(store, ZARR_NAME).get("attributes") or {}
    return "manifest" in attributes and store.size(MANIFEST_NAME) is not None


def open_zarr(store: Storage) -> Source:
    """Open a group (or a single array) of either version; reads metadata and the list of files.

    Raises:
        CorruptCheckpointError: if metadata is damaged or a chunk file has the wrong size.
    """
    files = set(store.list_files())
    if ZARR_NAME not in files:
        return _open_version_2(store, files)
    root = read_metadata(store, ZARR_NAME)
    tensors: dict[str, StoredTensor] = {}
    readers: dict[str, BoxReader] = {}
    decoded: dict[str, int] = {}
    paths: dict[str, Path] = {}
    for file in sorted(name for name in files if name.endswith(ZARR_NAME)):
        found = root if file == ZARR_NAME else read_metadata(store, file)
        if found.get("node_type") != "array":
            continue
        node = file.removesuffix(ZARR_NAME).rstrip("/")
        try:
            array = Array3(store, node, found)
            tensors[array.info.name] = array.stored(files)
            if array.path is not None:
                paths[array.info.name] = array.path
            if not array.is_plain:
                readers[array.info.name] = array.reader()
                decoded[array.info.name] = array.decoded_bytes
        except DAMAGE as error:
            raise damaged(store, file, error) from error
    try:
        content = (root.get("attributes") or {}).get(_ATTRIBUTE) or {}
        values: dict[str, StoredValue] = {
            str(name): constant(_from_json_1(value)) for name, value in (content.get("values") or {}).items()
        }
        stored_paths = content.get("paths") or {}
        paths |= {str(name): tuple(map(_part, parts)) for name, parts in stored_paths.items()}
    except DAMAGE as error:
        raise damaged(store, ZARR_NAME, error) from error
    # Files are listed by name; what is planned from here depends on the order of the state that was saved.
    tensors = {name: tensors[name] for name in (*filter(tensors.__contains__, paths), *tensors)}
    facts = {"arrays": str(len(tensors)), "decoded by zarr": str(len(readers))}
    return Source("zarr", store, tensors, values, paths, facts, readers, decoded)


def _open_version_2(store: Storage, files: set[str]) -> Source:
    tensors: dict[str, StoredTensor] = {}
    readers: dict[str, BoxReader] = {}
    decoded: dict[str, int] = {}
    last = LastChunk()
    for file in sorted(name for name in files if name.rpartition("/")[2] == ARRAY_FILE):
        node = file.removesuffix(ARRAY_FILE).rstrip("/")
        try:
            array = Array2(store, node, read_metadata(store, file, 2), node.replace("/", "."), last)
            tensors[array.info.name] = array.stored(files)
        except DAMAGE as error:
            raise damaged(store, file, error) from error
        if not array.is_plain:
            readers[array.info.name] = array.read
            decoded[array.info.name] = array.decoded_bytes
    facts = {"arrays": str(len(tensors)), "zarr version": "2"}
    return Source("zarr", store, tensors, facts=facts, readers=readers, decoded=decoded)


def _from_json_1(data: Any) -> Any:
    """A value as to-zarr wrote it before it wrote native checkpoints.

    JSON stands for itself; what it lacks is an object with the single key ``$``: tuples, bytes, special floats,
    and dicts whose keys are no strings (or that look like such an object).

    Raises:
        CorruptCheckpointError: for an unknown marker.
    """
    if isinstance(data, list):
        return [_from_json_1(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$" not in data:
        return {key: _from_json_1(value) for key, value in data.items()}
    match data["$"]:
        case ["float", str(text)]:
            return float(text)
        case ["bytes", str(text)]:
            return base64.b64decode(text)
        case ["tuple", list(items)]:
            return tuple(_from_json_1(item) for item in items)
        case ["dict", list(pairs)]:
            return {_from_json_1(key): _from_json_1(value) for key, value in pairs}
    raise CorruptCheckpointError(
        "A stored value is damaged.", expected="a known marker", got=data["$"], todo="use another copy"
    )


def _part(part: Any) -> str | int:
    return ListIndex(part[0]) if isinstance(part, list) else part


class Array3:
    """One array of the hierarchy."""

    def __init__(self, store: Storage, node: str, metadata: dict[str, Any], name: str = "") -> None:
        self._store, self._node = store, node
        attributes = metadata.get("attributes") or {}
        stored_as = dtype_from_torch(str(metadata["data_type"]))
        dtype = dtype_from_torch(
            str(attributes.get("logical_dtype", attributes.get("dtype", stored_as.name)))
        )
        if dtype.itemsize != stored_as.itemsize:
            raise ValueError(f"dtype {dtype.name} in {stored_as.name}")
        name = name or str(attributes.get("name") or unquote(node).replace("/", "."))
        self.path: Path | None = None
        if (
            "logical_dtype" in attributes and "name" in attributes
        ):  # of a native checkpoint without its manifest
            self.path = split_name(name)
            name = name_of(self.path)
        self.info = TensorInfo(name, whole_numbers(metadata["shape"]), dtype)
        self._stored_as: DType = stored_as
        self._codecs = [codec["name"] for codec in metadata["codecs"]]
        self._inner_chunk = next(
            (
                c["configuration"]["chunk_shape"]
                for c in metadata["codecs"]
                if c["name"] == "sharding_indexed"
            ),
            None,
        )
        self._endian = metadata["codecs"][0].get("configuration", {}).get("endian", "little")
        self._grid = metadata["chunk_grid"]
        self._separator, self._prefix = _key_encoding(metadata["chunk_key_encoding"])
        self._is_zero_filled = metadata["fill_value"] in (0, False, [0, 0], "0x00")

    @property
    def is_plain(self) -> bool:
        """Whether chunk files are the items' bytes, row-major."""
        return (
            self._codecs in (["bytes"], ["bytes", "crc32c"])
            and self._endian == "little"
            and self._grid["name"] == "regular"
            and self._is_zero_filled
        )

    def stored(self, files: set[str]) -> StoredTensor:
        """Chunks of a plain array; one nominal chunk of an array that zarr decodes."""
        return stored_array(
            self._store,
            self.info,
            self._regular_chunks,
            self._node,
            files,
            partial(chunk_file_name, self._node, self._separator, self._prefix),
            is_plain=self.is_plain,
            has_crc="crc32c" in self._codecs,
        )

    @property
    def _regular_chunks(self) -> tuple[int, ...]:
        """The chunk's shape, of which one is read at a time; the whole array if they differ."""
        shape = self.info.shape
        if self._grid["name"] != "regular":
            return shape
        return whole_numbers(self._grid["configuration"]["chunk_shape"], len(shape))

    @property
    def decoded_bytes(self) -> int:
        """What reading a box holds beside it: a chunk as it is stored and as it is decoded. Of shards it is their inner
        chunks, of which the library decodes some at a time."""
        chunk, at_once = self._regular_chunks, 1
        if self._inner_chunk is not None:
            inner = whole_numbers(self._inner_chunk, len(chunk))
            at_once = min(_AT_ONCE, math.prod(-(-a // b) for a, b in zip(chunk, inner, strict=True)))
            chunk = inner
        return 2 * at_once * math.prod(chunk) * self.info.dtype.itemsize

    def reader(self) -> BoxReader:
        """Boxes as the zarr library decodes them, chunk after chunk."""
        path = f"{self._store.where}/{self._node}" if self._node else self._store.where
        try:
            import zarr  # only arrays that are not plain need it
        except ImportError as error:
            raise ConversionError(
                "An array is compressed or sharded, which the zarr library decodes.",
                expected="the package zarr (3 or later)",
                got=str(error),
                where=path,
                todo="pip install zarr",
            ) from error
        if self._stored_as.is_numpy:
            array = zarr.open_array(path, mode="r")
        else:  # JAX's bfloat16, which zarr lacks
            from vescale_fsdp.checkpoint.formats.zarr.as_integers import open_as_integers

            array = open_as_integers(path, self._stored_as)
        raw, chunks = self.info.dtype.raw, self._regular_chunks

        def read(box: Box) -> np.ndarray:
            out = np.empty(box.sizes, dtype=raw)
            for chunk in chunk_boxes(self.info.shape, chunks, box) if box.numel else ():
                part = clipped(chunk, self.info.shape).intersect(box)
                if part is None:
                    continue
                try:
                    values = np.ascontiguousarray(array[part.slices()]).reshape(part.sizes)
                except _UNDECODED as error:
                    raise damaged(self._store, f"{self._node}/{ZARR_NAME}", error) from error
                place: tuple[Any, ...] = (*part.slices(box.offsets), ...)
                out[place] = values.view(raw) if values.ndim else values.reshape(1).view(raw).reshape(())
            return out

        return read


def _key_encoding(encoding: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """(separator, leading parts) of chunk keys."""
    configuration = encoding.get("configuration") or {}
    if encoding["name"] == "default":
        return str(configuration.get("separator", "/")), ("c",)
    if encoding["name"] == "v2":
        return str(configuration.get("separator", ".")), ()
    raise ValueError(f"unknown chunk key encoding {encoding['name']}")
