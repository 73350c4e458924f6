"""Whole parameters and moments of ZeRO-1, 2 and 3 from the ranks' flat tensors, or from a universal checkpoint.

    single_partition_of_fp32_groups | fp32_flat_groups     masters: flat tensors, one per group of parameters
    base_optimizer_state | optimizer_state_dict            torch's state of those: flat moments, steps, options

    ZeRO-1, 2   one row of all parameters of a group, cut into a part per rank; parts may end inside a parameter
                a a a a|a b b b|b c . .          ranks 0, 1, 2; the padding at the end is not stored

    ZeRO-3      each parameter is cut into equal parts, one per rank, the last ones padded; a rank's parts make its row,
                which is stored in several tensors
                rank 0  a a a b b c      rank 1  a a . b b c      rank 2  . . . b . .

    universal   zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt     a tensor, or a dict with `param`; flat after ZeRO-3
                zero/NAME/step.pt                                a number
                zero/optimizer_state.pt                          the optimizer's groups

Names and shapes come from the model file. Sizes of the parts are checked against them, and so are the addresses that
ranks record for their parameters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.formats.torch_save.found_entries import FlatTensor, FoundEntries, OpenedFile
from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.state.nesting import ListIndex, Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.deepspeed.zero_files import ZeroFiles
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.geometry import boxes_of_range, whole_box


class FlatRun(NamedTuple):
    """Elements of a parameter, one after the other, in one of a rank's flat tensors.

    Args:
        first: the run's first element, in the flattened parameter.
        numel: how many.
        rank: whose.
        part: which of the rank's tensors.
        start: where in it.
    """

    first: int
    numel: int
    rank: int
    part: int
    start: int


def runs_of_groups(
    numels: Sequence[int], paddings: Sequence[int], group: int, parts: Sequence[int]
) -> list[list[FlatRun]]:
    """Runs of each parameter of one group of ZeRO-1 or 2.

    Args:
        numels: of its parameters, in their order in the row.
        paddings: elements behind each.
        group: its number, which is that of the ranks' tensors.
        parts: elements that each rank holds.

    >>> runs_of_groups([5, 4], [0, 0], 0, [4, 4, 1])[1]
    [FlatRun(first=0, numel=3, rank=1, part=0, start=1), FlatRun(first=3, numel=1, rank=2, part=0, start=0)]
    """
    found, at, ends = [], 0, list(accumulate(parts))
    for numel, padding in zip(numels, paddings, strict=True):
        cut = _cut(ends, at, at + numel)
        found.append(
            [FlatRun(low - at, high - low, rank, group, low - start) for rank, start, low, high in cut]
        )
        at += numel + padding
    return found


def runs_of_parameters(numels: Sequence[int], ranks: int, parts: Sequence[int]) -> list[list[FlatRun]]:
    """Runs of each parameter of ZeRO-3.

    Args:
        numels: of all parameters, in their order in the rows.
        ranks: how many share each.
        parts: elements of each tensor that a rank's row is stored in.

    >>> runs_of_parameters([5, 5], 3, [4])[1][2]
    FlatRun(first=4, numel=1, rank=2, part=0, start=2)
    """
    found, at, ends = [], 0, list(accumulate(parts))
    for numel in numels:
        share = -(-numel // ranks)
        runs: list[FlatRun] = []
        for rank in range(ranks):
            first, held = rank * share, min(share, numel - rank * share)
            cut = _cut(ends, at, at + held)
            runs += [
                FlatRun(first + low - at, high - low, rank, n, low - start) for n, start, low, high in cut
            ]
        found.append(runs)
        at += share
    return found


def padded_ends(numel: int, align: int) -> int:
    """A number of elements with padding at the end.

    >>> padded_ends(9, 4)
    12
    """
    return -(-numel // align) * align


def _cut(ends: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """A range of tensors that lie one after the other and end there: (number, where it begins, from, to) of each."""
    number = bisect_right(ends, low)
    while low < high and number < len(ends):
        yield number, ends[number - 1] if number else 0, low, min(high, ends[number])
        low, number = ends[number], bisect_right(ends, ends[number])


Shapes = list[dict[str, tuple[int, ...]]]  # of the parameters of each group, in order


@dataclass(frozen=True)
class RankShards:
    """What one rank's file holds.

    Args:
        masters: of each group.
        states: the optimizer's state of each master.
        groups: the optimizer's groups: options, and numbers of masters.
        paddings: elements at the end of each group that masters go without, and moments may have.
        gaps: elements behind each parameter of each group; None for none.
        addresses: where in the rank's part of a group each parameter lies, as far as the rank says.
    """

    opened: OpenedFile
    masters: tuple[FlatTensor, ...]
    states: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]
    paddings: tuple[int, ...]
    gaps: Sequence[Sequence[int]] | None
    addresses: Sequence[Mapping[str, Any]]
    ranks: int

    @classmethod
    def read(cls, store: Storage, file: str) -> RankShards:
        """One file's.

        Raises:
            ConversionError: if it is one of experts.
            CorruptCheckpointError: if it is none of ZeRO's.
        """
        opened = OpenedFile.open(store, file)
        content = opened.content["optimizer_state_dict"]
        counts = content["partition_count"]
        counts = list(counts) if isinstance(counts, (list, tuple)) else [counts]
        if len(set(counts)) > 1 or content.get("ds_zero_partition_groups"):
            raise ConversionError(
                "Experts of this checkpoint are spread over ranks.",
                expected="every parameter cut over all ranks",
                got=f"groups that are cut over {counts} ranks",
                where=opened.where,
                todo="make a universal checkpoint with DeepSpeed's ds_to_universal.py, and pass that",
            )
        if "fp32_flat_groups" in content:
            refs, base = content["fp32_flat_groups"], content.get("optimizer_state_dict") or {}
        else:
            refs, base = content["single_partition_of_fp32_groups"], content["base_optimizer_state"]
        if isinstance(base, list):  # "elastic" checkpoints
            base = {"state": dict(enumerate(base)), "param_groups": []}
            base["state"] = {
                n: {"step": content.get("base_optimizer_state_step"), **s} for n, s in base["state"].items()
            }
        return cls(
            opened,
            tuple(map(opened.flat, refs)),
            tuple(base.get("state", {}).get(number, {}) for number in range(len(refs))),
            tuple(base.get("param_groups", ())),
            tuple(content.get("group_paddings") or (0,) * len(refs)),
            content.get("param_alignment_paddings"),
            content.get("param_slice_mappings") or (),
            int(counts[0]),
        )

    @cached_property
    def moments(self) -> tuple[dict[str, FlatTensor], ...]:
        """Of each master, what its state has one of per element."""
        found = []
        for master, padding, state in zip(self.masters, self.paddings, self.states, strict=True):
            sizes = {(master.numel,), (master.numel + padding,)}
            refs = {k: v for k, v in state.items() if isinstance(v, TensorRef) and v.shape in sizes}
            found.append({kind: self.opened.flat(ref) for kind, ref in refs.items()})
        return tuple(found)

    def counts(self, number: int) -> dict[str, Any]:
        """Numbers in the state of a master, such as the step."""
        group = next((group for group in self.groups if number in group["params"]), {})
        state = {"step": group.get("step"), **self.states[number]}
        return {kind: value for kind, value in state.items() if _is_count(value)}


def _is_count(value: Any) -> bool:
    return type(value) in (int, float) or (isinstance(value, TensorRef) and value.shape == ())


class ZeroShards:
    """The shards of all ranks as whole parameters.

    Args:
        store: where the files are.
        files: which.
        shapes: of the parameters that are trained.

    Raises:
        CorruptCheckpointError: if files are missing, from different saves, or do not hold these parameters.
    """

    def __init__(self, store: Storage, files: ZeroFiles, shapes: Shapes) -> None:
        self.shapes = shapes
        self.ranks = [RankShards.read(store, file) for file in files.optim]
        self.first = self.ranks[0]
        files.require_all(self.first.ranks, f"{store.where}/{files.folder}")
        for rank in self.ranks:
            self._require_alike(rank)
        names = [name for group in shapes for name in group]
        runs = self._runs_of_all() if files.is_stage3 else self._runs_of_each_group()
        self.runs: dict[str, list[FlatRun]] = dict(zip(names, runs, strict=True))
        self.group_of = {name: number for number, group in enumerate(shapes) for name in group}
        self._require_addresses()

    def _require_alike(self, rank: RankShards) -> None:
        expected = (len(self.shapes), [master.dtype.name for master in self.first.masters], self.first.ranks)
        got = (len(rank.masters), [master.dtype.name for master in rank.masters], rank.ranks)
        if got != expected:
            told = "{} groups of {} for {} ranks"
            raise rank.opened.damaged(told.format(*expected), told.format(*got))
        for number in range(len(self.shapes)):
            for kind, value in self.first.counts(number).items():
                one, other = (
                    self.first.opened.number(value),
                    rank.opened.number(rank.counts(number).get(kind)),
                )
                if one != other:
                    raise rank.opened.damaged(
                        "files of all ranks of one step",
                        f"another {kind} than in {self.first.opened.file}",
                        "copy the files of one step",
                    )

    def _runs_of_each_group(self) -> list[list[FlatRun]]:
        found: list[list[FlatRun]] = []
        for number, group in enumerate(self.shapes):
            numels = [math.prod(shape) for shape in group.values()]
            gaps = self.first.gaps[number] if self.first.gaps is not None else [0] * len(numels)
            parts = [rank.masters[number].numel for rank in self.ranks]
            align = 2 * len(self.ranks)  # the end is padded to that, where it is stored
            self._require_size(sum(parts), sum(numels) + sum(gaps), align)
            found += runs_of_groups(numels, gaps, number, parts)
        return found

    def _runs_of_all(self) -> list[list[FlatRun]]:
        numels = [math.prod(shape) for group in self.shapes for shape in group.values()]
        ranks = len(self.ranks)
        parts = [master.numel for master in self.first.masters]
        for rank in self.ranks:
            found = [master.numel for master in rank.masters]
            if found != parts:
                raise rank.opened.damaged(f"parts of {parts} elements", found)
        self._require_size(sum(parts), sum(-(-numel // ranks) for numel in numels), 1)
        return runs_of_parameters(numels, ranks, parts)

    def _require_size(self, held: int, wanted: int, align: int) -> None:
        if held < wanted or padded_ends(held, align) != padded_ends(wanted, align):
            todo = "copy all files again, those of the model and of the ranks from one save"
            raise self.first.opened.damaged(f"masters of {wanted} elements", f"{held}", todo)

    def _require_addresses(self) -> None:
        """Refuse masters that lie elsewhere than their ranks say."""
        for number, rank in enumerate(self.ranks):
            for group, said in enumerate(rank.addresses):
                for name, address in said.items():
                    mine = [(r.start, r.numel, r.part) for r in self.runs.get(name, ()) if r.rank == number]
                    if mine != [(address.start, address.numel, group)]:
                        expected = f"{name} at {address.start}, {address.numel} elements of group {group}"
                        raise rank.opened.damaged(expected, f"(start, elements, group) {mine}")

    def weight(self, name: str, path: Path) -> StoredTensor:
        """A parameter's masters."""
        shape = self.shapes[self.group_of[name]][name]
        return tensor_of_runs(
            path, shape, self.runs[name], [[*rank.masters] for rank in self.ranks], self.first.opened
        )

    def add_optimizer(self, entries: FoundEntries) -> None:
        """The optimizer's state by parameter."""
        for group, shapes in enumerate(self.shapes):
            for name, shape in shapes.items():
                for kind in self.first.moments[group]:
                    flats = [[moments.get(kind) for moments in rank.moments] for rank in self.ranks]
                    path = ("optimizer", "state", name, kind)
                    tensor = tensor_of_runs(path, shape, self.runs[name], flats, self.first.opened)
                    entries.add_tensor(path, tensor)
                for kind, value in self.first.counts(group).items():
                    entries.add_step(("optimizer", "state", name, kind), value, self.first.opened)
            known = {*self.first.moments[group], *self.first.counts(group)}
            left = [
                f"optimizer.state.{kind} of group {group}"
                for kind in self.first.states[group]
                if kind not in known
            ]
            entries.omitted += left
        add_param_groups(entries, self.first.groups, self.shapes, self.first.opened)


