"""Read and check the header of a safetensors file, which has the position of each tensor. Does not read tensor data.

    u64 little-endian N | N bytes of JSON, padded with spaces | data, tensor after tensor, without gaps

The converter uses this module, and so does `plan_report` for a folder of weights. It does not import torch. Files are
untrusted, so everything is checked: sizes, offsets, repeated names, types of values, nesting. The README of
huggingface/safetensors defines the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType, dtype_from_code
from vescale_fsdp.layout.foreign_json import parse_json, tensor_shape, whole_numbers

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library, which refuses larger headers


class HeaderEntry(NamedTuple):
    """An extent of the file with its dtype and shape: the header's entry for one tensor."""

    dtype: DType
    shape: tuple[int, ...]  # the last dim counts bytes if the type is packed, see `dtypes`
    start_bytes: int  # position of the data, from the start of the file
    nbytes: int


def read_header(
    read: Callable[[int, int], bytes], file_bytes: int, where: object, *, whole: bool = True
) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Return the entries of a file's tensors, in the order of the header, and the file's ``__metadata__``.

    Args:
        read: ``read(offset, nbytes)`` returns bytes of the file. It is called in ascending order of offsets.
        file_bytes: size of the file.
        where: the file, for messages.
        whole: whether the file must end exactly where the data of its tensors ends.

    Raises:
        CorruptCheckpointError: if the file is not a safetensors file, or if tensors overlap or have gaps between them.
        ConversionError: for an element type that is not in the format.
    """
    # A file too short to contain a length gets -1, which fails the check below.
    header_bytes = int.from_bytes(read(0, 8), "little") if file_bytes >= 8 else -1
    base = 8 + header_bytes
    # Checked before memory is allocated, because the file may claim any length.
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
        got = f"length {header_bytes} in a file of {file_bytes} bytes"
        raise _corrupt("8 bytes of length, then that much JSON", got, where)
    try:
        table = parse_json(read(8, header_bytes).decode(), is_text=True)
        metadata = _strings(table.pop("__metadata__", {}))
        entries = {name: _entry(fields, base) for name, fields in table.items()}
    # The JSON may have any structure, so each access above may fail in its own way.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error!s:.200}"
        raise _corrupt("a header of names, types, shapes and offsets", got, where) from error
    end = base
    # Tensors of equal start are sorted by size, because an empty tensor has the same start as the tensor after it.
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].nbytes)):
        if entry.start_bytes != end:
            expected, got = f"bytes from {end - base}", f"bytes from {entry.start_bytes - base}"
            raise _corrupt(f"tensors one after the other: {expected}", got, f"tensor {name} in {where}")
        end += entry.nbytes
    if whole and end != file_bytes:
        raise _corrupt(f"a file of {end} bytes", f"{file_bytes} bytes", where)
    return entries, metadata


def _entry(fields: Mapping[str, Any], base: int) -> HeaderEntry:
    """Return one entry, checked. ``base`` is the position of the data in the file."""
    dtype = dtype_from_code(fields["dtype"])
    shape = dtype.from_header_shape(tensor_shape(fields["shape"]))
    start, stop = whole_numbers(fields["data_offsets"], 2)
    if stop - start != dtype.nbytes(shape):
        raise ValueError(
            f"bytes {start} to {stop} for {dtype.nbytes(shape)} of {dtype.code} {fields['shape']}"
        )
    return HeaderEntry(dtype, shape, base + start, stop - start)


def _strings(values: Any) -> dict[str, str]:
    """Return the ``__metadata__`` unchanged. Raises ValueError unless it is a dict of strings."""
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"__metadata__ {values!r:.80}")
    return values


def _corrupt(expected: str, got: str, where: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "The safetensors file is damaged or incomplete.",
        expected=expected,
        got=got,
        where=where,
    )
