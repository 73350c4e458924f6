"""`ViewedCheckpoint`: a checkpoint of any format, which `load` reads through views of its tensors.

    source    pytorch_model_fsdp_0.a.q, .k, .v      optimizer.state.0.exp_avg      (by the parameter's number)
    rules     a.qkv = concat(q, k, v)
    state     model.a.qkv                           optim.state.a.qkv.exp_avg      (by the parameter's name)

Tensors are matched by metadata alone. Each rank then reads its own regions of the views, in boxes of at most 16 MiB.
Bytes that a file stores in the tensor's order are read straight into the tensor. If several ranks each read a part of a
range with one checksum, one of these ranks joins the parts' checksums and compares the result with the stored one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vescale_fsdp.checkpoint.formats.loadable import Loadable
from vescale_fsdp.checkpoint.formats.native.read import Reads
from vescale_fsdp.checkpoint.formats.native.targets import LoadTarget
from vescale_fsdp.checkpoint.formats.native.tree import native_tree
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name
from vescale_fsdp.checkpoint.moves.carried_state import (
    CarriedState,
    InMemory,
    container_of,
    optimizer_container,
    optimizers_of,
    split_entries,
)
from vescale_fsdp.checkpoint.moves.casting import CastRules, CastView
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, TensorView
from vescale_fsdp.checkpoint.moves.threads import Shared, in_threads
from vescale_fsdp.checkpoint.moves.verified_reads import SeenPieces
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, num_neighbors
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.state.live_objects import (
    LiveObjects,
    aliases_of,
    allocate,
    is_meta,
    unsaved_meta_buffers,
)
from vescale_fsdp.checkpoint.state.matching.match import match
from vescale_fsdp.checkpoint.state.matching.result import Match, TensorRead
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.checksums import RunningDigest
from vescale_fsdp.errors import CheckpointError, callers_level, some
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import Box

AS_STATE = "state"  # the cast to the dtypes of the state's tensors
_BOX_BYTES = 16 << 20  # 16 MiB; bounds the memory of one read


@dataclass(frozen=True)
class OpenedSource:
    """An open checkpoint of any format, and its entries as a load needs them.

    Attributes:
        source: the open checkpoint.
        state: the source's entries, dequantized and after key rules.
        quantized: names of the model's quantized codes and scales, which must not be cast.
        aliases: takes all stored names, and whether they are those in memory; returns (dict from the other names of
            tied tensors to their stored names, warnings). Called only if tensors are missing, since the function may
            import transformers.
        adapter_names: takes the names of a live model and the names of the source's model. For an adapter's folder, it
            returns a dict from the adapter's tensors to names in the live model; for other sources, an empty dict.
        in_memory: takes the live modules; returns the source's model under the names in memory of the only model of
            transformers among them, or None without such a model. Without modules, the class is that of config.json.
            Returns None for sources whose names are those in memory.
    """

    source: Source
    state: CarriedState
    quantized: frozenset[str]
    aliases: Callable[[Collection[str], bool], tuple[dict[str, str], tuple[str, ...]]]
    adapter_names: Callable[[Collection[str], Collection[str]], Mapping[str, str]]
    in_memory: Callable[[Collection[nn.Module]], InMemory | None]


class ViewedCheckpoint(Loadable):
    """A checkpoint of any format that is loaded through views.

    Args:
        casts: casts as the ``dtype`` argument of `load` has them; may include `AS_STATE`.
        init: initializes the buffers of a module that no checkpoint contains; None to leave these buffers alone.
        strict: as for `load`.
        metadata: the metadata of a native checkpoint.
    """

    joins_stages = True

    def __init__(
        self,
        opened: OpenedSource,
        coordinator: Coordinator,
        casts: Sequence[str],
        init: Callable[[nn.Module], object] | None,
        *,
        strict: bool,
        metadata: Json = None,
    ) -> None:
        self._source, self._opened, self._coordinator = opened.source, opened, coordinator
        self._init, self._strict = init, strict
        self._casts_to_state = AS_STATE in casts
        self._carried, self._quantized = opened.state, opened.quantized
        texts = [text for text in casts if text != AS_STATE]
        self._rules = CastRules.parse(texts) if texts else None
        self._views: list[TensorView] = []  # by the tensor numbers of the last match
        self._has_aliases = False  # whether `match` has asked for aliases
        self._is_in_memory = False  # whether `_carried` has the names that its class has in memory
        self._computed = frozenset[str]()  # names in the model of weights that its class keeps out of files
        self.where, self.metadata = opened.source.url, metadata
        self.warnings, self.left_out = tuple(opened.source.warnings), tuple[str, ...]()

    @property
    def identity(self) -> str:
        """A digest of names, shapes, dtypes and locations of all tensors; equal on ranks that opened the same files."""
        digest = RunningDigest()
        for name, tensor in self._source.tensors.items():
            chunks = [(chunk.file, chunk.offset, chunk.box.offsets) for chunk in tensor.chunks]
            digest.update(repr((name, tensor.info.shape, tensor.info.dtype.name, chunks)).encode())
        return digest.hexdigest()

    def match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        """Match the source's entries with a state.

        Raises:
            ConversionError: if casts do not fit the source.
            CheckpointError: if a leaf is a tensor in the state and another value in the source, or vice versa.
        """
        texts = self._carried.warnings
        # The class of a live model decides how its names and layouts differ from those of the folder. Other states
        # have the folder's own names, or those of the class in config.json.
        is_first = self._carried is self._opened.state
        modules = LiveObjects(state).modules.values()
        is_named = is_first and bool(modules) and self._use_names_in_memory(modules)
        matched = self._match(state, include)
        if matched.missing and is_first and not is_named and self._use_names_in_memory(()):
            renamed = self._match(state, include)
            if len(renamed.missing) < len(matched.missing):
                matched = renamed
            else:
                self._carried, self._computed = self._opened.state, frozenset()
                self._is_in_memory = False
                matched = self._match(state, include)  # again, since `_views` has those of the last match
        # The source may store tied tensors once that the state has under several names. Aliases are added only once.
        if matched.missing and not self._has_aliases:
            self._has_aliases = True
            aliases, doubts = self._opened.aliases(self._carried.views, self._is_in_memory)
            texts += doubts
            if aliases:
                self._carried = self._carried.with_aliases(aliases)
                self._quantized |= {new for new, stored in aliases.items() if stored in self._quantized}
                matched = self._match(state, include)
        for text in texts:
            warnings.warn(text, stacklevel=callers_level())
        return matched

    def _use_names_in_memory(self, modules: Collection[nn.Module]) -> bool:
        """Give the source's model the names that its class has in memory; returns whether there is a class.

        Args:
            modules: see `OpenedSource.in_memory`.
        """
        named = self._opened.in_memory(modules)
        if named is None:
            return False
        state = named.state
        self._carried = state.restricted_to({*state.views, *state.values} - named.ignored)
        self._computed, self._is_in_memory = named.computed, not named.unknown
        return True

    def _match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        """Match once, with the aliases that are known so far."""
        live, carried, rules = LiveObjects(state), self._carried, self._rules
        leaves = live.leaves()
        if rules is not None:
            carried = carried.with_model_views(lambda views: rules.apply(views, self._quantized))
        carried, adapter = _at_paths_of(leaves, tuple(live.modules), carried, self._opened.adapter_names)
        tree, names = native_tree(carried, lambda _: 0)  # any file order, since the tree is not written
        self._views = [carried.views[name] for _, name in names]
        self.left_out = carried.left_out
        # Views fill the tensors of modules, so `load_state_dict` must not get them.
        matched = match(state, tree, include, live=live, gives_modules=False)
        # Not strict, since missing names are no error yet: they may get aliases later.
        matched.require_fit(self.where, strict=False)
        matched.reads = [read for read in matched.reads if matched.fits(read, *self._type_of(read))]
        # A tied tensor is filled if any of its names is.
        filled, aliases = {read.name for read in matched.reads}, aliases_of(leaves)
        matched.missing = [name for name in matched.missing if filled.isdisjoint(aliases.get(name, ()))]
        if self._computed:
            kept = self._computed_leaves(leaves)
            matched.missing = [name for name in matched.missing if name not in kept]
        if adapter:  # an adapter's folder lacks the base model, which keeps its values
            matched.missing = [name for name in matched.missing if name in adapter]
        return matched

    def _computed_leaves(self, leaves: Mapping[Path, Any]) -> set[str]:
        """Return the names of weights that their class keeps out of files. On the meta device they have no values."""
        return {
            name
            for name, leaf in ((name_of(path), leaf) for path, leaf in leaves.items())
            if isinstance(leaf, torch.Tensor) and not is_meta(leaf)
            if any(name == own or name.endswith(f".{own}") for own in self._computed)
        }

    def _type_of(self, read: TensorRead) -> tuple[str, tuple[int, ...]]:
        """Return (dtype, shape) of the view that fills a tensor."""
        info = self._view_for(read.number, read.tensor).info
        return info.dtype.name, info.shape

    def _view_for(self, number: int, tensor: torch.Tensor) -> TensorView:
        """Return the view that fills a tensor; with `AS_STATE`, floats are cast to the tensor's dtype."""
        view = self._views[number]
        # Quantized codes and scales are never cast: that would change what they encode.
        if not self._casts_to_state or view.info.name in self._quantized:
            return view
        wanted = dtype_from_torch(dtype_name(tensor.dtype))
        is_cast = view.info.dtype != wanted and view.info.dtype.kind == wanted.kind == "float"
        return CastView(view, wanted) if is_cast else view

    def describe(self, number: int) -> tuple[tuple[int, ...], str, bool]:
        """Return (shape, dtype, False) of a stored tensor; False, since a source does not say what was sharded."""
        info = self._views[number].info
        return info.shape, info.dtype.required_torch_name, False

    def allocate(
        self, matched: Match, state: Any, include: tuple[str, ...] | None, on_failure: ExitStack
    ) -> Match:
        """Allocate tensors that are on the meta device, and match the state again.

        Raises:
            CheckpointError: if ``strict`` and no checkpoint contains a buffer on the meta device, and there is no
                ``init``.
        """
        live = LiveObjects(state)
        names = [read.name for read in matched.reads if is_meta(read.tensor)]
        buffers = unsaved_meta_buffers(live)
        if buffers and self._init is None and self._strict:
            raise CheckpointError(
                "The model has non-persistent buffers on the meta device, whose values no checkpoint contains.",
                expected="values for every tensor of the model",
                got=some(buffers),
                todo="pass init=, which is called with each module that has such buffers: "
                "init=model._init_weights for transformers, else often lambda module: module.reset_parameters()",
            )
        if not names and not buffers:
            return matched
        # If not strict and without `init`, these buffers stay on the meta device.
        buffers = buffers if self._init is not None else {}
        on_failure.callback(allocate(live, names, buffers))
        for owner in dict.fromkeys(buffers.values()):  # one call per module, in a fixed order
            assert self._init is not None
            self._init(owner)
        again = self._match(state, include)
        again.unexpected = matched.unexpected  # already reduced to the names that are unexpected on all ranks
        return again

    def require_equal(self, one: TensorRead, other: TensorRead, region: Region) -> None:
        """Check that two stored tensors for one tensor of the state are equal in this rank's region.

        Raises:
            CheckpointError: if the stored tensors differ.
        """
        views = [self._view_for(read.number, read.tensor) for read in (one, other)]
        if one.number == other.number or views[0].identity() == views[1].identity():
            return
        raw = views[0].info.dtype.raw  # bits are compared, so that NaNs are equal
        for whole, _ in region.pieces():
            for box, _ in _cut(whole, raw.itemsize, 0):
                left, right = np.empty(box.sizes, dtype=raw), np.empty(box.sizes, dtype=raw)
                views[0].read_into(box, left)
                views[1].read_into(box, right)
                if not np.array_equal(left, right):
                    raise CheckpointError(
                        "Two tensors that are tied in the state differ in the source.",
                        expected=f"equal values of {one.name} and {other.name}, which the model ties",
                        got="other values",
                        where=self.where,
                        todo="untie them in the model (config.tie_word_embeddings=False), or leave one out with "
                        "include=",
                    )

    def fetch(self, reads: Reads, matched: Match) -> None:
        """Do nothing: all files are in the source's storage."""

    def read_values(self, matched: Match) -> None:
        """Do nothing: a source has no `PerRank` values."""

    def reads(self) -> Reads:
        return _ViewReads(self._source, self._view_for, self._coordinator)


