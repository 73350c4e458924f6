"""The files of one checkpoint of DeepSpeed's: which rank wrote which, and whether all are there.

    latest                                              the name of the folder that is meant
    global_step5/mp_rank_00_model_states.pt             the model in 16 bits, of ZeRO-1 and 2
                 zero_pp_rank_R_mp_rank_00_model_states.pt    one rank's part of it, of ZeRO-3
                 [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    one rank's masters and moments
                 zero/NAME/fp32.pt, exp_avg.pt ..       a universal checkpoint's, one folder per parameter

What is spread over more than data-parallel ranks (tensors, experts, stages of a pipeline) is refused by name, with the
way to a universal checkpoint, in which DeepSpeed has joined it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, some

_LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARAMETER = re.compile(r"zero/.+/fp32\.pt")
_ANY = rf"(?:{_MODEL.pattern}|{_OPTIM.pattern}|{_PARAMETER.pattern}|layer_\d+-model_\d+-model_states\.pt)"
_SPREAD = (  # what else lies there, and what it says
    (re.compile(r"layer_\d+-model_\d+-model_states\.pt"), "stages of a pipeline"),
    (
        re.compile(r"(layer_\d+_expert|expert|expp_rank)_\d+_.*_states\.pt"),
        "experts that are spread over ranks",
    ),
)
_TO_UNIVERSAL = "make a universal checkpoint with DeepSpeed's ds_to_universal.py, and pass that"


def checkpoint_folder(store: Storage) -> str:
    """Where in ``store`` the checkpoint lies: the folder (with a trailing slash) that ``latest`` names, or the one
    that is there; empty if ``store`` is the checkpoint.

    Raises:
        CorruptCheckpointError: if ``latest`` names a folder that is not there.
        ConversionError: if there are several and nothing says which.
    """
    files = store.list_files()
    if any(re.fullmatch(_ANY, file) for file in files):
        return ""
    inside = (file.partition("/") for file in files)
    folders = sorted({folder for folder, _, file in inside if re.fullmatch(_ANY, file)})
    if _LATEST in files:
        named = store.read(_LATEST).decode("utf-8", "replace").strip()
        if named in folders:
            return f"{named}/"
        raise CorruptCheckpointError(
            "The file latest names a checkpoint that is not there.",
            expected=f"one of {some(folders)}",
            got=named,
            where=f"{store.where}/{_LATEST}",
            todo="pass the folder of one checkpoint, or copy the one that latest names",
        )
    if len(folders) == 1:
        return f"{folders[0]}/"
    raise ConversionError(
        "The folder holds several checkpoints." if folders else "There are no files of DeepSpeed's.",
        expected="one, or a file named latest that says which",
        got=some(folders) if folders else some(files),
        where=store.where,
        todo="pass the folder of one checkpoint",
    )


@dataclass(frozen=True)
class ZeroFiles:
    """Names of one checkpoint's files.

    Args:
        folder: where in the store they lie, with a trailing slash; may be empty.
        model: files of the model: one, or of ZeRO-3 one per rank.
        optim: one rank's masters and moments each, in order of rank; none without ZeRO, and in universal checkpoints.
        parameters: files of a universal checkpoint by parameter.
        is_stage3: whether ranks have a file of the model each.
        is_spread: whether there are files of the model's other parts, as a universal checkpoint may have.
    """

    folder: str
    model: tuple[str, ...]
    optim: tuple[str, ...]
    parameters: dict[str, tuple[str, ...]]
    is_stage3: bool
    is_spread: bool = False

    @classmethod
    def find(cls, store: Storage) -> ZeroFiles:
        """Those in a store.

        Raises:
            ConversionError: if ranks are more than data-parallel.
            CorruptCheckpointError: if files of some ranks are missing.
        """
        folder = checkpoint_folder(store)
        files = [file.removeprefix(folder) for file in store.list_files() if file.startswith(folder)]
        where = f"{store.where}/{folder}".rstrip("/")
        parameters = _parameters(files, folder)
        if not parameters:
            _require_data_parallel(files, where)
        model = {int(m[1] or 0): m[0] for m in map(_MODEL.fullmatch, files) if m and not int(m[2])}
        optim = {int(m[1]): m[0] for m in map(_OPTIM.fullmatch, files) if m and not int(m[2])}
        is_stage3 = any(name.startswith("zero_pp_rank") for name in model.values())
        if not model:
            raise _missing("no file of the model", "the *_model_states.pt files", where)
        if not parameters:
            _require_ranks(optim, "optim_states", where)
        if is_stage3:
            _require_ranks(model, "model_states", where)
        return cls(
            folder,
            tuple(folder + model[rank] for rank in sorted(model)),
            tuple(folder + optim[rank] for rank in sorted(optim)) if not parameters else (),
            parameters,
            is_stage3,
            any(int(match[2]) for match in map(_MODEL.fullmatch, files) if match),
        )

    def require_all(self, ranks: int, where: str) -> None:
        """Refuse fewer or more files of masters than ranks wrote.

        Raises:
            CorruptCheckpointError: if so.
        """
        for files, of in (
            (self.optim, "optim_states"),
            (self.model if self.is_stage3 else (), "model_states"),
        ):
            if files and len(files) != ranks:
                raise _missing(f"{len(files)} files *_{of}.pt", f"those of {ranks} ranks", where)


def _parameters(files: Sequence[str], folder: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for file in files:
        if _PARAMETER.fullmatch(file):
            found[file.removeprefix("zero/").removesuffix("/fp32.pt")] = []
    for file in files:
        name = file.removeprefix("zero/").rpartition("/")[0]
        if name in found and file.startswith("zero/") and file.endswith(".pt"):
            found[name].append(folder + file)
    return {name: tuple(sorted(names)) for name, names in found.items()}


def _require_data_parallel(files: Sequence[str], where: str) -> None:
    by_rank = (match for match in (_MODEL.fullmatch(f) or _OPTIM.fullmatch(f) for f in files) if match)
    found = [f"tensors that are spread over ranks ({match[0]})" for match in by_rank if int(match[2])]
    found += [f"{what} ({file})" for file in files for pattern, what in _SPREAD if pattern.fullmatch(file)]
    if found:
        raise ConversionError(
            "This checkpoint of DeepSpeed's is spread over more than data-parallel ranks.",
            expected="files of mp_rank_00 alone",
            got=found[0],
            where=where,
            todo=_TO_UNIVERSAL,
        )


def _require_ranks(ranks: dict[int, str], of: str, where: str) -> None:
    if missing := sorted(set(range(max(ranks, default=-1) + 1)) - set(ranks)):
        got = f"none of rank {', '.join(map(str, missing[:8]))}"
        raise _missing(got, f"*_{of}.pt files of ranks 0 to {max(ranks)}", where)


def _missing(got: str, expected: str, where: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "Files of some ranks are missing.",
        expected=expected,
        got=got,
        where=where,
        todo="copy the files of all ranks into one folder",
    )
