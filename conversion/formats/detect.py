"""Detect what a path or URL contains, choose the step of a run, and open it.

    run/step-00000010/manifest.json        CheckpointManager        run/step-10/.metadata     torchtitan
    run/checkpoint-500/model.safetensors   transformers' Trainer    run/step-00000020/        unfinished: no step
    run/500/default/_METADATA              Orbax's manager

A run folder is refused without a step: "newest" may name another step each time the command runs. DeepSpeed's file
``latest`` is an exception, since its own tools read it. Incomplete checkpoints (pointers of git-lfs, unfinished saves
and downloads) are reported as such, not as damaged files.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from vescale_fsdp.checkpoint.formats.huggingface.repository import is_weight_file, refuse_pointers
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, step_name
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_store
from vescale_fsdp.conversion.formats.table import TRAINED
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, VescaleError, some
from vescale_fsdp.formats import DCP_INSIDE, FORMATS, all_formats
from vescale_fsdp.lazy import lazy_function

_with_side_files = lazy_function("vescale_fsdp.conversion.formats.side_files", "with_side_files")


def open_source(
    url: str | os.PathLike[str],
    *,
    kind: str | None = None,
    trust_pickle: bool = False,
    step: int | Literal["newest"] | None = None,
) -> Source:
    """Open a checkpoint; only metadata is read.

    Args:
        url: local path or fsspec URL of a folder, or of a file for single-file formats.
        kind: the format, by its name in `vescale_fsdp.formats.FORMATS`; None to detect it.
        trust_pickle: whether pickles may import and run what they name.
        step: which step of a run, if ``url`` is the folder around its steps; ``"newest"`` for the last one, and for
            what is no such folder.

    Raises:
        ConversionError: if nothing known is there.
        CorruptCheckpointError: if something known is there but damaged.

    Examples:
        >>> import torch
        >>> torch.save({"model": {"w": torch.ones(2, 3)}}, "to_open.pt")
        >>> source = open_source("to_open.pt")
        >>> source.kind, list(source.tensors), source.nbytes
        ('torch', ['model.w'], 24)
    """
    url = os.fspath(url)
    url = url.rstrip("/") if len(url) > 1 else url
    folder = open_store(url)
    files = folder.list_files()
    steps = steps_in(files) if kind is None or step is not None else {}
    if isinstance(step, int) or (steps and not says_which(files)):
        own = [number for number, name in steps.items() if name == step_name(number)]
        url = step_url(url, steps, abandoned_steps(folder, own), step)
        folder = open_store(url)
    try:
        with gc_paused():
            found = kind or _detect(folder, url)
            form = FORMATS.get(found) or dict(all_formats()).get(found)
            if form is None:
                raise _unreadable(url, [], f"kind {found}")
            where = open_parent(url) if form.is_file else (folder, "")
            source: Source = form.open(*where, trust_pickle)
            if found in TRAINED:
                source = _with_side_files(source, trust_pickle=trust_pickle)
    except RecursionError as error:
        raise CorruptCheckpointError(
            "The checkpoint cannot be read.",
            expected="a state of some levels",
            got="one that is nested too deeply, or holds itself",
            where=url,
            todo="save it again as dicts and lists of tensors, or use another copy",
        ) from error
    except VescaleError as error:
        _refuse_incomplete(url, folder, error)
        if kind in FORMATS:
            _refuse_wrong_kind(kind, folder, url, error)
        raise
    if kind is not None and not source.tensors:
        _refuse_wrong_kind(kind, folder, url, None)
    return source


def _refuse_wrong_kind(kind: str, folder: Storage, url: str, error: VescaleError | None) -> None:
    """Say so if looking finds another kind than the one that was asked for."""
    looks_like = _detect(folder, url)
    if looks_like != kind:
        raise ConversionError(
            "The source is not of the kind that was asked for.",
            expected=f"a checkpoint of kind {kind}",
            got=f"one that looks like {looks_like}",
            where=url,
            todo=f"pass one of kind {kind}, or leave out --from {kind}",
        ) from error


def _refuse_incomplete(url: str, folder: Storage, error: VescaleError) -> None:
    if files := folder.list_files():
        refuse_incomplete(folder, files, error)
    else:
        parent, name = open_parent(url)
        refuse_incomplete(parent, [name] if parent.size(name) is not None else [], error)


def _detect(folder: Storage, url: str) -> str:
    files = folder.list_files()
    for kind, form in all_formats() if files else ():
        if kind == "adapter" and any(map(is_weight_file, set(files) - {"adapter_model.safetensors"})):
            continue
        if not form.is_file and any(re.fullmatch(form.file, file) for file in files):
            return kind
    if any(re.fullmatch(DCP_INSIDE, file) for file in files):
        return "dcp"  # a model and its optimizer as two checkpoints
    if files:
        refuse_incomplete(folder, files)
        raise _unreadable(url, files, f"a folder with {', '.join(files[:4])}")
    parent, name = open_parent(url)
    if parent.size(name) is None:
        raise ConversionError(
            "There is nothing to read.",
            expected="a checkpoint folder or file",
            got=_what_is_there(url),
            where=url,
            todo="check the path",
        )
    for kind, form in all_formats():
        if form.is_file and re.fullmatch(form.file, name):
            return kind
    from vescale_fsdp.checkpoint.formats.torch_save.read import is_torch_file

    if is_torch_file(parent, name):
        return "torch"
    raise _unreadable(url, [name], f"a file {name}")


def _what_is_there(url: str) -> str:
    """Describe a path that contains no readable checkpoint."""
    path = Path(url)
    if path.is_dir():
        lost = [each.name for each in path.iterdir() if each.is_symlink() and not os.path.exists(each)]
        return f"links that lead nowhere: {some(sorted(lost))}" if lost else "an empty folder"
    if os.path.exists(path):
        return "a device or a pipe"
    return "a link that leads nowhere" if path.is_symlink() else "no such file or folder"


_INSIDE = (  # one of several checkpoints, in whatever folder
    rf"([^/]+/)*({re.escape(MANIFEST_NAME)}|(diffusion_pytorch_)?model\.safetensors(\.index\.json)?|\.metadata"
    r"|[^/]*mp_rank_\d+_model_states\.pt|model_world_size_\d+_rank_\d+\.pt)"
)
# Checkpoints that others write, which have a way to a format read here: a file's name, whose it is, the way.
_FOREIGN = (
    (
        r"(.*/)?mp_rank_\d+(_\d+)*/model_(optim_rng|rng)\.pt",
        "Megatron-LM's per-rank files, which do not say what part of a tensor each holds",
        "save with --ckpt-format torch_dist, which is torch.distributed.checkpoint",
    ),
    (r".*\.gguf", "llama.cpp's quantised file", "convert the repository that it was made from"),
    (
        r"(.*/)?(tf_model.*\.h5|flax_model.*\.msgpack)",
        "weights of TensorFlow or Flax",
        "save them from torch",
    ),
    (
        _INSIDE,
        "a folder around checkpoints",
        "pass the folder of one checkpoint",
    ),
    (
        r"(config|tokenizer_config)\.json",
        "a model's settings without its weights",
        "copy or download the files of its weights too, such as model.safetensors",
    ),
)


def _unreadable(url: str, files: list[str], got: str) -> ConversionError:
    """What to do about files of a kind that is known and cannot be read, or of none that is known."""
    problem = "This is not a checkpoint of a known kind."
    todo = "pass the folder that was given to dcp.save, or name the format with --from"
    known = ((p, file, whose, way) for p, whose, way in _FOREIGN for file in files if re.fullmatch(p, file))
    for _, file, whose, way in known:
        problem, got, todo = "This is not a checkpoint that can be read.", f"{whose} ({file})", way
        break
    return ConversionError(
        problem,
        expected="a native, DCP, Hugging Face or zarr folder, files of all ranks, a .safetensors or torch.save file",
        got=got,
        where=url,
        todo=todo,
    )


# A file that is left by what did not end; the file that would say that it did; what did not end; what to do.
_UNFINISHED = (
    (
        r"(.*/)?__\d+_\d+\.distcp",
        r"(.*/)?\.metadata",
        "a save with torch.distributed.checkpoint that did not end: its .metadata, written last, is not there",
        "take an older checkpoint, or save again",
    ),
    (
        r"(.*/)?\d{5,}-of-\d{5,}\.safetensors",
        rf"(.*/)?{re.escape(MANIFEST_NAME)}",
        f"a native save that did not end: its {MANIFEST_NAME}, written last, is not there",
        "take an older step, or save again",
    ),
    (
        r"(.*/)?\.?[^/]*\.(vescale-convert\.jsonl|partial)",
        None,
        "a conversion that did not end",
        "run its command again with --resume",
    ),
    (r"(.*/)?[^/]*\.(incomplete|crdownload|part)", None, "a download that did not end", "download it again"),
)
_NEVER_EMPTY = re.compile(
    rf"\.(safetensors(\.index\.json)?|bin|pth?|ckpt)$|(^|/)(\.metadata|zarr\.json|{re.escape(MANIFEST_NAME)})$"
)
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")


def refuse_incomplete(store: Storage, files: Iterable[str], error: VescaleError | None = None) -> None:
    """Say so if what could not be read as a checkpoint is what something unfinished has left.

    Args:
        error: why it could not be read.

    Raises:
        ConversionError: naming what it is and what to do.
        CorruptCheckpointError: if files are empty that never are.
    """
    found = sorted(files)
    refuse_pointers(store, found, error)
    if empty := [file for file in found if _NEVER_EMPTY.search(file) and store.size(file) == 0]:
        raise CorruptCheckpointError(
            "A file of the checkpoint is empty.",
            expected="files with something in them",
            got=some(empty),
            where=store.where,
            todo="copy or download it again, or take an older checkpoint",
        ) from error
    for left, deciding, what, todo in _UNFINISHED:
        files_left = [file for file in found if re.fullmatch(left, file)]
        if files_left and not (deciding and any(re.fullmatch(deciding, file) for file in found)):
            raise _unfinished(store, some(files_left), what, todo) from error
    if missing := _missing_numbers(found):
        what = "a copy or download that did not end"
        raise _unfinished(store, f"no {some(missing)}", what, "copy or download the folder again") from error


def _unfinished(store: Storage, got: str, what: str, todo: str) -> ConversionError:
    return ConversionError(
        f"This is {what}.", expected="a finished checkpoint", got=got, where=store.where, todo=todo
    )


def _missing_numbers(files: Iterable[str]) -> list[str]:
    """Files that the numbers in others' names count and that are not there."""
    known = set(files)
    missing: dict[str, None] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(known))):
        stem, _, count, end = match.groups()
        names = (f"{stem}-{number:05d}-of-{count}{end}" for number in range(1, min(int(count), 10_000) + 1))
        missing |= dict.fromkeys(name for name in names if name not in known)
    return list(missing)


