"""What object stores have of their own: parts on their way at once, listings that come late, other protocols."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations

from tests.support.s3_server import Weather, s3_server
from vescale_fsdp import conversion
from vescale_fsdp.checkpoint import CheckpointManager, load, save, verify
from vescale_fsdp.checkpoint.storage.remote import PART_BYTES, MultipartWriter, RemoteStorage
from vescale_fsdp.errors import StorageError

# botocore still asks for naive UTC times, moto parses with deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(20_000.0) + step, "step": step}


@pytest.fixture
def s3() -> Iterator[tuple[RemoteStorage, Weather]]:
    """A prefix of an S3 server's bucket, and its weather."""
    weather = Weather()
    options = {"client_kwargs": {"region_name": "us-east-1"}, "key": "any", "secret": "any"}
    with s3_server(weather) as endpoint:
        yield RemoteStorage("s3://bucket/parts", endpoint_url=endpoint, **options), weather


@pytest.mark.part("formats")
def test_several_parts_are_on_their_way_at_once(s3: tuple[RemoteStorage, Weather]) -> None:
    """Of one file, a bounded number; a part that is refused is sent again alone; an upload given up leaves nothing."""
    storage, weather = s3
    size = 4 * PART_BYTES + 12345
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy()
    cuts = [0, 7, PART_BYTES - 1, 2 * PART_BYTES, 3 * PART_BYTES + 5, size]
    weather.pause_s = 0.2
    with storage.create("a/file", size) as writer:
        assert isinstance(writer, MultipartWriter)
        for start, stop in itertools.pairwise(cuts):
            weather.refuse_next = int(start == 2 * PART_BYTES)
            writer.write_at(start, [data[start : start + 3], data[start + 3 : stop]])
        assert not storage.exists("a/file")
    weather.pause_s = 0
    assert 2 <= weather.most_uploading <= 4
    assert storage.size("a/file") == size and storage.read("a/file") == data.tobytes()

    dropped = storage.create("a/dropped", size)
    dropped.write_at(0, [data[: 2 * PART_BYTES]])
    dropped.abort()
    bucket = storage.filesystem.call_s3("list_multipart_uploads", Bucket="bucket")
    assert not bucket.get("Uploads") and storage.list_folder("a") == ["file"]
    assert not isinstance(storage.create("a/small", PART_BYTES), MultipartWriter)


class _Late(MemoryFileSystem):
    """A store that gives at once what is asked for by name, and lists it only when it has been asked a few times."""

    protocol = ("az", "gs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    listed: ClassVar[dict[str, int]] = {}
    lag = 3

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = path.partition("://")[2] if "://" in path else path
        return "/" + path.strip("/") if path.strip("/") else ""

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        found = [entry for entry in super().ls(path, detail=True, **kwargs) if self._shows(entry)]
        return found if detail else sorted(entry["name"] for entry in found)

    def _shows(self, entry: dict[str, Any]) -> bool:
        names = [name for name in self.store if name == entry["name"] or name.startswith(entry["name"] + "/")]
        for name in names:
            self.listed[name] = self.listed.get(name, 0) + 1
        return any(self.listed[name] > self.lag for name in names)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.store:
            return {"name": path, "size": self.store[path].size, "type": "file"}
        if any(name.startswith(path + "/") for name in self.store):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def exists(self, path: str, **kwargs: Any) -> bool:
        path = self._strip_protocol(path)
        return any(name == path or name.startswith(path + "/") for name in self.store)


@pytest.fixture(params=["gs", "az"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of the protocol, served by the double."""
    for kept in (_Late.store, _Late.listed):
        kept.clear()
    monkeypatch.setitem(_registry, request.param, _Late)  # undone behind the test, unlike a registration
    _Late.clear_instance_cache()
    return f"{request.param}://bucket/run"


def test_listings_that_come_late(late: str) -> None:
    """A save commits all the same: files are asked for by name, and nobody is warned of what is listed too late."""
    save(f"{late}/one", _state(7))
    loaded = _state(0)
    load(f"{late}/one", loaded)
    assert loaded["step"] == 7 and torch.equal(loaded["w"], _state(7)["w"])
    assert fsspec.filesystem(late[:2]).ls(f"{late}/one") == []  # the negative control

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = CheckpointManager(f"{late}/steps", retention=2)
        for step in range(1, 9):
            manager.save(step, _state(step))
    restored = [CheckpointManager(f"{late}/steps").restore(loaded) for _ in range(_Late.lag + 2)][-1]
    assert restored is not None and restored.step == 8 and torch.equal(loaded["w"], _state(8)["w"])
    assert verify(f"{late}/steps/step-00000008").ok


def test_gs_and_az_are_written_read_and_converted(late: str) -> None:
    """gs:// and az:// through and through: checkpoints, and the converter there and back."""
    save(f"{late}/native", {"model": {"w": torch.arange(10.0)}})
    _Late.listed.update(dict.fromkeys(_Late.store, _Late.lag))
    conversion.convert(conversion.open_source(f"{late}/native"), f"{late}/hf", "hf")
    _Late.listed.update(dict.fromkeys(_Late.store, _Late.lag))
    source = conversion.open_source(f"{late}/hf")
    assert list(source.tensors) == ["w"]
    assert {name.rpartition("/")[2] for name in _Late.store if "/hf/" in name} >= {"model.safetensors"}


@pytest.mark.parametrize(("protocol", "reason"), [("nope", "not known"), ("missing", "no_such_package")])
def test_protocols_that_cannot_be_opened(protocol: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown protocol, and one whose package is not installed: an error of this library, which names both."""
    known = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to access it"}
    monkeypatch.setitem(known_implementations, "missing", known)
    for call in (save, load):
        with pytest.raises(StorageError) as raised:
            call(f"{protocol}://bucket/step", _state(0))
        assert raised.value.where == f"{protocol}://bucket/step"
        assert protocol in raised.value.problem and reason in str(raised.value.got)
    with pytest.raises(StorageError, check=lambda error: error.where == f"{protocol}://bucket/step"):
        conversion.open_source(f"{protocol}://bucket/step")