def tensor_of_runs(
    path: Path,
    shape: tuple[int, ...],
    runs: Iterable[FlatRun],
    flats: Sequence[Sequence[FlatTensor | None]],
    opened: OpenedFile,
) -> StoredTensor:
    """A tensor from runs of ranks' flat tensors (``flats[rank][part]``).

    Raises:
        CorruptCheckpointError: if a rank has none of its kind, or one of another type.
    """
    chunks = []
    dtypes = set()
    for run in runs:
        flat = flats[run.rank][run.part]
        if flat is None:
            raise opened.damaged(f"{name_of(path)} of all ranks", f"none of rank {run.rank}")
        dtypes.add(flat.dtype)
        at = run.start
        for box in boxes_of_range(shape, run.first, run.first + run.numel):
            chunks.append(flat.chunk(box, at))
            at += box.numel
    if len(dtypes) > 1:
        raise opened.damaged(f"{name_of(path)} of one type", sorted(dtype.name for dtype in dtypes))
    dtype = dtypes.pop() if dtypes else next(flat.dtype for flat in flats[0] if flat is not None)
    return StoredTensor(TensorInfo(name_of(path), shape, dtype), tuple(chunks))


def add_param_groups(
    entries: FoundEntries, groups: Iterable[Mapping[str, Any]], shapes: Shapes, opened: OpenedFile
) -> None:
    """The optimizer's options, for parameters by name."""
    for number, group in enumerate(groups):
        path: Path = ("optimizer", "param_groups", ListIndex(number))
        for option, value in group.items():
            if option == "params":
                value = [name for part in value for name in shapes[part]]
            entries.add_all((*path, option), value, opened)


