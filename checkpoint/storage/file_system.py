"""Optional operations of file systems, and substitutes for them. Each root is probed once, before its first write.

    not supported             substitute
    hard links                renameat2(RENAME_NOREPLACE), else a check and a rename, under the folder's lock
    renames                   files are written under their own names; an incomplete manifest does not parse
    fsync of folders          none: names are as durable as the file system makes them
    flock                     a file with a lease, see `lock_file`
    exchange of two folders   name -> .name.before, .name.saving -> name: no folder exists between the two renames
    renames of folders        .name.saving/* -> name/*, one by one; the checkpoint is not valid until the last file

FUSE, SMB, AFS and some NFS servers lack some of these operations. Buckets that are mounted as folders (gcsfuse) rename
only files. On most file systems, Linux exchanges two names in one call.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint.storage.lock_file import NO_LINKS, NO_RENAMES

# Error codes of file systems for calls that they do not support.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR)
# gcsfuse reports EMFILE where a folder has more files than a limit, which is 0 by default.
_NO_FOLDER_RENAMES = (*NO_RENAMES, errno.EMFILE, errno.EXDEV)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # a full disk, or a used-up quota
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2  # values in Linux's headers
_PROBE_PREFIX = ".probe-"
_MIN_QUERY_BYTES = 1 << 20  # 1 MiB: for smaller ranges, mincore costs more than it saves
_SAMPLES = 4  # number of pages of a range that mincore is called for
_log = logging.getLogger(__name__)


@cache
def _c_function(name: str, *argtypes: Any) -> Callable[..., int] | None:
    """Return a function of the C library; None if the library lacks it, as outside of Linux or in old versions."""
    try:
        # None: libraries that this process has already loaded.
        function = ctypes.CDLL(None, use_errno=True)[name]
    except (OSError, AttributeError):
        return None
    function.argtypes = argtypes
    return function


@dataclass(frozen=True)
class FileSystem:
    """Whether a file system supports hard links, renames, fsync of folders and flock."""

    links: bool = True
    renames: bool = True
    folder_syncs: bool = True
    flock: bool = True


class FileSystemProbe:
    """Probes a file system once; shared by the storages of a root and of the folders inside it."""

    def __init__(self) -> None:
        self._known: FileSystem | None = None

    def of(self, folder: Path, *, durable: bool, flock: bool | None = None) -> FileSystem:
        """Return what the file system of a folder supports. The first call probes it, and logs what is missing.

        Args:
            durable: whether the storage syncs folders; otherwise that is not probed.
            flock: whether a lock by `flock` has worked; None if it has not been tried.
        """
        known = self._known
        if known is None:
            known = _probed(folder, durable, flock is not False)
        elif flock is False and known.flock:  # the first call had not tried a lock
            known = replace(known, flock=False)
        if known is not self._known:  # so that each finding is logged once
            _log_missing(folder, known)
            self._known = known
        return known


def is_probe(name: str) -> bool:
    """Return whether a file was made by a probe; a killed probe leaves it."""
    return name.startswith(_PROBE_PREFIX)


def _log_missing(folder: Path, known: FileSystem) -> None:
    """Log which operations a file system lacks, and their substitutes."""
    substitutes = (
        (known.links, "hard links (renames under the lock)"),
        (known.renames, "renames (files written in place: a replaced step is missing until its end)"),
        (known.folder_syncs, "fsync of folders (names are as durable as the file system makes them)"),
        (known.flock, "flock (a lock file with a lease)"),
    )
    if missing := [f"no {text}" for is_supported, text in substitutes if not is_supported]:
        _log.info("the file system of %s has %s", folder, ", ".join(missing))


def _probed(folder: Path, durable: bool, flock: bool) -> FileSystem:
    """Try a hard link, a rename and a sync in a folder; arguments as for `FileSystemProbe.of`."""
    name = folder / f"{_PROBE_PREFIX}{os.urandom(8).hex()}"  # ranks may probe at the same time
    linked, renamed = name.with_name(f"{name.name}.link"), name.with_name(f"{name.name}.renamed")
    folder_syncs = not durable or sync_names(folder)
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        links = _works(lambda: os.link(name, linked), NO_LINKS)
        renames = _works(lambda: os.replace(name, renamed), NO_RENAMES)
    finally:
        for file in (name, linked, renamed):
            file.unlink(missing_ok=True)
    return FileSystem(links, renames, folder_syncs, flock)


def _works(call: Callable[[], None], refusals: tuple[int, ...]) -> bool:
    """Return whether a call succeeds; False if it raises an OSError with one of these codes."""
    try:
        call()
    except OSError as error:
        if error.errno in _NO_ROOM:
            return True  # a full disk says nothing about support; the next write will report that it is full
        if error.errno not in refusals:
            raise
        return False
    return True


def sync_names(folder: Path) -> bool:
    """Make the names in a folder durable; returns False if the file system does not support that."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except PermissionError:  # this user may write to the folder, but not open it
        os.sync()  # of all file systems
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        return False
    return True


