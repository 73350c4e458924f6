"""One folder in the place of another, at once.

    with exchange     .name.saving <-> name             one call: readers find the old folder or the new one
    without           name -> .name.before, .name.saving -> name        for a moment there is none

Linux can exchange two names in one call on most file systems. Where it cannot (NFS, some FUSE), a process that is
killed between the two renames leaves the old folder under its other name, until the next one succeeds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["move_over", "rename_unless_there"]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM)


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


def move_over(new: Path, target: Path) -> None:
    """Give a folder another one's name; what had it lies under ``new`` then, or is gone."""
    aside = target.with_name(f".{target.name}.before")
    if not target.exists():
        os.rename(new, target)
    elif not _renamed(new, target, _RENAME_EXCHANGE):
        os.rename(target, aside)
        try:
            os.rename(new, target)
        except BaseException:
            os.rename(aside, target)
            raise
    shutil.rmtree(aside, ignore_errors=True)  # perhaps of a process that was killed
