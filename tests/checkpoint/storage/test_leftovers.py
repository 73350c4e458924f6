"""What killed jobs leave is removed by `clean`, and by the first save of the next job; what is in use is not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.s3_server import Weather, bucket_client, s3_server
from vescale_fsdp.checkpoint import CheckpointManager, RamTier
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage

LEFT = (
    "step-00000002/data-0123456789abcdef/00000-of-00001.safetensors",
    "step-00000001/.manifest.json.0123456789abcdef.tmp",
    "step-00000001/.lock-owner.0123456789abcdef",
    ".probe-0123456789abcdef.link",
    "exports/.step-00000001.saving/model.safetensors",
    "exports/.step-00000004.before/model.safetensors",
)
KEPT = (
    "exports/.step-00000003.before/model.safetensors",  # no other copy of this export
    "exports/step-00000004/model.safetensors",
    "notes.tmp",
    ".hidden",
    "step-2/file",
)


def _state() -> dict[str, Any]:
    return {"w": torch.arange(8.0)}


def _make(root: Path, names: tuple[str, ...], age_s: float) -> None:
    then_s = time.time() - age_s
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    for name in names:
        for path in (root / name, *(root / name).parents):
            if path.is_relative_to(root) and path != root:
                os.utime(path, (then_s, then_s))


def _there(root: Path, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if (root / name).exists()]


def test_clean_removes_what_killed_jobs_left(tmp_path: Path) -> None:
    """All of it, even though every step is to be kept, and nothing else; the names are returned."""
    CheckpointManager(tmp_path).save(1, _state())
    _make(tmp_path, LEFT + KEPT, age_s=0)
    manager = CheckpointManager(tmp_path)
    assert manager.clean() == [] and _there(tmp_path, LEFT) == list(LEFT), "what is young may be in use"
    removed = manager.clean(older_than_s=0)
    assert _there(tmp_path, LEFT) == [] and _there(tmp_path, KEPT) == list(KEPT)
    assert removed == sorted(
        [
            LEFT[1],
            LEFT[2],
            LEFT[3],
            *("/".join(LEFT[place].split("/")[:count]) for place, count in ((0, 1), (4, 2), (5, 2))),
        ]
    )
    assert manager.steps() == [1] and manager.restore(_state()) is not None


def test_memory_and_killed_overwrites_are_swept(tmp_path: Path) -> None:
    """In memory as on disk: data that no manifest names and unfinished copies, unless a live job holds the step."""
    folder = tmp_path / "shm"

    def manager() -> CheckpointManager:
        return CheckpointManager(tmp_path / "root", ram=RamTier("run", folder=folder))

    with manager() as first:
        first.save(1, _state())
    roots = (tmp_path / "root", folder / "vescale-run")
    names = []
    for root in roots:
        (data,) = root.glob("step-00000001/data-*")
        names.append(f"step-00000001/{data.name}/.00001-of-00002.safetensors.from1.partial")
        _make(root, (names[-1], *LEFT[:2], "step-00000001/data-0123456789abcdef/00000"), age_s=3600)
    removed = ("step-00000001/.manifest.json.0123456789abcdef.tmp", "step-00000001/data-0123456789abcdef")
    with LocalStorage(roots[1] / "step-00000001").lock(), manager() as second:
        second.clean()
        assert not _there(roots[0], (*removed, names[0], LEFT[0]))
        assert _there(roots[1], removed[1:]) == [removed[1]], "it is held"
    with manager() as third:
        third.save(2, _state())  # sweeps
        assert third.steps() == [1, 2] and not _there(roots[1], (*removed, LEFT[0]))


def test_the_first_save_sweeps(tmp_path: Path) -> None:
    """A new manager removes what is old when it saves for the first time; restoring removes nothing."""
    CheckpointManager(tmp_path).save(1, _state())
    _make(tmp_path, LEFT + KEPT, age_s=3600)
    manager = CheckpointManager(tmp_path)
    manager.restore(_state())
    assert _there(tmp_path, LEFT) == list(LEFT)
    manager.save(5, _state())
    assert _there(tmp_path, LEFT) == [] and _there(tmp_path, KEPT) == list(KEPT)
    assert manager.steps() == [1, 5]


def test_an_export_in_progress_stays(tmp_path: Path) -> None:
    """The working folder of an export is locked by the job that writes it."""
    folder = tmp_path / "exports" / ".step-00000001.saving"
    with LocalStorage(folder).lock():
        (folder / "model.safetensors").write_text("x")
        assert CheckpointManager(tmp_path).clean(older_than_s=0) == []
        assert (folder / "model.safetensors").exists()
    assert CheckpointManager(tmp_path).clean(older_than_s=0) == ["exports/.step-00000001.saving"]


def test_open_uploads_are_dropped() -> None:
    """Parts that a killed job has sent to S3 and never completed; those of other prefixes stay."""
    with s3_server(Weather()) as endpoint:
        client = bucket_client(endpoint)
        for key in ("run/step-00000002/data-a/file", "run/step-00000003/data-b/file", "run-2/file"):
            client.create_multipart_upload(Bucket="bucket", Key=key)
        options: dict[str, Any] = {
            "client_kwargs": {"region_name": "us-east-1"},
            "key": "any",
            "secret": "any",
        }
        root = RemoteStorage("s3://bucket/run", endpoint_url=endpoint, **options)
        manager = CheckpointManager(root)
        if_recent = client.list_multipart_uploads(Bucket="bucket")["Uploads"][0]["Initiated"]
        assert if_recent is not None
        removed = manager.clean(older_than_s=0)
        left = [one["Key"] for one in client.list_multipart_uploads(Bucket="bucket")["Uploads"]]
        assert removed == ["step-00000002/data-a/file", "step-00000003/data-b/file"] and left == [
            "run-2/file"
        ]
        manager.save(1, _state())
        assert manager.steps() == [1]
