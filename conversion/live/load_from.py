"""`load_from`: any checkpoint straight into a model that is sharded already, whatever shards it.

1  open the source, plan views of its tensors (renames, key rules, casts), put them where the state has its own
2  match them with the state: missing, unexpected, of other shapes or types; ranks compare what they found
3  give tensors on the meta device memory; compare what the source has twice and the state once
4  meet: any error so far is raised on all ranks, and nothing has been overwritten
5  read: each rank its own parts, in boxes of at most 16 MiB, straight into the tensors where they lie in the file so
6  prove the checksums of what ranks read in parts, meet; then plain values and optimizers take theirs
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp.checkpoint.checksums import RunningDigest
from vescale_fsdp.checkpoint.loading.load import Overwriting
from vescale_fsdp.checkpoint.loading.targets import LoadTarget
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.moves.checked_ranges import SeenPieces
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.checkpoint.moves.threads import Shared, in_threads
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.ranks.neighbours import num_neighbours
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.live.live_state import LiveState, is_meta
from vescale_fsdp.conversion.live.source_match import LiveMatch, LiveOptions, match_source
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.torch_modes import plainly

_log = logging.getLogger(__name__)
_NOTHING_LOADED = "nothing was overwritten"
_HALF_LOADED = "tensors may hold some of what was to be loaded"


@dataclass(frozen=True)
class LoadFromReport:
    """What `load_from` did not load.

    Attributes:
        missing: leaves of the state that the source lacks; they keep their values.
        unexpected: leaves of the source's model and optimizer that the state lacks.
        mismatched: leaves of other shapes or types, each with what the source and the state have.
        left_out: other entries of the source that the state has no place for.
        warnings: what its files could not say for sure, in sentences; the logger ``vescale_fsdp`` says them too.

    Examples:
        >>> report = LoadFromReport(missing=(), unexpected=("lm_head.weight",))
        >>> report.unexpected
        ('lm_head.weight',)
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def load_from(
    source: str | os.PathLike[str],
    state: Any,
    *,
    rules: str | None = None,
    rules_to: str = "ours",
    config: str | None = None,
    dequantize: str | None = None,
    dtype: str | Sequence[str] = (),
    include: str | Sequence[str] | None = None,
    strict: bool = True,
    init: Callable[[nn.Module], object] | None = None,
    model_prefix: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadFromReport:
    """Fill a model, sharded in whatever way, from a checkpoint of any format. A collective.

    Each rank reads the bytes that its own parts need, in boxes of 16 MiB, and no others but for small gaps: nothing is
    converted on disk. Tied weights stay one: a folder that stores them once fills both names.

    >>> import tempfile
    >>> import torch
    >>> torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, f"{(folder := tempfile.mkdtemp())}/linear.pt")
    >>> with torch.device("meta"):
    ...     model = nn.Linear(3, 2)
    >>> load_from(f"{folder}/linear.pt", model).missing, model.weight.sum().item()
    ((), 6.0)

    Args:
        source: path or URL of whatever ``vescale-convert`` reads; of peft's folder of an adapter too, which fills the
            adapter of a model that has one (a PeftModel) and leaves its base as it is.
        state: a module, or a dict such as ``{"model": model, "optimizer": optimizer, "step": 0}`` of modules, their
            optimizers, tensors, plain values and Stateful objects. Tensors of modules on the meta device get memory.
        rules: key rules, as ``vescale-convert --rules``: a shipped set's name or a TOML file.
        rules_to: whose names the state has, ``"ours"`` or ``"hf"``: the side of the rules that is made.
        config: folder or URL of the config.json that rules and ``dequantize`` go by; default: the source's own.
        dequantize: the float type that quantised weights become, before rules: ``"bf16"``, as for ``vescale-convert``.
        dtype: ``"state"`` casts floats to the types that the state has. Casts as for ``vescale-convert --dtype``,
            such as ``["bfloat16", "*.gate.bias=float32"]``, come before: types must agree in the end.
        include: name patterns (fnmatch); only leaves of the state that fit one are loaded.
        strict: raise if leaves of the state's models and optimizers are missing, unexpected or mismatched, or a
            pattern fits none; False reports these and loads the rest.
        init: called with each module that has buffers on the meta device which no checkpoint holds, once they have
            memory and before anything is read; ``model._init_weights`` for models of transformers.
        model_prefix: what the model's names begin with in the source; default: found out.
        process_group: the ranks that load together; default: all.

    Raises:
        CheckpointError: on all ranks, if the source does not fit the state; ranks that met something else raise that.
        ConversionError: if the source is of no known kind, or options do not fit it.
        CorruptCheckpointError: if files are missing, truncated or not what was saved.
        PartialLoadError: on all ranks, in place of these, once the first tensor may have been overwritten, as damage
            found in the data: ``error.overwritten`` names this rank's. What was on the meta device is there again.
    """
    patterns = (include,) if isinstance(include, str) else None if include is None else tuple(include)
    casts = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    options = LiveOptions(rules, rules_to, config, dequantize, casts, patterns, strict, init, model_prefix)
    return _LoadFrom(os.fspath(source), options, coordinator_for(process_group)).run(state)


@dataclass
class _LoadFrom:
    """The steps of `load_from`."""

    url: str
    options: LiveOptions
    coordinator: Coordinator

    @plainly
    def run(self, state: Any) -> LoadFromReport:
        alike = self.options.to_json()
        with self._together("planning", alike), gc_paused():
            source = open_source(self.url)
            alike["the source's tensors"] = _listing(source)
            live = LiveState(state)
            made = match_source(source, live, self.options)
        # Of ranks that hold stages of a model, each lacks what the others have.
        everywhere = [set(names) for names in self.coordinator.everyone(made.found.unexpected)]
        made.found.unexpected = [n for n in made.found.unexpected if all(n in names for names in everywhere)]
        undo: list[Callable[[], object]] = []
        try:
            with self._together("preparing"), gc_paused():
                made.found.require_fit(self.url, self.options.strict)
                made = self._with_memory(source, live, made, undo)
                fillings = self._without_twins(made, list(self._fillings(made)))
            overwriting = Overwriting()
            for filling in fillings:
                overwriting.add(filling.name, filling.tensor, filling.target)
            with overwriting.together(self.coordinator.world_size):
                with self._together("reading", outcome=_HALF_LOADED):
                    fill_all(fillings, self._num_threads(source))
                pieces = self.coordinator.everyone(source.seen_in_part())
                with self._together("verifying", outcome=_HALF_LOADED):
                    source.prove_with(_share(pieces, self.coordinator.rank))
                    source.require_unchanged()
                    made.found.finish()
                    live.give_back()
        except BaseException:
            for put_back in undo:  # what was to be filled would pass for values
                put_back()
            raise
        found, doubts = made.found, tuple(source.warnings)
        if self.coordinator.rank == 0:
            for doubt in doubts:
                _log.warning("%s: %s", self.url, doubt)
        return LoadFromReport(
            tuple(found.missing), tuple(found.unexpected), found.mismatched, made.left_out, doubts
        )

    def _together(
        self, doing: str, alike: dict[str, Any] | None = None, outcome: str = _NOTHING_LOADED
    ) -> AbstractContextManager[None]:
        is_first = doing == "planning"
        return self.coordinator.together(
            f"{doing} to load {self.url}", outcome, alike or {}, is_first=is_first
        )

    def _with_memory(
        self, source: Source, live: LiveState, made: LiveMatch, undo: list[Callable[[], object]]
    ) -> LiveMatch:
        """The match, with tensors that were on the meta device in memory."""
        names = [name for name, _, tensor in made.reads if is_meta(tensor)]
        bare = live.bare_buffers()
        if bare and self.options.init is None and self.options.strict:
            raise CheckpointError(
                "Buffers on the meta device are in no checkpoint.",
                expected="values for every tensor of the model",
                got=some(bare),
                todo="pass init=, which is called with each module that has such buffers: for transformers "
                "init=model._init_weights, elsewhere often lambda module: module.reset_parameters()",
            )
        if not names and not bare:
            return made
        bare = bare if self.options.init is not None else {}
        undo.append(live.allocate(names, bare))
        for owner in dict.fromkeys(bare.values()):
            assert self.options.init is not None
            self.options.init(owner)
        return match_source(source, live, self.options)

    def _fillings(self, made: LiveMatch) -> Iterator[Filling]:
        """This rank's parts of everything that is read."""
        describer = Describer(self.coordinator.rank_of)
        for name, view, tensor in made.reads:
            described = describer.describe(name, tensor)
            if described.local is not None:
                region = describer.region(described, self.coordinator.rank)
                yield Filling(name, view, region, tensor, LoadTarget(described.local))
        for new in made.found.fresh:
            view = made.views[new.place]
            dtype = dtype_named(view.info.dtype.required_torch_name)
            tensor = new.make(view.info.shape, dtype, is_sharded=False, where=self.url)
            described = describer.describe(new.name, tensor)
            if described.local is not None:
                region = describer.region(described, self.coordinator.rank)
                yield Filling(new.name, view, region, tensor, LoadTarget(described.local))

    def _without_twins(self, made: LiveMatch, fillings: list[Filling]) -> list[Filling]:
        """One filling for each tensor, whatever number of names it has.

        Raises:
            CheckpointError: if the source has two tensors where the state has one, and they differ.
        """
        first: dict[str, Filling] = {}
        for filling in fillings:
            names = made.ties.get(filling.name, (filling.name,))
            other = first.setdefault(names[0], filling)
            if (
                other is not filling
                and other.view.identity() != filling.view.identity()
                and not same_values(other, filling)
            ):
                raise CheckpointError(
                    "Two tensors of the source are one in the state, and they differ.",
                    expected=f"equal values of {other.name} and {filling.name}, which the model ties",
                    got="other values",
                    where=self.url,
                    todo="untie them in the model (config.tie_word_embeddings=False), or leave one out with include=",
                )
        return list(first.values())

    def _num_threads(self, source: Source) -> int:
        return max(1, min(source.store.read_threads, (os.cpu_count() or 1) // num_neighbours()))


def _share(pieces: Sequence[Sequence[SeenPieces]], rank: int) -> Iterator[SeenPieces]:
    """What ranks have read, in parts, of ranges with one checksum: of those that this rank is to prove.

    A record of a file, such as a whole matrix, has one checksum, and no rank wants all of it. One of those that read
    some of it joins the checksums of all parts; what nobody wanted it reads.
    """
    seen: dict[tuple[str, int], dict[int, SeenPieces]] = {}
    for reader, found in enumerate(pieces):
        for each in found:
            seen.setdefault((each.file, each.start), {})[reader] = each
    for number, readers in enumerate(seen.values()):
        if list(readers)[number % len(readers)] == rank:
            yield from readers.values()


def _listing(source: Source) -> str:
    """A digest of what a source says of its tensors, which all ranks must see alike."""
    digest = RunningDigest()
    for name, tensor in source.tensors.items():
        places = [(chunk.file, chunk.offset, chunk.box.offsets) for chunk in tensor.chunks]
        digest.update(repr((name, tensor.info.shape, tensor.info.dtype.name, places)).encode())
    return digest.hexdigest()


_BOX_BYTES = 16 << 20  # 16 MiB


class Filling(NamedTuple):
    """One tensor of the state: what fills this rank's part of it.

    Attributes:
        name: of the leaf.
        tensor: the leaf.
        target: this rank's part of it, in the type of the view.
    """

    name: str
    view: TensorView
    region: Region
    tensor: torch.Tensor
    target: LoadTarget


class _Job(NamedTuple):
    """A box of a view, and the target's items that it fills, from ``first`` on."""

    view: TensorView
    box: Box
    target: LoadTarget
    first: int

    def run(self) -> None:
        self.target.begin()
        raw, stop = self.view.info.dtype.raw, self.first + self.box.numel
        if self.target.memory is not None:
            items = self.target.memory.view(raw)[self.first : stop]
            self.view.read_into(self.box, items.reshape(self.box.sizes))
            return
        scratch = np.empty(self.box.numel, dtype=raw)
        self.view.read_into(self.box, scratch.reshape(self.box.sizes))
        into = self.target.flat[self.first : stop]
        into.copy_(torch.from_numpy(scratch.view(np.uint8)).view(into.dtype))


def fill_all(fillings: Iterable[Filling], num_threads: int) -> None:
    """Fill every tensor; any may hold some of its values if this raises.

    Raises:
        CorruptCheckpointError: if a file turns out damaged.
    """
    found = list(fillings)
    jobs = (job for filling in found for job in _jobs(filling))

    def work(shared: Shared[_Job]) -> None:
        for job in shared:
            job.run()

    in_threads(num_threads, work, jobs)
    for filling in found:
        filling.target.finish()


def same_values(a: Filling, b: Filling) -> bool:
    """Whether two views hold the same bytes for a rank's part of one tensor."""
    raw = a.view.info.dtype.raw
    for whole, _ in a.region.pieces():
        for box, _ in _cut(whole, raw.itemsize, 0):
            left, right = np.empty(box.sizes, dtype=raw), np.empty(box.sizes, dtype=raw)
            a.view.read_into(box, left)
            b.view.read_into(box, right)
            if not np.array_equal(left, right):
                return False
    return True


def _jobs(filling: Filling) -> Iterator[_Job]:
    for whole, place in filling.region.pieces():
        for box, first in _cut(whole, filling.target.itemsize, place):
            yield _Job(filling.view, box, filling.target, first)


def _cut(box: Box, itemsize: int, first: int) -> Iterator[tuple[Box, int]]:
    """Boxes of limited size that follow each other in a row-major box, each with its first item's place."""
    nbytes = box.numel * itemsize
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if nbytes <= _BOX_BYTES or dim is None:
        if box.numel:
            yield box, first
        return
    rows = box.sizes[dim]
    step = max(1, rows * _BOX_BYTES // nbytes)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        part = Box(offsets, (*box.sizes[:dim], count, *box.sizes[dim + 1 :]))
        yield from _cut(part, itemsize, first + start * (box.numel // rows))
