"""The files of a Hugging Face repository: names of weight files, and the settings files to copy.

    model.safetensors                                     the only weight file
    model-00001-of-0000N.safetensors, ..                  several weight files
    model.safetensors.index.json                          their index: tensor name -> file
    diffusion_pytorch_model...                            same, for diffusers, whose config.json has ``_class_name``
    config.json, tokenizer.json, *.py, LICENSE, ..        settings

Settings files are recognized by their names. A repository may also contain weights in other formats
(``original/consolidated.00.pth``, ``onnx/model.onnx``) and a trainer's files (``optimizer.pt``,
``training_args.bin``). Such files are not copied: they would not match the converted weights, and some loaders prefer
them to the converted weights.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.errors import ConversionError, option, some
from vescale_fsdp.layout.dtypes import known_dtype
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.layout.model_shapes import natural_key

_MODEL, _DIFFUSERS_MODEL = "model", "diffusion_pytorch_model"
BEING_WRITTEN = ".vescale-being-written"  # marker file: the folder is incomplete, or has files of two saves
# Weight files of any framework, whole or in shards, and their indices.
_WEIGHTS = re.compile(
    r"(model|diffusion_pytorch_model|pytorch_model|tf_model|flax_model)([-.].*)?\.(safetensors|bin|h5|msgpack)(\.index\.json)?"
)

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Range of sizes of pointer files, which consist of a version, a hash and a size as text. Other files are not opened.
_LFS_POINTER_BYTES = range(100, 301)


def is_of_diffusers(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a model of diffusers."""
    return isinstance(config.get("_class_name"), str)


def stem_of(config: Mapping[str, Any]) -> str:
    """Return the prefix of the names of weight files next to this config.json."""
    return _DIFFUSERS_MODEL if is_of_diffusers(config) else _MODEL


def stem_in(files: Collection[str]) -> str:
    """Return the prefix of the names of the weight files among these files; "model" if both prefixes or none exist."""
    names = set(files)
    if {single_of(_MODEL), index_of(_MODEL)} & names:
        return _MODEL
    return _DIFFUSERS_MODEL if {single_of(_DIFFUSERS_MODEL), index_of(_DIFFUSERS_MODEL)} & names else _MODEL


def single_of(stem: str) -> str:
    """Return the name of the weight file of a model that is stored in one file."""
    return f"{stem}.safetensors"


def index_of(stem: str) -> str:
    """Return the name of the index of a model that is stored in several files."""
    return f"{stem}.safetensors.index.json"


def is_weight_file(name: str) -> bool:
    """Whether a file is in the repository's root and contains weights or is an index of weights."""
    return "/" not in name and (_WEIGHTS.fullmatch(name) is not None or name.endswith(".safetensors"))


def refuse_pointers(store: Storage, files: Iterable[str], cause: Exception | None = None) -> None:
    """Refuse files whose content git-lfs has not fetched yet.

    Args:
        cause: the error that occurred when such a file was parsed, to be chained.

    Raises:
        ConversionError: with the names of these files, and the command that fetches them.
    """
    small = (file for file in files if (store.size(file) or 0) in _LFS_POINTER_BYTES)
    pointers = [file for file in small if store.read(file, 0, len(_LFS_POINTER)) == _LFS_POINTER]
    if pointers:
        raise ConversionError(
            "These files are pointers of git-lfs, without the content.",
            expected="the files themselves",
            got=some(pointers),
            where=store.where,
            todo="fetch them with: git lfs pull, or download the repository with: hf download",
        ) from cause


CONFIG_FILE = "config.json"
ADAPTER_CONFIG = (
    "adapter_config.json"  # of peft: loaders treat a folder that contains this file as an adapter
)
_SETTINGS = re.compile(
    r"([0-9]+_[^/]+/|tokenizer[^/]*/)?("  # folders of a sentence-transformers module or a tokenizer
    # Not `ADAPTER_CONFIG`.
    r"((?!adapter_)[^/]*config[^/]*|tokenizer[^/]*|[^/]*vocab[^/]*|merges|bpe|modules|normalizer|tekken|params"
    r"|[^/]*processor[^/]*|[^/]*feature_extractor[^/]*|[^/]*tokens(_map)?|chat_template[^/]*)\.json"
    r"|(tokenizer[^/]*|[^/]*vocab[^/]*|merges|dict[^/]*|requirements|[^/]*licen[cs]e[^/]*|notice)\.txt"
    r"|(tokenizer|spiece|spm|[^/]*sentencepiece|[^/]*bpe)[^/]*\.(model|vocab|codes)"
    r"|[^/]+\.(spm|tiktoken|jinja|md)|bpe\.codes"
    r"|(additional_chat_templates|chat_templates)/[^/]+\.jinja"
    r"|(licen[cs]e|notice|readme|use_policy|copying)[^/.]*"
    r"|(.+/)?[^/]+\.py)",  # code to which config.json refers
    re.IGNORECASE,  # such as LICENSE and License
)
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5 and of transformers 4


