"""`load`: fill a state in place from a checkpoint of any format, saved with any layout and world size.

1  open the checkpoint, and match the state with its metadata; check that all ranks have opened the same checkpoint
2  check that the state fits; allocate tensors on the meta device; compute the ranges to read
3  with a `Supply`: copy files from other nodes. With read="once": ranks exchange which stripes they request, and each
   stripe that several ranks request is assigned to one of them. Both only after an all-reduce of errors in step 2
4  read per-rank values; open every file, and check its size, header and checksum table; verify="before": hash every
   stripe that will be read; check that different stored tensors which fill the same memory (ties) are equal
5  all-reduce: an error so far is raised on all ranks, and nothing has been overwritten
6  read, directly into the tensors if their memory layout allows, and send shared stripes to the ranks that request
   them; verify="while" and "end-to-end": hash bytes after they have been read
7  assign plain values, and load the state of Stateful objects; all-reduce: an error since step 5 is raised on all ranks
   as a `PartialLoadError`
8  verify="end-to-end": compare the fingerprints of the loaded tensors with the recorded ones
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp.checkpoint.fingerprint import sums_of_state
from vescale_fsdp.checkpoint.foreign import SourceOptions, foreign_formats
from vescale_fsdp.checkpoint.manifest.file_names import CHECKPOINT_NODE
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.native.loadable import Loadable, NativeCheckpoint, Supply
from vescale_fsdp.checkpoint.native.read import Reads
from vescale_fsdp.checkpoint.native.read_state import read_manifest
from vescale_fsdp.checkpoint.native.targets import LoadTarget
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for, num_neighbors
from vescale_fsdp.checkpoint.ranks.first_error import noting
from vescale_fsdp.checkpoint.state.allocation import Allocation, meta_tensors
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects, is_meta
from vescale_fsdp.checkpoint.state.matching.catalogue import Catalogue
from vescale_fsdp.checkpoint.state.matching.leaves import fitting
from vescale_fsdp.checkpoint.state.matching.match import match
from vescale_fsdp.checkpoint.state.matching.result import Match, Strict, TensorRead
from vescale_fsdp.checkpoint.state.matching.shared_memory import Fill, require_equal, sharing
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_storage, path_text
from vescale_fsdp.checkpoint.storage.progress import Meter, Tell, meter_for
from vescale_fsdp.dtensor.half_loaded import mark_half_loaded, mark_whole
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import (
    ArgumentError,
    CheckpointError,
    CorruptCheckpointError,
    DamagedLoadError,
    NoCheckpointError,
    PartialLoadError,
    VescaleError,
    some,
)
from vescale_fsdp.layout.region import whole_region
from vescale_fsdp.torch_modes import plainly
from vescale_fsdp.torch_private import local_of

Verify = Literal["before", "while", "never", "end-to-end"]
Read = Literal["once", "each", "auto"]
_log = logging.getLogger(__name__)
_NOTHING_LOADED = "nothing was overwritten"
_HALF_LOADED = "some tensors may have been overwritten"


@dataclass(frozen=True)
class LoadReport:
    """The result of `load`: names that were not loaded, bytes that were read, and the saved metadata.

    Attributes:
        missing: leaves of the state that the checkpoint lacks; they keep their values, or get first ones from ``init``.
        unexpected: stored leaves that belong to an object which the state has (a module, a dict of tensors), but which
            that object lacks.
        metadata: the ``metadata`` argument of `save`; None for other formats.
        num_bytes_read: bytes that this rank read from files. With verification these are whole stripes, with the
            header and other tensors in them; with ``verify="before"``, hashed bytes count twice. For other formats,
            the size of this rank's parts of the tensors.
        num_bytes_received: bytes of tensors that other ranks read and sent to this rank.
        mismatched: tensors with different shapes or dtypes, which keep their values: name -> (in the checkpoint, in
            the state).
        ignored: leaves of the checkpoint under keys that the state lacks, such as an optimizer's or a scheduler's.
        warnings: possible problems with the checkpoint's files; the logger ``vescale_fsdp`` reports them too.
        unfilled: tensors of modules on the meta device that got no value, neither a stored one nor from ``init``.

    Examples:
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_report", {"w": torch.ones(4), "b": torch.ones(2)})
        >>> load("to_report", {"w": torch.zeros(4)}, strict=False).unexpected
        ('b',)
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    metadata: Json = None
    num_bytes_read: int = 0
    num_bytes_received: int = 0
    mismatched: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str],
    state: Any,
    *,
    strict: Strict | Literal["auto"] = "auto",
    include: str | Sequence[str] | None = None,
    dtype: str | Sequence[str] = (),
    init: Callable[[nn.Module], object] | None = None,
    source: SourceOptions | None = None,
    verify: Verify = "while",
    read: Read = "auto",
    process_group: dist.ProcessGroup | None = None,
    progress: Tell = False,
) -> LoadReport:
    """Fill a state in place from a checkpoint of any format, on any number of ranks. A collective.

    Tensors are filled in place; their sharding may differ from the sharding at the save. Plain values are replaced in
    their dicts and lists. Stateful objects are filled by their ``load_state_dict``. Optimizer state and options are
    loaded by parameter name, from any of torch's forms, even before the optimizer's first step.

    Native checkpoints (`save`) are matched by name, and a model without a key in the state, or in the checkpoint,
    matches the only model of the other. All other formats that ``vescale-convert`` reads are supported too:
    the model and the optimizer are then detected in the checkpoint under any name, and each rank reads the bytes of its
    own parts, in boxes of at most 16 MiB. Native checkpoints are read in this way too if ``dtype`` or ``source`` is
    given.

    Args:
        path: folder or fsspec URL of a checkpoint, or a file such as ``model.safetensors``. From a peft adapter's
            folder, only the model's adapter is loaded; the base weights stay unchanged. From a foreign checkpoint of
            a base model, a peft model gets its base weights. LoRA matrices stay unchanged; copies of modules (peft's
            ``modules_to_save``) get the base's values, so load an adapter after its base.
        state: nested like the saved state; for other formats a module, or a dict such as
            ``{"model": model, "optimizer": optimizer, "step": 0}``. Modules on the meta device are allocated.
        strict: what is an error. In every format, leaves of another object that only the checkpoint has (an optimizer,
            a scheduler, a step count) are no error: they are logged and listed in ``ignored``.
            "auto": "missing" for Hugging Face's files, which often have the heads of other classes; else True.
            True: leaves that are missing, unexpected or mismatched, and name patterns that match no leaf.
            "missing": the same, except unexpected leaves, which are logged and reported.
            False: these leaves are reported, mismatched tensors with a warning, and the rest is loaded. It is still
            an error if the checkpoint has only other names for a module or a dict of tensors.
        include: name patterns (fnmatch, such as ``"model.*"``); only leaves that match a pattern are loaded. Keys may
            also be joined by ``/``.
        dtype: ``"state"`` casts floats to the state's dtypes. Casts as for ``vescale-convert --dtype``, such as
            ``["bfloat16", "*.gate.bias=float32"]``, are applied first.
        init: writes first values into the tensors on the meta device that the checkpoint lacks, such as buffers that no
            ``state_dict()`` contains. Called with each module that owns one, after the allocation and before any tensor
            is read. Models of transformers, models that contain some, and LoRA layers of peft need none: their
            classes initialize these tensors. Under ``strict``, a tensor that is still without a value is an error.
        source: options for a checkpoint whose names, layouts or encodings differ from the state's.
        verify: "while" hashes bytes after they have been read into tensors, so that each byte is read once. Damage then
            raises a `PartialLoadError`, because tensors may contain damaged bytes. "before" reads and hashes all bytes
            before the first tensor is overwritten on any rank, so that damage leaves the state unchanged. "never"
            trusts the disk: only names, sizes and headers of files are checked. "end-to-end" does what "while" does,
            and then computes the fingerprints of the loaded tensors where they are, on a device for example, and
            compares them with those that the save has recorded: what is in the memory of all ranks together is what was
            saved. It needs 16 bytes per tensor in one all-reduce. Other formats support only "while".
        read: how ranks read bytes that several ranks need, such as replicas. "once": one rank reads and verifies the
            bytes, and sends them to the other ranks in pieces, so that each byte of the checkpoint is read once.
            "each": every rank reads for itself; this is faster from a local disk, whose page cache serves all ranks.
            "auto": "once" for object stores and network file systems, otherwise "each". The zarr format and other
            formats are always read by each rank.
        process_group: the ranks that load together; default: all.
        progress: callable that receives this rank's progress; True draws a bar on rank 0.

    Returns:
        The leaves that were missing, unexpected or mismatched, and the number of bytes read.

    Raises:
        CheckpointError: on all ranks, if the checkpoint does not fit the state.
        ConversionError: if the files have no known format, or options do not fit the checkpoint.
        CorruptCheckpointError: on all ranks, if any rank finds damage. A rank with any other error, such as a lost
            connection, raises that error, and the other ranks raise a CheckpointError that names it.
        PartialLoadError: on all ranks, instead of these errors, if a tensor may already be overwritten;
            ``error.overwritten`` names this rank's tensors. It is a CorruptCheckpointError too if damage caused it.
            For parameters of this library's `fully_shard`, the unit's next forward raises until a load or
            ``load_state_dict`` has filled the parameters. Other tensors, including FSDP2's, have no such guard. Modules
            that were on the meta device are moved back to it.
        ValueError: for an unknown value of ``verify`` or ``read``.

    Examples:
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_load", {"w": torch.ones(4), "step": 7})
        >>> state = {"w": torch.zeros(4), "step": 0}
        >>> report = load("to_load", state)
        >>> state["w"].sum().item(), state["step"], report.missing
        (4.0, 7, ())
        >>> torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "linear.pt")
        >>> with torch.device("meta"):
        ...     model = nn.Linear(3, 2)
        >>> load("linear.pt", model).missing, model.weight.sum().item()
        ((), 6.0)
    """
    coordinator = coordinator_for(process_group)
    alike: dict[str, Json] = {"init": init is not None}  # functions of different ranks cannot be compared
    with coordinator.together(f"opening {path_text(path)}", _NOTHING_LOADED, alike, is_first=True):
        # All arguments are checked inside the block, so that all ranks raise.
        check_choices(verify, read)
        if strict not in (True, False, "missing", "auto"):
            expected = "True, False, 'missing' or 'auto'"
            raise ArgumentError(
                "strict has an unknown value.", expected=expected, got=repr(strict), where="load(strict=..)"
            )
        patterns = None if include is None else _as_tuple(include)
        casts = _as_tuple(dtype)
        alike |= {"dtype": list(casts), "source": None if source is None else asdict(source)}
        storage = open_storage(path, neighbors=num_neighbors())  # neighbors: ranks share the cores
        alike["revision"] = storage.revision  # a branch may have moved between the questions of two ranks
        meter = meter_for(progress, coordinator.rank)
        manifest = _manifest_of(storage, path)
        through_views = manifest is None or bool(casts) or source is not None
        # Compared when the block ends: the two kinds of load issue different collectives.
        alike["the checkpoint is native"] = not through_views
        if through_views:
            _check_choices_of_views(verify, read, path)

    def open_views() -> Loadable:
        url = storage.where if storage.revision else _url_of(path)
        return foreign_formats().loadable(url, source, coordinator, casts, manifest)

    opener = open_views if through_views else None
    loader = Loader(storage, coordinator, verify, None, read, meter, manifest, opener, init)
    return loader.load(state, strict=strict, include=patterns)


