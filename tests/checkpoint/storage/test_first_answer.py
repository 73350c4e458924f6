"""A store that has never answered: the address is checked, and the error names the endpoint within a bound."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.support.processes import run_command
from tests.support.s3_server import Weather, s3_server
from vescale_fsdp.checkpoint import CheckpointManager, load
from vescale_fsdp.checkpoint.storage import first_answer
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage

# botocore still asks for naive UTC times, moto parses with deprecated calls.
pytestmark = [
    pytest.mark.part("faults"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
SILENCE_S, CONNECT_S, SPARE_S = 0.3, 1.0, 5.0  # spare: a busy machine


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that a test can wait for."""
    monkeypatch.setattr(first_answer, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(first_answer, "CONNECT_S", CONNECT_S)
    monkeypatch.setattr(first_answer, "_SOON_S", 0.2)


def _refused(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def _unknown(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> str:
    resolve = socket.getaddrinfo

    def fail(host: Any, *args: Any, **kwargs: Any) -> Any:  # a real resolver may take long
        if host in ("store.invalid", b"store.invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "planted")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    return "http://store.invalid:9000"


def _dropping(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server that accepts nothing, with a full queue: Linux drops all further packets."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(3):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(server.getsockname())
    return f"http://127.0.0.1:{server.getsockname()[1]}"


ADDRESSES: dict[str, tuple[Callable[[ExitStack, pytest.MonkeyPatch], str], float]] = {
    "refused": (_refused, SILENCE_S),
    "unknown host": (_unknown, SILENCE_S),
    "packets dropped": (_dropping, SILENCE_S + CONNECT_S),
}


def _gcs(endpoint: str) -> RemoteStorage:
    pytest.importorskip("gcsfs")
    return RemoteStorage("gs://bucket/run", token="anon", endpoint_url=endpoint)


def _azure(endpoint: str) -> RemoteStorage:
    pytest.importorskip("adlfs")
    key = "AccountName=account;AccountKey=a2V5"
    text = f"DefaultEndpointsProtocol=http;{key};BlobEndpoint={endpoint}/account;"
    return RemoteStorage("az://container/run", connection_string=text)


STORES: dict[str, Callable[[str], RemoteStorage]] = {
    "s3": lambda endpoint: RemoteStorage("s3://bucket/run", endpoint_url=endpoint, key="any", secret="any"),
    "http": lambda endpoint: RemoteStorage(f"{endpoint}/run"),
    "gs": _gcs,
    "az": _azure,
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("store", STORES)
def test_a_wrong_address_is_an_error_within_a_bound(
    store: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the endpoint and the URL, in every store alike."""
    make, bound_s = ADDRESSES[address]
    with ExitStack() as stack:
        endpoint = make(stack, monkeypatch)
        storage = STORES[store](endpoint)
        started_s = time.monotonic()
        with pytest.raises(ConnectionError) as caught:
            storage.exists("manifest.json")
        assert time.monotonic() - started_s < bound_s + SPARE_S
    assert endpoint in str(caught.value) and storage.where in str(caught.value)
    assert isinstance(caught.value.__cause__, first_answer.NoAnswer)


@pytest.fixture
def slow() -> Iterator[tuple[str, Weather]]:
    """A store that accepts connections, and answers late."""
    weather = Weather()
    with s3_server(weather) as endpoint:
        weather.pause_s = 3 * SILENCE_S
        yield endpoint, weather


@pytest.mark.usefixtures("short")
def test_a_slow_store_is_waited_for(slow: tuple[str, Weather], caplog: pytest.LogCaptureFixture) -> None:
    """However long: it is not a wrong address. One warning at the first request, none later."""
    endpoint, _ = slow
    storage = STORES["s3"](endpoint)
    with caplog.at_level(logging.WARNING, first_answer.__name__):
        assert not storage.exists("a") and not storage.exists("b")
    (record,) = caplog.records
    assert endpoint in record.getMessage() and storage.where in record.getMessage()


@pytest.mark.usefixtures("short")
def test_a_store_that_has_answered_has_the_right_address(slow: tuple[str, Weather]) -> None:
    """After its first answer, silence is bad weather: requests are repeated as often as ever."""
    endpoint, weather = slow
    weather.pause_s = 0.0
    storage = STORES["s3"](endpoint)
    assert not storage.exists("a")
    weather.calm_down()
    weather.drop_next = 3  # the client waits longer than `SILENCE_S` before its last try
    assert not storage.exists("a")
    assert weather.drop_next == 0


@pytest.mark.usefixtures("short")
def test_a_manager_and_a_load_find_a_wrong_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every request does, whatever makes it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint := _refused(ExitStack(), monkeypatch))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    for call in (CheckpointManager, lambda url: load(url, {})):
        S3FileSystem.clear_instance_cache()  # those of other tests, with their endpoint
        started_s = time.monotonic()
        with pytest.raises(ConnectionError) as caught:
            call("s3://nowhere/run")
        assert time.monotonic() - started_s < SILENCE_S + SPARE_S
        assert endpoint in str(caught.value)
    S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("options", [(), ("-q",)])
def test_the_command_says_what_it_waits_for(options: tuple[str, ...], slow: tuple[str, Weather]) -> None:
    """On stderr, unless it is to be quiet; the error of a wrong address names the endpoint either way."""
    endpoint, weather = slow
    weather.calm_down()

    def only_the_first_is_late(method: str, path: str) -> bool:
        weather.pause_s = 0.0 if weather.requests[1:] else first_answer.SILENCE_S + 1
        return False

    weather.refuse_if = only_the_first_is_late
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_EC2_METADATA_DISABLED": "true"}
    command = [sys.executable, "-m", "vescale_fsdp.conversion", "verify", "s3://bucket/run", *options]
    done = run_command(command, env={"AWS_ENDPOINT_URL": endpoint, **keys}, check=False)
    assert done.returncode == 1
    assert (endpoint in done.stderr) == (not options)