def _renamed(one: Path, other: Path, flags: int) -> bool:
    """Rename with flags of renameat2(2); returns False if the kernel or the file system lacks the flags."""
    arguments = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    renameat2 = _c_function("renameat2", *arguments)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_RENAMES:
        return False
    raise OSError(code, os.strerror(code), os.fspath(other))


def rename_unless_there(new: Path, target: Path) -> None:
    """Rename a file, without replacing an existing target.

    If the file system lacks RENAME_NOREPLACE, this takes a check and a rename. The folder's lock prevents other jobs
    from creating the target in between.

    Raises:
        FileExistsError: if the target exists.
    """
    if not _renamed(new, target, _RENAME_NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
        os.rename(new, target)


def move_over(new: Path, target: Path, last: str = "") -> None:
    """Replace folder ``target`` by folder ``new``. Afterward the old folder is removed, or has the name ``new``.

    A process that is killed between two renames leaves the old folder as ``.name.before`` until the next call succeeds.

    Args:
        last: the file without which the folder is not valid. If folders cannot be renamed, this file is removed from
            the target first and moved last.
    """
    import shutil  # imports bz2 and lzma, which takes milliseconds of every start

    aside = target.with_name(f".{target.name}.before")
    try:
        if not target.exists():
            os.rename(new, target)
        elif not _renamed(new, target, _RENAME_EXCHANGE):
            # Left by a process that was killed while it removed the folder; no rename replaces a folder with files.
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(target, aside)
            try:
                os.rename(new, target)
            except BaseException:  # also Ctrl-C: the old folder must get its name back
                os.rename(aside, target)
                raise
    except OSError as error:
        if error.errno not in _NO_FOLDER_RENAMES:
            raise
        _log.info(
            "the file system of %s renames no folders (%s): files are moved one by one, %s last",
            target.parent,
            error.strerror,
            last or "none",
        )
        _move_files(new, target, Path(last))
    shutil.rmtree(aside, ignore_errors=True)  # also a folder that a killed process has left


def _move_files(new: Path, target: Path, last: Path) -> None:
    """Move every file of ``new`` to ``target``, and remove the files of ``target`` that ``new`` lacks."""
    names = {path.relative_to(new) for path in new.rglob("*") if not path.is_dir()}
    old = {path.relative_to(target) for path in target.rglob("*") if not path.is_dir()}
    # False sorts before True: `last` is removed first, and moved last.
    for name in sorted(old, key=lambda name: name != last):
        if name == last or name not in names:
            (target / name).unlink()
    for name in sorted(names, key=lambda name: (name == last, name)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / name, target / name)


def reserve(fd: int, nbytes: int) -> None:
    """Reserve blocks for the first ``nbytes`` bytes of a file that is open for writing, if the file system can.

    A full disk is then reported at once instead of hours later, and writes on ext4 take 20 % less time.

    Raises:
        OSError: if the disk is full, the quota is used up, or the file would be too large for the file system.
    """
    # Not os.posix_fallocate: if a file system cannot reserve blocks (NFS before 4.2, some FUSE), it writes to every
    # block, while fallocate(2) fails. Only in 64-bit processes does fallocate take 64-bit offsets.
    fallocate = _c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if nbytes and sys.maxsize >= 2**32 and fallocate is not None and fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        # After any other error, the file is written without reserved blocks.
        if code in (*_NO_ROOM, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def is_cached(path: Path, start: int, stop: int) -> bool:
    """Return whether most of a byte range is in the page cache, by mincore(2) of a few pages; True if unknown.

    A read with RWF_NOWAIT would show it too, but starts a read-ahead; mincore does not.
    """
    mincore = _c_function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    if mincore is None or stop - start < _MIN_QUERY_BYTES:
        return True
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY  # mappings must be aligned
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A private copy-on-write mapping, because ctypes cannot get the address of read-only memory. It is not written.
        pages = mmap.mmap(file, stop - first, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError):
        return True
    finally:
        os.close(file)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    num_pages, num_cached = (stop - first) // mmap.PAGESIZE, 0
    for sample in range(_SAMPLES):
        answer = ctypes.create_string_buffer(1)
        at = (2 * sample + 1) * num_pages // (2 * _SAMPLES) * mmap.PAGESIZE  # the middle of each quarter
        # An error counts as cached. Bit 0 says whether the page is in memory; Linux reserves all other bits.
        num_cached += mincore(address + at, mmap.PAGESIZE, answer) != 0 or answer.raw[0] & 1
    return 2 * num_cached >= _SAMPLES
