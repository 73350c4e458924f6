"""A lock made of a file's existence, for file systems that have no `flock` (Lustre and NFS as they are often mounted).

    .lock-owner    {"host": "node17", "pid": 4711, "boot": "..", "started": ".."}, made only if there is none

The kernel does not clear it away when its owner dies. An owner on this host that is gone is told by its pid and its
start, and its file is taken; of one on another host nothing can be known, so the error names the file to remove.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LOCK_FILE_NAME", "held_by_file"]

LOCK_FILE_NAME = ".lock-owner"


@contextmanager
def held_by_file(folder: Path) -> Iterator[None]:
    """Hold a folder by a file in it.

    Raises:
        BlockingIOError: if another process holds it, or may hold it.
    """
    path = folder / LOCK_FILE_NAME
    mine = json.dumps(_identity(os.getpid()))
    if not _made(path, mine):
        _clear_stale(path)
        if not _made(path, mine):
            raise _busy(path)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):  # a person may have removed it, as the error says
            path.unlink()


def _identity(pid: int) -> dict[str, str | int]:
    """What tells a process from all others, also from a later one of the same number."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:  # no such process, or a system that does not say
        started = boot = ""
    return {"host": os.uname().nodename, "pid": pid, "boot": boot, "started": started}


def _made(path: Path, text: str) -> bool:
    """Whether the file could be made, with its text: under another name first, so that nobody reads half of it."""
    draft = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    draft.write_text(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _clear_stale(path: Path) -> None:
    """Remove the file if whoever made it ran on this host and is gone."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    if not _is_stale(text):
        return
    taken = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.rename(path, taken)
        if taken.read_text() != text:  # ... and holds the folder by now: give its file back
            with contextlib.suppress(FileExistsError):
                os.link(taken, path)
        taken.unlink()


def _is_stale(text: str) -> bool:
    try:
        owner = json.loads(text)
        pid = int(owner["pid"])
        here = owner["host"] == os.uname().nodename
    except (ValueError, KeyError, TypeError):
        return False  # not ours to judge
    return here and owner != _identity(pid)


def _busy(path: Path) -> BlockingIOError:
    try:
        owner = path.read_text()
    except FileNotFoundError:
        owner = "a process that has ended meanwhile"
    return BlockingIOError(
        errno.EWOULDBLOCK,
        f"held by {owner}; if that process is gone, remove the file",
        str(path),
    )
