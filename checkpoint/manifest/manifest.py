"""The manifest: the small JSON file that makes a folder a checkpoint, and defines where every byte is stored.

`Manifest` is immutable, and its size does not grow with the number of ranks. The tensors of a rank's file, their order
and their offsets are computed from the manifest (see `rank_file` and `zarr_layout`). `structure` describes the state,
and `state_tree` the state's values. FORMAT.md is the specification.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import isfinite, prod
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.manifest.file_names import (
    ARRAYS_NODE,
    CHECKPOINT_NODE,
    FORMAT_NAME,
    MANIFEST_FILES,
    array_paths,
)
from vescale_fsdp.checkpoint.manifest.state_tree import Json, decode
from vescale_fsdp.checkpoint.manifest.structure import (
    Entry,
    Structure,
    check_complete,
    dump_json,
    merge_structures,
)
from vescale_fsdp.checkpoint.manifest.torch_dtypes import is_numpy_dtype
from vescale_fsdp.checkpoint.storage.checksums import RunningDigest, hex_digest_of
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError
from vescale_fsdp.layout.distribution import (
    Axis,
    Cut,
    Distribution,
    Holders,
    LayoutCut,
    RankSet,
    ShardCut,
    UnitsCut,
)
from vescale_fsdp.layout.foreign_json import parse_json, whole_numbers
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.layout.region import Region

FORMAT_VERSION = 1  # of both forms
STRIPE_BYTES = 1 << 20  # 1 MiB: each stripe has one checksum, and is the smallest read that can be verified
SPLIT_BYTES = 64 << 10  # 64 KiB: replicas divide the writing of regions of at least this size

_SAVE_ID = re.compile(r"[0-9a-f]{16}")  # part of paths: a slash or dots could lead out of the folder
_SUMS = re.compile(r"[0-9a-f]{32}")
_MAX_STRIPE_BYTES = 1 << 30  # 1 GiB: a reader allocates memory for a stripe
_MAX_NUMEL = 1 << 62  # larger counts overflow the 64-bit integers of torch and numpy
_MAX_RANKS = 1 << 20  # bounds the time of computations that loop over ranks
_MAX_CHUNKS = 1 << 24  # bounds the number of files of one tensor


class SaveRecord(NamedTuple):
    """How a checkpoint was saved; `Saver` of `checkpoint/save.py` fills it.

    The keys are fixed: readers take any other key for damage, so a new one needs a new `FORMAT_VERSION`.

    Attributes:
        unix_s: time of the commit, in seconds since 1970.
        seconds: duration of the save, from the user's call until its commit: until the manifest is written.
        metric: the ``metric`` of `CheckpointManager.save`; None if there is none, or it is not a finite number.
    """

    unix_s: float
    seconds: float
    metric: float | None = None

    @property
    def is_valid(self) -> bool:
        """Whether all values are finite numbers."""
        values = (self.unix_s, self.seconds, 0.0 if self.metric is None else self.metric)
        # `type`: isinstance accepts a bool.
        return all(type(value) in (int, float) and isfinite(value) for value in values)


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint, and its layout in files.

    Args:
        save_id: 16 hex digits, new for every attempt to save; in the native form, data is in ``data-<save_id>/``.
        world_size: number of ranks that saved.
        structure: state tree, tensors and tables.
        rank_sets: table of sets of ranks.
        holders: for each tensor, the index in ``rank_sets`` of the set of ranks that have the tensor.
        blob_bytes: bytes reserved in each rank's file for per-rank values (0 if there are none).
        metadata: the JSON given to `save`; the key `user` of the file.
        stripe_bytes: bytes per checksum.
        split_bytes: replicas divide a region of at least this many bytes among themselves. None: every replica stores
            its whole region, because ranks do not share storage.
        chunks: for the zarr form, each tensor's chunk sizes; None for the native form.
        saved: how the checkpoint was saved; None before the commit, in memory, and if a conversion wrote it.
        sums: the byte sums of each tensor, 32 hex digits; None if they were not computed.
    """

    save_id: str
    world_size: int
    structure: Structure
    rank_sets: tuple[RankSet, ...]
    holders: tuple[int, ...]
    blob_bytes: int = 0
    metadata: Json = None
    stripe_bytes: int = STRIPE_BYTES
    split_bytes: int | None = SPLIT_BYTES
    chunks: tuple[tuple[int, ...], ...] | None = None
    saved: SaveRecord | None = None
    sums: tuple[str, ...] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors in file order."""
        return self.structure.entries

    @cached_property
    def _holders(self) -> dict[tuple[int, int], Holders]:
        """The cache of `holders_of`; not a field of the dataclass, because ``==`` compares fields."""
        return {}

    def holders_of(self, index: int) -> Holders:
        """Return the ranks that have tensor number ``index``, with the order of replicas."""
        key = (self.holders[index], self.entries[index].axes)
        if key not in self._holders:
            self._holders[key] = Holders(self.rank_sets[key[0]], self.structure.axes[key[1]])
        return self._holders[key]

    @cached_property
    def distributions(self) -> list[Distribution]:
        """The axes and cuts of each tensor, by tensor number."""
        return [self.structure.distribution(entry) for entry in self.entries]

    def split(self, index: int, region: Region, replica: int, replicas: int) -> Region:
        """Return the part of a region that replica number ``replica`` of ``replicas`` stores.

        Replicas divide a large region into equal parts. A small region is stored by the first replica alone.
        """
        if replicas == 1 or self.split_bytes is None:
            return region
        if self.is_undivided(index, region):
            start = region.span.start
            # An empty part: replicas other than the first store nothing.
            return region if replica == 0 else Region(region.box, Range(start, start))
        return region.part(replica, replicas)

    def is_undivided(self, index: int, region: Region) -> bool:
        """Return whether a region is too small to be divided: the first replica then stores the whole region."""
        return self.split_bytes is not None and region.numel * self.entries[index].itemsize < self.split_bytes

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors and per-rank values, without headers and checksums; replicas count once."""
        return sum(entry.numel * entry.itemsize for entry in self.entries) + self.world_size * self.blob_bytes

    @cached_property
    def pieces(self) -> list[dict[int, Region]]:
        """For each rank, tensor number -> the region that the rank stores, in file order; for readers of all files.

        The time to compute the pieces grows with their number, not with ranks times tensors. A reader of one file uses
        `RankFile` without this list, which needs less memory.
        """
        stored: list[dict[int, Region]] = [{} for _ in range(self.world_size)]
        structure = self.structure
        # A cache, because weights and their moments are cut alike. The key is all that a tensor's regions depend on.
        parts: dict[tuple[object, ...], list[tuple[list[int], Region]]] = {}
        # In the zarr form, ranks' files have no tensors.
        for index, entry in enumerate(() if self.is_zarr else structure.entries):
            cut = (entry.shape, entry.axes, entry.cuts, self.holders[index])
            held_by = parts.get(cut)
            if held_by is None:
                touching = structure.distribution(entry).touching(entry.shape, None, structure.layouts)
                at = self.holders_of(index).ranks_at
                held_by = parts[cut] = [(at(coordinates), held) for coordinates, held in touching]
            for ranks, held in held_by:
                if len(ranks) == 1:  # fast path: no replicas
                    if held.numel:
                        stored[ranks[0]][index] = held
                    continue
                # The first replica alone stores a small region.
                for replica, rank in enumerate(ranks[:1] if self.is_undivided(index, held) else ranks):
                    region = self.split(index, held, replica, len(ranks))
                    if region.numel:
                        stored[rank][index] = region
        return stored

    @cached_property
    def indices_by_name(self) -> dict[str, list[int]]:
        """Name -> indices of the tensors of that name: several if groups of ranks cut the tensor in different ways."""
        indices: dict[str, list[int]] = {}
        for index, entry in enumerate(self.entries):
            indices.setdefault(entry.name, []).append(index)
        return indices

    @property
    def is_zarr(self) -> bool:
        """Whether tensors are stored in zarr arrays, not in ranks' files."""
        return self.chunks is not None

    @property
    def chunk_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of each tensor's chunks; only for the zarr form."""
        assert self.chunks is not None
        return self.chunks

    @cached_property
    def array_paths(self) -> list[str]:
        """Folder of each tensor's array in the zarr form, relative to the checkpoint's folder."""
        paths = array_paths(self.indices_by_name)
        return [f"{ARRAYS_NODE}/{paths[entry.name]}" for entry in self.entries]

    @property
    def name(self) -> str:
        """Name of the manifest's own file, relative to the checkpoint's folder."""
        return MANIFEST_FILES[self.is_zarr]

    @property
    def files_folder(self) -> str:
        """Folder of the ranks' files, relative to the checkpoint's folder."""
        return CHECKPOINT_NODE if self.is_zarr else f"data-{self.save_id}"

    def file_name(self, rank: int) -> str:
        """Return the name of a rank's file, relative to the checkpoint's folder."""
        return f"{self.files_folder}/{rank:05d}-of-{self.world_size:05d}.safetensors"

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's file, with its checksum."""
        structure = self.structure
        content = dump_json(
            {
                "format": FORMAT_NAME,
                "version": FORMAT_VERSION,
                "save_id": self.save_id,
                "world_size": self.world_size,
                "stripe_bytes": self.stripe_bytes,
                "split_bytes": self.split_bytes,
                "blob_bytes": self.blob_bytes,
                "rank_sets": [ranks.to_json() for ranks in self.rank_sets],
                "axes": [[axis.to_json() for axis in axes] for axes in structure.axes],
                "layouts": [layout.to_json() for layout in structure.layouts],
                "tensors": [
                    {**entry.to_json(), "ranks": holder}
                    for entry, holder in zip(structure.entries, self.holders, strict=True)
                ],
                **({} if self.chunks is None else {"chunks": self.chunks}),
                **({} if self.sums is None else {"sums": self.sums}),
                "state": structure.tree,
                "user": self.metadata,
                **({} if self.saved is None else {"saved": self.saved._asdict()}),
            }
        )
        return content[:-1] + _seal(hex_digest_of(content))  # the seal ends with the closing brace

    @classmethod
    def from_bytes(cls, raw: bytes, *, where: str) -> Manifest:
        """Parse and check a manifest from an untrusted source.

        Raises:
            CheckpointError: if the manifest has a newer version of the format.
            CorruptCheckpointError: if the bytes are not a manifest, are damaged, or contradict themselves.
        """
        data = _parse(raw, where)
        try:
            manifest = cls(
                data["save_id"],
                data["world_size"],
                Structure.from_json(data),
                tuple(RankSet.from_json(ranks) for ranks in data["rank_sets"]),
                tuple(int(entry["ranks"]) for entry in data["tensors"]),
                data["blob_bytes"],
                data["user"],
                data["stripe_bytes"],
                data["split_bytes"],
                tuple(whole_numbers(sizes) for sizes in data["chunks"]) if "chunks" in data else None,
                SaveRecord(**data["saved"]) if "saved" in data else None,
                tuple(data["sums"]) if "sums" in data else None,
            )
            for problem in _problems(manifest):
                raise _corrupt(where, problem)
            decode(manifest.structure.tree, partial(_check_leaf, manifest, where), where)
        except CheckpointError:  # already describes the problem
            raise
        except Exception as error:  # values of wrong types or sizes can raise errors of any class
            raise _corrupt(where, f"{type(error).__name__}: {error}") from error
        return manifest


