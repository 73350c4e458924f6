"""Plan the files of a Hugging Face repository: shards, their headers and the index.

    u64 little-endian N | N bytes of JSON, padded with spaces to a multiple of 8 | data, tensor after tensor

Shapes and dtypes are known before any data is read, so a file can be written from front to back: first the header with
the offset of each tensor, then the data. The tensors of a file have the order of the safetensors library (widest dtype
first, then by name), so the bytes are those that the library writes. Format: README of huggingface/safetensors.

Tensors are distributed over files in natural order of their names (``layers.2`` before ``layers.10``), so the shards
depend only on names, shapes, dtypes and the size limit, never on the source. The repository contains the model's
tensors, an index if there are several files, the settings files of ``assets``, and ``fingerprints.json`` if wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.conversion.engine.plan import ClosingFile, FilePlan, FixedBytes, OutputPlan, whole
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.conversion.formats.huggingface.fingerprints import FINGERPRINTS_FILE, recording
from vescale_fsdp.conversion.formats.huggingface.repository import (
    ADAPTER_CONFIG,
    Assets,
    index_of,
    is_weight_file,
    single_of,
    stem_of,
)
from vescale_fsdp.errors import ConversionError, as_pattern, option
from vescale_fsdp.layout.dtypes import DTYPES
from vescale_fsdp.layout.model_shapes import natural_key
from vescale_fsdp.layout.safetensors_header import MAX_HEADER_BYTES

MAX_INDEX_BYTES = 10 * 2**20  # huggingface_hub refuses a larger index
_ALIGNMENT_BYTES = 8  # the safetensors library pads the header to a multiple of this
# The safetensors library sorts data by its own list of dtypes, in reverse; DTYPES has the order of that list.
_RANK_OF_DTYPE = {dtype: rank for rank, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of a safetensors file, and the offset of each tensor.

    Args:
        data: the bytes before the tensors: length, JSON, padding.
        offsets: name -> byte offset of the tensor in the file, in the order of the file.
        nbytes: size of the whole file.
    """

    data: bytes
    offsets: Mapping[str, int]
    nbytes: int


def make_header(infos: Iterable[TensorInfo], metadata: Mapping[str, str] | None = None) -> SafetensorsHeader:
    """Make the header of a file with these tensors.

    Args:
        metadata: the ``__metadata__``; by default ``{"format": "pt"}``, which Hugging Face loaders require.

    Raises:
        ConversionError: for a dtype that the format lacks, a shape that it cannot record, a reserved name, or too many
            tensors for one file.
    """
    ordered = sorted(infos, key=lambda info: (-_RANK_OF_DTYPE[info.dtype], info.name))
    table: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    starts: dict[str, int] = {}
    position = 0
    for info in ordered:
        if info.name in table:
            raise ConversionError(
                "A tensor has a name that safetensors files reserve.",
                expected="names other than __metadata__, each once",
                got=info.name,
                todo=f"leave it out with {option('exclude', as_pattern(info.name))}, or convert to another format",
            )
        if info.dtype.code is None:
            raise ConversionError(
                "The safetensors format has no such element type.",
                expected="a type of the safetensors format",
                got=info.dtype.name,
                where=f"tensor {info.name}",
                todo=f"leave it out with {option('exclude', as_pattern(info.name))}, or convert to another format",
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
            todo=f"choose a smaller {option('max_shard_bytes')}",
        )
    data = len(text).to_bytes(8, "little") + text
    offsets = {name: len(data) + start for name, start in starts.items()}
    return SafetensorsHeader(data, offsets, len(data) + position)


@dataclass(frozen=True)
class ShardPlan:
    """One weight file: its name and its tensors."""

    file: str
    infos: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file's tensors, without the header."""
        return sum(info.nbytes for info in self.infos)


def plan_shards(
    infos: Iterable[TensorInfo], max_shard_bytes: int, stem: str = "model"
) -> tuple[ShardPlan, ...]:
    """Distribute tensors over files with at most ``max_shard_bytes`` of data; a larger tensor gets a file of its own.

    Raises:
        ConversionError: if the limit is not positive.
    """
    if max_shard_bytes <= 0:
        raise ConversionError(
            "The shard size limit cannot be met.",
            expected="a positive number of bytes",
            got=max_shard_bytes,
            todo=f"pass a size such as {option('max_shard_bytes', 5 * 10**9)}",
        )
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    # In natural order, layers.2 before layers.10, so that a shard has consecutive layers.
    for info in sorted(infos, key=lambda info: natural_key(info.name)):
        if groups[-1] and filled + info.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(info)
        filled += info.nbytes
    if len(groups) == 1:
        return (ShardPlan(single_of(stem), tuple(groups[0])),)
    count = len(groups)
    return tuple(
        ShardPlan(f"{stem}-{i:05d}-of-{count:05d}.safetensors", tuple(group))
        for i, group in enumerate(groups, 1)
    )


def index_bytes(shards: Sequence[ShardPlan]) -> bytes:
    """Make the content of the index file of several shards.

    Raises:
        ConversionError: if the index is larger than loaders accept.
    """
    weight_map = {info.name: shard.file for shard in shards for info in shard.infos}
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),  # transformers sorts it, too
    }
    data = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    if len(data) > MAX_INDEX_BYTES:
        raise ConversionError(
            "The index of this model would be too large for Hugging Face loaders.",
            expected=f"at most {MAX_INDEX_BYTES} bytes",
            got=f"{len(data)} bytes for {len(weight_map)} tensors",
            todo=f"use one file: {option('max_shard_bytes', 10**15)}",
        )
    return data


def plan_hf(
    views: Sequence[TensorView],
    assets: Assets,
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
    *,
    fingerprint: bool = False,
) -> OutputPlan:
    """Plan the files of a repository with these tensors.

    Args:
        views: the tensors.
        assets: the settings files to copy.
        max_shard_bytes: the most bytes of tensors in one file.
        metadata: ``__metadata__`` entries for the header of each weight file.
        fingerprint: also write ``fingerprints.json``.

    Raises:
        ConversionError: for a dtype that safetensors lacks, or an index that is larger than loaders accept.
    """
    by_name = {view.info.name: view for view in views}
    stem = stem_of(assets.settings)
    shards = plan_shards([view.info for view in views], max_shard_bytes, stem)
    closing = [ClosingFile(file, assets.reader(file)) for file in assets.files]
    if len(shards) > 1:
        index = index_bytes(shards)
        closing.append(ClosingFile(index_of(stem), lambda: (index,)))
    files = []
    for shard in shards:
        header = make_header(shard.infos, {"format": "pt", **(metadata or {})})
        tensors = (whole(by_name[name]) for name in header.offsets)
        files.append(FilePlan(shard.file, (FixedBytes(header.data), *tensors)))
    plan = OutputPlan("hf", tuple(files), tuple(closing), is_stale=_is_stale)
    return recording(plan) if fingerprint else plan


def _is_stale(name: str) -> bool:
    """Return whether an old file of the target belongs to the weights that a conversion replaces."""
    # transformers would load the base that an old adapter's config names, instead of the new weights.
    return is_weight_file(name) or name in (FINGERPRINTS_FILE, ADAPTER_CONFIG)
