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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, dtype_name
from vescale_fsdp.checkpoint.native.loadable import Loadable, model_path, split_leaves
from vescale_fsdp.checkpoint.native.read import Reads
from vescale_fsdp.checkpoint.native.targets import LoadTarget
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, num_neighbors
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects
from vescale_fsdp.checkpoint.state.matching.catalogue import Catalogue, Stored
from vescale_fsdp.checkpoint.state.matching.match import match
from vescale_fsdp.checkpoint.state.matching.result import Match, TensorRead
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.checksums import RunningDigest
from vescale_fsdp.conversion.engine.carried_state import (
    CarriedState,
    InMemory,
    optimizer_container,
    optimizers_of,
)
from vescale_fsdp.conversion.engine.casting import CastRules, CastView
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.tensor_view import RenamedView, TensorView
from vescale_fsdp.conversion.engine.verified_reads import SeenReads
from vescale_fsdp.conversion.formats.native.tree import native_tree
from vescale_fsdp.errors import callers_level
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.layout.region import Region

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
        names_over_base: takes the names of a live model and the model's names in the source. If the source is the base
            of a peft model, it returns (dict from the live model's names to the source's, names of adapters); for other
            sources, two empty values.
        in_memory: takes the live modules; returns the source's model under the names in memory of the only model of
            transformers among them, or None without such a model. Without modules, the class is that of config.json.
            Returns None for sources whose names are those in memory.
        may_have_more: whether such sources often have tensors that a model lacks, such as the heads of another class.
    """

    source: Source
    state: CarriedState
    quantized: frozenset[str]
    aliases: Callable[[Collection[str], bool], tuple[dict[str, str], tuple[str, ...]]]
    adapter_names: Callable[[Collection[str], Collection[str]], Mapping[str, str]]
    names_over_base: Callable[[Collection[str], Collection[str]], tuple[dict[str, str], frozenset[str]]]
    in_memory: Callable[[Collection[nn.Module]], InMemory | None]
    may_have_more: bool = False


class ViewCatalogue(Catalogue):
    """The content of a checkpoint that is read through views.

    Args:
        carried: the checkpoint's entries, at the paths of the state.
        casts_to_state: whether floats are cast to the dtypes of the state.
        quantized: names of codes and scales, which are not cast.
        adapter: for an adapter's folder, the state's names that the folder fills; empty for other sources.
        over_base: for a folder of the base model alone, the state's names of adapters; empty for other sources.
        computed: names in the model of weights that its class keeps out of files.
    """

    def __init__(
        self,
        carried: CarriedState,
        where: str,
        *,
        casts_to_state: bool,
        quantized: Collection[str],
        adapter: Collection[str],
        over_base: Collection[str],
        computed: Collection[str],
    ) -> None:
        self.where, self.ignored = where, carried.dropped
        self.tree, names = native_tree(carried, lambda _: 0)  # any file order, since the tree is not written
        self._views = [carried.views[name] for _, name in names]
        self._casts_to_state, self._quantized = casts_to_state, quantized
        self._adapter, self._over_base, self._computed = adapter, over_base, computed

    def view(self, number: int, wanted: torch.dtype | None) -> TensorView:
        """Return tensor ``number``, cast to the dtype of the tensor to fill if both are floats and the load casts."""
        view = self._views[number]
        # Quantized codes and scales are never cast: that would change what they encode.
        if wanted is None or not self._casts_to_state or view.info.name in self._quantized:
            return view
        dtype = dtype_from_torch(dtype_name(wanted))
        is_cast = view.info.dtype != dtype and view.info.dtype.kind == dtype.kind == "float"
        return CastView(view, dtype) if is_cast else view

    def stored(self, number: int, wanted: torch.dtype | None) -> Stored:
        info = self.view(number, wanted).info
        return Stored(info.shape, info.dtype.name)  # a source does not say what was sharded

    def identity(self, number: int) -> Hashable:
        return self._views[number].sameness

    def may_lack(self, name: str) -> bool:
        return bool(self._adapter) and name not in self._adapter

    def leaves_to_class(self, name: str) -> bool:
        return any(name == own or name.endswith(f".{own}") for own in self._computed)

    def leaves_to_adapter(self, name: str) -> bool:
        return name in self._over_base


class ViewedCheckpoint(Loadable):
    """A checkpoint of any format that is loaded through views.

    Args:
        casts: casts as the ``dtype`` argument of `load` has them; may include `AS_STATE`.
        by_name: whether the names of the state's objects and those of the checkpoint are the same, as for native
            checkpoints. Otherwise the model and the optimizer are found under any name.
        metadata: the metadata of a native checkpoint.
    """

    def __init__(
        self,
        opened: OpenedSource,
        coordinator: Coordinator,
        casts: Sequence[str],
        *,
        by_name: bool,
        metadata: Json = None,
    ) -> None:
        self._source, self._opened, self._coordinator = opened.source, opened, coordinator
        self._by_name = by_name
        self._casts_to_state = AS_STATE in casts
        self._carried, self._quantized = opened.state, opened.quantized
        texts = [text for text in casts if text != AS_STATE]
        self._rules = CastRules.parse(texts) if texts else None
        self._is_in_memory = False  # whether `_carried` has the names that its class has in memory
        self._computed = frozenset[str]()  # names in the model of weights that its class keeps out of files
        self.where, self.metadata = opened.source.url, metadata
        self.warnings = tuple(opened.source.warnings)
        self.may_have_more = opened.may_have_more

    @property
    def identity(self) -> str:
        """A digest of names, shapes, dtypes and locations of all tensors; equal on ranks that opened the same files."""
        digest = RunningDigest()
        for name, tensor in self._source.tensors.items():
            chunks = [(*chunk.extent[:2], chunk.box.offsets) for chunk in tensor.chunks]
            digest.update(repr((name, tensor.info.shape, tensor.info.dtype.name, chunks)).encode())
        return digest.hexdigest()

    def match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        """Match the source's entries, under their names in memory or in files, and those of tied tensors.

        Raises:
            ConversionError: if casts do not fit the source.
        """
        texts, live = self._carried.warnings, LiveObjects(state)

        def matched_now() -> Match:
            return match(state, self._catalogue(live), include, live=live)

        # The class of a live model decides how its names and layouts differ from those of the folder. Other states
        # have the folder's own names, or those of the class in config.json.
        modules = live.modules.values()
        is_named = bool(modules) and self._use_names_in_memory(modules)
        matched = matched_now()
        if matched.missing and not is_named and self._use_names_in_memory(()):
            renamed = matched_now()
            if len(renamed.missing) < len(matched.missing):
                matched = renamed
            else:
                self._carried, self._computed = self._opened.state, frozenset()
                self._is_in_memory = False
        # The source may store tied tensors once that the state has under several names.
        if matched.missing:
            aliases, doubts = self._opened.aliases(self._carried.views, self._is_in_memory)
            texts += doubts
            if aliases:
                self._carried = self._carried.with_aliases(aliases)
                self._quantized |= {new for new, stored in aliases.items() if stored in self._quantized}
                matched = matched_now()
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

    def _catalogue(self, live: LiveObjects) -> Catalogue:
        """Return the source's entries by the state's names, with the aliases that are known so far."""
        carried, rules = self._carried, self._rules
        if rules is not None:
            carried = carried.with_model_views(lambda views: rules.apply(views, self._quantized))
        carried, adapter, over_base = _at_paths_of(live, carried, self._opened, by_name=self._by_name)
        quantized = {name for name, view in carried.views.items() if _first_name(view) in self._quantized}
        return ViewCatalogue(
            carried,
            self.where,
            casts_to_state=self._casts_to_state,
            quantized=quantized,
            adapter=adapter,
            over_base=over_base,
            computed=self._computed,
        )

    def reads(self, catalogue: Catalogue) -> Reads:
        assert isinstance(catalogue, ViewCatalogue)
        return _ViewReads(self._source, catalogue, self._coordinator)

    def read_now(
        self, read: TensorRead, region: Region, catalogue: Catalogue, *, verify: bool
    ) -> torch.Tensor:
        assert isinstance(catalogue, ViewCatalogue)
        view = catalogue.view(read.number, read.tensor.dtype)
        result = torch.empty(region.numel, dtype=read.tensor.dtype, device="cpu")
        items = bytes_of(result).numpy().view(view.info.dtype.raw)
        for box, first in region.pieces():
            view.read_into(box, items[first : first + box.numel].reshape(box.sizes))
        return result

    def fetch(self, saved_ranks: set[int], matched: Match) -> None:
        """Do nothing: all files are in the source's storage."""

    def read_values(self, matched: Match) -> None:
        """Do nothing: a source has no `PerRank` values."""