def _at_paths_of(
    leaves: Mapping[Path, Any],
    modules: Sequence[Path],
    carried: CarriedState,
    adapter_names: Callable[[Collection[str], Collection[str]], Mapping[str, str]],
) -> tuple[CarriedState, frozenset[str]]:
    """Move a source's entries to the paths that a live state has for them.

    If both sides have one model, the source's model moves to the live model's path, whatever its own path is. A single
    optimizer moves in the same way. Entries under other keys than the live state's are left out, such as a scheduler's,
    or the optimizer's if the live state is a model alone.

    Args:
        leaves: leaves of the live state.
        modules: paths of the live state's modules; empty for a state of plain dicts, whose model is then detected.
        adapter_names: see `OpenedSource`.

    Returns:
        (the moved entries, full names of the live tensors that an adapter fills).
    """
    paths = {name_of(path): path for path in leaves}
    shapes = {
        name: leaf.shape for name, path in paths.items() if isinstance(leaf := leaves[path], torch.Tensor)
    }
    prefix = name_of(modules[0]) if len(modules) == 1 else None
    live = split_entries(paths, shapes, prefix, "the state to be filled")
    optimizers = {home for name in live.optimizer if (home := optimizer_container(paths[name])) is not None}

    names = adapter_names(live.names.values(), carried.is_model)
    stored = carried.is_model.intersection(names)
    if stored:
        renamed = {names[name]: (RenamedView(carried.views[name], names[name]), name) for name in stored}
        carried = carried.with_replaced(renamed, stored)

    # `candidates` is not empty if there are several models.
    has_one_model = len(modules) == 1 or (not modules and not live.candidates)
    if has_one_model and not carried.model.candidates:
        container = modules[0] if modules else container_of(live.prefix, leaves)
        carried = _moved(carried, dict.fromkeys(carried.is_model, carried.container), container)
    containers = optimizers_of(carried)
    if len(containers) == len(optimizers) == 1:
        (container,) = optimizers
        ((old, entries),) = containers.items()
        carried = _moved(carried, dict.fromkeys(entries, old), container)
        containers = {container: entries}

    # A live state without an optimizer cannot take optimizer state.
    of_optimizers = {name for names in containers.values() for name in names} if optimizers else set()
    keys = {path[0] for path in leaves if path}
    kept = {
        name
        for name in (*carried.views, *carried.values)
        if name in carried.is_model or name in of_optimizers or carried.path(name)[0] in keys
    }
    carried = carried.restricted_to(kept)
    return carried, frozenset(f"{live.prefix}{name}" for name in names.values())


