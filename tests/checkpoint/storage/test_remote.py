"""Checkpoints on object stores: a real S3 protocol server on loopback, and memory://."""

from __future__ import annotations

import errno
import http.client
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import aiohttp
import pytest
import torch
import torch.distributed as dist
import urllib3
from botocore import exceptions as botocore_errors
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem

from tests.support.checkpoint_states import assert_equal, erase, mixed_state, plain
from tests.support.distributed import run_ranks
from tests.support.s3_server import Weather, s3_server
from vescale_fsdp.checkpoint import CheckpointManager, load, read_state, save, verify
from vescale_fsdp.checkpoint.storage import remote
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.formats.detect import last_steps
from vescale_fsdp.conversion.report.describe import describe_run
from vescale_fsdp.errors import (
    CheckpointError,
    ConversionError,
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
)

# botocore still asks for naive UTC times, moto parses with deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Weather]]:
    """An S3 server on loopback with a bucket, and its weather."""
    weather = Weather()
    with s3_server(weather) as endpoint:
        yield endpoint, weather


@pytest.fixture
def calm(server: tuple[str, Weather]) -> Iterator[tuple[str, Weather]]:
    """The server in fine weather, before and after."""
    server[1].calm_down()
    yield server
    server[1].calm_down()


def _storage(endpoint: str, name: str, *, patient: bool = True) -> RemoteStorage:
    """A prefix of the server's bucket; without patience, requests are sent once."""
    options: dict[str, Any] = {"client_kwargs": {"region_name": "us-east-1"}, "key": "any", "secret": "any"}
    if not patient:
        options["config_kwargs"] = {"retries": {"max_attempts": 0}}
    storage = RemoteStorage(
        f"s3://bucket/{name}", tries=3 if patient else 1, endpoint_url=endpoint, **options
    )
    if not patient:
        storage.filesystem.retries = 1
    return storage


def _state(value: float, rows: int = 300) -> dict[str, Any]:
    return {"w": torch.full((rows, 1000), value), "b": torch.arange(7) + int(value), "step": int(value)}


@pytest.mark.part("formats")
def test_a_store_that_cannot_be_reached_is_no_damage(calm: tuple[str, Weather]) -> None:
    """Refusals that outlast all tries end a restore, whichever request meets them; no older step is taken for it."""
    endpoint, weather = calm
    for step in (1, 2):
        CheckpointManager(_storage(endpoint, "outage")).save(step, _state(step))
    impatient = CheckpointManager(_storage(endpoint, "outage", patient=False))
    for part in (
        "/bucket/outage/step-00000002/manifest.json",
        "/bucket/outage/step-00000002/data-",
        "/bucket",
    ):
        weather.refuse_if = lambda method, path, part=part: (
            method == "GET"
            and (  # type: ignore[misc]
                path.startswith(part) if part != "/bucket" else path == part
            )
        )
        state = _state(0)
        with pytest.raises(OSError, match=r"\b1 tries\b"):
            impatient.restore(state)
        assert state["step"] == 0 and not state["w"].any()
    weather.calm_down()
    restored = impatient.restore(state)
    assert restored is not None and restored.step == 2 and torch.equal(_state(2)["w"], state["w"])


