"""The files of a DeepSpeed ZeRO checkpoint, and how whole parameters and moments are read from the ranks' parts.

    latest                                              the name of the checkpoint's folder
    global_step5/mp_rank_00_model_states.pt             ZeRO-1 and 2: the model in 16 bits
                 zero_pp_rank_R_mp_rank_00_model_states.pt    ZeRO-3: one rank's part of the model
                 [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    one rank's masters and moments
                 zero/NAME/fp32.pt, exp_avg.pt ..       universal checkpoint: one folder per parameter

Checkpoints of tensor, expert or pipeline parallelism are refused, with advice to make a universal checkpoint, in which
DeepSpeed has joined the parts.

    single_partition_of_fp32_groups | fp32_flat_groups     masters: flat tensors, one per group of parameters
    base_optimizer_state | optimizer_state_dict            torch's state of the masters: flat moments, steps, options

    ZeRO-1, 2   one row of all parameters of a group, cut into a part per rank; parts may end inside a parameter
                a a a a|a b b b|b c . .          ranks 0, 1, 2; the padding at the end is not stored
                with round_robin_gradients on 2 ranks, a c .. b d ..: parameters 0, 2, .. first, then 1, 3, ..

    ZeRO-3      each parameter is cut into equal parts, one per rank, of which the last may need padding; a rank's parts
                of all parameters form its row, which is stored in several tensors
                rank 0  a a a b b c      rank 1  a a . b b c      rank 2  . . . b . .

    universal   zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt     a tensor, or a dict with `param`; flat after ZeRO-3
                zero/NAME/step.pt                                a number
                zero/optimizer_state.pt                          the optimizer's groups

Names and shapes come from the model file. The reader checks that the sizes of the ranks' parts, and the addresses of
parameters that the ranks' files record, agree with these shapes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.state.nesting import ListIndex, Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.entries import Entries
from vescale_fsdp.conversion.engine.stored_tensor import StoredTensor, TensorInfo
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.conversion.formats.torch_save.read import TorchFile
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, DamagedFiles, some
from vescale_fsdp.layout.geometry import boxes_of_range, whole_box

_LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARAMETER = re.compile(r"zero/.+/fp32\.pt")
_ANY = rf"(?:{_MODEL.pattern}|{_OPTIM.pattern}|{_PARAMETER.pattern}|layer_\d+-model_\d+-model_states\.pt)"
_SPREAD = (  # (pattern of files of pipeline or expert parallelism, what these files contain)
    (re.compile(r"layer_\d+-model_\d+-model_states\.pt"), "stages of a pipeline"),
    (
        re.compile(r"(layer_\d+_expert|expert|expp_rank)_\d+_.*_states\.pt"),
        "experts that are spread over ranks",
    ),
)
_MOST_RANKS = 100_000  # ranks whose files are looked for, because a file's name can claim any number
_TO_UNIVERSAL = "make a universal checkpoint with DeepSpeed's ds_to_universal.py, and pass that"


def checkpoint_folder(store: Storage) -> str:
    """Return the checkpoint's folder in ``store``, with a trailing slash; "" if ``store`` itself is the checkpoint.

    If there are several checkpoints, the file ``latest`` names one.

    Raises:
        CorruptCheckpointError: if ``latest`` names a folder without a checkpoint.
        ConversionError: if there are several checkpoints and no ``latest``, or no checkpoint.
    """
    files = store.list_files()
    if any(re.fullmatch(_ANY, file) for file in files):
        return ""
    inside = (file.partition("/") for file in files)
    folders = sorted({folder for folder, _, file in inside if re.fullmatch(_ANY, file)})
    if _LATEST in files:
        named = store.read(_LATEST).decode("utf-8", "replace").strip()  # not UTF-8: no such folder
        if named in folders:
            return f"{named}/"
        raise CorruptCheckpointError(
            "The file latest names a checkpoint that is not there.",
            expected=f"one of {some(folders)}",
            got=named,
            where=f"{store.where}/{_LATEST}",
            todo="pass the folder of one checkpoint, or copy the checkpoint that latest names",
        )
    if len(folders) == 1:
        return f"{folders[0]}/"
    raise ConversionError(
        "The folder contains several checkpoints." if folders else "There are no DeepSpeed files.",
        expected="one checkpoint, or a file named latest that names one",
        got=some(folders) if folders else some(files),
        where=store.where,
        todo="pass the folder of one checkpoint",
    )


@dataclass(frozen=True)
class ZeroFiles:
    """Names of one checkpoint's files, in its store.

    Args:
        where: path of the checkpoint, for messages.
        folder: the checkpoint's folder in the store, with a trailing slash; empty for the store itself.
        model: the model file; with ZeRO-3, one per rank.
        optim: the files of the ranks' masters and moments, in rank order; empty without ZeRO, and for universal
            checkpoints.
        parameters: for a universal checkpoint, the files of each parameter by its name.
        is_stage3: whether each rank has a model file, as with ZeRO-3.
        is_spread: whether there are model files of other model-parallel ranks, which a universal checkpoint may have.
    """

    where: str
    folder: str
    model: tuple[str, ...]
    optim: tuple[str, ...]
    parameters: dict[str, list[str]]
    is_stage3: bool
    is_spread: bool

    @classmethod
    def find(cls, store: Storage) -> ZeroFiles:
        """Find the files in a store.

        Raises:
            ConversionError: if the checkpoint uses more than data parallelism.
            CorruptCheckpointError: if there is no file of the model.
        """
        folder = checkpoint_folder(store)
        files = [file.removeprefix(folder) for file in store.list_files() if file.startswith(folder)]
        where = f"{store.where}/{folder}".rstrip("/")
        parameters: dict[str, list[str]] = {
            file.removeprefix("zero/").removesuffix("/fp32.pt"): []
            for file in files
            if _PARAMETER.fullmatch(file)
        }
        for file in sorted(files):
            name = file.removeprefix("zero/").rpartition("/")[0]
            if name in parameters and file.startswith("zero/") and file.endswith(".pt"):
                parameters[name].append(folder + file)
        model_files = [match for match in map(_MODEL.fullmatch, files) if match]
        optim_files = [match for match in map(_OPTIM.fullmatch, files) if match]
        if not parameters:
            spread = [
                f"tensors that are spread over ranks ({m[0]})" for m in model_files + optim_files if int(m[2])
            ]
            spread += [f"{what} ({file})" for file in files for form, what in _SPREAD if form.fullmatch(file)]
            if spread:
                raise ConversionError(
                    "This DeepSpeed checkpoint uses more than data parallelism.",
                    expected="files of mp_rank_00 alone",
                    got=spread[0],
                    where=where,
                    todo=_TO_UNIVERSAL,
                )
        # Without ZeRO-3 there is one model file, whose name contains no rank. Files of other model-parallel ranks,
        # which only a universal checkpoint may have here, are skipped.
        model = {int(m[1] or 0): m[0] for m in model_files if not int(m[2])}
        optim = {int(m[1]): m[0] for m in optim_files if not int(m[2])} if not parameters else {}
        is_stage3 = any(name.startswith("zero_pp_rank") for name in model.values())
        if not model:
            raise _missing("no file of the model", "the *_model_states.pt files", where)
        return cls(
            where,
            folder,
            # With the names of missing files, whose opening fails.
            tuple(folder + file for file in _up_to_last(model, max(optim, default=0) + 1))
            if is_stage3
            else (folder + model[0],),
            tuple(folder + file for file in _up_to_last(optim, max(model) + 1 if is_stage3 else 0)),
            parameters,
            is_stage3,
            is_spread=any(int(match[2]) for match in model_files),
        )

    def require_all(self, store: Storage, ranks: int) -> None:
        """Check that there are files of ``ranks`` ranks.

        Raises:
            CorruptCheckpointError: if there are more or fewer files.
        """
        damaged = DamagedFiles()
        for files, kind in (
            (self.optim, "optim_states"),
            (self.model if self.is_stage3 else (), "model_states"),
        ):
            for file in _up_to_last({0: files[0]} if files else {}, ranks)[len(files) :]:
                with damaged.noted():
                    store.required_info(file)
            if files and len(files) > ranks:
                raise _missing(f"{len(files)} files *_{kind}.pt", f"files of {ranks} ranks", self.where)
        damaged.raise_any()


def _up_to_last(files: Mapping[int, str], count: int = 0) -> list[str]:
    """Return the files of ranks 0 to the last one that has a file, or of at least ``count`` ranks, if any has one."""
    some_file = next(iter(files.values()), "")
    ranks = range(min(max(*files, count - 1) + 1 if files else 0, _MOST_RANKS))
    return [
        files.get(rank) or re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", some_file) for rank in ranks
    ]


def _missing(got: str, expected: str, where: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "Files of some ranks are missing.",
        expected=expected,
        got=got,
        where=where,
        todo="copy the files of all ranks into one folder",
    )


class FlatRun(NamedTuple):
    """A copy of one dim: contiguous elements of a parameter, and their position in one of a rank's flat tensors.

    Args:
        first: index of the run's first element in the flattened parameter.
        numel: number of elements.
        rank: the rank that stores the run.
        part: index of the flat tensor among the rank's flat tensors.
        start: index of the run's first element in the flat tensor.
    """

    first: int
    numel: int
    rank: int
    part: int
    start: int


def runs_of_groups(
    numels: Sequence[int], paddings: Sequence[int], group: int, parts: Sequence[int]
) -> list[list[FlatRun]]:
    """Return the runs of each parameter of one group of ZeRO-1 or 2.

    Args:
        numels: number of elements of each parameter, in the order of the row.
        paddings: number of padding elements after each parameter.
        group: number of the group, which is also the index of the group's flat tensor on each rank.
        parts: number of elements of each rank's part of the row.

    >>> runs_of_groups([5, 4], [0, 0], 0, [4, 4, 1])[1]
    [FlatRun(first=0, numel=3, rank=1, part=0, start=1), FlatRun(first=3, numel=1, rank=2, part=0, start=0)]
    """
    runs, at, ends = [], 0, list(accumulate(parts))
    for numel, padding in zip(numels, paddings, strict=True):
        cut = _cut(ends, at, at + numel)
        runs.append(
            [FlatRun(low - at, high - low, rank, group, low - start) for rank, start, low, high in cut]
        )
        at += numel + padding
    return runs


def runs_of_parameters(numels: Sequence[int], ranks: int, parts: Sequence[int]) -> list[list[FlatRun]]:
    """Return the runs of each parameter of ZeRO-3.

    Args:
        numels: number of elements of each parameter, in the order of the rows.
        ranks: number of ranks that share each parameter.
        parts: number of elements of each flat tensor in which a rank's row is stored, the same on all ranks.

    >>> runs_of_parameters([5, 5], 3, [4])[1][2]
    FlatRun(first=4, numel=1, rank=2, part=0, start=2)
    """
    all_runs, at, ends = [], 0, list(accumulate(parts))
    for numel in numels:
        share = -(-numel // ranks)  # rounded up: the last ranks' parts are padded
        runs: list[FlatRun] = []
        for rank in range(ranks):
            first = rank * share
            stop = at + min(share, numel - first)  # the last ranks' shares may be shorter, or empty
            runs += [
                FlatRun(first + low - at, high - low, rank, part, low - start)
                for part, start, low, high in _cut(ends, at, stop)
            ]
        all_runs.append(runs)
        at += share
    return all_runs


def _cut(ends: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """Split the range [low, high) of concatenated tensors where a tensor ends.

    Args:
        ends: the end of each tensor.
        low, high: the range.

    Yields:
        (index of the tensor, start of the tensor, low, high) for each part of the range.
    """
    number = bisect_right(ends, low)  # right, because it skips empty tensors
    while low < high and number < len(ends):
        yield number, ends[number - 1] if number else 0, low, min(high, ends[number])
        low, number = ends[number], bisect_right(ends, ends[number])


Shapes = list[dict[str, tuple[int, ...]]]
"""For each group, the shapes of its parameters by name, in order."""


@dataclass(frozen=True)
class RankShards:
    """The content of one rank's file ``*_optim_states.pt``.

    Args:
        opened: the file.
        masters: the flat fp32 parameters of each group.
        states: the optimizer's state of each master.
        groups: the optimizer's groups: options, and indices of masters.
        paddings: number of padding elements at the end of each group. Moments may include them; masters do not.
        gaps: number of padding elements after each parameter of each group; None if there is no such padding.
        addresses: for each group, the recorded addresses of parameters in the rank's part; empty if the file has none.
        ranks: number of ranks that share the parameters.
    """

    opened: TorchFile
    masters: tuple[StoredTensor, ...]
    states: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]
    paddings: tuple[int, ...]
    gaps: Sequence[Sequence[int]] | None
    addresses: Sequence[Mapping[str, Any]]
    ranks: int

    @classmethod
    def read(cls, store: Storage, file: str) -> RankShards:
        """Read one file.

        Raises:
            ConversionError: if the file contains expert-parallel parameters.
            CorruptCheckpointError: if the file is damaged.
        """
        # Pickles may name classes of DeepSpeed. Stand-ins replace them, so that none is imported.
        opened = TorchFile.open(store, file, stand_ins=True)
        content = opened.content["optimizer_state_dict"]
        counts = content["partition_count"]
        # DeepSpeed stores one number, or one number per group.
        counts = list(counts) if isinstance(counts, (list, tuple)) else [counts]
        if len(set(counts)) > 1 or content.get("ds_zero_partition_groups"):
            raise ConversionError(
                "Experts of this checkpoint are spread over ranks.",
                expected="every parameter cut over all ranks",
                got=f"groups that are cut over {counts} ranks",
                where=opened.where,
                todo="make a universal checkpoint with DeepSpeed's ds_to_universal.py, and pass that",
            )
        if "fp32_flat_groups" in content:  # ZeRO-3
            refs, base = content["fp32_flat_groups"], content.get("optimizer_state_dict") or {}
        else:
            refs, base = content["single_partition_of_fp32_groups"], content["base_optimizer_state"]
        # DeepSpeed's "elastic" checkpoints have a list of states by group, and one step outside of the list.
        if isinstance(base, list):
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
    def moments(self) -> tuple[dict[str, StoredTensor], ...]:
        """For each master, the tensors of its state that have one item per element, by kind (such as exp_avg)."""
        moments = []
        for master, padding, state in zip(self.masters, self.paddings, self.states, strict=True):
            sizes = {
                (master.info.numel,),
                (master.info.numel + padding,),
            }  # moments may include the group's padding
            refs = {k: v for k, v in state.items() if isinstance(v, TensorRef) and v.shape in sizes}
            moments.append({kind: self.opened.flat(ref) for kind, ref in refs.items()})
        return tuple(moments)

    def counts(self, number: int) -> dict[str, Any]:
        """Return the scalars in the state of master ``number``, such as the step, by kind."""
        group = next((group for group in self.groups if number in group["params"]), {})
        # Some optimizers store the step in the group instead of the state.
        state = {"step": group.get("step"), **self.states[number]}
        return {
            kind: value
            for kind, value in state.items()
            # `type` instead of isinstance, because bool is a subclass of int.
            if type(value) in (int, float) or (isinstance(value, TensorRef) and value.shape == ())
        }


class ZeroShards:
    """Whole parameters and moments from the shards of all ranks.

    Args:
        store: the folder of the files.
        files: names of the files.
        ranks: the content of the ranks' files.
        shapes: shapes of the trained parameters.

    Raises:
        CorruptCheckpointError: if files are missing or from different saves, or do not contain these parameters.
    """

    def __init__(self, store: Storage, files: ZeroFiles, ranks: list[RankShards], shapes: Shapes) -> None:
        self.shapes, self.ranks = shapes, ranks
        self.first = self.ranks[0]
        files.require_all(store, self.first.ranks)
        for rank in self.ranks:
            self._require_alike(rank)
        self.runs: dict[str, list[FlatRun]]
        self.runs = self._runs_of_stage3() if files.is_stage3 else self._runs_of_groups()
        self._check_addresses()

    def _require_alike(self, rank: RankShards) -> None:
        """Raise unless a rank's file has the groups, dtypes, number of ranks and step of the first rank's file."""
        expected = (
            len(self.shapes),
            [master.info.dtype.name for master in self.first.masters],
            self.first.ranks,
        )
        got = (len(rank.masters), [master.info.dtype.name for master in rank.masters], rank.ranks)
        if got != expected:
            text = "{} groups of {} for {} ranks"
            raise rank.opened.damaged(text.format(*expected), text.format(*got))
        for number in range(len(self.shapes)):
            for kind, value in self.first.counts(number).items():
                other = rank.counts(number).get(kind)
                if self.first.opened.scalar(value) != rank.opened.scalar(other):
                    raise rank.opened.damaged(
                        "files of all ranks of one step",
                        f"another {kind} than in {self.first.opened.name}",
                        "copy the files of one step",
                    )

    def _rows(self) -> Iterator[list[str]]:
        """Yield the names of each group's parameters in the order of its row.

        With ``round_robin_gradients``, that is not the order of the shapes. It follows from the recorded addresses;
        without these, it is the order of the shapes. `_check_addresses` shows whether the order is right.
        """
        starts: dict[str, tuple[int, int]] = {}
        for number, rank in enumerate(self.ranks):
            for recorded in rank.addresses:
                for name, address in recorded.items():
                    # Kept from the first rank that has a part: it has the parameter's start.
                    starts.setdefault(name, (number, int(address.start)))
        for group in self.shapes:
            is_recorded = all(name in starts for name, shape in group.items() if math.prod(shape))
            # Parameters without elements have no address, and do not change the places of others.
            yield sorted(group, key=lambda name: starts.get(name, (-1, 0))) if is_recorded else list(group)

    def _runs_of_groups(self) -> dict[str, list[FlatRun]]:
        """Return the runs of all parameters of ZeRO-1 and 2, group by group."""
        all_runs: dict[str, list[FlatRun]] = {}
        for number, (group, row) in enumerate(zip(self.shapes, self._rows(), strict=True)):
            numels = [math.prod(group[name]) for name in row]
            gaps = self.first.gaps[number] if self.first.gaps is not None else [0] * len(numels)
            parts = [rank.masters[number].info.numel for rank in self.ranks]
            # DeepSpeed may store padding at the end, up to a multiple of twice the number of ranks.
            self._check_size(sum(parts), sum(numels) + sum(gaps), align=2 * len(self.ranks))
            all_runs |= zip(row, runs_of_groups(numels, gaps, number, parts), strict=True)
        return all_runs

    def _runs_of_stage3(self) -> dict[str, list[FlatRun]]:
        """Return the runs of all parameters of ZeRO-3."""
        names = [name for group in self.shapes for name in group]
        numels = [math.prod(shape) for group in self.shapes for shape in group.values()]
        ranks = len(self.ranks)
        parts = [master.info.numel for master in self.first.masters]
        for rank in self.ranks:
            rank_parts = [master.info.numel for master in rank.masters]
            if rank_parts != parts:
                raise rank.opened.damaged(f"parts of {parts} elements", rank_parts)
        # align=1, because ZeRO-3 pads each parameter, which `-(-numel // ranks)` includes, and not the row.
        self._check_size(sum(parts), sum(-(-numel // ranks) for numel in numels), align=1)
        return dict(zip(names, runs_of_parameters(numels, ranks, parts), strict=True))

    def _check_size(self, stored: int, needed: int, *, align: int) -> None:
        """Raise unless the size of the masters is ``needed`` plus at most the padding to a multiple of ``align``."""
        if stored < needed or -(-stored // align) != -(-needed // align):
            todo = "copy all files again: model files and ranks' files, all from one save"
            raise self.first.opened.damaged(f"masters of {needed} elements", f"{stored}", todo)

    def _check_addresses(self) -> None:
        """Raise for a parameter whose computed address differs from the address that a rank has recorded."""
        for number, rank in enumerate(self.ranks):
            for group, recorded in enumerate(rank.addresses):
                for name, address in recorded.items():
                    computed = [
                        (r.start, r.numel, r.part) for r in self.runs.get(name, ()) if r.rank == number
                    ]
                    # A rank's part of a group is one flat tensor, so a parameter has one run on the rank.
                    if computed != [(address.start, address.numel, group)]:
                        expected = f"{name} at {address.start}, {address.numel} elements of group {group}"
                        raise rank.opened.damaged(expected, f"(start, elements, group) {computed}")

    def weight(self, name: str, path: Path) -> StoredTensor:
        """Return the fp32 masters of a parameter, as one tensor."""
        shape = next(group[name] for group in self.shapes if name in group)
        masters = [rank.masters for rank in self.ranks]
        return tensor_of_runs(path, shape, self.runs[name], masters, self.first.opened)

    def add_optimizer(self, entries: Entries) -> None:
        """Add the optimizer's state by parameter, and its options."""
        first = self.first
        for group, shapes in enumerate(self.shapes):
            moments, counts = first.moments[group], first.counts(group)
            for name, shape in shapes.items():
                for kind in moments:
                    flats = [[of_group.get(kind) for of_group in rank.moments] for rank in self.ranks]
                    path = ("optimizer", "state", name, kind)
                    entries.add_tensor(
                        path, tensor_of_runs(path, shape, self.runs[name], flats, first.opened)
                    )
                for kind, value in counts.items():
                    first.opened.add_step(entries, ("optimizer", "state", name, kind), value)
            entries.unsupported += [
                f"optimizer.state.{kind} of group {group}"
                for kind in first.states[group]
                if kind not in moments and kind not in counts
            ]
        add_param_groups(entries, first.groups, self.shapes, first.opened)


