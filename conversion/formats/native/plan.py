"""`plan_native`: plans a conversion to a native checkpoint, laid out for a number of ranks.

The layout is that of ``fully_shard`` on every layer and on the root: tensors of the model are grouped by dtype and by
the part of their names up to the first number (``model.layers.3.``). A load on the same number of ranks then reads
whole buffers. A parameter's optimizer state of the same shape is cut like the parameter. All other tensors are stored
without a cut, as replicas on all ranks; the bytes of large ones are divided among the ranks' files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from vescale_fsdp.checkpoint.manifest.file_names import is_own_file
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RESERVED_NAMES, RankFile, pack_table
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.state.nesting import Path
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum
from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.plan import (
    ClosingFile,
    ComputedBytes,
    DeferredFile,
    FilePlan,
    FixedBytes,
    OutputPlan,
    TensorItems,
    Written,
)
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.conversion.engine.written_sums import sums_as_hex, written_sums
from vescale_fsdp.conversion.formats.native.tree import native_manifest, native_tree
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.distribution import Axis, Cut, LayoutCut
from vescale_fsdp.layout.granularity import GranularityRule, check_patterns, resolve_granularity
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.planner import TensorSpec, plan_group

# 64 MiB of a file for one thread. Jobs read the source's stripes at their two ends twice, so small jobs cost more.
_STRIPES_PER_JOB = 64
_MAX_RANKS = 65_536  # bounds the planning time, because every rank's file is planned
_UNIT = re.compile(r"(.*?\.\d+)\.")  # a name up to its first number: the layer that a tensor is in


def plan_native(
    state: CarriedState, num_ranks: int, granularity: GranularityRule, *, fingerprint: bool = False
) -> OutputPlan:
    """Return the plan of one file per rank and the manifest.

    Args:
        fingerprint: record byte sums in the manifest; reads the written files once more.

    Raises:
        ConversionError: for dtypes that torch lacks, values that the format cannot store, or more ranks than
            `_MAX_RANKS`.
        LayoutError: if the granularity does not fit a tensor, or has a pattern that matches no tensor.
    """
    if not 1 <= num_ranks <= _MAX_RANKS:
        raise ConversionError(
            "A checkpoint cannot be laid out for so many ranks.",
            expected=f"1 to {_MAX_RANKS:,} ranks",
            got=num_ranks,
            todo="lay it out for the number of ranks that will load it; any other number can load it too",
        )
    layouts, slots = _plan_layouts(state.without(state.aliases), num_ranks, granularity)
    structure, views = _structure(state, num_ranks, layouts, slots)
    manifest = native_manifest(
        "", structure, views, num_ranks, state.metadata
    )  # "": the zarr form passes its name
    by_name = {entry.name: view for entry, view in zip(structure.entries, views, strict=True)}
    tables: dict[str, _Stripes] = {}
    files = tuple(_deferred(manifest, rank, by_name, tables) for rank in range(num_ranks))

    def wrap(name: str, out: FileWriter) -> FileWriter:
        """Return a writer that also computes checksums, for the table at the end of the file."""
        tables[name] = _Stripes(out, manifest.stripe_bytes)
        return tables[name]

    sums: list[str] = []

    def when_written(read: Written) -> None:
        if fingerprint:
            sums[:] = _sums_in(manifest, files, read)

    closing = ClosingFile(manifest.name, lambda: (replace(manifest, sums=tuple(sums) or None).to_bytes(),))
    return OutputPlan("native", files, (closing,), is_stale=is_own_file, wrap=wrap, when_written=when_written)


def _sums_in(manifest: Manifest, files: Sequence[DeferredFile], read: Written) -> list[str]:
    """Read the files of all ranks, and return the byte sums of each of the manifest's tensors, as hex."""
    import torch  # late: a conversion that records no fingerprints does not need it

    totals = torch.zeros((len(manifest.entries), 2), dtype=torch.int64, device="cpu")
    for rank, file in enumerate(files):
        for index, (_, sums) in zip(manifest.pieces[rank], written_sums(file, read), strict=True):
            totals[index] += sums
    return [sums_as_hex(each) for each in totals]


