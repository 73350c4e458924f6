"""Folders of tensors' arrays: any key of a state becomes a path that file systems and object stores take.

    model/layers.0.weight        model/layers.0.weight        plain names stay as they are
    a key with /                 a key with ~1                 names escape it before they come here
    ..                           %2E%2E                        what means something to a file system, or to zarr
    zarr.json                    zarr%2Ejson                   what lies beside arrays
    W beside w                   W%~8f0e...                    what differs only by case: the later one
    a name of 300 bytes          its first 100 bytes%~8f0e...  what is too long for a folder's name

The tensor's name is an attribute of its array, so nobody has to read a path back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import accumulate
from urllib.parse import quote

_PLAIN = " !#$&'()+,;=@[]{}~-_."
_MAX_PART_BYTES = 200  # file systems take 255
_MAX_PATH_BYTES = 600  # object stores take 1024, with the folder before and the chunk behind
_HEAD_BYTES = 100


def array_paths(names: Iterable[str]) -> dict[str, str]:
    """The path of each tensor's array inside the data folder, by name.

    No two are one, and none lies inside another, even where file systems ignore case.
    """
    found: dict[str, str] = {}
    arrays: set[str] = set()
    groups: dict[str, str] = {}  # path in lower case -> as it is written
    for name in names:
        parts = [_escaped(part) for part in name.split("/")]
        path = "/".join(parts)
        parents = list(accumulate(parts[:-1], "{}/{}".format))
        clashes = path.lower() in arrays or path.lower() in groups
        for parent in parents:
            clashes |= parent.lower() in arrays or groups.get(parent.lower(), parent) != parent
        if clashes or len(path) > _MAX_PATH_BYTES or max(map(len, parts)) > _MAX_PART_BYTES:
            path, parents = _hashed(name), []
        found[name] = path
        arrays.add(path.lower())
        groups |= {parent.lower(): parent for parent in parents}
    return found


def _escaped(part: str) -> str:
    """One key as the name of a folder. All bytes but plain ones are percent-escaped."""
    text = quote(part, safe=_PLAIN, errors="surrogatepass")
    if not text:
        return "%empty"
    if text.lower() == "zarr.json" or text.lower().endswith(".safetensors"):  # files of ours have such names
        head, _, tail = text.rpartition(".")
        text = f"{head}%2E{tail}"
    if text[-1] in ". ":  # some file systems drop them
        text = text[:-1] + f"%{ord(text[-1]):02X}"
    if text[0] in ". " or text.startswith("__"):  # hidden files; nodes that zarr keeps for itself
        text = f"%{ord(text[0]):02X}" + text[1:]
    return text


def _hashed(name: str) -> str:
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{_escaped(name)[:_HEAD_BYTES]}%~{digest}"  # no escape looks like this


def array_paths_1(names: Iterable[str]) -> dict[str, str]:
    """As `array_paths`, for checkpoints of version 1 of the format."""
    found = {}
    for name in names:
        parts = [quote(part, safe=_PLAIN) for part in name.split("/")]
        found[name] = "/".join("%2E" * len(text) if text in (".", "..") else text or "%00" for text in parts)
    return found
