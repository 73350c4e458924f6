"""File names of the checkpoint format: manifests, steps, ranks' files, and the folders of tensors' arrays.

In the zarr form, a tensor's folder is named after the tensor. Every name becomes a path that file systems and object
stores accept:

    model/layers.0.weight        model/layers.0.weight        plain names stay unchanged
    a key with /                 a key with ~1                 `state_tree.join_name` has escaped it
    ..                           %2E%2E                        has a meaning for a file system, or for zarr
    zarr.json                    zarr%2Ejson                   a file next to arrays
    W next to w                  W%~8f0e...                    differs only by case; the later name is changed
    a name of 300 bytes          its first 100 bytes%~8f0e...  too long for a folder's name

No reader has to decode a path, because the array of a tensor has the tensor's name as an attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate
from urllib.parse import quote

from vescale_fsdp.checkpoint.storage.base import Storage

FORMAT_NAME = "vescale-checkpoint"
MANIFEST_NAME = "manifest.json"
ZARR_NAME = "zarr.json"  # metadata of an array or a group
ARRAYS_NODE = "arrays"  # zarr form: the group of all tensors' arrays
# Zarr form: an array without elements, whose folder contains the manifest and the ranks' files. Readers of zarr list
# the members of groups, and warn of other files among them; they do not list the folders of arrays.
CHECKPOINT_NODE = FORMAT_NAME
# The manifest's file in the native form, and in the zarr form. A folder with both holds the native checkpoint: it has
# replaced the zarr checkpoint, whose files are not removed yet.
MANIFEST_FILES = (MANIFEST_NAME, f"{CHECKPOINT_NODE}/{MANIFEST_NAME}")

_STEP = re.compile(r"step-(\d{8,})")  # padded to 8 digits, so that a listing by name is in the order of steps
_RANK_FILE = re.compile(r"(\d{5,})-of-\d{5,}\.safetensors")
_PLAIN = " !#$&'()+,;=@[]{}~-_."  # characters besides letters and digits that are not escaped
_MAX_PART_BYTES = 200  # of one folder's name; file systems accept 255
# Of the path in `ARRAYS_NODE`. Object stores accept 1024, including the checkpoint's folder and the chunk's name.
_MAX_PATH_BYTES = 600
_HEAD_BYTES = 100  # of a hashed name: enough to recognize the tensor


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> tuple[int, str] | None:
    """Return (step, name) for the name of a step's folder, else None, such as for ``step-1``, which is not padded."""
    match = _STEP.fullmatch(name)
    # Compared with `step_name`, because more than 8 digits may begin with zeros.
    return (int(match[1]), name) if match and step_name(int(match[1])) == name else None


def manifest_file(storage: Storage, folder: str = "") -> str | None:
    """Return the name of the manifest's file in a folder of the storage; None if the folder is not a checkpoint."""
    names = (f"{folder}/{name}" if folder else name for name in MANIFEST_FILES)
    return next(filter(storage.exists, names), None)


def is_own_file(name: str) -> bool:
    """Return whether a file of a checkpoint's folder is a file of the native or the zarr form."""
    folders = ("data-", f"{ARRAYS_NODE}/", f"{CHECKPOINT_NODE}/")
    return name in (MANIFEST_NAME, ZARR_NAME) or name.startswith(folders)


def parse_rank_file_name(name: str) -> int | None:
    """Return the rank that wrote a file with a name from `Manifest.file_name`; None for every other name."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) if match else None


def array_paths(names: Iterable[str]) -> dict[str, str]:
    """Return the path of each tensor's array inside the group of all arrays, by tensor name.

    All paths differ, and no array's path is inside another array's, even if the file system ignores case.
    """
    paths: dict[str, str] = {}
    arrays: set[str] = set()  # paths of arrays, in lower case
    groups: dict[str, str] = {}  # folders around arrays: path in lower case -> path
    for name in names:
        parts = [_escaped(part) for part in name.split("/")]
        path = "/".join(parts)
        parents = list(accumulate(parts[:-1], "{}/{}".format))
        clashes = path.lower() in arrays or path.lower() in groups
        for parent in parents:
            # A parent that differs only by case from another folder is the same folder on some file systems.
            clashes |= parent.lower() in arrays or groups.get(parent.lower(), parent) != parent
        if clashes or len(path) > _MAX_PATH_BYTES or max(map(len, parts)) > _MAX_PART_BYTES:
            path, parents = _hashed(name), []
        paths[name] = path
        arrays.add(path.lower())
        groups |= {parent.lower(): parent for parent in parents}
    return paths


def _escaped(part: str) -> str:
    """Return one part of a tensor's name as a folder name: bytes that are not plain characters are percent-escaped."""
    # A lone surrogate is escaped too, instead of an error.
    text = quote(part, safe=_PLAIN, errors="surrogatepass")
    if not text:
        return "%empty"
    if text.lower() == ZARR_NAME:
        text = text.replace(".", "%2E")
    if text[-1] in ". ":  # some file systems drop a trailing dot or space
        text = text[:-1] + f"%{ord(text[-1]):02X}"
    if text[0] in ". " or text.startswith("__"):  # hidden files; names that zarr reserves
        text = f"%{ord(text[0]):02X}" + text[1:]
    return text


def _hashed(name: str) -> str:
    """Return a short, unique folder name: the start of the tensor's name, and a digest of the whole name."""
    import hashlib  # here: loads OpenSSL in 5 ms, which most processes do not need

    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{_escaped(name)[:_HEAD_BYTES]}%~{digest}"  # unlike an escaped name: no hex digit after "%"
