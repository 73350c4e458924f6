"""`save`: describe, agree, write, commit. One all-reduce to agree, one after writing, one after the commit.

every rank                                             rank 0 besides
-----------------------------------------------        -------------------------------------------
take the state's structure                             lock the folder, refuse an existing checkpoint
agree on its digest (all errors meet here)
compute the manifest and the own file from it
write data-<id>/<rank>.safetensors, fsync
meet: any error means no commit
                                                       fsync the folder, publish manifest.json: the commit
meet: the commit's error, if any                       remove what older attempts left
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.agreement import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.chunk_owners import Chunk
from vescale_fsdp.checkpoint.image import FileImage
from vescale_fsdp.checkpoint.manifest import (
    MANIFEST_NAME,
    SPLIT_BYTES,
    STRIPE_BYTES,
    Manifest,
    build_manifest,
)
from vescale_fsdp.checkpoint.per_rank import pack_blob
from vescale_fsdp.checkpoint.quiet import gc_paused
from vescale_fsdp.checkpoint.rankfile import RankFile
from vescale_fsdp.checkpoint.storage import Storage, open_storage
from vescale_fsdp.checkpoint.structure import dump_json
from vescale_fsdp.checkpoint.taking import TakenState, take_state
from vescale_fsdp.checkpoint.tree import Json
from vescale_fsdp.checkpoint.writing import write_rank_file
from vescale_fsdp.checkpoint.zarr_layout import as_arrays
from vescale_fsdp.checkpoint.zarr_writing import write_arrays, write_groups
from vescale_fsdp.errors import CheckpointError, explain

__all__ = ["Format", "Saver", "commit_manifest", "plain_json", "save"]

Format = Literal["native", "zarr"]
_FORMATS: tuple[Format, ...] = get_args(Format)


def save(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    *,
    user: Json = None,
    overwrite: bool = False,
    format: Format = "native",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; when this returns on any rank, it is complete and durable. A collective.

    Args:
        path: folder or fsspec URL; it becomes a checkpoint by the appearance of its manifest, last of all.
        state: any nesting of dicts, lists and tuples of tensors, DTensors, plain values, `PerRank` values
            and objects with ``state_dict`` and ``load_state_dict``. Plain tensors and values must be the
            same on all ranks that have them.
        user: JSON of your own, returned by `read_state(path).user`.
        overwrite: replace an existing checkpoint; the old one stays good until the new one is committed.
        format: "native" (one safetensors file per rank, the fast one) or "zarr" (one zarr v3 array per
            tensor, for tools outside PyTorch; loads back at any world size as well).
        process_group: the ranks that save; default: all.

    Raises:
        CheckpointError: on all ranks, if any of them fails; nothing is committed then.
    """
    coordinator = coordinator_for(process_group)
    Saver(open_storage(path), coordinator, overwrite=overwrite, format=format).save(state, user)


