"""Presence: a port that a process answers on while it lives, and how others ask.

The kernel closes the port when the process ends, whichever way, so that whoever asks knows at once: no heartbeats, and
nothing to tune. A machine that is gone does not answer, and is given up after `ANSWER_S`. Who asks sends a nonce, and
the answer is an HMAC of it, so that no other process can answer for this one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from threading import Thread

from vescale_fsdp.checkpoint.ranks.stores import check_exposure, sign

ANSWER_S = 3.0  # a process that trains may hold the interpreter for a while before it answers
_NONCE_BYTES = 16


class Presence:
    """That this process is there.

    Args:
        host: the name or address under which others reach this machine; it alone is listened on.
        secret: that all processes share.

    Attributes:
        name: the process's, unlike any other's: ``host:port/token``.

    Raises:
        PlacementError: if there is no secret and the address is not a loopback one.
    """

    def __init__(self, host: str, secret: bytes | None = None) -> None:
        check_exposure(host, secret)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._token, self._secret = secrets.token_hex(8), secret
        self.name = f"{host}:{self._listener.getsockname()[1]}/{self._token}"
        self._accepting = Thread(target=self._accept, name="elastic-presence", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                asker, _ = self._listener.accept()
            except OSError:  # `end` has closed it
                return
            # One that sends nothing must not keep the others waiting.
            Thread(target=self._answer, args=(asker,), name="elastic-answer", daemon=True).start()

    def _answer(self, asker: socket.socket) -> None:
        with asker, contextlib.suppress(OSError):  # who asked has gone
            nonce = _received(asker, _NONCE_BYTES)
            if len(nonce) == _NONCE_BYTES:
                asker.sendall(_answer_to(nonce, self._token, self._secret))

    def end(self) -> None:
        """Be there no more."""
        # A close alone would not wake the thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(ANSWER_S)


def is_present(name: str, secret: bytes | None = None) -> bool:
    """Whether the process of this name lives, and its machine can be reached."""
    address, _, token = name.partition("/")
    host, _, port = address.rpartition(":")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    expected = _answer_to(nonce, token, secret)
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as asked:
            asked.sendall(nonce)
            return _received(asked, len(expected)) == expected  # another process may have got the port since
    except OSError:
        return False


def _answer_to(nonce: bytes, token: str, secret: bytes | None) -> bytes:
    return sign(secret or b"", f"presence {token}", nonce)


def _received(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer where the other side has closed.

    Raises:
        TimeoutError: if they do not come within `ANSWER_S`, however many at a time.
    """
    data, deadline_s = b"", time.monotonic() + ANSWER_S
    while len(data) < nbytes:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        more = connection.recv(nbytes - len(data))
        if not more:
            break
        data += more
    return data
