"""Reading torch.save files by range: state dicts and training states, nested as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vescale_fsdp.conversion.nesting import flatten, name_of
from vescale_fsdp.conversion.source import Source, StoredValue
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.conversion.tensors import StoredChunk, StoredTensor, TensorInfo, whole_box
from vescale_fsdp.conversion.torch_archive import TorchArchive
from vescale_fsdp.conversion.unpickle import TensorRef
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["is_torch_file", "open_torch"]


def is_torch_file(store: Store, file: str) -> bool:
    """Whether a file begins like a torch.save archive (a zip)."""
    size = store.size(file)
    return size is not None and size >= 4 and store.read(file, 0, 4) == b"PK\x03\x04"


def open_torch(store: Store, file: str, *, trust_pickle: bool = False) -> Source:
    """Open a torch.save file; reads its directory and its pickle only.

    Raises:
        ConversionError: if it holds no dict, or its pickle names more than tensors need.
        CorruptCheckpointError: if it is damaged.
    """
    where = f"{store.url}/{file}"
    size = store.required_size(file)
    if not is_torch_file(store, file):
        raise ConversionError(
            explain(
                "this torch.save file cannot be read by range",
                expected="the zip format that torch has written since 1.6",
                got="another format",
                where=where,
                todo="load it with torch and save it again",
            )
        )
    archive = TorchArchive(
        lambda offset, nbytes: store.read(file, offset, nbytes), size, where=where, trust=trust_pickle
    )
    content = archive.content
    if not isinstance(content, Mapping):
        raise ConversionError(
            explain(
                "the file holds no state dict",
                expected="a dict of tensors, nested or not",
                got=type(content).__name__,
                where=where,
                todo="save model.state_dict() or a dict that contains it",
            )
        )
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for path, leaf in flatten(content, lambda value: isinstance(value, TensorRef)).items():
        name = name_of(path)
        paths[name] = path
        if isinstance(leaf, TensorRef):
            tensors[name] = _stored(archive, file, name, leaf)
        else:
            values[name] = _constant(leaf)
    return Source("torch", store, tensors, values, paths, {}, trust_pickle, file=file)


def _stored(archive: TorchArchive, file: str, name: str, ref: TensorRef) -> StoredTensor:
    info = TensorInfo(name, ref.shape, ref.dtype)
    if not info.numel:
        return StoredTensor(info, ())
    offset = archive.tensor_offset(ref)
    return StoredTensor(info, (StoredChunk(whole_box(ref.shape), file, offset, info.nbytes, ref.strides),))


def _constant(value: Any) -> StoredValue:
    return lambda: value
