"""What lies where a checkpoint should be and is not whole: pointers of git-lfs, saves and downloads that never ended.

The bytes alone would be called damaged. The files' names, and the first line of a pointer, say what happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.huggingface.repository import refuse_pointers
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, VescaleError, some

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
