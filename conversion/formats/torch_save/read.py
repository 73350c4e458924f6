"""Reading torch.save files by range: state dicts and training states, nested as they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.checkpoint.moves.source import BoxReader, Source, StoredValue, constant
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.torch_save.archive_reader import TorchArchive
from vescale_fsdp.conversion.formats.torch_save.held_tensors import (
    HeldTensor,
    box_reader,
    is_tensor_ref,
    stored_tensor,
)
from vescale_fsdp.errors import ConversionError


@dataclass(frozen=True)
class StateFile:
    """One torch.save file that holds a state dict."""

    file: str
    archive: TorchArchive
    leaves: dict[Path, Any]  # tensors as what `is_tensor_ref` knows, everything else as itself


def is_torch_file(store: Storage, file: str) -> bool:
    """Whether a file begins like a torch.save archive (a zip)."""
    size = store.size(file)
    return size is not None and size >= 4 and store.read(file, 0, 4) == b"PK\x03\x04"


def open_archive(store: Storage, file: str, *, trust: bool = False, stand_ins: bool = False) -> TorchArchive:
    """A torch.save file, of which the end is read; ``trust`` and ``stand_ins`` as in `TorchArchive`.

    Raises:
        ConversionError: if it has the format from before zip archives.
        CorruptCheckpointError: if it is not there.
    """
    where = f"{store.where}/{file}"
    size = store.required_info(file).size_bytes
    if not is_torch_file(store, file):
        raise ConversionError(
            "This torch.save file cannot be read by range.",
            expected="the zip format that torch has written since 1.6",
            got="another format",
            where=where,
            todo="load it with torch and save it again",
        )
    return TorchArchive(
        lambda offset, nbytes: store.read(file, offset, nbytes),
        size,
        where=where,
        trust=trust,
        stand_ins=stand_ins,
    )


def open_state_file(store: Storage, file: str, *, trust: bool, stand_ins: bool = False) -> StateFile:
    """Read the directory and the pickle of a torch.save file; ``trust`` and ``stand_ins`` as in `TorchArchive`.

    Raises:
        ConversionError: if it holds no dict, or its pickle names more than tensors need.
        CorruptCheckpointError: if it is damaged.
    """
    where = f"{store.where}/{file}"
    archive = open_archive(store, file, trust=trust, stand_ins=stand_ins)
    content = archive.content
    if not isinstance(content, Mapping):
        raise ConversionError(
            "The file holds no state dict.",
            expected="a dict of tensors, nested or not",
            got="a tensor" if is_tensor_ref(content) else type(content).__name__,
            where=where,
            todo="save model.state_dict() or a dict that contains it",
        )
    leaves = flatten(content, is_tensor_ref)
    if flat := next((path for path in leaves if str(path[-1]).endswith("_flat_param")), None):
        raise ConversionError(
            "FSDP1 has flattened these parameters, and the file does not say how.",
            expected="parameters under their own names",
            got=name_of(flat),
            where=where,
            todo="load it into the model that saved it, and save with StateDictType.SHARDED_STATE_DICT",
        )
    return StateFile(file, archive, leaves)


def open_torch(store: Storage, file: str, *, trust_pickle: bool = False) -> Source:
    """Open a torch.save file; reads its directory and its pickle only.

    Raises:
        ConversionError: if it holds no dict, or its pickle names more than tensors need.
        CorruptCheckpointError: if it is damaged, or is one rank's file of several.
    """
    state = open_state_file(store, file, trust=trust_pickle)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    readers: dict[str, BoxReader] = {}
    paths = {name_of(path): path for path in state.leaves}
    for name, leaf in zip(paths, state.leaves.values(), strict=True):
        if not is_tensor_ref(leaf):
            values[name] = constant(leaf)
            continue
        tensors[name] = stored_tensor(name, [HeldTensor(file, state.archive, leaf)])
        if (reader := box_reader(leaf)) is not None:
            readers[name] = reader
    return Source("torch", store, tensors, values, paths, readers=readers, file=file)
