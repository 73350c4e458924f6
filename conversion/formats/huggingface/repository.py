"""How tensors are spread over the files of a Hugging Face repository, and what the files are called.

One file: ``model.safetensors`` and no index. Several: ``model-00001-of-0000N.safetensors`` and an index
that maps every name to its file. The models of diffusers (``unet``, ``vae``, ..) have ``diffusion_pytorch_model`` in
place of ``model``; their config.json says ``_class_name``. Names are placed greedily in natural order (``layers.2``
before ``layers.10``), so the split depends on names, shapes and the limit only, never on where the tensors came
from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError, some

_MODEL, _DIFFUSERS_MODEL = "model", "diffusion_pytorch_model"
BEING_WRITTEN = ".vescale-being-written"  # in a folder whose files are not all there, or not all of one save
_WEIGHTS = re.compile(
    r"(model|diffusion_pytorch_model|pytorch_model|tf_model|flax_model)([-.].*)?\.(safetensors|bin|h5|msgpack)(\.index\.json)?"
)


def is_of_diffusers(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model of diffusers."""
    return isinstance(config.get("_class_name"), str)


def stem_of(config: Mapping[str, Any]) -> str:
    """What the names of weight files begin with, beside such a config.json."""
    return _DIFFUSERS_MODEL if is_of_diffusers(config) else _MODEL


def stem_in(files: Collection[str]) -> str:
    """The same of a folder with these files."""
    has = {single_of(_DIFFUSERS_MODEL), index_of(_DIFFUSERS_MODEL)}.intersection(files)
    return (
        _DIFFUSERS_MODEL if has and not {single_of(_MODEL), index_of(_MODEL)}.intersection(files) else _MODEL
    )


def single_of(stem: str) -> str:
    """The file of a model that is one file."""
    return f"{stem}.safetensors"


def index_of(stem: str) -> str:
    """The index of a model that is several."""
    return f"{stem}.safetensors.index.json"


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which runs of digits compare as numbers."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def is_weight_file(name: str) -> bool:
    """Whether a file at the top of a repository holds (or indexes) weights rather than settings."""
    return "/" not in name and (_WEIGHTS.fullmatch(name) is not None or name.endswith(".safetensors"))


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LFS_POINTER_BYTES = range(100, 301)


def refuse_pointers(store: Storage, files: Iterable[str], cause: Exception | None = None) -> None:
    """Refuse files whose contents git-lfs has not fetched yet.

    Args:
        cause: what such a file was taken for.

    Raises:
        ConversionError: naming them, and what fetches them.
    """
    small = (file for file in files if (store.size(file) or 0) in _LFS_POINTER_BYTES)
    pointers = [file for file in small if store.read(file, 0, len(_LFS_POINTER)) == _LFS_POINTER]
    if pointers:
        raise ConversionError(
            "These files are pointers of git-lfs, not what they point to.",
            expected="the files themselves",
            got=some(pointers),
            where=store.where,
            todo="fetch them with: git lfs pull, or download the repository with: hf download",
        ) from cause
