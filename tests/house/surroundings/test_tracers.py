"""Under a debugger: a tracer in pure Python stops at every line and reads all variables; results are the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.errors import MisuseError, UnsupportedOpError


@contextmanager
def traced() -> Iterator[None]:
    """This thread, and those that it starts inside."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        for each in (frame, frame.f_back):
            if each is not None:
                dict(each.f_locals)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = models.build(num_blocks=1)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.full_tensor().detach() for param in model.parameters()]  # type: ignore[operator]


def job(folder: Path) -> list[list[torch.Tensor]]:
    """Parameters after a step, and after they were saved and loaded by DCP and in the native format."""
    model, optimizer = sharded()
    models.loss_of(model, models.batch(0, dist.get_rank())).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    after = [values(model)]
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder / "dcp")
    save(folder / "native", state)
    for read in (
        lambda state: dcp.load(state, checkpoint_id=folder / "dcp"),
        lambda state: load(folder / "native", state),
    ):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        read({"model": model.state_dict()})
        after.append(values(model))
    return after


def refusals(folder: Path) -> None:
    """What is refused without a tracer is refused under one."""
    model, _ = sharded()
    two_boxes = distribute_tensor(torch.ones(6, 5), cpu_mesh(), [RaggedShard((0, 1), (7, 23))])
    with pytest.raises(CheckpointException):
        dcp.save(
            {"w": two_boxes}, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True)
        )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = models.build(num_blocks=1).state_dict() if dist.get_rank() == 0 else {}
    with pytest.raises(UnsupportedOpError):
        set_model_state_dict(model, full, options=options)
    with pytest.raises(MisuseError):
        DistributedDataParallel(model)


def under_a_tracer(folder: Path) -> None:
    plain = job(folder / "plain")
    with traced():
        seen = job(folder / "traced")
        refusals(folder / "refused")
    for each in (*seen, *plain[1:]):
        assert all(torch.equal(one, other) for one, other in zip(each, plain[0], strict=True))


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_a_tracer_changes_nothing(tmp_path: Path) -> None:
    """Training, stock DCP and the native format, and what is refused."""
    run_ranks(2, under_a_tracer, tmp_path)