def _first_name(view: TensorView) -> str:
    """Return the name of a view before it was renamed, once or several times."""
    while isinstance(view, RenamedView):
        view = view.inner
    return view.info.name


def _at_paths_of(
    objects: LiveObjects,
    carried: CarriedState,
    opened: OpenedSource,
    *,
    by_name: bool,
) -> tuple[CarriedState, frozenset[str], frozenset[str]]:
    """Move a source's entries to the paths that a live state has for them.

    If both sides have one model, the source's model moves to the live model's path, whatever its own path is. A single
    optimizer moves in the same way. Entries under other keys than the live state's are ignored, such as a scheduler's,
    or the optimizer's if the live state is a model alone.

    With ``by_name``, only a model without a key, in the state or in the source, moves.

    Args:
        objects: the live state.
        opened: has the functions that map names of peft models.

    Returns:
        (the moved entries, full names of the live tensors that an adapter fills, full names of the live tensors of
        adapters if the source has the base model alone).
    """
    leaves, live = objects.leaves, split_leaves(objects)
    paths = {name_of(path): path for path in leaves}
    optimizers = {home for name in live.optimizer if (home := optimizer_container(paths[name])) is not None}

    names = opened.adapter_names(live.names.values(), carried.is_model)
    stored = carried.is_model.intersection(names)
    if stored:
        renamed = {names[name]: (RenamedView(carried.views[name], names[name]), name) for name in stored}
        carried = carried.with_replaced(renamed, stored)
    over_base = frozenset[str]()
    if not names and not by_name:
        of_model = {fqn: name for name, fqn in carried.model.names.items() if name in carried.views}
        of_base, over_base = opened.names_over_base(live.names.values(), of_model)
        renamed = {}
        for own, fqn in of_base.items():
            theirs = of_model[fqn]
            new = f"{theirs.removesuffix(fqn)}{own}"
            renamed[new] = (RenamedView(carried.views[theirs], new), theirs)
        carried = carried.with_replaced(renamed, {before for _, before in renamed.values()})

    # `candidates` is not empty if there are several models.
    container = model_path(objects)
    is_fixed = bool(carried.model.candidates) or (by_name and container and carried.model.prefix)
    if container is not None and not is_fixed:
        carried = _moved(carried, dict.fromkeys(carried.is_model, carried.container), container)
    containers = optimizers_of(carried)
    if len(containers) == len(optimizers) == 1 and not by_name:
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
    adapter, over = (
        frozenset(f"{live.prefix}{name}" for name in each) for each in (names.values(), over_base)
    )
    return carried, adapter, over


