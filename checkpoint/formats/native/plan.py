"""Planning a native checkpoint, laid out for a number of ranks: a start on as many reads whole buffers.

Tensors of the model are grouped as ``fully_shard`` on every layer and the root groups them: by the
container with the first number in its name (``model.layers.3.``) and by type. Optimizer state of a
parameter's shape lies where the parameter lies; everything else is stored whole, its bytes spread over the
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from vescale_fsdp.checkpoint.formats.native.tree import native_manifest, native_tree
from vescale_fsdp.checkpoint.manifest.distribution import Axis, Cut, LayoutCut
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.rank_file import RESERVED_NAMES, RankFile, pack_table
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.plan import (
    ClosingFile,
    ComputedBytes,
    Content,
    FilePlan,
    FixedBytes,
    OutputPlan,
    TensorItems,
)
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.checkpoint.state.nesting import Path
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.granularity import GranularityRule, check_patterns, resolve_granularity
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.planner import TensorSpec, plan_group

_STRETCH_STRIPES = 64  # 64 MiB of a file by one thread; at the ends a stripe of the source is read twice
_MAX_RANKS = 65_536  # each has a file, which is planned
_UNIT = re.compile(r"(.*?\.\d+)\.")


def plan_native(state: CarriedState, num_ranks: int, granularity: GranularityRule) -> OutputPlan:
    """One file per rank, and the manifest.

    Raises:
        ConversionError: for types that torch lacks, or more ranks than anybody starts.
        LayoutError: if the granularity does not fit a tensor, or has a pattern that matches none.
        CheckpointError: for values that the format cannot hold.
    """
    if not 1 <= num_ranks <= _MAX_RANKS:
        raise ConversionError(
            "A checkpoint cannot be laid out for so many ranks.",
            expected=f"1 to {_MAX_RANKS:,} ranks",
            got=num_ranks,
            todo="lay it out for the ranks that will load it; any other number reads it too",
        )
    layouts, slots = _plan_layouts(state.without(state.aliases), num_ranks, granularity)
    structure, views = _structure(state, num_ranks, layouts, slots)
    manifest = native_manifest("", structure, views, num_ranks)
    by_name = {entry.name: view for entry, view in zip(structure.entries, views, strict=True)}
    tables: dict[str, _Stripes] = {}
    files = tuple(
        _file(file, by_name, tables)
        for file in map(partial(RankFile, manifest), range(num_ranks), manifest.shares)
    )

    def wrap(name: str, out: FileWriter) -> FileWriter:
        tables[name] = _Stripes(out, manifest.stripe_bytes)
        return tables[name]

    closing = (ClosingFile(MANIFEST_NAME, lambda: (manifest.to_bytes(),)),)
    return OutputPlan("native", files, closing, is_stale=_is_stale, wrap=wrap)


def _is_stale(name: str) -> bool:
    return name == MANIFEST_NAME or name.startswith("data-")


def _plan_layouts(
    state: CarriedState, num_ranks: int, granularity: GranularityRule
) -> tuple[list[GroupLayout], dict[str, LayoutCut]]:
    """Layouts of all units, and which slot each of the model's names has."""
    groups: dict[tuple[Path, str, str], list[TensorSpec]] = {}
    names: dict[tuple[Path, str, str], list[str]] = {}
    for name, view in state.views.items():
        if name not in state.is_model:
            continue
        info = view.info
        *container, last = state.path(name)
        fqn = str(last)
        unit = _UNIT.match(fqn)
        key = (tuple(container), unit[1] if unit else "", info.dtype.name)  # models may share names
        inside = fqn[unit.end() :] if unit else fqn  # as in training: equal layers have equal layouts
        block_numel = resolve_granularity(granularity, inside, info).block_numel(info.shape)
        spec = TensorSpec(inside, info.shape, info.dtype.name, block_numel)
        groups.setdefault(key, []).append(spec)
        names.setdefault(key, []).append(name)
    check_patterns(granularity, [spec.fqn for specs in groups.values() for spec in specs])
    numbers: dict[GroupLayout, int] = {}
    slots: dict[str, LayoutCut] = {}
    for key, specs in groups.items():
        layout = plan_group(specs, num_ranks)
        number = numbers.setdefault(layout, len(numbers))
        order = {slot.fqn: place for place, slot in enumerate(layout.slots)}
        for name, spec in zip(names[key], specs, strict=True):
            slots[name] = LayoutCut(number, order[spec.fqn])
    return list(numbers), slots


