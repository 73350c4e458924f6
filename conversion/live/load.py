"""Loads through views: a checkpoint of any format into a state, whatever shards it.

1  open the source, plan views of its tensors (renames, key rules, casts), bring them to the state's paths
2  match them with the state: missing, unexpected, of other shapes or types; ranks compare what they found
3  give tensors on the meta device memory; compare what the source has twice and the state once
4  meet: any error so far is raised on all ranks, and nothing has been overwritten
5  read: each rank its own parts, in boxes of at most 16 MiB, straight into the tensors where files store them so
6  verify the checksums of what ranks read in parts, meet; then plain values and optimizers take theirs
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vescale_fsdp.checkpoint.formats.native.targets import LoadTarget
from vescale_fsdp.checkpoint.load import LoadReport, Overwriting, SourceOptions
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.checkpoint.moves.threads import Shared, in_threads
from vescale_fsdp.checkpoint.moves.verified_reads import SeenPieces
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, num_neighbours
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.tensor_description import Describer
from vescale_fsdp.checkpoint.storage.checksums import RunningDigest
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.live.live_state import LiveState, is_meta
from vescale_fsdp.conversion.live.source_match import LiveMatch, LiveOptions, match_source
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.torch_modes import plainly

_log = logging.getLogger(__name__)
_NOTHING_LOADED = "nothing was overwritten"
_HALF_LOADED = "tensors may hold some of what was to be loaded"


def load_through_views(
    url: str,
    state: Any,
    source: SourceOptions,
    *,
    casts: tuple[str, ...],
    include: tuple[str, ...] | None,
    strict: bool,
    init: Callable[[nn.Module], object] | None,
    coordinator: Coordinator,
    meter: Meter,
) -> LoadReport:
    """Fill a state from a checkpoint of any format; arguments and errors as for `checkpoint.load`."""
    options = LiveOptions(source, casts, include, strict, init)
    return _ViewLoader(url, options, coordinator, meter).run(state)


@dataclass
class _ViewLoader:
    """The steps of a load through views."""

    url: str
    options: LiveOptions
    coordinator: Coordinator
    meter: Meter

    @plainly
    def run(self, state: Any) -> LoadReport:
        alike: dict[str, Any] = {"include": self.options.include, "strict": self.options.strict}
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
                fillings = self._without_aliases(made, list(self._fillings(made)))
            overwriting = Overwriting()
            for filling in fillings:
                overwriting.add(filling.name, filling.tensor, filling.target)
            num_bytes = sum(filling.region.numel * filling.target.itemsize for filling in fillings)
            with overwriting.together(self.coordinator.world_size):
                with self._together("reading", outcome=_HALF_LOADED):
                    self.meter.begin("loading", num_bytes)
                    fill_all(fillings, self._num_threads(source), self.meter)
                pieces = self.coordinator.everyone(source.reads.seen_in_part())
                with self._together("verifying", outcome=_HALF_LOADED):
                    source.reads.verify_with(_share(pieces, self.coordinator.rank))
                    source.require_unchanged()
                    made.found.finish()
                    live.give_back()
        except BaseException:
            for put_back in undo:  # memory that could not be filled would pass for values
                put_back()
            raise
        found, doubts = made.found, tuple(source.warnings)
        if self.coordinator.rank == 0:
            for doubt in doubts:
                _log.warning("%s: %s", self.url, doubt)
        return LoadReport(
            tuple(found.missing),
            tuple(found.unexpected),
            num_bytes_read=num_bytes,
            mismatched=found.mismatched,
            left_out=made.left_out,
            warnings=doubts,
        )

    def _together(
        self, doing: str, alike: dict[str, Any] | None = None, outcome: str = _NOTHING_LOADED
    ) -> AbstractContextManager[None]:
        return self.coordinator.together(f"{doing} to load {self.url}", outcome, alike or {})

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

    def _without_aliases(self, made: LiveMatch, fillings: list[Filling]) -> list[Filling]:
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
    """The partially read checksum ranges that this rank verifies.

    A record of a file, such as a whole matrix, has one checksum, and each rank reads only some of it. One of these
    ranks joins the checksums of all parts, and reads the bytes that no rank has read.
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


def fill_all(fillings: Sequence[Filling], num_threads: int, meter: Meter) -> None:
    """Fill every tensor; any may hold some of its values if this raises.

    A rank's part is a flat range of a box (`Region`), in memory one run of items. It is cut into boxes that are runs of
    that memory again, so that what a file stores in the wanted order is read into it without a copy:

        region   rows 3.5 .. 9.0 of a matrix      boxes   half of row 3 | rows 4 .. 8       (of at most 16 MiB)

    Scratch is what views need to compute a box, and the box itself where the memory is a device's.

    Raises:
        CorruptCheckpointError: if a file turns out damaged.
    """
    jobs = (job for filling in fillings for job in _jobs(filling))

    def work(shared: Shared[_Job]) -> None:
        for job in shared:
            job.run()
            meter.advance(job.box.numel * job.target.itemsize)

    in_threads(num_threads, work, jobs)
    for filling in fillings:
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