def build_manifest(
    classes: Sequence[tuple[RankSet, Structure]],
    *,
    save_id: str,
    world_size: int,
    blob_bytes: int = 0,
    metadata: Json = None,
    stripe_bytes: int = STRIPE_BYTES,
    split_bytes: int | None = SPLIT_BYTES,
) -> Manifest:
    """Build the manifest of a state from the structures of all ranks; needs no process group.

    Args:
        classes: each distinct structure, with the ranks that have it.

    Raises:
        CheckpointError: if the structures contradict each other, or no rank has some part of a tensor.
    """
    if len(classes) == 1:  # the usual case: all ranks have the same structure, and nothing is merged
        ranks, structure = classes[0]
        sets = (ranks,) * len(structure.entries)
    else:
        structure, sets = merge_structures(classes)
    check_complete(structure, sets, classes)
    table: dict[RankSet, int] = {}
    holders = tuple(table.setdefault(ranks, len(table)) for ranks in sets)
    return Manifest(
        save_id,
        world_size,
        structure,
        tuple(table),
        holders,
        blob_bytes,
        metadata,
        stripe_bytes,
        split_bytes,
    )


def _seal(checksum: object) -> bytes:
    """Return the last bytes of a manifest. The checksum covers all bytes before them, followed by a closing brace."""
    return f',"checksum":"{checksum}"}}'.encode()


