"""The safetensors file format: making headers, and the tensors that a header names.

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
from functools import partial
from typing import Any

from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import DTYPES
from vescale_fsdp.layout.geometry import whole_box
from vescale_fsdp.layout.safetensors_header import MAX_HEADER_BYTES, read_header

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
                "A tensor has a name that safetensors files keep for themselves.",
                expected="names other than __metadata__, each once",
                got=info.name,
                todo=f"leave it out with --exclude {info.name!r}, or convert to another format",
            )
        if info.dtype.code is None:
            raise ConversionError(
                "The safetensors format has no such element type.",
                expected="a type of the safetensors format",
                got=info.dtype.name,
                where=f"tensor {info.name}",
                todo=f"leave it out with --exclude {info.name!r}, or convert to another format",
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
            "There are too many tensors for one safetensors file.",
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            got=f"{len(text)} bytes for {len(starts)} tensors",
            todo="choose a smaller --max-shard-size",
        )
    data = len(text).to_bytes(8, "little") + text
    return SafetensorsHeader(
        data, {name: len(data) + start for name, start in starts.items()}, len(data) + position
    )


def joined_metadata(files: Mapping[str, Mapping[str, str]], where: str) -> dict[str, str]:
    """The ``__metadata__`` of a model's files as one: equal values once, lists of JSON (torchao's ``tensor_names``) one
    after the other.

    Raises:
        ConversionError: if files say different things under one key.
    """
    found: dict[str, str] = {}
    for file, metadata in files.items():
        for key, value in metadata.items():
            before = found.setdefault(key, value)
            if before == value:
                continue
            lists = [_json_list(before), _json_list(value)]
            if lists[0] is None or lists[1] is None:
                raise ConversionError(
                    "The __metadata__ of a model's files disagree.",
                    expected=f"{key}: {before:.100}",
                    got=f"{value:.100}",
                    where=f"{where}/{file}",
                    todo="convert the files one by one, or copy the folder again from where it was made",
                )
            found[key] = json.dumps(list(dict.fromkeys([*lists[0], *lists[1]])))
    return found


def _json_list(text: str) -> list[str] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


def read_tensors(store: Storage, file: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file, and its ``__metadata__``; checks that they tile the file exactly.

    Raises:
        CorruptCheckpointError: if the file is truncated or not a safetensors file.
    """
    entries, metadata = read_header(
        partial(store.read, file), store.required_info(file).size_bytes, f"{store.where}/{file}"
    )
    tensors = {}
    for name, entry in entries.items():
        info = TensorInfo(name, entry.shape, entry.dtype)
        chunk = StoredChunk(whole_box(entry.shape), file, entry.start_bytes, entry.nbytes)
        tensors[name] = StoredTensor(info, (chunk,) if info.numel else ())
    return tensors, metadata
