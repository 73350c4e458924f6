"""`save`: describe, agree, write, commit. Ranks communicate by three small all-reduces: to agree, after writing, and
after the commit. A fourth one, which runs while files are written, compares replicas and adds up fingerprints.

every rank                                             rank 0 also
-----------------------------------------------        -------------------------------------------
describe the state's structure                         lock the folder, refuse an existing checkpoint
agree on the structure's digest (an error so far is raised on all ranks)
check that the parts of `Resharded` values can be merged, if there are any
compute the manifest
compute digests of replicas unless check_replicas=False, and fingerprints if asked for; start to add both up over all
ranks, if there are any (see `replicas`)
compute this rank's file from the manifest, write data-<id>/<rank>.safetensors, fsync
all-reduce: an error, or replicas that differ, prevents the commit
                                                       fsync the folder, publish manifest.json: the commit
all-reduce: an error of the commit is raised on all    remove files of older attempts
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.foreign import foreign_formats
from vescale_fsdp.checkpoint.manifest.file_names import parse_step_name
from vescale_fsdp.checkpoint.manifest.fingerprints import check_cuts
from vescale_fsdp.checkpoint.manifest.manifest import (
    SPLIT_BYTES,
    STRIPE_BYTES,
    Manifest,
    SaveRecord,
    build_manifest,
)
from vescale_fsdp.checkpoint.manifest.state_tree import MAX_DEPTH, Json, decode, depth_of
from vescale_fsdp.checkpoint.manifest.structure import Structure, dump_json
from vescale_fsdp.checkpoint.native.form import Commit, Form, RankShare, root_errors
from vescale_fsdp.checkpoint.native.leaves import fingerprint_in
from vescale_fsdp.checkpoint.native.write import NativeForm
from vescale_fsdp.checkpoint.native.zarr_live import ZarrForm
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for, num_neighbors
from vescale_fsdp.checkpoint.ranks.replicas import CheckReplicas, begin_comparison, check_choice
from vescale_fsdp.checkpoint.state.capture import TakenState, take_state
from vescale_fsdp.checkpoint.state.per_rank import leaf_of, pack_blob, unpack_blob
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.checkpoint.storage.progress import Meter, Tell, meter_for
from vescale_fsdp.errors import ArgumentError, CheckpointError, some
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.torch_modes import plainly

Format = Literal["native", "zarr", "dcp"] | Form
_FORMS: dict[str, Form] = {form.name: form for form in (NativeForm(), ZarrForm())}
TakeState = Callable[[], TakenState]
_log = logging.getLogger(__name__)


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    metadata: Json = None,
    overwrite: bool = False,
    format: Format = "native",
    process_group: dist.ProcessGroup | None = None,
    progress: Tell = False,
    check_replicas: CheckReplicas = "sample",
    fingerprint: bool | None = None,
) -> None:
    """Write a checkpoint. When the call returns on any rank, the checkpoint is complete and durable. A collective.

    Args:
        path: folder or fsspec URL. Its manifest, written last, makes it a checkpoint.
        state: any nesting of dicts, lists and tuples of tensors, DTensors, plain values, `PerRank` values, modules,
            optimizers of these modules' parameters, and other objects with ``state_dict`` and ``load_state_dict``; for
            example ``{"model": model, "optimizer": optimizer}``. Modules and optimizers are stored by parameter name.
            Plain tensors and values must be the same on all ranks that have them.
        metadata: JSON of your own, the same on all ranks, returned by `read_state(path).metadata`.
        overwrite: replace an existing checkpoint; the old one stays valid until the new one is committed. An object
            store cannot replace a checkpoint by one in the zarr format, so that this is an error.
        format: "native" (one safetensors file per rank; the fastest), "zarr" (one zarr v3 array per tensor, for tools
            outside PyTorch; also loads at any world size), "dcp" (a folder of `torch.distributed.checkpoint`,
            which cannot contain `PerRank` values), or an object that writes the format of another library:
            `vescale_fsdp.conversion.HuggingFace(..)`.
        process_group: the ranks that save; default: all. Its timeout limits how long ranks wait for a missing rank.
        progress: callable that receives this rank's progress; True draws a bar on rank 0.
        check_replicas: how replicas (ranks with the same part of a tensor) are compared. Each replica writes a share of
            the part, so the file would be a mixture if replicas differed. "sample" compares a digest of some elements
            of each tensor, different elements in each save. It detects replicas that have drifted or were never equal,
            but can miss a difference in few elements; it takes 2 us per tensor and 2.5 us per MB. "all" compares every
            bit. False compares nothing.
        fingerprint: before files are written, compute the fingerprints of all tensors. The manifest, written last,
            records them. A core takes 0.3 to 0.6 s per GB of its share; tensors on an accelerator are summed there.
            None: if this process has an accelerator. Other formats than "native" and "zarr" record none.

    Raises:
        CheckpointError: before any byte is written, if the path is a file, this user may not write there, or the
            storage has no room. Also if replicas differ or another rank fails. The failed rank raises its own error (an
            OSError, a KeyboardInterrupt, ..), so all ranks raise. Nothing is committed, unless the error says that the
            checkpoint was committed before the disk failed.

    Examples:
        >>> import torch
        >>> state = {"model": torch.nn.Linear(4, 2), "step": 10}
        >>> save("saved", state, metadata={"config": "tiny"})
        >>> from vescale_fsdp.checkpoint import read_state
        >>> read_state("saved").names()
        ['model.weight', 'model.bias']
    """
    start_s = time.monotonic()
    coordinator = coordinator_for(process_group)
    try:
        saver = Saver(
            open_storage(path, neighbors=num_neighbors()),  # neighbors: ranks share the cores
            coordinator,
            overwrite=overwrite,
            format=format,
            check_replicas=check_replicas,
            fingerprint=fingerprint,
            meter=meter_for(progress, coordinator.rank),
            called_s=start_s,
        )
    except BaseException as error:  # Ctrl-C too must reach the other ranks
        coordinator.agree(None, 0, error, {})  # other ranks are waiting in `agree`: now all ranks raise
        raise
    saver.write(partial(take_state, state, rank_of=coordinator.rank_of), metadata)


@dataclass
class Saver:
    """The steps of a save; `write` calls them in order."""

    storage: Storage
    coordinator: Coordinator
    overwrite: bool = False
    stripe_bytes: int = STRIPE_BYTES
    split_bytes: int | None = SPLIT_BYTES
    format: Format = "native"
    save_id: str | None = None  # shared with a save to memory, to show that both have the same state
    # Whether each node has its own storage, such as its memory. A node must not need files of other nodes, so replicas
    # then do not share the writing: every rank stores all of its regions.
    every_node: bool = False
    leads_node: bool = False  # with `every_node`: whether this rank commits for its node
    meter: Meter = field(default_factory=Meter)
    check_replicas: CheckReplicas = "sample"
    fingerprint: bool | None = None
    metric: float | None = None  # for the manifest, see `SaveRecord`
    called_s: float = field(default_factory=time.monotonic)  # when the user called: see `SaveRecord.seconds`

    def __post_init__(self) -> None:
        check_choice(self.check_replicas)
        if self.fingerprint is None:  # on the host alone, a save would take noticeably longer
            self.fingerprint = torch.accelerator.is_available()
        self._form = form_of(self.format)

    def dropped(self, structure: Structure) -> Collection[str]:
        """Return the names of tensors that this format does not store."""
        return self._form.dropped(structure)

    def save(self, state: Any, metadata: Json = None) -> None:
        """Take the state on this thread, and save it."""
        self.write(partial(take_state, state, rank_of=self.coordinator.rank_of), metadata)

    def write(self, take: TakeState, metadata: Json) -> None:
        """Take the state, agree with the other ranks, write and commit. A collective."""
        start_s = time.monotonic()
        with ExitStack() as held:
            commit = self.write_uncommitted(take, metadata, held)
            where = self.storage.where
            with self.coordinator.together(
                f"committing {where}", "that error says whether the checkpoint is there"
            ):
                if self.coordinator.rank == 0 or self.leads_node:  # one rank for each storage
                    commit.run()
                    try:
                        held.close()  # inside the block: an error while unlocking reaches all ranks
                    except BaseException as error:  # Ctrl-C too must say that the checkpoint is complete
                        error.add_note(f"{where} is saved and durable")
                        raise
        if self.coordinator.rank == 0:
            seconds = time.monotonic() - start_s
            rate = commit.num_bytes / max(seconds, 1e-9) / 1e9  # a coarse clock may measure 0 s
            text = "saved %s: %d bytes in %.3f s, %.2f GB/s, fingerprint %s"
            _log.info(text, where, commit.num_bytes, seconds, rate, commit.digest or "not recorded")

    @plainly  # not in the caller's autograd, inference or autocast mode
    def write_uncommitted(self, take: TakeState, metadata: Json, held: ExitStack) -> Commit:
        """Agree with the other ranks and write this rank's part. Returns the commit.

        The caller runs the commit on rank 0, and on each rank with `leads_node`: on one rank for each storage.

        Args:
            take: returns the state; an error that it raises is raised on all ranks.
            held: on rank 0, receives the folder's lock; the caller closes it after the commit.
        """
        error: BaseException | None = None
        structure, blob, alike, save_id, claimed, free_bytes = None, b"", {}, "", False, None
        try:
            taken = take()
            metadata = plain_json(metadata)
            blob = pack_blob(taken.per_rank)
            _ = taken.structure.digest  # computed inside the try: an error reaches all ranks
            if self.coordinator.rank == 0:
                with root_errors(self.storage):
                    self._form.claim(self.storage, held, overwrite=self.overwrite)
                claimed = True  # from here on, a failure must remove what this attempt wrote
            free_bytes = self.storage.free_bytes  # measured before any rank writes
            # Assigned last, so that both stay empty after an error: `agree` must not get metadata that is not JSON.
            structure, alike = taken.structure, {**self._alike, "metadata": metadata}
        except BaseException as caught:  # noqa: BLE001  every error is raised on all ranks, by `agree`
            error = caught
        try:
            agreed = self.coordinator.agree(
                structure,
                len(blob),
                error,
                alike,
                free_bytes,
                # After an error, `taken` may be unbound.
                has_resharded=error is None and bool(taken.resharded),
            )
            if agreed.has_resharded:
                check_mergeable(taken, self.coordinator)
            save_id = self.save_id or agreed.save_id

            @cache  # computed once: the form and the comparison of replicas both call it
            def plan() -> Manifest:
                """Return the manifest of this save, the same on all ranks."""
                return build_manifest(
                    agreed.classes,
                    save_id=save_id,
                    world_size=self.coordinator.world_size,
                    blob_bytes=agreed.blob_bytes,
                    metadata=metadata,
                    stripe_bytes=self.stripe_bytes,
                    split_bytes=None if self.every_node else self.split_bytes,  # None: replicas store all
                )

            sums: tuple[str, ...] = ()

            def sealed(manifest: Manifest) -> Manifest:
                """Return the manifest to commit. Manifests of several nodes must be equal, so they have no times."""
                record = None if self.every_node else self._record()
                return replace(manifest, saved=record, sums=sums or None)

            share = RankShare(
                self.storage,
                self.coordinator,
                taken.locals_by_name,
                blob,
                self.overwrite,
                self.every_node,
                agreed.free_bytes,
                self.meter,
                sealed,
            )
            records = bool(self.fingerprint) and self._form.has_manifest
            # Sums and digests are computed before this returns; their all-reduce runs while files are written.
            compared = begin_comparison(
                plan,
                taken.locals_by_name,
                self.coordinator,
                self.check_replicas,
                lambda manifest: self._form.dropped(manifest.structure),  # not stored, so not compared
                most_sums=sum(len(structure.entries) for _, structure in agreed.classes) if records else 0,
                threads=self.storage.write_threads,
            )
            commit = self._form.write(plan, share)
            sums = compared()
            if sums and self.check_replicas:
                check_cuts(plan(), sums)
            is_logged = sums and self.coordinator.rank == 0 and _log.isEnabledFor(logging.INFO)
            return commit._replace(digest=fingerprint_in(plan(), sums).digest) if is_logged else commit
        except BaseException as failed:  # Ctrl-C too leaves files that must be removed
            if claimed:
                try:
                    self._form.clear_away(self.storage, save_id)
                except Exception as left:  # noqa: BLE001  not fatal: the next save to this path removes them
                    failed.add_note(f"written files could not be removed: {type(left).__name__}: {left}")
            raise

    def _record(self) -> SaveRecord:
        """Return the record of a save that is committed now."""
        metric = self.metric
        # JSON has no NaN and no infinities.
        finite = metric if metric is not None and math.isfinite(metric) else None
        return SaveRecord(time.time(), time.monotonic() - self.called_s, finite)

    @property
    def _alike(self) -> dict[str, Json]:
        """The arguments that must be equal on all ranks."""
        folder = self.storage.where.rstrip("/").rpartition("/")[2]
        return {
            "format": self._form.arguments(),
            "overwrite": self.overwrite,
            "stripe_bytes": self.stripe_bytes,
            "split_bytes": self.split_bytes,
            "every_node": self.every_node,
            "check_replicas": self.check_replicas,
            "fingerprint": self.fingerprint,
            "save_id": self.save_id,
            # Only a step's name is compared, not the path: ranks may mount one folder at different paths.
            "step": folder if parse_step_name(folder) else None,
        }


def form_of(format: Format) -> Form:
    """Return the form for a ``format`` argument.

    Raises:
        ValueError: for an unknown name.
    """
    # `str`, so that an object of any other class, hashable or not, is an unknown format.
    if str(format) == "dcp":
        return foreign_formats().dcp_form()
    form = format if isinstance(format, Form) else _FORMS.get(str(format))
    if form is None:
        raise ArgumentError(
            "There is no such format.",
            expected="'native', 'zarr', 'dcp', or a form: conversion.HuggingFace(assets=..)",
            got=repr(format),
            where="format=..",
        )
    return form


def plain_json(metadata: Json) -> Json:
    """Return a copy of `metadata` as JSON stores it: tuples become lists, for example.

    Raises:
        CheckpointError: if `metadata` cannot be written as JSON.
    """
    try:
        plain = parse_json(dump_json(metadata))
        if depth_of(plain) > MAX_DEPTH:  # a load could exceed the interpreter's recursion limit
            raise ValueError(f"more than {MAX_DEPTH} levels")
        return plain
    except (TypeError, ValueError, RecursionError) as error:  # RecursionError: a container inside itself
        raise CheckpointError(
            "`metadata` is not JSON-serializable.",
            expected="dicts whose keys differ as text, lists, strings, finite numbers, True, False, None",
            got=str(error),
            where="the argument `metadata`",
            todo="put other values into the state",
        ) from error


def check_mergeable(taken: TakenState, coordinator: Coordinator) -> None:
    """Check that the `Resharded` values of all ranks can be merged, as a load on other ranks would do. A collective.

    All ranks gather all parts, of some hundred bytes each. Each value is merged by the first rank that has the value;
    the result is discarded.

    Raises:
        CheckpointError: on all ranks, if a value's ``merge`` raises; names the value and the ranks that have it.
    """
    # Packed here and decoded below, so that `merge` gets the parts as a load would read them.
    mine = pack_blob({name: taken.per_rank[name] for name in taken.resharded})
    blobs = coordinator.everyone(mine)
    with coordinator.together("merging the parts of Resharded values"):
        by_rank = []
        for rank, blob in enumerate(blobs if taken.resharded else ()):  # a rank without values merges nothing
            where = f"rank {rank}"
            packed = unpack_blob(memoryview(blob), where=where)
            by_rank.append(
                {
                    name: decode(tree, partial(leaf_of, tensors), where)
                    for name, (tree, tensors) in packed.items()
                }
            )
        for name, value in taken.resharded.items():
            holders = [rank for rank, values in enumerate(by_rank) if name in values]
            if holders[0] != coordinator.rank:  # one rank merges each value
                continue
            parts = [by_rank[rank][name] for rank in holders]
            try:
                value.merge(parts)
            except Exception as error:  # `merge` is user code, which may raise any class
                raise CheckpointError(
                    "The parts of a Resharded value cannot be merged: a load on other ranks would fail.",
                    expected=f"{len(parts)} parts that its merge() accepts",
                    got=f"{type(error).__name__}: {error}",
                    where=f"{name} of ranks {some(map(str, holders), 16)}",
                    todo="give all ranks the same settings, and save them at the same position in the data; or save "
                    "PerRank(value), which loads on the same number of ranks only",
                ) from error
