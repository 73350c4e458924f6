"""Read torch.distributed.checkpoint folders without a process group and without trusting their pickles.

``.metadata`` lists the boxes that tile each tensor, and the location of each box: (file, offset, length) of a
torch.save archive inside a ``.distcp`` file. FSDP2, DDP, tensor parallelism and ragged shards all save such boxes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import ListIndex
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.source import Source, StoredValue
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.formats.torch_save.archive_reader import TorchArchive, load_torch_bytes
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import Record, TensorRef, load_dcp_metadata
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, DamagedFiles
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box

METADATA_FILE = ".metadata"
_ACCELERATE_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_\d+)?/")  # such as pytorch_model_fsdp_0/

# Errors for a record that lacks an attribute or has one of a wrong type, which is then reported as damaged.
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError)


def open_dcp(store: Storage, *, trust_pickle: bool = False, stand_ins: bool = False) -> Source:
    """Open a DCP checkpoint, or accelerate's folder with two checkpoints: the model's and the optimizer's.

    Reads only ``.metadata`` and the sizes of files.

    Args:
        trust_pickle: import and run code that pickles name.
        stand_ins: replace names that are not needed, as in `load_tensor_pickle`.

    Raises:
        ConversionError: for a checkpoint that this reader refuses (untrusted pickle, transformed data), or a folder
            with several checkpoints.
        CorruptCheckpointError: if the boxes in the metadata do not tile the tensors, or a file is truncated.
    """
    # ("",): if no folder has a checkpoint, opening the root raises the error that says what is missing.
    folders = ("",) if store.size(METADATA_FILE) is not None else dcp_folders(store.list_files()) or ("",)
    stems = [match[1] for folder in folders if (match := _ACCELERATE_FOLDER.fullmatch(folder))]
    # At most one model and one optimizer: two models would be two checkpoints.
    if len(folders) > 1 and not len(set(stems)) == len(stems) == len(folders):
        raise ConversionError(
            "The folder contains several checkpoints.",
            expected="one, or one of a model and one of its optimizer",
            got=", ".join(folder.rstrip("/") for folder in folders[:6]),
            where=store.where,
            todo="pass one of these folders",
        )
    damaged = DamagedFiles()
    open_folder = partial(_open_folder, store, trust_pickle=trust_pickle, stand_ins=stand_ins)
    sources = damaged.read(open_folder, folders)
    damaged.raise_any()
    if len(sources) == 1:
        return sources[0]
    sides = [{**source.tensors, **source.values} for source in sources]
    if doubles := sides[0].keys() & sides[1].keys():
        raise CorruptCheckpointError(
            "The checkpoints of the model and of the optimizer contain entries with the same name.",
            expected="names under model and under optimizer",
            got=min(doubles),
            where=store.where,
            todo="pass one of the two folders",
        )
    return replace(
        sources[0],
        tensors={name: tensor for source in sources for name, tensor in source.tensors.items()},
        values={name: value for source in sources for name, value in source.values.items()},
        paths={name: path for source in sources for name, path in source.paths.items()},
        facts={**sources[0].facts, "folders": ", ".join(folder.rstrip("/") for folder in folders)},
    )


def dcp_folders(files: Iterable[str]) -> tuple[str, ...]:
    """Return the direct subfolders that contain DCP checkpoints, with a trailing slash, sorted."""
    # Not deeper: several models of one step lie side by side, and a folder of many steps is no single source.
    ends = [file for file in files if file.endswith(f"/{METADATA_FILE}") and file.count("/") == 1]
    return tuple(sorted(file.removesuffix(METADATA_FILE) for file in ends))


def _open_folder(store: Storage, folder: str, *, trust_pickle: bool, stand_ins: bool) -> Source:
    """Open one checkpoint; ``folder`` is its path in ``store`` with a trailing slash, or empty."""
    where = f"{store.where}/{folder}{METADATA_FILE}"
    data = store.read(folder + METADATA_FILE)
    metadata = load_dcp_metadata(data, where=where, trust=trust_pickle, stand_ins=stand_ins)
    try:
        reader = _MetadataReader(metadata, store, folder, trust_pickle)
        tensors, values = reader.entries()
        planned = metadata.planner_data or {}  # None if the planner of another library wrote no paths
        paths = {str(name): _path(path) for name, path in planned.items() if isinstance(path, tuple)}
    except _DAMAGE as error:
        raise CorruptCheckpointError(
            "The checkpoint's metadata is damaged.",
            expected="the records torch.distributed.checkpoint writes",
            got=f"{type(error).__name__}: {error}",
            where=where,
        ) from error
    # getattr: older versions of torch record no version.
    facts = {"dcp version": str(getattr(metadata, "version", None)), "data files": str(len(reader.sizes))}
    locate = partial(_locate, store, trust_pickle)
    return Source("dcp", store, tensors, values, paths, facts, locate=locate)


def _locate(store: Storage, trust_pickle: bool, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
    """Find the byte range of a chunk's items inside its torch.save archive.

    Called when the chunk is read, so that opening a checkpoint does not read every archive.
    """
    record = chunk.extent
    where = f"tensor {info.name} in {store.where}/{record.file} at byte {record.offset}"
    archive = TorchArchive(
        lambda offset, nbytes: store.read(record.file, record.offset + offset, nbytes),
        record.nbytes,
        where=where,
        trust=trust_pickle,
    )
    ref = archive.content
    if not isinstance(ref, TensorRef) or ref.shape != chunk.box.sizes or ref.dtype != info.dtype:
        raise CorruptCheckpointError(
            "The content of a data file differs from the metadata.",
            expected=f"a {info.dtype.name} tensor of shape {chunk.box.sizes}",
            got=f"{ref.dtype.name} {ref.shape}" if isinstance(ref, TensorRef) else type(ref).__name__,
            where=where,
            todo="the files are from different saves: copy the whole checkpoint again",
        )
    return archive.chunk(chunk.box, record, ref, where)


def _read_value(name: str, store: Storage, record: Extent, trust: bool) -> Any:
    """Read a value that is not a tensor.

    A function and not a method of `_MetadataReader`: a bound method would keep all metadata in memory.
    """
    where = f"{name} in {store.where}/{record.file} at byte {record.offset}"
    return load_torch_bytes(store.read(*record), where=where, trust=trust)


def _path(parts: tuple[Any, ...]) -> tuple[str | int, ...]:
    """Convert a path of DCP to this package's form, in which an index of a list is a `ListIndex`."""
    return tuple([ListIndex(part) if isinstance(part, int) else str(part) for part in parts])


