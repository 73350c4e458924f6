"""fsspec URLs at both ends: a real S3 protocol server on loopback, and fsspec's memory file system."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from safetensors.torch import load, load_file, save_file

from tests.support.dtype_zoo import make_tensor, same_bytes, zoo
from tests.support.faults.passing_storage import PassingStorage
from tests.support.processes import run_command
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.convert import ConvertOptions, ConvertReport, convert
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, StorageError, option

LIMITS = {"memory_budget_bytes": 8 * 2**20, "threads": 2}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of a bucket on an S3 server that runs for these tests."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    old = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    # moto keeps one set of buckets per process, whatever the server: other tests make one named "bucket".
    fsspec.filesystem("s3").mkdir("conversions")
    yield "s3://conversions"
    server.stop()
    for key, value in old.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A prefix of its own on each kind of remote store."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    found: str = request.getfixturevalue("s3")
    return f"{found}/{tmp_path.name}"


def _state() -> dict[str, torch.Tensor]:
    # A few of each kind: every tensor costs requests, and the server is slow.
    return {
        **{name: t for name, t in zoo().items() if "float" in name and "8" not in name},
        "big": make_tensor((3000, 1500), torch.float32),
    }


def _convert(source: str, target: str, kind: str = "hf", **options: object) -> None:
    convert(open_source(source), target, kind, ConvertOptions(**{**LIMITS, **options}))  # type: ignore[arg-type]


@pytest.mark.part("formats")
def test_both_ends_remote(remote: str, tmp_path: Path) -> None:
    """Local DCP -> remote DCP -> remote Hugging Face -> remote torch file -> local: no bit lost."""
    tensors = _state()
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(str(tmp_path / "dcp"), f"{remote}/dcp", "dcp")
    assert verify(open_source(f"{remote}/dcp")).problems == ()
    _convert(f"{remote}/dcp", f"{remote}/hf", max_shard_bytes=4_000_000)
    _convert(f"{remote}/hf", f"{remote}/a.pt", "torch")
    _convert(f"{remote}/a.pt", f"{remote}/zarr", "zarr")
    _convert(f"{remote}/zarr", str(tmp_path / "out"))
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(loaded) == sorted(tensors)
    assert all(same_bytes(loaded[name], value) for name, value in tensors.items())
    names = open_store(f"{remote}/hf").list_files()
    assert "model.safetensors.index.json" in names and not any("vescale" in name for name in names)


def test_a_failed_upload_leaves_no_object(remote: str, tmp_path: Path) -> None:
    """Damage in the source found in the middle: no object of the result exists afterwards."""
    state = {f"w{i}": torch.full((300_000,), float(i)) for i in range(6)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    data = tmp_path / "dcp" / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    at = raw.rfind(b"FloatStorage")
    raw[at : at + 12] = b"HalfStorage\n"
    data.write_bytes(raw)
    with pytest.raises((CorruptCheckpointError, ConversionError)):
        _convert(str(tmp_path / "dcp"), f"{remote}/out", max_shard_bytes=1_500_000)
    assert open_store(f"{remote}/out").list_files() == []


def test_remote_targets_are_refused_like_local_ones(remote: str, tmp_path: Path) -> None:
    """Not empty, over the source, inside it; and --overwrite removes stale weights."""
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(str(tmp_path / "dcp"), f"{remote}/dcp", "dcp")
    with pytest.raises(ConversionError, check=lambda error: option("overwrite", True) in error.todo):
        _convert(str(tmp_path / "dcp"), f"{remote}/dcp")
    other_name = f"{remote}/dcp".replace("s3://", "s3a://").replace("memory://", "memory:///")
    for place in (f"{remote}/dcp", f"{remote}/dcp/inside", remote, other_name):
        with pytest.raises(ConversionError, check=lambda error: error.where == place):  # noqa: B023
            _convert(f"{remote}/dcp", place, overwrite=True)
    store = open_store(f"{remote}/out")
    store.commit("pytorch_model.bin", b"old", replace=True)
    store.commit("notes.txt", b"mine", replace=True)
    _convert(f"{remote}/dcp", f"{remote}/out", overwrite=True)
    assert open_store(f"{remote}/out").list_files() == ["model.safetensors", "notes.txt"]
    weights = load(open_store(f"{remote}/out").read("model.safetensors"))
    assert torch.equal(weights["w"], torch.ones(3))


def test_an_upload_over_an_old_result_removes_its_index_first(remote: str, tmp_path: Path) -> None:
    """The same file names, other weights: a run that fails midway leaves no index over a mixture of both."""
    for number in range(2):
        state = {f"w{i}": torch.full((100_000,), float(i + 10 * number)) for i in range(3)}
        dcp.save({"model": state}, checkpoint_id=tmp_path / str(number), no_dist=True)
    target = f"{remote}/out"
    upload(str(tmp_path / "0"), target)
    assert len(open_store(target).list_files()) == 4
    calls: list[int] = []

    def fail(nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 3:
            raise ConversionError("planted")

    options = ConvertOptions(
        max_shard_bytes=450_000, overwrite=True, memory_budget_bytes=4 * 2**20, threads=1
    )
    with pytest.raises(ConversionError, match="planted"):
        convert(open_source(str(tmp_path / "1")), target, "hf", options, progress=fail)
    left = open_store(target)
    values = {load(left.read(name)).popitem()[1][0].item() for name in left.list_files()}
    assert values < {0.0, 1.0, 2.0} and len(values) > 0  # of the new ones nothing


# Uploads, and kills itself in the middle of the segment of that number.
KILLED = """
import itertools, os, signal, sys
from tests.conversion.test_urls import upload
count = itertools.count()
def progress(nbytes):
    if next(count) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