@dataclass
class Saver:
    """The steps of a save, for callers that put other work between them."""

    storage: Storage
    coordinator: Coordinator
    overwrite: bool = False
    stripe_bytes: int = STRIPE_BYTES
    split_bytes: int | None = SPLIT_BYTES
    format: Format = "native"
    every_node: bool = False  # the storage is each node's own: every rank stores all it holds

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(
                explain("There is no such format.", expected="'native' or 'zarr'", got=repr(self.format))
            )

    def save(self, state: Any, user: Json = None) -> None:
        """All steps in turn."""
        taken, error = None, None
        with torch.no_grad():
            try:
                taken = take_state(state, rank_of=self.coordinator.rank_of)
            except Exception as caught:  # noqa: BLE001  whatever it is, all ranks must hear of it
                error = caught
            self.write(taken, error, user)

    def write(self, taken: TakenState | None, error: Exception | None, user: Json) -> None:
        """Agree, write and commit what was taken. ``error`` is what taking it raised."""
        with ExitStack() as held:
            self._commit(self.write_uncommitted(taken, error, user, held))

    def write_uncommitted(
        self, taken: TakenState | None, error: Exception | None, user: Json, held: ExitStack
    ) -> Manifest:
        """Agree and write this rank's file; what is returned is yet to be committed by rank 0.

        Args:
            held: on rank 0, gets the folder's lock; to be closed after the commit.
        """
        blob = b""
        try:
            if error is None and taken is not None:
                plain_json(user)
                _ = taken.structure.digest  # computed here, where an error of one rank reaches all
                blob = pack_blob(taken.per_rank)
                self._claim(held)
        except Exception as caught:  # noqa: BLE001  whatever it is, all ranks must hear of it
            error = caught
        manifest = self._plan(taken, len(blob), error, user)
        assert taken is not None
        self._write_own(manifest, taken, blob)
        return manifest

    def _claim(self, held: ExitStack) -> None:
        """On rank 0: keep other jobs out, and refuse to replace a checkpoint unasked."""
        if self.coordinator.rank:
            return
        lock: AbstractContextManager[None] = self.storage.lock()
        try:
            held.enter_context(lock)
        except BlockingIOError as busy:
            raise CheckpointError(
                explain(
                    "Another job is saving to this path.",
                    expected="one job per path",
                    got="a lock held by another process",
                    where=self.storage.where,
                    todo="wait for it, or save to another path",
                )
            ) from busy
        if not self.overwrite and self.storage.exists(MANIFEST_NAME):
            raise CheckpointError(
                explain(
                    "The path already holds a checkpoint.",
                    expected="a path without a manifest",
                    got=MANIFEST_NAME,
                    where=self.storage.where,
                    todo="save to another path, or pass overwrite=True",
                )
            )

    def _plan(
        self, taken: TakenState | None, blob_bytes: int, error: Exception | None, user: Json
    ) -> Manifest:
        structure = taken.structure if taken is not None and error is None else None
        agreed = self.coordinator.agree(structure, blob_bytes, error, _FORMATS.index(self.format))
        # Every rank computes the same from the same input, so an error here is raised by all of them.
        with gc_paused():
            manifest = build_manifest(
                agreed.classes,
                save_id=agreed.save_id,
                world_size=self.coordinator.world_size,
                blob_bytes=agreed.blob_bytes,
                user=user,
                stripe_bytes=self.stripe_bytes,
                split_bytes=None if self.every_node else self.split_bytes,
            )
            return manifest if self.format == "native" else as_arrays(manifest)

    def _write_own(self, manifest: Manifest, taken: TakenState, blob: bytes) -> None:
        error = None
        try:
            checksums: dict[Chunk, int] = {}
            if manifest.chunks is not None:
                checksums = write_arrays(self.storage, manifest, taken.locals_by_name, self.coordinator)
            with gc_paused():
                file = RankFile(manifest, self.coordinator.rank)
                image = FileImage(file, taken.locals_by_name, blob, file.chunk_table(checksums))
            write_rank_file(self.storage, image)
        except Exception as caught:  # noqa: BLE001  whatever it is, all ranks must hear of it
            error = caught
        try:
            self.coordinator.raise_together(error, f"writing to {self.storage.where}")
        except Exception:
            if self.coordinator.rank == 0:
                self.storage.remove(f"data-{manifest.save_id}")
            raise

    def _commit(self, manifest: Manifest) -> None:
        error = None
        if self.coordinator.rank == 0 or (self.every_node and is_node_leader()):
            try:
                commit_manifest(
                    self.storage, manifest, replace=self.overwrite, check_files=not self.every_node
                )
            except Exception as caught:  # noqa: BLE001  whatever it is, all ranks must hear of it
                error = caught
        self.coordinator.raise_together(error, f"committing {self.storage.where}")


def plain_json(user: Json) -> Json:
    """A copy of the user's part as it will be read back.

    Raises:
        CheckpointError: if it is no JSON.
    """
    try:
        return json.loads(dump_json(user))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            explain(
                "The user's part of a checkpoint cannot be written as JSON.",
                expected="dicts, lists, strings, finite numbers, True, False, None",
                got=str(error),
                where="the argument `user`",
                todo="put other values into the state",
            )
        ) from error


def is_node_leader() -> bool:
    """Whether this rank is its node's first, as torchrun numbers them."""
    return os.environ.get("LOCAL_RANK") == "0"


def commit_manifest(storage: Storage, manifest: Manifest, *, replace: bool, check_files: bool = True) -> None:
    """Check that every rank's file is there, publish the manifest, and remove what older attempts left.

    Raises:
        CheckpointError: if a file is missing, or a manifest exists that must not be replaced.
    """
    folder = f"data-{manifest.save_id}"
    present = set(storage.list_folder(folder))
    wanted = [manifest.file_name(rank).rpartition("/")[2] for rank in range(manifest.world_size)]
    missing = [name for name in wanted if name not in present and check_files]
    if missing:
        raise CheckpointError(
            explain(
                "A rank's file is not where it was written.",
                expected=f"{manifest.world_size} files in {folder}",
                got=f"{len(missing)} missing, first {missing[0]}",
                where=storage.where,
                todo="make sure that all ranks see the same file system",
            )
        )
    if manifest.chunks is not None:
        write_groups(storage, manifest)
    storage.sync_folder(folder)
    storage.sync_folder("")
    try:
        storage.commit(MANIFEST_NAME, manifest.to_bytes(), replace=replace)
    except FileExistsError as error:
        raise CheckpointError(
            explain(
                "Another job has committed a checkpoint to this path meanwhile.",
                expected="no manifest",
                got=MANIFEST_NAME,
                where=storage.where,
                todo="save to another path",
            )
        ) from error
    for name in storage.list_folder(""):
        if name.startswith("data-") and name != folder:
            storage.remove(name)