class _MetadataReader:
    """Converts the records of one Metadata into stored tensors and values."""

    def __init__(self, metadata: Record, store: Storage, folder: str, trust_pickle: bool) -> None:
        self._store, self._folder, self._trust = store, folder, trust_pickle
        self._entries: dict[str, Any] = metadata.state_dict_metadata
        self.sizes: dict[str, int] = {}  # data file -> size in bytes
        self._damaged = DamagedFiles()
        # getattr: torch sets ``offset`` only for tensors, not for values.
        self._records = {
            (index.fqn, getattr(index, "offset", None)): info for index, info in metadata.storage_data.items()
        }

    def entries(self) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
        """Return the tensors and the values of the checkpoint, by name."""
        tensors: dict[str, StoredTensor] = {}
        values: dict[str, StoredValue] = {}
        for name, entry in self._entries.items():
            # By class name, since the unpickler returns stand-ins for torch's classes.
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = self._tensor(name, entry)
            else:
                values[name] = self._value(name)
        self._damaged.raise_any()
        return tensors, values

    def _tensor(self, name: str, entry: Any) -> StoredTensor:
        info = TensorInfo(name, tuple(entry.size), entry.properties.dtype)
        chunks = []
        for chunk in entry.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if not box.numel:
                continue  # an empty box has no bytes, and may have the same offset as the next box
            chunks.append(StoredChunk(box, self._record(name, box.offsets)))
        return StoredTensor(info, tuple(chunks))

    def _value(self, name: str) -> StoredValue:
        return partial(_read_value, name, self._store, self._record(name, None), self._trust)

    def _record(self, name: str, offsets: tuple[int, ...] | None) -> Extent:
        """Return the extent of an item; checks that the file is large enough.

        Args:
            offsets: the offsets of the item's box; None for a value.
        """
        info = self._records.get((name, offsets))
        if info is None:
            raise CorruptCheckpointError(
                "The checkpoint's metadata does not say where an entry is stored.",
                expected=f"a storage record for {name} at {offsets}",
                got="none",
                where=f"{self._store.where}/{self._folder}{METADATA_FILE}",
                todo="save the checkpoint again: its save did not finish, or its metadata is incomplete",
            )
        # getattr: torch pickles this attribute only if it is set.
        if getattr(info, "transform_descriptors", None):
            raise ConversionError(
                "The checkpoint's data was transformed (such as compressed) when it was saved.",
                expected="plain .distcp data",
                got=f"transforms {list(info.transform_descriptors)}",
                where=f"{name} in {self._store.where}/{info.relative_path}",
                todo="load it with the program that saved it, and save it without stream transforms",
            )
        file = self._checked_name(info.relative_path)
        if info.offset < 0 or info.length < 0 or info.offset + info.length > self.sizes[file]:
            with self._damaged.noted():
                raise CorruptCheckpointError(
                    "A data file of the checkpoint is truncated.",
                    expected=f"at least {info.offset + info.length} bytes (for {name})",
                    got=f"{self.sizes[file]} bytes",
                    where=f"{self._store.where}/{file}",
                )
            self.sizes[file] = sys.maxsize  # one error per file
        return Extent(file, info.offset, info.length)

    def _checked_name(self, file: str) -> str:
        """Return the path in the store of a file in the metadata, and note the file's size at its first use."""
        name, file = file, self._folder + file
        if file not in self.sizes:
            path = PurePosixPath(name)
            # `.metadata` may come from anyone, and must not make the reader open files elsewhere.
            if path.is_absolute() or ".." in path.parts:
                raise CorruptCheckpointError(
                    "The checkpoint's metadata refers to a file outside its folder.",
                    expected="a file name inside the checkpoint",
                    got=file,
                    where=f"{self._store.where}/{self._folder}{METADATA_FILE}",
                    todo="do not use this checkpoint: DCP does not write such metadata",
                )
            self.sizes[file] = sys.maxsize  # of a missing file, which is noted once
            with self._damaged.noted():
                self.sizes[file] = self._store.required_info(file).size_bytes
        return file