def _moved(state: CarriedState, containers: Mapping[str, Path], new: Path) -> CarriedState:
    """Move entries from their containers to ``new``. A model's entry gets one key, its dotted name, below ``new``."""
    paths = dict(state.paths)
    for name, old in containers.items():
        rest = state.path(name)[len(old) :]
        paths[name] = (*new, name_of(rest)) if name in state.is_model else (*new, *rest)
    return replace(state, paths=paths)


class _Filling(NamedTuple):
    """This rank's region of a view, and the tensor to fill, which has the view's dtype."""

    view: TensorView
    region: Region
    target: LoadTarget


class _BoxRead(NamedTuple):
    """A box of a view; its items fill consecutive items of the target, from index ``first`` on."""

    view: TensorView
    box: Box
    target: LoadTarget
    first: int


class _ViewReads(Reads):
    """Reads of views.

    A region is a flat range of a box, and is contiguous in memory. It is cut into boxes that are contiguous in memory
    too. If a file has the bytes of such a box in the same order, they are read without a copy.

        region   rows 3.5 .. 9.0 of a matrix      boxes   half of row 3 | rows 4 .. 8       (of at most 16 MiB)
    """

    def __init__(
        self,
        source: Source,
        view_for: Callable[[int, torch.Tensor], TensorView],
        coordinator: Coordinator,
    ) -> None:
        super().__init__(source.store)
        self._source, self._view_for, self._coordinator = source, view_for, coordinator
        self._fillings: list[_Filling] = []

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        filling = _Filling(self._view_for(index, tensor), region, LoadTarget(tensor))
        self._fillings.append(filling)
        return filling.target

    def open(self) -> None:
        """Do nothing: `open_for_load` has checked the files, and each file is opened when it is read."""

    def verify(self) -> None:
        raise AssertionError("views are verified while they are read")

    def run(self, *, verify: bool) -> None:
        """Read all regions. A collective: ranks that read parts of one checksum range verify it together."""
        kept, checks = FirstError(), self._source.reads
        kept.attempt(self._fill)
        seen = None if kept.error is not None else checks.seen_in_part()
        seen_by_rank = self._coordinator.everyone(seen)
        kept.raise_kept()  # only now: the other ranks wait in `everyone` above
        if None not in seen_by_rank:  # None: a rank has failed, and the caller raises its error on all ranks
            checks.verify_with(_share_of(self._coordinator.rank, [each or [] for each in seen_by_rank]))
        # Most formats have no checksums that would detect a file that was changed meanwhile.
        self._source.require_unchanged()

    def _fill(self) -> None:
        """Read all regions into their targets, in several threads."""
        total = sum(filling.region.numel * filling.target.itemsize for filling in self._fillings)
        self.meter.begin("loading", total)

        def work(shared: Shared[_BoxRead]) -> None:
            for read in shared:
                _fill_box(read)
                self.meter.advance(read.box.numel * read.target.itemsize)

        # At most this rank's share of the machine's cores, because computing views takes CPU time.
        cores = max(1, (os.cpu_count() or 1) // num_neighbors())
        in_threads(min(self.storage.read_threads, cores), work, self._boxes())
        self.num_bytes_read = total

    def _boxes(self) -> Iterator[_BoxRead]:
        """Yield the boxes that together are all requested regions."""
        for view, region, target in self._fillings:
            for whole, start in region.pieces():
                for box, first in _cut(whole, target.itemsize, start):
                    yield _BoxRead(view, box, target, first)

    def close(self) -> None:
        """Do nothing: each file is closed after it is read."""


def _fill_box(read: _BoxRead) -> None:
    """Read a box into its target."""
    view, box, target, first = read
    target.begin()
    raw, stop = view.info.dtype.raw, first + box.numel
    if target.memory is not None:
        view.read_into(box, target.memory.view(raw)[first:stop].reshape(box.sizes))
        return
    scratch = np.empty(box.numel, dtype=raw)  # a buffer, because the target is on a device
    view.read_into(box, scratch.reshape(box.sizes))
    items = target.flat[first:stop]
    items.copy_(torch.from_numpy(scratch.view(np.uint8)).view(items.dtype))


def _share_of(rank: int, seen_by_rank: Sequence[Sequence[SeenPieces]]) -> Iterator[SeenPieces]:
    """Yield the pieces of the partially read checksum ranges that this rank verifies.

    A record of a file, such as a whole matrix, has one checksum, but each rank reads only a part of the record. One of
    these ranks joins the checksums of all parts, and reads the bytes that no rank has read.
    """
    ranges: dict[tuple[str, int], dict[int, SeenPieces]] = {}
    for reader, seen in enumerate(seen_by_rank):
        for pieces in seen:
            # Inserted in an order that is the same on all ranks, because the number below chooses the rank.
            ranges.setdefault((pieces.file, pieces.start), {})[reader] = pieces
    for number, by_reader in enumerate(ranges.values()):
        # The readers take turns, to balance the work.
        if list(by_reader)[number % len(by_reader)] == rank:
            yield from by_reader.values()


def _cut(box: Box, itemsize: int, first: int) -> Iterator[tuple[Box, int]]:
    """Cut a row-major box into consecutive boxes of at most `_BOX_BYTES`; yield (box, index of its first item)."""
    nbytes = box.numel * itemsize
    # Cut along the outermost dim whose size is not 1, so that the parts follow each other in memory.
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if nbytes <= _BOX_BYTES or dim is None:
        if box.numel:
            yield box, first
        return
    rows = box.sizes[dim]
    step = max(1, rows * _BOX_BYTES // nbytes)  # at least one row; a larger row is cut along the next dim
    for start in range(0, rows, step):
        count = min(step, rows - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        part = Box(offsets, (*box.sizes[:dim], count, *box.sizes[dim + 1 :]))
        yield from _cut(part, itemsize, first + start * (box.numel // rows))
