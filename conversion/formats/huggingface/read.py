"""Read Hugging Face folders and single safetensors files.

model.safetensors, or an index and its files      transformers, diffusers
shard-0000R-model-0000I-of-0000N.safetensors      one file per rank: transformers 5, torch's HuggingFaceStorageWriter
pytorch_model.bin, pytorch_model_fsdp.bin         torch.save files: older versions of transformers, accelerate
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import SourceView
from vescale_fsdp.conversion.formats.huggingface.class_check import missing_tensors
from vescale_fsdp.conversion.formats.huggingface.fingerprints import FINGERPRINTS_FILE, recorded_sums
from vescale_fsdp.conversion.formats.huggingface.repository import (
    BEING_WRITTEN,
    index_of,
    is_weight_file,
    own_config,
    single_of,
    stem_in,
)
from vescale_fsdp.conversion.formats.huggingface.tied_weights import equal_bytes
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, DamagedFiles, some
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.foreign_json import parse_json, whole_numbers
from vescale_fsdp.layout.geometry import Box, whole_box
from vescale_fsdp.layout.safetensors_header import read_header

# The name that torch's HuggingFaceStorageWriter gives to one rank's file.
_SHARD_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# One of several files of a model. (?!00001\.): a file 00001-of-00001 is a whole model.
_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-(?!00001\.)\d{5}\.safetensors$")
_BIN_STEMS = ("pytorch_model", "diffusion_pytorch_model", "pytorch_model_fsdp")


def read_tensors(store: Storage, file: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read the header of a safetensors file, whose tensors must cover the file's data without gaps.

    Returns:
        The tensors by name, and the ``__metadata__``.

    Raises:
        CorruptCheckpointError: if the file is truncated or not a safetensors file.
    """
    size = store.required_info(file).size_bytes
    entries, metadata = read_header(partial(store.read, file), size, f"{store.where}/{file}")
    tensors = {}
    for name, entry in entries.items():
        info = TensorInfo(name, entry.shape, entry.dtype)
        chunk = StoredChunk(whole_box(entry.shape), Extent(file, entry.start_bytes, entry.nbytes))
        tensors[name] = StoredTensor(info, (chunk,) if info.numel else ())
    return tensors, metadata


def open_safetensors(store: Storage, file: str) -> Source:
    """Open one safetensors file.

    Raises:
        CorruptCheckpointError: if it is damaged.
    """
    tensors, metadata = read_tensors(store, file)
    facts = {"metadata": json.dumps(metadata)}
    return Source("safetensors", store, tensors, facts=facts, file=file, file_metadata=metadata)


def open_hf_folder(store: Storage) -> Source:
    """Open a folder with ``model.safetensors``, or with an index and its files.

    Raises:
        ConversionError: if the folder has both (loaders would ignore the index) or neither, or a save to it is running
            or has failed.
        CorruptCheckpointError: if index and headers disagree or a file is damaged.
    """
    listed = store.list_files()
    if BEING_WRITTEN in listed:
        raise ConversionError(
            "The folder is being written, or a save to it has failed.",
            expected="a complete folder",
            got=BEING_WRITTEN,
            where=store.where,
            todo="wait for the save to end, or save again",
        )
    files = [file for file in listed if file.endswith(".safetensors") and "/" not in file]
    stem = stem_in(listed)
    single, index = single_of(stem), index_of(stem)
    mapped: dict[str, str] | None = None
    if store.size(index) is not None:
        if single in files:
            raise _two_models(
                store, f"either {single} or {index}", "both", " (transformers loads the single file)"
            )
        mapped = weight_map(store, index)
        files = sorted(set(mapped.values()))  # by the numbers in their names
    elif single in files:
        files = [single]
    elif len(files) != 1 or _ONE_OF_SEVERAL.search(files[0]):  # a single file may have any other name
        raise ConversionError(
            "The folder has several weight files, or one of several, but no index.",
            expected=f"{single}, or {index} and its files",
            got=", ".join(files[:4]) or "no safetensors file",
            where=store.where,
            todo="pass one of the files instead of the folder, or restore the index",
        )
    metadata: dict[str, dict[str, str]] = {}

    def read(file: str) -> Mapping[str, StoredTensor]:
        tensors, metadata[file] = read_tensors(store, file)
        return tensors

    tensors, warnings = _tensors_of_files(store, files, mapped, read, index)
    return Source(
        "hf",
        store,
        tensors,
        facts={"weight files": str(len(files))},
        file_metadata=_joined_metadata(metadata, store.where),
        warnings=warnings,
        folder_problems=partial(_folder_problems, store, tensors),
        sums=recorded_sums(store, tensors) if FINGERPRINTS_FILE in listed else {},
    )


