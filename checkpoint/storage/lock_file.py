"""Lock a folder by the existence of a file, for file systems without `flock` (many mounts of Lustre and NFS).

    .lock-owner    {"host": "node17", "pid": 4711, .., "lease_s": 120}, created only if it does not exist

The kernel does not remove the file when its owner dies. If the owner runs in the same boot and PID namespace, its pid
and start time show whether it is alive. In any case, a file older than its lease belongs to a dead process, because
every owner touches the file several times per lease. Clocks of hosts differ, so ages are differences of two timestamps
of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE_NAME = ".lock-owner"
# Errors of file systems that do not support renames, and hard links.
NO_RENAMES = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
NO_LINKS = (*NO_RENAMES, errno.EXDEV, errno.EMLINK)
_LEASE_S = 120.0  # seconds for which an owner that died on another host blocks other jobs
_RENEWALS = 8  # per lease, since some renewals may fail
_LIMIT_BYTES = 1 << 12  # 4 KiB, more than any lock file has: the limit for reads
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
_log = logging.getLogger(__name__)


@contextmanager
def held_by_file(folder: Path) -> Iterator[None]:
    """Lock a folder during the block, by a file in the folder.

    Raises:
        BlockingIOError: if another process has the lock, or may have it.
    """
    path, owner = folder / LOCK_FILE_NAME, os.getpid()
    # "lock": distinguishes this lock from later locks of the same process.
    mine = json.dumps({**_identity(owner), "lease_s": _LEASE_S, "lock": os.urandom(8).hex()})
    if not _made(path, mine):
        _clear_stale(path)
        if not _made(path, mine):
            raise _busy(path)
    released = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(path, mine, released), name="checkpoint-lock", daemon=True
    )
    renewing.start()
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child does not own the lock
            released.set()
            renewing.join()
            # If renewals failed, another process may own the lock now. A user may also have removed the file.
            with contextlib.suppress(FileNotFoundError):
                if _read(path) == mine:
                    path.unlink()


def _renew(path: Path, mine: str, released: threading.Event) -> None:
    """Touch the lock file regularly until it is released, or until another process has taken the lock."""
    while not released.wait(_LEASE_S / _RENEWALS):
        try:
            if _read(path) != mine:
                _log.error("%s was taken by another process: %s", path, _read(path))
                return
            os.utime(path)
        except OSError as error:  # the lock is not lost yet: the next touch may succeed within the lease
            _log.warning("%s could not be renewed: %s", path, error)


def _identity(pid: int) -> dict[str, str | int]:
    """Return values that identify a process among all hosts, and among earlier processes with the same pid."""
    return {
        "host": os.uname().nodename,
        "pid": pid,
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "started": _start_of(pid),
    }


def _boot() -> str:
    """Return an id that differs for every boot of every host; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:  # not Linux
        return ""


def _pid_namespace() -> str:
    """Return the PID namespace: in two containers of one host, one pid may belong to different processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux, or /proc is not mounted
        return ""


def _start_of(pid: int) -> str:
    """Return the start time of a process; empty if there is no such process, or the time is unknown."""
    try:
        # Field 22. Fields are counted from the last bracket: the program's name in field 2 may contain brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _made(path: Path, text: str) -> bool:
    """Create the lock file; returns False if it exists.

    A hard link makes the file appear with its text. Without hard links, other processes may see it empty first.
    """
    draft = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    _write_new(draft, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            _write_new(path, text)
        except FileExistsError:
            return False
    finally:
        draft.unlink()
    return True


def _write_new(path: Path, text: str) -> None:
    """Write a new file; raises FileExistsError if it exists."""
    with open(os.open(path, _NEW, 0o666), "w") as file:
        file.write(text)


def _read(path: Path) -> str:
    """Read a lock file, without following a link.

    Raises:
        FileNotFoundError: if there is no lock file.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file, errors="replace") as text:
        return text.read(_LIMIT_BYTES)


def _clear_stale(path: Path) -> None:
    """Remove the lock file if its owner is dead or its lease has expired."""
    clock = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    try:
        text = _read(path)
        _write_new(clock, "")  # its timestamp is the current time by the file system's clock
        age_s = clock.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:  # the lock was just released
        return
    finally:
        clock.unlink(missing_ok=True)
    if not _is_stale(text, age_s):
        return
    taken = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster to remove it
        # A rename and a second look instead of a removal: another process may have taken over the lock meanwhile.
        os.rename(path, taken)
        if _read(taken) != text:  # the file of that process: put it back
            with contextlib.suppress(FileExistsError):  # a third process has the lock now
                os.link(taken, path)
        taken.unlink()


def _is_stale(text: str, age_s: float) -> bool:
    """Return whether a lock file with this text and age has no living owner."""
    try:
        owner = json.loads(text)
        pid, lease_s = int(owner["pid"]), float(owner["lease_s"])
        origin, started = (owner["boot"], owner["pid_namespace"]), owner["started"]
    except (ValueError, KeyError, TypeError):
        # Empty: the owner died before it wrote the text. Any other text was not written by this module.
        return not text and age_s > _LEASE_S
    is_here = bool(origin[0]) and origin == (_boot(), _pid_namespace())
    return age_s > lease_s or (is_here and started != _start_of(pid))


def _busy(path: Path) -> BlockingIOError:
    """Return the error for a folder that another process has locked."""
    try:
        owner = _read(path)
    except FileNotFoundError:
        owner = "a process that has ended since"
    return BlockingIOError(
        errno.EWOULDBLOCK, f"locked by {owner}; the lock ends {_LEASE_S:g} s after that process", str(path)
    )