def tensor_of_runs(
    path: Path,
    shape: tuple[int, ...],
    runs: Iterable[FlatRun],
    flats: Sequence[Sequence[StoredTensor | None]],
    opened: TorchFile,
) -> StoredTensor:
    """Return a tensor that consists of runs of the ranks' flat tensors.

    Args:
        path: path of the tensor in the state.
        shape: its shape.
        runs: its runs, in the order of its elements.
        flats: the flat tensors, as ``flats[rank][part]``; None for a flat tensor that a rank lacks.
        opened: a file of the checkpoint, for errors.

    Raises:
        CorruptCheckpointError: if a rank lacks a flat tensor, or if flat tensors differ in type.
    """
    chunks = []
    dtypes = set()
    for run in runs:
        flat = flats[run.rank][run.part]
        if flat is None:
            raise opened.damaged(f"{name_of(path)} of all ranks", f"none of rank {run.rank}")
        dtypes.add(flat.info.dtype)
        at = run.start
        for box in boxes_of_range(shape, run.first, run.first + run.numel):
            chunks.append(flat.chunks[0].with_items(box, at, flat.info.dtype.itemsize))
            at += box.numel
    if len(dtypes) > 1:
        raise opened.damaged(f"{name_of(path)} of one type", sorted(dtype.name for dtype in dtypes))
    # An empty tensor has no runs, so it gets the dtype of any flat tensor.
    dtype = dtypes.pop() if dtypes else next(flat.info.dtype for flat in flats[0] if flat is not None)
    return StoredTensor(TensorInfo(name_of(path), shape, dtype), tuple(chunks))


