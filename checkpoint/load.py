"""`load`: fill a state in place, from whatever layout and world size a checkpoint was saved with.

1  read the manifest, match the state with it: missing, unexpected, shapes, dtypes
2  compute the ranges to read; open every file, prove size, header and checksum table
3  verify="before": hash every stripe that will be read
4  meet: any error so far is raised on all ranks, and nothing has been overwritten
5  read, straight into the tensors where memory allows; verify="while": hash what has come
6  plain values and Stateful objects take theirs; meet: any error since 4 is a `PartialLoadError` on all ranks
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.formats.native.read import Reads
from vescale_fsdp.checkpoint.formats.native.targets import LoadTarget
from vescale_fsdp.checkpoint.formats.read_state import CheckpointReader, read_manifest
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, NoCheckpointError
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.state_tree import Json, dotted_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for, num_neighbours
from vescale_fsdp.checkpoint.ranks.first_error import noting
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.live_objects import has_meta_modules
from vescale_fsdp.checkpoint.state.match import Match, Strict, TensorRead, match
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_storage
from vescale_fsdp.checkpoint.storage.progress import Meter, Tell, meter_for
from vescale_fsdp.dtensor.half_loaded import mark_half_loaded, mark_whole
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import (
    ArgumentError,
    CheckpointError,
    CorruptCheckpointError,
    DamagedLoadError,
    PartialLoadError,
    VescaleError,
    some,
)
from vescale_fsdp.formats import is_known, load_through_views
from vescale_fsdp.torch_modes import plainly
from vescale_fsdp.torch_private import local_of

Verify = Literal["before", "while", "never"]
Read = Literal["once", "each", "auto"]
_log = logging.getLogger(__name__)
_NOTHING_LOADED = "nothing was overwritten"
_HALF_LOADED = "tensors may hold some of what was to be loaded"


@dataclass(frozen=True)
class LoadReport:
    """What a load did not touch, and the JSON that was saved with the state.

    Attributes:
        missing: leaves of the state that the checkpoint lacks; they keep their values.
        unexpected: leaves of the checkpoint that the state lacks.
        metadata: the ``metadata`` argument of `save`; None for other formats.
        num_bytes_read: bytes of tensors that this rank read from the storage; what ``verify="before"`` hashes first
            and reads then counts twice. For other formats, the bytes of its parts of the tensors.
        num_bytes_received: bytes of them that other ranks read and sent.
        mismatched: tensors of other shapes or dtypes, which keep their values: what the checkpoint and the state have.
        left_out: other entries of the checkpoint that the state cannot take, such as a scheduler's.
        warnings: what the checkpoint's files leave open, in sentences; the logger ``vescale_fsdp`` reports them too.

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
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceOptions:
    """How `load` reads a checkpoint whose tensors differ from the state's in name, layout or encoding.

    Args:
        rules: key rules, as ``vescale-convert --rules``: a shipped set's name or a TOML file.
        rules_to: whose names the state has, ``"ours"`` or ``"hf"``: the side of the rules that is made.
        config: folder or URL of the config.json that rules and ``dequantize`` use; default: the checkpoint's own.
        dequantize: the float type that quantized weights become, before rules: ``"bf16"``, as for ``vescale-convert``.
        model_prefix: what the model's names begin with in the checkpoint; detected by default.

    Examples:
        >>> from vescale_fsdp.checkpoint import save
        >>> save("of_two", {"teacher": {"w": torch.ones(2)}, "student": {"w": torch.zeros(2)}})
        >>> state = {"w": torch.zeros(2)}
        >>> _ = load("of_two", state, source=SourceOptions(model_prefix="teacher"))
        >>> state["w"].tolist()
        [1.0, 1.0]
    """

    rules: str | None = None
    rules_to: str = "ours"
    config: str | None = None
    dequantize: str | None = None
    model_prefix: str | None = None


