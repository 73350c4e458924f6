"""Read and verify the header of a safetensors file: the position of each tensor. Reads no data, imports no torch.

    u64 little-endian N | N bytes of JSON, padded with spaces | data, tensor after tensor, without gaps

The converter and plans of a folder of weights use it. Files are untrusted, so everything is checked: sizes, offsets,
repeated names, types of values, nesting. Format: README of huggingface/safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType, dtype_from_code
from vescale_fsdp.layout.foreign_json import parse_json, tensor_shape, whole_numbers

MAX_HEADER_BYTES = 100_000_000  # the format's limit; writers and readers refuse more


class HeaderEntry(NamedTuple):
    """One tensor of a file."""

    dtype: DType
    shape: tuple[int, ...]  # its last dim counts bytes where the type is packed, see `DType`
    start_bytes: int  # position of the data, from the start of the file
    nbytes: int


def read_header(
    read: Callable[[int, int], bytes], file_bytes: int, where: object, *, whole: bool = True
) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The tensors of a file, in the order of its header, and its ``__metadata__``.

    Args:
        read: returns bytes of the file, as ``read(offset, nbytes)``.
        file_bytes: size of the file.
        where: the file, for messages.
        whole: whether the file must contain all data that the header lists, and nothing after the data.

    Raises:
        CorruptCheckpointError: if it is not a safetensors file, or tensors do not tile its data exactly.
        ConversionError: for an element type that is not in the format.
    """
    # -1, for a file too short for a length, fails the check below.
    header_bytes = int.from_bytes(read(0, 8), "little") if file_bytes >= 8 else -1
    base = 8 + header_bytes
    # Checked before anything is allocated: the length may be any number.
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
        got = f"length {header_bytes} in a file of {file_bytes} bytes"
        raise _corrupt("8 bytes of length, then that much JSON", got, where)
    try:
        table = parse_json(read(8, header_bytes).decode(), is_text=True)
        metadata = _strings(table.pop("__metadata__", {}))
        entries = {name: _entry(fields, base) for name, fields in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # from JSON of another structure
        got = f"{type(error).__name__}: {error!s:.200}"
        raise _corrupt("a header of names, types, shapes and offsets", got, where) from error
    end = base
    # Sorted by size, too, because an empty tensor starts where the next tensor does.
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].nbytes)):
        if entry.start_bytes != end:
            expected, got = f"bytes from {end - base}", f"bytes from {entry.start_bytes - base}"
            raise _corrupt(f"tensors one after the other: {expected}", got, f"tensor {name} in {where}")
        end += entry.nbytes
    if whole and end != file_bytes:
        raise _corrupt(f"a file of {end} bytes", f"{file_bytes} bytes", where)
    return entries, metadata


def _entry(fields: Mapping[str, Any], base: int) -> HeaderEntry:
    dtype = dtype_from_code(fields["dtype"])
    shape = dtype.from_header_shape(tensor_shape(fields["shape"]))
    start, stop = whole_numbers(fields["data_offsets"], 2)
    if stop - start != dtype.nbytes(shape):
        raise ValueError(
            f"bytes {start} to {stop} for {dtype.nbytes(shape)} of {dtype.code} {fields['shape']}"
        )
    return HeaderEntry(dtype, shape, base + start, stop - start)


def _strings(values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"__metadata__ {values!r:.80}")
    return values


def _corrupt(expected: str, got: str, where: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "The safetensors file is damaged or incomplete.",
        expected=expected,
        got=got,
        where=where,
        todo="copy the file again from its source",
    )
