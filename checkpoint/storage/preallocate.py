"""Asking the file system for a file's blocks before its bytes come.

A disk that is too full says so at once instead of hours later, and on ext4 writing then takes a fifth less
time. ``os.posix_fallocate`` will not do: where the file system cannot reserve (NFS before 4.2, some FUSE) the C
library fakes it by writing to every block. The plain system call says that it cannot, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


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
