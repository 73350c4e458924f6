"""Ends the waits of gloo: closes the connections of its groups, and abandons a group that forms.

The kernel closes the connections of a killed process, so ranks that wait for that process get an error and leave the
step. Other ranks wait for a rank that has left the step but still lives, and get no error. Destroying a group waits for
its pending collectives, which may wait, until the time-out, for ranks that are destroying the group too. So a rank that
leaves an epoch closes all connections of its gloo groups itself, by their file descriptors. All ranks then leave within
milliseconds.

gloo's connections are recognized by their epoll instance. Every gloo group has one epoll instance, for a listening
socket, its connections and a pipe. No other library in a training process mixes these and nothing else: asyncio has a
pair of sockets; libuv, on which torch's stores run, and tokio have an eventfd. Only Linux lists the files of an epoll
instance. On other systems ranks leave when the group's time-out ends.

No method of a gloo group wakes a collective that waits: in torch 2.13, `abort` and `shutdown` of its backend return at
once, and the collective ends with its time-out. torch 2.11 and 2.15 declare the same methods.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

_FDS = Path("/proc/self/fd")
_FDINFO = Path("/proc/self/fdinfo")


def close_gloo_connections() -> int:
    """Close the connections of all gloo groups of this process. Collectives of these groups then fail on all ranks.

    Returns:
        The number of closed connections.
    """
    num_closed = 0
    for watched in _watched_by_epolls():
        with ExitStack() as opened:
            copies = [opened.enter_context(copy) for fd in watched if (copy := _tcp_socket(fd)) is not None]
            listening = {copy for copy in copies if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
            # An eventfd: the server of a torch store, whose epoll instance also has a listening socket and a pipe.
            if listening and any(map(_is_pipe, watched)) and not any(map(_is_eventfd, watched)):
                for connection in set(copies) - listening:
                    num_closed += 1
                    with suppress(OSError):  # the other side has closed the connection already
                        # Not close(), which closes only this copy: gloo's descriptor would keep the connection open.
                        # Only reads: gloo closes the connection when its thread reads the end. A send that meets a
                        # closed connection before that is lost by gloo, and its collective waits for the time-out.
                        connection.shutdown(socket.SHUT_RD)
    return num_closed


def _watched_by_epolls() -> list[list[int]]:
    """List, for each epoll instance of this process, the file descriptors that it watches."""
    watched = []
    for name in os.listdir(_FDS) if _FDS.exists() else ():  # only Linux has /proc/self/fd
        with suppress(OSError):  # the file was closed after it was listed
            if os.readlink(_FDS / name) == "anon_inode:[eventpoll]":
                text = (_FDINFO / name).read_text()
                # A line such as "tfd:       5 events: ..." for each watched descriptor.
                watched.append([int(fd) for fd in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)])
    return watched


def _tcp_socket(fd: int) -> socket.socket | None:
    """Return a socket object for a copy of a descriptor, for the caller to close; None if it is not a TCP socket."""
    try:
        copy = os.dup(fd)  # a copy, since a socket object closes its descriptor, and gloo needs the original
    except OSError:  # the file was closed after it was listed
        return None
    try:
        opened = socket.socket(fileno=copy)
    except OSError:  # not a socket, such as a pipe; `socket` has not taken over the copy
        os.close(copy)
        return None
    if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
        return opened
    opened.close()
    return None


def _is_pipe(fd: int) -> bool:
    """Return whether a file descriptor is a pipe; False if it was closed."""
    with suppress(OSError):  # the file was closed after it was listed
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def _is_eventfd(fd: int) -> bool:
    """Return whether a file descriptor is an eventfd; False if it was closed."""
    with suppress(OSError):  # the file was closed after it was listed
        return os.readlink(_FDS / str(fd)) == "anon_inode:[eventfd]"
    return False


class Interruptible:
    """A call in a thread of its own, which can be abandoned.

    Args:
        call: the call; it starts at once.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        # A daemon thread, because a call that was abandoned must not keep the process from exiting.
        self._thread = Thread(target=self._run, name="elastic-forming", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  raised by `has_ended`
            self._error = error

    def has_ended(self, within_s: float) -> bool:
        """Return whether the call ends within a time. Raises its error."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def interrupt(self) -> None:
        """Make the call raise an exception as soon as it returns to Python code, so that it changes nothing later."""
        thread_id = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(SystemExit))