def _as_tuple(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Return texts as a tuple; a single string is one text."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _url_of(path: str | os.PathLike[str] | Storage) -> str:
    """Return the path or URL of a checkpoint, which may also be an open `Storage`."""
    return path.where if isinstance(path, Storage) else os.fspath(path)


def _manifest_of(storage: Storage, path: str | os.PathLike[str]) -> Manifest | None:
    """Return the manifest of a native checkpoint; None if the path contains files of another format.

    Raises:
        NoCheckpointError: if the path contains no files of a known format.
    """
    try:
        return read_manifest(storage)
    except NoCheckpointError:
        if isinstance(path, Storage):  # readers of other formats open paths and URLs only
            raise
        files = storage.list_files()
        # An interrupted save in the zarr format leaves arrays without a manifest: do not load them as a foreign zarr
        # hierarchy.
        is_unfinished = any(name.startswith(("data-", f"{CHECKPOINT_NODE}/")) for name in files)
        if files and (is_unfinished or not foreign_formats().is_known(files)):
            raise
        parent, name = open_parent(os.fspath(path).rstrip("/"))
        if not files and parent.size(name) is None:  # neither a folder with files nor a single file
            raise
        return None


@dataclass
class Loader:
    """The steps of a load.

    Args:
        supply: fetches rank files that are not in the storage, such as from other nodes' memory.
        manifest: the checkpoint's manifest; None to read it.
        opener: opens the checkpoint; default: a native checkpoint in ``storage``, with ``supply`` and ``manifest``.
        init: see `load`.
        whole: whether a strict load refuses a checkpoint with leaves under keys that the state lacks: training that
            goes on without a part of its state, such as the optimizer's, would be another training.
    """

    storage: Storage
    coordinator: Coordinator
    verify: Verify = "while"
    supply: Supply | None = None
    read: Read = "auto"
    meter: Meter = field(default_factory=Meter)
    manifest: Manifest | None = None
    opener: Callable[[], Loadable] | None = None
    init: Callable[[nn.Module], object] | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        check_choices(self.verify, self.read)  # not all callers have checked them

    @property
    def _reads_once(self) -> bool:
        """Whether bytes that several ranks need are read by one rank and sent to the others."""
        if self.supply is not None or self.coordinator.world_size == 1:
            return False  # a supply copies each file to a node once; the node's ranks read it from memory
        return self.read == "once" or (self.read == "auto" and self.storage.is_shared)

    @plainly  # not in the caller's autograd, inference or autocast mode
    def load(
        self, state: Any, *, strict: Strict | Literal["auto"], include: tuple[str, ...] | None
    ) -> LoadReport:
        """Load a state."""
        start_s = time.monotonic()
        checkpoint, matched = self._open(state, include)
        if strict == "auto":
            strict = "missing" if checkpoint.may_have_more else True
        once = self._reads_once
        reading: Json = "once" if once else "each"
        alike = {"strict": strict, "include": include, "verify": self.verify, "read": reading}
        overwriting = Overwriting()
        with ExitStack() as on_failure, _closed_after(checkpoint.reads(matched.catalogue)) as reads:
            reads.meter = self.meter
            with self._preparing(checkpoint, alike):
                with gc_paused():  # planning creates many objects and no cycles
                    matched.require_fit(strict, whole=self.whole and include is None)
                    if self.verify == "end-to-end":
                        _require_sums(checkpoint)
                    matched = self._allocated(matched, state, include, on_failure)
                    matched.require_filled(strict, has_init=self.init is not None)
                    fills = self._fills(matched)
                    # What is read before anything is overwritten, to compare it.
                    ties = [
                        group for group in sharing(fills) if not _have_one_source(group, matched.catalogue)
                    ]
                    targets = self._targets(fills, reads, matched, overwriting)
                    saved_ranks = reads.saved_ranks() | _saved_ranks(checkpoint, matched.catalogue, ties)
                stripes = reads.stripes() if once else []
                # Else the files are opened below, after ranks have sent files or divided the reads.
                if self.supply is None and not once:
                    self._prepare_files(checkpoint, reads, matched, ties)
            # Outside of the `_preparing` blocks: a rank that fails inside one would not reach this collective.
            checkpoint.fetch(saved_ranks, matched)
            wanted = self.coordinator.everyone(stripes) if once else []
            if self.supply is not None or once:
                with self._preparing(checkpoint):
                    if any(wanted):  # empty if the form cannot share reads
                        reads.share(self.coordinator, wanted)
                    self._prepare_files(checkpoint, reads, matched, ties)
            # From the inside out: name a removed checkpoint, raise on all ranks, and report overwritten tensors.
            with overwriting.together(self.coordinator.world_size):
                with (
                    self.coordinator.together(f"loading {checkpoint.where}", _HALF_LOADED),
                    self._reading(checkpoint),
                ):
                    reads.run(verify=self.verify in ("while", "end-to-end"))
                    for target in targets:
                        target.finish()
                    matched.finish()
                    reads.close()  # inside the block, so that all ranks raise if it fails
                if self.verify == "end-to-end":
                    self._compare_sums(state, checkpoint, fills, matched)
            on_failure.pop_all()  # a success: modules are not moved back to the meta device
        report = _report_of(checkpoint, reads, matched)
        if self.coordinator.rank == 0:
            seconds = time.monotonic() - start_s
            _log_report(
                checkpoint.where,
                report,
                seconds,
                strict,
                checkpoint.digest if _log.isEnabledFor(logging.INFO) else "",
                is_partial=not strict or include is not None,
            )
        return report

    def _open(self, state: Any, include: tuple[str, ...] | None) -> tuple[Loadable, Match]:
        """Open the checkpoint and match it with the state; a collective.

        Returns the checkpoint and the match. Raises if ranks opened different checkpoints: a save may replace the files
        at any time.
        """
        with self.coordinator.together(f"opening {self.storage.where}", _NOTHING_LOADED), gc_paused():
            if self.opener is not None:
                checkpoint = self.opener()
            else:
                checkpoint = NativeCheckpoint(self.storage, self.coordinator, self.supply, self.manifest)
            matched = checkpoint.match(state, include)
        # Pipeline stages take different entries: an entry is unexpected only if no rank takes it.
        unexpected = matched.unexpected
        by_rank = self.coordinator.everyone((checkpoint.identity, unexpected))
        first_ranks: dict[str, int] = {}  # identity -> first rank that opened it, for the message
        for rank, (identity, _) in enumerate(by_rank):
            first_ranks.setdefault(identity, rank)
        if len(first_ranks) > 1:
            raise NoCheckpointError(
                "Ranks found different checkpoints at this path.",
                expected="the same checkpoint on all ranks, unchanged until it is read",
                got=", ".join(f"{identity} on rank {rank}" for identity, rank in first_ranks.items()),
                where=checkpoint.where,
                todo="load again when the save to this path has ended",
            )
        if unexpected:
            lacking_everywhere = set(unexpected).intersection(*(names for _, names in by_rank))
            matched.unexpected = [name for name in unexpected if name in lacking_everywhere]
        return checkpoint, matched

    @contextmanager
    def _preparing(self, checkpoint: Loadable, alike: Mapping[str, Json] | None = None) -> Iterator[None]:
        """Context manager around steps that overwrite nothing: an error is raised on all ranks."""
        doing = f"preparing to load {checkpoint.where}"
        with self.coordinator.together(doing, _NOTHING_LOADED, alike or {}), self._reading(checkpoint):
            yield

    @contextmanager
    def _reading(self, checkpoint: Loadable) -> Iterator[None]:
        """Context manager: if the checkpoint has been removed, read errors become a NoCheckpointError."""
        try:
            yield
        except (CorruptCheckpointError, OSError) as error:  # the classes that reads of removed files raise
            if not checkpoint.is_gone():
                raise
            raise NoCheckpointError(
                "The checkpoint was removed or replaced while it was read.",
                expected="a checkpoint that is unchanged until it is read",
                got=f"{type(error).__name__}: {error}",
                where=checkpoint.where,
                todo="load a newer checkpoint",
            ) from error

    def _fills(self, matched: Match) -> list[Fill]:
        """Return this rank's region of every tensor to fill."""
        describer = Describer(self.coordinator.rank_of)
        fills = []
        for read in matched.reads:
            if is_meta(read.tensor):
                raise _cannot_fill(
                    read.name, "a tensor on the meta device", "call to_empty() on its module first"
                )
            described = describer.describe(read.name, read.tensor)
            if described.local is not None:  # else this rank is not in the tensor's mesh
                _check_writable(read.name, described.local)
                fills.append(Fill(read, describer.region(described, self.coordinator.rank), described.local))
        return fills

    def _targets(
        self, fills: Sequence[Fill], reads: Reads, matched: Match, overwriting: Overwriting
    ) -> list[LoadTarget]:
        """Request the regions of all tensors; returns the targets. Tensors of the same memory are requested once."""
        targets = []
        for fill in {fill.memory if fill.local.numel() else fill.read.name: fill for fill in fills}.values():
            target = reads.ask(fill.read.number, fill.region, fill.local)
            overwriting.add(fill.read.name, fill.read.tensor, target)
            targets.append(target)
        describer = Describer(self.coordinator.rank_of)
        # Tensors that the state lacks, such as optimizer state before the first step.
        for new in matched.fresh:
            tensor = new.make(matched.catalogue)
            described = describer.describe(new.name, tensor)
            if described.local is not None:
                region = describer.region(described, self.coordinator.rank)
                targets.append(reads.ask(new.number, region, described.local))
        return targets

    def _compare_sums(self, state: Any, checkpoint: Loadable, fills: Sequence[Fill], matched: Match) -> None:
        """Compare the fingerprints of the loaded tensors with the recorded ones; a collective.

        Raises:
            CorruptCheckpointError: on all ranks, if any tensor differs.
        """
        describer = Describer(self.coordinator.rank_of)
        loaded = {fill.memory: fill.read.number for fill in fills}
        for new in matched.fresh:
            assert new.value is not None  # `_targets` has allocated it
            described = describer.describe(new.name, new.value)
            if described.local is not None:
                read = TensorRead(new.name, new.number, new.value)
                region = describer.region(described, self.coordinator.rank)
                loaded[Fill(read, region, described.local).memory] = new.number
        assert checkpoint.sums is not None  # see `_require_sums`
        locals_by_name, manifest, sums = sums_of_state(state, self.coordinator)
        with self.coordinator.together(f"comparing fingerprints with {checkpoint.where}", _HALF_LOADED):
            differing = []
            for entry, own in zip(manifest.entries, sums, strict=True):
                local = locals_by_name.get(entry.name)
                if local is None or not local.numel():  # other ranks compare it
                    continue
                whole = whole_region(entry.shape)
                number = loaded.get(Fill(TensorRead(entry.name, 0, local), whole, local).memory)
                # Tensors that the load has not filled have no recorded sums.
                if number is not None and own != checkpoint.sums[number]:
                    differing.append(entry.label)
            if differing:
                raise CorruptCheckpointError(
                    "Loaded tensors are not those that were saved, although no file is damaged.",
                    expected="the fingerprints that the save has recorded",
                    got=f"other values of {some(differing)}",
                    where=checkpoint.where,
                    todo="load again; if it fails again, test the memory of the ranks and of the ranks that saved",
                )

    def _allocated(
        self, matched: Match, state: Any, include: tuple[str, ...] | None, on_failure: ExitStack
    ) -> Match:
        """Allocate and initialize tensors that are on the meta device, and match the state again.

        Args:
            on_failure: receives a callback that moves these tensors back to the meta device.
        """
        live = LiveObjects(state)
        tensors = meta_tensors(live)
        if not tensors:
            return matched
        filled = {read.name for read in matched.reads}
        # Buffers of no state dict are in no checkpoint.
        unsaved = {each.name for each in tensors if not each.is_saved and fitting(each.name, include)}
        unsaved.update(matched.of_class)
        allocation = Allocation(
            tensors, live, filled, matched.missing, unsaved, self.init, adapter=matched.of_adapter
        )
        on_failure.callback(allocation.undo)
        allocation.initialize()
        again = match(state, matched.catalogue, include)
        again.unexpected = matched.unexpected  # already reduced to the names that are unexpected on all ranks
        again.unfilled = allocation.unfilled()
        return again

    def _prepare_files(
        self, checkpoint: Loadable, reads: Reads, matched: Match, ties: Sequence[Sequence[Fill]]
    ) -> None:
        """Read per-rank values, open and check the files, and verify if verify="before". Overwrites no tensor.

        Raises:
            CheckpointError: if stored tensors differ that fill the same memory.
        """
        with gc_paused():  # this creates many objects and no cycles
            checkpoint.read_values(matched)
            reads.open()
        if self.verify == "before":
            reads.verify()
        for group in ties:
            require_equal(
                group,
                lambda read, region: checkpoint.read_now(
                    read, region, matched.catalogue, verify=self.verify != "never"
                ),
                checkpoint.where,
            )


def _require_sums(checkpoint: Loadable) -> None:
    """Raise if the save has recorded no fingerprints."""
    if checkpoint.sums is None:
        raise CheckpointError(
            "The checkpoint has no fingerprints to compare.",
            expected="a native checkpoint that was saved with fingerprint=True",
            got="none in its manifest",
            where=checkpoint.where,
            todo="load with verify='while'",
        )


def _have_one_source(group: Sequence[Fill], catalogue: Catalogue) -> bool:
    """Return whether tensors of the same memory are filled from the same stored bytes."""
    numbers = {fill.read.number for fill in group}
    return len({fill.memory for fill in group}) == 1 and (
        len(numbers) == 1 or len(set(map(catalogue.identity, numbers))) == 1
    )


def _saved_ranks(checkpoint: Loadable, catalogue: Catalogue, groups: Iterable[Sequence[Fill]]) -> set[int]:
    """Return the saved ranks whose files have the stored tensors of these groups."""
    reads = checkpoint.reads(catalogue)
    for fill in (fill for group in groups for fill in group):
        # Memory that nothing writes to takes no room.
        reads.ask(
            fill.read.number, fill.region, torch.empty(fill.local.shape, dtype=fill.local.dtype, device="cpu")
        )
    return reads.saved_ranks()


@contextmanager
def _closed_after(reads: Reads) -> Iterator[Reads]:
    """Context manager that closes all files. If the block raised, an error of closing becomes a note of that error."""
    try:
        yield reads
    except BaseException as error:  # Ctrl-C too must close the files
        with noting(error):
            reads.close()
        raise
    reads.close()


def _report_of(checkpoint: Loadable, reads: Reads, matched: Match) -> LoadReport:
    """Return the report of a load that has succeeded."""
    return LoadReport(
        tuple(matched.missing),
        tuple(matched.unexpected),
        checkpoint.metadata,
        reads.num_bytes_read,
        reads.num_bytes_received,
        matched.mismatched,
        tuple(matched.ignored),
        checkpoint.warnings,
        tuple(matched.unfilled),
    )


def _log_report(
    where: str, report: LoadReport, seconds: float, strict: Strict, digest: str, *, is_partial: bool
) -> None:
    """Log the speed and the warnings of a load; what was ignored only if the caller asked for the whole state.

    Args:
        digest: the recorded fingerprint of the checkpoint; empty if there is none.
    """
    rate = report.num_bytes_read / max(seconds, 1e-9) / 1e9  # a coarse clock may measure 0 s
    text = "loaded %s: rank 0 read %d bytes in %.3f s, %.2f GB/s, fingerprint %s"
    _log.info(text, where, report.num_bytes_read, seconds, rate, digest or "not recorded")
    if report.ignored and not is_partial:
        others = dict.fromkeys(name.partition(".")[0] for name in report.ignored)
        _log.warning("%s: not loaded, since the state does not have it: %s", where, some(others))
    if report.unexpected and strict == "missing":
        _log.warning("%s: not loaded, since the state does not have it: %s", where, some(report.unexpected))
    for doubt in report.warnings:
        _log.warning("%s: %s", where, doubt)


def check_choices(verify: str, read: str) -> None:
    """Check the arguments ``verify`` and ``read``.

    Raises:
        ValueError: for an unknown value.
    """
    if verify not in get_args(Verify):
        expected = "'before', 'while', 'never' or 'end-to-end'"
        raise ArgumentError(
            "verify has an unknown value.", expected=expected, got=repr(verify), where="load(verify=..)"
        )
    if read not in get_args(Read):
        expected = "'once', 'each' or 'auto'"
        raise ArgumentError(
            "read has an unknown value.", expected=expected, got=repr(read), where="load(read=..)"
        )


def _check_choices_of_views(verify: str, read: str, path: object) -> None:
    """Check that a load through views supports the values of ``verify`` and ``read``.

    Raises:
        ValueError: for a value that only native loads support.
    """
    if verify != "while" or read == "once":
        raise ArgumentError(
            "This kind of load does not support these values of verify and read.",
            expected="verify='while' and read='auto' or 'each', unless a native checkpoint is loaded without "
            "dtype= and source=",
            got=f"verify={verify!r}, read={read!r}",
            where=str(path),
            todo="remove the arguments verify and read",
        )


def _check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise if elements of a tensor share memory, as after `expand` and `unfold`."""
    # A dim whose stride is not larger than the reach of the dims before it visits elements of those dims again.
    reach = 0  # distance in items from the first to the last element along all dims with smaller strides
    overlap = False
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):  # from the smallest stride up
        overlap = overlap or (size > 1 and step <= reach)
        reach += step * (size - 1)
    if overlap and tensor.numel():
        raise _cannot_fill(
            name, f"strides {tensor.stride()} of sizes {tuple(tensor.shape)}", "clone() it before loading"
        )


def _cannot_fill(name: str, got: str, todo: str) -> CheckpointError:
    """Return the error for a tensor of the state whose memory cannot be filled."""
    return CheckpointError(
        "A tensor of the state cannot be filled.",
        expected="separate memory for every element",
        got=got,
        where=name,
        todo=todo,
    )


class VanishedLoadError(PartialLoadError, NoCheckpointError):
    """A checkpoint was removed while a load overwrote tensors with its values."""


class _Filled(NamedTuple):
    """A tensor of the state, and the target that fills its local part."""

    name: str
    tensor: torch.Tensor
    target: LoadTarget


class Overwriting:
    """The tensors of a state that one load fills, to report and mark them if the load fails."""

    def __init__(self) -> None:
        self._filled: list[_Filled] = []

    def add(self, name: str, tensor: torch.Tensor, target: LoadTarget) -> None:
        """Add a tensor; ``target`` fills its local part."""
        self._filled.append(_Filled(name, tensor, target))

    @contextmanager
    def together(self, num_ranks: int) -> Iterator[None]:
        """Context manager around the overwriting of the tensors, which turns errors into `PartialLoadError`.

        Raises:
            PartialLoadError: instead of any `Exception`; Ctrl-C keeps its class. Raised even if this rank has
                overwritten nothing, because a state is usable only if the shards of all ranks are.
        """
        try:
            yield
        except BaseException as error:  # Ctrl-C leaves tensors half loaded too
            names = [filled.name for filled in self._filled if filled.target.is_overwritten]
            if not names and num_ranks == 1:  # nothing has changed, and no other rank can differ
                raise
            for filled in self._filled:
                # Only units of `fully_shard`, whose parameters have this class, check the mark before a forward.
                if isinstance(filled.tensor, RaggedDTensor):
                    mark_half_loaded(local_of(filled.tensor), filled.name)
            if not isinstance(error, Exception):
                error.add_note(_format_overwritten(names))  # Ctrl-C keeps its class
                raise
            raise partial_load(error, names) from error
        for filled in self._filled:
            if isinstance(filled.tensor, RaggedDTensor):
                mark_whole(local_of(filled.tensor))


def partial_load(error: Exception, overwritten: Iterable[str]) -> PartialLoadError:
    """Return the PartialLoadError to raise instead of ``error``.

    If ``error`` is a CorruptCheckpointError or a NoCheckpointError, the returned error is one too.
    """
    names = tuple(overwritten)
    kind = PartialLoadError
    if isinstance(error, CorruptCheckpointError):
        kind = DamagedLoadError
    elif isinstance(error, NoCheckpointError):
        kind = VanishedLoadError
    # Errors of other classes say little without the name of the class.
    text = str(error) if isinstance(error, VescaleError) else f"{type(error).__name__}: {error}"
    return kind(f"{text}\n  {_format_overwritten(names)}", overwritten=names)


def _format_overwritten(names: Iterable[str]) -> str:
    """Return a sentence about overwritten tensors, for messages."""
    return f"overwritten: {some(names)}; do not use the state until a load has succeeded"
