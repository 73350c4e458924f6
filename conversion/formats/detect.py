"""Detect the format of a checkpoint at a path or URL, choose a step of a run folder, and open the checkpoint.

    run/step-00000010/manifest.json        CheckpointManager        run/step-10/.metadata     torchtitan
    run/checkpoint-500/model.safetensors   transformers' Trainer    run/step-00000020/        unfinished: no step
    run/500/default/_METADATA              Orbax's manager

For a run folder a step must be named. A default of "the newest" would pick a different step each time the command runs.
DeepSpeed's file ``latest`` is an exception, because DeepSpeed's own tools read it. Incomplete checkpoints (pointers of
git-lfs, unfinished saves and downloads) are reported as incomplete, not as damaged files.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, step_name
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import checked_path, how_to_download, open_parent, open_store
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.formats.huggingface.repository import is_weight_file, refuse_pointers
from vescale_fsdp.conversion.formats.table import DCP_INSIDE, FORMATS, all_formats
from vescale_fsdp.errors import (
    ConversionError,
    CorruptCheckpointError,
    DamagedFiles,
    VescaleError,
    option,
    some,
)
from vescale_fsdp.lazy import lazy_function

_log = logging.getLogger(__name__)
_with_side_files = lazy_function("vescale_fsdp.conversion.formats.side_files", "with_side_files")
# Formats whose folders may contain files of a trainer (`side_files`).
_TRAINED = ("dcp", "shards", "hf", "bin", "ranks")
# The folder of a step, such as step-10, global_step5, checkpoint-500 and 500.
_STEP = re.compile(r"((?:global_?)?(?:step|iter|iteration|checkpoint|ckpt|epoch)[-_=]?)?(\d+)")
_LISTED_STEPS = 8  # maximum number of steps that an error lists
# Files in a subfolder that show that the subfolder is a checkpoint.
_INSIDE = (
    rf"([^/]+/)*({re.escape(MANIFEST_NAME)}|(diffusion_pytorch_)?model\.safetensors(\.index\.json)?|\.metadata"
    r"|[^/]*mp_rank_\d+_model_states\.pt|model_world_size_\d+_rank_\d+\.pt)"
)
# Known files that cannot be read: (pattern of the name, what the file is, what the user can do).
_FOREIGN = (
    (
        r"(.*/)?mp_rank_\d+(_\d+)*/model_(optim_rng|rng)\.pt",
        "Megatron-LM's per-rank files, which do not record which part of a tensor each file contains",
        "save with --ckpt-format torch_dist, which is torch.distributed.checkpoint",
    ),
    (
        r"(.*/)?model_[^/]+_pp-rank-\d+-of-\d+_tp-rank-\d+-of-\d+(_exp-rank-\d+-of-\d+)?\.safetensors",
        "nanotron's files, one of each part of each tensor",
        "convert them with nanotron's examples/llama/convert_nanotron_to_hf.py, and pass the folder that it writes",
    ),
    (r".*\.gguf", "a file of llama.cpp in a folder", "pass the .gguf file itself"),
    (
        r"(.*/)?(tf_model.*\.h5|flax_model.*\.msgpack)",
        "weights of TensorFlow or Flax",
        "save them from torch",
    ),
    (
        r"manifest\.json|\.metadata|.*\.index\.json",
        "the list of a checkpoint's contents, without the data",
        "pass the folder that contains this file and those with the data",
    ),
    (_INSIDE, "a folder around checkpoints", "pass the folder of one checkpoint"),
    (
        r"adapter_config\.json",
        "an adapter's settings without its weights",
        "copy or download adapter_model.safetensors too",
    ),
    (
        r"(config|tokenizer_config)\.json",
        "a model's settings without its weights",
        "copy or download the files of its weights too, such as model.safetensors",
    ),
)
# Files of unfinished saves, conversions and downloads: (pattern of the name, pattern of the file that is missing as
# long as the work is unfinished, problem, what the user can do).
_UNFINISHED = (
    (
        r"(.*/)?__\d+_\d+\.distcp",
        r"(.*/)?\.metadata",
        "A save with torch.distributed.checkpoint did not finish: its .metadata, which is written last, is missing.",
        "take an older checkpoint, or save again",
    ),
    (
        r"(.*/)?\d{5,}-of-\d{5,}\.safetensors",
        rf"(.*/)?{re.escape(MANIFEST_NAME)}",
        f"A native save did not finish: its {MANIFEST_NAME}, which is written last, is missing.",
        "put the manifest back if it was deleted, before the next save removes the data; else take an older step",
    ),
    (
        r"(.*/)?\.?[^/]*\.(vescale-convert\.jsonl|partial)",
        None,
        "A conversion did not finish.",
        "convert again, with {resume}",
    ),
    (r"(.*/)?[^/]*\.(incomplete|crdownload|part)", None, "A download did not finish.", "download it again"),
)
# Files that are not empty in any format: zero bytes show that a copy was interrupted.
_NEVER_EMPTY = re.compile(
    rf"\.(safetensors(\.index\.json)?|bin|pth?|ckpt)$|(^|/)(\.metadata|zarr\.json|{re.escape(MANIFEST_NAME)})$"
)
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
_MOST_NUMBERED = 10_000  # limits the search for missing files, because a file's name can claim any count


def locate(
    url: str | os.PathLike[str], step: int | Literal["newest"] | None, *, may_be_run: bool = True
) -> tuple[str, Storage]:
    """Return the URL and the storage of a checkpoint: of the step, if ``url`` is a run folder.

    Args:
        url: as in `open_source`.
        step: as in `open_source`.
        may_be_run: False if ``url`` must be the checkpoint itself.

    Raises:
        ConversionError: if a step is needed or does not exist.
        StorageError: if the URL's bucket does not exist.
    """
    url = checked_path(url)
    # Without slashes at the end, the last part of the URL is a name. "/" itself stays, and so does "s3://".
    url = url if len(url) == 1 or url.endswith("://") else url.rstrip("/")
    folder = open_store(url)
    url = folder.where if folder.revision else url  # from here on, all requests name one commit
    files = folder.list_files()
    if not files:
        folder.check_bucket()
    steps = steps_in(files) if may_be_run else {}
    # If there is a file `latest`, DeepSpeed's reader chooses the step.
    if isinstance(step, int) or (steps and "latest" not in files):
        # Only a run of this package records abandoned steps.
        own = [number for number, name in steps.items() if name == step_name(number)]
        is_missing = isinstance(step, int) and step not in steps
        folders = folder.list_folder("") if is_missing else steps.values()
        url = step_url(url, steps, abandoned_steps(folder, own), step, folders)
        folder = open_store(url)
    return url, folder


def open_source(
    url: str | os.PathLike[str],
    *,
    kind: str | None = None,
    trust_pickle: bool = False,
    step: int | Literal["newest"] | None = None,
    checks_files: bool = True,
) -> Source:
    """Open a checkpoint. Only metadata is read.

    Args:
        url: local path or fsspec URL of a folder, or of a file for single-file formats.
        kind: the format, by its name in `conversion.formats.table.FORMATS`; None to detect the format.
        trust_pickle: whether pickles may import and run code.
        step: the step to open if ``url`` is a run folder. ``"newest"`` opens the newest step of a run folder, or the
            checkpoint at ``url``. None requires a checkpoint.
        checks_files: False also opens a native checkpoint of which files are missing or have another size, to
            `convert` those of its tensors that ``include`` and ``exclude`` choose: only their files are checked then,
            before anything is written.

    Raises:
        ConversionError: if the path contains no known format, or if a step is needed or does not exist.
        CorruptCheckpointError: if the checkpoint is damaged.

    Examples:
        >>> import torch
        >>> torch.save({"model": {"w": torch.ones(2, 3)}}, "to_open.pt")
        >>> source = open_source("to_open.pt")
        >>> source.kind, list(source.tensors), source.nbytes
        ('torch', ['model.w'], 24)
    """
    # If the user passes a kind and no step, the path must be the checkpoint itself.
    url, folder = locate(url, step, may_be_run=kind is None or step is not None)
    try:
        # Otherwise the garbage collector would scan the objects of a large checkpoint repeatedly.
        with gc_paused():
            detected = kind or _detect(folder, url)
            # This package's formats come first, because `all_formats` also searches other packages.
            form = FORMATS.get(detected) or dict(all_formats()).get(detected)
            if form is None:
                raise _unreadable(url, [], f"kind {detected}")
            store, file = open_parent(url) if form.is_file else (folder, "")
            source, damaged = Source(detected, store, {}), DamagedFiles()
            with damaged.noted():
                source = form.open(store, file, trust_pickle, checks_files=checks_files)
            if detected in _TRAINED:
                with damaged.noted():
                    source = _with_side_files(source, trust_pickle=trust_pickle)
            damaged.raise_any()
    except RecursionError as error:  # a pickle can be nested to any depth
        raise CorruptCheckpointError(
            "The checkpoint cannot be read.",
            expected="a state of limited depth",
            got="a state that is nested too deeply, or contains itself",
            where=url,
            todo="save it again as dicts and lists of tensors, or use another copy",
        ) from error
    except VescaleError as error:
        # Incomplete files and a wrong kind cause most errors. If one of them is found, an error about it is clearer.
        if listed := folder.list_files():
            refuse_incomplete(folder, listed, error)
        else:  # the URL is a file
            parent, name = open_parent(url)
            refuse_incomplete(parent, [name] if parent.size(name) is not None else [], error)
        if kind in FORMATS:
            _refuse_other_kind(kind, folder, url, error)
        raise
    # A reader of another format may find nothing instead of raising.
    if kind is not None and not source.tensors:
        _refuse_other_kind(kind, folder, url, None)
    return source


def _refuse_other_kind(kind: str, folder: Storage, url: str, error: VescaleError | None) -> None:
    """Raise if the detected kind differs from ``kind``, which the user passed."""
    detected = _detect(folder, url)
    if detected != kind:
        raise ConversionError(
            "The source is not of the kind that was passed.",
            expected=f"a checkpoint of kind {kind}",
            got=f"one that looks like {detected}",
            where=url,
            todo=f"pass one of kind {kind}, or leave out {option('kind', kind)}",
        ) from error


def _detect(folder: Storage, url: str) -> str:
    """Return the name of the format at ``url``. ``folder`` lists no files if ``url`` is a file."""
    files = folder.list_files()
    for kind, form in all_formats() if files else ():
        # If a folder contains both a model and an adapter, the model is the checkpoint.
        if kind == "adapter" and any(map(is_weight_file, set(files) - {"adapter_model.safetensors"})):
            continue
        if not form.is_file and any(re.fullmatch(form.file, file) for file in files):
            return kind
    if any(re.fullmatch(DCP_INSIDE, file) for file in files):
        return "dcp"  # the folder has two DCP checkpoints in it, one of the model and one of the optimizer
    if files:
        refuse_incomplete(folder, files)
        raise _unreadable(url, files, f"a folder with {', '.join(files[:4])}")
    parent, name = open_parent(url)
    if parent.size(name) is None:
        raise ConversionError(
            "There is nothing to read.",
            expected="a checkpoint folder or file",
            got=_describe_path(url),
            where=url,
            todo=how_to_download(url) or "check the path",
        )
    for kind, form in all_formats():
        if form.is_file and re.fullmatch(form.file, name):
            return kind
    # Files of torch.save may have any name, so the content decides.
    from vescale_fsdp.conversion.formats.torch_save.read import is_torch_file

    if is_torch_file(parent, name):
        return "torch"
    raise _unreadable(url, [name], f"a file {name}")


def _describe_path(url: str) -> str:
    """Describe, for an error, a path that contains no readable checkpoint."""
    path = Path(url)
    if path.is_dir():
        broken = [each.name for each in path.iterdir() if each.is_symlink() and not os.path.exists(each)]
        return f"broken symbolic links: {some(sorted(broken))}" if broken else "an empty folder"
    if os.path.exists(path):
        return "a device or a pipe"
    return "a broken symbolic link" if path.is_symlink() else "no such file or folder"


def _unreadable(url: str, files: list[str], got: str) -> ConversionError:
    """Return the error for files of no readable format. For known files it says what the user can do."""
    problem = "This is not a checkpoint of a known format."
    todo = f"pass the folder that was given to dcp.save, or name the format with {option('kind')}"
    known = ((p, file, what, way) for p, what, way in _FOREIGN for file in files if re.fullmatch(p, file))
    # The error names the first known file only.
    for _, file, what, way in known:
        problem, got, todo = "This format cannot be read.", f"{what} ({file})", way
        break
    return ConversionError(
        problem,
        expected="a native, DCP, Hugging Face or zarr folder, files of all ranks, a .safetensors or torch.save file",
        got=got,
        where=url,
        todo=todo,
    )


def refuse_incomplete(store: Storage, files: Iterable[str], error: VescaleError | None = None) -> None:
    """Raise if files are of an unfinished save, conversion or download, or an incomplete copy of a checkpoint.

    Args:
        store: the folder of the files.
        files: names of all files.
        error: the error of the reader, if there was one.

    Raises:
        ConversionError: with the problem, and what to do.
        CorruptCheckpointError: if a file is empty that has content in every complete checkpoint.
    """
    names = sorted(files)  # so that the same files are always reported
    refuse_pointers(store, names, error)
    if empty := [file for file in names if _NEVER_EMPTY.search(file) and store.size(file) == 0]:
        emptied = CorruptCheckpointError(
            "A file of the checkpoint is empty.",
            expected="files with content",
            got=some(empty),
            where=store.where,
        )
        if isinstance(error, CorruptCheckpointError):
            said = {f"{store.where}/{file}" for file in empty}
            emptied.others = tuple(each for each in (error, *error.others) if each.where not in said)
        raise emptied from error
    problems = []
    for remains, completing, problem, todo in _UNFINISHED:
        files_left = [file for file in names if re.fullmatch(remains, file)]
        if files_left and not (completing and any(re.fullmatch(completing, file) for file in names)):
            todo = todo.format(resume=option("resume", True))
            problems.append((problem, some(files_left), todo))
    # An index, which a `CorruptCheckpointError` comes from, says more: it has the names of all files.
    if not isinstance(error, CorruptCheckpointError) and (missing := _missing_numbers(names)):
        problem = "Files are missing: the copy or download is incomplete."
        problems.append((problem, f"no {some(missing)}", "copy or download the folder again"))
    if problems:
        problem, got, todo = problems[0]
        raise ConversionError(
            problem, expected="a finished checkpoint", got=got, where=store.where, todo=todo
        ) from error


def _missing_numbers(files: Iterable[str]) -> list[str]:
    """Return the missing files of numbered series such as ``model-00001-of-00003.safetensors``, in order."""
    known = set(files)
    missing: dict[str, None] = {}  # a dict, because each file of a series names the same missing files
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(known))):
        stem, _, count, end = match.groups()
        numbers = range(1, min(int(count), _MOST_NUMBERED) + 1)
        names = (f"{stem}-{number:05d}-of-{count}{end}" for number in numbers)
        missing |= dict.fromkeys(name for name in names if name not in known)
    return list(missing)


def steps_in(files: Collection[str]) -> dict[int, str]:
    """Return the folders of finished checkpoints in a run folder, by step; {} if the folder itself is a checkpoint."""
    patterns = [form.file for form in FORMATS.values() if not form.is_file]
    deciding = re.compile("|".join(f"(?:{pattern})" for pattern in (*patterns, DCP_INSIDE)))
    steps: dict[int, str] = {}
    for file in files:
        folder, _, inner = file.partition("/")
        match = _STEP.fullmatch(folder)
        # A file that decides the format is directly in the folder, so the folder is a checkpoint.
        if not inner and deciding.fullmatch(file):
            return {}
        if match and inner and deciding.fullmatch(inner):
            steps[int(match[2])] = folder
    return dict(sorted(steps.items()))


def last_steps(url: str, count: int) -> list[int]:
    """Return the newest steps of the run folder ``url`` that no rollback has abandoned, the newest first.

    Raises:
        ConversionError: if there are fewer than ``count`` steps.
    """
    folder = open_store(url)
    steps = steps_in(folder.list_files())
    if not steps:
        folder.check_bucket()
    own = [number for number, name in steps.items() if name == step_name(number)]
    abandoned = abandoned_steps(folder, own)
    good = [number for number in sorted(steps, reverse=True) if number not in abandoned]
    if len(good) < count:
        raise ConversionError(
            "This folder has too few steps.",
            expected=f"a folder around at least {count} finished steps of a run",
            got=f"steps {some(map(str, good), _LISTED_STEPS)}",
            where=url,
            todo="ask for fewer steps, or pass the folders of the checkpoints",
        )
    return good[:count]


def step_url(
    url: str,
    steps: Mapping[int, str],
    abandoned: Collection[int],
    step: int | Literal["newest"] | None,
    folders: Collection[str],
) -> str:
    """Return the URL of a step's folder in the run folder ``url``.

    Args:
        url: the run folder.
        steps: the folders of the run's finished checkpoints, by step.
        abandoned: steps that a rollback has abandoned. Users can pass their numbers, but none of them is the newest.
        step: the step that the user passed.
        folders: names in the run folder, for an error that says that the step's folder is incomplete.

    Raises:
        ConversionError: if ``step`` is None or does not exist.
    """
    # The step that `CheckpointManager.restore` chooses, too. None if a rollback has abandoned all steps.
    newest = max((number for number in steps if number not in abandoned), default=None)
    wanted = newest if step == "newest" else step
    if isinstance(wanted, int) and wanted in steps:
        later = [number for number in steps if number > wanted and number in abandoned]
        if step == "newest" and later:
            skipped = ", ".join(map(str, later))
            _log.warning("%s: step %d is the newest; a rollback has abandoned %s", url, wanted, skipped)
        return f"{url}/{steps[wanted]}"
    last_steps = ", ".join(map(str, list(steps)[-_LISTED_STEPS:]))
    if newest is not None:
        # The folder too, because `load` and the command diff take no step.
        folder = f"the folder of one checkpoint, such as {url}/{steps[newest]}, which is the newest"
        todo = f"pass {folder}; or, where it is accepted, {option('step', newest)}"
    elif steps:
        todo = f"pass {option('step')} with one of these steps: a rollback has abandoned all of them"
    else:
        todo = f"leave out {option('step')}"
    got: object = "no step was named" if wanted is None else wanted
    numbered = ((name, _STEP.fullmatch(name)) for name in folders)
    if torn := [name for name, match in numbered if match and int(match[2]) == wanted]:
        got = f"{wanted}, whose folder {torn[0]} is incomplete: it lacks the file that is written last, its manifest"
    raise ConversionError(
        "This folder contains the steps of a run." if wanted is None else "There is no such step.",
        expected=f"one of the steps {last_steps}" if steps else "a folder around the steps of a run",
        got=got,
        where=url,
        todo=todo,
    )