def _plan_layouts(
    state: CarriedState, num_ranks: int, granularity: GranularityRule
) -> tuple[list[GroupLayout], dict[str, LayoutCut]]:
    """Return (all distinct layouts, tensor name -> its layout and slot, for the model's tensors)."""
    groups: dict[tuple[Path, str, str], list[TensorSpec]] = {}
    names: dict[tuple[Path, str, str], list[str]] = {}
    for name, view in state.views.items():
        if name not in state.is_model:
            continue
        info = view.info
        *container, last = state.path(name)
        fqn = str(last)
        unit = _UNIT.match(fqn)
        # The container is part of the key, because several models in a state may have equal tensor names.
        key = (tuple(container), unit[1] if unit else "", info.dtype.name)
        # Without the layer's number, so that equal layers share a layout.
        inside = fqn[unit.end() :] if unit else fqn
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
        order = {slot.fqn: index for index, slot in enumerate(layout.slots)}
        for name, spec in zip(names[key], specs, strict=True):
            slots[name] = LayoutCut(number, order[spec.fqn])
    return list(numbers), slots


def _structure(
    state: CarriedState, num_ranks: int, layouts: list[GroupLayout], slots: Mapping[str, LayoutCut]
) -> tuple[Structure, list[TensorView]]:
    """Return (the structure, the view of each of its tensors)."""
    parameters = _Parameters((str(state.path(name)[-1]), slot) for name, slot in slots.items())
    # Name -> (slot, or None for a tensor without a cut; role of optimizer state, such as "optimizer.state.*.exp_avg").
    cuts: dict[str, tuple[LayoutCut | None, str]] = {}
    for name, view in state.views.items():
        if name in slots:
            cuts[name] = slots[name], ""
        elif name not in state.aliases:
            candidates = (
                (cut, name.replace(fqn, "*", 1))
                for fqn in parameters.named_in(state.path(name))
                for cut in parameters.cuts[fqn]
                # State of another shape, such as a step count, cannot be cut like the parameter.
                if layouts[cut.layout].slots[cut.slot].shape == view.info.shape
            )
            cuts[name] = next(candidates, (None, name))

    def file_order(name: str) -> tuple[int, int, str, int]:
        """Return the sort key of a tensor in the files: by item size, layout, role, and offset in the layout."""
        cut, role = cuts[name]
        offset = layouts[cut.layout].slots[cut.slot].offset if cut else 0
        # Wide dtypes first, so that items stay aligned to their size. 1 << 60: tensors without a cut come last.
        return (-state.views[name].info.dtype.itemsize, cut.layout if cut else 1 << 60, role, offset)

    tree, names = native_tree(state, file_order, RESERVED_NAMES)
    axes = ((), (Axis(num_ranks, 1),))
    entries = []
    for stored, name in names:
        info, cut = state.views[name].info, cuts[name][0]
        # A single rank stores whole tensors.
        chosen: tuple[Cut, ...] = (cut,) if cut and num_ranks > 1 else ()
        entries.append(Entry(stored, info.dtype.required_torch_name, info.shape, 1 if chosen else 0, chosen))
    views = [state.views[name] for _, name in names]
    return Structure(tree, tuple(entries), axes, tuple(layouts)), views