def _two_models(store: Storage, expected: str, got: str, hint: str = "") -> ConversionError:
    return ConversionError(
        "The folder contains two models.",
        expected=expected,
        got=got,
        where=store.where,
        todo=f"remove the outdated one{hint}",
    )


def _joined_metadata(files: Mapping[str, Mapping[str, str]], where: str) -> dict[str, str]:
    """Join the ``__metadata__`` of several files.

    Under each key, all files must have the same text, or JSON lists of names (torchao's ``tensor_names``); such lists
    are concatenated.

    Raises:
        ConversionError: if files have different texts under one key.
    """
    joined: dict[str, str] = {}
    for file, metadata in files.items():
        for key, value in metadata.items():
            before = joined.setdefault(key, value)
            if before == value:
                continue
            lists = [_json_list(before), _json_list(value)]
            if lists[0] is None or lists[1] is None:
                raise ConversionError(
                    "The files of a model have different __metadata__.",
                    expected=f"{key}: {before:.100}",
                    got=f"{value:.100}",
                    where=f"{where}/{file}",
                    todo="convert the files one by one, or copy the folder again from where it was made",
                )
            # fromkeys: without duplicates, in order.
            joined[key] = json.dumps(list(dict.fromkeys([*lists[0], *lists[1]])))
    return joined


