"""gs:// by gcsfs, against an emulator of the service: saves, restores and retention, and an upload of several parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gcsfs
import pytest
import torch
from gcp_storage_emulator.server import create_server

from vescale_fsdp.checkpoint import CheckpointManager, load, save, verify
from vescale_fsdp.checkpoint.storage.multipart import PART_BYTES
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """What gcsfs needs to know of an emulator that has one bucket."""
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    host, port = server._api._httpd.socket.getsockname()  # port 0: the system has chosen one
    yield {"endpoint_url": f"http://{host}:{port}", "token": "anon", "skip_instance_cache": True}
    server.stop()


def _state(step: int, numel: int = 1000) -> dict[str, Any]:
    return {"w": torch.arange(float(numel)) + step, "step": step}


def test_steps_in_a_bucket(options: dict[str, Any]) -> None:
    """Saved, restored, removed when they are too many; what was uploaded in parts is whole."""
    manager = CheckpointManager(RemoteStorage("gs://bucket/run", **options), keep_last=2)
    for step in (1, 2, 3):
        manager.save(step, _state(step))
    assert manager.steps() == [2, 3] and [one.num_bytes for one in manager.history()] == [4000, 4000]
    state = _state(0)
    restored = manager.restore(state)
    assert restored is not None and restored.step == 3 and torch.equal(state["w"], _state(3)["w"])

    large = PART_BYTES // 2  # twice a part
    one = RemoteStorage("gs://bucket/one", **options)
    save(one, _state(5, large))
    assert verify(one).ok
    state = _state(0, large)
    load(one, state)
    assert state["step"] == 5 and torch.equal(state["w"], _state(5, large)["w"])
    assert isinstance(one.filesystem, gcsfs.GCSFileSystem)