def _corrupt(where: str, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "The file is not a manifest, or is damaged.",
        expected=f"a {FORMAT_NAME} manifest of version {FORMAT_VERSION}",
        got=got,
        where=where,
        todo="copy the manifest again from where the checkpoint was made, or use an older step: no tensor can be found "
        "without it",
    )


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON of a manifest, and check its format, checksum and version."""
    try:
        data = json.loads(raw, parse_constant=_refuse_constant)
        if not isinstance(data, dict) or data.get("format") != FORMAT_NAME:
            name = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise _corrupt(where, f"format {name!r}")
        seal = _seal(data.get("checksum"))
        written = RunningDigest(memoryview(raw)[: -len(seal)])
        written.update(b"}")  # the checksum was computed before the seal replaced the closing brace
        as_written = raw.endswith(seal) and written.hexdigest() == data["checksum"]
        if not as_written:
            # The file may have been reformatted: the bytes then differ, but not the JSON values.
            content = {key: value for key, value in parse_json(raw).items() if key != "checksum"}
            if data.get("checksum") != hex_digest_of(dump_json(content)):
                raise _corrupt(where, "the checksum does not fit the content")
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise _corrupt(where, str(error)) from error
    version = data.get("version")
    # After the checksum: a flipped bit can change the version, and the message would then suggest a wrong remedy.
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            "The checkpoint was written by a newer version of the format.",
            expected=f"version {FORMAT_VERSION}",
            got=f"version {version}",
            where=where,
            todo="update vescale_fsdp",
        )
    if version != FORMAT_VERSION:
        raise _corrupt(where, f"version {version!r}")
    return data


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")  # NaN and Infinity, which Python's parser accepts


def _check_leaf(manifest: Manifest, where: str, node: Mapping[str, Any]) -> None:
    """Check that the tensor number or name in a leaf of the state tree is valid.

    Raises:
        CorruptCheckpointError: if the number or name is not valid.
    """
    if node["$"] == "tensor":
        index = node["i"]
        # `type`: isinstance accepts a bool.
        if type(index) is not int or not 0 <= index < len(manifest.entries):
            raise _corrupt(where, f"tensor number {index!r} of {len(manifest.entries)}")
        if node.get("numpy") and not is_numpy_dtype(manifest.entries[index].dtype):
            raise _corrupt(where, f"an array of dtype {manifest.entries[index].dtype}")
    elif node["$"] == "per_rank" and not (isinstance(node["name"], str) and manifest.blob_bytes):
        raise _corrupt(where, f"per-rank values {node['name']!r} in {manifest.blob_bytes} bytes")


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield the bounds and references that are not valid. Only the first is reliable: later checks assume valid values.

    If there are no problems, computed paths stay inside the folder, computed indices stay inside the arrays, and
    computations take bounded time and memory.
    """
    world_size, split_bytes = manifest.world_size, manifest.split_bytes
    save_id, stripe_bytes = manifest.save_id, manifest.stripe_bytes
    valid = {
        # Part of paths: a slash or dots could lead out of the folder.
        "save_id": isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id) is not None,
        # `type`: isinstance accepts a bool.
        "world_size": type(world_size) is int and 1 <= world_size <= _MAX_RANKS,
        "stripe_bytes": type(stripe_bytes) is int
        and 16 <= stripe_bytes <= _MAX_STRIPE_BYTES
        and stripe_bytes % 16 == 0,  # 16 is the largest item size, so that no stripe cuts an element
        # 256 TiB: far above any real size.
        "blob_bytes": type(manifest.blob_bytes) is int and 0 <= manifest.blob_bytes < 1 << 48,
        "split_bytes": split_bytes is None or (type(split_bytes) is int and split_bytes >= 0),
        "saved": manifest.saved is None or manifest.saved.is_valid,
        "sums": manifest.sums is None or _are_valid_sums(manifest.sums, len(manifest.entries)),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            yield f"{name} {getattr(manifest, name)!r}"
    for ranks in manifest.rank_sets:
        for start, count, step, outer, outer_step in ranks.runs:
            last = start + max(0, count - 1) * step + max(0, outer - 1) * outer_step
            is_inside = min(start, count, step, outer, outer_step) >= 0 and last < world_size
            # The size too: with a step of 0, a run with a huge count would stay inside the world.
            if not is_inside or count * outer > world_size:
                yield f"ranks {ranks.to_json()} in a world of {world_size}"
    if manifest.is_zarr and len(manifest.chunk_sizes) != len(manifest.entries):
        yield f"chunks of {len(manifest.chunk_sizes)} tensors"
    for index, entry in enumerate(manifest.entries):
        for problem in _entry_problems(manifest, index, entry):
            yield f"tensor {entry.label!r}: {problem}"
    for before, entry in pairwise(manifest.entries):
        if before.itemsize < entry.itemsize:  # a piece in a rank's file would not be aligned
            yield f"tensor {entry.label!r} of {entry.dtype} after {before.dtype}"
    for index, entry in enumerate(manifest.entries):
        if entry.numel and (missing := manifest.holders_of(index).missing_cell()) is not None:
            yield f"tensor {entry.label!r}: no rank has cell {missing} of its mesh"