class Assets:
    """The settings files of a folder or URL that a conversion copies, and its changes to config.json.

    Args:
        url: the folder; None for no settings.
        include: patterns of further files to copy.

    Attributes:
        files: names of the files that are copied.
        left: names of other files, which are not copied.
        config: the original config.json; None if there is none.

    Raises:
        ConversionError: if the folder is empty, config.json is not JSON, or a pattern matches no file.
    """

    def __init__(self, url: str | None, include: Sequence[str] = ()) -> None:
        self.files: tuple[str, ...] = ()
        self.left: tuple[str, ...] = ()
        self.config: dict[str, Any] | None = None
        self._changes: dict[str, Any] = {}  # changes to config.json: key -> new value; None removes the key
        if url is None:
            return
        self._store: Storage = open_store(url)
        listed = self._store.list_files()
        if not listed:
            raise ConversionError(
                "There are no settings files to copy.",
                expected="a folder with config.json, tokenizer files and so on",
                got="an empty or missing folder",
                where=url,
                todo=f"check the path given as {option('assets')}",
            )
        # Neither weights, which the conversion writes, nor hidden files, which belong to git or to a download.
        is_candidate = {f: not is_weight_file(f) and not f.startswith(".") and "/." not in f for f in listed}
        candidates = sorted((file for file in listed if is_candidate[file]), key=natural_key)
        for pattern in include:
            if not any(fnmatchcase(file, pattern) for file in candidates):
                raise ConversionError(
                    "A pattern of files to copy matches no file.",
                    expected=f"patterns that match files such as {', '.join(candidates[:6]) or 'none'}",
                    got=pattern,
                    where=url,
                    todo="correct the pattern; weights in safetensors are never copied",
                )
        copied = {f for f in candidates if is_setting(f) or any(fnmatchcase(f, p) for p in include)}
        self.files = tuple(file for file in candidates if file in copied)
        self.left = tuple(file for file in candidates if file not in copied)
        refuse_pointers(self._store, self.files)
        if CONFIG_FILE in self.files:
            self.config = config_in(self._store)

    # The following methods change config.json with the weights, because loaders rely on config.json.

    def set_weights_dtype(self, name: str) -> None:
        """Set the dtype in config.json."""
        if is_of_diffusers(self.config or {}):  # these configs have no dtype
            return
        # The spelling of the original file is kept.
        key = next((key for key in _DTYPE_KEYS if key in (self.config or {})), _DTYPE_KEYS[0])
        self._changes[key] = name

    def match_dtype(self, infos: Iterable[TensorInfo]) -> None:
        """Set the dtypes that config.json names, also for its parts (text, vision), to those of the float tensors.

        The dtype is the one that an option has requested, if a float tensor has it, and otherwise that of most items. A
        part keeps its dtype if a float tensor has it.
        """
        items = Counter[str]()
        for info in infos:
            if info.dtype.kind == "float":
                items[info.dtype.name] += info.numel
        if items:
            chosen = _named_dtype(self._changes)
            name = chosen if chosen in items else items.most_common(1)[0][0]
            self._changes |= _with_dtype(self.settings, str(name), items)

    def set_quantization(self, settings: dict[str, Any] | None) -> None:
        """Set the quantization settings in config.json; None removes them."""
        # fromkeys: None removes the old settings under all keys.
        self._changes |= {**dict.fromkeys(QUANTIZATION_KEYS), QUANTIZATION_KEYS[0]: settings}

    def correct_dtype(self, infos: Iterable[TensorInfo], quantized: Collection[str]) -> None:
        """Replace config.json's dtype if no float tensor has that dtype.

        The new dtype is that of the original config.json if a float tensor has it, and otherwise the most frequent one.
        Tensors in ``quantized`` (codes and scales) do not count.
        """
        counts = _float_types(infos, quantized)
        if counts and _named_dtype(self.settings) not in counts:
            dtype = _named_dtype(self.config or {})
            if dtype is None or dtype not in counts:
                dtype = counts.most_common(1)[0][0]
            self.set_weights_dtype(dtype)

    def untie(self) -> None:
        """Set ``tie_word_embeddings`` to false, for embeddings that are written as two tensors."""
        self._changes |= _untied(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The changed config.json that is written; empty if there is no config.json."""
        changed = {**(self.config or {}), **self._changes}
        # A null is removed only if it is in the changes: a null in the original file may be a setting.
        return {key: value for key, value in changed.items() if value is not None or key not in self._changes}

    def disagreements(self, infos: Iterable[TensorInfo], quantized: Collection[str]) -> list[str]:
        """Return warnings if config.json and the weights disagree about dtype or quantization."""
        config, warnings = self.settings, list[str]()
        counts, named = _float_types(infos, quantized), _named_dtype(config)
        if named and counts and named not in counts:
            most = counts.most_common(1)[0][0]
            warnings.append(
                f"config.json says dtype {named}, the weights are {most}: loaders cast them to {named}; "
                f"{option('dtype', most)} (or {named}) makes both agree"
            )
        if self.config is None:
            warnings.append(
                f"no {CONFIG_FILE}: transformers needs one to load the result: {option('assets')}"
            )
        is_said = any(config.get(key) for key in QUANTIZATION_KEYS)
        if is_said and not quantized:
            warnings.append(
                "config.json has a quantization_config, but no weight is quantized: remove this entry"
            )
        if quantized and self.config is not None and not is_said:
            warnings.append(
                f"weights are quantized ({min(quantized)}), but config.json has no quantization_config"
            )
        return warnings

    def reader(self, file: str) -> Callable[[], Iterable[bytes]]:
        """Return a function that reads a file in pieces, since some files are large; config.json has its changes."""
        if file != CONFIG_FILE or self.config is None:
            return lambda: self._store.read_pieces(file)
        return self._changed_config

    def _changed_config(self) -> Iterable[bytes]:
        if not self._changes:  # the original bytes, which keep their formatting
            return self._store.read_pieces(CONFIG_FILE)
        return [(json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n").encode()]


def _float_types(infos: Iterable[TensorInfo], quantized: Collection[str]) -> Counter[str]:
    """Count the float tensors by dtype, without codes and scales (``quantized``)."""
    return Counter(i.dtype.name for i in infos if i.dtype.kind == "float" and i.name not in quantized)


def _named_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype in a config.json, such as "bfloat16"; None if it has none."""
    return next((str(config[key]).removeprefix("torch.") for key in _DTYPE_KEYS if config.get(key)), None)


def _with_dtype(
    config: Mapping[str, Any], name: str, stored: Collection[str], *, is_part: bool = False
) -> dict[str, Any]:
    """Return the changed entries of a config whose dtype becomes ``name``, like that of its parts if not ``stored``."""
    kept = (name, *stored) if is_part else (name,)
    changed: dict[str, Any] = {
        key: name for key in _DTYPE_KEYS if _float_name(config.get(key)) not in (None, *kept)
    }
    for key, value in config.items():
        if isinstance(value, dict) and key not in QUANTIZATION_KEYS:
            inner = _with_dtype(value, name, stored, is_part=True)
            changed |= {key: {**value, **inner}} if inner else {}
    return changed


def _float_name(value: object) -> str | None:
    """Return the name of a float type without "torch."; None for any other value, such as a number in a vocabulary."""
    dtype = known_dtype(value) if isinstance(value, str) else None
    return dtype.name if dtype is not None and dtype.kind == "float" else None


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed entries of a config that unties its embeddings, also those of its parts (text, vision)."""
    parts = {key: value for key, value in config.items() if isinstance(value, dict) and _ties(value)}
    return {key: {**value, **_untied(value)} for key, value in parts.items()} | {"tie_word_embeddings": False}


def _ties(config: Mapping[str, Any]) -> bool:
    """Whether a config or one of its parts ties its embeddings."""
    return any(
        value is True if key == "tie_word_embeddings" else isinstance(value, dict) and _ties(value)
        for key, value in config.items()
    )


KINDS = ("hf", "bin", "shards", "safetensors")
NAMES_OF_FILES = ("hf", "bin")
"""Kinds of sources whose tensors have the names that a class of transformers has in files."""


def config_class(config: Mapping[str, Any]) -> str | None:
    """Return the name of the model's class in a config.json; None if it names none."""
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else None


def own_settings(store: Storage) -> Storage | None:
    """Return the folder that contains the checkpoint's own config.json; None if there is none.

    verl stores config.json in the subfolder ``huggingface``.
    """
    folders = (store, store.child("huggingface"))
    return next((folder for folder in folders if folder.size(CONFIG_FILE) is not None), None)


def own_config(store: Storage) -> dict[str, Any]:
    """Read a checkpoint's own config.json; empty if there is none.

    Raises:
        ConversionError: if it is not JSON.
    """
    folder = own_settings(store)
    return {} if folder is None else config_in(folder)


def config_in(store: Storage, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ConversionError: if it is not a JSON object.
    """
    try:
        loaded = parse_json(store.read(name), is_text=True)
    except ValueError as error:
        refuse_pointers(store, [name], error)  # raises a more useful error for a pointer of git-lfs
        loaded = f"{type(error).__name__}: {error}"
    if not isinstance(loaded, dict):
        raise ConversionError(
            f"The settings in {name} cannot be read.",
            expected="a JSON object",
            got=loaded,
            where=f"{store.where}/{name}",
            todo="correct the file, or move it out of the folder",
        )
    return loaded


def is_setting(file: str) -> bool:
    """Whether the name of a file says that it contains settings."""
    return _SETTINGS.fullmatch(file) is not None