def _moved(state: CarriedState, containers: Mapping[str, Path], new: Path) -> CarriedState:
    """Move entries from their containers to ``new``. A model's entry gets one key, its dotted name, below ``new``."""
    paths = dict(state.paths)
    for name, old in containers.items():
        rest = state.path(name)[len(old) :]
        paths[name] = (*new, name_of(rest)) if name in state.is_model else (*new, *rest)
    return replace(state, paths=paths)


class _ViewReads(Reads):
    """Reads of views.

    A region is a flat range of a box, and is contiguous in memory. It is cut into boxes that are contiguous in memory
    too. If a file has the bytes of such a box in the same order, they are read without a copy.

        region   rows 3.5 .. 9.0 of a matrix      boxes   half of row 3 | rows 4 .. 8       (of at most 16 MiB)
    """

    def __init__(self, source: Source, catalogue: ViewCatalogue, coordinator: Coordinator) -> None:
        super().__init__(source.store)
        self._source, self._catalogue, self._coordinator = source, catalogue, coordinator
        self._jobs: list[tuple[TensorView, Box, LoadTarget, int]] = []  # the arguments of `_fill_box`
        self._nbytes = 0

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        view, target = self._catalogue.view(index, tensor.dtype), LoadTarget(tensor)
        for whole, start in region.pieces():
            self._jobs += ((view, box, target, first) for box, first in _cut(whole, target.itemsize, start))
        self._nbytes += region.numel * target.itemsize
        return target

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
            checks.verify_with(_share_of(self._coordinator.rank, [each or {} for each in seen_by_rank]))
        # Most formats have no checksums that would detect a file that was changed meanwhile.
        self._source.require_unchanged()

    def _fill(self) -> None:
        """Read all regions into their targets, in several threads."""
        self.meter.begin("loading", self._nbytes)
        # At most this rank's share of the machine's cores, because computing views takes CPU time.
        cores = max(1, (os.cpu_count() or 1) // num_neighbors())
        threads = min(self.storage.read_threads, cores)
        self.num_bytes_read = for_each(
            threads, _fill_box, self._jobs, name="checkpoint-read", advance=self.meter.advance
        )

    def close(self) -> None:
        """Do nothing: each file is closed after it is read."""


def _fill_box(job: tuple[TensorView, Box, LoadTarget, int]) -> int:
    """Read a box of a view into consecutive items of a target, from an index on. Returns its size in bytes."""
    view, box, target, first = job
    nbytes = box.numel * target.itemsize
    target.begin()
    stop = first + box.numel
    if target.memory is not None:
        view.read_into(box, target.memory.view(view.info.dtype.raw)[first:stop].reshape(box.sizes))
        return nbytes
    items, read = target.flat[first:stop], view.read(box)  # a buffer, because the target is on a device
    items.copy_(torch.from_numpy(read.reshape(-1).view(np.uint8)).view(items.dtype))
    return nbytes


def _share_of(
    rank: int, seen_by_rank: Sequence[Mapping[tuple[str, int], SeenReads]]
) -> Iterator[tuple[tuple[str, int], SeenReads]]:
    """Yield the reads of the partially read checksum ranges that this rank verifies, by file and first byte.

    A record of a file, such as a whole matrix, has one checksum, but each rank reads only a part of the record. One of
    these ranks joins the checksums of all parts, and reads the bytes that no rank has read.
    """
    # In an order that is the same on all ranks, because the number of a range chooses the rank.
    for number, key in enumerate(dict.fromkeys(chain.from_iterable(seen_by_rank))):
        readers = [reader for reader, seen in enumerate(seen_by_rank) if key in seen]
        # The readers take turns, to balance the work.
        if readers[number % len(readers)] == rank:
            yield from ((key, seen_by_rank[reader][key]) for reader in readers)


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
        part = box.with_range(dim, box.offsets[dim] + start, count)
        yield from _cut(part, itemsize, first + start * (box.numel // rows))
