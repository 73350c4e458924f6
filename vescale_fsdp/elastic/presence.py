"""Presence: a port that a process answers on while it lives, and how others ask.

The kernel closes the port when the process ends, whichever way, so that whoever asks knows at once: no heartbeats, and
nothing to tune. A machine that is gone does not answer, and is given up after `ANSWER_S`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from threading import Thread

__all__ = ["ANSWER_S", "Presence", "is_present"]

ANSWER_S = 3.0  # a process that trains may hold the interpreter for a while before it answers


class Presence:
    """That this process is there.

    Args:
        host: the name or address under which others reach this machine.

    Attributes:
        name: the process's, unlike any other's: ``host:port/token``.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=128)
        self._token = secrets.token_hex(8)
        self.name = f"{host}:{self._listener.getsockname()[1]}/{self._token}"
        Thread(target=self._answer, name="elastic-presence", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                asker, _ = self._listener.accept()
            except OSError:  # `end` has closed it
                return
            with asker, contextlib.suppress(OSError):  # who asked has gone
                asker.sendall(self._token.encode())

    def end(self) -> None:
        """Be there no more."""
        # A close alone would not wake the thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def is_present(name: str) -> bool:
    """Whether the process of this name lives, and its machine can be reached."""
    address, _, token = name.partition("/")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as asked:
            said = b""
            while len(said) < len(token) and (more := asked.recv(len(token) - len(said))):
                said += more
    except OSError:
        return False
    return said == token.encode()  # another process may have got the port since