def _are_valid_sums(sums: Sequence[object], count: int) -> bool:
    return len(sums) == count and all(isinstance(each, str) and _SUMS.fullmatch(each) for each in sums)


def _entry_problems(manifest: Manifest, index: int, entry: Entry) -> Iterator[str]:
    """Yield the problems of one tensor's description."""
    structure = manifest.structure
    _ = entry.itemsize  # raises for an unknown dtype
    # The sign is checked too, because two negative sizes have a positive product.
    if min(entry.shape, default=0) < 0 or entry.numel > _MAX_NUMEL:
        yield f"shape {entry.shape}"
    if not 0 <= entry.axes < len(structure.axes) or len(structure.axes[entry.axes]) != len(entry.cuts):
        yield f"axes {entry.axes} with {len(entry.cuts)} cuts"
    if not 0 <= manifest.holders[index] < len(manifest.rank_sets):
        yield f"ranks {manifest.holders[index]}"
    if manifest.is_zarr:
        entry.name.encode()  # raises for a lone surrogate, which no folder's name can have
        chunks = manifest.chunk_sizes[index]
        # Not strict: the lengths of `chunks` and the shape are compared below.
        is_inside = all(1 <= size <= max(1, full) for size, full in zip(chunks, entry.shape, strict=False))
        count = prod(-(-full // max(1, size)) for size, full in zip(chunks, entry.shape, strict=False))
        if len(chunks) != len(entry.shape) or not is_inside or count > _MAX_CHUNKS:
            yield f"chunks {chunks} of shape {entry.shape}"
    for axis, cut in zip(structure.axes[entry.axes], entry.cuts, strict=True):
        if not _is_valid_cut(manifest, entry, axis, cut):
            yield f"cut {cut} on axis {axis} of shape {entry.shape}"


def _is_valid_cut(manifest: Manifest, entry: Entry, axis: Axis, cut: Cut) -> bool:
    """Return whether a cut fits the tensor and the axis. Called before any code lists the cut's pieces."""
    # The formula for coordinates divides by the strides, and by the size of the faster digit.
    faster, step = axis.minor
    if not 1 <= axis.size <= manifest.world_size or min(axis.stride, faster, step) < 1 or axis.size % faster:
        return False
    if isinstance(cut, ShardCut):
        return 0 <= cut.dim < len(entry.shape)
    if isinstance(cut, UnitsCut):
        return all(count > 0 for count, _ in cut.runs) and sum(count for count, _ in cut.runs) == axis.size
    assert isinstance(cut, LayoutCut)
    if cut.layout < 0 or cut.slot < 0:
        return False
    layout = manifest.structure.layouts[cut.layout]
    return layout.num_shards == axis.size and layout.slots[cut.slot].shape == entry.shape
