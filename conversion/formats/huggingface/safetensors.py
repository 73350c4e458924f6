"""The safetensors file format: making headers and reading them, nothing else.

    u64 little-endian N | N bytes of JSON, padded with spaces to a multiple of 8 | data, tensor after tensor

Shapes and types are known before any data is read, so a file is written front to back: header, then tensors
at offsets the header already names. The order of the data is the reference writer's (widest type first,
then by name), so that the files are byte for byte what the safetensors library writes for the same tensors.
Format: README of huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.conversion.formats.zarr.json_values import parse_json
from vescale_fsdp.conversion.source.stored_tensor import StoredChunk, StoredTensor, TensorInfo, whole_numbers
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, explain
from vescale_fsdp.layout.dtypes import DTYPES, dtype_from_code
from vescale_fsdp.layout.geometry import whole_box

__all__ = ["SafetensorsHeader", "make_header", "read_header"]

MAX_HEADER_BYTES = 100_000_000  # the format's limit; writers and readers refuse more
_ALIGNMENT_BYTES = 8
_RANK_OF_DTYPE = {dtype: rank for rank, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class SafetensorsHeader:
    """A finished header and where each tensor's bytes go.

    Args:
        data: everything before the tensors: length, JSON, padding.
        offsets: byte offset in the file of each tensor, in file order.
        nbytes: size of the whole file.
    """

    data: bytes
    offsets: Mapping[str, int]
    nbytes: int


def make_header(infos: Iterable[TensorInfo], metadata: Mapping[str, str] | None = None) -> SafetensorsHeader:
    """Header of a file with these tensors; ``metadata`` defaults to what Hugging Face loaders expect.

    Raises:
        ConversionError: for a type the format lacks, a shape it cannot record, a name of the format's own, or too many
            tensors.
    """
    ordered = sorted(infos, key=lambda info: (-_RANK_OF_DTYPE[info.dtype], info.name))
    table: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    starts: dict[str, int] = {}
    position = 0
    for info in ordered:
        if info.name in table:
            raise ConversionError(
                explain(
                    "a tensor has a name that safetensors files keep for themselves",
                    expected="names other than __metadata__, each once",
                    got=info.name,
                    todo=f"leave it out with --exclude {info.name!r}, or convert to another format",
                )
            )
        if info.dtype.code is None:
            raise ConversionError(
                explain(
                    "safetensors has no such element type",
                    expected="a type of the safetensors format",
                    got=info.dtype.name,
                    where=f"tensor {info.name}",
                    todo=f"leave it out with --exclude {info.name!r}, or convert to another format",
                )
            )
        table[info.name] = {
            "dtype": info.dtype.code,
            "shape": list(info.dtype.to_header_shape(info.shape)),
            "data_offsets": [position, position + info.nbytes],
        }
        starts[info.name] = position
        position += info.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ConversionError(
            explain(
                "too many tensors for one safetensors file",
                expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
                got=f"{len(text)} bytes for {len(starts)} tensors",
                todo="choose a smaller --max-shard-size",
            )
        )
    data = len(text).to_bytes(8, "little") + text
    return SafetensorsHeader(
        data, {name: len(data) + start for name, start in starts.items()}, len(data) + position
    )


def read_header(store: Store, file: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file, and its ``__metadata__``; checks that they tile the file exactly.

    Raises:
        CorruptCheckpointError: if the file is truncated or not a safetensors file.
    """
    size = store.required_size(file)
    where = f"{store.url}/{file}"
    if size < 8:
        raise _corrupt("an 8-byte header length", f"a file of {size} bytes", where)
    header_bytes = int.from_bytes(store.read(file, 0, 8), "little")
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        raise _corrupt(f"a header inside the {size} bytes of the file", f"one of {header_bytes} bytes", where)
    try:
        table = parse_json(store.read(file, 8, header_bytes))
        metadata = {str(k): str(v) for k, v in table.pop("__metadata__", {}).items()}
        entries = {
            str(name): (str(e["dtype"]), whole_numbers(e["shape"]), *whole_numbers(e["data_offsets"], 2))
            for name, e in table.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt("a JSON header", f"{type(error).__name__}: {error}", where) from error
    return _stored(entries, file, 8 + header_bytes, size, where), metadata


def _stored(
    entries: Mapping[str, tuple[Any, ...]], file: str, base: int, size: int, where: str
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    position = 0
    for name, (code, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        dtype = dtype_from_code(code)
        info = TensorInfo(name, dtype.from_header_shape(shape), dtype)
        if start != position or stop - start != info.nbytes:
            raise _corrupt(
                f"{info.nbytes} bytes at {position}",
                f"bytes {start} to {stop} for {code} {shape}",
                where,
                name,
            )
        position = stop
        chunk = StoredChunk(whole_box(info.shape), file, base + start, info.nbytes)
        tensors[name] = StoredTensor(info, (chunk,) if info.numel else ())
    if base + position != size:
        raise _corrupt(f"a file of {base + position} bytes", f"{size} bytes", where)
    return {name: tensors[name] for name in entries}


def _corrupt(expected: str, got: str, where: str, name: str | None = None) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        explain(
            "a safetensors file is damaged or incomplete",
            expected=expected,
            got=got,
            where=f"tensor {name} in {where}" if name else where,
            todo="copy the file again from where it was made",
        )
    )