class _Parameters:
    """Finds the parameter that an optimizer entry belongs to.

    Attributes:
        cuts: parameter name -> slots; several, if several models of the state have a parameter of this name.
    """

    def __init__(self, slots: Iterable[tuple[str, LayoutCut]]) -> None:
        self.cuts: dict[str, list[LayoutCut]] = {}
        for fqn, cut in slots:
            self.cuts.setdefault(fqn, []).append(cut)
        words = [fqn.split(".") for fqn in self.cuts]
        self._first, self._last = {each[0] for each in words}, {each[-1] for each in words}

    def named_in(self, path: Path) -> Iterator[str]:
        """Yield the names of parameters that occur in a path, as whole dotted words; the longest first."""
        likely = max(map(str, path), key=len)  # a parameter's name is usually the longest key of its path
        if likely in self.cuts:  # nearly always true, and much faster than the search below
            yield likely
        names: dict[str, None] = {}
        for words in [str(part).split(".") for part in path]:
            stops = [stop for stop, word in enumerate(words, 1) if word in self._last]
            for start in [start for start, word in enumerate(words) if word in self._first]:
                runs = (".".join(words[start:stop]) for stop in stops if stop > start)
                names |= {run: None for run in runs if run in self.cuts}
        yield from sorted(names, key=len, reverse=True)


class _Stripes(FileWriter):
    """Writes a file, and computes the checksum of each stripe. The bytes of one stripe must be written in order."""

    def __init__(self, out: FileWriter, stripe_bytes: int) -> None:
        self._out, self._stripe_bytes = out, stripe_bytes
        # Number of each unfinished stripe -> (checksum so far, offset of the next byte).
        self._hashes: dict[int, tuple[RunningChecksum, int]] = {}
        self._checksums: dict[int, int] = {}  # number of each finished stripe -> checksum

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        self._out.write_at(offset_bytes, buffers)
        for view in [memoryview(buffer).cast("B") for buffer in buffers]:
            while len(view):
                part = view[: self._stripe_bytes - offset_bytes % self._stripe_bytes]
                self._hash(offset_bytes, part)
                offset_bytes, view = offset_bytes + len(part), view[len(part) :]

    def _hash(self, offset_bytes: int, data: memoryview) -> None:
        """Add bytes of a single stripe to that stripe's checksum."""
        index = offset_bytes // self._stripe_bytes
        state, expected = self._hashes.pop(index, (RunningChecksum(), index * self._stripe_bytes))
        assert offset_bytes == expected, f"written at {offset_bytes}, expected {expected}"
        state.update(data)
        stop = offset_bytes + len(data)
        if stop % self._stripe_bytes:
            self._hashes[index] = state, stop
        else:  # an int instead of the hash object saves memory: there are 1000 stripes per GB
            self._checksums[index] = state.intdigest()

    def table(self) -> bytes:
        """Return the packed table of the checksums of all stripes so far, including an unfinished last stripe."""
        known = self._checksums | {index: state.intdigest() for index, (state, _) in self._hashes.items()}
        return pack_table([known[index] for index in range(len(known))])

    def close(self) -> None:
        self._out.close()

    def abort(self) -> None:
        self._out.abort()


def _deferred(
    manifest: Manifest, rank: int, views: Mapping[str, TensorView], tables: dict[str, _Stripes]
) -> DeferredFile:
    """Return a rank's file; only its sizes are computed, for which `RankFile` needs its pieces and header once.

    Args:
        tables: file name -> checksums; filled while the file is written, and read for the table at its end.
    """
    file = RankFile(manifest, rank, manifest.pieces[rank])
    name, header_bytes, table_start, nbytes = file.name, len(file.header), file.table_start, file.total_bytes

    # These functions must not refer to `file`, which would keep its pieces and header in memory.
    def items() -> Iterator[TensorItems]:
        # The region of each piece is one run of the flattened tensor.
        for index, region in manifest.pieces[rank].items():
            yield TensorItems(views[manifest.entries[index].name], region.span.start, region.span.stop)

    def planned() -> FilePlan:
        header = FixedBytes(RankFile(manifest, rank, manifest.pieces[rank]).header)
        table = ComputedBytes(nbytes - table_start, lambda _: tables.pop(name).table())
        return FilePlan(name, (header, *items(), table), _STRIPES_PER_JOB * manifest.stripe_bytes)

    # A conversion writes no per-rank values: between header and table, there are only tensors.
    return DeferredFile(name, nbytes, table_start - header_bytes, items, planned)
