"""Finding out what a path or URL holds, and opening it.

Each format's reader is imported when a checkpoint of that format is opened, so that looking at a DCP folder
does not wait for the libraries that other formats need.
"""

from __future__ import annotations

import os
import re

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, ZARR_NAME
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.conversion.places import open_store, split_file
from vescale_fsdp.conversion.source.source import Source
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, VescaleError, explain

__all__ = ["KINDS", "open_source"]

KINDS = ("native", "dcp", "hf", "safetensors", "shards", "torch", "bin", "zarr", "ranks")


def open_source(url: str, *, kind: str | None = None, trust_pickle: bool = False) -> Source:
    """Open a checkpoint; only metadata is read.

    Args:
        url: local path or fsspec URL of a folder, or of a file for single-file formats.
        kind: one of `KINDS`; None to look.
        trust_pickle: whether pickles may import and run what they name.

    Raises:
        ConversionError: if nothing known is there.
        CorruptCheckpointError: if something known is there but damaged.
    """
    url = url.rstrip("/") if len(url) > 1 else url
    try:
        with gc_paused():
            return _open_as(kind, open_store(url), url, trust_pickle=trust_pickle)
    except RecursionError as error:
        raise CorruptCheckpointError(
            explain(
                "The checkpoint cannot be read.",
                expected="a state of some levels",
                got="one that is nested too deeply, or holds itself",
                where=url,
                todo="save it again as dicts and lists of tensors, or use another copy",
            )
        ) from error


def _open_as(kind: str | None, folder: Store, url: str, *, trust_pickle: bool) -> Source:
    if kind is None:
        return _open(_detect(folder, url), folder, url, trust_pickle=trust_pickle)
    try:
        source = _open(kind, folder, url, trust_pickle=trust_pickle)
    except VescaleError as error:
        if wrong := _wrong_kind(kind, folder, url):
            raise wrong from error
        raise
    if not source.tensors and (wrong := _wrong_kind(kind, folder, url)):
        raise wrong
    return source


def _wrong_kind(kind: str, folder: Store, url: str) -> ConversionError | None:
    """If looking finds another kind than the one that was asked for."""
    looks_like = _detect(folder, url)
    if looks_like == kind:
        return None
    return ConversionError(
        explain(
            "The source is not of the kind that was asked for.",
            expected=f"a checkpoint of kind {kind}",
            got=f"one that looks like {looks_like}",
            where=url,
            todo=f"leave out --from {kind}, or pass another source",
        )
    )


def _open(found: str, folder: Store, url: str, *, trust_pickle: bool) -> Source:
    if found == "native":
        from vescale_fsdp.conversion.formats.native.read import open_native

        return open_native(folder)
    if found == "dcp":
        from vescale_fsdp.conversion.formats.dcp.read import open_dcp

        return open_dcp(folder, trust_pickle=trust_pickle)
    if found == "hf":
        from vescale_fsdp.conversion.formats.huggingface.read import open_hf_folder

        return open_hf_folder(folder)
    if found == "safetensors":
        from vescale_fsdp.conversion.formats.huggingface.read import open_safetensors

        parent, name = split_file(url)
        return open_safetensors(open_store(parent), name)
    if found == "shards":
        from vescale_fsdp.conversion.formats.huggingface.read import open_shards

        return open_shards(folder)
    if found == "bin":
        from vescale_fsdp.conversion.formats.huggingface.read_bin import open_bin_folder
        from vescale_fsdp.conversion.formats.torch_save.read import open_torch

        return open_bin_folder(folder, lambda file: open_torch(folder, file, trust_pickle=trust_pickle))
    if found == "zarr":
        from vescale_fsdp.conversion.formats.zarr.read import open_zarr

        return open_zarr(folder)
    if found == "ranks":
        from vescale_fsdp.conversion.formats.torch_save.rank_files import open_ranks

        return open_ranks(folder, trust_pickle=trust_pickle)
    if found == "torch":
        from vescale_fsdp.conversion.formats.torch_save.read import open_torch

        parent, name = split_file(url)
        return open_torch(open_store(parent), name, trust_pickle=trust_pickle)
    raise ConversionError(_unknown(url, f"kind {found}"))


