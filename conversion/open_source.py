"""Finding out what a path or URL holds, and opening it.

Each format's reader is imported when a checkpoint of that format is opened, so that looking at a DCP folder
does not wait for the libraries that other formats need.
"""

from __future__ import annotations

from vescale_fsdp.checkpoint.names import MANIFEST_NAME
from vescale_fsdp.checkpoint.quiet import gc_paused
from vescale_fsdp.conversion.source import Source
from vescale_fsdp.conversion.store import Store, open_store, split_file
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["KINDS", "open_source"]

KINDS = ("native", "dcp", "hf", "safetensors", "torch", "zarr", "ranks")


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
    folder = open_store(url)
    with gc_paused():
        return _open(folder, url, kind or _detect(folder, url), trust_pickle=trust_pickle)


def _open(folder: Store, url: str, found: str, *, trust_pickle: bool) -> Source:
    if found == "native":
        from vescale_fsdp.conversion.native_source import open_native

        return open_native(folder)
    if found == "dcp":
        from vescale_fsdp.conversion.dcp_source import open_dcp

        return open_dcp(folder, trust_pickle=trust_pickle)
    if found == "hf":
        from vescale_fsdp.conversion.hf_source import open_hf_folder

        return open_hf_folder(folder)
    if found == "safetensors":
        from vescale_fsdp.conversion.hf_source import open_safetensors

        parent, name = split_file(url)
        return open_safetensors(open_store(parent), name)
    if found == "zarr":
        from vescale_fsdp.conversion.zarr_source import open_zarr

        return open_zarr(folder)
    if found == "ranks":
        from vescale_fsdp.conversion.ranks_source import open_ranks

        return open_ranks(folder, trust_pickle=trust_pickle)
    if found == "torch":
        from vescale_fsdp.conversion.torch_source import open_torch

        parent, name = split_file(url)
        return open_torch(open_store(parent), name, trust_pickle=trust_pickle)
    raise ConversionError(_unknown(url, f"kind {found}"))


def _detect(folder: Store, url: str) -> str:
    from vescale_fsdp.conversion.dcp_source import METADATA_FILE
    from vescale_fsdp.conversion.ranks_source import rank_files
    from vescale_fsdp.conversion.to_zarr import ROOT_FILE
    from vescale_fsdp.conversion.torch_source import is_torch_file

    files = folder.list_files()
    if MANIFEST_NAME in files:
        return "native"
    if METADATA_FILE in files:
        return "dcp"
    if ROOT_FILE in files:
        return "zarr"
    if any(file.endswith((".safetensors", ".safetensors.index.json")) and "/" not in file for file in files):
        return "hf"
    if rank_files(files):
        return "ranks"
    if files:
        raise ConversionError(_unknown(url, f"a folder with {', '.join(files[:4])}"))
    parent, name = split_file(url)
    if open_store(parent).size(name) is None:
        raise ConversionError(
            explain(
                "there is nothing to read",
                expected="a checkpoint folder or file",
                got="no such file or folder, or an empty one",
                where=url,
                todo="check the path",
            )
        )
    if name.endswith(".safetensors"):
        return "safetensors"
    if is_torch_file(open_store(parent), name) or name.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    raise ConversionError(_unknown(url, f"a file {name}"))


def _unknown(url: str, got: str) -> str:
    return explain(
        "this is no checkpoint of a known kind",
        expected="a native, DCP, Hugging Face or zarr folder, a .safetensors or a torch.save file",
        got=got,
        where=url,
        todo="pass the folder that was given to dcp.save, or name the format with --from",
    )
