"""What a root's file system can do, asked once per root, before anything is written to it.

    without                   instead
    hard links                renameat2(RENAME_NOREPLACE), else a look and a rename, under the folder's lock
    renames                   files are written under their own names; a torn manifest does not parse
    fsync of folders          left out: names are durable when the file system says so
    flock                     a file with a lease, see `lock_file`

FUSE, SMB, AFS and some NFS servers lack one or several of these.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vescale_fsdp.checkpoint.storage.lock_file import NO_LINKS

NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR)
_NO_RENAMES = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PREFIX = ".probe-"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileSystem:
    """What works."""

    links: bool = True
    renames: bool = True
    folder_syncs: bool = True
    flock: bool = True


class FileSystemProbe:
    """Asks once; shared by the storages of a root and of the folders inside of it."""

    def __init__(self) -> None:
        self._known: FileSystem | None = None

    def of(self, folder: Path, *, durable: bool, flock: bool | None = None) -> FileSystem:
        """What the file system of a folder can do.

        Args:
            durable: whether folders are synced at all.
            flock: whether locking has worked; None if it has not been tried yet.
        """
        known = self._known
        if known is None:
            known = _asked(folder, durable, flock is not False)
            _report(folder, known)
        elif flock is False and known.flock:
            known = FileSystem(known.links, known.renames, known.folder_syncs, False)
            _report(folder, known)
        self._known = known
        return known


def probe_name(name: str) -> bool:
    """Whether a file is one of a probe that was killed."""
    return name.startswith(_PREFIX)


def _report(folder: Path, found: FileSystem) -> None:
    instead = {
        "hard links": None if found.links else "renames under the lock",
        "renames": None if found.renames else "files written in place: a replaced step is gone until its end",
        "fsync of folders": None
        if found.folder_syncs
        else "names are as durable as the file system makes them",
        "flock": None if found.flock else "a lock file with a lease",
    }
    if lacking := [f"no {name} ({other})" for name, other in instead.items() if other]:
        _log.info("the file system of %s has %s", folder, ", ".join(lacking))


def _asked(folder: Path, durable: bool, flock: bool) -> FileSystem:
    name = folder / f"{_PREFIX}{os.urandom(8).hex()}"
    linked, renamed = name.with_name(f"{name.name}.link"), name.with_name(f"{name.name}.renamed")
    folder_syncs = not durable or sync_names(folder)
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        links = _works(lambda: os.link(name, linked), NO_LINKS)
        renames = _works(lambda: os.replace(name, renamed), _NO_RENAMES)
    finally:
        for left in (name, linked, renamed):
            with contextlib.suppress(FileNotFoundError):
                left.unlink()
    return FileSystem(links, renames, folder_syncs, flock)


def _works(call: Callable[[], None], refusals: tuple[int, ...]) -> bool:
    try:
        call()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True  # a full disk says nothing about the call; what is written next fails, under its own name
        if error.errno not in refusals:
            raise
        return False
    return True


def sync_names(folder: Path) -> bool:
    """Make the names in a folder durable; False where the file system has no such call."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder that one may make entries in and not list
        os.sync()
        return True
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
        return False
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
        return False
    finally:
        os.close(file)
    return True