def test_an_answer_cut_short_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few bytes of an object that is large enough are no damage: they are asked for again, then an error."""
    storage = RemoteStorage("memory://short", tries=3)
    save(storage, _state(5))
    whole = MemoryFileSystem.cat_file
    cut: list[bool] = []

    def cat_file(self: MemoryFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        cut.append(len(cut) % 3 != 2 or always)
        return bytes(whole(self, path, *args, **kwargs)[: -1 if cut[-1] else None])

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between tries
    always = False
    state = _state(0)
    load(storage, state)
    assert torch.equal(_state(5)["w"], state["w"]) and sum(cut) >= 6
    always = True
    with pytest.raises(ConnectionError, match=r"\b3 tries: OSError\b"):
        load(storage, state)


@pytest.mark.part("faults")
def test_a_store_that_removes_nothing(calm: tuple[str, Weather]) -> None:
    """A policy without DeleteObject: saves go on, each with a warning; old steps stay as they are."""
    endpoint, weather = calm
    manager = CheckpointManager(_storage(endpoint, "policy", patient=False), retention=1)
    manager.save(1, _state(1))
    weather.refuse_if = lambda method, path: method == "DELETE" or (method == "POST" and path == "/bucket")
    with pytest.warns(UserWarning, match=r"s3://bucket/policy\b.*\bstep-00000001\b"):
        manager.save(2, _state(2))
    weather.calm_down()
    assert manager.steps() == [1, 2]
    assert all(verify(_storage(endpoint, f"policy/step-0000000{step}")).ok for step in (1, 2))
    manager.save(3, _state(3))
    assert manager.steps() == [3]


def _round(endpoint: str, name: str, saving: bool) -> int:
    storage = _storage(endpoint, name)
    state = mixed_state(2 if saving else 1)
    if saving:
        save(storage, state)
        return 0
    expected = plain(state)
    erase(state)
    load(storage, state)
    dist.barrier()
    return assert_equal(expected, plain(state))


def test_ranks_save_to_s3_and_others_load(calm: tuple[str, Weather]) -> None:
    """Saved by two ranks to an S3 server, loaded by three; verify reads all of it."""
    endpoint, _ = calm
    run_ranks(2, _round, endpoint, "ranks", True)

    assert min(run_ranks(3, _round, endpoint, "ranks", False)) > 20_000
    report = verify(_storage(endpoint, "ranks"))
    assert report.ok and report.num_checksums == 2  # one stripe of each of two files


def test_large_files_go_up_in_parts_and_come_down_in_ranges(calm: tuple[str, Weather]) -> None:
    """A file above the part size is a multipart upload; reading one tensor asks for ranges, not the file."""
    endpoint, weather = calm
    state = {"big": torch.arange(6 << 20, dtype=torch.int64), "small": torch.arange(1000)}
    save(_storage(endpoint, "parts"), state)
    uploads = [path for method, path, _ in weather.requests if method == "PUT" and "data-" in path]
    weather.requests.clear()

    found = read_state(_storage(endpoint, "parts"))["small"].read()

    assert len(uploads) >= 3
    assert torch.equal(state["small"], found)
    ranges = [text for method, path, text in weather.requests if method == "GET" and "data-" in path]
    sizes = [int(text.split("-")[1]) - int(text.split("-")[0].removeprefix("bytes=")) for text in ranges]
    assert ranges and sum(sizes) < 10 << 20
    again = {"big": torch.zeros(6 << 20, dtype=torch.int64), "small": torch.zeros(1000, dtype=torch.int64)}
    load(_storage(endpoint, "parts"), again)
    assert torch.equal(state["big"], again["big"])


@pytest.mark.part("formats")
def test_refused_requests_are_retried(calm: tuple[str, Weather]) -> None:
    """Saving and loading survive a burst of 503 answers."""
    endpoint, weather = calm
    weather.refuse_next = 3
    save(_storage(endpoint, "burst"), _state(1.0))
    weather.refuse_next = 3
    state = _state(0.0)
    load(_storage(endpoint, "burst"), state)

    assert torch.equal(_state(1.0)["w"], state["w"])
    assert weather.refuse_next == 0


def test_slow_answers_are_waited_for(calm: tuple[str, Weather]) -> None:
    """A store that takes its time still gets everything."""
    endpoint, weather = calm
    weather.pause_s = 0.05
    save(_storage(endpoint, "slow"), _state(1.0))
    state = _state(0.0)
    load(_storage(endpoint, "slow"), state)

    assert torch.equal(_state(1.0)["w"], state["w"])


def test_a_failed_upload_never_commits(calm: tuple[str, Weather]) -> None:
    """If data cannot be uploaded there is no manifest, and the older checkpoint stays good."""
    endpoint, weather = calm
    save(_storage(endpoint, "failed"), _state(1.0))
    weather.refuse_if = lambda method, path: method in ("PUT", "POST") and "data-" in path
    with pytest.raises((OSError, CheckpointError)):
        save(_storage(endpoint, "failed", patient=False), _state(2.0), overwrite=True)
    with pytest.raises((OSError, CheckpointError)):
        save(_storage(endpoint, "failed2", patient=False), _state(2.0))
    weather.refuse_if = lambda method, path: False

    assert torch.equal(_state(1.0)["w"], read_state(_storage(endpoint, "failed"))["w"].read())
    with pytest.raises(NoCheckpointError):
        read_state(_storage(endpoint, "failed2"))


def test_a_failed_commit_is_no_checkpoint(calm: tuple[str, Weather]) -> None:
    """If only the manifest cannot be put, the path holds nothing."""
    endpoint, weather = calm
    weather.refuse_if = lambda method, path: method == "PUT" and path.endswith("manifest.json")
    with pytest.raises((OSError, CheckpointError)):
        save(_storage(endpoint, "uncommitted", patient=False), _state(2.0))
    weather.refuse_if = lambda method, path: False

    with pytest.raises(NoCheckpointError):
        read_state(_storage(endpoint, "uncommitted"))


def test_two_jobs_one_prefix(calm: tuple[str, Weather]) -> None:
    """The second job to commit is refused by the store itself, even if both began on an empty prefix."""
    endpoint, _ = calm
    storage = _storage(endpoint, "two")
    late = _storage(endpoint, "two")
    late.exists = lambda name: False  # type: ignore[method-assign]  # it looked before the other committed
    save(storage, _state(1.0))

    with pytest.raises(CheckpointError, check=lambda error: error.where == storage.where):
        save(late, _state(2.0))
    assert torch.equal(_state(1.0)["w"], read_state(storage)["w"].read())


def test_damage_on_the_store_is_found(calm: tuple[str, Weather]) -> None:
    """A flipped bit and a missing object are found on S3 as on disk."""
    endpoint, _ = calm
    storage = _storage(endpoint, "damaged")
    save(storage, _state(1.0))
    (folder,) = [name for name in storage.list_folder("") if name.startswith("data-")]
    path = f"bucket/damaged/{folder}/00000-of-00001.safetensors"
    data = bytearray(storage.filesystem.cat_file(path))
    data[len(data) // 2] ^= 1
    storage.filesystem.pipe_file(path, bytes(data))
    state = _state(0.0)
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == f"s3://{path}"):
        load(storage, state)
    assert torch.equal(_state(0.0)["w"], state["w"])
    storage.filesystem.rm(path)
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == f"s3://{path}"):
        load(storage, state)


def test_a_manager_on_s3(calm: tuple[str, Weather]) -> None:
    """Steps, retention and fallback work without a file system."""
    endpoint, _ = calm
    manager = CheckpointManager(_storage(endpoint, "run"), retention=2, asynchronous=True)
    for step in range(4):
        manager.save(step, _state(step))
    manager.wait()
    assert manager.steps() == [2, 3]
    storage = _storage(endpoint, "run/step-00000003")
    storage.remove(next(name for name in storage.list_folder("") if name.startswith("data-")))
    state = _state(0)

    with pytest.warns(UserWarning, match="step 3"):
        restored = manager.restore(state)

    assert restored is not None and restored.step == 2
    assert torch.equal(_state(2)["w"], state["w"])


def test_memory_urls() -> None:
    """Any fsspec URL will do."""
    save("memory://here/c", _state(3.0))
    state = _state(0.0)
    load("memory://here/c", state)

    assert torch.equal(_state(3.0)["w"], state["w"]) and verify("memory://here/c").ok
    with pytest.raises(CheckpointError, check=lambda error: error.got == "manifest.json"):
        save("memory://here/c", _state(4.0))


@pytest.mark.parametrize("scheme", ["gs", "az", "abfs"])
def test_other_stores_go_the_same_way(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gs:// and az:// URLs find whatever fsspec has for them. (A store in memory stands in: no such server here.)

    A bucket that does not exist is refused when the manager is made.
    """

    class Standin(MemoryFileSystem):
        protocol = scheme
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix(f"{scheme}://"))  # type: ignore[no-any-return]

    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, scheme, Standin)
    url = f"{scheme}://bucket/run"
    with pytest.raises(StorageError) as refused:
        CheckpointManager(url)
    # The error of fsspec says no more, and its traceback would hide this one.
    assert refused.value.__cause__ is None and refused.value.__suppress_context__
    Standin().mkdir("bucket")
    manager = CheckpointManager(url, retention=2)
    for step in (1, 2, 3):
        manager.save(step, _state(step))
    state = _state(0)

    restored = manager.restore(state)

    assert restored is not None and restored.step == 3 and torch.equal(_state(3)["w"], state["w"])
    assert manager.steps() == [2, 3] and verify(f"{url}/step-00000003").ok
    assert sum("manifest.json" in name for name in Standin.store) == 2
    assert all("bucket/run/step-" in name for name in Standin.store)


