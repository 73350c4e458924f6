"""A store that has never answered: the address is checked, and the error names the endpoint within a bound."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from typing import Any

import fsspec
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
SILENCE_S, SOON_S, CONNECT_S = 0.3, 0.2, 5.0  # the last is long enough for a busy machine to connect


# The most seconds that all waits of a request may ask for, for an answer and a connection. They are not measured,
# because a busy machine may take longer.
BOUND_S = SILENCE_S + 2 * SOON_S + 2 * CONNECT_S


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times that a test can wait for; returns the most seconds of each wait."""
    waited: list[float] = []

    def noted(futures: Any, timeout: float, *args: Any) -> Any:
        waited.append(timeout)
        return wait(futures, timeout, *args)

    monkeypatch.setattr(first_answer, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(first_answer, "CONNECT_S", CONNECT_S)
    monkeypatch.setattr(first_answer, "_SOON_S", SOON_S)
    monkeypatch.setattr(first_answer, "wait", noted)
    return waited


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


ADDRESSES: dict[str, Callable[[ExitStack, pytest.MonkeyPatch], str]] = {
    "refused": _refused,
    "unknown host": _unknown,
    "packets dropped": _dropping,
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


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("store", STORES)
def test_a_wrong_address_is_an_error_within_a_bound(
    store: str, address: str, short: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the endpoint and the URL, in every store alike. `NoAnswer`: no client has ended its retries before."""
    with ExitStack() as stack:
        endpoint = ADDRESSES[address](stack, monkeypatch)
        storage = STORES[store](endpoint)
        with pytest.raises(ConnectionError) as caught:
            storage.exists("manifest.json")
    assert 0 < sum(short) <= BOUND_S
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


def test_a_manager_and_a_load_find_a_wrong_address(
    short: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every request does, whatever makes it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint := _refused(ExitStack(), monkeypatch))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    for call in (CheckpointManager, lambda url: load(url, {})):
        S3FileSystem.clear_instance_cache()  # those of other tests, with their endpoint
        short.clear()
        with pytest.raises(ConnectionError) as caught:
            call("s3://nowhere/run")
        assert 0 < sum(short) <= BOUND_S
        assert endpoint in str(caught.value)
        assert isinstance(caught.value.__cause__, first_answer.NoAnswer)
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


class _FileSystem:
    """What `first_answer` needs of Google's file system, whose ``base`` is its endpoint."""

    def __init__(self, base: str) -> None:
        self.base = base


class _LateEndpoint:
    """A file system whose client is made after the first look at its endpoint, as on a busy machine."""

    def __init__(self, base: str) -> None:
        self._base = base

    @property
    def base(self) -> str:
        threading.Event().wait(3 * SILENCE_S)
        return self._base


class _LateCredentials:
    """A file system that does not know its endpoint while it asks for credentials."""

    @property
    def base(self) -> str:
        raise AttributeError("planted")


def _late(after_s: float = 3 * SILENCE_S) -> Callable[[], str]:
    """A request that is answered after the address has been checked."""

    def answer() -> str:
        threading.Event().wait(after_s)
        return "late"

    return answer


def _silent(closing: ExitStack) -> Callable[[], None]:
    """A request without an answer, until the test ends."""
    ended = threading.Event()
    closing.callback(ended.set)

    def wait() -> None:
        ended.wait(60)

    return wait


@pytest.mark.usefixtures("short")
def test_a_quick_answer_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is remembered for its bucket alone; "not found" is an answer, another error is none."""
    store = _FileSystem(_refused(ExitStack(), monkeypatch))
    asked: list[str] = []
    monkeypatch.setattr(first_answer, "_connect", asked.append)

    def raising(error: Exception) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    assert first_answer.first_answer(lambda: 3, store, "gs", "gs://one/run") == 3
    assert first_answer.has_answered(store, "gs://one/other")
    assert not first_answer.has_answered(store, "gs://two/run")
    assert not first_answer.has_answered(_FileSystem(store.base), "gs://one/run")
    for error, is_answer in ((FileNotFoundError("planted"), True), (PermissionError("planted"), False)):
        bucket = f"gs://{type(error).__name__}/run"
        with pytest.raises(type(error), match="planted"):
            first_answer.first_answer(raising(error), store, "gs", bucket)
        assert first_answer.has_answered(store, bucket) == is_answer
    assert asked == []


@pytest.mark.usefixtures("short")
def test_a_password_in_an_endpoint_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither user, password nor query."""
    place = _refused(ExitStack(), monkeypatch).removeprefix("http://")
    store = _FileSystem(f"http://user:planted-secret@{place}/a?sig=planted-secret")
    with ExitStack() as stack, pytest.raises(first_answer.NoAnswer) as caught:
        first_answer.first_answer(_silent(stack), store, "gs", "gs://bucket/run")
    assert f"http://{place}:" in str(caught.value) and "planted-secret" not in str(caught.value)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("bypassed", [False, True])
def test_behind_a_proxy_no_address_is_checked(monkeypatch: pytest.MonkeyPatch, bypassed: bool) -> None:
    """The proxy connects, so that the name may be unknown here; of hosts that bypass it, the address counts."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "store.invalid" if bypassed else "")
    store = _FileSystem(_unknown(ExitStack(), monkeypatch))
    if not bypassed:
        assert first_answer.first_answer(_late(), store, "gs", "gs://bucket/run") == "late"
        return
    with ExitStack() as stack, pytest.raises(first_answer.NoAnswer):
        first_answer.first_answer(_silent(stack), store, "gs", "gs://bucket/run")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_an_endpoint_without_a_port_has_its_schemes(
    monkeypatch: pytest.MonkeyPatch, scheme: str, port: int
) -> None:
    """The port that the client uses, too."""
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise ConnectionRefusedError("planted")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with ExitStack() as stack, pytest.raises(first_answer.NoAnswer):
        first_answer.first_answer(
            _silent(stack), _FileSystem(f"{scheme}://store.invalid"), "gs", "gs://bucket/run"
        )
    assert asked == [("store.invalid", port)]


@pytest.mark.usefixtures("short")
def test_a_client_that_still_asks_for_credentials_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Its endpoint is unknown: the warning names the URL, and no address is checked."""
    with caplog.at_level(logging.WARNING, first_answer.__name__):
        answer = first_answer.first_answer(_late(5 * SILENCE_S), _LateCredentials(), "gs", "gs://bucket/run")
    assert answer == "late"
    (record,) = caplog.records
    assert "gs://bucket/run" in record.getMessage()


@pytest.mark.usefixtures("short")
def test_an_endpoint_that_is_known_late_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wrong address is an error as that of any other: the client alone might try for minutes."""
    with ExitStack() as stack:
        store = _LateEndpoint(_refused(stack, monkeypatch))
        with pytest.raises(first_answer.NoAnswer):
            first_answer.first_answer(_silent(stack), store, "gs", "gs://bucket/run")


@pytest.mark.usefixtures("short")
def test_an_answer_during_the_check_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing else could connect: the client may know another way."""
    with ExitStack() as stack:
        store = _FileSystem(_dropping(stack, monkeypatch))
        assert first_answer.first_answer(_late(), store, "gs", "gs://bucket/run") == "late"


def test_no_exit_waits_for_a_request() -> None:
    """A process whose first request is never answered ends when its main thread does."""
    program = (
        "import time\n"
        "from vescale_fsdp.checkpoint.storage import first_answer\n"
        "first_answer._in_thread(lambda: time.sleep(600))\n"
    )
    run_command([sys.executable, "-c", program], timeout_s=60, check=True)


def test_missing_credentials_are_an_error_within_a_bound(
    short: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file system that waits for them while it is made. It names the variables that are missing."""
    monkeypatch.setattr(first_answer, "CREDENTIALS_S", SILENCE_S)
    monkeypatch.setattr(first_answer, "_with_credentials", set())
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _: None)  # gcsfs may not be installed
    with ExitStack() as stack:
        silent = _silent(stack)
        monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: silent())
        with pytest.raises(ConnectionError) as caught:
            RemoteStorage("gs://bucket/run")
    assert short == [SILENCE_S]
    assert isinstance(caught.value.__cause__, first_answer.NoAnswer)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(caught.value) and "gs://bucket/run" in str(caught.value)


def test_credentials_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per store whose file system asks while it is made; an error of its own is raised, and not remembered."""
    monkeypatch.setattr(first_answer, "_with_credentials", set())
    made: list[int] = []

    def fail() -> None:
        made.append(0)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        first_answer.credentials_answer(fail, "gs", "gs://bucket/run")
    for url in ("gs://bucket/run", "gs://bucket/other", "gs://second/run"):
        first_answer.credentials_answer(lambda: made.append(1), "gs", url)
    first_answer.credentials_answer(fail, "s3", "s3://bucket/run")  # is not made twice
    assert made == [0, 1, 1]


@pytest.mark.parametrize("given", [None, "AWS_ACCESS_KEY_ID"])
def test_amazons_missing_credentials_are_named(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every caller alike, at once; one key of two is as good as none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    if given is not None:
        monkeypatch.setenv(given, "any")
    S3FileSystem.clear_instance_cache()
    for explains in (False, True):
        with pytest.raises(ConnectionError) as caught:
            RemoteStorage("s3://bucket/run", explains=explains).exists("manifest.json")
        kind = "NoCredentialsError" if given is None else "PartialCredentialsError"
        assert type(caught.value.__cause__).__name__ == kind
        assert all(name in str(caught.value) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    S3FileSystem.clear_instance_cache()
