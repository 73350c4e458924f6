"""torch stores that processes of different jobs can trust: signed entries, calls with a time limit, addresses.

torch's store has no authentication: any process that reaches the store's port can read and write every key. Entries
that processes act upon are therefore signed with a shared secret. Without a secret, processes listen on loopback only.

If the process that hosts a store has ended, calls fail at once, because the kernel has closed the connections. If the
process is stopped, or its machine is down, torch's clients (2.11 to 2.15) wait forever, because their time-outs do not
cover reads. Each call therefore runs in its own thread, with a time limit.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from vescale_fsdp.errors import LifecycleError, PlacementError

SECRET = "VESCALE_FSDP_SECRET"  # name of the environment variable
_DIGEST = "sha256"
_MAC_BYTES = 64  # length of a SHA-256 digest in hexadecimal
_SIOCGIFADDR = 0x8915  # Linux ioctl, absent from Python's modules: get the IPv4 address of an interface
_POLL_S = 0.02  # between two checks for missing keys
_MAX_FILES = 65_536
_MOST_READ = 64  # ranks whose reports are read for an error
T = TypeVar("T")


def secret_of(secret: str | None) -> bytes | None:
    """Return the given secret, else that of the environment variable VESCALE_FSDP_SECRET, else None."""
    text = os.environ.get(SECRET) if secret is None else secret
    return text.encode() if text else None  # an empty secret would protect nothing


def check_exposure(address: str, secret: bytes | None) -> None:
    """Check that a process without a secret listens on this machine only.

    Raises:
        PlacementError: if there is no secret, and the address, or any address that the host name resolves to, is not a
            loopback address.
    """
    if secret is None and not _is_loopback(address):
        raise PlacementError(
            "Without a secret, processes listen on this machine only.",
            expected="a loopback address, or a secret that all processes share",
            got=address,
            todo=f"set {SECRET} in the environment of every process, or pass secret=...",
        )


def _is_loopback(address: str) -> bool:
    # partition: an IPv6 address may end with "%" and the name of an interface.
    addresses = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(address, None)}
    return all(ipaddress.ip_address(each).is_loopback for each in addresses)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; any loopback address gives the loopback one.

    Raises:
        PlacementError: if no interface has the address.
    """
    names = [name for _, name in socket.if_nameindex()]
    wanted = socket.gethostbyname(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name in names:
            try:
                # 15: the longest name of an interface in Linux.
                request = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            # The IPv4 address in the returned ifreq follows 16 bytes of name, 2 of family and 2 of port.
            own = ipaddress.ip_address(request[20:24])
            # Every address in 127.0.0.0/8 works on the loopback interface, which lists only one of them.
            if str(own) == wanted or (own.is_loopback and ipaddress.ip_address(wanted).is_loopback):
                return name
    raise PlacementError(
        "No network interface of this machine has this address.",
        expected=f"an IPv4 address of one of {names}",
        got=address,
        todo="pass interface=...",
    )


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        OSError: if there is no such interface, or the interface has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return str(ipaddress.ip_address(request[20:24]))  # after 16 bytes of name, 2 of family, 2 of port


def local_address(host: str, port: int) -> str:
    """Return the address of this machine that it uses on the route to another host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(address)  # chooses the route; on a datagram socket, this sends nothing
        return str(asking.getsockname()[0])


def bound_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Create a store that listens on this address only; by default, torch's listen on all. Port 0: any free port.

    Raises this process's limit of open files to 65,536, or as far as it may. With the usual limit of 1,024, so many
    connections of strangers, which the store keeps open while they send nothing, shut ranks out.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Many processes may connect at once.
    listener = socket.create_server(address[:2], family=family, backlog=2048)
    number = listener.getsockname()[1]
    # `detach`, because the store takes over the socket and closes it.
    return dist.TCPStore(
        host,
        number,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def sign(secret: bytes, name: str, value: bytes) -> bytes:
    """Return an HMAC of name and value, followed by the value."""
    # The zero byte separates name and value: without it, other names and values could give the same bytes. The name is
    # included so that an entry cannot be copied to another key.
    return hmac.new(secret, name.encode() + b"\0" + value, _DIGEST).hexdigest().encode() + value


def unsign(secret: bytes, name: str, signed: bytes) -> bytes:
    """Return the value of a message from `sign`.

    Raises:
        PlacementError: if the value was not signed for this name with this secret.
    """
    value = signed[_MAC_BYTES:]
    # Not `==`: the time of its comparison would reveal how much of a forged signature is right.
    if not hmac.compare_digest(sign(secret, name, value), signed):
        raise PlacementError(
            "A message is not signed with this job's secret.",
            expected="messages of processes with the same secret",
            got=f"{len(signed)} bytes without a valid signature",
            where=name,
            todo=f"set the same {SECRET} in all processes; if it is set, another program writes to this store or port",
        )
    return value


def within(timeout_s: float, call: Callable[[], T], what: str) -> T:
    """Run a call in its own thread, and return its result or raise its error. A late call keeps running there.

    Args:
        what: description of the call, for the error.

    Raises:
        LifecycleError: if the call does not end in time.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised by the waiting thread
            future.set_exception(error)

    # A daemon thread, because a call that never ends must not keep the process from exiting.
    Thread(target=run, name="bounded-call", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # the call itself has raised a TimeoutError
            raise
        raise LifecycleError(
            "A store does not answer.",
            expected=f"an answer within {timeout_s:g} s",
            got="none: its process is stalled, or its machine is gone",
            where=what,
            todo="check the process that hosts the store; restart it and this job",
        ) from None


def silent_ranks(store: dist.Store, rank: int, world_size: int, wait_s: float) -> list[int]:
    """Report in a group's store that a collective failed on this rank; return the ranks that do not report it in time.

    Args:
        wait_s: how long to wait for reports. Only those of the first 64 ranks are read, to limit the load on the store.
    """
    keys = {each: f"vescale_fsdp failed on {each}" for each in range(min(world_size, _MOST_READ))}
    store.check(
        [keys[0]]
    )  # first: the store of an elastic epoch raises at once if a member is known to be lost
    store.set(f"vescale_fsdp failed on {rank}", "")
    deadline_s = time.monotonic() + wait_s
    while True:
        silent = [each for each, key in keys.items() if not store.check([key])]
        if not silent or time.monotonic() > deadline_s:
            return silent
        time.sleep(_POLL_S)


class _StoreProxy(dist.Store):
    """A store that forwards calls to another store through `_call`."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def _call(self, call: Callable[[], T], what: str) -> T:
        return call()

    def set(self, key: str, value: Any) -> None:
        self._call(lambda: self._store.set(key, value), f"set {key}")

    def get(self, key: str) -> bytes:
        return self._call(lambda: self._store.get(key), f"get {key}")

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._call(lambda: self._store.compare_set(key, expected, desired), f"compare_set {key}")

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._store.add(key, amount), f"add {key}")

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: self._store.check(keys), f"check {keys[:4]}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._call(lambda: self._store.delete_key(key), f"delete_key {key}")

    deleteKey = delete_key  # the name that torch calls

    def num_keys(self) -> int:
        return self._call(self._store.num_keys, "num_keys")

    def has_extended_api(self) -> bool:
        return False  # this class does not forward `append`, `multi_get` and `multi_set`


class SignedStore(_StoreProxy):
    """A store with signed entries. Counters are not signed: the store itself computes ``add``, which barriers use.

    Args:
        store: the store that contains the signed entries.
        secret: the secret that all processes of the store share.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        super().__init__(store)
        self._secret = secret

    def set(self, key: str, value: Any) -> None:
        super().set(key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        return unsign(self._secret, key, super().get(key))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        # "" matches a missing entry, which has no signature.
        before = self._signed(key, expected) if expected else ""
        return unsign(self._secret, key, super().compare_set(key, before, self._signed(key, desired)))

    def _signed(self, key: str, value: str | bytes) -> Any:  # torch's stub says str, but bytes are accepted
        return sign(self._secret, key, value.encode() if isinstance(value, str) else bytes(value))


class BoundedStore(_StoreProxy):
    """A store with a time limit for every call.

    Args:
        timeout_s: time limit of each call, and default time limit of `wait`.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        super().__init__(store)
        self._timeout_s = timeout_s

    def _call(self, call: Callable[[], T], what: str) -> T:
        try:
            return within(self._timeout_s, call, what)
        except dist.DistNetworkError as lost:
            raise LifecycleError(
                "The processes' common store was lost.",
                expected="the process that hosts the store to outlive all processes that use the store",
                got=f"{type(lost).__name__}: {lost}",
                where=what,
                todo="find out why the hosting process has ended; start that process and this job again",
            ) from lost

    def get(self, key: str) -> bytes:
        self.wait([key])  # first: torch's `get` waits for a missing key without a time limit
        return super().get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: if a key does not exist in time.
            LifecycleError: if the store does not answer.
        """
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        while not self.check(keys):
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"{keys[:4]} were not set within {timeout_s:g} s")
            time.sleep(_POLL_S)
