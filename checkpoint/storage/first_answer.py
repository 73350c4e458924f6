"""The first request to a store: a wrong address is reported within seconds, not after all retries.

Networks and stores recover, so clients of stores repeat lost requests, some of them for minutes. But if a store has
never answered this process, the address is probably wrong:

    after 3 s without an answer    a plain connection to the store's endpoint is opened
        refused, or no such host   ConnectionError
        made                       the request goes on as long as the client wants; a warning is logged
    after 10 s without either      ConnectionError; some seconds later if the client itself was made late

Google's file system asks for credentials when it is made: without a metadata server, its retries take 15 s, and with
one that accepts connections and does not answer, more than 40 s. `credentials_answer` bounds that.
"""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

_log = logging.getLogger(__name__)
T = TypeVar("T")
SILENCE_S = 3.0  # without an answer, before the connection is tried
CONNECT_S = 7.0
CREDENTIALS_S = 8.0
_SOON_S = 0.5  # a refused connection or an unknown host is known after this time, without a warning before the error
_PORTS = {"http": 80, "https": 443}
# Protocol -> the endpoint of a file system and URL. Other protocols' endpoints are unknown.
_ENDPOINTS: Mapping[str, Callable[[Any, str], str]] = {
    "s3": lambda filesystem, url: str(filesystem.s3.meta.endpoint_url),
    "gs": lambda filesystem, url: str(filesystem.base),
    "abfs": lambda filesystem, url: str(filesystem.service_client.url),
    "http": lambda filesystem, url: url,
}
_ASKING_WHEN_MADE = ("gs", "gcs")  # protocols whose file systems ask for credentials when they are made
_with_credentials: set[str] = set()  # stores whose file system was made
# File system -> hosts or buckets that have answered. fsspec makes one file system for equal options.
_answered: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class NoAnswer(ConnectionError):
    """A store has never answered, and its endpoint cannot be connected to."""


def has_answered(filesystem: Any, url: str) -> bool:
    """Return whether `first_answer` has returned an answer of this URL's host or bucket."""
    return urlsplit(url).netloc in _answered.get(filesystem, ())


def first_answer(work: Callable[[], T], filesystem: Any, protocol: str, url: str) -> T:
    """Make a small request, which checks the store's address while it waits.

    Args:
        work: the request, with retries.
        filesystem: the fsspec file system that ``work`` uses.
        protocol: fsspec's first name of the protocol.
        url: the URL of the store.

    Raises:
        NoAnswer: if the endpoint cannot be connected to.
        Exception: the error of ``work``.
    """
    answer = _in_thread(work)
    wait([answer], SILENCE_S)
    if not answer.done():
        _check_address(answer, filesystem, protocol, url)
    if isinstance(answer.exception(), FileNotFoundError | None):  # "not found" is an answer, too
        _answered.setdefault(filesystem, set()).add(urlsplit(url).netloc)
    return answer.result()


def credentials_answer(make: Callable[[], object], protocol: str, url: str) -> None:
    """Make a file system that asks for credentials while it is made, once per host or bucket.

    The result is dropped, because fsspec keeps file systems by thread: the caller makes its own, which does not wait.

    Args:
        make: makes the file system.
        protocol: the URL's protocol.
        url: the URL of the store.

    Raises:
        NoAnswer: if this takes more than `CREDENTIALS_S`.
        Exception: the error of ``make``.
    """
    store = f"{protocol}://{urlsplit(url).netloc}"
    if protocol not in _ASKING_WHEN_MADE or store in _with_credentials:
        return
    made = _in_thread(make)
    wait([made], CREDENTIALS_S)
    if not made.done():
        raise NoAnswer(f"no credentials within {CREDENTIALS_S:.0f} s, and no answer from a metadata server")
    made.result()
    _with_credentials.add(store)


def _check_address(answer: Future[Any], filesystem: Any, protocol: str, url: str) -> None:
    """Wait until there is an answer, or a connection to the endpoint.

    Raises:
        NoAnswer: if there is neither within `CONNECT_S` after the endpoint is known.
    """
    # In a thread, because a client that still asks for credentials answers late, or raises.
    looked_up = _in_thread(lambda: _without_secrets(_ENDPOINTS[protocol](filesystem, url)))
    wait([looked_up], _SOON_S)
    connection = _in_thread(lambda: _connect(looked_up.result()))
    wait([answer, connection], _SOON_S, FIRST_COMPLETED)
    is_known = looked_up.done() and not looked_up.exception()
    if not answer.done() and not (is_known and connection.done() and connection.exception()):
        at = f" at {looked_up.result()}" if is_known else ""
        _log.warning("%s: the store%s has not answered for %.0f s; still trying", url, at, SILENCE_S)
        # On a busy machine, a client may be made only now: its endpoint is still checked.
        wait([answer, looked_up], CONNECT_S, FIRST_COMPLETED)
        wait([answer, connection], CONNECT_S - _SOON_S, FIRST_COMPLETED)
    if answer.done() or not looked_up.done() or looked_up.exception():
        return
    endpoint = looked_up.result()
    if not connection.done():
        raise NoAnswer(f"no connection to {endpoint} within {SILENCE_S + CONNECT_S:.0f} s")
    if isinstance(error := connection.exception(), OSError):
        raise NoAnswer(f"no connection to {endpoint}: {error.strerror or error}") from error


def _without_secrets(url: str) -> str:
    """Return scheme, host and port of a URL, without a password or a token."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _connect(endpoint: str) -> None:
    """Open and close a connection; do nothing for an unknown endpoint, or one behind a proxy.

    Raises:
        OSError: if there is no connection.
    """
    parts = urlsplit(endpoint)
    host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    has_proxy = parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host or "")
    if host and not has_proxy:
        socket.create_connection((host, port), timeout=CONNECT_S).close()


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Start ``work`` in a thread that no exit of the process waits for, unlike the threads of a pool."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised by the thread that asks for the result
            future.set_exception(error)

    Thread(target=run, daemon=True, name="checkpoint-first-request").start()
    return future
