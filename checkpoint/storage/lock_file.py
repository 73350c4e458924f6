"""A lock by the existence of a file, for file systems without `flock` (Lustre and NFS as they are often mounted).

    .lock-owner    {"host": "node17", "pid": 4711, .., "lease_s": 120}, created only if it does not exist

The kernel does not remove the file when its owner dies. The pid and start time show whether an owner of the same boot
and PID namespace is alive. Every owner has a lease and touches the file several times per lease, so that a file older
than its lease belongs to a dead process. Ages are differences of two timestamps of the file system's clock.
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
# Errors of file systems that do not support hard links.
NO_LINKS = (
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EXDEV,
    errno.EMLINK,
    errno.EINVAL,
)
_LEASE_S = 120.0  # how long an owner that died on another host blocks others
_RENEWALS = 8  # per lease; some of them may fail
_LIMIT_BYTES = 1 << 12  # 4 KiB
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
_log = logging.getLogger(__name__)


@contextmanager
def held_by_file(folder: Path) -> Iterator[None]:
    """Lock a folder by a file in it.

    Raises:
        BlockingIOError: if another process has the lock, or may have it.
    """
    path, owner = folder / LOCK_FILE_NAME, os.getpid()
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
            # After the end of the lease another process may own the lock; or a person has removed the file.
            with contextlib.suppress(FileNotFoundError):
                if _read(path) == mine:
                    path.unlink()


def _renew(path: Path, mine: str, released: threading.Event) -> None:
    """Touch the lock file until it is released."""
    while not released.wait(_LEASE_S / _RENEWALS):
        try:
            if _read(path) != mine:
                _log.error("%s was taken by another process: %s", path, _read(path))
                return
            os.utime(path)
        except OSError as error:  # not the end of the lock: the next touch may succeed within the lease
            _log.warning("%s could not be renewed: %s", path, error)


def _identity(pid: int) -> dict[str, str | int]:
    """Identifies a process among all hosts, and distinguishes it from earlier processes with the same pid."""
    return {
        "host": os.uname().nodename,
        "pid": pid,
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "started": _start_of(pid),
    }


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:  # not Linux
        return ""


def _pid_namespace() -> str:
    """The PID namespace: containers of one host may have different processes with the same pid."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process started; empty if there is no such process, or the time is not known."""
    try:
        # Field 22; the process's name in field 2 may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _made(path: Path, text: str) -> bool:
    """Create the lock file; False if it exists. Without hard links, other processes may see it before its text."""
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
    with open(os.open(path, _NEW, 0o666), "w") as file:
        file.write(text)


def _read(path: Path) -> str:
    """The text of a lock file; links are not followed.

    Raises:
        FileNotFoundError: if there is none.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file, errors="replace") as text:
        return text.read(_LIMIT_BYTES)


def _clear_stale(path: Path) -> None:
    """Remove the file if its owner is dead, or its lease is over."""
    clock = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    try:
        text = _read(path)
        _write_new(clock, "")  # its timestamp is the present time of the file system's clock
        age_s = clock.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return
    finally:
        clock.unlink(missing_ok=True)
    if not _is_stale(text, age_s):
        return
    taken = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        os.rename(path, taken)
        if _read(taken) != text:  # the file of a faster process, which now has the lock: restore it
            with contextlib.suppress(FileExistsError):
                os.link(taken, path)
        taken.unlink()


def _is_stale(text: str, age_s: float) -> bool:
    try:
        owner = json.loads(text)
        pid, lease_s = int(owner["pid"]), float(owner["lease_s"])
        origin, started = (owner["boot"], owner["pid_namespace"]), owner["started"]
    except (ValueError, KeyError, TypeError):
        return not text and age_s > _LEASE_S  # its owner died before it could write the text
    is_here = bool(origin[0]) and origin == (_boot(), _pid_namespace())
    return age_s > lease_s or (is_here and started != _start_of(pid))


def _busy(path: Path) -> BlockingIOError:
    try:
        owner = _read(path)
    except FileNotFoundError:
        owner = "a process that has ended since"
    return BlockingIOError(
        errno.EWOULDBLOCK,
        f"locked by {owner}; the lock ends {_LEASE_S:g} s after that process",
        str(path),
    )
