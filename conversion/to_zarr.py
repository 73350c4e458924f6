"""Planning a zarr v3 hierarchy: one array per tensor, plain chunks with crc32c, readable by any zarr library.

Arrays are cut along dim 0 into chunks of at most 32 MiB. Types that zarr lacks (bfloat16, 8-bit floats and
smaller) are unsigned integers of their width, with the real type in the attribute ``dtype``. The root's
attributes hold the nesting and all values that are no tensors; it is written last. Format: the zarr v3 core
specification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from vescale_fsdp.conversion.crc import CRC32C
from vescale_fsdp.conversion.dtypes import DType
from vescale_fsdp.conversion.file_plan import ComputedPart, FilePlan, FixedPart, Part, TensorPart
from vescale_fsdp.conversion.json_values import to_json
from vescale_fsdp.conversion.nesting import ListIndex
from vescale_fsdp.conversion.output_plan import ClosingFile, OutputPlan
from vescale_fsdp.conversion.state import State
from vescale_fsdp.conversion.tensors import TensorInfo
from vescale_fsdp.conversion.view import TensorView

__all__ = ["ATTRIBUTE", "ROOT_FILE", "node_name", "plan_zarr", "zarr_dtype"]

ROOT_FILE = "zarr.json"
ATTRIBUTE = "vescale_conversion"
_CHUNK_BYTES = 32 * 2**20  # 32 MiB
_CRC_BYTES = 4
_ZARR_TYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_ZARR_TYPES |= {"float16", "float32", "float64", "complex64", "complex128"}


def zarr_dtype(dtype: DType) -> str:
    """The zarr type a tensor's bytes are stored as."""
    return dtype.name if dtype.name in _ZARR_TYPES else f"uint{dtype.itemsize * 8}"


def node_name(name: str) -> str:
    """A tensor's name as one node of the hierarchy."""
    return name.replace("%", "%25").replace("/", "%2F")


def plan_zarr(state: State) -> OutputPlan:
    """Chunk files, then array metadata, then the root.

    Raises:
        ConversionError: for values that are no plain data.
    """
    files: list[FilePlan] = []
    closing: list[ClosingFile] = []
    for name, view in state.views.items():
        files += _chunks(node_name(name), view)
        closing.append(_json_file(f"{node_name(name)}/{ROOT_FILE}", _array(view.info)))
    content = {
        "version": 1,
        "paths": {n: [_part(p) for p in state.path(n)] for n in (*state.views, *state.values)},
        "values": {name: to_json(read(), where=name) for name, read in state.values.items()},
    }
    root = {"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: content}}
    closing.append(_json_file(ROOT_FILE, root))
    return OutputPlan("zarr", tuple(files), tuple(closing), is_stale=_is_stale)


def _part(part: str | int) -> str | int | list[int]:
    """A part of a path: names and int keys stand for themselves, places in lists are lists."""
    return [int(part)] if isinstance(part, ListIndex) else part


def _is_stale(name: str) -> bool:
    return name.endswith((ROOT_FILE, "/c")) or "/c/" in name


def _json_file(name: str, content: dict[str, Any]) -> ClosingFile:
    data = (json.dumps(content, indent=1) + "\n").encode()
    return ClosingFile(name, lambda: (data,))


def _rows_per_chunk(info: TensorInfo) -> int:
    if not info.numel:
        return 1
    return min(info.shape[0], max(1, _CHUNK_BYTES // (info.nbytes // info.shape[0])))


def _array(info: TensorInfo) -> dict[str, Any]:
    kind = zarr_dtype(info.dtype)
    chunk = [_rows_per_chunk(info), *(max(1, n) for n in info.shape[1:])] if info.shape else []
    plain = {"name": "bytes"} if kind in ("bool", "int8", "uint8") else _LITTLE
    fill: Any = [0.0, 0.0] if kind.startswith("complex") else kind != "bool" and 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(info.shape),
        "data_type": kind,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [plain, {"name": "crc32c"}],
        "attributes": {"dtype": info.dtype.name, "name": info.name},
    }


_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def _chunks(node: str, view: TensorView) -> Iterator[FilePlan]:
    info = view.info
    if not info.numel:
        return
    if not info.shape:
        yield FilePlan(f"{node}/c", _chunk_parts(TensorPart(view, 0, 1, CRC32C), 0))
        return
    rows, per_row = _rows_per_chunk(info), info.numel // info.shape[0]
    key = "/".join(["0"] * (len(info.shape) - 1))
    for number in range(math.ceil(info.shape[0] / rows)):
        stop = min((number + 1) * rows, info.shape[0])
        part = TensorPart(view, number * rows * per_row, stop * per_row, CRC32C)
        missing = ((number + 1) * rows - stop) * per_row * info.dtype.itemsize
        yield FilePlan(f"{node}/c/{number}" + (f"/{key}" if key else ""), _chunk_parts(part, missing))


def _chunk_parts(part: TensorPart, padding_bytes: int) -> tuple[Part, ...]:
    """Data, zeros up to a whole chunk, and the CRC-32C of both."""
    zeros = bytes(padding_bytes)
    zeros_crc = CRC32C.of(zeros)

    def checksum(crcs: dict[int, int]) -> bytes:
        return CRC32C.combine(crcs[0], zeros_crc, padding_bytes).to_bytes(_CRC_BYTES, "little")

    return (part, FixedPart(zeros), ComputedPart(_CRC_BYTES, checksum))
