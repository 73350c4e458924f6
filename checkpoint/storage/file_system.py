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
import ctypes
import errno
import logging
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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


@cache
def _fallocate() -> Callable[..., Any] | None:
    if sys.maxsize < 2**32:  # offsets of the plain call have 32 bits there
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found  # type: ignore[no-any-return]


def reserve(fd: int, nbytes: int) -> None:
    """Reserve blocks for the first ``nbytes`` bytes of a file open for writing, where that is possible.

    Raises:
        OSError: if there is no space (or no quota) for them.
    """
    fallocate = _fallocate()
    if nbytes and fallocate is not None and fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


_MIN_BYTES = 1 << 20  # 1 MiB: less is not worth the question
_SAMPLES = 4


@cache
def _mincore() -> Callable[..., int] | None:
    try:
        found = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):  # not Linux
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return found  # type: ignore[no-any-return]


def is_cached(path: Path, start: int, stop: int) -> bool:
    """Whether the page cache holds most of a range of a file, judged by a few pages; True where nobody can tell."""
    mincore = _mincore()
    if mincore is None or stop - start < _MIN_BYTES:
        return True
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A private copy, of which nothing is ever written: ctypes tells the address of nothing that is read-only.
        pages = mmap.mmap(file, stop - first, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError):
        return True
    finally:
        os.close(file)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    num_pages, held = (stop - first) // mmap.PAGESIZE, 0
    for sample in range(_SAMPLES):
        answer = ctypes.create_string_buffer(1)
        at = (2 * sample + 1) * num_pages // (2 * _SAMPLES) * mmap.PAGESIZE
        held += mincore(address + at, mmap.PAGESIZE, answer) != 0 or answer.raw[0] & 1
    return 2 * held >= _SAMPLES


_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM)
_CANNOT_FOLDERS = (
    *_CANNOT,
    errno.EMFILE,
    errno.EXDEV,
)  # gcsfuse: EMFILE where a folder has more files than a limit, 0


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
