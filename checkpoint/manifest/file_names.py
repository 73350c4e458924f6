"""What makes a folder a checkpoint of this format, or a step of a run: the names that tell without reading."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from itertools import accumulate
from urllib.parse import quote

FORMAT_NAME = "vescale-checkpoint"
FORMAT_VERSION = 2  # the newest that is read; what each brought: FORMAT.md
MANIFEST_NAME = "manifest.json"
ZARR_NAME = "zarr.json"  # metadata of an array or a group

_STEP = re.compile(r"step-(\d{8,})")
_RANK_FILE = re.compile(r"(\d{5,})-of-\d{5,}\.safetensors")


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> tuple[int, str] | None:
    """(step, name) of a step's folder; None for every other name, also for a step's number in another form."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), name) if match and step_name(int(match[1])) == name else None


def parse_rank_file_name(name: str) -> int | None:
    """The rank that wrote a file of this name, as `Manifest.file_name` gives it; None for every other name."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) if match else None


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