_STEP = re.compile(r"((?:global_?)?(?:step|iter|iteration|checkpoint|ckpt|epoch)[-_=]?)?(\d+)")
_log = logging.getLogger(__name__)
_MOST = 8  # that an error lists


def steps_in(files: Collection[str]) -> dict[int, str]:
    """Step -> its folder, of the checkpoints beside each other under a folder with these files; finished ones alone."""
    patterns = [form.file for form in FORMATS.values() if not form.is_file]
    deciding = re.compile("|".join(f"(?:{pattern})" for pattern in (*patterns, DCP_INSIDE)))
    found: dict[int, str] = {}
    for file in files:
        folder, _, inner = file.partition("/")
        match = _STEP.fullmatch(folder)
        if not inner and deciding.fullmatch(file):
            return {}  # the folder is a checkpoint itself
        if match and inner and deciding.fullmatch(inner):
            found[int(match[2])] = folder
    return dict(sorted(found.items()))


def says_which(files: Collection[str]) -> bool:
    """Whether a file beside the steps says which is meant, as DeepSpeed leaves it; its reader goes by it."""
    return "latest" in files


def step_url(
    url: str, steps: Mapping[int, str], abandoned: Collection[int], step: int | Literal["newest"] | None
) -> str:
    """The folder of the step that is meant, of those in ``url``.

    Args:
        abandoned: steps that a rollback has left behind: never the newest, but there for who names one.

    Raises:
        ConversionError: if nobody says which, or there is no such step.
    """
    # As `CheckpointManager.restore` and `latest` pick it. All abandoned: then nobody can say which is meant.
    newest = max((number for number in steps if number not in abandoned), default=None)
    wanted = newest if step == "newest" else step
    if isinstance(wanted, int) and wanted in steps:
        later = [number for number in steps if number > wanted and number in abandoned]
        if step == "newest" and later:
            _log.warning(
                "%s: step %d is the newest; a rollback has abandoned %s",
                url,
                wanted,
                ", ".join(map(str, later)),
            )
        return f"{url}/{steps[wanted]}"
    there = ", ".join(map(str, list(steps)[-_MOST:]))
    todo = (
        f"pass --step {newest}, which is the newest, or the folder of one checkpoint"
        if newest is not None
        else "pass --step to go back to one of them: a rollback has abandoned all"
        if steps
        else None
    )
    raise ConversionError(
        "This folder holds the steps of a run." if wanted is None else "There is no such step.",
        expected=f"one of the steps {there}" if steps else "a folder around the steps of a run",
        got="no step was named" if wanted is None else wanted,
        where=url,
        todo=todo or "leave out --step",
    )