def add_param_groups(
    entries: Entries, groups: Iterable[Mapping[str, Any]], shapes: Shapes, opened: TorchFile
) -> None:
    """Add the optimizer's options, with the names of parameters in place of the indices of masters."""
    for number, group in enumerate(groups):
        path: Path = ("optimizer", "param_groups", ListIndex(number))
        for option, value in group.items():
            if option == "params":
                value = [name for part in value for name in shapes[part]]
            opened.add_all(entries, (*path, option), value)


class UniversalFolder:
    """The parameters of a universal checkpoint.

    Args:
        store: the folder of the files.
        files: names of the files.
        shapes: shapes of the trained parameters, from the model file.
    """

    def __init__(self, store: Storage, files: ZeroFiles, shapes: Shapes) -> None:
        self._store, self._files, self._shapes = store, files, shapes
        self._shape = {name: shape for group in shapes for name, shape in group.items()}
        common = f"{files.folder}zero/optimizer_state.pt"
        has_common = store.size(common) is not None
        self._common = TorchFile.open(store, common, stand_ins=True) if has_common else None

    def weight(self, name: str, path: Path) -> StoredTensor:
        """Return the fp32 masters of a parameter, as one tensor.

        Raises:
            CorruptCheckpointError: if the parameter's folder is missing.
        """
        return self._tensor(name, "fp32", path)

    def _open(self, name: str, kind: str) -> TorchFile:
        """Open the file of one kind of state of a parameter."""
        return TorchFile.open(self._store, f"{self._files.folder}zero/{name}/{kind}.pt", stand_ins=True)

    def _tensor(self, name: str, kind: str, path: Path) -> StoredTensor:
        """Return the tensor of one kind of state of a parameter; "fp32" is the masters."""
        opened, shape = self._open(name, kind), self._shape[name]
        content = opened.archive.content
        # DeepSpeed writes a tensor, or a dict with `param`.
        ref = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(ref, TensorRef):
            raise opened.damaged("a tensor", type(ref).__name__)
        # The stored shape counts: it is smaller than the model file's if the model pads the parameter.
        if len(ref.shape) == len(shape):
            return opened.tensor(path, ref)
        if ref.shape != (math.prod(shape),):
            raise opened.damaged(f"{math.prod(shape)} elements, of shape {shape}", f"shape {ref.shape}")
        flat = opened.flat(ref)
        whole = flat.chunks[0].with_items(whole_box(shape), 0, flat.info.dtype.itemsize)
        return StoredTensor(TensorInfo(name_of(path), shape, flat.info.dtype), (whole,))

    def add_optimizer(self, entries: Entries) -> None:
        """Add the optimizer's state by parameter, and its options."""
        common = self._common.content if self._common is not None else {}
        states = (common.get("optimizer_state_dict") or {}).get("state") or {}
        groups = common.get("param_groups") or ()
        damaged = DamagedFiles()
        for number, names in enumerate(self._shapes):
            options: Mapping[str, Any] = next((g for g in groups if number in g["params"]), {})
            step = states.get(number, {}).get("step", options.get("step"))
            # `weight` has reported parameters without a folder.
            for name in filter(self._files.parameters.__contains__, names):
                with damaged.noted():
                    self._add_state(entries, name, step)
        damaged.raise_any()
        if self._common is not None:
            add_param_groups(entries, groups, self._shapes, self._common)

    def _add_state(self, entries: Entries, name: str, group_step: Any) -> None:
        """Add the moments and the step of a parameter. Without a file ``step.pt``, the step is ``group_step``."""
        kinds = [file.rpartition("/")[2].removesuffix(".pt") for file in self._files.parameters[name]]
        moments = [kind for kind in kinds if kind not in ("fp32", "step")]
        for kind in moments:
            path = ("optimizer", "state", name, kind)
            entries.add_tensor(path, self._tensor(name, kind, path))
        step_path = ("optimizer", "state", name, "step")
        if "step" in kinds:
            opened = self._open(name, "step")
            opened.add_step(entries, step_path, opened.archive.content)
        elif moments and group_step is not None and self._common is not None:
            self._common.add_step(entries, step_path, group_step)
