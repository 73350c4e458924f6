"""`save`: describe, agree, write, commit. One all-reduce to agree, one after writing, one after the commit; one for
replicas is under way while ranks write.

every rank                                             rank 0 besides
-----------------------------------------------        -------------------------------------------
take the state's structure                             lock the folder, refuse an existing checkpoint
agree on its digest (all errors meet here)
put the parts of `Resharded` values together, if there are some
compute the manifest and the own file from it
start to compare replicas (see `replicas`)
write data-<id>/<rank>.safetensors, fsync
meet: any error, and any difference, means no commit
                                                       fsync the folder, publish manifest.json: the commit
meet: the commit's error, if any                       remove what older attempts left
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.file_names import parse_step_name
from vescale_fsdp.checkpoint.manifest.manifest import (
    SPLIT_BYTES,
    STRIPE_BYTES,
    Manifest,
    build_manifest,
)
from vescale_fsdp.checkpoint.manifest.state_tree import MAX_DEPTH, Json, depth_of
from vescale_fsdp.checkpoint.manifest.structure import Structure, dump_json
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.ranks.neighbours import num_neighbours
from vescale_fsdp.checkpoint.saving.form import Commit, Form, RankShare, told_if_unusable
from vescale_fsdp.checkpoint.saving.manifest_form import ManifestForm
from vescale_fsdp.checkpoint.saving.mergeable import prove_mergeable
from vescale_fsdp.checkpoint.saving.rank_file_writer import NativeForm
from vescale_fsdp.checkpoint.saving.replicas import CheckReplicas, begin_comparison, check_choice
from vescale_fsdp.checkpoint.saving.zarr_writer import ZarrForm
from vescale_fsdp.checkpoint.state.capture import TakenState, take_state
from vescale_fsdp.checkpoint.state.per_rank import pack_blob
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.checkpoint.storage.progress import Meter, Tell, meter_for
from vescale_fsdp.errors import ArgumentError, CheckpointError
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.torch_modes import plainly

Format = Literal["native", "zarr"] | Form
_FORMS: dict[str, ManifestForm] = {form.name: form for form in (NativeForm(), ZarrForm())}
TakeState = Callable[[], TakenState]
_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """What a save took: bytes of all tensors and per-rank values, seconds until the commit; and its save_id."""

    num_bytes: int
    seconds: float
    save_id: str


def save(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    *,
    metadata: Json = None,
    overwrite: bool = False,
    format: Format = "native",
    process_group: dist.ProcessGroup | None = None,
    progress: Tell = False,
    check_replicas: CheckReplicas = "sample",
) -> None:
    """Write a checkpoint; when this returns on any rank, it is complete and durable. A collective.

    Args:
        path: folder or fsspec URL; it becomes a checkpoint by the appearance of its manifest, last of all.
        state: any nesting of dicts, lists and tuples of tensors, DTensors, plain values, `PerRank` values, modules,
            optimizers of their parameters, and other objects with ``state_dict`` and ``load_state_dict``; such as
            ``{"model": model, "optimizer": optimizer}``. Modules and optimizers are stored by parameter name. Plain
            tensors and values must be the same on all ranks that have them.
        metadata: JSON of your own, the same on all ranks, returned by `read_state(path).metadata`.
        overwrite: replace an existing checkpoint; the old one stays good until the new one is committed.
        format: "native" (one safetensors file per rank, the fast one), "zarr" (one zarr v3 array per
            tensor, for tools outside PyTorch; loads back at any world size as well), or a form that others read:
            `vescale_fsdp.HuggingFace(..)`, `vescale_fsdp.DCP()`.
        process_group: the ranks that save; default: all. Its timeout is how long they wait for one that does not come.
        progress: is told how far this rank has come; True draws a bar on rank 0.
        check_replicas: how ranks that hold the same part of a tensor compare it, since each writes a share. "sample"
            compares a digest of some elements of each tensor, other ones in each save, which finds replicas that have
            drifted or were never equal, for 2 us a tensor and 2.5 us a MB; it can miss a difference in few elements.
            "all" compares every bit. False compares nothing: of replicas that differ, parts of each are stored.

    Raises:
        CheckpointError: if the path is a file, or this user may not write there, or the storage has no room, before a
            byte is written; if replicas differ; if another rank fails. A rank that fails itself raises what it met (an
            OSError, a KeyboardInterrupt, ..), so all ranks raise. Nothing is committed then, except where the error
            says that the new checkpoint is there: the disk failed after the commit.

    Examples:
        >>> import torch
        >>> state = {"model": torch.nn.Linear(4, 2), "step": 10}
        >>> save("saved", state, metadata={"config": "tiny"})
        >>> from vescale_fsdp.checkpoint import read_state
        >>> read_state("saved").names()
        ['model.weight', 'model.bias']
    """
    coordinator = coordinator_for(process_group)
    try:
        saver = Saver(
            open_storage(path, neighbours=num_neighbours()),
            coordinator,
            overwrite=overwrite,
            format=format,
            check_replicas=check_replicas,
        )
    except BaseException as error:
        coordinator.agree(None, 0, error, {})  # where the other ranks are next: raises on all of them
        raise
    saver.meter = meter_for(progress, coordinator.rank)
    saver.write(partial(take_state, state, rank_of=coordinator.rank_of), metadata)


@dataclass
class Saver:
    """The steps of a save, for callers that put other work between them."""

    storage: Storage
    coordinator: Coordinator
    overwrite: bool = False
    stripe_bytes: int = STRIPE_BYTES
    split_bytes: int | None = SPLIT_BYTES
    format: Format = "native"
    save_id: str | None = None  # of a save of the same state to memory: one for both proves it
    every_node: bool = False  # the storage is each node's own: every rank stores all it holds
    leads_node: bool = False  # of such a storage: this rank commits for its node
    meter: Meter = field(default_factory=Meter)
    check_replicas: CheckReplicas = "sample"

    def __post_init__(self) -> None:
        check_choice(self.check_replicas)
        self._form = form_of(self.format)

    def left_out(self, structure: Structure) -> Collection[str]:
        """Names of tensors whose values no file will hold."""
        return self._form.left_out(structure)

    def save(self, state: Any, metadata: Json = None) -> Saved:
        """All steps in turn."""
        return self.write(partial(take_state, state, rank_of=self.coordinator.rank_of), metadata)

    def write(self, take: TakeState, metadata: Json) -> Saved:
        """Take the state, agree, write and commit."""
        start_s = time.monotonic()
        with ExitStack() as held:
            commit = self.write_uncommitted(take, metadata, held)
            where = self.storage.where
            with self.coordinator.together(
                f"committing {where}", "what has become of the checkpoint stands there too"
            ):
                if self.coordinator.rank == 0 or self.leads_node:
                    commit.run()
                    try:
                        held.close()  # here, where all ranks hear of a lock that cannot be given back
                    except BaseException as error:
                        error.add_note(f"{where} is saved and durable")
                        raise
        saved = Saved(commit.num_bytes, time.monotonic() - start_s, commit.save_id)
        if self.coordinator.rank == 0:
            rate = saved.num_bytes / max(saved.seconds, 1e-9) / 1e9
            _log.info("saved %s: %d bytes in %.3f s, %.2f GB/s", where, *saved[:2], rate)
        return saved

    @plainly
    def write_uncommitted(self, take: TakeState, metadata: Json, held: ExitStack) -> Commit:
        """Agree and write what is this rank's; what is returned is yet to be run, by rank 0.

        Args:
            take: takes the state; what it raises, all ranks hear of.
            held: on rank 0, gets the folder's lock; to be closed after the commit.
        """
        error: BaseException | None = None
        structure, blob, alike, save_id, claimed, free_bytes = None, b"", {}, "", False, None
        try:
            taken = take()
            metadata = plain_json(metadata)
            blob = pack_blob(taken.per_rank)
            _ = taken.structure.digest  # computed here, where an error of one rank reaches all
            if self.coordinator.rank == 0:
                with told_if_unusable(self.storage):
                    self._form.claim(self.storage, held, overwrite=self.overwrite)
                claimed = True
            free_bytes = self.storage.free_bytes  # nobody writes before all have agreed
            # Not beside an error, which all ranks raise first: there may be a `metadata` that is not JSON.
            structure, alike = taken.structure, {**self._alike, "metadata": metadata}
        except BaseException as caught:  # noqa: BLE001  whatever it is, all ranks must hear of it
            error = caught
        try:
            agreed = self.coordinator.agree(
                structure,
                len(blob),
                error,
                alike,
                free_bytes,
                has_resharded=error is None and bool(taken.resharded),
            )
            if agreed.has_resharded:
                prove_mergeable(taken, self.coordinator)
            save_id = self.save_id or agreed.save_id

            @cache  # forms ask for what replicas were compared by
            def plan() -> Manifest:
                return build_manifest(
                    agreed.classes,
                    save_id=save_id,
                    world_size=self.coordinator.world_size,
                    blob_bytes=agreed.blob_bytes,
                    metadata=metadata,
                    stripe_bytes=self.stripe_bytes,
                    split_bytes=None if self.every_node else self.split_bytes,
                )

            share = RankShare(
                self.storage,
                self.coordinator,
                taken.locals_by_name,
                blob,
                self.overwrite,
                self.every_node,
                agreed.free_bytes,
                self.meter,
            )
            compared = begin_comparison(
                plan,
                taken.locals_by_name,
                self.coordinator,
                self.check_replicas,
                lambda manifest: self._form.left_out(manifest.structure),
            )
            commit = self._form.write(plan, share)
            compared()
            return commit
        except BaseException as failed:
            if claimed:
                self._clear_away(save_id, failed)
            raise

    @property
    def _alike(self) -> dict[str, Json]:
        """What is written alike on all ranks, and what rank 0 alone would decide."""
        folder = self.storage.where.rstrip("/").rpartition("/")[2]
        return {
            "format": self._form.arguments(),
            "overwrite": self.overwrite,
            "stripe_bytes": self.stripe_bytes,
            "split_bytes": self.split_bytes,
            "every_node": self.every_node,
            "check_replicas": self.check_replicas,
            "save_id": self.save_id,
            # Other folders may be one under two names, as mounted; not so those that are named by a step.
            "step": folder if parse_step_name(folder) else None,
        }

    def _clear_away(self, save_id: str, error: BaseException) -> None:
        """Remove what an attempt has written that ended in ``error``, which is what the caller hears of."""
        try:
            self._form.clear_away(self.storage, save_id)
        except Exception as left:  # noqa: BLE001  the next save to this path tries again
            error.add_note(f"what it had written could not be removed: {type(left).__name__}: {left}")


def form_of(format: Format) -> Form:
    """The form that is asked for.

    Raises:
        ValueError: if there is no such form.
    """
    found = format if isinstance(format, Form) else _FORMS.get(str(format))
    if found is None:
        raise ArgumentError(
            "There is no such format.",
            expected="'native', 'zarr', or a form: vescale_fsdp.HuggingFace(assets=..), vescale_fsdp.DCP()",
            got=repr(format),
        )
    return found


def plain_json(metadata: Json) -> Json:
    """A copy of `metadata` as it will be read back.

    Raises:
        CheckpointError: if it is not JSON.
    """
    try:
        plain = parse_json(dump_json(metadata))
        if depth_of(plain) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        return plain
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "`metadata` is not JSON-serializable.",
            expected="dicts whose keys differ as text, lists, strings, finite numbers, True, False, None",
            got=str(error),
            where="the argument `metadata`",
            todo="put other values into the state",
        ) from error
