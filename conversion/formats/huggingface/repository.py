"""How tensors are spread over the files of a Hugging Face repository, and what the files are called.

One file: ``model.safetensors`` and no index. Several: ``model-00001-of-0000N.safetensors`` and an index
that maps every name to its file. Names are placed greedily in natural order (``layers.2`` before
``layers.10``), so the split depends on names, shapes and the limit only, never on where the tensors came
from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vescale_fsdp.conversion.source.stored_tensor import TensorInfo
from vescale_fsdp.errors import ConversionError

__all__ = [
    "BEING_WRITTEN",
    "INDEX_FILE",
    "SINGLE_FILE",
    "ShardPlan",
    "index_bytes",
    "is_weight_file",
    "natural_key",
    "plan_shards",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BEING_WRITTEN = ".vescale-being-written"  # in a folder whose files are not all there, or not all of one save
MAX_INDEX_BYTES = 10 * 2**20  # huggingface_hub refuses a larger index
_WEIGHTS = re.compile(
    r"(model|pytorch_model|tf_model|flax_model)([-.].*)?\.(safetensors|bin|h5|msgpack)(\.index\.json)?"
)


@dataclass(frozen=True)
class ShardPlan:
    """One weight file: its name and what it holds."""

    file: str
    infos: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, without the header."""
        return sum(info.nbytes for info in self.infos)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which runs of digits compare as numbers."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def is_weight_file(name: str) -> bool:
    """Whether a file at the top of a repository holds (or indexes) weights rather than settings."""
    return "/" not in name and (_WEIGHTS.fullmatch(name) is not None or name.endswith(".safetensors"))


def plan_shards(infos: Iterable[TensorInfo], max_shard_bytes: int) -> tuple[ShardPlan, ...]:
    """Spread tensors over files of at most ``max_shard_bytes`` bytes; a larger tensor gets its own.

    Raises:
        ConversionError: if the limit is not positive.
    """
    if max_shard_bytes <= 0:
        raise ConversionError(
            "The shard size limit cannot be met.",
            expected="a positive number of bytes",
            got=max_shard_bytes,
            todo="pass a --max-shard-size such as 5GB",
        )
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in sorted(infos, key=lambda info: natural_key(info.name)):
        if groups[-1] and filled + info.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(info)
        filled += info.nbytes
    if len(groups) == 1:
        return (ShardPlan(SINGLE_FILE, tuple(groups[0])),)
    count = len(groups)
    return tuple(
        ShardPlan(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(group))
        for i, group in enumerate(groups, 1)
    )


def index_bytes(shards: Sequence[ShardPlan]) -> bytes:
    """The index file of several shards.

    Raises:
        ConversionError: if loaders would refuse it for its size.
    """
    weight_map = {info.name: shard.file for shard in shards for info in shard.infos}
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    data = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    if len(data) > MAX_INDEX_BYTES:
        raise ConversionError(
            "The index of this model would be too large for Hugging Face loaders.",
            expected=f"at most {MAX_INDEX_BYTES} bytes",
            got=f"{len(data)} bytes for {len(weight_map)} tensors",
            todo="use one file: --max-shard-size 1000GB",
        )
    return data