_WEIGHT, _STEP = "fp32", "step"


class UniversalFolder:
    """Parameters of a universal checkpoint.

    Args:
        store: where the files are.
        files: which.
        shapes: of the parameters that are trained, as the file of the model knows them.
    """

    def __init__(self, store: Storage, files: ZeroFiles, shapes: Shapes) -> None:
        self._store, self._files, self._shapes = store, files, shapes
        self._shape = {name: shape for group in shapes for name, shape in group.items()}
        common = f"{files.folder}zero/optimizer_state.pt"
        self._common = OpenedFile.open(store, common) if store.size(common) is not None else None

    def weight(self, name: str, path: Path) -> StoredTensor:
        """A parameter's masters.

        Raises:
            CorruptCheckpointError: if its folder is not there.
        """
        return self._tensor(name, _WEIGHT, path)

    def _tensor(self, name: str, kind: str, path: Path) -> StoredTensor:
        opened = OpenedFile.open(self._store, f"{self._files.folder}zero/{name}/{kind}.pt")
        content = opened.archive.content
        ref = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(ref, TensorRef):
            raise opened.damaged("a tensor", type(ref).__name__)
        shape = self._shape[name]
        if len(ref.shape) == len(shape):  # in its own shape, which may be less than was padded
            return opened.tensor(path, ref)
        if ref.shape != (math.prod(shape),):
            raise opened.damaged(f"{math.prod(shape)} elements, of shape {shape}", f"shape {ref.shape}")
        flat = opened.flat(ref)
        return StoredTensor(TensorInfo(name_of(path), shape, flat.dtype), (flat.chunk(whole_box(shape), 0),))

    def add_optimizer(self, entries: FoundEntries) -> None:
        """The optimizer's state by parameter."""
        common = self._common.content if self._common is not None else {}
        states = (common.get("optimizer_state_dict") or {}).get("state") or {}
        groups = common.get("param_groups") or ()
        for number, group in enumerate(self._shapes):
            options: Mapping[str, Any] = next((g for g in groups if number in g["params"]), {})
            step = states.get(number, {}).get(_STEP, options.get(_STEP))
            for name in group:
                self._add_state(entries, name, step)
        if self._common is not None:
            add_param_groups(entries, groups, self._shapes, self._common)

    def _add_state(self, entries: FoundEntries, name: str, step: Any) -> None:
        found = [file.rpartition("/")[2].removesuffix(".pt") for file in self._files.parameters[name]]
        moments = [kind for kind in found if kind not in (_WEIGHT, _STEP)]
        for kind in moments:
            path = ("optimizer", "state", name, kind)
            entries.add_tensor(path, self._tensor(name, kind, path))
        if _STEP in found:
            opened = OpenedFile.open(self._store, f"{self._files.folder}zero/{name}/{_STEP}.pt")
            entries.add_step(("optimizer", "state", name, _STEP), opened.archive.content, opened)
        elif moments and step is not None and self._common is not None:
            entries.add_step(("optimizer", "state", name, _STEP), step, self._common)
