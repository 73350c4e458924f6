"""Read GGUF, llama.cpp's format: one file, or several with numbers in their names.

    magic, version, number of tensors, number of settings
    settings         key, type, value                        general.architecture, tokenizer.ggml.tokens, ...
    tensors          name, dims (fastest first), type, offset
    data             at a multiple of general.alignment      each tensor in its type's blocks

A tensor of plain numbers is one of that dtype. All other types are blocks of some 32 or 256 values of a row: they are
read as their bytes, uint8 [.., bytes of a row], and described in the source's metadata, by which
`conversion.quantization.gguf` dequantizes them. Names are llama.cpp's; rules rename them.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.quantization.gguf import block_sizes, description, name_of_type
from vescale_fsdp.errors import CorruptCheckpointError, DamagedFiles
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import whole_box

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PIECE_BYTES = 2**20
_MOST_DIMS = 4  # of ggml
_STRING, _ARRAY = 8, 9
# Types of settings: the format of `struct`, by number.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
# Types of tensors that are plain numbers, by number.
_PLAIN = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class _Header:
    """Reads numbers and strings from the start of a file, a MiB at a time.

    Raises:
        ValueError: by all methods, if the file ends too early.
    """

    def __init__(self, store: Storage, file: str) -> None:
        self._store, self._file = store, file
        self.size_bytes = store.required_info(file).size_bytes
        self._buffer, self._start, self.position = b"", 0, 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        stop = self.position + nbytes
        if stop > self.size_bytes:
            raise ValueError(f"{nbytes} bytes at {self.position} of {self.size_bytes}")
        if stop > self._start + len(self._buffer):
            wanted = min(max(nbytes, _PIECE_BYTES), self.size_bytes - self.position)
            self._buffer, self._start = self._store.read(self._file, self.position, wanted), self.position
        first = self.position - self._start
        self.position = stop
        return self._buffer[first : first + nbytes]

    def number(self, code: str) -> Any:
        """Return the next number, of a format of `struct`."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """Return the next setting; None for an array, whose items are skipped."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[item]}"))
        else:
            for _ in range(count):  # ends with the file, whatever the count says
                self.skip(self.number("Q")) if item == _STRING else self.value(item)
        return None

    def skip(self, nbytes: int) -> None:
        """Skip bytes, without reading them if they are many."""
        if self.position + nbytes > self.size_bytes:
            raise ValueError(f"{nbytes} bytes at {self.position} of {self.size_bytes}")
        self.position += nbytes
        if self.position > self._start + len(self._buffer):
            self._buffer, self._start = b"", self.position


def open_gguf(store: Storage, file: str) -> Source:
    """Open a GGUF file, with the files of the same series.

    Raises:
        ConversionError: if its tensors have types that only the package gguf knows, which is not installed.
        CorruptCheckpointError: if a file is damaged or missing.
    """
    tensors: dict[str, StoredTensor] = {}
    described: dict[str, str] = {}
    types: Counter[str] = Counter()
    settings: dict[str, Any] = {}
    files, damaged = _series(file), DamagedFiles()

    def read(each: str) -> None:
        nonlocal settings
        try:
            header = _Header(store, each)
            count, own = _settings(header)
            settings = {**own, **settings}
            for tensor, type_name in _tensors(header, each, count, int(own.get("general.alignment", 32))):
                name = tensor.info.name
                if name in tensors:
                    raise ValueError(f"{name} twice")
                tensors[name] = tensor
                types[type_name] += 1
                if type_name not in _PLAIN.values():
                    described[name] = description(type_name)
        except (ValueError, KeyError, struct.error, RecursionError) as error:
            raise CorruptCheckpointError(
                "A GGUF file cannot be read.",
                expected=f"GGUF of version {' or '.join(map(str, _VERSIONS))}, little-endian",
                got=f"{type(error).__name__}: {error}",
                where=f"{store.where}/{each}",
            ) from error

    damaged.read(read, files)
    damaged.raise_any()
    facts = {
        "architecture": str(settings.get("general.architecture", "unknown")),
        "types": ", ".join(f"{count} {name}" for name, count in types.most_common()),
    }
    single = file if len(files) == 1 else ""
    return Source("gguf", store, tensors, facts=facts, file=single, file_metadata=described)


def _series(file: str) -> list[str]:
    """Return the names of all files of a model, by the number in one of their names."""
    match = _NUMBERED.fullmatch(file)
    if match is None or not 1 <= int(match[3]) <= 10_000:
        return [file]
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def _settings(header: _Header) -> tuple[int, dict[str, Any]]:
    """Read the number of tensors, and the settings without arrays."""
    if header.take(4) != _MAGIC:
        raise ValueError("no GGUF")
    version = header.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}")
    num_tensors, num_settings = header.number("Q"), header.number("Q")
    found = {}
    for _ in range(num_settings):
        key = header.text()
        found[key] = header.value(header.number("I"))
    return num_tensors, found


def _tensors(header: _Header, file: str, count: int, alignment: int) -> Iterator[tuple[StoredTensor, str]]:
    """Yield the tensors of a file, and the names of their types: numpy's for plain numbers, else ggml's."""
    if alignment < 1:
        raise ValueError(f"alignment {alignment}")
    entries = []
    for _ in range(count):  # ends with the file, whatever the count says
        name, num_dims = header.text(), header.number("I")
        if num_dims > _MOST_DIMS:
            raise ValueError(f"{name} has {num_dims} dims")
        shape = tuple(header.number("Q") for _ in range(num_dims))[::-1]
        entries.append((name, shape, header.number("I"), header.number("Q")))
    data = -(-header.position // alignment) * alignment
    for name, shape, number, offset in entries:
        type_name = _PLAIN.get(number) or name_of_type(number, f"tensor {name}")
        info = TensorInfo(name, *_stored_as(type_name, shape, name))
        if offset % alignment or data + offset + info.nbytes > header.size_bytes:
            raise ValueError(f"{name} of {info.nbytes} bytes at {data + offset} of {header.size_bytes}")
        chunk = StoredChunk(whole_box(info.shape), Extent(file, data + offset, info.nbytes))
        yield StoredTensor(info, (chunk,) if info.numel else ()), type_name


def _stored_as(type_name: str, shape: tuple[int, ...], name: str) -> tuple[tuple[int, ...], DType]:
    """Return the shape and dtype in which a tensor is stored."""
    if type_name in _PLAIN.values():
        return shape, dtype_from_torch(type_name)
    block_values, block_bytes = block_sizes(type_name, f"tensor {name}")
    if not shape or shape[-1] % block_values:
        raise ValueError(f"{name} of shape {shape} in blocks of {block_values}")
    return (*shape[:-1], shape[-1] // block_values * block_bytes), dtype_from_torch("uint8")