def load(
    path: str | os.PathLike[str],
    state: Any,
    *,
    strict: bool = True,
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

    Tensors are filled where they are, whatever their sharding now and when they were saved. Plain values
    are replaced in their dicts and lists; Stateful objects get ``load_state_dict``. An optimizer takes its state and
    options by parameter name, in whichever of torch's forms they were saved, also before its first step.

    Native checkpoints (`save`) are matched name by name. Every other format that ``vescale-convert`` reads is opened
    too, and native ones likewise if ``dtype``, ``init`` or ``source`` is given or the state has modules on the meta
    device. The model and the optimizer are then found in the checkpoint whatever it calls them, and each rank reads the
    bytes of its own parts, in boxes of at most 16 MiB.

    Args:
        path: folder or fsspec URL of a checkpoint, or a file such as ``model.safetensors``. A folder of a peft adapter
            fills the adapter of a model that has one and leaves its base unchanged.
        state: nested like the state that was saved; for other formats a module, or a dict such as
            ``{"model": model, "optimizer": optimizer, "step": 0}``. Tensors of modules on the meta device get memory.
        strict: raise if leaves are missing, unexpected or mismatched, or a name pattern fits none; False reports
            them, warns of mismatched tensors, and loads the rest.
        include: name patterns (fnmatch, such as ``"model.*"``); only leaves that fit one are loaded. Keys may be joined
            by ``/`` too.
        dtype: ``"state"`` casts floats to the dtypes that the state has. Casts as for ``vescale-convert --dtype``,
            such as ``["bfloat16", "*.gate.bias=float32"]``, are applied first.
        init: called with each module that has buffers on the meta device which no checkpoint holds, once they have
            memory and before anything is read; ``model._init_weights`` for models of transformers.
        source: what a checkpoint with other names, layouts or encodings needs.
        verify: "while" hashes what has been read, so that bytes come from the disk or over the network once.
            Damage is found all the same, but tensors may hold some of it when the error is raised: a
            `PartialLoadError` then. "before" reads and hashes all bytes before the first tensor is overwritten
            on any rank, so that damage leaves the state as it was. "never" trusts the disk; names, sizes and
            headers of files are checked all the same. Other formats are read with "while" only.
        read: how ranks read what several of them want, such as replicas. "once": one of them reads and verifies it,
            and sends it to the others in pieces, so that all bytes read are the checkpoint's. "each": every rank
            reads for itself, which is faster from a local disk: its cache serves them all. "auto": once from
            object stores and from file systems that are mounted over a network, else each. The zarr form and other
            formats are read by each rank.
        process_group: the ranks that load together; default: all.
        progress: a function that gets reports of this rank's progress; True draws a bar on rank 0.

    Returns:
        What was missing, unexpected or mismatched, and how many bytes were read.

    Raises:
        CheckpointError: on all ranks, if the checkpoint does not fit the state.
        ConversionError: if files of no known format are there, or options do not fit the checkpoint.
        CorruptCheckpointError: on all ranks, if any of them finds damage. Whatever else a rank meets, such as a
            lost connection, it raises itself, and the others a CheckpointError that names it.
        PartialLoadError: on all ranks, in place of either, if the first tensor had been overwritten by then;
            ``error.overwritten`` names this rank's. One that damage led to is a CorruptCheckpointError too. DTensors
            that `fully_shard` made refuse their unit's next forward until a load has filled them, ``load_state_dict``
            included. Nothing watches over other tensors, FSDP2's among them: there the error has to be heeded. Modules
            that were on the meta device are there again.
        ValueError: if there is no such way to verify or to read.

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
    patterns = (include,) if isinstance(include, str) else None if include is None else tuple(include)
    casts = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    coordinator = coordinator_for(process_group)
    alike: dict[str, Json] = {
        "dtype": list(casts),
        "init": init is not None,
        "source": None if source is None else asdict(source),
    }
    with coordinator.together(f"opening {path}", _NOTHING_LOADED, alike, is_first=True):
        check_choices(verify, read)
        storage = open_storage(path, neighbours=num_neighbours())
        meter = meter_for(progress, coordinator.rank)
        manifest = _manifest_of(storage, path)
        has_options = bool(casts) or init is not None or source is not None
        through_views = manifest is None or has_options or has_meta_modules(state)
        alike["the checkpoint is native, and the state in memory"] = not through_views
        if through_views and (verify != "while" or read == "once"):
            raise ArgumentError(
                "This load has one way to verify and to read.",
                expected="verify='while' and read='auto' or 'each', unless a native checkpoint is loaded as it is",
                got=f"verify={verify!r}, read={read!r}",
                where=str(path),
                todo="leave verify and read out",
            )
    if not through_views:
        loader = Loader(storage, coordinator, verify, read=read, meter=meter, manifest=manifest)
        return loader.load(state, strict=strict, include=patterns)
    report: LoadReport = load_through_views(
        os.fspath(path) if isinstance(path, (str, os.PathLike)) else path.where,
        state,
        source or SourceOptions(),
        casts=casts,
        include=patterns,
        strict=strict,
        init=init,
        coordinator=coordinator,
        meter=meter,
    )
    return report if manifest is None else replace(report, metadata=manifest.metadata)


def _manifest_of(storage: Storage, path: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a native checkpoint; None where files of another format are.

    Raises:
        NoCheckpointError: if no known format's files are there.
    """
    try:
        return read_manifest(storage)
    except NoCheckpointError:
        if isinstance(path, Storage):
            raise
        files = storage.list_files()
        # An interrupted save has left zarr.json, but no manifest.
        is_unfinished = any(name.startswith("data-") for name in files)
        if files and (is_unfinished or not is_known(files)):
            raise
        parent, name = open_parent(os.fspath(path).rstrip("/"))
        if not files and parent.size(name) is None:
            raise
        return None


class Supply(Protocol):
    """Brings ranks' files to this rank's storage, where they do not lie there from the start."""

    def cost(self, saved_rank: int) -> int:
        """Of bringing the file of a rank that saved; the cheapest of equal ones is asked for."""

    def fetch(self, manifest: Manifest, saved_ranks: set[int]) -> None:
        """Bring the files of these ranks; a collective, each rank with its own."""


@dataclass
class Loader:
    """The steps of a load."""

    storage: Storage
    coordinator: Coordinator
    verify: Verify = "while"
    supply: Supply | None = None
    read: Read = "auto"
    meter: Meter = field(default_factory=Meter)
    manifest: Manifest | None = None  # None to read it

    def __post_init__(self) -> None:
        check_choices(self.verify, self.read)

    @property
    def _reads_once(self) -> bool:
        """Whether ranks compare what they want."""
        if self.supply is not None or self.coordinator.world_size == 1:
            return False  # memory of other nodes, which brings each file to a node once
        return self.read == "once" or (self.read == "auto" and self.storage.is_shared)

    @plainly
    def load(self, state: Any, *, strict: Strict, include: tuple[str, ...] | None) -> LoadReport:
        """All steps in turn. ``strict="missing"`` lets the checkpoint hold more than the state."""
        start_s = time.monotonic()
        reader = self._open()
        once = self._reads_once
        reading: Json = "once" if once else "each"
        alike: dict[str, Json] = {
            "strict": strict,
            "include": include,
            "verify": self.verify,
            "read": reading,
        }
        overwriting = Overwriting()
        with _closed_behind(reader.reads()) as reads:
            reads.meter = self.meter
            with self._preparing(reader, alike):
                with gc_paused():
                    found, targets = self._prepare(reader, reads, state, strict, include, overwriting)
                stripes = reads.stripes() if once else []
                if self.supply is None and not once:
                    self._prove(reader, reads, found)
            if self.supply is not None:
                self.supply.fetch(reader.manifest, reads.saved_ranks() | self._whose_values(reader, found))
            wanted = self.coordinator.everyone(stripes) if once else []
            if self.supply is not None or once:
                with self._preparing(reader):
                    if any(wanted):
                        reads.share(self.coordinator, wanted)
                    self._prove(reader, reads, found)
            with (
                overwriting.together(self.coordinator.world_size),
                self.coordinator.together(f"loading {self.storage.where}", _HALF_LOADED),
                self._reading(reader),
            ):
                reads.run(verify=self.verify == "while")
                for target in targets:
                    target.finish()
                found.finish()
                reads.close()  # where what it raises is raised on all ranks
        if self.coordinator.rank == 0:
            seconds = time.monotonic() - start_s
            rate = reads.num_bytes_read / max(seconds, 1e-9) / 1e9
            told = "loaded %s: rank 0 read %d bytes in %.3f s, %.2f GB/s"
            _log.info(told, self.storage.where, reads.num_bytes_read, seconds, rate)
        return LoadReport(
            tuple(found.missing),
            tuple(found.unexpected),
            reader.metadata,
            reads.num_bytes_read,
            reads.num_bytes_received,
            found.mismatched,
        )

    def _open(self) -> CheckpointReader:
        """The checkpoint, proven to be one and the same for all ranks: it may be replaced between two reads."""
        with self.coordinator.together(f"opening {self.storage.where}", _NOTHING_LOADED), gc_paused():
            cost = self.supply.cost if self.supply else self._cost
            reader = CheckpointReader(self.storage, cost=cost, manifest=self.manifest)
        save_ids = self.coordinator.everyone(reader.manifest.save_id)
        first_ranks = {save_id: save_ids.index(save_id) for save_id in save_ids}
        if len(first_ranks) > 1:
            raise NoCheckpointError(
                "Ranks found different checkpoints at this path.",
                expected="one checkpoint, which stays until it is read",
                got=", ".join(f"{save_id} on rank {rank}" for save_id, rank in first_ranks.items()),
                where=self.storage.where,
                todo="load again when the save that replaces it is done",
            )
        return reader

    def _cost(self, saved_rank: int) -> int:
        return saved_rank != self.coordinator.rank

    @contextmanager
    def _preparing(self, reader: CheckpointReader, alike: Mapping[str, Json] | None = None) -> Iterator[None]:
        doing = f"preparing to load {self.storage.where}"
        with self.coordinator.together(doing, _NOTHING_LOADED, alike or {}), self._reading(reader):
            yield

    @contextmanager
    def _reading(self, reader: CheckpointReader) -> Iterator[None]:
        """Tell a checkpoint that is removed meanwhile from damage, and from errors that say nothing of its bytes."""
        try:
            yield
        except (CorruptCheckpointError, OSError) as error:
            if self._is_gone(reader.manifest.save_id):
                raise _gone(self.storage, error) from error
            raise

    def _is_gone(self, save_id: str) -> bool:
        """Whether the checkpoint is surely not there any more."""
        try:
            return read_manifest(self.storage).save_id != save_id
        except NoCheckpointError:
            return True
        except (CheckpointError, OSError):
            return False  # the error that led here says more

    def _prepare(
        self,
        reader: CheckpointReader,
        reads: Reads,
        state: Any,
        strict: Strict,
        include: tuple[str, ...] | None,
        overwriting: Overwriting,
    ) -> tuple[Match, list[LoadTarget]]:
        """Everything that can fail before a file is opened."""
        found = match(state, reader.manifest.structure.tree, include)
        entries = reader.manifest.entries
        fitting = [
            read
            for read in found.reads
            if found.fits(read, entries[read.place].dtype, entries[read.place].shape)
        ]
        found.require_fit(self.storage.where, strict)
        describer = Describer(self.coordinator.rank_of)
        wanted: dict[object, tuple[TensorRead, Region, torch.Tensor]] = {}
        for read in fitting:
            tensor = local_of(read.tensor) if isinstance(read.tensor, DTensor) else read.tensor
            if tensor.device.type == "meta":
                raise _cannot_fill(
                    read.name, "a tensor on the meta device", "call to_empty() on its module first"
                )
            described = describer.describe(read.name, read.tensor)
            local = described.local
            if local is not None:
                _check_writable(read.name, local)
                region = describer.region(described, self.coordinator.rank)
                # Tensors that were two and are one now: the last one counts, as in load_state_dict, and
                # not which of them a thread happens to bring later.
                memory = (local.data_ptr(), local.shape, local.stride()) if local.numel() else read.name
                wanted[memory] = (read, region, local)
        targets = []
        for read, region, local in wanted.values():
            target = reads.ask(read.place, region, local)
            overwriting.add(read.name, read.tensor, target)
            targets.append(target)
        for new in found.fresh:
            entry = reader.manifest.entries[new.place]
            tensor = new.make(
                entry.shape,
                dtype_named(entry.dtype),
                is_sharded=bool(entry.cuts),
                where=self.storage.where,
            )
            described = describer.describe(new.name, tensor)
            if described.local is not None:
                region = describer.region(described, self.coordinator.rank)
                targets.append(reads.ask(new.place, region, described.local))
        return found, targets

    def _prove(self, reader: CheckpointReader, reads: Reads, found: Match) -> None:
        """Everything else that can fail before a byte is overwritten."""
        with gc_paused():
            self._per_rank(reader, found)
            reads.open()
        if self.verify == "before":
            reads.verify()

    def _merging(self, reader: CheckpointReader, found: Match) -> set[str]:
        """Per-rank values that are made of those of all ranks that saved."""
        if self.coordinator.world_size == reader.manifest.world_size:
            return set()
        return {name for name, leaf in found.per_rank.items() if leaf.merge is not None}

    def _whose_values(self, reader: CheckpointReader, found: Match) -> set[int]:
        """The saved ranks whose per-rank values `_per_rank` reads."""
        saved = reader.manifest.world_size
        if not found.per_rank or not reader.manifest.blob_bytes:
            return set()
        return (
            set(range(saved)) if self._merging(reader, found) else {self.coordinator.rank} & set(range(saved))
        )

    def _per_rank(self, reader: CheckpointReader, found: Match) -> None:
        """This rank's per-rank values: its own, or merged from all saved ranks."""
        if not found.per_rank:
            return
        rank, world, saved = self.coordinator.rank, self.coordinator.world_size, reader.manifest.world_size
        merging = self._merging(reader, found)
        if rank < saved:
            (own,) = reader.per_rank_values([rank])
            found.per_rank_values.update({name: own[name] for name in found.per_rank if name in own})
        elif merging != set(found.per_rank):
            lacking = sorted(set(found.per_rank) - merging)
            warnings.warn(
                f"rank {rank} keeps its own value of {', '.join(map(dotted_name, lacking))}: {saved} ranks saved. "
                "Give PerRank a merge function to derive one.",
                stacklevel=5,
            )
        if merging:
            everyone = reader.per_rank_values()
            for name in merging:
                values = [values[name] for values in everyone if name in values]
                merge = found.per_rank[name].merge
                assert merge is not None
                found.per_rank_values[name] = merge(values, rank, world)


@contextmanager
def _closed_behind(reads: Reads) -> Iterator[Reads]:
    """A block behind which nothing is open. What all ranks raise is raised here too, whatever closing raises."""
    try:
        yield reads
    except BaseException as error:
        with noting(error):
            reads.close()
        raise
    reads.close()


def check_choices(verify: str, read: str) -> None:
    """Refuse what is no way to verify or to read."""
    if verify not in get_args(Verify):
        expected = "'before', 'while' or 'never'"
        raise ArgumentError("There is no such way to verify.", expected=expected, got=repr(verify))
    if read not in get_args(Read):
        expected = "'once', 'each' or 'auto'"
        raise ArgumentError("There is no such way to read.", expected=expected, got=repr(read))


def _check_writable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what `expand` and `unfold` make: many elements in one place cannot take different values."""
    reach = 0  # of the elements along all dims of smaller strides
    overlap = False
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        overlap = overlap or (size > 1 and step <= reach)
        reach += step * (size - 1)
    if overlap and tensor.numel():
        raise _cannot_fill(
            name, f"strides {tensor.stride()} of sizes {tuple(tensor.shape)}", "clone() it before loading"
        )


def _cannot_fill(name: str, got: str, todo: str) -> CheckpointError:
    return CheckpointError(
        "A tensor of the state cannot be filled.",
        expected="memory of its own for every element",
        got=got,
        where=name,
        todo=todo,
    )


def _gone(storage: Storage, error: Exception) -> NoCheckpointError:
    return NoCheckpointError(
        "The checkpoint was removed or replaced while it was read.",
        expected="one that stays until it is read",
        got=f"{type(error).__name__}: {error}",
        where=storage.where,
        todo="load a newer one",
    )


class VanishedLoadError(PartialLoadError, NoCheckpointError):
    """A checkpoint was removed while a load overwrote tensors with it."""


class _Filled(NamedTuple):
    name: str
    tensor: torch.Tensor  # of the state
    target: LoadTarget


class Overwriting:
    """The tensors of a state that one load fills."""

    def __init__(self) -> None:
        self._filled: list[_Filled] = []

    def add(self, name: str, tensor: torch.Tensor, target: LoadTarget) -> None:
        """One more; ``target`` brings its values into the tensor, or into its local part."""
        self._filled.append(_Filled(name, tensor, target))

    @contextmanager
    def together(self, num_ranks: int) -> Iterator[None]:
        """A block that overwrites them, and that all ranks leave in the same way.

        Raises:
            PartialLoadError: for any error but Ctrl-C and the like; on all ranks, since what another has overwritten
                nobody can use without it.
        """
        try:
            yield
        except BaseException as error:
            names = [filled.name for filled in self._filled if filled.target.is_overwritten]
            if not names and num_ranks == 1:
                raise
            for filled in self._filled:
                if isinstance(filled.tensor, RaggedDTensor):  # of others nobody asks before they are used
                    mark_half_loaded(local_of(filled.tensor), filled.name)
            if not isinstance(error, Exception):
                error.add_note(_told(names))
                raise
            raise partial_load(error, names) from error
        for filled in self._filled:
            if isinstance(filled.tensor, RaggedDTensor):
                mark_whole(local_of(filled.tensor))


def partial_load(error: Exception, overwritten: Iterable[str]) -> PartialLoadError:
    """What to raise in place of an error that came when tensors had been overwritten: of its kind too."""
    names = tuple(overwritten)
    kind = PartialLoadError
    if isinstance(error, CorruptCheckpointError):
        kind = DamagedLoadError
    elif isinstance(error, NoCheckpointError):
        kind = VanishedLoadError
    met = str(error) if isinstance(error, VescaleError) else f"{type(error).__name__}: {error}"
    return kind(f"{met}\n  {_told(names)}", overwritten=names)


def _told(names: Iterable[str]) -> str:
    return f"overwritten: {some(names)}; use none of the state until a load has gone well"
