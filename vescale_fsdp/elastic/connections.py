"""Closing gloo's connections, so that ranks that wait for each other learn that one of them has left.

A rank that is killed is noticed at once by those that wait for it, since the kernel closes its connections. They leave
the step with an error; but others wait for *them*, who live. torch's gloo groups have no abort (2.13), and to destroy
one waits for what is in flight in it, which may wait for another rank's: in a circle, until the time-out. So whoever
leaves an epoch closes all connections of its gloo groups, below gloo, and the news goes round in milliseconds.

Which ones they are: every gloo group has an epoll instance for its listening socket, its connections and a pipe. Nobody
else in a training process mixes these: asyncio has a pair of sockets, libuv and tokio an eventfd in the pipe's place.
Linux alone tells; elsewhere ranks learn of it by the group's time-out.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

_FDS = Path("/proc/self/fd")
_FDINFO = Path("/proc/self/fdinfo")


def close_gloo_connections() -> int:
    """Close the connections of all gloo groups of this process; what waits for them, here and there, ends in errors.

    Returns:
        How many there were.
    """
    num_closed = 0
    for watched in _watched_by_epolls():
        with ExitStack() as opened:
            sockets = [
                opened.enter_context(found) for fd in watched if (found := _tcp_socket(fd)) is not None
            ]
            listening = [one for one in sockets if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
            if listening and any(map(_is_pipe, watched)):
                for connection in set(sockets) - set(listening):
                    num_closed += 1
                    with suppress(OSError):  # the other side was first
                        connection.shutdown(socket.SHUT_RDWR)
    return num_closed


def _watched_by_epolls() -> list[list[int]]:
    """For each epoll instance of this process, the numbers of the files it watches."""
    found = []
    for name in os.listdir(_FDS) if _FDS.exists() else ():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(_FDS / name) == "anon_inode:[eventpoll]":
                text = (_FDINFO / name).read_text()
                found.append([int(fd) for fd in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)])
    return found


def _tcp_socket(fd: int) -> socket.socket | None:
    """A second handle on a TCP socket, for the caller to close; None for files of other kinds."""
    try:
        copy = os.dup(fd)
    except OSError:  # closed meanwhile
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # a pipe, which `socket` does not close
        os.close(copy)
        return None
    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
        return found
    found.close()
    return None


def _is_pipe(fd: int) -> bool:
    with suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False