def test_readers_and_managers_name_a_missing_bucket_alike(
    calm: tuple[str, Weather], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty prefix of a bucket that exists is another problem, which each caller names as before."""
    calls: dict[str, Callable[[str], Any]] = {
        "ls": describe_run,
        "inspect": open_source,
        "a step": lambda url: open_source(url, step=3),
        "the last steps": lambda url: last_steps(url, 2),
        "load": lambda url: load(url, _state(0)),
        "read_state": read_state,
        "manager": CheckpointManager,
    }
    monkeypatch.setenv("AWS_ENDPOINT_URL", calm[0])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    S3FileSystem.clear_instance_cache()  # those of other tests, with their endpoint
    for name, call in calls.items():
        for path in ("run", "a/run"):
            with pytest.raises(StorageError) as missing:
                call(f"s3://nowhere/{path}")
            assert missing.value.problem == "The bucket does not exist.", name
            assert missing.value.got == "no bucket 'nowhere'" and missing.value.todo
        if name == "manager":
            call("s3://bucket/empty/run")
            continue
        with pytest.raises((NoCheckpointError, ConversionError)) as empty:
            call("s3://bucket/empty/run")
        assert "bucket" not in empty.value.problem
    S3FileSystem.clear_instance_cache()


_DROPPED: dict[str, Callable[[], Exception]] = {
    "closed": lambda: botocore_errors.ConnectionClosedError(endpoint_url="http://s3"),
    "unreachable": lambda: botocore_errors.EndpointConnectionError(endpoint_url="http://s3", error="refused"),
    "read time-out": lambda: botocore_errors.ReadTimeoutError(endpoint_url="http://s3"),
    "connect time-out": lambda: botocore_errors.ConnectTimeoutError(endpoint_url="http://s3"),
    "proxy": lambda: botocore_errors.ProxyConnectionError(proxy_url="http://proxy"),
    "tls": lambda: botocore_errors.SSLError(endpoint_url="http://s3", error="eof"),
    "stream": lambda: botocore_errors.ResponseStreamingError(error="cut off"),
    "short read": lambda: botocore_errors.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    "short answer": lambda: http.client.IncompleteRead(b"", 5),
    "bad answer": lambda: http.client.BadStatusLine("?"),
    "payload": lambda: aiohttp.ClientPayloadError("cut off"),
    "disconnected": lambda: aiohttp.ServerDisconnectedError(),
    "urllib3": lambda: urllib3.exceptions.ProtocolError("broken"),
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "reset by peer"),
    "time-out": lambda: TimeoutError("too slow"),
    "slow down": lambda: OSError(errno.EIO, "Please reduce your request rate."),
    "untranslated": lambda: botocore_errors.ClientError({"Error": {"Code": "SlowDown"}}, "PutObject"),
}
_LASTING: dict[str, Callable[[], BaseException]] = {
    "missing": lambda: FileNotFoundError("key"),
    "exists": lambda: FileExistsError("key"),
    "forbidden": lambda: PermissionError("key"),
    "credentials": lambda: botocore_errors.NoCredentialsError(),
    "no such bucket": lambda: botocore_errors.ClientError({"Error": {"Code": "NoSuchBucket"}}, "PutObject"),
    "memory": lambda: MemoryError("none"),
    "ours": lambda: ValueError("bad"),
    "ctrl-c": lambda: KeyboardInterrupt("now"),
}


class _Flaky:
    """A file system whose every call fails a number of times first."""

    def __init__(self, inner: Any, failures: int, error: Callable[[], BaseException]) -> None:
        self._inner, self._failures, self._error = inner, failures, error
        self.protocol = inner.protocol
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "invalidate_cache":
                self.calls.append(name)
                if self.calls.count(name) <= self._failures:
                    raise self._error()
            return getattr(self._inner, name)(*args, **kwargs)

        return call


def _flaky(failures: int, error: Callable[[], BaseException], tries: int = 3) -> RemoteStorage:
    storage = RemoteStorage("memory://flaky/run", tries=tries)
    storage.filesystem.store.clear()
    storage.filesystem.pipe_file("/flaky/run/small", b"12345")
    storage.filesystem = _Flaky(storage.filesystem, failures, error)
    return storage


def _read(storage: RemoteStorage) -> bytes:
    reader = storage.open_file("small")
    data = bytearray(5)
    reader.read_at(0, [data])
    return bytes(data)


_CALLS: dict[str, Callable[[RemoteStorage], Any]] = {
    "read_small": lambda storage: storage.read_small("small", limit_bytes=10),
    "read": _read,
    "list": lambda storage: storage.list_folder(""),
    "exists": lambda storage: storage.exists("small"),
    "commit": lambda storage: storage.commit("other", b"1", replace=True),
    "remove": lambda storage: storage.remove("small"),
    "write": lambda storage: storage.put("new", [b"123"]),
}


@pytest.mark.parametrize("call", _CALLS)
def test_what_may_pass_is_tried_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of lost connection, in reads, lists, writes and deletes: tried again, in the end a ConnectionError."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    wanted = _CALLS[call](_flaky(0, KeyError))
    for error in _DROPPED.values():
        assert _CALLS[call](_flaky(2, error)) == wanted
        assert pauses and pauses[-1] > pauses[-2]
        with pytest.raises(ConnectionError, match=r"\b3 tries\b") as caught:
            _CALLS[call](_flaky(3, error))
        assert type(caught.value.__cause__) is type(error())


def test_patience_ends_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose client has tried for so long itself is not asked again; with the usual patience it is."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for patience_s, tries in ((remote._PATIENCE_S, 3), (0.0, 1)):
        monkeypatch.setattr(remote, "_PATIENCE_S", patience_s)
        storage = _flaky(3, _DROPPED["reset"])
        with pytest.raises(ConnectionError, match=rf"\b{tries} tries\b"):
            _read(storage)
        assert len(storage.filesystem.calls) == tries


@pytest.mark.parametrize("call", _CALLS)
def test_what_lasts_is_not_tried_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals, mistakes and Ctrl-C come through at once, as they are; missing credentials are explained."""
    monkeypatch.setattr(time, "sleep", None)
    for kind, error in _LASTING.items():
        if kind == "missing" and call in ("list", "remove", "exists"):
            continue  # means an empty folder, nothing to remove, and no
        storage = _flaky(1, error)
        with pytest.raises(ConnectionError if kind == "credentials" else type(error())):
            _CALLS[call](storage)
        assert len(storage.filesystem.calls) == 1


@pytest.mark.part("faults")
def test_requests_of_dropped_connections_are_sent_again(calm: tuple[str, Weather]) -> None:
    """Requests whose connection the server closes are sent again, whatever they are."""
    endpoint, weather = calm
    state = _state(0.0)
    forms = ("native", "zarr")
    for step, form in enumerate(forms):
        storage = _storage(endpoint, f"dropped/step-{step:08d}")
        weather.drop_next = 3
        save(storage, _state(float(step)), format=form)
        assert weather.drop_next == 0
        weather.drop_next = 3
        load(storage, state)
        assert weather.drop_next == 0 and torch.equal(_state(float(step))["w"], state["w"])


def test_a_commit_whose_answer_is_lost(calm: tuple[str, Weather], monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has the manifest, the answer does not arrive: the save has gone well, and no other job is blamed."""
    endpoint, _ = calm
    for number, tries in enumerate((1, 3)):
        storage = _storage(endpoint, f"lost/{number}")
        storage._tries = tries
        pipe_file = storage.filesystem.pipe_file
        lost = iter([True])

        def answer_lost(*args: Any, pipe_file: Any = pipe_file, lost: Any = lost, **kwargs: Any) -> Any:
            found = pipe_file(*args, **kwargs)
            if next(lost, False):
                raise botocore_errors.ConnectionClosedError(endpoint_url=endpoint)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(storage.filesystem, "pipe_file", answer_lost)
            save(storage, _state(7.0))
        assert next(lost, False) is False
        assert torch.equal(_state(7.0)["w"], read_state(storage)["w"].read())
