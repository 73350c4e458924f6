"""A save killed before every call that changes the file system: what it leaves is swept, and no step is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp.checkpoint import CheckpointManager, RamTier

CALLS = ("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "ftruncate", "pwritev")
OPEN = os.open


def _manager(folder: Path) -> CheckpointManager:
    ram = RamTier("run", folder=folder / "shm", keep_last=9)
    return CheckpointManager(folder / "root", ram=ram, export="dcp", export_every=2, retention=9)


def _save(folder: Path) -> None:
    """Overwrite a step and save a new one: in memory, on disk, and as an export that is there already."""
    with _manager(folder) as manager:
        manager.save(1, {"w": torch.ones(4)})
        manager.save(2, {"w": torch.ones(4)})


def _die_at(index: int, folder: Path) -> None:
    """In a forked child: save, and be killed before the index-th call that changes the file system."""
    lock, count = threading.Lock(), [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            with lock:
                count[0] += call is not OPEN or bool(args[1] & os.O_CREAT)
                if count[0] == index:
                    os._exit(9)
            return call(*args, **options)

        return wrapped

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    _save(folder)
    os._exit(0)


def _not_of_steps(root: Path, exports: bool) -> list[str]:
    """Files and folders under a root that are no part of a committed step."""
    strange = []
    for path in sorted(root.iterdir()):
        if path.name in ("run.json", ".lock") or (exports and path.name == "exports"):
            continue
        if not re.fullmatch(r"step-\d{8}", path.name):
            strange.append(path.name)
            continue
        known = {
            "manifest.json",
            ".lock",
            f"data-{json.loads((path / 'manifest.json').read_text())['save_id']}",
        }
        strange += [f"{path.name}/{found.name}" for found in path.iterdir() if found.name not in known]
        strange += [str(found.relative_to(root)) for found in path.glob("data-*/.*")]
    return strange


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.part("faults"))])
def test_a_save_killed_anywhere_leaves_only_steps(stride: int, tmp_path: Path) -> None:
    """`clean` removes all the rest, on disk and in memory, and the step that was overwritten is there.

    It is killed before every call, or before every eighth.
    """
    template, at = tmp_path / "template", tmp_path / "at"
    with _manager(template) as manager:
        manager.save(1, {"w": torch.zeros(4)})
        manager.save(2, {"w": torch.zeros(4)})
        manager.remove(2)
    index, status, num_killed = 1 - stride, 9, 0
    while status == 9:
        index += stride
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(template, at)
        child = os.fork()
        if not child:
            try:
                _die_at(index, at)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        num_killed += status == 9
        with _manager(at) as manager:
            manager.clean(older_than_s=0)
            for root in (at / "root", at / "shm" / "vescale-run"):
                assert _not_of_steps(root, exports=root.name == "root") == [], (index, root)
            left = {path.name for path in (at / "root" / "exports").iterdir()}
            assert left <= {"step-00000002", ".step-00000002.before"}, (index, left)
            assert 1 in manager.steps()
            state = {"w": torch.full((4,), 2.0)}
            assert manager.restore(state) is not None
            assert state["w"].eq(state["w"][0]).all() and state["w"][0] in (0.0, 1.0)
    assert status == 0 and num_killed * stride > 50
