"""Finding out what a path or URL holds, and opening it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, step_name
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_store
from vescale_fsdp.conversion.formats.huggingface.repository import is_weight_file
from vescale_fsdp.conversion.formats.incomplete import refuse_incomplete
from vescale_fsdp.conversion.formats.run_steps import says_which, step_url, steps_in
from vescale_fsdp.conversion.formats.table import TRAINED
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, VescaleError, some
from vescale_fsdp.formats import DCP_INSIDE, FORMATS, all_formats
from vescale_fsdp.lazy import lazy_function

_with_side_files = lazy_function("vescale_fsdp.conversion.formats.trainers.side_files", "with_side_files")


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
        kind: one of `KINDS`; None to look.
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
    """In the place of a checkpoint whose files are none that can be opened."""
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
