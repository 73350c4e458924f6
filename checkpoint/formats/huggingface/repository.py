"""The files of a Hugging Face repository: names of weight files, and the settings that are copied with the weights.

    model.safetensors                                     the only weight file
    model-00001-of-0000N.safetensors, ..                  several weight files
    model.safetensors.index.json                          their index: tensor name -> file
    diffusion_pytorch_model...                            models of diffusers, whose config.json has ``_class_name``
    config.json, tokenizer.json, *.py, LICENSE, ..        settings

Settings are recognized by a list of known names. A repository also contains weights in other forms
(``original/consolidated.00.pth``, ``onnx/model.onnx``) and files of a trainer (``optimizer.pt``,
``training_args.bin``); these are not copied, because they would not match the converted weights, and some loaders
prefer them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.layout.model_shapes import natural_key

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


CONFIG_FILE = "config.json"
_SETTINGS = re.compile(
    r"([0-9]+_[^/]+/|tokenizer[^/]*/)?("  # a module of sentence-transformers, a tokenizer's folder
    r"((?!adapter_)[^/]*config[^/]*|tokenizer[^/]*|[^/]*vocab[^/]*|merges|bpe|modules|normalizer|tekken|params"
    r"|[^/]*processor[^/]*|[^/]*feature_extractor[^/]*|[^/]*tokens(_map)?|chat_template[^/]*)\.json"
    r"|(tokenizer[^/]*|[^/]*vocab[^/]*|merges|dict[^/]*|requirements|[^/]*licen[cs]e[^/]*|notice)\.txt"
    r"|(tokenizer|spiece|spm|[^/]*sentencepiece|[^/]*bpe)[^/]*\.(model|vocab|codes)"
    r"|[^/]+\.(spm|tiktoken|jinja|md)|bpe\.codes"
    r"|(additional_chat_templates|chat_templates)/[^/]+\.jinja"
    r"|(licen[cs]e|notice|readme|use_policy|copying)[^/.]*"
    r"|(.+/)?[^/]+\.py)",  # code that config.json names
    re.IGNORECASE,
)
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before


class Assets:
    """The settings files of a folder or URL, and files there that match a pattern; none at all for None.

    Raises:
        ConversionError: if there are none where there should be, config.json is not JSON, or a pattern matches
            nothing.
    """

    def __init__(self, url: str | None, include: Sequence[str] = ()) -> None:
        self.files: tuple[str, ...] = ()
        self.left: tuple[str, ...] = ()  # files that stay behind
        self.config: dict[str, Any] | None = None
        self._changes: dict[str, Any] = {}  # of settings in config.json; None for those that go
        if url is None:
            return
        self._store: Storage = open_store(url)
        found = self._store.list_files()
        if not found:
            raise ConversionError(
                "There are no settings files to carry over.",
                expected="a folder with config.json, tokenizer files and so on",
                got="an empty or missing folder",
                where=url,
                todo="check the path given with --assets",
            )
        candidates = sorted((file for file in found if _may_go(file)), key=natural_key)
        for pattern in include:
            if not any(fnmatchcase(file, pattern) for file in candidates):
                raise _no_match(pattern, candidates, url)
        taken = {f for f in candidates if is_setting(f) or any(fnmatchcase(f, p) for p in include)}
        self.files = tuple(file for file in candidates if file in taken)
        self.left = tuple(file for file in candidates if file not in taken)
        refuse_pointers(self._store, self.files)
        if CONFIG_FILE in self.files:
            self.config = _config_in(self._store)

    def set_weights_dtype(self, name: str) -> None:
        """Keep config.json in step with weights that were cast: loaders believe the config, not the files. Those of
        diffusers have no such entry."""
        if is_of_diffusers(self.config or {}):
            return
        key = next((key for key in _DTYPE_KEYS if key in (self.config or {})), _DTYPE_KEYS[0])
        self._changes[key] = name

    def set_quantization(self, found: dict[str, Any] | None) -> None:
        """Keep config.json in step with codes that were made, or are gone (None)."""
        self._changes |= {**dict.fromkeys(QUANTIZATION_KEYS), QUANTIZATION_KEYS[0]: found}

    def name_dtype_held(self, infos: Iterable[TensorInfo], quantized: Collection[str]) -> None:
        """Keep config.json in step with what is left of the ordinary floats: a type that none has gives way to the one
        that config.json named before, or else to that of most."""
        held = _float_types(infos, quantized)
        if held and _named_dtype(self.settings) not in held:
            before = _named_dtype(self.config or {})
            self.set_weights_dtype(
                before if before is not None and before in held else held.most_common(1)[0][0]
            )

    def untie(self) -> None:
        """Keep config.json in step with weights that are stored apart: loaders believe the config."""
        self._changes |= _untied(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """config.json as it goes into the result; empty if there is none."""
        changed = {**(self.config or {}), **self._changes}
        return {key: value for key, value in changed.items() if value is not None or key not in self._changes}

    def disagreements(self, infos: Iterable[TensorInfo], quantized: Collection[str]) -> list[str]:
        """What config.json says of the weights' types that they deny; loaders believe the config."""
        config, found = self.settings, list[str]()
        held, said = _float_types(infos, quantized), _named_dtype(config)
        if said and held and said not in held:
            most = held.most_common(1)[0][0]
            found.append(
                f"config.json says dtype {said}, the weights are {most}: loaders make them {said}; "
                f"--dtype {most} (or {said}) makes both agree"
            )
        if self.config is None:
            found.append(f"no {CONFIG_FILE}: transformers needs one to load the result (--assets DIR)")
        says_so = any(config.get(key) for key in QUANTIZATION_KEYS)
        if says_so and not quantized:
            found.append("config.json has a quantization_config, but no weight is quantised: remove it there")
        if quantized and self.config is not None and not says_so:
            name = min(quantized)
            found.append(f"weights are quantised ({name}), but config.json has no quantization_config")
        return found

    def reader(self, file: str) -> Callable[[], Iterable[bytes]]:
        """How to get a file's bytes, as they go into the result; a few MiB at a time, since some are large."""
        return lambda: self._read(file)

    def _read(self, file: str) -> Iterable[bytes]:
        if file != CONFIG_FILE or not self._changes or self.config is None:
            return self._store.read_pieces(file)
        return [(json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n").encode()]


def _float_types(infos: Iterable[TensorInfo], quantized: Collection[str]) -> Counter[str]:
    """How many tensors are ordinary floats of each type."""
    return Counter(i.dtype.name for i in infos if i.dtype.kind == "float" and i.name not in quantized)


def _named_dtype(config: Mapping[str, Any]) -> str | None:
    return next((str(config[key]).removeprefix("torch.") for key in _DTYPE_KEYS if config.get(key)), None)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config, and of its parts (text, vision), that tie no embedding any more."""
    parts = {key: value for key, value in config.items() if isinstance(value, dict) and _ties(value)}
    return {key: {**value, **_untied(value)} for key, value in parts.items()} | {"tie_word_embeddings": False}


def _ties(config: Mapping[str, Any]) -> bool:
    return any(
        value is True if key == "tie_word_embeddings" else isinstance(value, dict) and _ties(value)
        for key, value in config.items()
    )


def config_class(config: Mapping[str, Any]) -> str | None:
    """Name of the class that a config.json says the weights are of."""
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else None


def own_settings(store: Storage) -> Storage | None:
    """The folder of settings beside a checkpoint's weights, or in it, as verl leaves them; None if there is none."""
    folders = (store, store.child("huggingface"))
    return next((folder for folder in folders if folder.size(CONFIG_FILE) is not None), None)


def own_config(store: Storage) -> dict[str, Any]:
    """The config.json among a checkpoint's own settings; empty if there is none.

    Raises:
        ConversionError: if it is not JSON.
    """
    folder = own_settings(store)
    return {} if folder is None else _config_in(folder)


def _config_in(store: Storage) -> dict[str, Any]:
    try:
        loaded = parse_json(store.read(CONFIG_FILE), is_text=True)
    except ValueError as error:
        refuse_pointers(store, [CONFIG_FILE], error)
        loaded = f"{type(error).__name__}: {error}"
    if not isinstance(loaded, dict):
        raise ConversionError(
            "The settings in config.json cannot be read.",
            expected="a JSON object",
            got=loaded,
            where=f"{store.where}/{CONFIG_FILE}",
            todo="correct the file, or leave it out of --assets",
        )
    return loaded


def _no_match(pattern: str, files: Sequence[str], url: str) -> ConversionError:
    return ConversionError(
        "A pattern of --include-asset matches no file.",
        expected=f"patterns that match files such as {', '.join(files[:6]) or 'none'}",
        got=pattern,
        where=url,
        todo="correct the pattern; weights in safetensors do not go along",
    )


def is_setting(file: str) -> bool:
    """Whether a file of a repository is one of settings, by its name."""
    return _SETTINGS.fullmatch(file) is not None


def _may_go(file: str) -> bool:
    return not is_weight_file(file) and not any(part.startswith(".") for part in file.split("/"))