def _detect(folder: Store, url: str) -> str:
    files = folder.list_files()
    if found := _folder_kind(files):
        return found
    if files:
        raise ConversionError(_foreign(url, files) or _unknown(url, f"a folder with {', '.join(files[:4])}"))
    parent, name = split_file(url)
    if open_store(parent).size(name) is None:
        raise ConversionError(
            explain(
                "There is nothing to read.",
                expected="a checkpoint folder or file",
                got="an empty folder" if os.path.isdir(url) else "no such file or folder",
                where=url,
                todo="check the path",
            )
        )
    if name.endswith(".safetensors"):
        return "safetensors"
    from vescale_fsdp.conversion.formats.torch_save.read import is_torch_file

    if is_torch_file(open_store(parent), name) or name.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    raise ConversionError(_foreign(url, [name]) or _unknown(url, f"a file {name}"))


def _folder_kind(files: list[str]) -> str | None:
    if MANIFEST_NAME in files:
        return "native"
    from vescale_fsdp.conversion.formats.dcp.read import METADATA_FILE, dcp_folders

    if METADATA_FILE in files:
        return "dcp"
    from vescale_fsdp.conversion.formats.huggingface.read import is_shard_file
    from vescale_fsdp.conversion.formats.huggingface.read_bin import BIN_FILE, BIN_INDEX_FILE
    from vescale_fsdp.conversion.formats.torch_save.rank_files import rank_files

    if ZARR_NAME in files:
        return "zarr"
    if any(is_shard_file(file) for file in files):
        return "shards"
    if any(file.endswith((".safetensors", ".safetensors.index.json")) and "/" not in file for file in files):
        return "hf"
    if BIN_FILE in files or BIN_INDEX_FILE in files:
        return "bin"
    if rank_files(files):
        return "ranks"
    return "dcp" if dcp_folders(files) else None


# Checkpoints that others write, which have a way to a format read here: a file's name, whose it is, the way.
_FOREIGN = (
    (
        r"(.*/)?((bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states|mp_rank_\d+_model_states)\.pt",
        "DeepSpeed's per-rank files",
        "run the zero_to_fp32.py that DeepSpeed put beside them, and convert what it writes",
    ),
    (
        r"(.*/)?mp_rank_\d+(_\d+)*/model_(optim_rng|rng)\.pt",
        "Megatron-LM's per-rank files, which do not say what part of a tensor each holds",
        "save with --ckpt-format torch_dist, which is torch.distributed.checkpoint",
    ),
    (r".*\.gguf", "llama.cpp's quantised file", "convert the repository that it was made from"),
    (r"(.*/)?\.z(group|array|metadata)", "zarr of version 2", "write it anew with zarr_format=3"),
    (
        r"(.*/)?(tf_model.*\.h5|flax_model.*\.msgpack)",
        "weights of TensorFlow or Flax",
        "save them from torch",
    ),
    (
        rf"([^/]+/)*({re.escape(MANIFEST_NAME)}|model\.safetensors(\.index\.json)?|\.metadata)",
        "a folder around checkpoints",
        "pass the folder of one checkpoint",
    ),
)


def _foreign(url: str, files: list[str]) -> str | None:
    """What to do about a checkpoint of a known kind that cannot be read."""
    for pattern, whose, todo in _FOREIGN:
        for file in files:
            if re.fullmatch(pattern, file):
                got = f"{whose} ({file})"
                return explain(
                    "This is not a checkpoint that can be read.",
                    expected=_READABLE,
                    got=got,
                    where=url,
                    todo=todo,
                )
    return None


_READABLE = (
    "a native, DCP, Hugging Face or zarr folder, files of all ranks, a .safetensors or torch.save file"
)


def _unknown(url: str, got: str) -> str:
    return explain(
        "This is not a checkpoint of a known kind.",
        expected=_READABLE,
        got=got,
        where=url,
        todo="pass the folder that was given to dcp.save, or name the format with --from",
    )