def _json_list(text: str) -> list[str] | None:
    """Parse a JSON list of strings; returns None for any other text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


def _folder_problems(store: Storage, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """List problems that make loaders fail although every single file is valid."""
    problems = []
    listed = store.list_files()
    index_file = index_of(stem_in(listed))
    used = {chunk.extent.file for tensor in tensors.values() for chunk in tensor.chunks} | {index_file}
    # Weights for other loaders are not stale: pytorch_model.bin, Mistral's consolidated.safetensors.
    others = [file for file in listed if file.endswith(".safetensors") and "/" not in file]
    stale = [file for file in others if file not in used and not file.startswith("consolidated")]
    if stale:
        problems.append(f"weight files that are not part of the model: {', '.join(stale)}; remove them")
    if store.size(index_file) is not None:
        metadata = parse_json(store.read(index_file)).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        nbytes = sum(tensor.info.nbytes for tensor in tensors.values())
        if total != nbytes:
            problems.append(f"{index_file} says total_size {total}, the files have {nbytes}; write it again")
    try:
        config = own_config(store)
    except ConversionError as error:
        return [*problems, str(error)]
    class_name, missing = missing_tensors({name: tensor.info for name, tensor in tensors.items()}, config)
    if missing:
        problems.append(f"{class_name} needs tensors that no file has: {some(missing, 6)}")
    return problems


def open_shards(store: Storage) -> Source:
    """Open a folder of per-rank safetensors files, as written by transformers 5 and torch's HuggingFaceStorageWriter.

    The header of each file contains the offsets of its boxes in the whole tensors.

    Raises:
        ConversionError: if the folder also contains other weight files.
        CorruptCheckpointError: if a file is damaged or the boxes do not tile a tensor.
    """
    listed = store.list_files()
    files = [file for file in listed if _SHARD_FILE.fullmatch(file)]
    if whole := [file for file in listed if is_weight_file(file) and file not in files]:
        raise _two_models(
            store, "either the files of the ranks or whole weights", f"{files[0]} and {whole[0]}"
        )
    chunks: dict[str, dict[Box, StoredChunk]] = {}
    dtypes: dict[str, DType] = {}
    damaged = DamagedFiles()
    headers = damaged.read(lambda file: (file, *read_tensors(store, file)), files)
    if len(headers) < len(files):  # whether tensors have holes is not known, too
        damaged.read(store.required_info, _absent_ranks(files))
    damaged.raise_any()
    for file, tensors, metadata in headers:
        offsets_of = _saved_offsets(store, file, metadata)
        for name, tensor in tensors.items():
            shape = tensor.info.shape
            box = Box(offsets_of.get(name, (0,) * len(shape)), shape)
            if len(box.offsets) != len(shape):
                raise _odd_shard(store, file, f"{len(shape)} offsets of {name}", box.offsets)
            if dtypes.setdefault(name, tensor.info.dtype) != tensor.info.dtype:
                raise _odd_shard(store, file, f"{name} of {dtypes[name].name}", tensor.info.dtype.name)
            # An empty box has no chunk in the file, but counts for the shape of the whole tensor.
            extent = tensor.chunks[0].extent if tensor.chunks else Extent(file, 0, 0)
            chunks.setdefault(name, {})[box] = StoredChunk(
                box, extent
            )  # replicas of a box have the same bytes
    tensors = {}
    for name, chunk_of_box in chunks.items():
        # The header has no global shape, so it is computed from the ends of the boxes.
        ends = [tuple(o + n for o, n in zip(box.offsets, box.sizes, strict=True)) for box in chunk_of_box]
        info = TensorInfo(name, tuple(max(column) for column in zip(*ends, strict=True)), dtypes[name])
        with damaged.noted():
            tensors[name] = StoredTensor(
                info, tuple(chunk for box, chunk in chunk_of_box.items() if box.numel)
            )
    if len(tensors) < len(chunks):  # a rank may have no file, but not if a tensor has a hole
        absent = DamagedFiles()
        absent.read(store.required_info, _absent_ranks(files))
        absent.raise_any()
    damaged.raise_any()
    warning = "these files do not record the shapes of whole tensors: a missing last rank cannot be detected"
    facts = {"weight files": str(len(files))}
    return Source("shards", store, tensors, facts=facts, warnings=(warning,))


def _absent_ranks(files: Iterable[str]) -> list[str]:
    """Return names of files that ranks before the last one would have; the first rank is 1, or 0 if it has a file."""
    by_rank = {int(file.split("-")[1]): file for file in files}
    absent = sorted(set(range(1, max(by_rank))) - by_rank.keys())
    return [re.sub(r"^shard-\d+", f"shard-{rank:05d}", by_rank[max(by_rank)]) for rank in absent]


def _saved_offsets(store: Storage, file: str, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Read the offsets of a file's boxes in the whole tensors, by tensor name, from the file's ``__metadata__``."""
    try:
        sharding = parse_json(metadata.get("DCP_SHARDING_INFO", "{}"))
        return {str(name): whole_numbers(entry["saved_offsets"]) for name, entry in sharding.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # also JSON with unexpected types
        got = f"{type(error).__name__}: {error}"
        raise _odd_shard(store, file, "offsets of its boxes in the header", got) from error


def _odd_shard(store: Storage, file: str, expected: str, got: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "The files of the ranks do not fit together.",
        expected=expected,
        got=got,
        where=f"{store.where}/{file}",
        todo="copy the files of all ranks again, all from one save",
    )


def open_bin_folder(store: Storage, *, trust_pickle: bool = False) -> Source:
    """Open a folder with ``pytorch_model.bin``, ``pytorch_model_fsdp.bin``, or an index and its files.

    Raises:
        ConversionError: if a file contains no dict of tensors, or its pickle names code that tensors do not need.
        CorruptCheckpointError: if index and files disagree or a file is damaged.
    """
    # Imported here, since folders of safetensors files need no pickle reader.
    from vescale_fsdp.conversion.formats.torch_save.read import open_torch

    indices = [f"{stem}.bin.index.json" for stem in _BIN_STEMS]
    singles = [f"{stem}.bin" for stem in _BIN_STEMS]
    index = next((file for file in indices if store.size(file) is not None), None)
    mapped = None if index is None else weight_map(store, index)
    single = next((file for file in singles if store.size(file) is not None), singles[0])
    files = [single] if mapped is None else sorted(set(mapped.values()))

    def read(file: str) -> Mapping[str, StoredTensor]:
        return open_torch(store, file, trust_pickle=trust_pickle).tensors

    tensors, warnings = _tensors_of_files(store, files, mapped, read, index or single)
    return Source("bin", store, tensors, facts={"weight files": str(len(files))}, warnings=warnings)


def weight_map(store: Storage, index_file: str) -> dict[str, str]:
    """Read an index; returns tensor name -> file.

    Raises:
        CorruptCheckpointError: if the index is damaged or names files outside the folder.
    """
    try:
        index = parse_json(store.read(index_file), is_text=True)
        mapped = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # also JSON with unexpected types
        raise CorruptCheckpointError(
            "The index cannot be read.",
            expected="JSON with a weight_map",
            got=f"{type(error).__name__}: {error}",
            where=f"{store.where}/{index_file}",
        ) from error
    for name, file in mapped.items():
        # An index may come from anyone and must not name files elsewhere. A colon marks a drive letter or a URL.
        if file.startswith(("/", "\\")) or ".." in file or ":" in file:
            raise _disagree(store, index_file, name, "in a file of the folder", f"mapped to {file}")
    return mapped


def _tensors_of_files(
    store: Storage,
    files: Iterable[str],
    mapped: Mapping[str, str] | None,
    read: Callable[[str], Mapping[str, StoredTensor]],
    index_file: str,
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Read the tensors of all files, and compare them with the index.

    Like transformers, this accepts tensors that the index does not name. It accepts a tensor in several files if the
    bytes, which are read and compared, are the same.

    Args:
        mapped: tensor name -> file, from the index; None without an index.
        read: returns the tensors of a file.
        index_file: the name of the index, for messages.

    Returns:
        The tensors by name; and warnings about tensors that the index does not name or that several files contain.

    Raises:
        CorruptCheckpointError: if a file lacks a tensor that the index maps to it, or two files have different tensors
            of one name.
    """
    damaged = DamagedFiles()
    tables = dict(damaged.read(lambda file: (file, read(file)), files))
    damaged.raise_any()
    for name, file in (mapped or {}).items():
        if name not in tables[file]:
            others = (f"found in {other}" for other, table in tables.items() if name in table)
            raise _disagree(store, index_file, name, f"in {file}", next(others, "not there"))
    tensors: dict[str, StoredTensor] = {}
    file_of: dict[str, str] = dict(mapped or {})
    repeated: list[str] = []
    for file, table in tables.items():
        for name, tensor in table.items():
            first = file_of.setdefault(name, file)
            if first == file:
                tensors[name] = tensor
                continue
            repeated.append(name)
            copies = (tables[first][name], tensor)
            left, right = (SourceView(Source("hf", store, {name: copy}), name, name) for copy in copies)
            if not equal_bytes(left, right):
                raise _disagree(
                    store, index_file, name, f"only in {first}", f"a different tensor of that name in {file}"
                )
    unnamed = [name for name in tensors if mapped is not None and name not in mapped]
    notes = {
        "tensors that the index does not name, included as in transformers": unnamed,
        "tensors that are in several files with the same bytes": repeated,
    }
    return tensors, tuple(f"{note}: {some(names)}" for note, names in notes.items() if names)


def _disagree(store: Storage, index_file: str, name: str, expected: str, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "The index disagrees with the files.",
        expected=f"{name} {expected}",
        got=got,
        where=f"{store.where}/{index_file}",
        todo="copy the folder again from where it was made, or convert it again",
    )
