"""Checkpoints on object stores: a real S3 protocol server on loopback, and memory://."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint_states import assert_equal, erase, mixed_state, plain
from tests.distributed import run_ranks
from vescale_fsdp.checkpoint import CheckpointManager, load, read_state, save, verify
from vescale_fsdp.checkpoint.agreement import SoloCoordinator
from vescale_fsdp.checkpoint.remote import RemoteStorage
from vescale_fsdp.checkpoint.saving import Saver
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError

# botocore still asks for naive UTC times, moto parses with deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Weather:
    """What stands between the client and the server: refusals, slowness, and a count of requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calm_down()

    def calm_down(self) -> None:
        """Fine weather, nothing counted."""
        self.refuse_next = 0
        self.refuse_if: Callable[[str, str], bool] = lambda method, path: False
        self.pause_s = 0.0
        self.requests: list[tuple[str, str, str]] = []

    def wrap(self, application: Application) -> Application:
        """The application, in this weather."""

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            with self._lock:
                self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
                refused = self.refuse_next > 0 or self.refuse_if(method, path)
                self.refuse_next -= refused and self.refuse_next > 0
            time.sleep(self.pause_s)
            if refused:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
            return application(environ, start_response)

        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Weather]]:
    """An S3 server on loopback with a bucket, and its weather."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    weather = Weather()
    application = weather.wrap(DomainDispatcherApplication(create_backend_app))
    running = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{running.server_port}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **_keys("aws_access_key_id"))
    client.create_bucket(Bucket="bucket")
    yield endpoint, weather
    running.shutdown()


def _keys(key_name: str) -> dict[str, str]:
    secret = "aws_secret_access_key" if key_name.startswith("aws") else "secret"
    return {key_name: "any", secret: "any"}


@pytest.fixture
def calm(server: tuple[str, Weather]) -> Iterator[tuple[str, Weather]]:
    """The server in fine weather, before and after."""
    server[1].calm_down()
    yield server
    server[1].calm_down()


def _storage(endpoint: str, name: str, *, patient: bool = True) -> RemoteStorage:
    """A prefix of the server's bucket; without patience, requests are sent once."""
    options: dict[str, Any] = {"client_kwargs": {"region_name": "us-east-1"}, **_keys("key")}
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
        with pytest.raises(OSError, match="gave up after 1 tries"):
            impatient.restore(state)
        assert state["step"] == 0 and not state["w"].any()
    weather.calm_down()
    restored = impatient.restore(state)
    assert restored is not None and restored.step == 2 and torch.equal(_state(2)["w"], state["w"])


def test_a_store_that_removes_nothing(calm: tuple[str, Weather]) -> None:
    """A policy without DeleteObject: saves go on, each with a warning; old steps stay as they are."""
    endpoint, weather = calm
    manager = CheckpointManager(_storage(endpoint, "policy", patient=False), keep_last=1)
    manager.save(1, _state(1))
    weather.refuse_if = lambda method, path: method == "DELETE" or (method == "POST" and path == "/bucket")
    with pytest.warns(
        UserWarning, match="older ones could not be removed from s3://bucket/policy: step-00000001"
    ):
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
    assert report.ok and report.num_files == 2


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
    weather.pause_s = 0.2
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
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        read_state(_storage(endpoint, "failed2"))


def test_a_failed_commit_is_no_checkpoint(calm: tuple[str, Weather]) -> None:
    """If only the manifest cannot be put, the path holds nothing."""
    endpoint, weather = calm
    weather.refuse_if = lambda method, path: method == "PUT" and path.endswith("manifest.json")
    with pytest.raises((OSError, CheckpointError)):
        save(_storage(endpoint, "uncommitted", patient=False), _state(2.0))
    weather.refuse_if = lambda method, path: False

    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        read_state(_storage(endpoint, "uncommitted"))


def test_two_jobs_one_prefix(calm: tuple[str, Weather]) -> None:
    """The second job to commit is refused by the store itself, even if both began on an empty prefix."""
    endpoint, _ = calm
    storage = _storage(endpoint, "two")
    late = _storage(endpoint, "two")
    late.exists = lambda name: False  # type: ignore[method-assign]  # it looked before the other committed
    save(storage, _state(1.0))

    with pytest.raises(CheckpointError, match="Another job has committed"):
        Saver(late, SoloCoordinator()).save(_state(2.0))
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
    with pytest.raises(CorruptCheckpointError, match="not those that were written"):
        load(storage, state)
    assert torch.equal(_state(0.0)["w"], state["w"])
    storage.filesystem.rm(path)
    with pytest.raises(CorruptCheckpointError, match="missing"):
        load(storage, state)


def test_a_manager_on_s3(calm: tuple[str, Weather]) -> None:
    """Steps, retention and fallback work without a file system."""
    endpoint, _ = calm
    manager = CheckpointManager(_storage(endpoint, "run"), keep_last=2, async_=True)
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
    with pytest.raises(CheckpointError, match="already holds"):
        save("memory://here/c", _state(4.0))


@pytest.mark.parametrize("scheme", ["gs", "az", "abfs"])
def test_other_stores_go_the_same_way(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gs:// and az:// URLs find whatever fsspec has for them. (A store in memory stands in: no such server here.)"""

    class Standin(MemoryFileSystem):
        protocol = scheme
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix(f"{scheme}://"))  # type: ignore[no-any-return]

    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, scheme, Standin)
    url = f"{scheme}://bucket/run"
    manager = CheckpointManager(url, keep_last=2)
    for step in (1, 2, 3):
        manager.save(step, _state(step))
    state = _state(0)

    restored = manager.restore(state)

    assert restored is not None and restored.step == 3 and torch.equal(_state(3)["w"], state["w"])
    assert manager.steps() == [2, 3] and verify(f"{url}/step-00000003").ok
    assert sum("manifest.json" in name for name in Standin.store) == 2
    assert all("bucket/run/step-" in name for name in Standin.store)
