"""One folder in the place of another, at once.

    with exchange     .name.saving <-> name             one call: readers find the old folder or the new one
    without           name -> .name.before, .name.saving -> name        for a moment there is none
    no folder renames .name.saving/* -> name/*, one by one               until the last file there is none

Linux can exchange two names in one call on most file systems. Where it cannot (NFS, some FUSE), a process that is
killed between the two renames leaves the old folder under its other name, until the next one succeeds. Buckets that are
mounted as folders (gcsfuse) rename files alone.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM)
_CANNOT_FOLDERS = (
    *_CANNOT,
    errno.EMFILE,
    errno.EXDEV,
)  # gcsfuse: EMFILE where a folder has more files than a limit, 0
_log = logging.getLogger(__name__)


@cache
def _renameat2() -> Callable[..., Any] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux, or a C library before 2.28
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return found  # type: ignore[no-any-return]


def _renamed(one: Path, other: Path, flags: int) -> bool:
    """Rename with flags; False where the file system cannot."""
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), os.fspath(other))


def rename_unless_there(new: Path, target: Path) -> None:
    """Give a file a name that no file has. Where that is not one call, the folder's lock keeps others out.

    Raises:
        FileExistsError: if there is one.
    """
    if not _renamed(new, target, _RENAME_NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
        os.rename(new, target)


def move_over(new: Path, target: Path, last: str = "") -> None:
    """Give a folder another one's name; what had it lies under ``new`` then, or is gone.

    Args:
        last: name of the file without which the folder counts as none. Where folders cannot be renamed, it goes first
            from what is there, and comes last.
    """
    aside = target.with_name(f".{target.name}.before")
    try:
        if not target.exists():
            os.rename(new, target)
        elif not _renamed(new, target, _RENAME_EXCHANGE):
            os.rename(target, aside)
            try:
                os.rename(new, target)
            except BaseException:
                os.rename(aside, target)
                raise
    except OSError as error:
        if error.errno not in _CANNOT_FOLDERS:
            raise
        _log.info(
            "the file system of %s renames no folders (%s): files are moved one by one, %s last",
            target.parent,
            error.strerror,
            last or "none",
        )
        _move_files(new, target, last)
    shutil.rmtree(aside, ignore_errors=True)  # perhaps of a process that was killed


def _move_files(new: Path, target: Path, last: str) -> None:
    """Every file of a folder to another one, which holds no others then."""
    names = {path.relative_to(new) for path in new.rglob("*") if not path.is_dir()}
    old = {path.relative_to(target) for path in target.rglob("*") if not path.is_dir()}
    for name in sorted(old, key=lambda name: name != Path(last)):
        if name == Path(last) or name not in names:
            (target / name).unlink()
    for name in sorted(names, key=lambda name: (name == Path(last), name)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / name, target / name)
