"""`read_state`: read single tensors of a native checkpoint, or boxes of tensors, without a process group.

    state = read_state("ckpt/step-1000")                           reads the manifest alone
    state.names()                                                  every tensor's name
    state["model.layers.0.weight"].read()                          a torch tensor
    state["model.layers.0.weight"].read(Box((0, 0), (128, 64)))    its first 128 rows and 64 columns
    state.tree(read=True)                                          the whole nested state, with full tensors

A read fetches only the byte ranges that it needs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_FILES, parse_step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import CopyFinder
from vescale_fsdp.checkpoint.manifest.state_tree import Json, decode, dotted_name, join_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.native.read import ReadPlan, Reads
from vescale_fsdp.checkpoint.native.targets import FileCopy, LoadTarget
from vescale_fsdp.checkpoint.native.zarr_chunks import ChunkTables
from vescale_fsdp.checkpoint.native.zarr_live import ZarrReads
from vescale_fsdp.checkpoint.ranks.coordinator import num_neighbors
from vescale_fsdp.checkpoint.state.per_rank import leaf_of, unpack_blob
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import how_to_download, open_storage
from vescale_fsdp.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    UnknownNameError,
    some,
)
from vescale_fsdp.layout.geometry import Box, Range
from vescale_fsdp.layout.region import Copy, Region, whole_region

_MANIFEST_LIMIT_BYTES = 1 << 30  # 1 GiB; a larger file is no manifest, and is not read into memory


def read_manifest(storage: Storage) -> Manifest:
    """Read and verify the manifest of a checkpoint.

    Raises:
        NoCheckpointError: if there is no manifest.
        CheckpointError: if a newer version of this library wrote the manifest.
        CorruptCheckpointError: if the manifest is damaged.
    """
    absent: OSError | None = None
    for name in MANIFEST_FILES:
        where = f"{storage.where}/{name}"
        try:
            raw = storage.read_small(name, limit_bytes=_MANIFEST_LIMIT_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:  # NotADirectoryError: the path is a file
            absent = error
        except ValueError as error:  # too large, or not a regular file
            raise CorruptCheckpointError(
                "This file cannot be read as a manifest.",
                expected=f"a file of at most {_MANIFEST_LIMIT_BYTES} bytes",
                got=str(error),
                where=where,
            ) from error
        else:
            return Manifest.from_bytes(raw, where=where)
    raise _no_checkpoint(storage) from absent


def _no_checkpoint(storage: Storage) -> NoCheckpointError:
    """Return the error for a path without a manifest. It names steps or files of other formats at the path.

    Raises:
        StorageError: if the path's bucket does not exist.
    """
    got, todo = "no manifest.json", "give the path of a complete checkpoint"
    names = storage.list_folder("")
    if not names:
        storage.check_bucket()
        got = "an empty folder, or no folder"
        todo = how_to_download(storage.where) or todo
    steps = [name for name in names if parse_step_name(name)]
    if steps:
        got += f", but {steps[-1]}"
        todo = "for a folder of steps, CheckpointManager(path).restore(state); or give the path of one step"
    elif ".metadata" in names:
        got += ", but .metadata of torch.distributed.checkpoint"
        todo = "read it with `load` or dcp.load, or convert it to this format with vescale-convert to-native"
    elif any(name.endswith((".safetensors", ".bin", ".pt", ".pth")) for name in names):
        got += ", but files of weights"
        todo = "read them with `load`, or convert them to this format with vescale-convert to-native"
    return NoCheckpointError(
        "There is no checkpoint at this path.",
        expected="a folder with manifest.json (it is written last: a folder without one is incomplete)",
        got=got,
        where=storage.where,
        todo=todo,
    )


def read_state(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open a native checkpoint for reading tensors by name. Reads only the manifest.

    Raises:
        CheckpointError: if the path contains no complete native checkpoint.

    Examples:
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_read", {"w": torch.arange(6.0).reshape(2, 3)}, metadata={"loss": 2.5})
        >>> read_state("to_read").metadata
        {'loss': 2.5}
    """
    return CheckpointReader(open_storage(path, neighbors=num_neighbors()))  # neighbors: ranks share the cores


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint; `read` and `read_flat` load its values.

    Examples:
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_look", {"w": torch.arange(6.0).reshape(2, 3)})
        >>> tensor = read_state("to_look")["w"]
        >>> tensor.shape, tensor.read_flat(2, 4).tolist()
        (torch.Size([2, 3]), [2.0, 3.0])
    """

    reader: CheckpointReader
    index: int

    @property
    def name(self) -> str:
        """The tensor's name: its keys in the state, joined by dots."""
        return self.reader.manifest.entries[self.index].label

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.reader.manifest.entries[self.index].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that was saved."""
        return dtype_named(self.reader.manifest.entries[self.index].dtype)

    def read(
        self, box: Box | None = None, *, out: torch.Tensor | None = None, verify: bool = True
    ) -> torch.Tensor:
        """Read the tensor, or a box of the tensor. Returns a CPU tensor, or ``out``.

        Args:
            box: the part to read; default: the whole tensor.
            out: a tensor with the box's shape and the stored dtype; filled in place and returned. An error may leave it
                partly filled.
            verify: compare checksums; this reads whole stripes, of 1 MiB by default.

        Raises:
            CorruptCheckpointError: if a checksum differs.
            CheckpointError: if the box is not inside the tensor, or ``out`` has another shape or dtype.
        """
        wanted = whole_region(self.shape) if box is None else Region(box, Range(0, box.numel))
        self._check(wanted.box, out)
        # An explicit device, because the caller may have changed torch's default device.
        result = out if out is not None else torch.empty(wanted.box.sizes, dtype=self.dtype, device="cpu")
        self.reader.fill([(self.index, wanted, result)], verify=verify)
        return result

    def read_flat(self, start: int, stop: int, *, verify: bool = True) -> torch.Tensor:
        """Read elements [start, stop) of the row-major flattened tensor. Returns a 1D CPU tensor."""
        whole = whole_region(self.shape)
        if not 0 <= start <= stop <= whole.numel:
            raise self._misfit(f"a range inside [0, {whole.numel})", f"[{start}, {stop})")
        result = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        self.reader.fill([(self.index, Region(whole.box, Range(start, stop)), result)], verify=verify)
        return result

    def _check(self, box: Box, out: torch.Tensor | None) -> None:
        """Raise CheckpointError if the box is not inside the tensor, or ``out`` has another shape or dtype."""
        inside = len(box.sizes) == len(self.shape) and all(
            0 <= start <= start + size <= full
            for start, size, full in zip(box.offsets, box.sizes, self.shape, strict=True)
        )
        if not inside:
            raise self._misfit(f"a box inside {tuple(self.shape)}", f"{box}")
        if out is not None and (tuple(out.shape) != box.sizes or out.dtype != self.dtype):
            raise self._misfit(f"{box.sizes} of {self.dtype}", f"{tuple(out.shape)} of {out.dtype}")

    def _misfit(self, expected: str, got: str) -> CheckpointError:
        """Return the error for a request that does not fit the tensor."""
        return CheckpointError(
            "The tensor does not have the requested part or type.",
            expected=expected,
            got=got,
            where=self.name,
        )


class CheckpointReader(Mapping[str, CheckpointTensor]):
    """A checkpoint as a mapping from tensor name to `CheckpointTensor`. Needs no process group.

    A name is the tensor's keys in the state, joined by dots. If that name is not unique, the keys are joined by ``/``,
    as in the files; every tensor can be read under this name too. A tied tensor is stored and listed under its first
    name, and can be read under all its names.

    Attributes:
        manifest: layouts, state tree and all other information that the manifest stores.
        metadata: the ``metadata`` argument of `save`.

    Examples:
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_open", {"model": {"w": torch.ones(2, 3)}})
        >>> reader = read_state("to_open")
        >>> list(reader), reader.tree(read=True)["model"]["w"].sum().item(), tuple(reader["model/w"].shape)
        (['model.w'], 6.0, (2, 3))
    """

    Tensor = CheckpointTensor  # the type of the mapping's values, for the user's annotations

    def __init__(
        self,
        storage: Storage,
        *,
        cost: Callable[[int], int] = lambda rank: 0,
        manifest: Manifest | None = None,
    ) -> None:
        self.storage = storage
        self.manifest = read_manifest(storage) if manifest is None else manifest
        self.metadata: Json = self.manifest.metadata
        self._finder = CopyFinder(self.manifest, cost)
        self._tables = ChunkTables(storage, self.manifest)

    def __getitem__(self, name: str) -> CheckpointTensor:
        index = self._aliases.get(name)
        if index is None:
            raise UnknownNameError(
                "The checkpoint has no such tensor.",
                expected=f"one of {some(self)}",
                got=repr(name),
                where=self.storage.where,
                todo="iterate over the reader for all names",
            )
        return CheckpointTensor(self, index)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """Listed name -> number in the manifest, for each tensor, in file order."""
        return {
            dotted if (dotted := dotted_name(name)) in self._aliases else name: places[0]
            for name, places in self.manifest.indices_by_name.items()
        }

    @functools.cached_property
    def _aliases(self) -> dict[str, int]:
        """Accepted name -> number in the manifest: all stored names, names of tied tensors, and unique dotted names."""
        stored = {name: places[0] for name, places in self.manifest.indices_by_name.items()}

        def visit(node: Json, name: str) -> None:
            """Add all names of the tensors below a node of the state tree."""
            if isinstance(node, list):
                for number, item in enumerate(node):
                    visit(item, join_name(name, number))
            elif isinstance(node, dict) and "$" not in node:
                for key, item in node.items():
                    visit(item, join_name(name, key))
            elif isinstance(node, dict) and node["$"] == "tensor":
                stored[name] = int(node["i"])
            elif isinstance(node, dict) and node["$"] == "tuple":
                visit(node["v"], name)
            elif isinstance(node, dict) and node["$"] == "dict":  # with keys that JSON cannot express
                for key, item in node["v"]:
                    visit(item, join_name(name, decode(key, lambda leaf: None)))

        visit(self.manifest.structure.tree, "")
        dotted: dict[str, int | None] = {}  # None if several tensors have this dotted name
        for name, index in stored.items():
            spelled = dotted_name(name)
            dotted[spelled] = index if dotted.get(spelled, index) == index else None
        return stored | {name: index for name, index in dotted.items() if index is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def names(self) -> list[str]:
        """Return the names of all tensors, in file order."""
        return list(self._places)

    def tree(self, *, read: bool = False) -> Any:
        """Return the nested state.

        Args:
            read: True returns full CPU tensors, and for each `PerRank` value a list of all ranks' values. False returns
                `CheckpointTensor` leaves, and None for each `PerRank` value.
        """
        per_rank = self.per_rank_values() if read and self.manifest.blob_bytes else []
        tensors: dict[int, Any] = {}

        def leaf(node: Mapping[str, Any]) -> Any:
            """Return the value for a leaf of the state tree."""
            if node["$"] == "per_rank":
                return (
                    [values[node["name"]] for values in per_rank if node["name"] in values] if read else None
                )
            if node["$"] == "absent":
                return None
            index = int(node["i"])
            if index not in tensors:  # a tied tensor is read once, and stays one object
                stored = CheckpointTensor(self, index)
                tensors[index] = stored.read() if read else stored
            value = tensors[index]
            return value.numpy() if read and node.get("numpy") else value

        return decode(self.manifest.structure.tree, leaf, self.storage.where)

    def per_rank_values(self, ranks: list[int] | None = None) -> list[dict[str, Any]]:
        """Read the `PerRank` values of some ranks (default: all). Returns one dict per rank, from name to value."""
        chosen = list(range(self.manifest.world_size)) if ranks is None else ranks
        if not self.manifest.blob_bytes:
            return [{} for _ in chosen]
        return [
            self._unpack(blob, self._finder.file(rank).name)
            for rank, blob in zip(chosen, self.blobs(chosen), strict=True)
        ]

    def blobs(self, ranks: list[int]) -> list[memoryview]:
        """Read and verify the packed `PerRank` values of some ranks."""
        nbytes = self.manifest.blob_bytes
        blobs = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in ranks]
        with closing(ReadPlan(self.storage, self._finder)) as reads:
            for rank, blob in zip(ranks, blobs, strict=True):
                if nbytes:
                    file = self._finder.file(rank)
                    copy = Copy.run(file.blob_start, 0, nbytes)
                    reads.add(file, FileCopy(LoadTarget(blob), copy, file.blob_start, file.table_start))
            reads.run(verify=True)
        return [blob.numpy().data for blob in blobs]

    def _unpack(self, blob: memoryview, file_name: str) -> dict[str, Any]:
        """Decode the packed `PerRank` values of one rank. Returns a dict from name to value."""
        where = f"{self.storage.where}/{file_name}"
        # The first 8 bytes are a length, which is 0 if this rank had no values.
        packed = unpack_blob(blob, where=where) if any(blob[:8]) else {}
        values = {}
        for name, (tree, tensors) in packed.items():
            try:
                values[name] = decode(tree, functools.partial(leaf_of, tensors), where)
            # The classes that `decode` raises for a damaged tree.
            except (LookupError, TypeError, ValueError, RecursionError) as error:
                raise CorruptCheckpointError(
                    "A per-rank value is damaged.",
                    expected="a tree as described in FORMAT.md",
                    got=f"{type(error).__name__}: {error}",
                    where=f"{name} in {where}",
                ) from error
        return values

    def fill(self, wanted: list[tuple[int, Region, torch.Tensor]], *, verify: bool) -> None:
        """Fill tensors with regions of stored tensors.

        Args:
            wanted: (number of the stored tensor, region, tensor to fill).
        """
        with closing(self.reads()) as reads:
            targets = [reads.ask(index, region, tensor) for index, region, tensor in wanted]
            reads.run(verify=verify)
        for target in targets:
            target.finish()

    def reads(self) -> Reads:
        """Return a new, empty plan of reads from this checkpoint."""
        if self.manifest.is_zarr:
            return ZarrReads(self.storage, self._tables)
        return ReadPlan(self.storage, self._finder)