def _structure(
    state: CarriedState, num_ranks: int, layouts: list[GroupLayout], slots: Mapping[str, LayoutCut]
) -> tuple[Structure, list[TensorView]]:
    """State tree and tensors in file order, with the view of each."""
    parameters = _Parameters((str(state.path(name)[-1]), slot) for name, slot in slots.items())
    cuts: dict[str, tuple[LayoutCut | None, str]] = {
        name: (slots[name], "") if name in slots else _cut_of(name, state, layouts, parameters)
        for name in state.views
        if name not in state.aliases
    }

    def file_order(name: str) -> tuple[int, int, str, int]:
        cut, role = cuts[name]
        offset = layouts[cut.layout].slots[cut.slot].offset if cut else 0
        return (-state.views[name].info.dtype.itemsize, cut.layout if cut else 1 << 60, role, offset)

    tree, names = native_tree(state, file_order, RESERVED_NAMES)
    axes = ((), (Axis(num_ranks, 1),))
    entries = []
    for stored, name in names:
        info, cut = state.views[name].info, cuts[name][0]
        chosen: tuple[Cut, ...] = (cut,) if cut and num_ranks > 1 else ()
        entries.append(Entry(stored, info.dtype.required_torch_name, info.shape, 1 if chosen else 0, chosen))
    views = [state.views[name] for _, name in names]
    return Structure(tree, tuple(entries), axes, tuple(layouts)), views


class _Parameters:
    """The parameters that have slots, by name: several models may have one of the same name."""

    def __init__(self, slots: Iterable[tuple[str, LayoutCut]]) -> None:
        self.cuts: dict[str, list[LayoutCut]] = {}
        for fqn, cut in slots:
            self.cuts.setdefault(fqn, []).append(cut)
        words = [fqn.split(".") for fqn in self.cuts]
        self._first, self._last = {each[0] for each in words}, {each[-1] for each in words}

    def named_in(self, path: Path) -> Iterator[str]:
        """Names of parameters that are runs of dotted words of a path's parts, the longest first."""
        likely = max(map(str, path), key=len)
        if likely in self.cuts:  # nearly always
            yield likely
        found: dict[str, None] = {}
        for words in [str(part).split(".") for part in path]:
            stops = [stop for stop, word in enumerate(words, 1) if word in self._last]
            for start in [start for start, word in enumerate(words) if word in self._first]:
                runs = (".".join(words[start:stop]) for stop in stops if stop > start)
                found |= {run: None for run in runs if run in self.cuts}
        yield from sorted(found, key=len, reverse=True)  # the longest name is the right one


def _cut_of(
    name: str, state: CarriedState, layouts: list[GroupLayout], parameters: _Parameters
) -> tuple[LayoutCut | None, str]:
    """The slot of an optimizer's tensor, and what it is to its parameter; no slot for what is stored whole."""
    shape = state.views[name].info.shape
    for fqn in parameters.named_in(state.path(name)):
        for cut in parameters.cuts[fqn]:
            if layouts[cut.layout].slots[cut.slot].shape == shape:
                return cut, name.replace(fqn, "*", 1)
    return None, name


class _Stripes(FileWriter):
    """Passes bytes on and keeps the checksum of every stripe, of which each is written from front to back."""

    def __init__(self, out: FileWriter, stripe_bytes: int) -> None:
        self._out, self._stripe_bytes = out, stripe_bytes
        self._hashes: dict[int, tuple[RunningChecksum, int]] = {}  # stripe -> hash so far, next byte
        self._checksums: dict[int, int] = {}

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        self._out.write_at(offset_bytes, buffers)
        for view in [memoryview(buffer).cast("B") for buffer in buffers]:
            while len(view):
                part = view[: self._stripe_bytes - offset_bytes % self._stripe_bytes]
                self._hash(offset_bytes, part)
                offset_bytes, view = offset_bytes + len(part), view[len(part) :]

    def _hash(self, offset_bytes: int, data: memoryview) -> None:
        """Bytes of one stripe."""
        index = offset_bytes // self._stripe_bytes
        state, expected = self._hashes.pop(index, (RunningChecksum(), index * self._stripe_bytes))
        assert offset_bytes == expected, f"written at {offset_bytes}, expected {expected}"
        state.update(data)
        stop = offset_bytes + len(data)
        if stop % self._stripe_bytes:
            self._hashes[index] = state, stop
        else:  # as ints: there are 1000 of them per GB
            self._checksums[index] = state.intdigest()

    def table(self) -> bytes:
        """Checksums of all bytes so far, and the checksum of those."""
        known = self._checksums | {index: state.intdigest() for index, (state, _) in self._hashes.items()}
        return pack_table([known[index] for index in range(len(known))])

    def close(self) -> None:
        self._out.close()

    def abort(self) -> None:
        self._out.abort()


def _file(file: RankFile, views: Mapping[str, TensorView], tables: dict[str, _Stripes]) -> FilePlan:
    contents: list[Content] = [FixedBytes(file.header)]
    for piece in file.pieces:  # every region here is a run of the whole tensor
        view = views[file.manifest.entries[piece.tensor_index].name]
        contents.append(TensorItems(view, piece.region.span.start, piece.region.span.stop))
    name = file.name  # the file's pieces need not be kept
    contents.append(ComputedBytes(file.total_bytes - file.table_start, lambda _: tables.pop(name).table()))
    return FilePlan(name, tuple(contents), _STRETCH_STRIPES * file.manifest.stripe_bytes)
