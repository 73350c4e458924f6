"""Folders and files that other users of the machine must neither read nor have made.

A predictable name in a folder that everybody writes to (``/dev/shm``, ``/tmp``) may be taken by somebody else first: by
a folder of theirs with weights to restore, or by a link to a file of ours that is then overwritten.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from vescale_fsdp.checkpoint.storage.base import StorageError
from vescale_fsdp.errors import CheckpointError


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, or verify one that is there.

    Raises:
        StorageError: if it is a link, belongs to another user, others may enter it, or may replace it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found, around = folder.lstat(), folder.parent.stat()
    problem = None
    if not stat.S_ISDIR(found.st_mode):
        problem = "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
    elif found.st_uid != os.geteuid():
        problem = f"a folder of user {found.st_uid}"
    elif found.st_mode & 0o077:
        problem = f"a folder with mode {stat.S_IMODE(found.st_mode):04o}"
    elif around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        problem = f"a folder in {folder.parent}, where every user may replace it (no sticky bit)"
    if problem is not None:
        raise StorageError(
            "A private folder cannot be trusted.",
            expected=f"a folder of user {os.geteuid()} with mode 0700",
            got=problem,
            where=str(folder),
            todo="remove it if it is yours; else pass another name or folder",
        )


def check_not_planted(path: Path) -> None:
    """Verify that what is about to be continued was not put there by another user.

    Links are never followed. In a folder that everybody may write to, files must be this user's own.

    Raises:
        CheckpointError: if it is a link, or another user's.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    around = path.parent.stat()
    is_foreign = around.st_mode & stat.S_IWOTH and found.st_uid not in (os.geteuid(), around.st_uid)
    if stat.S_ISLNK(found.st_mode) or is_foreign:
        raise CheckpointError(
            "A file for temporary use is already there, and may have been planted.",
            expected=f"a file or folder of user {os.geteuid()}, or none",
            got="a link" if stat.S_ISLNK(found.st_mode) else f"one of user {found.st_uid}",
            where=str(path),
            todo="remove it, or write to a folder that only you can write to",
        )
