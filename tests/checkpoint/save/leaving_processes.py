"""Processes that exit with a save under way: ``python -m .. FOLDER``, one fork for each case, which ends as scripts do.

What a case wrote to stderr is in FOLDER/<case>.err, exit statuses in FOLDER/codes.json.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint import CheckpointManager, async_save
from vescale_fsdp.checkpoint.storage.base import FileWriter
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError


class _Hanging(LocalStorage):
    def create(self, name: str, num_bytes: int) -> FileWriter:
        threading.Event().wait()
        raise AssertionError("never")


class _Failing(LocalStorage):
    def create(self, name: str, num_bytes: int) -> FileWriter:
        raise OSError("the disk is gone")


def _state() -> dict[str, Any]:
    return {"w": torch.arange(2_000_000.0), "b": torch.ones(3)}


def _alone(folder: Path) -> None:
    async_save(folder, _state())


def _managed(folder: Path) -> None:
    CheckpointManager(folder, asynchronous=True).save(7, _state())


def _two_ranks(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}.store", 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    async_save(folder, _state())
    dist.destroy_process_group()


def _hanging(folder: Path) -> None:
    async_save(_Hanging(folder), _state(), exit_timeout_s=0.1)


def _failing(folder: Path) -> None:
    async_save(_Failing(folder), _state())


def _failing_heard(folder: Path) -> None:
    assert isinstance(async_save(_Failing(folder), _state()).exception(), OSError)


def _in_child(folder: Path) -> None:
    """A child with a save of its parent's under way: it can save, and does not wait for what is not its own."""
    parents = async_save(_Hanging(folder.with_name("parent's")), _state(), exit_timeout_s=0)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert isinstance(parents.exception(), CheckpointError)
    async_save(folder, _state()).wait(30)
    async_save(folder, _state(), overwrite=True)  # and is finished as the child exits


_CASES: dict[str, Callable[[Path], None]] = {
    "alone": _alone,
    "managed": _managed,
    "rank0": lambda folder: _two_ranks(folder.with_name("ranks"), 0),
    "rank1": lambda folder: _two_ranks(folder.with_name("ranks"), 1),
    "hanging": _hanging,
    "failing": _failing,
    "heard": _failing_heard,
    "child": _in_child,
}


def _main(folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child must not use OpenMP threads that its parent had
    gc.freeze()  # or each child, at its end, would collect what all imported
    children = {}
    for name, case in _CASES.items():
        child = os.fork()
        if not child:
            errors = os.open(folder / f"{name}.err", os.O_CREAT | os.O_WRONLY)
            os.dup2(errors, 2)
            atexit.register(lambda name=name: (folder / f"{name}.atexit").touch())
            case(folder / name)
            return  # and exit as any script does
        children[name] = child
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
