"""Ends the waits of gloo: closes the connections of its groups, and wakes ranks that wait for a rank to connect.

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

While a group forms, one rank of each pair listens and waits, for five times the group's time-out, until the other rank
connects. Nothing but a connection ends this wait. `Interrupter` connects in place of ranks that are lost, and
closes these connections.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Lock, Thread

from vescale_fsdp.collectives.interruptible import interrupt

_FDS = Path("/proc/self/fd")
_FDINFO = Path("/proc/self/fdinfo")
_ESTABLISHED = 1  # TCP_ESTABLISHED of Linux
_CALL_S = 1.0  # time limit of a connection to a socket of this process
_SETTLE_S = 0.05  # in which gloo's thread reads the number of a connection
_POLL_S = 0.002  # pause between two looks at connections that end
_AGAIN_S = 0.5  # pause before waits are ended again: groups may have connected meanwhile
_STOP_S = 10.0  # longest wait for the thread to end


def close_gloo_connections() -> int:
    """Close the connections of all gloo groups of this process. Collectives of these groups then fail on all ranks.

    Waits until gloo has closed them too, so that no message arrives later in memory that is used again; a second at
    most.

    Returns:
        The number of closed connections.
    """
    num_closed, deadline_s = 0, time.monotonic() + _CALL_S
    for _, connections in _gloo_sockets():
        for connection in connections:
            num_closed += 1
            with suppress(OSError):  # the other side has closed the connection already
                # Not close(), which closes only this copy: gloo's descriptor would keep the connection open.
                # Only reads: gloo closes the connection when its thread reads the end. A send that meets a
                # closed connection before that is lost by gloo, and its collective waits for the time-out.
                connection.shutdown(socket.SHUT_RD)
    while _num_open() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return num_closed


def _num_open() -> int:
    """Return the number of gloo's connections in state ESTABLISHED; gloo keeps half-closed ones."""
    return sum(
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
        for _, connections in _gloo_sockets()
        for connection in connections
    )


class Interrupter:
    """Ends all waits for other ranks in this process, from a loss until the end of the epoch.

    A thread closes gloo's connections, and connects in place of ranks that do not connect. It repeats both, for groups
    that connect meanwhile. It runs in its own thread because it takes longer than a keep-alive may.

    Such a connection must not reach gloo while it destroys a group: gloo's thread would wait for a lock of the group's
    listening socket, and the end of that socket waits for the thread (torch 2.13). So `stop` must be called before
    groups are destroyed, and connections are made one after the other, with a pause in which gloo reads the number.
    Numbers descend: gloo connects pairs in ascending order, so the connection that ends its wait is the last one.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stopped = Event()
        self._stopped.set()
        self._thread: Thread | None = None

    def allow(self) -> None:
        """Allow `start`, in a new epoch."""
        self._stopped = Event()  # a new one: a thread that `stop` could not wait for must not go on

    def start(self, num_ranks: int) -> None:
        """Start ending waits, in groups of at most ``num_ranks`` ranks. A no-op if already started or after `stop`.

        All groups of gloo are unusable afterwards.
        """
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                arguments = num_ranks, self._stopped
                self._thread = Thread(
                    target=self._run, args=arguments, name="elastic-interrupts", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Stop ending waits. Waits until no connection is under way, for at most `_STOP_S`."""
        with self._lock:
            self._stopped.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_STOP_S)

    def _run(self, num_ranks: int, stopped: Event) -> None:
        while not stopped.is_set():
            close_gloo_connections()
            if stopped.is_set():
                return
            interrupt()
            self._wake(num_ranks, stopped)
            stopped.wait(_AGAIN_S)

    def _wake(self, num_ranks: int, stopped: Event) -> None:
        """Connect to all groups that may wait for a rank; gloo's creation of the group then returns, or raises.

        A rank that connects sends the number of the pair of ranks first, in 8 bytes; the pairs of a group are numbered
        from 0 (torch 2.11-2.15).
        """
        for number in reversed(range(num_ranks)):
            if stopped.is_set():
                return
            # Anew each time: groups that are gone are not called.
            listening = [listener.getsockname() for listeners, _ in _gloo_sockets() for listener in listeners]
            for address in listening:
                if stopped.is_set():
                    return
                with suppress(OSError), socket.create_connection(address[:2], timeout=_CALL_S) as caller:
                    caller.sendall(struct.pack("=q", number))
            time.sleep(min(_SETTLE_S, 2 / num_ranks))  # before `stop` returns, too


def _gloo_sockets() -> Iterator[tuple[set[socket.socket], set[socket.socket]]]:
    """Yield the listening sockets and the connections of each gloo group, as copies that are closed afterwards."""
    for watched in _watched_by_epolls():
        with ExitStack() as opened:
            copies = {opened.enter_context(copy) for fd in watched if (copy := _tcp_socket(fd)) is not None}
            listening = {copy for copy in copies if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
            # An eventfd: the server of a torch store, whose epoll instance also has a listening socket and a pipe.
            if listening and any(map(_is_pipe, watched)) and not any(map(_is_eventfd, watched)):
                yield listening, copies - listening


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
