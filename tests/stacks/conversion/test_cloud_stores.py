"""gs:// and az:// by the packages that people use for them, against their emulators on loopback.

gcsfs talks to gcp-storage-emulator, adlfs to Azurite (a package of npm, which `make test-stacks` puts beside the
environment's Python).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.processes import wait_until
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, async_save, latest, load, save, verify
from vescale_fsdp.checkpoint.storage.remote import PART_BYTES, RemoteStorage
from vescale_fsdp.conversion import HuggingFace, convert, open_source
from vescale_fsdp.errors import CorruptCheckpointError, NoCheckpointError

# The emulators' own account, which every copy of Azurite has.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_AZURITE = Path(sys.prefix) / "node" / "node_modules" / ".bin" / "azurite-blob"
_EMULATOR = Path(sys.executable).with_name("gcp-storage-emulator")

# gcsfs asks for credentials that an emulator does without, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _gs(port: int) -> tuple[list[str], dict[str, str]]:
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [str(_EMULATOR), "start", *address, "--in-memory", "--default-bucket", "bucket"]
    return command, {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}


def _az(port: int) -> tuple[list[str], dict[str, str]]:
    address = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command = [str(_AZURITE), *address, "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    where = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1"
    account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={_KEY};{where};"
    return command, {"AZURE_STORAGE_CONNECTION_STRING": account}


@pytest.fixture(scope="module", params=["gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket's URL; its emulator runs as long as the tests do."""
    port = _free_port()
    command, settings = (_gs if request.param == "gs" else _az)(port)
    if not Path(command[0]).exists():
        pytest.skip(
            f"{Path(command[0]).name} is not installed; make test-stacks brings it where there is npm"
        )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        folder = tmp_path_factory.mktemp(request.param)
        with open(folder / "log", "w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            wait_until(
                lambda: _answers(port) or server.poll() is not None,
                command[0],
                state=lambda: (folder / "log").read_text(),
            )
            files = fsspec.filesystem(request.param)
            if not files.exists("bucket"):
                files.mkdir("bucket")
            yield f"{request.param}://bucket"
        finally:
            server.kill()  # asked to end, Azurite waits for every open connection
            server.wait(30)


def _state(step: int) -> dict[str, Any]:
    """More than a part of an upload, and some of other kinds."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model": {"w": torch.arange(PART_BYTES // 4 + 12345.0) + step, "b": torch.ones(7).bfloat16() * step},
        "step": step,
        "seen": PerRank(100 * rank + step),
    }


def _save_and_load(url: str, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    state = _state(0)
    save(f"{url}/one", _state(3))
    load(f"{url}/one", state)
    assert torch.equal(state["model"]["w"], _state(3)["model"]["w"]) and state["step"] == 3
    assert state["seen"].value == 100 * dist.get_rank() + 3
    async_save(f"{url}/later", _state(4)).wait()
    load(f"{url}/later", state, read="once")
    assert torch.equal(state["model"]["b"], _state(4)["model"]["b"])

    manager = CheckpointManager(f"{url}/steps", retention=2)
    for step in range(1, 5):
        manager.save(step, _state(step))
    restored = manager.restore(state)
    assert restored is not None and restored.step == 4 and state["step"] == 4
    assert manager.steps() == [3, 4]
    manager.close()


def test_ranks_save_load_and_keep_steps(store: str) -> None:
    """Files of several parts, read once for both ranks, old steps removed."""
    run_ranks(2, _save_and_load, f"{store}/ranks", _settings())
    assert verify(f"{store}/ranks/one").ok and latest(f"{store}/ranks/steps") is not None


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ if name.startswith(("STORAGE_", "AZURE_"))}


def test_damage_is_seen(store: str) -> None:
    """One changed byte, a file cut short, a file that is gone."""
    save(f"{store}/damage", {"w": torch.arange(50_000.0)})
    storage = RemoteStorage(f"{store}/damage")
    (name,) = [name for name in storage.list_files() if name.startswith("data-")]
    good = storage.read(name)
    state = {"w": torch.zeros(50_000)}
    for bad in (good[:100_000] + bytes([good[100_000] ^ 1]) + good[100_001:], good[:-1], None):
        if bad is None:
            storage.remove(name)
        else:
            storage.commit(name, bad, replace=True)
        with pytest.raises(CorruptCheckpointError):
            load(f"{store}/damage", state)
    storage.commit(name, good, replace=True)
    load(f"{store}/damage", state)
    assert torch.equal(state["w"], torch.arange(50_000.0))


_DIES = """
import os, sys, torch
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage

manager = CheckpointManager(sys.argv[1])
manager.save(1, {"w": torch.ones(1000)})
commit = RemoteStorage.commit
RemoteStorage.commit = lambda self, name, data, **how: (
    os._exit(9) if "manifest" in name else commit(self, name, data, **how)
)
manager.save(2, {"w": torch.ones(1000) * 2})
"""


def test_a_job_that_dies_before_it_commits(store: str) -> None:
    """What it had written is no step; the next job goes on from the one before, and saves the same step again."""
    command = [sys.executable, "-c", _DIES, f"{store}/dies"]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    state = {"w": torch.zeros(1000)}
    assert [name for name in RemoteStorage(f"{store}/dies").list_files() if "step-00000002" in name]

    manager = CheckpointManager(f"{store}/dies")
    restored = manager.restore(state)
    assert restored is not None and restored.step == 1 and state["w"].eq(1).all()
    manager.save(2, {"w": torch.ones(1000) * 3})
    restored = manager.restore(state)
    assert restored is not None and restored.step == 2 and state["w"].eq(3).all()


def test_other_forms_and_the_converter(store: str, tmp_path: Path) -> None:
    """A repository and a DCP folder written from live tensors, one replaced, and conversions there and back."""
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text('{"architectures": ["Any"]}')
    first, second = {"model": {"w": torch.arange(6.0)}}, {"model": {"v": torch.arange(8.0)}}
    save(f"{store}/hf", first, format=HuggingFace(assets=assets))
    save(f"{store}/hf", second, format=HuggingFace(assets=assets), overwrite=True)
    assert set(open_source(f"{store}/hf").tensors) == {"v"}
    save(f"{store}/dcp", first, format="dcp")
    for source, target, kind in [
        (f"{store}/dcp", f"{store}/native", "native"),
        (f"{store}/native", f"{store}/zarr", "zarr"),
        (f"{store}/zarr", str(tmp_path / "back"), "native"),
    ]:
        convert(open_source(source), target, kind)
    state = {"model": {"w": torch.zeros(6)}}
    load(tmp_path / "back", state)
    assert torch.equal(state["model"]["w"], torch.arange(6.0))


def test_a_bucket_that_is_not_there(store: str) -> None:
    """Nothing to load is said as ever, and a save's error carries what the store said."""
    nowhere = store.replace("bucket", "nobucket")
    with pytest.raises(NoCheckpointError):
        load(nowhere, {"w": torch.ones(3)})
    with pytest.raises(Exception, match=r"nobucket|container\b"):
        save(nowhere, {"w": torch.ones(3)})