upload(sys.argv[1], sys.argv[2], progress=progress)
"""


def upload(source: str, target: str, *, progress: Callable[[int], None] = lambda _: None) -> ConvertReport:
    """Convert to several small files, going on with what is there."""
    options = ConvertOptions(max_shard_bytes=450_000, resume=True, memory_budget_bytes=4 * 2**20, threads=1)
    return convert(open_source(source), target, "hf", options, progress=progress)


@pytest.mark.part("formats")
def test_a_killed_upload_goes_on(s3: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of an upload: no index is there, finished objects are kept by --resume, and the result
    is that of an undisturbed run."""
    state = {f"w{i}": torch.full((100_000,), float(i)) for i in range(4)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source, target = str(tmp_path / "dcp"), f"{s3}/{tmp_path.name}/hf"
    command = [sys.executable, "-c", KILLED, source, target]
    dead = run_command(command, cwd=Path(__file__).parents[2])
    assert dead.returncode == -signal.SIGKILL
    left = open_store(target).list_files()
    assert "model.safetensors.index.json" not in left and any(name.endswith(".safetensors") for name in left)
    report = upload(source, target)
    assert report.outcome.kept and report.outcome.written and report.outcome.published
    upload(source, str(tmp_path / "expected"))
    names = sorted(os.listdir(tmp_path / "expected"))
    assert open_store(target).list_files() == names and len(names) == 5
    for name in names:
        assert open_store(target).read(name) == (tmp_path / "expected" / name).read_bytes()


@pytest.mark.part("faults")
def test_parts_between_urls_killed_and_resumed(s3: str, tmp_path: Path) -> None:
    """Two parts read from S3 and write to S3; one is killed in the middle, the other when all was done."""
    tensors = {f"w{i}": torch.full((300, 500), float(i)) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    source, target = f"{s3}/{tmp_path.name}/source", f"{s3}/{tmp_path.name}/target"
    fsspec.filesystem("s3").put(str(tmp_path / "model.safetensors"), f"{source}/model.safetensors")
    script = """
import itertools, os, signal, sys
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
source, out, index, moment = sys.argv[1:]
count = itertools.count(1)
def progress(nbytes):
    if next(count) == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
options = ConvertOptions(
    max_shard_bytes=700_000, resume=True, part=(int(index), 2), memory_budget_bytes=8 * 2**20, threads=1
)
convert(open_source(source), out, "hf", options, progress=progress)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ends = []
    for index, moment in (("0", "4"), ("1", "1000"), ("0", "1000"), ("1", "1000")):
        command = [sys.executable, "-c", script, source, target, index, moment]
        ends.append(run_command(command))
    assert all(end.returncode == -signal.SIGKILL for end in ends), [end.stderr for end in ends]
    files = [
        file for file in fsspec.filesystem("s3").ls(target, detail=False) if file.endswith(".safetensors")
    ]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load(fsspec.filesystem("s3").cat(file))
    assert len(files) == 8 and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert not any("vescale-convert" in file for file in fsspec.filesystem("s3").find(target))


@pytest.mark.part("faults")
def test_a_server_that_does_not_answer_is_one_message(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an OSError, which keeps finished files: the client's own error, or the check of the address if it is first."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(ConnectionError, match=r"\b(EndpointConnectionError|NoAnswer)\b"):
        open_source("s3://nowhere/x")
    fsspec.filesystem("s3").clear_instance_cache()


class _ClientError(Exception):
    """What a client library might raise: no OSError, and nothing that may pass."""


def _failing(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, times: int) -> list[str]:
    """Make a method of the memory file system, or of its files, fail so often before it works; lists the failures."""
    kind = MemoryFile if method == "write" else MemoryFileSystem
    works, failures = getattr(kind, method), list[str]()

    def fails(self: object, *arguments: Any, **options: Any) -> Any:
        if len(failures) < times:
            failures.append(method)
            raise error
        return works(self, *arguments, **options)

    monkeypatch.setattr(kind, method, fails)
    return failures


@pytest.mark.parametrize("method", ["find", "info", "cat_file", "_open", "write", "pipe_file", "rm"])
def test_lost_connections_are_made_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists, reads, uploads from their first byte, deletes: each fails a few times, and the result is the same."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    state = {f"w{i}": torch.full((300_000,), float(i)) for i in range(4)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    there = f"memory://lost-{tmp_path.name}"
    progress: list[int] = []
    with monkeypatch.context() as patch:
        failures = _failing(patch, method, ConnectionResetError("reset by peer"), 3)
        upload(str(tmp_path / "dcp"), f"{there}/hf", progress=progress.append)
        upload(f"{there}/hf", str(tmp_path / "back"))
    assert len(failures) == 3 and sum(progress) == 4 * 1_200_000
    upload(str(tmp_path / "dcp"), str(tmp_path / "expected"))
    names = sorted(os.listdir(tmp_path / "expected"))
    assert open_store(f"{there}/hf").list_files() == names == sorted(os.listdir(tmp_path / "back"))
    for name in names:
        expected = (tmp_path / "expected" / name).read_bytes()
        assert open_store(f"{there}/hf").read(name) == expected == (tmp_path / "back" / name).read_bytes()


@pytest.mark.parametrize("method", ["find", "_open", "write"])
@pytest.mark.parametrize("error", [_ClientError("who are you?"), ConnectionResetError("reset by peer")])
def test_what_cannot_be_reached_is_one_message(
    error: Exception, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a client library raises, at once or in the end."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(str(tmp_path / "dcp"))
    failures = _failing(monkeypatch, method, error, 99)
    with pytest.raises(ConnectionError, match=rf"{error}(.|\n)*memory://never"):
        convert(source, f"memory://never-{tmp_path.name}", "hf")
    assert len(failures) == (1 if isinstance(error, _ClientError) else 5)


class _Unreadable(PassingStorage):
    """A disk whose files can be opened, and not read; lists the attempts."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.attempts: list[str] = []

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.attempts.append(name)
        raise OSError(errno.EIO, "Input/output error", name)


def test_a_source_that_fails_is_not_taken_for_the_target(remote: str, tmp_path: Path) -> None:
    """A disk that fails while its file is uploaded: its own error, at once, however often uploads are tried."""
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(str(tmp_path / "dcp"))
    storage = _Unreadable(source.store)
    with pytest.raises(OSError, match=r"\bdistcp\b", check=lambda error: error.errno == errno.EIO) as caught:
        convert(replace(source, store=storage), f"{remote}/out", "hf")
    assert len(storage.attempts) == 1 and caught.value.errno == errno.EIO


def test_other_names_of_the_disk(tmp_path: Path) -> None:
    """file:// and local:// are the disk: folders are made, and the source is known again under any name."""
    (tmp_path / "a").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "a" / "model.safetensors")
    for number, protocol in enumerate(("file", "local")):
        _convert(f"{protocol}://{tmp_path}/a", f"{protocol}://{tmp_path}/deep/{number}")
        assert os.listdir(tmp_path / "deep" / str(number)) == ["model.safetensors"]
        target = f"{protocol}://{tmp_path}/a/b"
        with pytest.raises(ConversionError, check=lambda error: error.where == target):  # noqa: B023
            _convert(str(tmp_path / "a"), target)


def test_a_web_server_without_ranges_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own sends whole files whatever is asked for: not to be taken for a damaged file."""
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(3)}, "model.safetensors")
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(ConversionError, check=lambda error: "http" in error.where):
                open_source(f"http://127.0.0.1:{server.server_port}/model.safetensors")
        finally:
            server.shutdown()


def test_unknown_protocols_say_so() -> None:
    """A URL of a protocol that fsspec does not know is a StorageError that names the URL."""
    with pytest.raises(StorageError) as failure:
        open_source("nonsense://x/y")
    assert failure.value.where == "nonsense://x/y"
