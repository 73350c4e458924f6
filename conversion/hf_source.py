"""Reading Hugging Face folders and single safetensors files."""

from __future__ import annotations

import json

from vescale_fsdp.conversion.hf_layout import INDEX_FILE, SINGLE_FILE
from vescale_fsdp.conversion.safetensors_file import read_header
from vescale_fsdp.conversion.source import Source
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.conversion.tensors import StoredTensor
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, explain

__all__ = ["open_hf_folder", "open_safetensors", "weight_map"]


def open_safetensors(store: Store, file: str) -> Source:
    """Open one safetensors file.

    Raises:
        CorruptCheckpointError: if it is damaged.
    """
    tensors, metadata = read_header(store, file)
    return Source("safetensors", store, tensors, facts={"metadata": json.dumps(metadata)}, file=file)


def open_hf_folder(store: Store) -> Source:
    """Open a folder with ``model.safetensors``, or with an index and its shards.

    Raises:
        ConversionError: if both are there (loaders would ignore the shards), or neither.
        CorruptCheckpointError: if index and headers disagree or a file is damaged.
    """
    files = [file for file in store.list_files() if file.endswith(".safetensors") and "/" not in file]
    has_index = store.size(INDEX_FILE) is not None
    if has_index and SINGLE_FILE in files:
        raise ConversionError(
            explain(
                "the folder holds two models",
                expected=f"either {SINGLE_FILE} or {INDEX_FILE}",
                got="both",
                where=store.url,
                todo="remove the one that is out of date (transformers would load the single file)",
            )
        )
    mapped = weight_map(store) if has_index else None
    if mapped is None and SINGLE_FILE in files:
        files = [SINGLE_FILE]
    elif mapped is not None:
        files = sorted(set(mapped.values()))
    elif len(files) != 1:
        raise ConversionError(
            explain(
                "the folder has several safetensors files but no index",
                expected=f"{SINGLE_FILE}, or {INDEX_FILE} and its files",
                got=", ".join(files[:4]) or "no safetensors file",
                where=store.url,
                todo="pass one of the files instead of the folder, or restore the index",
            )
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(store, file)[0].items():
            if mapped is not None and mapped.get(name) != file:
                raise _disagree(store, name, f"in {mapped.get(name, 'no file')}", f"found in {file}")
            tensors[name] = tensor
    for name in mapped or {}:
        if name not in tensors:
            raise _disagree(store, name, f"in {(mapped or {})[name]}", "not there")
    return Source("hf", store, tensors, facts={"weight files": str(len(files))})


def weight_map(store: Store) -> dict[str, str]:
    """Tensor name -> file, as the index says.

    Raises:
        CorruptCheckpointError: if the index is damaged or points outside of the folder.
    """
    try:
        index = json.loads(store.read_file(INDEX_FILE))
        found = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            explain(
                "the index cannot be read",
                expected="JSON with a weight_map",
                got=f"{type(error).__name__}: {error}",
                where=f"{store.url}/{INDEX_FILE}",
                todo="copy the file again from where it was made",
            )
        ) from error
    for name, file in found.items():
        if file.startswith(("/", "\\")) or ".." in file or ":" in file:
            raise _disagree(store, name, "in a file of the folder", f"mapped to {file}")
    return found


def _disagree(store: Store, name: str, expected: str, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        explain(
            "the index disagrees with the files",
            expected=f"{name} {expected}",
            got=got,
            where=f"{store.url}/{INDEX_FILE}",
            todo="copy the folder again from where it was made, or convert it anew",
        )
    )
